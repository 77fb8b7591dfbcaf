"""Addresses on which a process listens, as a flag gives them."""

from __future__ import annotations

import re
from typing import NamedTuple

PORT_LIMIT = 65535

ADDRESS = re.compile(r"(?P<host>[^:\[\]\s]*|\[[0-9A-Fa-f:.]+(%\w+)?\]):(?P<port>[0-9]{1,5})")


class ListenAddress(NamedTuple):
    """An empty host means every address of the machine, port 0 any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen_address(value: str) -> ListenAddress:
    """``HOST:PORT``, the host perhaps an IPv6 address in brackets. Raises ValueError."""
    found = ADDRESS.fullmatch(value)
    if found is None or int(found["port"]) > PORT_LIMIT:
        raise ValueError(
            f"must be HOST:PORT with a port of 0 to {PORT_LIMIT}, such as 127.0.0.1:9400, [::1]:9400, "
            "or :9400 for every address"
        )
    return ListenAddress(found["host"].strip("[]"), int(found["port"]))
