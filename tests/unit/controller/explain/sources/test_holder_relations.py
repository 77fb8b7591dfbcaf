"""Claims whose devices are held by pods that matter less, or by older pods of the same Deployment."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controller.cluster.claim_index import PoolDevice, gpu_of, reservations_in
from controller.explain.pipeline import ReasonFinder
from controller.explain.reason import ReasonCode
from controller.explain.situation import Situation as Now
from driver.kube.types import Pod
from tests.support.clock import FakeClock
from tests.support.gpus import H100
from tests.support.queues import FULL, Situation, fleet_gpu, request
from tests.support.reasons import Answers

HOLDERS = ("one", "two", "three")


def pod(name: str, revision: str | None = None, **spec: Any) -> Pod:
    owner = {"kind": "ReplicaSet", "name": f"web-{revision}", "uid": "x", "controller": True, "apiVersion": "apps/v1"}
    metadata: dict[str, Any] = {"name": name, "namespace": "default", "uid": name, "resourceVersion": "1"}
    if revision is not None:
        metadata |= {"labels": {"pod-template-hash": revision}, "ownerReferences": [owner]}
    return msgspec.convert({"metadata": metadata, "spec": spec}, Pod)


class Waiting:
    """A pod of a Deployment, of priority 1000, that waits for a full GPU; three claims hold those of the node."""

    def __init__(self, **holders: Pod) -> None:
        there = Situation([fleet_gpu("a", number, H100, "full") for number in range(len(HOLDERS))])
        for number, name in enumerate(HOLDERS):
            there.holding(name, "a", f"gpu-{number}")
        there.wants(request(selector=FULL), priority=1000)
        there.pods = [msgspec.structs.replace(there.pods[0], metadata=pod("new", "bbbb").metadata)]
        self.there, self.answers, self.clock = there, Answers(pods=holders), FakeClock()
        self.finder = ReasonFinder(60.0, self.clock)

    def sentence(self, *fenced: PoolDevice) -> str:
        self.clock.advance(5.0)
        reserved = {gpu_of(entry): uids for entry, uids in reservations_in(fenced).items()}
        [reason] = self.finder.find(Now(self.there.queue, lookups=self.answers, reserved=reserved))
        assert reason.code is ReasonCode.HELD
        return reason.sentence


@pytest.mark.parametrize(
    ("holders", "relation"),
    [
        pytest.param({}, "", id="holders that can not be read"),
        pytest.param({"one": pod("x", priority=1000)}, "", id="nothing in common"),
        pytest.param({"one": pod("x", "bbbb", priority=1000)}, "", id="replicas of the same template"),
        pytest.param(
            {"one": pod("x", priority=1000), "two": pod("old", "aaaa", priority=2000)},
            "; older pods of its own Deployment are among the holders: set its strategy to maxSurge 0",
            id="rolling update",
        ),
        pytest.param(
            {"one": pod("low", priority=10), "two": pod("lower", priority=5)},
            "; pod default/lower has one and a lower priority (5 < 1000), but Kubernetes does not preempt",
            id="lower priority",
        ),
    ],
)
def test_the_reason_says_how_the_holders_relate_to_the_pod(holders: dict[str, Pod], relation: str) -> None:
    waiting = Waiting(**holders)
    sentences = [waiting.sentence() for _ in HOLDERS]
    assert relation in sentences[-1]
    assert sentences[-1].endswith("default/one, default/three, default/two") == (not relation)


def test_instead_it_says_that_a_gpu_is_reserved_for_the_pod() -> None:
    waiting = Waiting(one=pod("low", priority=10))
    uid = waiting.there.queue.pending[0].claim.metadata.uid
    said = waiting.sentence(PoolDevice("a-gpu.tessera.dev", f"gpu-0={uid}"))
    assert said.endswith(
        "; gpu-0 of pool a-gpu.tessera.dev is reserved for it and free once the evicted pods have ended"
    )
    assert "lower priority (10 < 1000)" in waiting.sentence(PoolDevice("a-gpu.tessera.dev", "gpu-0=other"))


def test_a_decision_looks_up_few_holders_and_each_of_them_once() -> None:
    waiting = Waiting(**{name: pod(name) for name in HOLDERS})
    waiting.sentence()
    assert len(waiting.answers.asked) == 2
    for _ in range(4):
        waiting.sentence()
    assert sorted(claim.name for claim in waiting.answers.asked) == sorted(HOLDERS)
