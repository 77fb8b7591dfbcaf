"""Audit logs: what was asked, and what of it was refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.audit.grants import Request
from tests.harness.audit import ACCOUNTS

FORBIDDEN, INVALID = 403, 422
BOUNDARY = re.compile(r"ValidatingAdmissionPolicy 'own-|resourceclaims/(driver|binding)")
"""In the message of a refusal that isn't RBAC's, but a right all the same."""

AUTHORIZER = re.compile(r"is forbidden: User .* cannot ")
"""In the message of a refusal that is."""

STARTING = "not yet ready to handle request"
"""In the message with which an API server refuses any write until it knows its admission policies: it waits 10 s."""


@dataclass
class Asked:
    """How often each request was granted, and who was refused what, and why, in which cluster."""

    granted: Counter[Request] = field(default_factory=Counter)
    refused: Counter[tuple[str, Request, str]] = field(default_factory=Counter)


def read(logs: Iterable[Path]) -> Asked:
    """What the processes asked for, by the logs of all clusters. What a test asked in their name doesn't count."""
    asked = Asked()
    for log in logs:
        for event in _events(log):
            request = _request(event)
            if not _by_a_process(event, request):
                continue
            why = _refusal(event)
            if why:
                asked.refused[log.stem, request, why] += 1
            else:
                asked.granted[request] += 1
    return asked


def _events(log: Path) -> Iterator[dict[str, Any]]:
    """All but a last line that was cut off when the API server ended."""
    for line in log.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _request(event: dict[str, Any]) -> Request:
    target = event.get("objectRef") or {}
    resource = "/".join(filter(None, (target.get("resource"), target.get("subresource"))))
    who = event["user"]["username"].rpartition(":")[2]
    where = target.get("namespace", ""), target.get("name", "")
    return Request(who, event["verb"], target.get("apiGroup", ""), resource, *where)


def _by_a_process(event: dict[str, Any], request: Request) -> bool:
    """A process calls itself as its ServiceAccount is called; tests with its token don't."""
    return request.who in ACCOUNTS and event.get("userAgent") == request.who and bool(request.resource)


def _refusal(event: dict[str, Any]) -> str:
    status = event.get("responseStatus") or {}
    message = status.get("message", "")
    decision = (event.get("annotations") or {}).get("authorization.k8s.io/decision")
    if decision == "forbid" or status.get("code") == FORBIDDEN:
        return message or "forbidden"
    return message if status.get("code") == INVALID and BOUNDARY.search(message) else ""
