"""``tessera kueue config``: its documents, which `tessera lint --kueue` accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from driver.model.plan import COUNTERS_FIELD, PATH, PlanStatus
from driver.model.reported_gpus import GpuReport, encode_inventory
from driver.model.shared_memory import SharedMemory, SharingStrategy
from tessera.cli import main
from tests.support.api_server import ObjectApi
from tests.support.gpus import gpu_of
from tests.unit.tessera.test_cli import KUBECONFIG

NODES = ("dgx-h100", "dgx-a100", "dgx-h200", "l40s-8", "gb200-nvl72-tray")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["kueue", "config", *arguments])


def printed(*arguments: str) -> list[dict[str, Any]]:
    answer = run(*arguments, "-o", "json")
    assert answer.exit_code == 0, answer.output
    documents: list[dict[str, Any]] = json.loads(answer.stdout)
    return documents


def mapping_of(document: dict[str, Any]) -> dict[str, Any]:
    [mapping] = document["resources"]["deviceClassMappings"]
    found: dict[str, Any] = mapping
    return found


def quota_of(queue: dict[str, Any]) -> Any:
    return queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["nominalQuota"]


@pytest.mark.parametrize("charge", ["memory", "devices"])
@pytest.mark.parametrize("node", NODES)
def test_lint_finds_nothing_in_what_is_printed(node: str, charge: str, tmp_path: Path) -> None:
    answer = run("--gpus", f"sim:{node}", "--shares", "all=4", "--queues", "--charge", charge)
    (tmp_path / "printed.yaml").write_text(answer.stdout)
    assert [each["kind"] for each in yaml.safe_load_all(answer.stdout)] == [
        "Configuration",
        "ResourceFlavor",
        "ClusterQueue",
        "LocalQueue",
    ]
    linted = CliRunner().invoke(main, ["lint", "--kueue", str(tmp_path)])
    assert (linted.exit_code, linted.output) == (0, "4 objects checked, nothing found\n")


def test_one_quota_of_memory_covers_all_classes_of_the_gpus() -> None:
    [configuration] = printed("--gpus", "sim:h100-1")
    mapping = mapping_of(configuration)
    assert mapping["deviceClassNames"] == [
        "gpu-training",
        "gpu-inference",
        *(f"gpu-inference-{each}" for each in ("1g-10gb", "1g-20gb", "2g-20gb", "3g-40gb", "4g-40gb", "7g-80gb")),
    ]
    assert mapping["sources"][0]["counter"]["name"] == "memory"


def test_classes_for_which_a_mapping_has_no_room_are_named() -> None:
    answer = run("--gpus", "sim:h100-1", "--shares", "all=4")
    assert "at most 8 classes; not covered: gpu-inference-7g-80gb" in answer.stderr


def test_quotas_are_what_the_nodes_have() -> None:
    for nodes in (1, 3):
        *_, queue, _ = printed("--gpus", "sim:dgx-h100", "-n", str(nodes), "--queues", "--charge", "devices")
        assert quota_of(queue) == 8 * nodes
    *_, one, _ = printed("--gpus", "sim:h100-1", "--queues")
    assert quota_of(one) == "81559Mi"


@pytest.fixture
def api() -> Iterator[ObjectApi]:
    with ObjectApi() as server:
        yield server


def report(api: ObjectApi, node: str, *products: str, shared: SharedMemory | None = None, **status: Any) -> None:
    gpus = [GpuReport(gpu_of(product, minor), minor, shared=shared) for minor, product in enumerate(products)]
    written = msgspec.to_builtins(PlanStatus(inventory=encode_inventory(gpus), **status))
    api.store(f"{PATH}/{node}", spec={}, status=written)


@pytest.fixture
def cluster(api: ObjectApi, tmp_path: Path) -> tuple[str, str]:
    server = {"clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump({**KUBECONFIG, **server}))
    return "--kubeconfig", str(path)


H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"


def test_the_gpus_of_the_cluster_are_those_that_its_nodes_report(api: ObjectApi, cluster: tuple[str, str]) -> None:
    report(api, "n1", H100, H100)
    report(api, "n2", L4)
    *_, queue, _ = printed(*cluster, "--queues", "--charge", "devices")
    assert quota_of(queue) == 3
    answer = run(*cluster)
    assert f"products: {H100}, {L4}. A request that selects none is charged as the largest" in answer.stderr


def test_it_says_that_claims_of_shared_gpus_need_another_source(api: ObjectApi, cluster: tuple[str, str]) -> None:
    report(api, "n1", L4, shared=SharedMemory(SharingStrategy.TIME_SLICING, 22 << 30))
    answer = run(*cluster)
    assert "class gpu-shared is not covered: its claims need a capacity source" in answer.stderr
    assert answer.exit_code == 0


def test_memory_can_not_be_charged_where_counters_are_off(api: ObjectApi, cluster: tuple[str, str]) -> None:
    report(api, "n1", H100, dropped=(COUNTERS_FIELD,))
    answer = run(*cluster)
    assert (answer.exit_code, "give --charge devices" in answer.stderr) == (3, True)
    assert mapping_of(printed(*cluster, "--charge", "devices")[0])["deviceClassNames"] == ["gpu-training"]


def test_a_cluster_without_gpus_is_exit_code_3(api: ObjectApi, cluster: tuple[str, str]) -> None:
    api.folder(PATH)
    answer = run(*cluster)
    assert (answer.exit_code, "no GpuNodePlan lists a GPU" in answer.stderr) == (3, True)


def test_options_of_simulated_nodes_without_any_are_exit_code_2() -> None:
    answer = run("-n", "3")
    assert (answer.exit_code, "give --gpus" in answer.stderr) == (2, True)
