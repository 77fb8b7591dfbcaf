"""Objects put straight into etcd, thousands in a second: through the API server a fleet would take ten minutes.

Nothing validates them on the way in, so one of each kind goes through the API server first. It sets the defaults when
it reads them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import urllib3

Object = dict[str, Any]

MOST_OPERATIONS, MOST_BYTES = 100, 1_000_000
"""Of one transaction: etcd's own limits are 128 and 1.5 MiB."""

TIMEOUT_S = 60.0


class Etcd:
    """The etcd of a cluster, by its HTTP gateway. Its watchers, the API server's caches, learn of every change."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = urllib3.PoolManager(maxsize=1, retries=False)

    def put(
        self,
        folder: str,
        objects: Iterable[Object],
        tick: Callable[[str], None] = lambda _: None,
        together: int = MOST_OPERATIONS,
    ) -> None:
        """Store complete objects under ``/registry/<folder>``, with uids of their own; raises RuntimeError.

        ``together`` of them are one transaction and have one resource version: watches that are under way lose some of
        them, unless it is 1.
        """
        done = 0
        for batch in _batches(objects, folder, together):
            self._ask("txn", {"success": [{"requestPut": each} for each in batch]})
            done += len(batch)
            tick(f"{done} done")

    def delete_all(self, folder: str) -> None:
        """Delete what lies under ``/registry/<folder>/``."""
        prefix = f"/registry/{folder}/"
        self._ask("deleterange", {"key": _base64(prefix), "range_end": _base64(prefix[:-1] + "0")})  # "0" follows "/"

    def close(self) -> None:
        """Close the connection."""
        self._pool.clear()

    def _ask(self, what: str, body: Object) -> None:
        answer = self._pool.request("POST", f"{self._url}/v3/kv/{what}", json=body, timeout=TIMEOUT_S)
        if answer.status != 200:
            raise RuntimeError(f"etcd {what}: {answer.status}: {answer.data[:500]!r}")


def _batches(objects: Iterable[Object], folder: str, together: int) -> Iterator[list[dict[str, str]]]:
    batch, size = list[dict[str, str]](), 0
    for item in objects:
        metadata = {**item["metadata"], "uid": str(uuid4()), "creationTimestamp": _now()}
        key = "/".join(filter(None, ("/registry", folder, metadata.get("namespace"), metadata["name"])))
        value = json.dumps({**item, "metadata": metadata}, separators=(",", ":"))
        if batch and (len(batch) == together or size + len(value) > MOST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append({"key": _base64(key), "value": _base64(value)})
        size += len(value)
    if batch:
        yield batch


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
