"""Rights, one by one, as the chart grants them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.harness.audit import NAMESPACE

Object = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Request:
    """What somebody asked for. ``resource`` with its subresource (``resourceclaims/status``); ``name`` may be empty."""

    who: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str


@dataclass(frozen=True, order=True)
class Grant:
    """One verb on one resource; ``namespace`` and ``name`` are empty where all are meant."""

    who: str
    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""

    def allows(self, request: Request) -> bool:
        mine, asked = self, request
        return (
            (mine.who, mine.verb, mine.group, mine.resource) == (asked.who, asked.verb, asked.group, asked.resource)
            and mine.namespace in ("", asked.namespace)
            and mine.name in ("", asked.name)
        )

    def __str__(self) -> str:
        what = f"{self.group}/{self.resource}" if self.group else self.resource
        where = f" in {self.namespace}" if self.namespace else ""
        return f"{self.who}: {self.verb} {what}{f' of {self.name}' if self.name else ''}{where}"


CHECKED_WITH = {
    ("resourceclaims/driver", "associated-node:patch"): ("resourceclaims/status", "patch"),
    ("resourceclaims/binding", "update"): ("resourceclaims/status", "update"),
}
"""Rights that no request names: the API server asks for them while it takes the other one (1.36 and newer)."""


def grants(objects: Iterable[Object]) -> list[Grant]:
    """All that the Roles and ClusterRoles among ``objects`` grant; each is named after its ServiceAccount."""
    return sorted(grant for each in objects if each["kind"] in ("Role", "ClusterRole") for grant in _of(each))


def _of(role: Object) -> Iterator[Grant]:
    namespace = NAMESPACE if role["kind"] == "Role" else ""
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    for name in rule.get("resourceNames", [""]):
                        yield Grant(role["metadata"]["name"], verb, group, resource, namespace, name)


def stand_in(grant: Grant) -> Grant:
    """The grant whose use shows the use of this one: itself, but for the few that no request names."""
    resource, verb = CHECKED_WITH.get((grant.resource, grant.verb), (grant.resource, grant.verb))
    return grant if verb == grant.verb and resource == grant.resource else Grant(grant.who, verb, grant.group, resource)
