"""Checks of ``tessera status`` about slices, devices, health, plans and other GPU drivers, by node (pure)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from controller.curation.offer_mode import FIRST_FAST_MINOR_VERSION
from controller.demand.node_eligibility import BLOCKING
from controller.explain.sources.selected_gpus import listed
from driver.kube.client import Object
from driver.kube.get_and_list import minor_version
from driver.kube.slice_types import ResourceSlice, SliceDevice
from driver.kube.types import Claim, GpuNodePlan
from driver.model.device import is_shared
from driver.model.gpu_events_and_conditions import ConditionType
from driver.model.offer import compute_instances
from driver.model.plan import COMPLETE, COUNTERS_FIELD, PUBLISH, NodeConditionType, OfferMode, PlanMode
from driver.model.reported_gpus import FaultKind, GpuReport
from driver.model.shared_memory import SHARING_FIELD
from driver.slices.slice_names import Pool
from kubelet_plugin.coexistence.other_drivers import NodeSigns, find_other_drivers
from kubelet_plugin.health.device_conditions import UNABLE
from tessera.gpu_names_and_faults import GpuName, faults_of, names_of
from tessera.gpu_sources import readable_reports
from tessera.status.snapshot import CheckOutput, Listing, Problem, StatusSnapshot
from tessera.tables_and_drawings import counted

FAULT_TAINTS = ("unavailable", "unhealthy")

SELF_CLEARING: Mapping[str, str] = {
    "unhealthy=stuck": "its claim has ended and it can't be removed: end the process that still uses it, outside of "
    "pods usually dcgm-exporter or nvidia-persistenced (the Event UnprepareFailed of the claim has the lsof that finds "
    "it); it is tried again every 10 s",
    "unhealthy=lost": "a partition of a running claim is gone: make room for it on the GPU, or delete the claim's pod",
    "unhealthy=mps-lost": "the plugin starts an MPS daemon again every 5 s: its log says what fails; see the pods of "
    "DaemonSet tessera-mps on the node",
    "unhealthy=failing": "the Event GpuUnhealthy on the Node says what the hardware answered: end what uses the GPU "
    "outside of Kubernetes (dcgm-exporter, nvidia-persistenced; lsof /dev/nvidia*), or reset it; it is tried again "
    "every 30 s to 10 minutes",
    "unhealthy=needs-reset": "when no pod uses it: stop DCGM and nvidia-persistenced, then nvidia-smi --gpu-reset on "
    "the node, or reboot the node where a reset is not supported; it is used again when NVML reports no action",
    "unhealthy=needs-reboot": "drain and reboot the node; it is used again when NVML reports no action any more",
    "unavailable": "the GPU does not answer: docs/health.md; it is used again as soon as it does",
}
"""Remedies of faults that the node plugin ends by itself as soon as their cause does, without ``tessera uncordon``."""

OF_ONE_DEVICE = {kind.value for kind in ConditionType}
"""Values of taints about one device, not about its GPU."""

PARTITION = re.compile(r"(?P<gpu>gpu-\d+)-mig-.+-(?P<start>\d+)")
"""Name of a partition's device."""

CONDITION_REMEDIES: Mapping[str, str] = {
    NodeConditionType.UNREGISTERED: "check that its kubelet runs and that --kubelet-dir is the kubelet's --root-dir; "
    "its devices are published as soon as the kubelet registers the plugin",
    NodeConditionType.DRIVER_FILES_CHANGED: "restart the pods with GPUs that have run since before the change",
    NodeConditionType.UNABLE: "mend what the message names; the node is used again within 10 s (docs/failures.md)",
}
"""Remedies of conditions of nodes."""

GPU_COUNT = "nvidia.com/gpu.count"
"""Label of NVIDIA's GPU feature discovery (part of the GPU Operator): all GPUs of the node."""

KARPENTER = "karpenter.sh/nodepool"


def slices(snapshot: StatusSnapshot) -> CheckOutput:
    yield counted(len(snapshot.slices), "ResourceSlice")
    for node in snapshot.gpu_nodes:
        pools = [item.spec.pool for item in snapshot.slices_of(node)]
        newest = max((pool.generation for pool in pools), default=0)
        current = [pool for pool in pools if pool.generation == newest]
        expected = current[0].resource_slice_count if current else 0
        if len(current) != expected:
            message = f"its pool is incomplete: {len(current)} of {expected} slices, so the scheduler skips it"
            yield Problem(node, message, "check again in a minute; if it persists, restart the node's plugin")


def devices(snapshot: StatusSnapshot) -> CheckOutput:
    published, taken, offered = _published(snapshot), _taken(snapshot), _offered(snapshot)
    missing = sorted(taken.keys() - published.keys())
    left_out = _left_out(snapshot, missing, offered)
    yield f"{len(taken)} held" + (f" ({len(left_out)} not published: publishHeld auto)" if left_out else "")
    ruled_out = sum(bool(_rules_for(snapshot, *device)) for device in offered)
    yield f"{len(offered)} offered" + (f" ({ruled_out} of them tainted by DeviceTaintRules)" if ruled_out else "")
    if any(device.is_simulated for device in published.values()):
        yield "simulated GPUs among them"
    for name in missing:
        if name not in left_out:
            message = f"of pool {name[0]} is held by claim {taken[name].metadata.key}, but not published"
            yield Problem(name[1], message, "start the node's plugin; until then its memory may be allocated twice")


def health(snapshot: StatusSnapshot) -> CheckOutput:
    """Faults and cordons of GPUs.

    With a controller, an unhealthy GPU that no claim holds is soon in no slice: then the plan's status has its faults.
    """
    unhealthy, cordons = _unhealthy(snapshot), _cordons(snapshot)
    lines = [f"{gpu} ({reason})" if reason else gpu for gpu, reason in sorted(cordons.items())]
    yield f"{len(unhealthy)} unhealthy"
    yield f"{len(lines)} cordoned" + (f": {listed(lines)}" if lines else "")
    for gpu, fault in sorted(unhealthy.items()):
        if fault == f"unhealthy={UNABLE}":  # of all GPUs of the node: its condition is one finding
            continue
        passing = (remedy for start, remedy in SELF_CLEARING.items() if fault.startswith(start))
        remedy = next(passing, f"see docs/health.md; then tessera uncordon {gpu}")
        yield Problem(gpu, f"is {fault}: no new pods get it", remedy)
    for name, plan in (snapshot.plans or {}).items():
        for condition in plan.status.conditions:
            remedy = CONDITION_REMEDIES.get(condition.type, "see docs/failures.md")
            yield Problem(name, f"{condition.message} (since {condition.since})", remedy)
    gpus = {_gpu_of(item, device) for item in snapshot.slices for device in item.spec.devices}
    gpus |= {str(name) for name in names_of(snapshot.slices, _served(snapshot))}
    unusable = unhealthy.keys() | cordons.keys()
    if cordons and gpus and gpus <= unusable and snapshot.has_read(Listing.CLAIMS) and not _offered(snapshot):
        message = "are cordoned or unhealthy: nothing is offered to new pods"
        yield Problem("all GPUs", message, f"tessera uncordon {min(cordons)}")
    yield from _foreign(snapshot)
    yield from _tainted_nodes(snapshot)


def _foreign(snapshot: StatusSnapshot) -> CheckOutput:
    """GPUs with partitions that Tessera did not create and does not offer."""
    for plan in _served(snapshot):
        node, reports = plan.metadata.name, readable_reports(plan)
        starts = {
            (match["gpu"], int(match["start"]))
            for item in snapshot.slices_of(node)
            for device in item.spec.devices
            if (match := PARTITION.fullmatch(device.name))
        }
        cut = [
            f"gpu-{report.number}"
            for report in reports
            if report.foreign
            and report.fault_kind not in {FaultKind.RESERVED, FaultKind.ADOPTED}
            and not any(gpu == f"gpu-{report.number}" and report.foreign >> start & 1 for gpu, start in starts)
        ]
        if cut:
            of = f"{len(cut)} of {counted(len(reports), 'GPU')} ({listed(cut)})"
            message = f"has partitions that Tessera did not create on {of}: what they occupy is not offered"
            remedy = "end them (nvidia-smi mig -dci, then -dgi), or offer them: --existing-partitions publish"
            yield Problem(node, message, remedy)


def _tainted_nodes(snapshot: StatusSnapshot) -> CheckOutput:
    """DeviceTaintRules that taint whatever a node publishes."""
    nodes: dict[tuple[str, ...], list[str]] = {}
    for node in snapshot.gpu_nodes:
        pool = Pool(node, snapshot.driver).name
        names = [device.name for item in snapshot.slices_of(node) for device in item.spec.devices]
        rules = [_rules_for(snapshot, pool, name) for name in names]
        if rules and all(rules):
            nodes.setdefault(tuple(sorted({rule for of_device in rules for rule in of_device})), []).append(node)
    for names_of_rules, tainted in nodes.items():
        message = f"taints all devices of {listed(tainted)}: only claims that tolerate it get one"
        remedy = f"if its reason is over: kubectl delete devicetaintrule {names_of_rules[0]}"
        yield Problem(f"DeviceTaintRule {listed(names_of_rules)}", message, remedy)


def _rules_for(snapshot: StatusSnapshot, pool: str, device: str) -> list[str]:
    """Names of the DeviceTaintRules that keep new claims from a device."""
    return [
        rule.metadata.name
        for rule in snapshot.taint_rules
        if rule.spec.taint.effect in BLOCKING and rule.selects(snapshot.driver, pool, device)
    ]


def mode(snapshot: StatusSnapshot) -> CheckOutput:
    plans = snapshot.plans or {}
    serving = {item.spec.node_name for item in snapshot.slices} - {""}
    standalone = {name for name in serving if name not in plans or plans[name].status.mode is PlanMode.STANDALONE}
    complete = {name for name in serving & plans.keys() if plans[name].status.mode is PlanMode.COMPLETE}
    follow = len(serving - standalone - complete)
    yield f"{counted(follow, 'node follows', 'nodes follow')} the controller"
    yield f"{len(standalone)} standalone"
    if complete:
        yield f"{counted(len(complete), 'node publishes', 'nodes publish')} every device"
    if idle := len(plans.keys() - serving):
        yield f"{counted(idle, 'plan')} of nodes that publish nothing"
    for name in sorted(standalone & plans.keys()) if snapshot.is_led else ():
        remedy = "it follows within two minutes of a heartbeat; after that read the log of its plugin"
        yield Problem(name, "is standalone although a controller is running", remedy)
    for name in sorted(serving & plans.keys()):
        yield from _lagging(name, plans[name])
    yield from _autoscaled(snapshot, serving, complete)


def _autoscaled(snapshot: StatusSnapshot, serving: set[str], complete: set[str]) -> CheckOutput:
    """Nodes that an autoscaler manages and that publish only some of their devices, and labels without effect."""
    labels = {str(node["metadata"]["name"]): node["metadata"].get("labels") or {} for node in snapshot.nodes}
    label = f"{PUBLISH}={COMPLETE}"
    remedy = f"kubectl label node NODE {label}, or set it for the node pool; see docs/autoscaling.md"
    if snapshot.autoscaler is not None and serving and not complete:
        message = "takes the devices that a node publishes for all that it has, but no node publishes every device"
        yield Problem("cluster-autoscaler", message, remedy)
    for name in sorted(serving - complete):
        requested = labels.get(name, {}).get(PUBLISH)
        plan = (snapshot.plans or {}).get(name)
        if requested == COMPLETE and plan is not None and COUNTERS_FIELD in plan.status.dropped:
            message = f"has the label {label} without effect: the API server does not keep {COUNTERS_FIELD}"
            yield Problem(name, message, "remove the label, or upgrade to Kubernetes 1.36 or newer")
        elif requested != COMPLETE and KARPENTER in labels.get(name, {}):
            yield Problem(name, "is managed by Karpenter and does not publish every device", remedy)


def offers(snapshot: StatusSnapshot) -> CheckOutput:
    """What keeps the offers of one GPU apart and why, and which fields of devices the API server does not keep."""
    plans = _served(snapshot)
    dropped = sorted({name for plan in plans for name in plan.status.dropped})
    modes = [(plan.status.mode is PlanMode.PLANNED, plan.spec.offer_mode, plan.status.offer_mode) for plan in plans]
    decided = Counter(requested if is_planned else current for is_planned, requested, current in modes)
    if not decided:
        yield "no plan"
    for offer_mode, count in decided.most_common():
        where = f" on {counted(count, 'node')}" if len(decided) > 1 else ""
        yield f"mode {offer_mode}{where} ({_reason(offer_mode, dropped, snapshot)})"
    if changing := sum(is_planned and requested is not current for is_planned, requested, current in modes):
        yield f"{counted(changing, 'node')} not yet in the mode of the plan"
    if dropped:
        yield f"dropped device fields: {', '.join(dropped)}"
    for plan in plans:
        reports = readable_reports(plan) if SHARING_FIELD in plan.status.dropped else ()
        gpus = [f"gpu-{report.number}" for report in reports if report.shared is not None]
        profiles = {profile.name for report in reports for profile in report.gpu.profiles}
        partitions = sorted(name for name in profiles if compute_instances(name) > 1)
        for flag, names, how in (("--shared", gpus, " by memory"), ("--compute-instances", partitions, "")):
            if names:
                message = f"can't share {listed(names)}{how}: the API server does not keep {SHARING_FIELD}"
                way_out = f"remove {flag}, or upgrade to Kubernetes 1.36 (docs/sharing.md)"
                yield Problem(plan.metadata.name, message, way_out)


def _reason(offer_mode: OfferMode, dropped: Iterable[str], snapshot: StatusSnapshot) -> str:
    minor = minor_version(snapshot.version)
    if offer_mode is OfferMode.COUNTERS:
        return "the scheduler subtracts counters"
    if COUNTERS_FIELD in dropped:
        return f"nodes report that the API server does not keep {COUNTERS_FIELD}"
    if minor is not None and minor < FIRST_FAST_MINOR_VERSION:
        return f"Kubernetes 1.{minor}: its scheduler is slow with counters"
    return "controller.offerMode or --offer-mode"


def _lagging(name: str, plan: GpuNodePlan) -> CheckOutput:
    if behind := plan.versions_behind:
        yield Problem(name, f"is {counted(behind, 'version')} of its plan behind", "restart its plugin if it persists")
    for refused in plan.status.refused[:1]:
        more = f" and {len(plan.status.refused) - 1} more" if len(plan.status.refused) > 1 else ""
        message = f"can't offer what its plan requests: {refused}{more}"
        yield Problem(name, message, "the next plan takes it into account")


def other_drivers(snapshot: StatusSnapshot) -> CheckOutput:
    found: list[str] = []
    for node in snapshot.nodes:
        name = str(node["metadata"]["name"])
        others = [item for item in snapshot.others if item.spec.node_name == name]
        allocatable, labels = node.get("status", {}).get("allocatable"), node["metadata"].get("labels")
        signs = NodeSigns(allocatable or {}, labels or {}, _gpu_uuids(others) if others else None)
        refused = _refused_gpus(snapshot, name)
        for other_driver in find_other_drivers(signs, snapshot.driver) if name in snapshot.gpu_nodes else ():
            found.append(f"{other_driver.name} on {name}")
            both = (other_driver.gpus or frozenset()) & _gpu_uuids(snapshot.slices_of(name))
            if (overlap := _offered_twice(other_driver.count, node, snapshot)) and not both and not refused:
                remedy = "leave exactly its GPUs to it: --exclude-gpus (docs/soundness.md)"
                yield Problem(name, f"{other_driver}: {counted(overlap, 'GPU is', 'GPUs are')} offered twice", remedy)
            if both or refused:
                gpus = counted(len(both) or refused, "GPU is", "GPUs are")
                message = f"{other_driver}: {gpus} {'in its slices and in ours' if both else 'not offered'}"
                yield Problem(name, message, "remove it there, or exclude its GPUs: --exclude-gpus (docs/soundness.md)")
    yield "; ".join(found) or "none"


def _offered_twice(count: int, node: Object, snapshot: StatusSnapshot) -> int:
    """How many of our GPUs must be among the ``count`` of a device plugin, by the node's label for all its GPUs."""
    plan = (snapshot.plans or {}).get(node["metadata"]["name"])
    total = (node["metadata"].get("labels") or {}).get(GPU_COUNT)
    if plan is None or total is None or not total.isdecimal():
        return 0
    ours = sum(report.fault_kind is not FaultKind.RESERVED for report in readable_reports(plan))
    return max(0, min(ours, count + ours - int(total)))


def _published(snapshot: StatusSnapshot) -> dict[tuple[str, str], SliceDevice]:
    """Published devices by pool and name."""
    return {(item.spec.pool.name, device.name): device for item in snapshot.slices for device in item.spec.devices}


def _taken(snapshot: StatusSnapshot) -> dict[tuple[str, str], Claim]:
    """The claim that holds each device, by pool and name; not those of NVIDIA's DRA driver, whose pools have the names
    of nodes: the plan's status has what it prepared before ours took its name."""
    nodes = {node["metadata"]["name"] for node in snapshot.nodes}
    return {
        (result.pool, result.device): claim
        for claim in snapshot.claims
        for result in claim.results
        if result.driver == snapshot.driver and not result.admin_access and result.pool not in nodes
    }


def _offered(snapshot: StatusSnapshot) -> list[tuple[str, str]]:
    """Untainted devices that no claim holds, or that more claims can share."""
    taken, untainted = _taken(snapshot), (name for name, device in _published(snapshot).items() if not device.taints)
    return [(pool, device) for pool, device in untainted if (pool, device) not in taken or is_shared(device)]


def _left_out(
    snapshot: StatusSnapshot, missing: Iterable[tuple[str, str]], offered: Iterable[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Those of ``missing``, held devices in no slice, that nodes leave out because nothing of their GPU is ``offered``.

    The plan of the node must name them as held: only then are they published again together with the next offer.
    """
    held = {
        Pool(name, snapshot.driver).name: plan.spec.held_devices
        for name, plan in (snapshot.plans or {}).items()
        if plan.spec.leaves_out_held and plan.status.mode is PlanMode.PLANNED
    }
    offering = {(pool, _gpu_part(device)) for pool, device in offered}
    return {
        (pool, device)
        for pool, device in missing
        if device in held.get(pool, ()) and (pool, _gpu_part(device)) not in offering
    }


def _gpu_uuids(slices: Iterable[ResourceSlice]) -> frozenset[str]:
    return frozenset(uuid for item in slices for uuid in item.spec.gpu_uuids)


def _refused_gpus(snapshot: StatusSnapshot, node: str) -> int:
    """Number of GPUs that the plugin reserves for other drivers, by its plan; without a plan 1 if no device of the node
    can be allocated and none is held."""
    plan = (snapshot.plans or {}).get(node)
    if plan is not None and plan.status.inventory:
        return sum(state.fault_kind is FaultKind.RESERVED for state in readable_reports(plan))
    devices = [device for item in snapshot.slices_of(node) for device in item.spec.devices]
    pool = Pool(node, snapshot.driver).name
    taken = any(result.pool == pool for claim in snapshot.claims for result in claim.results)
    return int(not taken and all(device.taints for device in devices))


def _unhealthy(snapshot: StatusSnapshot) -> dict[str, str]:
    """The fault of each unhealthy GPU or partition: by taints, and by the plan for GPUs that are in no slice."""
    unhealthy: dict[str, str] = {}
    for item in snapshot.slices:
        for device in item.spec.devices:
            for taint in device.taints:
                key = taint.key.partition("/")[2]
                if key in FAULT_TAINTS:
                    where = _gpu_of(item, device)
                    if taint.value in OF_ONE_DEVICE:
                        where = f"{item.spec.node_name}/{device.name}"
                    unhealthy.setdefault(where, "=".join(filter(None, (key, taint.value))))
    for plan in _served(snapshot):
        for state in readable_reports(plan):
            name = GpuName(plan.metadata.name, state.number, state.gpu.uuid)
            if fault := _reported_fault(name, state, plan):
                unhealthy.setdefault(str(name), fault)
    return unhealthy


def _reported_fault(name: GpuName, state: GpuReport, plan: GpuNodePlan) -> str:
    """The fault that the plan's status has of a GPU; empty if it is cordoned or reserved for another driver."""
    if state.fault_kind is FaultKind.UNHEALTHY:
        return f"unhealthy={state.condition}"
    if state.fault_kind is FaultKind.UNAVAILABLE:
        return f"unavailable: {state.fault}"
    return next((f"unhealthy={reported.value}" for reported in faults_of(name, (), plan)), "")


def _cordons(snapshot: StatusSnapshot) -> dict[str, str]:
    """The reason of each cordoned GPU, by plans."""
    plans = snapshot.plans or {}
    names = {(name.node, name.uuid): str(name) for name in names_of(snapshot.slices, plans.values())}
    return {
        names.get((node, uuid), f"{node}/{uuid}"): reason
        for node, plan in plans.items()
        for uuid, reason in plan.spec.cordons.items()
    }


def _served(snapshot: StatusSnapshot) -> list[GpuNodePlan]:
    """Plans of nodes that publish; those of other nodes are outdated."""
    return [plan for name, plan in (snapshot.plans or {}).items() if snapshot.slices_of(name)]


def _gpu_of(item: ResourceSlice, device: SliceDevice) -> str:
    return f"{item.spec.node_name}/{_gpu_part(device.name)}"


def _gpu_part(device: str) -> str:
    """The part of a device's name that names its GPU: gpu-N."""
    return "-".join(device.split("-")[:2])
