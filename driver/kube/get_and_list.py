"""Typed reads: lists page by page, single claims, texts of ConfigMaps, the owner reference of a Node."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from driver.errors import NOT_FOUND, ApiError, FatalError, accepted_status
from driver.kube.client import KubeClient, Object
from driver.kube.tolerant_json import decode
from driver.kube.types import Claim, Key, Node, Pod, PodDetails

RESOURCE_GROUP = "/apis/resource.k8s.io/v1"

PAGE_SIZE = 500

T = TypeVar("T")


class ListMeta(msgspec.Struct, frozen=True, rename={"resource_version": "resourceVersion", "next_page": "continue"}):
    resource_version: str
    next_page: str = ""


class Page(msgspec.Struct, Generic[T], frozen=True):
    metadata: ListMeta
    items: list[T] | None = None


def pages(
    client: KubeClient, path: str, read: Callable[[bytes], Page[T]], selectors: Mapping[str, str] | None = None
) -> Iterator[Page[T]]:
    """All pages of a list as of one moment, decoded by ``read``. Raises ApiError and the errors of ``read``."""
    query = {**(selectors or {}), "limit": str(PAGE_SIZE)}
    while True:
        page = read(client.get(path, query))
        yield page
        if not page.metadata.next_page:
            return
        query["continue"] = page.metadata.next_page


def page_reader(kind: type[T]) -> Callable[[bytes], Page[T]]:
    """A function that decodes a page of objects of ``kind``. It raises MsgspecError if the data is no such list."""
    decoder: msgspec.json.Decoder[Page[T]] = msgspec.json.Decoder(Page[kind])  # type: ignore[valid-type]
    return partial(decode, decoder=decoder)


def read_all(client: KubeClient, path: str, kind: type[T], selectors: Mapping[str, str] | None = None) -> Iterator[T]:
    """All objects of a list, with the fields of ``kind``. Raises ApiError, and MsgspecError if one is not of it."""
    for page in pages(client, path, page_reader(kind), selectors):
        yield from page.items or ()


def read_object(client: KubeClient, path: str, decoder: msgspec.json.Decoder[T], *, any_age: bool = False) -> T:
    """Read one object. Raises ApiError, with status 404 if it does not exist.

    ``any_age`` allows an answer from the API server's cache, which costs it little and may be out of date.
    """
    body = client.get(path, {"resourceVersion": "0"} if any_age else None)
    try:
        return decode(body, decoder)
    except msgspec.MsgspecError as error:
        raise ApiError(f"GET {path}: the API server's answer does not parse: {error}") from error


CLAIM, NODE, POD = msgspec.json.Decoder(Claim), msgspec.json.Decoder(Node), msgspec.json.Decoder(Pod)


def read_claim(client: KubeClient, namespace: str, name: str, *, any_age: bool = False) -> Claim:
    """Read a claim, as ``read_object`` does."""
    path = f"{RESOURCE_GROUP}/namespaces/{namespace}/resourceclaims/{name}"
    return read_object(client, path, CLAIM, any_age=any_age)


def find_pod(client: KubeClient, key: Key) -> Pod | None:
    """The pod; None if there is none. Raises ApiError."""
    with accepted_status(NOT_FOUND):
        return read_object(client, f"/api/v1/namespaces/{key.namespace}/pods/{key.name}", POD)
    return None


def list_claims(client: KubeClient) -> Iterator[Claim]:
    """All claims of the cluster, as of one moment. Raises ApiError."""
    try:
        yield from read_all(client, f"{RESOURCE_GROUP}/resourceclaims", Claim)
    except msgspec.MsgspecError as error:
        raise ApiError(f"listing ResourceClaims: the API server's answer does not parse: {error}") from error


def config_map_text(client: KubeClient, namespace: str, name: str, key: str) -> str:
    """The text of one key of a ConfigMap; "" if there is none. Raises ApiError."""
    stored = client.find(f"/api/v1/namespaces/{namespace}/configmaps/{name}") or {}
    return str((stored.get("data") or {}).get(key, ""))


def owner_reference(client: KubeClient, name: str) -> Mapping[str, Any]:
    """An owner reference to the Node ``name``: objects with it are deleted with the Node. Raises ApiError."""
    try:
        node = read_object(client, f"/api/v1/nodes/{name}", NODE)
    except ApiError as error:
        raise ApiError(f"--node-name {name}: its Node object can't be read: {error}", error.status) from error
    if not node.metadata.uid:
        raise ApiError(f"--node-name {name}: what the API server sent is no Node object: it has no uid")
    return {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.metadata.uid, "controller": True}


def read_pods(client: KubeClient, namespace: str, labels: str | None = None) -> list[PodDetails]:
    """The pods of a namespace, those that the selector ``labels`` selects if given. Raises ApiError and FatalError."""
    selectors = None if labels is None else {"labelSelector": labels}
    try:
        return list(read_all(client, f"/api/v1/namespaces/{namespace}/pods", PodDetails, selectors))
    except msgspec.MsgspecError as error:
        raise FatalError(f"the API server's list of pods in namespace {namespace} can't be read: {error}") from error


def minor_version(version: Object) -> int | None:
    """The minor version in the API server's ``/version``, such as 36 for "36+"; None if it is not a number."""
    digits = re.match(r"\d+", str(version.get("minor", "")))
    return None if digits is None else int(digits[0])
