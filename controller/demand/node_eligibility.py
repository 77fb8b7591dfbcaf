"""The nodes on which pods may run, and what excludes the others (pure).

Nodes are selected by the scheduler's rules for node affinity, unschedulable nodes and taints. Other resources, ports,
volumes and pod affinity are left to the scheduler: offers on nodes that those exclude are superfluous, and the claim
gets wider offers later (``controller.curation.overdue_claims``). ``AntiAffinity`` is there for evictions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from enum import StrEnum
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from controller.cluster.node_views import UNREACHABLE_TAINTS
from driver.kube.types import (
    Expression,
    Key,
    LabelSelector,
    Node,
    NodeSelector,
    NodeTerm,
    Pod,
    PodAffinityTerm,
    PodSpec,
    Taint,
)

SHOWN = 4
"""Causes, terms of a node affinity, requirements of a term, and values of a requirement, that a message names."""

MAX_CONDITIONS = 64
"""Kinds of pods for which the nodes are remembered whether the last decision needed them or not."""

CORDONED = Taint("node.kubernetes.io/unschedulable", "NoSchedule")
"""The taint that a pod must tolerate to run on an unschedulable node."""

NODE_NAME_FIELD = "metadata.name"
"""The field of nodes by which a node affinity selects them: the DaemonSet controller names the node of each pod so."""

LABEL_OPERATORS = {"In", "NotIn", "Exists", "DoesNotExist"}
"""Those of label selectors."""

BLOCKING = frozenset({"NoSchedule", "NoExecute"})
"""Effects of taints, of a node that keep new pods from it and of a device that prevent its allocation."""


class Exclusion(StrEnum):
    """Why a pod can not run on a node; those that concern the node for every pod first."""

    NOT_READY = "not ready"
    CORDONED = "cordoned"
    TAINT = "taint"
    NODE_NAME = "node name"
    SELECTOR = "node selector"
    AFFINITY = "node affinity"
    OTHER_CLAIM = "another claim"


class Excluded(NamedTuple):
    """Everything that excludes a node for a pod. ``text`` follows the name of the node: ``is not ready``.

    ``claims`` are the claims of the pod that are allocated elsewhere: ``claim a of the pod, which is allocated on n2``.
    """

    kinds: frozenset[Exclusion]
    text: str
    claims: tuple[str, ...] = ()


class Eligibility:
    """The nodes on which pods may run; remembers the answers for the pods of recent decisions."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = {node.metadata.name: node for node in nodes}
        self._all_nodes = frozenset(self._nodes)
        self._nodes_of: dict[bytes, frozenset[str]] = {}
        self._before: dict[bytes, frozenset[str]] = {}

    def forget_unused(self) -> None:
        """Begin a decision: of many answers keep those that the last decision used."""
        if len(self._nodes_of) > MAX_CONDITIONS:
            self._before, self._nodes_of = self._nodes_of, {}

    def nodes_for(self, pod: Pod, allocations: Iterable[NodeSelector] = ()) -> frozenset[str]:
        """Names of the nodes for ``pod``, whose allocated claims are available on the nodes of ``allocations``."""
        spec, selectors = pod.spec, tuple(allocations)
        condition = condition_of(spec, selectors)
        nodes = self._nodes_of.get(condition)
        if nodes is None:
            nodes = self._before.get(condition)
            if nodes is None:
                names: Set[str] = self._nodes.keys()
                affinity = spec.affinity.node_affinity if spec.affinity is not None else None
                if affinity is not None and affinity.required is not None and not spec.node_name:
                    named = _named_nodes(affinity.required)
                    names = names if named is None else names & named
                candidates = (self._nodes[name] for name in names)
                admitting = (node for node in candidates if next(_exclusions(spec, node), None) is None)
                nodes = frozenset(
                    node.metadata.name for node in admitting if all(selects(selector, node) for selector in selectors)
                )
            # One object for most pods.
            nodes = self._nodes_of[condition] = self._all_nodes if nodes == self._all_nodes else nodes
        return nodes

    def nodes_for_successor(self, pod: Pod) -> frozenset[str]:
        """Names of the nodes for the next pod like ``pod``, which is bound, with claims that are not allocated."""
        return self.nodes_for(replace(pod, spec=replace(pod.spec, node_name="")))


def _named_nodes(selector: NodeSelector) -> set[str] | None:
    """The only nodes that ``selector`` can select, as for each pod of a DaemonSet; None if it names none."""
    by_name = (NODE_NAME_FIELD, "In")
    of_terms = [
        [field.values for field in term.match_fields if (field.key, field.operator) == by_name]
        for term in selector.node_selector_terms
    ]
    return {name for fields in of_terms for values in fields for name in values} if all(of_terms) else None


def condition_of(spec: PodSpec, allocations: Iterable[object]) -> bytes:
    """A digest of everything of such a pod that decides on which nodes it may run.

    ``allocations`` are the node selectors of its allocated claims, with or without the claims' names.
    """
    parts = (spec.node_name, spec.node_selector, spec.affinity, spec.tolerations, tuple(allocations))
    return blake2b(msgspec.json.encode(parts), digest_size=16).digest()


def exclusion(spec: PodSpec, node: Node, allocations: Mapping[str, NodeSelector] | None = None) -> Excluded | None:
    """Why such a pod can not run on ``node``; None if it may. ``allocations`` are those of its claims, by name."""
    exclusions = list(islice(_exclusions(spec, node), SHOWN))
    claims = tuple(
        f"claim {name} of the pod, which is allocated on {_nodes_named(selector)}"
        for name, selector in (allocations or {}).items()
        if not selects(selector, node)
    )
    exclusions += [(Exclusion.OTHER_CLAIM, f"can not have {claim}") for claim in claims]
    if not exclusions:
        return None
    return Excluded(frozenset(kind for kind, _ in exclusions), " and ".join(text for _, text in exclusions), claims)


def _exclusions(spec: PodSpec, node: Node) -> Iterator[tuple[Exclusion, str]]:
    if spec.node_name:
        if spec.node_name != node.metadata.name:
            yield Exclusion.NODE_NAME, f"is not {spec.node_name}, which the pod names"
        return
    taints = (*node.spec.taints, CORDONED) if node.spec.unschedulable else node.spec.taints
    blocking = [taint for taint in taints if taint.effect in BLOCKING and not taint.is_tolerated(spec.tolerations)]
    if blocking:
        yield from _of_taints(blocking)
    labels = node.metadata.labels
    for key, value in spec.node_selector.items():
        if labels.get(key) != value:
            yield Exclusion.SELECTOR, f"lacks the label {key}={value} of the pod's nodeSelector"
    affinity = spec.affinity.node_affinity if spec.affinity is not None else None
    if affinity is not None and affinity.required is not None and not selects(affinity.required, node):
        yield Exclusion.AFFINITY, f"does not match the pod's node affinity{_unmet(affinity.required, node)}"


def _unmet(selector: NodeSelector, node: Node) -> str:
    """The requirements that ``node`` does not meet: the end of a message."""
    terms = (
        " and ".join(map(_requirement, islice(_failing(term, node), SHOWN))) for term in selector.node_selector_terms
    )
    texts = [text for text in dict.fromkeys(islice(terms, SHOWN)) if text]
    return f": {' or '.join(texts)}" if texts else ""


def _requirement(expression: Expression) -> str:
    """As ``kubectl`` writes label selectors: ``zone in (a, b)``."""
    key, values = expression.key, ", ".join(expression.values[:SHOWN])
    values += ", ..." if len(expression.values) > SHOWN else ""
    match expression.operator:
        case "Exists":
            return f"{key} exists"
        case "DoesNotExist":
            return f"{key} does not exist"
        case "Gt" | "Lt" as operator:
            return f"{key} {'>' if operator == 'Gt' else '<'} {values}"
        case operator:
            return f"{key} {operator.lower()} ({values})"


def _nodes_named(selector: NodeSelector) -> str:
    """The nodes that the selector of an allocation names."""
    fields = (field for term in selector.node_selector_terms for field in term.match_fields)
    return ", ".join(name for field in fields for name in field.values) or "other nodes"


def _of_taints(taints: Sequence[Taint]) -> Iterator[tuple[Exclusion, str]]:
    keys = {taint.key for taint in taints}
    if keys & UNREACHABLE_TAINTS:
        yield Exclusion.NOT_READY, "is not ready"
    if CORDONED.key in keys:
        yield Exclusion.CORDONED, "is cordoned"
    others = [taint for taint in taints if taint.key not in {*UNREACHABLE_TAINTS, CORDONED.key}]
    if others:
        texts = [f"{taint.key}{f'={taint.value}' if taint.value else ''}:{taint.effect}" for taint in others[:SHOWN]]
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        what = f"taint {texts[0]}" if len(others) == 1 else f"taints {', '.join(texts)}{more}"
        yield Exclusion.TAINT, f"has the {what}, which the pod does not tolerate"


def selects(selector: NodeSelector, node: Node) -> bool:
    """Whether ``node`` meets all requirements of a term that has some."""
    terms = (term for term in selector.node_selector_terms if term.match_expressions or term.match_fields)
    return any(next(_failing(term, node), None) is None for term in terms)


def _failing(term: NodeTerm, node: Node) -> Iterator[Expression]:
    """The requirements of ``term`` that ``node`` does not meet."""
    labels, fields = node.metadata.labels, {NODE_NAME_FIELD: node.metadata.name}
    yield from (requirement for requirement in term.match_expressions if not meets(requirement, labels))
    yield from (requirement for requirement in term.match_fields if not meets(requirement, fields))


def meets(expression: Expression, labels: Mapping[str, str]) -> bool:
    """Whether a requirement holds for ``labels``; unknown operators select nothing."""
    value, values = labels.get(expression.key), expression.values
    match expression.operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                [limit], number = map(int, values), int(value or "")
            except ValueError:  # no integers, or several values: selects nothing, as in the scheduler
                return False
            return number > limit if operator == "Gt" else number < limit
    return False


def selects_labels(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    """An unknown operator counts as met: a pod is rather spared."""
    return all(labels.get(key) == value for key, value in selector.match_labels.items()) and all(
        expression.operator not in LABEL_OPERATORS or meets(expression, labels)
        for expression in selector.match_expressions
    )


class AntiAffinity:
    """The required anti-affinity of pods that run against others. For one thread."""

    def __init__(self, running: Iterable[Pod], nodes: Iterable[Node]) -> None:
        self._labels = {node.metadata.name: node.metadata.labels for node in nodes}
        affinities = ((pod, pod.spec.affinity and pod.spec.affinity.pod_anti_affinity) for pod in running)
        self._terms = [(pod, term) for pod, affinity in affinities if affinity for term in affinity.required]
        self._against: dict[Key, dict[tuple[str, str | None], list[Key]]] = {}
        """By pod, those that keep it away, by label of the nodes."""

    def pod_against(self, pod: Pod, node: str, gone: Container[str]) -> Key | None:
        """A pod, none of ``gone``, that keeps ``pod`` away from ``node``; None: there is none."""
        if pod.metadata.key not in self._against:
            against = self._against.setdefault(pod.metadata.key, {})
            for other, term in self._terms:
                if _is_against(term, other, pod):
                    domain = self._labels.get(other.spec.node_name, {}).get(term.topology_key)
                    against.setdefault((term.topology_key, domain), []).append(other.metadata.key)
        against = self._against[pod.metadata.key]
        others = (key for label in self._labels.get(node, {}).items() for key in against.get(label, ()))
        return next((key for key in others if str(key) not in gone), None)


def _is_against(term: PodAffinityTerm, other: Pod, pod: Pod) -> bool:
    """Whether ``term`` of ``other`` selects ``pod``. The labels of namespaces are not known: any may be selected."""
    is_own = not term.namespaces and term.namespace_selector is None
    namespaces = (other.metadata.namespace,) if is_own else term.namespaces
    is_there = term.namespace_selector is not None or pod.metadata.namespace in namespaces
    return is_there and term.label_selector is not None and selects_labels(term.label_selector, pod.metadata.labels)
