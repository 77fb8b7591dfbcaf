"""What a node has for a pod's requests for devices of other drivers, such as NICs, and why the scheduler takes none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec

from controller.cluster.fleet import FleetGpu
from controller.demand.node_eligibility import BLOCKING
from controller.demand.pending_claims import PendingClaim, Queue
from controller.demand.selected_devices import Selector
from controller.explain.situation import Lookups
from controller.explain.sources.causes_in_pods_and_claims import LookedUp
from controller.explain.sources.selected_gpus import listed, named_rule
from controller.explain.sources.selector_sentences import brief
from deviceclasses.cel.engine import from_slice_device
from driver.errors import CelError
from driver.kube.slice_types import DetailedDevice, DetailedSlice, newest_generation
from driver.kube.types import ExactDeviceRequest, Key, Pod, Request
from driver.model.offer import Spot

DRIVER = re.compile(r"device\.driver\s*==\s*[\"']([^\"']+)[\"']")
"""The name of the driver in a selector."""

MAX_EXAMINED = 256
"""Devices of a node that are compared with a request."""


class _Need(NamedTuple):
    """A request for devices of ``driver``. ``attributes``: those that its devices share with those of ours."""

    claim: PendingClaim
    request: Request
    alternative: ExactDeviceRequest
    driver: str
    attributes: tuple[str, ...]

    @property
    def key(self) -> Key:
        return self.claim.claim.metadata.key


class UnmetNeed(NamedTuple):
    """What a node has for a request.

    permanent  the end of other claims does not help
    seems_met  no cause is known why the scheduler takes nothing for it
    """

    text: str
    permanent: bool = True
    seems_met: bool = False


@dataclass(frozen=True)
class OtherDrivers:
    """For one situation. ``looked_up``: the slices of other drivers, looked up again after a while."""

    queue: Queue
    lookups: Lookups
    looked_up: LookedUp

    def unmet(
        self, pending: PendingClaim, pod: Pod, node: str, offered: Sequence[tuple[FleetGpu, Spot]]
    ) -> list[UnmetNeed]:
        """The requests of the pod's claims that are for no device of ours, and what ``node`` has for each.

        Those that seem to be met are left out if others are not. ``offered``: our devices that the node offers.
        """
        needs = []
        for need in (need for claim in self.queue.of_pod(pod) for need in self._of_claim(claim)):
            of_claim = "" if need.claim is pending else f" of claim {need.key.name}"
            name = f"request {need.request.name}{of_claim} (class {need.alternative.device_class_name})"
            has = self._has_for(need, node, offered)
            needs.append(has._replace(text=f"{name}: {has.text}"))
        return [need for need in needs if not need.seems_met] or needs

    def _of_claim(self, claim: PendingClaim) -> list[_Need]:
        ours = {request.name for request in self.queue.requests(claim)}
        devices = claim.claim.spec.devices
        needs = []
        for request in devices.requests:
            names = {request.name_of(alternative) for alternative in request.alternatives}
            if ours & names or any(alternative.admin_access for alternative in request.alternatives):
                continue
            shared = [
                constraint.match_attribute
                for constraint in devices.constraints
                if ours and constraint.match_attribute and request.name in (constraint.requests or (request.name,))
            ]
            alternative = request.alternatives[0]
            needs.append(_Need(claim, request, alternative, self._driver_of(alternative), tuple(shared)))
        return needs

    def _driver_of(self, alternative: ExactDeviceRequest) -> str:
        """The driver that the selectors name; empty if they name none."""
        of_class = (
            item.spec.selectors
            for item in self.queue.cluster.classes
            if item.metadata.name == alternative.device_class_name
        )
        selectors = chain.from_iterable((*of_class, alternative.selectors))
        named = (DRIVER.search(selector.cel.expression) for selector in selectors if selector.cel)
        return next((match[1] for match in named if match), "")

    def _has_for(self, need: _Need, node: str, offered: Sequence[tuple[FleetGpu, Spot]]) -> UnmetNeed:
        slices: Sequence[DetailedSlice] | None = None
        if need.driver:
            slices = self.looked_up.get(need.driver, partial(self.lookups.slices_of, need.driver))
        if slices is None or any(not item.spec.node_name for item in slices):
            # Not known, or some of its devices are not bound to a node.
            same = f" and the same {listed(need.attributes)} as the GPU" if need.attributes else ""
            return UnmetNeed(f"none that it selects{same} is free on node {node}")
        newest = newest_generation(slices, lambda item: (item.spec.pool.name, item.spec.pool.generation))
        pools = {pool: parts for pool, parts in newest.items() if parts[0].spec.node_name == node}
        if not any(part.spec.devices for parts in pools.values() for part in parts):
            others = sorted({item.spec.node_name for item in slices if item.spec.devices} - {node})
            have = "has" if len(others) == 1 else "have"
            elsewhere = f"only {listed(others)} {have} one" if others else "nor has any other"
            return UnmetNeed(f"node {node} has no device of {need.driver}, {elsewhere}")
        for pool, parts in pools.items():
            if len(parts) != parts[0].spec.pool.resource_slice_count:
                number = f"{len(parts)} of {parts[0].spec.pool.resource_slice_count} ResourceSlices"
                return UnmetNeed(
                    f"the scheduler takes none of {need.driver} from node {node}, whose pool {pool} is incomplete "
                    f"({number})"
                )
        devices = [(pool, device) for pool, parts in pools.items() for part in parts for device in part.spec.devices]
        return self._states(need, node, devices, offered)

    def _states(
        self,
        need: _Need,
        node: str,
        devices: Sequence[tuple[str, DetailedDevice]],
        offered: Sequence[tuple[FleetGpu, Spot]],
    ) -> UnmetNeed:
        """How many of ``devices``, all that the driver has on the node, can not be taken, and why."""
        reader, namespace = self.queue.reader, need.claim.claim.metadata.namespace
        selector = reader.selector_of_any(need.alternative, namespace, need.driver)
        users = self.queue.cluster.claims.users_of(need.driver)
        states: dict[str, list[str]] = {}
        usable = []
        for pool, device in devices[:MAX_EXAMINED]:
            state, holder = self._state(need, selector, pool, device), users.get((pool, device.name), "")
            if state is None and (not holder or device.allow_multiple_allocations):
                usable.append(device)
            elif state is None:
                states.setdefault("held", []).append(holder)
            else:
                states.setdefault(state, []).append("")
        holders = sorted(set(states.get("held", [])))
        by = f" by {'claim' if len(holders) == 1 else f'{len(holders)} claims:'} {listed(holders)}"
        only = len(devices) == 1
        parts = [
            f"{'' if only else f'{len(group)} '}{'is' if len(group) == 1 else 'are'} {state}{by * (state == 'held')}"
            for state, group in states.items()
        ]
        cause = self._of_usable(need, usable, offered) if usable else ""
        if usable:
            seems = f"{'seems' if len(usable) == 1 else 'seem'} to be free"
            parts.append(f"{'' if only else f'{len(usable)} '}{cause or seems}")
        all_of_them = "the only device" if only else f"of the {len(devices)} devices"
        text = f"{all_of_them} of {need.driver} on node {node}{' ' if only else ', '}{', '.join(parts)}"
        takes_all = need.alternative.takes_all
        held, count = len(states.get("held", [])), 1 if takes_all else need.alternative.count
        seems_met = bool(usable) and not cause and not (takes_all and states)
        return UnmetNeed(text, not held or held + len(usable) < count, seems_met)

    def _state(
        self, need: _Need, selector: Selector | CelError | None, pool: str, device: DetailedDevice
    ) -> str | None:
        """Why the request can not have the device, held or not; None: it could."""
        try:
            seen = from_slice_device(need.driver, msgspec.to_builtins(device))
        except CelError:  # an attribute of a kind that a later Kubernetes may have
            return None
        rejection = selector.rejection(seen) if isinstance(selector, Selector) else None
        if rejection is not None:
            return f"not selected by {brief(rejection.expression, need.driver)}"
        rules = self.queue.cluster.taint_rules
        taints = [(taint, f"taint {taint.text}") for taint in device.taints]
        taints += [
            (rule.spec.taint, named_rule(rule)) for rule in rules if rule.selects(need.driver, pool, device.name)
        ]
        for taint, text in taints:
            if taint.effect in BLOCKING and not taint.is_tolerated(need.alternative.tolerations):
                return f"tainted ({text})"
        return None

    def _of_usable(
        self, need: _Need, usable: Collection[DetailedDevice], offered: Sequence[tuple[FleetGpu, Spot]]
    ) -> str:
        """Why devices that are free and selected are not enough; empty if no cause is known."""
        is_free = "is free" if len(usable) == 1 else "are free"
        if not need.alternative.takes_all and len(usable) < need.alternative.count:
            return f"{is_free}, the request asks for {need.alternative.count}"
        value_of = self.queue.feasibility.matching.value
        count = len(usable) if need.alternative.takes_all else need.alternative.count
        for attribute in need.attributes:
            typed = [value for device in usable if (value := device.attribute(need.driver, attribute)) is not None]
            values = ((type(value), value) for _, value in typed if not isinstance(value, list))
            numbers: Counter[Hashable] = Counter(values)
            same = max((numbers[value_of(gpu, spot, attribute)] for gpu, spot in offered), default=0)
            if same < count:
                has_not = "has not" if len(usable) == 1 else "have not"
                has = f"only {same} {'has' if same == 1 else 'have'}" if same else has_not
                return f"{is_free}, but {has} the same {attribute} as the GPU"
        return ""
