"""The nodes on which a pod may run: the scheduler's NodeAffinity, NodeUnschedulable and TaintToleration (pure).

Resources other than devices, ports, volumes and the affinity between pods are left to the scheduler: an offer on a
node that those rule out is one too many there, and the claim gets its wider offers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from controller.objects import Expression, Node, NodeSelector, NodeTerm, Pod, PodSpec, Taint, Toleration

CORDONED = Taint("node.kubernetes.io/unschedulable", "NoSchedule")
"""What a pod tolerates that may run on an unschedulable node."""

BLOCKING = frozenset({"NoSchedule", "NoExecute"})


class Eligibility:
    """The nodes of the cluster; remembers the answer for pods that are alike."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = tuple(nodes)
        self._known: dict[bytes, frozenset[str]] = {}

    def nodes_for(self, pod: Pod, allocations: Iterable[NodeSelector] = ()) -> frozenset[str]:
        """Names of the nodes for ``pod``, whose claims are allocated where ``allocations`` say."""
        spec, selectors = pod.spec, tuple(allocations)
        key = msgspec.json.encode((spec.node_name, spec.node_selector, spec.affinity, spec.tolerations, selectors))
        if key not in self._known:
            self._known[key] = frozenset(
                node.metadata.name
                for node in self._nodes
                if admits(spec, node) and all(selects(selector, node) for selector in selectors)
            )
        return self._known[key]


def admits(spec: PodSpec, node: Node) -> bool:
    """Whether such a pod may run on ``node``."""
    if spec.node_name:
        return spec.node_name == node.metadata.name
    labels = node.metadata.labels
    if any(labels.get(key) != value for key, value in spec.node_selector.items()):
        return False
    affinity = spec.affinity.node_affinity if spec.affinity is not None else None
    if affinity is not None and affinity.required is not None and not selects(affinity.required, node):
        return False
    taints = (*node.spec.taints, CORDONED) if node.spec.unschedulable else node.spec.taints
    return all(_tolerated(taint, spec.tolerations) for taint in taints if taint.effect in BLOCKING)


def selects(selector: NodeSelector, node: Node) -> bool:
    return any(_holds(term, node) for term in selector.node_selector_terms)


def _holds(term: NodeTerm, node: Node) -> bool:
    if not term.match_expressions and not term.match_fields:
        return False
    fields = {"metadata.name": node.metadata.name}
    return all(_meets(each, node.metadata.labels) for each in term.match_expressions) and all(
        _meets(each, fields) for each in term.match_fields
    )


def _greater(found: str, values: tuple[str, ...]) -> bool:
    return len(values) == 1 and int(found) > int(values[0])


def _less(found: str, values: tuple[str, ...]) -> bool:
    return len(values) == 1 and int(found) < int(values[0])


PRESENT: Mapping[str, Callable[[str, tuple[str, ...]], bool]] = {
    "In": lambda found, values: found in values,
    "NotIn": lambda found, values: found not in values,
    "Exists": lambda found, values: True,
    "DoesNotExist": lambda found, values: False,
    "Gt": _greater,
    "Lt": _less,
}
"""What each operator says of a label that is there; an operator that isn't known here says no."""

HOLD_WITHOUT = frozenset({"NotIn", "DoesNotExist"})
"""Operators that hold where the label is missing."""


def _meets(expression: Expression, labels: Mapping[str, str]) -> bool:
    found = labels.get(expression.key)
    if found is None:
        return expression.operator in HOLD_WITHOUT
    meets = PRESENT.get(expression.operator)
    try:
        return meets is not None and meets(found, expression.values)
    except ValueError:  # Gt and Lt compare integers; the scheduler, too, takes anything else for a no
        return False


def _tolerated(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
    return any(
        (not each.key or each.key == taint.key)
        and (not each.effect or each.effect == taint.effect)
        and (each.operator == "Exists" or (each.operator in {"", "Equal"} and each.key and each.value == taint.value))
        for each in tolerations
    )
