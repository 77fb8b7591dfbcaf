"""What the caches keep of objects that tenants write."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from controller.cluster.cache import _kept_claim
from driver.kube.types import Claim
from tests.support.queues import request


def claim(number: int, length: int) -> Claim:
    spec = {"devices": {"requests": [request(selector=f"{number} == 1 && " + "x" * length)]}}
    return msgspec.convert({"metadata": {"name": f"claim-{number}", "namespace": "team"}, "spec": spec}, Claim)


def test_large_specs_of_claims_that_are_gone_take_no_memory() -> None:
    tracemalloc.start()
    for number in range(200):
        assert _kept_claim(claim(number, 100_000)).spec == claim(number, 100_000).spec
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 5_000_000


@pytest.mark.parametrize("is_allocated", [False, True])
def test_of_a_claim_that_waits_it_is_kept_which_pod_it_was_made_for(is_allocated: bool) -> None:
    """The status of that pod may not name it for a moment."""
    owners = [{"kind": "Other", "name": "a", "uid": "a"}, {"kind": "Pod", "name": "b", "uid": "b", "controller": True}]
    metadata = {"name": "claim", "namespace": "team", "ownerReferences": owners}
    status: dict[str, Any] = {"allocation": {"devices": {"results": []}}} if is_allocated else {}
    kept = _kept_claim(msgspec.convert({"metadata": metadata, "status": status}, Claim)).metadata
    assert [owner.uid for owner in kept.owner_references] == ([] if is_allocated else ["b"])


def test_equal_specs_are_kept_once() -> None:
    assert _kept_claim(claim(0, 100)).spec is _kept_claim(claim(0, 100)).spec
