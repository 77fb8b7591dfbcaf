"""``python -m tests.demo.usage``, or ``make demo-usage``: 30 pods on 10 GPUs, and what they use of them."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml

from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import SimulatedActivity, constant, duty
from kubelet_plugin.checkpoint.records import ClaimRecord, decode_record
from tests.demo.nodes import start
from tests.demo.replay import GAUGES, Measured, day_of
from tests.demo.screen import Screen
from tests.demo.stage import Play, options, perform
from tests.demo.svg import UsedSpan, usage_svg
from tests.harness.cluster import Cluster
from tests.harness.node import NodeError
from tests.harness.progress import Progress
from tests.harness.prometheus import ensure_prometheus
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.controller import ControllerProcess
from tests.support.metrics import families, port_in
from tests.support.plugin import TESSERA, PluginFlags, PluginProcess
from tests.support.workloads import request

PICTURE = "demo-usage.svg"
"""In the folder in which the demo is started: the cluster's own ends with the demo."""
INTERVAL_S = 2
RUNNING_S = 300.0
MEASURED_S = 60.0
GIB = 1 << 30
PID = 1 << 22
IMAGE = "docker.io/tessera/busybox:local"
SCRIPT = "trap 'exit 1' USR1; trap exit TERM; while :; do sleep 1; done"


class Team(NamedTuple):
    """Pods of one namespace: SM and memory-bandwidth activity, the part of a 4-second period in which they are active,
    and memory."""

    namespace: str
    device_class: str
    pods: int
    sm: float
    dram: float
    duty: float
    memory_gib: float


TEAMS = (
    Team("training", "gpu-training", 4, 0.85, 0.70, 1.0, 61),
    Team("serving", "gpu-inference-3g-40gb", 6, 0.35, 0.40, 0.5, 14),
    Team("notebooks", "gpu-inference-1g-10gb", 20, 0.05, 0.02, 0.1, 2),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options("demo-usage")
@click.option(
    "--svg", "image", type=click.Path(path_type=Path), default=PICTURE, help=f"The picture.  [default: {PICTURE}]"
)
def main(name: str, keep: bool, binaries: Path | None, image: Path) -> None:
    """Run 30 pods on 10 simulated H100 of a real two-node Kubernetes cluster, and measure what they use.

    Shows allocated against used slices by namespace and by GPU, which classes would have been large enough for a day
    like this, and the Event of a pod that fails because its partition is full. The first run builds Prometheus (5
    minutes). Ctrl-C ends everything that was started.

    \b
    Examples:
      make demo-usage
      make demo-usage SVG=usage.svg
    """
    perform(Play(name, 2, _opening, partial(_on, image)), keep, binaries)


def _opening(screen: Screen) -> None:
    screen.act("Fully allocated is not fully used")
    for team in TEAMS:
        screen.say(f"{team.namespace}: {team.pods} pods of class {team.device_class}")


def _on(image: Path, screen: Screen, cluster: Cluster, _keep: bool) -> None:
    with screen.step("install the Helm chart with nodePlugin.usageInterval"):
        install(cluster, {"nodePlugin": {"usageInterval": f"{INTERVAL_S}s"}})
    plugins = list(_plugins(cluster))
    with screen.step(f"start a node plugin on each node, with --usage-interval {INTERVAL_S}s"):
        start(plugins)
    with screen.step("start the controller"):
        ControllerProcess(cluster).start()
    with screen.step("start 30 pods"):
        _create(cluster)
        wait_for(lambda: _running(cluster) == sum(team.pods for team in TEAMS), RUNNING_S, "all pods run")
    with screen.step("load their simulated GPUs, each in its own way (tessera sim load), and measure"):
        _load(plugins)
        wait_for(lambda: _is_measured(plugins), MEASURED_S, "everything was measured under load")
    screen.act("What is allocated, and what is used")
    pages = [f"--node-metrics=http://127.0.0.1:{port_in(plugin.log, RUNNING_S)}/metrics" for plugin in plugins]
    _run(screen, ["usage", "--by", "namespace", *pages], cluster)
    screen.act("Which size would have been enough")
    _advise(screen, cluster, plugins)
    screen.act("A partition is full")
    _fail(screen, cluster, plugins)
    _draw(screen, image, plugins)


def _draw(screen: Screen, image: Path, plugins: Sequence[PluginProcess]) -> None:
    screen.act("Allocated against used, by GPU")
    image.write_text(usage_svg(sorted(_used(plugins))))
    screen.say(f"The picture is in {image}.")


def _plugins(cluster: Cluster) -> Iterator[PluginProcess]:
    description = yaml.safe_load(Path(__file__).with_name("five-h100.yaml").read_text())
    for node in cluster.nodes:
        file = cluster.directory / f"gpus-{node.name}.yaml"
        file.write_text(yaml.safe_dump({**description, "name": f"{description['name']}-{node.name}"}))
        flags = PluginFlags(f"sim:{file}", usage_interval=f"{INTERVAL_S}s", metrics_address="127.0.0.1:0")
        yield PluginProcess(cluster, node, flags)


def _create(cluster: Cluster) -> None:
    for team in TEAMS:
        cluster.api.post("/api/v1/namespaces", {"metadata": {"name": team.namespace}})
        core, claims = f"/api/v1/namespaces/{team.namespace}", f"/apis/resource.k8s.io/v1/namespaces/{team.namespace}"
        devices = {"requests": [request(team.device_class)]}
        template = {"metadata": {"name": "gpu"}, "spec": {"spec": {"devices": devices}}}
        cluster.api.post(f"{claims}/resourceclaimtemplates", template)
        account = f"{core}/serviceaccounts/default"
        wait_for(partial(cluster.api.get, account), RUNNING_S, f"{account} exists")
        for number in range(team.pods):
            cluster.api.post(f"{core}/pods", _pod(f"{team.namespace}-{number:02}"))


def _pod(name: str) -> dict[str, Any]:
    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sh", "-c", SCRIPT]}
    spec = {
        "hostNetwork": True,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 5,
        "containers": [{**container, "resources": {"claims": [{"name": "gpu"}]}}],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
    }
    return {"metadata": {"name": name}, "spec": spec}


def _running(cluster: Cluster) -> int:
    pods = cluster.api.get("/api/v1/pods")["items"]
    return sum(pod["status"].get("phase") == "Running" for pod in pods)


def _records(plugin: PluginProcess) -> Iterator[ClaimRecord]:
    for path in plugin.records():
        yield decode_record(path.read_bytes(), path)


def _load(plugins: Sequence[PluginProcess]) -> None:
    teams, chance = {team.namespace: team for team in TEAMS}, random.Random(54)
    for plugin in plugins:
        simulated = SimulatedNode.attach(plugin.host_root)
        for number, record in enumerate(_records(plugin)):
            team, more = teams[record.namespace], chance.uniform(0.7, 1.1)
            activity = SimulatedActivity.of(team.sm * more, dram=team.dram * more, tensor=team.sm * more / 2)
            phases = duty(activity, int(team.memory_gib * GIB), team.duty, 4.0)
            for device in record.devices:
                simulated.put_load(device.uuid or device.gpu_uuid, phases, pid=PID + number)


def _samples(plugins: Sequence[PluginProcess], name: str) -> Iterator[tuple[dict[str, str], float]]:
    for plugin in plugins:
        for sample in families(port_in(plugin.log, RUNNING_S))[name].samples:
            yield sample.labels, sample.value


def _is_measured(plugins: Sequence[PluginProcess]) -> bool:
    """Whether every claim shows the memory of its load, and has run with it for some intervals."""
    memory = [value for _, value in _samples(plugins, "tessera_claim_memory_used_bytes")]
    return len(memory) == sum(team.pods for team in TEAMS) and min(memory) > GIB


def _used(plugins: Sequence[PluginProcess]) -> Iterator[UsedSpan]:
    slices = {(labels["node"], labels["device"]): value for labels, value in _samples(plugins, "tessera_claim_slices")}
    used: dict[tuple[str, str], float] = {}
    for name in ("tessera_claim_sm_active_ratio", "tessera_claim_dram_active_ratio"):
        for labels, value in _samples(plugins, name):
            key = (labels["node"], labels["device"])
            used[key] = max(used.get(key, 0.0), value)
    for (node, device), count in slices.items():
        gpu, _, partition = device.partition("-mig-")
        start = int(partition.rpartition("-")[2]) if partition else 0
        yield UsedSpan(node, gpu, start, int(count), used.get((node, device), 0.0))


def _run(screen: Screen, arguments: Sequence[str], cluster: Cluster) -> None:
    """Show a command and what it prints."""
    screen.command(f"tessera {' '.join(arguments)}")
    command = [TESSERA, *arguments, "--kubeconfig", str(cluster.kubeconfig)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=RUNNING_S)
    screen.show(done.stdout)


def _advise(screen: Screen, cluster: Cluster, plugins: Sequence[PluginProcess]) -> None:
    """Let ``tessera advise`` judge a day that was like the last interval."""
    measured = [Measured(name, *sample) for name in GAUGES for sample in _samples(plugins, name)]
    programs = ensure_prometheus(Progress())
    with (
        screen.step("start a Prometheus in which what was measured has lasted for a day (simulated)"),
        day_of(measured, programs, cluster.directory / "prometheus") as address,
    ):
        _run(screen, ["advise", "--prometheus", address, "--since", "25h"], cluster)


def _fail(screen: Screen, cluster: Cluster, plugins: Sequence[PluginProcess]) -> None:
    """Fill the partition of a notebook, and end its container with a failure."""
    plugin, record = next(
        (each, found) for each in plugins for found in _records(each) if found.namespace == "notebooks"
    )
    simulated, uuid = SimulatedNode.attach(plugin.host_root), str(record.devices[0].uuid)
    pod = next(
        labels["pod"] for labels, _ in _samples(plugins, "tessera_claim_slices") if labels["claim"] == record.name
    )
    simulated.end_load(uuid)
    simulated.put_load(uuid, constant(SimulatedActivity.of(0.5, dram=0.2), int(9.6 * GIB)))

    def memory() -> float:
        found = _samples(plugins, "tessera_claim_memory_used_bytes")
        return next(value for labels, value in found if labels["claim"] == record.name)

    wait_for(lambda: memory() > 9 * GIB, MEASURED_S, "the partition is full")
    with suppress(NodeError):  # the container's end may end this process, too
        cluster.node(plugin.node.name).exec("notebooks", pod, ("sh", "-c", "kill -USR1 1"))
    simulated.end_load(uuid)
    path = f"/api/v1/namespaces/notebooks/events?fieldSelector=reason%3DPartitionFull,involvedObject.name%3D{pod}"
    [event] = wait_for(lambda: cluster.api.get(path)["items"], MEASURED_S, "the Event")
    screen.say(f"pod notebooks/{pod}: {event['reason']}: {event['message']}")


if __name__ == "__main__":
    main()
