"""Asking GPUs that may hang."""

from __future__ import annotations

import threading

import pytest

from driver.errors import HardwareError
from driver.hardware.host import TimeoutRunner
from tests.harness.waiting import wait_for


def lasting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("nvml") and not thread.daemon]


def test_once_a_gpu_has_answered_nothing_keeps_the_process_from_ending() -> None:
    runner = TimeoutRunner(60)
    assert [runner.run(gpu, lambda: "here") for gpu in range(3)] == ["here"] * 3
    wait_for(lambda: not lasting(), 60, "the end of the threads that asked")


def test_a_gpu_that_hangs_keeps_its_thread_and_is_not_asked_again_until_it_is_back() -> None:
    runner, answers = TimeoutRunner(0.05), threading.Event()
    with pytest.raises(HardwareError, match="did not answer within"):
        runner.run(0, answers.wait)
    with pytest.raises(HardwareError, match="has not answered for more than"):
        runner.run(0, answers.wait)
    assert len(lasting()) == 1
    answers.set()
    wait_for(lambda: not lasting(), 60, "the end of the question that hung")
    assert TimeoutRunner(60).run(0, lambda: "back") == runner.run(0, lambda: "back") == "back"


def test_who_asks_gets_what_the_question_raises() -> None:
    def refuse() -> str:
        raise LookupError("no such GPU")

    with pytest.raises(LookupError, match="no such GPU"):
        TimeoutRunner(60).run(0, refuse)
