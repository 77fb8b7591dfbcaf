"""Evictions for pods of higher priority: none in the mode DryRun, all victims or none in the mode Active."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from controller.cluster.claim_index import PoolDevice
from controller.eviction import preemptions
from controller.eviction.evictor import Evictor
from controller.eviction.gpu_policy import PATH, GpuPolicy
from controller.eviction.preemption_preview import REQUIRED
from controller.eviction.preemptions import PODS_PER_TURN, RESERVATION_SECONDS, Preemptions
from controller.eviction.recent_evictions import RecentEvictions
from controller.fence.fence import Fence
from controller.metrics import ControllerMetrics
from driver.kube.events import Recorder
from driver.kube.types import ExtendedClaimStatus, Metadata, Pod
from tests.support.api_server import Object
from tests.support.evictions import ClusterApi
from tests.support.preemption import EVERYBODY, OWNER, WAITING, Contest, policy
from tests.support.queues import DRIVER, FULL, node_of, request
from tests.support.recording import recording
from tests.support.running import eventually
from tests.support.shared_gpus import memory, shared_gpu

REFUSED = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "message": "1 cannot allocate all claims"}],
}
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
PODS, EVENTS = "/api/v1/namespaces/default/pods", "/api/v1/namespaces/default/events"

ACTIVE = {**EVERYBODY, "mode": "Active"}
ALL_DAY = {"from": "00:00", "to": "00:00", "timeZone": "Europe/Berlin"}
GPU = PoolDevice(f"a-{DRIVER}", "gpu-0")


class KeptReservations(Fence):
    """Reservations in memory. ``in_force``: whether the fence would refuse others. ``taken``: GPUs that no pod gets."""

    def __init__(self) -> None:
        self.in_force, self.kept, self.is_overdue = True, dict[PoolDevice, frozenset[str]](), False
        self.taken = set[PoolDevice]()
        self.woken, self.seconds = 0, 0.0

    def reserve(self, gpus: Iterable[PoolDevice], uids: Iterable[str], seconds: float) -> bool:
        new = dict.fromkeys(gpus, frozenset(uids))
        is_reserved = self.in_force and self.taken.isdisjoint(new)
        self.kept |= new if is_reserved else {}
        self.seconds = seconds
        return is_reserved

    def hand_over(self, uids: frozenset[str], pod: str) -> None:
        self.kept = {entry: frozenset({pod}) if of == uids else of for entry, of in self.kept.items()}

    def reservations(self) -> dict[PoolDevice, frozenset[str]]:
        return dict(self.kept)

    def lift(self, devices: Iterable[PoolDevice]) -> None:
        self.kept = {entry: claims for entry, claims in self.kept.items() if entry not in set(devices)}

    def wake_parked_pods(self) -> None:
        self.woken += 1

    def lift_overdue_reservations(self) -> set[frozenset[str]]:
        overdue = self.kept if self.is_overdue else {}
        self.kept = {} if self.is_overdue else self.kept
        return set(overdue.values())


@dataclass
class Site:
    """A full node of one GPU, a pod of priority 10 that the scheduler has refused, and a controller."""

    api: ClusterApi
    recorder: Recorder

    def __post_init__(self) -> None:
        self.contest = Contest(node_of("a", "full", gpus=1))
        self.contest.runs("notebook", "a", "gpu-0")
        self.contest.search(selector=FULL, status=REFUSED)
        self.registry = CollectorRegistry()
        self.begin_term()

    def begin_term(self) -> None:
        client, recorder = self.api.server.client(), self.recorder
        evictor = Evictor(client, recorder, RecentEvictions(client, "tessera"), ControllerMetrics(self.registry))
        self.reserved, self.stale = KeptReservations(), ""
        self.preemptions = Preemptions(
            client,
            lambda: self.contest.there.queue,
            lambda: self.stale or None,
            evictor,
            recorder,
            self.reserved,
        )

    def turn(self, *policies: GpuPolicy | dict[str, Any]) -> None:
        """One look, with these policies in the cluster."""
        there = self.contest.there
        for number, item in enumerate(policies):
            content = item.model_dump(mode="json", by_alias=True) if isinstance(item, GpuPolicy) else item
            name = content["metadata"]["name"]
            metadata = {"name": name, "uid": f"policy-{number}"}
            self.api.store(f"{PATH}/{name}", metadata=metadata, spec=content.get("spec"))
        self.api.folder(PODS).clear()
        for pod in there.pods:
            path = f"/api/v1/namespaces/{pod.metadata.namespace}/pods/{pod.metadata.name}"
            self.api.store(path, **msgspec.to_builtins(pod))
        for claim in there.claims:
            path = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{claim.metadata.name}"
            self.api.store(path, **msgspec.to_builtins(claim))
        for name, node in there.nodes.items():
            self.api.store(f"/api/v1/nodes/{name}", **msgspec.to_builtins(node))
        self.preemptions.turn()

    def turn_with(self, field: str, value: Any) -> None:
        """One look with a policy, and this field in the spec of the waiting pod."""
        self.turn()
        self.api.folder(PODS)["pod-of-claim"]["spec"][field] = value
        self.api.store(f"{PATH}/notebooks", metadata={"name": "notebooks", "uid": "p"}, spec=EVERYBODY)
        self.preemptions.turn()

    def events(self) -> list[tuple[str, str, str]]:
        """Policy, reason and message of the Events."""
        events: list[Object] = list(self.api.folder(EVENTS).values())
        return [(event["involvedObject"]["name"], event["reason"], event["message"]) for event in events]

    def read(self) -> set[str]:
        """The paths of all lists and objects that were read."""
        return {path.partition("?")[0] for kind in ("list", "get") for path in self.api.queries(kind)}

    def recorded(self) -> list[tuple[str, str, str, str, float]]:
        """Pod, trigger, policy, for whom, and GPU hours of the evictions that another leader finds."""
        recent = RecentEvictions(self.api.server.client(), "tessera")
        recent.refresh()
        return [
            (past.name, past.trigger, past.policy, past.contender, past.gpu_hours) for past in recent.record.evictions
        ]

    def counted(self, outcome: str = "dry-run") -> float | None:
        labels = {"trigger": "preemption", "outcome": outcome}
        return self.registry.get_sample_value("tessera_evictions_total", labels)


@pytest.fixture
def site() -> Iterator[Site]:
    with ClusterApi() as api, recording(api) as (_, recorder):
        yield Site(api, recorder)


def test_an_event_on_the_policy_names_the_victims_and_none_is_evicted(site: Site) -> None:
    site.turn(policy("notebooks", **EVERYBODY))
    eventually(site.events, "an Event is written")
    [(name, reason, message)] = site.events()
    assert (name, reason) == ("notebooks", "WouldEvict")
    assert message.startswith(
        "for pod default/pod-of-claim of priority 10 in the mode Active these would be evicted on "
    )
    assert "default/notebook, of priority 0 at most" in message
    assert site.api.evicted == []
    assert site.reserved.kept == {}


def test_in_quiet_hours_the_mode_dry_run_says_so_and_counts_no_pod(site: Site) -> None:
    site.turn(policy("notebooks", **EVERYBODY, quietHours=[ALL_DAY]))
    eventually(site.events, "an Event is written")
    [(_, reason, message)] = site.events()
    assert reason == "WouldEvict"
    assert re.search(r", but policy notebooks has quiet hours until \w{3} 00:00 \(Europe/Berlin\)$", message)
    assert site.counted() == 0


def test_the_same_victims_of_the_same_pod_count_once(site: Site) -> None:
    for _ in range(3):
        site.turn(policy("notebooks", **EVERYBODY))
    assert site.counted() == 1


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, id="preemption is not enabled"),
        pytest.param({"preemption": {"enabled": True}}, id="no namespace may take"),
        pytest.param({"preemption": {"enabled": True, "byNamespaces": ["other"]}}, id="another namespace may take"),
    ],
)
def test_without_a_policy_for_the_waiting_pod_only_the_policies_are_read(site: Site, spec: dict[str, Any]) -> None:
    site.turn(policy("notebooks", **spec))
    assert site.read() == {PATH}
    assert site.events() == []


def test_a_pod_that_the_scheduler_has_not_refused_takes_nothing(site: Site) -> None:
    [waiting] = [pod for pod in site.contest.there.pods if pod.metadata.name == "pod-of-claim"]
    site.contest.there.pods.remove(waiting)
    site.contest.there.pods.append(msgspec.structs.replace(waiting, status=type(waiting.status)()))
    site.turn(policy("notebooks", **EVERYBODY))
    assert site.read() == {PATH}


def test_one_policy_that_is_not_valid_stops_all_and_says_so(site: Site) -> None:
    wrong = {"metadata": {"name": "wrong"}, "spec": {"preemption": {"enabled": "yes"}}}
    site.turn(policy("notebooks", **EVERYBODY), wrong)
    eventually(site.events, "an Event is written")
    [(name, reason, message)] = site.events()
    assert (name, reason) == ("wrong", "InvalidPolicy")
    assert "spec.preemption.enabled" in message
    assert site.counted() == 0


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("topologySpreadConstraints", [{"whenUnsatisfiable": "DoNotSchedule"}], "topologySpreadConstraints"),
        ("affinity", {"podAntiAffinity": {REQUIRED: [{"topologyKey": "zone"}]}}, "affinity.podAntiAffinity"),
        ("volumes", [{"name": "scratch", "persistentVolumeClaim": {}}], "persistentVolumeClaim"),
        ("volumes", [{"name": "scratch", "ephemeral": {}}], "ephemeral"),
    ],
)
def test_a_pod_with_a_field_that_is_not_examined_takes_nothing(site: Site, field: str, value: Any, named: str) -> None:
    site.turn_with(field, value)
    assert site.counted() == 0
    eventually(site.events, "an Event is written")
    message = f"no pod is evicted for it: what {named} of it mean for a node is not examined"
    assert site.events() == [("pod-of-claim", "PreemptionBlocked", message)]


def test_a_pod_that_needs_a_device_of_another_driver_takes_nothing(site: Site) -> None:
    """Whether that driver has one for it is not known."""
    there, nic = site.contest.there, 'device.driver == "nic.example.com"'
    there.device_class("nic", nic)
    there.claim("nic", request(device_class="nic"))
    claims = [{"name": name, "resourceClaimName": name} for name in ("claim", "nic")]
    there.pods = [pod for pod in there.pods if pod.metadata.name != WAITING]
    there.pod(WAITING, status=REFUSED, priority=10, resourceClaims=claims)
    site.turn(policy("notebooks", **ACTIVE))
    eventually(site.events, "an Event is written")
    [(name, reason, message)] = site.events()
    assert (name, reason) == (WAITING, "PreemptionBlocked")
    assert "requests for devices of other drivers" in message
    assert (site.api.evicted, site.reserved.kept) == ([], {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("topologySpreadConstraints", [{"whenUnsatisfiable": "ScheduleAnyway"}]),
        ("affinity", {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}),
        ("volumes", [{"name": "scratch", "emptyDir": {}}]),
    ],
)
def test_what_a_pod_only_prefers_keeps_it_from_no_node(site: Site, field: str, value: Any) -> None:
    site.turn_with(field, value)
    assert site.counted() == 1


def test_an_event_on_a_pod_says_that_no_pod_may_be_evicted_for_it(site: Site) -> None:
    site.contest.there.pods = [
        replace(pod, spec=replace(pod.spec, priority=10)) if pod.metadata.name == "notebook" else pod
        for pod in site.contest.there.pods
    ]
    site.turn(policy("notebooks", **ACTIVE))
    eventually(site.events, "an Event is written")
    message = "no pod is evicted for it: no set of pods that may be evicted makes room for it (tessera preempt)"
    assert site.events() == [("pod-of-claim", "PreemptionBlocked", message)]


def test_a_cluster_without_the_definition_has_no_policies(site: Site) -> None:
    site.api.once("list", lambda exchange: exchange.refuse(404, "the server could not find the requested resource"))
    site.turn()
    assert site.read() == {PATH}
    assert site.events() == []


def test_a_turn_looks_for_victims_of_a_few_pods_only(site: Site) -> None:
    for number in range(2 * PODS_PER_TURN):
        site.contest.there.wants(request(selector=FULL), name=f"more-{number}", priority=20, status=REFUSED)
    site.turn(policy("notebooks", **EVERYBODY))
    assert site.counted() == PODS_PER_TURN


def test_pods_of_the_highest_priority_for_which_nothing_can_be_done_do_not_keep_others_from_their_turn(
    site: Site,
) -> None:
    """Tenants choose how many pods wait, and for what."""
    for number in range(2 * PODS_PER_TURN):
        there, name = site.contest.there, f"more-{number}"
        there.wants(request(selector=FULL, count=2), name=name, priority=20, status=REFUSED)
    for _ in range(100):
        site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == ["notebook"]


def test_in_the_mode_active_the_gpu_is_reserved_for_the_claim_and_the_victim_evicted(site: Site) -> None:
    site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == ["notebook"]
    assert site.reserved.kept == {GPU: frozenset({"claim"})}
    assert site.counted("evicted") == 1
    eventually(lambda: len(site.events()) == 3, "all Events are written")
    message_of = {(name, reason): message for name, reason, message in site.events()}
    assert message_of["notebook", "PreemptedFor"] == (
        "evicted for pod pod-of-claim of priority 10, which waits for its devices"
    )
    assert message_of["pod-of-claim", "Preempting"] == (
        "its devices are taken back on node a; pods that are evicted: notebook"
    )
    assert ("notebooks", "Preempting") in message_of


@pytest.mark.parametrize("rules", [None, [{"action": "FailJob", "onPodConditions": None}]])
def test_a_job_of_some_namespace_with_an_empty_list_in_its_failure_policy_does_not_matter(
    site: Site, rules: list[Object] | None
) -> None:
    """The API server writes it as null."""
    path = "/apis/batch/v1/namespaces/other/jobs/train"
    site.api.store(path, metadata={"name": "train"}, spec={"podFailurePolicy": {"rules": rules}})
    site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == ["notebook"]


INDEXED_JOB = {"kind": "Job", "apiVersion": "batch/v1", "name": "train", "uid": "train", "controller": True}
IGNORES = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]


@pytest.mark.parametrize(("rules", "evicted"), [(IGNORES, ["worker-0", "worker-1", "worker-2"]), ([], [])])
def test_all_pods_of_a_gang_are_evicted_if_its_job_does_not_count_that_as_failures(
    site: Site, rules: list[Object], evicted: list[str]
) -> None:
    """For the limit of an owner they are one: otherwise no gang of three could ever be evicted."""
    site.contest = contest = Contest(node_of("a", "full", gpus=3))
    for number in range(3):
        contest.runs(f"worker-{number}", "a", f"gpu-{number}", metadata={"ownerReferences": [INDEXED_JOB]})
    contest.search(selector=FULL, status=REFUSED)
    size = {"completionMode": "Indexed", "parallelism": 3, "completions": 3, "backoffLimit": 6}
    path = "/apis/batch/v1/namespaces/default/jobs/train"
    site.api.store(
        path, metadata={"name": "train", "uid": "train"}, spec={**size, "podFailurePolicy": {"rules": rules}}
    )
    site.turn(policy("notebooks", **ACTIVE))
    assert sorted(site.api.evicted) == evicted
    recent = RecentEvictions(site.api.server.client(), "tessera")
    recent.refresh()
    assert recent.of_owner("default/train", ()) == bool(evicted)


@pytest.fixture
def counting(site: Site) -> Site:
    """The waiting pod requests an extended resource, and so has no claim before the scheduler has chosen a device."""
    there = site.contest.there
    there.pods = [pod for pod in there.pods if pod.metadata.name != "pod-of-claim"]
    there.claims = [claim for claim in there.claims if claim.metadata.name != "claim"]
    there.device_class("full", FULL, extendedResourceName="example.com/gpu")
    limits = {"requests": {"example.com/gpu": "1"}, "limits": {"example.com/gpu": "1"}}
    there.pod("counting", containers=[{"name": "main", "resources": limits}], priority=10, status=REFUSED)
    return site


def test_for_a_pod_with_extended_resources_the_gpu_is_reserved_for_the_pod(counting: Site) -> None:
    counting.turn(policy("notebooks", **ACTIVE))
    assert counting.api.evicted == ["notebook"]
    assert counting.reserved.kept == {GPU: frozenset({"counting"})}


@pytest.mark.parametrize(
    ("state", "is_kept"),
    [
        pytest.param("waits", True, id="it waits"),
        pytest.param("claim is created", True, id="the scheduler has created the claim"),
        pytest.param("claim is allocated", False, id="the claim is allocated"),
        pytest.param("bound", False, id="it is bound"),
        pytest.param("gone", False, id="it is deleted"),
    ],
)
def test_a_reservation_for_a_pod_lasts_as_long_as_it_waits(counting: Site, state: str, is_kept: bool) -> None:
    counting.turn(policy("notebooks", **ACTIVE))
    there = counting.contest.there
    [pod] = [pod for pod in there.pods if pod.metadata.name == "counting"]
    there.pods.remove(pod)
    if state.startswith("claim"):
        results = [{"request": "gpu", "driver": DRIVER, "pool": GPU.pool, "device": GPU.device}]
        allocation = {"devices": {"results": results}} if state == "claim is allocated" else None
        there.claim("counting-extended-resources-x", request(), status={"allocation": allocation})
        claim = msgspec.convert({"resourceClaimName": "counting-extended-resources-x"}, ExtendedClaimStatus)
        pod = replace(pod, status=replace(pod.status, extended_resource_claim_status=claim))
    if state == "bound":
        pod = replace(pod, spec=replace(pod.spec, node_name="a"))
    there.pods += [] if state == "gone" else [pod]
    counting.turn()
    assert bool(counting.reserved.kept) == is_kept


def test_the_scheduler_tries_a_pod_with_extended_resources_again_once_its_devices_are_free(counting: Site) -> None:
    counting.turn(policy("notebooks", **ACTIVE))
    counting.contest.there.gpus = node_of("a", gpus=1)
    counting.preemptions.turn()
    assert counting.reserved.woken == 1


def test_it_is_recorded_who_was_evicted_for_whom_and_what_it_cost(site: Site) -> None:
    """Two pods of a gang lose what both have worked since they started."""
    site.contest = Contest(node_of("a", "full", gpus=2))
    started = (site.api.server.client().clock.now() - timedelta(hours=3)).isoformat()
    labels = {"leaderworkerset.sigs.k8s.io/group-key": "g"}
    for number, name in enumerate(("first", "second")):
        site.contest.runs(name, "a", f"gpu-{number}", since=started, metadata={"labels": labels})
    site.contest.search(selector=FULL, status=REFUSED)
    site.turn(policy("notebooks", **ACTIVE))
    assert [cells[:4] for cells in site.recorded()] == [
        (f"default/{name}", "preemption", "notebooks", "default/pod-of-claim") for name in ("first", "second")
    ]
    assert [hours for *_, hours in site.recorded()] == [pytest.approx(3, abs=0.1)] * 2


def test_two_waiting_pods_get_gpus_of_different_victims_at_once(site: Site) -> None:
    site.contest = Contest(node_of("a", "full", gpus=2))
    for number in range(2):
        site.contest.runs(f"notebook-{number}", "a", f"gpu-{number}")
    site.contest.search(selector=FULL, status=REFUSED)
    site.contest.there.wants(request(selector=FULL), name="other", priority=10, status=REFUSED)
    for _ in range(3):
        site.turn(policy("notebooks", **ACTIVE))
    assert sorted(site.api.evicted) == ["notebook-0", "notebook-1"]
    assert {gpu.device for gpu in site.reserved.kept} == {"gpu-0", "gpu-1"}
    assert {*site.reserved.kept.values()} == {frozenset({"claim"}), frozenset({"other"})}


def test_no_other_pod_is_evicted_for_a_pod_while_there_is_a_reservation_for_it(site: Site) -> None:
    site.turn(policy("notebooks", **ACTIVE))
    site.api.evicted.clear()
    site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == []
    assert site.reserved.kept == {GPU: frozenset({"claim"})}


@dataclass
class Freed:
    """The victim of ``site`` has ended; ``entered`` are the claims that were written to the status of a pod."""

    site: Site
    entered: list[tuple[str, Any]]

    def turn(self) -> None:
        self.site.preemptions.turn()


@pytest.fixture(params=["its own claim", "from a template"])
def freed(site: Site, request: pytest.FixtureRequest) -> Freed:
    """For a pod that names its claim, or one whose claim is made from a template."""
    there, entered = site.contest.there, list[tuple[str, Any]]()
    if request.param == "from a template":
        [pod] = [pod for pod in there.pods if pod.metadata.name == "pod-of-claim"]
        there.pods.remove(pod)
        [claim] = pod.spec.resource_claims
        made = replace(claim, resource_claim_name=None, resource_claim_template_name="gpus")
        status = replace(pod.status, resource_claim_statuses=(claim,))
        there.pods.append(replace(pod, spec=replace(pod.spec, resource_claims=(made,)), status=status))
    site.turn(policy("notebooks", **ACTIVE))
    site.turn()
    assert site.reserved.kept, "the victim has not ended"
    site.api.admit = lambda route, old, new: entered.append((route.name, new["status"].get("resourceClaimStatuses")))
    there.gpus = node_of("a", gpus=1)
    there.claims = [claim for claim in there.claims if claim.metadata.name != "notebook"]
    return Freed(site, entered)


def test_the_scheduler_tries_the_waiting_pod_alone_again_once_its_devices_are_free(freed: Freed) -> None:
    """It does when claims are entered in the status of the pod."""
    freed.turn()
    claim = {"name": "claim", "resourceClaimName": "claim"}
    assert freed.entered == [("pod-of-claim", []), ("pod-of-claim", [claim])]
    assert freed.site.reserved.woken == 0, "no other pod is tried"


def test_a_pod_that_goes_on_waiting_is_tried_less_and_less_often(freed: Freed) -> None:
    """After 0.25, 0.5 and 1 s: what keeps it may last."""
    ends = time.monotonic() + 1.5
    while time.monotonic() < ends:
        freed.turn()
    assert len(freed.entered) in (2 * 2, 2 * 3)


@pytest.mark.parametrize("meanwhile", [{"nodeName": "a"}, None], ids=["bound", "deleted"])
def test_a_pod_that_waits_no_more_is_not_tried_again(freed: Freed, meanwhile: dict[str, str] | None) -> None:
    path = f"{PODS}/pod-of-claim"
    freed.site.api.drop(path)
    if meanwhile is not None:
        freed.site.api.store(path, spec=meanwhile, metadata={"name": "pod-of-claim", "uid": "pod-of-claim"})
    freed.entered.clear()
    freed.turn()
    assert freed.entered == []


def test_of_very_many_pods_that_share_a_claim_a_few_are_tried_again_at_a_time(site: Site) -> None:
    there, entered = site.contest.there, set[str]()
    there.gpus, site.reserved.kept = node_of("a", gpus=1), {GPU: frozenset({"claim"})}
    for number in range(100):
        there.pod(f"more-{number}", "claim", status=REFUSED)
    site.api.admit = lambda route, old, new: entered.add(route.name) if "status" in new else None
    site.turn()
    assert 0 < len(entered) < 10


@pytest.mark.parametrize("is_mixed", [False, True])
def test_the_names_of_claims_are_not_lost_if_the_pod_was_read_while_they_were_written(
    site: Site, is_mixed: bool
) -> None:
    """By a new leader, which then keeps the reservation."""
    there = site.contest.there
    there.gpus, site.reserved.kept = node_of("a", gpus=2), {GPU: frozenset({"claim"})}
    there.claims, there.pods = [], []
    owner = {"kind": "Pod", "name": WAITING, "uid": WAITING, "controller": True}
    there.claim("claim", request(selector=FULL), metadata={"ownerReferences": [owner]})
    names = [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]
    if is_mixed:
        names.append({"name": "shared", "resourceClaimName": there.claim("shared", request(selector=FULL))})
    there.pod(WAITING, resourceClaims=names, priority=10, status=REFUSED)
    written: list[str] = []
    site.api.admit = lambda route, old, new: written.append(route.name) if "status" in new else None
    site.turn()
    assert (site.reserved.kept, written) == ({GPU: frozenset({"claim"})}, [])


def test_a_reservation_outlasts_a_decision_made_while_the_status_of_the_pod_named_no_claim(freed: Freed) -> None:
    there = freed.site.contest.there
    there.pods = [pod for pod in there.pods if pod.metadata.name != "pod-of-claim"]
    freed.turn()
    assert freed.site.reserved.kept


@pytest.fixture
def interrupted(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Two GPUs of three are reserved by an earlier leader; by now the pod on the third one costs less."""
    for name in ("INTERVAL_SECONDS", "REST_FACTOR"):
        monkeypatch.setattr(preemptions, name, 0.0)
    site.contest = Contest(node_of("a", "full", gpus=3))
    for number, name in enumerate("abc"):
        metadata = {"ownerReferences": [owner_of(number)]}
        site.contest.runs(name, "a", f"gpu-{number}", priority=int(name == "b"), metadata=metadata)
    site.contest.search(selector=FULL, count=2, status=REFUSED)
    site.reserved.kept = {PoolDevice(GPU.pool, f"gpu-{number}"): frozenset({"claim"}) for number in (0, 1)}
    return site


def record_eviction(site: Site, name: str) -> None:
    """The previous leader has evicted the pod ``name`` for the one that waits, or was about to."""
    recent = RecentEvictions(site.api.server.client(), "tessera")
    recent.refresh()
    [victim] = [pod for pod in site.contest.there.pods if pod.metadata.name == name]
    recent.add(victim, "default/owner", "preemption", policy="notebooks", contender=f"default/{WAITING}")


@pytest.mark.parametrize("state", ["runs", "is ending slowly", "has ended, its claim is not deallocated yet", "gone"])
def test_a_new_leader_goes_on_with_the_set_that_the_previous_one_has_begun(interrupted: Site, state: str) -> None:
    """Not at its first look: the previous one may still be at it. The pod on the GPU that is not reserved stays."""
    there, kept = interrupted.contest.there, interrupted.reserved.kept
    record_eviction(interrupted, "a")
    [victim] = [pod for pod in there.pods if pod.metadata.name == "a"]
    if state != "runs":
        there.pods.remove(victim)
    if state == "is ending slowly":
        there.pods.append(replace(victim, metadata=replace(victim.metadata, deletion_timestamp="2026-11-21T01:00:00Z")))
    if state == "gone":
        there.claims = [claim for claim in there.claims if claim.metadata.name != "a"]
        there.gpus[0] = there.gpus[0].holding(())
    progress = []
    for _ in range(3):
        interrupted.turn(policy("notebooks", **ACTIVE))
        progress.append(sorted(interrupted.api.evicted))
    evicted = ["a", "b"] if state == "runs" else ["b"]
    assert (progress, interrupted.reserved.kept) == ([[], evicted, evicted], kept)


@pytest.mark.parametrize("is_gone", [False, True], ids=["they are ending slowly", "their claims are not deallocated"])
def test_a_new_leader_evicts_no_pods_in_place_of_victims_that_have_been_evicted(
    interrupted: Site, is_gone: bool
) -> None:
    there, kept = interrupted.contest.there, interrupted.reserved.kept
    record_eviction(interrupted, "a")
    slowly = [replace(pod.metadata, deletion_timestamp="2026-11-21T01:00:00Z") for pod in there.pods[:2]]
    ending = [replace(pod, metadata=metadata) for pod, metadata in zip(there.pods, slowly, strict=False)]
    there.pods[:2] = [] if is_gone else ending
    for _ in range(3):
        interrupted.turn(policy("notebooks", **ACTIVE))
    assert (interrupted.api.evicted, interrupted.reserved.kept) == ([], kept)


def test_a_new_leader_knows_whose_memory_of_a_shared_gpu_remains_while_a_victim_is_ending(interrupted: Site) -> None:
    """Evicting the one that has 20 GiB would not be enough."""
    interrupted.contest = contest = Contest([shared_gpu("a", 0, 10, 20, 40)])
    contest.runs("ending", "a", "gpu-0-shared", metadata={"deletionTimestamp": "2026-11-21T01:00:00Z"})
    for name in ("small", "large"):
        contest.runs(name, "a", "gpu-0-shared")
    contest.there.wants(memory("45Gi"), priority=10, status=REFUSED)
    interrupted.reserved.kept = {GPU: frozenset({"claim"})}
    record_eviction(interrupted, "ending")
    for _ in range(2):
        interrupted.turn(policy("notebooks", **ACTIVE))
    assert interrupted.api.evicted == ["large"]


def test_a_new_leader_goes_on_for_the_pod_with_all_of_the_claims(interrupted: Site) -> None:
    """Though another pod shares one of them."""
    there, both = interrupted.contest.there, ["claim", "shared"]
    there.pods = [pod for pod in there.pods if pod.metadata.name != WAITING]
    there.claims = [claim for claim in there.claims if claim.metadata.name != "claim"]
    for name in both:
        there.claim(name, request(selector=FULL))
    there.pod("other", "shared", priority=10, status=REFUSED)
    there.pod(WAITING, *both, priority=10, status=REFUSED)
    kept = dict.fromkeys(interrupted.reserved.kept, frozenset(both))
    interrupted.reserved.kept = dict(kept)
    record_eviction(interrupted, "a")
    for _ in range(2):
        interrupted.turn(policy("notebooks", **ACTIVE))
    assert (sorted(interrupted.api.evicted), interrupted.reserved.kept) == (["a", "b"], kept)


def test_a_new_leader_keeps_the_reservation_of_a_begun_set_if_another_victim_ends_meanwhile(interrupted: Site) -> None:
    kept = interrupted.reserved.kept
    record_eviction(interrupted, "a")
    interrupted.contest.there.pods = [pod for pod in interrupted.contest.there.pods if pod.metadata.name != "a"]
    interrupted.api.protected["b"] = 404
    for _ in range(3):
        interrupted.turn(policy("notebooks", **ACTIVE))
    assert (interrupted.api.evicted, interrupted.reserved.kept) == ([], kept)


def test_a_new_leader_looks_anew_if_the_previous_one_has_evicted_none(interrupted: Site) -> None:
    """By now another pod costs less than one whose GPU is reserved."""
    kept, progress = interrupted.reserved.kept, []
    for _ in range(3):
        interrupted.turn(policy("notebooks", **ACTIVE))
        progress.append((sorted(interrupted.api.evicted), interrupted.reserved.kept))
    gpus = {PoolDevice(GPU.pool, f"gpu-{number}"): frozenset({"claim"}) for number in (0, 2)}
    assert progress == [([], kept), ([], {}), (["a", "c"], gpus)]


@pytest.mark.parametrize("end", ["the claim does not wait any more", "it lasts too long"])
def test_a_reservation_ends(site: Site, end: str) -> None:
    site.reserved.kept = {GPU: frozenset({"claim" if end == "it lasts too long" else "gone"})}
    site.reserved.is_overdue = end == "it lasts too long"
    site.turn(policy("notebooks", **EVERYBODY))
    assert site.reserved.kept == {}


def test_for_a_pod_with_very_many_claims_the_gpus_are_reserved_for_the_pod(site: Site) -> None:
    """Tenants must not be able to fill the fence."""
    site.contest = Contest(node_of("a", "full", gpus=8 + 1))
    for number in range(8 + 1):
        site.contest.runs(f"notebook-{number}", "a", f"gpu-{number}", metadata={"ownerReferences": [owner_of(number)]})
    there = site.contest.there
    claims = [there.claim(f"claim-{number}", request(selector=FULL)) for number in range(8 + 1)]
    there.pod("many", *claims, priority=10, status=REFUSED)
    site.turn(policy("notebooks", **ACTIVE))
    assert len(site.api.evicted) == 8 + 1
    assert {*site.reserved.kept.values()} == {frozenset({"many"})}
    assert len(site.reserved.kept) == 8 + 1
    site.preemptions.turn()
    assert site.reserved.kept


def owner_of(number: int) -> dict[str, Any]:
    return {**OWNER, "name": f"web-{number}", "uid": f"owner-{number}"}


def test_a_victim_that_has_not_ended_is_named_on_the_waiting_pod_though_there_is_no_other(site: Site) -> None:
    site.turn(policy("notebooks", **ACTIVE))
    site.reserved.is_overdue = True
    site.preemptions.turn()

    def messages() -> list[str]:
        blocked = [event for event in site.events() if event[:2] == ("pod-of-claim", "PreemptionBlocked")]
        return sorted(message for _, _, message in blocked)

    eventually(lambda: len(messages()) == 2, "both are said")
    assert messages() == [
        "no pod is evicted for it: no set of pods that may be evicted makes room for it (tessera preempt)",
        "pods that were evicted for it have not ended, so that others are looked for: notebook",
    ]


def test_the_devices_are_reserved_until_all_victims_must_have_ended(site: Site) -> None:
    site.contest = Contest(node_of("a", "full", gpus=2))
    site.contest.runs("quick", "a", "gpu-0")
    site.contest.runs("saves-its-work", "a", "gpu-1", terminationGracePeriodSeconds=1800)
    site.contest.search(selector=FULL, count=2, status=REFUSED)
    site.turn(policy("notebooks", **ACTIVE))
    assert site.reserved.seconds == 1800 + RESERVATION_SECONDS


@pytest.mark.parametrize("ends", [False, True], ids=["", "but not if only its claim is not deallocated yet"])
def test_a_victim_that_has_not_ended_in_time_is_reported_and_another_one_evicted(site: Site, ends: bool) -> None:
    site.contest = Contest([*node_of("a", "full", gpus=1), *node_of("b", "full", gpus=1)])
    site.contest.runs("hanging", "a", "gpu-0", metadata={"namespace": "default"})
    site.contest.runs("dear", "b", "gpu-0", priority=5)
    site.contest.search(selector=FULL, status=REFUSED)
    site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == ["hanging"]
    if ends:
        site.api.drop("/api/v1/namespaces/default/pods/hanging")
    site.reserved.is_overdue = True
    site.preemptions.turn()
    assert site.api.evicted == (["hanging"] if ends else ["hanging", "dear"])
    last = site.api.evicted[-1]
    eventually(lambda: (last, "PreemptedFor") in {event[:2] for event in site.events()}, "the last Event is written")
    blocked = {name: message for name, reason, message in site.events() if reason == "PreemptionBlocked"}
    if ends:
        assert blocked == {}
        return
    assert "default/hanging, of priority 0 at most" in blocked["notebooks"]
    assert "but have not ended 300 s after the longest grace period" in blocked["notebooks"]
    assert blocked["pod-of-claim"] == (
        "pods that were evicted for it have not ended, so that others are looked for: hanging"
    )


@pytest.mark.parametrize(
    ("spec", "obstacle"),
    [
        pytest.param({"budget": {"podsPerHour": 0}}, "the budget of policy notebooks is 0 pods an hour", id="budget"),
        pytest.param(
            {"budget": {"perNamespace": 0}},
            "the budget of policy notebooks is 0 pods of namespace default an hour, of which 0 are used",
            id="budget of a namespace",
        ),
        pytest.param({"quietHours": [ALL_DAY]}, "policy notebooks has quiet hours until ", id="quiet hours"),
        pytest.param({}, "the API server refuses an eviction", id="refused"),
        pytest.param({}, "the fence, which reserves their devices, is not in force or full", id="no fence"),
        pytest.param({}, "the pod does not wait any more", id="bound"),
        pytest.param({}, "the pod does not wait any more", id="allocated"),
        pytest.param({}, "the owner of the waiting pod has lost a pod in this way", id="cascade"),
    ],
)
def test_what_prevents_evictions_is_said_on_the_policy(
    site: Site, spec: dict[str, Any], obstacle: str, request: pytest.FixtureRequest
) -> None:
    case, there = request.node.callspec.id, site.contest.there
    [waiting] = [pod for pod in there.pods if pod.metadata.name == "pod-of-claim"]
    if case == "refused":
        site.api.protected["notebook"] = 429
    site.reserved.in_force = case != "no fence"
    if case == "cascade":
        owned = msgspec.convert(
            {"metadata": {"name": "x", "uid": "x", "namespace": "default", "ownerReferences": [{**OWNER, "uid": "s"}]}},
            Pod,
        )
        references = owned.metadata.owner_references
        there.pods.remove(waiting)
        there.pods.append(replace(waiting, metadata=replace(waiting.metadata, owner_references=references)))
        site.preemptions._evictor.recent.add(owned, "default/s")
    site.turn()
    if case == "bound":
        site.api.folder("/api/v1/namespaces/default/pods")["pod-of-claim"]["spec"]["nodeName"] = "b"
    if case == "allocated":
        claim = site.api.folder("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims")["claim"]
        claim["status"] = {"allocation": {"devices": {"results": []}}}
    site.api.store(f"{PATH}/notebooks", metadata={"name": "notebooks", "uid": "p"}, spec={**ACTIVE, **spec})
    site.preemptions.turn()
    eventually(site.events, "an Event is written")
    [(name, reason, message)] = site.events()
    assert (name, reason) == ("notebooks", "PreemptionBlocked")
    assert obstacle in message
    assert (site.api.evicted, site.reserved.kept) == ([], {})


def test_an_eviction_that_fails_ends_the_reservation(site: Site) -> None:
    site.api.protected_later["notebook"] = 429
    site.turn(policy("notebooks", **ACTIVE))
    assert (site.api.evicted, site.reserved.kept) == ([], {})


@pytest.mark.parametrize("when", ["protected", "protected_later"], ids=["before the reservation", "after it"])
def test_if_a_victim_has_ended_meanwhile_the_other_one_stays(site: Site, when: str) -> None:
    """Its devices may have gone to another pod before they were reserved: then the other's alone are of no use."""
    site.contest = Contest(node_of("a", "full", gpus=2))
    for number, name in enumerate(("first", "second")):
        site.contest.runs(name, "a", f"gpu-{number}")
    site.contest.search(selector=FULL, count=2, status=REFUSED)
    getattr(site.api, when)["first"] = 404
    site.turn(policy("notebooks", **ACTIVE))
    assert (site.api.evicted, site.reserved.kept) == ([], {})


def test_a_pod_stays_whose_claim_another_pod_has_begun_to_use_meanwhile(site: Site) -> None:
    """The claim would keep its devices until that one has ended, too."""

    def begin_to_use(*_: object) -> bool:
        claim = site.api.folder("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims")["notebook"]
        claim["status"]["reservedFor"] += ({"resource": "pods", "name": "other", "uid": "other"},)
        return True

    site.reserved.reserve = begin_to_use  # type: ignore[method-assign, assignment]
    site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == []


@pytest.mark.parametrize("mode", ["DryRun", "Active"])
def test_a_policy_that_only_reports_does_not_keep_another_one_from_acting(site: Site, mode: str) -> None:
    """Its pods would cost less."""
    site.contest = Contest(node_of("a", "full", gpus=2))
    for number, name in enumerate(("batch", "notebook")):
        site.contest.runs(name, "a", f"gpu-{number}", priority=number)
    site.contest.there.device_class("any-batch")
    [batch] = [claim for claim in site.contest.there.claims if claim.metadata.name == "batch"]
    spec = msgspec.convert({"devices": {"requests": [request(device_class="any-batch")]}}, type(batch.spec))
    site.contest.there.claims = [replace(batch, spec=spec), *site.contest.there.claims[1:]]
    site.contest.search(selector=FULL, status=REFUSED)
    tried = policy("tried", **{**ACTIVE, "mode": mode}, priority=1, deviceClasses=["any-batch"])
    site.turn(tried, policy("notebooks", **ACTIVE))
    assert site.api.evicted == (["batch"] if mode == "Active" else ["notebook"])
    eventually(lambda: len(site.events()) > 1, "the Events are written")
    assert ("tried", "WouldEvict" if mode == "DryRun" else "Preempting") in [event[:2] for event in site.events()]


def test_while_the_caches_are_out_of_date_nothing_is_done(site: Site) -> None:
    site.stale = "no decision has been made for 60 s"
    site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == []
    assert site.read() == set()


@pytest.mark.parametrize(
    ("spare", "allowed", "evicted"),
    [(1, 1, []), (2, 1, []), (2, 2, ["first", "second"])],
    ids=["too few", "one has just gone", "enough"],
)
def test_all_victims_of_a_budget_are_evicted_or_none(site: Site, spare: int, allowed: int, evicted: list[str]) -> None:
    """Each alone would be evicted by the API server."""
    site.contest = Contest(node_of("a", "full", gpus=2))
    for number, name in enumerate(("first", "second")):
        site.contest.runs(name, "a", f"gpu-{number}", metadata={"labels": {"app": "web"}})
    site.contest.search(selector=FULL, count=2, status=REFUSED)
    budget = {"selector": {"matchLabels": {"app": "web"}}}
    healthy = {"currentHealthy": 2, "desiredHealthy": 2 - spare, "disruptionsAllowed": allowed}
    site.api.store(f"{BUDGETS}/web", metadata={"name": "web"}, spec=budget, status=healthy)
    site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == evicted
    gpus = {PoolDevice(f"a-{DRIVER}", f"gpu-{number}") for number in range(2)}
    assert site.reserved.kept.keys() == (gpus if evicted else set())


@pytest.mark.parametrize("decides", ["notebooks", "others"])
def test_a_victim_counts_against_the_budget_of_its_own_policy(site: Site, decides: str) -> None:
    site.turn(policy("notebooks", **ACTIVE, budget={"podsPerHour": 1}))
    recent = RecentEvictions(site.api.server.client(), "tessera")
    recent.refresh()
    victim = Pod(Metadata(name="later", namespace="default", uid="later"))
    limit = recent.limit([(victim, policy(decides, **ACTIVE, budget={"podsPerHour": 1}))])
    used = "the budget of policy notebooks is 1 pods an hour, of which 1 are used"
    assert limit == (used if decides == "notebooks" else None)


def test_a_victim_that_was_recorded_and_not_evicted_before_the_leader_was_killed_counts_once(site: Site) -> None:
    recent = RecentEvictions(site.api.server.client(), "tessera")
    recent.refresh()
    [notebook] = [pod for pod in site.contest.there.pods if pod.metadata.name == "notebook"]
    recent.add(notebook, "default/owner", "preemption", policy="notebooks")
    site.turn(policy("notebooks", **ACTIVE, budget={"podsPerHour": 1}))
    assert site.api.evicted == ["notebook"]
