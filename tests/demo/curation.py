"""``python -m tests.demo.curation``, or ``make demo-curation``: the same 40 claims with and without the controller.

The real scheduler gives devices of three simulated nodes of 8 GPUs; their plugins run without hardware and kubelet.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest

import click

from driver.errors import FatalError, TesseraError
from driver.model.device import Device
from tests.bench.placement.fleet import FleetNode, Mode, RunningFleet, running_fleet
from tests.bench.placement.replay import claim, pod
from tests.bench.placement.trace import FULL_NODE, PROFILES, Request
from tests.demo.screen import Screen
from tests.demo.stage import name_option
from tests.harness.cluster import Cluster
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.workloads import CLAIMS, PODS

NODES = 3
COUNTS = (0, 0, 3, 7, 0, 30)
"""Claims for each of PROFILES: three of 3g.40gb, seven of 2g.20gb, thirty of 1g.10gb; less than two nodes can give."""

BOUND_S = 30.0
PATIENCE_S = 10.0
"""How long the training pod may wait; a fitting offer would be there in less than one second."""
SETTLED_S = 120.0
TRAINING = "training"
WIDTH = 44


@dataclass(frozen=True)
class Side:
    """What became of the fleet: its picture, and why the training pod waits; empty: it runs."""

    picture: Sequence[str]
    whole: int
    refusal: str


def requests() -> list[Request]:
    """The 40 claims in the order in which they come, always the same."""
    found = [request for request, count in zip(PROFILES, COUNTS, strict=True) for _ in range(count)]
    random.Random(40).shuffle(found)
    return found


def cells(memory_slices: int, held: Iterable[Device]) -> str:
    """One GPU as one letter a memory slice: how many compute slices its holder has, # for a full GPU, . for free."""
    row = ["."] * memory_slices
    for device in held:
        letter = device.profile.name[0] if device.profile else "#"
        row = [letter if device.mask >> at & 1 else old for at, old in enumerate(row)]
    return "".join(row)


def side_by_side(left: Sequence[str], right: Sequence[str]) -> str:
    return "\n".join(f"{one:{WIDTH}}{other}".rstrip() for one, other in zip_longest(left, right, fillvalue=""))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@name_option("demo-curation")
def main(name: str) -> None:
    """Give the same 40 claims devices twice, with and without the controller, then ask for a whole node of 8 GPUs.

    Exit code 1 if the whole node is not given with the controller, or is given without it.
    """
    logging.basicConfig(level=logging.ERROR)  # the end of a cluster cuts watches off
    screen = Screen()
    try:
        screen.act(f"40 claims for partitions, {NODES} nodes of 8 H100, and then one claim for 8 GPUs of one node")
        without = _play(screen, name, Mode.BEST_FIRST, "without the controller: every node offers whatever fits")
        curated = _play(screen, name, Mode.CURATED, "with it: offered is what leaves most to others")
    except TesseraError as error:
        click.secho(f"demo-curation: {error}", fg="red", err=True)
        sys.exit(error.exit_code if isinstance(error, FatalError) else 1)
    _compare(screen, without, curated)
    screen.end()
    sys.exit(0 if without.refusal and not curated.refusal else 1)


def _play(screen: Screen, name: str, mode: Mode, what: str) -> Side:
    screen.act(what[0].upper() + what[1:])
    with control_plane(name) as cluster:
        install(cluster)
        with running_fleet(cluster, NODES, mode) as fleet, _controller(screen, cluster, fleet, mode):
            with screen.step("40 pods with a claim each, one after the other"):
                for number, request in enumerate(requests()):
                    _ask(cluster, f"infer-{number:02}", request)
                    wait_for(lambda name=f"infer-{number:02}": _node_of(cluster, name), BOUND_S, f"pod {number} bound")  # type: ignore[misc]
            picture, whole = _picture(fleet), sum(not _held(node) for node in fleet.nodes)
            with screen.step("a pod that trains on all 8 GPUs of one node"):
                _ask(cluster, TRAINING, FULL_NODE)
                refusal = _refusal(cluster)
            screen.say(f"it waits: {refusal}" if refusal else f"it got {_node_of(cluster, TRAINING)}")
    return Side(picture, whole, refusal)


@contextmanager
def _controller(screen: Screen, cluster: Cluster, fleet: RunningFleet, mode: Mode) -> Iterator[None]:
    if mode is not Mode.CURATED:
        yield
        return
    controller = ControllerProcess(cluster)
    with screen.step("tessera controller, until every node offers what it says"):
        controller.start()
        fleet.wait_settled(SETTLED_S)
    yield
    controller.stop()


def _ask(cluster: Cluster, name: str, request: Request) -> None:
    cluster.api.post(CLAIMS, claim(name, request))
    cluster.api.post(PODS, pod(name))


def _node_of(cluster: Cluster, name: str) -> str:
    return str(cluster.api.get(f"{PODS}/{name}")["spec"].get("nodeName", ""))


def _refusal(cluster: Cluster) -> str:
    try:
        wait_for(lambda: _node_of(cluster, TRAINING), PATIENCE_S, "the training pod bound")
    except DeadlineError:
        conditions = cluster.api.get(f"{PODS}/{TRAINING}")["status"].get("conditions", ())
        return next((str(each.get("message", "")) for each in conditions), "") or "nobody says why"
    return ""


def _held(node: FleetNode) -> list[Device]:
    return [device for gpu in node.inventory.gpus for device in node.inventory.held_on(gpu)]


def _picture(fleet: RunningFleet) -> list[str]:
    lines = []
    for node in fleet.nodes:
        lines.append(f"{node.name}{'' if _held(node) else '   whole'}")
        for gpu in node.inventory.gpus:
            row = cells(gpu.memory_slices, node.inventory.held_on(gpu))
            lines.append(f"  gpu-{node.inventory.number(gpu)}  {row}")
    return lines


def _compare(screen: Screen, without: Side, curated: Side) -> None:
    screen.act("The fleet after the same 40 claims: a letter for each memory slice, . is free")
    left = ["without the controller", "", *without.picture, "", _verdict(without)]
    right = ["with the controller", "", *curated.picture, "", _verdict(curated)]
    screen.show(side_by_side(left, right))


def _verdict(side: Side) -> str:
    return f"whole nodes left: {side.whole}; 8 GPUs: {'no' if side.refusal else 'yes'}"


if __name__ == "__main__":
    main()
