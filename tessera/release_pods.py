"""The pods of a release: the fields by which commands find controllers, node plugins and their ports."""

from __future__ import annotations

import msgspec

from driver.errors import FatalError
from driver.kube.client import KubeClient
from driver.kube.reads import read_all
from driver.kube.types import Condition, Metadata

ENDED = frozenset({"Succeeded", "Failed"})


class ContainerPort(msgspec.Struct, frozen=True, rename="camel"):
    container_port: int
    name: str = ""


class Container(msgspec.Struct, frozen=True):
    args: tuple[str, ...] = ()
    ports: tuple[ContainerPort, ...] = ()


class ReleasePodSpec(msgspec.Struct, frozen=True, rename="camel"):
    service_account_name: str = ""
    node_name: str = ""
    containers: tuple[Container, ...] = ()


class ReleasePodStatus(msgspec.Struct, frozen=True):
    phase: str = ""
    conditions: tuple[Condition, ...] = ()


class ReleasePod(msgspec.Struct, frozen=True):
    """A pod of a controller or of a node plugin."""

    metadata: Metadata
    spec: ReleasePodSpec
    status: ReleasePodStatus = ReleasePodStatus()

    @property
    def has_ended(self) -> bool:
        return self.status.phase in ENDED

    @property
    def is_ready(self) -> bool:
        ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions)
        return ready and self.metadata.deletion_timestamp is None

    def port(self, name: str) -> int | None:
        """The number of the port with that name; None if there is none."""
        ports = (port for container in self.spec.containers for port in container.ports)
        return next((port.container_port for port in ports if port.name == name), None)


def read_pods(client: KubeClient, namespace: str, labels: str | None = None) -> list[ReleasePod]:
    """The pods of a namespace, those that the selector ``labels`` selects if given. Raises ApiError and FatalError."""
    selectors = None if labels is None else {"labelSelector": labels}
    try:
        return list(read_all(client, f"/api/v1/namespaces/{namespace}/pods", ReleasePod, selectors))
    except msgspec.MsgspecError as error:
        raise FatalError(f"the API server's list of pods in namespace {namespace} can't be read: {error}") from error
