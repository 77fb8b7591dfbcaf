"""What we offer is what the hardware takes: the occupancy rule against the simulated driver, for every MIG product."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.model.device import Device, devices_of
from driver.model.gpu import limits_of
from driver.placement.occupancy import GpuState
from driver.simulator import mig_rules
from driver.simulator.machine import SimulatedGpuState
from driver.simulator.products import Product, find_product
from tests.property.test_slices import PRODUCTS
from tests.support.gpus import gpu_of


def accepts(
    product: Product, state: SimulatedGpuState, profile_id: int, start: int, size: int
) -> SimulatedGpuState | None:
    """The state with one more instance, or None where the driver refuses it."""
    free = mig_rules.free_starts(product, state, product.by_id[profile_id])
    if start not in free:
        return None
    return mig_rules.create_gpu_instance(product, state, profile_id, (start, size))[0]


@pytest.mark.parametrize("name", PRODUCTS)
@settings(max_examples=30)
@given(st.data())
def test_a_device_fits_exactly_where_the_driver_cuts_it(name: str, data: st.DataObject) -> None:
    product, gpu = find_product(name), gpu_of(name)
    assert product is not None
    partitions = [device for device in devices_of(gpu, 0) if device.profile is not None]
    held: list[Device] = []
    state = SimulatedGpuState(mig_enabled=True, mig_pending=True)
    for device in data.draw(st.lists(st.sampled_from(partitions), max_size=10)):
        assert device.profile is not None
        assert device.placement is not None
        after = accepts(product, state, device.profile.id, device.placement.start, device.placement.size)
        assert GpuState.of(gpu, held).fits(device) == (after is not None), device.name
        if after is not None:
            held, state = [*held, device], after


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("NVIDIA H100 80GB HBM3", {"ofa-engines": 1}),
        ("NVIDIA A30", {"ofa-engines": 1}),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", {"ofa-engines": 1, "jpeg-engines": 4}),
        ("NVIDIA L40S", {}),
    ],
)
def test_only_what_memory_slices_do_not_keep_is_a_limit(name: str, limits: dict[str, int]) -> None:
    assert {limit.name: limit.total for limit in limits_of(gpu_of(name).profiles)} == limits
