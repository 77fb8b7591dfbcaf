"""NVLink and fabric facts of one GPU, through the pynvml functions.

Sources: NVML manual ("NvLink Methods", "Fabric"), NVLink's nominal rates from NVIDIA's data sheets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from ctypes import byref
from typing import Any
from uuid import UUID

import pynvml

from driver.hardware.nvml_errors import UNKNOWN_NUMBER, fact, text
from driver.hardware.pci_distance import pci_address
from driver.model.gpu import NvLink

GENERATIONS = {
    pynvml.NVML_NVLINK_VERSION_1_0: 1,
    pynvml.NVML_NVLINK_VERSION_2_0: 2,
    pynvml.NVML_NVLINK_VERSION_2_2: 2,
    pynvml.NVML_NVLINK_VERSION_3_0: 3,
    pynvml.NVML_NVLINK_VERSION_3_1: 3,
    pynvml.NVML_NVLINK_VERSION_4_0: 4,
    pynvml.NVML_NVLINK_VERSION_5_0: 5,
}
"""NVML's version codes by NVLink generation."""

LINK_GBPS = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50}
"""Nominal GB/s of one link in one direction, by generation; data sheets give links x this x 2."""

SWITCH = "switch"
"""Stands for the NVSwitch as a link's far end: a node's switches join all GPUs linked to them."""


def read_nvlink(nvml: Any, handle: Any) -> NvLink | None:
    """The links that are up, or None on a GPU without NVLink or with every link down."""
    up = list(_links_up(nvml, handle))
    if not up:
        return None
    versions = (fact(nvml.nvmlDeviceGetNvLinkVersion, handle, link) for link in up)
    generation = next((GENERATIONS[version] for version in versions if version in GENERATIONS), None)
    rate = LINK_GBPS.get(generation) if generation is not None else None
    return NvLink(
        generation=generation,
        links=len(up),
        bandwidth=len(up) * rate * 2 if rate is not None else None,
        peers=Counter(peer for link in up if (peer := _far_end(nvml, handle, link)) is not None),
    )


def read_fabric_clique(nvml: Any, handle: Any) -> str | None:
    """``<clusterUUID>.<cliqueId>`` of a multi-node NVLink domain.

    None without a fabric, before its set-up has completed, and for the zero UUID of a single node's NVSwitch.
    """
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    info.version = pynvml.nvmlGpuFabricInfo_v2
    if fact(nvml.nvmlDeviceGetGpuFabricInfoV, handle, byref(info)) is None:
        return None
    complete = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == pynvml.NVML_SUCCESS
    cluster = UUID(bytes=bytes(info.clusterUuid))
    return f"{cluster}.{info.cliqueId}" if complete and cluster.int else None


def nvlink_cliques(links: Mapping[str, NvLink | None]) -> dict[str, str]:
    """Which GPUs NVLink joins inside the node: ``clique-<n>`` by PCI address, for GPUs that have a peer.

    ``links`` is by PCI address. The number counts cliques in the order of their first address.
    """
    groups = _joined({address: link.peers for address, link in links.items() if link is not None})
    real = [group for group in groups if len(group - {SWITCH}) > 1]
    ordered = sorted(real, key=lambda group: min(group - {SWITCH}))
    return {address: f"clique-{n}" for n, group in enumerate(ordered) for address in group - {SWITCH}}


def _joined(peers: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Connected components of the graph of links."""
    groups: list[set[str]] = []
    for address, ends in peers.items():
        # Peers outside the node's GPUs (another tray, a GPU that failed) join nothing here.
        merged = {address, *(end for end in ends if end == SWITCH or end in peers)}
        apart = []
        for group in groups:
            if group & merged:
                merged |= group
            else:
                apart.append(group)
        groups = [*apart, merged]
    return groups


def _links_up(nvml: Any, handle: Any) -> Iterator[int]:
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        # None is not the end: numbers may have gaps where a board leaves links out.
        state = fact(nvml.nvmlDeviceGetNvLinkState, handle, link, absent=UNKNOWN_NUMBER)
        if state == pynvml.NVML_FEATURE_ENABLED:
            yield link


def _far_end(nvml: Any, handle: Any, link: int) -> str | None:
    """The PCI address of the GPU at the other end, or SWITCH; None for anything else."""
    kind = fact(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return SWITCH
    if kind != pynvml.NVML_NVLINK_DEVICE_TYPE_GPU:
        return None
    remote = fact(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return None if remote is None else pci_address(text(remote.busId))
