"""Pods and claims from manifests, as the API server and its controllers would create them (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from controller.demand.node_eligibility import NODE_NAME_FIELD, exclusion
from controller.eviction.evictor import Job
from deviceclasses.lint.admission_policies import AdmissionPolicy, refusals
from deviceclasses.lint.claim_fields import settings_of
from deviceclasses.lint.class_and_claim_rules import refused
from deviceclasses.lint.documents import Document, kind_of, text
from deviceclasses.lint.pod_templates import InvalidPodCount, PodTemplate, may_make_pods, pod_templates
from driver.errors import UsageError
from driver.kube.kubeconfig import DEFAULT_NAMESPACE
from driver.kube.types import (
    Claim,
    ClaimSpec,
    ClaimTemplate,
    DeviceClass,
    Key,
    Metadata,
    Node,
    OwnerReference,
    Pod,
    PodGroup,
    PodResourceClaim,
    PodSpec,
    PodStatus,
)
from driver.model.shared_memory import MEMORY_CAPACITY

WITH_TEMPLATE = {"Deployment", "ReplicaSet", "StatefulSet", "DaemonSet", "Job", "CronJob"}
"""Kinds of Kubernetes that are nothing without a pod template."""

OF_DAEMON_SETS = [
    {"key": f"node.kubernetes.io/{condition}", "operator": "Exists"}
    for condition in ("not-ready", "unreachable", "unschedulable", "disk-pressure", "memory-pressure", "pid-pressure")
]
"""The tolerations that the DaemonSet controller adds to its pods."""

MAX_PODS = 10_000
"""Pods of all manifests together: a placement takes some milliseconds."""

Parsed = TypeVar("Parsed")


class PriorityClass(msgspec.Struct, frozen=True, rename="camel"):
    metadata: Metadata
    value: int = 0
    preemption_policy: str = ""


@dataclass
class Workloads:
    """Pods in the order of the manifests, their claims, PodGroups and Jobs, ResourceClaimTemplates and DeviceClasses.

    ``refused``: why admission policies refuse an object, by its kind and key. ``ignored`` are other objects,
    ``untried`` those that seem to make pods and have no pod template, and ``notes``
    say what was read in a way that may surprise.
    """

    pods: list[Pod] = field(default_factory=list)
    claims: dict[Key, Claim] = field(default_factory=dict)
    classes: dict[str, DeviceClass] = field(default_factory=dict)
    groups: dict[Key, PodGroup] = field(default_factory=dict)
    refused: dict[tuple[str, Key], str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    templates: list[ClaimTemplate] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)


class Reader:
    """Reads documents. ``nodes`` are those on which a DaemonSet may have pods; ``policies`` may refuse objects.

    ``find_template`` looks for a ResourceClaimTemplate that the documents do not contain. ``priorities`` are
    PriorityClasses by name; None: priorities do not matter.
    """

    def __init__(
        self,
        find_template: Callable[[Key], ClaimSpec | None] = lambda _: None,
        nodes: Sequence[Node] = (),
        policies: Sequence[AdmissionPolicy] = (),
        priorities: Mapping[str, PriorityClass] | None = None,
    ) -> None:
        self._priorities = None if priorities is None else dict(priorities)
        self._find_template, self._nodes, self._policies = find_template, nodes, policies
        self._templates: dict[Key, ClaimSpec | None] = {}
        """The templates that were found; None: it does not exist."""
        self._found = Workloads()

    def read(self, documents: Iterable[Document]) -> Workloads:
        """The workloads. A claim that no pod refers to gets a pod. Raises UsageError.

        Of an object that is given twice the last one counts, as for ``kubectl apply``.
        """
        objects: list[tuple[tuple[str, ...], Document, Mapping[str, Any]]] = []
        for document in documents:
            if isinstance(document.content, Mapping):
                objects.append((_identity(document, document.content), document, document.content))
            elif document.content is not None:
                raise UsageError(f"{_place(document)}: this is no object")
        last = {identity: document for identity, document, _ in objects}
        makers: list[tuple[Document, Mapping[str, Any], list[PodTemplate]]] = []
        for identity, document, content in objects:
            if (counting := last[identity]) is not document:
                self._found.notes.append(f"{_described(document)} is given again in {_place(counting)}, which counts")
            elif templates := self._object(document, content):
                makers.append((document, content, templates))
        for document, content, templates in makers:
            self._pods(document, content, templates)
        used = {key for pod in self._found.pods for key in pod.claims}
        self._found.pods += [_pod_for(key) for key in self._found.claims if key not in used]
        return self._found

    def _object(self, document: Document, content: Mapping[str, Any]) -> list[PodTemplate]:
        """Keep a class, claim or template; returns the pod templates of any other object. Raises UsageError."""
        if (kind := kind_of(content)) is not None and (issue := next(refused(content, kind), None)) is not None:
            raise UsageError(f"{_place(document)}: {issue.path}: {issue.value}: {issue.message}")
        match text(content, "kind"):
            case "DeviceClass":
                device_class = _convert(document, content, DeviceClass)
                self._found.classes[device_class.metadata.name] = device_class
            case "ResourceClaim" as kind:
                claim = _convert(document, content, Claim)
                self._found.claims[claim.metadata.key] = Claim(claim.metadata, claim.spec)
                self._keep(kind, claim.metadata.key, self._refusal(kind, content))
            case "ResourceClaimTemplate" as kind:
                template = _convert(document, content, ClaimTemplate)
                self._keep(kind, template.metadata.key, self._refusal(kind, content))
                self._templates[template.metadata.key] = template.spec.spec
                self._found.templates.append(template)
            case "PodGroup" if text(content, "apiVersion").startswith("scheduling.k8s.io/"):
                group = _convert(document, content, PodGroup)
                self._found.groups[group.metadata.key] = group
            case "PriorityClass" if self._priorities is not None:
                priority_class = _checked(document, content, PriorityClass)
                self._priorities[priority_class.metadata.name] = priority_class
            case kind:
                if templates := list(pod_templates(content)):
                    return templates
                if kind in WITH_TEMPLATE:
                    raise UsageError(f"{_described(document)}: it has no pod template with containers")
                if may_make_pods(content):
                    self._found.untried.append(_described(document))
                else:
                    self._found.ignored.append(f"{_place(document)}: {kind or 'an object without kind'}")
        return []

    def _refusal(self, kind: str, content: Mapping[str, Any]) -> str | None:
        """The first refusal of an object, which is the one that its creator sees."""
        texts = (
            f"admission policy {name} refuses it: {text}" for name, text in refusals(self._policies, kind, content)
        )
        return next(texts, None)

    def _keep(self, kind: str, key: Key, refusal: str | None) -> None:
        if refusal is not None:
            self._found.refused[kind, key] = refusal

    def _pods(self, document: Document, content: Mapping[str, Any], templates: Sequence[PodTemplate]) -> None:
        metadata = _metadata(document, content)
        if settings_of(content, "spec").get("suspend") is True:
            self._found.notes.append(f"{_described(document)} is suspended: its pods are placed as if it were not")
        kind, numbers = text(content, "kind"), Counter[str]()
        uid = f"{metadata.namespace}/{kind}/{metadata.name}"
        owners = () if kind == "Pod" else (OwnerReference(kind, metadata.name, controller=True, uid=uid),)
        for template in templates:
            stem = f"{metadata.name}-{template.role}" if template.role and len(templates) > 1 else metadata.name
            labels = {str(name): str(value) for name, value in template.labels.items()}
            specs = self._specs_on_nodes(document, template) if template.is_on_each_node else [template.spec]
            refusal = self._refusal("Pod", {"spec": template.spec})
            for spec in specs * self._count(document, template, len(specs)):
                name = stem if kind == "Pod" else f"{stem}-{numbers[stem]}"
                numbers[stem] += 1
                of_pod = msgspec.structs.replace(metadata, name=name, labels=labels, owner_references=owners)
                self._keep("Pod", of_pod.key, refusal)
                self._pod(document, of_pod, spec)
        if kind == "Job":
            of_job = {"metadata": {"name": metadata.name, "uid": uid}, "spec": settings_of(content, "spec")}
            self._found.jobs.append(_checked(document, of_job, Job))

    def _count(self, document: Document, template: PodTemplate, nodes: int) -> int:
        """The pods of a template, on each of ``nodes``. Raises UsageError if they can not be simulated."""
        try:
            count = template.count
        except InvalidPodCount as error:
            raise UsageError(f"{_described(document)}: {error}") from error
        pods = len(self._found.pods)
        if count * nodes > MAX_PODS - pods:
            more = f" more, since these files have {pods} pods already" if pods else ""
            raise UsageError(
                f"{_described(document)}: {template.path}: {count * nodes} pods: `tessera simulate` takes "
                f"0 to {MAX_PODS - pods}{more}"
            )
        return count

    def _specs_on_nodes(self, document: Document, template: PodTemplate) -> list[Mapping[str, Any]]:
        """The spec of each pod that a DaemonSet makes: one for each node that admits it, whatever is free there."""
        tolerations = template.spec.get("tolerations")
        spec = {
            **template.spec,
            "tolerations": [*(tolerations if isinstance(tolerations, list) else ()), *OF_DAEMON_SETS],
        }
        read = _convert(document, spec, PodSpec)
        names = [node.metadata.name for node in self._nodes if exclusion(read, node) is None]
        if not names:
            self._found.notes.append(f"{_described(document)} makes no pod: no node admits its pods")
        return [_only_on(spec, name) for name in names]

    def _pod(self, document: Document, metadata: Metadata, spec: Any) -> None:
        read = _convert(document, spec, PodSpec)
        created = tuple(
            PodResourceClaim(pod_claim.name, self._created(document, self._owner(metadata, read, pod_claim), pod_claim))
            for pod_claim in read.resource_claims
            if pod_claim.resource_claim_template_name
        )
        plain = self._with_priority(document, msgspec.structs.replace(read, scheduling_gates=()), spec)
        self._found.pods.append(Pod(metadata, plain, PodStatus(resource_claim_statuses=created)))

    def _with_priority(self, document: Document, pod: PodSpec, spec: Mapping[str, Any]) -> PodSpec:
        """The spec of a pod with what its PriorityClass says, as the API server writes it."""
        name = text(spec, "priorityClassName")
        priority_class = (self._priorities or {}).get(name)
        if priority_class is not None:
            policy = pod.preemption_policy or priority_class.preemption_policy
            return msgspec.structs.replace(pod, priority=priority_class.value, preemption_policy=policy)
        if name and self._priorities is not None:
            note = f"{_described(document)}: there is no PriorityClass {name}: its priority counts as {pod.priority}"
            self._found.notes.append(note)
        return pod

    def _owner(self, pod: Metadata, spec: PodSpec, pod_claim: PodResourceClaim) -> Metadata:
        """Whose claim it is: that of the pod, or of its PodGroup if that has the same entry."""
        key = Pod(pod, spec).pod_group
        group = None if key is None else self._found.groups.get(key)
        return pod if group is None or pod_claim not in group.spec.resource_claims else group.metadata

    def _created(self, document: Document, metadata: Metadata, pod_claim: PodResourceClaim) -> str:
        """The name of the claim that is created from a template; it does not exist if the template does not."""
        key = Key(metadata.namespace, pod_claim.resource_claim_template_name or "")
        name = f"{metadata.name}-{pod_claim.name}"
        if key not in self._templates:
            self._templates[key] = self._find_template(key)
            if self._templates[key] is None:
                self._found.notes.append(f"{_described(document)}: there is no ResourceClaimTemplate {key}")
        if (spec := self._templates[key]) is not None:
            claim = Claim(Metadata(name, namespace=metadata.namespace), spec)
            self._found.claims[claim.metadata.key] = claim
            self._keep("ResourceClaim", claim.metadata.key, self._found.refused.get(("ResourceClaimTemplate", key)))
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


def _only_on(spec: Mapping[str, Any], node: str) -> Mapping[str, Any]:
    """A pod's spec with the affinity for one node, as the DaemonSet controller writes it."""
    term = {"matchFields": [{"key": NODE_NAME_FIELD, "operator": "In", "values": [node]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {**spec, "affinity": {"nodeAffinity": required}}


def _identity(document: Document, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Equal for documents that are the same object; of its own for an object without a name."""
    metadata = settings_of(content, "metadata")
    if not text(metadata, "name"):
        return (str(id(document)),)
    group = text(content, "apiVersion").rpartition("/")[0]
    namespace = text(metadata, "namespace") or DEFAULT_NAMESPACE
    return group, text(content, "kind"), namespace, text(metadata, "name")


def _described(document: Document) -> str:
    content = document.content if isinstance(document.content, Mapping) else {}
    metadata = settings_of(content, "metadata")
    name = text(metadata, "name") or text(metadata, "generateName")
    return f"{_place(document)}: {text(content, 'kind')} {name}".rstrip()


def _place(document: Document) -> str:
    return f"{document.file}, document {document.number}"


def pods_for_class(name: str, memory: str = "") -> Iterator[tuple[Pod, Claim]]:
    """Pods without end, each with a claim for one device of a class, or for ``memory`` of a shared GPU."""
    amount = {"capacity": {"requests": {MEMORY_CAPACITY: memory}}} if memory else {}
    number = 0
    while True:
        key = Key("simulated", f"fill-{number}")
        spec = {"devices": {"requests": [{"name": "device", "exactly": {"deviceClassName": name, **amount}}]}}
        yield _pod_for(key), Claim(Metadata(key.name, namespace=key.namespace), msgspec.convert(spec, ClaimSpec))
        number += 1
