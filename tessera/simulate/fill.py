"""How many claims for one device of a class still fit (pure)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from driver.kube.types import Allocation, Claim, Pod
from driver.slices.slice_names import Pool
from tessera.simulate.imagined_cluster import ImaginedCluster
from tessera.simulate.scheduler import PodPlacement
from tessera.simulate.workloads import pods_for_class

BATCH = 8
"""Pods that the controller knows of at a time."""


class Filled(NamedTuple):
    """The names of the ``devices`` that claims got by node, and ``why`` the next claim does not fit."""

    devices: Mapping[str, Sequence[str]]
    why: Sequence[str]


def fill(
    cluster: ImaginedCluster, device_class: str, memory: str = "", progress: Callable[[str], None] = lambda _: None
) -> Filled:
    """Place claims for one device of a class until one does not fit; ``progress`` gets each node that is full.

    ``memory``: what each asks of a shared GPU; empty: nothing.

    Devices of Tessera belong to one node each, so nodes are filled one by one, and of nodes that are alike only the
    first is simulated.
    """
    selector, supply = cluster.selector(device_class), pods_for_class(device_class, memory)
    devices: dict[str, list[str]] = {}
    placements: dict[Hashable, list[PodPlacement]] = {}
    for node in sorted(cluster.fleet.nodes):
        if selector is None:  # devices of other drivers may belong to several nodes
            break
        kind = cluster.likeness(node, selector)
        if kind not in placements:
            placements[kind] = list(_until_full(cluster.alone(node), pods_for_class(device_class, memory), []))
        allocations = [allocation for placement in placements[kind] for _, allocation in placement.allocations]
        cluster.give(node, _allocated(node, cluster.driver, allocations, supply))
        devices[node] = [result.device for allocated in allocations for result in allocated.devices.results]
        progress(node)
    why: list[str] = []
    for placement in _until_full(cluster, supply, why):
        names = [result.device for _, allocation in placement.allocations for result in allocation.devices.results]
        devices.setdefault(placement.node or "", []).extend(names)
    return Filled({node: names for node, names in devices.items() if names}, why)


def _until_full(
    cluster: ImaginedCluster, supply: Iterator[tuple[Pod, Claim]], why: list[str]
) -> Iterator[PodPlacement]:
    """Place pods until one does not fit; the reasons are added to ``why``."""
    while True:
        batch = list(islice(supply, BATCH))
        for _, claim in batch:
            cluster.add(claim)
        cluster.expect([pod for pod, _ in batch])
        for pod, _ in batch:
            placement = cluster.place(pod)
            if placement.node is None:
                why += [reason.sentence for reason in placement.reasons]
                return
            yield placement


def _allocated(
    node: str, driver: str, allocations: Sequence[Allocation], supply: Iterator[tuple[Pod, Claim]]
) -> Iterator[Claim]:
    """Claims with ``allocations`` that were made on a node like ``node``."""
    pool = Pool(node, driver).name
    for (_, claim), allocation in zip(supply, allocations, strict=False):
        results = tuple(msgspec.structs.replace(result, pool=pool) for result in allocation.devices.results)
        devices = msgspec.structs.replace(allocation.devices, results=results)
        given = msgspec.structs.replace(allocation, devices=devices)
        yield msgspec.structs.replace(claim, status=msgspec.structs.replace(claim.status, allocation=given))
