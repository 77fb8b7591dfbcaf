"""NVML that fails where a test says: at the n-th call of whatever the product really calls, with any code.

The simulator's own faults are by function; these are by occurrence, so that every single call of an operation can be
made to fail once, found by recording them. ``nvidia-smi``, which sets time-slices, counts as a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import pynvml

from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths
from driver.hardware.nvml_errors import NAMES
from driver.hardware.time_slice import TimeSliceTool
from driver.simulator import smi_tool
from driver.simulator.node import SimulatedNode

CODES = tuple(
    code
    for code, name in sorted(NAMES.items())
    if name
    in {
        "UNINITIALIZED",
        "INVALID_ARGUMENT",
        "NOT_SUPPORTED",
        "NO_PERMISSION",
        "NOT_FOUND",
        "INSUFFICIENT_SIZE",
        "DRIVER_NOT_LOADED",
        "TIMEOUT",
        "FUNCTION_NOT_FOUND",
        "GPU_IS_LOST",
        "RESET_REQUIRED",
        "OPERATING_SYSTEM",
        "LIB_RM_VERSION_MISMATCH",
        "IN_USE",
        "MEMORY",
        "INSUFFICIENT_RESOURCES",
        "UNKNOWN",
    }
)
"""What a driver in trouble answers."""

CHANGES = ("Create", "Destroy", "SetMigMode", "nvidia-smi")
"""Parts of the names of the calls that change something."""


class Mode(StrEnum):
    """How a call fails, and what comes after it."""

    ONCE = "once"
    LATE = "late"
    """It does its work and then says that it failed."""

    LASTING = "lasting"
    """So does every later call of the same function."""

    DEAD = "dead"
    """So does every later call of whatever function."""


@dataclass(frozen=True)
class Trouble:
    """The ``number``-th call (from 0) since ``faults`` began fails."""

    number: int
    call: str
    code: int
    mode: Mode = Mode.ONCE

    def __str__(self) -> str:
        return f"{self.call} (call {self.number}) {NAMES[self.code]} {self.mode}"

    def hits(self, number: int, call: str) -> bool:
        if number <= self.number or self.mode in (Mode.ONCE, Mode.LATE):
            return number == self.number
        return self.mode is Mode.DEAD or call == self.call


def modes_of(call: str) -> list[Mode]:
    changing = any(part in call for part in CHANGES)
    return [mode for mode in Mode if mode is not Mode.LATE or changing]


class FaultyNvml:
    """Stands in front of a simulated NVML; ``seen`` are the calls during the last ``faults``."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.seen: tuple[str, ...] = ()
        self._calls: list[str] = []
        self._trouble: Trouble | None = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._nvml, name)
        if not name.startswith("nvml") or isinstance(value, int | str | type):
            return value
        return partial(self.call, name, value)

    @contextmanager
    def faults(self, trouble: Trouble | None = None) -> Iterator[None]:
        """Count anew, and fail as ``trouble`` says, while the block runs."""
        self._calls, self._trouble = [], trouble
        try:
            yield
        finally:
            self.seen, self._trouble = tuple(self._calls), None

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        number, trouble = len(self._calls), self._trouble
        self._calls.append(name)
        if trouble is None or not trouble.hits(number, name):
            return function(*arguments, **keywords)
        if trouble.mode is Mode.LATE:
            function(*arguments, **keywords)
        raise pynvml.NVMLError(trouble.code)


class ToolInProcess(TimeSliceTool):
    """The simulated nvidia-smi without the 30 ms of its own process; fails as ``nvml`` says."""

    def __init__(self, nvml: FaultyNvml, paths: HostPaths) -> None:
        super().__init__(paths.root, needs_library=False)
        self._nvml = nvml
        self._node = str(paths.root)

    def _run(self, command: list[str], what: str) -> tuple[int, str]:
        try:
            return self._nvml.call(smi_tool.CALL, smi_tool.run, [self._node, *command[1:]])  # type: ignore[no-any-return]
        except pynvml.NVMLError as error:
            status = error.value if error.value in smi_tool.STATUSES else smi_tool.OTHER_STATUS
            return status, f"Failed to set timeslice : {NAMES[error.value]}"


class FaultyHost(Host):
    """The production Host over a FaultyNvml."""

    def __init__(self, simulated: SimulatedNode, nvml: FaultyNvml | None = None) -> None:
        paths = HostPaths(simulated.root, simulated.root)
        self.faulty = nvml or FaultyNvml(simulated.nvml)
        super().__init__(self.faulty, paths, simulated=True)
        self._time_slice = ToolInProcess(self.faulty, paths)
