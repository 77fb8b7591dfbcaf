"""What ``tessera topology`` prints for each simulated node."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from tessera.cli import main

FOLDER = Path(__file__).parent / "topology"


def kept(node: str) -> Path:
    """The file with the output that somebody has compared with the facts."""
    return FOLDER / f"{node}.txt"


def printed(*arguments: str) -> str:
    """What the command prints now."""
    answer = CliRunner().invoke(main, ["topology", *arguments], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.output
