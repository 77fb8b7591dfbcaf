"""A node plugin that starts while NVML or its disk is in trouble: it starts and is right later, or ends with one error.

Whatever it found is there again at the next look, and nothing of what it found was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path

import pynvml
import pytest

from driver.errors import RecoverableError
from tests.support.faulty_files import FaultyFiles, FileTrouble, plausible
from tests.support.faulty_nvml import CODES, Mode, Trouble
from tests.support.start_life import Found, Next, StartLife

Fault = Callable[[StartLife], AbstractContextManager[object]]


pytestmark = pytest.mark.usefixtures("silent_log")


def run(life: StartLife, what: str, cases: Sequence[tuple[object, Fault]]) -> None:
    wrong: list[str] = []
    for (trouble, fault), then in zip(cases, cycle(Next), strict=False):
        wrong += [f"{trouble}, then {then}: {sentence}" for sentence in life.problems(fault, then)]
    print(f"start with {what}: {len(cases)} faults")
    if wrong:
        pytest.fail(f"{len(wrong)} things are wrong, such as\n" + "\n".join(wrong[:20]), pytrace=False)


def nvml_fault(trouble: Trouble) -> Fault:
    return lambda life: life.nvml.faults(trouble)


def nvml_calls(life: StartLife) -> Sequence[str]:
    nvml = life.nvml
    assert life.problems(lambda now: now.nvml.faults(), Next.LOOK) == []
    assert len(nvml.seen) > 80
    return nvml.seen


@pytest.mark.long
@pytest.mark.parametrize("found", list(Found))
def test_a_start_with_nvml_in_trouble_loses_nothing(tmp_path: Path, found: Found) -> None:
    life = StartLife(tmp_path, found)
    calls, codes = nvml_calls(life), cycle(CODES)
    every = [Trouble(at, call, next(codes), (Mode.ONCE, Mode.DEAD)[at % 2]) for at, call in enumerate(calls)]
    run(life, found, [(trouble, nvml_fault(trouble)) for trouble in every[:: 3 if found is Found.PREPARED else 12]])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("found", list(Found))
def test_a_start_with_nvml_in_any_trouble_loses_nothing(tmp_path: Path, found: Found) -> None:
    life = StartLife(tmp_path, found)
    calls = nvml_calls(life)
    modes = (Mode.ONCE, Mode.DEAD)
    every = [Trouble(at, call, code, mode) for at, call in enumerate(calls) for code in CODES for mode in modes]
    run(life, found, [(trouble, nvml_fault(trouble)) for trouble in every[:: 1 if found is Found.PREPARED else 5]])


def file_fault(trouble: FileTrouble | None, seen: list[str] | None = None) -> Fault:
    def fault(life: StartLife) -> AbstractContextManager[object]:
        files = FaultyFiles(life.root / "state", life.root / "cdi")
        if seen is not None:
            files.seen = seen
        return files.faults(trouble)

    return fault


def file_faults(life: StartLife) -> list[tuple[FileTrouble, Fault]]:
    seen: list[str] = []
    assert life.problems(file_fault(None, seen), Next.LOOK) == []
    assert seen
    every = [
        FileTrouble(at, operation, error, lasting)
        for at, operation in enumerate(seen)
        for error in plausible(operation)
        for lasting in (False, True)
    ]
    return [(trouble, file_fault(trouble)) for trouble in every]


@pytest.mark.long
@pytest.mark.parametrize("found", list(Found))
def test_a_start_with_a_disk_in_trouble_loses_nothing(tmp_path: Path, found: Found) -> None:
    life = StartLife(tmp_path, found)
    run(life, found, file_faults(life)[::3])


@pytest.mark.slow
@pytest.mark.parametrize("found", list(Found))
def test_a_start_with_a_disk_in_any_trouble_loses_nothing(tmp_path: Path, found: Found) -> None:
    life = StartLife(tmp_path, found)
    run(life, found, file_faults(life))


def test_a_profile_that_nvml_keeps_back_at_the_start_does_not_cost_the_partition(tmp_path: Path) -> None:
    life = StartLife(tmp_path, Found.PREPARED)
    calls = nvml_calls(life)
    for name in ("nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstanceProfileInfo"):
        trouble = Trouble(calls.index(name), name, pynvml.NVML_ERROR_NOT_SUPPORTED)
        with life.nvml.faults(trouble):
            node = life.start()
        with pytest.raises(RecoverableError, match=r"NVML knows no profile 1g\.10gb .* at present"):
            node.preparer.unprepare(life.claim)
        node.scanner.scan(node.node.inventory)
        node.preparer.unprepare(life.claim)
        assert node.nothing_left()
        life.problems(lambda now: now.nvml.faults(), Next.LOOK)
