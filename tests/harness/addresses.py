"""Addresses and ports of a cluster: all on loopback, a pair of /24 networks to each.

Cluster number N has 127.240.N.0/24 for its services, of which the API server really serves the first address on port
443: so the ``kubernetes`` service works for pods on the host network without a kube-proxy. Everything else listens in
127.241.N.0/24: the control plane on .1, node I on .(10 + I), each on its usual port if that is free there.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass

from driver.errors import EnvironmentFault

API_PORT = 443
MAX_NETWORKS = 250
MAX_NODES = 200


@dataclass(frozen=True)
class Network:
    """The loopback networks of cluster ``number``."""

    number: int

    @property
    def service_range(self) -> str:
        return f"127.240.{self.number}.0/24"

    @property
    def api(self) -> str:
        """Where the API server listens: the address of the ``kubernetes`` service."""
        return f"127.240.{self.number}.1"

    @property
    def control_plane(self) -> str:
        return f"127.241.{self.number}.1"

    def node(self, index: int) -> str:
        """The address of node ``index``, counted from 0."""
        return f"127.241.{self.number}.{10 + index}"


def is_free(address: str, port: int) -> bool:
    """Whether something could listen there now. A listener on all addresses of the machine counts as in the way."""
    with socket.socket() as probe:
        # As servers do: connections of a cluster that just ended (TIME_WAIT) are no obstacle, listeners are.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def choose_network(taken: Collection[int], free: Callable[[str, int], bool] = is_free) -> Network:
    """The first network that no other cluster has (``taken``) and whose API address is free.

    The caller holds the lock of the base directory. Raises EnvironmentFault where there is none.
    """
    for number in range(MAX_NETWORKS):
        network = Network(number)
        if number not in taken and free(network.api, API_PORT):
            return network
    raise EnvironmentFault(f"port {API_PORT} is taken on 127.240.0.1 and all {MAX_NETWORKS} addresses like it")


def choose_port(address: str, preferred: int, free: Callable[[str, int], bool] = is_free) -> int:
    """``preferred`` if it is free on ``address``, else one that is."""
    if free(address, preferred):
        return preferred
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
