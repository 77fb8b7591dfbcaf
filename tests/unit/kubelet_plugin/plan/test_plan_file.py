"""What a node remembers about its plan, on a disk that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.errors import StateError
from driver.model.plan import PlanMode
from kubelet_plugin.plan.plan_file import PlanFile, PlanMemory
from tests.support.following import GivenStore


def test_what_could_not_be_saved_is_saved_by_the_next_call_although_nothing_differs() -> None:
    saved: list[PlanMemory] = []
    is_full = True

    def keep(memory: PlanMemory) -> None:
        if is_full:
            raise StateError("no space left on device")
        saved.append(memory)

    memory = GivenStore(None, keep)
    memory.change(durable=True, unpublished=("GPU-1",))
    is_full = False
    memory.change(durable=True, unpublished=("GPU-1",))
    memory.change(durable=True, unpublished=("GPU-1",))
    assert saved == [memory.now]
    assert memory.now.unpublished == ("GPU-1",)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff"])
def test_a_file_that_cannot_be_read_is_reported_and_the_node_starts_as_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    memory = PlanFile(tmp_path)
    assert memory.is_new
    assert memory.now.mode is PlanMode.STANDALONE
    assert str(tmp_path / "plan.json") in caplog.records[0].__dict__["error"]


def test_a_new_node_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert PlanFile(tmp_path).is_new
    assert caplog.records == []
