"""A release, published by the commands of the workflow, is installed from a registry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.image import recipe
from tests.release.build import Dist, write
from tests.support.in_pods import CACHE, HERE, Release
from tests.support.no_network import no_network
from tests.support.registry import REGISTRY, Registry
from tests.support.workloads import Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

OWNER = "Gpu"
WORKFLOW = yaml.safe_load((recipe.PROJECT / ".github/workflows/release.yml").read_text())


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Dist:
    folder = tmp_path_factory.mktemp("published")
    return write(CACHE, folder / "dist", f"{REGISTRY}/gpu/tessera")


@pytest.fixture(scope="module")
def cluster(dist: Dist, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With a registry that has the release, and no other network."""
    registry = Registry(tmp_path_factory.mktemp("registry"), CACHE)
    [publish] = [step["run"] for step in WORKFLOW["jobs"]["registry"]["steps"] if step.get("name") == "Publish"]
    variables = {"REGISTRY": REGISTRY, "GITHUB_REPOSITORY_OWNER": OWNER, "GITHUB_REF_NAME": f"v{dist.version}"}
    with no_network(), registry.serve():
        registry.run(publish, dist.folder.parent, variables)
        with Cluster.start(Settings(name="from-registry", usual_places=True), Progress()) as running:
            yield running


def test_a_published_release_is_installed_by_its_name(cluster: Cluster, dist: Dist) -> None:
    release = Release(cluster, "sim:h100-1", package=f"oci://{REGISTRY}/{OWNER.lower()}/charts/tessera")
    release.install(chart_version=dist.version, plain_http=True)
    workloads = Workloads(cluster)
    workloads.running(workloads.pod("serve", workloads.claim("serve", request("gpu-inference"))))
    events = cluster.api.get(f"/api/v1/namespaces/{HERE}/events")["items"]
    assert any(event["message"].startswith(f'Successfully pulled image "{dist.image}"') for event in events)
