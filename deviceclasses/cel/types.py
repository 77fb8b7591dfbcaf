"""The types of CEL as its checker knows them, and when one may stand for another.

Source: the CEL language definition ("Gradual type checking"), tried against Kubernetes 1.37's API server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Type:
    """A type by name. ``params``: element of a list, key and value of a map, content of an optional, and so on.

    ``name`` "var" is a type that is found while checking, and ``key`` tells one such type from another.
    """

    name: str
    params: tuple[Type, ...] = ()
    key: str = ""

    def __str__(self) -> str:
        if self.name == "var":
            return "dyn"
        return f"{self.name}({', '.join(map(str, self.params))})" if self.params else self.name


BOOL, BYTES, DOUBLE, INT = Type("bool"), Type("bytes"), Type("double"), Type("int")
NULL, STRING, UINT = Type("null_type"), Type("string"), Type("uint")
DYN, ANY = Type("dyn"), Type("any")
DURATION, TIMESTAMP = Type("google.protobuf.Duration"), Type("google.protobuf.Timestamp")
QUANTITY, SEMVER, URL = Type("kubernetes.Quantity"), Type("kubernetes.Semver"), Type("kubernetes.URL")
IP, CIDR, FORMAT = Type("net.IP"), Type("net.CIDR"), Type("kubernetes.NamedFormat")
DEVICE = Type("kubernetes.DRADevice")

NUMBERS = (INT, UINT, DOUBLE)
COMPARABLE = (INT, UINT, DOUBLE, BOOL, DURATION, TIMESTAMP, STRING, BYTES)
NULLABLE = {"optional_type", *(each.name for each in (DURATION, TIMESTAMP, QUANTITY, SEMVER, URL, IP, CIDR, FORMAT))}


def list_of(element: Type) -> Type:
    return Type("list", (element,))


def map_of(key: Type, value: Type) -> Type:
    return Type("map", (key, value))


def optional_of(content: Type) -> Type:
    return Type("optional_type", (content,))


def type_of_type(content: Type) -> Type:
    return Type("type", (content,))


def param(name: str) -> Type:
    """A parameter of a function's signature: the same type wherever it appears in one call."""
    return Type("var", (), name)


ATTRIBUTES = map_of(STRING, map_of(STRING, ANY))
"""``any``: what an attribute holds is known only for each device."""
CAPACITIES = map_of(STRING, map_of(STRING, QUANTITY))
DEVICE_FIELDS = {
    "driver": STRING,
    "attributes": ATTRIBUTES,
    "capacity": CAPACITIES,
    "allowMultipleAllocations": BOOL,
}
"""Of Kubernetes 1.34 and newer."""


def is_dynamic(one: Type) -> bool:
    """Whether only evaluation can tell what it is."""
    return one.name in ("dyn", "any")


def unwrapped(one: Type) -> Type:
    """What an optional holds; any other type as it is."""
    return one.params[0] if one.name == "optional_type" else one


@dataclass
class Bindings:
    """What the types that are still to be found turned out to be."""

    found: dict[str, Type] = field(default_factory=dict)
    _made: int = 0

    def fresh(self) -> Type:
        """A type that is still to be found."""
        self._made += 1
        return Type("var", (), f"_{self._made}")

    def resolve(self, one: Type, *, final: bool = False) -> Type:
        """``one`` with everything that is known filled in; ``final``: what stays unknown is ``dyn``."""
        if one.name == "var":
            known = self.found.get(one.key)
            if known is not None:
                return self.resolve(known, final=final)
            return DYN if final else one
        if not one.params:
            return one
        return Type(one.name, tuple(self.resolve(each, final=final) for each in one.params))

    def accepts(self, given: Sequence[Type], wanted: Sequence[Type]) -> bool:
        """Whether every type in ``given`` can stand where ``wanted`` says; what that tells is kept only if so."""
        before = dict(self.found)
        if len(given) == len(wanted) and all(map(self._assignable, given, wanted)):
            return True
        self.found = before
        return False

    def _assignable(self, given: Type, wanted: Type) -> bool:
        if wanted.name == "var":
            fits, known = self._substitutes(given, wanted)
            if fits or known:
                return fits
        if given.name == "var":
            return self._substitutes(wanted, given)[0]
        if is_dynamic(given) or is_dynamic(wanted):
            return True
        if "null_type" in (given.name, wanted.name):
            other = wanted if given.name == "null_type" else given
            return other.name in NULLABLE or other.name == "null_type"
        if given.name != wanted.name:
            return False
        if given.name == "type":
            return True
        return len(given.params) == len(wanted.params) and all(map(self._assignable, given.params, wanted.params))

    def _substitutes(self, one: Type, variable: Type) -> tuple[bool, bool]:
        """Whether ``one`` can be what ``variable`` stands for, and whether that was known already."""
        if one == variable:
            return True, True
        known = self.found.get(variable.key)
        if known is None:
            if self._occurs(variable, one):
                return False, False
            self.found[variable.key] = one
            return True, False
        if one == known:
            return True, True
        if not self._assignable(one, known):
            return False, True
        general = most_general(one, known)
        if not self._occurs(variable, general):
            self.found[variable.key] = general
        return True, True

    def _occurs(self, variable: Type, within: Type) -> bool:
        if within == variable:
            return True
        if within.name == "var":
            known = self.found.get(within.key)
            return known is not None and self._occurs(variable, known)
        return any(self._occurs(variable, each) for each in within.params)


def most_general(one: Type, other: Type) -> Type:
    """Of two types that fit each other, the one that says less."""
    return one if _says_no_more(one, other) else other


def _says_no_more(one: Type, other: Type) -> bool:
    if is_dynamic(one) or one.name == "var":
        return True
    if is_dynamic(other) or other.name == "var" or one.name != other.name:
        return False
    if one.name == "type":
        return True
    return len(one.params) == len(other.params) and all(map(_says_no_more, one.params, other.params))
