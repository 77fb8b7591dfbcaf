"""What is wrong with classes and claims, before a cluster sees them (pure).

Looks at DeviceClasses, ResourceClaims and ResourceClaimTemplates of ``resource.k8s.io``; whatever else stands in the
documents is passed over. The rules are those that the API server does not know: it checks the shape of an object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from deviceclasses.documents import SPEC, kind_of, misspelt, wrong_kind
from deviceclasses.fields import shape_issues
from deviceclasses.findings import Document, Finding, Issue, Severity
from deviceclasses.fitting import misfit_issues, never_issues, stranger_issues
from deviceclasses.known import Known, known_of, name_of, settings_of
from deviceclasses.published import ATTRIBUTES, CAPACITIES, IN_STANDARD, STANDARD_DOMAIN, unpublished
from deviceclasses.requests import (
    Constraint,
    Request,
    constraints_of,
    entries,
    parameters_of,
    request_names,
    requests_of,
    selectors_of,
    text,
)
from deviceclasses.selectors import selector_issues, selects_nothing
from deviceclasses.sharing import PARENT, share_issues
from driver.config.names import meant
from driver.config.opaque import InvalidParameters, parse_parameters
from driver.config.schema import shown


def lint(documents: Sequence[Document], installed: Iterable[Mapping[str, Any]], driver: str) -> Iterator[Finding]:
    """Every finding, in the order of ``documents``; ``installed`` are classes that exist beside those in them."""
    contents = [each.content for each in documents if isinstance(each.content, Mapping)]
    known = known_of([*installed, *(each for each in contents if kind_of(each) == "DeviceClass")], driver)
    for document in documents:
        if isinstance(document.content, Mapping):
            named = f"{text(document.content, 'kind')} {name_of(document.content)}"
            for issue in _issues(document.content, known):
                where = (document.file, document.number, named)
                yield Finding(*where, issue.path, issue.value, issue.message, issue.severity)


def _issues(content: Mapping[str, Any], known: Known) -> Iterator[Issue]:
    kind = kind_of(content)
    if kind is None:
        yield from wrong_kind(content)
        return
    yield from shape_issues(content, kind)
    rules = _class if kind == "DeviceClass" else _claim
    yield from rules(settings_of(content, SPEC[kind]), SPEC[kind], known)


def _class(spec: Mapping[str, Any], path: str, known: Known) -> Iterator[Issue]:
    expressions = tuple(expression for _, expression in selectors_of(spec, path))
    wrong = list(selector_issues(spec, path, known.driver))
    yield from wrong or selects_nothing(expressions, path, known.driver)
    yield from _parameter_issues(spec, path, known)


def _claim(devices: Mapping[str, Any], path: str, known: Known) -> Iterator[Issue]:
    requests = list(requests_of(devices, path))
    constraints = list(constraints_of(devices, path))
    for request in requests:
        if request.class_name and request.class_name not in known.classes:
            message = f"no such class in these files or among Tessera's{meant(request.class_name, known.classes)}"
            yield Issue(f"{request.path}.deviceClassName", shown(request.class_name), message, Severity.WARNING)
        wrong = list(selector_issues(request.raw, request.path, known.driver, known.facts(request).selectors))
        yield from wrong or stranger_issues(request, known)
    yield from _parameter_issues(devices, path, known)
    yield from misfit_issues(devices, path, requests, known)
    yield from _request_names(devices, path, requests)
    for constraint in constraints:
        yield from _constraint_attribute(constraint, known)
    yield from never_issues(requests, constraints, known)
    yield from share_issues(requests, constraints, known)


def _parameter_issues(owner: Mapping[str, Any], path: str, known: Known) -> Iterator[Issue]:
    for index, entry in entries(owner, "config"):
        opaque = entry.get("opaque")
        other = text(opaque, "driver") if isinstance(opaque, Mapping) else ""
        if misspelt(other, [known.driver]):
            message = f"is almost the driver's name; did you mean {known.driver}?"
            yield Issue(f"{path}.config[{index}].opaque.driver", shown(other), message, Severity.WARNING)
    for index, _, opaque in parameters_of(owner, known.driver):
        try:
            parse_parameters(opaque.get("parameters"), path)
        except InvalidParameters as error:
            there = f"{path}.config[{index}].opaque.parameters"
            for fault in error.faults:
                place = there if fault.path in {"", "parameters"} else f"{there}.{fault.path}"
                yield Issue(place, fault.found, fault.message)


def _request_names(devices: Mapping[str, Any], path: str, requests: Sequence[Request]) -> Iterator[Issue]:
    accepted = list(dict.fromkeys(name for request in requests for name in (request.base, request.name)))
    for field in ("config", "constraints"):
        for index, entry in entries(devices, field):
            for position, name in enumerate(request_names(entry)):
                if name not in accepted:
                    hint = meant(str(name), accepted)
                    message = f"no such request; accepted: {', '.join(accepted) or 'none'}{hint}"
                    yield Issue(f"{path}.{field}[{index}].requests[{position}]", shown(name), message)


def _constraint_attribute(constraint: Constraint, known: Known) -> Iterator[Issue]:
    domain, slash, name = constraint.attribute.rpartition("/")
    domains = [known.driver, STANDARD_DOMAIN]
    if not slash:
        message = f"must be qualified by a domain, such as {known.driver}/{PARENT}"
        hint = meant(name, (f"{known.driver}/{each}" for each in ATTRIBUTES))
        yield Issue(constraint.path, shown(name), f"{message}{hint}")
    elif misspelt(domain, domains):
        message = f"is almost a domain of Tessera's devices{meant(domain, domains)}"
        yield Issue(constraint.path, shown(constraint.attribute), message, Severity.WARNING)
    elif domain == known.driver and name not in ATTRIBUTES:
        yield Issue(constraint.path, shown(constraint.attribute), _no_attribute(name, domain))


def _no_attribute(name: str, domain: str) -> str:
    if name in IN_STANDARD:
        return f"is in Kubernetes' domain: {STANDARD_DOMAIN}/{name}"
    if name in CAPACITIES:
        return "is a capacity; constraints are on attributes"
    return unpublished("attributes", name, domain)
