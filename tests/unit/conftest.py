"""Fixtures of the tests that need no cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.node import NodeUnderTest, start_node


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    """A DGX H100 with nothing prepared."""
    return start_node(tmp_path)
