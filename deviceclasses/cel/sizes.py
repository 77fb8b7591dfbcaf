"""Bounds for how large a value can be, before there is a device: characters of a string, members of a list or map.

Source: Kubernetes' limits for what a slice may hold, and the arithmetic of its cost estimate, which stops at 2^64-1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deviceclasses.cel.values import UINT_MAX

Path = tuple[str, ...]
"""How a value is reached from a variable; "@keys", "@values" and "@items" stand for any of a map or list."""


def capped(value: int) -> int:
    """The largest number stands for "without bound"."""
    return min(value, UINT_MAX)


def scaled(value: int, factor: float) -> int:
    """``value`` times ``factor``, rounded up."""
    product = float(value) * factor
    return UINT_MAX if product >= float(UINT_MAX) else math.ceil(product)


@dataclass(frozen=True)
class Size:
    least: int
    most: int

    def plus(self, other: Size) -> Size:
        return Size(capped(self.least + other.least), capped(self.most + other.most))

    def times(self, other: Size) -> Size:
        return Size(capped(self.least * other.least), capped(self.most * other.most))

    def or_else(self, other: Size) -> Size:
        """Bounds for what is either."""
        return Size(min(self.least, other.least), max(self.most, other.most))

    def cost(self, factor: float) -> int:
        """Of work that grows with the size, at worst."""
        return scaled(self.most, factor)


def fixed(size: int) -> Size:
    return Size(size, size)


UNKNOWN = Size(0, UINT_MAX)
ONE = fixed(1)

MAX_ENTRIES, MAX_NAME, MAX_DOMAIN, MAX_DRIVER, MAX_VALUE = 32, 32, 63, 63, 64


def of_device(path: Path) -> Size | None:
    """What Kubernetes says of ``device`` and what is below it; None where it says nothing."""
    if path[:1] != ("device",):
        return None
    most = _most(path[1:])
    return None if most is None else Size(0, most)


def _most(path: Path) -> int | None:
    if path == ():
        return 0
    whole = {"driver": MAX_DRIVER, "allowMultipleAllocations": 1}.get(path[0])
    if whole is not None:
        return whole if len(path) == 1 else None
    if path[0] not in ("attributes", "capacity"):
        return None
    return _in_section(path[1:], path[0] == "attributes")


def _in_section(path: Path, has_values: bool) -> int | None:
    """Kubernetes finds a domain only behind brackets, and the values of attributes only."""
    if len(path) > 2:
        return None
    if path[:1] != ("@values",):
        return {(): MAX_ENTRIES, ("@keys",): MAX_DOMAIN}.get(path)
    if len(path) == 1:
        return MAX_ENTRIES
    if path[1] == "@keys":
        return MAX_NAME
    if has_values:
        return MAX_VALUE
    return 0 if path[1] == "@values" else None
