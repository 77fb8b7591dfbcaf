"""The plan's status shows what the slices show, whichever of the two is written first."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.model.plan import PATH
from driver.slices import publisher
from kubelet_plugin.plan import api as plan_api
from tests.harness.waiting import wait_for
from tests.support.claims import NODE
from tests.support.faulty_api import FaultyApi, PluginOnApi


@pytest.fixture
def root() -> Iterator[Path]:
    """Short: below it are unix sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


@pytest.mark.long
def test_a_status_written_before_the_slices_is_corrected_after_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_api, "STATUS_COALESCE_SECONDS", 0.0)
    monkeypatch.setattr(plan_api, "STATUS_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(publisher, "COALESCE_INTERVAL_SECONDS", 1.0)
    with FaultyApi() as api:
        plugin = PluginOnApi(root, api)

        def offered() -> int:
            status = api.folder(PATH)[NODE].get("status", {})
            return int(status.get("summary", {}).get("offered", 0))

        with plugin.running():
            wait_for(plugin.published, 60, "the first slices")
            wait_for(lambda: offered() == len(plugin.published()), 60, "the status counts the offers in the slices")
