"""Which pods would end so that a waiting pod gets its devices, and which never do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.cluster.fleet import FleetGpu
from controller.eviction.evictor import Evictor, Job
from controller.eviction.gpu_policy import GpuPolicy
from controller.eviction.preemption_preview import preview_of
from controller.eviction.recent_evictions import RecentEvictions
from controller.eviction.victim_search import EvictionCost
from tests.support.evictions import ClusterApi
from tests.support.gpus import H100
from tests.support.preemption import EVERYBODY, NOW, OWNER, SIX_HOURS_AGO, YESTERDAY, Contest, names, policy
from tests.support.queues import DRIVER, FULL, fleet_gpu, node_of, profile, request


def full_node(*priorities: int) -> Contest:
    """A GPU for each priority, which a pod of that priority has."""
    contest = Contest(node_of("a", "full", gpus=len(priorities)))
    for number, priority in enumerate(priorities):
        contest.runs(f"p{number}", "a", f"gpu-{number}", priority=priority)
    return contest


def test_the_pod_of_the_lowest_priority_ends_and_the_second_best_is_told() -> None:
    search = full_node(5, 1, 3).search()
    preemption = search.best()
    assert names(preemption) == ["p1"]
    assert preemption is not None
    assert preemption.is_cheapest
    second = search.second(preemption)
    assert second is not None
    assert (second.node, second.cost) == ("a", EvictionCost(priority=3, busy=1, pods=1, slices=8.0))


def test_of_nodes_that_cost_the_same_the_first_by_name_is_the_best_and_the_other_the_second() -> None:
    contest = Contest([*node_of("a", "full", gpus=2), *node_of("b", "full", gpus=1)])
    for name, node, gpu, priority in (("p0", "a", "gpu-0", 1), ("p1", "a", "gpu-1", 5), ("p2", "b", "gpu-0", 1)):
        contest.runs(name, node, gpu, priority=priority)
    search = contest.search()
    preemption = search.best()
    assert preemption is not None
    assert (preemption.node, names(preemption)) == ("a", ["p0"])
    second = search.second(preemption)
    assert second is not None
    assert (second.node, second.cost) == ("b", preemption.cost)


def test_of_equal_priorities_the_fewest_pods_end() -> None:
    contest = Contest(
        [fleet_gpu("a", 0, "NVIDIA H100 80GB HBM3", "mig-1g10gb-0", "mig-1g10gb-1"), *node_of("b", "full", gpus=1)]
    )
    contest.runs("small-0", "a", "gpu-0-mig-1g10gb-0")
    contest.runs("small-1", "a", "gpu-0-mig-1g10gb-1")
    contest.runs("large", "b", "gpu-0")
    assert names(contest.search().best()) == ["large"]


def test_of_equal_pods_the_one_ends_that_saved_its_work_last() -> None:
    contest = Contest(node_of("a", "full", gpus=2))
    contest.runs("unsaved", "a", "gpu-0", since=YESTERDAY)
    saved = {"annotations": {"gpu.tessera.dev/checkpointed-at": NOW}}
    contest.runs("saved", "a", "gpu-1", since=YESTERDAY, metadata=saved)
    assert names(contest.search().best()) == ["saved"]


def test_of_equal_priorities_the_idle_pods_end_even_if_they_are_more_and_have_lost_more() -> None:
    contest = Contest(
        [fleet_gpu("a", 0, "NVIDIA H100 80GB HBM3", "mig-1g10gb-0", "mig-1g10gb-1"), *node_of("b", "full", gpus=1)]
    )
    for number in range(2):
        contest.runs(f"small-{number}", "a", f"gpu-0-mig-1g10gb-{number}", since=YESTERDAY)
        contest.is_idle(f"small-{number}", hours=20)
    contest.runs("large", "b", "gpu-0")
    preemption = contest.search().best()
    assert names(preemption) == ["small-0", "small-1"]
    assert preemption is not None
    assert (preemption.cost.busy, preemption.cost.pods) == (0, 2)


def test_of_equal_idle_pods_the_one_ends_that_has_been_idle_for_longest() -> None:
    contest = Contest(node_of("a", "full", gpus=3))
    for number, hours in enumerate((2, 9, 4)):
        contest.runs(f"p{number}", "a", f"gpu-{number}", since=YESTERDAY)
        contest.is_idle(f"p{number}", hours)
    assert names(contest.search().best()) == ["p1"]


RECLAIM: dict[str, Any] = {"idleAfter": "1h", "action": "Evict", "keepAtMost": "8h"}
GROUP = {"leaderworkerset.sigs.k8s.io/group-key": "one"}
CLAIMS_OF_TWO = {
    "resourceClaims": [{"name": "gpu", "resourceClaimName": "p"}, {"name": "nic", "resourceClaimName": "n"}]
}


def ready_since(time: str, phase: str = "Running") -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": time}
    return {"phase": phase, "startTime": YESTERDAY, "conditions": [ready]}


@pytest.mark.parametrize(
    ("hours", "pod", "is_taken"),
    [
        pytest.param(2, {}, True, id="idle"),
        pytest.param(2, {"priority": 100}, True, id="idle with a higher priority than the waiting pod"),
        pytest.param(0.9, {}, False, id="not for long enough"),
        pytest.param(None, {}, False, id="unknown"),
        pytest.param(-2, {}, False, id="a clock that is ahead"),
        pytest.param(20, {"since": NOW}, False, id="the pod has just started"),
        pytest.param(20, {"status": ready_since(NOW)}, False, id="its images were pulled until now"),
        pytest.param(20, {"status": ready_since(YESTERDAY, "Pending")}, False, id="it still pulls its images"),
        pytest.param(20, {"status": ready_since("")}, False, id="it is not known since when it is ready"),
        pytest.param(20, CLAIMS_OF_TWO, False, id="what its other claim does is unknown"),
        pytest.param(2, {"keep": "2026-11-21T00:20:00Z"}, False, id="kept"),
        pytest.param(2, {"keep": "2026-11-21T03:20:00+03:00"}, False, id="kept, in another zone"),
        pytest.param(2, {"keep": NOW}, True, id="kept until now"),
        pytest.param(7.9, {"keep": "9999-12-31T23:59:59Z"}, False, id="kept for as long as it may"),
        pytest.param(8, {"keep": "9999-12-31T23:59:59Z"}, True, id="kept for longer than it may"),
        pytest.param(2, {"keep": "tomorrow"}, True, id="kept until an unknown time"),
        pytest.param(2, {"keep": "2026-11-22T00:00:00"}, True, id="kept until a time without a zone"),
        pytest.param(2, {"keep": "0001-01-01T00:00:00+14:00"}, True, id="kept until a time before all times"),
        pytest.param(2, {"keep": "9" * 100_000}, True, id="kept by a very long text"),
        pytest.param(2, {"metadata": {"ownerReferences": []}}, False, id="no controller"),
    ],
)  # fmt: skip
def test_idle_devices_are_taken_whatever_the_priority_unless_they_are_kept(
    hours: float | None, pod: dict[str, Any], is_taken: bool
) -> None:
    contest, keep = Contest(node_of("a", "full", gpus=1)), pod.pop("keep", None)
    metadata = {"annotations": {"gpu.tessera.dev/keep-until": keep}} if keep else {}
    contest.runs("p", "a", "gpu-0", **{"priority": 10, "since": YESTERDAY, "metadata": metadata, **pod})
    if hours is not None:
        contest.is_idle("p", hours)
    assert names(contest.search(policy(reclaim=RECLAIM)).best()) == (["p"] if is_taken else [])


def test_idle_pods_are_spared_without_a_policy_that_reclaims() -> None:
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0", priority=10, since=YESTERDAY)
    contest.is_idle("p", hours=20)
    assert contest.search(policy(**EVERYBODY)).best() is None


@pytest.mark.parametrize("tie", [{}, {"ownerReferences": [OWNER]}, {"labels": GROUP}], ids=["none", "owner", "gang"])
def test_idle_pods_stay_if_they_belong_to_the_waiting_pod(tie: dict[str, Any]) -> None:
    """Those of a gang of which one pod waits are idle because of that."""
    contest = Contest(node_of("a", "full", gpus=2))
    for number in range(2):
        metadata = {"labels": GROUP} if "labels" in tie else {}
        contest.runs(f"p{number}", "a", f"gpu-{number}", priority=10, since=YESTERDAY, metadata=metadata)
        contest.is_idle(f"p{number}", hours=20)
    search = contest.search(policy(reclaim=RECLAIM), metadata=tie)
    assert search.obstacle() is None
    assert bool(names(search.best())) == (not tie)
    why = "it has an owner, a gang or a claim in common with the waiting pod"
    assert {spared.reason for spared in search.spared} == (set() if not tie else {why})


def test_a_pod_stays_whose_claim_the_waiting_pod_needs_too() -> None:
    """What the claim holds would not become free for another claim of the waiting pod."""
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0")
    claims = [{"name": name, "resourceClaimName": name} for name in ("claim", "p")]
    assert contest.search(resourceClaims=claims).best() is None


def test_a_node_reports_of_no_claims_on_other_nodes() -> None:
    contest = Contest([*node_of("a", "full", gpus=1), *node_of("b", "full", gpus=1)])
    contest.runs("p", "a", "gpu-0", priority=10, since=YESTERDAY)
    contest.is_idle("p", hours=20, node="b")
    assert contest.search(policy(reclaim=RECLAIM), count=2).best() is None


@pytest.mark.parametrize("written", ["yesterday", "2026-11-21T00:00:00", "9999-12-31T23:59:59Z", "x" * 10_000])
def test_what_a_tenant_writes_as_the_time_of_its_checkpoint_breaks_nothing(written: str) -> None:
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0", metadata={"annotations": {"gpu.tessera.dev/checkpointed-at": written}})
    assert names(contest.search().best()) == ["p"]


@pytest.mark.parametrize(
    ("pod", "claim", "policies", "reason"),
    [
        pytest.param({"priority": 10}, {}, [policy(**EVERYBODY)], "its priority 10 is not below 10", id="priority"),
        pytest.param({}, {}, [policy(namespaces=["other"])], "no GpuPolicy matches it", id="no policy"),
        pytest.param({}, {}, [policy("off")], "GpuPolicy off does not enable preemption", id="not enabled"),
        pytest.param(
            {}, {}, [policy("x", preemption={"enabled": True})],
            "GpuPolicy x lets no pods of namespace default take its devices", id="namespace",
        ),
        pytest.param(
            {}, {}, [policy("x", preemption={**EVERYBODY["preemption"], "from": ["gpu-dev"]})],
            "GpuPolicy x does not list class any in preemption.from", id="class",
        ),
        pytest.param(
            {}, {}, [policy("b", **EVERYBODY), policy("a", priority=1)],
            "GpuPolicy a does not enable preemption", id="the policy of the highest priority decides",
        ),
        pytest.param(
            {"metadata": {"ownerReferences": []}}, {}, [policy(**EVERYBODY)],
            "it has no controller that would replace it", id="no controller",
        ),
        pytest.param(
            {"metadata": {"ownerReferences": [{**OWNER, "kind": "DaemonSet"}]}}, {}, [policy(**EVERYBODY)],
            "a pod of a DaemonSet would come back here", id="DaemonSet",
        ),
        pytest.param(
            {"terminationGracePeriodSeconds": 3601}, {}, [policy(**EVERYBODY)],
            "its terminationGracePeriodSeconds 3601 is above 3600", id="grace period",
        ),
        pytest.param(
            {"metadata": {"labels": {"kueue.x-k8s.io/podset": "main"}}}, {}, [policy(**EVERYBODY)],
            "Kueue admits it", id="Kueue",
        ),
        pytest.param(
            {}, {"reservedFor": [{"resource": "pods", "name": "gone", "uid": "gone"}]}, [policy(**EVERYBODY)],
            "reserved for something that is no running pod", id="unknown consumer",
        ),
    ],
)  # fmt: skip
def test_a_pod_is_spared_with_its_reason(
    pod: dict[str, Any], claim: dict[str, Any], policies: list[GpuPolicy], reason: str
) -> None:
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0", claim=claim, **pod)
    search = contest.search(*policies)
    assert search.best() is None
    [spared] = search.spared
    assert reason in spared.reason


@pytest.mark.parametrize(
    ("held", "pod", "reason"),
    [
        pytest.param(("full",), {"preemptionPolicy": "Never"}, "its preemptionPolicy is Never", id="never"),
        pytest.param(
            ("full",),
            {"status": {"nominatedNodeName": "a"}},
            "the scheduler makes room for it on node a",
            id="nominated",
        ),
        pytest.param((), {}, "devices for it are free", id="free"),
    ],
)
def test_no_pod_is_evicted_for_one_that_needs_or_wants_no_eviction(
    held: tuple[str, ...], pod: dict[str, Any], reason: str
) -> None:
    contest = Contest(node_of("a", *held, gpus=1))
    if held:
        contest.runs("p", "a", "gpu-0")
    assert reason in str(contest.search(**pod).obstacle())


def test_a_gang_of_victims_goes_as_a_whole_also_from_other_nodes() -> None:
    contest = Contest([*node_of("a", "full", gpus=1), *node_of("b", "full", gpus=2)])
    group: dict[str, Any] = {"metadata": {"labels": GROUP}}
    contest.runs("leader", "a", "gpu-0", **group)
    contest.runs("worker", "b", "gpu-0", **group)
    contest.runs("single", "b", "gpu-1", priority=1)
    preemption = contest.search().best()
    assert names(preemption) == ["leader", "worker"]
    assert preemption is not None
    assert preemption.cost.pods == 2


INDEXED = {"completionMode": "Indexed", "parallelism": 2, "completions": 2}


@pytest.mark.timeout(60)
def test_a_gang_of_hundreds_of_pods_is_searched_in_seconds() -> None:
    """Any tenant can label pods so. With work for each pair of pods on each node this takes minutes."""
    nodes = [f"n{number}" for number in range(50)]
    contest = Contest([gpu for node in nodes for gpu in node_of(node, "full", gpus=8)])
    labels = {"labels": {"leaderworkerset.sigs.k8s.io/group-key": "g"}}
    for node in nodes:
        for number in range(8):
            contest.runs(f"{node}-{number}", node, f"gpu-{number}", metadata=labels)
    assert len(names(contest.search().best())) == 400


def test_a_tenant_who_protects_many_pods_does_not_keep_those_of_others_from_being_evicted() -> None:
    contest = Contest(node_of("a", "full", gpus=80))
    for number in range(80):
        labels = {"owner": "other" if number == 79 else "tenant"}
        contest.runs(f"p{number}", "a", f"gpu-{number}", priority=number // 79, metadata={"labels": labels})
    with ClusterApi() as api:
        client, budget = api.server.client(), {"selector": {"matchLabels": {"owner": "tenant"}}}
        path = "/apis/policy/v1/namespaces/default/poddisruptionbudgets/all"
        api.store(path, metadata={"name": "all", "generation": 1}, spec=budget)
        preview = preview_of(contest.search(), Evictor(client, None, RecentEvictions(client, "gpus")))
    assert names(preview.preemption) == ["p79"]


@pytest.mark.timeout(20)
def test_a_pod_with_thousands_of_init_containers_is_added_up_in_a_moment() -> None:
    """Any tenant can write such a pod. With work for each pair of containers this takes minutes."""
    contest, resources = Contest(node_of("a", "full", gpus=1)), {"requests": {"cpu": "1m"}}
    containers = [{"restartPolicy": "Always", "resources": resources}, {"resources": resources}] * 3000
    contest.runs("p", "a", "gpu-0", initContainers=containers)
    assert names(contest.search(cpu=1).best()) == ["p"]


def test_nodes_with_many_pods_of_one_owner_do_not_keep_pods_on_other_nodes_from_being_evicted() -> None:
    nodes = [f"n{number:02}" for number in range(40)]
    contest = Contest([gpu for node in [*nodes, "other"] for gpu in node_of(node, "full", gpus=3)])
    for node in [*nodes, "other"]:
        for number in range(3):
            owner = {**OWNER, "uid": f"{number}"} if node == "other" else OWNER
            metadata = {"ownerReferences": [owner]}
            contest.runs(f"{node}-{number}", node, f"gpu-{number}", priority=int(node == "other"), metadata=metadata)
    preemption = preview_of(contest.search(count=3), None).preemption
    assert names(preemption) == ["other-0", "other-1", "other-2"]


def test_the_sets_that_are_tried_for_one_pod_are_limited_however_often_protected_pods_are_left_out() -> None:
    """Tenants choose how many PodDisruptionBudgets there are."""
    contest = Contest(node_of("a", "full", gpus=8))
    for number in range(8):
        contest.runs(f"p{number}", "a", f"gpu-{number}")
    search = contest.search(count=4)
    searches = [search.best() for _ in range(80)]
    assert [len(names(preemption)) for preemption in searches] == [4] * 80
    assert [preemption.is_cheapest for preemption in searches if preemption is not None][::79] == [True, False]


@pytest.mark.parametrize(
    ("ends", "obstacle"),
    [
        pytest.param("2026-11-21T00:17:10Z", "pods that are ending make room for it", id="soon"),
        pytest.param("2026-11-21T00:16:10Z", "pods that are ending make room for it", id="just now"),
        pytest.param("2026-11-21T01:16:40Z", None, id="after a long grace period"),
        pytest.param("2026-11-21T00:06:40Z", None, id="long ago, but it hangs"),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_no_pod_is_evicted_if_pods_that_are_ending_anyway_make_room(
    ends: str, obstacle: str | None, count: int
) -> None:
    contest = Contest([*node_of("a", "full", gpus=1), *node_of("b", "full", gpus=2)])
    contest.runs("ending", "a", "gpu-0", metadata={"deletionTimestamp": ends})
    for number in range(2):
        contest.runs(f"p{number}", "b", f"gpu-{number}")
    search = contest.search(count=count)
    assert search.obstacle() == (obstacle if count == 1 else None)
    assert names(search.best()) == ["p0", "p1"][:count]


@pytest.mark.parametrize(
    ("spec", "victims"),
    [
        (INDEXED, ["first", "second"]),
        ({**INDEXED, "completions": 4}, ["first"]),
        ({**INDEXED, "completionMode": "NonIndexed"}, ["first"]),
    ],
    ids=["all pods at once", "some after the others", "pods without indices"],
)
def test_the_pods_of_a_job_go_together_if_they_work_together(spec: dict[str, Any], victims: list[str]) -> None:
    contest = Contest(node_of("a", "full", gpus=2))
    contest.jobs.append(msgspec.convert({"metadata": {"name": "train", "uid": "owner"}, "spec": spec}, Job))
    for number, name in enumerate(["first", "second"]):
        owner = {**OWNER, "kind": "Job", "apiVersion": "batch/v1"}
        contest.runs(name, "a", f"gpu-{number}", metadata={"ownerReferences": [owner]})
    assert names(contest.search().best()) == victims


def test_a_gang_whose_other_pods_are_not_created_yet_gets_no_pod_evicted_for_one_of_them() -> None:
    """Such as pods of an Indexed Job that a ResourceQuota still forbids: a gang gets all of its devices or none."""
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0")
    spec = {"completionMode": "Indexed", "parallelism": 4, "completions": 4}
    contest.jobs.append(msgspec.convert({"metadata": {"name": "train", "uid": "train"}, "spec": spec}, Job))
    owner = {**OWNER, "kind": "Job", "apiVersion": "batch/v1", "name": "train", "uid": "train"}
    search = contest.search(metadata={"ownerReferences": [owner]})
    assert search.obstacle() is not None


@pytest.mark.parametrize(
    ("gang", "metadata"),
    [
        ("Job train", {"ownerReferences": [{**OWNER, "name": "train"}]}),
        ("LeaderWorkerSet one", {"labels": {"leaderworkerset.sigs.k8s.io/group-key": "one"}}),
    ],
)
def test_a_pod_of_a_gang_whose_pods_wait_together_gets_no_pod_evicted(gang: str, metadata: dict[str, Any]) -> None:
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0")
    contest.jobs.append(msgspec.convert({"metadata": {"name": "train", "uid": "owner"}, "spec": INDEXED}, Job))
    contest.there.wants(request(selector=FULL), name="other", metadata=metadata)
    assert (
        contest.search(metadata=metadata).obstacle()
        == f"it is one of 2 waiting pods of {gang}: room for one of them serves none"
    )


@pytest.mark.parametrize(
    "needs",
    [
        pytest.param({"containers": [{"resources": {"requests": {"cpu": "3"}}}]}, id="of a container"),
        pytest.param({"resources": {"requests": {"cpu": "3"}}}, id="of the whole pod"),
        pytest.param({"overhead": {"cpu": "3"}}, id="of its RuntimeClass"),
    ],
)
def test_a_node_that_lacks_cpu_even_without_all_victims_is_told(needs: dict[str, Any]) -> None:
    contest = Contest(node_of("a", "full", gpus=1), cpu="2")
    contest.runs("p", "a", "gpu-0", containers=[{"resources": {"requests": {"cpu": "1"}}}])
    search = contest.search(**needs)
    assert search.best() is None
    assert search.short_of == {"a": "cpu"}


SERVE: dict[str, Any] = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "serve"}}}


@pytest.fixture
def guarded() -> Contest:
    contest = Contest([*node_of("a", "full", gpus=2), *node_of("b", "full", gpus=1)])
    contest.runs("victim", "a", "gpu-0")
    contest.runs("dear", "b", "gpu-0", priority=5)
    return contest


@pytest.mark.parametrize(
    ("term", "victims"),
    [
        (SERVE, ["dear"]),
        ({**SERVE, "labelSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}, ["dear"]),
        ({**SERVE, "labelSelector": {}}, ["dear"]),
        ({**SERVE, "namespaces": ["default"]}, ["dear"]),
        ({**SERVE, "namespaceSelector": {}}, ["dear"]),
        ({**SERVE, "topologyKey": "zone"}, []),
        ({**SERVE, "topologyKey": "rack"}, ["victim"]),
        ({**SERVE, "labelSelector": {"matchLabels": {"app": "train"}}}, ["victim"]),
        ({**SERVE, "labelSelector": None}, ["victim"]),
        ({**SERVE, "namespaces": ["other"]}, ["victim"]),
    ],
)
def test_no_pod_is_evicted_on_nodes_from_which_another_one_keeps_the_waiting_pod_away(
    guarded: Contest, term: dict[str, Any], victims: list[str]
) -> None:
    anti_affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    guarded.runs("guard", "a", "gpu-1", priority=10, affinity=anti_affinity)
    search = guarded.search(metadata={"labels": {"app": "serve"}})
    assert names(search.best()) == victims
    assert search.short_of.get("a", "").startswith("room next to pod default/guard") == (victims != ["victim"])


def test_the_pod_that_keeps_the_waiting_pod_away_is_evicted_for_it_if_it_may_be(guarded: Contest) -> None:
    anti_affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [SERVE]}}
    guarded.runs("guard", "a", "gpu-1", priority=1, affinity=anti_affinity)
    search = guarded.search(metadata={"labels": {"app": "serve"}})
    assert (names(search.best()), search.short_of) == (["guard"], {})


@pytest.mark.parametrize(("effect", "is_taken"), [("NoSchedule", False), ("None", True)])
def test_a_pod_on_a_tainted_gpu_stays_as_the_waiting_pod_could_not_have_it(effect: str, is_taken: bool) -> None:
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0")
    selector = {"driver": DRIVER, "pool": f"a-{DRIVER}", "device": "gpu-0"}
    contest.there.taint_rule("maintenance", selector, key="maintenance", effect=effect)
    search = contest.search()
    assert search.obstacle() is None
    assert names(search.best()) == (["p"] if is_taken else [])


@pytest.mark.parametrize("cpu", [3, 4])
def test_a_free_gpu_of_a_node_without_enough_cpu_keeps_no_pod_from_being_evicted_elsewhere(cpu: int) -> None:
    """For CPU the scheduler itself preempts, and then it nominates the waiting pod."""
    contest = Contest([*node_of("a", "full", gpus=1), *node_of("b", gpus=1)], cpu="4")
    contest.runs("p", "a", "gpu-0")
    contest.runs("other", "b", priority=100, cpu=cpu)
    search = contest.search(cpu=1)
    obstacle, victims = search.obstacle(), names(search.best())
    assert (obstacle, victims) == (None, ["p"]) if cpu == 4 else "devices for it are free" in str(obstacle)


def test_more_pods_end_where_their_cpu_is_needed_too() -> None:
    contest = Contest(node_of("a", "full", gpus=2), cpu="4")
    for number in range(2):
        contest.runs(f"p{number}", "a", f"gpu-{number}", containers=[{"resources": {"requests": {"cpu": "2"}}}])
    assert names(contest.search(containers=[{"resources": {"requests": {"cpu": "3"}}}]).best()) == ["p0", "p1"]


PROFILES = {"1g.10gb": [f"mig-1g10gb-{place}" for place in range(7)], "3g.40gb": ["mig-3g40gb-0", "mig-3g40gb-4"]}


@st.composite
def contests(draw: st.DrawFn) -> tuple[Contest, dict[str, Any]]:
    """A contest on at most 2 nodes, and what its waiting pod asks for."""
    gpus, pods = list[FleetGpu](), list[tuple[str, str, int]]()
    for node in "ab"[: draw(st.integers(1, 2))]:
        for number in range(draw(st.integers(1, 3))):
            held = draw(
                st.sampled_from([["full"], *(PROFILES["1g.10gb"][:most] for most in range(4)), PROFILES["3g.40gb"]])
            )
            gpus.append(fleet_gpu(node, number, "NVIDIA H100 80GB HBM3", *held))
            devices = [f"gpu-{number}" if name == "full" else f"gpu-{number}-{name}" for name in held]
            pods += [(node, device, draw(st.integers(0, 12))) for device in devices]
    contest = Contest(gpus)
    for index, (node, device, priority) in enumerate(pods):
        contest.runs(f"p{index}", node, device, priority=priority, since=SIX_HOURS_AGO)
        if draw(st.booleans()):
            contest.is_idle(f"p{index}", draw(st.sampled_from([0.0, 0.2, 1.0, 5.0])), node)
    selector = draw(st.sampled_from([FULL, profile("3g.40gb"), profile("1g.10gb"), profile("7g.80gb")]))
    return contest, {"selector": selector, "count": draw(st.integers(1, 2))}


@settings(max_examples=60)
@given(contests())
def test_no_other_set_of_pods_would_be_cheaper(drawn: tuple[Contest, dict[str, Any]]) -> None:
    contest, wanted = drawn
    search = contest.search(**wanted)
    if search.obstacle() is None:
        preemption = search.best()
        assert (None if preemption is None else preemption.cost) == contest.cheapest_of_all()


def test_a_set_is_not_called_the_cheapest_if_the_search_ended_early_on_another_node() -> None:
    small = [f"mig-1g10gb-{start}" for start in range(7)]
    on_a = ["mig-1g10gb-0", "mig-2g20gb-2", "mig-3g40gb-4"]
    contest = Contest(
        [fleet_gpu("a", 0, H100, *on_a), fleet_gpu("b", 0, H100, *small), fleet_gpu("b", 1, H100, "full")]
    )
    for number, device in enumerate(on_a):
        contest.runs(f"a-{number}", "a", f"gpu-0-{device}")
    for number, device in enumerate(small):
        contest.runs(f"b-{number}", "b", f"gpu-0-{device}")
    contest.runs("cheapest", "b", "gpu-1", since=YESTERDAY)
    search = contest.search()
    search._tries.remaining = len(on_a) + 1
    best = search.best()
    assert best is not None
    assert (best.node, best.is_cheapest) == ("a", False)
    search._tries.remaining = 100
    assert names(search.best()) == ["cheapest"]
