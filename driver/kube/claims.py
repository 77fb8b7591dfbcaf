"""ResourceClaims, as far as a node needs them (``resource.k8s.io/v1``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from driver.errors import ApiError
from driver.kube.paging import Page, pages
from driver.kube.transport import KubeClient

GROUP = "/apis/resource.k8s.io/v1"


class Metadata(msgspec.Struct, frozen=True):
    name: str
    namespace: str
    uid: str


class OpaqueParameters(msgspec.Struct, frozen=True):
    driver: str
    parameters: dict[str, Any] = {}


class Configuration(msgspec.Struct, frozen=True, rename="camel"):
    """One config entry of an allocation; ``source`` is FromClass or FromClaim, no requests means all."""

    source: str = "FromClaim"
    requests: tuple[str, ...] = ()
    opaque: OpaqueParameters | None = None


class Result(msgspec.Struct, frozen=True, rename="camel"):
    """One allocated device."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    share_id: str | None = msgspec.field(default=None, name="shareID")


class DeviceAllocation(msgspec.Struct, frozen=True):
    results: tuple[Result, ...] = ()
    config: tuple[Configuration, ...] = ()


class Allocation(msgspec.Struct, frozen=True):
    devices: DeviceAllocation = DeviceAllocation()


class Consumer(msgspec.Struct, frozen=True):
    resource: str
    name: str
    uid: str = ""


class Status(msgspec.Struct, frozen=True, rename="camel"):
    allocation: Allocation | None = None
    reserved_for: tuple[Consumer, ...] = ()


class Claim(msgspec.Struct, frozen=True):
    """A ResourceClaim; fields the node does not use are not decoded."""

    metadata: Metadata
    status: Status = Status()

    @property
    def pods(self) -> str:
        """The pods it is reserved for, for logs."""
        return ",".join(user.name for user in self.status.reserved_for if user.resource == "pods")


DECODER = msgspec.json.Decoder(Claim)
PAGES = msgspec.json.Decoder(Page[Claim])


def read_claim(client: KubeClient, namespace: str, name: str, *, any_age: bool = False) -> Claim:
    """One GET. Raises ApiError, with status 404 where there is no such claim.

    ``any_age``: an answer from the API server's cache will do, which costs it next to nothing and may be out of date.
    """
    query = {"resourceVersion": "0"} if any_age else None
    body = client.get(f"{GROUP}/namespaces/{namespace}/resourceclaims/{name}", query)
    try:
        return DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise ApiError(f"ResourceClaim {namespace}/{name}: the API server's answer does not parse: {error}") from error


def list_claims(client: KubeClient) -> Iterator[Claim]:
    """Every claim of the cluster, as of one moment: for what happens once in a while. Raises ApiError."""
    try:
        for page in pages(client, f"{GROUP}/resourceclaims", PAGES):
            yield from page.items or ()
    except msgspec.MsgspecError as error:
        raise ApiError(f"listing ResourceClaims: the API server's answer does not parse: {error}") from error
