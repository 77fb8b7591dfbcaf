"""What is said of pending claims is true: each statement is checked by doing what it says.

The judge is the scheduler's allocator in Python, which gives the same answers as the real scheduler
(`make conformance-allocator`). `make conformance-reasons` asks the real scheduler itself.
"""

from __future__ import annotations

from hypothesis import given

from controller.explain.changes import changes_that_help
from controller.explain.reasons import Reasoning
from tessera.simulate.allocator import allocate
from tessera.simulate.capacity import Allocated
from tessera.simulate.pools import SliceIndex
from tests.conformance.reasons.statements import held, published, questions, situations, smaller_releases
from tests.support.queues import Situation


def fits(there: Situation) -> bool:
    """Whether the scheduler finds devices for the pending claim on a node that its pod may run on."""
    slices, allocated = SliceIndex(published(there)), Allocated.of(held(there))
    pending = there.waiting()
    nodes = there.queue.nodes(pending)
    return any(
        allocate([pending.claim], node, slices, there.classes, allocated) is not None
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
    queue = there.queue
    reason = Reasoning(queue).of(queue.pending[0])
    releases = [each for each in changes_that_help(queue, Reasoning(queue), queue.pending[0]) if each.kind == "release"]
    if reason is not None and not reason.permanent:
        assert len(releases) == 1, reason.sentence
    for question in smaller_releases(there):
        assert not fits(question.there), question.sentence
