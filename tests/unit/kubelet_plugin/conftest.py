"""Where the plugins of these tests live."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def root() -> Iterator[Path]:
    """Short: below it are unix sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)
