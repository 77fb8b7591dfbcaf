"""Devices as values of CEL, and selectors, which are compiled once and evaluated on them with Kubernetes' verdicts.

Expressions that Kubernetes refuses are refused, except that costs are not estimated: the API server does so at
admission, and a work limit stops long evaluations (``values.MAX_WORK``). Expressions that Kubernetes accepts get the
same verdict, or are refused with a reason (``registry.UNSUPPORTED_FUNCTIONS``). `tests/conformance` compares with the
verdicts of a real cluster.

Source of the devices: Kubernetes' DeviceAttribute and DeviceCapacity. A name without a domain belongs to the driver's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from deviceclasses.cel.compiler import compile_tree
from deviceclasses.cel.library.quantity import parse_quantity
from deviceclasses.cel.library.semver import parse_semver
from deviceclasses.cel.parser import parse
from deviceclasses.cel.referenced_attributes import Read, reads_of
from deviceclasses.cel.values import (
    DomainMap,
    EvaluationError,
    Map,
    Value,
    WorkLimitError,
    no_overload,
    start_work,
    string_map,
)
from driver.errors import CelError

Domains = Mapping[str, Mapping[str, Value]]
"""Values by domain and name."""
NOTHING: Mapping[str, Value] = {}
KINDS: dict[str, Callable[[Any], Value]] = {
    "string": str,
    "int": int,
    "bool": bool,
    "version": parse_semver,
    "strings": tuple,
    "ints": tuple,
    "bools": tuple,
    "versions": lambda values: tuple(map(parse_semver, values)),
}
"""The kinds of attributes in a ResourceSlice, and their conversion to values of CEL."""


@dataclass(frozen=True, eq=False)
class CelDevice:
    """``attributes`` hold str, int, bool, versions or tuples of them, ``capacity`` quantities."""

    driver: str
    attributes: Domains = field(default_factory=dict)
    capacity: Domains = field(default_factory=dict)
    allow_multiple_allocations: bool = False

    @cached_property
    def value(self) -> Map:
        """The value of the variable ``device``."""
        return string_map(
            {
                "driver": self.driver,
                "allowMultipleAllocations": self.allow_multiple_allocations,
                "attributes": _domain_map(self.attributes),
                "capacity": _domain_map(self.capacity),
            }
        )

    def read(self, section: str, domain: str, name: str) -> Hashable:
        """The value of one attribute or capacity, None if missing; equal only for values that are equal in CEL."""
        entry = (self.attributes if section == "attributes" else self.capacity).get(domain, NOTHING).get(name)
        return (bool, entry) if type(entry) is bool else entry


def _domain_map(domains: Domains) -> Map:
    return string_map({domain: string_map(values) for domain, values in domains.items()}, DomainMap)


def from_slice_device(driver: str, device: Mapping[str, Any]) -> CelDevice:
    """The device of one entry in ``spec.devices``. Raises CelError for a value that Kubernetes would not store."""
    try:
        return CelDevice(
            driver=driver,
            attributes=_by_domain(driver, device.get("attributes") or {}, _attribute),
            capacity=_by_domain(driver, device.get("capacity") or {}, _capacity),
            allow_multiple_allocations=bool(device.get("allowMultipleAllocations")),
        )
    except (EvaluationError, KeyError) as error:
        raise CelError(f"device {device.get('name', '')}: {error}") from None


def _attribute(entry: Mapping[str, Any]) -> Value:
    for kind, convert in KINDS.items():
        if kind in entry:
            return convert(entry[kind])
    raise EvaluationError(f"an attribute has one of {', '.join(KINDS)}, not {', '.join(entry) or 'nothing'}")


def _capacity(entry: Mapping[str, Any]) -> Value:
    return parse_quantity(str(entry["value"]))


def _by_domain(driver: str, entries: Mapping[str, Any], value: Callable[[Any], Value]) -> Domains:
    domains: dict[str, dict[str, Value]] = {}
    for qualified, entry in entries.items():
        domain, name = qualified.split("/", 1) if "/" in qualified else (driver, qualified)
        domains.setdefault(domain, {})[name] = value(entry)
    return domains


UNSUPPORTED_ERRORS = (ValueError, ArithmeticError, RecursionError, MemoryError, WorkLimitError)
"""Errors of Python for expressions that are too large for it. They come from users, so none may end the process."""

MAX_COMPILED = 2048

MAX_REMEMBERED_VERDICTS = 10_000
"""Maximum verdicts that a program remembers; a selector on UUIDs has one for every device."""


@dataclass(frozen=True)
class Program:
    """A compiled selector. Safe for use by several threads.

    ``reads_everything``: it may read more than ``reads``.
    """

    expression: str
    reads: tuple[Read, ...]
    reads_everything: bool
    _evaluate: Callable[[Value], Value]
    _verdicts: dict[Hashable, bool | str] = field(default_factory=dict)

    def verdict(self, device: CelDevice) -> bool | str:
        """Whether the device is selected, or the cause as a string where evaluation fails.

        Remembered for all devices that are equal in what the expression reads.
        """
        key: Hashable = (device.driver, device.allow_multiple_allocations, *[device.read(*read) for read in self.reads])
        if self.reads_everything:
            key = (key, _all_of(device.attributes), _all_of(device.capacity))
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self.evaluate(device)
            if len(self._verdicts) >= MAX_REMEMBERED_VERDICTS:
                self._verdicts.clear()
            self._verdicts[key] = verdict
        return verdict

    def evaluate(self, device: CelDevice) -> bool | str:
        """Like ``verdict``, but always evaluated anew."""
        start_work()
        try:
            value = self._evaluate(device.value)
            if type(value) is not bool:
                raise no_overload("a selector has to give bool", value)
        except EvaluationError as error:
            return str(error)
        except UNSUPPORTED_ERRORS as error:
            return f"Tessera can't evaluate it: {type(error).__name__}: {error}"
        return value


def _all_of(domains: Domains) -> Hashable:
    return frozenset(
        (domain, name, type(value), value) for domain, values in domains.items() for name, value in values.items()
    )


def compile_selector(expression: str) -> Program:
    """Parse and check an expression. Raises CelError with the position, the error and what would be accepted."""
    start_work()
    try:
        root = parse(expression)
        return Program(expression, *reads_of(root), compile_tree(expression, root))
    except UNSUPPORTED_ERRORS as error:
        raise CelError(f"Tessera can't evaluate it: {type(error).__name__}: {error}", expression) from error


@lru_cache(MAX_COMPILED)
def try_compile(expression: str) -> Program | CelError:
    """The same for many callers: remembered, and an expression that is refused is an answer."""
    try:
        return compile_selector(expression)
    except CelError as error:
        return error
