"""What people select by: on the real scheduler every attribute leads to a device that has it, and to no other."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from driver.model.gpu import Gpu
from driver.simulator.description import NodeDescription, load_description
from tests.harness.cluster import Cluster
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.nic_driver import NIC_CLASS, NIC_DRIVER, nic_class, nic_device, nic_slice
from tests.support.plugin import SLICES
from tests.support.published import DRIVER, devices_in, discover, slices_of
from tests.support.scheduling import Scheduling, asked, matching

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

DOCS = Path(__file__).parents[2] / "docs" / "attributes.md"
NODES = ("a100-pcie-bridged", "dgx-a100", "dgx-h100", "gb200-nvl72-tray", "l40s-8", "rtx-pro-6000-8")
NUMBERS = itertools.count()
OLD_NODE = "old-t4"
"""Differs in what all the others have in common: driver, ECC, PCIe, and that its GPUs count as real ones."""

FULL = "gpu-training"
PARTITION = "gpu-inference"

EMPTY = '""'
"""CEL's empty string."""

Values = dict[str, Any]
"""Attributes and capacities of a device by name."""


@dataclass(frozen=True)
class Published:
    """What the nodes offer: the values of each device, by pool and name."""

    devices: dict[tuple[str, str], Values]

    def of(self, node: str) -> list[Values]:
        return [values for (pool, _), values in self.devices.items() if pool == f"{node}-{DRIVER}"]


def old_node() -> NodeDescription:
    changes = {"driver_version": "550.54.15", "cuda_driver_version": "12.4", "ecc": False}
    return load_description("t4-4").replaced(**changes)


def gpus_of(node: str, root: Path) -> list[Gpu]:
    if node == OLD_NODE:
        return [replace(gpu, simulated=False, pcie_width=8) for gpu in discover(old_node(), root)]
    return list(discover(load_description(node), root))


def values_of(device: dict[str, Any]) -> Values:
    attributes = {name: next(iter(value.values())) for name, value in device["attributes"].items()}
    return attributes | {name: quantity(entry["value"]) for name, entry in device.get("capacity", {}).items()}


def quantity(written: str) -> int:
    """The number a quantity with a binary suffix stands for."""
    digits = written.rstrip("KMGTi")
    return int(digits) << 10 * ["", "Ki", "Mi", "Gi", "Ti"].index(written[len(digits) :])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("attributes") as running:
        install(running)
        running.apply(nic_class())
        yield running


@pytest.fixture(scope="module")
def published(cluster: Cluster) -> Published:
    """The slices of one node of each kind, and those of the NIC driver on the same nodes."""
    found: dict[tuple[str, str], Values] = {}
    for node in (*NODES, OLD_NODE):
        cluster.add_node_object(node)
        with tempfile.TemporaryDirectory() as folder:
            slices = slices_of(node, gpus_of(node, Path(folder)))
            nics = nic_slice(node, Path(folder))
        for item in [*slices, nics] if nics["spec"]["devices"] else slices:
            cluster.api.post(SLICES, item)
            pool = item["spec"]["pool"]["name"]
            found.update({(pool, device["name"]): values_of(device) for device in devices_in([item])})
    return Published(found)


@pytest.fixture
def scheduling(cluster: Cluster, published: Published) -> Iterator[Scheduling]:
    # A late write of the scheduler must not reach a claim of the next test, so no name is used twice.
    asking = Scheduling(cluster, f"wanted-{next(NUMBERS)}")
    yield asking
    asking.forget()


@dataclass(frozen=True)
class Wish:
    """A request for devices of which ``attribute`` is what ``selector`` (CEL) and ``wanted`` (Python) both say."""

    attribute: str
    selector: str
    wanted: Callable[[Any], bool]
    device_class: str = FULL

    def __str__(self) -> str:
        return self.attribute


def own(attribute: str) -> str:
    return f'device.attributes["{DRIVER}"].{attribute}'


def standard(attribute: str) -> str:
    return f'device.attributes["resource.kubernetes.io"].{attribute}'


def maybe(attribute: str, otherwise: str) -> str:
    """An attribute that some devices lack."""
    return f'device.attributes["{DRIVER}"].?{attribute}.orValue({otherwise})'


def among(selector: str, *products: str) -> str:
    names = ", ".join(f'"{name}"' for name in products)
    return f"{own('productName')} in [{names}] && {selector}"


UUID = "GPU-373ffd95-4762-50ff-b063-bb7c0efcc2d6"
"""Of GPU 5 of the simulated DGX H100: a node's name and an index always give the same UUID."""

WISHES = (
    Wish("type", f'{own("type")} == "mig"', lambda kind: kind == "mig", PARTITION),
    Wish("profile", f'{own("profile")} == "2g.20gb"', lambda name: name == "2g.20gb", PARTITION),
    Wish("productName", f'{own("productName")} == "NVIDIA L40S"', lambda name: name == "NVIDIA L40S"),
    Wish("architecture", f'{own("architecture")} == "Hopper"', lambda name: name == "Hopper"),
    Wish(
        "cudaComputeCapability",
        f'{own("cudaComputeCapability")}.compareTo(semver("12.0.0")) >= 0',
        lambda version: version == "12.0.0",
    ),
    Wish("memorySlices", f"{own('memorySlices')} == 12", lambda slices: slices == 12),
    Wish("simulated", f"!{own('simulated')}", lambda simulated: simulated is False),
    Wish(
        "resource.kubernetes.io/pciBusID",
        f'{standard("pciBusID")} == "0000:cb:00.0"',
        lambda address: address == "0000:cb:00.0",
    ),
    Wish(
        "resource.kubernetes.io/pcieRoot", f'{standard("pcieRoot")} == "pci0000:b1"', lambda root: root == "pci0000:b1"
    ),
    Wish(
        "resource.kubernetes.io/numaNode",
        'device.attributes["resource.kubernetes.io"].?numaNode.orValue(-1) == 7',
        lambda node: node == 7,
    ),
    Wish("uuid", f'{own("uuid")} == "{UUID}"', lambda uuid: uuid == UUID),
    Wish("brand", f'{own("brand")} == "NvidiaRTX"', lambda brand: brand == "NvidiaRTX"),
    Wish(
        "driverVersion",
        f'{own("driverVersion")}.isLessThan(semver("570.0.0"))',
        lambda version: version == "550.54.15",
    ),
    Wish(
        "cudaDriverVersion",
        f'{own("cudaDriverVersion")}.isLessThan(semver("13.0.0"))',
        lambda version: version == "12.4.0",
    ),
    Wish("memoryType", f'{maybe("memoryType", EMPTY)}.startsWith("HBM")', lambda kind: kind.startswith("HBM")),
    Wish("memoryBandwidth", f"{maybe('memoryBandwidth', '0')} >= 8000", lambda rate: rate >= 8000),
    Wish("nvlinkClique", f'{maybe("nvlinkClique", EMPTY)} == "clique-1"', lambda clique: clique == "clique-1"),
    Wish("nvlinkGeneration", f"{maybe('nvlinkGeneration', '0')} == 4", lambda generation: generation == 4),
    Wish("nvlinkLinks", f"{maybe('nvlinkLinks', '0')} > 12", lambda links: links > 12),
    Wish("nvlinkBandwidth", f"{maybe('nvlinkBandwidth', '0')} >= 1800", lambda rate: rate >= 1800),
    Wish(
        "fabricClique",
        f'{maybe("fabricClique", EMPTY)} == "5f3c9d2e-7a41-4b8e-9c60-1d2e3f4a5b6c.2"',
        lambda clique: clique == "5f3c9d2e-7a41-4b8e-9c60-1d2e3f4a5b6c.2",
    ),
    Wish("pcieGeneration", f"{maybe('pcieGeneration', '0')} == 3", lambda generation: generation == 3),
    Wish("pcieWidth", f"{maybe('pcieWidth', '0')} < 16", lambda width: width == 8),
    Wish("migCapable", f"!{own('migCapable')}", lambda capable: capable is False),
    Wish("migMode", f'{own("migMode")} == "unsupported"', lambda mode: mode == "unsupported"),
    Wish("ecc", f"!{maybe('ecc', 'true')}", lambda ecc: ecc is False),
    Wish("parentUUID", f'{own("parentUUID")} == "{UUID}"', lambda uuid: uuid == UUID, PARTITION),
    Wish("computeSlices", f"{own('computeSlices')} == 4", lambda slices: slices == 4, PARTITION),
    Wish("placementStart", f"{own('placementStart')} == 6", lambda start: start == 6, PARTITION),
    Wish("placementSize", f"{own('placementSize')} == 2", lambda size: size == 2, PARTITION),
    Wish(
        "memory",
        f'device.capacity["{DRIVER}"].memory.compareTo(quantity("40G")) >= 0',
        lambda size: size >= 40 * 10**9,
        PARTITION,
    ),
    Wish(
        "multiprocessors",
        f'device.capacity["{DRIVER}"].?multiprocessors.orValue(quantity("0")).compareTo(quantity("140")) >= 0',
        lambda count: count >= 140,
    ),
)


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_a_selector_on_an_attribute_gets_a_device_that_has_it(
    scheduling: Scheduling, published: Published, wish: Wish
) -> None:
    kind = "gpu" if wish.device_class == FULL else "mig"
    values = {
        key: device.get(wish.attribute) for key, device in published.devices.items() if device.get("type") == kind
    }
    fitting = {key for key, value in values.items() if value is not None and wish.wanted(value)}
    assert fitting
    # Of all partitions "type" can say one thing only; everything else tells some devices from others.
    assert len(fitting) < len(values) or wish.attribute == "type"
    scheduling.ask(asked(wish.device_class, wish.selector))
    [given] = scheduling.given()
    assert (given.pool, given.device) in fitting


def test_every_documented_attribute_and_capacity_is_selected_by() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", DOCS.read_text(), re.MULTILINE)
    # Nodes without --shares and --shared have none; test_classes.py and test_shared_gpus.py select by them. Claims
    # consume clients without asking for them (test_conformance_allocator.py).
    assert {wish.attribute for wish in WISHES} | {"shares", "memoryLimit", "clients"} == set(rows)


def test_hbm_only_is_refused_where_there_is_none(scheduling: Scheduling) -> None:
    hbm = f'{maybe("memoryType", EMPTY)}.startsWith("HBM")'
    scheduling.ask(asked(FULL, hbm), node="l40s-8")
    assert "cannot allocate all claims" in scheduling.refused()


@pytest.mark.parametrize("node", ["dgx-h100", "dgx-a100", "l40s-8"])
def test_a_gpu_of_at_least_40_gb(scheduling: Scheduling, published: Published, node: str) -> None:
    scheduling.ask(asked(FULL, f'device.capacity["{DRIVER}"].memory.compareTo(quantity("40G")) >= 0'), node=node)
    [given] = scheduling.given()
    assert published.devices[given.pool, given.device]["memory"] >= 40 * 10**9


def test_at_least_40_gb_is_refused_where_gpus_are_smaller(scheduling: Scheduling, published: Published) -> None:
    assert max(values["memory"] for values in published.of(OLD_NODE)) < 40 * 10**9
    scheduling.ask(asked(FULL, f'device.capacity["{DRIVER}"].memory.compareTo(quantity("40G")) >= 0'), node=OLD_NODE)
    assert "cannot allocate all claims" in scheduling.refused()


CLIQUE = matching(f"{DRIVER}/nvlinkClique")


def test_four_gpus_of_one_nvlink_clique(scheduling: Scheduling, published: Published) -> None:
    scheduling.ask(asked(FULL, count=4), constraints=[CLIQUE])
    given = scheduling.given()
    assert len({each.device for each in given}) == 4
    [pool] = {each.pool for each in given}
    [clique] = {published.devices[pool, each.device]["nvlinkClique"] for each in given}
    assert clique == "clique-0"


@pytest.mark.parametrize("node", ["dgx-h100", "dgx-a100", "gb200-nvl72-tray"])
def test_all_gpus_behind_nvswitches_are_one_clique(scheduling: Scheduling, published: Published, node: str) -> None:
    count = len([values for values in published.of(node) if values["type"] == "gpu"])
    scheduling.ask(asked(FULL, count=count), constraints=[CLIQUE], node=node)
    assert len(scheduling.given()) == count


def test_a_bridge_joins_two_gpus(scheduling: Scheduling, published: Published) -> None:
    scheduling.ask(asked(FULL, count=2), constraints=[CLIQUE], node="a100-pcie-bridged")
    given = scheduling.given()
    assert len({published.devices[each.pool, each.device]["nvlinkClique"] for each in given}) == 1


def test_a_bridge_does_not_join_three_gpus(scheduling: Scheduling) -> None:
    scheduling.ask(asked(FULL, count=3), constraints=[CLIQUE], node="a100-pcie-bridged")
    assert "cannot allocate all claims" in scheduling.refused()


def test_gpus_without_nvlink_are_in_no_clique(scheduling: Scheduling) -> None:
    scheduling.ask(asked(FULL, count=2), constraints=[CLIQUE], node="l40s-8")
    assert "cannot allocate all claims" in scheduling.refused()


NUMA = matching("resource.kubernetes.io/numaNode")


def test_four_gpus_of_one_numa_node(scheduling: Scheduling, published: Published) -> None:
    # The one GPU asked for by address is on node 1, so the others have to be.
    last = asked(FULL, f'{standard("pciBusID")} == "0000:df:00.0"', name="last")
    scheduling.ask(last, asked(FULL, count=3, name="near"), constraints=[NUMA], node="dgx-h100")
    given = {each.device for each in scheduling.given()}
    assert given == {"gpu-4", "gpu-5", "gpu-6", "gpu-7"}
    assert {published.devices[f"dgx-h100-{DRIVER}", name]["resource.kubernetes.io/numaNode"] for name in given} == {1}


def test_five_gpus_of_one_numa_node_are_refused_where_there_are_four(scheduling: Scheduling) -> None:
    scheduling.ask(asked(FULL, count=5), constraints=[NUMA], node="dgx-h100")
    assert "cannot allocate all claims" in scheduling.refused()


ROOT = matching("resource.kubernetes.io/pcieRoot")


def nic(rdma_name: str) -> dict[str, Any]:
    return asked(NIC_CLASS, f'device.attributes["{NIC_DRIVER}"].rdmaDevice == "{rdma_name}"', name="nic")


@pytest.mark.parametrize(
    ("node", "rdma_name", "near"),
    [
        ("dgx-h100", "mlx5_0", {"gpu-0"}),
        ("dgx-h100", "mlx5_6", {"gpu-4"}),
        ("dgx-h100", "mlx5_11", {"gpu-7"}),
        ("dgx-a100", "mlx5_8", {"gpu-6", "gpu-7"}),
    ],
)
def test_a_nic_gets_a_gpu_of_its_own_pcie_root(
    scheduling: Scheduling, node: str, rdma_name: str, near: set[str]
) -> None:
    scheduling.ask(asked(FULL), nic(rdma_name), constraints=[ROOT], node=node)
    given = {each.request: each for each in scheduling.given()}
    assert (given["nic"].driver, given["nic"].device) == (NIC_DRIVER, nic_device(rdma_name))
    assert given["gpu"].driver == DRIVER
    assert given["gpu"].device in near


def test_any_gpu_and_any_nic_of_one_pcie_root(scheduling: Scheduling, published: Published) -> None:
    scheduling.ask(asked(FULL), asked(NIC_CLASS, name="nic"), constraints=[ROOT])
    given = scheduling.given()
    assert {each.driver for each in given} == {DRIVER, NIC_DRIVER}
    assert len({published.devices[each.pool, each.device]["resource.kubernetes.io/pcieRoot"] for each in given}) == 1


def test_a_partition_and_a_nic_of_one_pcie_root(scheduling: Scheduling) -> None:
    scheduling.ask(asked("gpu-inference-1g-10gb"), nic("mlx5_9"), constraints=[ROOT], node="dgx-h100")
    given = {each.request: each.device for each in scheduling.given()}
    assert given["gpu"].startswith("gpu-5-mig-1g10gb-")


def test_a_storage_nic_has_no_gpu_on_its_root(scheduling: Scheduling) -> None:
    scheduling.ask(asked(FULL), nic("mlx5_1"), constraints=[ROOT], node="dgx-h100")
    assert "cannot allocate all claims" in scheduling.refused()
