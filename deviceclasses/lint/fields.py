"""Fields that the API does not have: kubectl refuses them, other clients drop them silently.

Source: Kubernetes 1.37, ``staging/src/k8s.io/api/resource/v1/types.go``. The API server checks everything else
(values, lengths, required fields).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deviceclasses.lint.documents import VERSION, Issue, text
from driver.config.schema import shown
from driver.config.suggestions import nearest

Fields = Mapping[str, Any]
"""The fields of an object, or of each object of a list, with their own fields; ANYTHING is not checked."""
ANYTHING: Fields | None = None


def _plain(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, ANYTHING)


METADATA = _plain(
    "name",
    "generateName",
    "namespace",
    "labels",
    "annotations",
    "finalizers",
    "ownerReferences",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "selfLink",
)
SELECTORS = {"cel": _plain("expression")}
OPAQUE = _plain("driver", "parameters")
REQUEST = {
    **_plain("deviceClassName", "allocationMode", "count"),
    "selectors": SELECTORS,
    "capacity": _plain("requests"),
    "tolerations": _plain("key", "operator", "value", "effect", "tolerationSeconds"),
    "derivedAttributes": _plain("name", "expression"),
}
CLAIM = {
    "devices": {
        "requests": {
            **_plain("name"),
            "exactly": {**REQUEST, **_plain("adminAccess")},
            "firstAvailable": {**_plain("name"), **REQUEST},
        },
        "constraints": _plain("requests", "matchAttribute", "distinctAttribute"),
        "config": {**_plain("requests"), "opaque": OPAQUE},
    }
}
COMMON = {**_plain("apiVersion", "kind"), "metadata": METADATA}
KINDS: Mapping[str, Fields] = {
    "DeviceClass": {
        **COMMON,
        "spec": {**_plain("extendedResourceName"), "selectors": SELECTORS, "config": {"opaque": OPAQUE}},
    },
    "ResourceClaim": {**COMMON, "spec": CLAIM, **_plain("status")},
    "ResourceClaimTemplate": {**COMMON, "spec": {"metadata": METADATA, "spec": CLAIM}},
}


def shape_issues(content: Mapping[str, Any], kind: str) -> Iterator[Issue]:
    """Issues for an API version that is not served and for unknown fields."""
    version = content.get("apiVersion")
    if version != VERSION:
        message = f"Kubernetes serves {VERSION}; other versions only if an administrator enables them"
        yield Issue("apiVersion", shown(version), message if text(content, "apiVersion") else f"must be {VERSION}")
    yield from _unknown(content, KINDS[kind], "")


def _unknown(content: Mapping[Any, Any], known: Fields, path: str) -> Iterator[Issue]:
    for name, found in content.items():
        place = f"{path}{name}"
        if not isinstance(name, str) or name not in known:
            yield Issue(place, shown(found), _no_such(str(name), known))
        elif known[name] is not ANYTHING:
            several = isinstance(found, list)
            for index, each in enumerate(found if several else [found]):
                if isinstance(each, Mapping):
                    yield from _unknown(each, known[name], f"{place}[{index}]." if several else f"{place}.")


def _no_such(name: str, known: Fields) -> str:
    inside = [field for field, fields in known.items() if fields is not ANYTHING and name in fields]
    if inside:
        return f"no such field here; it belongs under {' or '.join(inside)}"
    close = nearest(name, known)
    return f"no such field; did you mean {close}?" if close else f"no such field; accepted: {', '.join(known)}"
