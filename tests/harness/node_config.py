"""What a node's containerd and kubelet are told. Pure: state in, configuration out.

containerd 2 always has CDI on; DRA is on in the kubelet since Kubernetes 1.34.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.harness.cleanup import cgroup_of
from tests.harness.images import BUSYBOX_IMAGE
from tests.harness.layout import NodeLayout
from tests.harness.packages import CNI_PLUGINS
from tests.harness.state import ClusterState
from tests.harness.usual_places import KUBELET

CONTAINERD = """\
version = 3
root = {root}
state = {state}
# A machine without CAP_SYS_RESOURCE can't lower OOM scores; restrict_oom_score_adj below is for the same reason.
oom_score = 0
imports = []
disabled_plugins = [
  # Not needed, and each would touch something outside this node's directory or look for a kernel module.
  "io.containerd.nri.v1.nri",
  "io.containerd.image-verifier.v1.bindir",
  "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
  address = {socket}

[ttrpc]
  address = {ttrpc}

[plugins."io.containerd.internal.v1.opt"]
  path = {opt}

[plugins."io.containerd.shim.v1.manager"]
  socket_dir = {shim_sockets}

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = {sandbox}

[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  # Below this node's directory, where cleaning up after a crash finds them.
  netns_mounts_under_state_dir = true
  cdi_spec_dirs = [{cdi}]
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = [{cni_plugins}]
    conf_dir = {cni}
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      Root = {runc}
      SystemdCgroup = false
"""

CNI: dict[str, Any] = {"cniVersion": "1.0.0", "name": "loopback", "plugins": [{"type": "loopback"}]}
"""Enough for a node to be Ready; pods use the host's network."""


def containerd_config(node: NodeLayout) -> str:
    """containerd's config.toml."""
    values = {
        "root": node.containerd / "root",
        "state": node.containerd / "state",
        "socket": node.socket,
        "ttrpc": f"{node.socket}.ttrpc",
        "opt": node.containerd / "opt",
        "shim_sockets": node.shim_sockets,
        "sandbox": BUSYBOX_IMAGE,
        "cdi": node.cdi,
        "cni_plugins": CNI_PLUGINS,
        "cni": node.cni,
        "runc": node.containerd / "runc",
    }
    # A JSON string is a TOML string.
    return CONTAINERD.format(**{name: json.dumps(str(value)) for name, value in values.items()})


def kubelet_config(state: ClusterState, node: NodeLayout, resolv: Path = Path("/etc/resolv.conf")) -> dict[str, Any]:
    """The KubeletConfiguration. DRA needs no setting: it is on by default since 1.34."""
    pki, ports = state.layout.pki, state.nodes[node.index]
    address = state.addresses.node(node.index)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "port": ports.kubelet,
        "readOnlyPort": 0,
        "healthzBindAddress": address,
        "healthzPort": ports.health,
        "tlsCertFile": str(pki / f"{node.name}.crt"),
        "tlsPrivateKeyFile": str(pki / f"{node.name}.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "podLogsDir": str(node.pod_logs),
        "volumePluginDir": str(node.root / "volume-plugins"),
        "resolvConf": str(resolv) if resolv.exists() else "",
        # Cgroups, whatever the machine's version: no systemd, nothing taken from the machine, swap is its own affair.
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup_of(state.layout.root)}/{node.name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "makeIPTablesUtilChains": False,
        # A full disk or little memory must not evict test pods, nor throw away the only image there is.
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "maxPods": 500,
        # A pod's volumes follow its Secrets and ConfigMaps within seconds, and nodes report changes at once.
        "syncFrequency": "10s",
        "nodeStatusUpdateFrequency": "5s",
    }


def kubelet_flags(state: ClusterState, node: NodeLayout) -> list[str]:
    """The kubelet's flags.

    With an external cloud provider the kubelet keeps the addresses that the node object already has. That provider is
    the harness: it makes the object before the kubelet starts, with a loopback address, which the kubelet would refuse
    as --node-ip. So ``kubectl logs`` and ``kubectl exec`` work, on a machine without any network, too.
    """
    return [
        f"--config={node.root / 'kubelet.yaml'}",
        f"--kubeconfig={state.layout.kubeconfig(node.name)}",
        f"--hostname-override={node.name}",
        # By the usual name where it has one: the kubelet connects to sockets below, whose paths must be short.
        f"--root-dir={KUBELET if state.usual_places else node.kubelet}",
        f"--cert-dir={node.kubelet / 'pki'}",
        "--cloud-provider=external",
    ]
