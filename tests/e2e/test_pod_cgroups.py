"""The real kubelet's cgroups: a pod has one before its claims are prepared, and a limit on it holds its containers."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest
from click.testing import CliRunner

from driver.errors import UsageError
from driver.hardware.cgroups.pod_cgroups import PodCgroups
from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths
from driver.simulator.node import SimulatedNode
from driver.simulator.tree import MACHINE_CGROUPS
from kubelet_plugin.claims.memory_limits import PodMemoryLimits
from kubelet_plugin.step_names import StepRunner
from tessera.sim.node_commands import sim
from tests.harness.waiting import wait_for
from tests.support.memory_limits import GIB, node_with_limits
from tests.support.plugin import PluginProcess
from tests.support.workloads import Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_a_pod_has_a_cgroup_before_its_claim_is_prepared_whose_limit_holds_its_container_and_ends_with_it(
    workloads: Workloads, plugin: PluginProcess, tmp_path: Path
) -> None:
    limited = node_with_limits(tmp_path)
    if not (limited.root / MACHINE_CGROUPS).exists():
        pytest.skip("this machine has no cgroup v2")
    paths = HostPaths(limited.root, limited.root)
    cgroups, host = PodCgroups(paths), Host(limited.nvml, paths, simulated=True)
    limits, gpu = PodMemoryLimits(host.memory_limits, cgroups, StepRunner()), host.discover().gpus[0]

    faults = SimulatedNode.attach(plugin.host_root).faults
    fault = faults.fail("nvmlDeviceCreateGpuInstanceWithPlacement", code=pynvml.NVML_ERROR_UNKNOWN)
    workloads.pod("small", workloads.claim("small", request("gpu-inference-1g-10gb")))
    uid = workloads.cluster.api.get("/api/v1/namespaces/default/pods/small")["metadata"]["uid"]
    wait_for(lambda: "UNKNOWN" in plugin.log.read_text(), 60, "a preparation that fails")
    cgroup = cgroups.find(uid)
    assert cgroup is not None
    assert not list(cgroup.glob("*/cgroup.procs")), "no container was made"
    limits.apply(gpu, {uid: 6 * GIB})
    faults.clear(fault)
    workloads.running("small")

    pid = next(pid for file in cgroup.glob("*/cgroup.procs") for pid in file.read_text().split())
    load = ["load", "0", "--pid", pid, "--host-root", str(limited.root), "--memory"]
    with pytest.raises(UsageError, match=f"pod{uid} is limited to 6144Mi"):
        CliRunner().invoke(sim, [*load, "7Gi"], catch_exceptions=False)
    CliRunner().invoke(sim, [*load, "5Gi"], catch_exceptions=False)
    assert limits.check(gpu, {uid: 6 * GIB}) == ({uid: 5 * GIB}, {})
    workloads.delete_pods("small")
    wait_for(lambda: cgroups.find(uid) is None, 60, "the end of the pod's cgroup")
    assert limits.check(gpu, {uid: 6 * GIB}) == ({}, {})
