"""``tessera template``: its documents, and what it leaves out of a node that exists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from driver.model.gpu import MigMode
from driver.model.plan import PATH, PlanStatus
from driver.model.reported_gpus import GpuReport, encode_inventory
from driver.model.shared_memory import MemoryLimit, SharedMemory, SharingStrategy
from tessera.cli import main
from tests.support.api_server import ObjectApi
from tests.support.gpus import gpu_of
from tests.support.published import devices_in
from tests.unit.tessera.test_cli import KUBECONFIG

NODE = "worker-7"
OTHERS = "00000000-0000-0000-0000-000000000000"

LABELS = {
    "kubernetes.io/hostname": NODE,
    "gpu.tessera.dev/fabric-clique": "9b6b6c8e.7",
    "example.com/pool": "a",
    "gpu.tessera.dev/publish": "curated",
}
TAINTS = [
    {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "timeAdded": "2026-11-23T10:00:00Z"},
    {"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"},
    {"key": "dedicated", "value": "training", "effect": "NoSchedule"},
]
STATUS = {
    "capacity": {"cpu": "64", "memory": "1Ti", "pods": "110"},
    "allocatable": {"cpu": "63", "memory": "1000Gi", "pods": "110"},
    "addresses": [{"type": "InternalIP", "address": "10.1.2.3"}],
    "nodeInfo": {"architecture": "arm64", "operatingSystem": "linux", "machineID": "77", "kubeletVersion": "v1.37.1"},
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["template", *arguments])


def printed(*arguments: str) -> list[dict[str, Any]]:
    answer = run(*arguments, "-o", "json")
    assert answer.exit_code == 0, answer.output
    documents: list[dict[str, Any]] = json.loads(answer.stdout)
    return documents


@pytest.fixture
def api() -> Iterator[ObjectApi]:
    with ObjectApi() as server:
        server.store(f"/api/v1/nodes/{NODE}", spec={"taints": TAINTS, "providerID": "aws:///i-77"}, status=STATUS)
        server.folder("/api/v1/nodes")[NODE]["metadata"]["labels"] = LABELS
        report(server, reports())
        yield server


@pytest.fixture
def like(api: ObjectApi, tmp_path: Path) -> list[str]:
    server = {"clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump({**KUBECONFIG, **server}))
    return ["--like", NODE, "--kubeconfig", str(path)]


def reports(fault: str | None = None) -> list[GpuReport]:
    """Two H100, one of them cut into partitions."""
    gpus = [replace(gpu_of(minor=minor), fabric_clique="9b6b6c8e-1d2e-3f4a-5b6c-9c607a414b8e.7") for minor in range(2)]
    modes = (MigMode.ENABLED, MigMode.DISABLED)
    return [
        GpuReport(replace(gpu, mig_mode=mode), gpu.minor, shares=10 * gpu.minor, fault=fault, foreign=3)
        for gpu, mode in zip(gpus, modes, strict=True)
    ]


def report(api: ObjectApi, gpus: list[GpuReport], **status: Any) -> None:
    written = msgspec.to_builtins(PlanStatus(inventory=encode_inventory(gpus), **status))
    api.store(f"{PATH}/{NODE}", spec={"held": ["gpu-0-mig-1g10gb-0 default/a"]}, status=written)


def test_yaml_has_one_document_for_each_object() -> None:
    answer = run("--gpus", "sim:h100-1", "--name", "new-1")
    documents = list(yaml.safe_load_all(answer.stdout))
    assert "&id" not in answer.stdout
    assert documents == printed("--gpus", "sim:h100-1", "--name", "new-1")
    assert [each["kind"] for each in documents] == ["Node", *["ResourceSlice"] * 3]
    assert documents[0]["metadata"]["labels"]["gpu.tessera.dev/publish"] == "complete"


def test_a_new_node_has_nothing_of_the_one_that_it_is_like_but_its_kind(like: list[str]) -> None:
    [node, *slices] = printed(*like, "--name", "new-1")
    assert node["metadata"]["labels"] == {
        "kubernetes.io/hostname": "new-1",
        "example.com/pool": "a",
        "gpu.tessera.dev/publish": "complete",
    }
    assert node["spec"] == {"taints": [{"key": "dedicated", "value": "training", "effect": "NoSchedule"}]}
    assert node["status"]["allocatable"] == STATUS["allocatable"]
    assert node["status"]["nodeInfo"] == {
        "architecture": "arm64",
        "operatingSystem": "linux",
        "kubeletVersion": "v1.37.1",
    }
    text = json.dumps(slices)
    assert not [own for own in (NODE, '"GPU-0"', '"GPU-1"', "9b6b6c8e", "taints") if own in text]
    devices = {device["name"]: device for device in devices_in(slices)}
    assert sum("-mig-" in name for name in devices) == 50
    assert {device["attributes"].get("migMode", {}).get("string") for device in devices.values()} <= {None, "disabled"}
    assert devices["gpu-0"]["attributes"]["fabricClique"] == {"string": f"{OTHERS}.7"}


def test_a_node_that_is_described_has_the_labels_and_the_resources_that_are_given() -> None:
    node = printed("--gpus", "sim:gh200", "--labels", "kubernetes.io/arch=arm64", "--resources", "cpu=72,pods=110")[0]
    own = {"kubernetes.io/hostname": "template", "gpu.tessera.dev/publish": "complete"}
    assert node["metadata"]["labels"] == {"kubernetes.io/arch": "arm64", **own}
    assert node["status"]["capacity"] == node["status"]["allocatable"] == {"cpu": "72", "pods": "110"}


def test_gpus_that_run_in_mig_mode_after_a_reset_publish_partitions_instead_of_the_full_gpu() -> None:
    for flags, cut in (((), ""), (("--mig-gpus", "1,3"), "13"), (("--mig-gpus", "all"), "0123")):
        names = [device["name"] for device in devices_in(printed("--gpus", "sim:a30-4", *flags)[1:])]
        full = {f"gpu-{number}" for number in "0123" if number not in cut}
        assert {name for name in names if name.count("-") == 1} == full
        assert {name.split("-")[1] for name in names if "-mig-" in name} == set(cut)


def test_a_shared_gpu_of_the_template_is_shared_as_the_flag_or_the_node_says(api: ObjectApi, like: list[str]) -> None:
    by_memory = SharedMemory(SharingStrategy.MPS, 79 << 30, MemoryLimit.MPS)
    report(api, [replace(entry, shared=by_memory) for entry in reports()[1:]])
    for arguments, limit in ((("--gpus", "sim:h100-1", "--shared", "all=time-slicing"), "none"), (like, "mps")):
        [shared] = [device for device in devices_in(printed(*arguments)[1:]) if device["name"].endswith("-shared")]
        assert shared["allowMultipleAllocations"]
        assert shared["attributes"]["memoryLimit"] == {"string": limit}


def test_the_slices_count_themselves(like: list[str]) -> None:
    pools = [item["spec"]["pool"] for item in printed(*like, "--name", "new-1")[1:]]
    assert pools == [
        *[{"name": "new-1-gpu.tessera.dev", "generation": 1, "resourceSliceCount": 3}] * 3,
        {"name": "new-1-gpu.tessera.dev-monitor", "generation": 1, "resourceSliceCount": 1},
    ]


def test_cluster_autoscaler_gets_the_objects_and_the_annotations(like: list[str]) -> None:
    [document] = printed(*like, "--for", "cluster-autoscaler")
    objects = printed(*like)
    assert [document["externalgrpc"]["node"], *document["externalgrpc"]["resourceSlices"]] == objects
    prefix = "capacity.cluster-autoscaler.kubernetes.io/"
    assert document["clusterapi"]["annotations"] == {
        f"{prefix}cpu": "64",
        f"{prefix}memory": "1Ti",
        f"{prefix}maxPods": "110",
        f"{prefix}dra-driver": "gpu.tessera.dev",
        f"{prefix}gpu-count": "2",
        f"{prefix}labels": "example.com/pool=a,gpu.tessera.dev/publish=complete",
        f"{prefix}taints": "dedicated=training:NoSchedule",
    }


def test_karpenter_gets_templates_without_a_node(like: list[str]) -> None:
    [document] = printed(*like, "--for", "karpenter", "--driver-name", "gpu.nvidia.com", "--name", "new-1")
    templates = document["resourceSliceTemplates"]
    assert {each["driver"] for each in templates} == {"gpu.nvidia.com"}
    names = ["new-1-gpu.nvidia.com"] * 3
    assert [each["pool"]["name"] for each in templates] == [*names, "new-1-gpu.nvidia.com-monitor"]
    assert [set(each) - {"driver", "pool"} for each in templates] == [{"sharedCounters"}, *[{"devices"}] * 3]
    slices = [item["spec"] for item in printed(*like, "--driver-name", "gpu.nvidia.com", "--name", "new-1")[1:]]
    assert list(devices_in({"spec": each} for each in templates)) == list(devices_in({"spec": s} for s in slices))


def test_a_gpu_that_is_out_of_order_is_free_in_the_template_and_people_are_told(
    api: ObjectApi, like: list[str]
) -> None:
    healthy = printed(*like)
    report(api, reports(fault="xid-79"))
    answer = run(*like, "-o", "json")
    assert json.loads(answer.stdout) == healthy
    assert "gpu-0 of worker-7 can't be used at present (xid-79)" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ([], 2, "give either --gpus (such as sim:dgx-h100) or --like"),
        (["--gpus", "sim:cray-1"], 2, "dgx-h100"),
        (["--gpus", "sim:a30-4", "--mig-gpus", "0;1"], 2, "--mig-gpus 0;1: '0;1' is no index"),
        (["--gpus", "sim:h100-1", "--name", "New"], 2, "--name New: must be a name for a Node object"),
        (["--gpus", "sim:h100-1", "--driver-name", "Bad"], 2, "--driver-name Bad: must be a DNS subdomain"),
        (["--gpus", "sim:h100-1", "--resources", "192"], 2, "'192' is not NAME=QUANTITY, such as cpu=192"),
        (["--gpus", "sim:h100-1", "--labels", "a=b,c"], 2, "'c' is not NAME=VALUE, such as kubernetes.io/arch=arm64"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(arguments: list[str], code: int, expected: str) -> None:
    answer = run(*arguments)
    assert (answer.exit_code, expected in answer.output) == (code, True), answer.output


def test_a_node_without_report_or_counters_has_no_template(api: ObjectApi, like: list[str]) -> None:
    for status, code, expected in (
        ({"dropped": ("consumesCounters",)}, 3, "the API server does not keep consumesCounters"),
        ({"inventory": ""}, 1, "lists no GPU"),
        ({"inventory": "{"}, 1, "can't be read"),
    ):
        report(api, reports(), **{key: value for key, value in status.items() if key != "inventory"})
        if "inventory" in status:
            api.folder(PATH)[NODE]["status"] = status
        answer = run(*like)
        assert (answer.exit_code, expected in answer.output) == (code, True), answer.output
    api.drop(f"{PATH}/{NODE}")
    assert "which the controller creates" in run(*like).output
    api.drop(f"/api/v1/nodes/{NODE}")
    assert (answer := run(*like)).exit_code == 2
    assert "no such Node" in answer.output
