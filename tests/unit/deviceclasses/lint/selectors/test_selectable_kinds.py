"""The kinds of devices that partial evaluation lets pass, against devices that a selector accepts."""

from __future__ import annotations

from collections import Counter

import pytest

from deviceclasses.cel.engine import CelDevice, from_slice_device
from deviceclasses.lint.selectors.selectable_kinds import compiled_programs, may_select
from driver.model.device import Device, devices_of
from driver.model.gpu_settings import SharedProfiles
from driver.model.offer import OF_SEVERAL, DeviceKind
from driver.model.shared_memory import GIB, SHARING_FIELD, SharedMemory, SharingStrategy
from driver.slices.attributes import attributes, capacity
from tests.conformance import table
from tests.support.gpus import gpu_of
from tests.support.linting import DRIVER, OURS, TYPE, claim, device_class, found, request_for

EXPRESSIONS = [row.expression for row in table.read().values() if "lists.range(" not in row.expression]
"""Without those that only cost time: some count to a million."""
PRODUCTS = ("NVIDIA H100 80GB HBM3", "NVIDIA A30", "NVIDIA L4")


def published(device: Device) -> CelDevice:
    entry = {"name": device.name, "attributes": attributes(device), "capacity": capacity(device)}
    return from_slice_device(DRIVER, {**entry, SHARING_FIELD: device.kind in OF_SEVERAL})


SHARED = SharedMemory(SharingStrategy.TIME_SLICING, 20 * GIB)
PROFILES = SharedProfiles.parse("1c.3g.40gb,2c.4g.40gb,1c.2g.12gb")
GPUS = [gpu for name in PRODUCTS for gpu in (gpu_of(name), PROFILES.applied_to(gpu_of(name), {}))]
EVERY = [device for gpu in GPUS for device in devices_of(gpu, 0, shares=2, shared=SHARED)]
DEVICES = [
    (each.kind, published(each))
    for each in {(each.gpu.product_name, each.kind, each.profile): each for each in EVERY}.values()
]


@pytest.mark.long
def test_a_kind_of_which_some_device_passes_is_never_kept_out() -> None:
    passing: Counter[DeviceKind] = Counter()
    for program in compiled_programs(EXPRESSIONS):
        kinds = {kind for kind, device in DEVICES if program.verdict(device) is True}
        assert kinds <= may_select((program.expression,), DRIVER), program.expression
        passing.update(kinds)
    assert min(passing[kind] for kind in DeviceKind) > 20


@pytest.mark.slow
def test_no_expression_that_a_cluster_was_asked_about_is_too_odd() -> None:
    for expression in EXPRESSIONS:
        found(device_class("any", expression), claim(request_for("gpu-inference", expression)))


@pytest.mark.parametrize(
    ("expression", "kinds"),
    [
        ("true", "gpu mig mig-shared share shared"),
        ("false", ""),
        (OURS, "gpu mig mig-shared share shared"),
        ('device.driver == "dra.net"', ""),
        (f'{OURS} && {TYPE} in ["gpu", "shared"]', "gpu shared"),
        ('device.attributes["gpu.tessera.dev"].profile != "none"', "mig mig-shared"),
        ('device.attributes["gpu.tessera.dev"].profile == "1g.99gb"', "mig"),
        ('device.attributes["gpu.tessera.dev"].profile.endsWith("b+me")', "mig"),
        ('device.attributes["gpu.tessera.dev"].?brand.orValue("") == "Nvidia"', "gpu"),
        ('has(device.attributes["gpu.tessera.dev"].parentUUID)', "mig mig-shared share shared"),
        ('device.capacity["gpu.tessera.dev"].?memory.hasValue()', "gpu mig shared"),
        (f"{OURS} && device.allowMultipleAllocations", "mig-shared shared"),
        ("device.attributes.size() > 7", "gpu mig mig-shared share shared"),
        ('device.attributes["gpu.tessera.dev"].exists(name, name == "ecc")', "gpu mig mig-shared share shared"),
    ],
)
def test_only_a_plain_no_keeps_a_kind_out(expression: str, kinds: str) -> None:
    assert sorted(may_select((expression,), DRIVER)) == kinds.split()
