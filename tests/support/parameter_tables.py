"""The tables of the admission policies for parameters and misuse: what the driver accepts, as the chart carries it.

``python -m tests.support.parameter_tables`` writes them anew; a test fails where they are not what the code says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from driver.config.opaque_parameters import GROUPS, devices_for
from driver.config.strict_schema import Strict, accepted_names, kind_of_field, number_range
from driver.model.offer import DeviceKind
from driver.slices.attributes import FACTS
from tests.support.chart import CHART

FILE = CHART / "parameters.json"
LEVELS = 3
"""How deep the policy's expressions look: CEL has no recursion."""


def tables() -> dict[str, Any]:
    """By their use in the policy.

    kinds       by API version, the kinds
    notKinds    by API version, kinds that people know from elsewhere, and why they are not there
    fields      by ``version/kind`` and path of an object (empty: the parameters themselves), its fields
    values      by ``version/kind`` and path of a field that is neither object nor number, its values
    numbers     by ``version/kind`` and path of a field that is a number, the lowest and the highest
    refused     by ``version/kind`` and path of an object, names in it that people know from elsewhere, and why not
    serves      by ``version/kind``, the types of devices that it is for
    attributes  by name, the types of devices that may have it
    """
    everything = [
        (f"{version}/{kind}", model) for version, group in GROUPS.items() for kind, model in group.kinds.items()
    ]
    objects = {name: dict(_objects(model)) for name, model in everything}
    return {
        "kinds": {version: [*group.kinds] for version, group in GROUPS.items()},
        "notKinds": {version: dict(group.refused) for version, group in GROUPS.items()},
        "fields": {
            name: {path: accepted_names(each) for path, each in found.items()} for name, found in objects.items()
        },
        "values": {name: dict(_values(model)) for name, model in everything},
        "numbers": {name: dict(_numbers(model)) for name, model in everything},
        "refused": {
            name: {path: dict(each.REFUSED) for path, each in found.items()} for name, found in objects.items()
        },
        "serves": {name: _serves(*name.rsplit("/", 1)) for name, _ in everything},
        "attributes": dict(_attributes()),
    }


def _fields(model: type[Strict], place: str) -> Iterator[tuple[str, Any]]:
    """Path and type of every field below."""
    for field in msgspec.structs.fields(model):
        path, kind = f"{place}{field.encode_name}", kind_of_field(field)
        yield path, kind
        if _is_object(kind):
            yield from _fields(kind, f"{path}.")


def _objects(model: type[Strict]) -> Iterator[tuple[str, type[Strict]]]:
    yield "", model
    yield from ((path, kind) for path, kind in _fields(model, "") if _is_object(kind))


def _values(model: type[Strict]) -> Iterator[tuple[str, list[str]]]:
    fields = ((path, kind) for path, kind in _fields(model, "") if not _is_object(kind) and not number_range(kind))
    yield from ((path, accepted_names(kind)) for path, kind in fields)


def _numbers(model: type[Strict]) -> Iterator[tuple[str, list[int]]]:
    yield from ((path, [*limits]) for path, kind in _fields(model, "") if (limits := number_range(kind)))


def _serves(version: str, kind: str) -> list[str]:
    served = devices_for({"apiVersion": version, "kind": kind})
    return [device.value for device in DeviceKind if device in served]


def _is_object(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Strict)


def _attributes() -> Iterator[tuple[str, list[str]]]:
    names = dict.fromkeys(fact.name for facts in FACTS.values() for fact in facts)
    for name in names:
        yield name, [kind.value for kind, facts in FACTS.items() if any(fact.name == name for fact in facts)]


def text() -> str:
    return json.dumps(tables(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
