"""What the harness says about a machine that can't run a cluster."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from driver.errors import EnvironmentFault, UsageError
from tests.harness import packages, preflight
from tests.harness.addresses import Network, choose_network, choose_port, is_free
from tests.harness.cgroups import Cgroups
from tests.harness.packages import Package, missing_packages
from tests.harness.preflight import GB, Machine, failures
from tests.harness.progress import SILENT, Progress
from tests.harness.settings import Settings
from tests.support.ports import kept_port

PORTS_LINE = (
    "ports: port 443 is taken on every loopback address; "
    "stop what listens there (ss -ltnp 'sport = :443'), or bind it to one address"
)
KUBELET_LINE = (
    "kubelet: process 77 is a kubelet that the harness didn't start; "
    "use another machine: both would claim /var/lib/kubelet/device-plugins"
)
GOOD = Machine(
    user=0,
    memory_total=4 * GB,
    memory_available=3 * GB,
    cgroups=Cgroups((Path("/sys/fs/cgroup"),), unified=True),
    filesystems=frozenset({"overlay", "ext4"}),
    port_free=lambda address, port: True,
    disk_free=lambda folder: 11 * GB,
    missing_packages=(),
    foreign_kubelet=None,
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with an empty cache: everything would have to be built."""
    return Settings(cache=tmp_path)


def test_a_good_machine_has_no_failures(settings: Settings) -> None:
    assert failures(GOOD, settings) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"user": 1000}, "root: running as user 1000; run it as root: containers and mounts need that"),
        ({"memory_total": 2 * GB}, "memory: 2.0 GB in all; use a machine with 4 GB or more"),
        (
            {"memory_available": GB},
            "memory: 1.0 GB available, 1.2 GB needed; end other programs or clusters (python -m tests.harness status)",
        ),
        (
            {"cgroups": Cgroups((), unified=True)},
            "cgroup: no cgroup file system is mounted; mount -t cgroup2 none /sys/fs/cgroup",
        ),
        (
            {"cgroups": Cgroups((Path("/sys/fs/cgroup"),), unified=False, missing=("pids",))},
            "cgroup: v1 lacks pids; boot a kernel with these controllers (see /proc/cgroups)",
        ),
        ({"filesystems": frozenset({"ext4"})}, "overlayfs: the kernel doesn't offer it; modprobe overlay"),
        (
            {"port_free": lambda address, port: False},
            PORTS_LINE,
        ),
        (
            {"missing_packages": ("runc", "busybox-static")},
            "packages: missing: runc busybox-static; apt-get update && apt-get install --yes runc busybox-static",
        ),
        (
            {"foreign_kubelet": 77},
            KUBELET_LINE,
        ),
    ],
)
def test_each_failure_is_one_line_with_its_remedy(settings: Settings, change: dict[str, object], line: str) -> None:
    assert [str(each) for each in failures(dataclasses.replace(GOOD, **change), settings)] == [line]  # type: ignore[arg-type]


def test_each_further_node_needs_memory() -> None:
    (failure,) = failures(GOOD, Settings(nodes=20))
    assert str(failure) == (
        "memory: 3.0 GB available, 5.0 GB needed; "
        "end other programs or clusters (python -m tests.harness status) or start fewer than 20 nodes"
    )


def test_the_disk_of_a_first_build_is_10_gb(settings: Settings) -> None:
    machine = dataclasses.replace(GOOD, disk_free=lambda folder: 5 * GB)
    (failure,) = failures(machine, settings)
    assert str(failure) == (
        f"disk: 5.0 GB free for {settings.cache}, 10 GB needed; free some, or keep the programs elsewhere with --cache"
    )


def test_a_folder_of_programs_needs_no_disk_for_a_build(tmp_path: Path) -> None:
    machine = dataclasses.replace(GOOD, disk_free=lambda folder: 3 * GB)
    assert failures(machine, Settings(cache=tmp_path, binaries=tmp_path)) == []


def test_all_failures_are_told_at_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = dataclasses.replace(GOOD, user=1, memory_total=GB)
    monkeypatch.setattr(preflight.Machine, "here", lambda: bad)
    monkeypatch.setattr(preflight, "missing_packages", list)
    with pytest.raises(EnvironmentFault) as caught:
        preflight.prepare(settings, SILENT)
    assert str(caught.value).count("\n  - ") == 2


def test_missing_packages_are_installed_first(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []
    monkeypatch.setattr(preflight.Machine, "here", lambda: GOOD)
    monkeypatch.setattr(packages, "missing_packages", lambda _: ["runc"])
    monkeypatch.setattr(packages, "install_packages", lambda names, progress: installed.extend(names))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    preflight.prepare(settings, SILENT)
    assert installed == ["runc"]


def test_who_comes_while_packages_are_being_installed_waits_and_installs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = (Package("runc", (tmp_path / "runc",)),)
    installed: list[list[str]] = []
    ensure = partial(packages.ensure_packages, SILENT, wanted, tmp_path / "lock")
    second = threading.Thread(target=ensure)

    def install(names: list[str], progress: Progress) -> None:
        installed.append(names)
        if len(installed) == 1:
            second.start()
            second.join(0.2)
            (tmp_path / "runc").touch()

    monkeypatch.setattr(packages, "install_packages", install)
    ensure()
    second.join(60)
    assert installed == [["runc"]]


def test_any_of_its_files_shows_a_package(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    absent = tmp_path / "absent"
    wanted = (Package("one", (absent, tmp_path / "there")), Package("two", (absent,)))
    assert missing_packages(wanted) == ["two"]


def test_a_kubelet_of_a_cluster_is_not_foreign() -> None:
    assert preflight._is_foreign(["PATH=/bin", ""])
    assert not preflight._is_foreign(["PATH=/bin", "TESSERA_TEST_CLUSTER=/var/lib/x", ""])
    assert not preflight._is_foreign([""]), "it is just ending"


def test_memory_is_read_in_bytes() -> None:
    assert preflight._meminfo()["MemTotal"] > 100_000_000


def busy(*taken: tuple[str, int]) -> Callable[[str, int], bool]:
    return lambda address, port: (address, port) not in taken


def test_a_cluster_takes_the_first_network_nobody_has() -> None:
    assert choose_network({0, 1}, busy(("127.240.2.1", 443))) == Network(3)


def test_without_any_network_there_is_no_cluster() -> None:
    with pytest.raises(EnvironmentFault, match=r"port 443 is taken on 127\.240\.0\.1 and all"):
        choose_network((), lambda address, port: False)


def test_networks_do_not_overlap() -> None:
    one, two = Network(0), Network(1)
    assert one.api == "127.240.0.1"
    assert one.service_range == "127.240.0.0/24"
    assert {one.api, one.control_plane, one.node(0), one.node(199)}.isdisjoint(
        {two.api, two.control_plane, two.node(0), two.node(199)}
    )


def test_a_port_in_use_is_evaded() -> None:
    with kept_port() as port:
        with socket.create_server(("127.0.0.1", port)):
            assert not is_free("127.0.0.1", port)
            other = choose_port("127.0.0.1", port)
        assert other != port
        assert choose_port("127.0.0.1", port) == port


@pytest.mark.parametrize("name", ["", "Upper", "-a", "a-", "a_b", "../x", "a" * 21])
def test_names_that_cannot_name_a_cluster_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cluster name"):
        Settings(name=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": -1}, "nodes is -1"),
        ({"nodes": 201}, "nodes is 201"),
        ({"extra_args": {"etc": []}}, "names etc; known"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings(**change)  # type: ignore[arg-type]
