"""GPU products, read from the files under ``data/``.

``data/gpu_products.json`` contains memory, clocks and links, ``data/mig_geometry.json`` the MIG profiles. Product
names differ between them ("NVIDIA H100 80GB HBM3" and "NVIDIA H100 80GB HBM3 (SXM5)"), so they are matched without
the part in parentheses, by alias, or by a shorter name ("NVIDIA B300" for "NVIDIA B300 SXM6"). Missing values come
from ``data/estimates.yaml`` and from sibling products, because a real GPU answers every query; they are listed in
:attr:`Product.estimates`. Only the simulator reads these tables: on real GPUs the geometry comes from NVML.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import yaml

_PROFILE_FIELDS = ("memory_mb", "multiprocessors", "copy_engines", "decoders", "encoders", "jpeg", "ofa")

# Instance memory comes in steps of this many MiB (facts: mig_geometry.json, "memory_mb").
_MEMORY_STEP_MIB = 64

_CARD_FIELDS = {
    "nvml_total_memory_mib": "memoryMiB",
    "sm_count": "multiprocessors",
    "memory_bus_width_bits": "memoryBusBits",
    "max_memory_clock_mhz": "memoryClockMHz",
}


@cache
def _estimates() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("data", "estimates.yaml").read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return content


def _of(product: str) -> dict[str, Any]:
    """The estimates for a product, by full name or without the part in parentheses."""
    known = _estimates()
    found = known.get(product) or known.get(product.partition(" (")[0])
    # Longer names, such as "NVIDIA B300 SXM6 AC", are the same product.
    return found or next((known[name] for name in known if product.startswith(f"{name} ")), {})


# CI profile that spans a whole GI of so many slices, where the facts name none
# (NVML_COMPUTE_INSTANCE_PROFILE_*; facts: mig_geometry.json, default_ci_profile_id).
_CI_PROFILE_OF_SLICES = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}


@dataclass(frozen=True, slots=True, eq=False)
class ProductProfile:
    """One GPU-instance profile. ``id`` is what create calls take, ``enum`` the index of profile-info calls."""

    name: str
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
    max_instances: int
    starts: tuple[int, ...]
    size: int
    whole_ci_profile: int
    memory_by_start: dict[int, int] = field(default_factory=dict)

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


@dataclass(frozen=True, eq=False)
class Product:
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
    memory_slices: int
    profiles: tuple[ProductProfile, ...]
    estimates: tuple[str, ...]

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
    text = files(__package__).joinpath("data", f"{name}.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@cache
def find_product(name: str) -> Product | None:
    """The product of that NVML name, or None. ``profiles`` is empty where no placement is known."""
    return None if _row("gpu_products", name) is None else _product(name)


def product_names() -> list[str]:
    """The products' NVML names; a suffix in parentheses distinguishes two products of one name."""
    names = [row["product"].partition(" (")[0] for row in facts("gpu_products")["products"]]
    return [*names, *_VARIANTS]


# Products of one NVML name that differ in memory; the facts have geometry for each, one card for all.
_VARIANTS = ("NVIDIA H20 (141GB)",)


def _row(file: str, name: str) -> dict[str, Any] | None:
    rows: list[dict[str, Any]] = facts(file)["products"]
    exact = (row for row in rows if row["product"] == name)
    loose = (row for row in rows if row["product"].partition(" (")[0] == name.partition(" (")[0])
    alias = (row for row in rows if name in row.get("aliases", ()))
    longer = (row for row in rows if name.startswith(f"{row['product']} "))
    return next(exact, None) or next(loose, None) or next(alias, None) or next(longer, None)


def _card(name: str) -> tuple[dict[str, Any], list[str]]:
    """The product's row of ``gpu_products.json`` without gaps, and the fields that were filled in."""
    row, own, mig = _row("gpu_products", name) or {}, _of(name), _row("mig_geometry", name) or {}
    known = row | {"nvml_total_memory_mib": row["nvml_total_memory_mib"] or mig.get("total_memory_mib")}
    # H20 has one row for two memory sizes: here the estimate names the one that is meant.
    wrong = "nvml_total_memory_mib" if "memoryMiB" in own else None
    filled = {field: key for field, key in _CARD_FIELDS.items() if known[field] is None or field == wrong}
    default = {"nvml_total_memory_mib": row["memory_gb"] * 1024}
    values = {field: own.get(key, default.get(field)) for field, key in filled.items()}
    return known | values, list(filled.values())


def _profile_rows(name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The product's MIG profiles without gaps, and which (profile, field) were filled in from its sibling.

    Engines are those of the sibling's profile, memory and multiprocessors in proportion to the whole GPUs.
    """
    rows: list[dict[str, Any]] = (_row("mig_geometry", name) or {}).get("profiles", [])
    if not all(row.get("gi_profile_id") is not None and row.get("placements") for row in rows):
        return [], []
    gaps = {row["name"]: [field for field in _PROFILE_FIELDS if row[field] is None] for row in rows}
    if not any(gaps.values()):
        return rows, []
    sibling = _of(name).get("sibling") or name
    (card, _), (model_card, _) = _card(name), _card(sibling)
    models = {row["gi_profile_id"]: row for row in _profile_rows(sibling)[0]}

    def estimate(row: dict[str, Any], field: str) -> int:
        value = int(models[row["gi_profile_id"]][field])
        if field == "memory_mb":
            memory = value * card["nvml_total_memory_mib"] / model_card["nvml_total_memory_mib"]
            return int(memory) // _MEMORY_STEP_MIB * _MEMORY_STEP_MIB
        if field == "multiprocessors":
            return 2 * round(value * int(card["sm_count"]) / int(model_card["sm_count"]) / 2)
        return value

    complete = [row | {field: estimate(row, field) for field in gaps[row["name"]]} for row in rows]
    return complete, [f"{profile} {field}" for profile, fields in gaps.items() for field in fields]


def _product(name: str) -> Product:
    (card, card_estimates), (rows, profile_estimates) = _card(name), _profile_rows(name)
    mig, own = _row("mig_geometry", name) or {}, _of(name)
    major, minor = card["cuda_compute_capability"].split(".")
    by_start = own.get("memoryByStart", {})
    return Product(
        name=name.partition(" (")[0],
        brand=own.get("brand", "NVIDIA"),
        architecture=card["architecture"],
        compute_capability=(int(major), int(minor)),
        pci_device_id=int((mig.get("pci_device_ids") or ["0x000010DE"])[0], 16),
        memory_mib=card["nvml_total_memory_mib"],
        multiprocessors=card["sm_count"],
        memory_bus_bits=card["memory_bus_width_bits"],
        memory_clock_mhz=card["max_memory_clock_mhz"],
        pcie_generation=card["pcie_gen"],
        nvlink_generation=card["nvlink_generation"] or 0,
        memory_bandwidth=card["memory_bandwidth_gbps"],
        mig_capable=card["mig_capable"],
        toggles_without_reset=(mig.get("mig_mode_toggle") or "").startswith("no reset"),
        memory_slices=mig.get("memory_slices") or 1,
        profiles=tuple(_profile(row, by_start.get(row["name"], {})) for row in rows),
        estimates=(*card_estimates, *profile_estimates),
    )


def _profile(row: dict[str, Any], memory_by_start: dict[int, int]) -> ProductProfile:
    whole = row.get("default_ci_profile_id")
    same = ("name", "multiprocessors", "copy_engines", "decoders", "encoders", "jpeg", "ofa", "max_instances")
    return ProductProfile(
        **{field: row[field] for field in same},
        id=row["gi_profile_id"],
        enum=row["nvml_enum_value"],
        slices=row["slice_count"],
        memory_mib=row["memory_mb"],
        starts=tuple(sorted(placement["start"] for placement in row["placements"])),
        size=row["placements"][0]["size"],
        whole_ci_profile=_CI_PROFILE_OF_SLICES[row["slice_count"]] if whole is None else whole,
        memory_by_start=memory_by_start,
    )
