"""Pods that refer to claims which do not exist."""

from __future__ import annotations

import pytest

from controller.explain.missing import MissingClaims
from tests.support.clock import FakeClock
from tests.support.queues import FULL, Situation, node_of, request

OLD, YOUNG = "2026-11-21T00:00:00Z", "2026-11-21T00:16:39Z"
CREATED = {"resourceClaimStatuses": [{"name": "made", "resourceClaimName": "claim"}]}


@pytest.mark.parametrize(
    ("claims", "created", "part"),
    [
        pytest.param([{"name": "a", "resourceClaimName": "nope"}], OLD, "ResourceClaim nope, which", id="no claim"),
        pytest.param([{"name": "a", "resourceClaimName": "claim"}], OLD, "", id="it exists"),
        pytest.param([{"name": "a", "resourceClaimName": "nope"}], YOUNG, "", id="it may only be later"),
        pytest.param([{"name": "template"}], OLD, "template has not been created", id="no claim of a template"),
        pytest.param([{"name": "made"}], OLD, "", id="the claim of a template exists"),
    ],
)
def test_a_pod_without_its_claim_is_told_which_one_is_missing(
    claims: list[dict[str, str]], created: str, part: str
) -> None:
    there = Situation(node_of("a"))
    there.claim("claim", request(selector=FULL))
    there.pod("pod", status=CREATED, resourceClaims=claims, metadata={"creationTimestamp": created})
    missing = MissingClaims(FakeClock())
    reasons = missing.reasons(there.queue.cluster)
    assert all(each.pending.key == "Pod/default/pod" for each in reasons)
    found = [each.sentence for each in reasons]
    assert missing.next_s == (pytest.approx(1.0) if created == YOUNG else None)
    assert len(found) == bool(part)
    assert all(part in sentence for sentence in found)
