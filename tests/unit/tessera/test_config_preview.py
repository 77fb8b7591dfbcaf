"""The preview of an edit of nodeConfigs: which node gets what, and whom that concerns."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from driver.config.node_configs import NO_CONFIG, NodeConfig
from driver.errors import UsageError
from driver.kube.types import GpuNodePlan, PlanMetadata
from driver.model.plan import ConfigStatus, PlanSpec, PlanStatus
from driver.model.reported_gpus import GpuReport, encode_inventory
from tessera.config_preview import as_table, preview, read_file
from tests.support.gpus import gpu_of

NOW = (NodeConfig("shared", {"shares": "all=2"}, {"use": "shared"}),)
THEN = (
    NodeConfig("shared", {"shares": "all=4"}, {"use": "shared"}),
    NodeConfig("display", {"exclude_gpus": "0"}, {"use": "display"}),
    NodeConfig("open", {"publish": "complete"}, {}),
)


def plan(name: str, config: str = "", *held: str) -> GpuNodePlan:
    inventory = encode_inventory([GpuReport(gpu_of(), 0)])
    status = PlanStatus(inventory=inventory, config=ConfigStatus(config, NO_CONFIG.revision))
    return GpuNodePlan(PlanMetadata(name), PlanSpec(held=held), status)


PLANS = [plan("a", "shared", "gpu-0-share-1 team/notebook"), plan("b", "", "gpu-0 team/train"), plan("c")]
LABELS = {"a": {"use": "shared"}, "b": {"use": "display"}, "c": {}, "without-gpus": {}}


def test_every_node_with_gpus_has_a_row_with_changes_and_claims() -> None:
    a, _, c = preview(NOW, THEN, LABELS, PLANS)
    assert a == {
        "node": "a", "now": "shared", "then": "shared", "changes": {"shares": "all=2 -> all=4"}, "restart": True,
        "claims": ["team/notebook"], "error": None,
    }  # fmt: skip
    assert (c["now"], c["then"], c["changes"], c["restart"]) == (None, "open", {"publish": "(flag) -> complete"}, False)


def test_a_node_that_could_not_have_its_configuration_keeps_what_it_has() -> None:
    rows = preview(NOW, THEN, LABELS, PLANS)
    assert (rows[1]["then"], rows[1]["changes"]) == (None, {})
    assert rows[1]["error"] == "GPU 0 would not be managed, and claims have gpu-0"
    table = click.unstyle(as_table(rows))
    assert "b keeps its configuration: GPU 0 would not be managed" in table
    assert "3 nodes, 1 of them restart" in table


@pytest.mark.parametrize(
    "text", ["nodeConfigs:\n- {name: a, settings: {shares: 0=4}}\n", "- {name: a, settings: {shares: 0=4}}"]
)
def test_the_file_is_one_of_chart_values_or_the_list_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "values.yaml").write_text(text)
    assert read_file(tmp_path / "values.yaml") == (NodeConfig("a", {"shares": "0=4"}),)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file"), ("a: [", "expected"), ("nodeConfigs: 1", "must be a list"), ("[{name: a, x: 1}]", ".x 1")],
)
def test_a_file_that_can_not_be_used_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "values.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"--config .*values\.yaml") as refused:
        read_file(tmp_path / "values.yaml")
    assert said in str(refused.value)
