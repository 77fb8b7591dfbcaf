"""``tessera simulate --policy``: who would be evicted for the pods that find no place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.api_server import ObjectApi
from tests.support.scheduling import asked
from tests.unit.tessera.commands.test_simulate import GROUP, OURS, Object, api, claim, cluster, run, simulated

__all__ = ["api", "cluster"]  # fixtures

SERVING = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": "serving"},
    "value": 1000,
}
NO_SET = "no set of pods that may be evicted makes room for it"


@pytest.fixture
def policy(tmp_path: Path) -> list[str]:
    """The option with a policy by which pods of ``team-a`` may take devices of ``dev`` and ``default``."""
    spec = {"namespaces": ["dev", "default", "team"], "preemption": {"enabled": True, "byNamespaces": ["team-a"]}}
    manifest = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": "p"}, "spec": spec}
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(manifest))
    return ["--policy", str(tmp_path / "policy.yaml")]


def full(namespace: str, device_class: str = "gpu-training", count: int = 1) -> Object:
    request = {"name": "gpu", "exactly": {"deviceClassName": device_class, "count": count}}
    metadata = {"name": "full", "namespace": namespace}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": metadata,
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def workload(kind: str, name: str, namespace: str, replicas: int | None = 1, **pod_spec: Any) -> Object:
    """A Deployment, or another object with a template of pods that have a claim each."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": "full"}]
    spec = {"containers": [{"name": "c", "image": "x"}], "resourceClaims": claims, **pod_spec}
    if kind == "Pod":
        return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec}
    template = {"metadata": {"labels": {"app": name}}, "spec": spec}
    counts: Object = {} if replicas is None else {"replicas": replicas}
    if kind == "Job":
        counts = {"parallelism": replicas, "completions": replicas, "completionMode": "Indexed"}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": {**counts, "template": template}}


def serve(replicas: int = 1, **spec: Any) -> list[Object]:
    return [full("team-a"), workload("Deployment", "serve", "team-a", replicas, **{"priority": 1000, **spec})]


def evictions(objects: list[Object], *options: str) -> dict[str, list[str] | str]:
    """The victims for each pod without a place, or else the reason."""
    answer = simulated(objects, *options, code=1)
    return {eviction["pod"]: eviction["victims"] or eviction["why"] for eviction in answer["evictions"]}


@pytest.mark.parametrize(
    ("nodes", "holders", "waiting", "expected"),
    [
        pytest.param(
            "h100-1=1", [workload("Deployment", "notebook", "dev")], serve(), ["dev/notebook-0"], id="a notebook"
        ),
        pytest.param(
            "h100-1=1", [workload("Deployment", "notebook", "dev")],
            serve(containers=[{"name": "c", "resources": {"requests": {"cpu": "4", "memory": "1Ti"}}}]),
            ["dev/notebook-0"], id="whatever else a pod requests",
        ),
        pytest.param(
            "h100-1=1", [workload("Pod", "notebook", "dev")], serve(),
            f"{NO_SET}; it has no controller that would replace it, so it must be deleted (1 time)", id="a bare pod",
        ),
        pytest.param(
            "h100-1=1", [workload("DaemonSet", "notebook", "dev", None)], serve(),
            f"{NO_SET}; a pod of a DaemonSet would come back here (1 time)", id="a DaemonSet",
        ),
        pytest.param(
            "h100-1=2", [workload("Job", "train", "dev", 2)], serve(), ["dev/train-0", "dev/train-1"],
            id="all pods of an Indexed Job",
        ),
        pytest.param(
            "h100-1=1", [workload("Deployment", "notebook", "dev", priority=1000)], serve(),
            f"{NO_SET}; its priority 1000 is not below 1000 (1 time)", id="the same priority",
        ),
        pytest.param(
            "h100-1=1", [workload("Deployment", "notebook", "dev")], serve(preemptionPolicy="Never"),
            "its preemptionPolicy is Never", id="preemptionPolicy",
        ),
        pytest.param(
            "h100-1=1", [workload("Deployment", "notebook", "dev")],
            [SERVING, *serve(priority=None, priorityClassName="serving")], ["dev/notebook-0"], id="a PriorityClass",
        ),
        pytest.param(
            "h100-1=1", [workload("Deployment", "notebook", "dev")],
            [{**SERVING, "preemptionPolicy": "Never"}, *serve(priority=None, priorityClassName="serving")],
            "its preemptionPolicy is Never", id="a PriorityClass that does not preempt",
        ),
        pytest.param(
            "h100-1=1", [workload("Deployment", "notebook", "dev")],
            [full("team-b"), workload("Deployment", "serve", "team-b", priority=1000)],
            f"{NO_SET}; GpuPolicy p lets no pods of namespace team-b take its devices (preemption.byNamespaces) "
            "(1 time)", id="another namespace",
        ),
        pytest.param(
            "h100-pcie-4=1", [workload("Deployment", "notebook", "dev", 4)],
            [full("team-a", count=3), workload("Deployment", "serve", "team-a", priority=1000)],
            f"{NO_SET}; Deployment notebook loses at most 2 pods an hour in this way, and has lost 0 together with "
            "others (2 times)", id="three of an owner",
        ),
    ],
)  # fmt: skip
def test_who_would_be_evicted_on_simulated_nodes(
    policy: list[str], nodes: str, holders: list[Object], waiting: list[Object], expected: list[str] | str
) -> None:
    [answer] = evictions([full("dev"), *holders, *waiting], "--nodes", nodes, *policy).values()
    assert answer == expected


def test_two_pods_get_the_devices_of_two_victims(policy: list[str]) -> None:
    objects = [full("dev"), workload("Deployment", "notebook", "dev", 2), *serve(3)]
    answer = evictions(objects, "--nodes", "h100-1=2", *policy)
    assert sorted(answer["team-a/serve-0"] + answer["team-a/serve-1"]) == ["dev/notebook-0", "dev/notebook-1"]  # type: ignore[operator]
    assert answer["team-a/serve-2"] == f"{NO_SET}; its priority 1000 is not below 1000 (2 times)"


def test_the_pod_of_the_highest_priority_chooses_first(policy: list[str]) -> None:
    low = workload("Deployment", "low", "team-a", priority=10)
    objects = [full("dev"), workload("Deployment", "notebook", "dev"), low, *serve()]
    answer = evictions(objects, "--nodes", "h100-1", *policy)
    assert answer["team-a/serve-0"] == ["dev/notebook-0"]
    assert answer["team-a/low-0"] == f"{NO_SET}; its priority 1000 is not below 10 (1 time)"


@pytest.mark.parametrize(
    ("memory", "victims"),
    [
        pytest.param("12Gi", 1, id="a half"),
        pytest.param("20Gi", 2, id="nearly all"),
    ],
)
def test_of_a_shared_gpu_only_as_many_are_evicted_as_hold_what_is_needed(
    policy: list[str], memory: str, victims: int
) -> None:
    def shared(namespace: str, amount: str) -> Object:
        content = full(namespace, "gpu-shared")
        [request] = content["spec"]["spec"]["devices"]["requests"]
        request["exactly"]["capacity"] = {"requests": {"memory": amount}}
        return content

    holders = [shared("dev", "11Gi"), workload("Deployment", "notebook", "dev", 8)]
    waiting = [shared("team-a", memory), workload("Deployment", "serve", "team-a", 2, priority=1000)]
    answer = evictions([*holders, *waiting], "--nodes", "l4-4", "--shared", "all=time-slicing", *policy)
    assert [len(chosen) for chosen in answer.values()] == [victims, victims]
    assert len(set(answer["team-a/serve-0"]) | set(answer["team-a/serve-1"])) == 2 * victims


def test_the_table_says_it_and_what_is_drawn_is_the_state_before(policy: list[str]) -> None:
    ran = run([full("dev"), workload("Deployment", "notebook", "dev"), *serve()], "--nodes", "h100-1", *policy)
    assert ran.exit_code == 1
    lines = [line.split() for line in ran.output.splitlines()]
    assert ["team-a/serve-0", "1000", "h100-1-1", "dev/notebook-0", "0"] in lines
    assert "1 pod placed, 1 not; 1 of 1 GPUs in use" in ran.output
    assert "NO EVICTION FOR" not in ran.output


def test_an_unknown_priority_class_is_noted(policy: list[str]) -> None:
    objects = [full("dev"), workload("Deployment", "notebook", "dev"), *serve(priority=None, priorityClassName="none")]
    answer = simulated(objects, "--nodes", "h100-1", *policy, code=1)
    assert "there is no PriorityClass none: its priority counts as 0" in " ".join(answer["notes"])
    [eviction] = answer["evictions"]
    assert "its priority 0 is not below 0" in eviction["why"]


def test_without_a_policy_no_victims_are_looked_for_and_priority_classes_do_not_matter() -> None:
    objects = [full("dev"), workload("Deployment", "notebook", "dev"), *serve(priority=None, priorityClassName="none")]
    answer = simulated(objects, "--nodes", "h100-1", code=1)
    assert (answer["evictions"], answer["notes"]) == (None, [])


def test_a_file_that_is_no_policy_is_refused_with_its_field(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump({**SERVING, "kind": "GpuPolicy"}))
    ran = run(serve(), "--nodes", "h100-1", "--policy", str(tmp_path))
    assert ran.exit_code == 2
    assert "document 1: apiVersion" in ran.stderr


OWNER = {"kind": "ReplicaSet", "name": "web", "uid": "o", "controller": True, "apiVersion": "apps/v1"}


@pytest.mark.parametrize(
    ("spare", "expected"),
    [
        pytest.param(1, ["team/holder"], id="a pod that runs"),
        pytest.param(0, f"{NO_SET}; PodDisruptionBudget web forbids it (1 time)", id="a budget protects it"),
    ],
)
def test_pods_of_the_cluster_are_victims_as_its_budgets_allow(
    api: ObjectApi, cluster: list[str], policy: list[str], spare: int, expected: list[str] | str
) -> None:
    api.store(
        "/api/v1/namespaces/team/pods/holder",
        metadata={"name": "holder", "namespace": "team", "ownerReferences": [OWNER], "labels": {"app": "web"}},
        spec={"nodeName": "node-b", "resourceClaims": [{"name": "gpu", "resourceClaimName": "holder"}]},
        status={"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    )
    uid = api.folder("/api/v1/namespaces/team/pods")["holder"]["metadata"]["uid"]
    path = f"{GROUP}/namespaces/team/resourceclaims/holder"
    result = {"request": "gpu", "driver": OURS, "pool": f"node-b-{OURS}", "device": "gpu-0"}
    status = {
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": "holder", "uid": uid}],
    }
    api.store(path, spec=claim("holder", asked("gpu-training"))["spec"], status=status)
    for name in ("node-a", "node-b"):
        api.folder("/api/v1/nodes")[name]["status"]["allocatable"]["pods"] = "110"
    budget = {"currentHealthy": 1 + spare, "desiredHealthy": 1}
    selector = {"selector": {"matchLabels": {"app": "web"}}}
    api.store("/apis/policy/v1/namespaces/team/poddisruptionbudgets/web", spec=selector, status=budget)
    [answer] = evictions(serve(), *cluster, *policy).values()
    assert answer == expected
    assert api.repeated_lists() == []


def test_priority_classes_of_the_cluster_count(api: ObjectApi, cluster: list[str], policy: list[str]) -> None:
    api.store("/apis/scheduling.k8s.io/v1/priorityclasses/serving", value=1000)
    answer = simulated(serve(priority=None, priorityClassName="serving"), *cluster, *policy, code=1)
    [eviction] = answer["evictions"]
    assert (eviction["priority"], answer["notes"]) == (1000, [])
