"""Simulated NVML: how GPUs reach each other - NVLink, peer access, the NVLink fabric."""

# ruff: noqa: N802, N803
from __future__ import annotations

import ctypes
import uuid
from typing import Any

import pynvml

from .description import GpuDescription, NvlinkDescription
from .nvml_arguments import error, integer, pointer_to
from .nvml_device import pci_info
from .nvml_place import PlaceCalls
from .nvml_session import simulated

_NVSWITCH_DEVICE_ID = 0x22A310DE

# First driver branch that fills version 3 of the fabric struct.
_FABRIC_V3_SINCE = 580


# The function answers with an enum, not the generation: A100 says 5 (open-mpi/hwloc issue 658).
_VERSIONS = {
    2: pynvml.NVML_NVLINK_VERSION_2_0,
    3: pynvml.NVML_NVLINK_VERSION_3_1,
    4: pynvml.NVML_NVLINK_VERSION_4_0,
    5: pynvml.NVML_NVLINK_VERSION_5_0,
}

_FABRIC_STATES = {
    "not-started": pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED,
    "in-progress": pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS,
    "completed": pynvml.NVML_GPU_FABRIC_STATE_COMPLETED,
}

# "Degraded bandwidth: false" in a health mask whose other fields are not supported.
_FULL_BANDWIDTH = (
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_FALSE << pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW
)

# An estimate: everything but SLI.
_LACKING_CAPABILITIES = (pynvml.NVML_NVLINK_CAP_SLI_BRIDGE,)


class LinkCalls(PlaceCalls):
    """Links. They concern GPUs; a MIG device has none: NOT_SUPPORTED."""

    @simulated()
    def nvmlDeviceGetNvLinkState(self, device: Any, link: int) -> int:
        self.nvlink(device, link)
        enabled: int = pynvml.NVML_FEATURE_ENABLED
        return enabled

    @simulated()
    def nvmlDeviceGetNvLinkCapability(self, device: Any, link: int, capability: int) -> int:
        self.nvlink(device, link)
        if not 0 <= integer(capability) < pynvml.NVML_NVLINK_CAP_COUNT:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(integer(capability) not in _LACKING_CAPABILITIES)

    @simulated()
    def nvmlDeviceGetNvLinkVersion(self, device: Any, link: int) -> int:
        self.nvlink(device, link)
        return int(_VERSIONS[self.machine.product.nvlink_generation])

    @simulated()
    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int:
        nvlink = self.nvlink(handle, link)
        kinds = (pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)
        return int(kinds[_is_switched(nvlink)])

    @simulated()
    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: Any, link: int) -> Any:
        nvlink = self.nvlink(device, link)
        if nvlink.switches:
            return pci_info(nvlink.switches[integer(link) % len(nvlink.switches)], _NVSWITCH_DEVICE_ID)
        if nvlink.rack_switches:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        peers = self._peers(self.gpu(device))
        return pci_info(peers[integer(link) % len(peers)].pci_bus_id, self.machine.product.pci_device_id)

    @simulated()
    def nvmlDeviceGetP2PStatus(self, device1: Any, device2: Any, p2pIndex: int) -> int:
        first, second, caps = self.gpu(device1), self.gpu(device2), integer(p2pIndex)
        if first == second or not 0 <= caps < pynvml.NVML_P2P_CAPS_INDEX_UNKNOWN:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        linked = self.machine.gpus[second] in self._peers(first)
        needs_nvlink = caps in (pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_CAPS_INDEX_ATOMICS)
        # Over PCIe GPUs of one socket read and write each other; nothing crosses the sockets.
        near = self.ancestor(first, second) < pynvml.NVML_TOPOLOGY_SYSTEM
        status: int = (
            pynvml.NVML_P2P_STATUS_OK if linked or (near and not needs_nvlink) else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        )
        return status

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
        info.state = _FABRIC_STATES[fabric.state]
        # Captures of HGX H100 on driver 580 report no health: zero is "not supported" in every field.
        info.healthMask = _FULL_BANDWIDTH if fabric.healthy else 0
        if version == pynvml.nvmlGpuFabricInfo_v3:
            summary = (
                pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED,
                pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY,
            )
            info.healthSummary = summary[fabric.healthy]
        success: int = pynvml.NVML_SUCCESS
        return success

    def _fabric_struct(self, version: int) -> Any:
        if version == pynvml.nvmlGpuFabricInfo_v2:
            return pynvml.c_nvmlGpuFabricInfo_v2_t
        is_new_enough = self.machine.description.driver_major >= _FABRIC_V3_SINCE
        if version == pynvml.nvmlGpuFabricInfo_v3 and is_new_enough:
            return pynvml.c_nvmlGpuFabricInfo_v3_t
        raise error(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)

    def nvlink(self, handle: Any, link: int) -> NvlinkDescription:
        """The node's NVLinks, where the GPU has that link; INVALID_ARGUMENT or NOT_SUPPORTED elsewhere."""
        nvlink = self.machine.description.nvlink
        minor, number = self.gpu(handle), integer(link)
        if not 0 <= number < pynvml.NVML_NVLINK_MAX_LINKS:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if nvlink is None or not (_is_switched(nvlink) or self._peers(minor)):
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if number >= nvlink.links:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return nvlink

    def _peers(self, minor: int) -> list[GpuDescription]:
        gpus = self.machine.gpus
        clique = gpus[minor].nvlink_clique
        near = (gpus[other] for other in self.machine.present if other != minor)
        return [gpu for gpu in near if clique is not None and gpu.nvlink_clique == clique]


def _is_switched(nvlink: NvlinkDescription) -> bool:
    return bool(nvlink.switches) or nvlink.rack_switches
