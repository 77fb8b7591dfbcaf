"""Whoever looks at a cluster is told the same: the leader's Events and page, a standby's page, and the commands.

Each situation has been so for a while, so that nobody waits for a scheduler or a node any more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from controller.curation.counters_planner import CountersPlanner
from controller.curation.disjoint_planner import DisjointPlanner
from controller.curation.overdue_claims import OverdueClaims
from controller.curation.reservation import WAIT_SECONDS, Reservations
from controller.demand.demand import demand_of
from controller.explain.pipeline import OVERDUE_SECONDS, ReasonFinder
from controller.explain.reason import ReasonCode
from controller.explain.situation import DisjointPlan
from controller.report.claim_explainer import OTHER_DRIVERS, Explainer
from controller.report.cluster_view import ClusterView
from driver.kube.types import Claim
from driver.model.device import shared_device
from driver.model.offer import Offer
from driver.model.plan import OfferMode
from driver.model.reported_gpus import GpuReport
from driver.placement.ranking import Ranking
from tessera.simulate.imagined_cluster import ClusterContent, ImaginedCluster
from tests.conformance.reasons.statements import situations
from tests.support.clock import FakeClock
from tests.support.map_cluster import MapCluster
from tests.support.queues import DRIVER, FULL, SHARE, profile, request
from tests.support.queues import Situation as Objects
from tests.support.shared_gpus import memory, shared_memory, shared_result

Said = Mapping[str, tuple[str, str]]
"""Code and sentence by key of the claim."""

SINCE = re.compile(r" since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
"""Since when a device is offered: only who watches knows it."""

OF_OFFERS = {
    ReasonCode.WAITS,
    ReasonCode.UNUSED,
    ReasonCode.NOT_PUBLISHED,
    ReasonCode.TAINTED,
    ReasonCode.RESHAPING,
    ReasonCode.BEHIND,
}
"""Reasons of claims that a simulation places, or for which it publishes something else."""


@st.composite
def recorded(draw: st.DrawFn) -> MapCluster:
    """A cluster with more claims than one, some nodes that have not reported, and offers of an earlier decision."""
    objects = draw(situations())
    if draw(st.booleans()):
        share_memory(objects, draw)
    selectors = st.sampled_from([FULL, SHARE, profile("1g.10gb"), profile("3g.40gb"), profile("9g.90gb")])
    for number in range(draw(st.integers(0, 3))):
        refused = draw(st.booleans())
        asked = memory(draw(st.sampled_from(AMOUNTS))) if draw(st.booleans()) else request(selector=draw(selectors))
        objects.wants(asked, name=f"other-{number}", status=REFUSED if refused else {})
    mode = draw(st.sampled_from(OfferMode))
    cluster = with_plans(objects, mode)
    before = MapCluster(Objects(objects.gpus), cluster.reports, cluster.plans)
    offers = decided((before if draw(st.booleans()) else cluster).view(), mode)
    for gpu in objects.gpus:
        devices = [device.name for device in gpu.devices if device.offer in offers]
        cluster.offers(gpu.node, *(name for name in devices if draw(st.integers(0, 3))))
    if draw(st.booleans()):
        cluster.node("silent", {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}})
    return cluster


AMOUNTS = ("6Gi", "1500Mi", "39Gi", "100Gi", None)
"""Memory that claims request of shared GPUs."""


def share_memory(objects: Objects, draw: st.DrawFn) -> None:
    """Claims may share some of the GPUs of which nothing is held, by memory."""
    for place, gpu in enumerate(objects.gpus):
        if not gpu.held and draw(st.booleans()):
            shared = replace(gpu, shared=shared_memory(40))
            parts = draw(st.lists(st.integers(1, 13), max_size=3))
            for number, part in enumerate(parts):
                result = shared_result(gpu.node, gpu.number, f"{part}Gi")
                status = {"allocation": {"devices": {"results": [result]}}}
                objects.claim(f"part-{place}-{number}", memory(f"{part}Gi"), status=status)
            held = (shared_device(gpu.gpu, gpu.number, shared_memory(40), part) for part in parts)
            objects.gpus[place] = shared.holding(held)


REFUSED = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 cannot allocate all claims. still not schedulable",
        }
    ]
}


def with_plans(objects: Objects, mode: OfferMode) -> MapCluster:
    """The cluster as its node plugins report it."""
    cluster = MapCluster(objects)
    for gpu in objects.gpus:
        report = GpuReport(gpu.gpu, gpu.number, gpu.shares, gpu.shares_only, gpu.foreign, gpu.fault, shared=gpu.shared)
        cluster.reports.setdefault(gpu.node, []).append(report)
        cluster.plans[gpu.node] = {"spec": {"offerMode": mode.value}}
        cluster.held.setdefault(gpu.node, {}).update({device.name: max(1, gpu.shares) for device in gpu.held})
    return cluster


def decided(view: ClusterView, mode: OfferMode) -> set[Offer]:
    if mode is OfferMode.DISJOINT:
        return {*DisjointPlanner(Ranking()).curate(view.queue, [], {}).offers}
    return {*CountersPlanner(Ranking()).curate(view.fleet, demand_of(view.queue), [])}


def of_leader(view: ClusterView, mode: OfferMode) -> Said:
    """What the leader says in its decision after it has seen the same for a while."""
    clock = FakeClock()
    finder, reservations = ReasonFinder(OVERDUE_SECONDS, clock), Reservations(clock.monotonic)
    overdue_claims = OverdueClaims(clock.monotonic)
    said: Said = {}
    for _ in range(3):
        plan = None
        if mode is OfferMode.DISJOINT:
            turns, reserved = overdue_claims.node_in_turn(view.queue), reservations.update(view.queue)
            chosen = DisjointPlanner(Ranking()).curate(view.queue, view.devices.offered, turns, reserved)
            offers = view.devices.offerable(chosen.offers, view.snapshot.plans)
            plan = DisjointPlan(chosen.by_claim or {}, view.devices.obstacles(offers, ()))
        situation = replace(view.situation, plan=plan)
        said = {reason.pending.key: (reason.code, reason.sentence) for reason in finder.find(situation)}
        clock.advance(WAIT_SECONDS)
    return said


def of_views(view: ClusterView) -> Said:
    """What the page of a standby, ``tessera why`` and ``tessera status`` say."""
    explained = [each for each in Explainer(view).pending(lambda: False) if each.code != OTHER_DRIVERS]
    return {each.claim or f"Pod/{each.pods[0].metadata.key}": (each.code, each.message) for each in explained}


def of_simulation(view: ClusterView, claims: Sequence[Claim], mode: OfferMode) -> Said:
    """What ``tessera simulate --cluster`` says of the pods that it does not place, of each in the cluster as it is."""
    cluster = view.snapshot.cluster
    content = ClusterContent(
        fleet=view.fleet,
        nodes=cluster.nodes,
        classes={each.metadata.name: each for each in cluster.classes},
        claims=tuple(claims),
        mode=mode,
        rules=cluster.taint_rules,
        unreported=view.situation.unreported,
        offers=frozenset(view.devices.offered),
    )
    said: dict[str, tuple[str, str]] = {}
    for pod in view.queue.pods:
        placed = ImaginedCluster(DRIVER, content).place(pod)
        said |= {reason.claim: (reason.code, reason.sentence) for reason in placed.reasons if reason.code}
    return said


def without_times(said: Said) -> Said:
    return {key: (str(code), SINCE.sub("", sentence)) for key, (code, sentence) in said.items()}


@given(recorded())
def test_leader_standby_and_commands_say_the_same_of_each_pending_claim(cluster: MapCluster) -> None:
    view = cluster.view()
    modes = {plan.spec.offer_mode for name, plan in view.snapshot.plans.items() if name != "silent"}
    [mode] = modes
    leader = without_times(of_leader(view, mode))
    assert without_times(of_views(cluster.view())) == leader


@given(recorded())
def test_a_simulation_says_of_what_is_not_free_what_the_leader_says(cluster: MapCluster) -> None:
    view = cluster.view()
    [mode] = {plan.spec.offer_mode for name, plan in view.snapshot.plans.items() if name != "silent"}
    leader = without_times(of_leader(view, mode))
    for key, (code, sentence) in without_times(of_simulation(view, cluster.situation.claims, mode)).items():
        if leader[key][0] not in OF_OFFERS:
            assert (code, sentence) == leader[key], (code, sentence, leader[key])
