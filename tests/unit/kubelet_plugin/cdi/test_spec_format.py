"""CDI specs by the rules of the specification 0.5."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from driver.errors import EnvironmentFault, StateError
from driver.hardware.device_nodes import DeviceNode
from kubelet_plugin.cdi.driver_files import DriverFiles
from kubelet_plugin.cdi.spec_files import CdiDirectory
from kubelet_plugin.cdi.spec_format import CdiDevice, Spec, SpecFormat, variable
from kubelet_plugin.checkpoint import files
from kubelet_plugin.checkpoint.files import read_if_exists
from tests.support.disks import mounted

UID = "2f0c3c1e-93a5-4d6f-9f4e-1c0f1b1e6a77"
NODES = [
    DeviceNode("/dev/nvidia0", host_path="/host/dev/nvidia0"),
    DeviceNode("/dev/nvidia-caps/nvidia-cap12", major=235, minor=12),
]
DEVICES = [CdiDevice("gpu-0", "GPU-1", NODES)]
FILES = DriverFiles({"/usr/lib64/libcuda.so.1": "/usr/lib64/libcuda.so.1"}, (), None)

# SPEC.md of the Container Device Interface: "kind", device names, and the fields that 0.5.0 knows.
VENDOR = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
CLASS = re.compile(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
EDITS = {"env", "deviceNodes", "mounts", "hooks"}
NODE = {"path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"}
MOUNT = {"hostPath", "containerPath", "type", "options"}
HOOK = {"hookName", "path", "args", "env", "timeout"}


def spec_of(devices: list[CdiDevice], driver: str = "d", files: DriverFiles = FILES) -> Spec:
    found: Spec = json.loads(SpecFormat(driver, files).encode(UID, devices))
    return found


def directory_of(path: Path, driver: str = "d", *restored: Callable[[], None]) -> CdiDirectory:
    return CdiDirectory(path, SpecFormat(driver, FILES), *restored)


def check(spec: Spec) -> None:
    assert set(spec) == {"cdiVersion", "kind", "devices", "containerEdits"}
    assert spec["cdiVersion"] == "0.5.0"
    vendor, kind = spec["kind"].split("/")
    assert VENDOR.fullmatch(vendor)
    assert CLASS.fullmatch(kind)
    assert spec["devices"]
    names = [device["name"] for device in spec["devices"]]
    assert all(NAME.fullmatch(name) for name in names)
    assert len(set(names)) == len(names)
    for edits in (spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])):
        check_edits(edits)


def check_edits(edits: dict[str, Any]) -> None:
    assert set(edits) <= EDITS
    assert any(edits.values())
    assert all(re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", entry) for entry in edits.get("env", ()))
    for node in edits.get("deviceNodes", ()):
        assert set(node) <= NODE
        assert node["path"].startswith("/")
        assert node["permissions"] == "rw"
    for mount in edits.get("mounts", ()):
        assert set(mount) <= MOUNT
        assert mount["hostPath"].startswith("/")
        assert mount["containerPath"].startswith("/")
    for hook in edits.get("hooks", ()):
        assert set(hook) <= HOOK
        assert hook["hookName"] in {"prestart", "createRuntime", "createContainer", "startContainer", "poststart"}


@pytest.mark.parametrize("driver", ["gpu.tessera.dev", "gpu.nvidia.com", "x"])
@pytest.mark.parametrize("hook", [None, "/usr/bin/nvidia-cdi-hook"], ids=["no hook", "hook"])
@pytest.mark.parametrize("mounts", [{}, FILES.mounts], ids=["no files", "files"])
def test_a_spec_follows_the_specification(driver: str, hook: str | None, mounts: Mapping[str, str]) -> None:
    devices = [CdiDevice("gpu-0", "GPU-1", NODES), CdiDevice("gpu-1-mig-1g10gbme-6", "MIG-2", NODES)]
    spec = spec_of(devices, driver, DriverFiles(mounts, (("update-ldcache", "--folder", "/usr/lib64"),), hook))
    check(spec)
    for device in devices:
        kind, name = SpecFormat(driver, FILES).device_id(UID, device.name).split("=")
        assert kind == spec["kind"]
        assert name in {found["name"] for found in spec["devices"]}


def test_a_node_of_the_host_and_one_by_number_say_only_what_they_are() -> None:
    [device] = spec_of([CdiDevice("gpu-0", "GPU-1", NODES)])["devices"]
    assert device["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/nvidia0", "permissions": "rw", "hostPath": "/host/dev/nvidia0"},
        {"path": "/dev/nvidia-caps/nvidia-cap12", "permissions": "rw", "type": "c", "major": 235, "minor": 12},
    ]


def test_libraries_are_read_only_and_the_hook_runs_its_commands_in_their_order() -> None:
    commands = ("enable-cuda-compat", "--host-driver-version=580.95"), ("update-ldcache", "--folder", "/usr/lib64")
    files = DriverFiles(FILES.mounts, commands, "/usr/local/nvidia/toolkit/nvidia-cdi-hook")
    edits = spec_of(DEVICES, files=files)["containerEdits"]
    assert edits["mounts"][0]["options"] == ["ro", "nosuid", "nodev", "rbind", "rprivate"]
    assert edits["hooks"] == [
        {"hookName": "createContainer", "path": files.hook, "args": ["nvidia-cdi-hook", *command]}
        for command in commands
    ]


MEMORY_HOOK = ("/usr/bin/nvidia-cdi-hook", "apply-cuda-memory-limits", "--driver-root", "/")


def memory_limits_in(devices: list[CdiDevice], hook: tuple[str, ...] = MEMORY_HOOK) -> list[tuple[str, ...]]:
    """The GPU, request and limit of each call of the hook in a spec."""
    spec = spec_of(devices, files=DriverFiles(FILES.mounts, (), None, hook))
    check(spec)
    calls: list[tuple[str, ...]] = []
    for edits in (device["containerEdits"] for device in spec["devices"]):
        env = dict(variable.split("=") for variable in edits["env"])
        for call in edits.get("hooks", []):
            assert (call["hookName"], call["path"]) == ("createRuntime", MEMORY_HOOK[0])
            assert call["args"][:-1] == ["nvidia-cdi-hook", *MEMORY_HOOK[1:], "--gpu-id"]
            gpu, request = call["args"][-1], env["NVIDIA_GPU_MEMORY_REQUEST"]
            calls.append((gpu, request, env["NVIDIA_GPU_MEMORY_LIMIT"]))
    return calls


@pytest.mark.parametrize(
    ("devices", "calls"),
    [
        pytest.param([("GPU-1", 6 << 30)], [("GPU-1", "0", "6144")], id="one share"),
        pytest.param([("GPU-1", (1 << 20) + 1)], [("GPU-1", "0", "2")], id="part of a MiB"),
        pytest.param([("GPU-1", 1 << 30), ("GPU-2", None)], [("GPU-1", "0", "1024")], id="and a full GPU"),
        pytest.param(
            [("GPU-1", 1 << 30), ("GPU-2", 1 << 30)],
            [("GPU-1", "0", "1024"), ("GPU-2", "0", "1024")],
            id="equal shares",
        ),
        pytest.param([("GPU-1", 1 << 30), ("GPU-2", 2 << 30)], [], id="different shares, of which the hook reads one"),
        pytest.param([("GPU-1", 1 << 30), ("GPU-1", 1 << 30)], [], id="two shares of one GPU"),
        pytest.param([("GPU-1", None)], [], id="no limit"),
    ],
)
def test_the_hook_limits_a_container_to_what_its_share_has(
    devices: list[tuple[str, int | None]], calls: list[tuple[str, ...]]
) -> None:
    named = [CdiDevice(f"d{n}", uuid, NODES, memory_limit=memory) for n, (uuid, memory) in enumerate(devices)]
    assert memory_limits_in(named) == calls
    assert memory_limits_in(named, hook=()) == [], "the hook is older or missing"


@pytest.mark.parametrize(
    ("frameworks", "fractions", "limit", "variables"),
    [
        pytest.param("none", [0.0685], None, [], id="not asked for"),
        pytest.param("jax", [0.06857], None, ["XLA_PYTHON_CLIENT_MEM_FRACTION=0.0686"], id="JAX"),
        pytest.param("pytorch", [0.5], None, ["PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.5000"], id="PyTorch"),
        pytest.param("jax", [0.5, 0.25], None, ["XLA_PYTHON_CLIENT_MEM_FRACTION=0.2500"] * 2, id="the smallest part"),
        pytest.param("jax,pytorch", [None], None, [], id="the container sees its limit"),
        pytest.param("jax", [0.5, None], None, [], id="and a full GPU"),
        pytest.param("jax", [0.5], 1 << 30, [], id="the hook limits the container"),
    ],
)
def test_frameworks_are_told_a_part_only_where_they_see_the_whole_gpu(
    frameworks: str, fractions: list[float | None], limit: int | None, variables: list[str]
) -> None:
    files = DriverFiles(FILES.mounts, (), None, MEMORY_HOOK)
    devices = [
        CdiDevice(f"d{n}", f"GPU-{n}", NODES, memory_limit=limit, fraction=part) for n, part in enumerate(fractions)
    ]
    spec = json.loads(SpecFormat("d", files, frameworks).encode(UID, devices))
    check(spec)
    env = [variable for device in spec["devices"] for variable in device["containerEdits"]["env"]]
    assert [variable for variable in env if "FRACTION" in variable or "PYTORCH" in variable] == variables


def test_variables_of_different_devices_differ() -> None:
    names = ["gpu-0", "gpu-10", "gpu-1-mig-1g10gb-0", "gpu-1-mig-1g10gbme-0", "gpu-11-mig-1g10gb-0"]
    assert len({variable(name) for name in names}) == len(names)
    assert variable("gpu-0-mig-1g10gb-6") == "TESSERA_DEVICE_GPU_0_MIG_1G10GB_6"


def test_the_file_is_readable_by_the_runtime_and_named_after_driver_and_claim(tmp_path: Path) -> None:
    directory = directory_of(tmp_path / "run" / "cdi", "gpu.nvidia.com")
    directory.write(UID, DEVICES)
    path = tmp_path / "run" / "cdi" / f"gpu.nvidia.com-claim_{UID}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert directory.claim_uids() == [UID]
    written = path.stat().st_mtime_ns
    directory.write(UID, DEVICES)
    assert path.stat().st_mtime_ns == written
    directory.remove(UID)
    directory.remove(UID)
    assert directory.claim_uids() == []


def test_specs_of_another_driver_are_not_ours(tmp_path: Path) -> None:
    ours, theirs = directory_of(tmp_path, "gpu.tessera.dev"), directory_of(tmp_path, "gpu.nvidia.com")
    theirs.write(UID, DEVICES)
    (tmp_path / ".gpu.nvidia.com-claim_x.json.tmp").write_text("")
    assert ours.claim_uids() == []
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match=f"--cdi-dir {tmp_path}/file/cdi: can't be created: Not a directory"):
        directory_of(tmp_path / "file" / "cdi", "d")
    directory = directory_of(tmp_path / "cdi", "d")
    (tmp_path / "cdi").rmdir()
    (tmp_path / "cdi").write_text("")
    with pytest.raises(StateError, match=f"can't write {tmp_path}/cdi/d-claim_u.json"):
        directory.write("u", DEVICES)
    with pytest.raises(StateError, match=f"can't list {tmp_path}/cdi"):
        directory.claim_uids()


def test_a_directory_that_was_deleted_is_created_again_by_the_next_write(tmp_path: Path) -> None:
    restored: list[str] = []
    directory = directory_of(tmp_path / "run" / "cdi", "d", lambda: restored.append("again"))
    shutil.rmtree(tmp_path / "run")
    assert directory.claim_uids() == []
    assert not restored
    directory.write("u", DEVICES)
    assert directory.claim_uids() == ["u"]
    assert stat.S_IMODE((tmp_path / "run" / "cdi").stat().st_mode) == 0o755
    assert restored == ["again"]


def test_what_is_reserved_is_room_for_the_whole_spec_and_nothing_else_is_left_of_it(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, "d")
    devices = [CdiDevice(f"gpu-{number}-mig-1g10gb-0", f"MIG-{UID}", NODES) for number in range(16)]
    directory.reserve(UID, len(devices))
    [reserved] = tmp_path.iterdir()
    assert reserved.stat().st_blocks * 512 >= reserved.stat().st_size
    assert directory.claim_uids() == []
    room = reserved.stat().st_size
    directory.write(UID, devices, reserved=True)
    [written] = tmp_path.iterdir()
    assert json.loads(written.read_bytes()) == spec_of(devices)
    assert written.stat().st_size <= room
    directory.reserve("other", 2)
    directory.remove("other")
    assert list(tmp_path.iterdir()) == [written]


def test_a_mount_whose_source_was_deleted_is_named_because_only_a_new_container_helps(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "mount").mkdir()
    with mounted(tmp_path / "mount", "--bind", str(tmp_path / "host")):
        directory = directory_of(tmp_path / "mount", "d")
        assert directory.detached() is None
        (tmp_path / "host").rmdir()
        assert f"{tmp_path}/mount was deleted on the host" in str(directory.detached())
        with pytest.raises(StateError):
            directory.write("u", DEVICES)


def test_a_spec_is_read_again_only_after_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    def read(path: str) -> bytes | None:
        reads.append(path)
        return read_if_exists(path)

    monkeypatch.setattr(files, "read_if_exists", read)
    directory = directory_of(tmp_path)
    directory.write("uid-1", [])
    reads.clear()
    for _ in range(3):
        assert directory.is_current("uid-1")
    assert len(reads) == 1
    [file] = tmp_path.iterdir()
    spec = file.read_bytes()
    file.write_bytes(spec.replace(b"claim", b"mailc"))
    os.utime(file, ns=(1, 1))
    assert not directory.is_current("uid-1")
    file.write_bytes(spec)
    assert directory.is_current("uid-1")
    directory.specs.use(DriverFiles({"/usr/lib64/libcuda.so.1": "/usr/lib64/libcuda.so.2"}, (), None))
    assert not directory.is_current("uid-1")
    file.unlink()
    assert not directory.is_current("uid-1")
