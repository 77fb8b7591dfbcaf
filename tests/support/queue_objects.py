"""Kueue's Configuration, queues, and what waits in them, written short."""

from __future__ import annotations

from typing import Any

from tests.support.linting import DRIVER, OURS, SHARE, TYPE

Body = dict[str, Any]
API = "kueue.x-k8s.io/v1beta2"
FULL, SMALL = "gpu-training", "gpu-inference-1g-10gb"
NINE = ("1g-5gb", "1g-6gb", "1g-10gb", "1g-18gb", "1g-20gb", "1g-23gb", "1g-35gb", "1g-45gb", "2g-10gb")
CAPACITY_GATE = {"KueueDRAIntegrationConsumableCapacity": True}


def source(kind: str, name: str, selector: str = OURS, driver: str = DRIVER) -> Body:
    return {kind: {"name": name, "driver": driver, "deviceSelector": {"cel": {"expression": selector}}}}


def mapping(name: str, *classes: str, **more: Any) -> Body:
    return {"name": name, "deviceClassNames": list(classes), **more}


def configuration(*mappings: Body, gates: dict[str, bool] | None = None) -> Body:
    more = {"featureGates": gates} if gates is not None else {}
    content = {"apiVersion": f"config.{API}", "kind": "Configuration", **more}
    return {**content, "resources": {"deviceClassMappings": list(mappings)}}


def cluster_queue(name: str, flavor: str = "nodes", **quota: int) -> Body:
    resources = [{"name": each, "nominalQuota": most} for each, most in quota.items()]
    group = {"coveredResources": list(quota), "flavors": [{"name": flavor, "resources": resources}]}
    return {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": {"resourceGroups": [group]}}


def local_queue(name: str, queue: str) -> Body:
    return {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": name}, "spec": {"clusterQueue": queue}}


def template(name: str, *requests: Body) -> Body:
    spec = {"spec": {"devices": {"requests": list(requests)}}}
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def job(template: str | None, queue: str = "", **container: Any) -> Body:
    """A Job whose pods have a claim by ``template``."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": template}] if template else []
    pod = {"containers": [{"name": "main", **container}], "resourceClaims": claims}
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    metadata = {"name": "work", "labels": labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": {"spec": pod}}}


MEMORY = source("counter", "memory")
MAPPINGS = "resources.deviceClassMappings"

CONFIGURATIONS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "one count per class": (configuration(mapping("gpus", FULL), mapping("small", SMALL)), []),
    "a counter for all": (configuration(mapping("gpu-memory", FULL, SMALL, sources=[MEMORY])), []),
    "no mappings": (configuration(), []),
    "17 mappings": (
        configuration(*(mapping(f"m{n}", sources=[source("counter", "memory")]) for n in range(17))),
        [(MAPPINGS, "error"), *((f"{MAPPINGS}[{n}].deviceClassNames", "error") for n in range(17))],
    ),
    "9 classes": (
        configuration(mapping("m", *(f"gpu-inference-{n}" for n in NINE), sources=[MEMORY])),
        [("[0].deviceClassNames", "error")],
    ),
    "a name with a space": (configuration(mapping("my gpus", FULL)), [("[0].name", "error")]),
    "a domain in capitals": (configuration(mapping("Example.com/gpus", FULL)), [("[0].name", "error")]),
    "a name of two mappings": (
        configuration(mapping("gpus", FULL), mapping("gpus", SMALL)),
        [("[1].name", "error")],
    ),
    "a class twice": (configuration(mapping("gpus", FULL, FULL)), [("[0].deviceClassNames[1]", "error")]),
    "a class of two mappings": (
        configuration(mapping("gpus", FULL), mapping("more", FULL)),
        [("[1].deviceClassNames[0]", "error")],
    ),
    "a class that does not exist": (
        configuration(mapping("gpus", "gpu-trainig")),
        [("[0].deviceClassNames[0]", "warning")],
    ),
    "an empty source": (configuration(mapping("m", FULL, sources=[{}])), [("[0].sources[0]", "error")]),
    "counter and capacity": (
        configuration(mapping("m", FULL, sources=[MEMORY, source("capacity", "memory")]), gates=CAPACITY_GATE),
        [("[0].sources", "error")],
    ),
    "capacity without its gate": (
        configuration(mapping("m", FULL, sources=[source("capacity", "memory")]), gates={"VisibilityOnDemand": False}),
        [("[0].sources[0].capacity", "error")],
    ),
    "capacity, and gates perhaps by flag": (
        configuration(mapping("m", FULL, sources=[source("capacity", "memory")])),
        [("[0].sources[0].capacity", "warning")],
    ),
    "capacity with a domain": (
        configuration(mapping("m", FULL, sources=[source("capacity", f"{DRIVER}/memory")]), gates=CAPACITY_GATE),
        [("[0].sources[0].capacity.name", "error")],
    ),
    "the counter of one memory slice": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory-slice-0")])),
        [("[0].sources[0].counter.name", "error")],
    ),
    "a driver that is almost ours": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory", driver="gpu.tesera.dev")])),
        [("[0].sources[0].counter.driver", "warning")],
    ),
    "no driver": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory", driver="")])),
        [("[0].sources[0].counter.driver", "error")],
    ),
    "a selector that does not compile": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory", "device.driver =")])),
        [("[0].sources[0].counter.deviceSelector.cel.expression", "error")],
    ),
    "no selector": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory", "")])),
        [("[0].sources[0].counter.deviceSelector.cel.expression", "error")],
    ),
    "a selector of other devices than the class gives": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory", f'{OURS} && {TYPE} == "mig"')])),
        [("[0].sources[0].counter.deviceSelector.cel.expression", "error")],
    ),
    "capacity of shares": (
        configuration(mapping("m", "gpu-dev", sources=[source("capacity", "memory", SHARE)]), gates=CAPACITY_GATE),
        [("[0].sources[0].capacity", "error")],
    ),
    "full GPUs and partitions by count": (
        configuration(mapping("m", FULL, SMALL)),
        [("[0].deviceClassNames", "warning")],
    ),
}
"""Configurations, and path (below ``MAPPINGS``) and severity of each finding."""

REFUSED_LATER = {
    "capacity with a domain",
    "the counter of one memory slice",
    "a selector of other devices than the class gives",
    "capacity of shares",
}
"""Errors of which Kueue knows nothing until a Workload comes, which it never admits."""

REFUSED_BY_DEFAULT = {"capacity, and gates perhaps by flag"}
"""Warnings about what Kueue refuses without flags."""
