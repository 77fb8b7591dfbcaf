"""The simulated products have the captured and published values; the others are named as estimates."""

from __future__ import annotations

from typing import Any

import pytest

from driver.simulator.products import Product, facts, find_product

CARD = {
    "architecture": "architecture",
    "nvml_total_memory_mib": "memory_mib",
    "sm_count": "multiprocessors",
    "memory_bus_width_bits": "memory_bus_bits",
    "max_memory_clock_mhz": "memory_clock_mhz",
    "pcie_gen": "pcie_generation",
    "memory_bandwidth_gbps": "memory_bandwidth",
    "mig_capable": "mig_capable",
}
ESTIMATE = {
    "nvml_total_memory_mib": "memoryMiB",
    "sm_count": "multiprocessors",
    "memory_bus_width_bits": "memoryBusBits",
    "max_memory_clock_mhz": "memoryClockMHz",
}
PROFILE = {
    "gi_profile_id": "id",
    "nvml_enum_value": "enum",
    "slice_count": "slices",
    "max_instances": "max_instances",
    "memory_mb": "memory_mib",
    "multiprocessors": "multiprocessors",
    "copy_engines": "copy_engines",
    "decoders": "decoders",
    "encoders": "encoders",
    "jpeg": "jpeg",
    "ofa": "ofa",
}
CARDS = facts("gpu_products")["products"]
GEOMETRIES = [row for row in facts("mig_geometry")["products"] if find_product(row["product"])]


def product_of(row: dict[str, Any]) -> Product:
    found = find_product(row["product"])
    assert found is not None
    return found


@pytest.mark.parametrize("row", CARDS, ids=[row["product"] for row in CARDS])
def test_a_gpu_has_the_published_values_and_names_the_others_as_estimates(row: dict[str, Any]) -> None:
    product = product_of(row)
    known = {name: value for name in CARD if (value := row[name]) is not None}
    assert {name: getattr(product, CARD[name]) for name in known} == known
    captured = {mig["total_memory_mib"] for mig in GEOMETRIES if product_of(mig).name == product.name}
    open_ = {ESTIMATE[name] for name in CARD.keys() - known.keys()}
    if product.memory_mib in captured:
        open_ -= {"memoryMiB"}
    assert {each for each in product.estimates if " " not in each} == open_


@pytest.mark.parametrize("row", GEOMETRIES, ids=[row["product"] for row in GEOMETRIES])
def test_a_profile_has_the_captured_values_and_names_the_others_as_estimates(row: dict[str, Any]) -> None:
    product = product_of(row)
    ours = {profile.name: profile for profile in product.profiles}
    for fact in row["profiles"] if ours else ():
        profile = ours[fact["name"]]
        assert list(profile.starts) == sorted(place["start"] for place in fact["placements"])
        assert {place["size"] for place in fact["placements"]} == {profile.size}
        for name, field in PROFILE.items():
            if fact[name] is None:
                assert f"{profile.name} {name}" in product.estimates
            else:
                assert getattr(profile, field) == fact[name]
