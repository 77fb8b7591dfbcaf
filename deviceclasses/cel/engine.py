"""Compilation of selectors, and their evaluation on devices, with the verdicts of Kubernetes.

Expressions that Kubernetes refuses are refused, except that costs are not estimated: the API server does so at
admission, and a work limit stops long evaluations (``values.MAX_WORK``). Expressions that Kubernetes accepts get the
same verdict, or are refused with a reason (``hints.UNSUPPORTED_FUNCTIONS``). `tests/conformance` compares with the
verdicts of a real cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from deviceclasses.cel.compiler import compile_tree
from deviceclasses.cel.device import CelDevice
from deviceclasses.cel.parse import parse
from deviceclasses.cel.referenced_attributes import ReferencedAttributes, key_of, referenced_attributes
from deviceclasses.cel.values import EvaluationError, Value, WorkLimitError, no_overload, start_work
from driver.errors import CelError

UNSUPPORTED_ERRORS = (ValueError, ArithmeticError, RecursionError, MemoryError, WorkLimitError)
"""Errors of Python for expressions that are too large for it. They come from users, so none may end the process."""

MAX_REMEMBERED_VERDICTS = 10_000
"""Maximum verdicts that a program remembers; a selector on UUIDs has one for every device."""


@dataclass(frozen=True)
class Program:
    """A compiled selector. Safe for use by several threads."""

    expression: str
    referenced: ReferencedAttributes
    _evaluate: Callable[[Value], Value]
    _verdicts: dict[Hashable, bool | str] = field(default_factory=dict)

    def verdict(self, device: CelDevice) -> bool | str:
        """Whether the device is selected, or the cause as a string where evaluation fails.

        Remembered for all devices that are equal in what the expression reads.
        """
        key = key_of(self.referenced, device)
        found = self._verdicts.get(key)
        if found is None:
            found = self.evaluate(device)
            if len(self._verdicts) >= MAX_REMEMBERED_VERDICTS:
                self._verdicts.clear()
            self._verdicts[key] = found
        return found

    def evaluate(self, device: CelDevice) -> bool | str:
        """Like ``verdict``, but always evaluated anew."""
        start_work()
        try:
            value = self._evaluate(device.value)
            if type(value) is not bool:
                raise no_overload("a selector has to give bool", value)
        except EvaluationError as error:
            return str(error)
        except UNSUPPORTED_ERRORS as error:
            return f"Tessera can't evaluate it: {type(error).__name__}: {error}"
        return value


def compile_selector(expression: str) -> Program:
    """Parse and check an expression. Raises CelError with the position, the error and what would be accepted."""
    start_work()
    try:
        root = parse(expression)
        return Program(expression, referenced_attributes(root), compile_tree(expression, root))
    except UNSUPPORTED_ERRORS as error:
        raise CelError(f"Tessera can't evaluate it: {type(error).__name__}: {error}", expression) from error
