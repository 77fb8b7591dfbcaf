"""Configurations of nodes: which one a node takes, and what is said of mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from driver.config.node_configs import CONFIG_LABEL, NO_CONFIG, NodeConfig, chosen_config, read_configs
from driver.errors import UsageError
from kubelet_plugin.settings import node_settings

SHARED = NodeConfig("shared", {"shares": "all=4"}, {"gpu": "l4"})
EVERYWHERE = NodeConfig("everywhere", {"publish": "complete"}, {})
BY_LABEL = NodeConfig("by-label", {"exclude_gpus": "0"}, None)
CONFIGS = (BY_LABEL, SHARED, EVERYWHERE)


def refusal(*configs: Any) -> str:
    with pytest.raises(UsageError) as refused:
        read_configs(json.dumps(configs))
    return str(refused.value)


def test_they_are_read_as_they_are_written() -> None:
    written = [
        {"name": "by-label", "settings": {"excludeGpus": "0"}, "nodeSelector": None},
        {"name": "shared", "nodeSelector": {"gpu": "l4"}, "settings": {"shares": "all=4"}},
        {"name": "everywhere", "nodeSelector": {}, "settings": {"publish": "complete"}},
    ]
    assert read_configs(json.dumps(written)) == CONFIGS
    assert read_configs("") == read_configs("[]") == ()


@pytest.mark.parametrize(
    ("labels", "config"),
    [
        pytest.param({"gpu": "l4", "zone": "a"}, SHARED, id="the first selector that matches"),
        pytest.param({"gpu": "h100"}, EVERYWHERE, id="an empty selector matches every node"),
        pytest.param({"gpu": "l4", CONFIG_LABEL: "by-label"}, BY_LABEL, id="the label comes before selectors"),
    ],
)
def test_a_node_takes_one_of_them(labels: dict[str, str], config: NodeConfig) -> None:
    assert chosen_config(CONFIGS, labels) is config


def test_a_node_that_none_selects_keeps_its_flags() -> None:
    assert chosen_config((BY_LABEL, SHARED), {"gpu": "h100"}) is NO_CONFIG
    flags = node_settings(node_name="n1", exclude_gpus="1")
    assert flags.configured(SHARED).exclude_gpus == flags.exclude_gpus
    assert flags.configured(BY_LABEL).configured(NO_CONFIG).exclude_gpus == flags.exclude_gpus


def test_a_label_that_names_none_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="no such configuration; accepted: by-label, shared, everywhere; did you mean"):
        chosen_config(CONFIGS, {CONFIG_LABEL: "shred"})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("x", 'nodeConfigs[0] "x": must be an object with fields name, nodeSelector, settings'),
        ({}, "nodeConfigs[0].name: must be a string"),
        ({"name": "a b"}, 'nodeConfigs[0].name "a b": must be the value of a label'),
        (
            {"name": "a", "selector": {}},
            "nodeConfigs[0].selector {}: no such field; accepted: name, nodeSelector,",
        ),
        (
            {"name": "a", "nodeSelector": {"gpu": 1}},
            "nodeConfigs[0].nodeSelector {...}: must be an object: labels",
        ),
        ({"name": "a", "settings": []}, "nodeConfigs[0].settings []: must be an object with fields includeGpus"),
        (
            {"name": "a", "settings": {"share": "0=2"}},
            "no such setting; accepted: includeGpus, excludeGpus, migGpus",
        ),
        ({"name": "a", "settings": {"shares": 4}}, "nodeConfigs[0].settings.shares 4: must be a string"),
        ({"name": "a", "settings": {"shares": "all=1"}}, 'nodeConfigs[0].settings.shares "all=1": '),
        ({"name": "a", "settings": {"excludeGpus": "zero"}}, 'nodeConfigs[0].settings.excludeGpus "zero": '),
        ({"name": "a", "settings": {"publish": "all"}}, "must be curated or complete"),
        ({"name": "a", "settings": {"layout": "all"}}, 'nodeConfigs[0].settings.layout "all": '),
    ],
)
def test_a_mistake_is_refused_with_path_value_and_what_is_accepted(config: Any, said: str) -> None:
    assert said in refusal(config)


def test_several_configurations_may_lack_a_name_or_have_a_wrong_one() -> None:
    said = refusal({}, {}, {"name": 5}, {"name": 5})
    assert [f"nodeConfigs[{at}].name" in said for at in range(4)] == [True] * 4


def test_all_mistakes_are_named_at_once() -> None:
    said = refusal({"name": "a", "settings": {"publish": "x", "shares": "y"}}, {"name": "a"})
    assert "publish" in said
    assert "shares" in said
    assert 'nodeConfigs[1].name "a": another configuration has that name' in said


@pytest.mark.parametrize("text", ["{", "null", "{}", '"configs"', "1e999999", "[" * 2000 + "]" * 2000])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="tessera-node-configs"):
        read_configs(text)


def test_the_revision_differs_only_with_settings_that_need_a_restart() -> None:
    live = NodeConfig("other", {**SHARED.settings, "publish": "complete"})
    assert live.revision == SHARED.revision
    assert EVERYWHERE.revision == NO_CONFIG.revision
    assert BY_LABEL.revision != SHARED.revision
