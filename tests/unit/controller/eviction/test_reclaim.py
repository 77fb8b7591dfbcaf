"""Idle devices are taken back: for pods that wait for them, or always, as the policies say."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controller.eviction.gpu_policy import parse_policy, seconds_of
from driver.clock import seconds_time
from driver.errors import UsageError
from driver.model.plan import IDLE_REPORT_SECONDS
from driver.model.plan import PATH as PLANS
from tests.support.api_server import Object
from tests.support.evictions import ClusterApi
from tests.support.preemption import OWNER, Contest, policy
from tests.support.queues import FULL, node_of, request
from tests.support.recording import recording
from tests.support.running import eventually
from tests.unit.controller.eviction.test_preemptions import BUDGETS, EVENTS, REFUSED, Site

PODS, CLAIMS = "/api/v1/namespaces/default/pods", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
EVICT: dict[str, Any] = {"mode": "Active", "reclaim": {"action": "Evict"}}
ALWAYS: dict[str, Any] = {"mode": "Active", "reclaim": {"action": "Evict", "when": "Always"}}
TOGETHER = {"labels": {"leaderworkerset.sigs.k8s.io/group-key": "one"}}


def ago(hours: float) -> str:
    return seconds_time(datetime.now(UTC) - timedelta(hours=hours))


class Lab(Site):
    """Notebooks of StatefulSets of their own, each with a GPU. Pods of the same priority wait."""

    def runs_notebooks(self, count: int, metadata: Object | None = None, waiting: int = 0) -> None:
        sizes = {node: min(8, count - first) for node, first in zip("abcd", range(0, count, 8), strict=False)}
        self.contest = Contest([gpu for node, gpus in sizes.items() for gpu in node_of(node, "full", gpus=gpus)])
        for number in range(count):
            name = f"notebook-{number}"
            owner = {**OWNER, "uid": f"owner-of-{name}"}
            of_pod = {"ownerReferences": [owner], **(metadata or {})}
            self.contest.runs(name, *self.place(number), priority=10, since=ago(200), metadata=of_pod)
        for number in range(waiting):
            self.waits(f"train-{number}")

    def place(self, number: int) -> tuple[str, str]:
        return "abcd"[number // 8], f"gpu-{number % 8}"

    def waits(self, name: str, owner: str = "training") -> None:
        metadata = {"ownerReferences": [{**OWNER, "uid": owner}]}
        there = self.contest.there
        there.wants(request(selector=FULL), name=name, priority=10, status=REFUSED, metadata=metadata)

    def reports_idle(self, hours: dict[int, float], age: float = 0.0) -> None:
        """Nodes have reported, ``age`` hours ago, since when notebooks are idle."""
        for node in "abcd":
            entries = [
                f"default/notebook-{number} {ago(idle)}"
                for number, idle in hours.items()
                if self.place(number)[0] == node
            ]
            self.api.store(f"{PLANS}/{node}", metadata={"name": node}, status={"idle": entries, "idleAsOf": ago(age)})

    def replaces(self, number: int, successor: str) -> None:
        """A notebook ends and its next pod waits; a waiting pod gets its GPU."""
        there, notebook = self.contest.there, f"notebook-{number}"
        gone = {notebook, f"pod-of-{successor}", successor}
        there.pods = [pod for pod in there.pods if pod.metadata.name not in gone]
        there.claims = [claim for claim in there.claims if claim.metadata.name not in gone]
        for folder in (PODS, CLAIMS):
            for name in gone & set(self.api.folder(folder)):
                del self.api.folder(folder)[name]
        self.contest.runs(successor, *self.place(number), priority=10)
        self.waits(f"again-{number}", f"owner-of-{notebook}")

    def reasons(self, name: str) -> dict[str, str]:
        """The messages of the Events on an object, by reason."""
        events: list[Object] = list(self.api.folder(EVENTS).values())
        return {event["reason"]: event["message"] for event in events if event["involvedObject"]["name"] == name}

    def reclaimed(self, outcome: str = "evicted") -> float | None:
        labels = {"trigger": "reclaim", "outcome": outcome}
        return self.registry.get_sample_value("tessera_evictions_total", labels)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with ClusterApi() as api, recording(api) as (_, recorder):
        yield Lab(api, recorder)


def test_an_idle_pod_is_evicted_for_one_of_its_own_priority_that_waits(lab: Lab) -> None:
    lab.runs_notebooks(1, waiting=1)
    lab.reports_idle({0: 3})
    lab.turn(policy("notebooks", **EVICT))
    assert lab.api.evicted == ["notebook-0"]
    assert list(lab.reserved.kept.values()) == [{"train-0"}]
    assert lab.reclaimed() == 1
    eventually(lambda: "Reclaimed" in lab.reasons("notebook-0"), "an Event is written")
    assert lab.reasons("notebook-0")["Reclaimed"] == (
        "evicted for pod pod-of-train-0 of priority 10, which waits for its devices: they are idle"
    )


def test_of_30_notebooks_20_idle_ones_10_training_pods_get_the_gpus_of_those_that_are_idle_for_longest(
    lab: Lab,
) -> None:
    lab.runs_notebooks(30, waiting=10)
    idle = {number: 1.0 + (number * 7) % 20 for number in range(30) if number % 3}
    assert len(idle) == 20
    lab.reports_idle(idle)
    longest = sorted(idle, key=idle.__getitem__, reverse=True)[:10]
    for turn in range(15):
        lab.turn(policy("notebooks", **EVICT))
        if turn < 10:
            assert lab.api.evicted == [f"notebook-{number}" for number in longest[: turn + 1]]
            [[served]] = set(lab.reserved.kept.values())
            lab.replaces(longest[turn], served)
    assert len(lab.api.evicted) == 10
    assert {pod.metadata.name for pod in lab.contest.there.pods} >= {f"train-{number}" for number in range(10)}


@pytest.mark.parametrize(
    ("spec", "age"),
    [
        pytest.param({"mode": "DryRun", "reclaim": {"action": "Evict"}}, 0.0, id="DryRun"),
        pytest.param({"mode": "Active", "reclaim": {"action": "Event"}}, 0.0, id="action Event"),
        pytest.param({"mode": "Active", "reclaim": {}}, 0.0, id="the defaults"),
        pytest.param(EVICT, 2 * IDLE_REPORT_SECONDS / 3600 + 0.01, id="the node has not reported for 10 minutes"),
        pytest.param({**EVICT, "reclaim": {"action": "Evict", "idleAfter": "4h"}}, 0.0, id="not idle for long enough"),
        pytest.param({**EVICT, "namespaces": ["other"]}, 0.0, id="the policy of another namespace"),
        pytest.param({**EVICT, "budget": {"podsPerHour": 0}}, 0.0, id="no budget"),
    ],
)
def test_idle_pods_stay(lab: Lab, spec: dict[str, Any], age: float, request: pytest.FixtureRequest) -> None:
    lab.runs_notebooks(1, waiting=1)
    lab.reports_idle({0: 3}, age)
    for _ in range(2):
        lab.turn(policy("notebooks", **spec))
    assert lab.api.evicted == []
    is_told = request.node.callspec.id in {"DryRun", "action Event", "the defaults"}
    assert lab.reclaimed("dry-run") == int(is_told)
    if is_told:
        eventually(lambda: "WouldEvict" in lab.reasons("notebooks"), "an Event is written")
        assert "default/notebook-0" in lab.reasons("notebooks")["WouldEvict"]
        assert lab.reasons("notebooks")["WouldEvict"].endswith("; 1 of them idle")


@pytest.mark.parametrize(
    ("spec", "evicted", "outcome"),
    [
        pytest.param(ALWAYS, ["notebook-1", "notebook-0"], "evicted", id="the longest first"),
        pytest.param({**ALWAYS, "budget": {"podsPerHour": 1}}, ["notebook-1"], "evicted", id="budget"),
        pytest.param({**ALWAYS, "mode": "DryRun"}, [], "dry-run", id="DryRun"),
        pytest.param(EVICT, [], "", id="Contended"),
        pytest.param({**ALWAYS, "reclaim": {"when": "Always"}}, [], "", id="action Event"),
        pytest.param({**ALWAYS, "deviceClasses": ["other"]}, [], "", id="the policy of another class"),
    ],
)
def test_idle_pods_are_evicted_always_though_no_pod_waits_if_the_policy_says_so(
    lab: Lab, spec: dict[str, Any], evicted: list[str], outcome: str
) -> None:
    lab.runs_notebooks(3)
    lab.reports_idle({0: 3, 1: 30, 2: 0.1})
    lab.turn(policy("notebooks", **spec))
    lab.preemptions.turn()
    assert lab.api.evicted == evicted
    if outcome:
        assert lab.reclaimed(outcome) == (len(evicted) or 2)
    reason = "ReclaimBlocked" if len(evicted) == 1 else "WouldEvict" if outcome == "dry-run" else None
    if reason is not None:
        eventually(lambda: reason in lab.reasons("notebooks"), "an Event is written")


@pytest.mark.parametrize(
    ("obstacle", "metadata"),
    [
        ("a budget for disruptions", {"labels": {"app": "web"}}),
        ("it is one of a gang of which another pod is busy", TOGETHER),
        ("it has no controller", {"ownerReferences": []}),
        ("it is ending", {"deletionTimestamp": "2026-11-21T00:00:00Z"}),
        ("it is kept", {"annotations": {"gpu.tessera.dev/keep-until": ago(-1)}}),
        ("the API server refuses", {}),
    ],
)
def test_idle_pods_are_protected_like_other_victims(lab: Lab, obstacle: str, metadata: Object) -> None:
    lab.runs_notebooks(2, metadata=metadata)
    budget = {"selector": {"matchLabels": {"app": "web"}}}
    lab.api.store(
        f"{BUDGETS}/web", metadata={"name": "web"}, spec=budget, status={"currentHealthy": 2, "desiredHealthy": 2}
    )
    if obstacle == "the API server refuses":
        lab.api.protected["notebook-0"] = 429
    lab.reports_idle({0: 3})
    lab.turn(policy("notebooks", **ALWAYS))
    assert lab.api.evicted == []


def test_while_a_budget_is_used_up_nothing_is_read_for_each_idle_pod(lab: Lab) -> None:
    lab.runs_notebooks(3)
    lab.reports_idle({0: 3, 1: 3, 2: 3})
    lab.turn(policy("notebooks", **ALWAYS, budget={"podsPerHour": 1}))
    assert len(lab.api.evicted) == 1
    assert len([path for path in lab.api.queries("list") if path.startswith(BUDGETS)]) == 1


def test_a_gang_that_is_idle_goes_as_a_whole(lab: Lab) -> None:
    lab.runs_notebooks(2, metadata=TOGETHER)
    lab.reports_idle({0: 3, 1: 3})
    lab.turn(policy("notebooks", **ALWAYS))
    assert sorted(lab.api.evicted) == ["notebook-0", "notebook-1"]


@pytest.mark.parametrize(
    ("spec", "hours", "message"),
    [
        pytest.param(EVICT, 0.17, "on it may be evicted for a pod that waits for them, unless", id="Contended"),
        pytest.param(
            ALWAYS, 0.17, "on it may be evicted, unless you annotate it with gpu.tessera.dev/keep-until", id="Always"
        ),
        pytest.param(EVICT, 20, "on it may be evicted for a pod that waits for them", id="idle, and no pod waits"),
        pytest.param({"mode": "Active", "reclaim": {}}, 1, "its devices are idle since ", id="action Event"),
        pytest.param(EVICT, 0.16, None, id="less than two thirds of the time"),
        pytest.param({"mode": "Active", "reclaim": {}}, 0.24, None, id="action Event, less than the time"),
        pytest.param({"mode": "DryRun", "reclaim": {"action": "Evict"}}, 1, None, id="DryRun"),
        pytest.param({"mode": "Active"}, 20, None, id="no reclaim"),
    ],
)
def test_a_pod_is_warned_when_two_thirds_of_the_time_are_over(
    lab: Lab, spec: dict[str, Any], hours: float, message: str | None
) -> None:
    lab.runs_notebooks(1)
    lab.reports_idle({0: hours})
    for _ in range(2):
        lab.turn(policy("notebooks", **spec))
    if message is not None:
        eventually(lambda: lab.reasons("notebook-0"), "an Event is written")
        [(reason, text)] = lab.reasons("notebook-0").items()
        assert message in text
        assert reason == ("IdleSoon" if "; from " in text else "Idle")
    assert bool(lab.reasons("notebook-0")) == (message is not None)


@pytest.mark.parametrize(
    ("text", "seconds"), [("15m", 900), ("1h30m", 5400), ("24h", 86_400), ("0s", 0), ("1h1m1s", 3661)]
)
def test_times_in_policies_are_durations_of_go(text: str, seconds: int) -> None:
    assert policy(reclaim={"idleAfter": text}).spec.reclaim is not None
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["15", "m", "15 m", "1d", "-5m", "1.5h", "", "5m1h", 15])
def test_other_times_are_refused_with_their_field(text: object) -> None:
    manifest = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": "a"}}
    with pytest.raises(UsageError, match=r"spec\.reclaim\.idleAfter"):
        parse_policy({**manifest, "spec": {"reclaim": {"idleAfter": text}}}, "file")
