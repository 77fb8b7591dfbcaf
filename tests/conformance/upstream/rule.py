"""Whether a scheduler gives out anything of a pool in which a held device is not published."""

from __future__ import annotations

from tests.bench.kubelet import allocated_claim
from tests.harness.cluster import Cluster
from tests.support.gpus import gpu_of
from tests.support.plugin import SLICES
from tests.support.scheduling import Offering, Scheduling, asked
from tests.support.workloads import CLAIMS

NODE = "probe"
UNPUBLISHED = "gpu-1"


def check_rule(cluster: Cluster, *, changed: bool) -> None:
    """Raises DeadlineError where the scheduler is not as the caller says, so that no run is about the wrong one."""
    Offering(cluster, NODE, [gpu_of()])
    holder = allocated_claim(cluster, "holder", NODE, UNPUBLISHED)
    pod = Scheduling(cluster, NODE)
    pod.ask(asked("gpu-inference-1g-10gb"), node=NODE)
    if changed:
        pod.refused()
    else:
        pod.given()
    pod.forget()
    for path in (f"{CLAIMS}/{holder.name}", f"{SLICES}?fieldSelector=spec.nodeName%3D{NODE}", f"/api/v1/nodes/{NODE}"):
        cluster.api.request("DELETE", path)
