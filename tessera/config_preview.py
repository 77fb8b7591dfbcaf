"""What an edit of the configurations of nodes would change, node by node (pure, except for ``read_file``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from driver.config.libyaml_loader import read_yaml
from driver.config.node_configs import NO_CONFIG, SETTING_FIELDS, NodeConfig, chosen_config, read_configs
from driver.errors import UsageError
from driver.kube.types import GpuNodePlan
from kubelet_plugin.inventory.standalone_offers import check_layouts
from kubelet_plugin.settings import node_settings
from tessera.gpu_names_and_faults import GpuName
from tessera.gpu_sources import readable_reports
from tessera.tables_and_drawings import columns

COLUMNS = {"NODE": "node", "NOW": "now", "THEN": "then", "CHANGES": "changes", "RESTART": "restart", "CLAIMS": "claims"}
"""Keys of the JSON output by column of the table."""

FLAG = "(flag)"
"""The value of a setting that a configuration leaves to the flags of the plugin."""


def read_file(path: Path) -> tuple[NodeConfig, ...]:
    """The configurations in a file of chart values, or of the list alone. Raises UsageError."""
    try:
        content = read_yaml(path.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    configs = content.get("nodeConfigs") or [] if isinstance(content, dict) else content
    try:
        return read_configs(json.dumps(configs, default=str))
    except UsageError as error:
        raise UsageError(f"--config {path}: {error}") from error


def preview(
    now: Sequence[NodeConfig],
    then: Sequence[NodeConfig],
    nodes: Mapping[str, Mapping[str, str]],
    plans: Sequence[GpuNodePlan],
) -> list[dict[str, Any]]:
    """One object a node with GPUs: its configuration now and then, what changes, and which claims that concerns.

    ``nodes`` are the labels of Nodes. ``error`` says why a node would keep what it has.
    """
    plan_of = {plan.metadata.name: plan for plan in plans}
    return [_of_node(plan_of[name], nodes.get(name, {}), now, then) for name in sorted(plan_of.keys() & nodes.keys())]


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The objects of ``preview`` as a table, followed by a line for each node that would keep its configuration."""
    cells = [[_cell(row[key]) for key in COLUMNS.values()] for row in rows]
    restarts = sum(row["restart"] for row in rows)
    errors = [f"{row['node']} keeps its configuration: {row['error']}" for row in rows if row["error"]]
    return "\n".join([columns(list(COLUMNS), cells), "", *errors, f"{len(rows)} nodes, {restarts} of them restart"])


def _of_node(
    plan: GpuNodePlan, labels: Mapping[str, str], now: Sequence[NodeConfig], then: Sequence[NodeConfig]
) -> dict[str, Any]:
    name, error = plan.metadata.name, None
    before = next((config for config in now if config.name == plan.status.config.name), NO_CONFIG)
    after = before
    try:
        config = chosen_config(then, labels)
        _check(config, plan)
        after = config
    except UsageError as fault:
        error = str(fault)
    changes = dict(_changes(before, after))
    return {
        "node": name,
        "now": before.name or None,
        "then": after.name or None,
        "changes": changes,
        "restart": after.revision != before.revision,
        "claims": sorted({entry.partition(" ")[2] for entry in plan.spec.held} if changes else ()),
        "error": error,
    }


def _changes(before: NodeConfig, after: NodeConfig) -> Iterator[tuple[str, str]]:
    for name, flag in SETTING_FIELDS.items():
        values = before.settings.get(flag, FLAG), after.settings.get(flag, FLAG)
        if values[0] != values[1]:
            yield name, " -> ".join(values)


def _check(config: NodeConfig, plan: GpuNodePlan) -> None:
    """Raises UsageError if the GPUs of the node, or their claims, do not allow ``config``."""
    reports = readable_reports(plan)
    settings = node_settings(node_name=plan.metadata.name, **config.settings)
    check_layouts(settings.layout, settings.shares, [report.gpu for report in reports])
    for report in reports:
        name = GpuName(plan.metadata.name, report.number, report.gpu.uuid)
        if reason := settings.reason_against(report.gpu, [*filter(name.has, plan.spec.held_devices)]):
            raise UsageError(reason)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {change}" for name, change in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
