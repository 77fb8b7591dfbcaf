"""The main job on a real cluster: a claim becomes a GPU or a MIG partition inside a running pod."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.waiting import wait_for
from tests.support.plugin import PluginProcess
from tests.support.workloads import CLAIMS, Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(300)]

SMALL, LARGE, FULL = "gpu-inference-1g-10gb", "gpu-inference-3g-40gb", "gpu-training"

OVERLAPPING = pytest.mark.needs("shared counters")
"""Each GPU of the node offers whatever fits."""


def environment(workloads: Workloads, pod: str) -> dict[str, str]:
    """The GPU variables of a pod's container."""
    pairs = (line.split("=", 1) for line in workloads.exec(pod, "env").splitlines() if "=" in line)
    return {name: value for name, value in pairs if name.startswith(("TESSERA", "NVIDIA"))}


def device_nodes(workloads: Workloads, pod: str) -> set[str]:
    """The GPU device nodes inside a pod's container, as full paths."""
    found = workloads.exec(pod, "find", "/dev", "-name", "nvidia*", "-type", "c")
    return set(found.split())


def test_three_pods_get_a_full_gpu_a_small_and_a_larger_partition(workloads: Workloads, plugin: PluginProcess) -> None:
    for name, device_class in (("training", FULL), ("inference", SMALL), ("large", LARGE)):
        workloads.pod(name, workloads.claim(name, request(device_class)))
    workloads.running("training", "inference", "large")
    partitions = {partition["profile"]: partition for partition in plugin.partitions()}

    assert set(partitions) == {"1g.10gb", "3g.40gb"}
    for pod, profile in (("inference", "1g.10gb"), ("large", "3g.40gb")):
        seen = environment(workloads, pod)
        assert seen.pop("NVIDIA_VISIBLE_DEVICES") == "void"
        assert list(seen.values()) == [partitions[profile]["uuid"]]
        assert partitions[profile]["holder"] == f"default/{pod}"
        nodes = device_nodes(workloads, pod)
        assert len([node for node in nodes if node.startswith("/dev/nvidia-caps/nvidia-cap")]) == 2
        assert f"/dev/nvidia{partitions[profile]['gpu']}" in nodes

    [full] = workloads.allocated("training")
    seen = environment(workloads, "training")
    assert seen[f"TESSERA_DEVICE_{full.upper().replace('-', '_')}"].startswith("GPU-")
    nodes = device_nodes(workloads, "training")
    assert f"/dev/nvidia{full.removeprefix('gpu-')}" in nodes
    assert not [node for node in nodes if "caps" in node]

    workloads.delete_pods("training", "inference", "large")
    assert plugin.nothing_left()


@pytest.mark.smoke
def test_a_pod_with_two_claims_sees_both_devices(workloads: Workloads, plugin: PluginProcess) -> None:
    first = workloads.claim("first", request(SMALL))
    second = workloads.claim("second", request(SMALL))
    workloads.pod("both", first, second)
    workloads.running("both")
    seen = environment(workloads, "both")
    uuids = {value for name, value in seen.items() if name.startswith("TESSERA")}
    assert uuids == {partition["uuid"] for partition in plugin.partitions()}
    assert len(uuids) == 2


def test_a_running_pods_claim_says_which_partition_it_got(workloads: Workloads, plugin: PluginProcess) -> None:
    workloads.pod("inference", workloads.claim("told", request(SMALL)))
    workloads.running("inference")
    [partition] = plugin.partitions()
    [entry] = wait_for(lambda: workloads.cluster.api.get(f"{CLAIMS}/told")["status"].get("devices"), 60, "its status")
    [condition] = entry["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Ready", "True", "Prepared")
    assert entry["data"]["uuid"] == partition["uuid"]
    assert [entry["device"]] == workloads.allocated("told")


@pytest.mark.smoke
def test_two_pods_that_share_a_claim_see_the_same_partition(workloads: Workloads, plugin: PluginProcess) -> None:
    claim = workloads.claim("shared", request(SMALL))
    workloads.pod("one", claim)
    workloads.pod("two", claim)
    workloads.running("one", "two")
    assert environment(workloads, "one") == environment(workloads, "two")
    [partition] = plugin.partitions()
    workloads.delete_pods("one")
    assert plugin.partitions() == [partition]
    workloads.delete_pods("two")
    assert plugin.nothing_left()


def test_a_claim_template_gives_each_pod_a_partition_of_its_own(workloads: Workloads, plugin: PluginProcess) -> None:
    template = workloads.template("template", request(SMALL))
    workloads.pod("one", template=template)
    workloads.pod("two", template=template)
    workloads.running("one", "two")
    assert len(plugin.partitions()) == 2
    assert environment(workloads, "one") != environment(workloads, "two")
    workloads.delete_pods("one", "two")
    assert plugin.nothing_left()


def test_one_claim_may_ask_for_a_full_gpu_and_a_partition(workloads: Workloads, plugin: PluginProcess) -> None:
    workloads.pod("mixed", workloads.claim("mixed", request(FULL, "train"), request(SMALL, "infer")))
    workloads.running("mixed")
    full, small, _ = sorted(environment(workloads, "mixed").values())
    assert full.startswith("GPU-")
    assert small.startswith("MIG-")
    assert len(plugin.partitions()) == 1


@OVERLAPPING
def test_eight_full_gpus_at_once(workloads: Workloads, plugin: PluginProcess) -> None:
    pods = [workloads.pod(f"train-{i}", workloads.claim(f"train-{i}", request(FULL))) for i in range(8)]
    workloads.running(*pods)
    assert {device for pod in pods for device in workloads.allocated(pod)} == {f"gpu-{i}" for i in range(8)}
    ninth = workloads.pod("ninth", workloads.claim("ninth", request(SMALL)))
    reason = wait_for(lambda: workloads.why_waiting(ninth), 60, "the scheduler's reason")
    assert "cannot allocate all claims" in reason


def on_gpu(bus_id: str) -> str:
    """A selector for the devices of one GPU."""
    return f'device.attributes["resource.kubernetes.io"].pciBusID == "{bus_id}"'


@OVERLAPPING
@pytest.mark.parametrize(("first", "second"), [(FULL, SMALL), (SMALL, FULL), (LARGE, FULL)])
def test_full_gpu_and_partition_of_one_gpu_exclude_each_other(
    workloads: Workloads, plugin: PluginProcess, first: str, second: str
) -> None:
    bus_id = plugin.devices()["gpu-5"]["attributes"]["resource.kubernetes.io/pciBusID"]["string"]
    holder = workloads.pod("holder", workloads.claim("holder", request(first, selector=on_gpu(bus_id))))
    workloads.running(holder)
    late = workloads.pod("late", workloads.claim("late", request(second, selector=on_gpu(bus_id))))
    reason = wait_for(lambda: workloads.why_waiting(late), 60, "the scheduler's reason")
    assert "cannot allocate all claims" in reason
    assert workloads.allocated("late") == []
    workloads.delete_pods(holder)
    workloads.delete_claims("holder")
    workloads.running(late)
    assert workloads.allocated("late")[0].startswith("gpu-5")


@OVERLAPPING
def test_what_no_longer_fits_leaves_the_slice_and_what_is_held_stays(
    workloads: Workloads, plugin: PluginProcess
) -> None:
    plugin.wait_quiet()
    before = plugin.devices()
    workloads.running(workloads.pod("large", workloads.claim("large", request(LARGE))))
    [held] = workloads.allocated("large")
    number = held.split("-")[1]

    def after() -> dict[str, Any]:
        devices = plugin.devices()
        return devices if f"gpu-{number}" not in devices else {}

    now = wait_for(after, 60, "the full GPU leaves the slice")[held]
    attributes = {name: value for name, value in now["attributes"].items() if name != "uuid"}
    assert {**now, "attributes": attributes} == before[held], "it only gets the UUID of its partition"
    workloads.delete_pods("large")
    # Attributes may differ: MIG mode stays on once it was needed.
    wait_for(lambda: plugin.devices().keys() == before.keys(), 60, "everything is offered again")
