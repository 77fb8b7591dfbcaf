"""Reading YAML files of users, also hostile ones."""

from __future__ import annotations

import json
from time import thread_time

import pytest
import yaml

from driver.config.yaml_reader import YamlLoader, read_yaml
from tests.fuzz.answers import ANSWER_SECONDS, Answers
from tests.fuzz.objects import Hostile

SLOW_SEED, SLOW_OBJECT = 23, 32
"""An object of the fuzz test with deeply nested lists: PyYAML's own scanner needed 1.5 s for its 9 kB."""

TOO_LARGE = f"a: 1{':00' * 200}.5"
"""A number by its syntax, to the base 60."""


@pytest.mark.parametrize("part", ["[", "- ", "{a: ", "? ", "{? ", "[a, "])
def test_what_is_nested_too_deeply_is_refused_at_once(part: str) -> None:
    began = thread_time()
    with pytest.raises(yaml.YAMLError):
        read_yaml(part * 50_000)
    assert thread_time() - began < ANSWER_SECONDS


def test_every_object_of_the_fuzz_test_is_answered_in_time() -> None:
    answers, hostile = Answers(), Hostile(SLOW_SEED)
    for number in range(SLOW_OBJECT + 1):
        answers.of_commands(hostile, number)
    assert not answers.failures
    assert answers.slowest_seconds < ANSWER_SECONDS / 4


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
