"""The pods that an object of any kind makes: its pod templates, and how many pods of each (pure).

Controllers differ in the names of their fields, not in their shape: a pod template is an object with ``spec``, and
``containers`` or ``resourceClaims`` in that, and a number of pods stands next to it or further out. Known beyond that:
Jobs (``parallelism``, ``completions``), DaemonSets, LeaderWorkerSet (``size``), RayCluster (``numOfHosts``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from deviceclasses.lint.claim_fields import settings_of
from deviceclasses.lint.documents import text
from driver.config.strict_schema import shown

ROLE_SUFFIXES = ("PodTemplate", "GroupSpec", "Template", "Specs", "Spec")
"""Ends of the names of fields that contain pod templates; what stands before them says what the pods do."""

WITHOUT_PODS = ("admissionregistration.k8s.io", "apiextensions.k8s.io", "kyverno.io", "gatekeeper.sh")
"""Groups of objects that contain parts of pods and make none."""

MAX_DEPTH, MAX_VALUES = 32, 100_000
"""Fields from the spec to a pod template, and values of one object, that are looked at."""


class InvalidPodCount(ValueError):
    """A number of pods that no controller accepts: ``path`` of the field, ``value``, and what would be ``accepted``."""

    accepted = "must be a whole number of at least 0"

    def __init__(self, path: str, value: object) -> None:
        super().__init__(f"{path}: {shown(value)}: {self.accepted}")
        self.path, self.value = path, value


class Factor(NamedTuple):
    """A field that multiplies pods; ``completions`` is the one that limits it, if there is one."""

    path: str
    value: object
    completions: object = None

    @property
    def pods(self) -> int:
        """Raises InvalidPodCount."""
        pods = _whole(self.path, self.value)
        if self.completions is None:
            return pods
        return min(pods, _whole(f"{self.path.rpartition('.')[0]}.completions", self.completions))


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """``path`` is that of ``spec``. ``role`` tells the templates of one object apart, such as "worker"; it may be "".

    ``factors`` are the fields around it that multiply its pods, ``fewer`` is subtracted from the innermost: the leader
    of a group of workers. ``is_on_each_node``: of a DaemonSet, whose number of pods depends on the nodes.
    """

    path: str
    spec: Mapping[str, Any]
    labels: Mapping[str, Any]
    role: str = ""
    factors: tuple[Factor, ...] = ()
    fewer: int = 0
    is_on_each_node: bool = False

    @property
    def count(self) -> int:
        """The number of its pods, or of those on each node. Raises InvalidPodCount."""
        *outer, inner = (1, *(factor.pods for factor in self.factors))
        return math.prod(outer) * max(0, inner - self.fewer)


class _Value(NamedTuple):
    """A value of an object, with what is known of the pods in it."""

    value: object
    path: str
    depth: int
    role: str = ""
    factors: tuple[Factor, ...] = ()
    fewer: int = 0


def pod_templates(content: Mapping[str, Any]) -> Iterator[PodTemplate]:
    """The pod templates of an object, in the order of its fields; that of a Pod is itself."""
    kind = text(content, "kind")
    if kind == "Pod":
        yield PodTemplate("spec", settings_of(content, "spec"), settings_of(content, "metadata.labels"))
        return
    for value, path, _, role, factors, fewer in _values(content):
        spec = value.get("spec") if isinstance(value, Mapping) else None
        if isinstance(value, Mapping) and isinstance(spec, Mapping) and _is_pod(spec):
            labels, all_factors = settings_of(value, "metadata.labels"), (*factors, *_factors(value, path))
            is_on_each_node = kind == "DaemonSet"
            yield PodTemplate(f"{path}.spec", spec, labels, role, all_factors, fewer, is_on_each_node)


def may_make_pods(content: Mapping[str, Any]) -> bool:
    """Whether an object without pod templates seems to make pods all the same: it contains a container or a claim."""
    mappings = (value for value, *_ in _values(content) if isinstance(value, Mapping))
    return any(_is_pod(mapping) or "image" in settings_of(mapping, "container") for mapping in mappings)


def _values(content: Mapping[str, Any]) -> Iterator[_Value]:
    """What is in the spec of an object, depth first; nothing that is inside of a pod template.

    YAML's aliases can make an object that contains itself, or one that is much larger than its text: what is deeper
    than ``MAX_DEPTH`` is left out, and so is what exceeds ``MAX_VALUES``.
    """
    if text(content, "apiVersion").partition("/")[0].endswith(WITHOUT_PODS):
        return
    pending, room = [_Value(content.get("spec"), "spec", 0)], MAX_VALUES
    while pending:
        parent = pending.pop()
        yield parent
        children = [*islice(_children(parent), room)] if parent.depth < MAX_DEPTH else []
        room -= len(children)
        pending += reversed(children)


def _children(parent: _Value) -> Iterator[_Value]:
    value, path, depth = parent.value, parent.path, parent.depth + 1
    if isinstance(value, list):
        for index, item in enumerate(value):
            role = (text(item, "groupName") or text(item, "name")) if isinstance(item, Mapping) else ""
            yield parent._replace(value=item, path=f"{path}[{index}]", depth=depth, role=role or parent.role)
    elif isinstance(value, Mapping) and not _is_pod(settings_of(value, "spec")):
        for name, child in value.items():
            factors, fewer = (*parent.factors, *_factors(value, path)), 0
            if name == "workerTemplate":
                factors = (*factors, Factor(f"{path}.size", value.get("size", 1)))
                fewer = 0 if value.get("leaderTemplate") is None else 1
            yield _Value(child, f"{path}.{name}", depth, _role(str(name)) or parent.role, factors, fewer)


def _factors(owner: Mapping[str, Any], path: str) -> Iterator[Factor]:
    """The fields of ``owner`` that multiply the pods of the templates in it."""
    for name in ("replicas", "numOfHosts"):
        if owner.get(name) is not None:
            yield Factor(f"{path}.{name}", owner[name])
    if owner.get("parallelism") is not None:
        yield Factor(f"{path}.parallelism", owner["parallelism"], owner.get("completions"))


def _whole(path: str, number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise InvalidPodCount(path, number)
    return number


def _role(field: str) -> str:
    """What the name of a field says about the pods below it: "leader" for leaderTemplate, "" for template."""
    for suffix in ROLE_SUFFIXES:
        if field.endswith(suffix):
            return field.removesuffix(suffix).lower()
    return field.lower() if field[:1].isupper() else ""


def _is_pod(spec: Mapping[str, Any]) -> bool:
    """Whether this is the spec of a pod."""
    return isinstance(spec.get("containers"), list) or isinstance(spec.get("resourceClaims"), list)
