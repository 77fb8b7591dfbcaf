"""``tessera lint``: findings about names and values in selectors that no device has, and about wrong comparisons."""

from __future__ import annotations

import pytest

from driver.model.device import devices_of
from driver.simulator.products import find_product, product_names
from driver.slices.attributes import attributes
from tests.support.gpus import gpu_of
from tests.support.linting import OF_ANY_TYPE, OURS, TYPE, claim, device_class, findings, found, request_for

PLACE = "spec.selectors[0].cel.expression"
ATTRIBUTES = 'device.attributes["gpu.tessera.dev"]'
STANDARD = 'device.attributes["resource.kubernetes.io"]'
MEMORY = 'device.capacity["gpu.tessera.dev"].memory'
FULL = f'{OURS} && {TYPE} == "gpu"'


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('quantity("40Gigs")', "'40Gigs' is not a quantity: digits and a suffix such as m, k, Ki, Gi or e3 make one"),
        ('semver("12.0")', "'12.0' is not a semantic version: three numbers without leading zeros, such as 12.0.1"),
    ],
)
def test_a_conversion_of_a_literal_that_always_fails_is_found(call: str, message: str) -> None:
    value = call[call.index('"') : -1]
    expected = f"at character {len(OURS) + 5}: always fails: {message}"
    assert found(device_class("mine", f"{OURS} && {call} == {call}"))[0] == (PLACE, value, expected)


def test_a_call_of_a_function_that_tessera_does_not_evaluate_is_found_with_its_name() -> None:
    [(_, _, message)] = found(device_class("mine", f'{OURS} && cidr("10.0.0.0/8").containsIP("10.1.2.3")'))
    assert message.endswith("cidr() is not evaluated by Tessera; no attribute of a device is an address or a network")


def test_a_conversion_that_the_api_server_refuses_says_what_is_accepted() -> None:
    [(_, _, message)] = found(device_class("mine", f'{OURS} && int("8 GPUs") == 8'))
    assert message.endswith("type conversion error from 'string' to 'int': '8 GPUs'; accepted: digits")


@pytest.mark.parametrize(
    "call", ['quantity("40Gi")', 'semver("12.0.0")', 'semver("v12", true)', 'isQuantity("40Gigs")']
)
def test_a_conversion_of_a_literal_that_can_be_converted_is_let_through(call: str) -> None:
    assert found(device_class("mine", f"{FULL} && {call} == {call}")) == []


@pytest.mark.parametrize(
    ("expression", "severity", "value", "message"),
    [
        (
            f'{TYPE} == "gpuu"',
            "error",
            "gpuu",
            "no device has this type; accepted: gpu, mig, share, shared, mig-shared, monitor; did you mean gpu?",
        ),
        (
            f'{TYPE} != "partition"',
            "error",
            "partition",
            "no device has this type; accepted: gpu, mig, share, shared, mig-shared, monitor",
        ),
        (
            f'{FULL} && {ATTRIBUTES}.migMode == "enable"',
            "error",
            "enable",
            (
                "no device has this migMode; accepted: enabled, disabled, enabled-after-reset, disabled-after-reset, "
                "unsupported; did you mean enabled?"
            ),
        ),
        (
            f'{ATTRIBUTES}.profile == "1g.10g"',
            "warning",
            "1g.10g",
            "no known GPU has this profile; did you mean 1g.10gb?",
        ),
        (
            f'{ATTRIBUTES}.profile == "1g-10gb"',
            "warning",
            "1g-10gb",
            "no known GPU has this profile; did you mean 1g.10gb?",
        ),
        (
            f'"2G.20GB" == {ATTRIBUTES}.profile',
            "warning",
            "2G.20GB",
            "no known GPU has this profile; did you mean 2g.20gb?",
        ),
        (
            f'{ATTRIBUTES}.profile in ["3g.40gb", "3g.40"]',
            "warning",
            "3g.40",
            "no known GPU has this profile; did you mean 3g.40gb?",
        ),
        (
            f'{ATTRIBUTES}.?architecture.orValue("") == "hopper"',
            "warning",
            "hopper",
            "no known GPU has this architecture; did you mean Hopper?",
        ),
        (
            f'cel.bind(a, {ATTRIBUTES}, a.architecture != "Blackwel")',
            "warning",
            "Blackwel",
            "no known GPU has this architecture; did you mean Blackwell?",
        ),
        (
            f'cel.bind(t, {TYPE}, t == "migg")',
            "error",
            "migg",
            "no device has this type; accepted: gpu, mig, share, shared, mig-shared, monitor; did you mean mig?",
        ),
    ],
)
def test_a_value_that_no_device_has_is_found_with_the_nearest(
    expression: str, severity: str, value: str, message: str
) -> None:
    [finding] = findings(device_class("x", f"{OURS} && {expression}"))
    assert (finding.path, finding.severity, finding.value, finding.message) == (PLACE, severity, f'"{value}"', message)


@pytest.mark.parametrize(
    "expression",
    [
        f'{ATTRIBUTES}.profile in ["1g.10gb", "7g.80gb", "1g.12gb+me", "none"]',
        f'{ATTRIBUTES}.architecture in ["Ampere", "Ada", "Hopper", "Unknown"]',
        f'{ATTRIBUTES}.?profile.orValue("") != ""',
        f'{ATTRIBUTES}.productName == "NVIDIA X1"',
        f'{FULL} && {ATTRIBUTES}.brand == "whatever"',
        'device.attributes["gpu.nvidia.com"].?type.orValue("card") == "card"',
        '["gpuu"].exists(type, type == "gpuu")',
    ],
)
def test_values_that_a_device_may_have_or_that_are_others_are_let_be(expression: str) -> None:
    assert found(device_class("x", f"{OF_ANY_TYPE} && {expression}")) == []


@pytest.mark.slow
def test_lint_knows_the_values_of_every_device_that_can_be_simulated() -> None:
    products = [name for name in product_names() if (product := find_product(name)) and product.mig_capable]
    assert len(products) > 5
    for name in products:
        for device in devices_of(gpu_of(name), 0):
            said = attributes(device)
            terms = [f'{ATTRIBUTES}.{each} == "{said[each]["string"]}"' for each in ("type", "profile", "architecture")]
            assert found(device_class("x", " && ".join([OURS, *terms]))) == []


@pytest.mark.parametrize(
    ("expression", "value", "message"),
    [
        (
            'device.driver == "gpu.tesera.dev"',
            "gpu.tesera.dev",
            "is almost the driver's name; did you mean gpu.tessera.dev?",
        ),
        (
            f'{OURS} && device.attributes["gpu.tesera.dev"].type == "gpu"',
            "gpu.tesera.dev",
            "is almost a domain of Tessera's devices; did you mean gpu.tessera.dev?",
        ),
        (
            f'{FULL} && device.capacity["gpu.tessera.dve"].memory.isGreaterThan(quantity("1Gi"))',
            "gpu.tessera.dve",
            "is almost a domain of Tessera's devices; did you mean gpu.tessera.dev?",
        ),
        (
            f'{OURS} && device.attributes["resource.kubernets.io"].?numaNode.orValue(0) == 0',
            "resource.kubernets.io",
            "is almost a domain of Tessera's devices; did you mean resource.kubernetes.io?",
        ),
        (
            f"{OURS} && {STANDARD}.numanode == 0",
            "numanode",
            "Tessera publishes no such name in resource.kubernetes.io; did you mean numaNode?",
        ),
    ],
)
def test_a_slip_in_a_driver_or_domain_is_a_warning_since_it_may_be_somebody_elses(
    expression: str, value: str, message: str
) -> None:
    [finding] = findings(device_class("x", expression))
    assert (finding.severity, finding.value, finding.message) == ("warning", f'"{value}"', message)


@pytest.mark.parametrize(
    "domain", ["gpu.nvidia.com", "resource.nvidia.com", "dra.net", "gpu.intel.com", "gpu.example.org"]
)
def test_other_drivers_are_no_slips(domain: str) -> None:
    assert found(device_class("x", f'device.driver == "{domain}" && device.attributes["{domain}"].type == "x"')) == []


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (f'{MEMORY} >= quantity("100Gi")', 'quantities are compared with .compareTo(quantity("100Gi")) >= 0'),
        (f'{MEMORY} == "40Gi"', 'quantities are compared with .compareTo(quantity("40Gi")) == 0'),
        (f'quantity("1Gi") < {MEMORY}', 'quantities are compared with .compareTo(quantity("1Gi")) > 0'),
        (
            f'{ATTRIBUTES}.driverVersion >= semver("550.0.0")',
            'versions are compared with .compareTo(semver("550.0.0")) >= 0',
        ),
    ],
)
def test_what_no_operator_compares_is_told_with_what_does(expression: str, message: str) -> None:
    [(_, _, told)] = found(device_class("x", f"{FULL} && {expression}"))
    assert told.endswith(f"; {message}")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (
            f'{ATTRIBUTES}.memoryBandwidth >= "3000"',
            "memoryBandwidth is a number: compare with a number, 3000 without quotes",
        ),
        (f'{ATTRIBUTES}.nvlinkLinks == "many"', "nvlinkLinks is a number: compare with a number"),
        (f'{STANDARD}.numaNode == "0"', "numaNode is a number: compare with a number, 0 without quotes"),
        (f'{ATTRIBUTES}.driverVersion >= "550"', 'driverVersion is a version: .compareTo(semver("550.0.0")) >= 0'),
        (f'"580.95.05" > {ATTRIBUTES}.driverVersion', 'driverVersion is a version: .compareTo(semver("580.95.5")) < 0'),
        (f"{ATTRIBUTES}.cudaDriverVersion == 13", 'cudaDriverVersion is a version: .compareTo(semver("13.0.0")) == 0'),
        (f'{ATTRIBUTES}.ecc == "true"', "ecc is a bool: compare with true or false, without quotes"),
        (f"{ATTRIBUTES}.productName == 100", 'productName is a string: compare with a string, "100" in quotes'),
    ],
)
def test_a_value_of_another_type_is_told_with_what_to_compare_with(expression: str, message: str) -> None:
    assert [told for _, _, told in found(device_class("x", f"{FULL} && {expression}"))] == [message]
    by_request = claim(request_for("gpu-training", expression))
    assert [told for _, _, told in found(by_request)] == [message]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (f'{ATTRIBUTES}.memory.isGreaterThan(quantity("1Gi"))', f"memory is a capacity: {MEMORY}"),
        (f"{ATTRIBUTES}.numaNode == 0", f"numaNode is in Kubernetes' domain: {STANDARD}.numaNode"),
        (
            f'{ATTRIBUTES}["resource.kubernetes.io/numaNode"] == 0',
            f"numaNode is in Kubernetes' domain: {STANDARD}.numaNode",
        ),
        (
            f"has({MEMORY.replace('memory', 'memorySlices')})",
            f"memorySlices is an attribute: {ATTRIBUTES}.memorySlices",
        ),
        (
            f"{ATTRIBUTES}.numanode == 0",
            (
                "Tessera publishes no such name in gpu.tessera.dev (docs/attributes.md has them all); "
                f"did you mean {STANDARD}.numaNode?"
            ),
        ),
    ],
)
def test_a_name_that_stands_elsewhere_is_told_with_its_place(expression: str, message: str) -> None:
    assert [told for _, _, told in found(device_class("x", f"{FULL} && {expression}"))] == [message]


def test_a_function_for_another_type_is_told_with_the_types() -> None:
    [(_, _, told)] = found(device_class("x", f'{FULL} && {ATTRIBUTES}.driverVersion.startsWith("550")'))
    assert told.endswith("; driverVersion is a version, type is a string (docs/attributes.md)")


@pytest.mark.parametrize(
    ("device_class_name", "expression"),
    [
        ("gpu-inference-2g-20gb", f"{ATTRIBUTES}.memoryBandwidth >= 3000"),
        ("gpu-inference", f'{ATTRIBUTES}.profile == "3g.40gb" && {ATTRIBUTES}.memoryBandwidth >= 3000'),
    ],
)
def test_a_selector_is_held_against_partitions_of_the_profile_that_is_asked_for(
    device_class_name: str, expression: str
) -> None:
    [(_, _, message)] = found(claim(request_for(device_class_name, expression)))
    assert message.startswith("fails on a partition, which stops")


@pytest.mark.parametrize(
    "selectors",
    [
        [f'{FULL} && {ATTRIBUTES}.profile == "1g.10gb"'],
        [FULL, f'{OURS} && {TYPE} == "mig"'],
        [f'{OURS} && {ATTRIBUTES}.profile.startsWith("1g-")'],
    ],
)
def test_a_class_that_selects_none_of_our_devices_is_a_warning(selectors: list[str]) -> None:
    [finding] = findings(device_class("x", *selectors))
    assert (finding.path, finding.severity) == ("spec.selectors", "warning")
    assert finding.message == "selects none of Tessera's devices: none has the type and profile that it asks for"


@pytest.mark.parametrize("selectors", [[OURS], [f'{OURS} && {ATTRIBUTES}.productName == "NVIDIA L4"']])
def test_a_class_that_selects_monitor_devices_next_to_others_is_a_warning(selectors: list[str]) -> None:
    [finding] = findings(device_class("x", *selectors))
    assert (finding.path, finding.severity) == ("spec.selectors", "warning")
    condition = finding.message.partition("add the selector ")[2]
    assert found(device_class("x", *selectors, condition)) == []
    assert found(device_class("x", f'{OURS} && {TYPE} == "monitor"')) == []


def test_a_class_of_another_driver_may_select_none_of_our_devices() -> None:
    other = 'device.attributes["dra.net"]'
    assert (
        found(device_class("x", f'device.driver == "dra.net" && {other}.type == "gpu" && {other}.profile == "a"')) == []
    )
