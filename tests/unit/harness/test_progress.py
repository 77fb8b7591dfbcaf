"""What the harness tells people while it works or waits."""

from __future__ import annotations

import io

import pytest

from driver.errors import ApiError
from tests.harness.progress import Progress, duration
from tests.harness.waiting import DeadlineError, wait_for


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (4.25, "4.2 s"), (42.4, "42 s"), (185, "3 min 05 s"), (3725, "1 h 02 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_log_gets_a_line_now_and_then() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(out, clock, terminal=False).part("building it", 90) as part:
        for clock.now in range(1, 46):
            part.tick(f"{clock.now:g} packages")
    assert out.getvalue().splitlines() == [
        "building it ... usually about 1 min 30 s",
        "building it: 20 s so far, usually about 1 min 30 s (20 packages)",
        "building it: 40 s so far, usually about 1 min 30 s (40 packages)",
        "building it: done after 45 s",
    ]


def test_a_terminal_gets_one_line_that_changes() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(out, clock, terminal=True).part("building it") as part:
        clock.now = 1
        part.tick()
    text = "building it ...", "building it: 1.0 s so far", "building it: done after 1.0 s"
    assert out.getvalue() == "".join(f"\r\x1b[K{line}" for line in text) + "\n"


def test_what_fails_is_called_failed() -> None:
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress(out, Clock()).part("building it"):
        raise KeyboardInterrupt
    assert out.getvalue().splitlines()[-1] == "building it: failed after 0.0 s"


def test_waiting_returns_what_came_true() -> None:
    values = iter([None, 0, "seen"])
    assert wait_for(lambda: next(values), 5, "a value", interval_s=0) == "seen"


def test_waiting_in_vain_shows_the_last_value() -> None:
    with pytest.raises(DeadlineError, match=r"seven: not within 0 s; last seen: \[\]"):
        wait_for(list, 0, "seven")


def test_an_error_that_may_pass_counts_as_not_yet() -> None:
    def refuse() -> bool:
        raise ApiError("connection refused")

    with pytest.raises(DeadlineError, match=r"an answer: .*connection refused"):
        wait_for(refuse, 0, "an answer")


def test_an_error_that_will_not_pass_ends_the_wait() -> None:
    with pytest.raises(ZeroDivisionError):
        wait_for(lambda: 1 / 0, 60, "a miracle")
