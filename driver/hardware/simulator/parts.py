"""What a description is made of: frozen objects, read from YAML or JSON with everything that is wrong told at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo


class Part(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """An object without any fields but its own, which are spelled in camelCase."""

    def replaced(self, **changes: Any) -> Self:
        """The same with other values of some fields, unchecked."""
        return msgspec.structs.replace(self, **changes)


def faults(kind: type[Part], content: object, place: str = "") -> Iterator[str]:
    """A line for each thing that keeps ``content`` (parsed YAML or JSON) from being a ``kind``, with its place."""
    # msgspec itself would stop at the first.
    if not isinstance(content, Mapping):
        yield f"{place or '(the whole)'}: must be an object"
        return
    known = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for name, field in known.items():
        yield from _of_field(field, content, f"{place}.{name}".removeprefix("."))
    for name in content:
        if name not in known:
            yield f"{place}.{name}: no such field; accepted: {', '.join(known)}".removeprefix(".")


def _of_field(field: FieldInfo, content: Mapping[str, object], path: str) -> Iterator[str]:
    if field.encode_name not in content:
        if field.required:
            yield f"{path}: is missing"
        return
    found = content[field.encode_name]
    inside = list(_inside(field.type, found, path))
    yield from inside
    try:
        if not inside:
            msgspec.convert(found, field.type)
    except msgspec.ValidationError as error:
        yield f"{path}: {error}"


def _inside(type_: Any, found: object, path: str) -> Iterator[str]:
    """What is wrong with an object, or with the objects of a list."""
    if get_origin(type_) is Annotated:
        type_ = get_args(type_)[0]
    kind = next((each for each in (type_, *get_args(type_)) if isinstance(each, type) and issubclass(each, Part)), None)
    if kind is None or found is None:
        return
    if get_origin(type_) is not tuple:
        yield from faults(kind, found, path)
    elif isinstance(found, list):
        for index, each in enumerate(found):
            yield from faults(kind, each, f"{path}[{index}]")
