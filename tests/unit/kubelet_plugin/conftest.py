"""Where the plugins of these tests live."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.killable import Zygote, zygote_in


@pytest.fixture
def root() -> Iterator[Path]:
    """Short: below it are unix sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def parent() -> Iterator[Zygote]:
    """What plugins are forked from."""
    with tempfile.TemporaryDirectory(prefix="tz-") as name:
        (Path(name) / "run").mkdir()
        with zygote_in(Path(name), Path(name)) as found:
            yield found
