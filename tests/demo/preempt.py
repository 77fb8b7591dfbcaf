"""``python -m tests.demo.preempt``, or ``make demo-preempt``: a pod of higher priority gets the GPU of a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import yaml

from driver.errors import FatalError
from tests.demo.screen import Screen
from tests.demo.stage import Play, options, perform, try_next
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.controller import ControllerProcess
from tests.support.plugin import TESSERA, PluginFlags, PluginProcess
from tests.support.workloads import PODS, RUNNING_S, Workloads, request

GRACE_S = 20
CLAIMS = [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]
REPLICA_SETS = "/apis/apps/v1/namespaces/default/replicasets"
POLICY = """apiVersion: gpu.tessera.dev/v1alpha1
kind: GpuPolicy
metadata: {name: notebooks}
spec:
  mode: DryRun
  deviceClasses: [gpu-training]
  preemption: {enabled: true, byNamespaces: [default]}
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options("demo-preempt")
def main(name: str, keep: bool, binaries: Path | None) -> None:
    """Evict a notebook for a pod of higher priority on a real Kubernetes cluster, without a GPU.

    Shows that the scheduler alone lets the pod wait for ever, what `tessera preempt` says, how a GpuPolicy evicts the
    notebook after its preStop hook has saved its work, and that the next notebook does not get the GPU.

    \b
    Examples:
      make demo-preempt
      make demo-preempt KEEP=1
    """
    perform(Play(name, 1, _opening, _on), keep, binaries)


def _opening(screen: Screen) -> None:
    screen.act("One GPU, a notebook that has it, and a pod that serves customers")
    screen.say("The kube-scheduler preempts for CPU and memory, but never for devices.")


def _on(screen: Screen, cluster: Cluster, keep: bool) -> None:
    saved = cluster.directory / "saved"
    saved.mkdir()
    with screen.step("install the Helm chart, start a node plugin (one simulated H100) and the controller"):
        install(cluster)
        PluginProcess(cluster, cluster.nodes[0], PluginFlags(gpus="sim:h100-1")).start()
        ControllerProcess(cluster).start()
    _notebook_runs(screen, cluster, saved)
    _serving_waits(screen, cluster)
    _policy_is_tried(screen, cluster)
    _notebook_is_evicted(screen, cluster, saved)
    if keep:
        try_next(
            screen,
            cluster,
            f"kubectl get pods,gpupolicies\n{TESSERA} preempt pod/serve\nkubectl describe gpupolicy notebooks",
        )


def _notebook_runs(screen: Screen, cluster: Cluster, saved: Path) -> None:
    screen.act("A notebook of a ReplicaSet has the GPU")
    cluster.api.post(
        "/apis/scheduling.k8s.io/v1/priorityclasses",
        {"metadata": {"name": "serving"}, "value": 1000, "preemptionPolicy": "PreemptLowerPriority"},
    )
    Workloads(cluster).template("gpu", request("gpu-training"))
    with screen.step("it starts; its preStop hook saves its work"):
        cluster.api.post(REPLICA_SETS, notebooks(saved))
        wait_for(lambda: _pods(cluster, "Running"), RUNNING_S, "the notebook runs")
    screen.show(cluster.kubectl("get", "pods"))


def notebooks(saved: Path) -> dict[str, Any]:
    """A ReplicaSet of one pod, which takes two seconds to save its work into the folder ``saved``."""
    hook = {"exec": {"command": ["sh", "-c", "sleep 2; echo the notebook of $(date) > /saved/work"]}}
    container = {
        "command": ["sh", "-c", "trap exit TERM; sleep 100000 & wait"],
        "lifecycle": {"preStop": hook},
        "resources": {"claims": [{"name": "gpu"}]},
        "volumeMounts": [{"name": "saved", "mountPath": "/saved"}],
    }
    pod = busybox_pod(
        "notebook",
        container=container,
        resourceClaims=CLAIMS,
        restartPolicy="Always",
        terminationGracePeriodSeconds=GRACE_S,
        volumes=[{"name": "saved", "hostPath": {"path": str(saved)}}],
    )
    labels = {"app": "notebook"}
    template = {"metadata": {"labels": labels}, "spec": pod["spec"]}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    return {"metadata": {"name": "notebook"}, "spec": spec}


def _serving_waits(screen: Screen, cluster: Cluster) -> None:
    screen.act("A pod of higher priority comes, and waits")
    container = {"resources": {"claims": [{"name": "gpu"}]}}
    with screen.step("the scheduler finds no GPU for it"):
        pod = busybox_pod("serve", container=container, resourceClaims=CLAIMS, priorityClassName="serving")
        cluster.api.post(PODS, pod)
        refusal = wait_for(lambda: Workloads(cluster).why_waiting("serve"), RUNNING_S, "the scheduler says why")
    screen.say(f"The scheduler: {refusal}")


def _policy_is_tried(screen: Screen, cluster: Cluster) -> None:
    screen.act("A GpuPolicy allows to take GPUs from notebooks. DryRun evicts no pod")
    screen.show(POLICY)
    cluster.apply(POLICY)
    screen.command("tessera preempt pod/serve")
    screen.show(wait_for(lambda: _preview(cluster), RUNNING_S, "tessera preempt names the notebook"))


def _notebook_is_evicted(screen: Screen, cluster: Cluster, saved: Path) -> None:
    screen.act("The same in the mode Active")
    screen.command("""kubectl patch gpupolicy notebooks --type=merge -p '{"spec":{"mode":"Active"}}'""")
    policy = yaml.safe_load(POLICY)
    with screen.step("the GPU is reserved, the notebook is evicted and saves its work, the pod starts"):
        cluster.apply({**policy, "spec": {**policy["spec"], "mode": "Active"}})
        cluster.wait_pod("serve", deadline_s=RUNNING_S)
    screen.show(cluster.kubectl("get", "pods"))
    screen.say("The next notebook waits, though it asked for the GPU before it was free. What the first one saved:")
    work = [file.read_text() for file in saved.iterdir()]
    screen.show("".join(work))
    screen.say("The Events of the controller:")
    screen.show(_events(cluster))
    if not work:
        raise FatalError("the notebook was evicted before its preStop hook had saved its work")


def _pods(cluster: Cluster, phase: str) -> list[dict[str, Any]]:
    return list(cluster.api.get(f"{PODS}?labelSelector=app%3Dnotebook&fieldSelector=status.phase%3D{phase}")["items"])


def _preview(cluster: Cluster) -> str:
    """What the command prints once it names victims; empty before."""
    command = [TESSERA, "preempt", "pod/serve", "--kubeconfig", str(cluster.kubeconfig)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout if answer.returncode == 0 else ""


def _events(cluster: Cluster) -> str:
    reasons = {"WouldEvict", "Preempting", "PreemptedFor"}
    items = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    events = [item for item in items if item["reason"] in reasons]
    events.sort(key=lambda item: item["metadata"]["creationTimestamp"])
    return "\n".join(f"{item['reason']:13} {item['involvedObject']['name']}: {item['message']}" for item in events)


if __name__ == "__main__":
    sys.exit(main())
