"""Which claims a node reports as not prepared, since when and why."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from driver.errors import ApiError, ClaimError, HardwareError, MpsError, StateError
from driver.model.plan import MOST_UNPREPARED, FailedClaim, FailureCause
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.checkpoint.gpu_and_claim_locks import LockTimeoutError
from kubelet_plugin.health.failed_preparations import (
    FORGOTTEN_AFTER_SECONDS,
    MOST_CHARACTERS,
    RELEASE_GRACE_SECONDS,
    FailedPreparations,
)
from kubelet_plugin.inventory.inventory import ClaimReference

CLAIM = ClaimReference("team", "train", "uid-1")


@dataclass
class Calls:
    """The kubelet's calls, by a clock of the test. ``changes`` counts the reported changes."""

    now: float = 1_800_000_000.0
    changes: int = 0
    failed: FailedPreparations = field(init=False)

    def __post_init__(self) -> None:
        notifier = ChangeNotifier()
        notifier.subscribe(NodeChange.UNPREPARED, self._changed)
        self.failed = FailedPreparations(notifier, lambda: self.now, lambda: self.now)

    def fail(self, error: Exception, claim: ClaimReference = CLAIM, verb: str = "prepare") -> None:
        with pytest.raises(type(error)), self.failed.observe(verb, claim):
            raise error

    def succeed(self, verb: str = "prepare", claim: ClaimReference = CLAIM) -> None:
        with self.failed.observe(verb, claim):
            pass

    def _changed(self) -> None:
        self.changes += 1


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (HardwareError("NVML says UNKNOWN", 999), FailureCause.GPU),
        (HardwareError("NVML says NO_PERMISSION", 4), FailureCause.NODE),
        (LockTimeoutError("waited 15 s for GPU-1"), FailureCause.GPU),
        (StateError("no space left on device"), FailureCause.NODE),
        (MpsError("no MPS daemon pod answers on this node"), FailureCause.OTHER),
        (ValueError("a defect"), FailureCause.NODE),
        (ClaimError("unknown device"), FailureCause.OTHER),
        (ApiError("no answer"), FailureCause.OTHER),
    ],
)
def test_the_report_says_what_is_at_fault_and_since_when(calls: Calls, error: Exception, cause: FailureCause) -> None:
    calls.fail(error)
    calls.now += 30
    calls.fail(error)
    assert calls.failed.reported() == (FailedClaim("team/train", "uid-1", "2027-01-15T08:00:00Z", cause, str(error)),)
    assert calls.changes == 1


@pytest.mark.parametrize("verb", ["prepare", "unprepare"])
def test_a_claim_that_is_prepared_or_released_is_reported_no_more(calls: Calls, verb: str) -> None:
    calls.fail(HardwareError("UNKNOWN"))
    calls.succeed(verb)
    assert calls.failed.reported() == ()
    assert calls.changes == 2


def test_a_release_that_fails_is_reported_apart_until_it_succeeds(calls: Calls) -> None:
    calls.fail(HardwareError("IN_USE"), verb="unprepare")
    calls.now += RELEASE_GRACE_SECONDS
    calls.fail(HardwareError("IN_USE"), verb="unprepare")
    assert calls.failed.reported() == ()
    [failed] = calls.failed.reported("unprepare")
    assert (failed.claim, failed.message, failed.cause) == ("team/train", "IN_USE", FailureCause.GPU)
    assert failed.since == "2027-01-15T08:00:00Z"
    assert calls.changes == 1
    calls.succeed("unprepare")
    assert calls.failed.reported("unprepare") == ()
    assert calls.changes == 2


def test_a_release_that_fails_only_for_a_moment_is_not_reported(calls: Calls) -> None:
    for _ in range(3):
        calls.fail(HardwareError("IN_USE"), verb="unprepare")
        calls.now += (RELEASE_GRACE_SECONDS - 1) / 3
    assert calls.failed.reported("unprepare") == ()
    calls.succeed("unprepare")
    assert calls.changes == 0


def test_another_cause_is_a_change_and_another_message_is_none(calls: Calls) -> None:
    calls.fail(ApiError("no answer for 3 s"))
    calls.fail(ApiError("no answer for 6 s"))
    assert calls.changes == 1
    calls.fail(HardwareError("UNKNOWN"))
    assert calls.changes == 2
    [failed] = calls.failed.reported()
    assert (failed.cause, failed.message) == (FailureCause.GPU, "UNKNOWN")


def test_a_claim_that_the_kubelet_has_given_up_is_forgotten(calls: Calls) -> None:
    calls.fail(HardwareError("UNKNOWN"))
    calls.now += FORGOTTEN_AFTER_SECONDS + 1
    assert calls.failed.reported() == ()


def test_the_report_has_a_limit_and_keeps_the_claims_that_fail_longest(calls: Calls) -> None:
    for number in range(MOST_UNPREPARED + 5):
        calls.fail(HardwareError("x" * 5000), ClaimReference("team", f"c-{number}", f"uid-{number}"))
    reported = calls.failed.reported()
    assert [failed.uid for failed in reported] == [f"uid-{number}" for number in range(MOST_UNPREPARED)]
    assert {len(failed.message) for failed in reported} == {MOST_CHARACTERS}


def test_claims_with_mistakes_of_their_own_hide_no_failing_gpu(calls: Calls) -> None:
    for number in range(MOST_UNPREPARED):
        calls.fail(ClaimError("unknown parameter"), ClaimReference("team", f"c-{number}", f"other-{number}"))
    calls.fail(HardwareError("UNKNOWN"))
    assert calls.failed.reported()[0].uid == "uid-1"
    assert calls.failed.reported()[0].cause is FailureCause.GPU
