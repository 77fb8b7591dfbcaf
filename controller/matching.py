"""Which devices of a GPU a request selects, by the attributes that the GPU's slices carry (pure).

A fleet has a quarter of a million devices and few kinds of GPU. Selectors read few attributes; GPUs that don't differ
in those get one answer, worked out once and remembered as long as the GPU is the same object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

from controller.fleet import FleetGpu, Hardware
from controller.likeness import BY_PLACEMENT, FACT_OF, Examples, Likeness, Names, device_at, representatives
from deviceclasses.cel import CelDevice, Mentions, Program, compile_selector, from_slice_device
from driver.errors import CelError
from driver.model.device import Device, DeviceKind
from driver.placement import Key, key_of
from driver.slices.attributes import STANDARD, attributes, capacity

SELECTORS = 512
"""How many selectors, and sets of attributes, are remembered."""


class Failure(NamedTuple):
    """An expression that has no answer for a device: one that the scheduler looks at stops the pod's scheduling."""

    device: Device
    expression: str
    message: str


@dataclass(frozen=True, eq=False)
class Matches:
    """What a request selects of one GPU: the memory slices at which placements of each key start, or None for all.

    GPUs that are alike share one, so it is compared by identity. ``failures``: devices, of this GPU or of one like
    it, for which there is no answer.
    """

    keys: Mapping[Key, frozenset[int] | None]
    failures: tuple[Failure, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys)

    def has(self, key: Key, start: int) -> bool:
        starts = self.keys.get(key, frozenset())
        return starts is None or start in starts


NOTHING = Matches({})


class Selector:
    """The CEL expressions of a class and of a request, in the scheduler's order."""

    def __init__(self, driver: str, programs: tuple[Program, ...], likeness: Likeness) -> None:
        self.expressions = tuple(program.expression for program in programs)
        self._driver = driver
        self._programs = programs
        self._likeness = likeness
        self._by_placement = likeness.names is None or BY_PLACEMENT in likeness.names
        self._by_mark: dict[int, Matches] = {}
        self._by_marks: dict[tuple[int, ...], Matches] = {}

    def on(self, entry: FleetGpu) -> Matches:
        """What it selects of one GPU, whatever is held there."""
        marks = self._likeness.marks(entry)
        found = self._by_marks.get(marks)
        if found is None:
            examples = self._likeness.examples.of(entry)
            parts = [self._part(mark, entry, each.kind) for mark, each in zip(marks, examples, strict=True)]
            found = self._by_marks[marks] = _joined([part for part in parts if part or part.failures])
        return found

    def _part(self, mark: int, entry: FleetGpu, kind: DeviceKind) -> Matches:
        if mark not in self._by_mark:
            self._by_mark[mark] = self._select(entry, kind)
        return self._by_mark[mark]

    def _select(self, entry: FleetGpu, kind: DeviceKind) -> Matches:
        keys: dict[Key, frozenset[int] | None] = {}
        failures: list[Failure] = []
        for devices in representatives(entry, kind, each_placement=self._by_placement):
            verdicts = [(device, self._verdict(device)) for device in devices]
            failures += [verdict for _, verdict in verdicts if isinstance(verdict, Failure)]
            selected = [device for device, verdict in verdicts if verdict is True]
            if selected:
                starts = frozenset(device.placement.start for device in selected if device.placement)
                keys[key_of(devices[0])] = None if len(selected) == len(devices) else starts
        return Matches(keys, tuple(failures)) if keys or failures else NOTHING

    def _verdict(self, device: Device) -> bool | Failure:
        """Whether all expressions select it; the first that says no, or fails, decides."""
        seen = cel_device(self._driver, device, self._likeness.names)
        for program in self._programs:
            verdict = program.verdict(seen)
            if isinstance(verdict, str):
                return Failure(device, program.expression, verdict)
            if not verdict:
                return False
        return True


@dataclass
class SurveyMemory:
    """What surveys of fleets with the same hardware need not find out again (``controller.survey``).

    ``kinds`` by selector and nodes. ``free`` slices and ``outcomes`` of a node hold as long as its GPUs are as they
    were; ``order`` are the nodes by free slices.
    """

    hardware: Hardware | None
    kinds: dict[Any, Any] = field(default_factory=dict)
    free: dict[str, tuple[tuple[FleetGpu, ...], float]] = field(default_factory=dict)
    order: list[tuple[float, str]] = field(default_factory=list)
    having: Counter[Key] = field(default_factory=Counter)
    outcomes: dict[Any, dict[str, tuple[tuple[FleetGpu, ...], Any]]] = field(default_factory=dict)


class Matching:
    """Selectors by their text; GPUs speak for ``driver``. Meant to be kept: what it has learnt makes it fast."""

    def __init__(self, driver: str) -> None:
        self.driver = driver
        self.program = lru_cache(SELECTORS)(_compiled)
        self.selector = lru_cache(SELECTORS)(self._selector)
        self._survey_memory = SurveyMemory(None)
        examples = Examples()
        self._likeness = lru_cache(SELECTORS)(lambda names: Likeness(names, examples))

    def survey_memory(self, hardware: Hardware) -> SurveyMemory:
        """What was found about a fleet of that hardware."""
        if self._survey_memory.hardware is not hardware:
            self._survey_memory = SurveyMemory(hardware)
        return self._survey_memory

    def _selector(self, expressions: tuple[str, ...]) -> Selector | CelError:
        """The selector, or why one of its expressions is refused."""
        programs: list[Program] = []
        for expression in expressions:
            program = self.program(expression)
            if isinstance(program, CelError):
                return program
            programs.append(program)
        mentions = reduce(or_, (program.mentions for program in programs), Mentions())
        return Selector(self.driver, tuple(programs), self._likeness(_names(self.driver, mentions)))

    def is_about_us(self, expressions: Iterable[str]) -> bool:
        """Whether any of ``expressions`` speaks of attributes of ours: then it can mean no other driver's devices."""
        programs = ((expression, self.program(expression)) for expression in expressions)
        return any(
            self.driver in text if isinstance(program, CelError) else self._speaks_of_us(program.mentions)
            for text, program in programs
        )

    def _speaks_of_us(self, mentions: Mentions) -> bool:
        return any(domain == self.driver for domain, _ in mentions.attributes | mentions.capacity)

    def value(self, entry: FleetGpu, key: Key, start: int, attribute: str) -> Hashable | None:
        """What constraints compare: an attribute of a device, by its full name; None where it has none."""
        name = attribute.removeprefix(f"{self.driver}/")
        device = device_at(entry, key, start)
        fact = FACT_OF[device.kind].get(name)
        value = fact(device) if fact is not None else None
        return None if value is None else (type(value), value)


def cel_device(driver: str, device: Device, names: Names = None) -> CelDevice:
    """``device`` as the scheduler reads it out of its slice; with ``names`` only those attributes of it."""
    said = attributes(device)
    if names is not None:
        said = {name: value for name, value in said.items() if name in names}
    return from_slice_device(driver, {"name": device.name, "attributes": said, "capacity": capacity(device)})


def _joined(parts: list[Matches]) -> Matches:
    """One answer out of those for each kind."""
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    keys = {key: starts for part in parts for key, starts in part.keys.items()}
    return Matches(keys, tuple(failure for part in parts for failure in part.failures))


def _compiled(expression: str) -> Program | CelError:
    try:
        return compile_selector(expression)
    except CelError as error:
        return error


def _names(driver: str, mentions: Mentions) -> Names:
    prefixes = {driver: "", STANDARD.rstrip("/"): STANDARD}
    if mentions.everything:
        return None
    return frozenset(prefixes[domain] + name for domain, name in mentions.attributes if domain in prefixes)
