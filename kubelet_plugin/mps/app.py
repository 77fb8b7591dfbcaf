"""The process of the MPS daemons: serves the node plugin's requests on a socket that only root may use.

Without click, for its memory: ``python -m kubelet_plugin.mps [DIRECTORY [json|text]]``.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from driver.logs import configure_logs
from kubelet_plugin.mps.control_daemons import ControlDaemons
from kubelet_plugin.mps.control_tool import ControlError
from kubelet_plugin.mps.protocol import DIRECTORY, LOCK, MOST_BYTES, SOCKET, VERSION, speaks

log = logging.getLogger(__name__)

WATCH_INTERVAL_SECONDS = 15.0
"""Interval in which daemons are watched. A server that a client starts has the daemon's default limits at once."""

CONNECTION_TIMEOUT_SECONDS = 5.0


def serve(directory: str) -> NoReturn:
    """Serve until the process is told to end; daemons stay. Raises OSError: the directory or socket can't be used."""
    os.makedirs(directory, 0o700, exist_ok=True)  # noqa: PTH103
    os.chmod(directory, 0o700)  # noqa: PTH101 - containers mount folders below
    # Held until the process ends: of two pods during an update, only one may serve.
    lock = os.open(f"{directory}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    daemons = ControlDaemons(directory)
    with _listening(f"{directory}/{SOCKET}") as listening:
        watched = time.monotonic()
        while True:
            listening.settimeout(max(0.001, watched + WATCH_INTERVAL_SECONDS - time.monotonic()))
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                daemons.watch()
                watched = time.monotonic()
                continue
            threading.Thread(target=_answer, args=(daemons, connection), daemon=True, name="request").start()


def _listening(path: str) -> socket.socket:
    """A socket that only root may use, in place of one that an earlier process left."""
    temporary = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(temporary)  # noqa: PTH108
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(temporary)
    os.chmod(temporary, 0o600)  # noqa: PTH101
    listening.listen()
    os.replace(temporary, path)  # noqa: PTH105
    log.info("serving requests for MPS daemons", extra={"socket": path})
    return listening


def _answer(daemons: ControlDaemons, connection: socket.socket) -> None:
    """Answer the one request of a connection. Raises nothing."""
    connection.settimeout(CONNECTION_TIMEOUT_SECONDS)
    try:
        with connection, connection.makefile("rb") as file:
            line = file.readline(MOST_BYTES)
            if line:
                connection.sendall(json.dumps({"version": VERSION, **_outcome(daemons, line)}).encode() + b"\n")
    except OSError as error:
        log.warning("a request for MPS daemons was cut off", extra={"error": str(error)})


def _outcome(daemons: ControlDaemons, line: bytes) -> dict[str, object]:
    try:
        request = json.loads(line)
        if not speaks(request["version"]):
            return {
                "error": f"version: {request['version']} is not understood; accepted: {VERSION - 1} to {VERSION + 1}"
            }
        return daemons.answer(request)
    except (KeyError, TypeError, ValueError) as error:
        return {"error": f"the request is not valid: {type(error).__name__}: {error}"}
    except (ControlError, OSError) as error:
        return {"error": str(error)}


def main(arguments: list[str]) -> NoReturn:
    """The process that serves; ``arguments``: the directory and the format of logs, both optional."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    directory, style = [*arguments, *(DIRECTORY, "json")[len(arguments) :]][:2]
    configure_logs(style, "info")
    try:
        serve(directory)
    except OSError as error:
        log.error("MPS daemons can't be served", extra={"path": directory, "error": str(error)})
        sys.exit(3)
