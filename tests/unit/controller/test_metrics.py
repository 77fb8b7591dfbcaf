"""What the controller tells of its last decision, and how long claims wait for their allocation."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controller.cluster.cache import Snapshot
from controller.cluster.node_views import NodeChanges
from controller.metrics import MAX_OLDEST_CLAIMS, ControllerMetrics
from driver.kube.types import Claim, ClaimStatus, GpuNodePlan, PlanMetadata
from driver.model.plan import FailedClaim, FailureCause, PlanStatus
from driver.model.shared_memory import GIB
from tests.support.gpus import H100
from tests.support.queues import DRIVER, Situation, fleet_gpu, profile, request, selected_by
from tests.support.shared_gpus import shared_gpu

NOW = datetime(2026, 1, 1, 12, 0, 30, tzinfo=UTC)


def measured(registry: CollectorRegistry) -> ControllerMetrics:
    return ControllerMetrics(registry, NOW.timestamp)


def test_pending_claims_are_counted_by_class_and_reason_and_an_invented_class_makes_no_series() -> None:
    registry = CollectorRegistry()
    metrics, situation = measured(registry), Situation([fleet_gpu("n", 0, H100, "full")])
    situation.wants(request(selector=profile("1g.10gb")), name="one").wants(request(), name="two")
    situation.wants(request(device_class="invented-by-a-tenant"), name="three")
    queue = situation.queue
    metrics.decision_made(queue, queue.feasibility.fleet, (), {"default/one": "Fragmented"}, reported({}))
    found = {
        (sample.labels["class"], sample.labels["reason"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "tessera_pending_claims"
    }
    assert found == {("any", "Fragmented"): 1, ("any", "Waits"): 1, ("unknown", "Waits"): 1}
    assert registry.get_sample_value("tessera_slices", {"product": H100, "state": "held"}) == 8
    assert registry.get_sample_value("tessera_gpus_by_use", {"product": H100, "use": "held"}) == 1
    metrics.leadership_lost()
    assert registry.get_sample_value("tessera_slices", {"product": H100, "state": "held"}) is None


def test_gpus_lost_to_scatter_are_measured_by_product() -> None:
    registry = CollectorRegistry()
    queue = Situation([fleet_gpu("n", number, H100, "mig-1g10gb-0") for number in range(3)]).queue
    measured(registry).decision_made(queue, queue.feasibility.fleet, (), {}, reported({}))
    assert registry.get_sample_value("tessera_gpus_lost_to_scatter", {"product": H100}) == 2


def test_the_memory_of_shared_gpus_is_counted_as_held_and_as_free_while_claims_can_get_it() -> None:
    registry = CollectorRegistry()
    gpus = [shared_gpu("n", 0, 6, 30), shared_gpu("n", 1), shared_gpu("n", 2, fault="XID 79"), fleet_gpu("n", 3, H100)]
    queue = Situation(gpus).queue
    measured(registry).decision_made(queue, queue.feasibility.fleet, (), {}, reported({}))
    for state, gib in {"held": 36, "free": 44 + 80}.items():
        labels = {"product": H100, "state": state}
        assert registry.get_sample_value("tessera_shared_memory_bytes", labels) == gib * GIB
    assert registry.get_sample_value("tessera_gpus_by_use", {"product": H100, "use": "partly-held"}) == 1
    assert registry.get_sample_value("tessera_slices", {"product": H100, "state": "held"}) == pytest.approx(8 * 36 / 80)


def ages(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Seconds by class and namespace."""
    return {
        (sample.labels["class"], sample.labels["namespace"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "tessera_oldest_pending_claim_age_seconds"
    }


def waiting(situation: Situation, name: str, namespace: str, claim: str, pod: str, device_class: str = "any") -> None:
    """Add a claim and its pod, which were created at ``claim`` and ``pod`` on the day of NOW."""
    metadata = [{"namespace": namespace, "creationTimestamp": f"2026-01-01T{time}Z"} for time in (claim, pod)]
    situation.claim(name, request(device_class=device_class), metadata=metadata[0])
    situation.pod(f"pod-of-{name}", name, metadata=metadata[1])


def test_the_age_of_a_pending_claim_is_that_of_the_oldest_of_its_class_and_namespace_and_begins_with_its_pod() -> None:
    registry, situation = CollectorRegistry(), Situation([fleet_gpu("n", 0, H100, "full")])
    waiting(situation, "younger", "team-a", "11:59:30", "11:59:30")
    waiting(situation, "older", "team-a", "11:00:00", "11:00:30")
    waiting(situation, "of-a-new-pod", "team-b", "08:00:00", "12:00:00")
    waiting(situation, "odd", "team-b", "11:58:30", "11:58:00", "invented-by-a-tenant")
    metrics, queue = measured(registry), situation.queue
    metrics.decision_made(queue, queue.feasibility.fleet, (), {}, reported({}))
    assert ages(registry) == {("any", "team-a"): 3600, ("any", "team-b"): 30, ("unknown", "team-b"): 120}
    metrics.leadership_lost()
    assert ages(registry) == {}


def test_only_the_oldest_pending_claims_have_a_series_however_many_namespaces_there_are() -> None:
    registry, situation = CollectorRegistry(), Situation([fleet_gpu("n", 0, H100, "full")])
    for minute in range(MAX_OLDEST_CLAIMS + 20):
        created = f"{10 + minute // 60}:{minute % 60:02}:00"
        waiting(situation, f"claim-{minute}", f"team-{minute}", created, created)
    metrics, queue = measured(registry), situation.queue
    metrics.decision_made(queue, queue.feasibility.fleet, (), {}, reported({}))
    assert ages(registry).keys() == {("any", f"team-{minute}") for minute in range(MAX_OLDEST_CLAIMS)}


def reported(plans: dict[str, GpuNodePlan]) -> Snapshot:
    """What a decision was made from, as far as it is counted."""
    changed = NodeChanges(frozenset(["n"]), {}, (), membership=False)
    return Snapshot(Situation([]).queue.cluster, plans, (), {}, changed)


def test_claims_that_nodes_can_not_prepare_are_counted_by_cause() -> None:
    registry = CollectorRegistry()
    metrics, queue = measured(registry), Situation([fleet_gpu("n", 0)]).queue
    causes = (FailureCause.GPU, FailureCause.GPU, FailureCause.NODE)
    failed = tuple(FailedClaim("team/c", str(n), "2026-01-01T12:00:00Z", cause) for n, cause in enumerate(causes))
    plan = GpuNodePlan(PlanMetadata("n"), status=PlanStatus(unprepared=failed))
    metrics.decision_made(queue, queue.feasibility.fleet, (), {}, reported({"n": plan}))
    counts = [registry.get_sample_value("tessera_unprepared_claims", {"cause": cause}) for cause in FailureCause]
    assert counts == [2, 1, 0]


def claim(*, allocated: bool) -> Claim:
    results = [{"request": "gpu", "driver": DRIVER, "pool": "n", "device": "gpu-0"}]
    status = {"allocation": {"devices": {"results": results}}} if allocated else {}
    metadata = {"name": "one", "namespace": "default", "uid": "one", "creationTimestamp": "2026-01-01T12:00:00Z"}
    return msgspec.convert({"metadata": metadata, "status": status}, Claim)


def test_the_wait_of_a_claim_ends_with_its_allocation_and_counts_once() -> None:
    registry = CollectorRegistry()
    metrics, waits, has = measured(registry), claim(allocated=False), claim(allocated=True)
    for old, new in [(None, waits), (waits, has), (has, has), (has, None), (None, has)]:
        metrics.claim_changed(old, new)
    assert registry.get_sample_value("tessera_claim_allocation_duration_seconds_count") == 1
    assert registry.get_sample_value("tessera_claim_allocation_duration_seconds_sum") == 30


@pytest.mark.parametrize(
    ("selector", "device", "expected"),
    [
        pytest.param(selected_by('type == "mig"'), "gpu-0-mig-1g10gb-6", (0, 0), id="the smallest"),
        pytest.param(selected_by('type == "mig"'), "gpu-0-mig-3g40gb-0", (1, 0), id="a larger one"),
        pytest.param(selected_by('type == "mig"'), "gpu-0-mig-7g80gb-0", (0, 1), id="the whole GPU"),
        pytest.param(selected_by('type in ["mig", "gpu"]'), "gpu-0", (0, 1), id="the full device"),
        pytest.param(profile("3g.40gb"), "gpu-0-mig-3g40gb-0", (0, 0), id="by name"),
        pytest.param(selected_by('type in ["mig", "share"]'), "gpu-0-share-0", (1, 0), id="half of the GPU"),
        pytest.param(selected_by('type == "gpu"'), "gpu-0", (0, 0), id="nothing else would do"),
    ],
)
def test_devices_that_are_larger_than_others_that_would_do_are_counted_when_they_are_allocated(
    selector: str, device: str, expected: tuple[int, int]
) -> None:
    registry = CollectorRegistry()
    metrics, there = measured(registry), Situation([fleet_gpu("n", 0, shares=2)])
    there.claim("one", request(selector=selector))
    [waiting] = there.claims
    there.claims.clear()
    results = [{"request": "gpu", "driver": DRIVER, "pool": f"n-{DRIVER}", "device": device}]
    allocation = {"allocation": {"devices": {"results": results}}}
    metrics.claim_changed(waiting, msgspec.structs.replace(waiting, status=msgspec.convert(allocation, ClaimStatus)))
    for _ in range(2):
        metrics.decision_made(there.queue, there.queue.feasibility.fleet, (), {}, reported({}))
    name = "tessera_larger_devices_taken_total"
    assert tuple(registry.get_sample_value(name, {"size": size}) for size in ("part", "whole")) == expected


def test_sizes_are_those_of_the_gpus_own_product() -> None:
    small, large = (
        fleet_gpu(node, 7, product, shares=2) for node, product in (("s", "Tesla T4"), ("l", "NVIDIA L40S"))
    )
    assert small.layout is large.layout, "products without MIG have the same devices, of different sizes"
    registry, there = CollectorRegistry(), Situation([small, large])
    metrics = measured(registry)
    there.claim("one", request(selector=selected_by('type in ["gpu", "share"]')))
    [waiting] = there.claims
    results = [{"request": "gpu", "driver": DRIVER, "pool": f"l-{DRIVER}", "device": "gpu-7-share-0"}]
    allocation = {"allocation": {"devices": {"results": results}}}
    metrics.claim_changed(waiting, msgspec.structs.replace(waiting, status=msgspec.convert(allocation, ClaimStatus)))
    metrics.decision_made(there.queue, there.queue.feasibility.fleet, (), {}, reported({}))
    assert registry.get_sample_value("tessera_larger_devices_taken_total", {"size": "part"}) == 0
