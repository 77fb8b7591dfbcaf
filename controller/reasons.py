"""Why nothing that is free could satisfy a claim that waits: one reason, as data and as a sentence (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from controller.claim_queue import Queue
from controller.search import Outcome
from controller.shortage import Obstacle, Shortage, holders, named, shortage
from controller.survey import Nodes, Survey
from controller.waiting import Waiting
from controller.wishes import RESULTS, Ask, Refusal, Wish
from driver.config.names import meant


class Code(StrEnum):
    """Reasons; of several alternatives of a claim the one named last here is told: it is nearest to being met."""

    NO_SUCH_CLASS = "NoSuchClass"
    SELECTOR_REFUSED = "SelectorRefused"
    NOTHING_MATCHES = "NothingMatches"
    SELECTOR_FAILS = "SelectorFails"
    TOO_MANY = "TooMany"
    NO_NODE = "NoNode"
    OTHER_NODES = "OnOtherNodesOnly"
    CONSTRAINT = "ConstraintNotMet"
    NOT_TOGETHER = "NotOnOneNode"
    DEDICATED = "NotOfferedThere"
    FAULT = "GpuFault"
    RESET = "GpuNeedsReset"
    FRAGMENTED = "Fragmented"
    HELD = "AllHeld"
    UNUSED = "OfferStandsUnused"
    """Of a claim that could be met (``controller.unused``)."""


OF_OBSTACLE = {
    Obstacle.FAULT: (Code.FAULT, "a fault or an operator keeps them from use"),
    Obstacle.RESET: (Code.RESET, "their MIG mode has to change first, which takes a reset of the GPU"),
    Obstacle.DEDICATED: (Code.DEDICATED, "labels or settings keep them for other uses"),
}


@dataclass(frozen=True)
class Reason:
    """``claim`` is ``namespace/name``, of the pod if ``of_pod`` (its claim isn't made yet). ``data`` is JSON."""

    claim: str
    code: Code
    sentence: str
    data: Mapping[str, Any]
    of_pod: bool = False


@dataclass(frozen=True)
class Why:
    code: Code
    sentence: str
    data: Mapping[str, Any]


def reasons_of(queue: Queue) -> list[Reason]:
    """One reason for each claim that waits and that nothing free could satisfy.

    None where the bounded search could not tell, and none for claims on other drivers' devices alone.
    """
    found = ((waiting, reason_for(queue, waiting)) for waiting in queue.waiting)
    return [
        Reason(waiting.key, why.code, why.sentence, why.data, waiting.made_up)
        for waiting, why in found
        if why is not None
    ]


def reason_for(queue: Queue, waiting: Waiting) -> Why | None:
    """Why nothing could satisfy ``waiting``; None where something could, or nobody knows."""
    wishes = queue.wishes(waiting)
    if isinstance(wishes, Refusal):
        return Why(Code(wishes.code.value), wishes.sentence, {})
    if not wishes or queue.found(waiting).outcome is not Outcome.NONE:
        return None
    nodes, order = queue.nodes(waiting), list(Code)
    told = [_of_wish(queue, wish, nodes) or _of_pod(queue, waiting) for wish in wishes]
    best = max(told, key=lambda why: order.index(why.code))
    if len(wishes) == 1:
        return best
    return Why(best.code, f"{best.sentence} (none of its {len(wishes)} alternatives is nearer)", best.data)


def _of_wish(queue: Queue, wish: Wish, nodes: Nodes) -> Why | None:
    """Why a claim can't be met by itself; None if it could."""
    for ask in wish.asks:
        if (why := _of_ask(queue, ask, nodes)) is not None:
            return why
    survey = queue.survey
    if survey.fitting(wish, nodes).outcome is not Outcome.NONE:
        return None
    if wish.too_many:
        return Why(Code.TOO_MANY, f"it asks for more than the {RESULTS} devices that one claim can have", {})
    if wish.rules and survey.fitting(Wish(wish.asks), nodes).outcome is not Outcome.NONE:
        return _constraint(survey, wish, nodes)
    names = [ask.request for ask in wish.asks]
    sentence = f"each of the requests {', '.join(names)} could be met, but no node has all of them free at once"
    return Why(Code.NOT_TOGETHER, sentence, {"requests": names, "ever": _ever(survey, wish, nodes)})


def _of_pod(queue: Queue, waiting: Waiting) -> Why:
    """Why a claim that could be met by itself can't be with the other claims of its pod."""
    keys = {key for pod in waiting.pods for each in queue.of_pod(pod) if (key := each.key) != waiting.key}
    others = sorted(keys)
    sentence = f"it could be met, but not on one node with the other claims of its pod: {', '.join(others)}"
    return Why(Code.NOT_TOGETHER, sentence, {"claims": others})


def _of_ask(queue: Queue, ask: Ask, nodes: Nodes) -> Why | None:
    """Why one request can't be met by itself; None if it could."""
    survey = queue.survey
    if not survey.kinds(ask.selector, nodes):
        return _nothing_selected(survey, ask, nodes)
    alone = Wish((ask,))
    if survey.fitting(alone, nodes).outcome is not Outcome.NONE:
        return None
    if not _ever(survey, alone, nodes):
        most = survey.emptied.most_on_one_node(ask, nodes)
        sentence = f"request {ask.request} asks for {ask.count} devices of one node; no node has more than {most}"
        return Why(Code.TOO_MANY, sentence, {"request": ask.request, "count": ask.count, "most": most})
    return _lacking(queue, ask, shortage(survey, ask, nodes))


def _ever(survey: Survey, wish: Wish, nodes: Nodes) -> bool:
    """Whether it could be met, or might be, if nothing were held."""
    return survey.emptied.fitting(wish, nodes).outcome is not Outcome.NONE


def _nothing_selected(survey: Survey, ask: Ask, nodes: Nodes) -> Why:
    everywhere = frozenset(survey.fleet.nodes)
    elsewhere = survey.kinds(ask.selector, everywhere)
    failures = [failure for entry in survey.fleet for failure in ask.selector.on(entry).failures]
    data: dict[str, Any] = {"request": ask.request}
    if not elsewhere and failures:
        first = failures[0]
        sentence = f"request {ask.request}: the selector {first.expression!r} fails on {first.device}: {first.message}"
        return Why(Code.SELECTOR_FAILS, sentence, {**data, "device": first.device.name, "error": first.message})
    if not elsewhere:
        return Why(Code.NOTHING_MATCHES, f"request {ask.request}: {_missing(survey, ask)}", data)
    found = sorted({survey.fleet.gpus[uuid].node for gpus in elsewhere.values() for uuid in gpus})
    data |= {"nodes": found}
    if not nodes:
        return Why(Code.NO_NODE, "no node is open to its pod: node selector, affinity or taints rule out all", data)
    where = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    sentence = f"request {ask.request}: what it selects is only on nodes where its pod may not run: {where}"
    return Why(Code.OTHER_NODES, sentence, data)


def _lacking(queue: Queue, ask: Ask, found: Shortage) -> Why:
    """GPUs have what is selected, and not enough of it is free."""
    obstacles = {each.value: len(gpus) for each, gpus in found.obstacles.items()}
    data = {"request": ask.request, "gpus": len(found.gpus), "obstacles": obstacles}
    if not found.usable:
        code, text = OF_OBSTACLE[found.main_obstacle]
        where = named(found.obstacles[found.main_obstacle])
        return Why(code, f"request {ask.request}: {len(found.gpus)} GPUs have it, but {text}: {where}", data)
    data |= {"freeSlices": found.free, "neededSlices": found.needed}
    if ask.count is not None and found.freest and found.free >= found.needed * ask.count:
        return _fragmented(ask, found, data)
    claims = holders(found.usable, queue.holders)
    if ask.count is None:
        lacking = "it asks for all devices of a node, and on every node that has them some are in use"
    else:
        lacking = f"of the {len(found.usable)} GPUs that have it none has enough free"
    by = f"devices there are held by {len(claims)} {'claim' if len(claims) == 1 else 'claims'}"
    sentence = f"request {ask.request}: {lacking}, {by}{_also(obstacles)}"
    return Why(Code.HELD, sentence, {**data, "claims": len(claims)})


def _fragmented(ask: Ask, found: Shortage, data: Mapping[str, Any]) -> Why:
    most = found.freest[0].state.free
    wanted = f"{found.needed:g} slices" if ask.count == 1 else f"{ask.count} times {found.needed:g} slices on one node"
    sentence = (
        f"request {ask.request}: {found.free:g} memory slices are free on {len(found.usable)} GPUs, at most {most:g} "
        f"on one, but no free placement of {wanted}; most is free on {named(found.freest)}"
    )
    places = [f"{entry.node}/gpu-{entry.number}" for entry in found.freest]
    return Why(Code.FRAGMENTED, sentence + _also(data["obstacles"]), {**data, "mostFree": most, "freest": places})


def _also(obstacles: Mapping[str, int]) -> str:
    kept = sum(obstacles.values())
    return f"; {kept} more can't be used ({', '.join(sorted(obstacles))})" if kept else ""


def _constraint(survey: Survey, wish: Wish, nodes: Nodes) -> Why:
    ever = _ever(survey, wish, nodes)
    names = sorted({rule.attribute for rule in wish.rules})
    when = "even if nothing were held" if not ever else "at present"
    kinds = "the same value" if not all(rule.distinct for rule in wish.rules) else "different values"
    sentence = f"the requests could be met, but {when} no node has devices for them with {kinds} of {', '.join(names)}"
    return Why(Code.CONSTRAINT, sentence, {"attributes": names, "ever": ever})


LITERAL = re.compile(r"\.(\w+)\s*==\s*\"([^\"]*)\"")
"""An attribute that is compared with a text."""


def _missing(survey: Survey, ask: Ask) -> str:
    """What it selects that nobody has, and the nearest there is."""
    known = {name: sorted(set(values)) for name, values in _known(survey).items()}
    for expression in ask.selector.expressions:
        for name, value in LITERAL.findall(expression):
            if name in known and value not in known[name]:
                there = f"; there are {', '.join(known[name])}" if known[name] else "; there are none at all"
                return f"{name} {value}: no GPU has it{there}{meant(value, known[name])}"
    texts = " and ".join(ask.selector.expressions)
    return f"no device of the cluster's {len(survey.fleet.gpus)} GPUs is selected by {texts}"


def _known(survey: Survey) -> dict[str, Iterable[str]]:
    """Values in the cluster of the attributes that people select by."""
    gpus = list({entry.state.geometry: entry.gpu for entry in survey.fleet}.values())
    return {
        "profile": [profile.name for gpu in gpus for profile in gpu.profiles],
        "productName": [entry.gpu.product_name for entry in survey.fleet],
        "architecture": [entry.gpu.architecture for entry in survey.fleet],
    }
