"""Permanent reasons: the fleet cannot satisfy the claim, whatever devices other claims release (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from controller.cluster.fleet import FleetGpu
from controller.demand.feasibility import Feasibility, Nodes
from controller.demand.requirements import MAX_DEVICES, ClaimRequirements, DeviceRequest
from controller.explain.reason_codes import Code, Reason
from controller.explain.shortage import Obstacle, Shortage, named
from driver.config.suggestions import meant
from driver.model.device import DeviceKind
from driver.model.gpu import MigMode

OF_OBSTACLE = {
    Obstacle.FAULT: (Code.FAULT, "a fault or an operator keeps {} from use"),
    Obstacle.RESET: (Code.RESET, "a reset must first give {} another MIG mode"),
    Obstacle.DEDICATED: (Code.DEDICATED, "labels, settings or a pause of the node's plan keep {} for other uses"),
    Obstacle.FOREIGN: (Code.FOREIGN, "partitions that Tessera did not make take the place on {}"),
}

NEAREST = (MigMode.RESET_TO_ENABLE, MigMode.RESET_TO_DISABLE, MigMode.DISABLED, MigMode.ENABLED)
"""MIG modes, the one with the fewest remaining steps first."""

LITERAL = re.compile(r"\.(\w+)\s*==\s*\"([^\"]*)\"")
"""A comparison of an attribute with a string."""

SHOWN = 3
"""Nodes that a message names."""

SHOWN_PRODUCTS = 5

NOT_DIVIDED = "no GPU is divided into shares (node plugin: --shares, e.g. nodePlugin.extraArgs={--shares=all=10})"

ShortageOf = Callable[[DeviceRequest, Nodes], Shortage]


def permanent_reason(
    feasibility: Feasibility, wish: ClaimRequirements, nodes: Nodes, shortage_of: ShortageOf
) -> Reason | None:
    """Why ``wish`` can't be met by itself even if nothing is held; None where it could, or nobody knows."""
    for ask in wish.requests:
        if not feasibility.kinds(ask.selector, nodes):
            return _nothing_selected(feasibility, ask, nodes)
    if wish.too_many:
        asked = sum(ask.count or 0 for ask in wish.requests)
        sentence = f"it asks for {asked} devices, more than the {MAX_DEVICES} that one claim can have"
        return Reason(Code.TOO_MANY, sentence, {"count": asked, "most": MAX_DEVICES}, permanent=True)
    for ask in wish.requests:
        if not feasibility.emptied.could(ClaimRequirements((ask,)), nodes):
            return _too_many(feasibility, ask, nodes)
    if not feasibility.emptied.could(wish, nodes):
        return _not_together(feasibility, wish, nodes)
    if not any(shortage_of(ask, nodes).hindered for ask in wish.requests) or feasibility.unheld.could(wish, nodes):
        return None
    return _hindered(feasibility, wish, nodes, shortage_of)


def _nothing_selected(feasibility: Feasibility, ask: DeviceRequest, nodes: Nodes) -> Reason:
    """Why ``ask`` selects nothing on ``nodes``."""
    elsewhere = feasibility.kinds(ask.selector, frozenset(feasibility.fleet.nodes))
    data: dict[str, Any] = {"request": ask.name}
    if not elsewhere:
        return _selected_nowhere(feasibility, ask, data)
    found = sorted({feasibility.fleet.gpus[uuid].node for gpus in elsewhere.values() for uuid in gpus})
    data |= {"nodes": found}
    if not nodes:
        sentence = "no node is open to its pod: node selector, affinity or taints rule out all"
        return Reason(Code.NO_NODE, sentence, data, permanent=True)
    where = ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
    sentence = f"request {ask.name}: what it selects is only on nodes where its pod may not run: {where}"
    return Reason(Code.OTHER_NODES, sentence, data, permanent=True)


def _selected_nowhere(feasibility: Feasibility, ask: DeviceRequest, data: dict[str, Any]) -> Reason:
    first = next((failure for entry in feasibility.fleet for failure in ask.selector.on(entry).failures), None)
    if first is None:
        return Reason(Code.NOTHING_MATCHES, f"request {ask.name}: {_missing(feasibility, ask)}", data, permanent=True)
    sentence = f"request {ask.name}: the selector {first.expression!r} fails on {first.device}: {first.message}"
    said = {**data, "device": first.device.name, "error": first.message}
    return Reason(Code.SELECTOR_FAILS, sentence, said, permanent=True)


def _missing(feasibility: Feasibility, ask: DeviceRequest) -> str:
    known = {name: sorted(set(values)) for name, values in _known(feasibility).items()}
    for expression in ask.selector.expressions:
        for name, value in LITERAL.findall(expression):
            if name not in known or value in known[name]:
                continue
            if in_words := NO_TYPE.get((name, value)) or (NO_TYPE["type", "mig"] if not known[name] else None):
                return in_words(feasibility)
            return f"{name} {value}: no GPU has it; there are {', '.join(known[name])}{meant(value, known[name])}"
    texts = " and ".join(ask.selector.expressions)
    return f"no device of the cluster's {len(feasibility.fleet.gpus)} GPUs is selected by {texts}"


def _known(feasibility: Feasibility) -> dict[str, Iterable[str]]:
    """The values of frequently selected attributes in the cluster."""
    alike = list({(entry.state.geometry, bool(entry.shares)): entry for entry in feasibility.fleet}.values())
    return {
        "type": [device.kind.value for entry in alike for device in entry.devices],
        "profile": [profile.name for entry in alike for profile in entry.gpu.profiles],
        "productName": [entry.gpu.product_name for entry in feasibility.fleet],
        "architecture": [entry.gpu.architecture for entry in feasibility.fleet],
    }


def _no_partitions(feasibility: Feasibility) -> str:
    products = sorted({entry.gpu.product_name for entry in feasibility.fleet})
    more = len(products) - SHOWN_PRODUCTS
    there = ", ".join(products[:SHOWN_PRODUCTS]) + (f" and {more} more products" if more > 0 else "")
    return f"no GPU can be cut into MIG partitions; there are {there}"


NO_TYPE: dict[tuple[str, str], Callable[[Feasibility], str]] = {
    ("type", DeviceKind.SHARE.value): lambda _: NOT_DIVIDED,
    ("type", DeviceKind.PARTITION.value): _no_partitions,
}
"""The message where no device of the cluster has that type."""


def _too_many(feasibility: Feasibility, ask: DeviceRequest, nodes: Nodes) -> Reason:
    if ask.count is None:
        sentence = (
            f"request {ask.name} asks for all devices of a node: more than the {MAX_DEVICES} that one claim can have"
        )
        return Reason(Code.TOO_MANY, sentence, {"request": ask.name, "most": MAX_DEVICES}, permanent=True)
    most = feasibility.emptied.most_on_one_node(ask, nodes)
    where = "no node" if nodes >= feasibility.fleet.nodes.keys() else "no node where its pod may run"
    sentence = f"request {ask.name} asks for {ask.count} devices of one node; {where} has more than {most}"
    return Reason(Code.TOO_MANY, sentence, {"request": ask.name, "count": ask.count, "most": most}, permanent=True)


def _not_together(feasibility: Feasibility, wish: ClaimRequirements, nodes: Nodes) -> Reason:
    if wish.constraints and feasibility.emptied.could(ClaimRequirements(wish.requests), nodes):
        return constraint(wish, "even if nothing were held", without_value(feasibility, wish, nodes), permanent=True)
    return together(wish, "even if nothing were held no node could give all of them", permanent=True)


def constraint(wish: ClaimRequirements, when: str, more: str = "", *, permanent: bool = False) -> Reason:
    """The reason where only the constraints of the claim are in the way."""
    names = sorted({rule.attribute for rule in wish.constraints})
    kinds = "the same value" if not all(rule.distinct for rule in wish.constraints) else "different values"
    sentence = f"{when} no node has devices for its requests with {kinds} of {', '.join(names)}{more}"
    return Reason(Code.CONSTRAINT, sentence, {"attributes": names, "ever": not permanent}, permanent)


def together(wish: ClaimRequirements, obstacle: str, *, permanent: bool = False) -> Reason:
    """Of a wish each request of which could be met."""
    names = [ask.name for ask in wish.requests]
    sentence = f"each of the requests {', '.join(names)} could be met, but {obstacle}"
    return Reason(Code.NOT_TOGETHER, sentence, {"requests": names, "ever": not permanent}, permanent)


def without_value(feasibility: Feasibility, wish: ClaimRequirements, nodes: Nodes) -> str:
    """The constrained attributes that no selected device has: the end of a message."""
    lacking = {
        rule.attribute
        for rule in wish.constraints
        for ask in (wish.requests[index] for index in rule.requests)
        if not any(
            feasibility.sets(ask, kind, nodes, (rule.attribute,)) for kind in feasibility.kinds(ask.selector, nodes)
        )
    }
    return f": none of these devices has a value of {', '.join(sorted(lacking))}" if lacking else ""


def _hindered(
    feasibility: Feasibility, wish: ClaimRequirements, nodes: Nodes, shortage_of: ShortageOf
) -> Reason | None:
    """The reason where faults, settings, labels, MIG modes or foreign partitions are in the way."""
    alone = [ask for ask in wish.requests if not feasibility.unheld.could(ClaimRequirements((ask,)), nodes)]
    asks = alone[:1] or list(wish.requests)
    found = [shortage_of(ask, nodes) for ask in asks]
    obstacles = _joined([each.obstacles for each in found]) or _joined([each.hindered for each in found])
    if not obstacles:
        return None
    main = max(obstacles, key=lambda each: len(obstacles[each]))
    gpus = {entry.gpu.uuid for each in found for entry in each.gpus}
    lost = sum(map(len, obstacles.values()))
    request = f"request {asks[0].name}: " if len(asks) == 1 else ""
    code, text = OF_OBSTACLE[main]
    if not any(each.usable for each in found):
        sentence = f"{request}{len(gpus)} GPUs have it, but {text.format('them')}"
    else:
        which = f"{len(obstacles[main])} of the {len(gpus)} GPUs that have it"
        sentence = f"{request}even if nothing were held no node could give all of it: {text.format(which)}"
    data = {
        "request": asks[0].name,
        "gpus": len(gpus),
        "obstacles": {each.value: len(where) for each, where in obstacles.items()},
    }
    message = f"{sentence}: {_named(main, obstacles[main])}{_others(obstacles, main, lost)}"
    return Reason(code, message, data, permanent=True)


def _named(obstacle: Obstacle, gpus: Sequence[FleetGpu]) -> str:
    """Names of GPUs, with the steps to be taken where they are known."""
    if obstacle is not Obstacle.RESET:
        return named(gpus)
    nearest = _nearest_to_switch(gpus)
    return f"{named(nearest)}; {_reset_of(nearest[0])}"


def _others(obstacles: Mapping[Obstacle, Sequence[FleetGpu]], main: Obstacle, lost: int) -> str:
    others = sorted(each for each in obstacles if each is not main)
    return f"; {lost - len(obstacles[main])} more can't be used ({', '.join(others)})" if others else ""


def _joined(parts: Sequence[Mapping[Obstacle, Sequence[FleetGpu]]]) -> dict[Obstacle, tuple[FleetGpu, ...]]:
    """The GPUs of all parts, each once."""
    found: dict[Obstacle, dict[str, FleetGpu]] = {}
    for part in parts:
        for obstacle, gpus in part.items():
            found.setdefault(obstacle, {}).update({entry.gpu.uuid: entry for entry in gpus})
    return {obstacle: tuple(gpus.values()) for obstacle, gpus in found.items()}


def _nearest_to_switch(gpus: Sequence[FleetGpu]) -> list[FleetGpu]:
    """The GPUs with the fewest remaining steps to another MIG mode: all are in the same mode."""
    modes = {entry.gpu.mig_mode for entry in gpus}
    mode = next((each for each in NEAREST if each in modes), None)
    return [entry for entry in gpus if entry.gpu.mig_mode is mode]


def _reset_of(entry: FleetGpu) -> str:
    """The remaining steps to change the MIG mode of ``entry``."""
    uuid = entry.gpu.uuid
    reset = f"nvidia-smi --gpu-reset -i {uuid}"
    match entry.gpu.mig_mode:
        case MigMode.RESET_TO_ENABLE | MigMode.RESET_TO_DISABLE:
            return f"the new mode is set already, so for gpu-{entry.number}, with nothing running on it: {reset}"
        case MigMode.DISABLED:
            flag = f"--mig-gpus={uuid}"
            return (
                f"for gpu-{entry.number}: start its node plugin with {flag} (nodePlugin.extraArgs={{{flag}}}), "
                f"then, with nothing running on the GPU: {reset}"
            )
        case _:
            return (
                f"for gpu-{entry.number}, with nothing running on it: name it no more in its node plugin's --mig-gpus, "
                f"then nvidia-smi -i {uuid} -mig 0, then {reset}"
            )
