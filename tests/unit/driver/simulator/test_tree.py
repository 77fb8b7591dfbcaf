"""The simulated node's files: what production code reads from sysfs, procfs and /dev."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from driver.simulator.description import load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from tests.support.nvml_client import G1, G3, cut, enable_mig, one_h100, remove


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DGX H100's directory, to look at."""
    path = tmp_path_factory.mktemp("dgx-h100")
    return SimulatedNode.open(load_description("dgx-h100"), path, latency=ZERO_LATENCY).root


def pcie_root(root: Path, bus_id: str) -> str:
    """The PCIe root as production code finds it: the first ``pci...`` of the resolved sysfs link."""
    resolved = (root / "sys/bus/pci/devices" / bus_id).resolve()
    return next(part for part in resolved.parts if part.startswith("pci"))


def test_each_gpu_shares_its_pcie_root_with_its_nic_and_nobody_else(root: Path) -> None:
    gpus = load_description("dgx-h100").gpus
    roots = [pcie_root(root, gpu.pci_bus_id) for gpu in gpus]
    assert len(set(roots)) == 8
    assert roots[0] == "pci0000:15"
    assert roots == [pcie_root(root, gpu.nic.pci_bus_id) for gpu in gpus if gpu.nic]


def test_sysfs_tells_numa_node_vendor_device_and_class(root: Path) -> None:
    device = root / "sys/bus/pci/devices/0000:9d:00.0"
    read = {path.name: path.read_text() for path in device.iterdir()}
    assert read == {
        "numa_node": "1\n",
        "local_cpulist": "56-111,168-223\n",
        "vendor": "0x10de\n",
        "device": "0x2330\n",
        "class": "0x030200\n",
    }


def test_rail_nics_are_infiniband_devices_of_the_same_numa_node(root: Path) -> None:
    nic = (root / "sys/class/infiniband/mlx5_6").resolve().parents[1]
    assert nic.name == "0000:9a:00.0"
    assert (nic / "class").read_text() == "0x020700\n"
    assert (nic / "numa_node").read_text() == "1\n"


def test_procfs_tells_the_driver_the_gpus_and_the_majors(root: Path) -> None:
    assert "580.95.05" in (root / "proc/driver/nvidia/version").read_text()
    information = (root / "proc/driver/nvidia/gpus/0000:df:00.0/information").read_text()
    assert load_description("dgx-h100").gpu_uuid(7) in information
    assert "Device Minor: \t 7\n" in information
    majors = dict(
        line.split()[::-1] for line in (root / "proc/devices").read_text().splitlines() if line[:3].strip().isdigit()
    )
    assert (majors["nvidia"], majors["nvidia-caps"]) == ("195", "235")
    assert "nvidia-uvm" in majors


def test_device_nodes_swallow_what_is_written_and_capability_nodes_are_absent(root: Path) -> None:
    names = {path.name for path in (root / "dev").iterdir()}
    assert names == {f"nvidia{i}" for i in range(8)} | {
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidia-modeset",
    }
    node = (root / "dev/nvidia0").stat()
    if stat.S_ISCHR(node.st_mode):
        assert node.st_rdev == Path("/dev/null").stat().st_rdev


def test_driver_files_are_where_a_driver_root_has_them(root: Path) -> None:
    libraries = root / "usr/lib/x86_64-linux-gnu"
    assert (libraries / "libcuda.so.1").resolve().name == "libcuda.so.580.95.05"
    assert (libraries / "libnvidia-ml.so.1").resolve().name == "libnvidia-ml.so.580.95.05"
    assert (libraries / "libnvidia-ptxjitcompiler.so.580.95.05").is_file()
    printed = subprocess.run([root / "usr/bin/nvidia-smi"], capture_output=True, text=True, check=True).stdout
    assert "simulated by Tessera" in printed


def test_capability_files_come_and_go_with_their_instances(tmp_path: Path) -> None:
    nvml = one_h100(tmp_path).nvml
    gpu, base = enable_mig(nvml), tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig"
    assert list(base.iterdir()) == []
    partition = cut(nvml, gpu, G3, 4, 4)
    assert (base / "gi1/access").read_text() == "DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    assert (base / "gi1/ci0/access").read_text().startswith("DeviceFileMinor: 13\n")
    remove(nvml, partition)
    assert list(base.iterdir()) == []


def test_capability_minors_are_those_of_the_kernels_table(tmp_path: Path) -> None:
    node = SimulatedNode.open(load_description("dgx-h100"), tmp_path, latency=ZERO_LATENCY)
    node.nvml.nvmlInit()
    gpu = enable_mig(node.nvml, 5)
    cut(node.nvml, gpu, G1, 0, 1)
    base = tmp_path / "proc/driver/nvidia/capabilities/gpu5/mig"
    # 1 and 2 are config and monitor; a GPU has 15 GPU instances, each with one minor and 8 of its compute instances.
    for name, minor in (("gi7", 3 + (5 * 15 + 7) * 9), ("gi7/ci0", 4 + (5 * 15 + 7) * 9)):
        assert (base / name / "access").read_text().splitlines()[0] == f"DeviceFileMinor: {minor}"


def test_a_damaged_tree_is_repaired_by_opening_the_node(tmp_path: Path) -> None:
    one_h100(tmp_path)
    numa_node = tmp_path / "sys/bus/pci/devices/0000:1b:00.0/numa_node"
    numa_node.chmod(0o644)
    numa_node.write_text("")
    (tmp_path / "usr/lib/x86_64-linux-gnu/libcuda.so.1").unlink()
    one_h100(tmp_path)
    assert numa_node.read_text() == "0\n"
    assert (tmp_path / "usr/lib/x86_64-linux-gnu/libcuda.so.1").is_file()


def test_without_permission_to_make_device_nodes_there_are_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.mknod", forbidden)
    one_h100(tmp_path)
    assert (tmp_path / "dev/nvidia0").is_file()
