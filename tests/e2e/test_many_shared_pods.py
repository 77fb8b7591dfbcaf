"""Hundreds of pods share GPUs, one group after another through the real kubelet, and leave nothing behind.

Another number of them: ``TESSERA_PODS=100 pytest tests/e2e/test_many_shared_pods.py -m slow``
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from driver.simulator.tree import MACHINE_CGROUPS
from kubelet_plugin.mps.protocol import DIRECTORY, SOCKET
from tests.harness.cluster import Cluster
from tests.harness.processes import ProcessTable, stop
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.invariants import Facts, leftovers, read_facts, violations
from tests.support.kill_node import TWO_H100
from tests.support.mps import end_daemons, running, served_gpus, serving
from tests.support.plugin import READY_S, STOPPED_S, PluginFlags, PluginProcess
from tests.support.scheduling import asked
from tests.support.workloads import Workloads

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(3600)]

PODS, GROUP = int(os.environ.get("TESSERA_PODS", "500")), 20
SIZES = (1, 2, 3, 4, 5, 6, 8)


class PluginInItsPlace(PluginProcess):
    """It has the directory of the MPS daemons where the pods of its node have it."""

    def command(self, kubeconfig: Path | None = None) -> list[str]:
        return self.cluster.node(self.node.name).inside(super().command(kubeconfig))

    def look(self) -> Facts:
        daemons = served_gpus(self.cluster.node(self.node.name).mps_dir.glob("*/"))
        return read_facts(self.host_root, self.state_dir, self.node.cdi_dir, daemons=daemons)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginInItsPlace]:
    """Two H100, of which claims share one in time slices and the other by MPS."""
    described = tmp_path_factory.mktemp("node") / "two-h100.yaml"
    described.write_text(TWO_H100)
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster.start(Settings(name="many-shared", usual_places=True), Progress()))
        install(cluster)
        [node] = cluster.nodes
        stack.callback(end_daemons, node.mps_dir)
        command, log = node.inside(serving(Path(DIRECTORY))), cluster.logs_dir / "mps.log"
        served = ProcessTable(cluster.directory).spawn("mps", command, log)
        stack.callback(stop, [served], STOPPED_S)
        wait_for((node.mps_dir / SOCKET).exists, READY_S, "the process of the MPS daemons")
        process = PluginInItsPlace(cluster, node, PluginFlags(gpus=f"sim:{described}", shared="0=time-slicing,1=mps"))
        process.start()
        stack.callback(process.stop)
        yield process


def test_pods_that_share_gpus_leave_no_limit_daemon_directory_or_compute_mode(plugin: PluginInItsPlace) -> None:
    if not (plugin.host_root / MACHINE_CGROUPS).exists():
        pytest.skip("this machine has no cgroup v2")
    workloads, uuids = Workloads(plugin.cluster), [gpu["uuid"] for gpu in plugin.gpus()]
    for first in range(0, PODS, GROUP):
        names = [f"pod-{number}" for number in range(first, min(first + GROUP, PODS))]
        for number, name in enumerate(names, first):
            on = f'device.attributes["gpu.tessera.dev"].parentUUID == "{uuids[number % 2]}"'
            memory = f"{SIZES[number % len(SIZES)]}Gi"
            workloads.pod(name, workloads.claim(name, asked("gpu-shared", on, memory=memory)))
        workloads.running(*names)
        facts = plugin.look()
        assert violations(facts) == []
        assert len(facts.limits) == len(facts.records) == len(names)
        assert facts.daemons == frozenset(uuids[1:])
        workloads.delete_pods(*names)
        assert leftovers(plugin.look()) == []
        assert running(plugin.host_root) == []
        workloads.delete_claims(*names)
