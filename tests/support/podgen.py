"""Pods and claims of every kind a user may write, drawn from a seed: what curation has to serve (pure).

Everything is drawn from a ``Vocabulary``: what the fleet has, so that selectors meet something, and many only little.
A case names no node and no namespace; who runs it adds those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from driver.model.gpu import Gpu
from tests.harness.manifests import busybox_pod
from tests.support.plugin import DRIVER

Object = dict[str, Any]

CLASS = "any-gpu"
"""Selects every device of ours."""

EXTENDED = {"example.org/gpu": 'type == "gpu"', "example.org/slice": 'profile == "1g.10gb"'}
"""Extended resources, and what the class of each selects."""

TAINTS = (("dedicated", "inference"), ("spot", "yes"))


def classes() -> list[Object]:
    """The DeviceClasses that cases ask for."""
    found = [_class(CLASS, f'device.driver == "{DRIVER}"')]
    for resource, condition in EXTENDED.items():
        found.append(_class(resource.replace("/", "-").replace(".", "-"), selector(condition)))
        found[-1]["spec"]["extendedResourceName"] = resource
    return found


def _class(name: str, expression: str) -> Object:
    return {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}


def selector(*conditions: str) -> str:
    """A selector of our devices; a condition is about an attribute, or about ``device`` where it says so."""
    told = [each if "device." in each else f'device.attributes["{DRIVER}"].{each}' for each in conditions]
    return " && ".join([f'device.driver == "{DRIVER}"', *told])


@dataclass(frozen=True)
class Vocabulary:
    """What the fleet has: its GPUs, and the labels of its nodes."""

    gpus: Sequence[Gpu]
    labels: Sequence[Mapping[str, str]]

    @property
    def profiles(self) -> list[str]:
        return sorted({profile.name for gpu in self.gpus for profile in gpu.profiles})

    @property
    def products(self) -> list[str]:
        return sorted({gpu.product_name for gpu in self.gpus})


@dataclass
class Case:
    """What is created together. ``alike``: all pods ask for the same, so that it does not matter which are served."""

    name: str
    pods: list[Object] = field(default_factory=list)
    claims: list[Object] = field(default_factory=list)
    templates: list[Object] = field(default_factory=list)
    alike: bool = False

    def only(self, pod: Object) -> Case:
        """The same with one of its pods."""
        used = {each.get("resourceClaimName") for each in pod["spec"]["resourceClaims"]}
        claims = [claim for claim in self.claims if claim["metadata"]["name"] in used]
        return Case(self.name, [pod], claims, self.templates)


def pod_with(name: str, claims: Sequence[Object], resources: Object | None = None, **spec: Any) -> Object:
    """A pod that uses ``claims``, entries of its ``resourceClaims``."""
    used = {**(resources or {}), "claims": [{"name": claim["name"]} for claim in claims]}
    pod = busybox_pod(name, container={"resources": used}, resourceClaims=list(claims), **spec)
    pod["metadata"]["labels"] = {"app": "case"}
    return pod


def generate(seed: str, known: Vocabulary) -> Case:
    """The case of ``seed``; always the same."""
    return _Drawing(Random(seed), known, Case(seed)).case()


GIBIBYTES = (8, 20, 39, 45, 79, 100)

Condition = Callable[[Random, Vocabulary], tuple[str, ...]]

CONDITIONS: Sequence[Condition] = (
    lambda r, v: ('type == "gpu"',),
    lambda r, v: ('type == "share"',),
    lambda r, v: (f'profile == "{r.choice(v.profiles)}"',),
    lambda r, v: (f'profile == "{r.choice(v.profiles)}"',),
    lambda r, v: ('type == "mig"', f"memorySlices == {r.choice((1, 2, 4, 8))}"),
    lambda r, v: ('type == "mig"', f"computeSlices >= {r.choice((1, 2, 3, 4))}"),
    lambda r, v: (f'profile == "{r.choice(v.profiles)}"', f"placementStart {r.choice(('<', '>='))} {r.choice((2, 4))}"),
    lambda r, v: ('type == "gpu"', f'uuid == "{r.choice(v.gpus).uuid}"'),
    lambda r, v: ('type != "gpu"', f'parentUUID == "{r.choice(v.gpus).uuid}"'),
    lambda r, v: ('type == "gpu"', f'productName == "{r.choice(v.products)}"'),
    lambda r, v: ('type == "mig"', f'productName == "{r.choice(v.products)}"'),
    lambda r, v: (
        'type == "gpu"',
        f'device.attributes["resource.kubernetes.io"].numaNode == {r.choice(v.gpus).numa_node}',
    ),
    lambda r, v: (
        'type == "mig"',
        f'device.attributes["resource.kubernetes.io"].numaNode == {r.choice(v.gpus).numa_node}',
    ),
    lambda r, v: (f'architecture == "{r.choice(v.gpus).architecture}"', 'type != "share"'),
    lambda r, v: (
        'type != "share"',
        f'device.capacity["{DRIVER}"].memory.isGreaterThan(quantity("{r.choice(GIBIBYTES)}Gi"))',
    ),
    lambda r, v: (
        'type == "mig"',
        f'device.capacity["{DRIVER}"].memory.compareTo(quantity("{r.choice(GIBIBYTES)}Gi")) > 0',
        f'device.capacity["{DRIVER}"].multiprocessors.isLessThan(quantity("70"))',
    ),
    lambda r, v: (f'"placementStart" in device.attributes["{DRIVER}"]', "memorySlices < 4"),
    lambda r, v: (f'!("profile" in device.attributes["{DRIVER}"]) || device.driver == "{DRIVER}"', 'type == "gpu"'),
    lambda r, v: (f'has(device.attributes["{DRIVER}"].nvlinkClique)', 'nvlinkClique != "none"'),
    lambda r, v: (f'has(device.attributes["{DRIVER}"].shares)', f"shares >= {r.choice((2, 4))}"),
    lambda r, v: ('cudaComputeCapability.isGreaterThan(semver("8.5.0"))', 'type == "gpu"'),
    lambda r, v: ('profile.startsWith("1g.")', 'type == "mig"'),
    lambda r, v: (f'profile in ["{r.choice(v.profiles)}", "{r.choice(v.profiles)}"]',),
)

OPERATORS: Sequence[Callable[[Random, Vocabulary], Object]] = (
    lambda r, v: {"key": "zone", "operator": "In", "values": [r.choice(v.labels)["zone"]]},
    lambda r, v: {"key": "zone", "operator": "NotIn", "values": [r.choice(v.labels)["zone"]]},
    lambda r, v: {"key": "quiet", "operator": r.choice(("Exists", "DoesNotExist"))},
    lambda r, v: {"key": "rank", "operator": r.choice(("Gt", "Lt")), "values": [str(r.randrange(1, 6))]},
    lambda r, v: {"key": "logical", "operator": "In", "values": [each["logical"] for each in r.sample(v.labels, 2)]},
)

TOLERATIONS: Sequence[Object] = (
    {"operator": "Exists"},
    {"key": "dedicated", "operator": "Equal", "value": "inference", "effect": "NoSchedule"},
    {"key": "spot", "operator": "Exists"},
)

CONSTRAINTS = ("matchAttribute", "matchAttribute", "distinctAttribute")
NAMES = ("nvlinkClique", "parentUUID", "resource.kubernetes.io/numaNode", "uuid", "productName", "profile")
"""Attributes that constraints are about."""

COUNTS = (1, 1, 1, 1, 1, 1, 2, 2, 3, 4)
BURSTS = (3, 8, 20, 100)


@dataclass
class _Drawing:
    random: Random
    known: Vocabulary
    made: Case

    def case(self) -> Case:
        kinds = (self._one_pod, self._shared_claim, self._burst, self._extended, self._several)
        self.random.choices(kinds, weights=(10, 2, 3, 2, 3))[0]()
        return self.made

    def _one_pod(self) -> None:
        several = self.random.choice((1, 1, 1, 1, 2))
        self._pod("pod", [self._claim(f"claim-{index}", self._devices()) for index in range(several)])

    def _several(self) -> None:
        """Pods that ask for different things."""
        for index in range(self.random.randint(2, 6)):
            self._pod(f"pod-{index}", [self._claim(f"claim-{index}", self._devices())])

    def _shared_claim(self) -> None:
        claims, rules = [self._claim("shared", self._devices())], self._rules()
        for index in range(self.random.randint(2, 3)):
            self._pod(f"pod-{index}", claims, rules)
        self.made.alike = True

    def _burst(self) -> None:
        """Pods from one template, of one device each: whoever is served, as many can be."""
        profile = self.random.choice(self.known.profiles)
        condition = self.random.choice((f'profile == "{profile}"', 'type == "share"', 'type == "gpu"'))
        spread = self.random.choice(((), (), ('architecture == "Hopper"',)))
        requests = [{"name": "gpu", "exactly": self._exactly(selector(condition, *spread))}]
        if self.random.random() < 0.25:
            requests.append({"name": "other", "exactly": self._exactly()})
        self.made.templates.append(
            {"metadata": {"name": "alike"}, "spec": {"spec": {"devices": {"requests": requests}}}}
        )
        rules = self._rules()
        for index in range(self.random.choice(BURSTS)):
            self._pod(f"pod-{index}", [{"name": "gpu", "resourceClaimTemplateName": "alike"}], rules)
        self.made.alike = True

    def _extended(self) -> None:
        rules, amount = self._rules(), self.random.choice((1, 1, 2, 4))
        resources = {self.random.choice(list(EXTENDED)): str(amount)}
        for index in range(self.random.randint(1, 3)):
            self._pod(f"pod-{index}", [], rules, {"requests": resources, "limits": resources})
        self.made.alike = True

    def _pod(
        self, name: str, claims: list[Object], rules: Object | None = None, resources: Object | None = None
    ) -> None:
        resources = resources or self.random.choice(({}, {}, {}, {"requests": {"cpu": "3"}}))
        self.made.pods.append(pod_with(name, claims, resources, **(self._rules() if rules is None else rules)))

    def _claim(self, name: str, devices: Object) -> Object:
        self.made.claims.append({"metadata": {"name": name}, "spec": {"devices": devices}})
        return {"name": name, "resourceClaimName": name}

    def _rules(self) -> Object:
        """Where a pod may run."""
        rules: Object = {"tolerations": [each for each in TOLERATIONS if self.random.random() < 0.55]}
        if self.random.random() < 0.1:
            rules["nodeSelector"] = {"zone": self.random.choice(self.known.labels)["zone"]}
        if self.random.random() < 0.25:
            terms = [
                {"matchExpressions": [self.random.choice(OPERATORS)(self.random, self.known) for _ in range(some)]}
                for some in self.random.choice(((1,), (1,), (2,), (1, 1)))
            ]
            required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
            rules["affinity"] = {"nodeAffinity": required}
        if self.random.random() < 0.08:
            kind = self.random.choice(("podAntiAffinity", "podAntiAffinity", "podAffinity"))
            topology = "logical" if kind == "podAntiAffinity" else "zone"
            term = {"labelSelector": {"matchLabels": {"app": "case"}}, "topologyKey": topology}
            rules.setdefault("affinity", {})[kind] = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        return rules

    def _devices(self) -> Object:
        requests = [self._request(f"r{index}") for index in range(self.random.choice((1, 1, 1, 1, 1, 1, 2, 2, 3)))]
        constraints = []
        if self.random.random() < 0.25:
            name = self.random.choice(NAMES)
            qualified = name if "/" in name else f"{DRIVER}/{name}"
            constraint: Object = {self.random.choice(CONSTRAINTS): qualified}
            if self.random.random() < 0.3:
                constraint["requests"] = [self.random.choice(requests)["name"]]
            constraints.append(constraint)
        return {"requests": requests, "constraints": constraints}

    def _request(self, name: str) -> Object:
        if self.random.random() < 0.2:
            wanted = [{"name": f"a{index}", **self._exactly()} for index in range(self.random.choice((2, 2, 3)))]
            return {"name": name, "firstAvailable": wanted}
        return {"name": name, "exactly": self._exactly()}

    def _exactly(self, expression: str | None = None) -> Object:
        found: Object = {"deviceClassName": CLASS}
        if expression is None:
            found["count"] = self.random.choice(COUNTS)
            if self.random.random() < 0.06:
                found = {"deviceClassName": CLASS, "allocationMode": "All"}
            expression = selector(*self.random.choice(CONDITIONS)(self.random, self.known))
        found["selectors"] = [{"cel": {"expression": expression}}]
        if self.random.random() < 0.15:
            found["tolerations"] = [{"operator": "Exists"}]
        if self.random.random() < 0.08:
            found["capacity"] = {"requests": {"memory": f"{self.random.choice(GIBIBYTES)}Gi"}}
        return found
