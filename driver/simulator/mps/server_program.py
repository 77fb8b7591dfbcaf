"""The ``nvidia-cuda-mps-server`` of a simulated node: a process that its control daemon starts, and that may die.

It has memory on its GPUs, and ends with its daemon. Whoever survives, server or daemon, ends the server's clients.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from driver.simulator.smi_tool import locked, present_gpus, replace_text

SERVER_PROGRAM = "usr/bin/nvidia-cuda-mps-server"
SERVER_BYTES = 66 << 20
"""Memory that a server takes on its GPU, as measured on an H200."""

DEFAULT_PID = (1 << 22) + 1
"""Process id of a load that has none in its file: ``gpu_load.LOAD_PID``."""

Json = dict[str, Any]


def clients_of(node: Path, server: int) -> list[int]:
    """Process ids of the loads that are clients of a server."""
    states = (json.loads(path.read_text()) for path in _states(node))
    return [load.get("pid", DEFAULT_PID) for state in states for load in _clients(state, server)]


def start_server(node: Path, gpus: list[str], server: int) -> None:
    """Let a server have its memory on GPUs (UUIDs)."""
    minors = {gpu.minor for gpu in present_gpus(node) if gpu.uuid in gpus}
    for path in _states(node):
        if int(path.stem.removeprefix("gpu-")) in minors:
            with _changing(path) as state:
                process = {"pid": server, "memory": SERVER_BYTES, "mpsServer": True}
                state["processes"] = [*state.get("processes", []), process]


def end_server(node: Path, server: int) -> None:
    """Remove a server from the GPUs and end its clients. Idempotent."""
    for path in _states(node):
        with _changing(path) as state:
            state["processes"] = [process for process in state.get("processes", []) if process["pid"] != server]
            for load in _clients(state, server):
                load["until"] = time.time()


def _clients(state: Json, server: int) -> list[Json]:
    loads = state.get("loads", {}).get("running", [])
    return [load for load in loads if load.get("server") == server and load.get("until") is None]


def _states(node: Path) -> list[Path]:
    return sorted((node / "sim").glob("gpu-*.json"))


@contextmanager
def _changing(path: Path) -> Iterator[Json]:
    with locked(path.with_suffix(".lock")):
        before = path.read_text()
        state: Json = json.loads(before)
        yield state
        if state != json.loads(before):
            replace_text(path, json.dumps(state))


def main() -> None:
    program, *gpus = sys.argv
    node = Path(program.removesuffix(f"/{SERVER_PROGRAM}"))
    start_server(node, gpus, os.getpid())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        print("ready", flush=True)  # noqa: T201 - the daemon waits for it
        sys.stdin.read()  # ends with the daemon
    finally:
        end_server(node, os.getpid())
