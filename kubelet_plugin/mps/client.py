"""The node plugin's side of MPS: what it asks of the process that runs the control daemons, and what a container gets.

A caller holds the lock of the GPU. Each call may be repeated, and is repeated after a restart of either side.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driver.errors import MpsError
from driver.hardware.host_paths import HOST, PROGRAM_DIRECTORIES, find_libraries, find_program
from kubelet_plugin.mps.control_tool import PROGRAM
from kubelet_plugin.mps.protocol import (
    CLIENT,
    LEGACY,
    NAMESPACES,
    NAMESPACES_SINCE,
    PIPE,
    SERVER,
    SOCKET,
    VERSION,
    DaemonState,
    daemon_state,
    gpu_directory,
    speaks,
)

REQUEST_TIMEOUT_SECONDS = 30.0
"""Timeout of one request; the kubelet waits 45 s for a whole pod."""

CUDA = "libcuda.so.1"


class MpsShare(NamedTuple):
    """The part of a GPU that a claim has with MPS: bytes of memory, and percent of the threads; None: no limit."""

    memory: int
    threads: int | None = None

    @property
    def mebibytes(self) -> int:
        """The unit of MPS; at least one: 0 would be no limit."""
        return max(1, self.memory >> 20)


class MpsAccess(NamedTuple):
    """What the containers of a claim get: a directory of the host at a path, and variables."""

    host_path: str
    container_path: str
    environment: Mapping[str, str]


def protocol_for(driver_version: str) -> int:
    """The protocol of the control daemon of a driver: NAMESPACES where it has them."""
    branch = driver_version.partition(".")[0]
    return NAMESPACES if branch.isdecimal() and int(branch) >= NAMESPACES_SINCE else LEGACY


def namespace_of(share_id: str) -> str:
    """The name of the namespace of a claim's part of a GPU: a claim may have several."""
    return share_id.replace("-", "_").lower()


def largest(shares: Iterable[MpsShare]) -> MpsShare:
    """The limits of a server that all ``shares`` use, of which there is one at least."""
    listed = list(shares)
    threads = [share.threads for share in listed if share.threads is not None]
    return MpsShare(max(share.memory for share in listed), max(threads) if len(threads) == len(listed) else None)


def cuda_library(driver_root: Path) -> str:
    """libcuda.so.1 below the driver root, which the dynamic linker does not search; "": it is not there."""
    return next((str(driver_root / path) for _, path in find_libraries(driver_root, [CUDA])), "")


def control_program(driver_root: Path, gpu: str) -> str:
    """The program that starts and commands the daemon of a GPU (UUID). Raises MpsError."""
    program = find_program(driver_root, PROGRAM)
    if program is None:
        raise MpsError(
            f"{driver_root / PROGRAM_DIRECTORIES[0] / PROGRAM} does not exist: install it with the NVIDIA "
            f"driver of this node, or share {gpu} by time-slicing"
        )
    return str(driver_root / program)


def lost_gpus(before: Sequence[DaemonState], now: Sequence[DaemonState]) -> dict[str, str]:
    """The GPUs whose clients have failed between two calls of ``daemons``, and why.

    A daemon or a server that ran does not run any more, whether another runs in its place or not. A server that serves
    one user only ends when another user's turn comes.
    """
    present = {state.gpu: state for state in now}
    lost: dict[str, str] = {}
    for state in before:
        after = present.get(state.gpu, DaemonState(state.gpu))
        if state.pid and after.pid != state.pid:
            lost[state.gpu] = f"MPS control daemon {state.pid} has ended"
        elif after.answers and after.multi_user and (gone := sorted(set(state.servers) - set(after.servers))):
            lost[state.gpu] = f"MPS server {', '.join(map(str, gone))} has ended"
    return lost


class MpsClient:
    """Requests to the process of the MPS daemons, whose socket is in ``directory``. All methods raise MpsError.

    ``driver_root``: the root of the driver as both processes see it. ``needs_library``: whether the driver's programs
    need libcuda.so.1 from there, as outside of simulated nodes.
    """

    def __init__(self, directory: Path, driver_root: Path, *, needs_library: bool = True) -> None:
        self._directory, self._driver_root = directory, driver_root
        self._needs_library = needs_library and driver_root != HOST

    def has_directory(self, gpu: str) -> bool:
        """Whether a GPU (UUID) may have a daemon, without a request."""
        return Path(gpu_directory(str(self._directory), gpu)).exists()

    def daemons(self, gpu: str = "") -> list[DaemonState]:
        """What runs, for recovery and for ``lost_gpus``; of one ``gpu`` (UUID) or of all."""
        answer = self._ask("status", gpu=gpu)
        try:
            states = [daemon_state(fields) for fields in answer["daemons"]]
        except (LookupError, TypeError, ValueError) as error:
            raise self._unreadable(error) from error
        return [state for state in states if gpu in ("", state.gpu)]

    def ensure_daemon(self, gpu: str, protocol: int, mode: int | None = None, uid: int | None = None) -> DaemonState:
        """Start the daemon of a GPU (UUID) unless it runs.

        ``mode``: the compute mode that the GPU had before its first claim, to be kept with the daemon. ``uid``: whose
        processes may use it if it has no multi-user server; None: those of the first client's user.
        """
        answer = self._ask(
            "start",
            gpu=gpu,
            program=control_program(self._driver_root, gpu),
            library=cuda_library(self._driver_root) if self._needs_library else "",
            protocol=protocol,
            uid=uid,
            mode=mode,
        )
        try:
            return daemon_state(answer["daemon"])
        except (LookupError, TypeError, ValueError) as error:
            raise self._unreadable(error) from error

    def admit(self, daemon: DaemonState, namespace: str, share: MpsShare, others: Iterable[MpsShare]) -> MpsAccess:
        """Limit a claim's clients to its share; return what its containers get.

        ``others``: the other claims on the GPU. Without namespaces the server's limit is the largest claim's, and the
        environment lowers it to the claim's own.
        """
        directory = gpu_directory(str(self._directory), daemon.gpu)
        if daemon.protocol == NAMESPACES:
            self._limit(daemon.gpu, share, namespace)
            path = f"{directory}/{PIPE}/{SERVER}/{namespace}"
            return MpsAccess(path, path, {"CUDA_MPS_PIPE_DIRECTORY": path})
        self._limit(daemon.gpu, largest([share, *others]), namespace)
        # An ordinal could name another GPU of the container, and a GPU that it does not see drops every limit.
        limits = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{daemon.gpu}={share.mebibytes}M"}
        if share.threads is not None:
            limits["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share.threads)
        pipe = f"{directory}/{PIPE}"
        return MpsAccess(f"{directory}/{CLIENT}", pipe, {"CUDA_MPS_PIPE_DIRECTORY": pipe, **limits})

    def dismiss(self, daemon: DaemonState, namespace: str, others: Sequence[MpsShare]) -> None:
        """Take back what ``admit`` did for a claim; ``others``: the claims that stay. The daemon goes on.

        A daemon that does not run has nothing to take back.
        """
        remaining = largest(others) if others else None
        limits = {} if remaining is None else {"memory": remaining.mebibytes, "threads": remaining.threads}
        self._ask("remove", gpu=daemon.gpu, namespace=namespace, **limits)

    def end_daemon(self, gpu: str) -> None:
        """End the daemon of a GPU and its servers; nothing of them is left. A GPU without a daemon is no error."""
        self._ask("end", gpu=gpu)

    def _limit(self, gpu: str, share: MpsShare, namespace: str) -> None:
        self._ask("limit", gpu=gpu, namespace=namespace, memory=share.mebibytes, threads=share.threads)

    def _ask(self, name: str, **fields: object) -> dict[str, Any]:
        request = json.dumps({"version": VERSION, "request": name, **fields}).encode() + b"\n"
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(REQUEST_TIMEOUT_SECONDS)
                connection.connect(str(self._directory / SOCKET))
                connection.sendall(request)
                with connection.makefile("rb") as file:
                    line = file.readline()
        except OSError as error:
            raise MpsError(
                f"no MPS daemon pod answers on this node: {self._directory / SOCKET}: {error.strerror or error}; see "
                "the pods of DaemonSet tessera-mps, which the chart installs where a setting shares GPUs by MPS"
            ) from error
        try:
            answer: dict[str, Any] = json.loads(line)
            version, complaint = answer["version"], answer.get("error")
        except (LookupError, TypeError, ValueError) as error:
            raise self._unreadable(error) from error
        if not speaks(version):
            raise MpsError(
                f"the MPS daemon pod of this node speaks version {version} of the protocol, this plugin {VERSION}: "
                "delete the pod while no claim on the node uses MPS, so that it starts with the plugin's version"
            )
        if complaint:
            raise MpsError(f"MPS daemon pod of this node: {name}: {complaint}")
        return answer

    def _unreadable(self, error: Exception) -> MpsError:
        return MpsError(f"the MPS daemon pod of this node gave no valid answer: {type(error).__name__}: {error}")
