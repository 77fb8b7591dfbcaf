"""What a simulated node is made of, as data: ``data/nodes/*.yaml`` or a file of the user's.

A further node is one more YAML file; nothing in the code names a node. Its GPUs' properties come from the
product (:mod:`.products`), so a description says only what differs between two machines with the same GPU:
where things sit, what is linked with what, which driver runs.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import yaml
from msgspec import Meta

from driver.errors import UsageError

from .parts import Part, faults
from .products import Product, find_product, product_names

BusId = Annotated[str, Meta(pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")]
PcieRoot = Annotated[str, Meta(pattern=r"^pci[0-9a-f]{4,8}:[0-9a-f]{2}$")]
CpuList = Annotated[str, Meta(pattern=r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$")]
NodeName = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$")]
Uuid = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]

MAX_GPUS = 64
"""GPUs of one node."""

# Namespace of the GPUs' UUIDs: a node's name and an index always give the same UUID.
_GPU_NAMESPACE = uuid.UUID("6f0d3f0b-6a5e-5d43-9c1f-5f6d1f4f9a7e")


class NicDescription(Part, frozen=True, kw_only=True):
    """The NIC next to a GPU: same PCIe switch, same NUMA node."""

    pci_bus_id: BusId
    rdma_device: str


class Place(Part, frozen=True, kw_only=True):
    """Where a PCI device sits.

    ``bridges`` are the PCI bridges from the root bus down; two devices' common bridges decide how far apart
    they are. ``numa_node`` is -1 where the kernel knows none. ``cpus`` is the kernel's list, as "0-55,112-167".
    """

    pci_bus_id: BusId
    pcie_root: PcieRoot
    bridges: tuple[BusId, ...] = ()
    numa_node: Annotated[int, Meta(ge=-1)] = -1
    cpus: CpuList = ""


class GpuDescription(Place, frozen=True, kw_only=True):
    """One GPU and its place in the machine.

    GPUs of one ``nvlink_clique`` are NVLink peers. ``memory_numa_node`` is set only where the GPU's memory is
    a NUMA node of its own (Grace). ``nic`` is a NIC that shares the GPU's place; others are the node's ``nics``.
    """

    nvlink_clique: int | None = None
    memory_numa_node: int | None = None
    nic: NicDescription | None = None


class NodeNicDescription(Place, frozen=True, kw_only=True):
    """A NIC with a place of its own: shared by several GPUs, or near none."""

    rdma_device: str


class NvlinkDescription(Part, frozen=True, kw_only=True):
    """NVLink inside the node: links of each GPU, and where they end.

    At ``switches``, the node's own NVSwitches; at the rack's switch trays (``rack_switches``), which are no PCI
    devices of this node; or, with neither, at the GPUs of the same clique.
    """

    links: Annotated[int, Meta(ge=1, le=36)]
    switches: tuple[BusId, ...] = ()
    rack_switches: bool = False


class FabricDescription(Part, frozen=True, kw_only=True):
    """The NVLink domain: a zero cluster UUID is one node's own NVSwitches.

    ``healthy`` false is "no health reported", as driver 580 says of an HGX H100.
    """

    cluster_uuid: Uuid
    clique_id: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
    state: Literal["not-started", "in-progress", "completed"] = "completed"
    healthy: bool = False


class NodeDescription(Part, frozen=True, kw_only=True):
    """One node. ``product`` is the GPUs' name (``products.product_names``); all GPUs of a node are of one product.

    ``pcie_generation`` limits the GPUs' links to what the host can; ``addressing_mode`` and ``c2c`` (NVLink to a
    Grace CPU) say how GPU and CPU share memory.
    """

    name: NodeName
    serial: str = ""
    summary: str = ""
    product: str
    driver_version: Annotated[str, Meta(pattern=r"^\d{3}(\.\d+){1,2}$")]
    cuda_driver_version: Annotated[str, Meta(pattern=r"^\d{2}\.\d$")]
    pcie_generation: Annotated[int, Meta(ge=1, le=6)] | None = None
    ecc: bool = True
    addressing_mode: Literal["none", "hmm", "ats"] = "hmm"
    c2c: bool = False
    nvlink: NvlinkDescription | None = None
    fabric: FabricDescription | None = None
    gpus: Annotated[tuple[GpuDescription, ...], Meta(min_length=1, max_length=MAX_GPUS)]
    nics: tuple[NodeNicDescription, ...] = ()

    @property
    def gpu_product(self) -> Product:
        """The GPUs' product; known, because the description was checked."""
        product = find_product(self.product)
        if product is None:
            raise LookupError(self.product)
        return product

    @property
    def driver_major(self) -> int:
        """The driver's branch, as 580."""
        return int(self.driver_version.partition(".")[0])

    def gpu_uuid(self, index: int) -> str:
        """``GPU-...`` of the GPU at that index: always the same for one name and serial."""
        node = f"{self.name}/{self.serial}" if self.serial else self.name
        return f"GPU-{uuid.uuid5(_GPU_NAMESPACE, f'{node}/{index}')}"

    def to_json(self) -> dict[str, Any]:
        """The description as plain JSON values with camelCase keys; :func:`parse_description` reads it."""
        return cast("dict[str, Any]", msgspec.to_builtins(self))


def known_descriptions() -> dict[str, NodeDescription]:
    """The nodes that come with Tessera, by name, in order of name."""
    return {name: _built_in(name) for name in known_names()}


def known_names() -> list[str]:
    """Names of the nodes that come with Tessera, sorted; each is the name of its file too."""
    entries = (entry.name for entry in _nodes_folder().iterdir())
    return sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))


def _nodes_folder() -> Traversable:
    return files(__package__).joinpath("data", "nodes")


@cache
def _built_in(name: str) -> NodeDescription:
    text = _nodes_folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return parse_description(yaml.safe_load(text), f"{name} (built in)")


def load_description(text: str) -> NodeDescription:
    """The node that ``text`` names, or that the YAML file at path ``text`` describes.

    :raises UsageError: no such name or file, or the file breaks rules; all broken rules are listed
    """
    known = known_names()
    if text in known:
        return _built_in(text)
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"no simulated node {text!r}: neither a file nor one of the known names: {', '.join(known)}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"node description {text}: not readable as YAML: {error}") from error
    return parse_description(content, text)


def parse_description(content: object, source: str) -> NodeDescription:
    """A description from parsed YAML or JSON.

    :param source: where it came from, for the message
    :raises UsageError: naming each field that is wrong
    """
    lines = list(faults(NodeDescription, content))
    if isinstance(content, Mapping) and isinstance(product := content.get("product"), str):
        lines += _product_faults(product)
    if not lines:
        description = msgspec.convert(content, NodeDescription)
        lines += _bus_id_faults(description)
    if lines:
        raise UsageError(f"node description {source} is not valid:\n" + "\n".join(f"  {line}" for line in lines))
    return description


def _product_faults(name: str) -> Iterator[str]:
    product = find_product(name)
    if product is None:
        yield f"product: product {name!r} is unknown; known: {', '.join(product_names())}"
    elif product.mig_capable and not product.profiles:
        yield f"product: product {name!r}: geometry unknown (no public record of its placements)"


def _bus_id_faults(description: NodeDescription) -> Iterator[str]:
    bus_ids = [place.pci_bus_id for place in (*description.gpus, *description.nics)]
    bus_ids += [gpu.nic.pci_bus_id for gpu in description.gpus if gpu.nic]
    if twice := sorted({bus_id for bus_id in bus_ids if bus_ids.count(bus_id) > 1}):
        yield f"(the whole): one PCI bus id for two devices: {', '.join(twice)}"


def parse_gpu(content: dict[str, Any]) -> GpuDescription:
    """One GPU's place; without ``pcieRoot`` its root bus is the bus before its own.

    :raises UsageError: naming each field that is wrong
    """
    domain, _, rest = str(content.get("pciBusId", "")).partition(":")
    bus = rest.partition(":")[0]
    guessed = f"pci{domain}:{max(int(bus, 16) - 1, 0):02x}" if re.fullmatch("[0-9a-f]{2}", bus) else ""
    complete = {"pcieRoot": guessed} | content
    if lines := list(faults(GpuDescription, complete)):
        raise UsageError("GPU is not valid:\n" + "\n".join(f"  {line}" for line in lines))
    return msgspec.convert(complete, GpuDescription)
