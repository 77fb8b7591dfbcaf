"""A real Kubernetes cluster on this one Linux machine, for the demo, the end-to-end tests and the benchmarks.

    from tests.harness import Cluster, Settings
    with Cluster.start(Settings(name="e2e", nodes=2)) as cluster:
        cluster.kubectl("get", "nodes")

Real etcd, kube-apiserver, kube-scheduler, kube-controller-manager, containerd and kubelet; no Docker and no image
registry. It needs root. See ``python -m tests.harness --help`` for the command.
"""

from __future__ import annotations

from tests.harness.cluster import Cluster
from tests.harness.images import BUSYBOX_IMAGE
from tests.harness.manifests import busybox_pod
from tests.harness.node import Node
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.versions import KubernetesRelease, release
from tests.harness.waiting import DeadlineError, wait_for

__all__ = [
    "BUSYBOX_IMAGE",
    "Cluster",
    "DeadlineError",
    "KubernetesRelease",
    "Node",
    "Progress",
    "Settings",
    "busybox_pod",
    "release",
    "wait_for",
]
