"""The Helm chart on the real API server: what it renders is accepted; installed, changed and removed by helm itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from driver.errors import EnvironmentFault
from driver.model.plan import PATH
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import CHART, RELEASE, Object, Values, rendered
from tests.support.control_plane import control_plane
from tests.support.features import has
from tests.support.helm import helm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NAMESPACE = "tessera"
OTHER_NAMESPACE = "2026"
"""A name that YAML would take for a number."""

EVERY_NAME = {"extendedResourceNames": ["gpu-training", "gpu-dev"], "admission": {"shareClasses": ["gpu-dev", "mine"]}}
PARTS = ("nodePlugin", "controller")
OFF = {"enabled": False}
SOMEWHERE = {
    "nodeSelector": {"pool": "gpus"},
    "affinity": {"nodeAffinity": {}},
    "tolerations": [{"operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 60}],
    "resources": {"limits": {"cpu": 1, "memory": "1Gi"}},
    "logLevel": "debug",
}
OF_ONES_OWN = {
    "podLabels": {"team": "gpus"},
    "podAnnotations": {"sidecar.istio.io/inject": "false"},
    "extraEnv": [
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        {"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
    ],
}
DIRECTORIES = {
    "kubeletDir": "/data/kubelet",
    "cdiDir": "/etc/cdi",
    "stateDir": "/data/tessera",
    "driverRoot": "/run/nvidia/driver",
}
VALUE_SETS: dict[str, tuple[Values, str]] = {
    "defaults": ({}, "default"),
    "everything else": (
        {
            "driverName": "gpu.nvidia.com",
            **EVERY_NAME,
            "crd": {"keep": False},
            "priorityQuota": {"enabled": True},
            "priorityClasses": {"create": True},
        },
        OTHER_NAMESPACE,
    ),
    "less": ({"classes": {"gpu-dev": False}, "fence": OFF, "admission": OFF, "driverName": "true"}, "default"),
    "no process": (dict.fromkeys(PARTS, OFF), "default"),
    "simulated GPUs": ({"gpus": "sim:dgx-h100", "nodePlugin": {"stateDir": "/s"}}, "default"),
    "the host's network": ({each: {"hostNetwork": True} for each in PARTS}, "default"),
    "no ports": ({each: {"hostNetwork": True, "metricsPort": 0, "healthPort": 0} for each in PARTS}, "default"),
    "elsewhere": ({"nodePlugin": {**SOMEWHERE, **DIRECTORIES}, "controller": SOMEWHERE}, OTHER_NAMESPACE),
    "network policies and pods of ones own": (
        {
            "networkPolicy": {
                "enabled": True,
                "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
                "apiServers": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
                "extraEgress": [{"ports": [{"port": 53, "protocol": "UDP"}]}],
            },
            "nodePlugin": {**OF_ONES_OWN, "updateStrategy": {"maxUnavailable": "10%"}},
            "controller": {**OF_ONES_OWN, "webAddress": ":8443", "webTlsSecret": "web-tls"},
        },
        "default",
    ),
    "alone": ({"controller": {"replicas": 1, "pdb": OFF, "priorityClassName": ""}}, "default"),
    "an image by digest": (
        {
            "image": {"repository": "example.com:5000/t", "digest": f"sha256:{64 * 'a'}"},
            "imagePullSecrets": [{"name": "p"}],
        },
        "default",
    ),
    "gpus of others": ({"neighbours": "exclude", "excludeGpus": [0, "GPU-1"]}, "default"),
    "more flags": ({each: {"extraArgs": ["--log-level=debug", "-h"]} for each in PARTS}, "default"),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("chart") as running:
        running.api.post("/api/v1/namespaces", {"metadata": {"name": OTHER_NAMESPACE}})
        yield running


@pytest.mark.parametrize(("values", "namespace"), VALUE_SETS.values(), ids=VALUE_SETS)
def test_the_api_server_accepts_every_object(cluster: Cluster, values: Values, namespace: str) -> None:
    objects = rendered(values, namespace, mutating=has(cluster, "mutating policies"))
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    # Strict: a field that the API server does not know is an error, not a warning.
    strict = ("--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts")
    stored = json.loads(cluster.kubectl("apply", *strict, "--output=json", "--filename=-", stdin=text))["items"]
    assert [identity(each) for each in stored] == [identity(each) for each in objects]


Identity = tuple[str, str, str | None]

REVISION = "deployment.kubernetes.io/revision"
"""Which of its ReplicaSets a Deployment has: the controller manager writes it, some time after the Deployment."""


def identity(each: Object) -> Identity:
    return each["kind"], each["metadata"]["name"], each["metadata"].get("namespace")


NO_HOOK: Values = {"uninstall": {"hook": False}}
"""Nodes, on which the hook's pod could run, are not part of this cluster."""


@dataclass
class Release:
    """What helm itself does with the chart, as the admin."""

    cluster: Cluster

    def install(self, values: Values | None = None) -> None:
        given = {**NO_HOOK, **(values or {})}
        helm(self.cluster, NAMESPACE, "install", str(CHART), RELEASE, given, create_namespace=True)

    def upgrade(self, values: Values | None = None) -> None:
        helm(self.cluster, NAMESPACE, "upgrade", str(CHART), RELEASE, {**NO_HOOK, **(values or {})})

    def uninstall(self) -> None:
        helm(self.cluster, NAMESPACE, "uninstall", RELEASE, ignore_not_found=True)

    def objects(self) -> list[Object]:
        return rendered(NO_HOOK, mutating=has(self.cluster, "mutating policies"))

    def stored(self) -> dict[Identity, Object]:
        """Every object that is there now, less what the cluster writes by itself: status, versions, who set what."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": self.objects()})
        found = self.cluster.kubectl("get", "--ignore-not-found", "--output=json", "--filename=-", stdin=text)
        items = json.loads(found)["items"] if found else []
        for each in items:
            each.pop("status", None)
            del each["metadata"]["resourceVersion"]
            each["metadata"].get("annotations", {}).pop(REVISION, None)
        return {identity(each): each for each in items}


@pytest.fixture
def release(cluster: Cluster) -> Iterator[Release]:
    """Not installed yet, and no more when the test ends."""
    found = Release(cluster)
    yield found
    found.uninstall()


@pytest.mark.smoke
def test_an_upgrade_to_the_same_changes_nothing(release: Release) -> None:
    release.install()
    installed = release.stored()
    assert installed.keys() == {identity(each) for each in release.objects()}
    release.upgrade()
    assert release.stored() == installed


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"driverName": "gpu.example.com"}, 'driverName: "gpu.tessera.dev" is installed'),
        ({"nodePlugin": {"stateDir": "/var/lib/tessera"}}, 'nodePlugin.stateDir: "" is installed'),
    ],
    ids=["driverName", "stateDir"],
)
def test_an_upgrade_after_which_held_devices_would_be_offered_again_is_refused(
    release: Release, values: Values, said: str
) -> None:
    """Node plugins of two names, or with two directories, know nothing of what the other has prepared."""
    release.install()
    installed = release.stored()
    with pytest.raises(EnvironmentFault, match=said):
        release.upgrade(values)
    assert release.stored() == installed


def test_an_upgrade_keeps_a_directory_that_a_flag_of_ones_own_names(release: Release) -> None:
    own: Values = {"nodePlugin": {"extraArgs": ["--state-dir=/var/lib/tessera"]}}
    release.install(own)
    release.upgrade(own)
    with pytest.raises(EnvironmentFault, match=r"nodePlugin\.stateDir"):
        release.upgrade()


def test_a_class_that_is_switched_off_goes_and_nothing_else(release: Release) -> None:
    release.install()
    installed = release.stored()
    release.upgrade({"classes": {"gpu-dev": False}})
    assert release.stored() == {key: each for key, each in installed.items() if key != ("DeviceClass", "gpu-dev", None)}


def test_the_plans_outlive_the_release_and_are_there_when_it_comes_back(release: Release, cluster: Cluster) -> None:
    release.install()
    plan = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuNodePlan", "metadata": {"name": "n1"}, "spec": {}}
    wait_for(lambda: cluster.api.get(PATH), 60, "plans are served")
    cluster.apply(plan)
    release.uninstall()
    kept = ("gpunodeplans.gpu.tessera.dev", "gpupolicies.gpu.tessera.dev")
    assert release.stored().keys() == {("CustomResourceDefinition", name, None) for name in kept}
    release.install()
    assert release.stored().keys() == {identity(each) for each in release.objects()}
    assert cluster.kubectl("get", "gpunodeplans", "--output=name") == "gpunodeplan.gpu.tessera.dev/n1\n"
