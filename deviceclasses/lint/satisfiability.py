"""Claims that no device can satisfy, and claims that could get two shares of one GPU.

Their pods would stay pending, or fail when they start. The chart's policy ``fitting-class`` refuses such claims for the
chart's classes at admission; lint checks every class, by what its selectors may select.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deviceclasses.chart_classes import FULL_GPU, MONITORS
from deviceclasses.lint.claim_fields import (
    ClassFacts,
    ConstraintFields,
    LintContext,
    RequestFields,
    parameters_of,
    request_names,
    requested_strategy,
    selectors_of,
    settings_of,
)
from deviceclasses.lint.findings import Issue, Severity
from deviceclasses.lint.selectors.attribute_catalogue import ATTRIBUTES, CAPACITIES, capacities_of, names_of
from deviceclasses.lint.selectors.memory_bounds import requested_memory_issues
from deviceclasses.lint.selectors.selectable_kinds import (
    compiled_programs,
    may_select,
    may_select_monitors,
    possible_limits,
)
from driver.config.opaque_parameters import devices_for
from driver.config.strict_schema import shown
from driver.config.suggestions import meant
from driver.kube.types import MAX_DEVICES
from driver.model.offer import DeviceKind
from driver.model.shared_memory import MEMORY_CAPACITY, MemoryLimit, gib_of
from driver.slices.attributes import PARENT

DEVICE_NAMES = {
    DeviceKind.FULL: "full GPUs",
    DeviceKind.PARTITION: "partitions",
    DeviceKind.SHARE: "shares",
    DeviceKind.SHARED: "parts of shared GPUs",
    DeviceKind.SHARED_PARTITION: "compute instances of partitions",
}
MAX_LISTED_CLASSES = 3
EXAMPLE = f"{MEMORY_CAPACITY}: 6Gi"
LEAST_GIB_BY_MPS = 2
"""Less memory is hardly enough for a program where its context counts."""

ONE_PART = "one request for the memory of all gives a part of one GPU"
NOT_BY_MPS = f"where GPUs are shared by MPS its pod does not start: {ONE_PART}"


def parameter_mismatches(
    devices: Mapping[str, Any], path: str, requests: Sequence[RequestFields], context: LintContext
) -> Iterator[Issue]:
    """Issues for parameters of another kind of device than a request they name gets, or than all their requests get."""
    for index, entry, opaque in parameters_of(devices, context.driver):
        named, raw = request_names(entry), opaque.get("parameters")
        served = devices_for(raw)
        covered = [request for request in requests if not named or request.name in named or request.base in named]
        unfit = [request for request in covered if served and _gives_none_of(request, served, context)]
        if len(unfit) < len(covered):
            unfit = [request for request in unfit if request.name in named]
        for request in unfit:
            message = (
                f"does not fit request {request.name}: {_gives(request, context)}; "
                f"take {_classes_of(served, context)}or parameters for what the class gives"
            )
            kind = raw.get("kind") if isinstance(raw, Mapping) else None
            yield Issue(f"{path}.config[{index}].opaque.parameters.kind", shown(kind), message)


def unsatisfiable_selectors(request: RequestFields, context: LintContext) -> Iterator[Issue]:
    """Issues for selectors of a request that accept no device of its class."""
    facts = context.facts(request)
    if request.class_name not in context.classes:
        return
    if request.has_admin_access or (not facts.gives and may_select_monitors(facts.selectors, context.driver)):
        yield from _monitor_issues(request, context)
        return
    selectors = list(selectors_of(request.raw, request.path))
    if not selectors or not facts.gives or _selected_kinds(facts, request.selectors, context):
        return
    place, expression = next(
        (selector for selector in selectors if not _selected_kinds(facts, (selector[1],), context)), selectors[0]
    )
    others = _class_list(
        [name for name, other in context.classes.items() if _selected_kinds(other, (expression,), context)]
    )
    message = f"{_gives(request, context)}, never what this selector asks for"
    yield Issue(place, shown(expression), f"{message}; take {others.removesuffix(', ')}" if others else message)


def unsatisfiable_capacities(request: RequestFields, context: LintContext) -> Iterator[Issue]:
    """Issues for ``capacity.requests`` that no device of its class can meet.

    The scheduler compares the names as they are written, and takes devices without the capacity for too small.
    """
    facts, path = context.facts(request), f"{request.path}.capacity.requests"
    kinds = _selected_kinds(facts, request.selectors, context)
    for name, amount in settings_of(request.raw, "capacity.requests").items() if facts.gives else ():
        plain = name.removeprefix(f"{context.driver}/")
        if plain != name and plain in CAPACITIES:
            yield Issue(
                f"{path}.{name}", shown(name), f"no device has it: names are compared as written; write {plain}"
            )
        elif name not in CAPACITIES:
            hint = meant(name, CAPACITIES) or f"; accepted: {', '.join(sorted(CAPACITIES))}"
            yield Issue(f"{path}.{name}", shown(name), f"no device of Tessera has this capacity{hint}")
        elif kinds == {DeviceKind.SHARE}:
            message = f"{_gives(request, context)}, which have no capacity: a share may use all memory of its GPU"
            yield Issue(f"{path}.{name}", shown(amount), message)
        elif kinds and not any(name in capacities_of(kind) for kind in kinds):
            yield Issue(f"{path}.{name}", shown(amount), f"{_gives(request, context)}, which have no {name}")
        elif name == "memory":
            programs = compiled_programs((*facts.selectors, *request.selectors))
            yield from requested_memory_issues(f"{path}.{name}", str(amount), programs, context.driver)


def shared_gpu_issues(
    requests: Sequence[RequestFields], constraints: Sequence[ConstraintFields], context: LintContext
) -> Iterator[Issue]:
    """Issues for requests that get a part of a shared GPU: without an amount of memory, or for parts of several."""
    parts = _parts_of_shared_gpus(requests, context)
    for request in parts:
        path, amounts = f"{request.path}.capacity", settings_of(request.raw, "capacity.requests")
        if not any(name.rpartition("/")[2] == MEMORY_CAPACITY for name in amounts):
            message = f"without memory the request gets all memory of a GPU: add capacity: {{requests: {{{EXAMPLE}}}}}"
            yield Issue(path, shown(request.raw.get("capacity")), message)
        if request.count > 1:
            message = f"asks for parts of {request.count} GPUs, each with that memory; {NOT_BY_MPS}"
            yield Issue(f"{request.path}.count", shown(request.count), message, Severity.WARNING)
    parent = f"{context.driver}/{PARENT.name}"
    together = [constraint for constraint in constraints if not constraint.distinct and constraint.attribute == parent]
    for index, request in enumerate(parts):
        earlier = next((other for other in parts[:index] if other.base != request.base), None)
        if earlier and not any(constraint.covers(earlier) and constraint.covers(request) for constraint in together):
            message = f"together with request {earlier.name} may get parts of two GPUs, or two of one; {NOT_BY_MPS}"
            yield Issue(f"{request.path}.deviceClassName", shown(request.class_name), message, Severity.WARNING)


def little_memory_by_mps(
    devices: Mapping[str, Any], requests: Sequence[RequestFields], context: LintContext
) -> Iterator[Issue]:
    """Warnings about less memory than programs need where the MPS server limits it, as far as that is known."""
    given = parameters_of(devices, context.driver)
    asked = [(request_names(entry), requested_strategy(opaque.get("parameters"))) for _, entry, opaque in given]
    for request in _parts_of_shared_gpus(requests, context):
        amounts, facts = settings_of(request.raw, "capacity.requests"), context.facts(request)
        gib = gib_of(amounts, LEAST_GIB_BY_MPS)
        limits = possible_limits((*facts.selectors, *request.selectors), context.driver)
        if gib is None or gib >= LEAST_GIB_BY_MPS or MemoryLimit.MPS not in limits:
            continue
        strategy = facts.strategy or ("MPS" if context.limits_by_mps else None)
        for named, of_entry in asked:
            if of_entry and (not named or request.name in named or request.base in named):
                strategy = of_entry
        if strategy == "MPS" or limits == {MemoryLimit.MPS}:
            place = f"{request.path}.capacity.requests.{MEMORY_CAPACITY}"
            message = (
                "where the MPS server limits memory, the context of each CUDA process counts, about 514 MiB: request "
                f"{LEAST_GIB_BY_MPS}Gi or more"
            )
            yield Issue(place, shown(amounts[MEMORY_CAPACITY]), message, Severity.WARNING)


def _parts_of_shared_gpus(requests: Sequence[RequestFields], context: LintContext) -> list[RequestFields]:
    """The requests that certainly get a part of a shared GPU, and nothing else."""
    return [
        request
        for request in requests
        if not request.has_admin_access
        and _selected_kinds(context.facts(request), request.selectors, context) == {DeviceKind.SHARED}
    ]


def _monitor_issues(request: RequestFields, context: LintContext) -> Iterator[Issue]:
    """Issues for adminAccess to other devices than those of monitors, and for those without adminAccess."""
    facts, path = context.facts(request), f"{request.path}.deviceClassName"
    if not request.has_admin_access:
        message = "gives only monitor devices, which the node plugin refuses to requests without adminAccess: true"
        yield Issue(path, shown(request.class_name), f"{message}; take class {FULL_GPU} to use a GPU")
    elif may_select_monitors(facts.selectors, context.driver):
        selectors = list(selectors_of(request.raw, request.path))
        if not may_select_monitors((*facts.selectors, *request.selectors), context.driver):
            place, expression = selectors[-1]
            yield Issue(place, shown(expression), "accepts no monitor device; requests with adminAccess get no other")
    elif facts.gives:
        message = (
            f"gives no monitor devices, and requests with adminAccess get no other: take {MONITORS}. From Kubernetes "
            "1.36 on, the classes in admission.monitoredClasses of the chart are replaced when a claim is created; "
            "otherwise its pod cannot start"
        )
        yield Issue(path, shown(request.class_name), message, Severity.WARNING)


def unsatisfiable_constraints(
    requests: Sequence[RequestFields], constraints: Sequence[ConstraintFields], context: LintContext
) -> Iterator[Issue]:
    """Issues for constraints on an attribute that no device of a request can have."""
    for constraint in constraints:
        domain, _, name = constraint.attribute.rpartition("/")
        having = frozenset(kind for kind in DeviceKind if name in names_of(kind))
        if domain != context.driver or name not in ATTRIBUTES:
            continue
        covered = filter(constraint.covers, requests)
        without = [request for request in covered if _gives_none_of(request, having, context)]
        for base in dict.fromkeys(request.base for request in without):
            alternatives = [request for request in requests if request.base == base]
            if all(request in without for request in alternatives):
                given = ", ".join(f"request {request.name}: {_gives(request, context)}" for request in alternatives)
                message = (
                    f"can't hold for {given}, which never have it; take {_classes_of(having, context)}"
                    "or list under requests of the constraint only those that it applies to"
                )
                yield Issue(constraint.path, shown(constraint.attribute), message)


def _gives_none_of(request: RequestFields, wanted: frozenset[DeviceKind], context: LintContext) -> bool:
    """Whether the request certainly gets no device of these kinds."""
    facts = context.facts(request)
    narrowed = _selected_kinds(facts, request.selectors, context) or facts.gives
    return bool(facts.gives) and not narrowed & wanted


def _selected_kinds(facts: ClassFacts, selectors: tuple[str, ...], context: LintContext) -> frozenset[DeviceKind]:
    """The kinds of a class's devices that the selectors of a request may accept."""
    return facts.gives & may_select((*facts.selectors, *selectors), context.driver)


def _gives(request: RequestFields, context: LintContext) -> str:
    facts = context.facts(request)
    given = " or ".join(DEVICE_NAMES[kind] for kind in DeviceKind if kind in facts.gives)
    return f"class {request.class_name} gives {given}"


def _classes_of(kinds: frozenset[DeviceKind], context: LintContext) -> str:
    return _class_list([name for name, facts in context.classes.items() if facts.gives and facts.gives <= kinds])


def _class_list(names: Sequence[str]) -> str:
    """The beginning of a hint with classes, shortest names first; empty if there are none."""
    ordered = sorted(names, key=lambda name: (len(name), name))
    if len(ordered) <= MAX_LISTED_CLASSES:
        return f"class {' or '.join(ordered)}, " if ordered else ""
    return f"class {ordered[0]} or one of {len(ordered) - 1} more, "


def too_many_devices(requests: Sequence[RequestFields], path: str) -> Iterator[Issue]:
    """Issues for more devices than a claim can have: of one request, or of all with their smallest alternatives."""
    smallest: dict[str, int] = {}
    for request in requests:
        smallest[request.base] = min(request.count, smallest.get(request.base, request.count))
        if request.count > MAX_DEVICES:
            message = f"a claim can have at most {MAX_DEVICES} devices: its pod would wait for ever"
            yield Issue(f"{request.path}.count", shown(request.count), message)
    if max(smallest.values(), default=0) <= MAX_DEVICES < sum(smallest.values()):
        message = f"ask for {sum(smallest.values())} devices together; a claim can have at most {MAX_DEVICES}"
        yield Issue(f"{path}.requests", "", message)


def share_issues(
    requests: Sequence[RequestFields], constraints: Sequence[ConstraintFields], context: LintContext
) -> Iterator[Issue]:
    """Issues for claims that could get two shares of one GPU, which the driver refuses when the pod starts."""
    parent = f"{context.driver}/{PARENT.name}"
    apart = [constraint for constraint in constraints if constraint.distinct and constraint.attribute == parent]
    shares = []
    for request in requests:
        facts = context.facts(request)
        kinds = may_select((*facts.selectors, *request.selectors), context.driver)
        if request.class_name not in context.classes or request.has_admin_access:
            continue
        if facts.shares or DeviceKind.SHARE in kinds:
            shares.append(request)
    remedy = (
        "may give two shares of one GPU to this claim, which the driver refuses: ask for one share (of a GPU with "
        "fewer shares, if that is too little), a partition or a full GPU; for shares of different GPUs add the "
        f"constraint distinctAttribute: {parent}"
    )
    for request in shares:
        if request.count > 1 and not any(constraint.covers(request) for constraint in apart):
            yield Issue(f"{request.path}.count", shown(request.raw.get("count")), remedy)
    for index, other in enumerate(shares):
        for earlier in shares[:index]:
            separated = any(constraint.covers(earlier) and constraint.covers(other) for constraint in apart)
            if earlier.base != other.base and not separated:
                message = f"together with request {earlier.name} {remedy}"
                yield Issue(f"{other.path}.deviceClassName", shown(other.class_name), message)
                break
