"""Reading YAML files of users, also hostile ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import thread_time
from typing import Any

import pytest
import yaml

from driver.config.libyaml_loader import YamlLoader, read_yaml
from tests.fuzz.objects import nested

TOO_LARGE = f"a: 1{':00' * 200}.5"
"""A number by its syntax, to the base 60."""


@pytest.mark.parametrize("part", ["[", "- ", "{a: ", "? ", "{? ", "[a, "])
def test_what_is_nested_too_deeply_is_refused(part: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_yaml(part * 50_000)


def test_deeply_nested_lists_take_a_fraction_of_the_time_of_pyyaml() -> None:
    text = nested(depth=300, opening="[", closing="]")
    assert read_yaml(text) == yaml.safe_load(text)
    assert _seconds(read_yaml, text) < _seconds(yaml.safe_load, text) / 2


def _seconds(read: Callable[[str], Any], text: str) -> float:
    """Processor time, the least of three."""
    took = []
    for _ in range(3):
        began = thread_time()
        read(text)
        took.append(thread_time() - began)
    return min(took)


@pytest.mark.parametrize(
    "text", ["a: 0o17\nb: 017\nc: 1_000\nd: yes", "a: &x [1]\nb: *x", "a: |\n  x\n", "\u00e9: 2026-11-26", "null"]
)
def test_the_content_is_what_pyyaml_reads(text: str) -> None:
    assert read_yaml(text) == yaml.safe_load(text)
    assert list(yaml.load_all(f"{text}\n---\n{text}".encode(), YamlLoader)) == [yaml.safe_load(text)] * 2


@pytest.mark.parametrize(
    "text", ["a: 2024-13-45", "!!int x", "a: \x00", "a: b: c", "!foo x", "- a\n---\n- b", TOO_LARGE]
)
def test_what_is_no_yaml_is_refused_with_one_kind_of_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)


@pytest.mark.parametrize("text", ["\U0001f600", "\\\U0001f600", "\\\\ud83d\\ude00", "a\u00e9\U0001f600\U0001f680"])
def test_json_may_escape_every_character(text: str) -> None:
    escaped = json.dumps({"a": text})
    assert read_yaml(escaped) == read_yaml(escaped.encode()) == {"a": text}


def test_half_a_character_is_refused() -> None:
    with pytest.raises(yaml.YAMLError):
        read_yaml(b'{"a": "\\ud83d\\ud83d"}')
