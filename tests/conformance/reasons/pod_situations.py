"""Situations in which a GPU is offered and a pod does not get it: resources, taints, labels or NICs are in the way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import strategies as st

from driver.kube.slice_types import DetailedSlice
from driver.kube.types import NodeStatus
from tests.support.queues import FULL, Situation, fleet_gpu, request

NIC, NIC_CLASS = "nic.example.com", "rdma"
ROOT = "resource.kubernetes.io/pcieRoot"
FAST = f'device.attributes["{NIC}"].speed >= 200'
OFFERED = "a/gpu-0"
"""The only GPU, which is free."""

CREATED = "2026-11-21T00:06:40Z"
"""When the pod was created."""

TAINTS = (
    {"key": "maintenance", "effect": "NoSchedule"},
    {"key": "maintenance", "effect": "NoExecute"},
    {"key": "team", "value": "blue", "effect": "NoSchedule"},
    {"key": "team", "value": "blue", "effect": "NoExecute"},
    {"key": "spot", "value": "true", "effect": "PreferNoSchedule"},
)
TOLERATIONS = (
    {"key": "maintenance", "operator": "Exists"},
    {"key": "maintenance", "operator": "Exists", "effect": "NoExecute"},
    {"key": "team", "value": "blue"},
    {"key": "team", "value": "blue", "effect": "NoSchedule"},
    {"key": "team", "value": "red"},
    {"operator": "Exists", "effect": "NoExecute"},
)
AFFINITIES = (
    ({"key": "zone", "operator": "In", "values": ["x", "z"]},),
    ({"key": "zone", "operator": "NotIn", "values": ["y"]},),
    ({"key": "disk", "operator": "Exists"},),
    ({"key": "zone", "operator": "DoesNotExist"}, {"key": "disk", "operator": "Exists"}),
    ({"key": "generation", "operator": "Gt", "values": ["3"]},),
)
"""Terms: requirements that a node must meet together."""

AMOUNTS = {
    "cpu": ("100m", "0.5", 1, "1500m", "2"),
    "memory": ("64Mi", "1Gi", "1e9", "500M", "1500Mi"),
    "ephemeral-storage": ("1Gi", "10G", "2500Mi"),
}
ALLOCATABLE = {
    "cpu": ("50m", "900m", "1", "2500m", "3"),
    "memory": ("32Mi", "1Gi", "1100Mi", "2G"),
    "ephemeral-storage": ("512Mi", "5G", "12Gi"),
    "pods": ("0",),
}
OF_PODS = ({"requests": {"cpu": "12"}}, {"requests": {"memory": "12Gi"}}, {"limits": {"cpu": "12", "memory": "12Gi"}})
"""More than any sum of ``AMOUNTS``, as the API server demands of what a whole pod requests."""

DEVICE_TAINT = {"key": "repair", "value": "fan", "effect": "NoSchedule"}
TOLERANT = [{"key": "repair", "operator": "Exists"}]


@st.composite
def pod_situations(draw: st.DrawFn, has_taints: bool = True) -> Situation:
    """A pod, its node and NICs of another driver, with one or more of them in the way of its placement.

    ``has_taints``: whether NICs may be tainted.
    """
    there = Situation([fleet_gpu("a", 0)])
    there.device_class(NIC_CLASS, f'device.driver == "{NIC}"')
    troubles = draw(st.sets(st.sampled_from(["node", "resources", "nics"]), min_size=1))
    pod = draw(_node(there)) if "node" in troubles else {}
    pod |= draw(_resources("a", there)) if "resources" in troubles else {}
    claims = draw(_claims(there, has_taints)) if "nics" in troubles else [there.claim("claim", request(selector=FULL))]
    there.pod("pod", *claims, metadata={"creationTimestamp": CREATED}, **pod)
    return there


@st.composite
def _node(draw: st.DrawFn, there: Situation) -> dict[str, Any]:
    """Taints and labels of the node; gives what the pod tolerates and selects."""
    taints = draw(
        st.lists(st.sampled_from(TAINTS), max_size=4, unique_by=lambda taint: (taint["key"], taint["effect"]))
    )
    labels = draw(st.dictionaries(st.sampled_from(["pool", "zone"]), st.sampled_from("xy")))
    there.node("a", labels | draw(st.sampled_from([{}, {"generation": "3"}])), taints=taints)
    spec: dict[str, Any] = {"tolerations": draw(st.lists(st.sampled_from(TOLERATIONS), max_size=2))}
    if draw(st.booleans()):
        spec["nodeSelector"] = {"pool": "x"}
    if terms := draw(st.lists(st.sampled_from(AFFINITIES), max_size=2)):
        required = {"nodeSelectorTerms": [{"matchExpressions": term} for term in terms]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return spec


@st.composite
def _resources(draw: st.DrawFn, node: str, there: Situation) -> dict[str, Any]:
    """What the node has; gives what the containers of the pod, the pod itself and its RuntimeClass request."""
    amounts = {name: st.sampled_from(values) for name, values in AMOUNTS.items()}
    requests = st.fixed_dictionaries({}, optional=amounts)
    resources = st.builds(lambda kind, some: {kind: some}, st.sampled_from(["requests", "limits"]), requests)
    has = draw(st.fixed_dictionaries({}, optional={name: st.sampled_from(each) for name, each in ALLOCATABLE.items()}))
    there.nodes[node] = msgspec.structs.replace(there.nodes[node], status=NodeStatus(allocatable=has))
    containers = [{"name": f"main-{number}", "resources": draw(resources)} for number in range(draw(st.integers(1, 2)))]
    first: list[dict[str, Any]] = []
    for number in range(draw(st.integers(0, 3))):
        sidecar = {"restartPolicy": "Always"} if draw(st.booleans()) else {}
        first.append({"name": f"first-{number}", "resources": draw(resources), **sidecar})
    spec: dict[str, Any] = {"containers": containers, "initContainers": first}
    if draw(st.integers(0, 3)) == 0:
        spec["resources"] = draw(st.sampled_from(OF_PODS))
    if draw(st.integers(0, 3)) == 0:
        spec["overhead"] = draw(st.fixed_dictionaries({"cpu": amounts["cpu"]}, optional={"memory": amounts["memory"]}))
    return spec


@st.composite
def _claims(draw: st.DrawFn, there: Situation, has_taints: bool) -> list[str]:
    """NICs of up to two nodes, some of them held or tainted; gives the claims for the GPU and for NICs."""
    for node in draw(st.sampled_from(["a", "a", "a", "b", "ab", ""])):
        if node not in there.nodes:
            there.node(node)
        _publish(draw, there, node, has_taints)
    if has_taints and draw(st.integers(0, 3)) == 0:
        selector = draw(st.sampled_from([{"driver": NIC}, {"pool": "a-nics"}, {"pool": "a-nics", "device": "nic-0"}]))
        there.taint_rule("broken", selector, key="cable", value="loose", effect=draw(st.sampled_from(EFFECTS)))
    number = Counter(item.spec.pool.name for item in there.slices)
    is_complete = all(number[item.spec.pool.name] == item.spec.pool.resource_slice_count for item in there.slices)
    # All devices of an incomplete pool are an error for the scheduler, which tries again instead of reporting nodes.
    amounts: list[dict[str, Any]] = [{}, {}, {"count": 2}, {"allocationMode": "All"} if is_complete else {}]
    more = draw(st.sampled_from(amounts))
    more = more | draw(st.sampled_from([{}, {}, {"tolerations": TOLERANT}])) if has_taints else {}
    nics = request(NIC_CLASS, "nic", draw(st.sampled_from([None, FAST])), **more)
    gpu = request(selector=FULL)
    if draw(st.integers(0, 2)) == 0:
        return [there.claim("claim", gpu), there.claim("fast", nics)]
    constraints = draw(st.sampled_from([[], [{"matchAttribute": ROOT}]])) if "allocationMode" not in more else []
    return [there.claim("claim", gpu, nics, constraints=constraints)]


EFFECTS = ("NoSchedule", "NoExecute", "None")


def _publish(draw: st.DrawFn, there: Situation, node: str, has_taints: bool) -> None:
    """NICs in one or two slices of the newest generation of a pool."""
    devices = []
    for number in range(draw(st.integers(0, 3))):
        root = draw(st.sampled_from(["pci0000:00", "pci0000:00", "pci0000:ff"]))
        attributes = {"speed": {"int": draw(st.sampled_from([100, 400, 400]))}, ROOT: {"string": root}}
        taints = [DEVICE_TAINT] if has_taints and draw(st.integers(0, 4)) == 0 else []
        devices.append({"name": f"nic-{number}", "attributes": attributes, "taints": taints})
        if draw(st.booleans()):
            results = [{"request": "nic", "driver": NIC, "pool": f"{node}-nics", "device": f"nic-{number}"}]
            there.claim(f"holder-{node}-{number}", status={"allocation": {"devices": {"results": results}}})
    parts = [devices[:1], devices[1:]] if draw(st.booleans()) else [devices]
    count = len(parts) + (draw(st.integers(0, 4)) == 0)
    there.slices += [nic_slice(node, number, part, count) for number, part in enumerate(parts)]


def nic_slice(node: str, number: int, devices: list[dict[str, Any]], count: int) -> DetailedSlice:
    """One of ``count`` ResourceSlices of the pool of a node."""
    pool = {"name": f"{node}-nics", "generation": 1, "resourceSliceCount": count}
    raw = {
        "metadata": {"name": f"{node}-nics-{number}", "resourceVersion": "1"},
        "spec": {"driver": NIC, "nodeName": node, "pool": pool, "devices": devices},
    }
    return msgspec.convert(raw, DetailedSlice)
