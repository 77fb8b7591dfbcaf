"""The real Kueue manager refuses at its start the Configurations that ``tessera lint --kueue`` calls errors."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.plugin import TESSERA
from tests.support.queue_objects import CONFIGURATIONS, REFUSED_BY_DEFAULT, REFUSED_LATER

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(60)]

REFUSED = "Unable to validate the configuration"
ACCEPTED = '"Initializing"'
"""What the manager logs next; then it ends, because it has no cluster."""

LOAD_S = 30


def started(program: Path, folder: Path, configuration: dict[str, Any]) -> str:
    """The log of a manager with this Configuration and without a cluster."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**configuration, "namespace": "kueue-system"}))
    environment = {**os.environ, "KUBECONFIG": str(folder / "none")}
    command = [str(program), f"--config={file}"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LOAD_S, check=False)
    return answer.stdout + answer.stderr


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_manager_refuses_what_lint_calls_an_error(name: str, kueue_program: Path, tmp_path: Path) -> None:
    configuration, findings = CONFIGURATIONS[name]
    errors = "error" in {severity for _, severity in findings}
    log = started(kueue_program, tmp_path, configuration)
    refused = (errors and name not in REFUSED_LATER) or name in REFUSED_BY_DEFAULT
    assert (REFUSED in log, ACCEPTED in log) == (refused, not refused), log


@pytest.mark.parametrize("gpus", ["dgx-h100", "dgx-a100", "l40s-8"])
def test_the_manager_accepts_what_tessera_prints(gpus: str, kueue_program: Path, tmp_path: Path) -> None:
    printed = subprocess.run([TESSERA, "kueue", "config", "--gpus", f"sim:{gpus}", "-o", "json"], capture_output=True)
    [configuration] = json.loads(printed.stdout)
    assert ACCEPTED in started(kueue_program, tmp_path, configuration)
