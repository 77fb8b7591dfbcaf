"""Claims that could get two shares of one GPU, which would give them no more than one does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deviceclasses.findings import Issue
from deviceclasses.known import Known
from deviceclasses.passing import may_select
from deviceclasses.requests import Constraint, Request, selectors_of
from driver.config.schema import shown
from driver.model.device import DeviceKind
from driver.slices.attributes import PARENT as PARENT_UUID

PARENT = PARENT_UUID.name


def share_issues(requests: Sequence[Request], constraints: Sequence[Constraint], known: Known) -> Iterator[Issue]:
    """A claim must not be given two shares of one GPU: the driver would refuse it when the pod starts."""
    parent = f"{known.driver}/{PARENT}"
    apart = [each for each in constraints if each.distinct and each.attribute == parent]
    shares = [request for request in requests if _may_be_share(request, known)]
    remedy = (
        "may give two shares of one GPU to this claim, which the driver refuses: ask for one share (of a GPU with "
        "fewer shares, if that is too little), a partition or a full GPU; for shares of different GPUs add the "
        f"constraint distinctAttribute: {parent}"
    )
    for request in shares:
        if request.several and not any(each.covers(request) for each in apart):
            yield Issue(f"{request.path}.{request.several}", shown(request.raw.get(request.several)), remedy)
    for index, other in enumerate(shares):
        beside = (one for one in shares[:index] if one.base != other.base)
        one = next((one for one in beside if not any(each.covers(one) and each.covers(other) for each in apart)), None)
        if one is not None:
            yield Issue(
                f"{other.path}.deviceClassName", shown(other.class_name), f"together with request {one.name} {remedy}"
            )


def _may_be_share(request: Request, known: Known) -> bool:
    facts = known.facts(request)
    if request.class_name not in known.classes:
        return False
    expressions = (*facts.selectors, *(expression for _, expression in selectors_of(request.raw, "")))
    return facts.shares or DeviceKind.SHARE in may_select(expressions, known.driver)
