"""The real programs: binaries that ``make integration`` has built, or that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def program(variable: str) -> Path:
    """The binary that ``variable`` names; skips the test if it names none."""
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"{variable} names no binary; `make integration` builds it")
    path = Path(found)
    assert path.is_file(), f"{variable}={found}: no such file"
    return path


@pytest.fixture(scope="session")
def cluster_autoscaler() -> Path:
    return program("CLUSTER_AUTOSCALER")
