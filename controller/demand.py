"""What must be offered so that the claims that wait can be given devices (pure).

Demand for a claim that asks for one device names the GPUs that would do; for several, the sets of GPUs of which one
must give them all. A claim that asks for more than a key and a set of GPUs can say (devices of different kinds on one
node, different values of an attribute, certain placements) is helped by the fullest node that can meet it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from controller.claim_queue import Queue
from controller.likeness import BY_PLACEMENT
from controller.offers import Demand, Eligible
from controller.survey import Kind, Nodes, Survey
from controller.waiting import Waiting
from controller.wishes import Ask, Wish
from driver.placement import Key

NOBODY: Mapping[str, Nodes] = MappingProxyType({})


def demand_of(queue: Queue, widened: Mapping[str, Nodes] = NOBODY) -> list[Demand]:
    """Demand for every claim that waits. Claims for one device that would do with the same GPUs make one demand.

    ``widened`` are nodes that shall offer everything that would do for the claim of that key (``controller.patience``).
    """
    found = [demand for waiting in queue.waiting for demand in claim_demand(queue, waiting)]
    found += [each for w in queue.waiting if w.key in widened for each in _everything(queue, w, widened[w.key])]
    plain: Counter[tuple[Key, Eligible]] = Counter()
    rest: list[Demand] = []
    for demand in found:
        if demand.together or demand.everything:
            rest.append(demand)
        else:
            plain[demand.key, demand.eligible] += demand.count
    return [*(Demand(key, count, eligible) for (key, eligible), count in plain.items()), *rest]


def claim_demand(queue: Queue, waiting: Waiting) -> Iterator[Demand]:
    """Demand for one claim: for each request one for every kind of device that would do."""
    wish = queue.chosen(waiting)
    if wish is None:
        return
    nodes = queue.nodes(waiting)
    at_once = _on_one_node(queue, waiting, wish, nodes)
    if at_once is not None:
        yield from at_once
        return
    for index, ask in enumerate(wish.asks):
        same = tuple(rule.attribute for rule in wish.rules if index in rule.asks and not rule.distinct)
        for kind in queue.survey.kinds(ask.selector, nodes):
            yield from _for_kind(queue.survey, ask, kind, nodes, same)


def _for_kind(survey: Survey, ask: Ask, kind: Kind, nodes: Nodes, same: tuple[str, ...]) -> Iterator[Demand]:
    """``same`` are the attributes in which the devices have to agree, and that each of them has to have."""
    count = survey.count(ask, kind, nodes)
    eligible = survey.kinds(ask.selector, nodes)[kind]
    if same:
        eligible = frozenset().union(*survey.sets(ask, kind, nodes, same))
    if not count or not eligible:
        return
    anywhere = kind.starts is None and len(eligible) == survey.having(kind.key)
    together = survey.groups(ask, kind, nodes, same) if ask.count != 1 else ()
    yield Demand(kind.key, count, None if anywhere else eligible, together, everything=kind.starts is not None)


def _on_one_node(queue: Queue, waiting: Waiting, wish: Wish, nodes: Nodes) -> Iterable[Demand] | None:
    """Demand on the one node that was found for a claim that sets of GPUs can't describe; None for others.

    Where devices of several kinds are taken together that is everything: the best place of one kind may be on the very
    GPU that another one needs.
    """
    survey, companions = queue.survey, queue.companions(waiting)
    beside = [each for each in map(queue.chosen, companions) if each is not None]
    kinds = {kind for each in beside for ask in each.asks for kind in survey.kinds(ask.selector, nodes)}
    finer = any(rule.distinct or len(wish.asks) > 1 or _inside_gpu(rule.attribute) for rule in wish.rules)
    single = len(wish.asks) == len(companions) == 1
    mixed = len(kinds) > 1 and not (single and wish.asks[0].count in {1, None})
    exact = finer or mixed or any(kind.starts is not None for kind in kinds)
    if single and not exact:
        return None
    node = queue.found(waiting).node
    if node is None:
        return None
    only = frozenset({node})
    return [
        Demand(kind.key, count, gpus, everything=exact)
        for ask in wish.asks
        for kind, gpus in survey.kinds(ask.selector, only).items()
        if (count := survey.count(ask, kind, only))
    ]


def _everything(queue: Queue, waiting: Waiting, nodes: Nodes) -> Iterator[Demand]:
    """All that ``nodes`` have for a claim and for what its pods need beside it, whatever alternative is taken."""
    wishes = [wish for each in queue.companions(waiting) for wish in queue.wishes(each) if isinstance(wish, Wish)]
    for ask in {ask for wish in wishes for ask in wish.asks}:
        for kind, gpus in queue.survey.kinds(ask.selector, nodes).items():
            yield Demand(kind.key, ask.count or 1, gpus, everything=True)


def _inside_gpu(attribute: str) -> bool:
    """Whether devices of one GPU differ in it."""
    return attribute.rpartition("/")[2] == BY_PLACEMENT
