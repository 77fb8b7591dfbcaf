"""Checks of ``tessera status`` about the controller, the node plugins, their pods, images and directories (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from controller.app import LEASE
from controller.explain.sources.selected_gpus import listed
from driver.kube.client import Object
from driver.kube.controller_heartbeat import HEARTBEAT, LEAVING, is_silent
from kubelet_plugin.status.events import EventReason
from tessera.cluster_options import cancel_uninstall_command, package_version
from tessera.status.snapshot import CONTROLLER, NODE_PLUGIN, CheckOutput, Listing, Problem, StatusSnapshot, condition_of
from tessera.tables_and_drawings import counted

OWN_LABEL = "gpu.tessera.dev/node"
GPU_LABELS = (
    OWN_LABEL,
    "nvidia.com/gpu.present",
    *(f"feature.node.kubernetes.io/pci-{vendor}.present" for vendor in ("10de", "0302_10de", "0300_10de")),
)
"""The chart's node plugin runs on nodes where any of these is true, or where GKE_LABEL is set."""
GKE_LABEL = "cloud.google.com/gke-accelerator"
KUBELET_SILENT_SECONDS = 50.0
"""Age of a kubelet's Lease at which Kubernetes marks its node not ready (--node-monitor-grace-period)."""

REVISION = "controller-revision-hash"
"""Label of the pods of a DaemonSet, and of its ControllerRevisions: the version of its template."""

LABEL_NODES = f"kubectl label node NODE {OWN_LABEL}=true (or install Node Feature Discovery)"
SINCE_SILENCE = "30 to 90 s after the last heartbeat"
THE_SET = f"the DaemonSet {NODE_PLUGIN}"

UNWRITABLE: Mapping[str, str] = {
    EventReason.STATE_UNWRITABLE: EventReason.STATE_WRITABLE,
    EventReason.CDI_UNWRITABLE: EventReason.CDI_WRITABLE,
}
"""The Event of each minute in which a directory can't be written, and the Event that ends it."""


def controller(snapshot: StatusSnapshot) -> CheckOutput:
    if LEAVING in (snapshot.leases.get(HEARTBEAT, {}).get("metadata", {}).get("annotations") or {}):
        message = "an uninstallation has begun, and nodes offer nothing"
        cancel = cancel_uninstall_command(snapshot.namespace)
        yield Problem(HEARTBEAT, message, f"complete `tessera uninstall` (helm uninstall), or cancel it: {cancel}")
    if snapshot.has_read(Listing.LEASES):
        yield from _leader(snapshot)
    yield from pods_ready(snapshot, CONTROLLER)


def _leader(snapshot: StatusSnapshot) -> CheckOutput:
    lease = snapshot.leases.get(LEASE)
    holder = (lease or {}).get("spec", {}).get("holderIdentity")
    age = snapshot.age_of(snapshot.leases.get(HEARTBEAT))
    standalone = "every node offers whatever fits"
    log = f"kubectl -n {snapshot.namespace} logs deploy/{CONTROLLER}"
    if lease is None and not snapshot.pods_of(CONTROLLER):
        yield f"none: {standalone}" if snapshot.has_read(Listing.PODS) else "no Lease of one"
        return
    yield f"leader {holder}" if holder else "no leader"
    if not holder:
        message = f"no replica is the leader; {standalone} {SINCE_SILENCE}"
        yield Problem("controller", message, f"start it, or read its log: {log}")
    elif is_silent(age):
        since = "has not sent a heartbeat yet" if age is None else f"sent its last heartbeat {age:.0f} s ago"
        message = f"{holder} {since}; {standalone} {SINCE_SILENCE}"
        yield Problem("controller", message, f"it is blocked or gone; its log: {log}")
    else:
        yield f"heartbeat {age:.0f} s ago"


def versions(snapshot: StatusSnapshot) -> CheckOutput:
    images = Counter(
        str(container.get("image"))
        for account in (NODE_PLUGIN, CONTROLLER)
        for pod in snapshot.pods_of(account)
        for container in pod["spec"].get("containers", ())[:1]
    )
    yield f"this command {package_version('tessera-dra')}"
    if images:
        yield ", ".join(f"{image} x{count}" for image, count in images.items())
    elif snapshot.has_read(Listing.PODS):
        yield "no pods"
    if len(images) > 1:
        yield Problem("images", f"{len(images)} versions run at once", "let the rollout end: kubectl rollout status")


def rollout(snapshot: StatusSnapshot) -> CheckOutput:
    """Whether all pods are those that DaemonSet and Deployment describe now, and have been ready for a while."""
    daemon_set, deployment = snapshot.daemon_set, snapshot.deployment
    pods = [*snapshot.pods_of(NODE_PLUGIN), *snapshot.pods_of(CONTROLLER)]
    if not (daemon_set or deployment or pods or snapshot.has_controller):
        yield "none"
        yield Problem("Tessera", "is not installed here", "docs/install.md; or name its namespace: --namespace")
        return
    if daemon_set is None:
        yield f"no DaemonSet {NODE_PLUGIN}"
    else:
        nodes = daemon_set.get("status", {}).get("desiredNumberScheduled", 0)
        yield from _rolled_out(snapshot, daemon_set, nodes, ("updatedNumberScheduled", "numberAvailable"))
        yield from _outdated(snapshot)
    if deployment is None:
        yield f"no Deployment {CONTROLLER}"
    else:
        replicas = deployment.get("spec", {}).get("replicas", 1)
        yield from _rolled_out(snapshot, deployment, replicas, ("updatedReplicas", "availableReplicas"))
    yield from (part for part in pods_ready(snapshot, NODE_PLUGIN) if isinstance(part, Problem))
    if ending := [pod["metadata"]["name"] for pod in pods if pod["metadata"].get("deletionTimestamp")]:
        remedy = f"it ends within 30 s; after that: kubectl -n {snapshot.namespace} describe pod {ending[0]}"
        yield Problem(f"pod {listed(ending)}", "is ending", remedy)


def _rolled_out(snapshot: StatusSnapshot, workload: Object, pods: int, fields: tuple[str, str]) -> CheckOutput:
    """How many of its ``pods`` are new and available, by two ``fields`` of its status."""
    metadata, status = workload["metadata"], workload.get("status", {})
    updated, available = (status.get(field, 0) for field in fields)
    counts = f"{updated} of {pods} updated, {available} available"
    yield f"{metadata['name']}: {counts}"
    if status.get("observedGeneration", 0) < metadata.get("generation", 0):
        message = "its last change has not been noticed yet"
        yield Problem(metadata["name"], message, "check that kube-controller-manager runs")
    elif min(updated, available) < pods:
        remedy = f"see the pods that are not ready: kubectl -n {snapshot.namespace} get pods -o wide"
        yield Problem(metadata["name"], f"is not rolled out: {counts}", remedy)


def _outdated(snapshot: StatusSnapshot) -> CheckOutput:
    """The nodes with a plugin of an earlier version of the DaemonSet; none if its versions can't be read."""
    newest = max(snapshot.revisions, key=lambda revision: int(revision["revision"]), default=None)
    outdated = {
        str(pod["spec"].get("nodeName"))
        for pod in snapshot.pods_of(NODE_PLUGIN)
        if newest is not None and _revision(pod) != _revision(newest)
    }
    if outdated:
        remedy = "they are replaced in turn (nodePlugin.updateStrategy); a new pod that is not ready stops the rollout"
        yield Problem(listed(sorted(outdated)), "still has a plugin of an earlier version", remedy)


def _revision(item: Object) -> str | None:
    return (item["metadata"].get("labels") or {}).get(REVISION)


def plugins(snapshot: StatusSnapshot) -> CheckOutput:
    names = snapshot.gpu_nodes
    if snapshot.has_read(Listing.SLICES):
        yield f"{sum(bool(snapshot.slices_of(name)) for name in names)} of {len(names)} nodes publish"
    yield from pods_ready(snapshot, NODE_PLUGIN)
    if snapshot.has_read(Listing.SLICES, Listing.PODS) and not snapshot.slices and not snapshot.pods_of(NODE_PLUGIN):
        yield _no_plugin(snapshot)
    if snapshot.has_read(Listing.NODES):
        there = {item["metadata"]["name"] for item in snapshot.nodes}
        yield from _not_ready(snapshot)
        for name in names:
            if name not in there:
                message = "has slices or a plan, but no Node of this name exists"
                yield Problem(name, message, f"register the node, or: kubectl delete gpunodeplan {name}")
        if snapshot.has_read(Listing.SLICES):
            yield from _silent(snapshot)


def _not_ready(snapshot: StatusSnapshot) -> CheckOutput:
    """GPU nodes whose kubelet is not ready or has stopped: pods can't use their devices."""
    ages = {lease["metadata"]["name"]: snapshot.age_of(lease) or 0.0 for lease in snapshot.node_leases}
    for node in snapshot.nodes:
        name, ready = str(node["metadata"]["name"]), condition_of(node, "Ready")
        if name not in snapshot.gpu_nodes:
            continue
        remedy = f"no new pod starts there; kubectl describe node {name}"
        if ready is not None and ready.get("status") != "True":
            why = ready.get("message") or ready.get("reason") or "no reason is given"
            yield Problem(name, f"its Node is not ready: {why}", remedy)
        elif (age := ages.get(name, 0.0)) > KUBELET_SILENT_SECONDS:
            yield Problem(name, f"its Node is not ready: its kubelet has not renewed its Lease for {age:.0f} s", remedy)


def _no_plugin(snapshot: StatusSnapshot) -> Problem:
    daemon_set = snapshot.daemon_set
    describe = f"kubectl -n {snapshot.namespace} describe daemonset {NODE_PLUGIN}"
    if daemon_set is None:
        remedy = f"{LABEL_NODES}; check that the DaemonSet {NODE_PLUGIN} exists (values: nodePlugin.enabled)"
        return Problem("nodes", "publish no GPU, and no pod of a node plugin exists", remedy)
    if wanted := daemon_set.get("status", {}).get("desiredNumberScheduled", 0):
        return Problem(THE_SET, f"should run on {wanted}, but has no pod", describe)
    labelled = any(_has_gpus(node) for node in snapshot.nodes)
    if _goes_by_labels(daemon_set) and snapshot.has_read(Listing.NODES) and not labelled:
        return Problem(THE_SET, "matches no node: no node has a label of NVIDIA GPUs", LABEL_NODES)
    return Problem(THE_SET, "matches no node: its node selector, affinity or tolerations exclude all", describe)


def _silent(snapshot: StatusSnapshot) -> CheckOutput:
    """Nodes that should publish and don't; those that only have an old plan share one finding."""
    with_old_plan = []
    for node in snapshot.nodes:
        name = node["metadata"]["name"]
        if snapshot.slices_of(name) or not (name in snapshot.gpu_nodes or _has_gpus(node)):
            continue
        pods = [pod["metadata"]["name"] for pod in snapshot.pods_of(NODE_PLUGIN) if pod["spec"].get("nodeName") == name]
        if pods:
            yield Problem(name, "publishes nothing", f"kubectl -n {snapshot.namespace} logs {pods[0]}")
        elif not snapshot.has_read(Listing.PODS):
            remedy = f"check that its plugin runs and is ready: kubectl -n {snapshot.namespace} get pods -o wide"
            yield Problem(name, "publishes nothing", remedy)
        elif _has_gpus(node):
            yield Problem(name, "publishes nothing: no pod of a node plugin runs there", _start(snapshot))
        else:
            with_old_plan.append(name)
    if with_old_plan:
        by_label = snapshot.daemon_set is not None and _goes_by_labels(snapshot.daemon_set)
        start = f"kubectl label node {with_old_plan[0]} {OWN_LABEL}=true" if by_label else _start(snapshot)
        remedy = f"{start}; if no plugin should run there: kubectl delete gpunodeplan {' '.join(with_old_plan[:3])}"
        message = "no node plugin runs there, but a plan of an earlier one is left"
        yield Problem(listed(with_old_plan), message, remedy)


def _start(snapshot: StatusSnapshot) -> str:
    if snapshot.daemon_set is None:
        return "start it there, as a pod or as a process (docs/install.md)"
    return f"check taints and the node selector: kubectl -n {snapshot.namespace} describe daemonset {NODE_PLUGIN}"


def _goes_by_labels(daemon_set: Object) -> bool:
    """Whether it has the chart's own affinity: simulated nodes need no label, and values may replace it."""
    return OWN_LABEL in str(daemon_set.get("spec", {}).get("template", {}).get("spec", {}).get("affinity"))


def _has_gpus(node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    return GKE_LABEL in labels or any(labels.get(label) == "true" for label in GPU_LABELS)


def pods_ready(snapshot: StatusSnapshot, account: str) -> CheckOutput:
    """How many pods of a process are ready; a finding for each that is not."""
    pods = snapshot.pods_of(account)
    ready = [pod for pod in pods if (condition_of(pod, "Ready") or {}).get("status") == "True"]
    if pods:
        yield f"{len(ready)} of {counted(len(pods), 'pod')} ready"
    yield from (_pod_finding(pod, snapshot.namespace) for pod in pods if pod not in ready)


def _pod_finding(pod: Object, namespace: str) -> Problem:
    name, containers = pod["metadata"]["name"], pod.get("status", {}).get("containerStatuses") or ()
    states = [container.get("state") or {} for container in containers]
    restarts = sum(int(container.get("restartCount", 0)) for container in containers)
    reasons = [str(state["waiting"].get("reason")) for state in states if "waiting" in state]
    remedy = f"kubectl -n {namespace} describe pod {name}"
    if restarts:
        reasons.append(f"restarted {counted(restarts, 'time')}")
        remedy = f"read its last log: kubectl -n {namespace} logs {name} --previous"
    elif states and all("running" in state for state in states):
        remedy += "; its /readyz?verbose lists missing conditions"
    message = f"is not ready on {pod['spec'].get('nodeName', 'no node')}"
    return Problem(f"pod {name}", ": ".join(filter(None, (message, ", ".join(reasons)))), remedy)


def directories(snapshot: StatusSnapshot) -> CheckOutput:
    """Whether plugins can write their state and CDI directories, and whether one had to be created again."""
    events = sorted(snapshot.node_events, key=lambda event: event.last_timestamp or "")
    latest = {(event.involved_object.name, event.reason): event for event in events}
    times = {key: event.last_timestamp or "" for key, event in latest.items()}
    recent = [key for key, event in sorted(latest.items()) if snapshot.is_recent(event)]
    unwritable = [
        (node, reason)
        for node, reason in recent
        if reason in UNWRITABLE and times.get((node, UNWRITABLE[reason]), "") < times[node, reason]
    ]
    many = counted(len(unwritable), "directory", "directories")
    yield f"{many} not writable" if unwritable else "all writable"
    for key in unwritable:
        remedy = "free space on that file system, or mount it read-write; no pod with a claim starts there until then"
        yield Problem(key[0], latest[key].message, remedy)
    for node, reason in recent:
        if reason == EventReason.CDI_RESTORED:
            yield Problem(
                node, latest[node, reason].message, "find out what removes it; running pods were not affected"
            )
