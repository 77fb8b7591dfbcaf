"""Objects as a tenant may write them to make trouble, as the JSON that the API server sends, drawn from a seed (pure).

Untyped parts (opaque parameters, data of other drivers) are anything that is JSON to Go. Typed parts are at the
limits of the API, and now and then of a wrong type, as no API server of today sends them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from driver.model.reported_gpus import GpuReport, encode_inventory
from tests.support.queues import DRIVER, OURS, gpu_in, profile, selected_by

Object = dict[str, Any]

HUGE = 2**63 - 1
NAMESPACES = ("team", "a" * 63, "default")
CLASSES = ("any", "gpu-training", "missing", "x" * 253)
STRINGS = ("", "x", "é😀", "\u0000", "x" * 253, "9" * 5000, "1e999", "-1", "../../etc", "%s{}", "\u202e", "null")
QUANTITIES = ("1", "0", "-1", "1Ei", "9" * 18, "1e18", "40Gi", "0.1m", "1e-9", "999999999999E")
NODES = ("a", "b", "none")
INVENTORY = encode_inventory([GpuReport(gpu_in("a", 0), 0), GpuReport(gpu_in("a", 1), 1, shares=4)])


def nested(depth: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * depth + "1" + closing * depth


class Hostile:
    """Draws objects; ``untyped`` texts stand in them as placeholders until ``text`` puts them in."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._untyped: list[str] = []

    def draw(self, kind: str, version: int) -> tuple[str, str]:
        """Namespaced name and JSON text of one object."""
        self._untyped.clear()
        metadata = self._metadata(kind, version)
        makers: Mapping[str, Callable[[], Object]] = {
            "resourceclaims": self._claim,
            "resourceclaimtemplates": lambda: {"spec": {"spec": self._claim()["spec"]}},
            "pods": self._pod,
            "podgroups": self._pod_group,
            "nodes": self._node,
            "deviceclasses": self._class,
            "resourceslices": self._slice,
            "gpunodeplans": self._plan,
            "devicetaintrules": self._taint_rule,
        }
        body = makers[kind]()
        if self._one_in(20):
            self._spoil(body)
        return f"{metadata.get('namespace', '')}/{metadata['name']}", self._text({"metadata": metadata, **body})

    def workload(self, version: str, kind: str, field: str) -> str:
        """JSON text of a workload with a pod template, whose ``field`` is the number of pods."""
        self._untyped.clear()
        spec = {field: self.number(), "template": {"spec": self._pod()["spec"]}}
        return self._text({"apiVersion": version, "kind": kind, "metadata": self._metadata("pods", 1), "spec": spec})

    def number(self) -> int:
        """A number of pods or nodes; nearly always one that takes no time, or far too much."""
        return int(self._pick(0, 1, 2, 10**6, 2**31, HUGE, 10**30, -1))

    def _text(self, content: Object) -> str:
        text = json.dumps(content, ensure_ascii=self._one_in(2))
        for number, untyped in enumerate(self._untyped):
            text = text.replace(f'"@untyped-{number}@"', untyped)
        return text

    # Pieces

    def _one_in(self, count: int) -> bool:
        return self._random.randrange(count) == 0

    def _pick(self, *values: Any) -> Any:
        return self._random.choice(values)

    def _few(self, make: Callable[[], Any], most: int = 4, limit: int = 32) -> list[Any]:
        return [make() for _ in range(limit if self._one_in(50) else self._random.randint(0, most))]

    def _string(self) -> str:
        return str(self._pick(*STRINGS))

    def _anything(self) -> str:
        """A placeholder for JSON that only its author understands."""
        size = 5000 if self._one_in(8) else 70  # most small, for speed
        text = self._pick(
            nested(self._random.randint(1, size // 3)),
            nested(self._random.randint(1, size), "[", "]"),
            f"[{','.join(['[]'] * self._random.randint(0, size // 2))}]",
            '"\\ud800"',
            '{"\\udfff":"\\ud83d\\ude00\\ud83d"}',
            "9" * self._random.randint(1, 2 * size),
            "-1E999",
            json.dumps("x" * size),
            "null",
            '{"apiVersion":"gpu.tessera.dev/v1alpha1","kind":"ShareConfig","sharing":{"a":[]}}',
        )
        self._untyped.append(text)
        return f"@untyped-{len(self._untyped) - 1}@"

    def _metadata(self, kind: str, version: int) -> Object:
        name = f"{self._pick('o', 'x' * 240)}-{self._random.randrange(60)}"
        found: Object = {"name": name, "uid": f"uid-{name[-6:]}", "resourceVersion": str(version)}
        if kind in ("resourceclaims", "resourceclaimtemplates", "pods", "podgroups"):
            found["namespace"] = self._pick(*NAMESPACES)
        names = {"nodes": NODES, "gpunodeplans": NODES, "deviceclasses": CLASSES}.get(kind)
        if names is not None and not self._one_in(4):
            found["name"] = self._pick(*names)
        if self._one_in(4):
            many = self._one_in(50)
            found["labels"] = {f"l-{n}": self._string()[:63] for n in range(500 if many else 2)}
            found["annotations"] = {"a": "x" * (100_000 if many else 9), "gpu.tessera.dev/paused": self._string()}
        if self._one_in(5):
            found["deletionTimestamp"] = self._pick("2026-11-22T00:00:00Z", None)
        found["creationTimestamp"] = self._pick("2026-11-22T00:00:00Z", None, "0001-01-01T00:00:00Z")
        return found

    def _expression(self) -> str:
        deep = self._random.randint(1, 400 if self._one_in(8) else 20)
        return str(
            self._pick(
                OURS,
                profile(self._pick("1g.10gb", "7g.80gb", "9g.1tb")),
                selected_by('type == "gpu"'),
                'device.attributes["nobody.example"].x == 1',
                f"{'(' * deep}true{')' * deep}",
                f"{'!' * (deep * 10)}true",
                f'quantity("{"9" * deep * 20}") == quantity("1")',
                f"{'9' * deep * 20} == 1",
                f'semver("{"1." * deep}0") == semver("1.0.0")',
                "[1,2,3,4,5,6,7,8,9,10].all(a, " * 4 + "true" + ")" * 4,
                self._string(),
                '"\\ud800" == device.driver',
            )
        )

    def _selectors(self) -> list[Object]:
        return self._few(lambda: {"cel": {"expression": self._expression()}}, 2)

    def _tolerations(self) -> list[Object]:
        return self._few(lambda: {"key": self._string(), "operator": self._pick("Exists", "Equal", "")}, 2)

    def _wanted(self, name: str | None = None) -> Object:
        found: Object = {"deviceClassName": self._pick(*CLASSES), "selectors": self._selectors()}
        found |= {} if name is None else {"name": name}
        if self._one_in(2):
            found["count"] = self._pick(1, 2, 8, 32, 33, HUGE)
        if self._one_in(4):
            found["allocationMode"] = self._pick("All", "ExactCount", "Future")
        if self._one_in(8):
            found["adminAccess"] = self._pick(True, False, None)
        if self._one_in(4):
            found["capacity"] = {"requests": {self._pick("memory", "a/b", "x"): self._pick(*QUANTITIES)}}
        found["tolerations"] = self._tolerations()
        return {key: value for key, value in found.items() if value is not None}

    def _request(self) -> Object:
        name = f"r{self._random.randrange(5)}"
        if self._one_in(3):
            return {"name": name, "firstAvailable": [self._wanted(f"a{n}") for n in range(self._pick(1, 2, 8))]}
        return {"name": name, "exactly": self._wanted()}

    def _config(self) -> Object:
        driver = self._pick(DRIVER, "example.com", "")
        return {"requests": ["r0"], "opaque": {"driver": driver, "parameters": self._anything()}}

    def _result(self) -> Object:
        device = self._pick("gpu-0", "gpu-1-mig-1g10gb-0", "gpu-0-share-99999999999999999999", "x" * 63, "")
        pool = f"{self._pick(*NODES)}-{DRIVER}"
        return {"request": "r0/a1", "driver": self._pick(DRIVER, "example.com"), "pool": pool, "device": device}

    def _claim(self) -> Object:
        attribute = self._pick(f"{DRIVER}/parentUUID", "numaNode", "x/y", "")
        constraint = {self._pick("matchAttribute", "distinctAttribute"): attribute, "requests": self._pick([], ["r0"])}
        devices = {
            "requests": self._few(self._request),
            "constraints": self._few(lambda: constraint, 2),
            "config": self._few(self._config, 2),
        }
        found: Object = {"spec": {"devices": devices}}
        if self._one_in(3):
            allocation = {"devices": {"results": self._few(self._result), "config": self._few(self._config, 1)}}
            data = {**self._result(), "data": self._anything(), "conditions": []}
            found["status"] = {"allocation": allocation, "devices": [data], "reservedFor": self._few(self._consumer, 2)}
        return found

    def _consumer(self) -> Object:
        return {"resource": self._pick("pods", "x"), "name": self._string(), "uid": self._string()}

    def _term(self) -> Object:
        operator = self._pick("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Future")
        values = self._few(lambda: self._pick("a", "1", "9" * 5000, "-", "٣"), 2)
        return {"matchExpressions": [{"key": self._pick("l-0", "x"), "operator": operator, "values": values}]}

    def _container(self) -> Object:
        name = self._pick("cpu", "nvidia.com/gpu", "deviceclass.resource.kubernetes.io/any", "example.org/gpu")
        return {"name": "c", "resources": {"limits": {name: self._pick(*QUANTITIES)}}, "restartPolicy": "Always"}

    def _pod(self) -> Object:
        required = {"nodeSelectorTerms": self._few(self._term, 2)}
        spec: Object = {
            "resourceClaims": self._few(
                lambda: {"name": "c", "resourceClaimName": f"o-{self._random.randrange(60)}"}, 3
            ),
            "containers": self._few(self._container, 2),
            "initContainers": self._few(self._container, 1),
            "tolerations": self._tolerations(),
            "nodeSelector": self._pick({}, {"l-0": "x"}),
            "affinity": self._pick(
                None, {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
            ),
        }
        if self._one_in(3):
            name = f"{self._pick('o', 'x' * 240)}-{self._random.randrange(60)}"
            spec["schedulingGroup"] = self._pick(None, {}, {"podGroupName": self._pick(name, None)})
        message = f"0/2 nodes are available: {self._pick('cannot allocate all claims', 'x' * 30_000)}"
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        return {"spec": spec, "status": {"phase": "Pending", "conditions": [condition]}}

    def _pod_group(self) -> Object:
        gang = {"minCount": self._pick(1, 2, 33, HUGE, 0, -1)}
        policy = self._pick({"gang": gang}, {"gang": None}, {"basic": {}}, None)
        conditions = self._pick([], None, [{"type": "PodGroupInitiallyScheduled", "status": "True"}])
        volcano = {"minMember": self._pick(0, 0, 2, 33, HUGE, -1)}
        return {"spec": {"schedulingPolicy": policy, **volcano}, "status": {"conditions": conditions}}

    def _node(self) -> Object:
        taint = {"key": self._string(), "effect": self._pick("NoSchedule", "x"), "value": self._string()}
        return {"spec": {"taints": self._pick([], [taint]), "unschedulable": self._one_in(9)}}

    def _class(self) -> Object:
        return {
            "spec": {
                "selectors": self._selectors(),
                "config": self._few(self._config, 1),
                "extendedResourceName": self._pick(None, "example.org/gpu", "nvidia.com/gpu"),
            }
        }

    def _slice(self) -> Object:
        shares = self._pick({}, {"shares": {"int": self._pick(1, 0, -1, HUGE)}}, {"shares": {"string": "x"}})
        devices = [{"name": f"gpu-{n}", "attributes": shares} for n in range(self._pick(0, 1, 128))]
        pool = {"name": f"{self._pick(*NODES)}-{DRIVER}", "generation": self._pick(0, HUGE), "resourceSliceCount": 1}
        return {"spec": {"driver": DRIVER, "nodeName": self._pick(*NODES), "pool": pool, "devices": devices}}

    def _taint_rule(self) -> Object:
        selector = {
            "driver": self._pick(DRIVER, "example.com", None),
            "pool": self._pick(f"{self._pick(*NODES)}-{DRIVER}", "", None),
            "device": self._pick("gpu-0", "x" * 63, "", None),
        }
        taint = {"key": self._string(), "value": self._string(), "effect": self._pick("NoSchedule", "NoExecute", "x")}
        return {"spec": {"deviceSelector": self._pick(selector, {}, None), "taint": taint}}

    def _plan(self) -> Object:
        inventory = self._pick("", "x", "[]", nested(2000), '{"gpus":null}', "x" * 10_000, self._inventory())
        return {"spec": {}, "status": {"mode": self._pick("Planned", "Alone", "Future"), "inventory": inventory}}

    def _inventory(self) -> str:
        """The inventory of a node with some other numbers."""
        content = json.loads(INVENTORY)
        for _ in range(self._random.randint(0, 3)):
            at: Any = content
            while isinstance(at, dict | list) and at:
                parent, key = at, self._random.choice(list(at) if isinstance(at, dict) else range(len(at)))
                at = parent[key]
            if isinstance(at, int) and not isinstance(at, bool):
                parent[key] = self._pick(-1, 0, 1, 63, 1000, 10**6, HUGE)
        return json.dumps(content)

    def _spoil(self, body: Object) -> None:
        """Give something in ``body`` a wrong type."""
        at: Any = body
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                return
            key = self._random.choice(keys)
            if not isinstance(at[key], dict | list) or not at[key] or self._one_in(4):
                at[key] = self._pick(None, 0, -HUGE, "x", True, [], {}, [None], 1.5, {"": {}}, self._anything())
                return
            at = at[key]
