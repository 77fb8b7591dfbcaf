"""What a claim asks of a class that it never gives: its pod would wait for ever, or fail when it starts.

The chart's policy ``fitting-class`` refuses the same for the chart's classes, when the claim is written; here it is
found for every class, by what its selectors may select.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deviceclasses.findings import Issue
from deviceclasses.known import ClassFacts, Known
from deviceclasses.passing import may_select
from deviceclasses.published import ATTRIBUTES, names_of
from deviceclasses.requests import Constraint, Request, parameters_of, request_names, selectors_of
from driver.config.opaque import devices_for
from driver.config.schema import shown
from driver.model.device import DeviceKind

WORDS = {DeviceKind.FULL: "full GPUs", DeviceKind.PARTITION: "partitions", DeviceKind.SHARE: "shares"}
FEW = 3
"""As many classes are told all."""


def misfit_issues(devices: Mapping[str, Any], path: str, requests: Sequence[Request], known: Known) -> Iterator[Issue]:
    """Parameters for another kind of device than a request that they name gets, or than all that they are for."""
    for index, entry, opaque in parameters_of(devices, known.driver):
        named, raw = request_names(entry), opaque.get("parameters")
        served = devices_for(raw)
        covered = [each for each in requests if not named or each.name in named or each.base in named]
        unfit = [each for each in covered if served and _never(each, served, known)]
        for request in unfit if len(unfit) == len(covered) else [each for each in unfit if each.name in named]:
            message = (
                f"does not fit request {request.name}: {_gives(request, known)}; "
                f"take {_classes_of(served, known)}or parameters for what the class gives"
            )
            kind = raw.get("kind") if isinstance(raw, Mapping) else None
            yield Issue(f"{path}.config[{index}].opaque.parameters.kind", shown(kind), message)


def stranger_issues(request: Request, known: Known) -> Iterator[Issue]:
    """Selectors of a request that no device of its class could pass."""
    facts = known.facts(request)
    asked = list(selectors_of(request.raw, request.path))
    if not asked or not facts.gives or _left(facts, tuple(text for _, text in asked), known):
        return
    place, expression = next((each for each in asked if not _left(facts, (each[1],), known)), asked[0])
    others = _told([name for name, other in known.classes.items() if _left(other, (expression,), known)])
    message = f"{_gives(request, known)}, never what this selector asks for"
    yield Issue(place, shown(expression), f"{message}; take {others.removesuffix(', ')}" if others else message)


def never_issues(requests: Sequence[Request], constraints: Sequence[Constraint], known: Known) -> Iterator[Issue]:
    """Constraints on an attribute that nothing has of what a request under them may get."""
    for constraint in constraints:
        domain, _, name = constraint.attribute.rpartition("/")
        having = frozenset(kind for kind in DeviceKind if name in names_of(kind))
        if domain != known.driver or name not in ATTRIBUTES:
            continue
        without = [each for each in requests if constraint.covers(each) and _never(each, having, known)]
        for base in dict.fromkeys(each.base for each in without):
            alternatives = [each for each in requests if each.base == base]
            if all(each in without for each in alternatives):
                given = ", ".join(f"request {each.name}: {_gives(each, known)}" for each in alternatives)
                message = (
                    f"can't hold for {given}, which never have it; take "
                    f"{_classes_of(having, known)}or name under requests of the constraint those that it is for"
                )
                yield Issue(constraint.path, shown(constraint.attribute), message)


def _never(request: Request, wanted: frozenset[DeviceKind], known: Known) -> bool:
    """Whether it is known that no device of these kinds is given."""
    facts = known.facts(request)
    narrowed = _left(facts, tuple(text for _, text in selectors_of(request.raw, "")), known) or facts.gives
    return bool(facts.gives) and not narrowed & wanted


def _left(facts: ClassFacts, asked: tuple[str, ...], known: Known) -> frozenset[DeviceKind]:
    """What of a class's devices passes the selectors of a request, too."""
    return facts.gives & may_select((*facts.selectors, *asked), known.driver)


def _gives(request: Request, known: Known) -> str:
    facts = known.facts(request)
    return f"class {request.class_name} gives {' or '.join(WORDS[kind] for kind in DeviceKind if kind in facts.gives)}"


def _classes_of(kinds: frozenset[DeviceKind], known: Known) -> str:
    """The classes that give nothing else."""
    return _told([name for name, facts in known.classes.items() if facts.gives and facts.gives <= kinds])


def _told(names: Sequence[str]) -> str:
    """The plainest names first, as the beginning of what could be done; empty where there is none."""
    first, *more = sorted(names, key=lambda name: (len(name), name)) or [""]
    if not first:
        return ""
    return (
        f"class {' or '.join((first, *more))}, " if len(more) < FEW else f"class {first} or one of {len(more)} more, "
    )
