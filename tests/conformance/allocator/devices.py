"""Generated ResourceSlices of no particular driver: everything that the API allows, and what makes pools unusable."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

Object = dict[str, Any]

API = "resource.k8s.io/v1"
ROOT = "shared.example.com/root"
"""An attribute of a domain that is not that of a driver."""

GHOST = "another-node"
"""A node that does not exist: its devices are part of the pool all the same."""

POLICIES: Sequence[Object] = (
    {"default": "1"},
    {"default": "2", "validValues": ["1", "2", "4"]},
    {"default": "2", "validRange": {"min": "1", "max": "4"}},
    {"default": "3", "validRange": {"min": "1", "step": "2"}},
    {"default": "1500m", "validRange": {"min": "500m", "max": "4500m", "step": "500m"}},
    {"default": "1Gi", "validRange": {"min": "1Gi", "max": "9Gi", "step": "1Gi"}},
    {"default": "2Gi", "validRange": {"min": "2Gi", "step": "3Gi"}},
    {"default": "4Gi", "validValues": ["1Gi", "4Gi", "8Gi"]},
)
"""Of the amounts that a claim can get of a capacity."""


def foreign_slices(
    random: Random, number: int, driver: str, name: str, node: str, label: str, *, allows_all: bool
) -> list[Object]:
    """The slices of one pool that has devices for ``node``, or for the nodes with ``label``.

    Some pools are incomplete or invalid, but none that every node of the cluster can use: others would suffer.
    """
    generation, sets = random.choice((1, 1, 7)), _counter_sets(random)
    parts: list[Object] = []
    for _ in range(random.choice((1, 1, 2, 3))):
        where = _where(random, node, label, allows_all=allows_all)
        entries = [
            device(random, driver, f"d{index}", sets, flawless=allows_all)
            for index in random.sample(range(30), random.randint(0 if parts else 2, 7))
        ]
        if random.random() > 0.03 or allows_all:
            taken = {each["name"] for part in parts for each in part["devices"]}
            entries = [each for each in entries if each["name"] not in taken]
        if "perDeviceNodeSelection" in where:
            entries = [each | _where_of_device(random, node, label, allows_all=allows_all) for each in entries]
        parts.append({**where, "devices": entries})
    for each in sets:
        copies = 2 if random.random() < 0.03 and not allows_all else 1
        own = {"nodeName": node} if random.random() < 0.6 else {"nodeSelector": _selector(label)}
        parts += [{**own, "sharedCounters": [each]} for _ in range(copies)]
    count = len(parts) + (random.random() < 0.04 and not allows_all)
    found = [_slice(random, number, driver, name, part, generation, count) for part in parts]
    if allows_all:
        return found
    if random.random() < 0.1:  # an older generation
        old = {"nodeName": node, "devices": [device(random, driver, "old", [])]}
        found.append(_slice(random, number, driver, name, old, generation - 1, 1))
    if random.random() < 0.05:  # a newer one, for another node only or for this one
        new = {"nodeName": random.choice((node, GHOST, GHOST)), "devices": [device(random, driver, "new", [])]}
        found.append(_slice(random, number, driver, name, new, generation + 1, random.choice((1, 1, 2))))
    return found


def device_class(name: str, expression: str) -> Object:
    selectors = [{"cel": {"expression": expression}}]
    return {
        "apiVersion": API,
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": selectors},
    }


def _slice(random: Random, number: int, driver: str, pool: str, part: Object, generation: int, count: int) -> Object:
    name = f"s{number}-{random.getrandbits(40):010x}"
    of_pool = {"name": pool, "generation": generation, "resourceSliceCount": count}
    spec = {"driver": driver, "pool": of_pool, **part}
    return {"apiVersion": API, "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}


def _selector(label: str, *, terms: int = 1, matching: bool = True) -> Object:
    values = ["yes", "perhaps"] if matching else ["no"]
    term = {"matchExpressions": [{"key": label, "operator": "In", "values": values}]}
    return {"nodeSelectorTerms": [term] * terms}


def _where(random: Random, node: str, label: str, *, allows_all: bool) -> Object:
    chance = random.random()
    if chance < 0.15:
        return {"perDeviceNodeSelection": True}
    if chance < 0.25:
        return {"nodeSelector": _selector(label, matching=random.random() < 0.7)}
    if chance < 0.3:
        return {"nodeName": GHOST}
    return {"allNodes": True} if allows_all else {"nodeName": node}


def _where_of_device(random: Random, node: str, label: str, *, allows_all: bool) -> Object:
    chance = random.random()
    if chance < 0.4:
        terms = 2 if random.random() < 0.1 else 1
        return {"nodeSelector": _selector(label, terms=terms, matching=random.random() < 0.7)}
    if chance < 0.55:
        return {"nodeName": GHOST}
    return {"allNodes": True} if allows_all else {"nodeName": node}


def _counter_sets(random: Random) -> list[Object]:
    return [
        {"name": f"set{index}", "counters": {"mem": {"value": f"{random.randint(4, 16)}Gi"}, "engines": {"value": "3"}}}
        for index in range(random.choice((0, 0, 1, 1, 2)))
    ]


def device(random: Random, driver: str, name: str, sets: Sequence[Object], *, flawless: bool = False) -> Object:
    """One device, with counters of ``sets``."""
    found: Object = {"name": name, "attributes": _attributes(random, driver)}
    if random.random() < 0.3:
        found["allowMultipleAllocations"] = True
    if random.random() < 0.6:
        found["capacity"] = _capacity(random, shareable="allowMultipleAllocations" in found)
    if sets and random.random() < 0.7:
        some = random.sample(list(sets), random.randint(1, len(sets)))
        found["consumesCounters"] = [_consumption(random, each, flawless=flawless) for each in some]
    if random.random() < 0.12:
        found["taints"] = [taint(random) for _ in range(random.choice((1, 1, 2)))]
    if random.random() < 0.02:
        found |= {"bindingConditions": ["ready"], "bindingFailureConditions": ["failed"]}
    if random.random() < 0.04:
        found["bindsToNode"] = True
    return found


def _attributes(random: Random, driver: str) -> Object:
    values: Object = {
        "size": {"int": random.randint(1, 3)},
        "kind": {"string": random.choice("ab")},
        "ok": {"bool": random.random() < 0.5},
        "ver": {"version": random.choice(("1.0.0", "1.0.1"))},
        ROOT: random.choice(({"string": "r0"}, {"string": "r1"}, {"int": 1}, {"bool": True})),
    }
    missing = {name for name in values if random.random() < 0.06}
    return {
        f"{driver}/{name}" if "/" not in name and random.random() < 0.1 else name: value
        for name, value in values.items()
        if name not in missing
    }


def _capacity(random: Random, *, shareable: bool) -> Object:
    found: Object = {}
    for name, amounts in (("memory", ("10Gi", "20Gi", "40G")), ("cores", ("5", "8", "10500m"))):
        if random.random() < 0.8:
            found[name] = {"value": random.choice(amounts)}
            if shareable and random.random() < 0.7:
                found[name]["requestPolicy"] = random.choice(POLICIES[5:] if name == "memory" else POLICIES[:5])
    return found


def _consumption(random: Random, counter_set: Object, *, flawless: bool) -> Object:
    name = "unknown" if random.random() < 0.003 and not flawless else counter_set["name"]
    counters = {"mem": {"value": f"{random.randint(1, 4)}Gi"}}
    if random.random() < 0.5:
        counters["engines"] = {"value": random.choice(("1", "2", "500m"))}
    if random.random() < 0.003 and not flawless:
        counters["unknown"] = {"value": "1"}
    return {"counterSet": name, "counters": counters}


def taint(random: Random) -> Object:
    """A device taint."""
    value = {"value": random.choice("12")} if random.random() < 0.6 else {}
    effect = random.choice(("NoSchedule", "NoSchedule", "NoExecute", "None"))
    return {"key": f"example.com/{random.choice('xy')}", **value, "effect": effect}
