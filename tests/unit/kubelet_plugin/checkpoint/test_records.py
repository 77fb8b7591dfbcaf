"""The checkpoint: what was written comes back, and what makes no sense is set aside, never guessed at."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from driver.errors import EnvironmentFault, StateError
from driver.model.gpu import Partition, Placement
from driver.model.offer import DeviceKind
from kubelet_plugin.checkpoint.files import remove, write_atomically
from kubelet_plugin.checkpoint.records import Checkpoint, ClaimRecord, DeviceRecord

PARTITION = Partition("GPU-1", 19, Placement(6, 1), 3, 0, "MIG-1")


def record(uid: str = "u1") -> ClaimRecord:
    full = DeviceRecord(("train",), "pool", "gpu-1", 1, "GPU-2", DeviceKind.FULL)
    small = DeviceRecord(("gpu",), "pool", "gpu-0-mig", 0, "GPU-1", DeviceKind.PARTITION, "1g.10gb", 19, 6, 1)
    return ClaimRecord(1, "default", "infer", uid, "preparing", (small, full))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path)


def test_a_record_comes_back_in_another_process(tmp_path: Path, checkpoint: Checkpoint) -> None:
    cut = record().devices[0].with_partition(PARTITION)
    written = ClaimRecord(1, "default", "infer", "u1", "prepared", (cut, record().devices[1]))
    checkpoint.put(record())
    checkpoint.put(written)
    again = Checkpoint(tmp_path)
    assert again.load() == [written]
    assert again.get("u1") == written
    assert written.devices[0].partition == PARTITION
    assert written.devices[1].partition is None
    assert written.gpu_uuids == {"GPU-1", "GPU-2"}


def test_a_removed_record_is_gone_and_removing_it_again_is_fine(tmp_path: Path, checkpoint: Checkpoint) -> None:
    checkpoint.put(record())
    checkpoint.remove("u1")
    checkpoint.remove("u1")
    assert checkpoint.get("u1") is None
    assert Checkpoint(tmp_path).load() == []


def test_files_and_directories_are_for_root_alone(tmp_path: Path) -> None:
    state = tmp_path / "new" / "state"
    Checkpoint(state).put(record())
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (state, state / "claims", state / "claims/u1.json")
    }
    assert modes == {"state": 0o700, "claims": 0o700, "u1.json": 0o600}


def good() -> dict[str, Any]:
    device = {
        "requests": ["gpu"],
        "pool": "p",
        "device": "gpu-0",
        "number": 0,
        "gpuUUID": "GPU-1",
        "kind": "gpu",
    }
    return {
        "version": 1,
        "namespace": "default",
        "name": "infer",
        "uid": "u1",
        "phase": "prepared",
        "devices": [device],
    }


DAMAGED = {
    "empty": b"",
    "truncated": json.dumps(good()).encode()[:-20],
    "garbage": b"\x00\xff\xfe garbage",
    "another shape": b"[]",
    "a newer version": json.dumps(good() | {"version": 3}).encode(),
    "another claim's": json.dumps(good() | {"uid": "u2"}).encode(),
    "an unknown phase": json.dumps(good() | {"phase": "pondering"}).encode(),
    "no devices": json.dumps({key: value for key, value in good().items() if key != "devices"}).encode(),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_set_aside_and_the_others_are_read(
    tmp_path: Path, checkpoint: Checkpoint, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.put(record("u0"))
    (tmp_path / "claims" / "u1.json").write_bytes(data)
    assert [found.uid for found in Checkpoint(tmp_path).load()] == ["u0"]
    aside = tmp_path / "claims" / "u1.unreadable"
    assert aside.read_bytes() == data
    assert vars(caplog.records[0])["keptAs"] == str(aside)
    assert [found.uid for found in Checkpoint(tmp_path).load()] == ["u0"]


def test_something_that_is_no_file_is_set_aside_too(tmp_path: Path, checkpoint: Checkpoint) -> None:
    (tmp_path / "claims" / "u1.json").mkdir()
    assert checkpoint.load() == []
    assert (tmp_path / "claims" / "u1.unreadable").is_dir()


def test_what_a_crash_left_half_written_is_swept_away(tmp_path: Path, checkpoint: Checkpoint) -> None:
    checkpoint.put(record())
    half = tmp_path / "claims" / ".u2.json.tmp"
    half.write_text("{")
    assert [found.uid for found in Checkpoint(tmp_path).load()] == ["u1"]
    assert not half.exists()


def test_a_state_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match=f"--state-dir {tmp_path / 'file' / 'state'}: can't be used: Not a dir"):
        Checkpoint(tmp_path / "file" / "state")


def test_a_directory_that_vanished_is_an_error_and_not_a_traceback(tmp_path: Path, checkpoint: Checkpoint) -> None:
    (tmp_path / "claims").rmdir()
    with pytest.raises(StateError, match=f"can't write {tmp_path}/claims/u1.json: No such file"):
        checkpoint.put(record())
    with pytest.raises(StateError, match=f"can't read the checkpoint in {tmp_path}/claims"):
        checkpoint.load()


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    (target / "inside").write_text("old")
    with pytest.raises(StateError, match=f"can't write {target}"):
        write_atomically(target, b"new", durable=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


def test_a_temporary_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".spec.tmp").symlink_to(victim)
    with pytest.raises(StateError):
        write_atomically(tmp_path / "spec", b"new", durable=False, mode=0o644)
    assert victim.read_text() == "precious"


def test_removing_a_link_removes_the_link(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    remove(tmp_path / "dangling", durable=True)
    assert list(tmp_path.iterdir()) == []
