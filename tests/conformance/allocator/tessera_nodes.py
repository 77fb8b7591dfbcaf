"""Slices as Tessera's node plugin publishes them, and Tessera's classes, with the driver name of a scenario."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from uuid import UUID

import yaml

from deviceclasses.chart_classes import FULL_GPU, SHARED_GPU
from driver.model.gpu_settings import GpuSharing
from driver.model.shared_memory import SharingStrategy
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


def tessera_slices(random: Random, node: str, driver: str, *, shared: bool) -> list[Object]:
    """The slices of an idle node of one to three GPUs, which publishes everything. ``shared``: by memory, too."""
    gpus = [gpu_of(random.choice(PRODUCTS), minor) for minor in range(random.randint(1, 3))]
    shares = random.choice((1, 2, 4))
    strategy = random.choice(list(SharingStrategy)) if shared else None
    sharing = GpuSharing(lambda _: shares, strategy_of=lambda _: strategy)
    inventory = Inventory(gpus, {gpu.uuid: gpu.minor for gpu in gpus}, sharing)
    pool = Pool(node, driver)
    built = SliceBuilder(pool).build(inventory.published(PublishPolicy(complete=True)))
    return [slice_object(name, content, pool, 1, len(built), None) for name, content in built.items()]


def parts_held(random: Random, slices: Sequence[Object]) -> list[Object]:
    """Results of claims that have parts of shared GPUs, and seldom of one that has another device."""
    found: list[Object] = []
    for each in slices:
        for entry in each["spec"].get("devices") or ():
            where = {"driver": each["spec"]["driver"], "pool": each["spec"]["pool"]["name"], "device": entry["name"]}
            if not entry.get("allowMultipleAllocations"):
                found += [where] if random.random() < 0.002 else []
                continue
            for _ in range(random.choice((0, 0, 1, 2, 4))):
                admin = {"adminAccess": True} if random.random() < 0.1 else {}
                amount = random.choice(("1Gi", "1Gi", "6Gi", "6Gi", "20Gi"))
                found.append({**where, **admin, "shareID": share_id(random), "consumedCapacity": {"memory": amount}})
    return [{"request": f"r{number}", **each} for number, each in enumerate(found[:16])]


def share_id(random: Random) -> str:
    """A UUID."""
    return str(UUID(int=random.getrandbits(128)))


def tessera_classes(number: int, driver: str, *, shared: bool) -> list[Object]:
    """The chart's classes, except those that the kept answers are without, and one that fails for full GPUs.

    ``shared``: that of shared GPUs first, and few others.
    """
    expressions = {
        each["metadata"]["name"]: each["spec"]["selectors"][0]["cel"]["expression"]
        for path in sorted(CLASSES.glob("*.yaml"))
        if path.stem
        not in {"gpu-monitor", "gpu-training-nvlink", "gpu-compute-instance", *(() if shared else (SHARED_GPU,))}
        for each in yaml.safe_load_all(path.read_text())
    }
    ours = 'device.driver == "gpu.tessera.dev" && device.attributes["gpu.tessera.dev"]'
    for profile in PROFILES:
        guarded = f'{ours}.type == "mig" && device.attributes["gpu.tessera.dev"].profile == "{profile}"'
        expressions[f"profile-{profile.replace('.', '-')}"] = guarded
    expressions = {"any": 'device.driver == "gpu.tessera.dev"', **expressions}
    if shared:
        expressions = {name: expressions[name] for name in (SHARED_GPU, "any", FULL_GPU)}
    expressions["fails"] = f'{ours}.profile == "1g.10gb"'
    return [
        device_class(f"s{number}-{name}", expression.replace("gpu.tessera.dev", driver))
        for name, expression in expressions.items()
    ]
