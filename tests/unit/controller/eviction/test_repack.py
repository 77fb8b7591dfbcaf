"""Pods are moved so that a waiting pod gets full GPUs: one at a time, and only those that may and can be."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from controller.cluster.claim_index import PoolDevice, gpu_of
from controller.eviction import preemptions
from controller.eviction.gpu_policy import PATH, GpuPolicy
from controller.fence.fenced_devices import read, written
from tests.support.evictions import ClusterApi
from tests.support.gpus import H100
from tests.support.preemption import EVERYBODY, OWNER, Contest, policy
from tests.support.queues import DRIVER, FULL, fleet_gpu, request
from tests.support.recording import recording
from tests.support.running import eventually
from tests.unit.controller.eviction.test_preemptions import BUDGETS, GPU, REFUSED, Site

REPACK: dict[str, Any] = {"repack": {"movable": True}}
ACTIVE: dict[str, Any] = {"mode": "Active", **REPACK}
SMALL = "mig-1g10gb"
PLACE, OTHER_GPU = PoolDevice(f"b-{DRIVER}", "gpu-0"), PoolDevice(f"c-{DRIVER}", "gpu-0")


def owned_by(name: str, kind: str = "ReplicaSet") -> dict[str, Any]:
    return {"ownerReferences": [{**OWNER, "name": name, "uid": f"owner-of-{name}", "kind": kind}]}


def owner_of(name: str) -> frozenset[str]:
    """As the fence names the owner of pod ``name``."""
    return frozenset({sha256(f"default/owner-of-{name}".encode()).hexdigest()})


class Scattered(Site):
    """Node a has one GPU, of which the pods ``one`` and ``two`` have a partition; half of b's GPU is free.

    A pod of priority 10 that has waited for an hour wants the full GPU. The others have run for half an hour.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.now = self.api.server.client().clock.now()
        self.begin()

    def begin(self, waited: float = 1.0, **pod: Any) -> None:
        """The situation, with more fields of the pod ``one``."""
        partitions = [f"{SMALL}-0", f"{SMALL}-3"]
        gpus = [fleet_gpu("a", 0, H100, *partitions), fleet_gpu("b", 0, H100, "mig-4g40gb-0")]
        self.contest = Contest(gpus, cpu=pod.pop("cpu", "64"))
        node = self.contest.there.nodes["a"]
        self.contest.there.nodes["a"] = replace(node, metadata=replace(node.metadata, labels={"zone": "a"}))
        pod = {"metadata": owned_by("one"), "since": self.ago(0.5), **pod}
        self.contest.runs("one", "a", f"gpu-0-{SMALL}-0", **pod)
        self.contest.runs("two", "a", f"gpu-0-{SMALL}-3", metadata=owned_by("two"), since=self.ago(0.5))
        self.contest.runs("large", "b", "gpu-0-mig-4g40gb-0", metadata={"ownerReferences": []})
        self.contest.search(selector=FULL, status=REFUSED, metadata={"creationTimestamp": self.ago(waited)})

    def waits(self, claim: str) -> None:
        """Another pod of less priority wants a full GPU."""
        metadata = {"creationTimestamp": self.ago(1)}
        full_gpu = request(selector=FULL)
        self.contest.there.wants(full_gpu, name=claim, priority=5, status=REFUSED, metadata=metadata)

    def has_another(self, *held: str) -> None:
        """Node c has a GPU of which the pod ``three`` has a device, or another pod all that is ``held``."""
        there = self.contest.there
        there.gpus = [gpu for gpu in there.gpus if gpu.node != "c"]
        there.claims = [claim for claim in there.claims if claim.metadata.name != "three"]
        there.pods = [pod for pod in there.pods if pod.metadata.name != "three"]
        there.gpus.append(fleet_gpu("c", 0, H100, *held))
        there.node("c")
        there.nodes["c"] = replace(there.nodes["c"], status=there.nodes["b"].status)
        device = "gpu-0" if held == ("full",) else f"gpu-0-{held[0]}"
        self.contest.runs("three", "c", device, metadata=owned_by("three"), since=self.ago(0.5))

    def ago(self, hours: float) -> str:
        return (self.now - timedelta(hours=hours)).isoformat()

    def ends(self, name: str, *, start: int | None) -> None:
        """Pod ``name`` and its claim are gone, and a new pod of its owner runs on b, on slices from ``start``."""
        there = self.contest.there
        there.pods = [pod for pod in there.pods if pod.metadata.name != name]
        there.claims = [claim for claim in there.claims if claim.metadata.name != name]
        self.api.folder("/api/v1/namespaces/default/pods").pop(name)
        self.api.folder("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims").pop(name)
        held = [device for device in there.gpus[0].held if device.name != f"gpu-0-{SMALL}-{0 if name == 'one' else 3}"]
        there.gpus[0] = there.gpus[0].holding(held)
        if start is not None:
            device = there.gpus[1].device_named(f"gpu-0-{SMALL}-{start}")
            assert device is not None
            there.gpus[1] = there.gpus[1].holding((*there.gpus[1].held, device))
            self.contest.runs(f"{name}-again", "b", device.name, metadata=owned_by(name))

    def reasons(self) -> set[tuple[str, str]]:
        """Object and reason of the Events."""
        return {(name, reason) for name, reason, _ in self.events()}

    def moved(self, outcome: str) -> float | None:
        labels = {"trigger": "repack", "outcome": outcome}
        return self.registry.get_sample_value("tessera_evictions_total", labels)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scattered]:
    """Its controller looks in each turn."""
    monkeypatch.setattr(preemptions, "INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(preemptions, "REST_FACTOR", 0.0)
    with ClusterApi() as api, recording(api) as (_, recorder):
        yield Scattered(api, recorder)


def test_in_the_mode_dry_run_the_policy_names_the_moves_and_no_pod_is_evicted(site: Scattered) -> None:
    for _ in range(2):
        site.turn(policy("notebooks", **REPACK))
    eventually(site.events, "an Event is written")
    [(name, reason, message)] = site.events()
    assert (name, reason) == ("notebooks", "WouldMove")
    assert message.startswith(
        "for pod default/pod-of-claim of priority 10 in the mode Active these would be evicted on node a: default/one, "
        "default/two, of priority 0 at most; 0.12"
    )
    assert message.endswith(
        " GPU hours lost; one at a time: on node a moving default/one (1g.10gb) from gpu-0 to gpu-0 of node b, "
        "default/two (1g.10gb) from gpu-0 to gpu-0 of node b would make room"
    )
    assert (site.api.evicted, site.reserved.kept, site.moved("dry-run")) == ([], {}, 2)


@pytest.mark.parametrize("most", [20, 1])
def test_the_next_pod_is_moved_once_the_last_one_runs_again(
    site: Scattered, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there are reservations for as many pods as there may be."""
    monkeypatch.setattr(preemptions, "MAX_RESERVATIONS", most)
    site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == ["one"]
    assert site.reserved.kept == {GPU: frozenset({"claim"}), PLACE: owner_of("one")}
    site.ends("one", start=None)
    site.turn()
    assert site.api.evicted == ["one"], "its owner's new pod is not bound"
    assert site.reserved.kept == {GPU: frozenset({"claim"}), PLACE: owner_of("one")}
    site.contest.runs("one-again", "b", metadata=owned_by("one"))
    site.turn()
    assert site.api.evicted == ["one", "two"]
    assert site.reserved.kept == {GPU: frozenset({"claim"}), PLACE: owner_of("two")}
    about = {("notebooks", "Repacking"), ("pod-of-claim", "Repacking"), ("one", "MovedFor"), ("two", "MovedFor")}
    eventually(lambda: about <= site.reasons(), "all Events are written")
    assert [(name, trigger) for name, trigger, *_ in site.recorded()] == [
        ("default/one", "repack"),
        ("default/two", "repack"),
    ]


def test_the_next_pod_stays_while_the_last_one_is_ending_though_its_successor_is_bound(site: Scattered) -> None:
    site.turn(policy("notebooks", **ACTIVE))
    site.contest.runs("one-again", "b", metadata=owned_by("one"))
    site.turn()
    assert site.api.evicted == ["one"]


def test_the_mode_dry_run_tells_both_what_it_would_move_and_whom_it_would_evict(site: Scattered) -> None:
    site.turn(policy("notebooks", **REPACK, **EVERYBODY))
    eventually(
        lambda: {reason for _, reason, _ in site.events()} == {"WouldMove", "WouldEvict"}, "there are two Events"
    )


def test_only_pods_of_the_first_plan_are_moved_one_after_the_other(site: Scattered) -> None:
    """Others would leave a GPU that is not reserved."""
    site.has_another("full")
    site.turn(policy("notebooks", **ACTIVE))
    site.ends("one", start=4)
    site.has_another(f"{SMALL}-0")
    site.turn(policy("notebooks", mode="DryRun"))
    volume = {"name": "work", "persistentVolumeClaim": {"claimName": "work"}}
    site.api.folder("/api/v1/namespaces/default/pods")["two"]["spec"]["volumes"] = [volume]
    site.api.store(f"{PATH}/notebooks", metadata={"name": "notebooks", "uid": "policy-0"}, spec=ACTIVE)
    site.preemptions.turn()
    assert site.api.evicted == ["one"]


def test_pods_are_moved_for_one_that_waits_at_a_time(site: Scattered) -> None:
    """Two at once could need the same places."""
    site.has_another(f"{SMALL}-0")
    site.waits("other")
    for _ in range(2):
        site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == ["three"]
    assert set(site.reserved.kept.values()) == {frozenset({"claim"}), owner_of("three")}


def test_meanwhile_pods_are_evicted_for_others_of_higher_priority(
    site: Scattered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of the pod that is moved does not count as a reservation for one that waits."""
    monkeypatch.setattr(preemptions, "MAX_RESERVATIONS", 2)
    site.has_another("full")
    both = policy("notebooks", **ACTIVE, **EVERYBODY)
    site.turn(both)
    site.waits("other")
    site.turn()
    assert site.api.evicted == ["one", "three"]
    site.ends("one", start=4)
    site.turn()
    assert site.api.evicted == ["one", "three", "two"]
    assert set(site.reserved.kept.values()) == {
        frozenset({"claim"}),
        frozenset({"other"}),
        owner_of("two"),
    }


def test_no_further_pod_is_moved_once_there_is_no_place_for_it(site: Scattered) -> None:
    site.turn(policy("notebooks", **ACTIVE))
    site.ends("one", start=4)
    site.contest.there.gpus[1] = fleet_gpu("b", 0, H100, "mig-4g40gb-0", "mig-3g40gb-4")
    site.contest.there.holding("another", "b", "gpu-0-mig-3g40gb-4")
    site.turn()
    assert site.api.evicted == ["one"]


def test_what_takes_too_long_is_given_up(site: Scattered) -> None:
    site.turn(policy("notebooks", **ACTIVE))
    site.reserved.is_overdue = True
    site.contest.there.pods = [pod for pod in site.contest.there.pods if pod.metadata.name != "one"]
    site.turn(policy("notebooks", mode="DryRun"))
    assert (site.api.evicted, site.reserved.kept) == (["one"], {})


def test_a_budget_that_is_used_up_ends_it_and_no_other_reservation(site: Scattered) -> None:
    site.turn(policy("notebooks", mode="Active", repack={"movable": True, "maxPerHour": 2}))
    site.waits("other")
    site.reserved.kept |= {OTHER_GPU: frozenset({"other"})}
    site.ends("one", start=4)
    site.turn(policy("notebooks", mode="Active", repack={"movable": True, "maxPerHour": 1}))
    assert (site.api.evicted, site.reserved.kept) == (["one"], {OTHER_GPU: frozenset({"other"})})


def test_no_pod_is_moved_any_more_once_the_pod_is_served(site: Scattered) -> None:
    site.turn(policy("notebooks", **ACTIVE))
    site.ends("one", start=4)
    site.contest.there.pods = [pod for pod in site.contest.there.pods if pod.metadata.name != "pod-of-claim"]
    site.turn()
    assert (site.api.evicted, site.reserved.kept) == (["one"], {})


def test_no_pod_is_moved_while_the_policy_does_not_allow_it_any_more(site: Scattered) -> None:
    site.turn(policy("notebooks", **ACTIVE))
    site.ends("one", start=4)
    site.turn(policy("notebooks", mode="Active"))
    assert site.api.evicted == ["one"]


@pytest.mark.parametrize(
    ("new", "is_next"),
    [
        pytest.param({}, True, id="of the same owner"),
        pytest.param(owned_by("two"), False, id="of another owner"),
        pytest.param({"namespace": "other"}, False, id="that claims to be of the same owner, in another namespace"),
    ],
)
def test_the_place_becomes_that_of_the_next_pod_once_it_waits(
    site: Scattered, new: dict[str, Any], is_next: bool
) -> None:
    """Also if the pod for which the last one was moved has its GPU before."""
    site.turn(policy("notebooks", **ACTIVE))
    there = site.contest.there
    there.wants(request(selector="true"), name="new", metadata={**owned_by("one"), **new})
    namespace = there.pods[-1].metadata.namespace
    there.claims[-1] = replace(there.claims[-1], metadata=replace(there.claims[-1].metadata, namespace=namespace))
    there.pods = [pod for pod in there.pods if pod.metadata.name != "pod-of-claim"]
    for _ in range(2):
        site.turn()
    assert site.reserved.kept == {PLACE: frozenset({"pod-of-new"}) if is_next else owner_of("one")}


def test_the_place_is_that_of_the_next_pod_until_it_is_bound(site: Scattered) -> None:
    """Also after a decision made while the status of the pod named no claim."""
    there, kept = site.contest.there, {GPU: frozenset({"claim"}), PLACE: frozenset({"pod-of-new"})}
    site.turn(policy("notebooks", **ACTIVE))
    there.wants(request(selector="true"), name="new", metadata=owned_by("one"))
    site.turn(policy("notebooks", mode="DryRun"))
    assert site.reserved.kept == kept
    pod = there.pods.pop()
    site.preemptions.turn()
    assert site.reserved.kept == kept
    running = replace(pod.status, phase="Running")
    there.pods.append(replace(pod, spec=replace(pod.spec, node_name="b"), status=running))
    site.turn()
    assert site.reserved.kept == {GPU: frozenset({"claim"})}


def test_of_a_moved_pod_that_does_not_end_the_next_pod_is_not_told(site: Scattered) -> None:
    """It is the pod for which it was moved that waits for that."""
    site.turn(policy("notebooks", **ACTIVE))
    site.contest.there.wants(request(selector="true"), name="new", metadata=owned_by("one"))
    site.turn(policy("notebooks", mode="DryRun"))
    site.reserved.is_overdue = True
    site.turn()
    eventually(lambda: ("pod-of-claim", "PreemptionBlocked") in site.reasons(), "the waiting pod is told")
    assert ("pod-of-new", "PreemptionBlocked") not in site.reasons()


@pytest.mark.parametrize("is_served", [False, True])
def test_the_place_is_free_for_all_once_the_next_pod_is_bound_elsewhere(site: Scattered, is_served: bool) -> None:
    """Whether the pod for which the last one was moved has its GPU by then or not."""
    site.turn(policy("notebooks", **ACTIVE))
    site.contest.runs("one-again", "a", metadata=owned_by("one"))
    if is_served:
        site.contest.there.pods = [pod for pod in site.contest.there.pods if pod.metadata.name != "pod-of-claim"]
    site.turn()
    assert site.reserved.kept == ({} if is_served else {GPU: frozenset({"claim"})})
    site.turn()
    reads = len(site.api.queries("list"))
    site.turn()
    assert (len(site.api.queries("list")) == reads + 1) == is_served, "nothing but the policies is read for it any more"


def test_nobody_is_moved_if_its_place_can_not_be_reserved(site: Scattered) -> None:
    site.reserved.taken = {PLACE}
    site.turn(policy("notebooks", **ACTIVE))
    assert (site.api.evicted, site.reserved.kept) == ([], {})


def test_no_place_stays_reserved_for_a_pod_that_was_not_moved(site: Scattered) -> None:
    site.api.protected_later = {"one": 429}
    site.turn(policy("notebooks", **ACTIVE))
    site.turn(policy("notebooks", mode="DryRun"))
    assert (site.api.evicted, site.reserved.kept) == ([], {})


def test_a_new_leader_does_not_keep_places_of_moves_that_it_does_not_go_on_with(site: Scattered) -> None:
    site.turn(policy("notebooks", **ACTIVE))
    reserved, site.registry = site.reserved.kept, CollectorRegistry()
    site.begin_term()
    site.reserved.kept = reserved
    site.turn()
    assert site.reserved.kept == {GPU: frozenset({"claim"})}


def test_a_new_leader_moves_the_pods_that_the_previous_one_has_not_moved(site: Scattered) -> None:
    site.turn(policy("notebooks", **ACTIVE))
    reserved, site.registry = site.reserved.kept, CollectorRegistry()
    site.ends("one", start=4)
    site.begin_term()
    site.reserved.kept = reserved
    for _ in range(3):
        site.turn()
    assert site.api.evicted == ["one", "two"]
    assert site.reserved.kept == {GPU: frozenset({"claim"}), PLACE: owner_of("two")}


def test_pods_are_moved_and_not_taken_from_also_after_the_first_one_could_not_be_evicted(site: Scattered) -> None:
    """It changed meanwhile."""
    both = policy("notebooks", **ACTIVE, **EVERYBODY)
    site.api.protected_later = {"one": 409}
    site.turn(both)
    site.api.protected_later = {}
    site.turn(both)
    assert (site.api.evicted, [trigger for _, trigger, *_ in site.recorded()]) == (["one"], ["repack"])


def test_a_device_of_the_pod_that_need_not_move_is_part_of_its_place(site: Scattered) -> None:
    """Reserved for the waiting pod it would keep the next pod from starting."""
    others = [f"{SMALL}-1", "mig-2g20gb-2", "mig-3g40gb-4"]
    gpus = [[f"{SMALL}-0"], [f"{SMALL}-0", *others], ["mig-4g40gb-0"]]
    site.contest = Contest([fleet_gpu("a", number, H100, *held) for number, held in enumerate(gpus)])
    site.contest.runs("one", "a", f"gpu-0-{SMALL}-0", f"gpu-1-{SMALL}-0", metadata=owned_by("one"), since=site.ago(0.5))
    devices = [f"gpu-1-{device}" for device in others]
    site.contest.runs("two", "a", *devices, "gpu-2-mig-4g40gb-0", metadata={"ownerReferences": []})
    site.contest.search(selector=FULL, status=REFUSED, metadata={"creationTimestamp": site.ago(1)})
    site.turn(policy("notebooks", **ACTIVE))
    place = [GPU._replace(device=name) for name in ("gpu-1", "gpu-2")]
    assert site.reserved.kept == {GPU: frozenset({"claim"}), **dict.fromkeys(place, owner_of("one"))}


def test_the_text_that_a_tenant_writes_as_the_uid_of_an_owner_is_no_entry_of_the_fence(site: Scattered) -> None:
    site.begin(metadata={"ownerReferences": [{**OWNER, "uid": "x gpu-1=another=9999999999"}]})
    site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == ["one"]
    entries = {PoolDevice(gpu.pool, f"{gpu.device}={','.join(uids)}=1") for gpu, uids in site.reserved.kept.items()}
    assert {gpu_of(entry) for entry in read(written(entries))} == {GPU, PLACE}


ONE_CPU = [{"name": "main", "resources": {"requests": {"cpu": "1"}}}]
NEEDS_CPU = {"containers": [{"name": "main", "resources": {"requests": {"cpu": "3"}}}]}
DAEMON = {"metadata": owned_by("one", "DaemonSet")}


@pytest.mark.parametrize(
    ("spec", "pod", "is_moved"),
    [
        pytest.param(ACTIVE, {}, True, id="it may be"),
        pytest.param({"mode": "Active"}, {}, False, id="movable is false"),
        pytest.param({**ACTIVE, "namespaces": ["other"]}, {}, False, id="no policy matches it"),
        pytest.param({"mode": "Active", "repack": {"movable": True, "maxPerHour": 1}}, {}, False, id="maxPerHour"),
        pytest.param({**ACTIVE, "budget": {"podsPerHour": 1}}, {}, False, id="the budget of the policy"),
        pytest.param(ACTIVE, {"priority": 1000}, True, id="its priority does not matter"),
        pytest.param(ACTIVE, {"since": 20.0}, False, id="more GPU hours would be lost than the pod has waited"),
        pytest.param(ACTIVE, {"waited": 0.1}, False, id="the pod has not waited for so many GPU hours"),
        pytest.param(ACTIVE, {"metadata": {"ownerReferences": []}}, False, id="no controller would create it again"),
        pytest.param(ACTIVE, DAEMON, False, id="it would come back to this node"),
        pytest.param(ACTIVE, {"nodeSelector": {"zone": "a"}}, False, id="it can run on this node only"),
        pytest.param(ACTIVE, {"schedulingGroup": {"podGroupName": "gang"}}, True, id="it is alone in its PodGroup"),
        pytest.param(ACTIVE, {**NEEDS_CPU, "cpu": "2"}, False, id="the other node has not enough CPU for it"),
        pytest.param(ACTIVE, {**NEEDS_CPU, "cpu": "4"}, True, id="the other node has enough CPU for it"),
    ],
)
def test_a_pod_is_moved_only_if_it_may_and_can_be(
    site: Scattered, spec: dict[str, Any], pod: dict[str, Any], is_moved: bool
) -> None:
    if "since" in pod:
        pod = {**pod, "since": site.ago(pod["since"])}
    site.begin(**pod)
    site.turn(policy("notebooks", **spec))
    assert site.api.evicted == (["one"] if is_moved else [])


def test_a_pod_that_a_disruption_budget_protects_is_not_moved(site: Scattered) -> None:
    status = {"observedGeneration": 1, "currentHealthy": 1, "desiredHealthy": 1, "disruptionsAllowed": 0}
    site.api.store(f"{BUDGETS}/all", spec={"selector": {}}, status=status)
    site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == []


def test_a_pod_with_a_field_that_is_not_examined_is_not_moved(site: Scattered) -> None:
    site.turn()
    volume = {"name": "work", "persistentVolumeClaim": {"claimName": "work"}}
    site.api.folder("/api/v1/namespaces/default/pods")["two"]["spec"]["volumes"] = [volume]
    site.api.store(f"{PATH}/all", metadata={"name": "all", "uid": "p"}, spec=ACTIVE)
    site.preemptions.turn()
    assert site.api.evicted == []


@pytest.mark.parametrize(("cpu", "is_moved"), [("4", True), ("3", False)])
def test_pods_that_stay_on_the_node_keep_their_cpu_there(site: Scattered, cpu: str, is_moved: bool) -> None:
    gpus = [fleet_gpu("a", number, H100, f"{SMALL}-0") for number in (0, 1)]
    site.contest = Contest(gpus, cpu=cpu)
    for name, device in (("one", f"gpu-0-{SMALL}-0"), ("two", f"gpu-1-{SMALL}-0")):
        site.contest.runs(name, "a", device, metadata=owned_by(name), containers=ONE_CPU, since=site.ago(0.5))
    metadata = {"creationTimestamp": site.ago(1)}
    two = [{"name": "main", "resources": {"requests": {"cpu": "2"}}}]
    site.contest.search(selector=FULL, status=REFUSED, metadata=metadata, containers=two)
    site.turn(policy("notebooks", **ACTIVE))
    assert site.api.evicted == (["one"] if is_moved else [])


@pytest.mark.parametrize(
    ("preemption", "evicted"),
    [
        pytest.param({**EVERYBODY, "mode": "Active"}, ["one", "two"], id="a policy lets it take devices"),
        pytest.param({}, [], id="no policy lets it take devices"),
    ],
)
def test_a_dry_run_of_moves_keeps_no_pod_from_being_evicted_for_the_pod(
    site: Scattered, preemption: dict[str, Any], evicted: list[str]
) -> None:
    moving: GpuPolicy = policy("movable", priority=1, deviceClasses=["none"], **REPACK)
    site.turn(moving, policy("others", **preemption))
    assert sorted(site.api.evicted) == evicted
