"""What the controller says of a policy in the mode DryRun, and that nobody is evicted for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controller.eviction.gpu_policy import PATH, GpuPolicy
from controller.eviction.preemption_dry_runs import PODS_PER_TURN, PreemptionDryRuns
from controller.metrics import ControllerMetrics
from driver.kube.events import Recorder
from tests.support.api_server import Object
from tests.support.evictions import ClusterApi
from tests.support.preemption import EVERYBODY, Contest, policy
from tests.support.queues import FULL, node_of, request
from tests.support.recording import recording
from tests.support.running import eventually

REFUSED = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "message": "1 cannot allocate all claims"}],
}
EVENTS = "/api/v1/namespaces/default/events"


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
        metrics = ControllerMetrics(self.registry)
        client = self.api.server.client()
        self.dry_runs = PreemptionDryRuns(client, "tessera", lambda: self.contest.there.queue, self.recorder, metrics)

    def turn(self, *policies: GpuPolicy | dict[str, Any]) -> None:
        """One look, with these policies in the cluster."""
        there = self.contest.there
        for number, item in enumerate(policies):
            content = item.model_dump(by_alias=True) if isinstance(item, GpuPolicy) else item
            name = content["metadata"]["name"]
            metadata = {"name": name, "uid": f"policy-{number}"}
            self.api.store(f"{PATH}/{name}", metadata=metadata, spec=content.get("spec"))
        for pod in there.pods:
            self.api.store(f"/api/v1/namespaces/default/pods/{pod.metadata.name}", **msgspec.to_builtins(pod))
        for claim in there.claims:
            path = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{claim.metadata.name}"
            self.api.store(path, **msgspec.to_builtins(claim))
        for name, node in there.nodes.items():
            self.api.store(f"/api/v1/nodes/{name}", **msgspec.to_builtins(node))
        self.dry_runs.turn()

    def told(self) -> list[tuple[str, str, str]]:
        """Policy, reason and message of the Events."""
        events: list[Object] = list(self.api.folder(EVENTS).values())
        return [(event["involvedObject"]["name"], event["reason"], event["message"]) for event in events]

    def read(self) -> set[str]:
        """The paths of all lists and objects that were read."""
        return {path.partition("?")[0] for kind in ("list", "get") for path in self.api.queries(kind)}

    def counted(self) -> float | None:
        labels = {"trigger": "preemption", "outcome": "dry-run"}
        return self.registry.get_sample_value("tessera_evictions_total", labels)


@pytest.fixture
def site() -> Iterator[Site]:
    with ClusterApi() as api, recording(api) as (_, recorder):
        yield Site(api, recorder)


def test_the_policy_of_the_victims_is_told_who_would_be_evicted_and_nobody_is(site: Site) -> None:
    site.turn(policy("notebooks", **EVERYBODY))
    eventually(site.told, "an Event is written")
    [(name, reason, message)] = site.told()
    assert (name, reason) == ("notebooks", "WouldEvict")
    assert message.startswith("for pod default/pod-of-claim of priority 10 these would be evicted on node a: ")
    assert "default/notebook, of priority 0 at most" in message
    assert message.endswith("(mode DryRun)")
    assert site.api.evicted == []


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
    assert site.told() == []


def test_a_pod_that_the_scheduler_has_not_refused_takes_nothing(site: Site) -> None:
    [waiting] = [pod for pod in site.contest.there.pods if pod.metadata.name == "pod-of-claim"]
    site.contest.there.pods.remove(waiting)
    site.contest.there.pods.append(msgspec.structs.replace(waiting, status=type(waiting.status)()))
    site.turn(policy("notebooks", **EVERYBODY))
    assert site.read() == {PATH}


def test_one_policy_that_is_not_valid_stops_all_and_says_so(site: Site) -> None:
    wrong = {"metadata": {"name": "wrong"}, "spec": {"preemption": {"enabled": "yes"}}}
    site.turn(policy("notebooks", **EVERYBODY), wrong)
    eventually(site.told, "an Event is written")
    [(name, reason, message)] = site.told()
    assert (name, reason) == ("wrong", "InvalidPolicy")
    assert "spec.preemption.enabled" in message
    assert site.counted() == 0


def test_a_pod_with_a_field_that_is_not_examined_takes_nothing(site: Site) -> None:
    [waiting] = [pod for pod in site.contest.there.pods if pod.metadata.name == "pod-of-claim"]
    path = "/api/v1/namespaces/default/pods/pod-of-claim"
    site.turn()
    site.api.folder(path)[waiting.metadata.name]["spec"]["topologySpreadConstraints"] = [{"maxSkew": 1}]
    site.api.store(f"{PATH}/notebooks", metadata={"name": "notebooks", "uid": "p"}, spec=EVERYBODY)
    site.dry_runs.turn()
    assert site.counted() == 0


def test_a_cluster_without_the_definition_has_no_policies(site: Site) -> None:
    site.api.once("list", lambda exchange: exchange.refuse(404, "the server could not find the requested resource"))
    site.turn()
    assert site.read() == {PATH}
    assert site.told() == []


def test_a_turn_looks_for_victims_of_a_few_pods_only(site: Site) -> None:
    for number in range(2 * PODS_PER_TURN):
        site.contest.there.wants(request(selector=FULL), name=f"more-{number}", priority=20, status=REFUSED)
    site.turn(policy("notebooks", **EVERYBODY))
    assert site.counted() == PODS_PER_TURN
