"""Ports that nobody else gets between the moment one is chosen and the moment somebody listens there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def keep_port(port: int = 0) -> socket.socket:
    """Have the port until the socket is closed: connections are refused, and who sets SO_REUSEADDR may listen.

    The kernel gives such a port to nobody else, neither to a server that takes any nor to a client. A port that was
    only tried and let go belongs to another test's process by the time it is used, once in some hundred runs.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", port))
    return kept


@contextmanager
def kept_port() -> Iterator[int]:
    """A port of this machine for a server of the product to listen at, inside the block."""
    with keep_port() as kept:
        yield int(kept.getsockname()[1])
