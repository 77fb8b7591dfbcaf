"""Strict schemas of opaque parameters: every fault at once, each with path, value and what would be accepted.

null counts as left out, as everywhere in Kubernetes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from driver.config.names import meant
from driver.errors import ClaimError

SHOWN = 60
"""Characters of a wrong value that an error repeats."""


class Strict(BaseModel):
    """An object without any fields but its own, which are spelled in camelCase.

    ``REFUSED`` says why a field, or a value of one of its fields, that people know from elsewhere is not there.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", alias_generator=to_camel)

    REFUSED: ClassVar[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong: where (``sharing.strategy``; empty for the object itself), what was found, what would do."""

    path: str
    found: str
    message: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.path, self.found) if part) + f": {self.message}"


class InvalidParameters(ClaimError):
    """Opaque parameters that are not valid, with everything that is wrong with them."""

    def __init__(self, where: str, faults: Sequence[Fault]) -> None:
        super().__init__(f"{where}: opaque parameters are not valid: {'; '.join(map(str, faults))}")
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Group:
    """The kinds of one API version; ``refused`` says why a kind that people know from elsewhere is not there."""

    api_version: str
    kinds: Mapping[str, type[Strict]]
    refused: Mapping[str, str]


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


def validate(model: type[Strict], settings: Mapping[str, Any]) -> Strict | list[Fault]:
    """``settings`` (apiVersion and kind taken off) as ``model``, or all that is wrong with them."""
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        return [_fault(model, detail) for detail in error.errors(include_url=False)]


def _fault(model: type[Strict], detail: ErrorDetails) -> Fault:
    *parents, last = detail["loc"]
    found: object = detail["input"]
    path, name = ".".join(map(str, detail["loc"])), str(last)
    for parent in parents:
        model = _core(_field(model, str(parent)))
    if detail["type"] == "extra_forbidden":
        return _unknown_field(model, path, name, found)
    if detail["type"] == "model_type":
        fields = _accepted(_core(_field(model, name)))
        return Fault(path, shown(found), f"must be an object with fields {', '.join(fields)}, or left out")
    if detail["type"] in {"enum", "literal_error"}:
        return wrong_name(path, found, _accepted(_core(_field(model, name))), model.REFUSED)
    if detail["type"] == "invalid_key":
        return Fault(path, "", "is no field: names of fields are strings")
    return Fault(path, shown(found), detail["msg"])


def _unknown_field(model: type[Strict], path: str, name: str, found: object) -> Fault:
    known = _accepted(model)
    reason = model.REFUSED.get(name)
    accepted = f"accepted: {', '.join(known)}" if known else "this kind has no settings"
    message = f"{reason}; {accepted}" if reason else f"no such field; {accepted}{meant(name, known)}"
    return Fault(path, shown(found), message)


def _field(model: type[Strict], name: str) -> Any:
    return next(field.annotation for field in model.model_fields.values() if field.alias == name)


def _core(annotation: Any) -> Any:
    """``annotation`` without Annotated and ``| None``."""
    if get_origin(annotation) is Literal:
        return annotation
    inner = [argument for argument in get_args(annotation) if argument is not NoneType]
    if get_origin(annotation) is Annotated or inner:
        return _core(inner[0])
    return annotation


def _accepted(core: Any) -> list[str]:
    """The values of a Literal or enum, the fields of an object."""
    if get_origin(core) is Literal:
        return list(get_args(core))
    if issubclass(core, Enum):
        return [member.value for member in core]
    return [str(field.alias) for field in core.model_fields.values()]
