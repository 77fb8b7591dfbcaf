"""What a plugin looks at before it asks another for the node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver.config.settings import node_settings
from tessera import preflight
from tessera.hosts import open_host
from tests.support.api_server import ObjectApi
from tests.support.claims import NODE


def test_the_driver_is_open_once_however_often_it_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays open, so that GPUs stay awake; a newcomer may look for hours."""
    now = most = 0

    @contextmanager
    def counted(*arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal now, most
        with open_host(*arguments, **options) as found:
            now, most = now + 1, max(most, now + 1)
            try:
                yield found
            finally:
                now -= 1

    monkeypatch.setattr("tessera.preflight.open_host", counted)
    with ObjectApi() as api, ExitStack() as awake:
        api.store(f"/api/v1/nodes/{NODE}")["metadata"]["uid"] = "uid"
        settings = node_settings(
            node_name=NODE, gpus="sim:h100-pcie-4", host_root=tmp_path / "host", sim_latency="zero",
            state_dir=tmp_path / "state", kubeconfig=kubeconfig(tmp_path, api),
        )  # fmt: skip
        for _ in range(4):
            preflight.check(settings, awake)
            assert now == 1
    assert now == 0
    assert most == 2, "the next is open before the last is closed"


def kubeconfig(folder: Path, api: ObjectApi) -> Path:
    path = folder / "config"
    content = {
        "clusters": [{"name": "c", "cluster": {"server": api.server.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(content))
    return path
