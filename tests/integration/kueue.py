"""The real Kueue manager beside a test cluster, and its queues and jobs written short."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from driver.errors import NOT_FOUND, RecoverableError, accepted_status
from driver.kube.client import KubeClient, Object, load_configuration
from tests.harness.certs import Authority
from tests.harness.cluster import Cluster
from tests.harness.processes import ProcessTable, stop
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.controller import ControllerProcess
from tests.support.plugin import SLICES, TESSERA
from tests.support.ports import kept_port
from tests.support.published import DRIVER
from tests.support.workloads import PODS, TEMPLATES

ADDRESS = "127.0.0.1"
GROUP = "kueue.x-k8s.io"
API = f"/apis/{GROUP}/v1beta2"
WORKLOADS = f"{API}/namespaces/default/workloads"
CLUSTER_QUEUES = f"{API}/clusterqueues"
LOCAL_QUEUES = f"{API}/namespaces/default/localqueues"
PRIORITIES = f"{API}/workloadpriorityclasses"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
FLAVOR = "gpu-nodes"
READY_S = 60.0
WAITS_S = 3.0
"""A job that Kueue does not admit for so long waits for others."""

METADATA = ("name", "deletionTimestamp", "finalizers")
HANDLED_GROUPS = {"batch", GROUP}
"""API groups of the webhooks that are installed: no test has other kinds of jobs."""

METRICS_CERTIFICATES = "kueue/metrics/certs"
"""Where the manager insists on a certificate, below /etc."""


@contextmanager
def curated_nodes(cluster: Cluster, count: int) -> Iterator[None]:
    """Simulated nodes, each with eight H100, and a controller that curates them; their pods run no container."""
    install(cluster, ANY_SIZE)
    controller = ControllerProcess(cluster, flags=("--min-published", "auto"))
    controller.start()
    client = KubeClient(load_configuration(cluster.kubeconfig), "test")
    options = ["--nodes", str(count), "--gpus", "dgx-h100", "--kubeconfig", str(cluster.kubeconfig)]
    with (cluster.logs_dir / "fleet.log").open("w") as output:
        fleet = subprocess.Popen([TESSERA, "sim", "fleet", *options], stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: len(published(client, type="gpu")) >= 8, READY_S, "full GPUs are published to be counted")
        yield
    finally:
        fleet.send_signal(signal.SIGINT)
        fleet.wait(READY_S)
        controller.stop()


def published(client: KubeClient, **attributes: str) -> list[Object]:
    """Published devices with these values of attributes."""
    devices = [each for item in client.get_object(SLICES)["items"] for each in item["spec"].get("devices", ())]
    wanted = {name: {"string": value} for name, value in attributes.items()}
    return [each for each in devices if wanted.items() <= each["attributes"].items()]


@contextmanager
def kueue_manager(
    cluster: Cluster, program: Path, source: Path, mappings: Sequence[Object], **more: Any
) -> Iterator[None]:
    """Running while the block runs, with the CRDs of ``source``.

    ``mappings`` are its deviceClassMappings, ``more`` other fields of its Configuration.
    """
    folder = cluster.directory / "kueue"
    etc, certificates = folder / "etc", folder / "certs"
    certificates.mkdir(parents=True)
    authority = Authority(folder)
    pair = authority.issue("kueue", "kueue", addresses=[ADDRESS])
    (certificates / "tls.crt").write_bytes(pair.certificate.read_bytes())
    (certificates / "tls.key").write_bytes(pair.key.read_bytes())
    (etc / METRICS_CERTIFICATES).parent.mkdir(parents=True)
    (etc / METRICS_CERTIFICATES).symlink_to(certificates)
    _install(cluster, source)
    table = ProcessTable(cluster.directory)
    with kept_port() as port:
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump({**_configuration(port, certificates, mappings), **more}))
        # In a mount namespace with an /etc of its own, since the folder of that certificate is fixed.
        own_etc = ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", 'mount --bind "$0" /etc && exec "$@"', str(etc)]
        command = [
            *own_etc,
            str(program),
            f"--config={config}",
            f"--kubeconfig={cluster.kubeconfig}",
        ]
        record = table.spawn("kueue", command, cluster.logs_dir / "kueue.log")
        try:
            _install_webhooks(cluster, source, port, authority.pair.certificate.read_text())
            client_ready = {"apiVersion": f"{GROUP}/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": FLAVOR}}
            wait_for(
                lambda: cluster.api.post(f"{API}/resourceflavors", client_ready), READY_S, "Kueue serves its webhooks"
            )
            yield
        finally:
            stop([record])


def _configuration(port: int, certificates: Path, mappings: Sequence[Object]) -> Object:
    return {
        "apiVersion": f"config.{GROUP}/v1beta2",
        "kind": "Configuration",
        "namespace": "kueue-system",
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": ADDRESS, "port": port, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "clientConnection": {"qps": 300, "burst": 500},
        "integrations": {"frameworks": ["batch/job"]},
        "featureGates": {"VisibilityOnDemand": False, "KueueDRAIntegrationConsumableCapacity": True},
        "resources": {"deviceClassMappings": list(mappings)},
    }


def _install(cluster: Cluster, source: Path) -> None:
    cluster.api.post("/api/v1/namespaces", {"metadata": {"name": "kueue-system"}})
    install_definitions(cluster, source / "config/components/crd/bases")


def install_definitions(cluster: Cluster, folder: Path) -> None:
    """Install the CustomResourceDefinitions of ``folder``, and wait until they are served."""
    names = []
    for file in sorted(folder.glob("*.yaml")):
        body = yaml.safe_load(file.read_text())
        cluster.api.post(CRDS, body)
        names.append(body["metadata"]["name"])
    wait_for(
        lambda: all(_has_condition(cluster.api.get(f"{CRDS}/{name}"), "Established") for name in names),
        READY_S,
        f"the CRDs of {folder} are served",
    )


def _has_condition(item: Object, wanted: str) -> bool:
    conditions = item.get("status", {}).get("conditions") or ()
    return any(each["type"] == wanted and each["status"] == "True" for each in conditions)


def _install_webhooks(cluster: Cluster, source: Path, port: int, authority: str) -> None:
    """Kueue's own configurations, but without a Service in between."""
    bundle = base64.b64encode(authority.encode()).decode()
    text = (source / "config/components/webhook/manifests.yaml").read_text()
    for body in yaml.safe_load_all(text):
        handled = [
            each
            for each in body["webhooks"]
            if {group for rule in each["rules"] for group in rule["apiGroups"]} <= HANDLED_GROUPS
        ]
        for each in handled:
            path = each["clientConfig"]["service"]["path"]
            each["clientConfig"] = {"url": f"https://{ADDRESS}:{port}{path}", "caBundle": bundle}
        plural = f"{body['kind'].lower()}s"
        cluster.api.post(f"/apis/admissionregistration.k8s.io/v1/{plural}", {**body, "webhooks": handled})


def mapping(name: str, *classes: str, **source: Object) -> Object:
    """A quota of this name for devices of these classes; ``source`` as ``counter={"name": ...}``."""
    sources = {}
    for kind, given in source.items():
        selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
        sources = {"sources": [{kind: {"driver": DRIVER, "deviceSelector": selector, **given}}]}
    return {"name": name, "deviceClassNames": list(classes), **sources}


@dataclass(frozen=True)
class Queues:
    """Queues and jobs of one test. Names are the test's own."""

    client: KubeClient

    def add(self, name: str, quota: Mapping[str, int | str], cohort: str = "", **preemption: str) -> None:
        """A ClusterQueue and a LocalQueue of that name."""
        resources = [{"name": each, "nominalQuota": most} for each, most in quota.items()]
        group = {"coveredResources": list(quota), "flavors": [{"name": FLAVOR, "resources": resources}]}
        spec: Object = {"resourceGroups": [group], "namespaceSelector": {}, "preemption": preemption}
        if cohort:
            spec["cohortName"] = cohort
        self.client.create(CLUSTER_QUEUES, self._object("ClusterQueue", name, spec))
        self.client.create(LOCAL_QUEUES, self._object("LocalQueue", name, {"clusterQueue": name}))
        path = f"{LOCAL_QUEUES}/{name}"
        wait_for(lambda: _has_condition(self.client.get_object(path), "Active"), READY_S, f"queue {name} is active")

    def priority(self, name: str, value: int) -> None:
        self.client.create(PRIORITIES, {**self._object("WorkloadPriorityClass", name, {}), "value": value})

    def template(self, name: str, device_class: str, count: int = 1, selector: str = "", memory: str = "") -> None:
        request: Object = {"deviceClassName": device_class, "count": count}
        if selector:
            request["selectors"] = [{"cel": {"expression": selector}}]
        if memory:
            request["capacity"] = {"requests": {"memory": memory}}
        devices = {"requests": [{"name": "gpu", "exactly": request}]}
        self.client.create(TEMPLATES, {"metadata": {"name": name}, "spec": {"spec": {"devices": devices}}})

    def job(self, name: str, queue: str, template: str, pods: int = 1, priority: str = "", **pod_spec: Any) -> None:
        """A job whose pods run until ``finish``; each has a claim by ``template``."""
        labels = {f"{GROUP}/queue-name": queue}
        if priority:
            labels[f"{GROUP}/priority-class"] = priority
        container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template}],
            **pod_spec,
        }
        spec = {"parallelism": pods, "completions": pods, "backoffLimit": 0, "template": {"spec": pod}}
        self.client.create(JOBS, {"metadata": {"name": name, "labels": labels}, "spec": spec})

    def running(self, job: str) -> int:
        """Number of its pods that run."""
        return sum(pod["status"].get("phase") == "Running" for pod in self.pods(job))

    def pods(self, job: str) -> list[Object]:
        """Its pods that are not being deleted."""
        found = json.loads(self.client.get(PODS, {"labelSelector": f"job-name={job}"}))["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def admitted(self, job: str) -> bool:
        """Whether Kueue has started the job; a workload that it has evicted is not admitted."""
        return not self.client.get_object(f"{JOBS}/{job}")["spec"].get("suspend", False)

    def conditions(self, job: str) -> Mapping[str, Object]:
        """Conditions of its Workload by type."""
        for item in self.client.get_object(WORKLOADS)["items"]:
            if any(owner["name"] == job for owner in item["metadata"].get("ownerReferences", ())):
                return {each["type"]: each for each in item.get("status", {}).get("conditions", ())}
        return {}

    def finish(self, pods: Iterable[Object]) -> None:
        """Let these pods succeed."""
        for pod in pods:
            self.client.patch_existing(f"{PODS}/{pod['metadata']['name']}/status", {"status": {"phase": "Succeeded"}})

    def remove_all(self) -> None:
        """Remove jobs, queues and templates, and wait until nothing of them is left."""
        self._remove_all(JOBS)
        for path in (PODS, WORKLOADS):
            wait_for(partial(self._is_empty, path), READY_S, f"all {path.rpartition('/')[2]} are gone")
        for path in (LOCAL_QUEUES, CLUSTER_QUEUES, PRIORITIES, TEMPLATES):
            self._remove_all(path)
        wait_for(partial(self._is_empty, CLUSTER_QUEUES), READY_S, "all queues are gone")

    def remove(self, path: str) -> None:
        """Remove one object, and the pods of a job, which would otherwise stay."""
        with accepted_status(NOT_FOUND):
            self.client._request("DELETE", path, {"propagationPolicy": "Background"})

    def items(self, path: str) -> list[Object]:
        """The objects of a list."""
        found: list[Object] = self.client.get_object(path)["items"]
        return found

    def _is_empty(self, path: str) -> bool:
        """Raises RecoverableError naming what is left."""
        left = [{name: item["metadata"].get(name) for name in METADATA} for item in self.items(path)]
        if left:
            raise RecoverableError(f"{left}")
        return True

    def _remove_all(self, path: str) -> None:
        for item in self.items(path):
            self.remove(f"{path}/{item['metadata']['name']}")

    def _object(self, kind: str, name: str, spec: Object) -> Object:
        return {"apiVersion": f"{GROUP}/v1beta2", "kind": kind, "metadata": {"name": name}, "spec": spec}


def waits(queues: Queues, job: str) -> None:
    """Kueue queues the job but does not admit it."""
    wait_for(lambda: queues.conditions(job).get("QuotaReserved", {}).get("status") == "False", READY_S, f"{job} waits")
    time.sleep(WAITS_S)
    assert not queues.admitted(job)
