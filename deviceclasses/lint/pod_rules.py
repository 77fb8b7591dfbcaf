"""The rules of lint for pods and pod templates of objects of any kind (pure).

The API server refuses a container's claim that the pod does not have. It accepts a claim that no container uses, and
names of claims and templates that do not exist: the pods wait, or run without their devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from deviceclasses.lint.admission_policies import policy_issues
from deviceclasses.lint.claim_fields import entries, findings_in, settings_of
from deviceclasses.lint.documents import Document, text
from deviceclasses.lint.findings import Finding, Issue, Severity
from deviceclasses.lint.nvidia_driver import RESOURCE_PREFIX, class_for_resource
from deviceclasses.lint.pod_templates import InvalidPodCount, PodTemplate, pod_templates
from driver.config.flag_values import DEFAULT_DRIVER
from driver.config.strict_schema import shown
from driver.config.suggestions import meant

REFERENCES = {"resourceClaimName": "ResourceClaim", "resourceClaimTemplateName": "ResourceClaimTemplate"}
"""The fields of a pod's claim that refer to an object, and the kind of that."""

RESOURCE = "extendedResourceName"

Names = Mapping[str, Collection[str]]
"""The names of the objects that exist, by kind, and under ``RESOURCE`` the extended resources of classes."""


def lint_pods(documents: Sequence[Document], installed: Iterable[Mapping[str, Any]] = ()) -> Iterator[Finding]:
    """Every finding about the pods that the objects of ``documents`` make, in their order.

    ``installed`` are classes that exist in addition.
    """
    names = defaultdict[str, set[str]](set)
    contents = [document.content for document in documents if isinstance(document.content, Mapping)]
    for content in (*installed, *contents):
        kind = text(content, "kind")
        names[kind].add(text(settings_of(content, "metadata"), "name"))
        if kind == "DeviceClass":
            names[RESOURCE].add(text(settings_of(content, "spec"), RESOURCE))
    return findings_in(documents, lambda content: _issues(content, names))


def makes_pods(content: object) -> bool:
    """Whether an object has pod templates."""
    return isinstance(content, Mapping) and next(pod_templates(content), None) is not None


def _issues(content: Mapping[str, Any], names: Names) -> Iterator[Issue]:
    for template in pod_templates(content):
        yield from _of_template(template, names)


def _of_template(template: PodTemplate, names: Names) -> Iterator[Issue]:
    for factor in template.factors:
        try:
            _ = factor.pods
        except InvalidPodCount as error:
            yield Issue(error.path, shown(error.value), error.accepted)
    claims = [(index, entry, text(entry, "name")) for index, entry in entries(template.spec, "resourceClaims")]
    accepted = [name for _, _, name in claims]
    used: set[str] = set()
    for path, name in _claims_of_containers(template):
        used.add(name)
        if name not in accepted:
            there = f"accepted: {', '.join(accepted)}" if accepted else f"{template.path}.resourceClaims has none"
            yield Issue(path, shown(name), f"the pod has no such claim; {there}{meant(name, accepted)}")
    yield from _resources(template, names)
    yield from policy_issues("Pod", {"spec": template.spec}, template.path, DEFAULT_DRIVER)
    for index, entry, name in claims:
        path = f"{template.path}.resourceClaims[{index}]"
        yield from _reference(entry, path, names)
        if name not in used:
            message = "no container has it under resources.claims: its devices are allocated, and nobody can use them"
            yield Issue(f"{path}.name", shown(name), message, Severity.WARNING)


def _claims_of_containers(template: PodTemplate) -> Iterator[tuple[str, str]]:
    """The path and name of each claim that a container uses."""
    for path, resources in _containers(template):
        for index, claim in entries(resources, "claims"):
            yield f"{path}.claims[{index}].name", text(claim, "name")


def _containers(template: PodTemplate) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The path and content of the resources of each container."""
    for field in ("initContainers", "containers"):
        for index, container in entries(template.spec, field):
            yield f"{template.path}.{field}[{index}].resources", settings_of(container, "resources")


def _resources(template: PodTemplate, names: Names) -> Iterator[Issue]:
    """Warnings about extended resources of NVIDIA's device plugin that no class provides."""
    for path, resources in _containers(template):
        limits, requests = settings_of(resources, "limits"), settings_of(resources, "requests")
        for name in dict.fromkeys(map(str, (*limits, *requests))):
            if name.startswith(RESOURCE_PREFIX) and name not in names.get(RESOURCE, ()):
                message = (
                    f"no class in these files or among Tessera's has this {RESOURCE}: write a claim of class "
                    f"{class_for_resource(name)}, or give a class that name"
                )
                yield Issue(
                    f"{path}.{'limits' if name in limits else 'requests'}", shown(name), message, Severity.WARNING
                )


def _reference(claim: Mapping[str, Any], path: str, names: Names) -> Iterator[Issue]:
    """Issues of the field by which a pod's claim refers to an object."""
    given = [field for field in REFERENCES if claim.get(field) is not None]
    if len(given) > 1:
        yield Issue(path, shown(claim), f"must have one of {' and '.join(REFERENCES)}, not both")
        return
    for field in given:
        name, kind = text(claim, field), REFERENCES[field]
        other, of_other = next((other, kind) for other, kind in REFERENCES.items() if other != field)
        if name in names.get(kind, ()):
            continue
        if name in names.get(of_other, ()):
            yield Issue(f"{path}.{field}", shown(name), f"this is a {of_other}: write {other}")
        else:
            message = f"no such {kind} in these files{meant(name, names.get(kind, ()))}"
            yield Issue(f"{path}.{field}", shown(name), message, Severity.WARNING)
