"""What a request selects that nobody has, and the nearest there is (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from controller.survey import Nodes, Survey
from controller.why import Code, Why
from controller.wishes import Ask
from driver.config.names import meant
from driver.model.device import DeviceKind

LITERAL = re.compile(r"\.(\w+)\s*==\s*\"([^\"]*)\"")
"""An attribute that is compared with a text."""

SHOWN = 3
"""Nodes that a sentence names."""

SHOWN_PRODUCTS = 5

NOT_DIVIDED = "no GPU is divided into shares (node plugin: --shares, e.g. nodePlugin.extraArgs={--shares=all=10})"


def nothing_selected(survey: Survey, ask: Ask, nodes: Nodes) -> Why:
    """Why ``ask`` selects nothing on ``nodes``."""
    elsewhere = survey.kinds(ask.selector, frozenset(survey.fleet.nodes))
    data: dict[str, Any] = {"request": ask.request}
    if not elsewhere:
        return _selected_nowhere(survey, ask, data)
    found = sorted({survey.fleet.gpus[uuid].node for gpus in elsewhere.values() for uuid in gpus})
    data |= {"nodes": found}
    if not nodes:
        sentence = "no node is open to its pod: node selector, affinity or taints rule out all"
        return Why(Code.NO_NODE, sentence, data, never=True)
    where = ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
    sentence = f"request {ask.request}: what it selects is only on nodes where its pod may not run: {where}"
    return Why(Code.OTHER_NODES, sentence, data, never=True)


def _selected_nowhere(survey: Survey, ask: Ask, data: dict[str, Any]) -> Why:
    first = next((failure for entry in survey.fleet for failure in ask.selector.on(entry).failures), None)
    if first is None:
        return Why(Code.NOTHING_MATCHES, f"request {ask.request}: {_missing(survey, ask)}", data, never=True)
    sentence = f"request {ask.request}: the selector {first.expression!r} fails on {first.device}: {first.message}"
    said = {**data, "device": first.device.name, "error": first.message}
    return Why(Code.SELECTOR_FAILS, sentence, said, never=True)


def _missing(survey: Survey, ask: Ask) -> str:
    known = {name: sorted(set(values)) for name, values in _known(survey).items()}
    for expression in ask.selector.expressions:
        for name, value in LITERAL.findall(expression):
            if name not in known or value in known[name]:
                continue
            if in_words := NO_TYPE.get((name, value)) or (NO_TYPE["type", "mig"] if not known[name] else None):
                return in_words(survey)
            return f"{name} {value}: no GPU has it; there are {', '.join(known[name])}{meant(value, known[name])}"
    texts = " and ".join(ask.selector.expressions)
    return f"no device of the cluster's {len(survey.fleet.gpus)} GPUs is selected by {texts}"


def _known(survey: Survey) -> dict[str, Iterable[str]]:
    """Values in the cluster of the attributes that people select by."""
    alike = list({(entry.state.geometry, bool(entry.shares)): entry for entry in survey.fleet}.values())
    return {
        "type": [device.kind.value for entry in alike for device in entry.devices],
        "profile": [profile.name for entry in alike for profile in entry.gpu.profiles],
        "productName": [entry.gpu.product_name for entry in survey.fleet],
        "architecture": [entry.gpu.architecture for entry in survey.fleet],
    }


def _no_partitions(survey: Survey) -> str:
    products = sorted({entry.gpu.product_name for entry in survey.fleet})
    more = len(products) - SHOWN_PRODUCTS
    there = ", ".join(products[:SHOWN_PRODUCTS]) + (f" and {more} more products" if more > 0 else "")
    return f"no GPU can be cut into MIG partitions; there are {there}"


NO_TYPE: dict[tuple[str, str], Callable[[Survey], str]] = {
    ("type", DeviceKind.SHARE.value): lambda _: NOT_DIVIDED,
    ("type", DeviceKind.PARTITION.value): _no_partitions,
}
"""What to say where no device of the cluster has that type."""
