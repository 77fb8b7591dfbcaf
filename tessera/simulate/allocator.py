"""The scheduler's allocator: the devices on one node for the claims of a pod (pure; KEP-4381, 4815, 4816, 5055, 5075).

The same answers as Kubernetes 1.37 with its default features; `make conformance-allocator` compares them. Claims,
requests and devices are tried in order, all combinations, and the first that fits is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from controller.demand.node_eligibility import BLOCKING
from deviceclasses.cel.engine import try_compile
from driver.errors import CelError
from driver.kube.types import (
    MAX_DEVICES,
    Allocation,
    Claim,
    DeviceAllocation,
    DeviceClass,
    DeviceConstraint,
    DeviceSelector,
    ExactDeviceRequest,
    Node,
    Request,
    Result,
)
from tessera.simulate.allocatable_devices import (
    AllocatableDevice,
    AllocationError,
    Counters,
    DeviceId,
    FailureKind,
    Quantities,
    number,
    written,
)
from tessera.simulate.capacity import HeldDevices, consumed, has_room
from tessera.simulate.pools import DevicePool, PoolId, SliceIndex, nodes_of, pools_of, usable_on

SHARE_ID = "simulated"
"""The share ID of an imagined allocation; only whether there is one makes a difference."""


class BranchOutcome(Enum):
    """Of one branch of the search. TOO_MANY: the claim would have more devices than an allocation can hold."""

    FITS = auto()
    NONE = auto()
    TOO_MANY = auto()


@dataclass(eq=False)
class RequestPart:
    """A request or one of its alternatives: ``names`` are those that constraints use, the last is the full one."""

    claim: int
    request: int
    alternative: ExactDeviceRequest
    names: tuple[str, ...]
    selectors: tuple[tuple[str, DeviceSelector], ...]
    requested: Quantities
    all_devices: tuple[AllocatableDevice, ...] | None = None
    """With allocation mode All: the devices, which are known from the beginning."""
    selected: dict[DeviceId, bool] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.alternative.count if self.all_devices is None else len(self.all_devices)


class ConstraintState:
    """One constraint, with the values of the devices that have been added."""

    def __init__(self, written: DeviceConstraint, claim: Claim) -> None:
        """Raises AllocationError for a constraint of ``claim`` of a kind that the scheduler does not know."""
        attribute = written.match_attribute if written.match_attribute is not None else written.distinct_attribute
        if attribute is None:
            message = f"claim {claim.metadata.key} has a constraint of an unknown kind"
            raise AllocationError(FailureKind.UNKNOWN_KIND, message)
        self._requests, self._attribute = frozenset(written.requests), attribute
        self._distinct = written.match_attribute is None
        self._values: list[tuple[str, Any]] = []

    def applies(self, names: Collection[str]) -> bool:
        """Whether it is for a request that has these names: its own and, for an alternative, the full one."""
        return not self._requests or not self._requests.isdisjoint(names)

    def add(self, device: AllocatableDevice) -> bool:
        """Add ``device``; False, and nothing changed, if the constraint does not allow it with the others."""
        value = device.attribute(self._attribute)
        others = self._values
        if value is None or (value in others if self._distinct else bool(others) and value != others[0]):
            return False
        others.append(value)
        return True

    def remove(self) -> None:
        """Remove the device that was added last."""
        self._values.pop()


def allocate(
    claims: Sequence[Claim],
    node: Node,
    slices: SliceIndex,
    classes: Mapping[str, DeviceClass],
    held: HeldDevices,
    expired: Callable[[], bool] = lambda: False,
) -> list[Allocation] | None:
    """Allocations of ``claims`` on ``node``, in order; None: they do not fit. Raises AllocationError.

    All classes must exist. The search ends with an error once ``expired`` returns True: the scheduler, too, gives up
    after a time.
    """
    search = _AllocationSearch(claims, node, pools_of(slices, node), held, expired)
    try:
        return search.run(classes)
    except CelError as error:
        raise AllocationError(FailureKind.SELECTOR, str(error)) from error
    except RecursionError as error:
        raise AllocationError(FailureKind.TOO_LONG, "the pod has too many claims and requests for Tessera") from error


class _AllocationSearch:
    """One search. Taken devices are undone in the reverse order, so that every branch finds what it began with."""

    def __init__(
        self,
        claims: Sequence[Claim],
        node: Node,
        pools: Sequence[DevicePool],
        held: HeldDevices,
        expired: Callable[[], bool],
    ) -> None:
        self._claims, self._node, self._pools, self._expired = claims, node, pools, expired
        self._held = held
        self._candidates = [device for pool in pools for device in pool.candidates]
        self._parts: list[list[list[RequestPart]]] = []
        """By claim and request, the alternatives."""
        self._constraints: list[list[ConstraintState]] = []
        self._taken: defaultdict[DeviceId, set[int]] = defaultdict(set)
        """The claims for which a device that can't be shared is taken."""
        self._shared: defaultdict[DeviceId, list[Quantities]] = defaultdict(list)
        """What each share of a device takes."""
        self._left = {pool.id: _left_of(pool, held) for pool in pools}
        """What is left of the counters of each pool."""
        self._overdrawn = {pool for pool, left in self._left.items() if any(amount < 0 for amount in left.values())}
        self._results: list[list[tuple[Result, AllocatableDevice]]] = [[] for _ in claims]
        self._steps = 0

    def run(self, classes: Mapping[str, DeviceClass]) -> list[Allocation] | None:
        for index, claim in enumerate(self._claims):
            self._read(index, claim, classes)
        outcome = self._request(0, 0)
        if outcome is BranchOutcome.TOO_MANY:
            raise AllocationError(FailureKind.TOO_MANY_DEVICES, "too many devices")
        if outcome is BranchOutcome.FITS:
            return [
                Allocation(
                    DeviceAllocation(tuple(result for result, _ in results)),
                    nodes_of([device for _, device in results], self._node.metadata.name),
                )
                for results in self._results
            ]
        if invalid := [pool for pool in self._pools if pool.invalid is not None]:
            raise AllocationError(FailureKind.INVALID_POOLS, f"pool {invalid[0].id} is invalid: {invalid[0].invalid}")
        return None

    # Reading the requests

    def _read(self, index: int, claim: Claim, classes: Mapping[str, DeviceClass]) -> None:
        devices, parts = 0, list[list[RequestPart]]()
        for position, request in enumerate(claim.spec.devices.requests):
            parts.append(
                [self._part(index, position, request, alternative, classes) for alternative in request.alternatives]
            )
            devices += min(part.count for part in parts[-1])
            if devices > MAX_DEVICES:
                message = f"claim {claim.metadata.key} requests {devices} devices; {MAX_DEVICES} are possible"
                raise AllocationError(FailureKind.TOO_MANY_DEVICES, message)
        self._parts.append(parts)
        self._constraints.append([ConstraintState(written, claim) for written in claim.spec.devices.constraints])

    def _part(
        self,
        claim: int,
        position: int,
        request: Request,
        alternative: ExactDeviceRequest,
        classes: Mapping[str, DeviceClass],
    ) -> RequestPart:
        key, of_class = self._claims[claim].metadata.key, alternative.device_class_name
        selectors = [(f"class {of_class}", selector) for selector in classes[of_class].spec.selectors]
        selectors += [(f"claim {key}", selector) for selector in alternative.selectors]
        names = (request.name,) if request.exactly is not None else (request.name, f"{request.name}/{alternative.name}")
        amounts = alternative.capacity.requests if alternative.capacity is not None else {}
        requested = {name: number(amount) for name, amount in amounts.items()}
        part = RequestPart(claim, position, alternative, names, tuple(selectors), requested)
        if alternative.takes_all:
            part.all_devices = self._all_devices(part)
        return part

    def _all_devices(self, part: RequestPart) -> tuple[AllocatableDevice, ...]:
        found: list[AllocatableDevice] = []
        for pool in self._pools:
            if pool.incomplete:
                message = f"request {part.names[-1]} takes all devices, and pool {pool.id} is incomplete"
                raise AllocationError(FailureKind.INCOMPLETE_POOL, message)
            if pool.invalid is not None:
                message = f"request {part.names[-1]} takes all devices, and pool {pool.id} is invalid: {pool.invalid}"
                raise AllocationError(FailureKind.INVALID_POOL, message)
            found += [
                device
                for device in pool.candidates
                if self._selects(part, device) and has_room(part.requested, device.entry.capacity)
            ]
        return tuple(found)

    def _selects(self, part: RequestPart, device: AllocatableDevice) -> bool:
        """Whether the selectors of class and request match ``device``, which is usable on the node."""
        selected = part.selected.get(device.id)
        if selected is None:
            matches = all(_matches(device, *selector) for selector in part.selectors)
            selected = part.selected[device.id] = matches and usable_on(self._node, device)
        return selected

    # Searching

    def _request(self, claim: int, request: int) -> BranchOutcome:
        """Satisfy this request of a claim and everything after it."""
        if claim == len(self._claims):
            return BranchOutcome.FITS
        if request == len(self._parts[claim]):
            # A later claim with too many devices ends no earlier one: other devices there may help.
            outcome = self._request(claim + 1, 0)
            return BranchOutcome.NONE if outcome is BranchOutcome.TOO_MANY else outcome
        outcomes = set()
        for part in self._parts[claim][request]:
            outcome = self._devices(part, 0, 0)
            if outcome is BranchOutcome.FITS:
                return outcome
            outcomes.add(outcome)
        return BranchOutcome.TOO_MANY if outcomes == {BranchOutcome.TOO_MANY} else BranchOutcome.NONE

    def _devices(self, part: RequestPart, done: int, start: int) -> BranchOutcome:
        """Satisfy the rest of a request, of which ``done`` devices are taken, with devices from ``start`` on."""
        self._steps += 1
        if self._steps % 256 == 0 and self._expired():
            raise AllocationError(FailureKind.TOO_LONG, "there are too many combinations of devices to try")
        if part.all_devices == ():
            return BranchOutcome.NONE
        if done == part.count:
            return self._request(part.claim, part.request + 1)
        if part.count - done > MAX_DEVICES - len(self._results[part.claim]):
            return BranchOutcome.TOO_MANY
        if part.all_devices is not None:
            return self._with(part, part.all_devices[done], done, start) or BranchOutcome.NONE
        for position in range(start, len(self._candidates)):
            device = self._candidates[position]
            if self._in_use(part, device) or not self._selects(part, device) or not self._has_room(part, device):
                continue
            outcome = self._with(part, device, done, position + 1)
            if outcome in (BranchOutcome.FITS, BranchOutcome.TOO_MANY):
                return outcome
        return BranchOutcome.NONE

    def _with(self, part: RequestPart, device: AllocatableDevice, done: int, start: int) -> BranchOutcome | None:
        """The rest of the search with ``device`` taken; None if it can't be."""
        undo = self._take(part, device)
        if undo is None:
            return None
        outcome = self._devices(part, done + 1, start)
        if outcome is not BranchOutcome.FITS:
            undo.close()
        return outcome

    def _in_use(self, part: RequestPart, device: AllocatableDevice) -> bool:
        taken = self._taken.get(device.id, ())
        if part.alternative.admin_access:
            return part.claim in taken
        return bool(taken) or device.id in self._held.devices

    def _has_room(self, part: RequestPart, device: AllocatableDevice) -> bool:
        used = self._held.capacity.get(device.id, {}), *self._shared.get(device.id, ())
        return has_room(part.requested, device.entry.capacity, *used)

    def _take(self, part: RequestPart, device: AllocatableDevice) -> ExitStack | None:
        """Take ``device`` for a request that selects it; None if that is impossible, else what undoes it."""
        if self._in_use(part, device):
            return None
        of_others = device.id in self._held.shared or self._shared[device.id]
        is_shared = device.entry.allow_multiple_allocations and of_others
        with ExitStack() as undo:
            # The first share of a device takes its counters for all.
            if not is_shared and not self._consume(device, undo):
                return None
            taints = (taint for taint in device.entry.taints if taint.effect in BLOCKING)
            if not all(taint.is_tolerated(part.alternative.tolerations) for taint in taints):
                return None
            if not self._constrain(part, device, undo) or not self._has_room(part, device):
                return None
            self._record(part, device, undo)
            return undo.pop_all()

    def _consume(self, device: AllocatableDevice, undo: ExitStack) -> bool:
        """Take the counters that ``device`` consumes, which there may not be; a pool with a debt gives nothing."""
        if not device.entry.consumes_counters:
            return True
        pool = PoolId(device.id.driver, device.id.pool)
        remaining, amounts = self._left[pool], device.consumption
        subtract(remaining, amounts)
        undo.callback(subtract, remaining, amounts, -1)
        return pool not in self._overdrawn and all(remaining[counter] >= 0 for counter in amounts)

    def _constrain(self, part: RequestPart, device: AllocatableDevice, undo: ExitStack) -> bool:
        """Add ``device`` to the constraints of the claim, which may not allow it. Raises AllocationError."""
        for constraint in self._constraints[part.claim]:
            if not constraint.applies(part.names):
                continue
            if not constraint.add(device):
                if part.all_devices is None:
                    return False
                name = part.names[-1]
                message = f"request {name} takes all devices, but a constraint does not allow {device.id.device}"
                raise AllocationError(FailureKind.CONSTRAINT, message)
            undo.callback(constraint.remove)
        return True

    def _record(self, part: RequestPart, device: AllocatableDevice, undo: ExitStack) -> None:
        result = Result(part.names[-1], *device.id, part.alternative.admin_access or None)
        if device.entry.allow_multiple_allocations:
            taken = consumed(part.requested, device.entry.capacity)
            self._shared[device.id].append(taken)
            undo.callback(self._shared[device.id].pop)
            amounts = {name: written(amount) for name, amount in taken.items()}
            result = msgspec.structs.replace(result, share_id=SHARE_ID, consumed_capacity=amounts or None)
        else:
            self._taken[device.id].add(part.claim)
            undo.callback(self._taken[device.id].discard, part.claim)
        self._results[part.claim].append((result, device))
        undo.callback(self._results[part.claim].pop)


def _left_of(pool: DevicePool, held: HeldDevices) -> Counters:
    """What the allocated devices of a pool leave of its counters."""
    remaining = dict(pool.counters)
    for device in (*pool.candidates, *pool.elsewhere):
        if device.id in held.devices or device.id in held.shared:
            subtract(remaining, device.consumption)
    return remaining


def subtract(left: Counters, amounts: Counters, sign: int = 1) -> None:
    """Subtract ``amounts``, or add them."""
    for counter, amount in amounts.items():
        left[counter] -= sign * amount


def _matches(device: AllocatableDevice, owner: str, selector: DeviceSelector) -> bool:
    """Whether a selector of ``owner`` matches. Raises AllocationError where the scheduler can't tell."""
    if selector.cel is None:
        raise AllocationError(FailureKind.UNKNOWN_KIND, f"{owner} has a selector of an unknown kind")
    program = try_compile(selector.cel.expression)
    verdict = str(program) if isinstance(program, CelError) else program.verdict(device.cel)
    if isinstance(verdict, str):
        message = f"{owner}: {selector.cel.expression} on device {'/'.join(device.id)}: {verdict}"
        raise AllocationError(FailureKind.SELECTOR, message)
    return verdict
