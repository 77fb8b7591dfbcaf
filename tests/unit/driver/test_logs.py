"""Logs: one line an event, facts as keys, and nothing in a fact that a terminal would obey."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.logs import StructuredFormatter, configure_logs


def line(style: str, message: str = "prepared claim", **facts: Any) -> str:
    record = logging.makeLogRecord({"msg": message, "levelname": "INFO", "created": 0.0, **facts})
    return StructuredFormatter(style).format(record)


def test_text_has_time_level_message_and_facts() -> None:
    assert line("text", claim="default/infer", devices=2) == (
        "1970-01-01T00:00:00.000Z INFO    prepared claim claim=default/infer devices=2"
    )


def test_json_is_one_object_a_line() -> None:
    assert json.loads(line("json", claim="default/infer", path=Path("/x"))) == {
        "time": "1970-01-01T00:00:00.000Z",
        "level": "info",
        "message": "prepared claim",
        "claim": "default/infer",
        "path": "/x",
    }


@pytest.mark.parametrize("style", ["text", "json"])
def test_empty_facts_are_left_out(style: str) -> None:
    shown = line(style, pod="", error=None, count=0)
    assert "pod" not in shown
    assert "error" not in shown
    assert "count" in shown


@pytest.mark.parametrize(
    "value",
    ["two words", 'a "quote"', "a=b", "line\nbreak", "carriage\rreturn", "\x1b[2Jclear", "a\tb", "\u2028", "\x00"],
)
@pytest.mark.parametrize("style", ["text", "json"])
def test_hostile_values_stay_on_their_line_and_do_nothing(style: str, value: str) -> None:
    shown = line(style, claim=value)
    assert shown.isprintable()
    assert json.dumps(value) in shown


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_traceback_is_one_fact_of_one_line(style: str) -> None:
    try:
        raise KeyError("defect")
    except KeyError:
        shown = line(style, exc_info=sys.exc_info())
    assert len(shown.splitlines()) == 1
    assert "KeyError" in shown
    assert "trace" in shown


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Put the root logger back as it was."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    urllib3_level = logging.getLogger("urllib3").level
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.getLogger("urllib3").setLevel(urllib3_level)


@pytest.mark.usefixtures("own_logging")
def test_logs_go_to_standard_error_from_the_chosen_level_on(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json", "warning")
    logging.getLogger("kubelet_plugin").info("quiet")
    logging.getLogger("kubelet_plugin").warning("loud")
    logging.getLogger("urllib3.connectionpool").warning("Retrying")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [json.loads(found)["message"] for found in captured.err.splitlines()] == ["loud"]
