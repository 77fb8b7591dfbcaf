"""The kept table: what the real cluster said, and of which Kubernetes it was."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PATH = Path(__file__).with_name("verdicts.json")


@dataclass(frozen=True)
class Row:
    """``devices``: whether each is selected, or "error"; empty for an expression that is not valid."""

    expression: str
    valid: bool
    devices: dict[str, bool | Literal["error"]] = field(default_factory=dict)


def read() -> dict[str, Row]:
    """The rows by "theme: name"."""
    return {name: Row(**row) for name, row in json.loads(PATH.read_text())["expressions"].items()}


def write(kubernetes: str, rows: dict[str, Row]) -> None:
    """Keep them; one line a row, so that a difference can be read."""
    lines = [f"    {json.dumps(name)}: {json.dumps(vars(row))}" for name, row in rows.items()]
    head = f'{{\n  "kubernetes": {json.dumps(kubernetes)},\n  "generatedBy": "make conformance",\n  "expressions": {{\n'
    PATH.write_text(head + ",\n".join(lines) + "\n  }\n}\n")
