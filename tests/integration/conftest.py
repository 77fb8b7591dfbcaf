"""The real programs: binaries that ``make integration`` has built, or that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def program(variable: str) -> Path:
    """The binary or folder that ``variable`` names; skips the test if it names none."""
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"{variable} is not set; `make integration` builds the programs")
    path = Path(found)
    assert path.exists(), f"{variable}={found}: no such file or folder"
    return path


@pytest.fixture(scope="session")
def cluster_autoscaler() -> Path:
    return program("CLUSTER_AUTOSCALER")


@pytest.fixture(scope="session")
def kueue_program() -> Path:
    return program("KUEUE_MANAGER")


@pytest.fixture(scope="session")
def kueue_source() -> Path:
    return program("KUEUE_SOURCE")


@pytest.fixture(scope="session")
def volcano_program() -> Path:
    return program("VOLCANO_SCHEDULER")


@pytest.fixture(scope="session")
def volcano_source() -> Path:
    return program("VOLCANO_SOURCE")


@pytest.fixture(scope="session")
def prometheus_folder() -> Path:
    return program("PROMETHEUS")
