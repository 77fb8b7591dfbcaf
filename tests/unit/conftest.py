"""Fixtures of the tests that need no cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.node import NodeUnderTest, start_node


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    """A DGX H100 with nothing prepared."""
    return start_node(tmp_path)


@pytest.fixture
def silent_log() -> Iterator[None]:
    """Thousands of expected errors in the log take longer than what they are about."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
