"""Generated scenarios: the devices of one node, claims that hold some, and the claims of a pod that wants others.

A scenario depends on its number only. Everything in it has names of its own, so that many of them fit into one cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.conformance.allocator import tessera_nodes
from tests.conformance.allocator.devices import API, ROOT, Object, device_class, foreign_slices, taint
from tests.conformance.allocator.tessera_nodes import parts_held, share_id, tessera_classes, tessera_slices

CONSTRAINED = ("size", "kind", "ok", "ver", "size", "kind", "none", ROOT)
"""Attributes of constraints; those without a domain get that of a driver."""

EVERY = 50
"""One of so many scenarios has devices for all nodes."""

SELECTORS = (
    'device.attributes["{driver}"].size >= 2',
    'device.attributes["{driver}"].?size.orValue(0) >= 2',
    'device.capacity["{driver}"].memory.compareTo(quantity("15Gi")) > 0',
    '"kind" in device.attributes["{driver}"] && device.attributes["{driver}"].kind == "a"',
    "device.allowMultipleAllocations",
    'device.driver.startsWith("a.")',
    "false",
)


@dataclass(frozen=True)
class Vocabulary:
    """What claims can be written with: classes of which the last fails for some devices, selectors, attributes.

    ``shared``: most requests state an amount of memory, as for parts of shared GPUs.
    """

    driver: str
    classes: Sequence[str]
    selectors: Sequence[str]
    attributes: Sequence[str]
    shared: bool = False


@dataclass(frozen=True)
class Scenario:
    """``held``: results of allocated claims; ``claims``: specs in the order of the pod; ``rules``: DeviceTaintRules."""

    number: int
    node: str
    labels: dict[str, str]
    slices: Sequence[Object]
    classes: Sequence[Object]
    held: Sequence[Object] = field(default_factory=tuple)
    claims: Sequence[Object] = field(default_factory=tuple)
    rules: Sequence[Object] = field(default_factory=tuple)


def is_for_all_nodes(number: int) -> bool:
    """Whether devices of a scenario can be used on every node: other scenarios of its wave see them, too."""
    return number % EVERY == 1


def scenario(number: int, node: str) -> Scenario:
    """The scenario of that number on ``node``."""
    random = Random(number)
    label = f"s{number}.example.com/here"
    drivers = [f"a.s{number}.example.com", f"b.s{number}.example.com"]
    everywhere = is_for_all_nodes(number)
    words: tuple[Sequence[str], Sequence[str]]
    shared = number % 10 == 5
    if number % 5 == 0:
        slices = tessera_slices(random, node, drivers[0], shared=shared)
        classes = tessera_classes(number, drivers[0], shared=shared)
        words = (tessera_nodes.SELECTORS, tessera_nodes.ATTRIBUTES)
    else:
        pools = [(drivers[0], "p1"), *random.sample([(drivers[0], "p0"), (drivers[1], "p2"), (drivers[1], "p1")], 2)]
        slices = [
            each
            for driver, name in pools[: random.choice((1, 1, 2, 3))]
            for each in foreign_slices(random, number, driver, name, node, label, allows_all=everywhere)
        ]
        classes, words = _classes(number, drivers), (SELECTORS, CONSTRAINED)
    vocabulary = Vocabulary(drivers[0], [each["metadata"]["name"] for each in classes], words[0], words[1], shared)
    claims = [_claim(random, vocabulary) for _ in range(random.choice((1, 1, 1, 1, 1, 2, 2, 3)))]
    held = parts_held(random, slices) if shared else _held(random, slices)
    return Scenario(number, node, {label: "yes"}, slices, classes, held, claims, _rules(random, number, slices))


def _classes(number: int, drivers: Sequence[str]) -> list[Object]:
    # The first is taken most often, the last fails where a device lacks the attribute.
    expressions = {
        "any": f'device.driver.endsWith(".s{number}.example.com")',
        "a": f'device.driver == "{drivers[0]}"',
        "b": f'device.driver == "{drivers[1]}"',
        "large": f'device.driver == "{drivers[0]}" && device.attributes["{drivers[0]}"].?size.orValue(0) >= 2',
        "fails": f'device.attributes["{drivers[0]}"].size >= 1',
    }
    return [device_class(f"s{number}-{name}", expression) for name, expression in expressions.items()]


def _rules(random: Random, number: int, slices: Sequence[Object]) -> list[Object]:
    """DeviceTaintRules for a driver of the scenario, one of its pools, or a device."""
    if random.random() > 0.1:
        return []
    spec = random.choice(slices)["spec"]
    names = [each["name"] for each in spec.get("devices", ())] or ["none"]
    selector = {"driver": spec["driver"]}
    selector |= random.choice(({}, {"pool": spec["pool"]["name"]}, {"device": random.choice(names)}))
    rule = {"deviceSelector": selector, "taint": taint(random)}
    return [{"apiVersion": API, "kind": "DeviceTaintRule", "metadata": {"name": f"s{number}"}, "spec": rule}]


def _held(random: Random, slices: Sequence[Object]) -> list[Object]:
    """Results for some of the devices, and for one that is not published."""
    found: list[Object] = []
    share = random.choice((0.0, 0.0, 0.1, 0.3))
    for each in slices:
        for entry in each["spec"].get("devices") or ():
            if random.random() > share:
                continue
            where = {"driver": each["spec"]["driver"], "pool": each["spec"]["pool"]["name"], "device": entry["name"]}
            found.append({"request": f"r{len(found)}", **where, **_share(random, entry)})
    if slices and random.random() < 0.1:
        spec = slices[0]["spec"]
        gone = {"driver": spec["driver"], "pool": spec["pool"]["name"], "device": "gone"}
        found.append({"request": f"r{len(found)}", **gone})
    return found[:16]


def _share(random: Random, entry: Object) -> Object:
    if random.random() < 0.05:
        return {"adminAccess": True}
    if not entry.get("allowMultipleAllocations"):
        return {}
    shared = {"shareID": share_id(random)}
    amounts = {name: random.choice(("0", "1", "1Gi", "5Gi")) for name in entry.get("capacity", ())}
    return {**shared, "consumedCapacity": amounts} if amounts else shared


def _claim(random: Random, vocabulary: Vocabulary) -> Object:
    requests = [_request(random, f"r{index}", vocabulary) for index in range(random.choice((1, 1, 1, 1, 2, 3)))]
    names = [request["name"] for request in requests]
    names += [f"{request['name']}/{each['name']}" for request in requests for each in request.get("firstAvailable", ())]
    constraints = []
    for _ in range(random.choice((0, 0, 0, 0, 0, 1, 2))):
        attribute = random.choice(vocabulary.attributes)
        name = attribute if "/" in attribute else f"{vocabulary.driver}/{attribute}"
        kind = random.choice(("matchAttribute", "matchAttribute", "distinctAttribute"))
        some = random.sample(names, random.randint(1, len(names))) if random.random() < 0.4 else []
        # The API server refuses an alternative beside its own request.
        some = [each for each in some if "/" not in each or each.partition("/")[0] not in some]
        constraints.append({"requests": some, kind: name} if some else {kind: name})
    devices: Object = {"requests": requests}
    return {"devices": {**devices, "constraints": constraints} if constraints else devices}


def _request(random: Random, name: str, vocabulary: Vocabulary) -> Object:
    if random.random() < 0.25:
        alternatives = [{"name": f"s{index}", **_wanted(random, vocabulary)} for index in range(random.randint(1, 3))]
        return {"name": name, "firstAvailable": alternatives}
    admin = {"adminAccess": True} if random.random() < 0.08 else {}
    return {"name": name, "exactly": {**_wanted(random, vocabulary), **admin}}


def _wanted(random: Random, vocabulary: Vocabulary) -> Object:
    classes = vocabulary.classes
    wanted: Object = {
        "deviceClassName": classes[-1]
        if random.random() < 0.04
        else random.choice((classes[0], classes[0], classes[0], *classes[:-1]))
    }
    if random.random() < 0.12:
        wanted["allocationMode"] = "All"
    else:
        wanted["count"] = random.choice((2, 2, 3, 4, 12, 16, 20, 33) if random.random() < 0.12 else (1, 1, 1, 2))
    if random.random() < 0.2:
        # The first and third fail where a device lacks the attribute or capacity.
        given = vocabulary.selectors
        some = given if random.random() < 0.2 else (given[1], *given[3:])
        wanted["selectors"] = [{"cel": {"expression": random.choice(some).format(driver=vocabulary.driver)}}]
    if random.random() < 0.35:
        wanted["tolerations"] = [_toleration(random) for _ in range(random.choice((1, 1, 2)))]
    if random.random() < (0.8 if vocabulary.shared else 0.3):
        wanted["capacity"] = {"requests": _parts(random) if vocabulary.shared else _amounts(random)}
    return wanted


def _amounts(random: Random) -> Object:
    usual = {"memory": ("1Gi", "3Gi", "5Gi", "8Gi", "12Gi"), "cores": ("0", "1", "2", "1500m", "4")}
    odd = ("0", "7", "64Gi", "1e19", "100n")
    names = random.choice((("memory",), ("cores",), ("memory", "cores"), ("memory", "none")))
    return {each: random.choice(odd if random.random() < 0.1 else usual.get(each, odd)) for each in names}


def _parts(random: Random) -> Object:
    usual = ("1Gi", "1", "0", "6Gi", "1500Mi", "13G", "20Gi", "33Gi", "38Gi", "44Gi")
    name = "none" if random.random() < 0.03 else "memory"
    return {name: random.choice(("79Gi", "80Gi", "1e19") if random.random() < 0.1 else usual)}


def _toleration(random: Random) -> Object:
    found: dict[str, Any] = {}
    if random.random() < 0.6:
        found = {"key": f"example.com/{random.choice('xy')}"}
    if random.random() < 0.3 and found:
        found |= {"operator": "Equal", "value": random.choice(("1", "2", ""))}
    else:
        found["operator"] = "Exists"
    if random.random() < 0.4:
        found["effect"] = random.choice(("NoSchedule", "NoExecute"))
    return found
