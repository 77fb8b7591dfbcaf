"""``python -m tests.demo.helm``, or ``make demo-helm``: the main job with all of Tessera in pods."""

from __future__ import annotations

from pathlib import Path

import click

from driver.errors import RecoverableError
from tests.demo.screen import Screen
from tests.demo.stage import Play, options, perform, try_next
from tests.demo.story import seen_inside
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.image.build import Built, ensure_image, summary
from tests.support.in_pods import CACHE, HERE, IMAGE, READY_S, Release
from tests.support.workloads import PROJECT, RUNNING_S, Workloads

GPUS = "sim:h100-pcie-4"
PODS = ("training", "inference", "inference-large")
EXAMPLES = PROJECT / "deploy" / "examples"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options("demo-helm")
def main(name: str, keep: bool, binaries: Path | None) -> None:
    """Build Tessera's image, install its chart into a real two-node Kubernetes cluster on this machine, and use it.

    Node plugins and controllers run in pods of that cluster; only the GPUs are simulated. Later runs take about a
    minute. Ctrl-C ends everything that was started.

    \b
    Examples:
      make demo-helm
      make demo-helm KEEP=1
    """
    perform(Play(name, 2, _opening, _on, usual_places=True), keep, binaries)


def _opening(screen: Screen) -> None:
    screen.act("The image")
    screen.say("Python, the libraries it loads, and Tessera; no shell, no package manager, no compiler.")
    built = _image(screen)
    screen.show(summary(built))


def _image(screen: Screen) -> Built:
    return ensure_image(CACHE, [IMAGE], screen.step)


def _on(screen: Screen, cluster: Cluster, keep: bool) -> None:
    release = Release(cluster, GPUS)
    _install(screen, release)
    _pods_run(screen, release)
    _inside(screen, cluster)
    _plugin_dies(screen, release)
    _pods_go(screen, release)
    if keep:
        try_next(
            screen,
            cluster,
            "kubectl get pods -A -o wide\n"
            ".venv/bin/tessera status\n"
            f"kubectl -n {HERE} logs -l app.kubernetes.io/component=node --prefix\n"
            "kubectl apply -f deploy/examples/inference.yaml\n"
            "kubectl wait --for=condition=Ready --timeout=2m pod/inference\n"
            "# the GPUs of the node on which it runs, as that node's plugin sees them:\n"
            "NODE=$(kubectl get pod inference -o jsonpath={.spec.nodeName})\n"
            f"PLUGIN=$(kubectl -n {HERE} get pods -l app.kubernetes.io/component=node "
            "--field-selector spec.nodeName=$NODE -o name)\n"
            f"kubectl -n {HERE} exec $PLUGIN -- tessera sim smi",
        )
        return
    screen.act("And helm takes it away again")
    with screen.step("helm uninstall"):
        release.uninstall()
    screen.say("`make demo-helm KEEP=1` leaves the cluster with everything installed and prints what to try next.")


def _install(screen: Screen, release: Release) -> None:
    screen.act("Installed by helm")
    with screen.step("import the image on both nodes"):
        release.import_image(_image(screen))
    screen.say(
        "Helm's own code installs the chart, from the Python package helm-python: this machine gets no program helm. "
        "With one (https://helm.sh/docs/intro/install/) it would be:"
    )
    screen.show(release.helm_command())
    with screen.step("create everything, start the pods, register with the kubelets, publish the GPUs"):
        release.install()
    screen.command(f"kubectl -n {HERE} get pods -o wide")
    screen.show(release.cluster.kubectl("-n", HERE, "get", "pods", "-o", "wide"))
    screen.command("kubectl get resourceslices")
    screen.show(release.cluster.kubectl("get", "resourceslices"))


def _pods_run(screen: Screen, release: Release) -> None:
    """Three pods: a full GPU, a small and a larger partition."""
    screen.act("Three pods ask for GPUs")
    workloads = Workloads(release.cluster)
    for pod in PODS:
        screen.command(f"kubectl apply -f deploy/examples/{pod}.yaml")
        with screen.step(f"{pod}: allocate, cut, start the container"):
            release.cluster.apply((EXAMPLES / f"{pod}.yaml").read_text())
            node = release.cluster.wait_pod(pod, deadline_s=RUNNING_S)["spec"]["nodeName"]
        [claim] = workloads.pod_claims(pod)
        screen.show(f"the scheduler chose {', '.join(workloads.allocated(claim))} of {node}")
    screen.act("What that did to the GPUs")
    for node in release.cluster.nodes:
        plugin = release.plugin_on(node.name)
        screen.command(f"kubectl -n {HERE} exec {plugin['metadata']['name']} -- tessera sim smi")
        screen.show(release.run(plugin, "/usr/bin/tessera", "sim", "smi"))


def _inside(screen: Screen, cluster: Cluster) -> None:
    screen.act("What each container sees")
    workloads = Workloads(cluster)
    for pod in PODS:
        seen_inside(screen, workloads, pod)


def _plugin_dies(screen: Screen, release: Release) -> None:
    screen.act("A node plugin is killed")
    node: str = release.cluster.wait_pod("inference")["spec"]["nodeName"]
    plugin, before = release.plugin_on(node), release.partitions(node)
    release.cluster.node(node).kill_container(HERE, plugin["metadata"]["name"])
    with screen.step("the kubelet starts it again, and it finds everything as it was"):
        wait_for(lambda: release.runs_again(node), READY_S, f"the plugin's container on {node} runs again")
    if release.partitions(node) != before:
        raise RecoverableError(f"partitions of {node}: {before} before the kill, {release.partitions(node)} after it")
    [status] = release.cluster.wait_pod("inference")["status"]["containerStatuses"]
    screen.show(f"inference: running, {status['restartCount']} restarts, the same partition")


def _pods_go(screen: Screen, release: Release) -> None:
    screen.act("The pods go, and so do their partitions")
    with screen.step("delete the three pods"):
        for pod in PODS:
            release.cluster.kubectl("delete", "--wait=false", "-f", str(EXAMPLES / f"{pod}.yaml"))
        for pod in PODS:
            release.cluster.wait_pod_gone(pod)
    for node in release.cluster.nodes:
        specs = len(list(node.cdi_dir.iterdir()))
        screen.show(f"{node.name}: {len(release.partitions(node.name))} partitions, {specs} CDI specs left")


if __name__ == "__main__":
    main()
