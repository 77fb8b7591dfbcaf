"""Doing exactly the moves that are named makes the waiting claim fit, and satisfies every claim that is moved.

The judge is the scheduler's allocator in Python, as in ``test_reasons_are_true``.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controller.cluster.fleet import Fleet
from controller.explain.sources.moves import HeldDevice, Move, moves_that_help
from controller.explain.sources.no_free_device import Reasoning
from driver.kube.types import Claim, ClaimStatus, Pod
from driver.model.device import Device
from driver.model.offer import DeviceKind, OfferKind
from driver.model.plan import OfferMode
from driver.slices.slice_names import Pool
from tessera.simulate.allocator import allocate
from tessera.simulate.capacity import HeldDevices
from tessera.simulate.imagined_cluster import PublishedSlices, tainted
from tessera.simulate.pools import SliceIndex
from tests.conformance.reasons.statements import held
from tests.property.test_reasons_are_true import fits
from tests.support.fleets import possible
from tests.support.gpus import H100
from tests.support.queues import DRIVER, FULL, Situation, fleet_gpu, profile, request, selected_by

A100 = "NVIDIA A100-SXM4-80GB"
REPAIR = {"key": "repair", "effect": "NoSchedule"}
TOLERATION = [{"key": REPAIR["key"], "operator": "Exists"}]
MATCHING = [{"matchAttribute": f"{DRIVER}/parentUUID"}]
SIZES = ("1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb")


class Scattered:
    """Nodes with partitions, each of a claim with a pod of its own, and one claim for full GPUs."""

    def __init__(self, draw: st.DrawFn) -> None:
        product = draw(st.sampled_from([H100, H100, H100, A100]))
        of_b = draw(st.sampled_from([product, product, product, H100]))
        products = {"a": product, "b": of_b, "c": product}
        self.there = Situation(
            [fleet_gpu(name, number, products[name]) for name in products for number in range(draw(st.integers(1, 3)))]
        )
        for name in products:
            self.there.node(name, {"pool": draw(st.sampled_from("xy"))})
        self.pods: dict[str, Pod] = {}
        for number in range(draw(st.integers(2, 6))):
            self._hold(draw, f"held-{number}", draw(st.sampled_from([1, 1, 2])))
        if draw(st.integers(0, 3)) == 0:
            self.there.taint_rule("repair", {"pool": f"{draw(st.sampled_from('abc'))}-{DRIVER}"}, **REPAIR)
        tolerations = draw(st.sampled_from([[], TOLERATION]))
        full_gpus = request(selector=FULL, count=draw(st.integers(1, 3)), tolerations=tolerations)
        self.there.wants(full_gpus, **draw(selectors()))

    def _hold(self, draw: st.DrawFn, name: str, count: int) -> None:
        """Devices of one size for a claim, on one node."""
        size, node = draw(st.sampled_from(SIZES)), draw(st.sampled_from(self.there.gpus)).node
        results = list[dict[str, str]]()
        for _ in range(count):
            free = [
                (index, device)
                for index, gpu in enumerate(self.there.gpus)
                for device in possible(gpu)
                if gpu.node == node and device.spot.kind == OfferKind(DeviceKind.PARTITION, size)
            ]
            if not free:
                return
            index, device = draw(st.sampled_from(free))
            gpu = self.there.gpus[index]
            self.there.gpus[index] = gpu.holding((*gpu.held, device))
            results.append({"request": "gpu", "driver": DRIVER, "pool": f"{node}-{DRIVER}", "device": device.name})
        more = draw(st.sampled_from(["", "", "placementStart < 4", f'parentUUID != "{self.there.gpus[0].gpu.uuid}"']))
        selector = selected_by(f'profile == "{size}"', *filter(None, [more])) if more else profile(size)
        tolerations = draw(st.sampled_from([[], [], TOLERATION]))
        status = {"allocation": {"devices": {"results": results}}}
        asked = request(selector=selector, count=count, tolerations=tolerations)
        constraints = draw(st.sampled_from([[], [], MATCHING]))
        self.there.claim(name, asked, constraints=constraints, status=status)
        raw = {"metadata": {"name": name}, "spec": {"nodeName": node, **draw(selectors())}}
        self.pods[f"default/{name}"] = msgspec.convert(raw, Pod)

    def moves(self) -> tuple[Move, ...]:
        reasoning = Reasoning(self.there.queue)
        pending = reasoning.queue.pending[0]
        queue = reasoning.for_claim(pending).queue

        def may_go(item: HeldDevice, node: str) -> bool:
            return node == item.gpu.node or self.runs_on(item.claim, node)

        return () if queue.satisfiable(pending) else moves_that_help(queue, pending.pods[0], may_go)

    def runs_on(self, claim: str, node: str) -> bool:
        """Whether the pod of ``claim`` may run there, by its node selector."""
        return self.pods[claim].spec.node_selector.items() <= self.there.nodes[node].metadata.labels.items()

    def after(self, moves: tuple[Move, ...]) -> Situation:
        """The cluster after these moves."""
        there, gpus = copy(self.there), {gpu.gpu.uuid: gpu for gpu in self.there.gpus}
        for move in moves:
            uuid = move.source.gpu.uuid
            gpus[uuid] = gpus[uuid].holding(at for at in gpus[uuid].held if at.name != move.device.name)
        claims = {str(claim.metadata.key): claim for claim in there.claims}
        for move in moves:
            uuid = move.target.gpu.uuid
            device = gpus[uuid].device(move.spot)
            assert device is not None
            assert gpus[uuid].state.fits(device), "its place is free"
            gpus[uuid] = gpus[uuid].holding((*gpus[uuid].held, device))
            claims[move.claim] = moved(claims[move.claim], move, device)
        there.gpus, there.claims = [gpus[gpu.gpu.uuid] for gpu in self.there.gpus], list(claims.values())
        return there


def selectors() -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from([{}, {}, {"nodeSelector": {"pool": "x"}}])


def moved(claim: Claim, move: Move, device: Device) -> Claim:
    """``claim`` with ``device`` in place of the one that is moved."""
    allocation = claim.status.allocation
    assert allocation is not None
    before, pool = (Pool(move.source.node, DRIVER).name, move.device.name), Pool(move.target.node, DRIVER).name
    results = tuple(
        replace(result, pool=pool, device=device.name) if (result.pool, result.device) == before else result
        for result in allocation.devices.results
    )
    assert results != allocation.devices.results
    return replace(claim, status=ClaimStatus(replace(allocation, devices=replace(allocation.devices, results=results))))


def is_satisfied(there: Situation, claim: Claim) -> bool:
    """Whether the scheduler would give ``claim`` exactly the devices that it has."""
    taken = {(result.pool, result.device) for result in claim.results}
    [pool] = {result.pool for result in claim.results}
    node = pool.removesuffix(f"-{DRIVER}")
    mine = [device for gpu in there.gpus if gpu.node == node for device in gpu.held if (pool, device.name) in taken]
    fleet = Fleet.of(gpu.holding(at for at in gpu.held if at not in mine) for gpu in there.gpus)
    slices = PublishedSlices(DRIVER, OfferMode.COUNTERS, {}).of(fleet, [device.offer for device in mine])
    others = [result for result in held(there) if (result.pool, result.device) not in taken]
    index = SliceIndex(tainted(written, there.taint_rules) for written in slices)
    unallocated = replace(claim, status=ClaimStatus())
    return allocate([unallocated], there.nodes[node], index, there.classes, HeldDevices.of(others)) is not None


@given(st.composite(Scattered)())
def test_the_moves_that_are_named_make_the_claim_fit_and_satisfy_every_claim_that_is_moved(there: Scattered) -> None:
    moves = there.moves()
    if not moves:
        return
    before, after = there.there, there.after(moves)
    assert not fits(before)
    assert fits(after)
    for name in {move.claim for move in moves}:
        [then], [claim] = ([claim for claim in at.claims if str(claim.metadata.key) == name] for at in (before, after))
        # A device that stays may be tainted by now, or not selected.
        assert is_satisfied(after, claim) or not is_satisfied(before, then)
        [node] = {result.pool.removesuffix(f"-{DRIVER}") for result in claim.results}
        assert there.runs_on(name, node) or node == there.pods[name].spec.node_name
