"""The chart's admission policies for claims, claim templates, classes and pods, evaluated by Tessera's own CEL (pure).

``admission_policies.json`` has the policies as the chart renders them with its default values, so that their rules and
messages exist once. ``python -m tests.support.admission_policies`` writes it anew.

What only the API server knows is left out: a condition that asks for the rights of the user is taken as met, and a
policy that reads the labels of the namespace refuses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, NamedTuple

from deviceclasses.cel.compiler import compile_untyped
from deviceclasses.cel.engine import UNSUPPORTED_ERRORS
from deviceclasses.cel.parser import parse
from deviceclasses.cel.values import EvaluationError, Map, Value, spend, start_work, string_map
from deviceclasses.lint.documents import DRA_GROUP
from deviceclasses.lint.findings import Issue
from driver.config.flag_values import DEFAULT_DRIVER
from driver.errors import CelError

PLACEHOLDER = "driver-of-release"
"""The driver's name in the file."""

RESOURCES = {
    "ResourceClaim": (DRA_GROUP, "resourceclaims"),
    "ResourceClaimTemplate": (DRA_GROUP, "resourceclaimtemplates"),
    "DeviceClass": (DRA_GROUP, "deviceclasses"),
    "Pod": ("", "pods"),
}
"""The API group and resource of each kind for which policies are evaluated."""

VARIABLES = ("object", "oldObject", "request", "namespaceObject", "variables")

MAX_MESSAGE = 5 * 1024
"""Bytes of a message from an expression; the API server replaces a longer one by ``message``."""

WORK_OF_VALUE = 50
"""Units of work for each value of an object: the largest claim that the API server takes has some thousand values."""

FAILURES = (EvaluationError, *UNSUPPORTED_ERRORS)
Expression = Callable[..., Value]


class PolicyValidation(NamedTuple):
    """``message`` is the fixed one, which is used if ``expression_of_message`` gives none."""

    expression: Expression
    expression_of_message: Expression | None
    message: str


class PolicyRefusal(NamedTuple):
    policy: str
    message: str


class PolicyProgram(NamedTuple):
    conditions: Sequence[Expression]
    variables: Sequence[tuple[str, Expression]]
    validations: Sequence[PolicyValidation]


class AdmissionPolicy:
    """One ValidatingAdmissionPolicy. It is compiled for the first object that it is about."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.name: str = manifest["metadata"]["name"]
        self._spec = manifest["spec"]

    def refusal(self, kind: str, content: Mapping[str, Any]) -> str | None:
        """Its message if it refuses that an object of ``kind`` is created, else None.

        Raises CelError for expressions that Tessera can't evaluate.
        """
        if not self._is_about(*RESOURCES[kind]):
            return None
        request = string_map({"operation": "CREATE", "kind": string_map({"kind": kind})})
        variables: dict[str, Value] = {}

        def value_of(expression: Expression) -> Value:
            start_work()
            return expression(object_value, None, request, None, string_map(variables))

        with suppress(*FAILURES):
            start_work()
            object_value = _cel_value(content)
            if all(value_of(condition) is True for condition in self._program.conditions):
                for name, expression in self._program.variables:
                    with suppress(*FAILURES):  # an expression that reads the variable fails in its place
                        variables[name] = value_of(expression)
                for validation in self._program.validations:
                    if value_of(validation.expression) is False:
                        return _message(validation, value_of)
        return None

    def _is_about(self, group: str, resource: str) -> bool:
        return any(
            group in rule["apiGroups"] and resource in rule["resources"] and "CREATE" in rule["operations"]
            for rule in self._spec["matchConstraints"]["resourceRules"]
        )

    @cached_property
    def _program(self) -> PolicyProgram:
        validations = [
            PolicyValidation(
                _compiled(validation["expression"]),
                _compiled(validation["messageExpression"]) if validation.get("messageExpression") else None,
                validation.get("message") or f"failed expression: {validation['expression'].strip()}",
            )
            for validation in self._spec["validations"]
        ]
        variables = [(variable["name"], _compiled(variable["expression"])) for variable in self._spec["variables"]]
        conditions = (condition["expression"] for condition in self._spec.get("matchConditions", ()))
        return PolicyProgram(list(_decidable(conditions)), variables, validations)


def refusals(policies: Iterable[AdmissionPolicy], kind: str, content: Mapping[str, Any]) -> Iterator[PolicyRefusal]:
    """Why an object of ``kind`` would be refused when it is created."""
    for policy in policies:
        if (message := policy.refusal(kind, content)) is not None:
            yield PolicyRefusal(policy.name, message)


def policy_issues(kind: str, content: Mapping[str, Any], path: str, driver: str) -> Iterator[Issue]:
    """The refusals of the chart's policies; ``path`` is what they are about."""
    for policy, message in refusals(chart_policies(driver), kind, content):
        yield Issue(path, "", f"the chart's admission policy {policy} refuses it: {message}")


@cache
def chart_policies(driver: str = DEFAULT_DRIVER) -> tuple[AdmissionPolicy, ...]:
    """The policies of the chart with its default values, for a driver of this name."""
    written = files(__package__).joinpath("admission_policies.json").read_text("utf-8")
    return tuple(map(AdmissionPolicy, json.loads(written.replace(PLACEHOLDER, driver))))


def _message(validation: PolicyValidation, value_of: Callable[[Expression], Value]) -> str:
    message: Value = None
    if validation.expression_of_message is not None:
        with suppress(*FAILURES):
            message = value_of(validation.expression_of_message)
    is_usable = (
        type(message) is str and message.strip() and "\n" not in message and len(message.encode()) <= MAX_MESSAGE
    )
    return message.strip() if is_usable else validation.message


def _compiled(expression: str) -> Expression:
    start_work()
    return compile_untyped(expression, parse(expression), VARIABLES)


def _decidable(expressions: Iterable[str]) -> Iterator[Expression]:
    """Those that need nothing but the object."""
    for expression in expressions:
        with suppress(CelError):
            yield _compiled(expression)


def _cel_value(content: Any, *, with_null: bool = False) -> Value:
    """Decoded YAML as a value of CEL. Null is the same as no field, except in opaque parameters.

    It counts as work: by aliases, an object can be much larger than its text, or contain itself.
    """
    spend(WORK_OF_VALUE)
    if isinstance(content, Mapping):
        return Map(
            (str(name), _cel_value(value, with_null=with_null or name == "parameters"))
            for name, value in content.items()
            if with_null or value is not None
        )
    if isinstance(content, list):
        return tuple(_cel_value(item, with_null=with_null) for item in content)
    if content is None or isinstance(content, (bool, int, float, str)):
        return content
    raise EvaluationError(f"no value of JSON: {type(content).__name__}")
