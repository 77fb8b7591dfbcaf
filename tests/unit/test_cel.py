"""The CEL engine's own promises: messages, what it remembers, errors of one device; verdicts are in the table."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from deviceclasses.cel import (
    CelDevice,
    Mentions,
    compile_selector,
    evaluate,
    evaluate_all,
    from_slice_device,
)
from driver.errors import CelError, CelRuntimeError, RecoverableError

DRIVER = "gpu.tessera.dev"
OURS = f'device.attributes["{DRIVER}"]'
MEMORY = f'device.capacity["{DRIVER}"].memory'


def gpu(name: str = "gpu-0", memory: str = "80Gi", **attributes: Any) -> CelDevice:
    kinds = {bool: "bool", int: "int", str: "string"}
    entries = {key: {kinds[type(value)]: value} for key, value in attributes.items()}
    return from_slice_device(DRIVER, {"name": name, "attributes": entries, "capacity": {"memory": {"value": memory}}})


def refused(expression: str) -> CelError:
    with pytest.raises(CelError) as caught:
        compile_selector(expression)
    assert caught.value.expression == expression
    return caught.value


@pytest.mark.parametrize(
    ("expression", "message", "at"),
    [
        ("", "the expression is empty", ""),
        ("device.attribute['x'].y == 1", "did you mean 'attributes'?", "attribute["),
        ("devices.driver == 'x'", "did you mean 'device'?", "devices"),
        ("device.name == 'x'", "known are allowMultipleAllocations, attributes, capacity, driver", "name"),
        (f"{OURS}.type.startWith('g')", "did you mean 'startsWith'?", OURS),
        (f"{OURS}.type = 'gpu'", "'=' can't stand here", "= 'gpu'"),
        (f"{OURS}.type == 'gpu", "is not a complete string", "'gpu"),
        (f"({OURS}.type == 'gpu'", "ends too early", ""),
        ("device.driver == 1", "_==_ does not take (string, int)", "1"),
        ("5", "the expression gives int; a selector has to give bool", "5"),
        ("[1, 'a'].size() == 2", "string next to int", "'a'"),
        ("device.driver.exists(x, true)", "string can't be iterated over; lists and maps can", "driver.exists"),
        ("'a'.matches('[')", "illegal regular expression '['", "'['"),
        ("int('x') == 1", "'x'", "int"),
        ("'\\d' == ''", "unknown escape '\\\\d'", "'\\d'"),
        ("9223372036854775808 > 0", "does not fit into an int", "9223372036854775808"),
        ("'%s'.format(['a']) == 'a'", "join strings with + instead", "'%s'"),
        ("if == 1", "'if' is a reserved word", "if"),
        ("has(device)", "has() takes a field after a dot", "device"),
        (f"{MEMORY} >= quantity('40Gi')", "_>=_ does not take (kubernetes.Quantity, kubernetes.Quantity)", "quantity"),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_what_would_do(expression: str, message: str, at: str) -> None:
    error = refused(expression)
    assert message in str(error)
    assert error.position is not None
    assert expression[error.position :].startswith(at)


def test_an_expression_is_refused_beyond_ten_kilobytes_of_utf_8() -> None:
    assert "10240 are allowed" in str(refused(f'"{"ä" * 5120}" != ""'))


def test_an_expression_that_may_cost_too_much_is_refused_with_the_limit() -> None:
    assert "1000000 is the limit" in str(refused(f"{MEMORY} != quantity('1')"))


def test_a_refused_selector_does_not_end_a_process() -> None:
    assert isinstance(refused("x"), RecoverableError)


def test_a_runtime_error_names_expression_device_and_cause() -> None:
    program = compile_selector(f"{OURS}.profile == '1g.10gb'")
    with pytest.raises(CelRuntimeError, match=r"profile == .* on device gpu-3: no such key: profile") as caught:
        program.matches(gpu("gpu-3"))
    assert (caught.value.expression, caught.value.device) == (program.expression, "gpu-3")
    assert caught.value.reason == "no such key: profile"


def test_a_runtime_error_that_is_remembered_names_the_device_that_was_asked_for() -> None:
    program = compile_selector(f"{OURS}.profile == '1g.10gb'")
    for name in ("gpu-1", "gpu-2"):
        with pytest.raises(CelRuntimeError, match=f"on device {name}"):
            program.matches(gpu(name))


def test_one_devices_error_does_not_stop_the_others() -> None:
    devices = [gpu("gpu-0", type="gpu"), gpu("gpu-1"), gpu("gpu-2", type="mig"), gpu("gpu-3", type="gpu")]
    found = evaluate(compile_selector(f"{OURS}.type == 'gpu'"), devices)
    assert [each.name for each in found.matching] == ["gpu-0", "gpu-3"]
    assert [each.name for each in found.not_matching] == ["gpu-2"]
    assert [(each.name, error.device) for each, error in found.errors] == [("gpu-1", "gpu-1")]


def test_several_programs_are_asked_at_once() -> None:
    devices = [gpu(type="gpu", memory="80Gi"), gpu(type="gpu", memory="40Gi")]
    programs = [compile_selector(f"{MEMORY}.isGreaterThan(quantity('50Gi'))"), compile_selector("true")]
    large, all_of_them = evaluate_all(programs, devices)
    assert large.matching == devices[:1]
    assert all_of_them.matching == devices


@pytest.mark.parametrize(
    ("expression", "attributes", "capacity"),
    [
        (f"{OURS}.type == 'gpu'", {(DRIVER, "type")}, set()),
        (f"{OURS}['type'] == 'gpu' && {MEMORY}.isInteger()", {(DRIVER, "type")}, {(DRIVER, "memory")}),
        (f"{OURS}.?type.orValue('') == 'gpu'", {(DRIVER, "type")}, set()),
        (f"has({OURS}.type)", {(DRIVER, "type")}, set()),
        (f"'x' in {OURS}", {(DRIVER, "x")}, set()),
        (f"!('memory' in device.capacity['{DRIVER}'])", set(), {(DRIVER, "memory")}),
        (f"cel.bind(a, {OURS}, a.x == a.y)", {(DRIVER, "x"), (DRIVER, "y")}, set()),
        (f"cel.bind(d, device, d.attributes['{DRIVER}'].x)", {(DRIVER, "x")}, set()),
        (f"[{OURS}.x].exists(device, device == 1)", {(DRIVER, "x")}, set()),
        ("device.driver == 'x' || device.allowMultipleAllocations", set(), set()),
        ("true", set(), set()),
    ],
)
def test_what_an_expression_reads_is_known(
    expression: str, attributes: set[tuple[str, str]], capacity: set[tuple[str, str]]
) -> None:
    assert compile_selector(expression).mentions == Mentions(frozenset(attributes), frozenset(capacity))


@pytest.mark.parametrize(
    "expression",
    [
        f"size({OURS}) == 3",
        f"{OURS}.all(name, name != 'x')",
        f"{OURS}.x in {OURS}",
        f"'x' in {OURS} && size({OURS}) == 1",
        f"{OURS}[device.driver] == 1",
        f"cel.bind(a, {OURS}, a == {{}})",
        "device == device",
    ],
)
def test_where_it_is_not_known_everything_counts_as_read(expression: str) -> None:
    assert compile_selector(expression).mentions.everything


def test_a_bool_and_the_int_that_python_takes_for_it_are_told_apart() -> None:
    program = compile_selector(f"{OURS}.migCapable == 1")
    assert [program.verdict(gpu(migCapable=value)) for value in (True, 1, False, 0)] == [False, True, False, False]


def test_a_driver_of_another_name_has_its_own_domain() -> None:
    device = from_slice_device("gpu.nvidia.com", {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}})
    assert compile_selector("device.attributes['gpu.nvidia.com'].type == 'gpu'").matches(device)
    assert not compile_selector(f"has({OURS}.type)").matches(device)


def test_an_attribute_of_no_known_kind_is_an_error_that_names_the_device() -> None:
    with pytest.raises(CelError, match=r"device gpu-0: an attribute has one of string, int, .*, not float"):
        from_slice_device(DRIVER, {"name": "gpu-0", "attributes": {"x": {"float": 1.5}}})


def test_threads_share_a_program() -> None:
    program = compile_selector(f"{OURS}.n % 2 == 0 && {OURS}.all(k, cel.bind(v, {OURS}[k], v == v))")
    devices = [gpu(f"gpu-{n}", n=n) for n in range(2000)]
    wrong: list[int] = []

    def ask(offset: int) -> None:
        order = [*range(offset, 2000), *range(offset)]
        wrong.extend(n for n in order if program.verdict(devices[n]) is not (n % 2 == 0))

    threads = [threading.Thread(target=ask, args=(offset,)) for offset in (0, 500, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
