"""The types of the checker, and the rules for assigning one to another.

Source: the CEL language definition ("Gradual type checking"), tried against Kubernetes 1.37's API server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from deviceclasses.cel.values import WorkLimitError, spend

MAX_TYPE_SIZE = 1000
"""Maximum names in one type. ``{x: x}`` doubles the type of ``x``, so a short expression can build a huge type."""


@dataclass(frozen=True)
class Type:
    """A type by name. ``params``: element of a list, key and value of a map, content of an optional, and so on.

    ``name`` "var" is a type variable, identified by ``key``, which checking replaces by a type.
    """

    name: str
    params: tuple[Type, ...] = ()
    key: str = ""

    def __post_init__(self) -> None:
        if self.size > MAX_TYPE_SIZE:
            raise WorkLimitError("its types are nested too deeply")

    @cached_property
    def size(self) -> int:
        """The number of names in it."""
        return 1 + sum(param.size for param in self.params)

    def __str__(self) -> str:
        if self.name == "var":
            return "dyn"
        return f"{self.name}({', '.join(map(str, self.params))})" if self.params else self.name


BOOL, BYTES, DOUBLE, INT = Type("bool"), Type("bytes"), Type("double"), Type("int")
NULL, STRING, UINT = Type("null_type"), Type("string"), Type("uint")
BASIC = (BOOL, BYTES, DOUBLE, INT, NULL, STRING, UINT)
DYN, ANY_TYPE = Type("dyn"), Type("any")
QUANTITY, SEMVER = Type("kubernetes.Quantity"), Type("kubernetes.Semver")
DEVICE = Type("kubernetes.DRADevice")

NUMBERS = (INT, UINT, DOUBLE)
COMPARABLE = (INT, UINT, DOUBLE, BOOL, STRING, BYTES)
NULLABLE = {"optional_type", QUANTITY.name, SEMVER.name}


def list_of(element: Type) -> Type:
    return Type("list", (element,))


def map_of(key: Type, value: Type) -> Type:
    return Type("map", (key, value))


def optional_of(content: Type) -> Type:
    return Type("optional_type", (content,))


def type_of_type(content: Type) -> Type:
    return Type("type", (content,))


def param(name: str) -> Type:
    """A type parameter of a signature: the same type wherever it appears in one call."""
    return Type("var", (), name)


DEVICE_FIELDS = {
    "driver": STRING,
    "attributes": map_of(STRING, map_of(STRING, ANY_TYPE)),
    "capacity": map_of(STRING, map_of(STRING, QUANTITY)),
    "allowMultipleAllocations": BOOL,
}
"""The fields of ``device`` in Kubernetes 1.34 and newer. The type of an attribute is known only during evaluation."""
TYPES_BY_NAME = {
    kind.name: kind for kind in (*BASIC, list_of(DYN), map_of(DYN, DYN), optional_of(DYN), type_of_type(DYN))
}
"""Types that have a name in expressions, as in ``type(x) == int``."""


def is_dynamic(one: Type) -> bool:
    """Whether the type is known only during evaluation."""
    return one.name in ("dyn", "any")


def unwrapped(one: Type) -> Type:
    """The content type of an optional; any other type unchanged."""
    return one.params[0] if one.name == "optional_type" else one


@dataclass
class Bindings:
    """The types that type variables stand for."""

    found: dict[str, Type] = field(default_factory=dict)
    _made: int = 0

    def fresh(self) -> Type:
        """A new type variable."""
        self._made += 1
        return Type("var", (), f"_{self._made}")

    def instance(self, *signature: Type) -> tuple[Type, ...]:
        """The types of a signature with fresh variables as type parameters."""
        variables: defaultdict[str, Type] = defaultdict(self.fresh)

        def renamed(kind: Type) -> Type:
            spend(1)
            return variables[kind.key] if kind.name == "var" else Type(kind.name, tuple(map(renamed, kind.params)))

        return tuple(map(renamed, signature))

    def resolve(self, one: Type, *, final: bool = False) -> Type:
        """``one`` with its type variables replaced; ``final`` replaces unbound ones by ``dyn``."""
        spend(1)
        if one.name == "var":
            bound = self.found.get(one.key)
            if bound is not None:
                return self.resolve(bound, final=final)
            return DYN if final else one
        if not one.params:
            return one
        return Type(one.name, tuple(self.resolve(param, final=final) for param in one.params))

    def accepts(self, given: Sequence[Type], wanted: Sequence[Type]) -> bool:
        """Whether every type in ``given`` is assignable to that in ``wanted``. Keeps the new bindings only if so."""
        before = dict(self.found)
        if len(given) == len(wanted) and all(map(self._assignable, given, wanted)):
            return True
        self.found = before
        return False

    def _assignable(self, given: Type, wanted: Type) -> bool:
        spend(1)
        if wanted.name == "var":
            fits, substitute = self._substitutes(given, wanted)
            if fits or substitute:
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
        """Whether ``one`` can be bound to ``variable``, and whether ``variable`` was bound already."""
        if one == variable:
            return True, True
        bound = self.found.get(variable.key)
        if bound is None:
            if self._occurs(variable, one):
                return False, False
            self.found[variable.key] = one
            return True, False
        if one == bound:
            return True, True
        if not self._assignable(one, bound):
            return False, True
        general = most_general(one, bound)
        if not self._occurs(variable, general):
            self.found[variable.key] = general
        return True, True

    def _occurs(self, variable: Type, within: Type) -> bool:
        spend(1)
        if within == variable:
            return True
        if within.name == "var":
            bound = self.found.get(within.key)
            return bound is not None and self._occurs(variable, bound)
        return any(self._occurs(variable, param) for param in within.params)


def most_general(one: Type, other: Type) -> Type:
    """The less specific of two types that are assignable to each other."""
    return one if _is_more_general(one, other) else other


def _is_more_general(one: Type, other: Type) -> bool:
    if is_dynamic(one) or one.name == "var":
        return True
    if is_dynamic(other) or other.name == "var" or one.name != other.name:
        return False
    if one.name == "type":
        return True
    return len(one.params) == len(other.params) and all(map(_is_more_general, one.params, other.params))
