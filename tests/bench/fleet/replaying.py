"""A client that reads recorded lists, for a process that shall load nothing else."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from driver.clock import Clock
from driver.errors import NOT_FOUND, ApiError
from driver.kube.client import Object


class Recorded:
    """Stands for a KubeClient: lists come from the files, watches stay silent, writes are answered.

    What has no file is not served.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._silence: queue.Queue[bytes] = queue.Queue()
        self._version = 2_000_000
        self.clock = Clock()

    def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        page = self._directory / folder_of(path) / (query or {}).get("continue", "0")
        if not page.exists():
            raise ApiError(f"{path}: not recorded", NOT_FOUND)
        return page.read_bytes()

    def get_object(self, path: str) -> Object:
        return {"metadata": {"resourceVersion": "1"}, "data": {}}

    @contextmanager
    def stream(self, path: str, query: Mapping[str, str], read_timeout_s: float) -> Iterator[Iterator[bytes]]:
        yield (self._silence.get() for _ in range(1))

    def find(self, path: str) -> Object:
        return self.get_object(path)

    def create(self, path: str, body: Object) -> Object:
        return self._stored(path, body)

    def patch(self, path: str, body: Object) -> Object:
        return self._stored(path, body)

    def patch_existing(self, path: str, body: Object) -> Object:
        return self._stored(path, body)

    def create_or_patch(self, path: str, body: Object, new: Object | None = None) -> Object:
        return self._stored(path, body)

    def replace(self, path: str, body: Object, query: Mapping[str, str] | None = None) -> Object:
        return self._stored(path, body)

    def _stored(self, path: str, body: Object) -> Object:
        self._version += 1
        name = {"name": path.rpartition("/")[2]}
        return {**body, "metadata": {**name, **body.get("metadata", {}), "resourceVersion": str(self._version)}}


def folder_of(path: str) -> str:
    """Where the pages of a list are."""
    return path.rpartition("/")[2]
