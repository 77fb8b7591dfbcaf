"""What Kueue's queued Workloads will claim: which of them count, and what must be published for them."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest

from controller.cluster.kueue_workloads import QueuedPod, QueuedWorkload, kept_workload
from controller.cluster.node_views import ALL_REPORTED
from controller.curation.listed_devices import ListedDevices
from controller.decision.explain import WorkloadReasons
from controller.demand.queued_workload_claims import WorkloadQueue, queued_needs
from driver.kube.types import ClaimSpec, KueueWorkload, Metadata, PodSpec
from driver.model.offer import Offer
from tests.support.queues import FULL, Situation, node_of, profile, request

SMALL = profile("1g.10gb")


def workload(name: str, *requests: dict[str, Any], **pod: Any) -> QueuedWorkload:
    """One pod set with one claim."""
    spec = msgspec.convert({"devices": {"requests": requests}}, ClaimSpec)
    return QueuedWorkload(
        Metadata(name=name, namespace="team", uid=name),
        (QueuedPod("workers", msgspec.convert(pod, PodSpec), {"gpu": spec}),),
    )


def queue_of(there: Situation, *workloads: QueuedWorkload) -> WorkloadQueue:
    of_pods = there.queue
    return WorkloadQueue(workloads, of_pods.cluster, of_pods.feasibility.fleet, there.matching)


def listed(there: Situation, *workloads: QueuedWorkload, lists: ListedDevices | None = None) -> frozenset[Offer]:
    queue = queue_of(there, *workloads)
    nodes = {entry.node for entry in there.gpus}
    found = lists or ListedDevices({}, 2)
    return found.update(queue.feasibility.fleet, nodes, queued_needs(queue))


def names(offers: frozenset[Offer]) -> list[str]:
    return sorted(str(offer).split("/", 2)[2].split("@")[0] for offer in offers)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        pytest.param([request(selector=FULL, count=3)], ["full"] * 3, id="full GPUs"),
        pytest.param([request(selector=SMALL, count=5)], ["1g.10gb"] * 5, id="partitions"),
        pytest.param([request(selector=SMALL, count=2), request(selector=FULL, name="b")], ["1g.10gb"] * 2 + ["full"]),
        pytest.param([request(selector=FULL, count=9)], ["full"] * 4, id="more than there are"),
        pytest.param([request(selector=FULL, count=40)], [], id="more than a claim may have"),
        pytest.param([request(selector=FULL, allocationMode="All")], [], id="all, which Kueue refuses"),
        pytest.param([request("no-such-class")], [], id="a class that is missing"),
        pytest.param([request(selector="device.driver ==")], [], id="a selector that is refused"),
    ],
)
def test_as_many_devices_are_published_as_a_queued_claim_asks_for(
    asked: list[dict[str, Any]], found: list[str]
) -> None:
    assert names(listed(Situation([*node_of("a", gpus=4)]), workload("train", *asked))) == found


def test_equal_requests_of_several_workloads_need_the_devices_once() -> None:
    there = Situation([*node_of("a", gpus=8)])
    queued = [workload(name, request(selector=FULL, count=count)) for name, count in (("a", 2), ("b", 5), ("c", 3))]
    assert names(listed(there, *queued)) == ["full"] * 5


def test_devices_are_listed_that_are_held_or_beside_held_ones() -> None:
    there = Situation([*node_of("a", "full", gpus=4)])
    assert names(listed(there, workload("train", request(selector=FULL, count=4)))) == ["full"] * 4
    assert names(listed(there, workload("infer", request(selector=SMALL, count=7)))) == ["1g.10gb"] * 7


def test_listed_devices_stay_the_same_until_no_workload_needs_them() -> None:
    there, lists = Situation([*node_of("a", gpus=4)]), ListedDevices({}, 2)
    train, infer = workload("train", request(selector=FULL, count=3)), workload("infer", request(selector=SMALL))
    first = listed(there, train, lists=lists)
    again = listed(there, infer, train, lists=lists)
    assert first < again
    assert listed(there, train, lists=lists) == first
    assert listed(there, lists=lists) == frozenset()


def test_a_selector_for_one_node_lists_devices_of_that_node() -> None:
    there = Situation([*node_of("a", gpus=2), *node_of("b", gpus=2)])
    only = 'device.attributes["gpu.tessera.dev"].uuid == "b/1" && ' + FULL
    assert {offer.gpu for offer in listed(there, workload("train", request(selector=only)))} == {"b/1"}


def test_a_workload_whose_devices_are_held_gets_the_reason_of_its_claim() -> None:
    there = Situation([*node_of("a", "full")]).holding("holder", "a", "gpu-0", "gpu-1")
    train = workload("train", request(selector=FULL, count=2))
    [(about, reason)] = WorkloadReasons().of(queue_of(there, train), ALL_REPORTED)
    assert (about.name, reason.code) == ("train", "AllHeld")
    assert reason.sentence.startswith(
        "pod set workers, claim gpu: request gpu needs 2 full GPUs of one node: none is free"
    )


def test_a_workload_gets_no_reason_where_devices_are_free_or_a_flavor_may_open_nodes() -> None:
    there = Situation([*node_of("a")])
    there.node("a", taints=[{"key": "team", "effect": "NoSchedule"}])
    free = workload("free", request(selector=FULL))
    elsewhere = workload("elsewhere", request(selector=FULL), nodeSelector={"pool": "none"})
    queued = [free, elsewhere]
    assert [*WorkloadReasons().of(queue_of(there, *queued), ALL_REPORTED)] == []


def test_every_workload_has_its_turn_although_there_is_time_for_one_at_a_time() -> None:
    there = Situation([*node_of("a", "full")]).holding("holder", "a", "gpu-0", "gpu-1")
    queued = [workload(name, request(selector=FULL)) for name in ("a", "b", "c")]
    queue, reasons = queue_of(there, *queued), WorkloadReasons(count(step=10).__next__)
    found = [[about.name for about, _ in reasons.of(queue, ALL_REPORTED)] for _ in range(4)]
    assert found == [["a"], ["b"], ["c"], ["a"]]


CLAIMS = [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]
QUEUED = msgspec.convert(
    {
        "metadata": {"name": "train", "namespace": "team"},
        "spec": {"podSets": [{"name": "main", "template": {"spec": {"resourceClaims": CLAIMS}}}]},
    },
    KueueWorkload,
)


@pytest.mark.parametrize(
    ("condition", "counts"),
    [
        ({"type": "QuotaReserved", "status": "False"}, True),
        ({"type": "QuotaReserved", "status": "True"}, False),
        ({"type": "Finished", "status": "True"}, False),
        ({"type": "Evicted", "status": "True"}, True),
    ],
)
def test_workloads_count_until_quota_is_reserved_for_them(condition: dict[str, str], counts: bool) -> None:
    status = msgspec.convert({"conditions": [condition]}, type(QUEUED.status))
    found = KueueWorkload(QUEUED.metadata, QUEUED.spec, status)
    assert (kept_workload(found) is not None) is counts


def test_a_deactivated_workload_and_one_without_templates_do_not_count() -> None:
    stopped = msgspec.structs.replace(QUEUED.spec, active=False)
    plain = msgspec.structs.replace(QUEUED.spec, pod_sets=())
    assert kept_workload(msgspec.structs.replace(QUEUED, spec=stopped)) is None
    assert kept_workload(msgspec.structs.replace(QUEUED, spec=plain)) is None
    assert kept_workload(QUEUED) is not None
