"""The configuration of a cluster's parts, certificates and image: made, not run."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import subprocess
import tarfile
import tomllib
from pathlib import Path

import msgspec
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from cryptography.x509.verification import PolicyBuilder, Store

from driver.errors import UsageError
from tests.harness.certs import Authority, service_account_keys
from tests.harness.control_plane import (
    apiserver_flags,
    controller_manager_flags,
    etcd_flags,
    make_credentials,
    make_kubelet_credentials,
    scheduler_flags,
)
from tests.harness.images import BUSYBOX_IMAGE, busybox_archive
from tests.harness.layout import BASE, PLUGIN_SOCKET, SOCKET_PATH_MAX, check_socket_paths
from tests.harness.manifests import busybox_pod, node_object
from tests.harness.node import _without_prefix
from tests.harness.node_config import containerd_config, kubelet_config, kubelet_flags
from tests.harness.settings import Settings
from tests.harness.state import ClusterState, read_state


def test_a_state_survives_the_disk(state: ClusterState, tmp_path: Path) -> None:
    state.write()
    assert read_state(tmp_path) == state
    assert state.layout.state.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", "{", '{"directory": "/x"}'])
def test_a_state_that_a_crash_cut_short_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    assert read_state(tmp_path) is None


def test_nodes_share_nothing_on_the_machine(state: ClusterState) -> None:
    one, two = (containerd_config(state.layout.node(index)) for index in (0, 1))
    own = [line for line in one.splitlines() if str(state.layout.root) in line or "/run/" in line]
    assert len(own) == 9
    assert not set(own) & set(two.splitlines())
    first, second = (kubelet_config(state, state.layout.node(index)) for index in (0, 1))
    for key in ("address", "healthzBindAddress", "containerRuntimeEndpoint", "podLogsDir", "cgroupRoot", "tlsCertFile"):
        assert first[key] != second[key]


def test_containerd_looks_for_cdi_specs_of_its_node_only(state: ClusterState) -> None:
    node = state.layout.node(1)
    config = tomllib.loads(containerd_config(node))
    runtime = config["plugins"]["io.containerd.cri.v1.runtime"]
    assert config["version"] == 3
    assert runtime["cdi_spec_dirs"] == [str(node.cdi)]
    assert runtime["restrict_oom_score_adj"] is True
    assert config["plugins"]["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"] == BUSYBOX_IMAGE


def test_the_kubelet_leaves_the_machine_alone(state: ClusterState) -> None:
    config = kubelet_config(state, state.layout.node(0), resolv=Path("/no/such/file"))
    assert config["cgroupRoot"] == f"/tessera-test/{state.name}/node-0"
    assert config["enforceNodeAllocatable"] == []
    assert config["makeIPTablesUtilChains"] is False
    assert config["resolvConf"] == ""
    assert "--cloud-provider=external" in kubelet_flags(state, state.layout.node(0))


def test_flags_name_the_addresses_of_the_cluster(state: ClusterState) -> None:
    assert "--bind-address=127.240.3.1" in apiserver_flags(state)
    assert "--service-cluster-ip-range=127.240.3.0/24" in apiserver_flags(state)
    assert "--listen-client-urls=http://127.241.3.1:2379" in etcd_flags(state)
    assert "--secure-port=10259" in scheduler_flags(state)
    assert "--use-service-account-credentials" in controller_manager_flags(state)


def test_credentials_are_complete_and_private(state: ClusterState) -> None:
    authority = make_credentials(state)
    make_kubelet_credentials(state, authority, "node-0", "127.241.3.10")
    files = [
        flag.split("=", 1)[1] for flag in (*apiserver_flags(state), *controller_manager_flags(state)) if "/" in flag
    ]
    for file in files:
        if file.startswith(str(state.layout.root)):
            assert Path(file).exists()
    for secret in (
        *state.layout.pki.glob("*.key"),
        *state.layout.root.glob("*.kubeconfig"),
        state.layout.pki / "tokens.csv",
    ):
        assert secret.stat().st_mode & 0o777 == 0o600, secret


def test_the_admins_kubeconfig_holds_everything(state: ClusterState) -> None:
    make_credentials(state)
    config = yaml.safe_load(state.layout.kubeconfig("admin").read_text())
    cluster = config["clusters"][0]["cluster"]
    assert cluster["server"] == "https://127.240.3.1"
    authority = base64.b64decode(cluster["certificate-authority-data"])
    assert authority == (state.layout.pki / "ca.crt").read_bytes()
    assert config["users"][0]["user"] == {"token": "secret"}


def certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def test_certificates_verify_against_their_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("node-0", "system:node:node-0", ["system:nodes"], ["127.241.0.10"], ["node-0"])
    leaf = certificate(pair.certificate)
    builder = PolicyBuilder().store(Store([certificate(authority.pair.certificate)]))
    builder.build_server_verifier(x509.DNSName("node-0")).verify(leaf, [])
    builder.build_client_verifier().verify(leaf, [])
    assert leaf.subject.rfc4514_string() == "CN=system:node:node-0,O=system:nodes"
    assert load_pem_private_key(pair.key.read_bytes(), None).public_key() == leaf.public_key()


def test_another_authority_does_not_vouch(tmp_path: Path) -> None:
    pair = Authority(tmp_path / "one").issue("x", "x", dns=["x"])
    stranger = certificate(Authority(tmp_path / "two").pair.certificate)
    verifier = PolicyBuilder().store(Store([stranger])).build_server_verifier(x509.DNSName("x"))
    with pytest.raises(x509.verification.VerificationError):
        verifier.verify(certificate(pair.certificate), [])


def test_service_account_keys_belong_together(tmp_path: Path) -> None:
    pair = service_account_keys(tmp_path)
    private = load_pem_private_key(pair.key.read_bytes(), None)
    assert private.public_key() == load_pem_public_key(pair.certificate.read_bytes())


@pytest.fixture
def busybox(tmp_path: Path) -> Path:
    """Stands for busybox: lists its applets, and is small."""
    file = tmp_path / "busybox"
    file.write_text("#!/bin/sh\nprintf 'busybox\\nsh\\nsleep\\n'\n")
    file.chmod(0o755)
    return file


def test_the_image_is_a_valid_oci_archive(busybox: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(busybox_archive(busybox))) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == BUSYBOX_IMAGE
    manifest = json.loads(blob(files, entry))
    config = json.loads(blob(files, manifest["config"]))
    layer = blob(files, manifest["layers"][0])
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as tree:
        assert tree.getmember("bin/sh").linkname == "busybox"
        assert tree.getmember("bin/busybox").mode == 0o755


def blob(files: dict[str, bytes], descriptor: dict[str, object]) -> bytes:
    digest = str(descriptor["digest"])
    content = files[f"blobs/sha256/{digest.removeprefix('sha256:')}"]
    assert len(content) == descriptor["size"]
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == digest
    return content


def test_the_image_is_the_same_every_time(busybox: Path) -> None:
    assert busybox_archive(busybox) == busybox_archive(busybox)


def test_a_busybox_that_fails_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "busybox"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError):
        busybox_archive(broken)


def test_a_pod_takes_more_fields() -> None:
    pod = busybox_pod("p", ["true"], node="node-1", container={"env": []}, resourceClaims=[{"name": "c"}])
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "node-1"}
    assert pod["spec"]["containers"][0]["env"] == []
    assert pod["spec"]["resourceClaims"] == [{"name": "c"}]
    assert pod["spec"]["hostNetwork"] is True


def test_the_labels_of_a_node_object_are_added_to_its_own() -> None:
    assert node_object("n", {"a": "b"})["metadata"]["labels"] == {
        "kubernetes.io/hostname": "n",
        "kubernetes.io/os": "linux",
        "a": "b",
    }


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("2026-11-21T03:56:42.1Z stdout F two words", "two words\n"),
        ("2026-11-21T03:56:42.1Z stderr P to be", "to be"),
        ("2026-11-21T03:56:42.1Z stdout F ", "\n"),
    ],
)
def test_lines_of_a_log_lose_their_prefix(line: str, text: str) -> None:
    assert _without_prefix(line) == text


def test_the_longest_names_leave_room_for_sockets() -> None:
    settings = Settings(name="a" * 20, nodes=200)
    assert len(str(settings.directory / "node-199" / PLUGIN_SOCKET)) <= SOCKET_PATH_MAX


def test_a_directory_too_long_for_sockets_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a socket below it would have 12[0-9] characters, at most 107"):
        check_socket_paths(BASE / ("a" * 50), 1)


def test_extra_arguments_and_all_survive_in_the_state(state: ClusterState) -> None:
    more = msgspec.structs.replace(state, extra_args={"kubelet": ["--v=4"]})
    more.write()
    assert read_state(Path(more.directory)) == more
