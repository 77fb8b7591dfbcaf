"""What a cluster should be like: parsed once, where the user says it, and never changed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from driver.errors import UsageError
from tests.harness.addresses import MAX_NODES
from tests.harness.layout import BASE, check_socket_paths
from tests.harness.versions import KubernetesRelease, default_release

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,18}[a-z0-9])?")
COMPONENTS = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubelet", "containerd")


@dataclass(frozen=True)
class Settings:
    """A cluster to be. Raises UsageError for a value that makes no sense.

    name        of the cluster and of its directory; clusters of different names live side by side
    nodes       real nodes, each with its own containerd and kubelet: "node-0", "node-1", ...
    release     the Kubernetes version; without one, that of the environment variable KUBE, otherwise the reference
    binaries    a folder with all programs; None: the cache, built into if need be
    ephemeral   True: the cluster ends with the process that started it, however that ends;
                False: it stays until ``Cluster.stop`` or ``python -m tests.harness down``
    usual_places  nodes whose pods find the kubelet in /var/lib/kubelet and CDI specs in /var/run/cdi
    extra_args  more flags for a component, after the harness's own, so that they win:
                ``{"kube-apiserver": ["--feature-gates=DRAPrioritizedList=false"]}``
    """

    name: str = "tessera"
    nodes: int = 1
    release: KubernetesRelease = field(default_factory=default_release)
    binaries: Path | None = None
    cache: Path = field(default_factory=lambda: Path.home() / ".cache" / "tessera")
    ephemeral: bool = True
    usual_places: bool = False
    extra_args: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 0 <= self.nodes <= MAX_NODES:
            raise UsageError(f"nodes is {self.nodes}; from 0 to {MAX_NODES} is possible")
        unknown = set(self.extra_args) - set(COMPONENTS)
        if unknown:
            raise UsageError(f"extra_args names {', '.join(sorted(unknown))}; known: {', '.join(COMPONENTS)}")
        check_socket_paths(self.directory, self.nodes)

    @property
    def directory(self) -> Path:
        """Where all of this cluster lies."""
        return BASE / self.name


def check_name(name: str) -> None:
    """Raise UsageError unless ``name`` can name a cluster."""
    if not NAME.fullmatch(name):
        raise UsageError(f"cluster name {name!r}: lower-case letters, digits and inner dashes, at most 20")
