"""What ``tessera status`` says of the pods of a process (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from driver.kube.transport import Object
from tessera.status_finding import Finding, Told, some
from tessera.status_picture import Picture


def tell_pods(picture: Picture, account: str) -> Told:
    """How many are ready, and where to look for why one is not."""
    pods = picture.pods_of(account)
    ready = [pod for pod in pods if _is_ready(pod)]
    if pods:
        yield f"{len(ready)} of {some(len(pods), 'pod')} ready"
    for pod in pods:
        if pod not in ready:
            where = pod["spec"].get("nodeName", "no node")
            about = f"pod {pod['metadata']['name']}"
            yield Finding(about, f"is not ready on {where}{_why(pod)}", _remedy(pod, picture.namespace))


def _remedy(pod: Object, namespace: str) -> str:
    name = pod["metadata"]["name"]
    if _restarts(pod):
        return f"read why it ended: kubectl -n {namespace} logs {name} --previous"
    describe = f"kubectl -n {namespace} describe pod {name}"
    return f"{describe}; its /readyz?verbose names what is missing" if _runs(pod) else describe


def _is_ready(pod: Object) -> bool:
    conditions: Sequence[Any] = pod.get("status", {}).get("conditions") or ()
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def _why(pod: Object) -> str:
    reasons = [str(state["waiting"].get("reason")) for state in _states(pod) if "waiting" in state]
    if restarts := _restarts(pod):
        reasons.append(f"started again {some(restarts, 'time')}")
    return f": {', '.join(reasons)}" if reasons else ""


def _restarts(pod: Object) -> int:
    return sum(int(entry.get("restartCount", 0)) for entry in _containers(pod))


def _runs(pod: Object) -> bool:
    states = _states(pod)
    return bool(states) and all("running" in state for state in states)


def _states(pod: Object) -> list[Mapping[str, Any]]:
    return [entry.get("state") or {} for entry in _containers(pod)]


def _containers(pod: Object) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = pod.get("status", {}).get("containerStatuses") or ()
    return found
