"""Generated expressions over attributes and capacities, and how our engine's verdicts differ from the real ones.

Most are of the right types; some read what is missing, or compare what does not compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from deviceclasses.cel.engine import Program, from_slice_device, try_compile
from driver.errors import CelError
from tests.conformance.devices import DEVICES, entry
from tests.conformance.judge import Judge, Pair

OURS, OURS_OF_CAPACITY = 'device.attributes["gpu.tessera.dev"]', 'device.capacity["gpu.tessera.dev"]'
ATTRIBUTES = {
    "string": ("type", "productName", "architecture", "profile", "missing"),
    "int": ("memoryBandwidth", "memorySlices", "placementStart", "missing"),
    "bool": ("migCapable", "ecc", "simulated", "missing"),
    "version": ("cudaComputeCapability", "driverVersion", "missing"),
}
CAPACITIES = ("memory", "multiprocessors", "half", "missing")
LITERALS = {
    "string": ('"gpu"', '"mig"', '""', '"Hopper"', '"1g.10gb"', '"a.b*c"'),
    "int": ("0", "1", "8", "-1", "3352", "9223372036854775807"),
    "bool": ("true", "false"),
    "version": ('semver("9.0.0")', 'semver("550.54.15")', 'semver("1.2.3-rc.1+build.5")'),
    "quantity": ('quantity("80Gi")', 'quantity("0")', 'quantity("1500m")', 'quantity("9984Mi")'),
}
COST = "exceeds cost limit"
"""Part of what the API server says of an expression that it takes for too expensive."""


class Difference(NamedTuple):
    """Without a device: one of the two refuses the expression, for the reason that is given."""

    expression: str
    device: str
    real: object
    ours: object


class Grammar:
    """Expressions of a type, at most ``depth`` operators deep."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def bool(self, depth: int) -> str:
        if depth == 0:
            return self._value("bool")
        makers: tuple[Callable[[int], str], ...] = (
            lambda below: f"({self.bool(below)} {self._one_of('&&', '||')} {self.bool(below)})",
            lambda below: f"!({self.bool(below)})",
            lambda below: f"({self.bool(below)} ? {self.bool(below)} : {self.bool(below)})",
            self._comparison,
            self._comparison,
            self._order,
            self._test,
            self._macro,
        )
        return self._random.choice(makers)(depth - 1)

    def _comparison(self, depth: int) -> str:
        kind = self._one_of(*LITERALS)
        right = kind if self._random.random() < 0.9 else self._one_of(*LITERALS)
        wrapped = "dyn({})" if self._random.random() < 0.2 else "{}"
        operator = self._one_of("==", "!=")
        return f"{self._of(kind, depth)} {operator} {wrapped.format(self._of(right, depth))}"

    def _order(self, depth: int) -> str:
        kind = self._one_of("int", "string", "version", "quantity")
        left, right = self._of(kind, depth), self._of(kind, depth)
        if kind in ("version", "quantity"):
            way = self._one_of("compareTo({}) >= 0", "isGreaterThan({})", "isLessThan({})", "compareTo({}) == 0")
            return f"{left}.{way.format(right)}"
        return f"{left} {self._one_of('<', '<=', '>', '>=')} {right}"

    def _test(self, depth: int) -> str:
        name = self._one_of(*ATTRIBUTES["string"], *ATTRIBUTES["int"])
        return self._one_of(
            f"has({OURS}.{name})",
            f'"{name}" in {OURS}',
            f"{OURS}.?{name}.hasValue()",
            f'"{self._one_of(*CAPACITIES)}" in {OURS_OF_CAPACITY}',
            f"{self._of('string', depth)}.startsWith({self._value('string')})",
            f"{self._of('string', depth)}.contains({self._value('string')})",
            f"{self._value('string')}.matches('^[a-z]+')",
            "device.allowMultipleAllocations",
            'device.driver == "gpu.tessera.dev"',
        )

    def _macro(self, depth: int) -> str:
        kind = self._one_of("string", "int")
        members = f"[{self._value(kind)}, {self._value(kind)}, {self._value(kind)}]"
        macro = self._one_of("all", "exists", "exists_one")
        return self._one_of(
            f"{self._value(kind)} in {members}",
            f"{members}.{macro}(x, x == {self._of(kind, depth)})",
            f"{OURS}.{macro}(name, name == {self._value('string')})",
        )

    def _of(self, kind: str, depth: int) -> str:
        if kind == "bool" or depth == 0 or self._random.random() < 0.5:
            return self.bool(depth) if kind == "bool" and depth else self._value(kind)
        left, right = self._of(kind, depth - 1), self._of(kind, depth - 1)
        match kind:
            case "int":
                return f"({left} {self._one_of('+', '-', '*', '/', '%')} {right})"
            case "string":
                return self._one_of(f"({left} + {right})", f"{left}.lowerAscii()", f"string({self._value('int')})")
            case "quantity":
                return f"{left}.{self._one_of('add', 'sub')}({right})"
        return f"({self.bool(0)} ? {left} : {right})"

    def _value(self, kind: str) -> str:
        literal = self._one_of(*LITERALS[kind])
        if self._random.random() < 0.3:
            return literal
        if kind == "quantity":
            return f"{OURS_OF_CAPACITY}.{self._one_of(*CAPACITIES)}"
        name = self._one_of(*ATTRIBUTES[kind])
        return self._one_of(
            f"{OURS}.{name}", f"{OURS}.{name}", f'{OURS}["{name}"]', f"{OURS}.?{name}.orValue({literal})"
        )

    def _one_of(self, *texts: str) -> str:
        return self._random.choice(texts)


def generated(count: int, seed: int) -> list[str]:
    """Different expressions, always the same for a seed."""
    grammar, texts = Grammar(Random(seed)), dict[str, None]()
    while len(texts) < count:
        texts[grammar.bool(1 + len(texts) % 3)] = None
    return list(texts)


def differences(judge: Judge, texts: list[str]) -> tuple[list[Difference], list[str]]:
    """Where our engine says something else than the real cluster, and what the API server refuses for its cost."""
    problems = {text: judge.problem(text) for text in texts}
    costly = [text for text, problem in problems.items() if problem is not None and COST in problem]
    found, pairs = list[Difference](), list[Pair]()
    for text, problem in problems.items():
        program = try_compile(text)
        if problem is None and isinstance(program, Program):
            pairs += [(text, device) for device in DEVICES]
        elif (problem is None or isinstance(program, Program)) and text not in costly:
            found.append(Difference(text, "", problem, program if isinstance(program, CelError) else None))
    return [*found, *_wrong(judge, pairs)], costly


def _wrong(judge: Judge, pairs: list[Pair]) -> Iterator[Difference]:
    devices = {name: from_slice_device(driver, entry(name)) for name, (driver, _) in DEVICES.items()}
    for (text, device), real in judge.verdicts(pairs).items():
        program = try_compile(text)
        assert isinstance(program, Program)
        ours = program.verdict(devices[device])
        if real != ("error" if isinstance(ours, str) else ours):
            yield Difference(text, device, real, ours)
