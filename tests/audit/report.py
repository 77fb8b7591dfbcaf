"""The comparison, as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.audit.grants import Grant, stand_in
from tests.audit.log import AUTHORIZER, STARTING, Asked


@dataclass(frozen=True)
class Report:
    """``used`` says how often; nothing is wrong where all were used and nothing was refused."""

    used: Sequence[tuple[Grant, int]]
    refused: Sequence[str]

    @property
    def unused(self) -> list[Grant]:
        return [grant for grant, times in self.used if not times]

    @property
    def sound(self) -> bool:
        return not self.unused and not self.refused

    def __str__(self) -> str:
        width = max((len(str(grant)) for grant, _ in self.used), default=0)
        lines = [f"{grant!s:{width}}  {times or 'never used'}" for grant, times in self.used]
        lines += [f"refused: {each}" for each in self.refused]
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        found = f"{len(self.used)} rights, {len(self.unused)} never used, {len(self.refused)} kinds of request refused"
        return f"{found}: {'as few as needed' if self.sound else 'not as few as needed, or too few'}"


def compare(granted: Sequence[Grant], asked: Asked) -> Report:
    """An API server that has just started knows no roles and no policies yet and refuses what is granted: that is no
    missing right."""
    used = [(grant, _times(stand_in(grant), asked)) for grant in granted]
    refused = [
        f"{request.who}: {request.verb} {request.resource} {request.namespace}/{request.name} in cluster {cluster}, "
        f"{times} times: {why}"
        for (cluster, request, why), times in sorted(asked.refused.items())
        if STARTING not in why and not (AUTHORIZER.search(why) and any(grant.allows(request) for grant in granted))
    ]
    return Report(used, refused)


def _times(grant: Grant, asked: Asked) -> int:
    return sum(times for request, times in asked.granted.items() if grant.allows(request))
