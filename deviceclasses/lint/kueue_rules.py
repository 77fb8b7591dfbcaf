"""The rules of ``tessera lint --kueue``: Kueue's Configuration, queues, and the jobs and templates that wait in them.

Source: Kueue 0.20 development (ff69552e), ``pkg/config/validation.go`` and ``pkg/dra``. What the manager refuses at its
start and what keeps a Workload from ever being admitted are errors; the rest are warnings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from deviceclasses.lint.claim_fields import (
    UNKNOWN,
    LintContext,
    entries,
    findings_in,
    lint_context,
    requests_of,
    selectors_of,
    settings_of,
)
from deviceclasses.lint.documents import Document, parse_documents, text
from deviceclasses.lint.findings import Finding, Issue, Severity, almost
from deviceclasses.lint.pod_templates import pod_templates
from deviceclasses.lint.satisfiability import DEVICE_NAMES
from deviceclasses.lint.selectors.attribute_catalogue import CAPACITIES
from deviceclasses.lint.selectors.selectable_kinds import may_select
from deviceclasses.lint.selectors.selector_rules import selector_issues
from driver.config.flag_values import SUBDOMAIN
from driver.config.strict_schema import shown
from driver.config.suggestions import meant
from driver.model.offer import DeviceKind

Object = Mapping[str, Any]

KUEUE_GROUP = "kueue.x-k8s.io"
CONFIGURATION = f"config.{KUEUE_GROUP}"
QUEUE_NAME = f"{KUEUE_GROUP}/queue-name"
MAPPINGS = "resources.deviceClassMappings"
MAX_MAPPINGS, MAX_CLASSES, MAX_NAME, MAX_LABEL = 16, 8, 253, 63
MEMORY_NAME = "memory"
SOURCE_GATES = {
    "counter": ("KueueDRAIntegrationPartitionableDevices", True),
    "capacity": ("KueueDRAIntegrationConsumableCapacity", False),
}
"""The feature gate of each kind of source, and its default."""

LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
COUNTER_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
CAPACITY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ClassMapping:
    """An entry of deviceClassMappings; ``path`` is its own."""

    path: str
    raw: Object

    @property
    def name(self) -> str:
        return text(self.raw, "name")

    @property
    def classes(self) -> list[str]:
        names = self.raw.get("deviceClassNames")
        return [name for name in (names if isinstance(names, list) else ()) if isinstance(name, str)]

    @property
    def sources(self) -> Iterator[tuple[str, str, Object]]:
        for index, source in entries(self.raw, "sources"):
            for kind in SOURCE_GATES:
                if isinstance(found := source.get(kind), Mapping):
                    yield f"{self.path}.sources[{index}].{kind}", kind, found

    @property
    def counter(self) -> str:
        """The name of the counter of the first source, by which Kueue tells two mappings of a class apart."""
        first = next(entries(self.raw, "sources"), (0, {}))[1].get("counter")
        return text(first, "name") if isinstance(first, Mapping) else ""


@dataclass(frozen=True)
class KueueContext:
    """All objects of the files, and the facts about classes."""

    objects: Sequence[Object]
    lint: LintContext

    def of_kind(self, kind: str) -> list[Object]:
        return [item for item in self.objects if text(item, "kind") == kind and _is_kueue(item)]

    @cached_property
    def mappings(self) -> list[ClassMapping]:
        return [mapping for configuration in self.of_kind("Configuration") for mapping in mappings_of(configuration)]

    @cached_property
    def templates_outside(self) -> set[tuple[str, str]]:
        """Namespace and name of the templates that only pods outside of Kueue use."""
        users: dict[tuple[str, str], set[bool]] = {}
        for item in self.objects:
            for pod in pod_templates(item):
                for _, claim in entries(pod.spec, "resourceClaims"):
                    template = (_metadata(item, "namespace"), text(claim, "resourceClaimTemplateName"))
                    users.setdefault(template, set()).add(bool(queue_of(item)))
        return {template for template, queued in users.items() if queued == {False}}

    def kinds(self, mapping: ClassMapping) -> set[DeviceKind]:
        """The kinds of Tessera's devices that the classes of a mapping give."""
        return {kind for name in mapping.classes for kind in self.lint.classes.get(name, UNKNOWN).gives}


def lint_kueue(documents: Sequence[Document], installed: Iterable[Object], driver: str) -> Iterator[Finding]:
    """The findings that only Kueue gives a reason for: unreadable ones first, then in the order of ``documents``."""
    given = [part for document in documents for part in (document, *_configurations_in(document))]
    yield from (part for part in given if isinstance(part, Finding))
    documents = [part for part in given if isinstance(part, Document)]
    objects = [document.content for document in documents if isinstance(document.content, Mapping)]
    classes = [item for item in objects if text(item, "kind") == "DeviceClass"]
    context = KueueContext(objects, lint_context([*installed, *classes], driver))
    yield from findings_in(documents, lambda content: _issues(content, context))


def is_checked(content: object) -> bool:
    if not isinstance(content, Mapping):
        return False
    return _is_kueue(content) or bool(queue_of(content)) or any(_configurations_in(Document("", 1, content)))


def _configurations_in(document: Document) -> Iterator[Document | Finding]:
    """The Configurations in a ConfigMap, as Kueue's manifests have it; a finding for a value that can't be read."""
    content = document.content
    if not isinstance(content, Mapping) or text(content, "kind") != "ConfigMap":
        return
    metadata = settings_of(content, "metadata")
    for name, value in settings_of(content, "data").items():
        for part in parse_documents(document.file, str(value).encode()) if CONFIGURATION in str(value) else ():
            if isinstance(part, Finding):
                about = f"ConfigMap {text(metadata, 'name')}"
                yield replace(part, document=document.number, object=about, path=f"data[{name}]: {part.path}")
            elif isinstance(part.content, Mapping) and _is_kueue(part.content):
                named = {**part.content, "metadata": {**metadata, **settings_of(part.content, "metadata")}}
                yield Document(document.file, document.number, named)


def _issues(content: Object, context: KueueContext) -> Iterator[Issue]:
    kind = text(content, "kind")
    if kind == "Configuration" and _is_kueue(content):
        yield from _configuration(content, context)
    elif kind == "ClusterQueue" and _is_kueue(content):
        yield from _shared_hardware(content, context)
    elif kind == "LocalQueue" and _is_kueue(content):
        name = text(settings_of(content, "spec"), "clusterQueue")
        yield from _known(context, "ClusterQueue", "spec.clusterQueue", name)
    elif kind == "ResourceClaimTemplate":
        if (_metadata(content, "namespace"), _metadata(content, "name")) not in context.templates_outside:
            yield from _template(settings_of(content, "spec.spec.devices"), context)
    elif queue := queue_of(content):
        yield from _known(context, "LocalQueue", f"metadata.labels[{QUEUE_NAME}]", queue)
        yield from _job(content, context)


def mappings_of(configuration: Object) -> list[ClassMapping]:
    resources = settings_of(configuration, "resources")
    return [ClassMapping(f"{MAPPINGS}[{index}]", raw) for index, raw in entries(resources, "deviceClassMappings")]


def queue_of(content: Object) -> str:
    """The LocalQueue that an object names; empty if Kueue does not queue it."""
    return text(settings_of(content, "metadata.labels"), QUEUE_NAME)


def _is_kueue(content: Object) -> bool:
    return text(content, "apiVersion").partition("/")[0] in {KUEUE_GROUP, CONFIGURATION}


def _metadata(content: Object, field: str) -> str:
    return text(settings_of(content, "metadata"), field)


def _known(context: KueueContext, kind: str, path: str, name: str) -> Iterator[Issue]:
    """A warning about a queue that is not in the files, if they have any of its kind."""
    names = [_metadata(queue, "name") for queue in context.of_kind(kind)]
    if names and name not in names:
        message = f"no {kind} of this name in these files; there is {', '.join(names)}{meant(name, names)}"
        yield Issue(path, shown(name), message, Severity.WARNING)


def _configuration(content: Object, context: KueueContext) -> Iterator[Issue]:
    mappings, gates = mappings_of(content), content.get("featureGates")
    if len(mappings) > MAX_MAPPINGS:
        message = f"Kueue accepts at most {MAX_MAPPINGS} mappings; one mapping can have up to {MAX_CLASSES} classes"
        yield Issue(MAPPINGS, str(len(mappings)), message)
    for position, mapping in enumerate(mappings):
        earlier = mappings[:position]
        yield from _label_key(f"{mapping.path}.name", mapping.raw.get("name"))
        if mapping.name in {before.name for before in earlier}:
            message = "another mapping has this name; list its classes in one mapping"
            yield Issue(f"{mapping.path}.name", shown(mapping.name), message)
        yield from _classes(mapping, earlier, context)
        yield from _sources(mapping, gates if isinstance(gates, Mapping) else None, context)
        kinds = context.kinds(mapping)
        if len(kinds) > 1 and not list(mapping.sources):
            alike = " and ".join(DEVICE_NAMES[kind] for kind in DeviceKind if kind in kinds)
            remedy = f"with a counter source {MEMORY_NAME} each is charged the memory that it takes"
            path, names = f"{mapping.path}.deviceClassNames", ", ".join(mapping.classes)
            yield Issue(path, names, f"counts {alike} alike; {remedy}", Severity.WARNING)


def _label_key(path: str, found: object) -> Iterator[Issue]:
    name = found if isinstance(found, str) else ""
    prefix, slash, last = name.rpartition("/")
    valid = len(name) <= MAX_NAME and len(last) <= MAX_LABEL and LABEL_NAME.fullmatch(last)
    if not valid or (slash and not SUBDOMAIN.fullmatch(prefix)):
        accepted = f"a name of at most {MAX_LABEL} letters, digits, - _ and ., such as gpu-memory"
        message = f"must be {accepted}, with or without a DNS domain and / before it; {MAX_NAME} characters at most"
        yield Issue(path, shown(found), message)


def _classes(mapping: ClassMapping, earlier: Sequence[ClassMapping], context: KueueContext) -> Iterator[Issue]:
    path, listed = f"{mapping.path}.deviceClassNames", mapping.raw.get("deviceClassNames")
    names = listed if isinstance(listed, list) else []
    if not names:
        yield Issue(path, shown(listed), f"must list 1 to {MAX_CLASSES} DeviceClasses, such as gpu-training")
    if len(names) > MAX_CLASSES:
        yield Issue(path, str(len(names)), f"Kueue accepts at most {MAX_CLASSES} classes in a mapping")
    for index, name in enumerate(names):
        place = f"{path}[{index}]"
        yield from _label_key(place, name)
        if name in names[:index]:
            yield Issue(place, shown(name), "the mapping lists this class already")
        other = next((before for before in earlier if name in before.classes and before.name != mapping.name), None)
        if other and (not mapping.counter or not other.counter or mapping.counter == other.counter):
            message = f"is part of mapping {other.name} already; two mappings can share a class only if each has a "
            yield Issue(place, shown(name), f"{message}counter source, for different counters")
        if isinstance(name, str) and name not in context.lint.classes:
            message = f"no such class in these files or among Tessera's{meant(name, context.lint.classes)}"
            yield Issue(place, shown(name), message, Severity.WARNING)


def _sources(mapping: ClassMapping, gates: Object | None, context: KueueContext) -> Iterator[Issue]:
    for index, source in entries(mapping.raw, "sources"):
        if len([kind for kind in SOURCE_GATES if source.get(kind) is not None]) != 1:
            message = "must have exactly one of counter and capacity"
            yield Issue(f"{mapping.path}.sources[{index}]", ", ".join(source) or "{}", message)
    if len({kind for _, kind, _ in mapping.sources}) > 1:
        yield Issue(f"{mapping.path}.sources", "counter, capacity", "must be all counters or all capacities")
    for path, kind, source in mapping.sources:
        gate, default = SOURCE_GATES[kind]
        if (gates or {}).get(gate, default) is not True:
            message = f"Kueue refuses {kind} sources without featureGates: {{{gate}: true}}"
            severity = Severity.WARNING if gates is None else Severity.ERROR
            yield Issue(path, kind, message if gates is not None else f"{message} (or the flag)", severity)
        yield from _source_name(path, kind, source, context.lint.driver)
        driver = text(source, "driver")
        if len(driver) > MAX_LABEL or not SUBDOMAIN.fullmatch(driver):
            message = f"must be the name of a DRA driver, such as {context.lint.driver}; {MAX_LABEL} characters at most"
            yield Issue(f"{path}.driver", shown(source.get("driver")), message)
        yield from almost(f"{path}.driver", driver, [context.lint.driver], "the driver's name")
        yield from _source_selector(mapping, path, kind, source, context)


def _source_name(path: str, kind: str, source: Object, driver: str) -> Iterator[Issue]:
    name, ours = text(source, "name"), text(source, "driver") == driver
    domain, _, last = name.rpartition("/")
    if kind == "counter":
        valid = len(name) <= MAX_LABEL and bool(COUNTER_NAME.fullmatch(name))
    else:
        valid = bool(CAPACITY_NAME.fullmatch(last)) and (not domain or bool(SUBDOMAIN.fullmatch(domain)))
    if not valid:
        accepted = "a DNS label" if kind == "counter" else "an identifier, with or without a DNS domain and /"
        yield Issue(f"{path}.name", shown(source.get("name")), f"must be {accepted}, such as {MEMORY_NAME}")
    elif ours and name not in ({MEMORY_NAME} if kind == "counter" else CAPACITIES):
        message = f"no {kind} of Tessera's devices that can be a quota; accepted: {MEMORY_NAME}"
        reason = " (Kueue compares the name as written, without a domain)" if domain else ""
        yield Issue(f"{path}.name", shown(name), f"{message}{reason}")


def _source_selector(
    mapping: ClassMapping, path: str, kind: str, source: Object, context: KueueContext
) -> Iterator[Issue]:
    owner, driver = {"selectors": [source.get("deviceSelector")]}, context.lint.driver
    expressions = [expression for _, expression in selectors_of(owner, path)]
    if not expressions:
        message = f'must be a CEL expression, such as device.driver == "{driver}"'
        yield Issue(f"{path}.deviceSelector.cel.expression", shown(source.get("deviceSelector")), message)
        return
    wrong = list(selector_issues(owner, path, driver))
    yield from (replace(issue, path=issue.path.replace(".selectors[0]", ".deviceSelector")) for issue in wrong)
    for name in mapping.classes if not wrong and text(source, "driver") == driver else ():
        facts = context.lint.classes.get(name, UNKNOWN)
        given = facts.gives & may_select((*facts.selectors, *expressions), driver)
        described = " or ".join(DEVICE_NAMES[device_kind] for device_kind in DeviceKind if device_kind in facts.gives)
        if facts.gives and not given:
            message = f"class {name} gives {described}, none of which this selects: its claims are never admitted"
            yield Issue(f"{path}.deviceSelector.cel.expression", shown(expressions[0]), message)
        elif given == {DeviceKind.SHARE} and kind == "capacity":
            remedy = f"take a counter source with name {MEMORY_NAME}"
            yield Issue(path, kind, f"class {name} gives shares, which have no capacity: {remedy}")
        elif given == {DeviceKind.SHARED} and kind == "counter":
            message = f"charges each claim of class {name} a whole GPU: take a capacity source with name {MEMORY_NAME}"
            yield Issue(path, kind, message, Severity.WARNING)


def _quotas(queue: Object) -> Iterator[tuple[str, str, str, object]]:
    """Path, flavor, resource and quota of each positive quota of a ClusterQueue."""
    for group, owner in entries(settings_of(queue, "spec"), "resourceGroups"):
        for position, flavor in entries(owner, "flavors"):
            for index, resource in entries(flavor, "resources"):
                path = f"spec.resourceGroups[{group}].flavors[{position}].resources[{index}].nominalQuota"
                if (quota := resource.get("nominalQuota")) not in (None, 0, "0"):
                    yield path, text(flavor, "name"), text(resource, "name"), quota


def _shared_hardware(queue: Object, context: KueueContext) -> Iterator[Issue]:
    """Warnings about quotas of one flavor that promise the same GPUs twice, in this ClusterQueue or with others."""
    mapped = {mapping.name: mapping for mapping in context.mappings if context.kinds(mapping)}
    quotas = [quota for other in context.of_kind("ClusterQueue") for quota in _quotas(other)]
    for path, flavor, resource, quota in _quotas(queue):
        names = list(dict.fromkeys(name for _, other, name, _ in quotas if other == flavor and name in mapped))
        if resource in names[1:]:
            remedy = f"map the classes of both to one resource with a counter source {MEMORY_NAME} and one quota"
            same = f"the quota of {names[0]} in flavor {flavor} is for the same GPUs"
            message = f"{same}: together they promise more than there is; {remedy}"
            yield Issue(path, f"{resource}: {quota}", message, Severity.WARNING)


def _template(devices: Object, context: KueueContext) -> Iterator[Issue]:
    path = "spec.spec.devices"
    for index, request in entries(devices, "requests"):
        if "firstAvailable" in request:
            message = "Kueue refuses firstAvailable: ask for one class with exactly"
            yield Issue(f"{path}.requests[{index}].firstAvailable", shown(request["firstAvailable"]), message)
    for fields in requests_of(devices, path):
        if ".firstAvailable[" in fields.path:
            continue
        if fields.has_admin_access:
            message = "Kueue charges nothing for a request with adminAccess, whatever it gets"
            yield Issue(f"{fields.path}.adminAccess", "true", message, Severity.WARNING)
            continue
        if fields.raw.get("allocationMode") == "All":
            message = "Kueue refuses All: ask for a number of devices, such as allocationMode: ExactCount, count: 8"
            yield Issue(f"{fields.path}.allocationMode", '"All"', message)
        mapped = [name for mapping in context.mappings for name in mapping.classes]
        if context.of_kind("Configuration") and fields.class_name not in mapped:
            message = f"Kueue refuses it, because no mapping has this class; mapped: {', '.join(mapped) or 'none'}"
            hint = meant(fields.class_name, mapped)
            yield Issue(f"{fields.path}.deviceClassName", shown(fields.class_name), f"{message}{hint}")


def _job(content: Object, context: KueueContext) -> Iterator[Issue]:
    sourced = {name for mapping in context.mappings if list(mapping.sources) for name in mapping.classes}
    extended = {
        text(settings_of(item, "spec"), "extendedResourceName"): _metadata(item, "name")
        for item in context.objects
        if text(item, "kind") == "DeviceClass" and _metadata(item, "name") in sourced
    }
    for template in pod_templates(content):
        path, pod = template.path, template.spec
        for index, claim in entries(pod, "resourceClaims"):
            if name := text(claim, "resourceClaimName"):
                message = "Kueue refuses pods with claims that exist already: take resourceClaimTemplateName"
                yield Issue(f"{path}.resourceClaims[{index}].resourceClaimName", shown(name), message)
        for index, container in entries(pod, "containers"):
            for field in ("resources.limits", "resources.requests"):
                for name in settings_of(container, field):
                    if name and name in extended:
                        message = f"Kueue refuses it, because the mapping of its class {extended[name]} has a source: "
                        place = f"{path}.containers[{index}].{field}[{name}]"
                        yield Issue(place, shown(name), f"{message}take a ResourceClaimTemplate")
