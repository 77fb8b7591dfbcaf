"""The CEL engine: messages, work limit, attributes that are read, remembered verdicts.

Verdicts are in the conformance table.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from deviceclasses.cel.engine import CelDevice, compile_selector, from_slice_device
from driver.errors import CelError, RecoverableError

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
        ("timestamp('2026-01-01T00:00:00Z').getHours() == 1", "timestamp() is not evaluated by Tessera", "timestamp"),
        ("ip.isCanonical('10.0.0.1')", "ip.isCanonical() is not evaluated by Tessera", "ip"),
        (f"{OURS}.type.getHours() == 1", "getHours() is not evaluated by Tessera", OURS),
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


def nested(depth: int, first: str, step: str, last: str) -> str:
    """``last`` about a value (IT) that ``step`` makes of the one before (PRE), ``depth`` times."""
    binds = [f"cel.bind(v0, {first}, "]
    binds += [f"cel.bind(v{level}, {step.replace('PRE', f'v{level - 1}')}, " for level in range(1, depth)]
    return "".join(binds) + last.replace("IT", f"v{depth - 1}") + ")" * depth


TEN = "[0,1,2,3,4,5,6,7,8,9]"
MILLION = "lists.range(1000000)"
SAME_TEXT = "cel.bind(same, 'a' + IT.substring(1), lists.range(60000).all(i, IT == same))"


@pytest.mark.long
@pytest.mark.parametrize(
    "expression",
    [
        "".join(f"{TEN}.all(v{level}, " for level in range(8)) + "true" + ")" * 8,
        f"{MILLION}.all(x, {MILLION}.all(y, x + y >= 0))",
        f"{MILLION}.distinct().size() > 0",
        f"sets.contains({MILLION}, {MILLION})",
        f"{MILLION}.sort().size() > 0",
        "lists.range(400000).all(x, x in [1000001, 1000002, 1000003, 1000004] || true)",
        nested(60, "'long'", "PRE + PRE", "IT.size() > 0"),
        nested(60, "'long'", "PRE.replace('', PRE)", "IT.size() > 0"),
        nested(60, "['a', 'b']", "[PRE.join(PRE.join('zzzzzzzz')), 'c']", "IT.size() > 0"),
        nested(60, "[1, 1]", "[PRE, PRE]", "IT == IT"),
        nested(60, "{1: 1}", "{1: PRE, 2: PRE}", "IT == IT"),
        nested(60, "[1, 1]", "[PRE, PRE]", "IT in [IT, IT]"),
        nested(60, "[1, 1]", "[PRE, PRE]", "[dyn(IT), dyn(IT)].flatten(90).size() > 0"),
        nested(17, "'aaaaaaaaaaaaaaaa'", "PRE + PRE", SAME_TEXT),
        nested(17, "'aaaaaaaaaaaaaaaa'", "PRE + PRE", "lists.range(60000).exists(i, {'a': 1}[IT] == i)"),
        nested(14, "'aaaaaaaaaaaaaaaa'", "PRE + PRE", "IT.findAll('a*b|a').size() > 0"),
    ],
)
def test_an_evaluation_without_end_is_stopped_by_the_work_limit(expression: str) -> None:
    program = compile_selector(expression)
    assert "takes more than 1000000 steps" in str(program.verdict(gpu()))
    assert compile_selector("[1, 2].all(x, x > 0)").verdict(gpu()) is True, "each evaluation has its own limit"


def test_an_expression_whose_types_have_no_end_is_refused() -> None:
    assert "nested too deeply" in str(refused(nested(60, "{1: 1}", "{PRE: PRE}", "true")))


def test_an_error_message_does_not_write_out_a_value_of_any_size() -> None:
    joined = nested(60, "[1, 1]", "[PRE, PRE]", "[dyn('a'), dyn(IT)].join() == ''")
    assert compile_selector(joined).verdict(gpu()) == "join: invalid input: list"
    index = nested(60, "[1, 1]", "[PRE, PRE]", "dyn(1)[dyn(IT)] == 1")
    assert compile_selector(index).verdict(gpu()) == "no such key: list"
    key = nested(17, "'aaaaaaaaaaaaaaaa'", "PRE + PRE", "{'a': 1}[IT] == 1")
    assert compile_selector(key).verdict(gpu()) == f"no such key: {'a' * 100}"


def test_a_refused_selector_does_not_end_a_process() -> None:
    assert isinstance(refused("x"), RecoverableError)


def test_the_verdict_on_a_device_without_the_attribute_is_the_cause_and_stops_no_other_device() -> None:
    devices = [gpu("gpu-0", type="gpu"), gpu("gpu-1"), gpu("gpu-2", type="mig"), gpu("gpu-3", type="gpu")]
    program = compile_selector(f"{OURS}.type == 'gpu'")
    for _ in range(2):
        assert [program.verdict(each) for each in devices] == [True, "no such key: type", False, True]


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
    program = compile_selector(expression)
    reads = [*(("attributes", *name) for name in attributes), *(("capacity", *name) for name in capacity)]
    assert program.reads == tuple(sorted(reads))
    assert not program.reads_everything


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
    assert compile_selector(expression).reads_everything


def test_a_bool_and_the_int_that_python_takes_for_it_are_told_apart() -> None:
    program = compile_selector(f"{OURS}.migCapable == 1")
    assert [program.verdict(gpu(migCapable=value)) for value in (True, 1, False, 0)] == [False, True, False, False]


def test_a_driver_of_another_name_has_its_own_domain() -> None:
    device = from_slice_device("gpu.nvidia.com", {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}})
    assert compile_selector("device.attributes['gpu.nvidia.com'].type == 'gpu'").verdict(device) is True
    assert compile_selector(f"has({OURS}.type)").verdict(device) is False


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
