"""The ``nvidia-cuda-mps-control`` of a simulated node: starts its daemon, and sends it commands.

A program, run by the script in the node's ``usr/bin`` with the standard library only, as nvidia-smi's is. Options,
commands and environment variables are those of NVIDIA's MPS manual, release 615: the interactive commands of protocol
2, which read standard input, and ``module verb`` of protocol 3, which drivers before 615 lack. What was measured on
a real driver and what is an estimate, such as texts and exit statuses: docs/simulator.md.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driver.simulator.mps.commands import run_command
from driver.simulator.mps.control_daemon import CONTROL, PID_FILE, PRIVILEGED, ControlDaemon, Settings
from driver.simulator.mps.limits import CudaError, Refusal

PROGRAM = "usr/bin/nvidia-cuda-mps-control"
PROTOCOL_3_SINCE = 615
DEFAULT_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's default

USAGE = "usage: nvidia-cuda-mps-control [-d | -f] [-M] [-p 2|3] [-a FILE] [-q] [module verb ...]"
NO_DAEMON, ENDED = "Cannot find MPS control daemon process", "the daemon has ended"


class Invocation(NamedTuple):
    """The arguments of one run."""

    flags: frozenset[str]
    values: Mapping[str, str]
    words: Sequence[str]


FLAGS = {
    "-d": "daemon", "--daemon": "daemon", "-f": "foreground", "--foreground": "foreground",
    "-M": "multiuser", "--multiuser-server": "multiuser", "-h": "help", "--help": "help", "-v": "version",
}  # fmt: skip
FLAGS_OF_3 = {"-m": "multiuser", "--multiuser": "multiuser", "-q": "quit", "--quit": "quit", "--version": "version"}
VALUES_OF_3 = {"-p": "protocol", "--protocol": "protocol", "-a": "apply", "--apply": "apply"}


def parse(arguments: Sequence[str], driver: int) -> Invocation:
    """Sort the arguments; options stop at the first word. Raises Refusal: an option that the driver does not have."""
    has_3 = driver >= PROTOCOL_3_SINCE
    names, with_value = FLAGS | (FLAGS_OF_3 if has_3 else {}), VALUES_OF_3 if has_3 else {}
    flags, values, remaining = set(), {}, list(arguments)
    while remaining and remaining[0].startswith("-"):
        option = remaining.pop(0)
        if option in names:
            flags.add(names[option])
        elif option in with_value and remaining:
            values[with_value[option]] = remaining.pop(0)
        else:
            raise Refusal(f"Unknown option: {option}\n{USAGE}")
    if remaining and not has_3:
        raise Refusal(f"Unknown option: {remaining[0]}\n{USAGE}")
    return Invocation(frozenset(flags), values, remaining)


def driver_branch(node: Path) -> int:
    """The first number of the driver's version, as 580."""
    match = re.search(r"\s(\d+)\.\d+", (node / "proc/driver/nvidia/version").read_text())
    return int(match[1]) if match else 0


def run(program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Do what the arguments ask for, and print the answer. Raises Refusal."""
    node = Path(program.removesuffix(f"/{PROGRAM}"))
    driver = driver_branch(node)
    invocation = parse(arguments, driver)
    pipe = Path(environment.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_DIRECTORY)
    if "help" in invocation.flags or "version" in invocation.flags:
        say(USAGE if "help" in invocation.flags else f"CUDA MPS Control Daemon, driver {driver}")
    elif invocation.flags & {"daemon", "foreground"}:
        start(node, pipe, invocation, environment, driver)
    elif "quit" in invocation.flags:
        say(ask(pipe, {"command": "quit"})["output"])
    elif invocation.words:
        say(ask(pipe, {"words": list(invocation.words)})["output"])
    else:
        for line in sys.stdin:
            if line.strip():
                say(interactive(pipe, line.strip()))


def interactive(pipe: Path, command: str) -> str:
    """The answer to a command of protocol 2, a refusal included: only without a daemon the program fails.

    Raises Refusal.
    """
    try:
        return str(ask(pipe, {"command": command})["output"])
    except Refusal as refusal:
        if str(refusal) in (NO_DAEMON, ENDED):
            raise
        return str(refusal)


def start(node: Path, pipe: Path, invocation: Invocation, environment: Mapping[str, str], driver: int) -> None:
    """Start the daemon; with ``-d`` return as soon as it answers."""
    requested = environment.get("CUDA_MPS_PROTOCOL_VERSION") or invocation.values.get("protocol") or "2"
    if requested not in ("2", "3") or (requested == "3" and driver < PROTOCOL_3_SINCE):
        raise Refusal(f"Unknown protocol: {requested}")
    logs = Path(environment.get("CUDA_MPS_LOG_DIRECTORY") or "/var/log/nvidia-mps")
    for folder in (pipe, logs):
        if not folder.is_dir():
            raise Refusal(f"{folder}: No such directory")
    settings = Settings(
        node, pipe, logs, int(requested), "multiuser" in invocation.flags, environment.get("CUDA_VISIBLE_DEVICES")
    )
    daemon, configuration = ControlDaemon(settings, run_command), invocation.values.get("apply")
    if "foreground" in invocation.flags:
        _begin(daemon, configuration)
        daemon.run()
        return
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        try:
            _begin(daemon, configuration)
        except Refusal as refusal:
            os.write(writing, str(refusal).encode())
            os._exit(1)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2, writing):
            os.dup2(null, descriptor)
        daemon.run()
        os._exit(0)
    os.close(writing)
    with open(reading) as file:  # noqa: PTH123 - a descriptor
        if complaint := file.read():
            raise Refusal(complaint)


def _begin(daemon: ControlDaemon, configuration: str | None) -> None:
    daemon.listen()
    (daemon.settings.pipe / PID_FILE).write_text(str(os.getpid()))
    if configuration is not None:
        daemon.configure(Path(configuration))


def ask(pipe: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Send one request to the daemon: to its privileged socket, if this user may use it. Raises Refusal, CudaError."""
    path = pipe / PRIVILEGED
    if not os.access(path, os.W_OK) or "client" in request:
        path = pipe / CONTROL
    with socket.socket(socket.AF_UNIX) as connection:
        if connection.connect_ex(str(path)):
            raise Refusal(NO_DAEMON)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile() as file:
            answer: dict[str, Any] = json.loads(file.readline() or json.dumps({"error": ENDED}))
    if "cuda" in answer:
        raise CudaError(answer["cuda"])
    if "error" in answer:
        raise Refusal(answer["error"])
    return answer


class Granted(NamedTuple):
    """What a program gets from an MPS server: its process, bytes of memory (None: no limit), a part of the threads."""

    server: int
    memory: int | None
    threads: float


def connect_client(pipe: Path, gpu: str, memory: int, environment: Mapping[str, str], uid: int) -> Granted:
    """Connect a program that uses ``memory`` bytes of a GPU, its context included. Raises Refusal, CudaError."""
    passed = {name: value for name, value in environment.items() if name.startswith("CUDA_MPS_")}
    client = {"gpu": gpu, "memory": memory, "environment": passed, "uid": uid}
    answer = ask(pipe, {"client": client})
    return Granted(answer["server"], answer["memory"], answer["threads"])


def say(text: str) -> None:
    """Print an answer that is not empty."""
    if text:
        print(text)  # noqa: T201 - a program's output


def main() -> None:
    program, *arguments = sys.argv
    try:
        run(program, arguments, os.environ)
    except Refusal as refusal:
        say(str(refusal))
        sys.exit(1)
