"""Lists of any resource, page by page, as of one moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

import msgspec

from driver.kube.transport import KubeClient, Object

PAGE = 500
"""Objects of one answer."""

T = TypeVar("T")


class ListMeta(msgspec.Struct, frozen=True, rename={"resource_version": "resourceVersion", "next_page": "continue"}):
    resource_version: str
    next_page: str = ""


class Page(msgspec.Struct, Generic[T], frozen=True):
    """One page of a list."""

    metadata: ListMeta
    items: list[T] | None = None


def pages(
    client: KubeClient, path: str, decoder: msgspec.json.Decoder[Page[T]], selectors: Mapping[str, str] | None = None
) -> Iterator[Page[T]]:
    """Every page of a list. Raises ApiError, and MsgspecError where an answer is no list."""
    query = {**(selectors or {}), "limit": str(PAGE)}
    while True:
        page = decoder.decode(client.get(path, query))
        yield page
        if not page.metadata.next_page:
            return
        query["continue"] = page.metadata.next_page


_OBJECTS = msgspec.json.Decoder(Page[Object])


def objects(client: KubeClient, path: str, selectors: Mapping[str, str] | None = None) -> Iterator[Object]:
    """Every object of a list, whole: for commands, which ask once. Raises as ``pages`` does."""
    for page in pages(client, path, _OBJECTS, selectors):
        yield from page.items or ()
