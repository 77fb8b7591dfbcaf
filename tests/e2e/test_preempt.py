"""Preemption in the mode DryRun on a real API server and scheduler: pods are named after whose end the waiting pod is
bound, and no pod is evicted."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver.errors import NOT_FOUND, ApiError, accepted_status
from driver.kube.client import KubeClient, load_configuration
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.command import run_tessera
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.faults import signal_scheduler
from tests.support.plugin import PluginFlags
from tests.support.waiting_pod import (
    APPS,
    CORE,
    DRA,
    FENCE,
    FULL,
    POLICIES,
    SOON_S,
    end,
    events_about,
    events_of,
    fenced,
    is_refused,
    notebooks,
    pods,
    requesting,
    running_controller,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
CLAIMS = requesting("full")["resourceClaims"]
POLICY = """apiVersion: gpu.tessera.dev/v1alpha1
kind: GpuPolicy
metadata:
  name: notebooks
spec:
  deviceClasses: [gpu-training]
  preemption:
    enabled: true
    byNamespaces: [default]
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node with one H100."""
    with control_plane("preempt") as running:
        install(running, ANY_SIZE)
        running.api.post("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "serving"}, "value": 10})
        with plugins(running, ["one"], PluginFlags(gpus="sim:h100-1")):
            yield running


@pytest.fixture(scope="module")
def controller(cluster: Cluster) -> Iterator[ControllerProcess]:
    with running_controller(cluster) as process:
        yield process


EXTENDED = {"limits": {"deviceclass.resource.kubernetes.io/gpu-training": "1"}}
BY_CLAIM = requesting("full")
BY_COUNT = {"container": {"resources": EXTENDED}}
"""How a pod requests a GPU."""


@pytest.fixture
def waiting(cluster: Cluster, controller: ControllerProcess, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A notebook of a ReplicaSet has the only GPU; pod ``train`` of a higher priority waits for it."""
    api = cluster.api
    api.post(f"{DRA}/resourceclaimtemplates", {"metadata": {"name": "full"}, "spec": {"spec": FULL}})
    api.post(f"{APPS}/replicasets", notebooks("full"))
    wait_for(lambda: [pod for pod in pods(cluster, "notebook") if pod["spec"].get("nodeName")], SOON_S, "bound")
    api.post(f"{CORE}/pods", busybox_pod("train", priorityClassName="serving", **getattr(request, "param", BY_CLAIM)))
    wait_for(lambda: is_refused(cluster), SOON_S, "the scheduler has refused the pod")
    yield cluster
    ours = (f"{APPS}/replicasets/notebook", f"{DRA}/resourceclaimtemplates/full")
    for path in (f"{BUDGETS}/always-one", f"{POLICIES}/notebooks", *ours):
        with accepted_status(NOT_FOUND):
            api.request("DELETE", path)
    wait_for(lambda: ends_all_pods(cluster), SOON_S, "all pods are gone")
    wait_for(lambda: not api.get(f"{DRA}/resourceclaims")["items"], SOON_S, "all claims are gone")


def ends_all_pods(cluster: Cluster) -> bool:
    """Delete the pods that there are, which no kubelet ends. Whether there were none."""
    present = cluster.api.get(f"{CORE}/pods")["items"]
    for pod in present:
        end(cluster, pod["metadata"]["name"])
    return not present


def preempt(cluster: Cluster, *arguments: str) -> tuple[int, dict[str, Any]]:
    answer = run_tessera(cluster, "preempt", "pod/train", "-o", "json", *arguments)
    assert answer.stdout, answer.stderr
    return answer.exit_code, json.loads(answer.stdout)


ALL_DAY = {"from": "00:00", "to": "00:00", "timeZone": "Europe/Berlin"}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"mode": "On"}, "spec.mode"),
        ({"preemption": {"enabled": "yes"}}, "spec.preemption.enabled"),
        ({"priority": "high"}, "spec.priority"),
        ({"namespaces": [""]}, "spec.namespaces"),
        ({"budget": {"perNamespace": -1}}, "spec.budget.perNamespace"),
        ({"quietHours": [{**ALL_DAY, "from": "24:00"}]}, "spec.quietHours"),
        ({"quietHours": [{**ALL_DAY, "days": ["Monday"]}]}, "spec.quietHours"),
        ({"quietHours": [{"from": "08:00", "to": "18:00"}]}, "spec.quietHours"),
    ],
)
def test_the_api_server_refuses_a_policy_with_a_wrong_value(cluster: Cluster, spec: dict[str, Any], field: str) -> None:
    manifest = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": "wrong"}}
    with pytest.raises(ApiError, match=field):
        cluster.api.post(POLICIES, {**manifest, "spec": spec})


def test_the_pod_is_bound_after_the_victims_that_are_named_have_ended(waiting: Cluster, tmp_path: Path) -> None:
    api = waiting.api
    [notebook] = pods(waiting, "notebook")
    name = notebook["metadata"]["name"]
    assert preempt(waiting)[0] == 1, "there is no policy"
    (tmp_path / "policy.yaml").write_text(POLICY)
    wait_for(lambda: preempt(waiting, "--policy", str(tmp_path))[0] == 0, SOON_S, "victims are found by a file")
    api.post(POLICIES, yaml.safe_load(POLICY))
    preview = preempt(waiting)[1]
    assert (preview["node"], preview["isCheapest"]) == ("one", True)
    assert preview["waitsFor"] == "their policies only report it (mode or action): notebooks"
    assert [victim["pods"] for victim in preview["victims"]] == [[f"default/{name}"]]
    wait_for(
        lambda: [event for event in events_of(waiting, "notebooks") if f"default/{name}" in event["message"]],
        SOON_S,
        "the controller says whom it would evict",
    )
    assert {event["reason"] for event in events_of(waiting, "notebooks")} >= {"WouldEvict"}
    budget = {
        "metadata": {"name": "always-one"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "notebook"}}},
    }
    api.post(BUDGETS, budget)
    wait_for(lambda: preempt(waiting)[0] == 1, SOON_S, "the budget protects the notebook")
    [spared] = preempt(waiting)[1]["spared"]
    assert spared["reason"] == "PodDisruptionBudget always-one forbids it"
    assert pods(waiting, "notebook")[0]["metadata"]["uid"] == notebook["metadata"]["uid"]
    api.patch(f"{APPS}/replicasets/notebook", {"spec": {"replicas": 0}})
    end(waiting, name)
    wait_for(lambda: api.get(f"{CORE}/pods/train")["spec"].get("nodeName"), SOON_S, "the waiting pod is bound")


def test_in_quiet_hours_no_pod_is_evicted_and_the_policy_says_when_they_end(
    waiting: Cluster, controller: ControllerProcess
) -> None:
    [notebook] = pods(waiting, "notebook")
    policy = yaml.safe_load(POLICY)
    policy["spec"] |= {"mode": "Active", "quietHours": [ALL_DAY]}
    waiting.api.post(POLICIES, policy)
    end = re.compile(r"but policy notebooks has quiet hours until \w{3} 00:00 \(Europe/Berlin\)$")

    def is_said() -> bool:
        blocked = [event for event in events_of(waiting, "notebooks") if event["reason"] == "PreemptionBlocked"]
        return any(end.search(event["message"]) for event in blocked)

    wait_for(is_said, SOON_S, "the controller says when the quiet hours end")
    assert deletion_of(waiting, notebook) is None


@pytest.mark.parametrize(
    ("waiting", "trouble"),
    [
        pytest.param(BY_CLAIM, "", id="claim"),
        pytest.param(BY_CLAIM, "controller", id="the controller is killed meanwhile"),
        pytest.param(BY_CLAIM, "scheduler", id="the scheduler is late"),
        pytest.param(BY_COUNT, "", id="extended resource", marks=pytest.mark.needs("extended resources")),
    ],
    indirect=["waiting"],
)
def test_in_the_mode_active_the_notebook_is_evicted_and_the_waiting_pod_gets_its_gpu(
    waiting: Cluster, controller: ControllerProcess, trouble: str
) -> None:
    """Though the next notebook, and another pod of its priority, would take the GPU at once. A scheduler that is late
    is asked to try the pod again."""
    api = waiting.api
    api.post(f"{CORE}/pods", busybox_pod("rival", resourceClaims=CLAIMS))
    [notebook] = pods(waiting, "notebook")
    policy = yaml.safe_load(POLICY)
    policy["spec"]["mode"] = "Active"
    api.post(POLICIES, policy)
    wait_for(lambda: deletion_of(waiting, notebook), SOON_S, "the notebook is evicted")
    train = api.get(f"{CORE}/pods/train")
    claims = [status["resourceClaimName"] for status in train["status"].get("resourceClaimStatuses", ())]
    [reserved_for] = [api.get(f"{DRA}/resourceclaims/{claim}") for claim in claims] or [train]
    assert f"gpu-0={reserved_for['metadata']['uid']}" in fenced(waiting)
    reason = run_tessera(waiting, "why", "pod/train").stdout
    assert "is reserved for it and free once the evicted pods have ended" in " ".join(reason.split())
    if trouble == "controller":
        controller.kill()
    elif trouble == "scheduler":
        signal_scheduler(waiting, signal.SIGSTOP)
    end(waiting, notebook["metadata"]["name"])
    if trouble == "controller":
        controller.start()
    elif trouble == "scheduler":
        try:
            wait_for(lambda: has_written_claims(waiting), SOON_S, "the controller asks for another try")
        finally:
            signal_scheduler(waiting, signal.SIGCONT)
    wait_for(lambda: api.get(f"{CORE}/pods/train")["spec"].get("nodeName"), SOON_S, "the waiting pod is bound")
    wait_for(lambda: "=" not in fenced(waiting), SOON_S, "the reservation ends")
    others = [*pods(waiting, "notebook"), api.get(f"{CORE}/pods/rival")]
    assert not [pod["metadata"]["name"] for pod in others if pod["spec"].get("nodeName")]
    reasons = {event["reason"] for event in events_about(waiting, notebook["metadata"]["name"])}
    assert trouble == "controller" or "PreemptedFor" in reasons
    checks = json.loads(run_tessera(waiting, "status", "-o", "json").stdout)
    [listed] = [check["evictions"] for check in checks if check["check"] == "evictions"]
    last = {key: listed[-1][key] for key in ("pod", "node", "for", "trigger", "policy")}
    name = f"default/{notebook['metadata']['name']}"
    assert last == {"pod": name, "node": "one", "for": "default/train", "trigger": "preemption", "policy": "notebooks"}


def test_a_victim_that_does_not_end_is_reported_and_its_gpu_not_reserved_any_more(waiting: Cluster) -> None:
    """No kubelet ends it. The deadline is written as if it had passed."""
    api = waiting.api
    [notebook] = pods(waiting, "notebook")
    policy = yaml.safe_load(POLICY)
    policy["spec"]["mode"] = "Active"
    api.post(POLICIES, policy)
    wait_for(lambda: deletion_of(waiting, notebook), SOON_S, "the notebook is evicted")
    entry = fenced(waiting)
    reservation, deadline = entry.rsplit("=", 1)
    grace = notebook["spec"]["terminationGracePeriodSeconds"]
    assert 240 + grace < int(deadline) - time.time() <= 301 + grace
    [pool] = api.get(FENCE)["data"]
    api.patch(FENCE, {"data": {pool: f"{reservation}={int(time.time())}"}})
    wait_for(lambda: "=" not in fenced(waiting), SOON_S, "the reservation ends")
    name = notebook["metadata"]["name"]

    def says(events: list[dict[str, Any]]) -> list[str]:
        messages = [event["message"] for event in events if event["reason"] == "PreemptionBlocked"]
        return [message for message in messages if "have not ended" in message and name in message]

    wait_for(
        lambda: says(events_of(waiting, "notebooks")), SOON_S, "an Event on the policy names the victim that hangs"
    )
    wait_for(lambda: says(events_about(waiting, "train")), SOON_S, "there is an Event on the waiting pod")


@pytest.mark.parametrize(
    "change",
    [
        {"status": {"phase": "Failed"}},
        {"status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}},
        {"status": {"conditions": None}},
        {"metadata": {"labels": {"app": "other"}}},
        {"metadata": {"annotations": {"example.com/other": "x"}}},
    ],
    ids=str,
)
def test_the_right_to_patch_the_status_of_pods_is_good_for_the_claims_of_waiting_pods_only(
    waiting: Cluster, change: dict[str, Any]
) -> None:
    client = KubeClient(
        load_configuration(waiting.service_account_kubeconfig("tessera", "tessera-controller")), "tessera-test"
    )
    [notebook] = pods(waiting, "notebook")
    claims: dict[str, Any] = {"status": {"resourceClaimStatuses": []}}
    client.patch(f"{CORE}/pods/train/status", claims)
    for pod, refused in (("train", change), (notebook["metadata"]["name"], claims)):
        with pytest.raises(ApiError, match="Tessera may change only status"):
            client.patch(f"{CORE}/pods/{pod}/status", refused)
    train = f"{CORE}/pods/train"
    wait_for(lambda: waiting.api.get(train)["status"].get("resourceClaimStatuses"), SOON_S, "the claim is named again")


def has_written_claims(cluster: Cluster) -> bool:
    """Whether the controller has entered the claims in the status of the waiting pod."""
    writers = cluster.api.get(f"{CORE}/pods/train")["metadata"]["managedFields"]
    return any("tessera" in writer["manager"] and writer.get("subresource") == "status" for writer in writers)


def deletion_of(cluster: Cluster, pod: dict[str, Any]) -> str | None:
    present = [item for item in pods(cluster, "notebook") if item["metadata"]["uid"] == pod["metadata"]["uid"]]
    return present[0]["metadata"].get("deletionTimestamp") if present else "gone"
