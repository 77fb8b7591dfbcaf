"""Checks of ``tessera status`` about the cluster and the controller (pure)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version

from driver.kube.heartbeat import HEARTBEAT, LEAVING, SILENT_S
from driver.kube.transport import Object
from tessera.removal import taking_back
from tessera.status_finding import Finding, Told, some
from tessera.status_picture import CONTROLLER, CONTROLLER_LEASE, NODE, Picture, What, read_time, written_at
from tessera.status_pods import tell_pods

BOUNDARIES = tuple(f"own-{what}.gpu.tessera.dev" for what in ("claims", "events", "fence", "plan", "slices"))
OLDEST = (1, 34)
SKEW_S = 5.0
"""More than the resolution of the API server's times and a slow request."""


def api(picture: Picture) -> Told:
    yield f"Kubernetes {picture.version}"
    found = re.match(r"v(\d+)\.(\d+)", picture.version)
    if found and (int(found[1]), int(found[2])) < OLDEST:
        yield Finding("API server", f"is {picture.version}", "update it to 1.34 or newer: resource.k8s.io/v1 is needed")
    forbidden = [(what, refused.why) for what, refused in picture.unreadable.items() if refused.forbidden]
    if forbidden:
        remedy = "use an account that may list them: the ClusterRole is in docs/soundness.md"
        yield Finding(", ".join(what for what, _ in forbidden), f"may not be read: {forbidden[0][1]}", remedy)
    for what, refused in picture.unreadable.items():
        if not refused.forbidden:
            yield Finding(what, f"can't be read: {refused.why}", "checks that need them are unread; try again")


def is_nowhere(picture: Picture) -> bool:
    """Whether all was read that would show anything of Tessera's, and nothing does; a plan alone is a thing left."""
    seen = (What.SLICES, What.CLAIMS, What.CLASSES, What.POLICIES, What.PODS, What.LEASES, What.PLANS)
    if not picture.has_read(*seen) or picture.is_in_namespace:
        return False
    return not (picture.slices or picture.claims or _our_classes(picture) or _our_policies(picture))


def not_installed(picture: Picture) -> Told:
    yield "none"
    if plans := picture.plans:
        yield f"{some(len(plans), 'GpuNodePlan')} of an earlier one left (kubectl delete gpunodeplans --all)"
    remedy = f"helm install tessera deploy/tessera -n {picture.namespace} --create-namespace (docs/install.md)"
    yield Finding("Tessera", "is not installed here", remedy)


def definition(picture: Picture) -> Told:
    if picture.plans is None:
        remedy = "install the chart with crd.install=true; without it no controller and no cordon works"
        yield Finding("GpuNodePlan", "the cluster does not know this kind", remedy)
    else:
        yield some(len(picture.plans), "plan")


def classes(picture: Picture) -> Told:
    ours = _our_classes(picture)
    yield some(len(ours), "DeviceClass", "DeviceClasses")
    if not ours:
        yield Finding(
            "DeviceClasses", f"none selects devices of {picture.driver}", "install the chart's (values: classes)"
        )
    known = {item["metadata"]["name"] for item in picture.classes}
    missing = {name for claim in picture.claims for name in _classes_asked(claim)} - known
    for name in sorted(missing):
        yield Finding(f"DeviceClass {name}", "is gone, and claims name it", "create it again (values: classes)")


def policies(picture: Picture) -> Told:
    ours = _our_policies(picture)
    specs = [item["spec"] for item in picture.bindings]
    denied = {spec.get("policyName") for spec in specs if "Deny" in (spec.get("validationActions") or ())}
    yield some(len(ours), "admission policy", "admission policies")
    for name in sorted(set(BOUNDARIES) - set(ours)):
        remedy = "helm upgrade: without it a node's token may write about other nodes"
        yield Finding(name, "this admission policy is missing", remedy)
    for name in sorted(set(ours) - denied):
        message = "this admission policy has no binding that denies, so it refuses nothing"
        yield Finding(name, message, "helm upgrade restores it")


def controller(picture: Picture) -> Told:
    yield from _uninstalling(picture)
    if picture.has_read(What.LEASES):
        yield from _leader(picture)
    yield from tell_pods(picture, CONTROLLER)


def _leader(picture: Picture) -> Told:
    lease = picture.leases.get(CONTROLLER_LEASE)
    holder = (lease or {}).get("spec", {}).get("holderIdentity")
    age = age_of(picture, picture.leases.get(HEARTBEAT))
    alone = "every node offers whatever fits"
    log = f"kubectl -n {picture.namespace} logs deploy/{CONTROLLER}"
    if lease is None and not picture.pods_of(CONTROLLER):
        yield f"none: {alone}" if picture.has_read(What.PODS) else "no Lease of one"
        return
    yield f"leader {holder}" if holder else "no leader"
    if not holder:
        yield Finding("controller", f"nobody leads; {alone}", f"start it, or read its log: {log}")
    elif age is None or age > SILENT_S:
        said = "has shown no sign of life yet" if age is None else f"showed the last sign of life {age:.0f} s ago"
        yield Finding("controller", f"{holder} {said}; {alone}", f"it can't decide, or is gone; its log: {log}")
    else:
        yield f"heartbeat {age:.0f} s ago"


def _uninstalling(picture: Picture) -> Told:
    """It may have come to no end, and nodes go on by what they were told."""
    if LEAVING in (picture.leases.get(HEARTBEAT, {}).get("metadata", {}).get("annotations") or {}):
        message = "nodes were told that Tessera is being uninstalled, and offer nothing"
        remedy = f"let `tessera uninstall` end (helm uninstall), or take it back: {taking_back(picture.namespace)}"
        yield Finding(HEARTBEAT, message, remedy)


def versions(picture: Picture) -> Told:
    images = Counter(
        str(container.get("image"))
        for account in (NODE, CONTROLLER)
        for pod in picture.pods_of(account)
        for container in pod["spec"].get("containers", ())[:1]
    )
    yield f"this command {version('tessera-dra')}"
    if images:
        yield ", ".join(f"{image} x{count}" for image, count in images.items())
    elif picture.has_read(What.PODS):
        yield "no pods"
    if len(images) > 1:
        yield Finding("images", f"{len(images)} versions run at once", "let the rollout end: kubectl rollout status")


def clocks(picture: Picture) -> Told:
    skews = {}
    for lease in (*picture.leases.values(), *picture.node_leases):
        renewed, written = read_time(lease["spec"].get("renewTime")), written_at(lease)
        if renewed is not None and written is not None:
            who = str(lease["spec"].get("holderIdentity") or lease["metadata"]["name"])
            skews[who] = (renewed - written).total_seconds()
    worst = max((abs(seconds) for seconds in skews.values()), default=0.0)
    if skews:
        yield f"within {max(1.0, worst):.0f} s of the API server's ({len(skews)} seen)"
    elif picture.has_read(What.LEASES, What.NODE_LEASES):
        yield "none seen: no Leases"
    for who, seconds in sorted(skews.items()):
        if abs(seconds) > SKEW_S:
            word = "ahead of" if seconds > 0 else "behind"
            yield Finding(
                who, f"its clock is {abs(seconds):.0f} s {word} the API server's", "synchronise it (chrony, NTP)"
            )


def age_of(picture: Picture, lease: Object | None) -> float | None:
    """Seconds since a Lease was renewed, by the API server's clock."""
    written = None if lease is None else written_at(lease)
    return None if written is None else (picture.now - written).total_seconds()


def _classes_asked(claim: Object) -> Iterator[str]:
    for request in claim["spec"].get("devices", {}).get("requests") or ():
        for one in (request.get("exactly"), *(request.get("firstAvailable") or ())):
            if one and one.get("deviceClassName"):
                yield str(one["deviceClassName"])


def _our_classes(picture: Picture) -> list[str]:
    return [item["metadata"]["name"] for item in picture.classes if picture.driver in str(item["spec"])]


def _our_policies(picture: Picture) -> list[str]:
    return [item["metadata"]["name"] for item in picture.policies if _is_policy(item["metadata"]["name"])]


def _is_policy(name: str) -> bool:
    return name.startswith("tessera-") or name.endswith(".gpu.tessera.dev")
