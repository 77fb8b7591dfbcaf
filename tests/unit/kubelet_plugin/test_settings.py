"""Flags: defaults, and errors that name the flag, its value and what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.errors import UsageError
from driver.model.gpu import Gpu
from kubelet_plugin.inventory.standalone_offers import setting_warnings
from kubelet_plugin.settings import node_settings
from tests.support.gpus import H100, gpu_of


def test_only_the_node_name_is_needed() -> None:
    settings = node_settings(node_name="worker-1", kubeconfig=None)
    assert settings.driver_name == "gpu.tessera.dev"
    assert settings.simulated is None
    assert settings.plugin_socket == Path("/var/lib/kubelet/plugins/gpu.tessera.dev/dra.sock")
    assert settings.registration_socket == Path("/var/lib/kubelet/plugins_registry/gpu.tessera.dev-reg.sock")
    assert settings.state_dir == settings.plugin_socket.parent


def test_sockets_and_state_follow_driver_name_and_kubelet_directory() -> None:
    settings = node_settings(node_name="n", driver_name="gpu.nvidia.com", kubelet_dir=Path("/k"), gpus="sim:dgx-h100")
    assert settings.plugin_socket == Path("/k/plugins/gpu.nvidia.com/dra.sock")
    assert settings.state_dir == Path("/k/plugins/gpu.nvidia.com")
    assert settings.simulated == "dgx-h100"


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        pytest.param("node_name", "Worker_1", "--node-name Worker_1: must be the name of a Node", id="capital letters"),
        pytest.param("node_name", "", "--node-name : must be the name of a Node", id="empty node name"),
        pytest.param("node_name", "n" * 254, "must be the name of a Node", id="node name too long"),
        pytest.param("node_name", "a\n", "must be the name of a Node", id="line break"),
        pytest.param("driver_name", "-x", "--driver-name -x: must be a DNS subdomain", id="driver name with a dash"),
        pytest.param("driver_name", "../../etc", "must be a DNS subdomain", id="driver name with a path"),
        pytest.param("driver_name", "d" * 64, "at most 63 characters", id="driver name too long"),
        pytest.param("driver_name", "3gpu.example.com", "begins with a letter", id="CDI wants a letter first"),
        pytest.param("gpus", "amd", "--gpus amd: must be nvml, sim:NAME", id="unknown GPUs"),
        pytest.param("gpus", "sim:", "--gpus sim:: must be nvml, sim:NAME", id="no simulated node named"),
        pytest.param("cdi_dir", Path("cdi"), "--cdi-dir cdi: must be an absolute path", id="relative CDI directory"),
        pytest.param("kubelet_dir", Path("k"), "--kubelet-dir k: must be an absolute path", id="relative kubelet"),
        pytest.param("state_dir", Path("s"), "--state-dir s: must be an absolute path", id="relative state"),
        pytest.param(
            "cdi_hook", "hook", "--cdi-hook hook: must be auto, none or the absolute path", id="relative hook"
        ),
        pytest.param("driver_root", Path("r"), "--driver-root r: must be an absolute path", id="relative driver root"),
        pytest.param("shares", "all", "--shares all: 'all' has no number of shares: write WHICH=R", id="no number"),
        pytest.param("shares", "all=", "--shares all=: 'all=': '' is no number of shares", id="empty number"),
        pytest.param("shares", "all=ten", "'ten' is no number of shares: 0 (none) or 2 to 32", id="number in letters"),
        pytest.param("shares", "0=-2", "'-2' is no number of shares", id="negative shares"),
        pytest.param("shares", "0=4,1=1", "'1=1': one share would be the full GPU", id="one share"),
        pytest.param("shares", "all=33", "'all=33': 33 shares are more than a GPU switches between", id="too many"),
        pytest.param("shares", "=4", "'' is no index (0), UUID (GPU-...), PCI address", id="shares of nothing"),
        pytest.param("shares", "GPU-xyz=4", "'GPU-xyz' is no index (0), UUID", id="no UUID"),
        pytest.param("shares", "0=4,0=8", "--shares 0=4,0=8: 0 has several numbers of shares", id="two numbers"),
        pytest.param("shares_only", "H100", "--shares-only H100: 'H100' is no index", id="a product is no selection"),
        pytest.param("layout", "0", "--layout 0: '0' has no profiles: write WHICH=PROFILE,...", id="no profiles"),
        pytest.param("layout", "0=half", "'0=half': 'half' is no MIG profile, such as 3g.40gb", id="no profile"),
        pytest.param("layout", "=1g.10gb", "'' is no index (0), UUID (GPU-...)", id="layout of nothing"),
        pytest.param("layout", "0=1g.10gb,1=1g.10gb", "layouts are separated by ;", id="layouts with a comma between"),
        pytest.param("layout", "0=1g.10gb;0=2g.20gb", "0 has several layouts; give it one", id="two layouts"),
        pytest.param("kubelet_dir", Path("/" + "k" * 90), "Linux takes 107", id="socket path too long"),
    ],
)
def test_a_wrong_flag_is_named_with_its_value_and_what_is_accepted(flag: str, value: object, expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        node_settings(**{"node_name": "worker-1", flag: value})
    assert expected in str(refused.value)


def test_all_wrong_flags_are_told_at_once() -> None:
    with pytest.raises(UsageError, match=r"--node-name A: .*; --driver-name B: .*; --gpus c: "):
        node_settings(node_name="A", driver_name="B", gpus="c")


def shares_of(text: str, gpu: Gpu) -> int:
    return node_settings(node_name="n", shares=text).shares.of(gpu)


def test_without_the_flag_no_gpu_has_shares() -> None:
    settings = node_settings(node_name="n")
    assert settings.shares.of(gpu_of()) == 0
    assert gpu_of() not in settings.shares_only


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("all=10", 10, id="all"),
        pytest.param(f"{H100}=8", 8, id="product"),
        pytest.param("NVIDIA L4=8", 0, id="another product"),
        pytest.param("3=4", 4, id="index"),
        pytest.param("GPU-3=5", 5, id="UUID"),
        pytest.param("0000:03:00.0=6", 6, id="PCI address"),
        pytest.param(f"all=10,{H100}=8", 8, id="a product before all"),
        pytest.param(f" 3 = 4 ,{H100}=8, all=10", 4, id="a GPU before its product"),
        pytest.param("all=10,3=0", 0, id="none for one GPU"),
        pytest.param("3=4,0000:03:00.0=6,GPU-3=5", 5, id="the UUID before address and index"),
        pytest.param("3=4,0000:03:00.0=6", 6, id="the address before the index"),
        pytest.param("all=32", 32, id="the most"),
        pytest.param("", 0, id="nothing"),
    ],
)
def test_the_more_exact_name_decides_how_many_shares_a_gpu_has(text: str, expected: int) -> None:
    assert shares_of(text, gpu_of(minor=3)) == expected


def warnings(shares: str, shares_only: str = "") -> list[str]:
    gpus = [gpu_of(minor=0), gpu_of(minor=1), gpu_of("NVIDIA L4", minor=2)]
    return list(setting_warnings(node_settings(node_name="n", shares=shares, shares_only=shares_only), gpus))


def test_names_that_match_no_gpu_are_told_with_those_that_are_there() -> None:
    there = f"there are {H100} (0, 1), NVIDIA L4 (2)"
    assert warnings("NVIDIA H100 80GB=4,7=2,all=3", "9") == [
        f"--shares 7: no GPU here has that name; {there}",
        f"--shares NVIDIA H100 80GB: no GPU here has that name; {there}; did you mean {H100}?",
        f"--shares-only 9: no GPU here has that name; {there}",
    ]


def test_a_gpu_for_mig_that_is_not_there_is_told_with_those_that_are() -> None:
    gpus = [gpu_of(minor=0), gpu_of("NVIDIA L4", minor=1)]
    there = f"there are {H100} (0), NVIDIA L4 (1)"
    wrong, right = node_settings(node_name="n", mig_gpus="0,9"), node_settings(node_name="n", mig_gpus="all,GPU-1")
    assert list(setting_warnings(wrong, gpus)) == [f"--mig-gpus 9: no GPU here has that name; {there}"]
    assert list(setting_warnings(right, gpus)) == []


def test_only_shares_on_a_gpu_without_a_number_of_shares_is_told() -> None:
    assert warnings("all=4", "all") == []
    assert warnings("NVIDIA L4=4", "2") == []
    (warning,) = warnings("NVIDIA L4=4", "1,2")
    assert warning == (
        f"--shares-only: GPU 1 ({H100}, GPU-1) has no number of shares: set --shares 1=R, R from 2 to 32, "
        "or --shared 1=time-slicing"
    )
