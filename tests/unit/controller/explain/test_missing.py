"""Pods that refer to claims which do not exist."""

from __future__ import annotations

from typing import Any

import pytest

from controller.explain.missing import missing_claims
from tests.support.queues import FULL, Situation, node_of, request

SEEN = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "not found"}]}
CREATED = {"resourceClaimStatuses": [{"name": "template", "resourceClaimName": "claim"}]}


@pytest.mark.parametrize(
    ("claims", "status", "part"),
    [
        pytest.param([{"name": "a", "resourceClaimName": "nope"}], SEEN, "ResourceClaim nope, which", id="no claim"),
        pytest.param([{"name": "a", "resourceClaimName": "claim"}], SEEN, "", id="it exists"),
        pytest.param([{"name": "a", "resourceClaimName": "nope"}], {}, "", id="no scheduler has looked yet"),
        pytest.param([{"name": "template"}], SEEN, "template has not been created", id="no claim of a template"),
        pytest.param([{"name": "template"}], {**SEEN, **CREATED}, "", id="the claim of a template exists"),
    ],
)
def test_a_pod_without_its_claim_is_told_which_one_is_missing(
    claims: list[dict[str, str]], status: dict[str, Any], part: str
) -> None:
    there = Situation(node_of("a"))
    there.claim("claim", request(selector=FULL))
    there.pod("pod", status=status, resourceClaims=claims)
    found = [each.sentence for each in missing_claims(there.queue.cluster)]
    assert len(found) == bool(part)
    assert all(part in sentence for sentence in found)
