"""The kept answers of the real scheduler, and of which Kubernetes it was."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

PATH = Path(__file__).with_name("answers.json")


def read() -> dict[int, str]:
    """Answers by the number of the scenario."""
    return {int(number): answer for number, answer in json.loads(PATH.read_text())["answers"].items()}


def release() -> str:
    """The version of Kubernetes that gave them."""
    return str(json.loads(PATH.read_text())["kubernetes"])


def write(kubernetes: str, answers: Mapping[int, str]) -> None:
    """Keep them; one line a scenario, so that a difference can be read."""
    lines = [f'    "{number}": {json.dumps(answer)}' for number, answer in sorted(answers.items())]
    head = f'{{\n  "kubernetes": {json.dumps(kubernetes)},\n  "generatedBy": "make conformance-allocator",\n'
    PATH.write_text(head + '  "answers": {\n' + ",\n".join(lines) + "\n  }\n}\n")


def summary(answers: Mapping[int, str], different: Collection[int]) -> str:
    """How many scenarios had which kind of answer."""
    kinds = Counter("allocated" if ":" in answer else answer for answer in answers.values())
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{len(answers)} scenarios ({listed}): {len(different)} differences"
