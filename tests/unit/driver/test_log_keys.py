"""Every key of a log line is in docs/logs.md, and the other way round: whoever filters by one finds all that has it."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from driver.logs import STANDARD, StructuredFormatter

ROOT = Path(__file__).parents[3]
FOLDERS = ("controller", "deviceclasses", "driver", "kubelet_plugin", "tessera")
ROW = re.compile(r"^\| (`[^|]*`) \|", re.MULTILINE)
STEPS = ("_step", "steps")
"""What begins a step; its keywords are keys of the line that tells how long it took."""


def keys_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "extra" for t in node.targets):
            yield from _of_dict(node.value)


def _of_call(call: ast.Call) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    for keyword in call.keywords:
        if keyword.arg == "extra":
            yield from _of_dict(keyword.value)
        elif name in STEPS and keyword.arg:
            yield keyword.arg


def _of_dict(value: ast.AST) -> Iterator[str]:
    for key in value.keys if isinstance(value, ast.Dict) else ():
        if key is not None:
            assert isinstance(key, ast.Constant), ast.unparse(value)
            yield str(key.value)


def used() -> dict[str, str]:
    """Every key, and a file that has it."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {key: str(path) for path in files for key in keys_in(ast.parse(path.read_text()))}


def documented() -> set[str]:
    rows = ROW.findall((ROOT / "docs" / "logs.md").read_text())
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_key_of_the_code_is_documented_and_every_documented_key_is_used() -> None:
    assert used().keys() - documented() == set()
    assert documented() - used().keys() == set()


def test_a_key_is_one_camel_case_word_and_hides_nothing_of_the_line_itself() -> None:
    for key, file in used().items():
        assert re.fullmatch(r"[a-z]+([A-Z][a-z]+|[A-Z]+)*", key), (key, file)
        assert key not in {*STANDARD, "time", "level", "message", "trace"}, (key, file)


def test_a_json_line_has_the_keys_of_what_it_is_about() -> None:
    record = logging.makeLogRecord(
        {"msg": "prepared %s", "args": ("it",), "levelno": logging.INFO, "levelname": "INFO"}
    )
    record.claim, record.gpu = "team/train", "GPU-1"
    line = json.loads(StructuredFormatter("json").format(record))
    assert (line["message"], line["level"], line["claim"], line["gpu"]) == (
        "prepared it",
        "info",
        "team/train",
        "GPU-1",
    )
