"""The commands of the MPS control daemon: those of protocol 2, and the modules of protocol 3.

Commands and answers are NVIDIA's (MPS manual, release 615); texts of refusals are estimates. Everybody may read; what
changes something needs the privileged socket, which is an estimate, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from driver.simulator.mps.control_daemon import ControlDaemon, Server
from driver.simulator.mps.limits import EVERY_GPU, ClientLimits, Refusal, gpu_named, percentage, size
from driver.simulator.mps.server_program import clients_of

READING = re.compile(r"get_|.* list$")
"""Commands that change nothing."""


def run_command(daemon: ControlDaemon, request: Mapping[str, Any], privileged: bool) -> str:
    """Run ``command`` of protocol 2, or the ``words`` of protocol 3; ``quit`` belongs to both. Raises Refusal."""
    words: list[str] = request.get("words") or request["command"].split()
    protocol, name = daemon.settings.protocol, " ".join(words[:2] if "words" in request else words[:1])
    if protocol != (3 if "words" in request else 2) and name != "quit":
        raise Refusal(f"This daemon has protocol {protocol}")
    if not privileged and not READING.match(name):
        raise Refusal("Permission denied")
    if "words" in request:
        return _run_module(daemon, name, words[2:])
    command = INTERACTIVE.get(name)
    if command is None:
        raise Refusal(f"Unknown command: {name}")
    return _call(command, name, daemon, *words[1:])


def _call(command: FunctionType, name: str, *arguments: Any) -> str:
    most = command.__code__.co_argcount
    if not most - len(command.__defaults__ or ()) <= len(arguments) <= most:
        raise Refusal(f"{name}: wrong number of arguments")
    return str(command(*arguments))


def _server(daemon: ControlDaemon, pid: str) -> Server:
    server = daemon.servers.get(int(pid)) if pid.isdecimal() else None
    if server is None:
        raise Refusal(f"Server {pid} not found")
    return server


def _start_server(daemon: ControlDaemon, option: str, uid: str) -> str:
    if option != "-uid" or not uid.isdecimal():
        raise Refusal("usage: start_server -uid <user id>")
    if not any(server.uid == int(uid) for server in daemon.servers.values()):
        daemon.start_server(int(uid))
    return ""


def _shutdown_server(daemon: ControlDaemon, pid: str, option: str = "") -> str:
    server = _server(daemon, pid)
    if option != "-f" and clients_of(daemon.settings.node, server.pid):
        raise Refusal(f"Server {pid} has active clients")
    daemon.stop_server(server)
    return ""


def _set_default_threads(daemon: ControlDaemon, value: str) -> str:
    daemon.defaults.threads = percentage(value)
    return ""


def _set_threads(daemon: ControlDaemon, pid: str, value: str) -> str:
    _server(daemon, pid).limits.threads = percentage(value)
    return ""


def _set_default_memory(daemon: ControlDaemon, gpu: str, value: str) -> str:
    daemon.defaults.set_memory(gpu, value)  # a GPU that does not exist is ignored when a server starts
    return ""


def _set_memory(daemon: ControlDaemon, pid: str, gpu: str, value: str) -> str:
    server = _server(daemon, pid)
    uuid = gpu_named(gpu, server.gpus)
    if uuid is None:
        raise Refusal(f"Invalid device: {gpu}")
    server.limits.set_memory(uuid, value)
    return ""


def _get_memory(daemon: ControlDaemon, pid: str, gpu: str) -> str:
    server = _server(daemon, pid)
    return written(server.limits.memory.get(gpu_named(gpu, server.gpus) or ""))


def _clients(daemon: ControlDaemon, pid: str) -> str:
    return "\n".join(map(str, clients_of(daemon.settings.node, _server(daemon, pid).pid)))


def _quit(daemon: ControlDaemon) -> str:
    daemon.quit()
    return ""


INTERACTIVE: Mapping[str, Any] = {
    "get_server_list": lambda daemon: "\n".join(map(str, daemon.servers)),
    "get_server_status": lambda daemon, pid: "Active" if _server(daemon, pid) else "",
    "get_client_list": _clients,
    "start_server": _start_server,
    "shutdown_server": _shutdown_server,
    "set_default_active_thread_percentage": _set_default_threads,
    "get_default_active_thread_percentage": lambda daemon: str(daemon.defaults.threads),
    "set_active_thread_percentage": _set_threads,
    "get_active_thread_percentage": lambda daemon, pid: str(_server(daemon, pid).limits.threads),
    "set_default_device_pinned_mem_limit": _set_default_memory,
    "get_default_device_pinned_mem_limit": lambda daemon, gpu: written(daemon.defaults.memory.get(gpu)),
    "set_device_pinned_mem_limit": _set_memory,
    "get_device_pinned_mem_limit": _get_memory,
    "quit": _quit,
}


def written(memory: int | None) -> str:
    """A limit as commands take it; empty: no limit."""
    if memory is None:
        return ""
    return f"{memory >> 30}G" if memory % (1 << 30) == 0 else f"{memory >> 20}M"


def _run_module(daemon: ControlDaemon, name: str, words: Sequence[str]) -> str:
    """Run ``module verb [positional ...] [--key=value ...]``."""
    if name not in MODULES:
        raise Refusal(f"Unknown command: {name}")
    command, accepted = MODULES[name]
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words if "=" in word or word[:2] == "--")
    for option in options:
        if option not in accepted:
            raise Refusal(f"Unknown option: --{option}")
    positional = [word for word in words if "=" not in word and word[:2] != "--"]
    return _call(command, name, daemon, options, *positional)


Options = Mapping[str, str]


def _named(daemon: ControlDaemon, name: str) -> Server:
    for server in daemon.servers.values():
        if server.name == name:
            return server
    raise Refusal(f"server {name} not found")


def _namespace(daemon: ControlDaemon, options: Options, name: str) -> tuple[Server, ClientLimits]:
    server = _named(daemon, options.get("server", ""))
    if name not in server.namespaces:
        raise Refusal(f"namespace {name} not found")
    return server, server.namespaces[name]


def _server_create(daemon: ControlDaemon, options: Options, name: str) -> str:
    uid = int(options.get("uid", "0"))
    if daemon.settings.multi_user and uid != 0:
        raise Refusal("only --uid=0 is allowed in multiuser mode")
    daemon.start_named_server(name, uid, options.get("allowed-devices"), ClientLimits())
    return ""


def _server_delete(daemon: ControlDaemon, options: Options, name: str) -> str:
    server = _named(daemon, name)
    if "force" not in options and clients_of(daemon.settings.node, server.pid):
        raise Refusal(f"server {name} has active clients")
    daemon.stop_server(server)
    return ""


def _server_list(daemon: ControlDaemon, options: Options, name: str = "") -> str:
    servers = [server for server in daemon.servers.values() if name in ("", server.name)]
    rows = [
        (server.name, server.uid, server.pid, "Ready", daemon.pipe_directory(server.name), ",".join(server.gpus), "-")
        for server in servers
    ]
    return _table(options, ("NAME", "UID", "PID", "STATUS", "PIPE DIRECTORY", "ALLOWED DEVICES", "CONTEXT IDS"), rows)


def _namespace_create(daemon: ControlDaemon, options: Options, name: str) -> str:
    daemon.add_namespace(_named(daemon, options.get("server", "")), name, ClientLimits())
    return ""


def _namespace_delete(daemon: ControlDaemon, options: Options, name: str) -> str:
    server, _ = _namespace(daemon, options, name)
    if name == "default":
        raise Refusal("namespace default can't be deleted")
    # Which of the server's clients are in the namespace is not recorded.
    if "force" not in options and clients_of(daemon.settings.node, server.pid):
        raise Refusal(f"namespace {name} has active clients")
    daemon.remove_namespace(server, name)
    return ""


def _namespace_list(daemon: ControlDaemon, options: Options, name: str = "") -> str:
    rows = [
        (
            namespace,
            server.name,
            "Ready",
            written(limits.memory.get(EVERY_GPU)) or "-",
            f"{limits.threads:.2f}",
            "0",
            daemon.pipe_directory(server.name, namespace),
        )
        for server in daemon.servers.values()
        if options.get("server") in (None, server.name)
        for namespace, limits in server.namespaces.items()
        if name in ("", namespace)
    ]
    titles = ("NAME", "SERVER", "SERVER STATUS", "PINNED MEMORY LIMIT", "ACTIVE THREAD PERCENTAGE")
    return _table(options, (*titles, "CLIENT PRIORITY", "PIPE DIRECTORY"), rows)


def _set(limits: ClientLimits, options: Options) -> str:
    if not options.keys() & {"pinned-memory-limit", "active-thread-percentage"}:
        raise Refusal("At least one option is required")
    memory, threads = options.get("pinned-memory-limit"), options.get("active-thread-percentage")
    if memory is not None:
        limits.memory[EVERY_GPU] = size(memory)
    if threads is not None:
        limits.threads = percentage(threads)
    return ""


def _table(options: Options, titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    style, _, header = options.get("format", "table").partition(",")
    lines = [list(map(str, row)) for row in rows]
    if header != "noheader":
        lines.insert(0, list(titles))
    return "\n".join(("," if style == "csv" else "  ").join(line) for line in lines)


LIMIT_OPTIONS = {"pinned-memory-limit", "active-thread-percentage"}
MODULES: Mapping[str, tuple[Any, set[str]]] = {
    "server create": (_server_create, {"uid", "allowed-devices"}),
    "server delete": (_server_delete, {"force"}),
    "server list": (_server_list, {"format"}),
    "server set": (lambda daemon, options, name: _set(_named(daemon, name).limits, options), LIMIT_OPTIONS),
    "namespace create": (_namespace_create, {"server"}),
    "namespace delete": (_namespace_delete, {"server", "force"}),
    "namespace list": (_namespace_list, {"server", "format"}),
    "namespace set": (
        lambda daemon, options, name: _set(_namespace(daemon, options, name)[1], options),
        {"server", *LIMIT_OPTIONS},
    ),
}
