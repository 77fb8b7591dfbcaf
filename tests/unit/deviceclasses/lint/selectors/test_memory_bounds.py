"""Bounds of memory that leave out what their author most likely means."""

from __future__ import annotations

import pytest

from tests.support.linting import OURS, device_class, findings

ATTRIBUTES = 'device.attributes["gpu.tessera.dev"]'
MEMORY = 'device.capacity["gpu.tessera.dev"].memory'
MIG = f'{OURS} && {ATTRIBUTES}.type == "mig"'
FULL = f'{OURS} && {ATTRIBUTES}.type == "gpu"'


def at_least(amount: str) -> str:
    return f'{MEMORY}.compareTo(quantity("{amount}")) >= 0'


@pytest.mark.parametrize(
    ("selector", "value", "message"),
    [
        (f"{MIG} && {at_least('40Gi')}", '"40Gi"', "leaves out 3g.40gb, which has 40192Mi to 40448Mi"),
        (f"{MIG} && {at_least('10Gi')}", '"10Gi"', "leaves out 1g.10gb"),
        (f'{MIG} && {MEMORY}.isGreaterThan(quantity("5Gi"))', '"5Gi"', "leaves out 1g.5gb, which has 4864Mi; 4Gi"),
        (f"{FULL} && {at_least('80Gi')}", '"80Gi"', "leaves out a full NVIDIA H100 80GB HBM3"),
        (f'{MIG} && {ATTRIBUTES}.productName == "NVIDIA H200" && {at_least("18Gi")}', '"18Gi"', "leaves out 1g.18gb"),
    ],
)
def test_a_bound_just_above_what_a_profile_has_is_a_warning_with_a_bound_that_works(
    selector: str, value: str, message: str
) -> None:
    [finding] = findings(device_class("x", selector))
    assert (finding.value, finding.severity) == (value, "warning")
    assert message in finding.message
    working = finding.message.rpartition("; ")[2].removesuffix(" includes it")
    assert findings(device_class("x", selector.replace(value.strip('"'), working))) == []


@pytest.mark.parametrize(
    "selector",
    [
        f"{MIG} && {at_least('39Gi')}",
        f"{MIG} && {at_least('30Gi')}",
        f'{MIG} && {ATTRIBUTES}.profile == "7g.80gb" && {at_least("40Gi")}',
        f"{FULL} && {at_least('40Gi')}",
        f'{MIG} && {MEMORY}.compareTo(quantity("40Gi")) <= 0',
    ],
)
def test_a_bound_that_leaves_out_nothing_by_mistake_is_let_be(selector: str) -> None:
    assert findings(device_class("x", selector)) == []


@pytest.mark.parametrize(("name", "value"), [("architecture", "Hopper"), ("profile", "2g.20gb")])
@pytest.mark.parametrize("operator", ["<", ">="])
def test_a_comparison_of_text_by_the_alphabet_is_a_warning(name: str, value: str, operator: str) -> None:
    [finding] = findings(device_class("x", f'{MIG} && {ATTRIBUTES}.{name} {operator} "{value}"'))
    assert finding.severity == "warning"
    assert f"compares {name} as text" in finding.message
