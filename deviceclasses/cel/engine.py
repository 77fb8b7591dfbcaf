"""Selectors as Kubernetes evaluates them: compile once, ask for any number of devices.

What Kubernetes refuses is refused; what it accepts gets the same verdict, or is refused too with the reason
(`unsupported.py`), never answered otherwise: `tests/conformance` holds both against a real cluster's verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from deviceclasses.cel.checker import check
from deviceclasses.cel.cost import check_cost
from deviceclasses.cel.device import CelDevice
from deviceclasses.cel.interpret import build
from deviceclasses.cel.mentions import Mentions, key_of, mentions_of
from deviceclasses.cel.parse import parse
from deviceclasses.cel.values import EvaluationError, Value, no_overload
from driver.errors import CelRuntimeError

KEPT = 10_000
"""Verdicts a program remembers; a selector on UUIDs would otherwise remember every device there ever was."""


@dataclass(frozen=True)
class Program:
    """A selector that was admitted. Threads may share it."""

    expression: str
    mentions: Mentions
    _evaluate: Callable[[Value], Value]
    _verdicts: dict[Hashable, bool | str] = field(default_factory=dict)

    def matches(self, device: CelDevice) -> bool:
        """Whether the device is selected; raises CelRuntimeError where the expression has no answer for it."""
        verdict = self.verdict(device)
        if isinstance(verdict, str):
            raise CelRuntimeError(self.expression, device.name, verdict)
        return verdict

    def verdict(self, device: CelDevice) -> bool | str:
        """Like ``matches``, with the reason of an error as a string; remembered for all devices that are alike."""
        key = key_of(self.mentions, device)
        found = self._verdicts.get(key)
        if found is None:
            found = self.evaluate(device)
            if len(self._verdicts) >= KEPT:
                self._verdicts.clear()
            self._verdicts[key] = found
        return found

    def evaluate(self, device: CelDevice) -> bool | str:
        """Like ``verdict``, without a memory."""
        try:
            value = self._evaluate(device.value)
            if type(value) is not bool:
                raise no_overload("a selector has to give bool", value)
        except EvaluationError as error:
            return str(error)
        return value


def compile_selector(expression: str) -> Program:
    """Parse and check an expression. Raises CelError with the place, what is wrong there and what could stand there."""
    root = parse(expression)
    checked = check(expression, root)
    check_cost(expression, root, checked)
    return Program(expression, mentions_of(root), build(expression, root, checked))


@dataclass
class Verdicts:
    """What one program says of many devices, each in one of three lists, in the order they were given."""

    matching: list[CelDevice] = field(default_factory=list)
    not_matching: list[CelDevice] = field(default_factory=list)
    errors: list[tuple[CelDevice, CelRuntimeError]] = field(default_factory=list)


def evaluate(program: Program, devices: Iterable[CelDevice]) -> Verdicts:
    """Ask for every device; an error on one does not keep the others from being asked."""
    return evaluate_all([program], devices)[0]


def evaluate_all(programs: Sequence[Program], devices: Iterable[CelDevice]) -> list[Verdicts]:
    """``evaluate`` for several programs, devices that none of them can tell apart being asked for once."""
    mentions = reduce(or_, (program.mentions for program in programs), Mentions())
    alike: dict[Hashable, list[int]] = {}
    given = list(devices)
    for index, device in enumerate(given):
        alike.setdefault(key_of(mentions, device), []).append(index)
    return [_sorted(program, given, alike.values()) for program in programs]


def _sorted(program: Program, devices: Sequence[CelDevice], groups: Iterable[list[int]]) -> Verdicts:
    verdicts: list[bool | str] = [False] * len(devices)
    for group in groups:
        verdict = program.verdict(devices[group[0]])
        if verdict is not False:
            for index in group:
                verdicts[index] = verdict
    found = Verdicts()
    for device, verdict in zip(devices, verdicts, strict=True):
        if verdict is True:
            found.matching.append(device)
        elif verdict is False:
            found.not_matching.append(device)
        else:
            found.errors.append((device, CelRuntimeError(program.expression, device.name, verdict)))
    return found
