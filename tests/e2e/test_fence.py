"""The fence on the real API server: how soon it is in force, what it refuses, what it leaves alone, and the race."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Iterator
from typing import Any

import pytest

from controller.cluster.claim_index import PoolDevice
from controller.fence.fence import Fence, FenceSettings, Withdrawable
from controller.fence.fence_probe import Canary
from controller.fence.fenced_devices import MAX_ENTRIES, FencedDevices
from driver.clock import Clock
from driver.errors import ApiError
from driver.kube.client import KubeClient, load_configuration
from driver.model.plan import OfferMode
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.fence_race import (
    CLAIMS,
    POOL,
    ClaimsCache,
    Race,
    allocate,
    claims_cache,
    new_claim,
    without_fence,
)
from tests.support.unpublishing_race import Outcome
from tests.support.unpublishing_race import race as unpublishing_race

LONGEST = ".".join(["n" * 63] * 3 + ["n" * 61])
"""A name of a pool as long as it may be."""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

A, B, C = (PoolDevice(POOL, f"gpu-{number}") for number in range(3))
CONFIG_MAP = "/api/v1/namespaces/tessera/configmaps/tessera-fence"
POLICY = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/tessera-fence"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("fence") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def scheduler(cluster: Cluster) -> KubeClient:
    """Who allocates; as the admin."""
    return KubeClient(load_configuration(cluster.kubeconfig), "scheduler")


@pytest.fixture(scope="module")
def controller(cluster: Cluster) -> KubeClient:
    """With the rights of the chart and no others."""
    kubeconfig = cluster.service_account_kubeconfig("tessera", "tessera-controller")
    return KubeClient(load_configuration(kubeconfig), "controller")


@pytest.fixture(scope="module")
def claims(controller: KubeClient) -> Iterator[ClaimsCache]:
    def wake() -> None:
        Canary(controller, "tessera").touch()

    with claims_cache(controller, wake) as claims:
        yield claims


@pytest.fixture
def fence(controller: KubeClient, claims: ClaimsCache) -> Iterator[Fence]:
    """Nothing is fenced before and after; the policy is in force."""
    fence = Fence(controller, claims, FenceSettings(settle_s=0, probe_s=30, keep_s=0))
    assert fence.take_back([PoolDevice("no-pool", "no-device")]).in_force
    fence.expire()
    yield fence
    fence.expire()


@pytest.fixture
def claim(scheduler: KubeClient, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    claim = new_claim(scheduler, "wanted")
    yield claim
    scheduler.delete(f"{CLAIMS}/wanted")


@pytest.mark.core
@pytest.mark.smoke
def test_a_fenced_device_is_refused_with_a_reason_and_an_unfenced_one_is_not(
    fence: Fence, scheduler: KubeClient, claim: dict[str, Any]
) -> None:
    assert fence.take_back([A, B]) == Withdrawable(frozenset({A, B}))
    with pytest.raises(ApiError) as refused:
        allocate(scheduler, claim, C, A)
    assert refused.value.status == 422
    assert f"Tessera is taking back {POOL}/gpu-0; the pod is scheduled again" in str(refused.value)
    assert allocate(scheduler, claim, C)["status"]["allocation"]["devices"]["results"][0]["device"] == "gpu-2"


@pytest.mark.core
@pytest.mark.smoke
def test_what_was_allocated_before_can_be_reserved_reported_and_given_back(
    fence: Fence, scheduler: KubeClient, claim: dict[str, Any], controller: KubeClient
) -> None:
    held = allocate(scheduler, claim, A)
    # As if somebody fenced what is held: none of its updates may be stopped.
    FencedDevices(controller, "tessera", Clock()).add([A])
    wait_for(lambda: Canary(controller, "tessera").refusal(A), 60, "the fence is in force")
    report = {"driver": "gpu.tessera.dev", "pool": A.pool, "device": A.device, "conditions": []}
    for change in ({"reservedFor": [{"resource": "pods", "name": "pod", "uid": "uid-1"}]}, {"devices": [report]}):
        changed = {**held, "status": {**held["status"], **change}}
        stored = scheduler.replace(f"{CLAIMS}/wanted/status", changed, {"dryRun": "All"})
        assert stored["status"].keys() >= change.keys()
    free = scheduler.replace(f"{CLAIMS}/wanted/status", {**held, "status": {}})
    assert "allocation" not in free.get("status", {})
    with pytest.raises(ApiError, match="Tessera is taking back"):
        allocate(scheduler, free, A)
    fence.start(offered=[A])
    wait_for(lambda: not Canary(controller, "tessera").refusal(A), 60, "it is offered again")


@pytest.fixture
def waiting_pod(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """It is not scheduled."""
    pod = busybox_pod("waiting", schedulingGates=[{"name": "example.com/no"}])
    yield cluster.api.post("/api/v1/namespaces/default/pods", pod)
    cluster.api.request("DELETE", "/api/v1/namespaces/default/pods/waiting", {"gracePeriodSeconds": 0})


@pytest.mark.core
@pytest.mark.parametrize(
    ("owner", "allocated_for", "is_admitted"),
    [
        pytest.param("waiting", "waiting", True, id="made and allocated for it"),
        pytest.param("waiting", "other", False, id="another pod's, which looks like one that was made for it"),
        pytest.param("waiting", None, False, id="no pod's, which looks like one that was made for it"),
        pytest.param(None, "other", False, id="another pod's"),
    ],
)
def test_a_gpu_that_is_reserved_for_a_pod_is_allocated_for_no_other(
    fence: Fence,
    scheduler: KubeClient,
    waiting_pod: dict[str, Any],
    owner: str | None,
    allocated_for: str | None,
    is_admitted: bool,
) -> None:
    """Tenants can write claims that look as if the scheduler had made them for the extended resources of a pod."""
    uid = waiting_pod["metadata"]["uid"]
    assert fence.reserve([A], [uid], 300)
    reference = {"apiVersion": "v1", "kind": "Pod", "name": "waiting", "uid": uid, "controller": True}
    annotations = {"resource.kubernetes.io/extended-resource-claim": "true"}
    metadata = {"annotations": annotations, "ownerReferences": [reference]} if owner else {}
    claim = new_claim(scheduler, "wanted", **metadata)
    pod = uid if allocated_for == "waiting" else allocated_for
    try:
        allocate(scheduler, claim, B, pod=pod, dry_run=True)
        for device in (A, PoolDevice(POOL, f"{A.device}-mig-1g10gb-0")):
            if is_admitted:
                allocate(scheduler, claim, device, pod=pod, dry_run=True)
                continue
            with pytest.raises(ApiError, match=f"Tessera has reserved {POOL}/{device.device} for another pod"):
                allocate(scheduler, claim, device, pod=pod, dry_run=True)
    finally:
        scheduler.delete(f"{CLAIMS}/wanted")
        fence.lift(fence.reservations())


def test_a_held_device_stays_and_the_longest_names_are_fenced_too(
    fence: Fence, scheduler: KubeClient, claim: dict[str, Any]
) -> None:
    allocate(scheduler, claim, A)
    long = PoolDevice(LONGEST, "g" * 63)
    assert fence.take_back([A, long]) == Withdrawable(frozenset({long}), held=frozenset({A}))
    other = new_claim(scheduler, "other")
    with pytest.raises(ApiError, match="Tessera is taking back"):
        allocate(scheduler, other, long)
    scheduler.delete(f"{CLAIMS}/other")


def test_without_the_config_map_everything_passes(
    cluster: Cluster, fence: Fence, scheduler: KubeClient, claim: dict[str, Any]
) -> None:
    fence.take_back([A])
    cluster.api.request("DELETE", CONFIG_MAP)
    wait_for(lambda: allocate(scheduler, claim, A, dry_run=True), 60, "it fails open")


def policy_status(cluster: Cluster) -> dict[str, Any]:
    status: dict[str, Any] = cluster.api.get(POLICY).get("status", {})
    return status


@pytest.mark.core
def test_the_policy_has_no_fault_that_the_api_server_could_find(cluster: Cluster, fence: Fence) -> None:
    def checked() -> dict[str, Any]:
        return {"found": status["typeChecking"]} if "typeChecking" in (status := policy_status(cluster)) else {}

    assert wait_for(checked, 60, "the expressions were checked") == {"found": {}}


def test_it_is_in_force_within_milliseconds(
    fence: Fence, controller: KubeClient, scheduler: KubeClient, claim: dict[str, Any]
) -> None:
    fenced = FencedDevices(controller, "tessera", Clock())
    took = []
    for number in range(50):
        device = PoolDevice(POOL, f"gpu-{100 + number}")
        fenced.add([device])
        began = time.perf_counter()
        while True:
            asked = time.perf_counter()
            try:
                allocate(scheduler, claim, device, dry_run=True)
            except ApiError:
                break
        took.append(((asked - began) * 1000, (time.perf_counter() - began) * 1000))
    fence.start(offered=[])
    for what, each in zip(("asked", "answered"), zip(*took, strict=True), strict=True):
        print(
            f"first refusal {what} after: p50 {statistics.median(each):.1f} ms, max {max(each):.1f} ms, {len(each)} x"
        )
    assert statistics.median(asked for asked, _ in took) < 1000


def test_a_full_config_map_is_accepted_and_makes_an_allocation_hardly_slower(
    fence: Fence, controller: KubeClient, scheduler: KubeClient, claim: dict[str, Any]
) -> None:
    fenced = FencedDevices(controller, "tessera", Clock())
    many = [PoolDevice(LONGEST, f"gpu-{number:020}") for number in range(MAX_ENTRIES)]

    devices = [PoolDevice(POOL, f"gpu-{number}") for number in range(32)]

    def took_ms() -> float:
        times = [
            timeit.timeit(lambda: allocate(scheduler, claim, *devices, dry_run=True), number=1) for _ in range(100)
        ]
        return min(times) * 1000  # what else the machine does says nothing of the fence

    before = took_ms()
    fenced.add(many)
    wait_for(lambda: Canary(controller, "tessera").refusal(many[-1]), 60, "all of it is in force")
    took: list[float] = []

    def hardly_slower() -> bool:
        took.append(took_ms())
        return took[-1] < before + 20

    try:
        wait_for(hardly_slower, 60, "allocations that are hardly slower, with the machine as busy as it was before")
    finally:
        print(f"an allocation of 32 devices: {before:.1f} ms; with {MAX_ENTRIES} fenced: {min(took):.1f} ms")
        fence.start(offered=[])


def test_a_reservation_is_judged_on_the_largest_node_with_all_devices_fenced(
    fence: Fence, controller: KubeClient, scheduler: KubeClient, claim: dict[str, Any]
) -> None:
    """An expression that costs the API server too much would admit every allocation."""
    gpus, names = range(16), [f"mig-1g10gb-{place}" for place in range(30)]
    FencedDevices(controller, "tessera", Clock()).add(
        [PoolDevice(POOL, f"gpu-{gpu}-{name}") for gpu in gpus for name in names]
    )
    uids = [f"00000000-0000-4000-8000-{number:012}" for number in range(8)]
    assert fence.reserve([PoolDevice(POOL, f"gpu-{gpu}") for gpu in gpus], uids, 300)
    devices = [PoolDevice(POOL, f"gpu-{gpu}-new-{number}") for gpu in gpus for number in range(2)]
    try:
        began = time.perf_counter()
        with pytest.raises(ApiError, match="Tessera has reserved"):
            allocate(scheduler, claim, *devices, dry_run=True, pod="other")
        print(f"an allocation of {len(devices)} devices was refused in {(time.perf_counter() - began) * 1000:.1f} ms")
        allocate(scheduler, claim, *devices, dry_run=True, pod=uids[-1])
    finally:
        fence.start(offered=[])
        fence.lift(fence.reservations())


def race(
    scheduler: KubeClient, controller: KubeClient, claims: ClaimsCache, *, fenced: bool, rounds: int, delay_s: float
) -> None:
    fence = Fence(controller, claims, FenceSettings(settle_s=0), observer=lambda step, moment: running.delay())
    take_back = fence.take_back if fenced else without_fence(controller, claims)
    running = Race(scheduler, take_back, fence.lift, seed=rounds, most_delay_s=delay_s)
    outcome = running.run(rounds, until=lambda seen: fenced or seen.overlaps)
    print(f"{'fenced' if fenced else 'not fenced'}, delays up to {delay_s} s: {outcome}")
    assert outcome.allocated
    assert outcome.withdrawn
    assert (outcome.overlaps == 0) == fenced


@pytest.mark.core
@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "not fenced"])
def test_no_device_is_both_withdrawn_and_allocated(
    fence: Fence, scheduler: KubeClient, controller: KubeClient, claims: ClaimsCache, fenced: bool
) -> None:
    race(scheduler, controller, claims, fenced=fenced, rounds=50 if fenced else 20, delay_s=0.01)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("rounds", "delay_s"), [(600, 0.0), (600, 0.003), (300, 0.03), (10, 5.0)])
def test_no_device_is_both_withdrawn_and_allocated_in_thousands_of_tries(
    fence: Fence, scheduler: KubeClient, controller: KubeClient, claims: ClaimsCache, rounds: int, delay_s: float
) -> None:
    race(scheduler, controller, claims, fenced=True, rounds=rounds, delay_s=delay_s)


def unpublishing(
    scheduler: KubeClient, controller: KubeClient, claims: ClaimsCache, nodes: int, delay_s: float, tries: int
) -> None:
    fence = Fence(controller, claims, FenceSettings(settle_s=0))
    assert fence.take_back([PoolDevice("no-pool", "no-device")]).in_force

    def is_over(so_far: Outcome) -> bool:
        """GPUs must also have come back, which takes longer than ``tries`` where the machine is busy."""
        return so_far.tried >= tries and min(so_far.unpublished, so_far.republished) > 0

    outcome = unpublishing_race(scheduler, fence, claims, nodes, delay_s, is_over, 1500)
    print(f"delays up to {delay_s} s: {outcome}")
    assert outcome.overlaps == outcome.refused_by_node == 0


@pytest.mark.core
def test_no_memory_is_given_out_twice_when_gpus_are_unpublished_and_come_back(
    scheduler: KubeClient, controller: KubeClient, claims: ClaimsCache
) -> None:
    unpublishing(scheduler, controller, claims, nodes=8, delay_s=0.1, tries=150)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_memory_is_given_out_twice_in_thousands_of_tries(
    scheduler: KubeClient, controller: KubeClient, claims: ClaimsCache
) -> None:
    unpublishing(scheduler, controller, claims, nodes=128, delay_s=10, tries=5000)


def reshaping(
    scheduler: KubeClient, controller: KubeClient, claims: ClaimsCache, nodes: int, delay_s: float, times: int
) -> None:
    fence = Fence(controller, claims, FenceSettings(settle_s=0))
    assert fence.take_back([PoolDevice("no-pool", "no-device")]).in_force
    outcome = unpublishing_race(
        scheduler, fence, claims, nodes, delay_s, lambda so_far: so_far.reshaped >= times, 3300, OfferMode.DISJOINT
    )
    print(f"delays up to {delay_s} s: {outcome}; refused: {outcome.refused / outcome.tried:.1%}")
    assert outcome.overlaps == outcome.refused_by_node == 0


def test_no_memory_is_given_out_twice_when_disjoint_offers_are_replaced(
    scheduler: KubeClient, controller: KubeClient, claims: ClaimsCache
) -> None:
    reshaping(scheduler, controller, claims, nodes=8, delay_s=0.1, times=60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_memory_is_given_out_twice_when_disjoint_offers_are_replaced_thousands_of_times(
    scheduler: KubeClient, controller: KubeClient, claims: ClaimsCache
) -> None:
    reshaping(scheduler, controller, claims, nodes=256, delay_s=10, times=5000)
