"""The driver's files: where they are on hosts, and where containers get them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from driver.errors import EnvironmentFault
from driver.hardware.host_paths import HostPaths, device_root, find_nvml
from kubelet_plugin.cdi.driver_files import AUTO, NONE, DriverFiles, DriverFileWatch, find_driver_files

DEBIAN = "usr/lib/x86_64-linux-gnu"
LOADERS = ("/usr/lib64", f"/{DEBIAN}", "/usr/local/nvidia/lib64")
"""Where loaders of Red Hat's images, those of Debian's images, and ``LD_LIBRARY_PATH`` of NVIDIA's images look."""


class Host:
    """A root directory with some of the driver's files."""

    def __init__(self, root: Path) -> None:
        self.root, self.paths = root, HostPaths(root, Path("/"))

    def file(self, *paths: str, content: bytes = b"") -> None:
        for path in paths:
            target = self.root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

    def link(self, path: str, to: str) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(to)

    def found(self, driver_root: str = "/", cdi_hook: str = AUTO, memory_hook: str = AUTO) -> DriverFiles:
        return find_driver_files(self.paths, Path(driver_root), cdi_hook, memory_hook)

    def mounted(self) -> dict[str, str]:
        return dict(self.found(cdi_hook=NONE).mounts)


@pytest.fixture(autouse=True)
def x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubelet_plugin.cdi.driver_files.LOADER_DIRECTORIES", LOADERS[:2])


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def everywhere(*names: str, own: str = LOADERS[0]) -> set[str]:
    """The paths in a container of libraries that the host has in ``own``."""
    return {f"{directory}/{name}" for directory in {own, *LOADERS} for name in names}


def test_no_driver_at_all_is_no_error(host: Host) -> None:
    host.file("usr/bin/nvidia-cdi-hook", "sbin/ldconfig")
    assert host.found() == DriverFiles({}, (), None)


def test_libraries_programs_and_firmware_are_found_and_nothing_else(host: Host) -> None:
    libraries = [f"{DEBIAN}/libcuda.so.580.95.05", f"{DEBIAN}/libnvidia-ml.so.580.95.05"]
    host.file("lib/firmware/nvidia/580.95.05/gsp_ga10x.bin", "usr/bin/nvidia-smi", *libraries)
    host.file(f"{DEBIAN}/libc.so.6", "usr/bin/ls", f"{DEBIAN}/libcudart.so")
    assert set(host.mounted()) == {
        "/lib/firmware/nvidia/580.95.05/gsp_ga10x.bin",
        "/usr/bin/nvidia-smi",
        "/usr/local/nvidia/bin/nvidia-smi",
        *everywhere("libcuda.so.580.95.05", "libnvidia-ml.so.580.95.05"),
    }
    assert host.mounted()["/usr/lib64/libcuda.so.580.95.05"] == f"/{DEBIAN}/libcuda.so.580.95.05"


def test_short_names_are_mounted_too_and_dangling_ones_are_not(host: Host) -> None:
    host.file("usr/lib64/libcuda.so.580")
    host.link("usr/lib64/libcuda.so.1", "libcuda.so.580")
    host.link("usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.550")
    host.link("usr/lib64/libnvcuvid.so", "libnvcuvid.so")
    mounts = host.mounted()
    assert set(mounts) == {"/usr/lib64/libcuda.so.580", *everywhere("libcuda.so", "libcuda.so.1")}
    assert set(mounts.values()) == {"/usr/lib64/libcuda.so.580"}


def test_where_lib_is_a_link_into_usr_each_file_is_found_once(host: Host) -> None:
    host.file(f"{DEBIAN}/libcuda.so.580", "usr/lib64/libnvidia-ml.so.580")
    host.link("lib", "usr/lib")
    host.link("lib64", "usr/lib64")
    assert set(host.mounted()) == everywhere("libcuda.so.580", "libnvidia-ml.so.580")


LAYOUTS = {
    "Debian, Ubuntu": ("/", DEBIAN, "usr/bin"),
    "Debian's own package": ("/", f"{DEBIAN}/nvidia/current", "usr/bin"),
    "arm64": ("/", "usr/lib/aarch64-linux-gnu", "usr/bin"),
    "Red Hat, SUSE": ("/", "usr/lib64", "usr/bin"),
    "an H200's host, with links in /usr/lib": ("/", "usr/local/nvidia/lib64", "usr/local/nvidia/bin"),
    "the same, by its own root": ("/usr/local/nvidia", "lib64", "bin"),
    "GKE": ("/home/kubernetes/bin/nvidia", "lib64", "bin"),
    "GPU Operator": ("/run/nvidia/driver", DEBIAN, "usr/bin"),
    "Talos": ("/", "usr/local/lib", "usr/local/bin"),
    "Talos, container": ("/run/nvidia/driver", "usr/lib64", "usr/bin"),
    "Flatcar": ("/", "opt/nvidia/current/usr/lib64", "opt/bin"),
    "Bottlerocket": ("/", "usr/lib/nvidia/tesla", "usr/bin"),
    "usr/lib": ("/", "usr/lib", "usr/bin"),
    "lib": ("/opt/driver", "lib", "bin"),
}


@pytest.mark.parametrize(("root", "libraries", "programs"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_driver_is_found_wherever_hosts_have_it_and_mounted_where_images_look(
    host: Host, root: str, libraries: str, programs: str
) -> None:
    for name in ("libcuda", "libnvidia-ml"):
        host.file(f"{root}/{libraries}/{name}.so.580.95.05")
        host.link(f"{root}/{libraries}/{name}.so.1", f"{name}.so.580.95.05")
    host.file(f"{root}/{programs}/nvidia-smi")
    inside = host.paths.here(root)
    (inside / "dev").mkdir()
    if libraries.startswith("opt/"):
        stub(inside / libraries / "libcuda.so.580.95.05", "libcuda.so.1")
        run_ldconfig(inside, libraries)
    mounts = host.found(root).mounts
    library, program = Path(root, libraries, "libcuda.so.580.95.05"), Path(root, programs, "nvidia-smi")
    for directory in (f"/{libraries}", *LOADERS):
        assert mounts[f"{directory}/libcuda.so.1"] == mounts[f"{directory}/libcuda.so"] == str(library)
    assert mounts["/usr/bin/nvidia-smi"] == mounts["/usr/local/nvidia/bin/nvidia-smi"] == str(program)
    assert find_nvml(inside) == inside / libraries / "libnvidia-ml.so.580.95.05"
    assert device_root(host.paths, Path(root)) == "/", "an empty dev is not the driver's"


def run_ldconfig(root: Path, *directories: str) -> None:
    """Write the cache of ``root``, as ldconfig does on its host."""
    (root / "etc").mkdir()
    (root / "etc/ld.so.conf").write_text("".join(f"/{directory}\n" for directory in directories))
    subprocess.run(["/sbin/ldconfig", "-r", root], check=True)


def stub(path: Path, soname: str, *flags: str) -> None:
    """Compile a library with nothing in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-nostdlib", "-x", "c", "/dev/null", f"-Wl,-soname,{soname}", *flags, "-o", str(path)]
    subprocess.run(command, check=True)


def test_directories_that_only_ldconfig_names_are_searched_except_for_the_toolkits_own_libcuda(host: Host) -> None:
    driver, toolkit = "srv/nvidia/lib", "usr/local/cuda-13.0/compat"
    stub(host.root / driver / "libcuda.so.580.95.05", "libcuda.so.1")
    stub(host.root / driver / "libnvidia-gpucomp.so.580.95.05", "libnvidia-gpucomp.so.580.95.05")
    stub(host.root / toolkit / "libcuda.so.590.44.01", "libcuda.so.1")
    run_ldconfig(host.root, toolkit, driver)
    mounts = host.mounted()
    assert mounts["/usr/lib64/libcuda.so.1"] == f"/{driver}/libcuda.so.580.95.05"
    assert mounts["/usr/lib64/libnvidia-gpucomp.so.580.95.05"] == f"/{driver}/libnvidia-gpucomp.so.580.95.05"
    assert not [path for path in mounts.values() if path.startswith(f"/{toolkit}")]


@pytest.mark.parametrize("content", [b"", b"glibc-ld.so.cache1.1", b"glibc-ld.so.cache1.1" + b"\xff" * 100])
def test_a_damaged_cache_of_ldconfig_hides_no_driver(host: Host, content: bytes) -> None:
    host.file("etc/ld.so.cache", content=content)
    host.file("usr/lib64/libcuda.so.580")
    assert set(host.mounted()) == everywhere("libcuda.so.580")


def test_a_32_bit_library_is_not_mounted(host: Host) -> None:
    host.file("usr/lib/libcuda.so.1", content=b"\x7fELF\x01\x01\x01")
    host.file("usr/local/nvidia/lib64/libcuda.so.1", content=b"\x7fELF\x02\x01\x01")
    assert set(host.mounted().values()) == {"/usr/local/nvidia/lib64/libcuda.so.1"}


def test_links_of_the_host_are_mounted_where_they_are_too(host: Host) -> None:
    host.file("usr/local/nvidia/lib64/libcuda.so.580")
    host.link("usr/local/nvidia/lib64/libcuda.so.1", "libcuda.so.580")
    host.link("usr/lib/libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1")
    assert host.mounted()["/usr/lib/libcuda.so.1"] == "/usr/local/nvidia/lib64/libcuda.so.580"


def test_links_with_absolute_targets_are_followed_inside_the_hosts_root(host: Host) -> None:
    """Debian's alternatives: seen from a container, the target lies below the mounted root, not below /."""
    host.file("usr/lib/nvidia/current/libcuda.so.580")
    host.link("etc/alternatives/cuda", "/usr/lib/nvidia/current/libcuda.so.580")
    host.link(f"{DEBIAN}/libcuda.so.1", "/etc/alternatives/cuda")
    assert host.mounted()[f"/{DEBIAN}/libcuda.so.1"] == "/usr/lib/nvidia/current/libcuda.so.580"


def test_links_inside_a_driver_root_are_resolved_for_the_runtime(host: Host) -> None:
    host.file("run/nvidia/driver/usr/lib/nvidia/libcuda.so.580")
    host.link("run/nvidia/driver/usr/lib64/libcuda.so.1", "/usr/lib/nvidia/libcuda.so.580")
    mounts = host.found("/run/nvidia/driver").mounts
    assert mounts["/usr/lib64/libcuda.so.1"] == "/run/nvidia/driver/usr/lib/nvidia/libcuda.so.580"


def test_a_link_out_of_the_root_stays_inside(host: Host) -> None:
    host.link("usr/lib64/libcuda.so.1", "../../../../../../../../etc/passwd")
    assert host.mounted() == {}


HOOK = b"... enable-cuda-compat ... update-ldcache ..."
COMPAT = ("enable-cuda-compat", "--host-driver-version=580.95.05")
UPDATE = ("update-ldcache", "--folder", "/usr/lib64")
ELSEWHERE = ("--ldconfig-path", "/usr/local/sbin/ldconfig")


@pytest.mark.parametrize(
    "hook", ["/usr/bin/nvidia-cdi-hook", "/usr/local/bin/nvidia-cdi-hook", "/usr/local/nvidia/toolkit/nvidia-cdi-hook"]
)
@pytest.mark.parametrize("root", ["/", "/run/nvidia/driver"])
def test_the_hosts_hook_makes_libraries_known_to_the_loader_after_newer_ones_of_the_image(
    host: Host, hook: str, root: str
) -> None:
    host.file(f"{root}/usr/lib64/libcuda.so.580.95.05", "sbin/ldconfig")
    host.file(hook, content=HOOK)
    files = host.found(root)
    assert set(files.mounts) == {f"{directory}/libcuda.so.580.95.05" for directory in LOADERS[:2]}
    assert files.hook == hook
    assert files.hook_commands == (COMPAT, UPDATE)


@pytest.mark.parametrize(
    ("content", "shim", "ldconfig", "commands"),
    [
        pytest.param(b"update-ldcache", b"", "sbin", [UPDATE], id="before 1.17.5"),
        pytest.param(b"#!/bin/sh", HOOK, "sbin", [COMPAT, UPDATE], id="a script before the program"),
        pytest.param(b"", b"", "usr/local/sbin", [(UPDATE[0], *ELSEWHERE, *UPDATE[1:])], id="ldconfig elsewhere"),
    ],
)
def test_a_hook_gets_only_commands_that_it_knows(
    host: Host, content: bytes, shim: bytes, ldconfig: str, commands: list[tuple[str, ...]]
) -> None:
    host.file("usr/lib64/libcuda.so.580.95.05", f"{ldconfig}/ldconfig")
    host.file("usr/bin/nvidia-cdi-hook", content=content)
    host.file("usr/bin/nvidia-cdi-hook.real", content=shim)
    assert list(host.found().hook_commands) == commands


def test_a_hook_that_could_not_run_is_left_out(host: Host) -> None:
    host.file("usr/lib64/libcuda.so.580", "usr/bin/nvidia-cdi-hook")
    assert host.found().hook is None, "there is no ldconfig"
    host.file("sbin/ldconfig")
    assert host.found(cdi_hook=NONE) == DriverFiles(host.mounted(), (), None)
    assert host.found(cdi_hook="/usr/bin/nvidia-cdi-hook").hook == "/usr/bin/nvidia-cdi-hook"
    with pytest.raises(EnvironmentFault, match="--cdi-hook /opt/hook: does not exist on the host; give the path"):
        DriverFileWatch(host.paths, Path("/"), "/opt/hook")


@pytest.mark.parametrize("program", ["nvidia-cdi-hook", "nvidia-cdi-hook.real"])
@pytest.mark.parametrize("driver_root", ["/", "/run/nvidia/driver"])
def test_a_hook_that_limits_memory_is_known_with_its_driver_also_without_ldconfig(
    host: Host, program: str, driver_root: str
) -> None:
    host.file(f"{driver_root}/usr/lib64/libcuda.so.615", "usr/bin/nvidia-cdi-hook")
    assert host.found(driver_root).memory_hook == (), "the hook is older"
    host.file(f"usr/bin/{program}", content=b"... apply-cuda-memory-limits ...")
    command = ("/usr/bin/nvidia-cdi-hook", "apply-cuda-memory-limits", "--driver-root", driver_root)
    assert host.found(driver_root).memory_hook == command
    assert host.found(driver_root, cdi_hook=NONE).memory_hook == ()
    assert host.found(driver_root, memory_hook=NONE).memory_hook == ()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda host: host.file("usr/lib64/libnvidia-ml.so.580"), id="a library"),
        pytest.param(lambda host: host.file("bin/nvidia-smi"), id="a program"),
        pytest.param(lambda host: host.file("usr/bin/nvidia-cdi-hook"), id="the hook"),
        pytest.param(lambda host: (host.root / "usr/lib64/libcuda.so.580").unlink(), id="a library that is removed"),
    ],
)
def test_what_is_installed_later_is_found(host: Host, change: object) -> None:
    host.file("usr/lib64/libcuda.so.580", "sbin/ldconfig")
    watch = DriverFileWatch(host.paths, Path("/"))
    assert not watch.refresh("580")
    change(host)  # type: ignore[operator]
    assert watch.refresh("580")
    assert watch.files == host.found()
    assert not watch.refresh("580")


def test_a_driver_in_a_directory_that_ldconfig_names_later_is_found(host: Host) -> None:
    watch = DriverFileWatch(host.paths, Path("/"))
    stub(host.root / "srv/driver/libcuda.so.580.95.05", "libcuda.so.1")
    run_ldconfig(host.root, "srv/driver")
    assert watch.refresh("580.95.05")
    assert watch.files.has_cuda
