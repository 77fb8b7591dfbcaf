"""Input and output of lint: the documents of a file, their kinds and fields, and the findings about them (pure).

kubectl refuses fields that the API does not have, other clients drop them silently. The API server checks everything
else (values, lengths, required fields). Source: Kubernetes 1.37, ``staging/src/k8s.io/api/resource/v1/types.go``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Any

from driver.config.strict_schema import shown
from driver.config.suggestions import meant, nearest


class Severity(StrEnum):
    """Severity of a finding. A warning may be correct in a cluster with other classes or drivers."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file, decoded; ``number`` counts from 1."""

    file: str
    number: int
    content: object


@dataclass(frozen=True, slots=True)
class Issue:
    """One problem in an object: field, value found, and message with what would be accepted."""

    path: str
    value: str
    message: str
    severity: Severity = Severity.ERROR


@dataclass(frozen=True, slots=True)
class Finding:
    """An issue with its document and its object (``DeviceClass gpu-dev``)."""

    file: str
    document: int
    object: str
    path: str
    value: str
    message: str
    severity: Severity


GROUP = "resource.k8s.io"
VERSION = f"{GROUP}/v1"
SPEC = {"DeviceClass": "spec", "ResourceClaim": "spec.devices", "ResourceClaimTemplate": "spec.spec.devices"}
"""The kinds that are checked, and the path of their settings."""
OTHER_KINDS = ("ResourceSlice", "DeviceTaintRule", "ResourcePoolStatusRequest")
"""The other kinds of the group, which are ignored."""

MIN_SIMILARITY = 0.8
"""Minimum similarity, from 0 to 1, of a misspelt name and the right one."""


def text(owner: Mapping[str, Any], field: str) -> str:
    """A string field; empty if it is missing or not a string."""
    found = owner.get(field)
    return found if isinstance(found, str) else ""


def kind_of(content: object) -> str | None:
    """The kind of an object that the rules check, else None."""
    if not isinstance(content, Mapping) or not _of_our_group(content):
        return None
    kind = text(content, "kind")
    return kind if kind in SPEC else None


def misspelt(name: str, known: Sequence[str]) -> str | None:
    """The name in ``known`` of which ``name`` is probably a misspelling, else None."""
    close = nearest(name, known)
    if name in known or close is None:
        return None
    return close if SequenceMatcher(None, name.casefold(), close.casefold()).ratio() >= MIN_SIMILARITY else None


def almost(path: str, value: str, known: Sequence[str], what: str) -> Iterator[Issue]:
    """A warning about a value that is probably a misspelling of one in ``known``; none for any other value."""
    if close := misspelt(value, known):
        yield Issue(path, shown(value), f"is almost {what}; did you mean {close}?", Severity.WARNING)


def items_of(content: object) -> Iterator[object]:
    """The objects of a document. The items of a list from the API server get the kind that the list implies."""
    kind = text(content, "kind") if isinstance(content, Mapping) else ""
    items = content.get("items") if isinstance(content, Mapping) else None
    one = kind.removesuffix("List")
    if not kind.endswith("List") or one not in {"", *SPEC} or not isinstance(items, list) or not items:
        yield content
        return
    implied = {"apiVersion": text(content, "apiVersion"), "kind": one} if one and isinstance(content, Mapping) else {}
    yield from ({**implied, **item} if isinstance(item, Mapping) else item for item in items)


def wrong_kind(content: Mapping[str, Any]) -> Iterator[Issue]:
    """An issue for a kind that does not exist in resource.k8s.io."""
    kind = text(content, "kind")
    if text(content, "apiVersion").startswith(f"{GROUP}/") and kind.removesuffix("List") not in {*SPEC, *OTHER_KINDS}:
        yield Issue("kind", shown(kind), f"no such kind in {GROUP}{meant(kind, (*SPEC, *OTHER_KINDS))}")


def nothing_to_check(paths: Sequence[str], documents: Sequence[Document]) -> Finding:
    """The finding about files without any object that lint checks."""
    there = dict.fromkeys(_described(each.content) for each in documents if each.content is not None)
    contents = f"there is {', '.join(there)}" if there else "it is empty"
    message = f"nothing here is a DeviceClass, ResourceClaim or ResourceClaimTemplate: {contents}"
    return Finding(", ".join(paths), 1, "-", "", "", message, Severity.ERROR)


def _of_our_group(content: Mapping[str, Any]) -> bool:
    """Whether an object is of resource.k8s.io, or lacks the group or misspells it."""
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


Fields = Mapping[str, Any]
"""The fields of an object, or of each object of a list, with their own fields; ANYTHING is not checked."""
ANYTHING: Fields | None = None


def _plain(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, ANYTHING)


METADATA = _plain(
    "name",
    "generateName",
    "namespace",
    "labels",
    "annotations",
    "finalizers",
    "ownerReferences",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "selfLink",
)
SELECTORS = {"cel": _plain("expression")}
OPAQUE = _plain("driver", "parameters")
REQUEST = {
    **_plain("deviceClassName", "allocationMode", "count"),
    "selectors": SELECTORS,
    "capacity": _plain("requests"),
    "tolerations": _plain("key", "operator", "value", "effect", "tolerationSeconds"),
    "derivedAttributes": _plain("name", "expression"),
}
CLAIM = {
    "devices": {
        "requests": {
            **_plain("name"),
            "exactly": {**REQUEST, **_plain("adminAccess")},
            "firstAvailable": {**_plain("name"), **REQUEST},
        },
        "constraints": _plain("requests", "matchAttribute", "distinctAttribute"),
        "config": {**_plain("requests"), "opaque": OPAQUE},
    }
}
COMMON = {**_plain("apiVersion", "kind"), "metadata": METADATA}
KINDS: Mapping[str, Fields] = {
    "DeviceClass": {
        **COMMON,
        "spec": {**_plain("extendedResourceName"), "selectors": SELECTORS, "config": {"opaque": OPAQUE}},
    },
    "ResourceClaim": {**COMMON, "spec": CLAIM, **_plain("status")},
    "ResourceClaimTemplate": {**COMMON, "spec": {"metadata": METADATA, "spec": CLAIM}},
}


def shape_issues(content: Mapping[str, Any], kind: str) -> Iterator[Issue]:
    """Issues for an API version that is not served and for unknown fields."""
    version = content.get("apiVersion")
    if version != VERSION:
        message = f"Kubernetes serves {VERSION}; other versions only if an administrator enables them"
        yield Issue("apiVersion", shown(version), message if text(content, "apiVersion") else f"must be {VERSION}")
    yield from _unknown(content, KINDS[kind], "")


def _unknown(content: Mapping[Any, Any], known: Fields, path: str) -> Iterator[Issue]:
    for name, found in content.items():
        place = f"{path}{name}"
        if not isinstance(name, str) or name not in known:
            yield Issue(place, shown(found), _no_such(str(name), known))
        elif known[name] is not ANYTHING:
            several = isinstance(found, list)
            for index, each in enumerate(found if several else [found]):
                if isinstance(each, Mapping):
                    yield from _unknown(each, known[name], f"{place}[{index}]." if several else f"{place}.")


def _no_such(name: str, known: Fields) -> str:
    inside = [field for field, fields in known.items() if fields is not ANYTHING and name in fields]
    if inside:
        return f"no such field here; it belongs under {' or '.join(inside)}"
    close = nearest(name, known)
    return f"no such field; did you mean {close}?" if close else f"no such field; accepted: {', '.join(known)}"
