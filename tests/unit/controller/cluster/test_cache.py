"""What the caches keep of objects that tenants write."""

from __future__ import annotations

import tracemalloc

import msgspec

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


def test_equal_specs_are_kept_once() -> None:
    assert _kept_claim(claim(0, 100)).spec is _kept_claim(claim(0, 100)).spec
