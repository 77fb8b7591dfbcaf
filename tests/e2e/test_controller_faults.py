"""A controller that is killed, stopped, cut off or wrong, and such nodes: nothing held is touched, none waits long."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.bench.placement.measures import count_refusals
from tests.harness.cluster import Cluster
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.faults import Circumstances, FaultyController, Point, signal_scheduler
from tests.support.field import FULL, LARGE, MIDDLE, SERVED_S, SMALL, SOON_S, Field, field, take_lease
from tests.support.partition import Wire
from tests.support.slow_watches import SlowWatches

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(900)]

BEYOND_K = 3
"""One more than is offered while nobody waits: the third needs a controller."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("faults") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[Field]:
    with field(cluster) as found:
        yield found


@pytest.fixture
def quiet(nodes: Field) -> Iterator[Field]:
    """With nothing held at the start and nothing held at the end."""
    yield nodes
    nodes.end_all()


def stir(nodes: Field, before: list[str]) -> list[str]:
    """Let jobs go and others come: offers move, so that some are taken back."""
    nodes.jobs.end(*before)
    return [*nodes.ask(FULL), *nodes.ask(MIDDLE), *nodes.ask(LARGE)]


def points_of(nodes: Field, cluster: Cluster, circumstances: Circumstances) -> list[Point]:
    """Every point that a controller comes to in its life, in that order, found by watching one."""
    first = FaultyController(cluster, "watched", circumstances)
    first.start()
    wait_for(first.leads, 60, "the first leads")
    nodes.wait_curated()
    jobs = stir(nodes, [])
    nodes.served(*jobs)
    jobs = stir(nodes, jobs)
    nodes.served(*jobs)
    nodes.wait_curated()
    nodes.jobs.end(*jobs)
    first.stop()
    return list(dict.fromkeys(seen.point for seen in first.seen()))


class Succession:
    """Controllers one after the other: each is killed at its point, and the next one waits already."""

    def __init__(self, nodes: Field, cluster: Cluster, circumstances: Circumstances, stack: ExitStack) -> None:
        self._nodes, self._cluster, self._circumstances, self._stack = nodes, cluster, circumstances, stack
        self._made = 0
        self._leader = self._next()
        self._jobs: list[str] = []
        self.took: dict[str, float] = {}
        wait_for(self._leader.leads, 60, "the first of them leads")

    def _next(self) -> FaultyController:
        self._made += 1
        found = FaultyController(self._cluster, f"c{self._made}", self._circumstances)
        found.start()
        self._stack.callback(found.kill)
        return found

    def _stir_until_killed(self, leader: FaultyController, *points: Point) -> None:
        """Some points are come to only when something is taken back once more.

        Jobs that are like the ones before may get what those had, for ever; so more come, and more go, each other time.
        """
        for more, last in ((0, False), (4, False), (0, False), (4, False), (0, True)):
            self._jobs = [*stir(self._nodes, self._jobs), *self._nodes.ask(SMALL, more)]
            try:
                wait_for(lambda: not leader.running, 15, f"the controller to be killed {', '.join(map(str, points))}")
                return
            except DeadlineError:
                if last:
                    raise

    def kill(self, *points: Point, wait_for_lease: bool) -> None:
        """Kill the leader there; what waits is served by the next in time, and all is well."""
        standby, leader = self._next(), self._leader
        leader.order(signal.SIGKILL, *points)
        self._stir_until_killed(leader, *points)
        if not wait_for_lease:
            take_lease(self._cluster)
        waiting = self._nodes.ask(SMALL, BEYOND_K)
        name = ", then ".join(map(str, points))
        self.took[name] = self._nodes.served(*self._jobs, *waiting, within_s=SERVED_S)
        self._nodes.untouched()
        wait_for(lambda: not self._nodes.fenced_though_offered(), SOON_S, f"{name}: nothing offered is fenced")
        self._nodes.jobs.end(*waiting)
        # Only then may there be another candidate: who is served from what was offered before says nothing of this.
        wait_for(standby.leads, 60, f"{name}: the next leads")
        self._leader = standby


def kill_everywhere(nodes: Field, cluster: Cluster, circumstances: Circumstances, *, everywhere: bool) -> None:
    points = points_of(nodes, cluster, circumstances)
    assert {point.step for point in points} >= {"decide", "write-plan", "fence", "check", "lift", "withdraw"}
    cases = [[point] for point in points] + [[point, point] for point in points]
    cases = cases if everywhere else cases[: len(points) : 4]
    allocations = nodes.allocations
    unpublished, republished = allocations.unpublished, allocations.republished
    with ExitStack() as stack:
        succession = Succession(nodes, cluster, circumstances, stack)
        holders = [*nodes.ask(SMALL, node="n1"), *nodes.ask(FULL, node="n2")]
        nodes.served(*holders)
        had = {name: nodes.allocations.of(name) for name in holders}
        for case in cases:
            succession.kill(*case, wait_for_lease=everywhere)
            assert {name: nodes.allocations.of(name) for name in holders} == had
    slowest = max(succession.took, key=lambda name: succession.took[name])
    took = sorted(succession.took.values())
    print(
        f"{len(cases)} kills, {len(points)} points found; who waited was served {took[len(took) // 2]:.1f} s "
        f"(median) to {took[-1]:.1f} s ({slowest}) after they came; "
        f"GPUs with held devices were unpublished {allocations.unpublished - unpublished} times "
        f"and came back {allocations.republished - republished} times"
    )


COUNTED, DISJOINT = Circumstances(), Circumstances(offer_mode="disjoint")


@pytest.mark.parametrize(
    ("circumstances", "everywhere"),
    [
        pytest.param(COUNTED, False, id="counted, some points"),
        pytest.param(COUNTED, True, id="counted, all points", marks=pytest.mark.slow),
        pytest.param(DISJOINT, True, id="disjoint, all points", marks=pytest.mark.slow),
    ],
)
def test_a_controller_killed_at_any_point_leaves_nothing_touched_and_the_next_serves_who_waits(
    quiet: Field, cluster: Cluster, circumstances: Circumstances, everywhere: bool
) -> None:
    kill_everywhere(quiet, cluster, circumstances, everywhere=everywhere)


Start = Callable[..., FaultyController]


@pytest.fixture
def start(cluster: Cluster) -> Iterator[Start]:
    """Starts a controller; all are gone when the test ends."""
    with ExitStack() as stack:

        def started(name: str, circumstances: Circumstances | None = None) -> FaultyController:
            found = FaultyController(cluster, name, circumstances)
            found.start()
            stack.callback(found.kill)
            return found

        yield started


@contextmanager
def nobody_schedules(cluster: Cluster) -> Iterator[None]:
    """While the block runs: pods wait, and the controller sees it."""
    signal_scheduler(cluster, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_scheduler(cluster, signal.SIGCONT)


def leading(nodes: Field, controller: FaultyController) -> FaultyController:
    wait_for(controller.leads, 60, "it leads")
    nodes.wait_curated()
    return controller


SMALL_PROFILE, MANY = "1g.10gb", 8


def surplus(nodes: Field, cluster: Cluster) -> None:
    """Many small devices are offered on the second node, and then nobody wants them."""
    with nobody_schedules(cluster):
        impatient = nodes.ask(SMALL, MANY, node="n2")
        wait_for(lambda: len(nodes.offered_on("n2", SMALL_PROFILE)) >= MANY, SOON_S, "offers for all of them")
        nodes.jobs.end(*impatient)


def stopped_while_taking_back(nodes: Field, cluster: Cluster, start: Start, *points: Point) -> FaultyController:
    """A leader that was stopped at ``points`` while it took offers back; another leads since."""
    first = leading(nodes, start("first"))
    second = start("second")
    first.order(signal.SIGSTOP, *points)
    surplus(nodes, cluster)
    wait_for(first.obeyed, 60, "the first is stopped")
    wait_for(second.leads, 60, "the second leads")
    return first


def test_a_plan_that_a_stopped_leader_writes_late_touches_nothing_that_was_given_out_since(
    quiet: Field, cluster: Cluster, start: Start
) -> None:
    first = stopped_while_taking_back(quiet, cluster, start, Point("withdraw", "after"), Point("write-plan", "before"))
    quiet.kubelets.working.clear()  # what is prepared is safe anyway
    jobs = quiet.ask(SMALL, MANY, node="n2")
    quiet.served(*jobs)
    written = len(first.seen())
    first.signal(signal.SIGCONT)
    wait_for(lambda: Point("write-plan", "after") in [seen.point for seen in first.seen()[written:]], 60, "it writes")
    more = quiet.ask(FULL, 2)
    quiet.served(*more)
    quiet.kubelets.working.set()
    quiet.untouched()
    wait_for(lambda: all(map(quiet.kubelets.settled, jobs + more)), SOON_S, "all are prepared")
    assert not quiet.kubelets.refused


@pytest.mark.slow
def test_a_fence_that_a_stopped_leader_writes_late_keeps_nobody_waiting(
    quiet: Field, cluster: Cluster, start: Start
) -> None:
    first = stopped_while_taking_back(quiet, cluster, start, Point("fence", "before"))
    with nobody_schedules(cluster):
        jobs = quiet.ask(SMALL, MANY, node="n2")
        wait_for(lambda: len(quiet.offered_on("n2", SMALL_PROFILE)) >= MANY, SOON_S, "offers for all of them")
        before = quiet.fenced()
        first.signal(signal.SIGCONT)
        wait_for(lambda: quiet.fenced() != before, SOON_S, "the late fence")
    quiet.served(*jobs, within_s=2 * SERVED_S)
    quiet.untouched()


@pytest.mark.slow
def test_a_leader_that_is_cut_off_gives_way_and_does_no_harm_when_it_is_back(
    quiet: Field, cluster: Cluster, start: Start
) -> None:
    with Wire(cluster.server) as wire:
        first = leading(quiet, start("first", Circumstances(server=wire.url)))
        start("second")
        holders = quiet.ask(MIDDLE, 2)
        quiet.served(*holders)
        wire.cut()
        jobs = quiet.ask(SMALL, BEYOND_K + 4)
        took = quiet.served(*jobs)
        print(f"cut off: who waited was served after {took:.1f} s")
        quiet.untouched()
        wire.mend()
        wait_for(lambda: "leadership lost" in first.log.read_text(), SOON_S, "the first gives way")
        decisions = [seen for seen in first.seen() if seen.point == ("decide", "before")]
        quiet.served(*quiet.ask(SMALL, BEYOND_K))
        quiet.untouched()
        assert [seen for seen in first.seen() if seen.point == ("decide", "before")] == decisions


@pytest.mark.slow
@pytest.mark.parametrize("resource", ["resourceclaims", "resourceslices", "pods", "gpunodeplans"])
def test_a_controller_that_hears_late_harms_nothing(
    quiet: Field, cluster: Cluster, start: Start, resource: str
) -> None:
    authority = cluster.directory / "pki" / "ca.crt"
    with SlowWatches(cluster.server, authority, (resource,)) as watches:
        leading(quiet, start("late", Circumstances(lease_s=15, server=watches.url)))
        watches.delay_s = 3.0
        jobs: list[str] = []
        took = []
        for _ in range(6):
            jobs = stir(quiet, jobs)
            jobs += quiet.ask(SMALL, BEYOND_K)
            took.append(quiet.served(*jobs[-BEYOND_K:], within_s=SERVED_S + 3 * watches.delay_s))
            quiet.served(*jobs, within_s=SERVED_S + 3 * watches.delay_s)
            quiet.untouched()
        print(f"{resource} 3 to 6 s late: served after {min(took):.1f} to {max(took):.1f} s")
        watches.delay_s = 0.0


@pytest.mark.slow
def test_a_node_that_ignores_its_plan_harms_nobody_and_what_waits_is_served_elsewhere(
    quiet: Field, start: Start
) -> None:
    leading(quiet, start("first"))
    holders = [*quiet.ask(MIDDLE, 2, node="n1"), *quiet.ask(SMALL, node="n2")]
    quiet.served(*holders)
    wait_for(lambda: all(map(quiet.kubelets.settled, holders)), SOON_S, "they are prepared")
    quiet.kubelets.working.clear()
    os.kill(quiet.nodes[0].pid, signal.SIGSTOP)
    try:
        took = [quiet.served(*quiet.ask(kind, BEYOND_K)) for kind in (SMALL, LARGE, SMALL)]
    finally:
        os.kill(quiet.nodes[0].pid, signal.SIGCONT)
        quiet.kubelets.working.set()
    print(f"one of two nodes ignores its plan: served after at most {max(took):.1f} s")
    wait_for(lambda: all(map(quiet.kubelets.settled, quiet.jobs.names)), SOON_S, "all are prepared")
    assert not quiet.kubelets.refused
    quiet.untouched()


def test_a_plan_for_a_gpu_that_is_gone_keeps_nobody_waiting(quiet: Field, start: Start) -> None:
    leading(quiet, start("first", Circumstances(publish_held=True)))
    [holder] = quiet.ask(SMALL)
    quiet.served(holder)
    [held] = quiet.allocations.of(holder)
    wait_for(lambda: held in quiet.allocations.published(), SOON_S, "what is held is in the slices: Always")
    [node] = [node for node in quiet.nodes if held.pool.startswith(node.node.name)]
    gone = held.device.split("-")[1]
    node.fault("remove", "--gpu", gone)
    try:
        took = quiet.served(*quiet.ask(SMALL, BEYOND_K), *quiet.ask(FULL))
        print(f"a GPU with offers is gone: served after {took:.1f} s")
        quiet.untouched()
    finally:
        node.fault("return", "--gpu", gone)


@pytest.mark.slow
def test_controllers_whose_clocks_are_hours_off_lead_and_follow_as_any(
    quiet: Field, cluster: Cluster, start: Start
) -> None:
    lease = "/apis/coordination.k8s.io/v1/namespaces/tessera/leases/tessera-controller"
    first = leading(quiet, start("first", Circumstances(clock_off_s=-7200)))
    second = start("second", Circumstances(clock_off_s=7200))
    renewals = set()

    def renewed() -> bool:
        spec = cluster.api.get(lease)["spec"]
        assert spec["holderIdentity"] == "tessera-first"
        renewals.add(spec["renewTime"])
        return len(renewals) > 15

    wait_for(renewed, 60, "fifteen renewals")
    assert quiet.modes() == ["Planned", "Planned"]
    first.kill()
    killed = time.monotonic()
    wait_for(second.leads, 60, "the second leads")
    print(f"clocks 4 hours apart: taken over {time.monotonic() - killed:.1f} s after the kill")
    quiet.served(*quiet.ask(SMALL, BEYOND_K))
    assert quiet.modes() == ["Planned", "Planned"]
    quiet.untouched()


@pytest.mark.slow
def test_without_any_controller_left_nodes_offer_everything_again_and_nothing_of_it_is_fenced(
    quiet: Field, start: Start
) -> None:
    first = leading(quiet, start("first"))
    surplus(quiet, quiet.cluster)
    first.kill()
    killed = time.monotonic()
    wait_for(lambda: quiet.modes() == ["Alone", "Alone"], 120, "nodes stand alone")
    print(f"nodes stand alone {time.monotonic() - killed:.0f} s after the kill; {len(quiet.fenced())} devices fenced")
    jobs = [*quiet.ask(SMALL, MANY), *quiet.ask(MIDDLE, 3), *quiet.ask(FULL)]
    quiet.untouched()
    try:
        quiet.served(*jobs)
    finally:
        print(f"refused by the fence: {count_refusals(quiet.cluster.logs_dir / 'kube-scheduler.log')}")
