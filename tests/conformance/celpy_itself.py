"""How cel-python's own evaluator does on the table: ``python -m tests.conformance.celpy_itself``.

It is given what it needs for a fair try: ``quantity`` and ``semver`` values that compare, a map that raises for a
missing name and is empty for a missing domain. It has no checker, so refusals are counted apart from answers. Says
why ``deviceclasses/cel`` parses and evaluates by itself.
"""

from __future__ import annotations

import warnings
from collections import Counter
from functools import total_ordering
from typing import Any

import celpy
from celpy import celtypes
from celpy.adapter import json_to_cel

from deviceclasses.cel.engine import from_slice_device
from deviceclasses.cel.library.quantity import parse_quantity
from deviceclasses.cel.library.semver import parse_semver
from deviceclasses.cel.values import compare
from tests.conformance import table
from tests.conformance.devices import DEVICES, entry


@total_ordering
class Comparable:
    """A quantity or a version."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Comparable) and compare(self.value, other.value) == 0

    def __lt__(self, other: Comparable) -> bool:
        return compare(self.value, other.value) < 0

    def __hash__(self) -> int:
        return 0


class Domains(celtypes.MapType):
    """A domain that is missing is an empty map."""

    def __missing__(self, key: object) -> celtypes.MapType:
        return celtypes.MapType({})


FUNCTIONS: Any = {
    "quantity": lambda text: Comparable(parse_quantity(str(text))),
    "semver": lambda text: Comparable(parse_semver(str(text))),
    "compareTo": lambda one, other: celtypes.IntType(compare(one.value, other.value)),
    "isGreaterThan": lambda one, other: celtypes.BoolType(compare(one.value, other.value) > 0),
    "isLessThan": lambda one, other: celtypes.BoolType(compare(one.value, other.value) < 0),
}


def converted(value: Any) -> Any:
    if isinstance(value, (bool, int, str)):
        return json_to_cel(value)
    if isinstance(value, tuple):
        return celtypes.ListType([converted(each) for each in value])
    return Comparable(value)


def activation(name: str) -> dict[str, Any]:
    driver, _ = DEVICES[name]
    device = from_slice_device(driver, entry(name))

    def domains(found: Any) -> Domains:
        maps = {domain: {key: converted(value) for key, value in of.items()} for domain, of in found.items()}
        return Domains(
            {
                celtypes.StringType(d): celtypes.MapType({celtypes.StringType(k): v for k, v in m.items()})
                for d, m in maps.items()
            }
        )

    return {
        "device": celtypes.MapType(
            {
                celtypes.StringType("driver"): celtypes.StringType(driver),
                celtypes.StringType("allowMultipleAllocations"): celtypes.BoolType(device.allow_multiple_allocations),
                celtypes.StringType("attributes"): domains(device.attributes),
                celtypes.StringType("capacity"): domains(device.capacity),
            }
        )
    }


def verdict(program: Any, device: str) -> bool | str:
    try:
        value = program.evaluate(activation(device))
    except Exception:  # noqa: BLE001 - whatever it raises is its answer
        return "error"
    return bool(value) if isinstance(value, celtypes.BoolType) else "error"


def main() -> None:
    warnings.simplefilter("ignore")
    environment = celpy.Environment(runner_class=celpy.InterpretedRunner)
    found: Counter[str] = Counter()
    for name, row in table.read().items():
        if name.startswith(("cost", "limit")):  # it has no limit: some of these would take all memory
            found["about cost, left out"] += 1
            continue
        try:
            program = environment.program(environment.compile(row.expression), FUNCTIONS)
        except Exception:  # noqa: BLE001
            found["valid, refused" if row.valid else "invalid, refused"] += 1
            continue
        if not row.valid:
            found["invalid, accepted"] += 1
            continue
        for device, expected in row.devices.items():
            answer = verdict(program, device)
            found["right" if answer == expected else "no answer" if answer == "error" else "wrong answer"] += 1
    print(", ".join(f"{what}: {count}" for what, count in sorted(found.items())))


if __name__ == "__main__":
    main()
