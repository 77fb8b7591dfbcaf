"""Simulated NVML: field values, the way to facts that have no function of their own."""

# ruff: noqa: N802, N803
from __future__ import annotations

import time
from typing import Any

import pynvml

from .nvml_arguments import error
from .nvml_links import LinkCalls
from .nvml_session import simulated

# MB/s of one link and direction by NVLink generation, as `nvidia-smi nvlink -s` prints it (facts:
# gpu_products.json, "_about"). Generation 2 is an estimate.
LINK_SPEED_MBPS = {2: 25781, 3: 25781, 4: 26562, 5: 53125}

# Of one NVLink-C2C link; GH200 and GB200 show ten. Estimates.
_C2C_LINKS = 10
_C2C_MBPS = 44712

_SPEED_OF_LINK = {getattr(pynvml, f"NVML_FI_DEV_NVLINK_SPEED_MBPS_L{link}"): link for link in range(12)}


class FieldCalls(LinkCalls):
    """``nvmlDeviceGetFieldValues``: a field that the GPU lacks fails alone, in its own ``nvmlReturn``."""

    @simulated()
    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: Any) -> Any:
        self.gpu(handle)
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        if not values:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for value, wanted in zip(values, fieldIds, strict=True):
            try:
                value.fieldId, value.scopeId = wanted
            except TypeError:
                value.fieldId = wanted
            self._fill(handle, value)
        return values

    def _fill(self, handle: Any, value: Any) -> None:
        value.timestamp = time.time_ns() // 1000
        value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        try:
            value.value.uiVal = self._field(handle, value.fieldId, value.scopeId)
        except pynvml.NVMLError as failure:
            value.nvmlReturn = failure.value

    def _field(self, handle: Any, field: int, scope: int) -> int:
        """The field's value; the NVMLError that its ``nvmlReturn`` tells."""
        if field in _SPEED_OF_LINK:
            return self._speed(handle, _SPEED_OF_LINK[field])
        if field == pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON:
            return self._speed(handle, 0)
        if field == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED:
            return self._speed(handle, scope)
        if field == pynvml.NVML_FI_DEV_NVLINK_GET_STATE:
            return self.nvmlDeviceGetNvLinkState(handle, scope)
        if field == pynvml.NVML_FI_DEV_NVLINK_GET_VERSION:
            return self.nvmlDeviceGetNvLinkVersion(handle, scope)
        if field == pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT:
            return self.nvlink(handle, 0).links
        if field == pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
            return self._recovery_action(handle)
        return self._c2c_field(field)

    def _c2c_field(self, field: int) -> int:
        values = {
            pynvml.NVML_FI_DEV_C2C_LINK_COUNT: _C2C_LINKS,
            pynvml.NVML_FI_DEV_C2C_LINK_GET_STATUS: 1,
            pynvml.NVML_FI_DEV_C2C_LINK_GET_MAX_BW: _C2C_MBPS,
        }
        if not 0 < field < pynvml.NVML_FI_MAX:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if field not in values or not self.machine.description.c2c:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return values[field]

    def _recovery_action(self, handle: Any) -> int:
        if not self.machine.tells_recovery:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.machine.state(self.gpu(handle)).recovery_action

    def _speed(self, handle: Any, link: int) -> int:
        self.nvlink(handle, link)
        return LINK_SPEED_MBPS[self.machine.product.nvlink_generation]
