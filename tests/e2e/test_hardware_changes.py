"""What happens to the hardware shows in the slices of a real API server within seconds."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from driver.model.plan import PATH
from driver.slices.build import UNAVAILABLE
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.plugin import COMMAND_S, TESSERA, PluginProcess
from tests.support.workloads import Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SEEN_S = 60.0
PROMISED_S = 10.0
"""Within which a change shows, as the docs say."""


@pytest.fixture
def faults(plugin: PluginProcess) -> Iterator[PluginProcess]:
    """The plugin's simulated node, whose faults end with the test."""
    yield plugin
    fault(plugin, "clear")
    wait_for(lambda: not tainted(plugin), SEEN_S, "all GPUs are well again")


def fault(plugin: PluginProcess, *arguments: str) -> None:
    """``tessera sim fault``, from a process of its own."""
    command = [TESSERA, "sim", "fault", "--host-root", str(plugin.host_root), *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_S)


def tainted(plugin: PluginProcess, key: str = "") -> set[str]:
    """The GPUs whose devices are tainted, with that key or any."""
    return {
        name.split("-mig-")[0]
        for name, device in plugin.devices().items()
        if any(taint["key"].startswith(key) for taint in device.get("taints", ()))
    }


@pytest.mark.needs("device taints")
def test_a_lost_gpu_is_tainted_and_nothing_new_lands_on_it(faults: PluginProcess, workloads: Workloads) -> None:
    running = workloads.pod("running", workloads.claim("running", request("gpu-inference-1g-10gb")))
    workloads.running(running)
    [held] = workloads.allocated("running")
    number = held.split("-")[1]
    fault(faults, "lose", "--gpu", number)
    wait_for(lambda: tainted(faults) == {f"gpu-{number}"}, SEEN_S, "the lost GPU is tainted")
    assert held in faults.devices()
    workloads.running(workloads.pod("next", workloads.claim("next", request("gpu-inference-1g-10gb"))))
    assert not workloads.allocated("next")[0].startswith(f"gpu-{number}-")
    # That it fell off the bus is over when it answers after it did not: somebody has to have looked meanwhile.
    wait_for(lambda: tainted(faults, UNAVAILABLE["key"]) == {f"gpu-{number}"}, SEEN_S, "it was seen not to answer")
    fault(faults, "clear")
    wait_for(lambda: not tainted(faults), SEEN_S, "the GPU is well again")


@pytest.mark.needs("device taints")
def test_a_gpu_that_disappears_and_comes_back(faults: PluginProcess) -> None:
    faults.wait_quiet()
    before = faults.devices()
    fault(faults, "remove", "--gpu", "6")
    wait_for(lambda: tainted(faults) == {"gpu-6"}, SEEN_S, "the GPU that is gone is tainted")
    assert faults.devices().keys() == before.keys()
    fault(faults, "return", "--gpu", "6")
    wait_for(lambda: faults.devices() == before, SEEN_S, "everything is as before")


@pytest.mark.needs("device taints")
@pytest.mark.parametrize("command", ["lose", "remove"])
def test_a_gpu_that_is_lost_when_the_plugin_starts_stays_with_its_fault(faults: PluginProcess, command: str) -> None:
    faults.wait_quiet()
    before = faults.devices()
    fault(faults, command, "--gpu", "6")
    faults.restart()
    wait_for(lambda: tainted(faults, UNAVAILABLE["key"]) == {"gpu-6"}, SEEN_S, "the lost GPU is tainted")
    assert faults.devices().keys() == before.keys()

    def reported() -> list[str]:
        plan = faults.cluster.api.get(f"{PATH}/{faults.node.name}")
        return [line.partition(" ")[0] for line in plan.get("status", {}).get("gpus", ()) if "can't be used" in line]

    wait_for(lambda: reported() == ["gpu-6"], SEEN_S, "the node reports it as one of its GPUs")
    fault(faults, *(("return", "--gpu", "6") if command == "remove" else ("clear",)))
    wait_for(lambda: faults.devices() == before, SEEN_S, "everything is as before")


def test_looking_again_writes_nothing(plugin: PluginProcess) -> None:
    plugin.wait_quiet()
    versions = plugin.versions()
    fault(plugin, "xid", "13", "--gpu", "0")
    # An application's XID makes it look, and so does the timer; a change would show within the promise.
    with pytest.raises(DeadlineError):
        wait_for(lambda: plugin.versions() != versions, PROMISED_S, "a change")
