"""Why the fleet as it is can never meet a claim, whatever is held at the moment: one reason (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from controller.fleet import FleetGpu
from controller.missing import nothing_selected
from controller.remedies import nearest_to_switch, reset_of
from controller.shortage import Obstacle, Shortage, named
from controller.survey import Nodes, Survey
from controller.why import Code, Why
from controller.wishes import RESULTS, Ask, Wish

OF_OBSTACLE = {
    Obstacle.FAULT: (Code.FAULT, "a fault or an operator keeps {} from use"),
    Obstacle.RESET: (Code.RESET, "a reset must first give {} another MIG mode"),
    Obstacle.DEDICATED: (Code.DEDICATED, "labels, settings or a pause of the node's plan keep {} for other uses"),
    Obstacle.FOREIGN: (Code.FOREIGN, "partitions that Tessera did not make take the place on {}"),
}

ShortageOf = Callable[[Ask, Nodes], Shortage]


def never(survey: Survey, wish: Wish, nodes: Nodes, shortage_of: ShortageOf) -> Why | None:
    """Why ``wish`` can't be met by itself even if nothing is held; None where it could, or nobody knows."""
    for ask in wish.asks:
        if not survey.kinds(ask.selector, nodes):
            return nothing_selected(survey, ask, nodes)
    if wish.too_many:
        asked = sum(ask.count or 0 for ask in wish.asks)
        sentence = f"it asks for {asked} devices, more than the {RESULTS} that one claim can have"
        return Why(Code.TOO_MANY, sentence, {"count": asked, "most": RESULTS}, never=True)
    for ask in wish.asks:
        if not survey.emptied.could(Wish((ask,)), nodes):
            return _too_many(survey, ask, nodes)
    if not survey.emptied.could(wish, nodes):
        return _not_together(survey, wish, nodes)
    if not any(shortage_of(ask, nodes).hindered for ask in wish.asks) or survey.unheld.could(wish, nodes):
        return None
    return _hindered(survey, wish, nodes, shortage_of)


def _too_many(survey: Survey, ask: Ask, nodes: Nodes) -> Why:
    if ask.count is None:
        sentence = (
            f"request {ask.request} asks for all devices of a node: more than the {RESULTS} that one claim can have"
        )
        return Why(Code.TOO_MANY, sentence, {"request": ask.request, "most": RESULTS}, never=True)
    most = survey.emptied.most_on_one_node(ask, nodes)
    where = "no node" if nodes >= survey.fleet.nodes.keys() else "no node where its pod may run"
    sentence = f"request {ask.request} asks for {ask.count} devices of one node; {where} has more than {most}"
    return Why(Code.TOO_MANY, sentence, {"request": ask.request, "count": ask.count, "most": most}, never=True)


def _not_together(survey: Survey, wish: Wish, nodes: Nodes) -> Why:
    if wish.rules and survey.emptied.could(Wish(wish.asks), nodes):
        return constraint(wish, "even if nothing were held", without_value(survey, wish, nodes), never=True)
    return together(wish, "even if nothing were held no node could give all of them", never=True)


def constraint(wish: Wish, when: str, more: str = "", *, never: bool = False) -> Why:
    """Of a wish that could be met but for its constraints."""
    names = sorted({rule.attribute for rule in wish.rules})
    kinds = "the same value" if not all(rule.distinct for rule in wish.rules) else "different values"
    sentence = f"{when} no node has devices for its requests with {kinds} of {', '.join(names)}{more}"
    return Why(Code.CONSTRAINT, sentence, {"attributes": names, "ever": not never}, never)


def together(wish: Wish, obstacle: str, *, never: bool = False) -> Why:
    """Of a wish each request of which could be met."""
    names = [ask.request for ask in wish.asks]
    sentence = f"each of the requests {', '.join(names)} could be met, but {obstacle}"
    return Why(Code.NOT_TOGETHER, sentence, {"requests": names, "ever": not never}, never)


def without_value(survey: Survey, wish: Wish, nodes: Nodes) -> str:
    """Which attributes of its constraints no device has that is selected: the end of a sentence."""
    lacking = {
        rule.attribute
        for rule in wish.rules
        for ask in (wish.asks[index] for index in rule.asks)
        if not any(survey.sets(ask, kind, nodes, (rule.attribute,)) for kind in survey.kinds(ask.selector, nodes))
    }
    return f": none of these devices has a value of {', '.join(sorted(lacking))}" if lacking else ""


def _hindered(survey: Survey, wish: Wish, nodes: Nodes, shortage_of: ShortageOf) -> Why | None:
    """Of a wish that could be met but for faults, settings, labels, MIG modes and partitions of others."""
    alone = [ask for ask in wish.asks if not survey.unheld.could(Wish((ask,)), nodes)]
    asks = alone[:1] or list(wish.asks)
    found = [shortage_of(ask, nodes) for ask in asks]
    obstacles = _joined([each.obstacles for each in found]) or _joined([each.hindered for each in found])
    if not obstacles:
        return None
    main = max(obstacles, key=lambda each: len(obstacles[each]))
    gpus = {entry.gpu.uuid for each in found for entry in each.gpus}
    lost = sum(map(len, obstacles.values()))
    request = f"request {asks[0].request}: " if len(asks) == 1 else ""
    code, text = OF_OBSTACLE[main]
    if not any(each.usable for each in found):
        sentence = f"{request}{len(gpus)} GPUs have it, but {text.format('them')}"
    else:
        which = f"{len(obstacles[main])} of the {len(gpus)} GPUs that have it"
        sentence = f"{request}even if nothing were held no node could give all of it: {text.format(which)}"
    data = {
        "request": asks[0].request,
        "gpus": len(gpus),
        "obstacles": {each.value: len(where) for each, where in obstacles.items()},
    }
    return Why(code, f"{sentence}: {_named(main, obstacles[main])}{_others(obstacles, main, lost)}", data, never=True)


def _named(obstacle: Obstacle, gpus: Sequence[FleetGpu]) -> str:
    """GPUs, and what has to be done about them if that is known."""
    if obstacle is not Obstacle.RESET:
        return named(gpus)
    nearest = nearest_to_switch(gpus)
    return f"{named(nearest)}; {reset_of(nearest[0])}"


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
