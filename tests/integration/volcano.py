"""The real Volcano scheduler next to a test cluster, and its gangs written short."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from driver.kube.client import KubeClient, Object, load_configuration
from tests.harness.cluster import Cluster
from tests.harness.processes import ProcessTable, stop
from tests.harness.waiting import wait_for
from tests.integration.kueue import READY_S, install_definitions
from tests.support.workloads import CLAIMS, PODS, TEMPLATES

API = "/apis/scheduling.volcano.sh/v1beta1"
GROUPS = f"{API}/namespaces/default/podgroups"
EVENTS = "/api/v1/namespaces/default/events"
GATES = "--feature-gates=DRAPartitionableDevices=true"
"""Off by default in Volcano 1.15: it would allocate no device that consumes counters."""


@contextmanager
def volcano_scheduler(cluster: Cluster, program: Path, source: Path) -> Iterator[None]:
    """Running while the block runs, with the CRDs and the configuration of ``source``."""
    chart = source / "installer/helm/chart/volcano"
    install_definitions(cluster, chart / "crd/bases")
    command = [
        str(program),
        f"--kubeconfig={cluster.kubeconfig}",
        f"--scheduler-conf={chart / 'config/volcano-scheduler.conf'}",
        GATES,
        "--leader-elect=false",
        "--cache-dumper=false",
    ]
    record = ProcessTable(cluster.directory).spawn("volcano", command, cluster.logs_dir / "volcano.log")
    try:
        queue = f"{API}/queues/default"
        wait_for(lambda: cluster.api.get(queue), READY_S, "Volcano has its default queue")
        # Its controllers, which do not run here, would open the queue.
        client = KubeClient(load_configuration(cluster.kubeconfig), "test")
        client.patch_existing(f"{queue}/status", {"status": {"state": "Open"}})
        yield
    finally:
        stop([record])


@dataclass(frozen=True)
class VolcanoGangs:
    """The gangs of one test."""

    client: KubeClient

    def create(self, name: str, pods: int, min_member: int, device_class: str = "gpu-training", cpu: str = "1") -> None:
        """A PodGroup of Volcano and its pods, each with a claim. ``cpu``: what each requests; empty: only devices."""
        group = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup", "metadata": {"name": name}}
        self.client.create(GROUPS, {**group, "spec": {"minMember": min_member}})
        annotations = {"scheduling.k8s.io/group-name": name}
        self.pods(name, pods, device_class, cpu, annotations, schedulerName="volcano")

    def pods(
        self, name: str, count: int, device_class: str, cpu: str = "", annotations: Object | None = None, **spec: str
    ) -> None:
        """Pods with a claim each; by default without a group, and of the default scheduler."""
        devices = {"requests": [{"name": "gpu", "exactly": {"deviceClassName": device_class}}]}
        self.client.create(TEMPLATES, {"metadata": {"name": name}, "spec": {"spec": {"devices": devices}}})
        resources = {"claims": [{"name": "gpu"}], "requests": {"cpu": cpu} if cpu else {}}
        pod = {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": "none", "resources": resources}],
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": name}],
            **spec,
        }
        for number in range(count):
            metadata = {"name": f"{name}-{number}", "labels": {"gang": name}, "annotations": annotations or {}}
            self.client.create(PODS, {"metadata": metadata, "spec": pod})

    def running(self, name: str) -> set[str]:
        """The names of its pods that run."""
        return {pod["metadata"]["name"] for pod in self._pods_of(name) if pod["status"].get("phase") == "Running"}

    def allocated(self) -> int:
        """The number of claims that have devices."""
        return sum("allocation" in claim.get("status", {}) for claim in self.client.get_object(CLAIMS)["items"])

    def messages(self, kind: str, name: str) -> list[str]:
        """The messages of the controller's Events about an object: ``REASON: SENTENCE``."""
        return [
            f"{event['reason']}: {event['message']}"
            for event in self.client.get_object(EVENTS)["items"]
            if (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == (kind, name)
        ]

    def wait_running(self, name: str, pods: int) -> None:
        wait_for(lambda: len(self.running(name)) == pods, READY_S, f"{pods} pods of {name} run")

    def wait_reason(self, kind: str, name: str, expected: str) -> None:
        """Wait until an Event about the object has the pattern ``expected`` in it."""
        what = f"an Event about {kind} {name} with: {expected}"
        wait_for(lambda: any(re.search(expected, message) for message in self.messages(kind, name)), READY_S, what)

    def remove(self, name: str) -> None:
        """Remove the pods and the template of a gang, and its PodGroup if there is one."""
        for pod in self._pods_of(name):
            self.client.delete(f"{PODS}/{pod['metadata']['name']}", missing_ok=True)
        self.client.delete(f"{TEMPLATES}/{name}")
        self.client.delete(f"{GROUPS}/{name}", missing_ok=True)

    def remove_all(self) -> None:
        for template in self.client.get_object(TEMPLATES)["items"]:
            self.remove(template["metadata"]["name"])
        wait_for(lambda: not self.client.get_object(CLAIMS)["items"], READY_S, "all claims are gone")

    def _pods_of(self, name: str) -> list[Object]:
        found: list[Object] = json.loads(self.client.get(PODS, {"labelSelector": f"gang={name}"}))["items"]
        return found
