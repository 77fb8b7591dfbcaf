"""Locks by key: exclusion, no circles, and an error that names who is waited for."""

from __future__ import annotations

import threading

import pytest

from kubelet_plugin.checkpoint.gpu_and_claim_locks import KeyedLocks, LockTimeoutError
from tests.harness.waiting import wait_for


def test_one_key_is_held_by_one_at_a_time() -> None:
    locks, inside, most = KeyedLocks(), [0], [0]
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for _ in range(50):
            with locks.hold(["gpu"], f"claim {number}"):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    run_all(work, 8)
    assert most == [1]


def test_opposite_orders_do_not_wait_for_each_other_in_a_circle() -> None:
    locks, done = KeyedLocks(timeout_seconds=20), []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        keys = ["a", "b", "c"] if number % 2 else ["c", "b", "a"]
        start.wait()
        for _ in range(50):
            with locks.hold(keys, f"claim {number}"):
                pass
        done.append(number)

    run_all(work, 4)
    assert sorted(done) == [0, 1, 2, 3]


def test_different_keys_do_not_wait() -> None:
    locks = KeyedLocks(timeout_seconds=0)
    with locks.hold(["a"], "one"), locks.hold(["b"], "two"):
        pass


def test_at_the_deadline_the_holder_is_named_and_nothing_is_kept() -> None:
    locks = KeyedLocks(timeout_seconds=0)
    with locks.hold(["b"], "claim default/slow"):
        with (
            pytest.raises(LockTimeoutError, match=r"claim default/late waited 0 s for b, which is in use by claim def"),
            locks.hold(["a", "b", "c"], "claim default/late"),
        ):
            raise AssertionError("was let in")
        with locks.hold(["a", "c"], "claim default/other"):
            pass
    with locks.hold(["a", "b", "c"], "claim default/late"):
        pass


def test_an_error_inside_gives_everything_back_and_nothing_is_remembered() -> None:
    locks = KeyedLocks(timeout_seconds=0)
    with pytest.raises(RuntimeError), locks.hold(["a", "b"], "one"):
        raise RuntimeError
    with locks.hold(["a", "b", "a"], "two"):
        pass
    assert locks._entries == {}


def run_all(work: object, count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_who_waits_for_whom_can_be_seen() -> None:
    locks = KeyedLocks(timeout_seconds=20)
    with locks.hold(["GPU-1"], "claim default/slow"):
        late = threading.Thread(target=run_late, args=(locks,))
        late.start()
        wait_for(locks.waits, 60, "somebody who waits")
        [line] = locks.waits()
    late.join(60)
    assert line.startswith("claim default/late waits for GPU-1, which is in use by claim default/slow since ")
    assert locks.waits() == []


def test_a_long_wait_is_logged_and_ends_well(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("kubelet_plugin.checkpoint.gpu_and_claim_locks.LONG_WAIT_SECONDS", 0.01)
    locks = KeyedLocks(timeout_seconds=20)
    with locks.hold(["GPU-1"], "claim default/slow"):
        late = threading.Thread(target=run_late, args=(locks,))
        late.start()
        wait_for(lambda: "waits" in caplog.messages, 60, "the line in the log")
    late.join(60)
    [record] = caplog.records
    assert vars(record)["work"] == "claim default/late"
    assert vars(record)["lock"] == "GPU-1"


def run_late(locks: KeyedLocks) -> None:
    with locks.hold(["GPU-1"], "claim default/late"):
        pass
