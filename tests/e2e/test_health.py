"""What hardware reports keeps new pods off it, on a real cluster: taints, the kubelet's word, an operator's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from driver.clock import written_time
from tests.harness.cluster import Cluster
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.plugin import COMMAND_S, TESSERA, PluginProcess
from tests.support.workloads import PODS, Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SEEN_S = 60.0
TOLD_S = 60.0
"""The kubelet writes a pod's status when it comes to it."""

UNHEALTHY, CORDONED = "gpu.tessera.dev/unhealthy", "gpu.tessera.dev/cordoned"
SMALL = "gpu-inference-1g-10gb"


@pytest.fixture
def faulty(plugin: PluginProcess) -> Iterator[PluginProcess]:
    """The plugin, whose simulated node is well again after the test."""
    yield plugin
    plugin.fault("clear")
    # Also where an operator has dealt with it: a plugin that has lost its memory (test_uninstall) would find it again.
    for gpu in sorted({name.split("-")[1] for name in plugin.devices()}):
        plugin.fault("recovery", "NONE", "--gpu", gpu)
    for gpu in {name.split("-")[1] for name in tainted(plugin)}:
        operator(plugin, "uncordon", gpu)
    wait_for(lambda: not tainted(plugin), SEEN_S, "all GPUs are well again")


def tainted(plugin: PluginProcess) -> dict[str, str]:
    """The first taint of each GPU that has any, as ``key=value``."""
    found = {}
    for name, device in plugin.devices().items():
        for taint in device.get("taints", ())[:1]:
            found["-".join(name.split("-")[:2])] = "=".join([taint["key"], taint.get("value", "")]).rstrip("=")
    return found


def all_told(plugin: PluginProcess) -> bool:
    """Whether its slices show the newest fault of each GPU that has one; the last is what NVML says the GPU needs."""
    newest = {written_time(max(each["stamp"] for each in faults)) for faults in plugin.faults_of_gpus().values()}
    taints = [taint for device in plugin.devices().values() for taint in device.get("taints", ())]
    return bool(newest) and {taint["timeAdded"] for taint in taints if taint["key"] == UNHEALTHY} == newest


def operator(plugin: PluginProcess, verb: str, gpu: str, *more: str) -> str:
    """``tessera cordon`` or ``uncordon``, with an administrator's kubeconfig."""
    command = [TESSERA, verb, f"{plugin.node.name}/gpu-{gpu}", "--kubeconfig", str(plugin.cluster.kubeconfig), *more]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_S).stdout


def health_of(cluster: Cluster, pod: str) -> dict[str, tuple[str, str]]:
    """What the pod's status says of its devices: health and message by resource id."""
    found: dict[str, tuple[str, str]] = {}
    for container in cluster.api.get(f"{PODS}/{pod}")["status"].get("containerStatuses", ()):
        for entry in container.get("allocatedResourcesStatus", ()):
            for resource in entry.get("resources", ()):
                found[resource["resourceID"]] = (resource.get("health", ""), resource.get("message", ""))
    return found


def test_an_unhealthy_gpu_is_offered_to_nobody_until_it_is_reset(faulty: PluginProcess) -> None:
    """Its devices are tainted, or left out of the slices where the API server keeps no taints."""

    def offered() -> bool:
        devices = faulty.devices()
        return "gpu-3" in devices and "taints" not in devices["gpu-3"]

    wait_for(offered, SEEN_S, "nothing holds it any more")
    faulty.fault("xid", "48", "--gpu", "3")
    wait_for(lambda: faulty.devices() and not offered(), SEEN_S, "no pod can get it")
    wait_for(faulty.faults_of_gpus, SEEN_S, "it is known what the GPU needs: a reset ends the fault only then")
    faulty.fault("reset", "--gpu", "3")
    wait_for(offered, SEEN_S, "it is offered again")


@pytest.mark.core
@pytest.mark.needs("device taints")
def test_a_fatal_xid_taints_its_gpu_survives_a_restart_and_ends_with_a_reset(faulty: PluginProcess) -> None:
    faulty.fault("xid", "13", "--gpu", "1")  # an application's: it would show as soon as the other
    faulty.fault("xid", "48", "--gpu", "3")
    wait_for(lambda: tainted(faulty) == {"gpu-3": f"{UNHEALTHY}=xid-48"}, SEEN_S, "its devices are tainted")
    wait_for(lambda: all_told(faulty), SEEN_S, "all of it is told")
    faulty.restart()
    assert tainted(faulty) == {"gpu-3": f"{UNHEALTHY}=xid-48"}
    versions = faulty.versions()
    with pytest.raises(DeadlineError):
        wait_for(lambda: faulty.versions() != versions, 6, "a write")
    faulty.fault("reset", "--gpu", "3")
    wait_for(lambda: not tainted(faulty), SEEN_S, "the GPU is well again")


@pytest.mark.needs("device taints")
def test_new_pods_pass_by_an_unhealthy_gpu_until_an_operator_has_dealt_with_it(
    faulty: PluginProcess, workloads: Workloads
) -> None:
    for gpu in range(7):
        faulty.fault("xid", "48", "--gpu", str(gpu))
    wait_for(lambda: len(tainted(faulty)) == 7, SEEN_S, "all GPUs but one are tainted")
    wait_for(lambda: all_told(faulty), SEEN_S, "what an operator deals with is told whole")
    workloads.running(workloads.pod("first", workloads.claim("first", request("gpu-training"))))
    assert workloads.allocated("first") == ["gpu-7"]
    second = workloads.pod("second", workloads.claim("second", request("gpu-training")))
    wait_for(lambda: "cannot allocate" in workloads.why_waiting(second), TOLD_S, "the second pod waits")
    said = operator(faulty, "uncordon", "2")
    assert said.startswith("cleared on ")
    assert "xid-48" in said
    workloads.running(second)
    assert workloads.allocated("second") == ["gpu-2"]
    for gpu in range(7):
        operator(faulty, "uncordon", str(gpu))


@pytest.mark.core
@pytest.mark.needs("device taints")
def test_new_pods_run_elsewhere_while_a_gpu_refuses_to_be_cut_and_it_is_used_again_when_it_obeys(
    faulty: PluginProcess, workloads: Workloads
) -> None:
    faulty.fault("fail", "nvmlDeviceCreateGpuInstanceWithPlacement", "--code", "UNKNOWN", "--gpu", "0")
    first = workloads.pod("first", workloads.claim("first", request(SMALL)))
    wait_for(lambda: tainted(faulty) == {"gpu-0": f"{UNHEALTHY}=failing"}, 2 * SEEN_S, "three refusals were enough")
    assert workloads.allocated("first")[0].startswith("gpu-0-")
    workloads.running(workloads.pod("second", workloads.claim("second", request(SMALL))))
    assert not workloads.allocated("second")[0].startswith("gpu-0-")
    faulty.restart()
    assert tainted(faulty) == {"gpu-0": f"{UNHEALTHY}=failing"}
    faulty.fault("clear")
    wait_for(lambda: not tainted(faulty), 2 * SEEN_S, "the pod that waits for it, or a trial, has shown that it obeys")
    workloads.running(first)


@pytest.mark.needs("device taints")
def test_a_cordon_keeps_new_pods_off_and_uncordon_brings_the_gpu_back(
    faulty: PluginProcess, workloads: Workloads
) -> None:
    running = workloads.pod("running", workloads.claim("running", request(SMALL)))
    workloads.running(running)
    [held] = workloads.allocated("running")
    number = held.split("-")[1]
    assert "cordoned" in operator(faulty, "cordon", number, "--reason", "fan on Friday")
    wait_for(lambda: tainted(faulty) == {f"gpu-{number}": CORDONED}, SEEN_S, "the cordon is seen")
    faulty.restart()
    assert tainted(faulty) == {f"gpu-{number}": CORDONED}
    workloads.running(workloads.pod("next", workloads.claim("next", request(SMALL))))
    assert workloads.allocated("next")[0].split("-")[1] != number
    assert held in faulty.devices()
    operator(faulty, "uncordon", number)
    wait_for(lambda: not tainted(faulty), SEEN_S, "the cordon is gone")


@pytest.mark.needs("device taints", "resource health")
def test_a_running_pods_status_says_that_its_device_is_unhealthy_and_well_again(
    faulty: PluginProcess, workloads: Workloads, cluster: Cluster
) -> None:
    pod = workloads.pod("watched", workloads.claim("watched", request(SMALL)))
    workloads.running(pod)

    def says(health: str) -> Any:
        return [found for found in health_of(cluster, pod).values() if found[0] == health]

    wait_for(lambda: says("Healthy"), TOLD_S, "the device is told to be well")
    number = workloads.allocated("watched")[0].split("-")[1]
    faulty.fault("xid", "95", "--gpu", number)
    wait_for(lambda: "XID 95" in str(says("Unhealthy")), TOLD_S, "the device is told to be ill, and why")
    wait_for(lambda: all_told(faulty), SEEN_S, "the fault is shown, which the operator calls dealt with")
    operator(faulty, "uncordon", number)
    wait_for(lambda: says("Healthy"), TOLD_S, "the device is told to be well again")
