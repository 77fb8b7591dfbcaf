"""What is said of pending claims is true: each statement is checked by doing what it says.

The judge is the scheduler's allocator in Python, which gives the same answers as the real scheduler
(`make conformance-allocator`). `make conformance-reasons` asks the real scheduler itself.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from controller.cluster.fleet import Fleet, FleetGpu
from controller.demand.feasibility import Matching
from controller.demand.node_eligibility import Eligibility
from controller.demand.pending_claims import Queue
from controller.explain.helpful_changes import changes_that_help
from controller.explain.sources.no_free_device import KnownReasons
from tessera.simulate.allocator import allocate
from tessera.simulate.capacity import HeldDevices
from tessera.simulate.imagined_cluster import tainted
from tessera.simulate.pools import SliceIndex
from tests.conformance.reasons.statements import held, published, questions, reasoning_of, situations, smaller_releases
from tests.support.fleets import possible
from tests.support.queues import DRIVER, FULL, Situation, profile, request
from tests.support.reasons import reasons_of


def fits(there: Situation) -> bool:
    """Whether the scheduler finds devices for the claims of the pending pod on a node that it may run on."""
    slices = SliceIndex(tainted(each, there.taint_rules) for each in published(there))
    allocated = HeldDevices.of(held(there))
    queue = there.queue
    claims, nodes = [each.claim for each in queue.pending], queue.nodes(queue.pending[0])
    return any(
        allocate(claims, node, slices, there.classes, allocated) is not None
        for name, node in sorted(there.nodes.items())
        if name in nodes
    )


@given(situations())
def test_everything_that_is_said_of_a_claim_is_true(there: Situation) -> None:
    """Whether it fits, whether it would if all others ended, and whether each change that is named helps."""
    for question in questions(there):
        assert fits(question.there) == question.expected, question.sentence


@given(situations())
def test_if_the_end_of_claims_would_help_the_fewest_are_named(there: Situation) -> None:
    reasoning, pending = reasoning_of(there)
    reason = reasoning.reason(pending)
    releases = [each for each in changes_that_help(reasoning, pending) if each.kind == "release"]
    if reason is not None and not reason.permanent:
        assert len(releases) == 1, reason.sentence
    for question in smaller_releases(there):
        assert not fits(question.there), question.sentence


@st.composite
def changed_gpu(draw: st.DrawFn, entry: FleetGpu) -> FleetGpu:
    """With a device less or more that is held, or with another fault."""
    changes = [entry.holding(entry.held[1:]), replace(entry, fault=draw(st.sampled_from([None, "Xid 79"])))]
    changes += [entry.holding((*entry.held, each)) for each in possible(entry)[:3]]
    return draw(st.sampled_from(changes))


@given(situations(), st.data())
def test_a_reason_is_the_same_whatever_earlier_decisions_have_found(there: Situation, data: st.DataObject) -> None:
    known, fleet, eligibility = KnownReasons(), Fleet.of(there.gpus), Eligibility(there.nodes.values())
    for step in range(4):
        objects = there.queue.cluster
        remembered = reasons_of(Queue(objects, fleet, there.matching, eligibility), known=known)
        alone = reasons_of(Queue(objects, Fleet.of(replace(entry) for entry in fleet), Matching(DRIVER)))
        assert [each[1:] for each in remembered] == [each[1:] for each in alone]
        chosen = data.draw(st.sampled_from(list(fleet)))
        fleet = fleet.changed([data.draw(changed_gpu(chosen))])
        selector = data.draw(st.sampled_from([FULL, profile("3g.40gb")]))
        pool = data.draw(st.sampled_from("xyz"))
        there.wants(request(selector=selector), name=f"later-{step}", nodeSelector={"pool": pool})
