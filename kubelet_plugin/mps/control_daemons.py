"""The MPS control daemons of a node: starts, limits and ends them as requested, and decides nothing.

What must survive the process is in the directory of each GPU: the daemon itself, found again by its pid file, and
DaemonRecord. Requests for one GPU are served one after the other.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from driver.clock import wait_until
from kubelet_plugin.mps.control_tool import ControlError, ControlTool
from kubelet_plugin.mps.protocol import (
    CLIENT,
    LEGACY,
    LOG,
    NAMESPACES,
    PIPE,
    RECORD,
    SERVER,
    DaemonState,
    gpu_directory,
)

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS, END_TIMEOUT_SECONDS, INTERVAL_SECONDS = 5.0, 10.0, 0.02

FOR_CLIENTS = ("control", "log")
"""Files of the pipe directory that containers get with protocol 2; never control_privileged."""

NEARLY_NOTHING = ("--pinned-memory-limit=1M", "--active-thread-percentage=1")
"""Limits of the default namespace of protocol 3, which no container gets."""


class DaemonRecord(NamedTuple):
    """How a GPU's daemon was started, and with protocol 2 the limits of its servers (MiB, percent; 0: none set).

    ``mode`` as in DaemonState: like a compute mode, the directory outlives both processes and no reboot.
    """

    gpu: str
    program: str
    library: str
    protocol: int
    multi_user: bool = True
    uid: int | None = None
    memory: int = 0
    threads: int = 100
    ending: bool = False
    mode: int | None = None


class ControlDaemons:
    """Thread-safe. All methods raise ControlError."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._locks: dict[str, threading.Lock] = {}
        self._limited: dict[str, set[int]] = {}
        """By directory, the servers that have the recorded limits."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks for. Raises KeyError, TypeError: a field is missing or wrong, too."""
        handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "start": self._start,
            "limit": self._limit,
            "remove": self._remove,
            "end": self._end,
        }
        name = str(request["request"])
        if name == "status":
            return {"daemons": [state._asdict() for state in self.states(str(request.get("gpu") or ""))]}
        if name not in handlers:
            raise ControlError(f"request {name!r} is not known; accepted: status, {', '.join(handlers)}")
        gpu = str(request["gpu"])
        if not gpu.startswith("GPU-") or not gpu.replace("-", "").isalnum():
            raise ControlError(f"gpu: {gpu!r} is no UUID of a GPU")
        with self._lock(gpu_directory(self._base, gpu)):
            return handlers[name](request)

    def states(self, gpu: str = "") -> list[DaemonState]:
        """What is in the directory of each GPU, or of ``gpu`` (UUID).

        A daemon that gives no answer has no servers and no namespaces.
        """
        states = []
        for name in sorted(os.listdir(self._base)):  # noqa: PTH208
            record = _read(f"{self._base}/{name}")
            if record is not None and gpu in ("", record.gpu):
                with self._lock(f"{self._base}/{name}"):
                    states.append(self._state(record))
        return states

    def watch(self) -> None:
        """Let servers that clients have started since have the recorded limits, and log daemons that have ended."""
        for state in self.states():
            directory = gpu_directory(self._base, state.gpu)
            with self._lock(directory):
                record = _read(directory)
                if record is None:
                    continue
                if not state.pid and self._limited.pop(directory, None) is not None:
                    log.error("an MPS control daemon has ended", extra={"gpu": state.gpu})
                if state.pid and record.protocol == LEGACY and set(state.servers) - self._limited.get(directory, set()):
                    try:
                        self._set_limits(record)
                    except ControlError as error:
                        log.warning("can't set the limits of an MPS server", extra={"error": str(error)})

    def _lock(self, directory: str) -> threading.Lock:
        return self._locks.setdefault(directory, threading.Lock())

    # The caller holds the lock of the GPU

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        gpu, protocol = str(request["gpu"]), int(request["protocol"])
        if protocol not in (LEGACY, NAMESPACES):
            raise ControlError(f"protocol: {protocol} is not known; accepted: {LEGACY}, {NAMESPACES}")
        directory = gpu_directory(self._base, gpu)
        uid = request.get("uid")
        record = DaemonRecord(gpu, request["program"], request["library"], protocol, uid=uid, mode=request.get("mode"))
        tool = self._tool(record)
        before = _read(directory)
        if before is not None and before.ending:
            self._end(request)
            before = None
        if before is not None and _runs(tool):
            record = before
        else:
            if before is not None:
                mode = record.mode if before.mode is None else before.mode
                record = record._replace(memory=before.memory, threads=before.threads, mode=mode)
            for name in ("", PIPE, CLIENT, LOG):
                os.makedirs(f"{directory}/{name}", 0o755, exist_ok=True)  # noqa: PTH103
            _write(directory, record)
            record = self._launch(record, tool)
            log.info("started an MPS control daemon", extra={"gpu": gpu, "pid": tool.daemon()})
        if record.protocol == LEGACY:
            _link_for_clients(directory)
        else:
            _ensure_server(tool)
        self._limited.setdefault(directory, set())
        return {"daemon": self._state(record)._asdict()}

    def _launch(self, record: DaemonRecord, tool: ControlTool) -> DaemonRecord:
        """Start the daemon, and with protocol 2 set the recorded limits; return the record as it is then."""
        _end_processes(tool.control_processes)
        _remove_stale_files(f"{tool.directory}/{PIPE}")
        if record.protocol == NAMESPACES:
            self._begin(tool, "-d", "-p", str(NAMESPACES), "-m")
            return record
        try:
            self._begin(tool, "-d", "-M")
        except ControlError as error:
            log.warning("an MPS control daemon serves one user only", extra={"gpu": record.gpu, "error": str(error)})
            record = record._replace(multi_user=False)
            _write(tool.directory, record)
            self._begin(tool, "-d")
        if record.memory:
            self._set_limits(record)
        if not record.multi_user and record.uid is not None:
            tool.run(commands=f"start_server -uid {record.uid}\n")
        return record

    def _begin(self, tool: ControlTool, *arguments: str) -> None:
        _run_once(tool, lambda: bool(tool.control_processes()), *arguments)
        if not wait_until(START_TIMEOUT_SECONDS, tool.daemon, INTERVAL_SECONDS):
            raise ControlError(f"{tool.program} {' '.join(arguments)}: no daemon runs in {tool.directory}/{PIPE}")

    def _limit(self, request: dict[str, Any]) -> dict[str, Any]:
        record, tool = self._running(str(request["gpu"]))
        memory, threads = int(request["memory"]), int(request.get("threads") or 100)
        if record.protocol == LEGACY:
            record = record._replace(memory=memory, threads=threads)
            _write(tool.directory, record)
            self._set_limits(record)
            return {}
        name = str(request["namespace"])
        if name not in _namespaces(tool):
            _run_once(tool, lambda: name in _namespaces(tool), "namespace", "create", name, f"--server={SERVER}")
        limits = (f"--pinned-memory-limit={memory}M", f"--active-thread-percentage={threads}")
        tool.run("namespace", "set", name, f"--server={SERVER}", *limits)
        return {}

    def _set_limits(self, record: DaemonRecord) -> None:
        """Set the recorded limits as the daemon's defaults, then of each server: of a new one, too, whatever it got."""
        tool, memory, threads = self._tool(record), f"{record.gpu} {record.memory}M", record.threads
        defaults = (
            f"set_default_device_pinned_mem_limit {memory}" if record.memory else "",
            f"set_default_active_thread_percentage {threads}",
        )
        tool.run(commands="\n".join(filter(None, defaults)) + "\n")
        servers = tool.servers()
        for pid in servers:
            limit = f"set_device_pinned_mem_limit {pid} {memory}\n" if record.memory else ""
            tool.run(commands=f"{limit}set_active_thread_percentage {pid} {threads}\n")
        self._limited[tool.directory] = set(servers)

    def _remove(self, request: dict[str, Any]) -> dict[str, Any]:
        record = _read(gpu_directory(self._base, str(request["gpu"])))
        if record is None:
            return {}
        tool, name, memory = self._tool(record), str(request["namespace"]), int(request.get("memory") or 0)
        runs = tool.daemon() > 0
        if record.protocol == LEGACY and memory:
            record = record._replace(memory=memory, threads=int(request.get("threads") or 100))
            _write(tool.directory, record)
            if runs:
                self._set_limits(record)
        elif record.protocol == NAMESPACES and runs and name in _namespaces(tool):
            # Its containers have ended, though the server may not have noticed yet.
            delete = ("namespace", "delete", name, f"--server={SERVER}", "--force")
            _run_once(tool, lambda: name not in _namespaces(tool), *delete)
        return {}

    def _end(self, request: dict[str, Any]) -> dict[str, Any]:
        directory = gpu_directory(self._base, str(request["gpu"]))
        record = _read(directory)
        if record is not None:
            tool = self._tool(record)
            pid = tool.daemon()
            _write(directory, record._replace(ending=True))  # a daemon that still runs must not be found again
            if pid:
                with suppress(ControlError):
                    tool.run(*(["-q"] if record.protocol == NAMESPACES else []), commands="quit\n")
            if not wait_until(END_TIMEOUT_SECONDS if pid else 0.0, lambda: not tool.processes(), INTERVAL_SECONDS):
                _end_processes(tool.processes)
            log.info("ended an MPS control daemon", extra={"gpu": record.gpu, "pid": pid})
        self._limited.pop(directory, None)
        _remove_tree(directory)
        return {}

    def _running(self, gpu: str) -> tuple[DaemonRecord, ControlTool]:
        record = _read(gpu_directory(self._base, gpu))
        if record is None or not self._tool(record).daemon():
            raise ControlError(f"the MPS control daemon of {gpu} does not run")
        return record, self._tool(record)

    def _tool(self, record: DaemonRecord) -> ControlTool:
        return ControlTool(record.gpu, gpu_directory(self._base, record.gpu), record.program, record.library)

    def _state(self, record: DaemonRecord) -> DaemonState:
        tool = self._tool(record)
        state = DaemonState(record.gpu, record.protocol, tool.daemon(), record.multi_user, mode=record.mode)
        if not state.pid:
            return state
        try:
            if record.protocol == LEGACY:
                return state._replace(servers=tuple(tool.servers()))
            servers = _servers(tool)
            return state._replace(servers=tuple(servers), namespaces=tuple(_namespaces(tool) if servers else ()))
        except ControlError as error:
            log.warning("an MPS control daemon does not answer", extra={"gpu": record.gpu, "error": str(error)})
            return state._replace(answers=False)


def _runs(tool: ControlTool) -> bool:
    """Whether the daemon runs, also one that a killed process was just starting: it has no pid file yet."""
    wait_until(START_TIMEOUT_SECONDS, lambda: tool.daemon() or not tool.control_processes(), INTERVAL_SECONDS)
    return tool.daemon() > 0


def _run_once(tool: ControlTool, is_done: Callable[[], bool], *arguments: str) -> None:
    """Run the program. Its failure does not count if what it was to do is done: by the run of a killed process."""
    try:
        tool.run(*arguments)
    except ControlError:
        if not is_done():
            raise


def _servers(tool: ControlTool) -> list[int]:
    """Process ids of the servers of a daemon with protocol 3."""
    return [int(row[2]) for row in tool.rows("server", "list") if len(row) > 2 and row[2].isdecimal()]


def _ensure_server(tool: ControlTool) -> None:
    """Start the server of a daemon with protocol 3 unless it runs: the first time, or because it died."""
    if _servers(tool):
        return
    _run_once(tool, lambda: bool(_servers(tool)), "server", "create", SERVER, f"--allowed-devices={tool.gpu}")
    tool.run("server", "set", SERVER, *NEARLY_NOTHING)
    if not _servers(tool):  # one for a GPU that is not there is accepted, and ends at once
        raise ControlError(f"the MPS server of {tool.gpu} has ended at once; see {tool.directory}/{LOG}/{SERVER}")


def _namespaces(tool: ControlTool) -> list[str]:
    rows = tool.rows("namespace", "list", f"--server={SERVER}")
    return [row[0] for row in rows if row[0] != "default"]


def _read(directory: str) -> DaemonRecord | None:
    """The record in a directory; None: there is none that is valid."""
    try:
        with open(f"{directory}/{RECORD}") as file:  # noqa: PTH123
            fields = json.load(file)
        return DaemonRecord(**{name: value for name, value in fields.items() if name in DaemonRecord._fields})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _write(directory: str, record: DaemonRecord) -> None:
    """Replace the record. It need not survive a power cut: no daemon does."""
    temporary = f"{directory}/{RECORD}.tmp"
    with open(temporary, "w") as file:  # noqa: PTH123
        json.dump(record._asdict(), file)
    os.replace(temporary, f"{directory}/{RECORD}")  # noqa: PTH105


def _link_for_clients(directory: str) -> None:
    """Let containers reach the daemon by links to its files; those of a daemon that died are replaced."""
    for name in FOR_CLIENTS:
        target, link = f"{directory}/{PIPE}/{name}", f"{directory}/{CLIENT}/{name}"
        temporary = f"{directory}/{CLIENT}/.{name}"
        with suppress(FileNotFoundError):
            os.unlink(temporary)  # noqa: PTH108
        with suppress(FileNotFoundError):  # the driver may not have both
            os.link(target, temporary)
            os.replace(temporary, link)  # noqa: PTH105


def _remove_stale_files(folder: str) -> None:
    """Remove what a daemon left that died. Directories stay: containers have mounted them."""
    for path, _, files in os.walk(folder):
        for name in files:
            os.unlink(f"{path}/{name}")  # noqa: PTH108


def _remove_tree(folder: str) -> None:
    for path, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(f"{path}/{name}")  # noqa: PTH108
        for name in folders:
            os.rmdir(f"{path}/{name}")  # noqa: PTH106
    with suppress(FileNotFoundError):
        os.rmdir(folder)  # noqa: PTH106


def _end_processes(remaining: Callable[[], list[int]]) -> None:
    """Kill them, and wait until they have ended: until then the daemon keeps others out of its directory."""
    pids = remaining()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if pids:
        wait_until(END_TIMEOUT_SECONDS, lambda: not remaining(), INTERVAL_SECONDS)
