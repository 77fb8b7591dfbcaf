"""GPU products, read from ``data/products.json``: memory, clocks, links, and the MIG profiles.

A real GPU answers every query, so no value is missing: :attr:`Product.estimates` names those that are not published.
An estimate is the value of a sibling product: engines unchanged, memory and multiprocessors of a profile in proportion
to those of the GPUs. Memory clock and bus width are estimated such that 2 x clock x width / 8 is the published
bandwidth. Which of two placements of A100's 3g.20gb has which of its two captured sizes is an estimate, too.

Captured and published values, with their sources, are in the facts files beside; a test compares the products with
them. Only the simulator reads these tables: on real GPUs the geometry comes from NVML.
"""

from __future__ import annotations

import json
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=64)]
"""A number of instances or memory slices, which bounds loops: it may come from a file of a user."""

ProfileName = Annotated[str, Meta(pattern=r"^[0-9a-z.+-]{1,63}$")]
"""A profile's name; NVML has 96 bytes for it, and the names of devices are made of it."""


class ProductProfile(msgspec.Struct, frozen=True, eq=False, rename="camel"):
    """One GPU-instance profile. ``id`` is what create calls take, ``enum`` the index of profile-info calls."""

    name: ProfileName
    id: int
    enum: int
    slices: int
    memory_mib: int
    multiprocessors: int
    copy_engines: int
    decoders: int
    encoders: int
    jpeg: int
    ofa: int
    max_instances: Count
    starts: tuple[int, ...]
    size: Count
    whole_ci_profile: int
    memory_by_start: dict[int, int] = {}

    @property
    def media(self) -> str:
        """How the profile shares media engines: "", "me" (+me), "all" (+me.all) or "none" (-me)."""
        for ending, kind in (("+me.all", "all"), ("+me", "me"), ("-me", "none")):
            if self.name.endswith(ending):
                return kind
        return ""

    def memory_at(self, start: int) -> int:
        """MiB of an instance that starts there; on some GPUs two placements of one profile differ."""
        return self.memory_by_start.get(start, self.memory_mib)


class Product(msgspec.Struct, frozen=True, eq=False, rename="camel", dict=True):
    """One GPU product: identity, memory (MiB, and GB/s as published), clocks (MHz), links, and its MIG geometry.

    ``estimates`` names what is no published figure. There is one object a product (see :func:`find_product`),
    compared by identity.
    """

    name: str
    brand: str
    architecture: str
    compute_capability: tuple[int, int]
    pci_device_id: int
    memory_mib: int
    multiprocessors: int
    memory_bus_bits: int
    memory_clock_mhz: int
    pcie_generation: int
    nvlink_generation: int
    memory_bandwidth: int
    mig_capable: bool
    toggles_without_reset: bool
    memory_slices: Count
    profiles: tuple[ProductProfile, ...]
    estimates: tuple[str, ...]

    @property
    def brand_constant(self) -> str:
        return f"NVML_BRAND_{self.brand}"

    @property
    def architecture_constant(self) -> str:
        return f"NVML_DEVICE_ARCH_{self.architecture.partition(' ')[0].upper()}"  # Ada Lovelace is ADA

    @cached_property
    def by_id(self) -> dict[int, ProductProfile]:
        """Profiles by the id that create, capacity and placement calls take."""
        return {profile.id: profile for profile in self.profiles}

    @cached_property
    def by_enum(self) -> dict[int, ProductProfile]:
        """Profiles by ``NVML_GPU_INSTANCE_PROFILE_*`` index."""
        return {profile.enum: profile for profile in self.profiles}


def facts(name: str) -> dict[str, Any]:
    """One of the facts files, parsed: "gpu_products", "mig_geometry" or "node_topologies"."""
    content: dict[str, Any] = json.loads(_data(name))
    return content


@cache
def find_product(name: str) -> Product | None:
    """The product of that NVML name, or None. Without known placements it has no profiles, other values may be 0."""
    products = _products()
    product = products.get(name) or products.get(name.partition(" (")[0])
    # Longer names, such as "NVIDIA B300 SXM6 AC", are the same product.
    longer = (
        msgspec.structs.replace(products[known_name], name=name)
        for known_name in products
        if name.startswith(f"{known_name} ")
    )
    return product or next(longer, None)


def read_product(facts: object) -> Product:
    """The product of a node description. Raises ValidationError naming the field."""
    return msgspec.convert(facts, Product)


def product_names() -> list[str]:
    """The products' NVML names; a suffix in parentheses distinguishes two products of one name."""
    return list(_products())


@cache
def _products() -> dict[str, Product]:
    return msgspec.json.decode(_data("products"), type=dict[str, Product])


def _data(name: str) -> bytes:
    return (Path(__file__).parent / "data" / f"{name}.json").read_bytes()
