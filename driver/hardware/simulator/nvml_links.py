"""Simulated NVML: how devices reach each other - NVLink, peer access, PCIe distance, the NVLink fabric."""

# ruff: noqa: N802, N803
from __future__ import annotations

import ctypes
import uuid
from itertools import takewhile
from typing import Any

import pynvml

from .description import GpuDescription, NvlinkDescription
from .nvml_arguments import error, integer, pointer_to
from .nvml_device import pci_info
from .nvml_session import NvmlSession, simulated

_NVSWITCH_DEVICE_ID = 0x22A310DE

# First driver branch that fills version 3 of the fabric struct.
_FABRIC_V3_SINCE = 580


class LinkCalls(NvmlSession):
    """Links and distances. They concern GPUs; a MIG device has none: NOT_SUPPORTED."""

    @simulated()
    def nvmlDeviceGetNvLinkState(self, device: Any, link: int) -> int:
        self._link(device, link)
        enabled: int = pynvml.NVML_FEATURE_ENABLED
        return enabled

    @simulated()
    def nvmlDeviceGetNvLinkVersion(self, device: Any, link: int) -> int:
        self._link(device, link)
        return self.machine.product.nvlink_generation

    @simulated()
    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int:
        nvlink = self._link(handle, link)
        kind: int = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if nvlink.switches else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
        return kind

    @simulated()
    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: Any, link: int) -> Any:
        nvlink = self._link(device, link)
        if nvlink.switches:
            return pci_info(nvlink.switches[integer(link) % len(nvlink.switches)], _NVSWITCH_DEVICE_ID)
        peers = self._peers(self.gpu(device))
        return pci_info(peers[integer(link) % len(peers)].pci_bus_id, self.machine.product.pci_device_id)

    @simulated()
    def nvmlDeviceGetP2PStatus(self, device1: Any, device2: Any, p2pIndex: int) -> int:
        first, second, caps = self.gpu(device1), self.gpu(device2), integer(p2pIndex)
        if first == second or not 0 <= caps < pynvml.NVML_P2P_CAPS_INDEX_UNKNOWN:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        linked = self.machine.description.gpus[second] in self._peers(first)
        needs_nvlink = caps in (pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_CAPS_INDEX_ATOMICS)
        # Over PCIe GPUs of one socket read and write each other; nothing crosses the sockets.
        near = self._ancestor(first, second) < pynvml.NVML_TOPOLOGY_SYSTEM
        status: int = (
            pynvml.NVML_P2P_STATUS_OK if linked or (near and not needs_nvlink) else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        )
        return status

    @simulated()
    def nvmlDeviceGetTopologyCommonAncestor(self, device1: Any, device2: Any) -> int:
        return self._ancestor(self.gpu(device1), self.gpu(device2))

    @simulated()
    def nvmlDeviceGetGpuFabricInfoV(self, device: Any, gpuFabricInfo: Any) -> int:
        self.gpu(device)
        fabric = self.machine.description.fabric
        version = pointer_to(ctypes.c_uint, gpuFabricInfo)[0]
        info = pointer_to(self._fabric_struct(version), gpuFabricInfo)[0]
        if fabric is None:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info.clusterUuid[:] = list(uuid.UUID(fabric.cluster_uuid).bytes)
        info.status, info.cliqueId = pynvml.NVML_SUCCESS, fabric.clique_id
        info.state = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
        # Captures of HGX H100 on driver 580 report no health: zero is "not supported" in every field.
        info.healthMask = 0
        success: int = pynvml.NVML_SUCCESS
        return success

    def _fabric_struct(self, version: int) -> Any:
        if version == pynvml.nvmlGpuFabricInfo_v2:
            return pynvml.c_nvmlGpuFabricInfo_v2_t
        is_new_enough = self.machine.description.driver_major >= _FABRIC_V3_SINCE
        if version == pynvml.nvmlGpuFabricInfo_v3 and is_new_enough:
            return pynvml.c_nvmlGpuFabricInfo_v3_t
        raise error(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)

    def _link(self, handle: Any, link: int) -> NvlinkDescription:
        """The node's NVLinks, where the GPU has that link; INVALID_ARGUMENT or NOT_SUPPORTED elsewhere."""
        nvlink = self.machine.description.nvlink
        minor, number = self.gpu(handle), integer(link)
        if not 0 <= number < pynvml.NVML_NVLINK_MAX_LINKS:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if nvlink is None or not (nvlink.switches or self._peers(minor)):
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if number >= nvlink.links:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return nvlink

    def _peers(self, minor: int) -> list[GpuDescription]:
        gpus = self.machine.description.gpus
        clique = gpus[minor].nvlink_clique
        return [gpu for gpu in gpus if clique is not None and gpu.nvlink_clique == clique and gpu != gpus[minor]]

    def _ancestor(self, first: int, second: int) -> int:
        return common_ancestor(self.machine.description.gpus[first], self.machine.description.gpus[second])


def common_ancestor(one: GpuDescription, other: GpuDescription) -> int:
    """``NVML_TOPOLOGY_*`` between two GPUs, from their places in the PCI tree and NUMA."""
    if one.pci_bus_id == other.pci_bus_id:
        level = pynvml.NVML_TOPOLOGY_INTERNAL
    elif one.pcie_root == other.pcie_root:
        pairs = zip(one.bridges, other.bridges, strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        # Two shared bridges are a root port and one switch below it; one is a root port with several.
        by_shared = (pynvml.NVML_TOPOLOGY_HOSTBRIDGE, pynvml.NVML_TOPOLOGY_MULTIPLE, pynvml.NVML_TOPOLOGY_SINGLE)
        level = by_shared[min(shared, 2)]
    elif one.numa_node == other.numa_node:
        level = pynvml.NVML_TOPOLOGY_NODE
    else:
        level = pynvml.NVML_TOPOLOGY_SYSTEM
    return int(level)
