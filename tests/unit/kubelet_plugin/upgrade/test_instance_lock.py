"""Names of the sockets of a plugin that shares its node, and who is said to be at work there."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.errors import UsageError
from kubelet_plugin.settings import SOCKET_PATH_LIMIT, node_settings
from kubelet_plugin.upgrade.instance_lock import InstanceLock, is_listening

UID = "3f0c9d1e-7a41-4b8e-9c60-1d2e3f4a5b6c"
REGISTRY = Path("/var/lib/kubelet/plugins_registry")


def test_sockets_are_named_as_the_kubelets_helper_for_rolling_updates_names_them() -> None:
    settings = node_settings(node_name="node-a", pod_uid=UID)
    assert settings.registration_socket == REGISTRY / f"gpu.tessera.dev-{UID}-reg.sock"
    assert settings.plugin_socket == Path(f"/var/lib/kubelet/plugins/gpu.tessera.dev/dra-{UID}.sock")


def test_without_a_uid_sockets_keep_their_names() -> None:
    settings = node_settings(node_name="node-a")
    assert settings.registration_socket == REGISTRY / "gpu.tessera.dev-reg.sock"
    assert settings.plugin_socket.name == "dra.sock"


def test_a_long_driver_name_gets_sockets_that_linux_takes_and_that_differ_by_pod() -> None:
    name = "gpu." + "a" * 55 + ".dev"
    one, two = (node_settings(node_name="node-a", driver_name=name, pod_uid=uid) for uid in (UID, UID[::-1]))
    for settings in (one, two):
        assert len(str(settings.registration_socket)) <= SOCKET_PATH_LIMIT
        assert len(str(settings.plugin_socket)) <= SOCKET_PATH_LIMIT
    assert one.registration_socket != two.registration_socket


@pytest.mark.parametrize("uid", ["../x", "a/b", "-a", "a b", "a" * 64])
def test_what_is_no_uid_is_refused(uid: str) -> None:
    with pytest.raises(UsageError, match=r"--pod-uid .*must be the uid of this process' pod"):
        node_settings(node_name="node-a", pod_uid=uid)


def owner_of(directory: Path, name: str) -> InstanceLock:
    return InstanceLock(directory, directory / f"dra-{name}.sock", directory / "dra.sock")


def test_one_of_two_owns_the_node_and_the_other_knows_whom_to_ask(tmp_path: Path) -> None:
    one, two = owner_of(tmp_path, "one"), owner_of(tmp_path, "two")
    assert one.take()
    assert not two.take()
    assert one.owner() is None
    assert two.owner() == tmp_path / "dra-one.sock"
    assert not two.known_to_kubelet()
    one.note_registered()
    assert two.known_to_kubelet()
    one.release()
    assert two.take()
    assert one.owner() == tmp_path / "dra-two.sock"
    assert not one.known_to_kubelet()


def test_an_owner_that_names_no_socket_has_the_fixed_one(tmp_path: Path) -> None:
    """A plugin without --pod-uid, or of version 0.1.0."""
    (tmp_path / "lock").write_text("4711\n")
    other = owner_of(tmp_path, "new")
    assert other.owner() == tmp_path / "dra.sock"
    assert other.known_to_kubelet()


def test_nobody_is_known_before_the_owner_has_written_its_name(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"")
    assert owner_of(tmp_path, "new").owner() is None


def test_a_socket_that_is_not_there_is_not_listened_on(tmp_path: Path) -> None:
    assert not is_listening(tmp_path / "none.sock")
