"""Flags of the node plugin: defaults, and errors that name the flag, its value and what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.config.settings import node_settings
from driver.errors import UsageError


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
        pytest.param("driver_root", Path("r"), "--driver-root r: must be an absolute path", id="relative driver root"),
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
