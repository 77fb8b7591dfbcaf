"""GPU products, read from the files under ``data/``.

``data/gpu_products.json`` contains memory, clocks and links, ``data/mig_geometry.json`` the MIG profiles. Product
names differ between them ("NVIDIA H100 80GB HBM3" and "NVIDIA H100 80GB HBM3 (SXM5)"), so they are matched without
the part in parentheses, by alias, or by a shorter name ("NVIDIA B300" for "NVIDIA B300 SXM6"). Missing values come
from ``data/estimates.yaml`` and from sibling products, because a real GPU answers every query; they are listed in
:attr:`Product.estimates`. Only the simulator reads these tables: on real GPUs the geometry comes from NVML.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import yaml

_ENGINES = ("copy_engines", "decoders", "encoders", "jpeg", "ofa")

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


def sibling_of(product: str) -> str | None:
    """The product whose MIG profiles complete those of this one, or None."""
    name: str | None = _of(product).get("sibling")
    return name


def brand_of(product: str) -> str:
    """``NVML_BRAND_*`` without the prefix."""
    return str(_of(product).get("brand", "NVIDIA"))


def memory_by_start(product: str) -> dict[str, dict[int, int]]:
    """MiB of instances whose memory differs by placement: by profile name and start."""
    return dict(_of(product).get("memoryByStart", {}))


def complete_card(product: str, card: dict[str, Any], mig: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The product's row of ``gpu_products.json`` without gaps, and the fields that were filled in."""
    own = _of(product)
    row = card | {"nvml_total_memory_mib": card["nvml_total_memory_mib"] or mig.get("total_memory_mib")}
    # H20 has one row for two memory sizes: here the estimate names the one that is meant.
    wrong = ["nvml_total_memory_mib"] if "memoryMiB" in own else []
    filled = [field for field in _CARD_FIELDS if row[field] is None or field in wrong]
    default = {"nvml_total_memory_mib": card["memory_gb"] * 1024}
    values = {field: own.get(_CARD_FIELDS[field], default.get(field)) for field in filled}
    return row | values, tuple(_CARD_FIELDS[field] for field in filled)


def complete_profiles(
    rows: list[dict[str, Any]], card: dict[str, Any], sibling: Callable[[], tuple[list[dict[str, Any]], dict[str, Any]]]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """A product's MIG profile rows without gaps, and which (profile, field) were filled in.

    :param sibling: profile rows (without gaps) and card of the sibling; called only where there is a gap
    """
    gaps = {row["name"]: _gaps(row) for row in rows}
    if not any(gaps.values()):
        return rows, ()
    model, model_card = sibling()
    by_id = {row["gi_profile_id"]: row for row in model}
    complete = [row | _filled(gaps[row["name"]], by_id[row["gi_profile_id"]], card, model_card) for row in rows]
    return complete, tuple(f"{name} {field}" for name, fields in gaps.items() for field in fields)


def _gaps(row: dict[str, Any]) -> list[str]:
    return [field for field in ("memory_mb", "multiprocessors", *_ENGINES) if row[field] is None]


def _filled(gaps: list[str], model: dict[str, Any], card: dict[str, Any], model_card: dict[str, Any]) -> dict[str, Any]:
    memory = model["memory_mb"] * card["nvml_total_memory_mib"] / model_card["nvml_total_memory_mib"]
    multiprocessors = model["multiprocessors"] * card["sm_count"] / model_card["sm_count"]
    values = {field: model[field] for field in _ENGINES} | {
        "memory_mb": int(memory) // _MEMORY_STEP_MIB * _MEMORY_STEP_MIB,
        "multiprocessors": 2 * round(multiprocessors / 2),
    }
    return {field: values[field] for field in gaps}


# Memory the driver keeps for itself in MiB, where somebody measured it (facts: gpu_products.json, "_about").
_RESERVED_MIB = {"Hopper": 480, "Ampere": 518, "Blackwell": 728, "Ada Lovelace": 609, "Turing": 448}

# CI profile that spans a whole GI of so many slices, where the facts name none
# (NVML_COMPUTE_INSTANCE_PROFILE_*; facts: mig_geometry.json, default_ci_profile_id).
CI_PROFILE_OF_SLICES = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}


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
    compute_slices: int
    max_gpu_instances: int
    profiles: tuple[ProductProfile, ...]
    estimates: tuple[str, ...]

    @property
    def reserved_mib(self) -> int:
        """Memory the driver keeps for itself (NVML memory info v2, ``reserved``)."""
        return _RESERVED_MIB.get(self.architecture, 0)

    @cached_property
    def by_id(self) -> dict[int, ProductProfile]:
        """Profiles by the id that create, capacity and placement calls take."""
        return {profile.id: profile for profile in self.profiles}

    @cached_property
    def by_enum(self) -> dict[int, ProductProfile]:
        """Profiles by ``NVML_GPU_INSTANCE_PROFILE_*`` index."""
        return {profile.enum: profile for profile in self.profiles}

    @cached_property
    def by_name(self) -> dict[str, ProductProfile]:
        """Profiles by the name people use, as "1g.10gb"."""
        return {profile.name: profile for profile in self.profiles}


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
    """Every name :func:`find_product` knows: NVML's, with what tells two of one name apart in parentheses."""
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


def _completed(name: str) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], tuple[str, ...]]:
    """Card, geometry and profile rows of a product that has a card, without gaps; and what was filled in."""
    card, mig = _row("gpu_products", name) or {}, _row("mig_geometry", name) or {}
    card, estimated = complete_card(name, card, mig)
    rows = mig.get("profiles", [])
    if not rows or not all(_is_placed(row) for row in rows):
        return card, mig, [], estimated

    def sibling() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        model_card, _, model_rows, _ = _completed(sibling_of(name) or name)
        return model_rows, model_card

    rows, guessed = complete_profiles(rows, card, sibling)
    return card, mig, rows, estimated + guessed


def _product(name: str) -> Product:
    card, mig, rows, estimates = _completed(name)
    major, minor = card["cuda_compute_capability"].split(".")
    by_start = memory_by_start(name)
    return Product(
        name=name.partition(" (")[0],
        brand=brand_of(name),
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
        compute_slices=mig.get("compute_slices") or 1,
        max_gpu_instances=mig.get("max_gpu_instances") or 0,
        profiles=tuple(_profile(row, by_start.get(row["name"], {})) for row in rows),
        estimates=estimates,
    )


def _is_placed(row: dict[str, Any]) -> bool:
    return row.get("gi_profile_id") is not None and bool(row.get("placements"))


def _profile(row: dict[str, Any], memory_by_start: dict[int, int]) -> ProductProfile:
    whole = row.get("default_ci_profile_id")
    return ProductProfile(
        name=row["name"],
        id=row["gi_profile_id"],
        enum=row["nvml_enum_value"],
        slices=row["slice_count"],
        memory_mib=row["memory_mb"],
        multiprocessors=row["multiprocessors"],
        copy_engines=row["copy_engines"],
        decoders=row["decoders"],
        encoders=row["encoders"],
        jpeg=row["jpeg"],
        ofa=row["ofa"],
        max_instances=row["max_instances"],
        starts=tuple(sorted(placement["start"] for placement in row["placements"])),
        size=row["placements"][0]["size"],
        whole_ci_profile=CI_PROFILE_OF_SLICES[row["slice_count"]] if whole is None else whole,
        memory_by_start=memory_by_start,
    )
