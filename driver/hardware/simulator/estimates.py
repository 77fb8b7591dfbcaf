"""What the facts leave open about a product, filled in: ``data/estimates.yaml`` and sibling products.

A real GPU answers every query, so a simulated one can't answer "nobody published it". What is filled in here is
named in :attr:`Product.estimates`, so that nobody takes it for a captured value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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
    """The estimates for a product; what stands in parentheses counts only where it is spelled so there."""
    known = _estimates()
    found = known.get(product) or known.get(product.partition(" (")[0])
    # Longer names, as "NVIDIA B300 SXM6 AC", are those products too.
    return found or next((known[name] for name in known if product.startswith(f"{name} ")), {})


def sibling_of(product: str) -> str | None:
    """The product whose MIG profiles fill the gaps of this one's, or None."""
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
