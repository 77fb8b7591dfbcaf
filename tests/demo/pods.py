"""The pods of the demo: making them, waiting for them, looking at them. No output, no opinion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from driver.errors import RecoverableError
from tests.demo.nodes import SHARES, slices
from tests.demo.picture import Holding, Object, holdings
from tests.demo.promises import DEFAULT_INTERVAL, Group, Seen, Workload
from tests.demo.resets import SETTLED_S
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.plugin import DRIVER, PluginProcess
from tests.support.workloads import CLAIMS, NAMESPACE, PODS, TEMPLATES, request

EVERYBODY = (
    Group("train", "gpu-training", "gpu", 4),
    Group("infer", "gpu-inference-1g-10gb", "mig", 20, profile="1g.10gb"),
    Group("note", "gpu-dev", "share", 30, shares=SHARES, interval="Short"),
)
NOTEBOOK_GIB = 7
BY_MEMORY = (*EVERYBODY[:2], Group("nb", "gpu-shared", "shared", 30, gib=NOTEBOOK_GIB))
"""The same workloads, but notebooks ask for memory."""

LABEL = "tessera-demo=workloads"

RUNNING_S = 300.0
"""The node authorizer may refuse the kubelet's first read of a fresh claim; the retry takes up to a minute."""
GONE_S = 180.0

END = "that is all"
LOOK = f"env | grep ^TESSERA_; find /dev -name 'nvidia*' -type c; echo {END}; trap exit TERM; sleep 100000 & wait"


class PromiseError(RecoverableError):
    """Something is not as it was promised; the message says what."""


def require(faults: Sequence[str]) -> None:
    """Raises PromiseError with all of ``faults``, if there are any."""
    if faults:
        raise PromiseError("not as promised:\n  " + "\n  ".join(faults))


def create(cluster: Cluster, groups: Iterable[Group]) -> None:
    """A claim template a group, and its pods."""
    for group in groups:
        cluster.api.post(TEMPLATES, _template(group))
        for pod in group.pods:
            cluster.api.post(PODS, _pod(pod, group.prefix))


def wait_running(cluster: Cluster, count: int, tell: Callable[[str], None] = lambda _: None) -> None:
    """Until ``count`` pods run at once; ``tell`` hears "37 of 54 run". DeadlineError says what others wait for."""

    def all_run() -> bool:
        pods = _pods(cluster)
        waiting = [pod for pod in pods if pod["status"].get("phase") != "Running"]
        tell(f"{len(pods) - len(waiting)} of {count} run")
        if waiting or len(pods) != count:
            reasons = "; ".join(_why(pod) for pod in waiting[:3])
            raise PromiseError(f"{len(pods) - len(waiting)} of {count} pods run; waiting: {reasons}")
        return True

    wait_for(all_run, RUNNING_S, f"{count} pods at once", interval_s=0.25)


def delete(cluster: Cluster, tell: Callable[[str], None] = lambda _: None) -> None:
    """Delete pods and templates; returns when pods and their claims are gone. ``tell`` hears "17 pods left"."""
    for path in (PODS, TEMPLATES):
        cluster.api.request("DELETE", f"{path}?labelSelector={LABEL}")

    def gone() -> bool:
        pods, claims = len(_pods(cluster)), len(_claims(cluster))
        tell(f"{pods} pods left")
        if pods or claims:
            raise PromiseError(f"{pods} pods and {claims} claims are left")
        return True

    wait_for(gone, GONE_S, "pods and claims gone", interval_s=0.25)


def held(cluster: Cluster, plugins: Iterable[PluginProcess]) -> list[Holding]:
    """Which pod has which device, by the API. Raises PromiseError for one that is held and not published."""
    try:
        return holdings(slices(plugins), _claims(cluster))
    except KeyError as error:
        raise PromiseError(f"pool and device {error} are allocated, but in no slice") from error


def look(cluster: Cluster, plugins: Sequence[PluginProcess], groups: Iterable[Group]) -> list[Workload]:
    """Every pod of ``groups`` as it is: by the API, by what its container printed, by the hardware."""
    holding_of = {holding.pod: holding for holding in held(cluster, plugins)}
    partitions = {
        (plugin.node.name, partition["holder"]): partition for plugin in plugins for partition in plugin.partitions()
    }
    found = []
    for group in groups:
        for pod in group.pods:
            holding = holding_of.get(pod)
            if holding is None:
                raise PromiseError(f"pod {pod} runs, but no claim of it is allocated; it was promised a {group.type}")
            node = holding.device.node
            partition = partitions.get((node, f"{NAMESPACE}/{holding.claim}"))
            found.append(Workload(group, holding, _inside(cluster, node, pod), partition))
    return found


def _template(group: Group) -> dict[str, Any]:
    asked = request(group.device_class)
    if group.gib:
        asked["exactly"]["capacity"] = {"requests": {"memory": f"{group.gib}Gi"}}
    devices: dict[str, Any] = {"requests": [asked]}
    if group.interval != DEFAULT_INTERVAL:
        sharing = {"strategy": "TimeSlicing", "timeSlicing": {"interval": group.interval}}
        parameters = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "ShareConfig", "sharing": sharing}
        devices["config"] = [{"opaque": {"driver": DRIVER, "parameters": parameters}}]
    return {
        "metadata": _metadata(group.prefix),
        "spec": {"metadata": {"labels": _labels()}, "spec": {"devices": devices}},
    }


def _pod(name: str, template: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": "docker.io/tessera/busybox:local",
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", LOOK],
        "resources": {"claims": [{"name": "gpu"}]},
    }
    spec = {
        "hostNetwork": True,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template}],
    }
    return {"metadata": _metadata(name), "spec": spec}


def _metadata(name: str) -> dict[str, Any]:
    return {"name": name, "labels": _labels()}


def _labels() -> dict[str, str]:
    return dict([LABEL.split("=")])


def _pods(cluster: Cluster) -> list[dict[str, Any]]:
    return list(cluster.api.get(f"{PODS}?labelSelector={LABEL}")["items"])


def _claims(cluster: Cluster) -> list[dict[str, Any]]:
    return list(cluster.api.get(f"{CLAIMS}?labelSelector={LABEL}")["items"])


def _why(pod: Object) -> str:
    """What a pod that does not run waits for, as the scheduler or the kubelet says it."""
    status = pod["status"]
    said = [each.get("message", "") for each in status.get("conditions", ()) if each["status"] == "False"]
    states = [each["state"].get("waiting", {}) for each in status.get("containerStatuses", ())]
    said += [state.get("message", state.get("reason", "")) for state in states]
    return f"{pod['metadata']['name']} ({status.get('phase')}): {next(filter(None, said), 'no reason given')}"


def _inside(cluster: Cluster, node: str, pod: str) -> Seen:
    """What the container printed when it started."""

    def printed() -> str:
        text = cluster.node(node).read_log(pod)
        return text if END in text else ""

    return Seen.parse(wait_for(printed, SETTLED_S, f"what {pod} printed on {node}"))
