"""Strict schemas of opaque parameters: every fault at once, each with path, value and what would be accepted.

null counts as left out, as everywhere in Kubernetes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from driver.config.suggestions import meant
from driver.errors import ClaimError

SHOWN = 60
"""Characters of a wrong value that an error repeats."""


class Strict(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """An object without any fields but its own, which are spelled in camelCase. None of them is needed.

    A field's type is another Strict, a Literal or an Enum of strings, or an int with ``msgspec.Meta(ge=..., le=...)``,
    each ``| None``. ``REFUSED`` says why a field, or a value of one of its fields, that people know from elsewhere is
    not there.
    """

    REFUSED: ClassVar[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Fault:
    """One error: path (``sharing.strategy``; empty for the object itself), found value, message."""

    path: str
    found: str
    message: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.path, self.found) if part) + f": {self.message}"


class InvalidParameters(ClaimError):
    """Opaque parameters are not valid; lists all errors."""

    def __init__(self, where: str, faults: Sequence[Fault]) -> None:
        super().__init__(f"{where}: opaque parameters are not valid: {'; '.join(map(str, faults))}")
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Group:
    """The kinds of one API version; ``refused`` says why a kind that people know from elsewhere is not there."""

    api_version: str
    kinds: Mapping[str, type[Strict]]
    refused: Mapping[str, str]

    def __post_init__(self) -> None:
        # Two threads that are the first to use a type end the process (see
        # kubelet_plugin/checkpoint/records.py): claims of one call are worked on at once.
        for kind in self.kinds.values():
            msgspec.json.Decoder(kind)


def shown(found: object) -> str:
    """A value as an error repeats it: short, and objects and lists only by their type."""
    if isinstance(found, Mapping):
        return "{...}" if found else "{}"
    if isinstance(found, list | tuple):
        return "[...]" if found else "[]"
    text = json.dumps(found, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def wrong_name(path: str, found: object, known: Sequence[str], refused: Mapping[str, str]) -> Fault:
    """The fault of a value that should be one of ``known``."""
    accepted = f"accepted: {', '.join(known)}"
    if found is None:
        return Fault(path, "", f"is missing; {accepted}")
    if not isinstance(found, str):
        return Fault(path, shown(found), f"must be a string; {accepted}")
    reason = refused.get(found)
    return Fault(
        path, shown(found), f"{reason}; {accepted}" if reason else f"is not known; {accepted}{meant(found, known)}"
    )


def faults_of(model: type[Strict], settings: Mapping[Any, Any], place: str = "") -> Iterator[Fault]:
    """All faults of ``settings`` (without apiVersion and kind) as a ``model``; ``place``: the path to them, with a dot.

    msgspec itself stops at the first fault, and makes no suggestions.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(model)}
    for name, value in settings.items():
        path = f"{place}{name}"
        if not isinstance(name, str):
            yield Fault(path, "", "is no field: names of fields are strings")
        elif name not in fields:
            yield _unknown_field(model, path, name, value)
        elif value is not None:
            yield from _wrong_value(model, fields[name], path, value)


def _wrong_value(model: type[Strict], field: FieldInfo, path: str, value: object) -> Iterator[Fault]:
    kind = kind_of_field(field)
    if limits := number_range(kind):
        low, high = limits
        if type(value) is not int or not low <= value <= high:
            yield Fault(path, shown(value), f"must be a whole number from {low} to {high}")
        return
    accepted = accepted_names(kind)
    if not (isinstance(kind, type) and issubclass(kind, Strict)):
        if value not in accepted:
            yield wrong_name(path, value, accepted, model.REFUSED)
    elif isinstance(value, Mapping):
        yield from faults_of(kind, value, f"{path}.")
    else:
        yield Fault(path, shown(value), f"must be an object with fields {', '.join(accepted)}, or left out")


def _unknown_field(model: type[Strict], path: str, name: str, value: object) -> Fault:
    names = accepted_names(model)
    reason = model.REFUSED.get(name)
    accepted = f"accepted: {', '.join(names)}" if names else "this kind has no settings"
    message = f"{reason}; {accepted}" if reason else f"no such field; {accepted}{meant(name, names)}"
    return Fault(path, shown(value), message)


def kind_of_field(field: FieldInfo) -> Any:
    """Its type without ``| None``."""
    [kind] = [alternative for alternative in get_args(field.type) if alternative is not NoneType]
    return kind


def number_range(kind: Any) -> tuple[int, int] | None:
    """The lowest and the highest number of a field that is a number."""
    if get_origin(kind) is not Annotated:
        return None
    _, limits = get_args(kind)
    return limits.ge, limits.le


def accepted_names(kind: Any) -> list[str]:
    """Accepted values of a Literal or enum, or the field names of an object."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if issubclass(kind, Enum):
        return [member.value for member in kind]
    return [field.encode_name for field in msgspec.structs.fields(kind)]
