"""A driver that a container brings below its own root, as the GPU Operator's does; no simulation beside real GPUs."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from driver.errors import EnvironmentFault, HardwareError
from driver.hardware.device_nodes import DeviceNodes
from driver.hardware.host_paths import HostPaths, device_root, find_nvml, missing_driver
from kubelet_plugin import awaited_hardware
from kubelet_plugin.app import discovered_plugin
from kubelet_plugin.cdi.driver_files import find_driver_files
from kubelet_plugin.inventory.open_hardware import open_host, refuse_beside_real_gpus
from kubelet_plugin.settings import NodeSettings, node_settings
from tests.harness.waiting import wait_for
from tests.support.faulty_api import kubeconfig_of
from tests.support.metrics import fetch
from tests.support.node import NodeUnderTest, start_node
from tests.support.ports import kept_port
from tests.unit.kubelet_plugin.inventory.test_scan import published

DRIVER = Path("/run/nvidia/driver")
LIBRARIES = "usr/lib/x86_64-linux-gnu"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host whose driver lies in a container's root, with that container's absolute links."""
    root = tmp_path / "run/nvidia/driver"
    (root / LIBRARIES).mkdir(parents=True)
    for name in ("libnvidia-ml.so.580.95.05", "libcuda.so.580.95.05"):
        (root / LIBRARIES / name).write_text("a library")
        short = name.removesuffix(".580.95.05") + ".1"
        (root / LIBRARIES / short).symlink_to(f"/{LIBRARIES}/{name}")
    (root / "lib64").symlink_to(f"/{LIBRARIES}")
    (root / "usr/bin").mkdir()
    (root / "usr/bin/nvidia-smi").write_text("a tool")
    (root / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (root / "dev" / name).write_text("")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("580.95.05")
    return tmp_path


@pytest.fixture
def paths(host: Path) -> HostPaths:
    return HostPaths(host, Path("/"))


def test_nvml_is_found_through_links_that_mean_the_drivers_own_root(host: Path, paths: HostPaths) -> None:
    assert find_nvml(paths.here(str(DRIVER))) == host / "run/nvidia/driver" / LIBRARIES / "libnvidia-ml.so.580.95.05"
    (host / "run/nvidia/driver" / LIBRARIES / "libnvidia-ml.so.580.95.05").unlink()
    assert find_nvml(paths.here(str(DRIVER))) is None


def test_containers_get_the_files_at_their_usual_places_from_below_the_driver_root(paths: HostPaths) -> None:
    files = find_driver_files(paths, DRIVER)
    mounts = files.mounts
    assert mounts[f"/{LIBRARIES}/libcuda.so.1"] == f"{DRIVER}/{LIBRARIES}/libcuda.so.580.95.05"
    assert mounts["/usr/bin/nvidia-smi"] == f"{DRIVER}/usr/bin/nvidia-smi"
    assert not [path for path in mounts if path.startswith("/lib64")], "each file once"


def test_a_directory_that_is_an_absolute_link_leads_into_the_drivers_root_and_not_out_of_it(
    host: Path, paths: HostPaths
) -> None:
    root = host / "run/nvidia/driver"
    (root / LIBRARIES).rename(root / "usr/lib/elsewhere")
    (root / LIBRARIES).symlink_to("/usr/lib/elsewhere")
    for link in (root / "usr/lib/elsewhere").glob("*.so.1"):
        target = link.readlink().name
        link.unlink()
        link.symlink_to(target)
    mounts = find_driver_files(paths, DRIVER).mounts
    assert mounts[f"/{LIBRARIES}/libcuda.so.1"] == f"{DRIVER}/usr/lib/elsewhere/libcuda.so.580.95.05"


def test_device_nodes_are_those_of_the_drivers_container_where_it_makes_them(
    host: Path, paths: HostPaths, node: NodeUnderTest
) -> None:
    gpu = node.node.inventory.gpus[0]
    nodes = DeviceNodes(paths, DRIVER).of_gpu(gpu)
    assert {(each.path, each.host_path) for each in nodes} == {
        (f"/dev/{name}", f"{DRIVER}/dev/{name}") for name in ("nvidia0", "nvidiactl", "nvidia-uvm")
    }
    (host / "run/nvidia/driver/dev/nvidiactl").unlink()
    assert device_root(paths, DRIVER) == "/"
    with pytest.raises(HardwareError, match="/dev/nvidia0"):
        DeviceNodes(paths, DRIVER).of_gpu(gpu)


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> NodeUnderTest:
    return start_node(tmp_path_factory.mktemp("node"))


def test_what_is_missing_of_a_driver_is_said_one_thing_after_another(tmp_path: Path) -> None:
    paths, root = HostPaths(tmp_path, Path("/")), tmp_path / "run/nvidia/driver"
    assert str(missing_driver(paths, DRIVER)).endswith("run/nvidia/driver does not exist")
    (root / LIBRARIES).mkdir(parents=True)
    assert "has no libnvidia-ml.so.1 in usr/lib" in str(missing_driver(paths, DRIVER))
    (root / LIBRARIES / "libnvidia-ml.so.1").write_text("")
    assert "the kernel module is not loaded" in str(missing_driver(paths, DRIVER))
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("")
    assert missing_driver(paths, DRIVER) is None


def settings(host: Path, **more: object) -> NodeSettings:
    return node_settings(node_name="n1", host_root=host, driver_root=DRIVER, **more)


@pytest.fixture
def port() -> Iterator[int]:
    with kept_port() as kept:
        yield kept


@pytest.mark.long
def test_a_plugin_that_starts_before_the_driver_waits_says_so_and_loads_nothing_of_it_before_it_is_complete(
    host: Path, root: Path, port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited_hardware, "HARDWARE_CHECK_INTERVAL_SECONDS", 0.1)
    version, stop = host / "proc/driver/nvidia/version", threading.Event()
    version.rename(host / "later")
    (root / "config").write_text(yaml.safe_dump(dict(kubeconfig_of("http://127.0.0.1:9"))))
    folders = {"kubeconfig": root / "config", "kubelet_dir": root / "kubelet", "cdi_dir": root / "cdi"}
    wanted = settings(host, health_address=f"127.0.0.1:{port}", **folders)
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO):
        plugin = pool.submit(discovered_plugin, wanted, stop)
        wait_for(lambda: "serving" in caplog.messages, 60, "the kubelet can call it")
        assert "waits for the NVIDIA driver" in caplog.messages
        assert fetch(port, "/livez")[0] == 200
        assert "[-]driver failed" in fetch(port, "/readyz")[1]
        assert "the kernel module is not loaded" in fetch(port, "/readyz")[1]
        (host / "later").rename(version)
        ended = plugin.exception(60)
    assert isinstance(ended, EnvironmentFault)
    assert re.search(r"libnvidia-ml\.so\.580\.95\.05: can't be loaded", str(ended)), "the test's library is none"
    assert list((root / "kubelet" / "plugins_registry").iterdir()) == []


@pytest.mark.parametrize("sign", ["dev/nvidia0", "proc/driver/nvidia/gpus/0000:1b:00.0", "pci"])
def test_nothing_is_simulated_beside_a_real_gpu(tmp_path: Path, sign: str) -> None:
    if sign == "pci":
        sign = "sys/bus/pci/devices/0000:1b:00.0"
        (tmp_path / sign).mkdir(parents=True)
        (tmp_path / sign / "vendor").write_text("0x10de\n")
        (tmp_path / sign / "class").write_text("0x030200\n")
    else:
        (tmp_path / sign).parent.mkdir(parents=True)
        (tmp_path / sign).write_text("")
    wanted = node_settings(node_name="n1", gpus="sim:h100-1", host_root=tmp_path / "simulated")
    told = re.escape(f"--gpus sim:h100-1: this machine has real GPUs (/{sign})")
    with pytest.raises(EnvironmentFault, match=told), open_host(wanted, lasting=True, machine=tmp_path):
        pass


def test_what_is_no_nvidia_gpu_is_no_hindrance(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate([("0x10de", "0x068000"), ("0x1002", "0x030000")]):
        device = tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor)
        (device / "class").write_text(kind)
    refuse_beside_real_gpus("sim:h100-1", tmp_path)


def test_every_simulated_device_says_that_it_is(node: NodeUnderTest) -> None:
    devices = published(node)
    assert len(devices) > 100
    assert all(device["attributes"]["simulated"] == {"bool": True} for device in devices.values())  # type: ignore[index]
