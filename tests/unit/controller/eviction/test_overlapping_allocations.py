"""Two claims with overlapping devices: which pods are evicted, when, and what they are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from controller.cluster.claim_index import ClaimIndex
from controller.cluster.fleet import Fleet
from controller.eviction import overlapping_allocations
from controller.eviction.evictor import MOST_OF_OWNER, PASS_SECONDS, Evictor
from controller.eviction.overlapping_allocations import CONFLICT_SECONDS, OverlapEvictor, conflicts_on
from controller.eviction.recent_evictions import RECORD_SECONDS, RecentEvictions
from controller.settings import ControllerSettings
from driver.kube.events import Recorder
from driver.kube.types import Claim
from driver.model.plan import Held
from tests.support.api_server import Exchange
from tests.support.clock import FakeClock
from tests.support.evictions import NODE, ClusterApi, allocated, ready
from tests.support.gpus import H100
from tests.support.queues import DRIVER, fleet_gpu
from tests.support.recording import recording
from tests.support.running import eventually
from tests.support.shared_gpus import shared_gpu, shared_result
from tests.unit.controller.test_controller import led

SMALL = "gpu-0-mig-1g10gb-0"
JOB = {"apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": "job-uid", "controller": True}


@pytest.mark.parametrize(
    ("held", "claims", "found"),
    [
        ("full mig-1g10gb-0", {"gpu-0": "a", SMALL: "b"}, "ab"),
        ("mig-2g20gb-0 mig-1g10gb-1", {"gpu-0-mig-2g20gb-0": "a", "gpu-0-mig-1g10gb-1": "b"}, "ab"),
        ("mig-2g20gb-0 mig-1g10gb-2", {"gpu-0-mig-2g20gb-0": "a", "gpu-0-mig-1g10gb-2": "b"}, ""),
        ("full", {"gpu-0": "ab"}, "ab"),
        ("share-0", {"gpu-0-share-0": "ab"}, "ab"),
        ("share-0 share-1", {"gpu-0-share-0": "a", "gpu-0-share-1": "b"}, ""),
        ("share-0 mig-1g10gb-0", {"gpu-0-share-0": "b", SMALL: "a"}, "ab"),
        ("full mig-1g10gb-0", {"gpu-0": "a", SMALL: "a"}, ""),
        ("full mig-1g10gb-0", {"gpu-0": "abc", SMALL: "c"}, "ab ac bc"),
        ("", {"gpu-7": "ab"}, "ab"),
    ],
)
def test_claims_conflict_whose_devices_share_memory(held: str, claims: dict[str, str], found: str) -> None:
    entry = fleet_gpu(NODE, 0, H100, *held.split(), shares=4)
    holders = {device: [Held(device, each) for each in names] for device, names in claims.items()}
    conflicts = conflicts_on(NODE, [entry], holders)
    assert {"".join(sorted(device.claim for device in conflict.devices)) for conflict in conflicts} == set(
        found.split()
    )


class Site:
    """Claims and pods on an API server, and the resolver of a controller that knows all of them."""

    def __init__(self, api: ClusterApi, clock: FakeClock, recorder: Recorder) -> None:
        self.api, self.clock = api, clock
        client = api.server.client()
        evictor = Evictor(client, recorder, RecentEvictions(client, "tessera", clock))
        self.resolver = OverlapEvictor(client, evictor, ControllerSettings(), clock=clock.monotonic)
        self.fleet = Fleet.of(fleet_gpu(NODE, number, H100, "full", "mig-1g10gb-0") for number in range(3))

    def claim(self, name: str, device: str, *pods: str, **status: Any) -> None:
        """A claim that is allocated ``device`` and reserved for ``pods``."""
        reserved = [{"resource": "pods", "name": pod, "uid": f"uid-of-{pod}"} for pod in pods]
        body = {"allocation": allocated(device), "reservedFor": reserved, **status}
        self.api.store(f"/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/{name}", status=body)

    def pod(self, name: str, claim: str, owners: Any = None, **more: Any) -> None:
        """A pod on the node that waits for ``claim``, by default of a Job of its own."""
        owners = [{**JOB, "uid": f"job-of-{name}"}] if owners is None else owners
        spec = {"nodeName": NODE, "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}]}
        metadata = {
            "name": name,
            "uid": f"uid-of-{name}",
            "ownerReferences": list(owners),
            **more.pop("metadata", {}),
        }
        body = {"spec": {**spec, **more.pop("spec", {})}, "status": {"phase": "Pending"}, **more}
        self.api.store(f"/api/v1/namespaces/team/pods/{name}", metadata=metadata, **body)

    def conflict(self, number: int = 0, **second: Any) -> None:
        """A prepared claim ``first-N`` and its running pod, and a claim ``second-N`` with a pod that waits in vain."""
        first, given = f"first-{number}", f"gpu-{number}"
        self.claim(first, f"{given}-mig-1g10gb-0", f"{first}-pod", devices=ready(f"{given}-mig-1g10gb-0"))
        self.pod(f"{first}-pod", first, status={"phase": "Running"})
        self.claim(f"second-{number}", given, f"second-{number}-pod")
        self.pod(f"second-{number}-pod", f"second-{number}", **second)

    def decide(self, after_s: float = 0.0) -> None:
        """Let the controller decide once, so many seconds later."""
        self.clock.advance(after_s)
        claims = self.api.folder("/apis/resource.k8s.io/v1/namespaces/team/resourceclaims")
        index = ClaimIndex(DRIVER, [msgspec.convert(each, Claim) for each in claims.values()])
        self.resolver.update(index, self.fleet, [NODE])

    def events(self) -> dict[str, str]:
        """The messages of the Events by pod."""
        stored = [*self.api.folder("/api/v1/namespaces/team/events").values()]
        assert {(each["reason"], each["type"]) for each in stored} <= {("GpuConflict", "Warning")}
        return {each["involvedObject"]["name"]: each["message"] for each in stored}

    def event(self, pod: str) -> str:
        eventually(lambda: pod in self.events(), f"an Event on {pod}")
        return self.events()[pod]


@pytest.fixture
def site() -> Iterator[Site]:
    with ClusterApi() as api, recording(api) as (clock, recorder):
        yield Site(api, clock, recorder)


def test_the_pod_of_the_claim_that_is_not_prepared_is_evicted_after_a_while(site: Site) -> None:
    site.conflict()
    site.decide()
    site.decide(CONFLICT_SECONDS - 1)
    assert site.resolver.next_s == 1
    assert not site.api.count("get")
    site.decide(1)
    assert site.api.evicted == ["second-0-pod"]
    message = site.event("second-0-pod")
    assert f"claim team/second-0 was allocated gpu-0 of node {NODE}, which overlaps {SMALL}" in message
    assert "which claim team/first-0 holds: this pod can not start and is evicted" in message
    site.decide(CONFLICT_SECONDS)
    assert site.api.evicted == ["second-0-pod"]
    assert list(site.events()) == ["second-0-pod"]


def test_a_pod_that_nothing_replaces_stays_and_is_told_to_be_deleted(site: Site) -> None:
    site.conflict(owners=[{**JOB, "controller": False}])
    site.decide()
    site.decide(CONFLICT_SECONDS)
    assert "it has no controller that would replace it, so it must be deleted" in site.event("second-0-pod")
    assert not site.api.evicted


def test_of_two_claims_with_one_device_the_prepared_one_is_the_holder_even_if_it_is_unhealthy(site: Site) -> None:
    site.claim("first", SMALL, devices=ready(SMALL, "False"))
    site.claim("second", SMALL, "pod")
    site.pod("pod", "second")
    site.decide()
    site.decide(CONFLICT_SECONDS)
    assert f"claim team/second was allocated {SMALL} of node {NODE}, which claim team/first holds" in site.event("pod")
    assert site.api.evicted == ["pod"]


@pytest.mark.parametrize(
    ("prepared", "evicted"),
    [
        pytest.param("1", "pod-of-3", id="of two that wait the newest"),
        pytest.param("13", "pod-of-2", id="the one that waits, though it is older"),
        pytest.param("", None, id="none is prepared: the node will refuse one"),
    ],
)
def test_of_claims_with_more_memory_than_their_gpu_has_one_that_is_not_prepared_is_evicted(
    site: Site, prepared: str, evicted: str | None
) -> None:
    for name, part in {"1": "40Gi", "2": "30Gi", "3": "20Gi"}.items():
        status = {"devices": ready("gpu-0-shared")} if name in prepared else {}
        allocation = {"devices": {"results": [shared_result(NODE, 0, part, name)]}}
        site.claim(name, "gpu-0-shared", f"pod-of-{name}", allocation=allocation, **status)
        site.pod(f"pod-of-{name}", name)
    site.fleet = Fleet.of([shared_gpu(NODE, 0, 40, 30, 20)])
    site.decide()
    site.decide(CONFLICT_SECONDS)
    assert site.api.evicted == ([evicted] if evicted else [])
    if evicted:
        claim = f"claim team/{evicted[-1]} was allocated gpu-0-shared of node {NODE}"
        assert f"{claim}, of whose 80 GiB claims have 90: this pod can not start" in site.event(evicted)


def test_claims_that_share_a_gpu_within_its_memory_are_in_nobodys_way(site: Site) -> None:
    for name in "12":
        site.claim(name, "gpu-0-shared", devices=ready("gpu-0-shared") if name == "1" else [])
    site.fleet = Fleet.of([shared_gpu(NODE, 0, 40, 40)])
    site.decide()
    assert site.resolver.next_s is None


def test_what_is_allocated_with_admin_access_is_in_nobodys_way(site: Site) -> None:
    site.claim("first", SMALL, devices=ready(SMALL))
    site.claim("second", "gpu-0", "pod", allocation=allocated("gpu-0", adminAccess=True))
    site.pod("pod", "second")
    site.decide()
    assert site.resolver.next_s is None


def test_a_conflict_that_ends_in_time_is_forgotten(site: Site) -> None:
    site.conflict()
    site.decide()
    site.claim("second-0", "gpu-0", allocation=None)
    site.decide(CONFLICT_SECONDS)
    assert site.resolver.next_s is None
    assert not site.api.count("get")


CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda site: site.claim("first-0", SMALL), id="neither claim is prepared"),
        pytest.param(
            lambda site: site.claim("second-0", "gpu-0", "second-0-pod", devices=ready("gpu-0")), id="both are prepared"
        ),
        pytest.param(
            lambda site: site.claim("first-0", SMALL, devices=ready(SMALL, driver="other.example")),
            id="another driver prepared something",
        ),
        pytest.param(lambda site: site.claim("first-0", SMALL, devices=ready("gpu-1")), id="another device"),
        pytest.param(lambda site: site.claim("first-0", "gpu-1", devices=ready(SMALL)), id="it has another device now"),
        pytest.param(lambda site: site.claim("first-0", SMALL, allocation=None, devices=ready(SMALL)), id="none"),
        pytest.param(lambda site: site.api.drop(f"{CLAIMS}/first-0"), id="the holder is gone"),
        pytest.param(lambda site: site.api.drop(f"{CLAIMS}/second-0"), id="the other claim is gone"),
        pytest.param(lambda site: site.pod("second-0-pod", "second-0", status={"phase": "Running"}), id="it runs"),
        pytest.param(lambda site: site.pod("second-0-pod", "second-0", spec={"nodeName": ""}), id="it is not bound"),
        pytest.param(lambda site: site.pod("second-0-pod", "third"), id="the pod uses another claim"),
        pytest.param(
            lambda site: site.pod("second-0-pod", "second-0", metadata={"deletionTimestamp": "2026-11-21T00:00:00Z"}),
            id="it is being deleted",
        ),
        pytest.param(lambda site: site.api.drop("/api/v1/namespaces/team/pods/second-0-pod"), id="the pod is gone"),
        pytest.param(lambda site: site.api.protected.update({"second-0-pod": 409}), id="another pod of its name"),
    ],
)
def test_nothing_is_done_if_the_api_server_knows_better(
    site: Site, change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    site.conflict()
    site.decide()
    index = ClaimIndex(DRIVER, [msgspec.convert(each, Claim) for each in site.api.folder(CLAIMS).values()])
    change(site)
    site.clock.advance(CONFLICT_SECONDS)
    site.resolver.update(index, site.fleet, [NODE])
    assert site.api.count("get")
    assert not site.api.evicted
    assert not site.events()
    assert "evicted a pod" not in caplog.text


def test_a_refused_eviction_is_tried_again_and_keeps_no_other_pod_waiting(site: Site) -> None:
    site.conflict(0)
    site.conflict(1)
    site.claim("second-0", "gpu-0", "second-0-pod", "neighbour")
    site.pod("neighbour", "second-0")
    site.api.protected = {"second-0-pod": 429}
    site.decide()
    site.decide(CONFLICT_SECONDS)
    assert sorted(site.api.evicted) == ["neighbour", "second-1-pod"]
    site.api.protected = {}
    site.decide(CONFLICT_SECONDS)
    assert sorted(site.api.evicted) == ["neighbour", "second-0-pod", "second-1-pod"]


def test_an_owner_loses_two_pods_an_hour_and_no_more(site: Site) -> None:
    for number in range(MOST_OF_OWNER + 1):
        site.conflict(number, owners=[JOB])
    site.decide()
    site.decide(CONFLICT_SECONDS)
    assert len(site.api.evicted) == MOST_OF_OWNER
    [kept] = {"second-0-pod", "second-1-pod", "second-2-pod"} - {*site.api.evicted}
    told = site.event(kept)
    assert "it is not evicted, because Job job loses at most 2 pods an hour in this way, and has lost 2" in told
    site.decide(RECORD_SECONDS + 1)
    assert kept in site.api.evicted


def test_objects_that_cannot_be_read_and_names_that_lead_elsewhere_do_no_harm(site: Site) -> None:
    site.conflict(0)
    site.conflict(1)
    site.conflict(2)
    site.decide()
    index = ClaimIndex(DRIVER, [msgspec.convert(each, Claim) for each in site.api.folder(CLAIMS).values()])
    site.claim("first-0", SMALL, devices="many")
    site.pod("second-1-pod", "second-1", spec={"resourceClaims": 7})
    names = ["../secrets/token", "..", "a b", "x" * 100_000 + "/", "second-2-pod"]
    site.claim("second-2", "gpu-2", *names)
    site.clock.advance(CONFLICT_SECONDS)
    site.resolver.update(index, site.fleet, [NODE])
    assert site.api.evicted == ["second-2-pod"]
    assert not [path for path in site.api.queries("get") if "secrets" in path]
    assert site.resolver.next_s == CONFLICT_SECONDS


def test_decisions_do_not_wait_for_an_api_server_that_is_slow(site: Site) -> None:
    for number in range(3):
        site.conflict(number)
    site.decide()

    def late(exchange: Exchange) -> None:
        site.clock.advance(2 * PASS_SECONDS)
        exchange.cut()

    site.api.once("get", late)
    site.decide(CONFLICT_SECONDS)
    assert (site.api.count("get"), site.resolver.next_s) == (1, 0)
    site.decide()
    assert len(site.api.evicted) == 2
    site.decide(CONFLICT_SECONDS)
    assert len(site.api.evicted) == 3


@pytest.mark.parametrize("evicts", [True, False])
def test_a_controller_evicts_unless_it_is_told_not_to(
    site: Site, monkeypatch: pytest.MonkeyPatch, evicts: bool
) -> None:
    monkeypatch.setattr(overlapping_allocations, "CONFLICT_SECONDS", 0.0)
    site.api.store(f"/api/v1/nodes/{NODE}")
    site.claim("first", SMALL, devices=ready(SMALL))
    site.claim("second", SMALL, "pod")
    site.pod("pod", "second")
    with led(site.api, evict_conflicting=evicts) as controller:
        eventually(lambda: controller.failure() is None, "it has decided")
    assert site.api.evicted == (["pod"] if evicts else [])
