"""From an allocated claim to devices and their parameters: which entry counts, and which shares go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from driver.errors import ClaimError
from driver.model.device import Device, devices_of
from driver.model.gpu_settings import TimeSlice
from driver.slices.slice_names import Pool
from kubelet_plugin.claims.allocation import AllocatedDevice, resolve
from kubelet_plugin.inventory.inventory import Inventory
from tests.support.claims import DRIVER, NODE, ClaimApi, opaque, result
from tests.support.gpus import gpu_of

SMALL = "gpu-0-mig-1g10gb-6"


class SharedInventory(Inventory):
    """Two GPUs, each of which also has four shares."""

    def __init__(self) -> None:
        gpus = [gpu_of(minor=0), gpu_of(minor=1)]
        super().__init__(gpus, {gpu.uuid: gpu.minor for gpu in gpus})
        self._all = {device.name: device for gpu in gpus for device in devices_of(gpu, gpu.minor, shares=4)}

    def device(self, name: str) -> Device | None:
        return self._all.get(name)


def ours(kind: str, interval: str | None = None) -> dict[str, Any]:
    sharing = {"sharing": {"timeSlicing": {"interval": interval}}} if interval else {}
    return {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": kind, **sharing}


def theirs(interval: str) -> dict[str, Any]:
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}
    return {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}


def resolved(*devices: str | dict[str, Any], config: Any = ()) -> Sequence[AllocatedDevice]:
    api = ClaimApi()
    reference = api.allocate("work", *devices, config=config)
    claim = api.read(reference.namespace, reference.name)
    return resolve(reference, claim, Pool(node=NODE, driver=DRIVER), SharedInventory()).devices


def wish(device: str, *config: dict[str, Any], request: str = "gpu") -> TimeSlice | None:
    [allocated] = resolved(result(device, request), config=config)
    return allocated.time_slice


def test_without_parameters_there_is_no_wish() -> None:
    assert wish("gpu-0") is None
    assert wish(SMALL, opaque(ours("MigDeviceConfig"))) is None


def test_the_claim_is_heard_after_the_class_wherever_it_stands() -> None:
    by_class = opaque(ours("ShareConfig", "Long"), source="FromClass")
    by_claim = opaque(ours("ShareConfig", "Short"))
    assert wish("gpu-0-share-1", by_class) is TimeSlice.LONG
    assert wish("gpu-0-share-1", by_class, by_claim) is TimeSlice.SHORT
    assert wish("gpu-0-share-1", by_claim, by_class) is TimeSlice.SHORT


def test_the_later_entry_replaces_the_earlier_one_whole() -> None:
    earlier = opaque(ours("GpuConfig", "Long"))
    assert wish("gpu-0", earlier, opaque(ours("GpuConfig", "Medium"))) is TimeSlice.MEDIUM
    assert wish("gpu-0", earlier, opaque(ours("GpuConfig"))) is None


def test_an_entry_for_all_requests_counts_only_for_its_kind_of_device() -> None:
    for_all = [opaque(ours("GpuConfig", "Long")), opaque(ours("ShareConfig", "Short")), opaque(ours("MigDeviceConfig"))]
    found = resolved("gpu-1", result("gpu-0-share-0", "dev"), result(SMALL, "small"), config=for_all)
    assert [allocated.time_slice for allocated in found] == [TimeSlice.LONG, TimeSlice.SHORT, None]


def test_an_entry_counts_only_for_the_requests_it_names() -> None:
    config = [
        opaque(ours("ShareConfig", "Long"), requests=("a",)),
        opaque(ours("ShareConfig", "Short"), requests=("b",)),
    ]
    found = resolved(result("gpu-0-share-0", "a"), result("gpu-1-share-0", "b"), config=config)
    assert [allocated.time_slice for allocated in found] == [TimeSlice.LONG, TimeSlice.SHORT]


def test_another_drivers_parameters_are_not_looked_at() -> None:
    entry = opaque({"anything": 1})
    entry["opaque"]["driver"] = "dra.net"
    assert wish("gpu-0", entry) is None


@pytest.mark.parametrize(("chosen", "expected"), [("gpu-0-share-0", TimeSlice.SHORT), (SMALL, None)])
def test_each_alternative_may_carry_its_own_parameters(chosen: str, expected: TimeSlice | None) -> None:
    config = [
        opaque(ours("ShareConfig", "Short"), requests=("gpu/share",)),
        opaque(ours("MigDeviceConfig"), requests=("gpu/small",)),
    ]
    assert wish(chosen, *config, request="gpu/share" if "share" in chosen else "gpu/small") is expected


def test_parameters_for_all_alternatives_fit_those_they_are_for() -> None:
    for_the_base = opaque(ours("ShareConfig", "Short"), requests=("gpu",))
    assert wish("gpu-0-share-0", for_the_base, request="gpu/share") is TimeSlice.SHORT
    assert wish(SMALL, for_the_base, request="gpu/small") is None


@pytest.mark.parametrize(
    ("device", "kind", "expected"),
    [
        ("gpu-0", "ShareConfig", "ShareConfig is for devices of type share, gpu-0 has type gpu"),
        ("gpu-0-share-1", "GpuConfig", "GpuConfig is for devices of type gpu, gpu-0-share-1 has type share"),
        (
            "gpu-0-share-1",
            "MigDeviceConfig",
            "MigDeviceConfig is for devices of type mig, gpu-0-share-1 has type share",
        ),
        (SMALL, "ShareConfig", f"ShareConfig is for devices of type share, {SMALL} has type mig"),
    ],
)
@pytest.mark.parametrize("request_name", ["gpu", "gpu/first"])
def test_parameters_that_name_a_request_must_fit_its_device(
    device: str, kind: str, expected: str, request_name: str
) -> None:
    with pytest.raises(ClaimError, match=f"request {request_name}, FromClaim: {expected}"):
        wish(device, opaque(ours(kind), requests=(request_name,)), request=request_name)


def test_a_class_may_carry_parameters_for_every_kind_of_device() -> None:
    entries = [opaque(ours(kind), ("gpu",), source="FromClass") for kind in ("GpuConfig", "MigDeviceConfig")]
    share = opaque(ours("ShareConfig", "Short"), ("gpu",), source="FromClass")
    assert wish("gpu-0-share-1", *entries, share) is TimeSlice.SHORT
    assert wish("gpu-0", *entries, share) is None


def test_nvidias_gpu_config_counts_on_a_full_gpu_and_on_a_share_but_not_on_a_partition() -> None:
    assert wish("gpu-0", opaque(theirs("Medium"), requests=("gpu",))) is TimeSlice.MEDIUM
    assert wish("gpu-0-share-3", opaque(theirs("Medium"), requests=("gpu",))) is TimeSlice.MEDIUM
    with pytest.raises(ClaimError, match="GpuConfig is for devices of type gpu"):
        wish(SMALL, opaque(theirs("Medium"), requests=("gpu",)))


def test_a_claims_parameters_that_fit_none_of_its_devices_are_refused() -> None:
    # With one request the scheduler (1.37.1) leaves its name out of the allocation.
    with pytest.raises(
        ClaimError, match=r"FromClaim: .* for devices of type gpu, not for gpu-0-mig-1g10gb-6 \(type mig"
    ):
        wish(SMALL, opaque(ours("GpuConfig", "Long")))


def test_a_claims_parameters_may_be_for_an_alternative_that_was_not_chosen() -> None:
    assert wish(SMALL, opaque(ours("ShareConfig", "Long")), request="gpu/small") is None


def test_an_entry_that_is_replaced_must_be_valid_all_the_same() -> None:
    with pytest.raises(ClaimError, match=r"claim default/work, request gpu, FromClass: .*did you mean GpuConfig"):
        wish("gpu-0", opaque(ours("GpuConfg"), source="FromClass"), opaque(ours("GpuConfig")))


@pytest.mark.parametrize("requests", [("gpu", "gpu"), ("a", "b")])
def test_two_shares_of_one_gpu_are_refused_with_what_to_ask_for(requests: tuple[str, str]) -> None:
    devices = [result(f"gpu-0-share-{index}", request) for index, request in enumerate(requests)]
    with pytest.raises(ClaimError, match="gpu-0-share-0 and gpu-0-share-1 are shares of one GPU") as refused:
        resolved(*devices)
    assert f"claim default/work, request {', '.join(dict.fromkeys(requests))}: " in str(refused.value)
    for remedy in ("one share", "fewer shares", "a partition", "a full GPU", f"distinctAttribute: {DRIVER}/parentUUID"):
        assert remedy in str(refused.value)


def test_shares_of_different_gpus_go_together() -> None:
    found = resolved("gpu-0-share-0", "gpu-1-share-0")
    assert [allocated.device.name for allocated in found] == ["gpu-0-share-0", "gpu-1-share-0"]


def test_a_device_that_serves_two_requests_is_prepared_once_for_both() -> None:
    [allocated] = resolved(result(SMALL, "a/x"), result(SMALL, "b"))
    assert allocated.requests == ("a", "b")
