"""Descriptions of simulated nodes: ``data/nodes/*.yaml`` or a file of the user.

A new node is one more YAML file. The properties of its GPUs come from the product (:mod:`.products`), so a description
contains only what differs between two machines with the same GPU: PCI places, links, and the driver version.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import msgspec
import pynvml
import yaml
from msgspec import Meta

from driver.config.libyaml_loader import read_yaml
from driver.config.suggestions import meant
from driver.errors import UsageError
from driver.simulator.products import Product, find_product, product_names, read_product


class Part(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A frozen object of a description. Fields are in camelCase; unknown fields are errors."""

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields, without validation."""
        return msgspec.structs.replace(self, **changes)


def validation_errors(kind: type[Part], content: object, place: str = "") -> Iterator[str]:
    """Yield a line for each field of ``content`` (parsed YAML or JSON) that is invalid for a ``kind``."""
    # msgspec itself stops at the first error.
    if not isinstance(content, Mapping):
        yield f"{place or '(the whole)'}: must be an object"
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for name, field in fields.items():
        path = f"{place}.{name}".removeprefix(".")
        if name in content:
            yield from _value_errors(field.type, content[name], path)
        elif field.required:
            yield f"{path}: is missing"
    for name in content:
        if name not in fields:
            yield f"{place}.{name}: no such field; accepted: {', '.join(fields)}".removeprefix(".")


def _value_errors(type_: Any, value: object, path: str) -> Iterator[str]:
    plain = get_args(type_)[0] if get_origin(type_) is Annotated else type_
    kinds = [part for part in (plain, *get_args(plain)) if isinstance(part, type) and issubclass(part, Part)]
    inside: list[str] = []
    if kinds and get_origin(plain) is tuple and isinstance(value, list):
        for index, item in enumerate(value):
            inside += validation_errors(kinds[0], item, f"{path}[{index}]")
    elif kinds and get_origin(plain) is not tuple and value is not None:
        inside += validation_errors(kinds[0], value, path)
    yield from inside
    try:
        if not inside:
            msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        yield f"{path}: {error}"


BusId = Annotated[str, Meta(pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")]
PcieRoot = Annotated[str, Meta(pattern=r"^pci[0-9a-f]{4,8}:[0-9a-f]{2}$")]
CpuList = Annotated[str, Meta(pattern=r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$")]
NodeName = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$")]
Uuid = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]

CgroupControl = Literal["dmem", "misc", "v1"]
"""What limits GPU memory by cgroup on a node: the kernel, the driver, or nothing because of cgroup v1."""

LIMITS_SINCE = 615
"""First driver branch that limits GPU memory by cgroup."""

_NODES = Path(__file__).parent / "data" / "nodes"

MAX_GPUS = 64
"""GPUs of one node."""

# Namespace of the GPUs' UUIDs: a node's name and an index always give the same UUID.
_GPU_NAMESPACE = uuid.UUID("6f0d3f0b-6a5e-5d43-9c1f-5f6d1f4f9a7e")


class NicDescription(Part, frozen=True, kw_only=True):
    """The NIC next to a GPU: same PCIe switch, same NUMA node."""

    pci_bus_id: BusId
    rdma_device: str


class PciPlace(Part, frozen=True, kw_only=True):
    """Where a PCI device sits.

    ``bridges`` are the PCI bridges from the root bus down; two devices' common bridges decide how far apart
    they are. ``numa_node`` is -1 where the kernel knows none. ``cpus`` is the kernel's list, as "0-55,112-167".
    """

    pci_bus_id: BusId
    pcie_root: PcieRoot
    bridges: tuple[BusId, ...] = ()
    numa_node: Annotated[int, Meta(ge=-1)] = -1
    cpus: CpuList = ""


class GpuDescription(PciPlace, frozen=True, kw_only=True):
    """One GPU and its place in the machine.

    GPUs of one ``nvlink_clique`` are NVLink peers. ``memory_numa_node`` is set only where the GPU's memory is
    a NUMA node of its own (Grace). ``nic`` is a NIC that shares the GPU's place; others are the node's ``nics``.
    """

    nvlink_clique: int | None = None
    memory_numa_node: int | None = None
    nic: NicDescription | None = None


class NodeNicDescription(PciPlace, frozen=True, kw_only=True):
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

    @property
    def switched(self) -> bool:
        """Whether the links end at switches."""
        return bool(self.switches) or self.rack_switches


class FabricDescription(Part, frozen=True, kw_only=True):
    """The NVLink domain: a zero cluster UUID is one node's own NVSwitches.

    ``healthy`` false is "no health reported", as driver 580 says of an HGX H100.
    """

    cluster_uuid: Uuid
    clique_id: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
    state: Literal["not-started", "in-progress", "completed"] = "completed"
    healthy: bool = False


class NodeDescription(Part, frozen=True, kw_only=True, omit_defaults=True):
    """One node. ``product`` is the GPUs' name (``products.product_names``); all GPUs of a node are of one product.

    ``product_facts`` are the fields of a ``products.Product``, for a product that is not among those, or that differs.
    ``pcie_generation`` limits the GPUs' links to what the host can; ``addressing_mode`` and ``c2c`` (NVLink to a
    Grace CPU) say how GPU and CPU share memory. ``cgroups`` only matters with driver 615 and newer.
    """

    name: NodeName
    serial: str = ""
    summary: str = ""
    product: str
    product_facts: dict[str, Any] | None = None
    driver_version: Annotated[str, Meta(pattern=r"^\d{3}(\.\d+){1,2}$")]
    cuda_driver_version: Annotated[str, Meta(pattern=r"^\d{2}\.\d$")]
    pcie_generation: Annotated[int, Meta(ge=1, le=6)] | None = None
    ecc: bool = True
    addressing_mode: Literal["none", "hmm", "ats"] = "hmm"
    c2c: bool = False
    cgroups: CgroupControl = "dmem"
    nvlink: NvlinkDescription | None = None
    fabric: FabricDescription | None = None
    gpus: Annotated[tuple[GpuDescription, ...], Meta(min_length=1, max_length=MAX_GPUS)]
    nics: tuple[NodeNicDescription, ...] = ()

    @property
    def gpu_product(self) -> Product:
        """The GPUs' product; known, because the description was checked."""
        product = find_product(self.product) if self.product_facts is None else read_product(self.product_facts)
        if product is None:
            raise LookupError(self.product)
        return product

    @property
    def driver_branch(self) -> int:
        """The first number of the driver's version."""
        return int(self.driver_version.partition(".")[0])

    @property
    def limits_memory(self) -> bool:
        """Whether the driver has limits on memory by cgroup."""
        return self.driver_branch >= LIMITS_SINCE

    def gpu_uuid(self, index: int) -> str:
        """``GPU-...`` of the GPU at that index: always the same for one name and serial."""
        node = f"{self.name}/{self.serial}" if self.serial else self.name
        return f"GPU-{uuid.uuid5(_GPU_NAMESPACE, f'{node}/{index}')}"


def known_descriptions() -> dict[str, NodeDescription]:
    """The nodes that come with Tessera, by name, in order of name."""
    return {name: _built_in(name) for name in known_names()}


def known_names() -> list[str]:
    """Names of the nodes that come with Tessera, sorted; each is the name of its file too."""
    entries = (entry.name for entry in _NODES.iterdir())
    return sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))


@cache
def _built_in(name: str) -> NodeDescription:
    text = (_NODES / f"{name}.yaml").read_text(encoding="utf-8")
    return parse_description(read_yaml(text), f"{name} (built in)")


def load_description(text: str) -> NodeDescription:
    """The node that ``text`` names, or that the YAML file at path ``text`` describes.

    :raises UsageError: no such name or file, or the file breaks rules; all broken rules are listed
    """
    node_names = known_names()
    if text in node_names:
        return _built_in(text)
    path = Path(text)
    if not path.is_file():
        names = f"the known names are {', '.join(node_names)}{meant(text, node_names)}"
        raise UsageError(f"no simulated node {text!r}, and no such file; {names}")
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"node description {text}: not readable as YAML: {error}") from error
    return parse_description(content, text)


def parse_description(content: object, source: str) -> NodeDescription:
    """A description from parsed YAML or JSON.

    :param source: where it came from, for the message
    :raises UsageError: naming each field that is wrong
    """
    lines = list(validation_errors(NodeDescription, content))
    if isinstance(content, Mapping) and content.get("productFacts") is not None:
        lines += _product_errors(content["productFacts"])
    elif isinstance(content, Mapping) and isinstance(product := content.get("product"), str):
        model = find_product(product)
        if model is None:
            lines.append(f"product: product {product!r} is unknown; known: {', '.join(product_names())}")
        elif model.mig_capable and not model.profiles:
            lines.append(f"product: product {product!r}: geometry unknown (no public record of its placements)")
    if not lines:
        description = msgspec.convert(content, NodeDescription)
        bus_ids = [place.pci_bus_id for place in (*description.gpus, *description.nics)]
        bus_ids += [gpu.nic.pci_bus_id for gpu in description.gpus if gpu.nic]
        if twice := sorted({bus_id for bus_id in bus_ids if bus_ids.count(bus_id) > 1}):
            lines.append(f"(the whole): one PCI bus id for two devices: {', '.join(twice)}")
    if lines:
        raise UsageError(f"node description {source} is not valid:\n" + "\n".join(f"  {line}" for line in lines))
    return description


def _product_errors(facts: object) -> Iterator[str]:
    """Yield a line for each rule that the facts of a product break."""
    try:
        product = read_product(facts)
    except msgspec.ValidationError as error:
        yield f"productFacts: {error}"
        return
    for name, constant in (("brand", product.brand_constant), ("architecture", product.architecture_constant)):
        if not hasattr(pynvml, constant):
            yield f"productFacts.{name}: {getattr(product, name)!r} is unknown: NVML has no {constant}"
    for index, profile in enumerate(product.profiles):
        if not profile.starts or min(profile.starts) < 0 or max(profile.starts) + profile.size > product.memory_slices:
            yield (
                f"productFacts.profiles[{index}]: {profile.name} has the starts {list(profile.starts)} and the size "
                f"{profile.size}; expected places within {product.memory_slices} memory slices"
            )


def parse_gpu(content: dict[str, Any]) -> GpuDescription:
    """One GPU's place; without ``pcieRoot`` its root bus is the bus before its own.

    :raises UsageError: naming each field that is wrong
    """
    domain, _, rest = str(content.get("pciBusId", "")).partition(":")
    bus = rest.partition(":")[0]
    guessed = f"pci{domain}:{max(int(bus, 16) - 1, 0):02x}" if re.fullmatch("[0-9a-f]{2}", bus) else ""
    complete = {"pcieRoot": guessed} | content
    if lines := list(validation_errors(GpuDescription, complete)):
        raise UsageError("GPU is not valid:\n" + "\n".join(f"  {line}" for line in lines))
    return msgspec.convert(complete, GpuDescription)
