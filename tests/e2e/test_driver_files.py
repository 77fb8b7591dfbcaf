"""Containers of well-known kinds of images find the driver's libcuda, or the loader says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster
from tests.harness.packages import ensure_packages
from tests.harness.progress import Progress
from tests.harness.waiting import wait_for
from tests.support.loader_images import MUSL, alpine, archive, compile_stub, debian, distroless, ubi
from tests.support.plugin import PluginProcess
from tests.support.workloads import Workloads, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NVIDIA = "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"
"""LD_LIBRARY_PATH of NVIDIA's images."""

NOT_FOUND = "Error loading shared library libcuda.so.1: No such file or directory"
OF_GLIBC = "gnu_get_libc_version: symbol not found"

IMAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "debian": (debian, "", "stub of libcuda in /lib/x86_64-linux-gnu/libcuda.so.1"),
    "distroless": (distroless, "", "stub of libcuda in /usr/lib/x86_64-linux-gnu/libcuda.so.1"),
    "ubi": (ubi, "", "stub of libcuda in /lib64/"),
    "nvidia": (ubi, NVIDIA, "stub of libcuda in /usr/local/nvidia/lib64/libcuda.so.1"),
    "alpine": (alpine, "", NOT_FOUND),
    "alpine-nvidia": (alpine, NVIDIA, OF_GLIBC),
}
"""How the image is made, its LD_LIBRARY_PATH, and what its program says."""


@pytest.fixture
def libcuda(plugin: PluginProcess) -> Iterator[Path]:
    """The simulated node's libcuda, which a loader can load for the length of the test."""
    [library] = {path.resolve() for path in plugin.host_root.rglob("libcuda.so.1")}
    text = library.read_bytes()
    compile_stub(library)
    yield library
    library.write_bytes(text)


@pytest.fixture
def images(cluster: Cluster, tmp_path: Path) -> dict[str, str]:
    """The images on the cluster's node, name by kind."""
    ensure_packages(Progress(), MUSL)
    names = {kind: f"docker.io/tessera/{kind}:local" for kind in IMAGES}
    for kind, (make, library_path, _) in IMAGES.items():
        file = tmp_path / f"{kind}.tar"
        file.write_bytes(archive(make, names[kind], tmp_path / kind, library_path))
        cluster.nodes[0].import_image(file)
    return names


@pytest.mark.usefixtures("libcuda")
def test_the_loader_of_each_image_finds_libcuda_except_alpines_which_says_why(
    workloads: Workloads, images: dict[str, str]
) -> None:
    claim = workloads.claim("shared", request("gpu-inference-1g-10gb"))
    for kind, image in images.items():
        workloads.pod(kind, claim, image=image)
    workloads.running(*images)
    [node] = workloads.cluster.nodes
    logs = {kind: wait_for(partial(node.read_log, kind), 60, f"the log of {kind}") for kind in images}
    for kind, (_, _, expected) in IMAGES.items():
        assert expected in logs[kind], kind
