"""What is wrong with classes and claims, before a cluster sees them (pure).

Looks at DeviceClasses, ResourceClaims and ResourceClaimTemplates of ``resource.k8s.io``; whatever else stands in the
documents is passed over. The rules are those that the API server does not know: it checks the shape of an object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deviceclasses.documents import SPEC, kind_of, wrong_kind
from deviceclasses.findings import Document, Finding, Issue, Severity
from deviceclasses.published import ATTRIBUTES, unpublished
from deviceclasses.requests import Constraint, Request, constraints_of, entries, request_names, requests_of, text
from deviceclasses.selectors import may_select_share, selector_issues, selectors_of
from driver.config.names import meant
from driver.config.opaque import InvalidParameters, ShareConfig, kinds_of, parse_parameters
from driver.config.schema import shown

PARENT = "parentUUID"


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """Of a class that exists: its selectors, the kinds of our parameters it carries, and whether shares are meant."""

    selectors: tuple[str, ...]
    kinds: frozenset[str]
    shares: bool


UNKNOWN = ClassFacts((), frozenset(), shares=False)


@dataclass(frozen=True, slots=True)
class Known:
    """What the rules need to know of the driver and of the classes that exist, by name."""

    driver: str
    classes: Mapping[str, ClassFacts]


def lint(documents: Sequence[Document], installed: Iterable[Mapping[str, Any]], driver: str) -> Iterator[Finding]:
    """Every finding, in the order of ``documents``; ``installed`` are classes that exist beside those in them."""
    contents = [each.content for each in documents if isinstance(each.content, Mapping)]
    known = _known([*installed, *(each for each in contents if kind_of(each) == "DeviceClass")], driver)
    for document in documents:
        if isinstance(document.content, Mapping):
            named = f"{text(document.content, 'kind')} {_name(document.content)}"
            for issue in _issues(document.content, known):
                where = (document.file, document.number, named)
                yield Finding(*where, issue.path, issue.value, issue.message, issue.severity)


def _issues(content: Mapping[str, Any], known: Known) -> Iterator[Issue]:
    kind = kind_of(content)
    if kind is None:
        yield from wrong_kind(content)
        return
    rules = _class if kind == "DeviceClass" else _claim
    yield from rules(_settings(content, SPEC[kind]), SPEC[kind], known)


def _settings(content: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """What stands at a dotted path; empty where nothing, or no object, does."""
    for field in path.split("."):
        found = content.get(field)
        content = found if isinstance(found, Mapping) else {}
    return content


def _name(content: Mapping[str, Any]) -> str:
    metadata = content.get("metadata")
    if not isinstance(metadata, Mapping):
        return "without a name"
    name = text(metadata, "name") or text(metadata, "generateName") or "without a name"
    namespace = text(metadata, "namespace")
    return f"{namespace}/{name}" if namespace else name


def _known(classes: Sequence[Mapping[str, Any]], driver: str) -> Known:
    return Known(driver, {_name(each): _facts(_settings(each, "spec"), driver) for each in classes})


def _facts(spec: Mapping[str, Any], driver: str) -> ClassFacts:
    parameters = [opaque.get("parameters") for _, _, opaque in _ours(spec, driver)]
    kinds = [kinds_of(each) for each in parameters]
    selectors = tuple(expression for _, expression in selectors_of(spec, ""))
    return ClassFacts(selectors, frozenset().union(*kinds), {ShareConfig.kind} in kinds)


def _class(spec: Mapping[str, Any], path: str, known: Known) -> Iterator[Issue]:
    yield from selector_issues(spec, path, known.driver)
    yield from _parameter_issues(spec, path, known)


def _claim(devices: Mapping[str, Any], path: str, known: Known) -> Iterator[Issue]:
    requests = list(requests_of(devices, path))
    constraints = list(constraints_of(devices, path))
    for request in requests:
        if request.class_name and request.class_name not in known.classes:
            message = f"no such class in these files or among Tessera's{meant(request.class_name, known.classes)}"
            yield Issue(f"{request.path}.deviceClassName", shown(request.class_name), message, Severity.WARNING)
        facts = known.classes.get(request.class_name, UNKNOWN)
        yield from selector_issues(request.raw, request.path, known.driver, facts.selectors)
    yield from _parameter_issues(devices, path, known)
    yield from _misfits(devices, path, requests, known)
    yield from _request_names(devices, path, requests)
    for constraint in constraints:
        yield from _constraint_attribute(constraint, known)
    yield from _shares_of_one_gpu(requests, constraints, known)


def _ours(owner: Mapping[str, Any], driver: str) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """The entries for our driver: place in ``config``, entry, its ``opaque``."""
    for index, entry in entries(owner, "config"):
        opaque = entry.get("opaque")
        if isinstance(opaque, Mapping) and opaque.get("driver") == driver:
            yield index, entry, opaque


def _parameter_issues(owner: Mapping[str, Any], path: str, known: Known) -> Iterator[Issue]:
    for index, _, opaque in _ours(owner, known.driver):
        try:
            parse_parameters(opaque.get("parameters"), path)
        except InvalidParameters as error:
            there = f"{path}.config[{index}].opaque.parameters"
            for fault in error.faults:
                place = there if fault.path in {"", "parameters"} else f"{there}.{fault.path}"
                yield Issue(place, fault.found, fault.message)


def _misfits(devices: Mapping[str, Any], path: str, requests: Sequence[Request], known: Known) -> Iterator[Issue]:
    """Parameters that name a request whose class is for another kind of device: the driver would refuse them."""
    for index, entry, opaque in _ours(devices, known.driver):
        named, given = request_names(entry), kinds_of(opaque.get("parameters"))
        for request in requests if given else ():
            facts = known.classes.get(request.class_name, UNKNOWN)
            if request.name in named and facts.kinds and not facts.kinds & given:
                wanted = f"class {request.class_name} has {', '.join(sorted(facts.kinds))}"
                place = f"{path}.config[{index}].opaque.parameters.kind"
                yield Issue(place, shown(min(given)), f"does not fit request {request.name}: {wanted}")


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
    if not slash:
        message = f"must be qualified by a domain, such as {known.driver}/{PARENT}"
        yield Issue(
            constraint.path, shown(name), message + meant(name, (f"{known.driver}/{each}" for each in ATTRIBUTES))
        )
    elif domain == known.driver and name not in ATTRIBUTES:
        yield Issue(constraint.path, shown(constraint.attribute), unpublished("attributes", name, domain))


def _shares_of_one_gpu(requests: Sequence[Request], constraints: Sequence[Constraint], known: Known) -> Iterator[Issue]:
    """A claim must not be given two shares of one GPU: the driver would refuse it when the pod starts."""
    parent = f"{known.driver}/{PARENT}"
    apart = [each for each in constraints if each.distinct and each.attribute == parent]
    shares = [request for request in requests if _may_be_share(request, known)]
    remedy = (
        "may give two shares of one GPU to this claim, which the driver refuses: ask for one share (of a GPU with "
        "fewer shares, if that is too little), a partition or a full GPU; for shares of different GPUs add the "
        f"constraint distinctAttribute: {parent}"
    )
    for request in shares:
        if request.several and not any(each.covers(request) for each in apart):
            yield Issue(f"{request.path}.{request.several}", shown(request.raw.get(request.several)), remedy)
    for index, other in enumerate(shares):
        beside = (one for one in shares[:index] if one.base != other.base)
        one = next((one for one in beside if not any(each.covers(one) and each.covers(other) for each in apart)), None)
        if one is not None:
            yield Issue(
                f"{other.path}.deviceClassName", shown(other.class_name), f"together with request {one.name} {remedy}"
            )


def _may_be_share(request: Request, known: Known) -> bool:
    facts = known.classes.get(request.class_name)
    if facts is None:
        return False
    expressions = [*facts.selectors, *(expression for _, expression in selectors_of(request.raw, ""))]
    return facts.shares or may_select_share(expressions, known.driver)
