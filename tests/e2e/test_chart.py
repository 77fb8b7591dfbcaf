"""The Helm chart on the real API server: what it renders is accepted; installed, changed and removed by helm itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.harness.cluster import Cluster
from tests.support.chart import CHART, RELEASE, Object, Values, rendered
from tests.support.control_plane import control_plane

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

OTHER_NAMESPACE = "2026"
"""A name that YAML would take for a number."""

EVERY_NAME = {"extendedResourceNames": ["gpu-training", "gpu-dev"], "admission": {"shareClasses": ["gpu-dev", "mine"]}}
VALUE_SETS: list[tuple[Values, str]] = [
    ({}, "default"),
    ({"driverName": "gpu.nvidia.com", **EVERY_NAME, "crd": {"keep": False}}, OTHER_NAMESPACE),
    ({"classes": {"gpu-dev": False}, "fence": {"enabled": False}, "driverName": "true"}, "default"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("chart") as running:
        running.api.post("/api/v1/namespaces", {"metadata": {"name": OTHER_NAMESPACE}})
        yield running


@pytest.mark.parametrize(("values", "namespace"), VALUE_SETS, ids=["defaults", "everything else", "less"])
def test_the_api_server_accepts_every_object(cluster: Cluster, values: Values, namespace: str) -> None:
    objects = rendered(values, namespace)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    # Strict: a field that the API server does not know is an error, not a warning.
    strict = ("--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts")
    stored = json.loads(cluster.kubectl("apply", *strict, "--output=json", "--filename=-", stdin=text))["items"]
    assert [identity(each) for each in stored] == [identity(each) for each in objects]


Identity = tuple[str, str, str | None]


def identity(each: Object) -> Identity:
    return each["kind"], each["metadata"]["name"], each["metadata"].get("namespace")


HELM = """
import json, sys, helm_python
kubeconfig, action, arguments, options = sys.argv[1:]
with helm_python.Config(kubeconfig_path=kubeconfig, namespace="tessera") as config:
    getattr(config, action)(*json.loads(arguments), **json.loads(options))
"""


@dataclass
class Release:
    """What helm itself does with the chart, as the admin; in a process with another home, where it leaves its cache."""

    cluster: Cluster

    def install(self) -> None:
        self._helm("install", str(CHART), RELEASE, create_namespace=True)

    def upgrade(self, values: Values | None = None) -> None:
        self._helm("upgrade", str(CHART), RELEASE, values)

    def uninstall(self) -> None:
        self._helm("uninstall", RELEASE, ignore_not_found=True)

    def stored(self) -> dict[Identity, Object]:
        """Every object that is there now, less what the API server writes by itself: status, version, who set what."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": rendered()})
        found = self.cluster.kubectl("get", "--ignore-not-found", "--output=json", "--filename=-", stdin=text)
        items = json.loads(found)["items"] if found else []
        for each in items:
            each.pop("status", None)
            del each["metadata"]["resourceVersion"]
        return {identity(each): each for each in items}

    def _helm(self, action: str, *arguments: object, **options: object) -> None:
        given = (str(self.cluster.kubeconfig), action, json.dumps(arguments), json.dumps(options))
        command = [sys.executable, "-c", HELM, *given]
        home = {"HOME": str(self.cluster.directory)}
        done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def release(cluster: Cluster) -> Iterator[Release]:
    """Not installed yet, and no more when the test ends."""
    found = Release(cluster)
    yield found
    found.uninstall()


def test_an_upgrade_to_the_same_changes_nothing(release: Release) -> None:
    release.install()
    installed = release.stored()
    assert installed.keys() == {identity(each) for each in rendered()}
    release.upgrade()
    assert release.stored() == installed


def test_a_class_that_is_switched_off_goes_and_nothing_else(release: Release) -> None:
    release.install()
    installed = release.stored()
    release.upgrade({"classes": {"gpu-dev": False}})
    assert release.stored() == {key: each for key, each in installed.items() if key != ("DeviceClass", "gpu-dev", None)}


def test_the_plans_outlive_the_release_and_are_there_when_it_comes_back(release: Release, cluster: Cluster) -> None:
    release.install()
    plan = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuNodePlan", "metadata": {"name": "n1"}, "spec": {}}
    cluster.apply(plan)
    release.uninstall()
    assert release.stored().keys() == {("CustomResourceDefinition", "gpunodeplans.gpu.tessera.dev", None)}
    release.install()
    assert release.stored().keys() == {identity(each) for each in rendered()}
    assert cluster.kubectl("get", "gpunodeplans", "--output=name") == "gpunodeplan.gpu.tessera.dev/n1\n"
