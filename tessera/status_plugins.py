"""The check of ``tessera status`` about node plugins: where one runs, and where one should (pure)."""

from __future__ import annotations

from driver.kube.transport import Object
from tessera.status_finding import Finding, Told, first
from tessera.status_picture import NODE, Picture, What
from tessera.status_pods import tell_pods

OWN_LABEL = "gpu.tessera.dev/node"
GPU_LABELS = (
    OWN_LABEL,
    "nvidia.com/gpu.present",
    *(f"feature.node.kubernetes.io/pci-{each}.present" for each in ("10de", "0302_10de", "0300_10de")),
)
"""Any of them, with the value true, or GKE_LABEL: the chart's node plugin runs there."""
GKE_LABEL = "cloud.google.com/gke-accelerator"
BY_LABEL = f"kubectl label node NODE {OWN_LABEL}=true (or install Node Feature Discovery)"
THE_SET = f"the DaemonSet {NODE}"


def plugins(picture: Picture) -> Told:
    names = picture.gpu_nodes
    if picture.has_read(What.SLICES):
        yield f"{sum(bool(picture.slices_of(name)) for name in names)} of {len(names)} nodes publish"
    yield from tell_pods(picture, NODE)
    if picture.has_read(What.SLICES, What.PODS) and not picture.slices and not picture.pods_of(NODE):
        yield _nobody(picture)
    if picture.has_read(What.NODES):
        there = {item["metadata"]["name"] for item in picture.nodes}
        for name in names:
            if name not in there:
                yield Finding(
                    name, "has slices or a plan, but there is no such Node", "delete them, or register the node"
                )
        if picture.has_read(What.SLICES):
            yield from _silent(picture)


def _nobody(picture: Picture) -> Finding:
    """Nothing is published, and nobody is there who could."""
    daemon_set = picture.daemon_set
    describe = f"kubectl -n {picture.namespace} describe daemonset {NODE}"
    if daemon_set is None:
        remedy = f"{BY_LABEL}; is there a DaemonSet {NODE} (values: nodePlugin.enabled)?"
        return Finding("nodes", "none publishes a GPU, and no pod of a node plugin is there", remedy)
    if wanted := daemon_set.get("status", {}).get("desiredNumberScheduled", 0):
        return Finding(THE_SET, f"has {wanted} to run on, and no pod", describe)
    labelled = any(_has_gpus(node) for node in picture.nodes)
    if _goes_by_labels(daemon_set) and picture.has_read(What.NODES) and not labelled:
        return Finding(THE_SET, "has no node to run on: none has a label of NVIDIA GPUs", BY_LABEL)
    return Finding(THE_SET, "has no node to run on: its node selector, affinity or tolerations rule out all", describe)


def _silent(picture: Picture) -> Told:
    """Nodes that should publish and don't; those that only have a plan of earlier times are told together."""
    left = []
    for node in picture.nodes:
        name = node["metadata"]["name"]
        if picture.slices_of(name) or not (name in picture.gpu_nodes or _has_gpus(node)):
            continue
        pods = [pod["metadata"]["name"] for pod in picture.pods_of(NODE) if pod["spec"].get("nodeName") == name]
        if pods:
            yield Finding(name, "publishes nothing", f"kubectl -n {picture.namespace} logs {pods[0]}")
        elif not picture.has_read(What.PODS):
            remedy = f"is the plugin there and ready? kubectl -n {picture.namespace} get pods -o wide"
            yield Finding(name, "publishes nothing", remedy)
        elif _has_gpus(node):
            yield Finding(name, "publishes nothing: no pod of a node plugin is there", _start(picture))
        else:
            left.append(name)
    if left:
        yield _left(picture, left)


def _start(picture: Picture) -> str:
    if picture.daemon_set is None:
        return "start it there, as a pod or as a process (docs/install.md)"
    return f"do taints or a node selector keep it off? kubectl -n {picture.namespace} describe daemonset {NODE}"


def _left(picture: Picture, names: list[str]) -> Finding:
    """Without a label, since all that is known of them is a plan."""
    by_label = picture.daemon_set is not None and _goes_by_labels(picture.daemon_set)
    start = f"kubectl label node {names[0]} {OWN_LABEL}=true" if by_label else _start(picture)
    remedy = f"{start}; if they are to have none: kubectl delete gpunodeplan {' '.join(names[:3])}"
    return Finding(first(names), "no node plugin runs there, and a plan of an earlier one is left", remedy)


def _goes_by_labels(daemon_set: Object) -> bool:
    """Whether the chart's own affinity is in it: a simulated node needs no label, and values may name others."""
    return OWN_LABEL in str(daemon_set.get("spec", {}).get("template", {}).get("spec", {}).get("affinity"))


def _has_gpus(node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    return GKE_LABEL in labels or any(labels.get(label) == "true" for label in GPU_LABELS)
