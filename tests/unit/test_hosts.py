"""Where a node's hardware is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.config.settings import node_settings
from driver.errors import EnvironmentFault
from tessera.hosts import open_host


@pytest.mark.parametrize("driver_root", ["/", "/run/nvidia/driver"])
def test_in_a_container_nvmls_library_is_the_one_of_the_driver_root(tmp_path: Path, driver_root: str) -> None:
    library = tmp_path / driver_root.lstrip("/") / "usr/lib64/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.write_text("not a library at all")
    settings = node_settings(node_name="n1", host_root=tmp_path, driver_root=driver_root)
    with pytest.raises(EnvironmentFault, match=rf"{library}: can't be loaded"), open_host(settings, lasting=True):
        pass
