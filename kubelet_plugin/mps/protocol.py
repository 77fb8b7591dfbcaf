"""What the node plugin and the process of the MPS daemons agree on: messages, versions, places.

One connection to the socket carries one request, a JSON object in a line, and its answer. A request has ``version``,
``request`` and its fields; an answer has ``version``, and its fields or ``error``. Both sides ignore fields that they
do not know and read missing ones as their default, so that a side works with one whose version is one higher or
lower: the pods of the MPS daemons are updated by hand, long after the node plugins. A change of the meaning of a
field, or a field that is necessary, needs a new version.

    status gpu                                      ``daemons``: what is in each directory, or in that of the GPU, see
                                                    DaemonState
    start  gpu program library protocol uid mode    start the GPU's daemon unless it runs; ``daemon``
    limit  gpu namespace memory threads             set the limits (MiB, percent): of the namespace (protocol 3), or
                                                    of all servers of the daemon (protocol 2)
    remove gpu namespace memory threads             delete a namespace (protocol 3), or set the limits that the other
                                                    claims leave (protocol 2); nothing if no daemon runs
    end    gpu                                      end the daemon and its servers, remove its directory

Every request may be repeated after a kill of either side at any instruction.

This module, and what the process of the daemons imports, uses little memory: no dataclasses, no pathlib.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

VERSION = 1
DIRECTORY = "/run/tessera-mps"
"""Directory of the socket and of all daemons: the same on the host, in both pods and in containers."""

SOCKET, LOCK = "socket", "lock"
MOST_BYTES = 1 << 16
"""Longest request."""

SERVER = "gpu"
"""Name of the server of a daemon with protocol 3."""

PIPE, CLIENT, LOG, RECORD = "pipe", "client", "log", "daemon.json"
"""In the directory of a GPU: the daemon's pipe directory, the part of it that containers get, logs, a DaemonRecord."""

UUID_CHARACTERS = 17
"""Of a UUID, in the name of its directory: the path of a socket has at most 107 bytes."""

LEGACY, NAMESPACES = 2, 3
"""Protocols of the control daemon: without and with limits by namespace."""

NAMESPACES_SINCE = 615
"""First branch of the NVIDIA driver with protocol 3."""


class DaemonState(NamedTuple):
    """The daemon of a GPU. ``pid``: 0 if it does not run. ``servers``: process ids of its servers.

    ``multi_user``: processes of all users share one server; else those of other users wait until it has no client.
    ``answers``: False if the daemon runs and gives no answer; then its servers and namespaces are not known.
    ``mode``: the compute mode that the GPU had before its first claim, as the node plugin said; None: it is not known.
    """

    gpu: str
    protocol: int = LEGACY
    pid: int = 0
    multi_user: bool = True
    servers: tuple[int, ...] = ()
    namespaces: tuple[str, ...] = ()
    answers: bool = True
    mode: int | None = None


def daemon_state(fields: dict[str, Any]) -> DaemonState:
    """A DaemonState of an answer. Raises TypeError, ValueError: it is none."""
    state = DaemonState(**{name: value for name, value in fields.items() if name in DaemonState._fields})
    return state._replace(servers=tuple(map(int, state.servers)), namespaces=tuple(map(str, state.namespaces)))


def gpu_directory(base: str, gpu: str) -> str:
    """The directory of a GPU (UUID)."""
    return os.path.join(base, gpu[:UUID_CHARACTERS])  # noqa: PTH118 - see the top


def speaks(version: object) -> bool:
    """Whether this side works with one of that version."""
    return isinstance(version, int) and abs(version - VERSION) <= 1
