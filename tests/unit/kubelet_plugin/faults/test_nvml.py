"""Every NVML call that preparing makes fails, each occurrence, with every plausible code: nothing is lost or leaked.

The calls are found by recording them, so that a new one can't be forgotten. ``make test-fast`` takes one code and
mode for each call in turn; the slow tests the whole product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import pytest

from driver.hardware.nvml_errors import ABSENT
from driver.simulator.smi_tool import CALL as SMI
from tests.support.claim_life import CASES, SHAPES, Aftermath, Life, Operation, aftermaths
from tests.support.faulty_nvml import CODES, Mode, Trouble, modes_of

pytestmark = pytest.mark.usefixtures("silent_log")


def troubles(calls: Sequence[str]) -> Iterator[Trouble]:
    """All there are, but for nvidia-smi saying that the GPU has no time-slices: then there is none to restore."""
    for number, call in enumerate(calls):
        for mode in modes_of(call):
            for code in CODES:
                if not (call == SMI and code in ABSENT):
                    yield Trouble(number, call, code, mode)


def one_each(calls: Sequence[str]) -> Iterator[Trouble]:
    """Each call in one way, with a code and mode that differ from call to call."""
    for (number, call), code in zip(enumerate(calls), cycle(CODES), strict=False):
        modes = modes_of(call)
        yield Trouble(number, call, code, modes[number % len(modes)])


def calls_of(life: Life, shape: str, operation: Operation) -> Sequence[str]:
    """What the operation really calls, in order."""
    nvml = life.host.faulty
    assert life.problems(SHAPES[shape], operation, nvml.faults(), Aftermath.UNPREPARE) == []
    assert nvml.seen or (shape, operation) in {("full", Operation.REPEAT), ("full", Operation.UNPREPARE)}
    return nvml.seen


def run(folder: Path, shape: str, operation: Operation, cases: Callable[[Sequence[str]], Iterator[Trouble]]) -> None:
    life, number, wrong = Life(folder), 0, []
    calls = calls_of(life, shape, operation)
    for trouble, aftermath in zip(cases(calls), aftermaths(), strict=False):
        fault = life.host.faulty.faults(trouble)
        once = trouble.mode in (Mode.ONCE, Mode.LATE)
        found = life.problems(SHAPES[shape], operation, fault, aftermath, once=once)
        wrong += [f"{trouble}, then {aftermath}: {sentence}" for sentence in found]
        number += 1
    print(f"{operation} of {shape}: {number} faults of {len(calls)} NVML calls")
    if wrong:
        pytest.fail(f"{len(wrong)} things are wrong, such as\n" + "\n".join(wrong[:10]), pytrace=False)


@pytest.mark.parametrize(("shape", "operation"), CASES)
def test_a_fault_of_any_call_loses_and_leaks_nothing(tmp_path: Path, shape: str, operation: Operation) -> None:
    run(tmp_path, shape, operation, one_each)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("shape", "operation"), CASES)
def test_every_fault_of_any_call_loses_and_leaks_nothing(tmp_path: Path, shape: str, operation: Operation) -> None:
    run(tmp_path, shape, operation, troubles)
