"""The chart's schema and the reader of node plugin, controller and commands agree about ``nodeConfigs``."""

from __future__ import annotations

import json
from typing import Any

import helm_python
from hypothesis import example, given
from hypothesis import strategies as st

from driver.config.node_configs import read_configs
from driver.errors import UsageError
from tests.support.chart import rendered

GPUS = ("all", "0", "17", "GPU-1a2b3c4d-0000", "0000:1b:00.0", "NVIDIA L4", "NVIDIA H100 80GB HBM3", "")
SELECTIONS = st.lists(st.sampled_from(GPUS), max_size=3).map(", ".join) | st.text("0aZ-:. ,;=NgVb", max_size=8)
COUNTS = st.sampled_from(["0", "00", "1", "2", "9", "10", "32", "33", "99", "032", "x", ""])
PROFILES = st.sampled_from(["1g.10gb", "3g.40gb,1g.10gb+me", "1g.10gb, 2g.20gb", "1g", ""])

INSTANCES = ("1c.3g.40gb", " 2c.4g.40gb ", "3c.7g.80gb", "1c.2g.10gb+me", "4c.4g.40gb", "3g.40gb", "0c.3g.40gb", "")


def by_gpu(values: st.SearchStrategy[str], separator: str) -> st.SearchStrategy[str]:
    entry = st.tuples(st.sampled_from(GPUS), values).map("=".join)
    return st.lists(entry | st.sampled_from(["", "0"]), max_size=3).map(separator.join)


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "includeGpus": SELECTIONS,
        "excludeGpus": SELECTIONS,
        "migGpus": SELECTIONS,
        "sharesOnly": SELECTIONS,
        "shares": by_gpu(COUNTS, ","),
        "shared": by_gpu(st.sampled_from(["time-slicing", "mps", "mig", ""]), ","),
        "layout": by_gpu(PROFILES, ";"),
        "computeInstances": st.lists(st.sampled_from(INSTANCES), max_size=3).map(",".join),
        "publish": st.sampled_from(["curated", "complete", "all", ""]),
        "existingPartitions": st.sampled_from(["ignore", "publish", "none"]),
        "neighbours": st.sampled_from(["refuse", "exclude", 1]),
        "memoryHook": st.sampled_from(["auto", "none", "/usr/bin/hook"]),
        "frameworkVariables": st.sampled_from(["none", "jax", "pytorch", "jax,pytorch", "tensorflow"]),
        "share": st.just("0=2"),
    },
)
CONFIGS = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "a100-shared", "x" * 63, "x" * 64, "-a", "a b", "", 7])},
    optional={
        "nodeSelector": st.sampled_from([{}, {"gpu": "l4"}, {"gpu": 1}, None, []]),
        "settings": SETTINGS | st.sampled_from([None, [], "all=4"]),
        "selector": st.just({}),
    },
)


def refusal_of_the_reader(configs: list[Any]) -> str:
    try:
        read_configs(json.dumps(configs))
    except UsageError as error:
        return str(error)
    return ""


def refusal_of_the_chart(configs: list[Any]) -> str:
    try:
        rendered({"nodeConfigs": configs})
    except helm_python.HelmError as error:
        return str(error)
    return ""


@given(CONFIGS)
@example({"name": "a", "settings": {"shares": "all=4, 0=2", "layout": "0=3g.40gb;NVIDIA L4=1g.10gb"}})
@example({"name": "a", "settings": {"excludeGpus": "zero"}})
def test_the_chart_refuses_what_is_wrong_in_form_and_nothing_that_nodes_accept(
    config: dict[str, Any],
) -> None:
    by_reader, by_chart = refusal_of_the_reader([config]), refusal_of_the_chart([config])
    assert by_reader or not by_chart, by_chart
    # A pattern can not count names, and knows no profiles.
    if by_reader and not by_chart:
        assert ".layout" in by_reader or "give it one" in by_reader, by_reader
