"""Where a node's hardware is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.errors import EnvironmentFault, UsageError
from driver.hardware import host as hosts
from kubelet_plugin.inventory.open_hardware import missing_hardware, open_host
from kubelet_plugin.settings import NodeSettings, node_settings


@pytest.mark.parametrize("driver_root", ["/", "/run/nvidia/driver"])
def test_in_a_container_nvmls_library_is_the_one_of_the_driver_root(tmp_path: Path, driver_root: str) -> None:
    library = tmp_path / driver_root.lstrip("/") / "usr/lib64/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.write_text("not a library at all")
    settings = node_settings(node_name="n1", host_root=tmp_path, driver_root=driver_root)
    with pytest.raises(EnvironmentFault, match=rf"{library}: can't be loaded"), open_host(settings, lasting=True):
        pass


def simulated(root: Path) -> NodeSettings:
    return node_settings(
        node_name="n1", gpus="sim:h100-1", host_root=root, sim_latency="zero", state_dir=root.parent / "state"
    )


def test_who_only_looks_makes_no_simulated_node(tmp_path: Path) -> None:
    root = tmp_path / "nope"
    with pytest.raises(EnvironmentFault, match=f"--host-root {root}: no simulated node is there"):
        look(root)
    assert not root.exists()


def test_who_only_looks_leaves_a_strangers_directory_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(EnvironmentFault, match="no simulated node is there"):
        look(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("mine", ["etc", "sim/results"])
def test_no_simulated_node_is_made_among_a_strangers_files(tmp_path: Path, mine: str) -> None:
    (tmp_path / mine).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with (
        pytest.raises(UsageError, match=f"{tmp_path} is not empty and does not hold a simulated node"),
        open_host(simulated(tmp_path), lasting=True, machine=tmp_path / "machine"),
    ):
        pass
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("left", [(), ("sim",), ("sim", "sim/node.lock", "proc")])
def test_a_simulated_node_is_made_in_an_empty_directory_and_where_that_was_interrupted(
    tmp_path: Path, left: tuple[str, ...]
) -> None:
    root = tmp_path / "node"
    for name in ("", *left):
        (root / name).touch() if name.endswith(".lock") else (root / name).mkdir()
    with open_host(simulated(root), lasting=True, machine=tmp_path / "machine") as (host, _):
        assert len(host.discover().gpus) == 1


def test_a_node_that_a_plugin_made_can_be_looked_at_by_its_directory(tmp_path: Path) -> None:
    root = tmp_path / "node"
    with open_host(simulated(root), lasting=True, machine=tmp_path / "machine") as (host, _):
        made = host.discover().gpus
    before = {path: path.lstat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    with open_host(simulated(root), lasting=False) as (host, _):
        assert host.discover().gpus == made
    assert {path: path.lstat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == before


def test_who_looks_for_another_node_than_the_one_that_is_there_is_told(tmp_path: Path) -> None:
    root = tmp_path / "node"
    with open_host(simulated(root), lasting=True, machine=tmp_path / "machine"):
        pass
    other = node_settings(node_name="n1", gpus="sim:l4-4", host_root=root)
    with pytest.raises(UsageError, match="'h100-1', not 'l4-4'"), open_host(other, lasting=False):
        pass


def look(root: Path) -> None:
    with open_host(simulated(root), lasting=False):
        pass


def test_whether_the_driver_is_there_is_found_without_asking_a_gpu_which_may_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(hosts, "read_gpu", lambda *arguments, **_: asked.append(arguments))
    assert missing_hardware(simulated(tmp_path / "node")) is None
    assert not asked
