"""Every operation on the node plugin's own files fails, each occurrence: full, broken and read-only disks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from driver.errors import StateError
from tests.support.claim_life import CASES, SHAPES, Aftermath, Life, Operation, aftermaths
from tests.support.disks import fill, remount, small_disk
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


@pytest.fixture(params=["state", "cdi"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The state directory or the CDI directory of a node, which is a real file system of 64 KiB."""
    folder = tmp_path / "node" / str(request.param)
    with small_disk(folder):
        yield folder


@pytest.fixture
def node(disk: Path) -> NodeUnderTest:
    return start_node(disk.parent, gpus="h100-1")


@pytest.fixture
def cuts(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """How many partitions were cut so far."""
    caplog.set_level("INFO", "kubelet_plugin.claims.partitions")
    return lambda: sum(record.getMessage() == "cut partition" for record in caplog.records)


def test_a_disk_that_is_really_full_refuses_the_claim_before_the_cut_and_takes_it_once_there_is_room(
    node: NodeUnderTest, disk: Path, cuts: Callable[[], int]
) -> None:
    claim = node.api.allocate("infer", "gpu-0-mig-1g10gb-6")
    filler = fill(disk)
    with pytest.raises(StateError, match=f"can't write {disk}/.*: No space left on device"):
        node.preparer.prepare(claim)
    assert not cuts()
    filler.unlink()
    assert node.nothing_left()
    assert node.held() == set()
    node.preparer.prepare(claim)
    assert cuts() == 1
    filler = fill(disk)
    node.preparer.unprepare(claim)  # giving back needs no room
    filler.unlink()
    assert node.nothing_left()


def test_a_disk_that_is_really_read_only_refuses_both_ways_before_any_cut_and_loses_nothing(
    node: NodeUnderTest, disk: Path, cuts: Callable[[], int]
) -> None:
    first, second = (node.api.allocate(name, f"gpu-0-mig-1g10gb-{name}") for name in "12")
    node.preparer.prepare(first)
    remount(disk, "ro")
    with pytest.raises(StateError, match="Read-only file system"):
        node.preparer.prepare(second)
    assert cuts() == 1
    with pytest.raises(StateError, match="Read-only file system"):
        node.preparer.unprepare(first)
    assert len(node.records()) == 1
    assert node.held() == {"gpu-0-mig-1g10gb-1"}
    remount(disk, "rw")
    node.preparer.unprepare(first)
    node.preparer.prepare(second)
    node.preparer.unprepare(second)
    assert node.nothing_left()
