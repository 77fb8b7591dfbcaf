"""Checks of CEL selectors: syntax and types, names and literals, and errors on sample devices.

An evaluation error on one device stops the scheduling of the pod. Therefore each selector is evaluated on a sample of
each kind of Tessera's devices, and on one of another driver. Samples have the real names with made-up values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from deviceclasses.cel import nodes
from deviceclasses.cel.engine import CelDevice, Program, from_slice_device, try_compile
from deviceclasses.cel.library.registry import FUNCTIONS, chosen
from deviceclasses.cel.nodes import calls_of_literals
from deviceclasses.cel.parser import parse
from deviceclasses.cel.referenced_attributes import Comparison, comparisons_of
from deviceclasses.cel.values import EvaluationError, start_work
from deviceclasses.lint.claim_fields import selectors_of
from deviceclasses.lint.findings import Issue, Severity, almost, misspelt
from deviceclasses.lint.selectors.attribute_catalogue import (
    ATTRIBUTES,
    CAPACITIES,
    IN_STANDARD,
    SAMPLE_VALUES,
    STANDARD_DOMAIN,
    TYPE_OF,
    names_of,
    published_sample,
    type_mismatch,
    unknown_name,
    values,
)
from deviceclasses.lint.selectors.memory_bounds import memory_bound_issues
from deviceclasses.lint.selectors.selectable_kinds import (
    EXAMPLE_OF_SHARED,
    compared_strings,
    compiled_programs,
    may_select,
    may_select_monitors,
)
from driver.config.strict_schema import shown
from driver.config.suggestions import meant
from driver.errors import CelError
from driver.model.device import MONITOR_TYPE
from driver.model.offer import DeviceKind
from driver.simulator.products import find_product
from driver.slices.attributes import NO_PROFILE, STANDARD

ANY_PROFILE = "1g.10gb"
NO_SUCH_KEY = "no such key: "
ORDER_OPERATORS = {"<", "<=", ">", ">="}
CERTAIN_ERRORS = (NO_SUCH_KEY, "no such overload")
"""Errors that depend on names and types only, not on values."""

TYPE_NAMES: Mapping[str, str] = {
    DeviceKind.FULL: "a full GPU",
    DeviceKind.PARTITION: "a partition",
    DeviceKind.SHARE: "a share",
    DeviceKind.SHARED: "a shared GPU",
    DeviceKind.SHARED_PARTITION: "a shared partition",
    MONITOR_TYPE: "a monitor device",
}


def selector_issues(owner: Mapping[str, Any], path: str, driver: str, before: Iterable[str] = ()) -> Iterator[Issue]:
    """The issues of ``owner``'s selectors; ``before`` are those of its class, which are evaluated first."""
    earlier = list(before)
    for place, expression in selectors_of(owner, path):
        program = try_compile(expression)
        if isinstance(program, CelError):
            yield _refused(place, program, expression)
            continue
        programs = compiled_programs(earlier)
        wrong = _wrong_parts(place, program, driver) or list(_failures(place, program, programs, driver))
        yield from wrong or memory_bound_issues(place, program, programs, driver)
        earlier.append(expression)


def type_issues(expressions: tuple[str, ...], path: str, driver: str) -> Iterator[Issue]:
    """Issues for a class with valid selectors that refer to Tessera's devices.

    It may accept none of them, or monitor devices next to others.
    """
    ours = any(
        driver in {domain for _, domain, _ in program.reads} | compared_strings([program])
        for program in compiled_programs(expressions)
    )
    kinds, selects_monitors = may_select(expressions, driver), may_select_monitors(expressions, driver)
    if ours and not kinds and not selects_monitors:
        message = "selects none of Tessera's devices: none has the type and profile that it asks for"
        yield Issue(f"{path}.selectors", "", message, Severity.WARNING)
    elif ours and kinds and selects_monitors:
        message = (
            "also selects monitor devices, which can be prepared only for requests with adminAccess: add the selector "
            f'device.driver != "{driver}" || device.attributes["{driver}"].type != "{MONITOR_TYPE}"'
        )
        yield Issue(f"{path}.selectors", "", message, Severity.WARNING)


def mistakes(expressions: Iterable[str], driver: str) -> list[str]:
    """What is certainly wrong with the names, types and literals in selectors that compile, whatever GPUs there are."""
    programs = compiled_programs(expressions)
    issues = [issue for program in programs for issue in _wrong_parts("", program, driver)]
    issues += [
        Issue("", shown(domain), f"Tessera's devices have {name} in the domain {driver}, not in this one")
        for program in programs
        for _, domain, name in program.reads
        if domain not in {driver, STANDARD_DOMAIN}
        and name in ATTRIBUTES | CAPACITIES
        and not misspelt(domain, [driver])
    ]
    growing = tuple(known.unknown_value(name, "").split("; ")[0] for name, known in values().items() if known.growing)
    certain = (issue for issue in issues if not issue.message.startswith(growing))
    texts = (
        issue.message if issue.message.startswith(issue.value.strip('"')) else f"{issue.value}: {issue.message}"
        for issue in certain
    )
    return list(dict.fromkeys(texts))


def is_known_value(text: str) -> bool:
    """Whether some GPU has this profile, architecture or product name, whether there is one in the cluster or not."""
    return find_product(text) is not None or any(text in known_values.accepted for known_values in values().values())


def remedy(kind: DeviceKind, verdict: str) -> str:
    """How to correct a selector that fails on a device of ``kind`` with the error ``verdict``; empty if unknown."""
    if not verdict.startswith(NO_SUCH_KEY):
        return ""
    key = verdict.removeprefix(NO_SUCH_KEY)
    having = [device_kind for device_kind in DeviceKind if key in names_of(device_kind)]
    if kind in having:
        kinds = [TYPE_OF[name] for name in (key, f"{STANDARD}{key}") if name in TYPE_OF]
        if not kinds or kinds[0] == "version":
            return ""
        return f"not every GPU has {key}; .?{key}.orValue({json.dumps(SAMPLE_VALUES[kinds[0]])}) does not fail"
    types = " || ".join(f'type == "{device_kind}"' for device_kind in having)
    first = f"use a DeviceClass that selects only these, or test {types} first, with &&"
    return f"only devices with {types} have {key}: {first}" if having else ""


def _wrong_names(place: str, program: Program, driver: str) -> Iterator[Issue]:
    for section, domain, name in program.reads:
        if domain == driver and name not in (ATTRIBUTES if section == "attributes" else CAPACITIES):
            yield Issue(place, shown(name), unknown_name(section, name, domain))
        elif domain == STANDARD_DOMAIN and misspelt(name, list(IN_STANDARD)):
            message = f"Tessera publishes no such name in {domain}{meant(name, IN_STANDARD)}"
            yield Issue(place, shown(name), message, Severity.WARNING)
        else:
            yield from almost(place, domain, [driver, STANDARD_DOMAIN], "a domain of Tessera's devices")


def _failures(place: str, program: Program, earlier: Sequence[Program], driver: str) -> Iterator[Issue]:
    profiles = compared_strings([program, *earlier]) & {*values()["profile"].accepted} - {NO_PROFILE}
    for name, device in _samples(driver, profiles or frozenset({ANY_PROFILE})):
        verdict = program.verdict(device)
        is_certain = isinstance(verdict, str) and verdict.startswith(CERTAIN_ERRORS)
        if is_certain and all(selector.verdict(device) is True for selector in earlier):
            remedy = _remedy(program, str(verdict), driver)
            message = f"fails on {name}, which stops the pod's scheduling: {verdict}; {remedy}"
            yield Issue(place, shown(program.expression), message)
            return


def _remedy(program: Program, verdict: str, driver: str) -> str:
    """The hint how to correct the selector."""
    if not verdict.startswith(NO_SUCH_KEY):
        full = {driver: "", STANDARD_DOMAIN: STANDARD}
        read = [(name, TYPE_OF.get(f"{full[domain]}{name}")) for _, domain, name in program.reads if domain in full]
        types = ", ".join(f"{name} is a {kind}" for name, kind in read if kind)
        return f"{types or 'each has one type'} (docs/attributes.md)"
    key = verdict.removeprefix(NO_SUCH_KEY)
    having = [kind for kind in DeviceKind if key in names_of(kind)]
    kinds = " || ".join(f'.type == "{kind}"' for kind in having) if len(having) < len(DeviceKind) else ".type"
    kinds = f"({kinds})" if 1 < len(having) < len(DeviceKind) else kinds or ".type"
    return f'ask for device.driver == "{driver}" and {kinds} first, with &&'


def _refused(place: str, error: CelError, expression: str) -> Issue:
    """The issue for a CelError, with the expression from its position on."""
    if error.position is None:
        return Issue(place, shown(expression), str(error))
    return Issue(place, shown(expression[error.position :]), f"at character {error.position + 1}: {error}")


@cache
def _samples(driver: str, profiles: frozenset[str]) -> list[tuple[str, CelDevice]]:
    """Sample devices: one of each kind, with every name it can have, a partition per profile, one of another driver."""
    alike = [
        (DeviceKind.FULL, NO_PROFILE),
        *((DeviceKind.PARTITION, profile) for profile in sorted(profiles)),
        (DeviceKind.SHARE, NO_PROFILE),
        (DeviceKind.SHARED, NO_PROFILE),
        (DeviceKind.SHARED_PARTITION, EXAMPLE_OF_SHARED),
        (MONITOR_TYPE, NO_PROFILE),
    ]
    ours = [(TYPE_NAMES[name], from_slice_device(driver, published_sample(name, profile))) for name, profile in alike]
    return [*ours, ("a device of another driver", CelDevice("another-driver.example.com"))]


def _wrong_parts(place: str, program: Program, driver: str) -> list[Issue]:
    """Issues for names, literals and conversions that are wrong whatever the device."""
    return [
        *_wrong_names(place, program, driver),
        *_comparison_issues(place, program.expression, driver),
        *_conversion_issues(place, program.expression),
    ]


def _comparison_issues(place: str, expression: str, driver: str) -> Iterator[Issue]:
    """Issues for literals that an attribute or the driver can't have; the expression compiles."""
    for found in comparisons_of(expression):
        if found.value in found.otherwise:
            continue
        if found.path == ("driver",) and isinstance(found.value, str):
            yield from almost(place, found.value, [driver], "the driver's name")
        name = _attribute(found, driver)
        if name is None:
            continue
        catalogue = values().get(name)
        if (instead := type_mismatch(name, found)) is not None:
            yield Issue(place, shown(found.value), instead)
        elif TYPE_OF[name] == "string" and found.operator in ORDER_OPERATORS:
            yield Issue(place, shown(found.value), _as_text(name), Severity.WARNING)
        elif catalogue is not None and isinstance(found.value, str) and found.value not in catalogue.accepted:
            yield Issue(place, shown(found.value), catalogue.unknown_value(name, found.value), catalogue.severity)


def _as_text(name: str) -> str:
    newer = 'cudaComputeCapability.compareTo(semver("9.0.0")) >= 0 for Hopper and newer, or '
    better = f"write {newer if name == 'architecture' else ''}{name} in [...] with those that you accept"
    return f"compares {name} as text, in the order of the alphabet: {better}"


def _conversion_issues(place: str, expression: str) -> Iterator[Issue]:
    """Issues for functions of literals, such as ``quantity("4x")``, that always fail; the expression compiles."""
    for call in calls_of_literals(parse(expression)):
        if call.function not in FUNCTIONS:
            continue
        values = [argument.value for argument in call.arguments if isinstance(argument, nodes.Literal)]
        start_work()
        try:
            chosen(call.function, tuple(FUNCTIONS[call.function]))(*values)
        except EvaluationError as error:
            yield Issue(place, shown(values[0]), f"at character {call.position + 1}: always fails: {error}")


def _attribute(found: Comparison, driver: str) -> str | None:
    """The published name of the attribute, or None if it is not one of Tessera's."""
    if len(found.path) != 3 or found.path[0] != "attributes":
        return None
    _, domain, name = found.path
    full = {driver: name, STANDARD_DOMAIN: f"{STANDARD}{name}"}.get(domain)
    return full if full in TYPE_OF else None
