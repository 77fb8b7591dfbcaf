"""``tessera cordon`` and ``uncordon`` against a server that speaks the API's wire protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from driver.kube.types import GpuNodePlan, PlanMetadata
from driver.model.gpu_events_and_conditions import ConditionType
from driver.model.plan import PATH, PlanSpec, PlanStatus
from driver.model.reported_gpus import encode_inventory
from driver.slices.build import slice_object
from tessera.cli import main
from tests.support.api_server import SLICES, ObjectApi
from tests.support.claims import NODE
from tests.support.health import HealthUnderTest
from tests.support.node import NodeUnderTest
from tests.support.published import build_slices
from tests.unit.tessera.test_cli import KUBECONFIG

PLAN = f"{PATH}/{NODE}"


@pytest.fixture
def api() -> Iterator[ObjectApi]:
    with ObjectApi() as server:
        server.store(f"/api/v1/nodes/{NODE}")
        yield server


@pytest.fixture
def cluster(api: ObjectApi, node: NodeUnderTest, tmp_path: Path) -> Cluster:
    return Cluster(api, HealthUnderTest(node), tmp_path / "kubeconfig")


class Cluster:
    """One node that publishes its GPUs and follows its plan, and a kubeconfig for the command."""

    def __init__(self, api: ObjectApi, ill: HealthUnderTest, kubeconfig: Path) -> None:
        self.api, self.ill = api, ill
        self.uuids = [gpu.uuid for gpu in ill.node.node.inventory.gpus]
        server = {"clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}
        kubeconfig.write_text(yaml.safe_dump({**KUBECONFIG, **server}))
        self._kubeconfig = kubeconfig
        self.publish()

    def publish(self) -> None:
        pool = self.ill.node.node.pool
        for name, content in build_slices(pool, self.ill.node.node.inventory.published()).items():
            self.api.store(f"{SLICES}/{name}", spec=slice_object(name, content, pool, 1, 1, None)["spec"])

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--kubeconfig", str(self._kubeconfig)])

    def plan(self) -> dict[str, Any]:
        return self.api.folder(PATH)[NODE]

    def follow(self) -> None:
        """The node hears of its plan, and publishes."""
        self.ill.health.apply_plan(msgspec.convert(self.plan()["spec"], PlanSpec))
        self.publish()


def test_a_cordon_makes_the_plan_where_there_is_none_and_it_goes_with_its_node(cluster: Cluster) -> None:
    answer = cluster.run("cordon", f"{NODE}/gpu-3", "--reason", "fan on\nFriday")
    assert answer.exit_code == 0, answer.output
    assert answer.output == f"cordoned {NODE}/gpu-3 ({cluster.uuids[3]})\n"
    assert cluster.plan()["spec"] == {"cordoned": [f"{cluster.uuids[3]} fan on Friday"]}
    [owner] = cluster.plan()["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Node", NODE)
    cluster.follow()
    assert cluster.ill.node.node.inventory.states()[3].fault == "cordoned: fan on Friday"


def test_a_cordon_leaves_the_rest_of_a_plan_alone(cluster: Cluster) -> None:
    cluster.api.store(PLAN, spec={"epoch": "e1", "offers": ["x/full"], "cordoned": [f"{cluster.uuids[0]} old"]})
    assert cluster.run("cordon", cluster.uuids[1]).exit_code == 0
    assert cluster.run("cordon", cluster.uuids[0], "--reason", "new").exit_code == 0
    spec = cluster.plan()["spec"]
    assert spec["cordoned"] == [cluster.uuids[1], f"{cluster.uuids[0]} new"]
    assert (spec["epoch"], spec["offers"]) == ("e1", ["x/full"])


def test_a_second_cordon_without_a_reason_keeps_the_first_ones(cluster: Cluster) -> None:
    cluster.run("cordon", f"{NODE}/gpu-3", "--reason", "fan on Friday")
    answer = cluster.run("cordon", f"{NODE}/gpu-3")
    assert answer.output == f"cordoned {NODE}/gpu-3 ({cluster.uuids[3]}), as before: fan on Friday\n"
    assert cluster.plan()["spec"]["cordoned"] == [f"{cluster.uuids[3]} fan on Friday"]
    [told] = json.loads(cluster.run("cordon", f"{NODE}/gpu-3", "-o", "json").output)
    assert told["reason"] == "fan on Friday"
    cluster.run("cordon", f"{NODE}/gpu-3", "--reason", "")
    assert cluster.plan()["spec"]["cordoned"] == [cluster.uuids[3]]


def test_uncordon_brings_it_back_and_clears_what_is_shown(cluster: Cluster) -> None:
    cluster.run("cordon", f"{NODE}/gpu-3")
    cluster.follow()
    cluster.ill.xid(3, 48)
    cluster.publish()
    answer = cluster.run("uncordon", f"{NODE}/gpu-3")
    assert answer.output == f"uncordoned {NODE}/gpu-3 ({cluster.uuids[3]})\ncleared: xid-48\n"
    cluster.ill.xid(3, 95)
    cluster.follow()
    assert cluster.ill.taints()["gpu-3"] == "xid-95"
    assert cluster.plan()["spec"]["cordoned"] == []


def test_uncordon_clears_what_only_the_plan_tells(cluster: Cluster) -> None:
    cluster.ill.xid(3, 48)
    for name in list(cluster.api.folder(SLICES)):
        cluster.api.drop(f"{SLICES}/{name}")
    inventory = encode_inventory(cluster.ill.node.node.inventory.states())
    status = PlanStatus(inventory=inventory, faults=cluster.ill.health.describe_faults())
    cluster.api.store(PLAN, spec={}, status=msgspec.to_builtins(status))
    answer = cluster.run("uncordon", f"{NODE}/gpu-3", "-o", "json")
    assert answer.exit_code == 0, answer.output
    [told] = json.loads(answer.output)
    assert told == {
        "node": NODE,
        "gpu": "gpu-3",
        "uuid": cluster.uuids[3],
        "cordoned": False,
        "cleared": ["xid-48", "needs-reset"],
        "left": [],
    }
    cluster.follow()
    assert cluster.ill.taints() == {}


def test_uncordon_says_once_what_it_dealt_with_and_that_first(cluster: Cluster) -> None:
    """One fault by the GPU's taints, and the same again in its plan, a minute later."""
    cluster.ill.xid(3, 48)
    cluster.publish()
    cluster.ill.now += 60
    cluster.ill.xid(3, 48)
    cluster.api.store(
        PLAN, spec={}, status=msgspec.to_builtins(PlanStatus(faults=cluster.ill.health.describe_faults()))
    )
    answer = cluster.run("uncordon", f"{NODE}/gpu-3")
    shown = f"cleared on {NODE}/gpu-3 ({cluster.uuids[3]}): needs-reset, xid-48\nit was not cordoned\n"
    assert answer.output == shown
    cluster.follow()
    assert cluster.ill.taints() == {}


def test_uncordon_of_a_gpu_that_is_well_writes_nothing(cluster: Cluster) -> None:
    answer = cluster.run("uncordon", f"{NODE}/gpu-3")
    assert answer.output == f"{NODE}/gpu-3 ({cluster.uuids[3]}) was not cordoned\n"
    assert cluster.api.folder(PATH) == {}


def test_uncordon_says_what_it_can_not_end(cluster: Cluster) -> None:
    cluster.ill.health.set_condition("gpu-3", ConditionType.STUCK, "a process still uses it")
    cluster.publish()
    answer = cluster.run("uncordon", cluster.uuids[3])
    assert "not cleared: stuck" in answer.output
    assert cluster.api.folder(PATH) == {}


def test_a_wrong_name_gets_the_nearest_there_are(cluster: Cluster) -> None:
    answer = cluster.run("cordon", f"{NODE}/gpu-9")
    assert answer.exit_code == 2
    assert f"GPU '{NODE}/gpu-9': no GPU has this name; accepted: a UUID (GPU-...) or NODE/gpu-N" in answer.output
    assert f"nearest: {NODE}/gpu-" in answer.output
    nearly = cluster.uuids[5][:-1]
    assert f"nearest: {NODE}/gpu-5 ({cluster.uuids[5]})" in cluster.run("uncordon", nearly).output


def test_a_slice_of_another_node_with_the_uuid_of_a_gpu_does_not_take_its_cordon(cluster: Cluster) -> None:
    """A plugin can publish any UUID on its own node, and machines can be copied."""
    uuid = cluster.uuids[0]
    pool = {"name": "node-z-gpu.tessera.dev", "generation": 1, "resourceSliceCount": 1}
    device = {"name": "gpu-5", "attributes": {"uuid": {"string": uuid}}}
    spec = {"driver": "gpu.tessera.dev", "nodeName": "node-z", "pool": pool, "devices": [device]}
    cluster.api.store(f"{SLICES}/zzz", spec=spec)
    refused = cluster.run("cordon", uuid)
    assert refused.exit_code == 2
    assert f"several nodes have a GPU with this UUID: {NODE}/gpu-0, node-z/gpu-5" in refused.output
    assert cluster.run("cordon", f"{NODE}/gpu-0").exit_code == 0
    assert cluster.api.folder(PATH).keys() == {NODE}


def test_a_cluster_without_gpus_says_so(cluster: Cluster) -> None:
    for name in list(cluster.api.folder(SLICES)):
        cluster.api.drop(f"{SLICES}/{name}")
    assert (
        "no node reports a GPU: check that a node plugin runs, and --driver-name" in cluster.run("cordon", "x").output
    )


def test_a_plan_that_the_controller_changes_meanwhile_is_read_again(cluster: Cluster) -> None:
    cluster.api.store(PLAN, spec={"epoch": "e1"})
    cluster.api.once("PATCH", lambda exchange: exchange.refuse(409, "the object has been modified"))
    answer = cluster.run("cordon", f"{NODE}/gpu-0", "--reason", "test")
    assert answer.exit_code == 0, answer.output
    assert cluster.plan()["spec"] == {"epoch": "e1", "cordoned": [f"{cluster.uuids[0]} test"]}


def test_plans_without_the_new_fields_are_read_as_before() -> None:
    plan = msgspec.convert({"metadata": {"name": "n1"}, "spec": {"epoch": "e"}}, GpuNodePlan)
    assert plan == GpuNodePlan(PlanMetadata("n1"), PlanSpec(epoch="e"))
