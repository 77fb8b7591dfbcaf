"""How long an edit of nodeConfigs takes in a cluster of many nodes, and how many writes a second it causes.

    python -m tests.bench.config_rollout --nodes 1000 --configs 5

The API server and the controller are real. Each node is a Node and a plan; a thread restarts in its place, as a plugin
does it: two seconds after its plan allows that it reports the new revision. What devices would change in slices is not
part of this.
"""

from __future__ import annotations

import heapq
import itertools
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import click

from driver.config.node_configs import CONFIGS_KEY, NODE_CONFIGS, read_configs
from driver.kube.client import KubeClient, load_configuration
from driver.kube.types import GpuNodePlan
from driver.kube.watch_cache import Change, WatchCache
from driver.model.plan import API_VERSION, KIND, PATH
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess

RESTART_SECONDS = 2.0
"""Of a plugin on a simulated node, on a busy machine."""

TIMEOUT_SECONDS = 600.0


class RestartingNodes:
    """Reports the revision of each node some time after its plan has allowed it."""

    def __init__(self, client: KubeClient, stop: threading.Event) -> None:
        self._client, self._stop = client, stop
        self._due: list[tuple[float, int, GpuNodePlan]] = []
        self._count, self._lock = itertools.count(), threading.Lock()
        self.written: list[float] = []
        """When writes of either side were seen."""
        self.done: set[str] = set()
        self.plans = WatchCache(client, PATH, GpuNodePlan, lambda plan: plan, self._changed)
        for run in (self.plans.run, self._restart):
            threading.Thread(target=run, args=(stop,), daemon=True).start()

    def _changed(self, changes: Sequence[Change[GpuNodePlan]]) -> None:
        for change in changes:
            plan = change.new
            if plan is None or change.old is None:
                continue
            self.written.append(time.monotonic())
            if plan.spec.config_revision not in ("", plan.status.config.revision):
                with self._lock:
                    heapq.heappush(self._due, (time.monotonic() + RESTART_SECONDS, next(self._count), plan))
            elif plan.spec.config_revision:
                self.done.add(plan.metadata.name)

    def _restart(self, stop: threading.Event) -> None:
        while not stop.wait(0.01):
            with self._lock:
                due = [heapq.heappop(self._due)[2] for _ in range(len(self._due)) if self._due[0][0] < time.monotonic()]
            for plan in due:
                status = {"config": {"name": "x", "revision": plan.spec.config_revision, "error": ""}}
                self._client.patch_existing(f"{PATH}/{plan.metadata.name}/status", {"status": status})


def configurations(count: int, shares: int) -> str:
    configs = [
        {"name": f"c{number}", "nodeSelector": {"use": f"c{number}"}, "settings": {"shares": f"0={shares + number}"}}
        for number in range(count)
    ]
    return json.dumps(configs)


def populate(cluster: Cluster, nodes: int, configs: int) -> None:
    """Nodes and their plans, which report that they have the first configurations."""
    revisions = [config.revision for config in read_configs(configurations(configs, 2))]

    def add(number: int) -> None:
        name = f"n{number:04}"
        cluster.add_node_object(name)
        labels = {"use": f"c{number % configs}"}
        cluster.api.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": labels}})
        cluster.api.post(PATH, {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}})
        config = {"name": f"c{number % configs}", "revision": revisions[number % configs]}
        cluster.api.patch(f"{PATH}/{name}/status", {"status": {"config": config}})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(nodes)))


@click.command()
@click.option("--nodes", default=1000, show_default=True)
@click.option("--configs", default=5, show_default=True)
def main(nodes: int, configs: int) -> None:
    """Edit the configurations of all nodes, and measure until the last one has its new settings."""
    with control_plane("config-rollout") as cluster:
        install(cluster, {"nodeConfigs": json.loads(configurations(configs, 2))})
        populate(cluster, nodes, configs)
        stop = threading.Event()
        watched = RestartingNodes(KubeClient(load_configuration(cluster.kubeconfig), "bench"), stop)
        wait_for(lambda: watched.plans.synced, 60, "the plans are listed")
        controller = ControllerProcess(cluster)
        controller.start()
        wait_for(lambda: "elected leader" in controller.log.read_text(), 120, "the controller leads")
        time.sleep(10)  # its first plans are written; nothing depends on the length
        began = time.monotonic()
        data = {CONFIGS_KEY: configurations(configs, 8)}
        cluster.api.patch(f"/api/v1/namespaces/tessera/configmaps/{NODE_CONFIGS}", {"data": data})
        wait_for(lambda: len(watched.done) == nodes, TIMEOUT_SECONDS, "all nodes have their settings", 0.2)
        seconds = time.monotonic() - began
        times = sorted(at - began for at in watched.written if at > began)
        busiest = max(sum(1 for at in times if start <= at < start + 1) for start in times)
        click.echo(
            f"{nodes} nodes, {configs} configurations: {seconds:.0f} s, {len(times)} writes, "
            f"{len(times) / seconds:.1f} a second, at most {busiest} within a second"
        )
        stop.set()
        controller.stop()


if __name__ == "__main__":
    main()
