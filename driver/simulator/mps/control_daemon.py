"""The MPS control daemon of a simulated node: its sockets, its servers and the limits of their clients.

Servers are processes of their own, which may be killed like any other. The clients of a server are those loads in the
state of its GPUs that name it (``Load.server``), so a load is a client until it ends or its server does.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import shutil
import socket
import subprocess
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from driver.simulator.mps.limits import ClientLimits, CudaError, Refusal, check_name, gpu_named, granted
from driver.simulator.mps.server_program import SERVER_PROGRAM, clients_of, end_server
from driver.simulator.smi_tool import present_gpus

CONTROL, PRIVILEGED, LOCK, LOG = "control", "control_privileged", "control_lock", "log"
PID_FILE = "nvidia-cuda-mps-control.pid"
"""Files in the pipe directory; the daemon holds a lock on ``LOCK`` as long as it lives."""

ALREADY_RUNNING = "An instance of this daemon is already running"

DEFAULT_NAMESPACE = "default"
CONNECTION_TIMEOUT_SECONDS = 5
SERVER_KEYS = {"allowed_devices", "pinned_memory_limit", "active_thread_percentage", "client_priority", "uid",
               "locality_domains", "namespaces", "devices"}  # fmt: skip
NAMESPACE_KEYS = {"pinned_memory_limit", "active_thread_percentage", "client_priority"}


class Settings(NamedTuple):
    """What the daemon was started with; ``visible``: CUDA_VISIBLE_DEVICES, None: every GPU."""

    node: Path
    pipe: Path
    logs: Path
    protocol: int
    multi_user: bool
    visible: str | None


class Server:
    """A running server. ``limits`` are those of its default namespace; protocol 2 has no other."""

    def __init__(
        self, name: str, uid: int, gpus: list[str], process: subprocess.Popen[bytes], limits: ClientLimits
    ) -> None:
        self.name, self.uid, self.gpus, self.process, self.limits = name, uid, gpus, process, limits
        self.namespaces: dict[str, ClientLimits] = {}

    @property
    def pid(self) -> int:
        return self.process.pid


class Listener(NamedTuple):
    """What a socket is for: ``privileged`` takes every command; ``server``/``namespace``: only clients of them."""

    privileged: bool = False
    server: str = ""
    namespace: str = DEFAULT_NAMESPACE


class ControlDaemon:
    """For one thread. Limits of protocol 2 last as long as the daemon. ``run_command`` answers what is no client's."""

    def __init__(
        self, settings: Settings, run_command: Callable[[ControlDaemon, Mapping[str, Any], bool], str]
    ) -> None:
        self.settings = settings
        self._run_command = run_command
        self.servers: dict[int, Server] = {}
        self.defaults = ClientLimits()
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[Path, socket.socket] = {}
        self._stopping = False

    def listen(self) -> None:
        """Create the files of the pipe directory. Raises Refusal: another daemon has them."""
        pipe = self.settings.pipe
        self._lock = (pipe / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refusal(ALREADY_RUNNING) from error
        self.open_socket(pipe / CONTROL, Listener(), 0o666)
        self.open_socket(pipe / PRIVILEGED, Listener(privileged=True), 0o700)
        if not (pipe / LOG).exists():
            os.mkfifo(pipe / LOG)
        (pipe / LOG).chmod(0o777)

    def configure(self, path: Path) -> None:
        """Apply a configuration file, whose servers start now. Raises Refusal: a key or value that it may not have."""
        try:
            content = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise Refusal(f"{path}: {error}") from error
        for name, values in content.get("servers", {}).items():
            _known(values, SERVER_KEYS, f"servers.{name}")
            limits = ClientLimits.read(values)
            uid = int(values.get("uid", os.getuid()))
            server = self.start_named_server(name, uid, values.get("allowed_devices"), limits)
            for namespace, inner in values.get("namespaces", {}).items():
                _known(inner, NAMESPACE_KEYS, f"servers.{name}.namespaces.{namespace}")
                if server is not None:
                    self.add_namespace(server, namespace, ClientLimits.read(inner))

    def run(self) -> None:
        """Serve until it is told to quit."""
        while not self._stopping:
            for key, _ in self._selector.select():
                key.data(key.fileobj)
        for server in list(self.servers.values()):
            self.stop_server(server)
        for path in [*self._sockets, *(self.settings.pipe / name for name in (PID_FILE, LOG, LOCK))]:
            path.unlink(missing_ok=True)

    def quit(self) -> None:
        self._stopping = True

    def open_socket(self, path: Path, listener: Listener, mode: int) -> None:
        """Listen at ``path``, which may be left from a daemon that died."""
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        path.chmod(mode)
        listening.listen()
        self._sockets[path] = listening
        self._selector.register(listening, selectors.EVENT_READ, lambda _: self._accept(listening, listener))

    def close_socket(self, path: Path) -> None:
        listening = self._sockets.pop(path)
        self._selector.unregister(listening)
        listening.close()
        path.unlink(missing_ok=True)

    def log(self, text: str, server: str = "") -> None:
        """Append a line to the log of the daemon or of a server."""
        path = self.settings.logs / server / ("server.log" if server else "control.log")
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}\n")

    @property
    def gpus(self) -> list[str]:
        """UUIDs of the GPUs that servers of protocol 2 use, in the order of their ordinals."""
        present = [gpu.uuid for gpu in present_gpus(self.settings.node)]
        if self.settings.visible is None:
            return present
        named = [gpu_named(name, present) for name in self.settings.visible.split(",")]
        return [uuid for uuid in named if uuid is not None]

    # Requests

    def _accept(self, listening: socket.socket, listener: Listener) -> None:
        try:
            connection, _ = listening.accept()
            connection.settimeout(CONNECTION_TIMEOUT_SECONDS)
            with connection, connection.makefile() as file:
                if line := file.readline():
                    connection.sendall(json.dumps(self._outcome(json.loads(line), listener)).encode() + b"\n")
        except (OSError, ValueError) as error:
            self.log(f"broken request: {error}")

    def _outcome(self, request: Mapping[str, Any], listener: Listener) -> dict[str, Any]:
        try:
            return self._answer(request, listener)
        except CudaError as error:
            return {"cuda": str(error)}
        except Refusal as refusal:
            return {"error": str(refusal)}

    def _answer(self, request: Mapping[str, Any], listener: Listener) -> dict[str, Any]:
        if "client" in request:
            return self._admit(request["client"], listener)
        return {"output": self._run_command(self, request, listener.privileged)}

    def _admit(self, client: Mapping[str, Any], listener: Listener) -> dict[str, Any]:
        """Grant a client what its server and environment leave it. Raises CudaError."""
        server = self._server_for(client["uid"], listener)
        limits = server.namespaces.get(listener.namespace, server.limits)
        if client["gpu"] not in server.gpus:
            raise CudaError("CUDA_ERROR_NO_DEVICE: the server does not use this GPU")
        memory, threads = granted(limits, client["gpu"], client["environment"])
        if memory is not None and client["memory"] > memory:
            raise CudaError(f"CUDA_ERROR_OUT_OF_MEMORY: at most {memory >> 20}Mi, of which the context takes 514Mi")
        return {"server": server.pid, "memory": memory, "threads": threads}

    def _server_for(self, uid: int, listener: Listener) -> Server:
        if self.settings.protocol == 3:
            named = [server for server in self.servers.values() if listener.server in ("", server.name)]
            allowed = [server for server in named if self.settings.multi_user or server.uid == uid]
            if not allowed:
                raise CudaError("CUDA_ERROR_NOT_PERMITTED: another user's server, or none")
            return allowed[0]
        owner = 0 if self.settings.multi_user else uid
        for server in list(self.servers.values()):
            if server.uid == owner:
                return server
            if clients_of(self.settings.node, server.pid):
                raise CudaError(f"it would wait until the clients of user {server.uid} have ended")
            self.stop_server(server)
        return self.start_server(owner)

    # Servers

    def start_server(self, uid: int) -> Server:
        """Start a server of protocol 2, with the default limits. Raises CudaError: it ends at once."""
        limits = ClientLimits(self.defaults.threads)
        for name, memory in self.defaults.memory.items():
            uuid = gpu_named(name, self.gpus)
            if uuid is not None:
                limits.memory[uuid] = memory
        server = self._start("", uid, self.gpus, limits)
        if server is None:
            raise CudaError("CUDA_ERROR_MPS_SERVER_NOT_READY: the server has no GPU")
        return server

    def start_named_server(self, name: str, uid: int, allowed: str | None, limits: ClientLimits) -> Server | None:
        """Start a server of protocol 3; None: it ended at once, as where it has no GPU. Raises Refusal."""
        check_name(name)
        if any(server.name == name for server in self.servers.values()):
            raise Refusal(f"server {name} already exists")
        present = [gpu.uuid for gpu in present_gpus(self.settings.node)]
        gpus = [gpu_named(gpu, present) for gpu in allowed.split(",")] if allowed else list(present)
        server = self._start(name, uid, [gpu for gpu in gpus if gpu], limits)
        if server is not None:
            self.open_socket(self._folder(name) / CONTROL, Listener(server=name), 0o666)
            self.add_namespace(server, DEFAULT_NAMESPACE, limits)
        return server

    def _start(self, name: str, uid: int, gpus: list[str], limits: ClientLimits) -> Server | None:
        if not gpus:
            self.log("no CUDA-capable device is detected", name)
            return None
        process = subprocess.Popen(
            [self.settings.node / SERVER_PROGRAM, *gpus],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None  # noqa: S101 - for mypy
        if process.stdout.readline() != b"ready\n":
            return None
        server = self.servers[process.pid] = Server(name, uid, gpus, process, limits)
        self._selector.register(process.stdout, selectors.EVENT_READ, lambda _: self._forget(server))
        self.log(f"server {process.pid} started for user {uid}", name)
        return server

    def stop_server(self, server: Server) -> None:
        """End a server and with it its clients."""
        server.process.terminate()
        self._forget(server)

    def _forget(self, server: Server) -> None:
        """Forget a server that has ended, whoever ended it; so have its clients."""
        if self.servers.pop(server.pid, None) is None:
            return
        assert server.process.stdout is not None  # noqa: S101 - for mypy
        self._selector.unregister(server.process.stdout)
        server.process.communicate()
        end_server(self.settings.node, server.pid)
        self.log(f"server {server.pid} ended", server.name)
        if server.name:
            for path in [path for path in self._sockets if self._folder(server.name) in path.parents]:
                self.close_socket(path)
            shutil.rmtree(self._folder(server.name))

    # Namespaces of protocol 3

    def add_namespace(self, server: Server, name: str, limits: ClientLimits) -> None:
        """Raises Refusal: the name is taken or not valid."""
        check_name(name)
        if name in server.namespaces:
            raise Refusal(f"namespace {name} already exists")
        server.namespaces[name] = limits
        self.open_socket(self._folder(server.name, name) / CONTROL, Listener(False, server.name, name), 0o666)

    def remove_namespace(self, server: Server, name: str) -> None:
        del server.namespaces[name]
        self.close_socket(self._folder(server.name, name) / CONTROL)
        self._folder(server.name, name).rmdir()

    def _folder(self, *names: str) -> Path:
        folder = self.settings.pipe.joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def pipe_directory(self, *names: str) -> str:
        return str(self.settings.pipe.joinpath(*names))


def _known(values: Mapping[str, Any], accepted: set[str], where: str) -> None:
    for key in values:
        if key not in accepted:
            raise Refusal(f"{where}.{key}: unknown key")
