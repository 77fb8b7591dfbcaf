"""The obstacles that keep the GPUs selected by a request from providing devices (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from controller.cluster.fleet import FleetGpu
from controller.demand.feasibility import Feasibility, Kind, Nodes
from controller.demand.requirements import DeviceRequest
from controller.demand.selected_devices import slices_of
from driver.model.device import DeviceKind
from driver.model.gpu import MigMode

SHOWN = 3
"""Names in a message."""


NEAREST = (MigMode.RESET_TO_ENABLE, MigMode.RESET_TO_DISABLE, MigMode.DISABLED, MigMode.ENABLED)
"""MIG modes, the one with the fewest remaining steps first."""


class Obstacle(StrEnum):
    """An obstacle on a GPU that does not depend on held devices."""

    FAULT = "fault"
    RESET = "reset"
    DEDICATED = "dedicated"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class Shortage:
    """The GPUs that a request selects on the nodes in question.

    ``obstacles`` are GPUs that cannot provide any selected device, whatever is held; ``usable`` the others.
    ``hindered`` are GPUs that could provide more without an obstacle; they include ``obstacles``. Amounts are memory
    slices: ``needed`` by one device, ``free`` on all usable GPUs together.
    """

    gpus: tuple[FleetGpu, ...]
    obstacles: Mapping[Obstacle, tuple[FleetGpu, ...]]
    hindered: Mapping[Obstacle, tuple[FleetGpu, ...]]
    usable: tuple[FleetGpu, ...]
    needed: float
    free: float

    @property
    def freest(self) -> list[FleetGpu]:
        """The usable GPUs with the most free slices, in descending order."""
        ordered = sorted(self.usable, key=lambda entry: (-entry.state.free, entry.node, entry.number))
        return [entry for entry in ordered[:SHOWN] if entry.state.free]


def shortage(feasibility: Feasibility, request: DeviceRequest, nodes: Nodes) -> Shortage:
    """The GPUs on ``nodes`` that ``request`` selects, grouped by obstacle."""
    kinds = feasibility.kinds(request.selector, nodes)
    selected = frozenset().union(*kinds.values())
    gpus = tuple(entry for entry in feasibility.on(nodes) if entry.gpu.uuid in selected)
    kinds_of = {entry.gpu.uuid: [kind for kind, having in kinds.items() if entry.gpu.uuid in having] for entry in gpus}
    obstacles: dict[Obstacle | None, list[FleetGpu]] = {}
    hindered: dict[Obstacle | None, list[FleetGpu]] = {}
    for entry in gpus:
        obstacles.setdefault(obstacle_of(entry, kinds_of[entry.gpu.uuid]), []).append(entry)
        hindered.setdefault(hindrance_of(entry, kinds_of[entry.gpu.uuid]), []).append(entry)
    usable = tuple(obstacles.pop(None, ()))
    needed = min(slices_of(entry.state, kind.key) for entry in gpus for kind in kinds_of[entry.gpu.uuid])
    free = sum(entry.state.free for entry in usable)
    return Shortage(gpus, _frozen(obstacles), _frozen(hindered), usable, needed, free)


def obstacle_of(entry: FleetGpu, kinds: Sequence[Kind]) -> Obstacle | None:
    """The obstacle that keeps ``entry`` from providing any of ``kinds``, whatever is held on it."""
    if entry.fault is not None:
        return Obstacle.FAULT
    wanted = {kind.key.kind for kind in kinds}
    if not wanted & entry.state.kinds:
        return _forbidden(entry, wanted)
    if entry.foreign and not any(_fits(entry.unheld, kind) for kind in kinds):
        return Obstacle.FOREIGN
    return None


def hindrance_of(entry: FleetGpu, kinds: Sequence[Kind]) -> Obstacle | None:
    """The obstacle that keeps ``entry`` from providing all of ``kinds``, whatever is held on it."""
    if entry.fault is not None:
        return Obstacle.FAULT
    if missing := {kind.key.kind for kind in kinds} - entry.state.kinds:
        return _forbidden(entry, missing)
    return Obstacle.FOREIGN if entry.foreign else None


def _forbidden(entry: FleetGpu, wanted: Set[DeviceKind]) -> Obstacle:
    """Why its devices of the kinds ``wanted`` are not offered."""
    meant = wanted & entry.uses & ({DeviceKind.SHARE} if entry.shares_only else set(DeviceKind))
    return Obstacle.RESET if meant else Obstacle.DEDICATED


def _fits(entry: FleetGpu, kind: Kind) -> bool:
    return any(kind.starts is None or spot.at in kind.starts for spot in entry.state.spots(kind.key))


def _frozen(found: Mapping[Obstacle | None, list[FleetGpu]]) -> dict[Obstacle, tuple[FleetGpu, ...]]:
    return {each: tuple(gpus) for each, gpus in found.items() if each is not None}


def listed(names: Sequence[str], shown: int = SHOWN) -> str:
    """The first names and the number of the others: ``a, b, c and 3 more``."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def named(gpus: Iterable[FleetGpu]) -> str:
    """``gpu-3 of node-a, gpu-0 of node-b (fault)``, and the number of the others."""
    return listed([f"gpu-{each.number} of {each.node}{f' ({each.fault})' if each.fault else ''}" for each in gpus])


def holders(gpus: Iterable[FleetGpu], claim_of: Mapping[tuple[str, str], str]) -> set[str]:
    """The claims with devices on ``gpus``; ``claim_of`` maps node and device to ``namespace/name``."""
    held = ((entry.node, device.name) for entry in gpus for device in entry.held)
    return {claim_of[each] for each in held if each in claim_of}


def joined(parts: Sequence[Mapping[Obstacle, Sequence[FleetGpu]]]) -> dict[Obstacle, tuple[FleetGpu, ...]]:
    """The GPUs of all parts, each once."""
    found: dict[Obstacle, dict[str, FleetGpu]] = {}
    for part in parts:
        for obstacle, gpus in part.items():
            found.setdefault(obstacle, {}).update({entry.gpu.uuid: entry for entry in gpus})
    return {obstacle: tuple(gpus.values()) for obstacle, gpus in found.items()}


def reset_steps(gpus: Sequence[FleetGpu]) -> str:
    """The GPUs with the fewest remaining steps to another MIG mode, and these steps."""
    modes = {entry.gpu.mig_mode for entry in gpus}
    mode = next((each for each in NEAREST if each in modes), None)
    nearest = [entry for entry in gpus if entry.gpu.mig_mode is mode]
    uuid, gpu = nearest[0].gpu.uuid, f"for gpu-{nearest[0].number}"
    reset, flag = f"nvidia-smi --gpu-reset -i {uuid}", f"--mig-gpus={uuid}"
    match mode:
        case MigMode.RESET_TO_ENABLE | MigMode.RESET_TO_DISABLE:
            steps = f"the new mode is set already, so {gpu}, with nothing running on it: {reset}"
        case MigMode.DISABLED:
            steps = (
                f"{gpu}: start its node plugin with {flag} (nodePlugin.extraArgs={{{flag}}}), "
                f"then, with nothing running on the GPU: {reset}"
            )
        case _:
            steps = (
                f"{gpu}, with nothing running on it: name it no more in its node plugin's --mig-gpus, "
                f"then nvidia-smi -i {uuid} -mig 0, then {reset}"
            )
    return f"{named(nearest)}; {steps}"
