"""The pages ``/livez`` and ``/readyz``, as Kubernetes' own components have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from driver.checks import Check, look_at
from driver.web import Page, Question, Reply

LIVE, READY = "livez", "readyz"
VERBOSE = "verbose"


def check_pages(live: Sequence[Check], ready: Sequence[Check]) -> Mapping[str, Page]:
    """``/livez`` and ``/readyz``: 200 where every check holds, else 503 with all of them; ``?verbose`` shows them
    in any case."""
    return {f"/{LIVE}": _page(LIVE, live), f"/{READY}": _page(READY, ready)}


def _page(name: str, checks: Sequence[Check]) -> Page:
    def answer(question: Question) -> Reply:
        results = look_at(checks)
        well = all(result.reason is None for result in results)
        if well and VERBOSE not in question.keys:
            return Reply(HTTPStatus.OK, b"ok")
        lines = [*map(str, results), f"{name} check {'passed' if well else 'failed'}"]
        body = "".join(f"{line}\n" for line in lines).encode()
        return Reply(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, body)

    return answer
