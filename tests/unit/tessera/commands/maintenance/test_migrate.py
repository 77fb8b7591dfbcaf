"""``tessera migrate`` against a server that speaks the API's wire protocol, with a node that follows its labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from driver.config.flag_values import NVIDIA_DRIVER
from tessera.cli import main
from tessera.commands.maintenance import migrate
from tests.support.api_server import SLICES, Exchange, Object, ObjectApi, Route
from tests.support.evictions import NODE, POOL
from tests.support.other_drivers import CHANNEL
from tests.support.queues import DRIVER
from tests.support.workloads import request
from tests.unit.tessera.test_cli import KUBECONFIG

NODES, PODS = "/api/v1/nodes", "/api/v1/namespaces/team/pods"
TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaimtemplates"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims"
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
OWN, ANNOTATION = "gpu.tessera.dev/node", "gpu.tessera.dev/migration"
DEVICE_PLUGIN, MIG_MANAGER = "nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.deploy.mig-manager"
LABELS = {DEVICE_PLUGIN: "true", MIG_MANAGER: "true", "nvidia.com/gpu.present": "true"}


class MovingNode(ObjectApi):
    """A node on which the device plugin of the GPU Operator and Tessera's node plugin run as its labels say."""

    leaves = True
    refused: tuple[str, str] | None = None
    """Command and part of the path of requests that the account may not make."""

    def _answer(self, exchange: Exchange) -> None:
        if self.refused and exchange.command == self.refused[0] and self.refused[1] in exchange.path:
            return exchange.refuse(403, "not allowed")
        return super()._answer(exchange)

    def _write(self, exchange: Exchange) -> None:
        super()._write(exchange)
        if Route.of(exchange.route).resource.endswith("nodes"):
            self.follow()

    def follow(self) -> None:
        node = self.folder(NODES)[NODE]
        serves = node["metadata"]["labels"].get(DEVICE_PLUGIN) == "true" or not self.leaves
        node["status"] = {"allocatable": {"nvidia.com/gpu": "8" if serves else "0"}}
        if node["metadata"]["labels"].get(OWN) == "true":
            pool = {"name": POOL, "generation": 1, "resourceSliceCount": 1}
            self.store(f"{SLICES}/s", spec={"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": []})
        elif "s" in self.folder(SLICES):
            self.drop(f"{SLICES}/s")


class Site:
    """A cluster, and the command on it."""

    def __init__(self, api: MovingNode, kubeconfig: Path) -> None:
        self.api, self.kubeconfig = api, kubeconfig
        server = {"clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}
        kubeconfig.write_text(yaml.safe_dump({**KUBECONFIG, **server}))
        api.store(f"{NODES}/{NODE}", metadata={"name": NODE, "labels": dict(LABELS)}, spec={})
        api.follow()

    def migrate(self, *flags: str, node: str = NODE) -> Result:
        return CliRunner().invoke(main, ["migrate", node, "--kubeconfig", str(self.kubeconfig), *flags])

    def node(self) -> Object:
        return self.api.folder(NODES)[NODE]

    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.node()["metadata"]["labels"]
        return labels

    def pod(self, name: str, *resources: str) -> None:
        limits = dict.fromkeys(resources, "1")
        spec = {"nodeName": NODE, "containers": [{"name": "main", "resources": {"limits": limits}}]}
        owner = {"kind": "Job", "name": "training", "controller": True}
        self.api.store(f"{PODS}/{name}", metadata={"name": name, "ownerReferences": [owner]}, spec=spec)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(migrate, "POLL_INTERVAL_SECONDS", 0.01)
    with MovingNode() as api:
        yield Site(api, tmp_path / "kubeconfig")


def plan_of(site: Site, *flags: str) -> dict[str, Any]:
    answer = site.migrate("--plan", "-o", "json", *flags)
    assert answer.exit_code == 0, answer.output
    plan: dict[str, Any] = json.loads(answer.stdout)[0]
    return plan


@pytest.mark.parametrize(
    ("node", "flags", "message"),
    [
        ("node-q", (), "NODE node-q: the cluster has no such node: kubectl get nodes"),
        (NODE, ("--plan", "--back"), "--plan and --back exclude each other"),
        (f"{NODE}/status", (), "the cluster has no such node"),
        (NODE, ("--back",), f"NODE {NODE}: --back needs a node that `tessera migrate` has moved"),
    ],
)
def test_a_mistake_in_the_call_changes_nothing(site: Site, node: str, flags: tuple[str, ...], message: str) -> None:
    before = json.dumps(site.node())
    answer = site.migrate(*flags, node=node)
    assert answer.exit_code == 2
    assert message in answer.stderr
    assert json.dumps(site.node()) == before


@pytest.mark.parametrize("was_cordoned", [False, True])
def test_a_node_moves_and_comes_back_as_it_was(site: Site, *, was_cordoned: bool) -> None:
    site.node()["spec"] = {"unschedulable": True} if was_cordoned else {}
    answer = site.migrate()
    assert answer.exit_code == 0, answer.output
    assert answer.stdout == f"node {NODE} has moved to Tessera\n"
    assert site.labels() == {**LABELS, DEVICE_PLUGIN: "false", MIG_MANAGER: "false", OWN: "true"}
    assert bool(site.node()["spec"].get("unschedulable")) is was_cordoned
    moved = json.dumps(site.node())
    assert site.migrate().exit_code == 0
    assert json.dumps(site.node()) == moved, "a second run has nothing to do"
    assert site.migrate("--back", "-o", "json").exit_code == 0
    assert site.labels() == LABELS
    assert bool(site.node()["spec"].get("unschedulable")) is was_cordoned
    assert site.node()["metadata"]["annotations"] == {}


def test_pods_with_gpus_of_the_device_plugin_are_named_and_waited_for(site: Site) -> None:
    site.pod("train", "nvidia.com/gpu")
    site.pod("small", "nvidia.com/mig-1g.10gb", "cpu")
    site.pod("other", "cpu", "amd.com/gpu")
    answer = site.migrate("--timeout", "0.1")
    assert answer.exit_code == 1
    assert "pod team/small has nvidia.com/mig-1g.10gb; pod team/train has nvidia.com/gpu" in answer.stderr
    assert f"tessera migrate {NODE} continues, tessera migrate {NODE} --back undoes it" in answer.stderr
    assert site.labels() == LABELS
    assert site.node()["spec"]["unschedulable"]
    pods = plan_of(site)["pods"]
    assert [(pod["pod"], pod["owner"], pod["classes"]) for pod in pods] == [
        ("team/small", "Job/training", ["gpu-inference-1g-10gb"]),
        ("team/train", "Job/training", ["gpu-training"]),
    ]
    assert site.migrate("--back").exit_code == 0
    assert not site.node()["spec"].get("unschedulable")


def test_a_driver_that_stays_is_named_with_the_way_out(site: Site) -> None:
    site.api.leaves = False
    answer = site.migrate("--timeout", "0.1")
    assert answer.exit_code == 1
    assert (
        "a device plugin offers nvidia.com/gpu: 8; outside of the GPU Operator its DaemonSet must not" in answer.stderr
    )
    assert site.labels()[OWN] == "moving", "Tessera does not come before the other driver has left"


def test_the_other_driver_comes_back_only_after_the_pod_of_tessera_has_left(site: Site) -> None:
    labels = {"app.kubernetes.io/name": "tessera", "app.kubernetes.io/component": "node"}
    pod = {"metadata": {"name": "tessera-node-x", "labels": labels}, "spec": {"nodeName": NODE}}
    site.api.store("/api/v1/namespaces/gpus/pods/tessera-node-x", **pod)
    assert site.migrate().exit_code == 0
    answer = site.migrate("--back", "--timeout", "0.1")
    assert "waits until Tessera's node plugin has left" in answer.stderr
    assert "pod gpus/tessera-node-x" in answer.stderr
    assert site.labels()[DEVICE_PLUGIN] == "false"
    site.api.drop("/api/v1/namespaces/gpus/pods/tessera-node-x")
    assert site.migrate("--back").exit_code == 0
    assert site.labels() == LABELS


def test_a_node_whose_driver_the_operator_replaces_is_left_alone(site: Site) -> None:
    site.labels()[DEVICE_PLUGIN] = "paused-for-driver-upgrade"
    answer = site.migrate()
    assert answer.exit_code == 1
    assert f"the GPU Operator is replacing its driver ({DEVICE_PLUGIN}=paused-for-driver-upgrade)" in answer.stderr
    assert "stays cordoned" not in answer.stderr
    assert "unschedulable" not in site.node()["spec"]


def test_labels_that_can_not_be_written_are_named_with_the_cordon(site: Site) -> None:
    site.api.once("PATCH", MovingNode._write.__get__(site.api), lambda exchange: exchange.refuse(403, "not allowed"))
    answer = site.migrate()
    assert answer.exit_code == 1
    assert f"node {NODE} waits until its labels can be changed, and stays cordoned" in answer.stderr


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"step": "moved", "x": ' + "[" * 60_000 + "]" * 60_000 + "}",
        '{"step": "moved", "labels": {"role": "admin"}}',
    ],
    ids=["no JSON", "deep", "a label that no move changes"],
)
def test_an_annotation_that_somebody_has_changed_is_named_and_sets_nothing(site: Site, text: str) -> None:
    site.node()["metadata"]["annotations"] = {ANNOTATION: text}
    answer = site.migrate("--back")
    assert answer.exit_code == 1
    assert f"annotation {ANNOTATION} can't be read" in answer.stderr
    assert site.labels() == LABELS


def test_a_node_that_was_cordoned_after_its_move_stays_cordoned_on_its_way_back(site: Site) -> None:
    assert site.migrate().exit_code == 0
    site.node()["spec"] = {"unschedulable": True}
    assert site.migrate("--back").exit_code == 0
    assert site.node()["spec"]["unschedulable"]


def test_the_way_back_needs_the_driver_name_of_the_move(site: Site) -> None:
    assert site.migrate("--timeout", "0.1", "--driver-name", NVIDIA_DRIVER).exit_code == 1
    before = json.dumps(site.node())
    answer = site.migrate("--back")
    assert answer.exit_code == 2
    assert f"--driver-name {DRIVER}: node {NODE} moves to '{NVIDIA_DRIVER}': give that name" in answer.stderr
    assert json.dumps(site.node()) == before


def test_who_may_not_read_what_the_last_check_needs_is_told_at_once(site: Site) -> None:
    site.api.refused = ("GET", "gpunodeplans")
    answer = site.migrate("--timeout", "600")
    assert answer.exit_code == 1
    assert "GpuNodePlans can't be listed" in answer.stderr
    assert "within" not in answer.stderr
    assert f"tessera migrate {NODE} continues" in answer.stderr


@pytest.mark.parametrize(
    ("driver", "device", "parameters", "phase", "outcome"),
    [
        (DRIVER, "gpu-0", {}, "Running", f"must end first: only --driver-name {NVIDIA_DRIVER} adopts claims"),
        (NVIDIA_DRIVER, "gpu-0", {"sharing": {"strategy": "TimeSlicing"}}, "Running", "adopted"),
        (NVIDIA_DRIVER, "gpu-0", {"sharing": {"strategy": "MPS"}}, "Running", "must end first: an MPS control daemon"),
        (NVIDIA_DRIVER, "gpu-vfio-0", {}, "Running", "must end first: its GPU is passed through"),
        (NVIDIA_DRIVER, "gpu-0", {}, "Pending", "must end first: its pod has not started"),
    ],
)
def test_claims_of_nvidias_driver_are_adopted_or_waited_for(
    site: Site, driver: str, device: str, parameters: Object, phase: str, outcome: str
) -> None:
    result = {"request": "gpu", "driver": NVIDIA_DRIVER, "pool": NODE, "device": device}
    config = {"source": "FromClaim", "opaque": {"driver": NVIDIA_DRIVER, "parameters": parameters}}
    allocation = {"devices": {"results": [result], "config": [config]}}
    users = [{"resource": "pods", "name": "train", "uid": "u"}]
    site.api.store(f"{CLAIMS}/held", spec={}, status={"allocation": allocation, "reservedFor": users})
    pod = site.api.store(f"{PODS}/train", spec={"nodeName": NODE}, status={"phase": phase})
    users[0]["uid"] = pod["metadata"]["uid"]
    [claim] = plan_of(site, "--driver-name", driver)["claims"]
    assert (claim["claim"], claim["devices"], claim["pods"]) == ("team/held", [device], ["train"])
    assert claim["outcome"].startswith(outcome)
    said = site.migrate("--driver-name", driver, "--timeout", "0.1").stderr
    assert ("claim team/held (pods: train)" in said) is (outcome != "adopted")


def test_the_plan_names_objects_for_nvidias_driver_and_leaves_compute_domains_and_created_claims_out(
    site: Site,
) -> None:
    selector = f'device.attributes["{NVIDIA_DRIVER}"].productName == "NVIDIA H100 80GB HBM3"'
    for name, part in (
        ("theirs", request(NVIDIA_DRIVER, selector=selector)),
        ("domain", request(CHANNEL)),
        ("ours", request("gpu-training")),
    ):
        site.api.store(f"{TEMPLATES}/{name}", spec={"spec": {"devices": {"requests": [part]}}})
    created = {"name": "theirs-x", "annotations": {"resource.kubernetes.io/pod-claim-name": "gpu"}}
    spec = {"devices": {"requests": [request(NVIDIA_DRIVER)]}}
    site.api.store(f"{CLAIMS}/theirs-x", metadata=created, spec=spec)
    theirs = f'device.driver == "{NVIDIA_DRIVER}" && device.attributes["{NVIDIA_DRIVER}"].type == "gpu"'
    site.api.store(f"{CLASSES}/{NVIDIA_DRIVER}", spec={"selectors": [{"cel": {"expression": theirs}}]})
    changes = plan_of(site)["changes"]
    assert {change["object"] for change in changes} == {"ResourceClaimTemplate team/theirs"}
    messages = " ".join(change["message"] for change in changes)
    assert "write gpu-training, a full GPU" in messages
    assert f"write {DRIVER}" in messages
    assert plan_of(site, "--driver-name", NVIDIA_DRIVER)["changes"] == [], (
        "NVIDIA's class selects Tessera's devices then"
    )
    text = site.migrate("--plan").stdout
    assert "pods with GPUs of a device plugin: they must end first: none" in text
    assert f"the move sets {DEVICE_PLUGIN}=false" in text
