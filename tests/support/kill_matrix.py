"""Which kills there are: every point of every scenario, the points found by watching each scenario once unharmed.

A scenario is what is allocated (the shape) and what is being done when the plugin is killed (the deed). After the kill
the plugin is started again, the kubelet repeats what was not answered or gives it up, and what must hold is checked
after each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.harness.waiting import wait_for
from tests.support.invariants import leftovers
from tests.support.kill_node import SOON_S, KillNode, Look, Wanted
from tests.support.killable import Point


@dataclass(frozen=True)
class Shape:
    """What one call is about. ``mig``: the MIG mode of both GPUs before, such that it has to be switched."""

    name: str
    claims: Sequence[Wanted]
    mig: tuple[bool, bool]


SHARED = "gpu-0-shared"

SHAPES = (
    Shape("full", [Wanted(["gpu-0"])], (True, False)),
    Shape("MIG", [Wanted(["gpu-0-mig-1g10gb-6"])], (False, False)),
    Shape("several devices", [Wanted(["gpu-0-mig-3g40gb-4", "gpu-0-mig-1g10gbme-0", "gpu-1"])], (False, True)),
    Shape(
        "several claims",
        [Wanted(["gpu-0-mig-2g20gb-0"]), Wanted(["gpu-0-mig-1g10gb-3"]), Wanted(["gpu-1"])],
        (False, True),
    ),
    Shape("shares", [Wanted(["gpu-0-share-1"], "Long"), Wanted(["gpu-0-share-2"], "Short")], (True, False)),
    Shape(
        "memory",
        [Wanted([SHARED], gib=6, pod=1), Wanted([SHARED], gib=2, pod=1), Wanted([SHARED], gib=70, pod=2)],
        (True, False),
    ),
    Shape("MPS", [Wanted(["gpu-1-shared"], gib=6, pod=1), Wanted(["gpu-1-shared"], gib=2, pod=2)], (False, True)),
)


@dataclass(frozen=True)
class Deed:
    """``prepare`` brings the node to where ``act`` begins; ``act`` is what the plugin is killed in.

    ``starts``: the plugin is started in ``act``. ``given_up``: the kubelet gives up instead of trying again.
    ``whole``: what is prepared is whole when the plugin is killed, so that it is before the kubelet asks again, too.
    ``heals``: nobody asks, the plugin makes everything right by itself, soon after its start.
    ``cut``: ``prepare`` ends with a kill, so that slices may be written before it or in ``act``.
    """

    name: str
    prepare: Callable[[KillNode], None]
    act: Callable[[KillNode], None]
    starts: bool = False
    given_up: bool = False
    whole: bool = True
    heals: bool = False
    cut: bool = False


@dataclass(frozen=True)
class Scenario:
    shape: Shape
    deed: Deed

    def __str__(self) -> str:
        return f"{self.deed.name}, {self.shape.name}"


@dataclass(frozen=True)
class Case:
    """One kill."""

    scenario: Scenario
    point: Point

    def __str__(self) -> str:
        return f"{self.scenario}: killed {self.point}"


def _prepare(node: KillNode) -> None:
    node.kubelet.prepare(node.claims)


def _unprepare(node: KillNode) -> None:
    node.kubelet.unprepare(node.claims)


def _nothing(node: KillNode) -> None:
    pass


def _prepare_and_reboot(node: KillNode) -> None:
    _prepare(node)
    node.settle()
    node.reboot()


def _prepare_and_stop(node: KillNode) -> None:
    _prepare(node)
    node.settle()
    node.kill()


def _prepare_and_lose(node: KillNode) -> None:
    _prepare_and_stop(node)
    node.lose()


def _prepare_cut_short(node: KillNode) -> None:
    """The first claim's; the others are prepared. One call for all would leave them who knows where."""
    node.kubelet.prepare(node.claims[1:])
    node.settle()
    node.plugin.order(Point("write-prepared", "before"))
    node.kubelet.prepare(node.claims[:1])
    see_killed(node)


def _unprepare_cut_short(node: KillNode) -> None:
    """The first claim's; the others are prepared."""
    _prepare(node)
    node.settle()
    node.plugin.order(Point("remove-record", "before"))
    node.kubelet.unprepare(node.claims[:1])
    see_killed(node)


def _start(node: KillNode) -> None:
    node.plugin.start()


def _meddle_and_start(node: KillNode) -> None:
    _prepare_and_stop(node)
    node.meddle()


DEEDS = (
    Deed("first prepare", _nothing, _prepare),
    Deed("first prepare, given up", _nothing, _prepare, given_up=True),
    Deed("repeat", _prepare, _prepare),
    Deed("repeat after a reboot", _prepare_and_reboot, _prepare, whole=False),
    Deed("unprepare", _prepare, _unprepare),
    Deed("start", _prepare_and_stop, _start, starts=True),
    Deed("start with a stranger in the pool", _meddle_and_start, _start, starts=True),
    Deed("start after losses", _prepare_and_lose, _start, starts=True, whole=False, heals=True),
    Deed("start after a cut prepare", _prepare_cut_short, _start, starts=True, cut=True),
    Deed("start after a cut unprepare", _unprepare_cut_short, _start, starts=True, cut=True),
)

SCENARIOS = tuple(Scenario(shape, deed) for deed in DEEDS for shape in SHAPES)

OF_MAKE_TEST = tuple(
    scenario
    for scenario in SCENARIOS
    if scenario.shape.name == "MIG" or (scenario.shape.name in ("shares", "memory") and not scenario.deed.starts)
)
"""One shape, and what shares and parts of memory have of their own: together they come to every step."""

TOLD = ("write-slice", "delete-slice", "write-status")
"""Steps after the answer. How often they come depends on how quickly changes follow each other."""


def one_of_each(cases: Sequence[Case]) -> list[Case]:
    """One case before and one after each step."""
    return list({(case.point.step, case.point.moment): case for case in reversed(cases)}.values())


def watch(node: KillNode, scenario: Scenario) -> list[Case]:
    """Let the scenario happen unharmed; returns a case for each point that the plugin came to."""
    _begin_quietly(node, scenario)
    node.plugin.forget()
    scenario.deed.act(node)
    if scenario.deed.starts:
        node.kubelet.meet()
    if scenario.deed.heals:
        node.heal()
    _rest(node)
    points = [point for point in node.plugin.seen() if _sure(point, scenario)]
    _end(node, scenario.deed)
    return [Case(scenario, point) for point in points]


def kill(node: KillNode, case: Case) -> list[str]:
    """Let one case happen; returns what was wrong."""
    deed = case.scenario.deed
    try:
        if case.point.step in TOLD:
            _begin_quietly(node, case.scenario)
        else:
            _begin(node, case.scenario)
        node.plugin.order(case.point)
        deed.act(node)
        see_killed(node)
        node.start()
        if deed.whole:
            _assert_right(node, node.look(), "after the restart")
        if deed.heals:
            node.heal()
        _end(node, deed)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other cases have to have their turn
        last = "\n    ".join(node.plugin.log().splitlines()[-12:])
        node.wipe()
        return [f"{case}: {type(error).__name__}: {error}\n    {last}"]
    return []


def _begin(node: KillNode, scenario: Scenario) -> None:
    """Up to the deed, on hardware as the shape wants it."""
    node.set_mig_mode(scenario.shape.mig)
    node.allocate(scenario.shape.claims)
    scenario.deed.prepare(node)


def _begin_quietly(node: KillNode, scenario: Scenario) -> None:
    """The same, with nothing to be told any more: what is told then comes of the deed alone."""
    node.kill()
    node.set_mig_mode(scenario.shape.mig)
    node.start()
    _begin(node, scenario)
    if node.plugin.running:
        _rest(node)


def _rest(node: KillNode) -> None:
    """Wait until everything is told, and the step that told the last of it is over."""
    node.settle()
    wait_for(node.plugin.between_steps, SOON_S, "no step is under way")


def _sure(point: Point, scenario: Scenario) -> bool:
    """Whether the plugin comes there each time: slices may be written for several claims at once."""
    if point.step not in TOLD:
        return True
    most = len(scenario.shape.claims) if point.step == "write-status" else 1
    return not scenario.deed.cut and point.number <= most


def _end(node: KillNode, deed: Deed) -> None:
    """The kubelet does what it does by then, all is right, and when the pod is gone nothing is left."""
    if deed.given_up:
        node.kubelet.give_up()
    else:
        node.kubelet.retry()
    look = node.look()
    _assert_right(node, look, "after the kubelet's retry")
    if node.untold(look):
        node.settle()
    node.kubelet.unprepare(node.kubelet.prepared.values())
    look = node.look()
    _assert_right(node, look, "in the end")
    left = leftovers(look.facts)
    assert not left, f"left in the end: {left}"
    node.forget_claims()


def _assert_right(node: KillNode, look: Look, when: str) -> None:
    wrong = node.violations(look)
    assert not wrong, f"{when}: {'; '.join(wrong)}"


def see_killed(node: KillNode) -> None:
    assert node.plugin.killed(), "the plugin never came there"
    node.kubelet.part()
