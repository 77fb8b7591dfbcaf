"""Values of flags that several processes share: driver name, namespace, directories, listen addresses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

DEFAULT_DRIVER = "gpu.tessera.dev"
NVIDIA_DRIVER = "gpu.nvidia.com"
"""The name and attribute domain of NVIDIA's DRA driver."""

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DRIVER_LIMIT = 63
SIMULATED_NODES = Path("/var/lib/tessera/sim")
"""Default directory of the nodes of ``tessera node --gpus sim:...``."""

PORT_LIMIT = 65535
ADDRESS = re.compile(r"(?P<host>[^:\[\]\s]*|\[[0-9A-Fa-f:.]+(%\w+)?\]):(?P<port>[0-9]{1,5})")


def check_driver_name(value: str) -> str:
    """Check a DRA driver's name. Raises ValueError."""
    if len(value) > DRIVER_LIMIT or not SUBDOMAIN.fullmatch(value) or not value[0].isalpha():
        # The letter is CDI's rule: the name is the vendor part of every CDI device (specification, "kind").
        raise ValueError(
            f"must be a DNS subdomain of at most {DRIVER_LIMIT} characters that begins with a letter, "
            f"such as {DEFAULT_DRIVER}"
        )
    return value


def check_namespace(value: str) -> str:
    """Check a namespace's name. Raises ValueError."""
    if not LABEL.fullmatch(value):
        raise ValueError("must be the name of a namespace: a DNS label such as tessera")
    return value


class ListenAddress(NamedTuple):
    """An address to listen on. An empty host means every address of the machine, port 0 any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen_address(value: str) -> ListenAddress:
    """Parse ``HOST:PORT``; an IPv6 host is in brackets. Raises ValueError."""
    match = ADDRESS.fullmatch(value)
    if match is None or int(match["port"]) > PORT_LIMIT:
        raise ValueError(
            f"must be HOST:PORT with a port of 0 to {PORT_LIMIT}, such as 127.0.0.1:9400, [::1]:9400, "
            "or :9400 for every address"
        )
    return ListenAddress(match["host"].strip("[]"), int(match["port"]))


def matching(pattern: re.Pattern[str], meaning: str) -> Callable[[str], str]:
    """A check that the whole value matches ``pattern``; it raises ValueError with the ``meaning``."""

    def parse(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"must be {meaning}")
        return value

    return parse


def one_of(*allowed: str) -> Callable[[str], str]:
    return matching(re.compile("|".join(allowed)), " or ".join(allowed))
