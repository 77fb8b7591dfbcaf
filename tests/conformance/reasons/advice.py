"""What a sentence about a pod that waits despite an offered GPU implies: changes to make, and what they do (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import msgspec

from controller.explain.sources.selector_sentences import brief
from deviceclasses.cel.library.quantity import parse_quantity
from driver.kube.slice_types import DetailedSlice
from driver.kube.types import Container, DeviceClaim, Node, PodSpec, Request, Resources
from tests.conformance.reasons.pod_situations import NIC, ROOT, nic_slice
from tests.conformance.reasons.statements import Question, ended, holders, with_devices
from tests.support.queues import Situation

Change = Callable[[Situation], Situation]

TAINTED = re.compile(r"has the taints? (.+?), which the pod does not tolerate")
LABEL = re.compile(r"lacks the label (\S+)=(\S+) of the pod's nodeSelector")
AFFINITY = re.compile(r"does not match the pod's node affinity: ([^;]+)")
INSUFFICIENT = re.compile(r"\d Insufficient ([\w./-]+\w)")
REQUESTS = re.compile(r"\(the pod requests ([^)]*)\)")
TOO_MANY = "Too many pods"
NICS = re.compile(r"request nic(?: of claim fast)? \(class rdma\): (.*); gpu-0 of node a would do")
INCOMPLETE = re.compile(r"is incomplete \((\d) of \d ResourceSlices\)")
NONE_THERE = re.compile(rf"^node a has no device of {NIC}, (?:only b has one|nor has any other)$")
STATES = re.compile(rf"(?:the only device|of the (\d) devices) of {NIC} on node a,? (.*)")
PART = re.compile(
    r"(?:(\d) )?(?:(?:is|are) (?:(?P<held>held by (?:claim|\d claims:) (?P<claims>default/[\w-]+(?:, default/[\w-]+)*))"
    r"|(?P<unselected>not selected by (?P<selector>.+?))|(?P<tainted>tainted \((?P<taint>[^)]+)\))"
    r"|(?P<free>free(?:, the request asks for \d"
    r"|, but (?:ha(?:s|ve) not|only \d ha(?:s|ve)) the same (?P<attribute>\S+) as the GPU)?))"
    r"|(?P<seems>seems? to be free))(?:, |$)"
)


class Fix(NamedTuple):
    """A change that a sentence names. The pod does not fit without it, nor with any change of ``too_little``."""

    what: str
    change: Change
    too_little: tuple[Change, ...] = ()


def fixes(there: Situation, sentence: str) -> Iterator[Fix]:
    """Everything that ``sentence`` says is in the way of the pod, as changes all of which are needed."""
    for taints in TAINTED.findall(sentence):
        yield from (Fix(f"taint {text}", partial(_without_node_taint, text=text)) for text in taints.split(", "))
    for key, value in LABEL.findall(sentence):
        yield Fix(f"label {key}={value}", partial(_with_labels, labels={key: value}))
    for requirements in AFFINITY.findall(sentence):
        terms = [_labels_for(term) for term in requirements.split(" or ")]
        yield Fix(f"affinity {requirements}", partial(_with_labels, labels=terms[0]))
    yield from _of_resources(there, sentence)
    if TOO_MANY in sentence:
        yield Fix("pods", partial(_with_allocatable, resource="pods", amount="1"))
    for text in NICS.findall(sentence):
        if (change := _of_nics(text)) is not None:
            yield Fix(f"NICs: {text}", change)


def _labels_for(term: str) -> dict[str, str | None]:
    """Labels that meet the requirements of ``term``; None: without that label."""
    labels: dict[str, str | None] = {}
    for requirement in term.strip().split(" and "):
        key, operator, *values = re.split(r" (in|notin|exists|does not exist|>|<) ?", requirement.strip())
        first = values[0].strip("()").split(", ")[0]
        labels[key] = {"in": first, "exists": "yes", ">": str(int(first) + 1) if operator == ">" else ""}.get(operator)
    return labels


def _with_labels(there: Situation, labels: dict[str, str | None]) -> Situation:
    def changed(node: Node) -> Node:
        together = node.metadata.labels | labels
        kept = {key: value for key, value in together.items() if value is not None}
        return msgspec.structs.replace(node, metadata=msgspec.structs.replace(node.metadata, labels=kept))

    return _with_node(there, changed)


def _with_node(there: Situation, changed: Callable[[Node], Node]) -> Situation:
    found = copy(there)
    found.nodes = there.nodes | {"a": changed(there.nodes["a"])}
    return found


def _without_node_taint(there: Situation, text: str) -> Situation:
    def changed(node: Node) -> Node:
        taints = tuple(taint for taint in node.spec.taints if taint.text != text)
        return msgspec.structs.replace(node, spec=msgspec.structs.replace(node.spec, taints=taints))

    return _with_node(there, changed)


# Resources


def _of_resources(there: Situation, sentence: str) -> Iterator[Fix]:
    requested = {}
    for text in REQUESTS.findall(sentence):
        for amounts in text.split(", "):
            resource, parts = amounts.split(" ", 1)
            requested[resource] = [part.partition(" of ")[::2] for part in parts.split(" + ")]
    for resource in INSUFFICIENT.findall(sentence):
        parts = requested.get(resource, [])
        total = sum((value_of(amount) for amount, _ in parts), Fraction())
        set_to = partial(_with_allocatable, resource=resource)
        exact = partial(set_to, amount=_written(resource, total))
        less = [partial(set_to, amount=_written(resource, total, -1))] if total else []
        # With one unit more of any named part the same amount is not enough: so the part counts.
        more = [partial(_raised, exact=exact, resource=resource, source=source) for _, source in parts]
        yield Fix(f"{resource} {_written(resource, total)}", exact, (*less, *more))


def value_of(amount: object) -> Fraction:
    return Fraction(parse_quantity(str(amount)).value)


def _written(resource: str, amount: Fraction, units: int = 0) -> str:
    """``amount`` and so many units: thousandths of a CPU, or bytes."""
    return f"{int(amount * 1000) + units}m" if resource == "cpu" else str(int(amount) + units)


def _with_allocatable(there: Situation, resource: str, amount: str) -> Situation:
    def changed(node: Node) -> Node:
        status = msgspec.structs.replace(node.status, allocatable=node.status.allocatable | {resource: amount})
        return msgspec.structs.replace(node, status=status)

    return _with_node(there, changed)


def _raised(there: Situation, exact: Change, resource: str, source: str) -> Situation:
    """The situation with ``exact``, and with a unit more of ``resource`` in the part named ``source``."""
    found = exact(there)
    [pod] = found.pods
    spec = _raised_spec(pod.spec, resource, source)
    assert spec != pod.spec, f"nothing requests {resource} as {source or 'a container'}"
    found.pods = [msgspec.structs.replace(pod, spec=spec)]
    return found


def _raised_spec(spec: PodSpec, resource: str, source: str) -> PodSpec:
    def more(amounts: dict[str, Any]) -> dict[str, Any]:
        if resource not in amounts:
            return amounts
        return amounts | {resource: _written(resource, value_of(amounts[resource]), 1)}

    def of(resources: Resources) -> Resources:
        return Resources(more(resources.requests), more(resources.limits))

    def first(containers: Sequence[Container], chosen: Callable[[Container], bool]) -> tuple[Container, ...]:
        index = next(index for index, container in enumerate(containers) if chosen(container))
        raised = msgspec.structs.replace(containers[index], resources=of(containers[index].resources))
        return (*containers[:index], raised, *containers[index + 1 :])

    if source == "spec.resources":
        assert spec.resources is not None
        return msgspec.structs.replace(spec, resources=of(spec.resources))
    if source == "the overhead of its RuntimeClass":
        return msgspec.structs.replace(spec, overhead=more(spec.overhead))
    if source:
        name = source.split()[-1]
        initial = first(spec.init_containers, lambda container: container.name == name)
        return msgspec.structs.replace(spec, init_containers=initial)
    requesting = first(
        spec.containers,
        lambda container: resource in container.resources.requests or resource in container.resources.limits,
    )
    return msgspec.structs.replace(spec, containers=requesting)


# NICs


def _of_nics(text: str) -> Change | None:
    """The change after which the NICs are not in the way any more, if ``text`` about them is true."""
    if match := INCOMPLETE.search(text):
        return partial(_with_slices, changed=partial(_of_count, count=int(match[1])))
    if NONE_THERE.match(text):
        return _with_good_nics
    changes = [change for match in _parts(text) if (change := _of_part(match)) is not None]
    if not changes:
        free = sum(_number(match) for match in _parts(text) if match["free"])
        return partial(_with_nic_request, count=free) if free else None

    def all_of_them(there: Situation) -> Situation:
        for change in changes:
            there = change(there)
        return there

    return all_of_them


def _parts(text: str) -> Iterator[re.Match[str]]:
    """The states of the devices of a node, and how many of them are in each."""
    match = STATES.match(text)
    return iter(()) if match is None else PART.finditer(match[2])


def _number(match: re.Match[str]) -> int:
    return int(match[1] or 1)


def _of_part(match: re.Match[str]) -> Change | None:
    if match["held"]:
        return partial(ended, gone=match["claims"].split(", "))
    if match["unselected"]:
        return partial(_with_nic_request, without_selector=match["selector"])
    if match["tainted"]:
        return partial(_without_device_taint, text=match["taint"])
    return _without_constraints if match["attribute"] == ROOT else None


def _with_slices(there: Situation, changed: Callable[[DetailedSlice], DetailedSlice]) -> Situation:
    found = copy(there)
    found.slices = [changed(item) if item.spec.node_name == "a" else item for item in there.slices]
    return found


def _of_count(item: DetailedSlice, count: int) -> DetailedSlice:
    pool = msgspec.structs.replace(item.spec.pool, resource_slice_count=count)
    return msgspec.structs.replace(item, spec=msgspec.structs.replace(item.spec, pool=pool))


def _with_good_nics(there: Situation) -> Situation:
    """Node a has four NICs that serve every request of these situations."""
    attributes = {"speed": {"int": 400}, ROOT: {"string": "pci0000:00"}}
    found = copy(there)
    others = [item for item in there.slices if item.spec.node_name != "a"]
    devices = [{"name": f"new-{number}", "attributes": attributes} for number in range(4)]
    found.slices = [*others, nic_slice("a", 9, devices, 1)]
    return found


def _without_device_taint(there: Situation, text: str) -> Situation:
    found = copy(there)
    if text.startswith("taint "):
        return _with_slices(there, partial(_without_taints, text=text.removeprefix("taint ")))
    found.taint_rules = [
        rule
        for rule in there.taint_rules
        if text != f"DeviceTaintRule {rule.metadata.name} with {rule.spec.taint.text}"
    ]
    return found


def _without_taints(item: DetailedSlice, text: str | None = None) -> DetailedSlice:
    """A slice without the taint ``text``, or without any."""
    devices = tuple(
        msgspec.structs.replace(
            device, taints=tuple(taint for taint in device.taints if text is not None and taint.text != text)
        )
        for device in item.spec.devices
    )
    return msgspec.structs.replace(item, spec=msgspec.structs.replace(item.spec, written_devices=devices))


def _without_constraints(there: Situation) -> Situation:
    return with_devices(there, lambda devices: msgspec.structs.replace(devices, constraints=()))


def _with_nic_request(there: Situation, without_selector: str | None = None, count: int | None = None) -> Situation:
    def of_request(request: Request) -> Request:
        if request.name != "nic" or request.exactly is None:
            return request
        selectors = request.exactly.selectors
        kept = [each for each in selectors if each.cel and brief(each.cel.expression, NIC) != without_selector]
        exactly = msgspec.structs.replace(request.exactly, selectors=tuple(kept))
        if count is not None:
            exactly = msgspec.structs.replace(exactly, count=count, allocation_mode="ExactCount")
        return msgspec.structs.replace(request, exactly=exactly)

    def of_claim(devices: DeviceClaim) -> DeviceClaim:
        return msgspec.structs.replace(devices, written_requests=tuple(map(of_request, devices.requests)))

    return with_devices(there, of_claim)


def counted(there: Situation, sentence: str) -> Iterator[Question]:
    """Questions about the numbers of NICs that ``sentence`` gives, without constraints and for any number of them."""
    for text in NICS.findall(sentence):
        numbers = dict.fromkeys(("held", "tainted", "unselected", "free"), 0)
        named: list[str] = []
        for match in _parts(text):
            state = next((name for name in ("held", "tainted", "unselected") if match[name]), "free")
            numbers[state] += _number(match)
            named += match["claims"].split(", ") if match["held"] else []
        if STATES.match(text) is None:
            continue
        usable, loose = numbers["free"], _without_constraints(there)
        yield from _at_most(loose, usable, f"of the NICs {usable} are free: {text}")
        if named:
            loose, usable = ended(loose, named), usable + numbers["held"]
            yield from _at_most(loose, usable, f"without the named holders {usable} are free: {text}")
        if numbers["tainted"] or holders(loose):
            loose, usable = _with_slices(ended(loose, holders(loose)), _without_taints), usable + numbers["tainted"]
            loose.taint_rules = []
            yield from _at_most(loose, usable, f"without claims and taints {usable} are free: {text}")


def _at_most(there: Situation, count: int, sentence: str) -> Iterator[Question]:
    """So many NICs fit, and not one more."""
    if count:
        yield Question(_with_nic_request(there, count=count), True, sentence)
    yield Question(_with_nic_request(there, count=count + 1), False, f"no more than that: {sentence}")
