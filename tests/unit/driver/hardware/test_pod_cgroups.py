"""Where the plugin finds the cgroups of pods: names and places that kubelets use, and those that mislead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from driver.hardware.cgroups.pod_cgroups import PodCgroups
from driver.hardware.host_paths import HostPaths

UID = "2f0c3c1e-93a5-4d6f-9f4e-1c0f1b1e6a77"
SYSTEMD_UID = UID.replace("-", "_")
STATIC = "4a5b1f8f8c9a2d3e4f5061728394a5b6"
IN_A_CONTAINER = "system.slice/docker-1.scope/kubelet.slice/kubelet-kubepods.slice"


def cgroups_of(root: Path) -> PodCgroups:
    return PodCgroups(HostPaths(root, root))


def make(root: Path, *paths: str) -> Path:
    """Make cgroups below the host's root; return the last one."""
    for path in paths:
        (root / "sys/fs/cgroup" / path).mkdir(parents=True)
    return root / "sys/fs/cgroup" / paths[-1]


@pytest.mark.parametrize(
    ("uid", "path"),
    [
        (UID, f"kubepods/pod{UID}"),
        (UID, f"kubepods/burstable/pod{UID}"),
        (UID, f"kubepods/besteffort/pod{UID}"),
        (STATIC, f"kubepods/burstable/pod{STATIC}"),
        (UID, f"kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice"),
        (UID, f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice"),
        (UID, f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD_UID}.slice"),
        (STATIC, f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice"),
        (UID, f"tessera-test/c/node/kubepods/burstable/pod{UID}"),
        (UID, f"{IN_A_CONTAINER}/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{SYSTEMD_UID}.slice"),
    ],
)
def test_a_pod_is_found_with_each_cgroup_driver_quality_and_root(tmp_path: Path, uid: str, path: str) -> None:
    made = make(tmp_path, "system.slice/ssh.service", f"{path}/container", path.replace(uid[:4], "0000"), "user.slice")
    (made.parent / "cgroup.procs").touch()
    assert cgroups_of(tmp_path).find(uid) == tmp_path / "sys/fs/cgroup" / path
    assert cgroups_of(tmp_path).uids() == {uid, uid.replace(uid[:4], "0000")}


def test_pods_of_two_kubelets_are_found_also_of_one_that_starts_later(tmp_path: Path) -> None:
    cgroups = cgroups_of(tmp_path)
    assert cgroups.find(UID) is None, "no cgroup file system"
    early = make(tmp_path, f"kubepods/pod{UID}")
    assert cgroups.find(UID) == early
    late = make(tmp_path, f"kubelet/kubepods/pod{STATIC}")
    assert cgroups.find(STATIC) == late
    assert cgroups.find(UID) == early
    early.rmdir()
    assert cgroups.find(UID) is None


def test_pods_that_have_ended_cost_no_search_but_the_first_after_a_start(tmp_path: Path) -> None:
    cgroups = cgroups_of(tmp_path)
    early = make(tmp_path, f"kubepods/pod{UID}")
    assert cgroups.find(UID, expected=False) == early
    late = make(tmp_path, f"kubelet/kubepods/pod{STATIC}")
    assert cgroups.find(STATIC, expected=False) is None
    assert cgroups.find(STATIC) == late


@pytest.mark.parametrize("uid", ["", "..", "../kubepods/x", "a/b", "*", f"{UID}/..", "x\n"])
def test_a_uid_that_is_none_leads_nowhere(tmp_path: Path, uid: str) -> None:
    make(tmp_path, "kubepods/pod", "kubepods/pod..", "kubepods/podx", "kubepods/poda/b")
    assert cgroups_of(tmp_path).find(uid) is None


def test_a_user_can_not_pass_off_a_cgroup_as_a_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's systemd has a cgroup of its own, in which it makes what it wants."""
    make(tmp_path, f"user.slice/user-1000.slice/user@1000.service/kubepods/pod{UID}")
    assert cgroups_of(tmp_path).find(UID) is not None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cgroups_of(tmp_path).find(UID) is None


def test_a_search_ends_however_deep_or_wide_cgroups_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "/".join(["deeper"] * 100)
    make(tmp_path, f"{deep}/kubepods/pod{UID}")
    assert cgroups_of(tmp_path).find(UID) is None
    make(tmp_path, *(f"wide/{number}" for number in range(100)), f"wide/last/lower/kubepods/pod{UID}")
    assert cgroups_of(tmp_path).find(UID) is not None
    monkeypatch.setattr("driver.hardware.cgroups.pod_cgroups.SEARCHED_DIRECTORIES", 50)
    assert cgroups_of(tmp_path).find(UID) is None
