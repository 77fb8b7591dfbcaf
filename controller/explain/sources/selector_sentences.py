"""The reason of a request whose selector selects no device, or fails on one (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from controller.demand.feasibility import Feasibility
from controller.demand.requirements import DeviceRequest
from controller.demand.selected_devices import Selector, SelectorFailure
from controller.explain.reason import Reason, ReasonCode
from controller.explain.sources.selected_gpus import listed
from deviceclasses.cel.engine import Program, try_compile
from deviceclasses.cel.library.quantity import parse_quantity
from deviceclasses.cel.parser import conditions_of
from deviceclasses.cel.values import EvaluationError
from deviceclasses.lint.selectors.selector_rules import is_known_value, mistakes, remedy
from driver.config.suggestions import meant
from driver.model.device import Device
from driver.model.offer import DeviceKind, compute_instances
from driver.model.shared_memory import GIB
from driver.slices.attributes import NO_PROFILE, attributes, capacity

EQUAL = re.compile(r"(\w+)\s*==\s*\"([^\"]*)\"")
"""A comparison of an attribute with a string."""

AT_LEAST = re.compile(r'(?P<name>\w+)\.compareTo\(quantity\("(?P<amount>[^"]+)"\)\)\s*(?P<than>>=?)\s*0')
"""A comparison of a capacity with the least that is acceptable."""

WITH_DOMAIN = re.compile(r'"[^"]+/(?P<name>\w+)" in device\.capacity\[.*')
"""The condition for a requested capacity whose name has a domain."""

IDENTIFIERS = frozenset({"uuid", "parentUUID", "pciBusID", "pcieRoot", "nvlinkClique", "fabricClique"})
"""Attributes of which one value can not be meant by another that is like it."""

NAMES = frozenset({"profile", *IDENTIFIERS})
"""Attributes whose values may begin with a digit, but are no numbers."""

SHOWN_VALUES = 8
"""Values of an attribute, or products, that a message names."""

MAX_CONDITION = 200
"""Characters of a condition that a message shows."""

NOT_SHARED = (
    "no GPU is shared by memory (node plugin: --shared, e.g. nodePlugin.extraArgs={--shared=all=time-slicing}; "
    "the API server must keep allowMultipleAllocations: Kubernetes 1.36 and newer do)"
)
NO_COMPUTE_INSTANCES = (
    "no partitions are shared (node plugin: --compute-instances, e.g. nodePlugin.extraArgs="
    "{--compute-instances=1c.3g.40gb}; the API server must keep allowMultipleAllocations: Kubernetes 1.36 and newer do)"
)
NOT_DIVIDED = "no GPU is divided into shares (node plugin: --shares, e.g. nodePlugin.extraArgs={--shares=all=10})"


def failing(failure: SelectorFailure | None) -> str:
    """The GPUs for which the selector fails: the end of a sentence. The scheduler stops when it meets one of them."""
    if failure is None:
        return ""
    device, way_out = failure.device, remedy(failure.device.kind, failure.message)
    return (
        f"; its selector fails on devices like {device.name} of {device.gpu.product_name} ({failure.message}), "
        f"and where the scheduler meets such a device, it does not place the pod{f'; {way_out}' if way_out else ''}"
    )


def selected_nowhere(feasibility: Feasibility, request: DeviceRequest) -> Reason:
    name, selector = request.name, request.selector
    first = next((failure for matches, _ in selector.among(feasibility.fleet) for failure in matches.failures), None)
    if first is None:
        met = selector.met(feasibility.fleet, _conditions(selector))
        # Only the amount, rounded up, is too much.
        shared = [device for device, verdicts in met if device.shared and all(verdicts)]
        sentence = f"request {name}: {_too_much(selector, shared) if shared else _no_match(feasibility, request)}"
        return Reason(ReasonCode.NOTHING_MATCHES, sentence, permanent=True)
    driver = feasibility.matching.driver
    remedies = mistakes(selector.expressions, driver) or [remedy(first.device.kind, first.message)]
    way_out = "; ".join(hint for hint in remedies if hint and first.message not in hint)
    expression = brief(first.expression, driver) if len(first.expression) > MAX_CONDITION else first.expression
    whose = f" of DeviceClass {request.device_class}" if first.expression in request.class_selectors else ""
    sentence = f"request {name}: the selector {expression!r}{whose} fails on {first.device}: {first.message}"
    sentence += f"; {way_out}" if way_out else ""
    return Reason(ReasonCode.SELECTOR_FAILS, sentence, permanent=True)


def _conditions(selector: Selector) -> list[str]:
    return list(dict.fromkeys(part for expression in selector.expressions for part in conditions_of(expression)))


def _no_match(feasibility: Feasibility, request: DeviceRequest) -> str:
    """Which condition excludes all devices, or all that meet the other ones; and what there is."""
    driver, selector = feasibility.matching.driver, request.selector
    conditions = _conditions(selector)
    met = selector.met(feasibility.fleet, conditions)
    if not met:
        texts = " and ".join(selector.expressions)
        return f"no device of the cluster's {len(feasibility.fleet.gpus)} GPUs is selected by {texts}"
    culprit, others = _contradiction([verdicts for _, verdicts in met])
    wrong = mistakes(selector.expressions, driver)
    condition = brief(conditions[culprit], driver)
    if not others and not wrong and (text := _without_such_gpus(feasibility, condition)):
        return text
    devices = [device for device, verdicts in met if all(verdicts[index] for index in others)]
    if not others:
        devices = [device for device, verdicts in met if sum(verdicts) == len(conditions) - 1] or devices
    values = _values(feasibility, conditions[culprit], devices)
    has_domain = WITH_DOMAIN.match(conditions[culprit]) is not None
    hint = "; ".join(wrong) if wrong and not has_domain else _suggestion(conditions[culprit], values)
    hint = f"; {hint.removeprefix('; ')}" if hint else ""
    if any(conditions[culprit] in conditions_of(expression) for expression in request.class_selectors):
        hint += f"; this condition is part of DeviceClass {request.device_class}"
    there = f": {_listed_values(values)}" if values else ""
    if "device.driver" in condition:
        there = f": the driver of Tessera's devices is {driver}"
    among = " and ".join(brief(conditions[index], driver) for index in others)
    if (least := AT_LEAST.fullmatch(condition)) and values.get(least["name"]):
        if selector.memory is not None and all(device.shared for device in devices):
            return _too_much(selector, devices)
        return _too_small(least, values, f" together with {among}" if others else "") + hint
    if others:
        return f"none of the devices with {among} is selected by {condition}{there}{hint}"
    if (equal := EQUAL.fullmatch(condition)) and values.get(equal[1]):
        listed_values = _listed_values(values).removeprefix(f"{equal[1]} is ")
        return f"{equal[1]} {equal[2]}: no GPU has it; there are {listed_values}{hint}"
    return f"no device of the cluster's {len(feasibility.fleet.gpus)} GPUs is selected by {condition}{there}{hint}"


def _too_much(selector: Selector, devices: Sequence[Device]) -> str:
    """The sentence where more memory of a shared GPU is asked for than any of ``devices`` has, which are the others."""
    largest = max((device for device in devices if device.shared), key=lambda device: device.memory_bytes)
    room = largest.memory_bytes // GIB
    asked = f"memory {selector.memory} (rounded up to whole GiB)"
    return f"{asked}: no shared GPU has so much; the largest has {room} GiB for claims ({largest.gpu.product_name})"


def _too_small(least: re.Match[str], values: Mapping[str, Mapping[str, set[str]]], together: str) -> str:
    """The sentence where no device has as much of a capacity as ``least`` compares it with."""
    largest = max(values[least["name"]], key=_size)
    asked = f"{least['name']} {'of more than' if least['than'] == '>' else 'of at least'} {least['amount']}"
    products = listed(sorted(values[least["name"]][largest]))
    return f"{asked}: no device has it{together}; the largest is {largest} ({products})"


def _contradiction(met: Sequence[tuple[bool, ...]]) -> tuple[int, list[int]]:
    """A condition that no device meets together with ``others``, of which no one can be left out."""
    count = len(met[0])
    alone = next((index for index in range(count) if not any(verdicts[index] for verdicts in met)), None)
    if alone is not None:
        return alone, []
    kept = list(range(count))
    for index in range(count):
        rest = [other for other in kept if other != index]
        if rest and not any(all(verdicts[other] for other in rest) for verdicts in met):
            kept = rest
    return kept[-1], kept[:-1]


def brief(condition: str, driver: str) -> str:
    """The condition without the domain of the driver's own attributes."""
    ours = rf'device\.(?:attributes|capacity)\["{re.escape(driver)}"\]'
    condition = re.sub(rf'{ours}(?:\.|\["(\w+)"\])', r"\1", condition)
    return condition if len(condition) <= MAX_CONDITION else f"{condition[:MAX_CONDITION]}..."


def _without_such_gpus(feasibility: Feasibility, condition: str) -> str:
    """The sentence where the cluster has no partitions or no shares at all, and ``condition`` requires them."""
    equal = EQUAL.fullmatch(condition)
    if equal is None:
        return ""
    if equal.groups() == ("type", DeviceKind.SHARE):
        return NOT_DIVIDED
    if equal.groups() == ("type", DeviceKind.SHARED):
        return NOT_SHARED
    shares_partitions = any(compute_instances(p.name) > 1 for entry in feasibility.fleet for p in entry.gpu.profiles)
    if equal.groups() == ("type", DeviceKind.SHARED_PARTITION) and not shares_partitions:
        return NO_COMPUTE_INSTANCES
    cut = any(entry.gpu.profiles for entry in feasibility.fleet)
    if not cut and (equal.groups() == ("type", DeviceKind.PARTITION) or equal[1] == "profile"):
        products = sorted({entry.gpu.product_name for entry in feasibility.fleet})
        return f"no GPU can be cut into MIG partitions; there are {listed(products, SHOWN_VALUES)}"
    return ""


def _values(feasibility: Feasibility, condition: str, devices: Iterable[Device]) -> dict[str, dict[str, set[str]]]:
    """By attribute or capacity that ``condition`` reads its values on ``devices``, with the products that have them."""
    program, driver = try_compile(condition), feasibility.matching.driver
    values: dict[str, dict[str, set[str]]] = {}
    for section, domain, name in program.reads if isinstance(program, Program) else ():
        full = name if domain == driver else f"{domain}/{name}"
        values[name] = {}
        for device in devices:
            entries = attributes(device) if section == "attributes" else capacity(device)
            for value in entries.get(full, {}).values():
                text = str(value).lower() if isinstance(value, bool) else str(value)
                values[name].setdefault(text, set()).add(device.gpu.product_name)
    if list(values) == ["profile"] and len(values["profile"]) > 1:
        values["profile"].pop(NO_PROFILE, None)
    return values


def _listed_values(values: Mapping[str, Mapping[str, set[str]]]) -> str:
    """``memoryBandwidth is 3352 (NVIDIA H100 80GB HBM3), 864 (NVIDIA L40S)``: largest numbers first."""
    texts = []
    for name, by_value in values.items():
        products = {product for every in by_value.values() for product in every}
        if not by_value:
            texts.append(f"none of these devices has {name}")
            continue
        numbers = all(value[:1].isdigit() for value in by_value) and name not in NAMES
        differ = numbers and any(with_value != products for with_value in by_value.values())
        ordered = sorted(by_value, key=_size, reverse=True) if numbers else sorted(by_value)
        shown = [f"{value} ({listed(sorted(by_value[value]), 2)})" if differ else value for value in ordered]
        texts.append(f"{name} is {listed(shown, SHOWN_VALUES)}")
    return "; ".join(texts)


def _size(value: str) -> tuple[float, ...]:
    try:
        return (float(parse_quantity(value).value),)
    except EvaluationError:  # a version
        return tuple(float(digits) for digits in re.findall(r"\d+", value))


def _suggestion(condition: str, values: Mapping[str, Mapping[str, set[str]]]) -> str:
    """``; did you mean X?`` for a text in ``condition`` that is like a value that there is, or a name that is none."""
    if named := WITH_DOMAIN.match(condition):
        return f"write the name of the capacity as the slice has it, without a domain: {named['name']}"
    texts = re.findall(r"\"([^\"]*)\"", re.sub(r"\[[^\]]*\]\s*\.", "", condition))
    there = {value for name, by_value in values.items() for value in by_value if name not in IDENTIFIERS}
    return next((hint for text in texts if not is_known_value(text) and (hint := meant(text, there))), "")
