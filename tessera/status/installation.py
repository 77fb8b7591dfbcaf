"""Checks of ``tessera status`` about API server, GpuNodePlan kind, classes, policies, clocks, configurations (pure)."""

from __future__ import annotations

from controller.explain.sources.selected_gpus import listed
from driver.kube.controller_heartbeat import renewed_at
from driver.kube.get_and_list import minor_version
from driver.model.plan import FENCE
from tessera.status.snapshot import CheckOutput, Listing, Problem, StatusSnapshot, moment_of
from tessera.tables_and_drawings import counted

BOUNDARIES = tuple(f"own-{kind}.gpu.tessera.dev" for kind in ("claims", "events", "fence", "plan", "slices"))
TESTED_KUBERNETES = (34, 37)
"""The oldest and the newest minor version on which Tessera was tested; those of the chart."""
CLOCK_SKEW_SECONDS = 5.0
"""Tolerated difference: more than the resolution of the API server's times and a slow request."""


def api(snapshot: StatusSnapshot) -> CheckOutput:
    oldest, newest = TESTED_KUBERNETES
    version, minor = snapshot.version.get("gitVersion", ""), minor_version(snapshot.version)
    yield f"Kubernetes {version}" + (" (never tested)" if minor is not None and minor > newest else "")
    if minor is not None and minor < oldest:
        yield Problem("API server", f"is {version}", "update it to 1.34 or newer (docs/versions.md)")
    forbidden = [(listing, failure.reason) for listing, failure in snapshot.unreadable.items() if failure.forbidden]
    if forbidden:
        remedy = "use an account that may list them: the ClusterRole is in docs/soundness.md"
        yield Problem(", ".join(listing for listing, _ in forbidden), f"may not be read: {forbidden[0][1]}", remedy)
    for listing, failure in snapshot.unreadable.items():
        if not failure.forbidden:
            yield Problem(listing, f"can't be read: {failure.reason}", "checks that need them are unread; try again")


def is_not_installed(snapshot: StatusSnapshot) -> bool:
    """Whether everything that could show an installation was read and none is found; plans alone are leftovers."""
    of_cluster = Listing.SLICES, Listing.CLAIMS, Listing.CLASSES, Listing.POLICIES, Listing.PLANS
    if not snapshot.has_read(*of_cluster, Listing.PODS, Listing.LEASES) or snapshot.is_in_namespace:
        return False
    return not (snapshot.slices or snapshot.claims or our_classes(snapshot) or _our_policies(snapshot))


def not_installed(snapshot: StatusSnapshot) -> CheckOutput:
    yield "none"
    if plans := snapshot.plans:
        yield f"{counted(len(plans), 'GpuNodePlan')} left of an earlier one (kubectl delete gpunodeplans --all)"
    install = f"helm install tessera deploy/tessera -n {snapshot.namespace} --create-namespace"
    remedy = f"{install} --set image.repository=REGISTRY/tessera (docs/install.md)"
    yield Problem("Tessera", "is not installed here", remedy)


def definition(snapshot: StatusSnapshot) -> CheckOutput:
    if snapshot.plans is None:
        remedy = "install the chart with crd.install=true; the controller and `tessera cordon` need it"
        yield Problem("GpuNodePlan", "the CustomResourceDefinition is not installed", remedy)
    else:
        yield counted(len(snapshot.plans), "plan")


def classes(snapshot: StatusSnapshot) -> CheckOutput:
    ours = our_classes(snapshot)
    yield counted(len(ours), "DeviceClass", "DeviceClasses")
    if not ours:
        message = f"none selects devices of {snapshot.driver}"
        yield Problem("DeviceClasses", message, "install the chart's (values: classes)")
    existing = {item.metadata.name for item in snapshot.classes}
    missing = {name for claim in snapshot.claims for name in claim.class_names} - existing
    for name in sorted(missing):
        yield Problem(f"DeviceClass {name}", "does not exist, but claims name it", "create it again (values: classes)")


def policies(snapshot: StatusSnapshot) -> CheckOutput:
    ours = _our_policies(snapshot)
    specs = [item["spec"] for item in snapshot.bindings]
    denied = {spec.get("policyName") for spec in specs if "Deny" in (spec.get("validationActions") or ())}
    yield counted(len(ours), "admission policy", "admission policies")
    restore = f"install it again: helm upgrade tessera deploy/tessera -n {snapshot.namespace} --reuse-values"
    expected = dict.fromkeys(BOUNDARIES, "a node's token may write objects of other nodes")
    if snapshot.has_controller:
        expected[FENCE] = "a device that is being withdrawn may still be allocated (values: fence.enabled)"
    for name in sorted(expected.keys() - set(ours)):
        yield Problem(name, f"this admission policy is missing: {expected[name]}", restore)
    for name in sorted(set(ours) - denied):
        message = "this admission policy has no binding that denies, so it refuses nothing"
        yield Problem(name, message, restore)


def clocks(snapshot: StatusSnapshot) -> CheckOutput:
    skews = {}
    for lease in (*snapshot.leases.values(), *snapshot.node_leases):
        renewed, written = moment_of(lease["spec"].get("renewTime")), renewed_at(lease)
        if renewed is not None and written is not None:
            holder = str(lease["spec"].get("holderIdentity") or lease["metadata"]["name"])
            skews[holder] = (renewed - written).total_seconds()
    worst = max((abs(seconds) for seconds in skews.values()), default=0.0)
    if skews:
        yield f"within {max(1.0, worst):.0f} s of the API server's ({len(skews)} seen)"
    elif snapshot.has_read(Listing.LEASES, Listing.NODE_LEASES):
        yield "none seen: no Leases"
    for holder, seconds in sorted(skews.items()):
        if abs(seconds) > CLOCK_SKEW_SECONDS:
            direction = "ahead of" if seconds > 0 else "behind"
            message = f"its clock is {abs(seconds):.0f} s {direction} the API server's"
            yield Problem(holder, message, "synchronise it (chrony, NTP)")


def configurations(snapshot: StatusSnapshot) -> CheckOutput:
    """The nodes by configuration, and those that can not have theirs."""
    nodes: dict[str, list[str]] = {}
    for name, plan in sorted((snapshot.plans or {}).items()):
        config = plan.status.config
        if config.name:
            nodes.setdefault(config.name, []).append(name)
        if config.error:
            current = f"configuration {config.name}" if config.name else "the flags of its plugin"
            remedy = "correct nodeConfigs or the label of the Node; the node follows it at once"
            yield Problem(name, f"keeps {current}: {config.error}", remedy)
    yield (
        "; ".join(f"{name}: {listed(configured)}" for name, configured in sorted(nodes.items()))
        or "the same everywhere"
    )


def our_classes(snapshot: StatusSnapshot) -> list[str]:
    """Names of the classes with a selector that mentions the driver."""
    return [item.metadata.name for item in snapshot.classes if snapshot.driver in str(item.spec.selectors)]


def _our_policies(snapshot: StatusSnapshot) -> list[str]:
    names = [str(item["metadata"]["name"]) for item in snapshot.policies]
    return [name for name in names if name.startswith("tessera-") or name.endswith(".gpu.tessera.dev")]
