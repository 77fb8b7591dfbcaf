"""What a request to the API server asks for, in the words of RBAC (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

PATH = re.compile(
    r"(?:/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/[^/]+(?=/[^/]+))?"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<part>[^/]+))?)?"
)

OTHER = "other"
"""Instead of the resource, for a path that names none (/version): paths are many, resources are few."""

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Asked(NamedTuple):
    """``verb`` as in a Role ("get", "list", "watch", "create", ...), ``resource`` too ("resourceclaims/status")."""

    verb: str
    resource: str


def what_is_asked(method: str, path: str, query: Mapping[str, str] | None = None) -> Asked:
    """The verb and resource of one request; server-side apply is a patch, as it is in a Role."""
    found = PATH.fullmatch(path)
    if found is None:
        return Asked(method.lower(), OTHER)
    resource = f"{found['resource']}/{found['part']}" if found["part"] else found["resource"]
    if method != "GET":
        return Asked(VERBS.get(method, method.lower()), resource)
    if found["name"]:
        return Asked("get", resource)
    return Asked("watch" if "watch" in (query or {}) else "list", resource)
