"""What a workload is promised, checked against what its container sees. Pure: every broken promise is a sentence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubelet_plugin.cdi.spec_format import variable
from tests.demo.picture import Holding

GPU_NODE = re.compile(r"/dev/nvidia\d+")
DEFAULT_INTERVAL = "Default"
CAPABILITY_NODE = re.compile(r"/dev/nvidia-caps/nvidia-cap\d+")


@dataclass(frozen=True, slots=True)
class Group:
    """Pods of one kind: ``count`` of them, each with one device of a class, and what that is to be.

    ``prefix`` begins their names; ``type`` and ``profile`` are the device's; ``shares`` is of how many a share is one,
    ``interval`` the time-slice its claims ask for, ``gib`` the memory of a shared GPU.
    """

    prefix: str
    device_class: str
    type: str
    count: int
    profile: str = "none"
    shares: int = 1
    interval: str = DEFAULT_INTERVAL
    gib: int = 0

    @property
    def pods(self) -> list[str]:
        width = len(str(self.count))
        return [f"{self.prefix}-{number:0{width}}" for number in range(1, self.count + 1)]


@dataclass(frozen=True, slots=True)
class Seen:
    """What is inside a container: GPU variables, and device nodes by their paths."""

    variables: Mapping[str, str]
    nodes: frozenset[str]

    @classmethod
    def parse(cls, printed: str) -> Seen:
        """From what ``env`` and ``find /dev`` print."""
        lines = printed.splitlines()
        pairs = (line.partition("=") for line in lines if line.startswith("TESSERA_"))
        variables = {name: value for name, _, value in pairs}
        return cls(variables, frozenset(line for line in lines if line.startswith("/dev")))

    @property
    def gpus(self) -> list[str]:
        return sorted(node for node in self.nodes if GPU_NODE.fullmatch(node))

    @property
    def capabilities(self) -> list[str]:
        return sorted(node for node in self.nodes if CAPABILITY_NODE.fullmatch(node))


@dataclass(frozen=True, slots=True)
class Workload:
    """One pod: what it has by the API, what its container sees, and the partition that is cut for its claim."""

    group: Group
    holding: Holding
    seen: Seen
    partition: Mapping[str, Any] | None = None

    @property
    def uuid(self) -> Any:
        """What the container is to be told: the partition's UUID by the hardware, else the GPU's by the slices."""
        if self.group.type == "mig":
            return self.partition["uuid"] if self.partition else None
        return self.holding.device.value("uuid" if self.group.type == "gpu" else "parentUUID")


def broken(workloads: Sequence[Workload]) -> list[str]:
    """Every promise that is not kept, of each workload and between them; empty where all is well."""
    alone = [f"{each.holding.pod}: {fault}" for each in workloads for fault in _broken_alone(each)]
    return [*alone, *_broken_between(workloads)]


def broken_time_slices(workloads: Iterable[Workload], found: Mapping[tuple[str, int], str]) -> list[str]:
    """GPUs, by node and number, whose time-slice is not what those on them asked for; nobody asked: the default."""
    asked = {(each.holding.device.node, each.holding.device.gpu): each.group.interval for each in workloads}
    return [
        f"gpu-{gpu} of {node} has time-slice {interval}, promised {asked.get((node, gpu), DEFAULT_INTERVAL)}"
        for (node, gpu), interval in found.items()
        if interval != asked.get((node, gpu), DEFAULT_INTERVAL)
    ]


def _broken_alone(workload: Workload) -> Iterable[str]:
    group, device, seen = workload.group, workload.holding.device, workload.seen
    name = "-".join(filter(None, (device.name, workload.holding.share_id)))
    told = {variable(name): workload.uuid}
    if group.shares > 1:
        told[variable(name, "SHARES")] = str(group.shares)
    if group.gib:
        told[variable(name, "MEMORY")] = f"{group.gib}Gi"
    facts = (
        ("type of the device", device.value("type"), group.type),
        ("profile", device.value("profile"), group.profile),
        ("GiB of the GPU", workload.holding.gib, group.gib),
        ("variables", dict(seen.variables), told),
        ("GPUs it sees", seen.gpus, [f"/dev/nvidia{device.gpu}"]),
        ("capability nodes", len(seen.capabilities), 2 if group.type == "mig" else 0),
    )
    yield from (f"{what} {found}, promised {promised}" for what, found, promised in facts if found != promised)
    if group.type == "mig":
        yield from _broken_partition(workload)


def _broken_partition(workload: Workload) -> Iterable[str]:
    """The partition on the hardware is the one that the scheduler chose."""
    device, partition = workload.holding.device, workload.partition
    if partition is None:
        yield f"no partition is cut for its claim {workload.holding.claim}"
        return
    place = (partition["gpu"], partition["placement"]["start"], partition["placement"]["size"])
    if place != (device.gpu, *device.place):
        yield f"its partition is at (GPU, start, size) {place}, promised {(device.gpu, *device.place)}"


def _broken_between(workloads: Iterable[Workload]) -> Iterable[str]:
    """Nobody has what somebody else has, no GPU more claims than memory, and a GPU serves one kind of use."""
    groups_of: dict[tuple[str, int], set[str]] = {}
    owners: dict[str, list[str]] = {}
    given: Counter[tuple[str, int, int]] = Counter()
    for workload in workloads:
        device, pod = workload.holding.device, workload.holding.pod
        groups_of.setdefault((device.node, device.gpu), set()).add(workload.group.type)
        part = f"{device.name} {workload.holding.share_id}"
        if device.gib:
            given[device.node, device.gpu, device.gib] += workload.holding.gib
        for thing in (part.strip(), *workload.seen.capabilities):
            owners.setdefault(f"{thing} of {device.node}", []).append(pod)
    yield from (
        f"{thing} is with {', '.join(pods)}, promised to one" for thing, pods in owners.items() if len(pods) > 1
    )
    for (node, gpu, gib), total in given.items():
        if total > gib:
            yield f"gpu-{gpu} of {node} has {gib} GiB, and its claims have {total}"
    for (node, gpu), types in groups_of.items():
        if len(types) > 1:
            yield f"gpu-{gpu} of {node} serves {' and '.join(sorted(types))}, which exclude each other"


def seen_in_words(workload: Workload) -> list[str]:
    """A row for people: pod, node, device, and what the container sees of it."""
    device, seen = workload.holding.device, workload.seen
    uuids = [value for name, value in seen.variables.items() if name.startswith("TESSERA_DEVICE_")]
    nodes = [*seen.gpus, *(node.removeprefix("/dev/nvidia-caps/nvidia-") for node in seen.capabilities)]
    parts = [f"one of {value}" for name, value in seen.variables.items() if name.startswith("TESSERA_SHARES_")]
    parts += [value for name, value in seen.variables.items() if name.startswith("TESSERA_MEMORY_")]
    shown = [f"{uuid[:12]}.." for uuid in uuids] + parts
    return [workload.holding.pod, device.node, device.name, " ".join(nodes), " ".join(shown)]


def tally(workloads: Iterable[Workload]) -> str:
    """How many of each kind on how many GPUs, as one sentence."""
    workloads = list(workloads)
    pods = Counter(each.group.device_class for each in workloads)
    gpus = {
        name: len({(w.holding.device.node, w.holding.device.gpu) for w in workloads if w.group.device_class == name})
        for name in pods
    }
    each = ", ".join(f"{pods[name]} {name} on {gpus[name]} GPUs" for name in pods)
    return f"{sum(pods.values())} workloads on {sum(gpus.values())} GPUs: {each}"
