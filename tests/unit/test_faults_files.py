"""Every operation on the node plugin's own files fails, each occurrence: full, broken and read-only disks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from driver.errors import StateError
from tests.support.claim_life import CASES, SHAPES, Aftermath, Life, Operation, aftermaths
from tests.support.faulty_files import FaultyFiles, FileTrouble, plausible
from tests.support.node import NodeUnderTest, start_node

pytestmark = pytest.mark.usefixtures("silent_log")


def troubles(operations: Sequence[str]) -> Iterator[FileTrouble]:
    for number, operation in enumerate(operations):
        for error in plausible(operation):
            for lasting in (False, True):
                yield FileTrouble(number, operation, error, lasting)


def one_each(operations: Sequence[str]) -> Iterator[FileTrouble]:
    for number, operation in enumerate(operations):
        errors = plausible(operation)
        yield FileTrouble(number, operation, errors[number % len(errors)], number % 2 == 0)


def files_of(life: Life) -> FaultyFiles:
    return FaultyFiles(life.node.root / "state", life.node.root / "cdi")


def run(
    folder: Path, shape: str, operation: Operation, cases: Callable[[Sequence[str]], Iterator[FileTrouble]]
) -> None:
    life, number, wrong = Life(folder), 0, []
    files = files_of(life)
    assert life.problems(SHAPES[shape], operation, files.faults(), Aftermath.UNPREPARE) == []
    operations = files.seen
    assert operations
    for trouble, aftermath in zip(cases(operations), aftermaths(), strict=False):
        fault = files_of(life).faults(trouble)
        found = life.problems(SHAPES[shape], operation, fault, aftermath, once=not trouble.lasting)
        wrong += [f"{trouble}, then {aftermath}: {sentence}" for sentence in found]
        number += 1
    print(f"{operation} of {shape}: {number} faults of {len(operations)} file operations: {', '.join(operations)}")
    if wrong:
        pytest.fail(f"{len(wrong)} things are wrong, such as\n" + "\n".join(wrong[:10]), pytrace=False)


@pytest.mark.long
@pytest.mark.parametrize(("shape", "operation"), CASES)
def test_a_fault_of_any_file_operation_loses_and_leaks_nothing(
    tmp_path: Path, shape: str, operation: Operation
) -> None:
    run(tmp_path, shape, operation, troubles if shape == "MIG" else one_each)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "operation"), CASES)
def test_every_fault_of_any_file_operation_loses_and_leaks_nothing(
    tmp_path: Path, shape: str, operation: Operation
) -> None:
    run(tmp_path, shape, operation, troubles)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of a node whose own files are on a real file system of 64 KiB."""
    state = tmp_path / "node" / "state"
    state.mkdir(parents=True)
    try:
        mount("-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(state))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and mount: {error}")
    yield state.parent
    subprocess.run(["/bin/umount", "-l", str(state)], check=True)


def mount(*arguments: str) -> None:
    subprocess.run(["/bin/mount", *arguments], check=True, capture_output=True)


@pytest.fixture
def node(disk: Path) -> NodeUnderTest:
    return start_node(disk, gpus="h100-1")


def test_a_disk_that_is_really_full_refuses_the_claim_and_takes_it_once_there_is_room(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", "gpu-0-mig-1g10gb-6")
    filler = node.root / "state" / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with pytest.raises(StateError, match=f"can't write {node.root}/state/claims/.*: No space left on device"):
        node.preparer.prepare(claim)
    assert node.nothing_left()
    assert node.held() == set()
    filler.unlink()
    node.preparer.prepare(claim)
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    node.preparer.unprepare(claim)  # giving back needs no room
    assert node.nothing_left()


def test_a_disk_that_is_really_read_only_refuses_both_ways_and_loses_nothing(node: NodeUnderTest) -> None:
    first, second = (node.api.allocate(name, f"gpu-0-mig-1g10gb-{name}") for name in "12")
    node.preparer.prepare(first)
    mount("-o", "remount,ro", str(node.root / "state"))
    with pytest.raises(StateError, match="Read-only file system"):
        node.preparer.prepare(second)
    with pytest.raises(StateError, match="Read-only file system"):
        node.preparer.unprepare(first)
    assert len(node.records()) == 1
    assert node.held() == {"gpu-0-mig-1g10gb-1"}
    mount("-o", "remount,rw", str(node.root / "state"))
    node.preparer.unprepare(first)
    node.preparer.prepare(second)
    node.preparer.unprepare(second)
    assert node.nothing_left()
