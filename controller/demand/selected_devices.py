"""The devices of a GPU that a request selects, by the attributes in the GPU's slices (pure).

A fleet has a quarter of a million devices and few kinds of GPU. Selectors read few attributes; GPUs that don't differ
in those share one answer, which is computed once and remembered as long as the GPU is the same object.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from controller.cluster.fleet import Fleet, FleetGpu, Hardware
from controller.demand.gpu_equivalence_classes import (
    FACT_OF,
    KNOWN,
    PLACEMENT_ATTRIBUTE,
    EquivalenceClasses,
    Names,
    examples_of,
    representatives,
)
from controller.demand.namespace_selector_time import BUDGET_SECONDS, EXHAUSTED, BudgetExhausted, SelectorTime
from deviceclasses.cel.engine import CelDevice, Program, from_slice_device, try_compile
from driver.errors import CelError
from driver.kube.types import Quantity
from driver.model.device import Device, Monitor
from driver.model.offer import DeviceKind, OfferKind, Spot
from driver.model.shared_memory import MEMORY_CAPACITY, gib_of
from driver.slices.attributes import STANDARD, attributes, capacity, monitor_attributes

MAX_SELECTORS = 512
"""Limit on remembered selectors of one namespace, and on EquivalenceClasses, one for each set of attributes read."""

MAX_NAMESPACES = 1024
"""Namespaces remembered; one whose time budget is not full is kept beyond this limit."""

MAX_EXAMPLES = 2000
"""Different devices that are examined to find out why none is selected."""

Met = list[tuple[Device, tuple[bool, ...]]]
"""Devices, and for each of some conditions whether the device meets it."""


class SelectorFailure(NamedTuple):
    """An expression that fails for a device; when the scheduler meets it, it stops scheduling the pod."""

    device: Device
    expression: str
    message: str


class Rejection(NamedTuple):
    """The first expression that is not true for a device; ``error``: why it fails, empty if it is false."""

    expression: str
    error: str = ""

    @property
    def is_exhausted(self) -> bool:
        """Whether there was no time left to evaluate it."""
        return self.error == EXHAUSTED


@dataclass(frozen=True, eq=False)
class Matches:
    """The devices of one GPU that a request selects: the starts of placements of each kind, or None for all.

    ``gib``: what a claim would have of the shared device; 0 if that is not selected.
    Equal matches without failures are one shared object, so it is compared by identity. ``failures``: devices, of this
    GPU or of an equivalent one, for which evaluation fails.
    """

    starts_by_kind: Mapping[OfferKind, frozenset[int] | None]
    failures: tuple[SelectorFailure, ...] = ()
    gib: int = 0

    def __bool__(self) -> bool:
        return bool(self.starts_by_kind)

    def has(self, kind: OfferKind, start: int) -> bool:
        starts = self.starts_by_kind.get(kind, frozenset())
        return starts is None or start in starts

    def limited_to(self, spots: Collection[Spot]) -> Matches:
        starts: dict[OfferKind, set[int]] = {}
        for spot in spots:
            if self.has(*spot):
                starts.setdefault(spot.kind, set()).add(spot.at)
        return shared_matches(tuple((kind, frozenset(numbers)) for kind, numbers in starts.items()), self.gib)


@lru_cache(1 << 12)
def shared_matches(starts_by_kind: tuple[tuple[OfferKind, frozenset[int] | None], ...], gib: int = 0) -> Matches:
    return Matches(dict(starts_by_kind), gib=gib)


def _matches_of(
    starts_by_kind: Mapping[OfferKind, frozenset[int] | None], failures: tuple[SelectorFailure, ...], gib: int = 0
) -> Matches:
    if failures:
        return Matches(starts_by_kind, failures, gib)
    return shared_matches(tuple(starts_by_kind.items()), gib)


class Selector:
    """The CEL expressions of a class and of a request, in the scheduler's order."""

    def __init__(
        self,
        driver: str,
        programs: tuple[Program, ...],
        classes: EquivalenceClasses,
        time: SelectorTime,
        memory: Quantity | None,
        *,
        reads_our_attributes: bool,
    ) -> None:
        """``reads_our_attributes``: it reads attributes of this driver, so it selects no other driver's devices.

        ``memory``: how much the request asks for, as written; None: it does not say.
        """
        self._time = time
        self.memory = memory
        self.reads_our_attributes = reads_our_attributes
        self.expressions = tuple(program.expression for program in programs)
        self._driver = driver
        self._programs = programs
        self._classes = classes
        self._by_placement = classes.names is None or PLACEMENT_ATTRIBUTE in classes.names
        self._by_equivalence_class: dict[int, Matches] = {}
        self._by_gpu_class: dict[tuple[int, ...], Matches] = {}
        self._met: tuple[Hardware, Met] | None = None
        self._monitors: dict[int, Rejection | None] = {}

    def monitors_among(self, fleet: Fleet) -> Iterator[tuple[Rejection | None, tuple[str, ...]]]:
        """For each group of equivalent GPUs why it does not select their monitor devices, and their UUIDs."""
        return ((self._rejects_monitor(example), gpus) for example, gpus in self._classes.groups(fleet))

    def _rejects_monitor(self, gpu: FleetGpu) -> Rejection | None:
        """None if it selects the GPU's monitor device, whose attributes are those of the full GPU except ``type``."""
        gpu_class = self._classes.of(gpu)[0]
        if gpu_class not in self._monitors:
            attributes_of_monitor = monitor_attributes(Monitor.of(gpu.gpu, gpu.number))
            rejection = self.rejection(from_slice_device(self._driver, {"attributes": attributes_of_monitor}))
            if rejection is not None and rejection.is_exhausted:
                return rejection
            self._monitors[gpu_class] = rejection
        return self._monitors[gpu_class]

    def rejection(self, device: CelDevice) -> Rejection | None:
        """Why it does not select ``device``, of whatever driver; None: it does."""
        try:
            return self._time.spend(partial(self._rejection, device))
        except BudgetExhausted:
            return Rejection(self.expressions[-1], EXHAUSTED)

    def on(self, gpu: FleetGpu) -> Matches:
        """The devices that it selects on one GPU, held or not."""
        gpu_class = self._classes.of(gpu)
        matches = self._by_gpu_class.get(gpu_class)
        if matches is None:
            pairs = zip(gpu_class, examples_of(gpu), strict=True)
            parts = [self._matches_of_class(class_number, gpu, device.kind) for class_number, device in pairs]
            matches = self._by_gpu_class[gpu_class] = _joined([part for part in parts if part or part.failures])
        return matches

    def among(self, fleet: Fleet) -> Iterator[tuple[Matches, tuple[str, ...]]]:
        """The devices that it selects on each group of equivalent GPUs, or fails for, and the UUIDs of these GPUs."""
        for example, gpus in self._classes.groups(fleet):
            matches = self.on(example)
            if matches.starts_by_kind or matches.failures:
                yield matches, gpus

    def _matches_of_class(self, class_number: int, gpu: FleetGpu, kind: DeviceKind) -> Matches:
        if class_number not in self._by_equivalence_class:
            self._by_equivalence_class[class_number] = self._select(gpu, kind)
        return self._by_equivalence_class[class_number]

    def _select(self, gpu: FleetGpu, kind: DeviceKind) -> Matches:
        starts_by_kind: dict[OfferKind, frozenset[int] | None] = {}
        gib = 0
        failures: list[SelectorFailure] = []
        for devices in representatives(gpu, kind, each_placement=self._by_placement):
            verdicts = [(device, self._timed_verdict(device)) for device in devices]
            failures += [verdict for _, verdict in verdicts if isinstance(verdict, SelectorFailure)]
            selected = [device for device, verdict in verdicts if verdict is True]
            if selected:
                starts = frozenset(device.placement.start for device in selected if device.placement)
                starts_by_kind[devices[0].spot.kind] = None if len(selected) == len(devices) else starts
            if kind is DeviceKind.SHARED and selected and not (gib := self._gib_of(selected[0])):
                starts_by_kind.clear()  # the claim asks for more than the whole
        return _matches_of(starts_by_kind, tuple(failures), gib)

    def _gib_of(self, device: Device) -> int:
        """The GiB that a claim would have of a shared device; 0: that would be more than the whole."""
        whole = 0 if device.shared is None else device.shared.gib
        gib = gib_of(None if self.memory is None else {MEMORY_CAPACITY: str(self.memory)}, whole) or 1
        return gib if gib <= whole else 0

    def met(self, fleet: Fleet, conditions: Sequence[str]) -> Met:
        """Which ``conditions`` each device meets, of equivalent GPUs the first; empty if that takes too long."""
        if self._met is None or self._met[0] is not fleet.hardware:
            self._met = fleet.hardware, self._find_met(fleet, conditions)
        return self._met[1]

    def _find_met(self, fleet: Fleet, conditions: Sequence[str]) -> Met:
        programs = [try_compile(condition) for condition in conditions]
        devices = [
            device
            for example, _ in self._classes.groups(fleet)
            for kind in DeviceKind
            for devices in representatives(example, kind, each_placement=self._by_placement)
            for device in devices
        ]

        def verdicts(device: Device) -> tuple[bool, ...]:
            seen = cel_device(self._driver, device, self._classes.names)
            return tuple(isinstance(program, Program) and program.verdict(seen) is True for program in programs)

        try:
            met = [(device, self._time.spend(partial(verdicts, device))) for device in devices[:MAX_EXAMPLES]]
        except BudgetExhausted:
            return []
        return met if len(devices) <= MAX_EXAMPLES else []

    def _timed_verdict(self, device: Device) -> bool | SelectorFailure:
        rejection = self.rejection(cel_device(self._driver, device, self._classes.names))
        if rejection is not None and rejection.error:
            return SelectorFailure(device, *rejection)
        return rejection is None

    def _rejection(self, seen: CelDevice) -> Rejection | None:
        """None if all expressions select the device; the first that is false or fails decides."""
        for program in self._programs:
            verdict = program.verdict(seen)
            if verdict is not True:
                return Rejection(program.expression, verdict if isinstance(verdict, str) else "")
        return None


class NamespaceSelectors(NamedTuple):
    """The remembered selectors of one namespace, by their expressions, and its budget for more."""

    selector: Callable[[tuple[str, ...], tuple[str, ...], Quantity | None], Selector | CelError]
    time: SelectorTime


class Selectors:
    """Selectors by their text; all GPUs belong to ``driver``. Kept from decision to decision for what it remembers."""

    def __init__(self, driver: str) -> None:
        self.driver = driver
        self.namespaces: dict[str, NamespaceSelectors] = {}
        """The one used last at the end."""
        self._lock = threading.Lock()
        """For ``namespaces``: the web page's thread asks for selectors, too."""
        self._classes = lru_cache(MAX_SELECTORS)(EquivalenceClasses)

    def selector(
        self,
        expressions: tuple[str, ...],
        capacity_conditions: tuple[str, ...] = (),
        memory: Quantity | None = None,
        namespace: str = "",
    ) -> Selector | CelError:
        """The selector made of all these expressions, or why one of them is refused. ``memory``: what is requested.

        The time for it counts for ``namespace``, that of the claim; "" for the expressions of a DeviceClass alone.
        """
        with self._lock:
            remembered = self.namespaces.pop(namespace, None)
            if remembered is None or (namespace and remembered.time.retry()):  # DeviceClasses have no limit of time
                budget = BUDGET_SECONDS if namespace else math.inf
                time = SelectorTime(budget) if remembered is None else remembered.time
                make = lru_cache(MAX_SELECTORS)(partial(self._selector, time))
                remembered = NamespaceSelectors(make, time)
            self.namespaces[namespace] = remembered
            if len(self.namespaces) > MAX_NAMESPACES:
                idle = (
                    other for other, selectors in self.namespaces.items() if other != namespace and selectors.time.full
                )
                self.namespaces.pop(next(idle, ""), None)
        return remembered.selector(expressions, capacity_conditions, memory)

    def _selector(
        self,
        time: SelectorTime,
        expressions: tuple[str, ...],
        capacity_conditions: tuple[str, ...],
        memory: Quantity | None,
    ) -> Selector | CelError:
        programs: list[Program] = []
        for expression in (*expressions, *capacity_conditions):
            try:
                program = time.spend(partial(try_compile, expression))
            except BudgetExhausted:
                return CelError(EXHAUSTED, expression)
            if isinstance(program, CelError):
                return program
            programs.append(program)
        classes = self._classes(_names(self.driver, programs))
        read = {domain for program in programs[: len(expressions)] for _, domain, _ in program.reads}
        return Selector(self.driver, tuple(programs), classes, time, memory, reads_our_attributes=self.driver in read)

    def value(self, gpu: FleetGpu, spot: Spot, attribute: str) -> Hashable | None:
        """The value that constraints compare: a device's attribute, by its full name; None where it has none."""
        name = attribute.removeprefix(f"{self.driver}/")
        device, fact = gpu.device(spot), FACT_OF[spot.kind.type].get(name)
        value = fact(device) if device is not None and fact is not None else None
        return None if value is None else (type(value), value)


def cel_device(driver: str, device: Device, names: Names = None) -> CelDevice:
    """``device`` as the scheduler reads it from its slice; with ``names`` only those of its attributes."""
    published = attributes(device)
    if names is not None:
        published = {name: value for name, value in published.items() if name in names}
    return from_slice_device(driver, {"name": device.name, "attributes": published, "capacity": capacity(device)})


def _joined(parts: list[Matches]) -> Matches:
    """The matches of all kinds of devices as one."""
    if len(parts) == 1:
        return parts[0]
    starts_by_kind = {kind: starts for part in parts for kind, starts in part.starts_by_kind.items()}
    gib = max((part.gib for part in parts), default=0)
    return _matches_of(starts_by_kind, tuple(failure for part in parts for failure in part.failures), gib)


def _names(driver: str, programs: Sequence[Program]) -> Names:
    """The attributes that selectors read, without those that no device has: they tell no GPUs apart."""
    prefixes = {driver: "", STANDARD.rstrip("/"): STANDARD}
    if any(program.reads_everything for program in programs):
        return None
    reads = (read for program in programs for read in program.reads)
    attributes = {(domain, name) for section, domain, name in reads if section == "attributes"}
    return KNOWN & {prefixes[domain] + name for domain, name in attributes if domain in prefixes}
