"""Quantities against exact arithmetic, versions against their order, memory against none, nonsense against crashes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from deviceclasses.cel.engine import CelDevice, compile_selector, from_slice_device
from deviceclasses.cel.library.quantity import parse_quantity
from driver.errors import CelError
from tests.conformance.expressions import expressions

DRIVER = "gpu.tessera.dev"
FACTORS: dict[str, int | Fraction] = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": 1, "k": 10**3, "M": 10**6,
    "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "e3": 1000, "E-2": Fraction(1, 100),
}  # fmt: skip


@st.composite
def quantities(draw: st.DrawFn) -> tuple[str, Fraction]:
    """A quantity as it is written, and what it is worth; nothing that is too small or large to be kept exactly."""
    whole, places = draw(st.integers(0, 10**6)), draw(st.integers(0, 3))
    sign, suffix = draw(st.sampled_from(["", "-"])), draw(st.sampled_from(sorted(FACTORS)))
    fraction = draw(st.integers(0, 10**places - 1)) if places else 0
    text = f"{sign}{whole}" + (f".{fraction:0{places}d}" if places else "") + suffix
    value = (whole + Fraction(fraction, 10**places)) * FACTORS[suffix] * (-1 if sign else 1)
    assume((value * 10**9).denominator == 1)
    return text, value


@given(quantities(), quantities())
def test_quantities_are_exact(one: tuple[str, Fraction], other: tuple[str, Fraction]) -> None:
    left, right = f'quantity("{one[0]}")', f'quantity("{other[0]}")'
    order = (one[1] > other[1]) - (one[1] < other[1])
    assert parse_quantity(one[0]).value == one[1]
    assert true(f"{left}.compareTo({right}) == {order}")
    assert true(f"{left}.isLessThan({right}) == {str(order < 0).lower()}")
    assert true(f"({left} == {right}) == {str(order == 0).lower()}")
    assert true(f"{left}.add({right}).sub({right}) == {left}")
    assert true(f"{left}.sub({right}).compareTo({right}.sub({left})) == {order}")


@given(quantities(), st.integers(-(2**40), 2**40))
def test_adding_an_int_adds_that_many(one: tuple[str, Fraction], number: int) -> None:
    assert parse_quantity(one[0]).plus(parse_quantity(str(number))).value == one[1] + number
    assert true(f'quantity("{one[0]}").add({number}).sub({number}) == quantity("{one[0]}")')


WORDS = st.one_of(st.integers(0, 20).map(str), st.sampled_from(["a", "b", "rc", "alpha", "x-1"]))
VERSIONS = st.tuples(
    st.tuples(*[st.integers(0, 12)] * 3), st.lists(WORDS, max_size=3), st.sampled_from(["", "+build", "+7.exp"])
)


def written(version: Any) -> str:
    numbers, words, build = version
    return f"{'.'.join(map(str, numbers))}{'-' if words else ''}{'.'.join(words)}{build}"


def precedence(one: Any, other: Any) -> int:
    """Semver 2.0.0, item 11, step by step."""
    if one[0] != other[0]:
        return 1 if one[0] > other[0] else -1
    left, right = one[1], other[1]
    if not left or not right:
        return bool(right) - bool(left)
    for mine, theirs in zip(left, right, strict=False):
        if mine == theirs:
            continue
        if mine.isdigit() and theirs.isdigit():
            return 1 if int(mine) > int(theirs) else -1
        if mine.isdigit() != theirs.isdigit():
            return -1 if mine.isdigit() else 1
        return 1 if mine > theirs else -1
    return (len(left) > len(right)) - (len(left) < len(right))


@given(VERSIONS, VERSIONS)
def test_versions_have_the_order_of_semver(one: Any, other: Any) -> None:
    left, right = f'semver("{written(one)}")', f'semver("{written(other)}")'
    assert true(f"{left}.compareTo({right}) == {precedence(one, other)}")
    assert true(f"{left}.isGreaterThan({right}) == {str(precedence(one, other) > 0).lower()}")


def true(expression: str) -> bool:
    return compile_selector(expression).verdict(CelDevice(DRIVER)) is True


VALUES = st.one_of(
    st.booleans().map(lambda value: {"bool": value}),
    st.integers(0, 2).map(lambda value: {"int": value}),
    st.sampled_from(["gpu", "mig", "true", "1"]).map(lambda value: {"string": value}),
    st.sampled_from(["1.0.0", "9.0.0"]).map(lambda value: {"version": value}),
)
NAMES = st.sampled_from(["type", "migCapable", "memorySlices", "resource.kubernetes.io/numaNode"])
DEVICES = st.lists(
    st.fixed_dictionaries(
        {
            "attributes": st.dictionaries(NAMES, VALUES),
            "capacity": st.dictionaries(
                st.sampled_from(["memory", "multiprocessors"]),
                st.sampled_from(["1", "1000m", "80Gi", "0"]).map(lambda value: {"value": value}),
            ),
            "allowMultipleAllocations": st.booleans(),
        }
    ),
    max_size=12,
)
ABOUT_DEVICES = sorted(text for text in expressions().values() if "device" in text and len(text) < 200)


@given(st.lists(st.sampled_from(ABOUT_DEVICES), min_size=1, max_size=4), DEVICES)
def test_remembering_changes_no_verdict(texts: list[str], entries: list[dict[str, Any]]) -> None:
    devices = [from_slice_device(DRIVER, {"name": f"gpu-{i}", **entry}) for i, entry in enumerate(entries)]
    programs = []
    for text in texts:
        try:
            programs.append(compile_selector(text))
        except CelError:
            continue
    fresh = [[program.evaluate(device) for device in devices] for program in programs]
    assert [[program.verdict(device) for device in devices] for program in programs] == fresh
    assert [[program.verdict(device) for device in devices] for program in programs] == fresh


SIGNS = "()[]{}.,?:+-*/%!<>=&|\"'`\\ \n"
WORDS_OF_CEL = """== && || device attributes ["a"] x 1 1u 2.5 's' true null in has all exists map cel.bind quantity size
    optional.of orValue .?"""
PIECES = st.sampled_from([*SIGNS, *WORDS_OF_CEL.split()])


@given(st.one_of(st.lists(PIECES, max_size=12).map("".join), st.text(max_size=20)))
def test_whatever_is_written_is_answered_or_refused(text: str) -> None:
    try:
        answer = compile_selector(text).evaluate(CelDevice(DRIVER))
    except CelError as error:
        place = error.position or 0
    else:
        place = 0
        assert isinstance(answer, (bool, str))
    assert 0 <= place <= len(text)
