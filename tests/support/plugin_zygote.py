"""``python -P FILE SOCKET``: a process with the node plugin loaded that forks a real one for each request.

A start costs what the plugin itself needs, without Python's second of imports. A request is one line of JSON on a
connection: ``{"folder": ..., "settings": {flag: value}}``; the answer is the plugin's process id, with a pidfd of it.

``log``    in the folder: what the plugin logs
``seen``   gets a line "STEP MOMENT" for every moment of every step
``order``  "NUMBER STEP MOMENT": the plugin kills itself when it comes there for the NUMBERth time since the order was
           given; the file goes just before
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import grpc._server  # noqa: F401 - the plugin loads this and the simulator when it needs them: here before the fork

import driver.simulator.node  # noqa: F401
from driver.logs import configure_logs
from driver.slices import publisher
from driver.step_observer import Moment
from kubelet_plugin import awaited_hardware
from kubelet_plugin.app import NodePlugin, discovered_plugin
from kubelet_plugin.settings import NodeSettings, node_settings
from kubelet_plugin.status import claim_status as status_writer
from kubelet_plugin.upgrade.rolling_update import RollingInstance


class Orders:
    """The observer. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._order = folder / "order"
        self._seen = os.open(folder / "seen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._lock = threading.Lock()
        self._obeyed, self._reached = "", 0

    def __call__(self, step: StrEnum, moment: Moment) -> None:
        with self._lock:
            os.write(self._seen, f"{step.value} {moment}\n".encode())
            try:
                order = self._order.read_text()
            except FileNotFoundError:
                return
            if order != self._obeyed:
                self._obeyed, self._reached = order, 0
            number, *point = order.split()
            self._reached += point == [step.value, moment]
            if self._reached == int(number):
                self._order.unlink()
                os.kill(os.getpid(), signal.SIGKILL)


def warm(settings: dict[str, Any]) -> None:
    """Make a plugin that never runs, so that what Python does only once is done before the forks."""
    with tempfile.TemporaryDirectory(prefix="tz-") as elsewhere:
        folders = {name: f"{elsewhere}/{name}" for name in ("kubelet_dir", "cdi_dir", "host_root")}
        NodePlugin(node_settings(**{**settings, **folders}))
    gc.freeze()


def become_plugin(folder: Path, settings: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        configure_logs("text", "info")
        run_plugin(node_settings(**settings), Orders(folder))
        status = 0
    except Exception as error:
        print(f"ended by {type(error).__name__}: {error}", flush=True)
        raise
    finally:
        os._exit(status)


def run_plugin(settings: NodeSettings, orders: Orders) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    plugin = RollingInstance(settings, stop, orders) if settings.pod_uid else discovered_plugin(settings, stop, orders)
    if plugin is not None:
        plugin.run()


def main(address: str) -> None:
    # Hundreds of plugins wait for these in turn; but not the reconciler: it must find nothing to repair after a kill.
    publisher.COALESCE_INTERVAL_SECONDS = status_writer.CLAIM_STATUS_COALESCE_SECONDS = 0.005
    awaited_hardware.HARDWARE_CHECK_INTERVAL_SECONDS = 0.1
    with socket.socket(socket.AF_UNIX) as listener:
        # Whoever sees the address may connect: it gets its name when somebody listens.
        unnamed = Path(address).with_name("z")
        listener.bind(str(unnamed))
        listener.listen()
        unnamed.rename(address)
        children: list[int] = []
        warmed = False
        while True:
            connection, _ = listener.accept()
            with connection:
                request = json.loads(connection.makefile().readline())
                if not warmed:
                    warm(request["settings"])
                    warmed = True
                child = os.fork()
                if not child:
                    listener.close()
                    connection.close()
                    become_plugin(Path(request["folder"]), request["settings"])
                handle = os.pidfd_open(child)
                socket.send_fds(connection, [str(child).encode()], [handle])
                os.close(handle)
            # Not before: until then a process id means the process that it was given to.
            children = [pid for pid in (*children, child) if os.waitpid(pid, os.WNOHANG) == (0, 0)]


if __name__ == "__main__":
    main(sys.argv[1])
