"""The named functions of the product that a block of code calls, in the order of their first calls.

Lambdas, comprehensions and generated methods have no name of their own and are not counted; neither are the simulator,
in whose place a real machine has NVIDIA's library, and the format of log lines, which depends on who reads them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[2]

PRODUCT = ("driver", "kubelet_plugin", "controller", "deviceclasses", "tessera")

NOT_COUNTED = ("driver/simulator/", "driver/logs.py")


@dataclass
class Trace:
    """Calls of each function: (module, name) -> number of calls, in the order of the first calls."""

    calls: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(module for module, _ in self.calls))

    def summary(self) -> str:
        count = sum(self.calls.values())
        return f"{len(self.calls)} named functions in {len(self.modules)} modules, {count} calls"

    def lines(self) -> Iterator[str]:
        """A line for each module, at its first call, with its functions and how often they were called."""
        for module in self.modules:
            functions = {name: count for (where, name), count in self.calls.items() if where == module}
            listed = ", ".join(name if count == 1 else f"{name} ({count})" for name, count in functions.items())
            yield f"{module}: {listed}"


@contextmanager
def traced() -> Iterator[Trace]:
    """Trace this thread, and threads that start, until the end of the block."""
    trace, places = Trace(), dict[CodeType, tuple[str, str] | None]()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in places:
            places[code] = _place(code)
        place = places[code]
        # A generator that continues is no new call.
        if place is not None and not (code.co_flags & CO_GENERATOR and _continues(frame)):
            trace.calls[place] = trace.calls.get(place, 0) + 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _place(code: CodeType) -> tuple[str, str] | None:
    """Module and qualified name of a named function of the product; None for any other code."""
    path = Path(code.co_filename)
    if code.co_name.startswith("<") or not path.is_relative_to(ROOT):
        return None
    module = path.relative_to(ROOT).as_posix()
    if not module.startswith(PRODUCT) or module.startswith(NOT_COUNTED):
        return None
    return module, code.co_qualname.replace("<locals>.", "")


def _continues(frame: FrameType) -> bool:
    """Whether a generator goes on after a yield: its instruction RESUME has another argument than at the start."""
    return frame.f_code.co_code[frame.f_lasti + 1] != 0
