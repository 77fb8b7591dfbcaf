"""What the demo checks of its workloads: each way to break a promise is found and said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.demo.picture import Holding, Published
from tests.demo.promises import Group, Seen, Workload, broken, broken_time_slices, tally

TRAIN = Group("train", "gpu-training", "gpu", 4)
INFER = Group("infer", "gpu-inference-1g-10gb", "mig", 20, profile="1g.10gb")
NOTE = Group("note", "gpu-dev", "share", 30, shares=10, interval="Short")

COMMON = frozenset({"/dev/nvidiactl", "/dev/nvidia-uvm"})


def device(name: str, **attributes: str | int) -> Published:
    kinds = {str: "string", int: "int"}
    return Published("node-0", name, {key: {kinds[type(value)]: value} for key, value in attributes.items()})


def training() -> Workload:
    gpu = device("gpu-0", type="gpu", profile="none", uuid="GPU-0")
    seen = Seen({"TESSERA_DEVICE_GPU_0": "GPU-0"}, COMMON | {"/dev/nvidia0"})
    return Workload(TRAIN, Holding("train-1", "train-1-gpu-a", gpu), seen)


def inference(place: int = 0) -> Workload:
    name = f"gpu-1-mig-1g10gb-{place}"
    attributes: dict[str, str | int] = {
        "type": "mig",
        "profile": "1g.10gb",
        "placementStart": place,
        "placementSize": 1,
    }
    capabilities = {f"/dev/nvidia-caps/nvidia-cap{10 * place + i}" for i in range(2)}
    seen = Seen({f"TESSERA_DEVICE_GPU_1_MIG_1G10GB_{place}": f"MIG-{place}"}, COMMON | capabilities | {"/dev/nvidia1"})
    partition = {"gpu": 1, "uuid": f"MIG-{place}", "placement": {"start": place, "size": 1}}
    return Workload(
        INFER, Holding(f"infer-{place}", f"infer-{place}-gpu-a", device(name, **attributes)), seen, partition
    )


def notebook(index: int = 0) -> Workload:
    share = device(f"gpu-2-share-{index}", type="share", profile="none", parentUUID="GPU-2", shares=10)
    told = {f"TESSERA_DEVICE_GPU_2_SHARE_{index}": "GPU-2", f"TESSERA_SHARES_GPU_2_SHARE_{index}": "10"}
    return Workload(NOTE, Holding(f"note-{index}", f"note-{index}-gpu-a", share), Seen(told, COMMON | {"/dev/nvidia2"}))


def by_memory(part: str, gib: int = 40) -> Workload:
    shared = replace(device("gpu-3-shared", type="shared", profile="none", parentUUID="GPU-3"), gib=79)
    name = f"GPU_3_SHARED_{part.upper()}"
    seen = Seen({f"TESSERA_DEVICE_{name}": "GPU-3", f"TESSERA_MEMORY_{name}": f"{gib}Gi"}, COMMON | {"/dev/nvidia3"})
    group = Group("nb", "gpu-shared", "shared", 30, gib=gib)
    return Workload(group, Holding(f"nb-{part}", f"nb-{part}-gpu-a", shared, gib, part), seen)


def seeing(workload: Workload, *nodes: str, **variables: str) -> Workload:
    """``workload`` whose container sees more than it should, or is told something else."""
    seen = workload.seen
    return replace(workload, seen=Seen({**seen.variables, **variables}, seen.nodes | set(nodes)))


def test_kept_promises_of_every_kind_are_no_fault() -> None:
    assert broken([training(), inference(0), inference(1), notebook(0), notebook(1)]) == []
    assert broken([by_memory("a", 39), by_memory("b", 40)]) == []


BLIND = Seen({}, COMMON)


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (seeing(notebook(), "/dev/nvidia0"), "note-0: GPUs it sees ['/dev/nvidia0', '/dev/nvidia2'], promised"),
        (seeing(training(), "/dev/nvidia-caps/nvidia-cap7"), "train-1: capability nodes 1, promised 0"),
        (replace(training(), seen=BLIND), "train-1: GPUs it sees [], promised ['/dev/nvidia0']"),
        (seeing(training(), TESSERA_DEVICE_GPU_0="GPU-7"), "train-1: variables {'TESSERA_DEVICE_GPU_0': 'GPU-7'}"),
        (seeing(training(), TESSERA_DEVICE_GPU_1="GPU-1"), "train-1: variables"),
        (seeing(notebook(), TESSERA_SHARES_GPU_2_SHARE_0="4"), "note-0: variables"),
        (seeing(by_memory("a"), TESSERA_MEMORY_GPU_3_SHARED_A="79Gi"), "nb-a: variables"),
        (replace(by_memory("a"), group=Group("nb", "gpu-shared", "shared", 1, gib=7)), "GiB of the GPU 40, promised 7"),
        (replace(training(), group=NOTE), "train-1: type of the device gpu, promised share"),
        (replace(inference(), partition=None), "infer-0: no partition is cut for its claim infer-0-gpu-a"),
        (
            replace(inference(), partition={"gpu": 1, "uuid": "MIG-0", "placement": {"start": 3, "size": 1}}),
            "infer-0: its partition is at (GPU, start, size) (1, 3, 1), promised (1, 0, 1)",
        ),
        (
            replace(inference(), group=replace(INFER, profile="2g.20gb")),
            "infer-0: profile 1g.10gb, promised 2g.20gb",
        ),
    ],
)
def test_a_broken_promise_is_said_with_what_was_found_and_what_was_promised(workload: Workload, said: str) -> None:
    assert any(said in fault for fault in broken([workload]))


def test_a_capability_node_in_two_containers_is_said_with_both() -> None:
    first, second = inference(0), inference(1)
    second = replace(second, seen=replace(second.seen, nodes=first.seen.nodes))
    faults = broken([first, second])
    assert "/dev/nvidia-caps/nvidia-cap0 of node-0 is with infer-0, infer-1, promised to one" in faults


def test_one_device_given_out_twice_is_said_with_both() -> None:
    twice = replace(notebook(), holding=replace(notebook().holding, pod="note-9"))
    assert broken([notebook(), twice]) == ["gpu-2-share-0 of node-0 is with note-0, note-9, promised to one"]


def test_claims_that_have_more_memory_than_their_gpu_are_said() -> None:
    assert broken([by_memory("a"), by_memory("b")]) == ["gpu-3 of node-0 has 79 GiB, and its claims have 80"]


def test_two_kinds_of_use_of_one_gpu_are_said() -> None:
    beside = replace(notebook().holding, device=device("gpu-0-share-0", type="share", profile="none"))
    faults = broken([training(), replace(notebook(), holding=beside)])
    assert "gpu-0 of node-0 serves gpu and share, which exclude each other" in faults


def test_a_time_slice_that_nobody_asked_for_or_that_is_missing_is_said() -> None:
    workloads = [training(), notebook()]
    assert broken_time_slices(workloads, {("node-0", 0): "Default", ("node-0", 2): "Short"}) == []
    faults = broken_time_slices(workloads, {("node-0", 1): "Long", ("node-0", 2): "Default"})
    assert faults == [
        "gpu-1 of node-0 has time-slice Long, promised Default",
        "gpu-2 of node-0 has time-slice Default, promised Short",
    ]


def test_what_a_container_printed_is_read_as_variables_and_device_nodes() -> None:
    seen = Seen.parse(
        "TESSERA_DEVICE_GPU_1=GPU-a=b\nHOME=/root\n/dev/nvidia1\n/dev/nvidiactl\n/dev/nvidia-caps/nvidia-cap21\n"
    )
    assert seen.variables == {"TESSERA_DEVICE_GPU_1": "GPU-a=b"}
    assert seen.gpus == ["/dev/nvidia1"]
    assert seen.capabilities == ["/dev/nvidia-caps/nvidia-cap21"]


def test_pods_of_a_group_are_numbered_so_that_they_sort() -> None:
    assert Group("note", "gpu-dev", "share", 10).pods[:2] == ["note-01", "note-02"]
    assert Group("train", "gpu-training", "gpu", 4).pods == ["train-1", "train-2", "train-3", "train-4"]


def test_the_tally_counts_workloads_and_gpus() -> None:
    found = tally([training(), inference(0), inference(1), notebook()])
    assert found == (
        "4 workloads on 3 GPUs: 1 gpu-training on 1 GPUs, 2 gpu-inference-1g-10gb on 1 GPUs, 1 gpu-dev on 1 GPUs"
    )
