"""Which documents hold something to check, and what is said where none does (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from deviceclasses.findings import Document, Finding, Issue, Severity
from deviceclasses.requests import text
from driver.config.names import meant, nearest
from driver.config.schema import shown

GROUP = "resource.k8s.io"
VERSION = f"{GROUP}/v1"
SPEC = {"DeviceClass": "spec", "ResourceClaim": "spec.devices", "ResourceClaimTemplate": "spec.spec.devices"}
"""The kinds that are looked at, and where their settings are."""
BESIDE = ("ResourceSlice", "DeviceTaintRule", "ResourcePoolStatusRequest")
"""The other kinds of the group, which are passed over."""

SAME = 0.8
"""How like two names are, from 0 to 1, of which one is the other with a slip in it."""


def kind_of(content: object) -> str | None:
    """The kind of an object that the rules look at, else None."""
    if not isinstance(content, Mapping) or not _of_our_group(content):
        return None
    kind = text(content, "kind")
    return kind if kind in SPEC else None


def misspelt(name: str, known: Sequence[str]) -> str | None:
    """Which of ``known`` was meant, where ``name`` is almost one of them. Less like, it is somebody else's."""
    close = nearest(name, known)
    if name in known or close is None:
        return None
    return close if SequenceMatcher(None, name.casefold(), close.casefold()).ratio() >= SAME else None


def items_of(content: object) -> Iterator[object]:
    """The objects of a document: a list's items, which as the API server gives them don't say what they are."""
    kind = text(content, "kind") if isinstance(content, Mapping) else ""
    items = content.get("items") if isinstance(content, Mapping) else None
    one = kind.removesuffix("List")
    if not kind.endswith("List") or one not in {"", *SPEC} or not isinstance(items, list) or not items:
        yield content
        return
    told = {"apiVersion": text(content, "apiVersion"), "kind": one} if one and isinstance(content, Mapping) else {}
    yield from ({**told, **item} if isinstance(item, Mapping) else item for item in items)


def wrong_kind(content: Mapping[str, Any]) -> Iterator[Issue]:
    """An object of our group whose kind there is not; one without a group may be of a kind that others know."""
    kind = text(content, "kind")
    if text(content, "apiVersion").startswith(f"{GROUP}/") and kind.removesuffix("List") not in {*SPEC, *BESIDE}:
        yield Issue("kind", shown(kind), f"no such kind in {GROUP}{meant(kind, (*SPEC, *BESIDE))}")


def nothing_to_check(paths: Sequence[str], documents: Sequence[Document]) -> Finding:
    """The finding of files in which there is no object that lint looks at."""
    there = dict.fromkeys(_described(each.content) for each in documents if each.content is not None)
    told = f"there is {', '.join(there)}" if there else "it is empty"
    message = f"nothing here is a DeviceClass, ResourceClaim or ResourceClaimTemplate: {told}"
    return Finding(", ".join(paths), 1, "-", "", "", message, Severity.ERROR)


def _of_our_group(content: Mapping[str, Any]) -> bool:
    """Whether it is meant to be: without a group, or with a slip in it, our kinds are no others."""
    group, slash, _ = text(content, "apiVersion").partition("/")
    return not slash or group == GROUP or misspelt(group, [GROUP]) is not None


def _described(content: object) -> str:
    if isinstance(content, Mapping):
        kind = text(content, "kind")
        if kind.endswith("List") and not content.get("items"):
            return f"an empty {kind}"
        close = misspelt(kind, list(SPEC))
        return f"{kind} (did you mean {close}?)" if close else kind or "an object without kind"
    return "a list" if isinstance(content, list) else "text"
