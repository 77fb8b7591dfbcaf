"""Pods whose node can not prepare their claim: which are evicted, when, and what they and their claims are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from controller.cluster.claim_index import ClaimIndex
from controller.eviction.evictor import MOST_OF_OWNER, PASS_SECONDS, Evictor
from controller.eviction.failed_starts import (
    BUDGET_SECONDS,
    MOST_PODS,
    PROTECTED_RETRY_SECONDS,
    RETRY_SECONDS,
    FailedStarts,
)
from controller.eviction.recent_evictions import ANNOTATION, RECORD_SECONDS, RecentEvictions
from driver.kube.client import KubeClient
from driver.kube.events import Recorder
from driver.kube.types import Claim, GpuNodePlan, Metadata, PlanMetadata, Pod
from driver.model.plan import FailedClaim, FailureCause, PlanSpec, PlanStatus
from driver.slices.slice_names import Pool
from tests.support.api_server import Exchange
from tests.support.clock import FakeClock
from tests.support.evictions import ClusterApi, allocated, ready
from tests.support.queues import DRIVER
from tests.support.recording import recording
from tests.support.running import eventually

AFTER_SECONDS = 120.0
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims"
PODS = "/api/v1/namespaces/team/pods"
FENCED = "/api/v1/namespaces/tessera/configmaps/tessera-fence"
SMALL = "gpu-0-mig-1g10gb-0"


def owner(name: str, kind: str = "ReplicaSet", *, controller: bool = True) -> dict[str, Any]:
    version = "batch/v1" if kind == "Job" else "apps/v1"
    return {"apiVersion": version, "kind": kind, "name": name, "uid": f"uid-{name}", "controller": controller}


def monitor(node: str) -> dict[str, Any]:
    """An allocated monitor device."""
    pool = Pool(node, DRIVER).of_monitors.name
    return {"request": "monitor", "driver": DRIVER, "pool": pool, "device": "gpu-0-monitor", "adminAccess": True}


@dataclass
class Site:
    """Nodes, claims and pods on an API server, and what the nodes report."""

    api: ClusterApi
    clock: FakeClock
    recorder: Recorder
    nodes: int = 1
    reports: dict[str, list[FailedClaim]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin_term(self.api.server.client())

    def begin_term(self, client: KubeClient) -> None:
        """A controller becomes the leader, which knows what the API server knows."""
        evictor = Evictor(client, self.recorder, RecentEvictions(client, "tessera", self.clock))
        self.failed = FailedStarts(client, evictor, DRIVER, AFTER_SECONDS, self.clock.monotonic)

    def start(self, name: str, *pods: str, node: str = "node-a", cause: FailureCause = FailureCause.GPU) -> None:
        """A claim on ``node`` that can not be prepared, and its pods (by default one of its name)."""
        self.claim(name, *(pods or (name,)), node=node)
        for pod in pods or (name,):
            self.pod(pod, name, node=node)
        uid = self.api.folder(CLAIMS)[name]["metadata"]["uid"]
        report = FailedClaim(f"team/{name}", uid, "2026-11-26T00:00:00Z", cause, "NVML says UNKNOWN (999)")
        self.reports.setdefault(node, []).append(report)

    def claim(self, name: str, *pods: str, node: str = "node-a", **more: Any) -> None:
        reserved = [{"resource": "pods", "name": pod, "uid": f"uid-of-{pod}"} for pod in pods]
        allocation = allocated(SMALL, **{"pool": f"{node}-{DRIVER}"} | more.pop("result", {}))
        allocation["devices"]["results"] += more.pop("others", [])
        self.api.store(f"{CLAIMS}/{name}", status={"allocation": allocation, "reservedFor": reserved, **more})

    def pod(self, name: str, claim: str, node: str = "node-a", owners: Any = None, phase: str = "Pending") -> None:
        owners = [owner(name)] if owners is None else owners
        spec = {"nodeName": node, "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}]}
        metadata = {"name": name, "uid": f"uid-of-{name}", "ownerReferences": owners, "labels": {"app": name}}
        self.api.store(f"{PODS}/{name}", metadata=metadata, spec=spec, status={"phase": phase})

    def budget(self, name: str, app: str, healthy: int, desired: int, policy: str = "") -> None:
        spec: dict[str, Any] = {"selector": {"matchLabels": {"app": app}}}
        spec |= {"unhealthyPodEvictionPolicy": policy} if policy else {}
        status = {"currentHealthy": healthy, "desiredHealthy": desired}
        path = f"/apis/policy/v1/namespaces/team/poddisruptionbudgets/{name}"
        self.api.store(path, spec=spec, status=status)

    def job(self, name: str, failed: int = 0, **spec: Any) -> None:
        path = f"/apis/batch/v1/namespaces/team/jobs/{name}"
        self.api.store(path, spec={"backoffLimit": 6, **spec}, status={"failed": failed})

    def decide(self, after_s: float = 0.0) -> None:
        """Let the controller decide once, so many seconds later."""
        self.clock.advance(after_s)
        names = {*self.reports, "node-a", *(f"idle-{number}" for number in range(self.nodes - 1))}
        plans = {
            name: GpuNodePlan(PlanMetadata(name), PlanSpec(), PlanStatus(unprepared=tuple(self.reports.get(name, ()))))
            for name in names
        }
        claims = [msgspec.convert(each, Claim) for each in self.api.folder(CLAIMS).values()]
        self.failed.update(plans, ClaimIndex(DRIVER, claims))

    def events(self) -> dict[tuple[str, str], str]:
        """The messages of the Events by kind and name of what they are about."""
        stored = [*self.api.folder("/api/v1/namespaces/team/events").values()]
        assert {(each["reason"], each["type"]) for each in stored} <= {("FailedStart", "Warning")}
        return {(each["involvedObject"]["kind"], each["involvedObject"]["name"]): each["message"] for each in stored}

    def event(self, name: str, kind: str = "Pod") -> str:
        eventually(lambda: (kind, name) in self.events(), f"an Event on {kind} {name}")
        return self.events()[kind, name]


@pytest.fixture
def site() -> Iterator[Site]:
    with ClusterApi() as api, recording(api) as (clock, recorder):
        yield Site(api, clock, recorder)


def test_a_pod_is_evicted_when_its_claim_could_not_be_prepared_for_two_minutes(site: Site) -> None:
    site.start("serve")
    site.decide()
    site.decide(AFTER_SECONDS - 1)
    assert site.failed.next_s == 1
    assert not site.api.count("get")
    site.decide(1)
    assert site.api.evicted == ["serve"]
    for kind in ("Pod", "ResourceClaim"):
        message = site.event("serve", kind)
        assert f"node node-a can't prepare {SMALL} for claim team/serve: NVML says UNKNOWN (999)" in message
        assert "its pod is evicted" in message
    site.decide(RETRY_SECONDS)
    assert site.api.evicted == ["serve"]


@pytest.mark.parametrize("cause", [FailureCause.GPU, FailureCause.NODE])
def test_a_fault_of_the_gpu_or_of_the_node_is_a_reason(site: Site, cause: FailureCause) -> None:
    site.start("serve", cause=cause)
    site.decide()
    site.decide(AFTER_SECONDS)
    assert site.api.evicted == ["serve"]


def test_what_the_claim_itself_is_to_blame_for_moves_nobody(site: Site) -> None:
    site.start("serve", cause=FailureCause.OTHER)
    site.decide()
    assert site.failed.next_s is None


def test_a_claim_that_is_prepared_in_time_is_forgotten(site: Site) -> None:
    site.start("serve")
    site.decide()
    site.reports.clear()
    site.decide(AFTER_SECONDS)
    assert site.failed.next_s is None
    assert not site.api.count("get")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda site: site.api.drop(f"{CLAIMS}/serve"), id="the claim is gone"),
        pytest.param(lambda site: site.claim("serve", "serve", allocation=None), id="it has no device any more"),
        pytest.param(lambda site: site.claim("serve", "serve", devices=ready(SMALL)), id="it is prepared"),
        pytest.param(lambda site: site.claim("serve", "serve", node="node-b"), id="it is on another node now"),
        pytest.param(lambda site: site.pod("serve", "serve", phase="Running"), id="the pod runs"),
        pytest.param(lambda site: site.api.drop(f"{PODS}/serve"), id="the pod is gone"),
        pytest.param(lambda site: site.api.protected.update({"serve": 409}), id="another pod of its name"),
    ],
)
def test_nobody_is_evicted_if_the_api_server_knows_better(site: Site, change: Any) -> None:
    site.start("serve")
    site.decide()
    change(site)
    site.decide(AFTER_SECONDS)
    assert site.api.count("get")
    assert not site.api.evicted
    assert not site.events()


def test_another_claim_of_the_same_name_is_left_alone(site: Site) -> None:
    site.start("serve")
    site.reports["node-a"] = [msgspec.structs.replace(site.reports["node-a"][0], uid="of-an-earlier-claim")]
    site.decide()
    site.decide(AFTER_SECONDS)
    assert not site.api.evicted


@pytest.mark.parametrize(
    ("protect", "why"),
    [
        pytest.param(
            lambda site: site.pod("serve", "serve", owners=[owner("x", controller=False)]), "must be deleted", id="bare"
        ),
        pytest.param(
            lambda site: site.pod("serve", "serve", owners=[owner("x", "DaemonSet")]), "DaemonSet", id="DaemonSet"
        ),
        pytest.param(
            lambda site: site.pod("serve", "serve", owners=[owner("node-a", "Node")]), "static", id="static pod"
        ),
        pytest.param(
            lambda site: site.claim("serve", "serve", result={"adminAccess": True}), "adminAccess", id="adminAccess"
        ),
        pytest.param(
            lambda site: site.claim("serve", "serve", others=[monitor("node-a")]), "adminAccess", id="and a monitor"
        ),
        pytest.param(
            lambda site: site.claim("serve", "serve", result=monitor("node-a")), "adminAccess", id="a monitor"
        ),
        pytest.param(lambda site: site.budget("keep", "serve", 1, 2), "PodDisruptionBudget keep forbids it", id="PDB"),
    ],
)
def test_a_protected_pod_stays_and_is_told_why(site: Site, protect: Any, why: str) -> None:
    site.start("serve")
    protect(site)
    site.decide()
    site.decide(AFTER_SECONDS)
    assert not site.api.evicted
    assert why in site.event("serve")
    assert "its pod is not evicted" in site.event("serve", "ResourceClaim")


@pytest.mark.parametrize(
    "budget",
    [("other-app", 1, 2, ""), ("serve", 2, 2, ""), ("serve", 1, 2, "AlwaysAllow")],
    ids=["of other pods", "that has room", "that lets unhealthy pods go"],
)
def test_a_budget_does_not_protect_a_pod(site: Site, budget: tuple[str, int, int, str]) -> None:
    site.start("serve")
    site.budget("pdb", *budget)
    site.decide()
    site.decide(AFTER_SECONDS)
    assert site.api.evicted == ["serve"]


def fails_with(operator: str, *codes: int) -> dict[str, Any]:
    return {"action": "FailJob", "onExitCodes": {"operator": operator, "values": codes}, "onPodConditions": None}


IGNORES: dict[str, Any] = {
    "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
}
EXIT_CODES = fails_with("In", 1)
FAILS = {"rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]}


@pytest.mark.parametrize(
    ("failed", "spec", "evicted"),
    [
        (0, {}, True),
        (5, {}, True),
        (6, {}, False),
        (0, {"backoffLimit": 0}, False),
        (0, {"backoffLimit": 0, "podFailurePolicy": IGNORES}, True),
        (0, {"podFailurePolicy": FAILS}, False),
        (0, {"podFailurePolicy": {"rules": [EXIT_CODES]}}, True),
        (6, {"podFailurePolicy": {"rules": [EXIT_CODES]}}, False),
        (0, {"podFailurePolicy": {"rules": [fails_with("In", 42), *IGNORES["rules"]]}}, True),
        (0, {"podFailurePolicy": {"rules": [fails_with("In", 1, 143), *IGNORES["rules"]]}}, False),
        (0, {"podFailurePolicy": {"rules": [fails_with("NotIn", 42, 143), *IGNORES["rules"]]}}, False),
        (0, {"podFailurePolicy": {"rules": [*IGNORES["rules"], fails_with("NotIn", 42)]}}, True),
        (0, {"podFailurePolicy": {"rules": None}}, True),
        (0, {"backoffLimitPerIndex": 1}, False),
    ],
)
def test_a_pod_of_a_job_goes_only_if_the_job_goes_on(site: Site, failed: int, spec: Any, evicted: bool) -> None:
    site.start("train")
    site.pod("train", "train", owners=[owner("fit", "Job")])
    site.job("fit", failed, **spec)
    site.decide()
    site.decide(AFTER_SECONDS)
    assert bool(site.api.evicted) is evicted
    if not evicted:
        assert "Job fit would count it" in site.event("train")


def test_of_the_consumers_of_a_claim_all_are_evicted_or_none(site: Site) -> None:
    site.start("shared", "one", "two")
    site.pod("two", "shared", owners=[])
    site.decide()
    site.decide(AFTER_SECONDS)
    assert not site.api.evicted
    site.pod("two", "shared")
    site.decide(PROTECTED_RETRY_SECONDS)
    assert sorted(site.api.evicted) == ["one", "two"]


def test_an_owner_loses_two_pods_an_hour_and_no_more(site: Site) -> None:
    for number in range(MOST_OF_OWNER + 1):
        name = f"pod-{number}"
        site.start(name)
        site.pod(name, name, owners=[owner("deployment")])
    site.decide()
    site.decide(AFTER_SECONDS)
    for _ in range(2 * MOST_OF_OWNER):
        site.decide(BUDGET_SECONDS)
    assert len(site.api.evicted) == MOST_OF_OWNER


def test_the_limit_of_an_owner_survives_a_change_of_leaders(site: Site) -> None:
    for number in range(MOST_OF_OWNER + 1):
        site.start(f"pod-{number}", node=f"node-{number}")
        site.pod(f"pod-{number}", f"pod-{number}", node=f"node-{number}", owners=[owner("deployment")])
        site.nodes = 100
        site.decide()
        site.decide(AFTER_SECONDS)
        site.reports.clear()
        site.begin_term(site.api.server.client())
    assert site.api.evicted == ["pod-0", "pod-1"]
    assert "ReplicaSet deployment loses at most 2 pods an hour in this way, and has lost 2" in site.event("pod-2")
    site.start("pod-3")
    site.pod("pod-3", "pod-3", owners=[owner("deployment")])
    site.decide()
    site.decide(RECORD_SECONDS)
    assert site.api.evicted == ["pod-0", "pod-1", "pod-3"]


def test_the_owner_of_another_namespace_is_another_owner_whatever_its_uid(site: Site) -> None:
    record = RecentEvictions(site.api.server.client(), "tessera", site.clock)
    site.start("pod-0")
    other = msgspec.convert(site.api.folder(PODS)["pod-0"], Pod)
    for uid in ("x", "y"):
        record.refresh()
        record.add(msgspec.structs.replace(other, metadata=Metadata(name=uid, uid=uid)), "others/uid-pod-0")
    site.decide()
    site.decide(AFTER_SECONDS)
    assert site.api.evicted == ["pod-0"]


def test_nodes_that_asked_before_a_change_of_leaders_are_remembered(site: Site) -> None:
    site.nodes = 10
    for number in range(2):
        site.start(f"pod-{number}", node=f"node-{number}")
        site.decide()
        site.decide(AFTER_SECONDS)
        site.reports = {"node-0": [], "node-1": []}
        site.begin_term(site.api.server.client())
    assert site.api.evicted == ["pod-0"]


class KilledError(BaseException):
    """The controller is gone."""


class DyingClient(KubeClient):
    """A client whose process is killed at the write number ``last``, before or after the API server has made it."""

    def __init__(self, api: ClusterApi, last: int, *, after: bool) -> None:
        alive = api.server.client()
        super().__init__(alive._access, "controller")
        self._left, self._after = last, after

    def _request(self, method: str, *args: Any, **options: Any) -> Any:
        if method == "GET":
            return super()._request(method, *args, **options)
        self._left -= 1
        if self._left == 0 and not self._after:
            raise KilledError
        answer = super()._request(method, *args, **options)
        if self._left == 0:
            raise KilledError
        return answer


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after it"])
@pytest.mark.parametrize("write", range(1, 9))
def test_a_controller_that_is_killed_in_the_middle_of_evictions_evicts_nobody_twice(
    site: Site, write: int, after: bool
) -> None:
    site.start("shared", "one", "two")
    for pod in ("one", "two"):
        site.pod(pod, "shared", owners=[owner("deployment")])
    site.begin_term(DyingClient(site.api, write, after=after))
    site.decide()
    with suppress(KilledError):
        site.decide(AFTER_SECONDS)
    site.begin_term(site.api.server.client())
    site.decide()
    site.decide(AFTER_SECONDS)
    assert sorted(site.api.evicted) == ["one", "two"]
    site.start("next")
    site.pod("next", "next", owners=[owner("deployment")])
    site.decide()
    site.decide(AFTER_SECONDS)
    assert len(site.api.evicted) == MOST_OF_OWNER


def test_a_write_of_the_fence_meanwhile_delays_no_eviction(site: Site) -> None:
    site.api.store(FENCED, data={"pool": "gpu-0"})
    site.start("serve")
    site.decide()
    site.api.once("PATCH", lambda exchange: exchange.refuse(409, "the fence has just been written"))
    site.decide(AFTER_SECONDS)
    assert site.api.evicted == ["serve"]


def test_if_another_controller_evicts_meanwhile_this_one_looks_again(site: Site) -> None:
    site.start("serve")
    site.decide()
    site.decide(AFTER_SECONDS - 1)
    other = RecentEvictions(site.api.server.client(), "tessera", site.clock)

    def meanwhile(exchange: Exchange) -> None:
        other.asking({"elsewhere"}, RECORD_SECONDS)
        exchange.refuse(409, "changed")

    site.api.once("PATCH", meanwhile)
    site.decide(1)
    assert not site.api.evicted
    site.decide(RETRY_SECONDS)
    assert site.api.evicted == ["serve"]


@pytest.mark.parametrize("text", ["no JSON", '{"evictions": 1}', '{"evictions": [["x", "team/uid-serve", "n", 1e18]]}'])
def test_a_record_that_somebody_broke_starts_anew_and_times_in_the_future_end(site: Site, text: str) -> None:
    site.api.store(FENCED, metadata={"annotations": {ANNOTATION: text}})
    site.start("serve")
    site.decide()
    site.decide(AFTER_SECONDS)
    assert site.api.evicted == ["serve"]


def test_a_node_loses_one_pod_a_minute_at_first(site: Site) -> None:
    for number in range(3):
        site.start(f"pod-{number}")
    site.decide()
    site.decide(AFTER_SECONDS)
    assert len(site.api.evicted) == 1
    site.decide(RETRY_SECONDS)
    assert len(site.api.evicted) == 1
    site.decide(BUDGET_SECONDS)
    assert len(site.api.evicted) == 2


def test_a_release_that_fails_everywhere_evicts_nobody(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.nodes = 18
    for number in range(3):
        site.start(f"pod-{number}", node=f"node-{number}")
    site.decide()
    site.decide(AFTER_SECONDS)
    assert not site.api.evicted
    assert "too many nodes" in caplog.text


def test_nodes_that_can_not_prepare_monitors_keep_no_other_pod_from_eviction(site: Site) -> None:
    site.nodes = 18
    for number in range(3):
        site.start(f"pod-{number}", node=f"node-{number}")
    for number in range(2):
        site.claim(f"pod-{number}", f"pod-{number}", result=monitor(f"node-{number}"))
    site.decide()
    site.decide(AFTER_SECONDS)
    assert site.api.evicted == ["pod-2"]


def test_without_the_right_to_look_nobody_is_evicted(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.start("serve")
    site.decide()
    site.api.once("get", lambda exchange: exchange.refuse(403, "no right"))
    site.decide(AFTER_SECONDS)
    assert "nobody is evicted now" in caplog.text
    site.api.once("get", lambda exchange: exchange.refuse(404, "no record yet"))
    site.api.once("get", lambda exchange: exchange.refuse(403, "no right"))
    site.decide(RETRY_SECONDS)
    assert "can't be evicted now" in caplog.text
    assert not site.api.evicted


def test_a_report_can_not_lead_elsewhere(site: Site) -> None:
    report = FailedClaim("../../nodes/x", "uid", "2026-11-26T00:00:00Z", FailureCause.GPU)
    site.reports["node-a"] = [report]
    site.decide()
    site.decide(AFTER_SECONDS)
    assert site.api.count("get") == site.api.count("get", FENCED)


def test_a_later_pod_of_the_same_name_and_a_pod_of_another_claim_are_left_alone(site: Site) -> None:
    site.start("web-0")
    site.pod("web-0", "another-claim", node="node-z")
    site.decide()
    site.decide(AFTER_SECONDS)
    assert not site.api.evicted
    site.api.store(f"{PODS}/web-0", metadata={"uid": "of-the-next-pod"})
    site.decide(PROTECTED_RETRY_SECONDS)
    assert not site.api.evicted


def test_the_pods_of_a_claim_count_together_against_the_limit_of_their_owner(site: Site) -> None:
    site.start("shared", "a", "b", "c")
    for pod in "abc":
        site.pod(pod, "shared", owners=[owner("deployment")])
    site.decide()
    site.decide(AFTER_SECONDS)
    assert not site.api.evicted
    assert "ReplicaSet deployment loses at most 2 pods an hour" in site.event("a")


def test_evictions_that_a_job_has_not_counted_yet_are_counted_for_it(site: Site) -> None:
    site.job("fit", backoffLimit=1)
    for name in ("one", "two"):
        site.start(name)
        site.pod(name, name, owners=[owner("fit", "Job")])
    site.decide()
    site.decide(AFTER_SECONDS)
    site.decide(BUDGET_SECONDS + 1)
    assert len(site.api.evicted) == 1


def test_a_job_of_another_kind_of_controller_is_no_batch_job(site: Site) -> None:
    site.start("train")
    site.pod("train", "train", owners=[{**owner("fit", "Job"), "apiVersion": "batch.volcano.sh/v1alpha1"}])
    site.decide()
    site.decide(AFTER_SECONDS)
    assert site.api.evicted == ["train"]


def test_a_pod_that_the_api_server_protects_keeps_the_others_of_its_claim_too(site: Site) -> None:
    site.start("shared", "one", "two")
    site.api.protected = {"two": 429}
    site.decide()
    site.decide(AFTER_SECONDS)
    assert not site.api.evicted
    site.api.protected = {}
    site.decide(RETRY_SECONDS)
    assert sorted(site.api.evicted) == ["one", "two"]


def test_a_claim_of_very_many_pods_is_left_alone(site: Site) -> None:
    site.start("shared", *(f"pod-{number}" for number in range(MOST_PODS + 1)))
    site.decide()
    site.decide(AFTER_SECONDS)
    assert not site.api.evicted
    assert f"more than {MOST_PODS} share it" in site.event("shared", "ResourceClaim")


def test_another_cause_for_a_moment_ends_no_wait(site: Site) -> None:
    site.start("serve")
    site.decide()
    [report] = site.reports["node-a"]
    site.reports["node-a"] = [msgspec.structs.replace(report, cause=FailureCause.OTHER)]
    site.decide(AFTER_SECONDS)
    assert not site.api.evicted
    site.reports["node-a"] = [report]
    site.decide(1)
    assert site.api.evicted == ["serve"]


def test_a_node_that_reports_very_much_slows_no_decision_and_keeps_no_other_node_waiting(site: Site) -> None:
    site.nodes = 30
    site.reports["node-a"] = [
        FailedClaim(f"team/fake-{number}", f"uid-{number}", "2026-11-26T00:00:00Z", FailureCause.GPU)
        for number in range(20_000)
    ]
    site.start("serve", node="node-b")
    site.decide()
    site.decide(AFTER_SECONDS)
    assert site.failed.next_s is not None
    assert site.failed.next_s >= PASS_SECONDS
    assert site.api.count("get") < 100
    assert site.api.evicted == ["serve"]


def test_a_failure_that_is_over_in_time_does_not_count_as_a_sign_of_a_bad_release(site: Site) -> None:
    site.nodes = 18
    site.start("serve", node="node-a")
    site.start("other", node="node-b")
    site.start("third", node="node-c")
    site.decide()
    del site.reports["node-b"], site.reports["node-c"]
    site.decide(AFTER_SECONDS)
    assert site.api.evicted == ["serve"]


def test_a_running_pod_of_several_budgets_is_protected_because_the_api_server_evicts_none(site: Site) -> None:
    for name in ("one", "two"):
        site.budget(name, "serve", 2, 1)
    client = site.api.server.client()
    evictor = Evictor(client, None, RecentEvictions(client, "tessera"))
    for phase, reason in (("Running", "several PodDisruptionBudgets select it"), ("Pending", None)):
        site.pod("serve", "serve", phase=phase)
        [pod] = [msgspec.convert(item, Pod) for item in site.api.folder(PODS).values()]
        protection = evictor.protection([pod])
        assert (protection and protection.reason.partition(",")[0]) == reason


@pytest.mark.parametrize(("trigger", "is_evicted"), [("failed-start", False), ("", False), ("preemption", True)])
def test_only_pods_that_could_not_start_count_for_the_limit_of_their_node(
    site: Site, trigger: str, is_evicted: bool
) -> None:
    recent = RecentEvictions(site.api.server.client(), "tessera", site.clock)
    other = msgspec.convert({"metadata": {"name": "other", "uid": "other"}, "spec": {"nodeName": "node-a"}}, Pod)
    site.start("mine")
    site.decide()
    site.decide(AFTER_SECONDS - 30)
    recent.add(other, "team/other", trigger)
    site.decide(30)
    assert site.api.evicted == (["mine"] if is_evicted else [])


def test_a_budget_that_was_not_counted_yet_protects(site: Site) -> None:
    site.start("serve")
    site.budget("fresh", "serve", 0, 0)
    path = "/apis/policy/v1/namespaces/team/poddisruptionbudgets/fresh"
    site.api.store(path, metadata={"generation": 2}, spec={"selector": {"matchLabels": {"app": "serve"}}})
    site.decide()
    site.decide(AFTER_SECONDS)
    assert not site.api.evicted
