"""Which pods would end so that a waiting pod gets its devices, and which never do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.cluster.fleet import FleetGpu
from controller.eviction.evictor import Job
from controller.eviction.gpu_policy import GpuPolicy
from controller.eviction.victim_search import EvictionCost
from tests.support.preemption import EVERYBODY, NOW, OWNER, Contest, names, policy
from tests.support.queues import FULL, fleet_gpu, node_of, profile, request


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
    assert preemption.victims.is_cheapest
    assert search.second(preemption) == ("a", EvictionCost(3, 1, 0.0, 8.0))


def test_of_equal_priorities_the_fewest_pods_end() -> None:
    contest = Contest(
        [fleet_gpu("a", 0, "NVIDIA H100 80GB HBM3", "mig-1g10gb-0", "mig-1g10gb-1"), *node_of("b", "full", gpus=1)]
    )
    contest.runs("small-0", "a", "gpu-0-mig-1g10gb-0")
    contest.runs("small-1", "a", "gpu-0-mig-1g10gb-1")
    contest.runs("large", "b", "gpu-0")
    assert names(contest.search().best()) == ["large"]


def test_of_equal_pods_the_one_ends_that_saved_its_work_last() -> None:
    contest, yesterday = Contest(node_of("a", "full", gpus=2)), "2026-11-20T00:00:00Z"
    contest.runs("unsaved", "a", "gpu-0", since=yesterday)
    saved = {"annotations": {"gpu.tessera.dev/checkpointed-at": NOW}}
    contest.runs("saved", "a", "gpu-1", since=yesterday, metadata=saved)
    assert names(contest.search().best()) == ["saved"]


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
def test_nobody_ends_for_a_pod_that_needs_or_wants_no_eviction(
    held: tuple[str, ...], pod: dict[str, Any], reason: str
) -> None:
    contest = Contest(node_of("a", *held, gpus=1))
    if held:
        contest.runs("p", "a", "gpu-0")
    assert reason in str(contest.search(**pod).obstacle())


def test_a_gang_of_victims_goes_as_a_whole_also_from_other_nodes() -> None:
    contest = Contest([*node_of("a", "full", gpus=1), *node_of("b", "full", gpus=2)])
    group: dict[str, Any] = {"metadata": {"labels": {"leaderworkerset.sigs.k8s.io/group-key": "one"}}}
    contest.runs("leader", "a", "gpu-0", **group)
    contest.runs("worker", "b", "gpu-0", **group)
    contest.runs("single", "b", "gpu-1", priority=1)
    preemption = contest.search().best()
    assert names(preemption) == ["leader", "worker"]
    assert preemption is not None
    assert preemption.victims.cost.pods == 2


INDEXED = {"completionMode": "Indexed", "parallelism": 2, "completions": 2}


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


def test_a_pod_of_a_job_whose_pods_wait_together_gets_nobody_evicted() -> None:
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0")
    contest.jobs.append(msgspec.convert({"metadata": {"name": "train", "uid": "owner"}, "spec": INDEXED}, Job))
    of_job: dict[str, Any] = {"metadata": {"ownerReferences": [{**OWNER, "name": "train"}]}}
    assert contest.search(**of_job).obstacle() is None
    contest.there.wants(request(selector=FULL), name="other", **of_job)
    assert (
        contest.search(**of_job).obstacle()
        == "it is one of 2 waiting pods of Job train: room for one of them serves none"
    )


def test_a_node_that_lacks_cpu_even_without_all_victims_is_told() -> None:
    contest = Contest(node_of("a", "full", gpus=1), cpu="2")
    contest.runs("p", "a", "gpu-0", containers=[{"resources": {"requests": {"cpu": "1"}}}])
    search = contest.search(containers=[{"resources": {"requests": {"cpu": "3"}}}])
    assert search.best() is None
    assert search.short_of == {"a": "cpu"}


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
        contest.runs(f"p{index}", node, device, priority=priority)
    selector = draw(st.sampled_from([FULL, profile("3g.40gb"), profile("1g.10gb"), profile("7g.80gb")]))
    return contest, {"selector": selector, "count": draw(st.integers(1, 2))}


@settings(max_examples=60)
@given(contests())
def test_no_other_set_of_pods_would_be_cheaper(drawn: tuple[Contest, dict[str, Any]]) -> None:
    contest, wanted = drawn
    search = contest.search(**wanted)
    if search.obstacle() is None:
        preemption = search.best()
        assert (None if preemption is None else preemption.victims.cost) == contest.cheapest_of_all()
