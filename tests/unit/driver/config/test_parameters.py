"""Parameters written for NVIDIA's driver keep their meaning, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from driver.config.opaque_parameters import (
    GpuConfig,
    InvalidParameters,
    MigDeviceConfig,
    MpsSettings,
    ShareConfig,
    SharedConfig,
    parse_parameters,
)
from driver.model.gpu_settings import TimeSlice
from driver.model.offer import DeviceKind


def theirs(kind: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, **fields}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, None, id="no sharing"),
        pytest.param({"sharing": {"strategy": "TimeSlicing"}}, TimeSlice.DEFAULT, id="no timeSlicingConfig"),
        pytest.param(
            {"sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {}}},
            TimeSlice.DEFAULT,
            id="empty timeSlicingConfig",
        ),
        pytest.param(
            {"sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": None}},
            TimeSlice.DEFAULT,
            id="timeSlicingConfig is null",
        ),
        pytest.param(
            {"sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}},
            TimeSlice.LONG,
            id="interval",
        ),
    ],
)
@pytest.mark.parametrize(
    ("device", "kind"), [(DeviceKind.FULL, GpuConfig), (DeviceKind.SHARE, ShareConfig), (None, GpuConfig)]
)
def test_gpu_config_is_ours_and_on_a_share_it_is_a_share_config(
    fields: dict[str, Any], expected: TimeSlice | None, device: DeviceKind | None, kind: type
) -> None:
    ours = parse_parameters(theirs("GpuConfig", **fields), "here", device)
    assert type(ours) is kind
    assert ours.time_slice is expected


def test_mig_device_config_is_ours() -> None:
    assert type(parse_parameters(theirs("MigDeviceConfig"), "here")) is MigDeviceConfig


NO_MPS = "MPS is for shared devices (kind SharedConfig), which several claims hold at once"
NO_MEMORY = "the memory of a claim is its limit: request it as capacity of the device, not here"
ALL_USERS = "an MPS server serves all users wherever the driver can do that"
PERCENTAGE = "accepted: defaultActiveThreadPercentage"
FIELD = "timeSlicingConfig"
KINDS = "accepted: GpuConfig, MigDeviceConfig"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(
            theirs("GpuConfig", sharing={"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "10Gi"}}),
            [f'sharing.mpsConfig.defaultPinnedDeviceMemoryLimit "10Gi": {NO_MEMORY}; {PERCENTAGE}'],
            id="a limit on memory",
        ),
        pytest.param(
            theirs("GpuConfig", sharing={"mpsConfig": {"defaultActiveThreadPercentage": 0, "multiUser": True}}),
            [
                "sharing.mpsConfig.defaultActiveThreadPercentage 0: must be a whole number from 1 to 100",
                f"sharing.mpsConfig.multiUser true: {ALL_USERS}; {PERCENTAGE}",
            ],
            id="settings of MPS",
        ),
        pytest.param(
            theirs("MigDeviceConfig", sharing={"strategy": "MPS"}),
            [f"sharing {{...}}: {NO_MPS}; this kind has no settings"],
            id="MPS on a partition",
        ),
        pytest.param(
            theirs("VfioDeviceConfig", iommu={"backendPolicy": "x"}),
            [f'kind "VfioDeviceConfig": passing a GPU through to a virtual machine is not supported; {KINDS}'],
            id="VFIO",
        ),
        pytest.param(
            theirs("ShareConfig"),
            [f'kind "ShareConfig": is a kind of gpu.tessera.dev/v1alpha1; {KINDS}'],
            id="our kind under their version",
        ),
        pytest.param(
            theirs("GpuConfig", sharing={"timeSlicing": {}}),
            [f"sharing.timeSlicing {{}}: no such field; accepted: strategy, {FIELD}, mpsConfig; did you mean {FIELD}?"],
            id="our field in their kind",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(raw: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(InvalidParameters) as refused:
        parse_parameters(raw, "here")
    assert [str(fault) for fault in refused.value.faults] == expected


MPS = theirs("GpuConfig", sharing={"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}})


@pytest.mark.parametrize("device", [DeviceKind.SHARED, None])
def test_mps_is_accepted_for_shared_devices(device: DeviceKind | None) -> None:
    assert parse_parameters(MPS, "here", device) == SharedConfig("MPS", MpsSettings(50))


def test_time_slicing_on_a_shared_device_keeps_its_interval() -> None:
    raw = theirs("GpuConfig", sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})
    assert parse_parameters(raw, "here", DeviceKind.SHARED).time_slice is TimeSlice.LONG


@pytest.mark.parametrize("device", [DeviceKind.FULL, DeviceKind.SHARE])
def test_mps_is_refused_for_other_devices(device: DeviceKind) -> None:
    with pytest.raises(InvalidParameters) as refused:
        parse_parameters(MPS, "here", device)
    assert [str(fault) for fault in refused.value.faults] == [
        f'sharing.strategy "MPS": {NO_MPS}; accepted: TimeSlicing',
        f"sharing.mpsConfig {{...}}: {NO_MPS}; leave it out",
    ]


def test_settings_of_the_other_strategy_are_refused() -> None:
    raw = theirs("GpuConfig", sharing={"strategy": "TimeSlicing", "mpsConfig": {"defaultActiveThreadPercentage": 50}})
    with pytest.raises(InvalidParameters, match=r"sharing\.mpsConfig {\.\.\.}: sharing\.strategy is TimeSlicing"):
        parse_parameters(raw, "here", DeviceKind.SHARED)
