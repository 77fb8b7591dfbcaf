"""The rules of lint for DeviceClasses, ResourceClaims and ResourceClaimTemplates of ``resource.k8s.io`` (pure).

Other objects are ignored. The rules find what the API server refuses, and above all what it accepts, since it checks
only the shape of an object.

kubectl refuses fields that the API does not have, other clients drop them silently. The API server checks everything
else (values, lengths, required fields). Source: Kubernetes 1.37, ``staging/src/k8s.io/api/resource/v1/types.go``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from deviceclasses.cel.library.quantity import parse_quantity
from deviceclasses.cel.values import EvaluationError
from deviceclasses.lint.admission_policies import policy_issues
from deviceclasses.lint.claim_fields import (
    ConstraintFields,
    LintContext,
    RequestFields,
    constraints_of,
    entries,
    findings_in,
    lint_context,
    parameters_of,
    request_names,
    requests_of,
    selectors_of,
    settings_of,
)
from deviceclasses.lint.documents import DRA_GROUP, DRA_VERSION, SPEC, Document, kind_of, text
from deviceclasses.lint.findings import Finding, Issue, Severity, almost, misspelt
from deviceclasses.lint.nvidia_driver import (
    nvidia_parameters,
    nvidia_selectors,
    of_nvidia_class,
    of_nvidia_domain,
)
from deviceclasses.lint.satisfiability import (
    little_memory_by_mps,
    parameter_mismatches,
    share_issues,
    shared_gpu_issues,
    too_many_devices,
    unsatisfiable_capacities,
    unsatisfiable_constraints,
    unsatisfiable_selectors,
)
from deviceclasses.lint.selectors.attribute_catalogue import ATTRIBUTES, STANDARD_DOMAIN, no_attribute
from deviceclasses.lint.selectors.selectable_kinds import may_select
from deviceclasses.lint.selectors.selector_rules import selector_issues, type_issues
from driver.config.flag_values import NVIDIA_DRIVER
from driver.config.libyaml_loader import read_yaml
from driver.config.opaque_parameters import InvalidParameters, parse_parameters
from driver.config.strict_schema import shown
from driver.config.suggestions import meant, nearest
from driver.model.offer import DeviceKind
from driver.slices.attributes import PARENT

ALLOCATION_MODES = ("ExactCount", "All")
OTHER_KINDS = ("ResourceSlice", "DeviceTaintRule", "ResourcePoolStatusRequest")
"""The other kinds of the group, which are ignored."""


def lint(documents: Sequence[Document], installed: Iterable[Mapping[str, Any]], driver: str) -> Iterator[Finding]:
    """Every finding, in the order of ``documents``; ``installed`` are classes that exist in addition.

    ResourceSlices among the documents say what limits memory on the GPUs of the cluster.
    """
    contents = [document.content for document in documents if isinstance(document.content, Mapping)]
    classes = (content for content in contents if kind_of(content) == "DeviceClass")
    slices = (content for content in contents if text(content, "kind") == "ResourceSlice")
    context = lint_context([*installed, *classes], driver, slices)
    return findings_in(documents, lambda content: _issues(content, context))


def _issues(content: Mapping[str, Any], context: LintContext) -> Iterator[Issue]:
    kind = kind_of(content)
    if kind is None:
        written, existing = text(content, "kind"), (*SPEC, *OTHER_KINDS)
        if text(content, "apiVersion").startswith(f"{DRA_GROUP}/") and written.removesuffix("List") not in existing:
            yield Issue("kind", shown(written), f"no such kind in {DRA_GROUP}{meant(written, existing)}")
        return
    rules = _class if kind == "DeviceClass" else _claim
    issues = [*refused(content, kind), *rules(settings_of(content, SPEC[kind]), SPEC[kind], context)]
    yield from issues
    # The policies would say of most errors once more what the rules say.
    if all(issue.severity is Severity.WARNING for issue in issues):
        yield from policy_issues(kind, content, SPEC[kind], context.driver)


def refused(content: Mapping[str, Any], kind: str) -> Iterator[Issue]:
    """Why the API server, or the strict validation of kubectl, refuses an object of this kind."""
    version = content.get("apiVersion")
    if version != DRA_VERSION:
        message = f"Kubernetes serves {DRA_VERSION}; other versions only if an administrator enables them"
        yield Issue("apiVersion", shown(version), message if text(content, "apiVersion") else f"must be {DRA_VERSION}")
    yield from _unknown(content, _fields_of_kinds()[kind], "")
    for request in requests_of(settings_of(content, SPEC[kind]), SPEC[kind]):
        yield from _values(request)


def _values(request: RequestFields) -> Iterator[Issue]:
    count, mode = request.raw.get("count", 1), request.raw.get("allocationMode") or ALLOCATION_MODES[0]
    if "deviceClassName" not in request.raw:
        yield Issue(request.path, shown(request.raw), "must have exactly or firstAvailable, with deviceClassName")
    if isinstance(count, int) and count < 1:
        yield Issue(f"{request.path}.count", shown(count), "must be at least 1")
    if mode not in ALLOCATION_MODES:
        yield Issue(f"{request.path}.allocationMode", shown(mode), f"accepted: {', '.join(ALLOCATION_MODES)}")
    for name, amount in settings_of(request.raw, "capacity.requests").items():
        try:
            parse_quantity(str(amount))
        except EvaluationError as error:
            yield Issue(f"{request.path}.capacity.requests.{name}", shown(amount), str(error))


def _class(spec: Mapping[str, Any], path: str, context: LintContext) -> Iterator[Issue]:
    expressions = tuple(expression for _, expression in selectors_of(spec, path))
    wrong = list(selector_issues(spec, path, context.driver))
    yield from wrong or type_issues(expressions, path, context.driver)
    if spec.get("extendedResourceName") and may_select(expressions, context.driver) == {DeviceKind.SHARED}:
        message = "a pod that requests it can't state memory, and would get all memory of a shared GPU: leave it out"
        yield Issue(f"{path}.extendedResourceName", shown(spec["extendedResourceName"]), message)
    yield from _parameter_issues(spec, path, context)


def _claim(devices: Mapping[str, Any], path: str, context: LintContext) -> Iterator[Issue]:
    requests = list(requests_of(devices, path))
    constraints = list(constraints_of(devices, path))
    for request in requests:
        if request.class_name and request.class_name not in context.classes:
            hint = of_nvidia_class(request.class_name) or meant(request.class_name, context.classes)
            message = f"no such class in these files or among Tessera's{hint}"
            yield Issue(f"{request.path}.deviceClassName", shown(request.class_name), message, Severity.WARNING)
        wrong = list(selector_issues(request.raw, request.path, context.driver, context.facts(request).selectors))
        yield from wrong or unsatisfiable_selectors(request, context)
        yield from () if wrong else unsatisfiable_capacities(request, context)
        yield from nvidia_selectors(request.raw, request.path, context.driver)
        yield from _all_devices(request, context)
    yield from _repeated(devices, f"{path}.requests", "request")
    for index, with_alternatives in entries(devices, "requests"):
        yield from _repeated(with_alternatives, f"{path}.requests[{index}].firstAvailable", "alternative")
    yield from _parameter_issues(devices, path, context)
    yield from parameter_mismatches(devices, path, requests, context)
    yield from _request_names(devices, path, requests)
    for constraint in constraints:
        yield from _constraint_attribute(constraint, context)
    yield from unsatisfiable_constraints(requests, constraints, context)
    yield from too_many_devices(requests, path)
    yield from share_issues(requests, constraints, context)
    yield from shared_gpu_issues(requests, constraints, context)
    yield from little_memory_by_mps(devices, requests, context)


def _parameter_issues(owner: Mapping[str, Any], path: str, context: LintContext) -> Iterator[Issue]:
    for index, entry in entries(owner, "config"):
        opaque = entry.get("opaque")
        other = text(opaque, "driver") if isinstance(opaque, Mapping) else ""
        place = f"{path}.config[{index}].opaque.driver"
        yield from almost(place, other, [context.driver], "the driver's name")
        yield from nvidia_parameters(other, place, context.driver)
    for index, _, opaque in parameters_of(owner, context.driver):
        try:
            parse_parameters(opaque.get("parameters"), path)
        except InvalidParameters as error:
            there = f"{path}.config[{index}].opaque.parameters"
            for fault in error.faults:
                place = there if fault.path in {"", "parameters"} else f"{there}.{fault.path}"
                yield Issue(place, fault.found, fault.message)


def _all_devices(request: RequestFields, context: LintContext) -> Iterator[Issue]:
    """An issue for allocationMode All, except with administrative access, which allocates nothing."""
    mode, gives = request.raw.get("allocationMode"), context.facts(request).gives
    if mode == "All" and gives and not request.has_admin_access:
        message = (
            "with a controller gives the devices that are offered at the moment, not all that are free, and a policy "
            "of the chart refuses it: ask for a number of devices instead, at most as many as one node has, such as "
            "count: 8"
        )
        yield Issue(f"{request.path}.allocationMode", shown(mode), message)


def _repeated(owner: Mapping[str, Any], path: str, what: str) -> Iterator[Issue]:
    """Issues for names that several entries of the list at ``path`` have, which the API server refuses."""
    seen: set[str] = set()
    for index, entry in entries(owner, path.rpartition(".")[2]):
        name = text(entry, "name")
        if name and name in seen:
            yield Issue(f"{path}[{index}].name", shown(name), f"another {what} has this name")
        seen.add(name)


def _request_names(devices: Mapping[str, Any], path: str, requests: Sequence[RequestFields]) -> Iterator[Issue]:
    accepted = list(dict.fromkeys(name for request in requests for name in (request.base, request.name)))
    for field in ("config", "constraints"):
        for index, entry in entries(devices, field):
            for position, name in enumerate(request_names(entry)):
                if name not in accepted:
                    hint = meant(str(name), accepted)
                    message = f"no such request; accepted: {', '.join(accepted) or 'none'}{hint}"
                    yield Issue(f"{path}.{field}[{index}].requests[{position}]", shown(name), message)


def _constraint_attribute(constraint: ConstraintFields, context: LintContext) -> Iterator[Issue]:
    domain, slash, name = constraint.attribute.rpartition("/")
    domains = [context.driver, STANDARD_DOMAIN]
    if not slash:
        message = f"must be qualified by a domain, such as {context.driver}/{PARENT.name}"
        hint = meant(name, (f"{context.driver}/{attribute}" for attribute in ATTRIBUTES))
        yield Issue(constraint.path, shown(name), f"{message}{hint}")
    elif misspelt(domain, domains):
        message = f"is almost a domain of Tessera's devices{meant(domain, domains)}"
        yield Issue(constraint.path, shown(constraint.attribute), message, Severity.WARNING)
    elif domain == NVIDIA_DRIVER and domain != context.driver:
        yield Issue(constraint.path, shown(constraint.attribute), of_nvidia_domain(context.driver), Severity.WARNING)
    elif domain == context.driver and name not in ATTRIBUTES:
        yield Issue(constraint.path, shown(constraint.attribute), no_attribute(name, domain))


Fields = Mapping[str, Any]
"""The fields of an object, or of each object of a list, with their own fields; None: they are not checked."""


@cache
def _fields_of_kinds() -> Mapping[str, Fields]:
    fields: dict[str, Fields] = read_yaml(files(__package__).joinpath("fields.yaml").read_text("utf-8"))
    return fields


def _unknown(content: Mapping[Any, Any], known: Fields, path: str) -> Iterator[Issue]:
    for name, found in content.items():
        place = f"{path}{name}"
        if not isinstance(name, str) or name not in known:
            yield Issue(place, shown(found), _no_such(str(name), known))
        elif known[name] is not None:
            several = isinstance(found, list)
            for index, item in enumerate(found if several else [found]):
                if isinstance(item, Mapping):
                    yield from _unknown(item, known[name], f"{place}[{index}]." if several else f"{place}.")


def _no_such(name: str, known: Fields) -> str:
    inside = [field for field, fields in known.items() if fields is not None and name in fields]
    if inside:
        return f"no such field here; it belongs under {' or '.join(inside)}"
    close = nearest(name, known)
    return f"no such field; did you mean {close}?" if close else f"no such field; accepted: {', '.join(known)}"
