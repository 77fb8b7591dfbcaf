"""A cluster of API server, scheduler and controllers, without a node: for what needs no running pod."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.versions import KubernetesRelease, default_release


@contextmanager
def control_plane(
    name: str, extra_args: Mapping[str, Sequence[str]] | None = None, release: KubernetesRelease | None = None
) -> Iterator[Cluster]:
    """Running while the block runs; ``TESSERA_BINARIES`` names a folder of its programs, as for every cluster test.

    The programs of a given ``release`` come from the cache.
    """
    named = os.environ.get("TESSERA_BINARIES") if release is None else None
    settings = Settings(
        name=name,
        nodes=0,
        release=release or default_release(),
        binaries=Path(named) if named else None,
        extra_args=extra_args or {},
    )
    with Cluster.start(settings, Progress()) as cluster:
        yield cluster
