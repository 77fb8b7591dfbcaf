"""What can wait gives way to claims that are worked on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kubelet_plugin.claims.preparer import PreparedDevice, Preparer
from kubelet_plugin.dra.kubelet_sockets import SocketServer
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2
from kubelet_plugin.dra.service import DraService
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.reconcile.background_work import QUIET_PERIOD_SECONDS, ClaimActivity
from tests.support.kubelet import DraClient


class Waiting(threading.Event):
    """A stop that nobody waits for: waiting for it takes the time on ``now`` alone, and ``meanwhile`` happens."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.meanwhile: list[ExitStack] = []

    def clock(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        if self.meanwhile:
            self.meanwhile.pop(0).close()
        return self.is_set()


def waited(activity: ClaimActivity, most_s: float, time: Waiting) -> float:
    began = time.now
    activity.wait_idle(most_s)(time)
    return time.now - began


def test_where_no_claim_is_worked_on_nothing_waits() -> None:
    time = Waiting()
    assert waited(ClaimActivity(time.clock), 5.0, time) == 0


def test_after_the_last_claim_of_a_burst_it_is_quiet_for_a_moment_first() -> None:
    time = Waiting()
    activity, claim = ClaimActivity(time.clock), ExitStack()
    claim.enter_context(activity.working())
    time.meanwhile = [ExitStack(), ExitStack(), claim]
    assert round(waited(activity, 5.0, time), 3) == round(4 * QUIET_PERIOD_SECONDS, 3)


def test_claims_without_end_keep_nothing_waiting_for_ever() -> None:
    time = Waiting()
    activity = ClaimActivity(time.clock)
    with activity.working():
        assert round(waited(activity, 0.5, time), 3) == 0.5


def test_a_stop_ends_the_waiting() -> None:
    activity, stop = ClaimActivity(), threading.Event()
    stop.set()
    with activity.working():
        activity.wait_idle(3600)(stop)


class Worker(Preparer):
    """Claim work that notes what waits meanwhile would see."""

    def __init__(self, activity: ClaimActivity, time: Waiting) -> None:
        self.activity, self.time, self.waits = activity, time, list[float]()

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        self.waits.append(waited(self.activity, 1.0, self.time))
        return []

    def unprepare(self, reference: ClaimReference) -> None:
        self.waits.append(waited(self.activity, 1.0, self.time))


def test_preparing_and_unpreparing_are_given_way_to(tmp_path: Path) -> None:
    time = Waiting()
    activity = ClaimActivity(time.clock)
    worker = Worker(activity, time)
    service = DraService(worker, activity.working)
    with ExitStack() as stack:
        stack.callback(service.close)
        stack.callback(SocketServer(tmp_path / "dra.sock", [service.handler()]).stop)
        kubelet = DraClient(tmp_path / "dra.sock")
        stack.callback(kubelet.channel.close)
        for verb in ("Prepare", "Unprepare"):
            kubelet.call(dra_v1_pb2, verb, [("default", "claim", "uid-1")])
    assert [round(wait, 3) for wait in worker.waits] == [1.0, 1.0]
