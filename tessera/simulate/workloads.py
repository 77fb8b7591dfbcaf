"""Pods and claims from manifests, as the API server and its controllers would create them (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from deviceclasses.lint.class_and_claim_rules import refused
from deviceclasses.lint.documents import Document, kind_of, text
from driver.config.strict_schema import shown
from driver.errors import UsageError
from driver.kube.types import (
    Claim,
    ClaimSpec,
    ClaimTemplate,
    DeviceClass,
    Key,
    Metadata,
    Pod,
    PodResourceClaim,
    PodSpec,
    PodStatus,
)

COUNTS = {"Deployment": "replicas", "ReplicaSet": "replicas", "StatefulSet": "replicas", "Job": "parallelism"}
"""The kinds with a pod template, and their fields for the number of pods."""

MAX_PODS = 10_000
"""Pods of all manifests together: a placement takes some milliseconds."""

DEFAULT_NAMESPACE = "default"

Parsed = TypeVar("Parsed")


@dataclass
class Workloads:
    """The pods in the order of the manifests, their claims, and the DeviceClasses. ``ignored`` are other objects."""

    pods: list[Pod] = field(default_factory=list)
    claims: dict[Key, Claim] = field(default_factory=dict)
    classes: dict[str, DeviceClass] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


class Reader:
    """Reads documents. ``find_template`` looks for a ResourceClaimTemplate that they do not contain."""

    def __init__(self, find_template: Callable[[Key], ClaimSpec | None] = lambda _: None) -> None:
        self._find_template = find_template
        self._templates: dict[Key, ClaimSpec] = {}
        self._found = Workloads()

    def read(self, documents: Iterable[Document]) -> Workloads:
        """The workloads. A claim that no pod refers to gets a pod. Raises UsageError."""
        pods: list[tuple[Document, Mapping[str, Any]]] = []
        for document in documents:
            if isinstance(document.content, Mapping):
                self._object(document, document.content, pods)
            elif document.content is not None:
                raise UsageError(f"{_place(document)}: this is no object")
        for document, content in pods:
            self._pods(document, content)
        used = {key for pod in self._found.pods for key in pod.claims}
        self._found.pods += [_pod_for(key) for key in self._found.claims if key not in used]
        return self._found

    def _object(self, document: Document, content: Mapping[str, Any], pods: list[tuple[Document, Any]]) -> None:
        if (kind := kind_of(content)) is not None and (issue := next(refused(content, kind), None)) is not None:
            raise UsageError(f"{_place(document)}: {issue.path}: {issue.value}: {issue.message}")
        match text(content, "kind"):
            case "DeviceClass":
                device_class = _convert(document, content, DeviceClass)
                self._found.classes[device_class.metadata.name] = device_class
            case "ResourceClaim":
                claim = _convert(document, content, Claim)
                self._found.claims[claim.metadata.key] = Claim(claim.metadata, claim.spec)
            case "ResourceClaimTemplate":
                template = _convert(document, content, ClaimTemplate)
                self._templates[template.metadata.key] = template.spec.spec
            case kind if kind == "Pod" or kind in COUNTS:
                pods.append((document, content))
            case kind:
                self._found.ignored.append(f"{_place(document)}: {kind or 'an object without kind'}")

    def _pods(self, document: Document, content: Mapping[str, Any]) -> None:
        kind, metadata = text(content, "kind"), _metadata(document, content)
        spec = content.get("spec") or {}
        if kind == "Pod":
            self._pod(document, metadata, spec)
            return
        count, pods = spec.get(COUNTS[kind], 1), self._found.pods
        if not isinstance(count, int) or not isinstance(template := spec.get("template"), Mapping):
            raise UsageError(f"{_place(document)}: {kind} {metadata.name} has no valid {COUNTS[kind]} or template")
        if not 0 <= count <= MAX_PODS - len(pods):
            where = f"{_place(document)}: {kind} {metadata.name}: spec.{COUNTS[kind]}"
            more = f" more, since these files have {len(pods)} pods already" if pods else ""
            raise UsageError(f"{where}: {shown(count)}: `tessera simulate` takes 0 to {MAX_PODS - len(pods)}{more}")
        for index in range(count):
            numbered = msgspec.structs.replace(metadata, name=f"{metadata.name}-{index}")
            self._pod(document, numbered, template.get("spec") or {})

    def _pod(self, document: Document, metadata: Metadata, spec: Any) -> None:
        read = _convert(document, spec, PodSpec)
        created = tuple(
            PodResourceClaim(pod_claim.name, self._created(document, metadata, pod_claim))
            for pod_claim in read.resource_claims
            if pod_claim.resource_claim_template_name
        )
        # A gang is placed pod by pod here.
        plain = msgspec.structs.replace(read, scheduling_group=None, scheduling_gates=())
        self._found.pods.append(Pod(metadata, plain, PodStatus(resource_claim_statuses=created)))

    def _created(self, document: Document, metadata: Metadata, pod_claim: PodResourceClaim) -> str:
        """The name of the claim that is created from a template. Raises UsageError if that does not exist."""
        key = Key(metadata.namespace, pod_claim.resource_claim_template_name or "")
        spec = self._templates.get(key) or self._find_template(key)
        if spec is None:
            missing = f"pod {metadata.key} needs ResourceClaimTemplate {key}, which is missing"
            raise UsageError(f"{_place(document)}: {missing}")
        name = f"{metadata.name}-{pod_claim.name}"
        claim = Claim(Metadata(name, namespace=metadata.namespace), spec)
        self._found.claims[claim.metadata.key] = claim
        return name


def _pod_for(key: Key) -> Pod:
    """A pod for a claim to which no pod refers: the scheduler allocates claims only for pods."""
    spec = PodSpec(resource_claims=(PodResourceClaim("claim", key.name),))
    return Pod(Metadata(f"pod-of-{key.name}", namespace=key.namespace), spec)


def _metadata(document: Document, content: Mapping[str, Any]) -> Metadata:
    given = content.get("metadata")
    plain = dict(given) if isinstance(given, Mapping) else {}
    plain["name"] = plain.get("name") or str(plain.get("generateName", "")).rstrip("-") or "unnamed"
    if text(content, "kind") != "DeviceClass":
        plain["namespace"] = plain.get("namespace") or DEFAULT_NAMESPACE
    fields = {name: plain[name] for name in ("name", "namespace", "labels") if plain.get(name) is not None}
    return _checked(document, fields, Metadata)


def _convert(document: Document, content: Any, kind: type[Parsed]) -> Parsed:
    if isinstance(content, Mapping) and "metadata" in content:
        fields = {name: content[name] for name in ("spec", "status") if content.get(name) is not None}
        content = {**fields, "metadata": msgspec.to_builtins(_metadata(document, content))}
    return _checked(document, content, kind)


def _checked(document: Document, content: Any, kind: type[Parsed]) -> Parsed:
    try:
        return msgspec.convert(_without_null(content), kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise UsageError(f"{_place(document)}: {error}") from error


def _without_null(content: Any) -> Any:
    """YAML's ``field:`` without a value means the same as no field, to the API server."""
    if isinstance(content, Mapping):
        return {name: _without_null(value) for name, value in content.items() if value is not None}
    return [_without_null(item) for item in content] if isinstance(content, list) else content


def _place(document: Document) -> str:
    return f"{document.file}, document {document.number}"


def pods_for_class(name: str) -> Iterator[tuple[Pod, Claim]]:
    """Pods without end, each with a claim for one device of a class."""
    number = 0
    while True:
        key = Key("simulated", f"fill-{number}")
        spec = {"devices": {"requests": [{"name": "device", "exactly": {"deviceClassName": name}}]}}
        yield _pod_for(key), Claim(Metadata(key.name, namespace=key.namespace), msgspec.convert(spec, ClaimSpec))
        number += 1
