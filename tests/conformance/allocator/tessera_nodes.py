"""Slices as Tessera's node plugin publishes them, and Tessera's classes, with the driver name of a scenario."""

from __future__ import annotations

from pathlib import Path
from random import Random

import yaml

from driver.model.gpu_settings import GpuSharing
from driver.slices.build import SliceBuilder, slice_object
from driver.slices.slice_names import Pool
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.inventory.published_devices import PublishPolicy
from tests.conformance.allocator.devices import Object, device_class
from tests.support.gpus import gpu_of

PRODUCTS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA L40S")
CLASSES = Path(__file__).parents[3] / "deploy" / "tessera" / "classes"
PROFILES = ("1g.10gb", "1g.5gb", "3g.40gb", "3g.20gb", "7g.80gb")
ATTRIBUTES = ("parentUUID", "uuid", "productName", "profile", "resource.kubernetes.io/pcieRoot")
"""Of constraints."""

SELECTORS = (
    'device.attributes["{driver}"].memorySlices >= 2',
    'device.attributes["{driver}"].?profile.orValue("") in ["1g.10gb", "2g.20gb", "2g.10gb"]',
    'device.capacity["{driver}"].memory.compareTo(quantity("15Gi")) > 0',
    'device.attributes["{driver}"].architecture == "Hopper"',
    'device.attributes["{driver}"].type != "share"',
)


def tessera_slices(random: Random, node: str, driver: str) -> list[Object]:
    """The slices of an idle node of one to three GPUs, which publishes everything."""
    gpus = [gpu_of(random.choice(PRODUCTS), minor) for minor in range(random.randint(1, 3))]
    shares = random.choice((1, 2, 4))
    inventory = Inventory(gpus, {gpu.uuid: gpu.minor for gpu in gpus}, GpuSharing(lambda _: shares))
    pool = Pool(node, driver)
    built = SliceBuilder(pool).build(inventory.published(PublishPolicy(complete=True)))
    return [slice_object(name, content, pool, 1, len(built), None) for name, content in built.items()]


def tessera_classes(number: int, driver: str) -> list[Object]:
    """The chart's classes, except those that the kept answers are without, and one that fails for full GPUs."""
    expressions = {
        each["metadata"]["name"]: each["spec"]["selectors"][0]["cel"]["expression"]
        for path in sorted(CLASSES.glob("*.yaml"))
        if path.stem not in {"gpu-monitor", "gpu-training-nvlink", "gpu-shared"}
        for each in yaml.safe_load_all(path.read_text())
    }
    ours = 'device.driver == "gpu.tessera.dev" && device.attributes["gpu.tessera.dev"]'
    for profile in PROFILES:
        guarded = f'{ours}.type == "mig" && device.attributes["gpu.tessera.dev"].profile == "{profile}"'
        expressions[f"profile-{profile.replace('.', '-')}"] = guarded
    expressions = {"any": 'device.driver == "gpu.tessera.dev"', **expressions}
    expressions["fails"] = f'{ours}.profile == "1g.10gb"'
    return [
        device_class(f"s{number}-{name}", expression.replace("gpu.tessera.dev", driver))
        for name, expression in expressions.items()
    ]
