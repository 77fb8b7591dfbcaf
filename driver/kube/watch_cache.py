"""A copy of some objects of the API server, kept up to date by list and watch.

The client library's own informer retries without a pause and asks for no bookmarks; this one backs off
with jitter, resumes from bookmarks and lists again after 410 Gone.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping

import msgspec

from driver.errors import ApiError
from driver.kube.backoff import Backoff
from driver.kube.transport import KubeClient, Object

log = logging.getLogger(__name__)

PAGE = 500
"""Objects a page of a list."""

WATCH_S = (240, 480)
"""Range from which the length of a watch is drawn, so that watches of a fleet end apart."""

READ_GRACE_S = 30.0
"""How much longer than the watch a silent connection is kept: the server ends the watch first."""

SENSELESS = (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError)
"""What an answer that is no list, no event or no object of Kubernetes makes our reading of it raise."""


class WatchCache:
    """Objects of one resource by name. Thread-safe; readers get a snapshot.

    ``on_change`` is called without arguments, from the thread of ``run`` or of ``observe``, after every
    change; it must return quickly.
    """

    def __init__(
        self, client: KubeClient, path: str, selectors: Mapping[str, str], on_change: Callable[[], None]
    ) -> None:
        self._client = client
        self._path = path
        self._selectors = dict(selectors)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._objects: dict[str, Object] = {}
        self._versions: dict[str, int] = {}
        self._synced = threading.Event()
        self._resume_at = ""

    @property
    def synced(self) -> bool:
        """Whether a complete list has been read at least once."""
        return self._synced.is_set()

    def snapshot(self) -> dict[str, Object]:
        """The objects by name; treat them as read-only."""
        with self._lock:
            return dict(self._objects)

    def observe(self, stored: Object) -> None:
        """Take over the answer to a write of our own before the watch brings it."""
        with self._lock:
            self._store(stored)
        self._on_change()

    def forget(self, name: str) -> None:
        """Take over a deletion of our own; the watch brings the same later."""
        with self._lock:
            self._objects.pop(name, None)
        self._on_change()

    def run(self, stop: threading.Event) -> None:
        """List and watch until ``stop`` is set; whatever fails is logged and tried again, more and more slowly.

        A connection that is cut goes on where it was; after a refusal (410 Gone among them) or an answer
        that makes no sense everything is listed anew.
        """
        backoff = Backoff()
        while not stop.is_set():
            try:
                self._resume_at = self._resume_at or self._list()
                if not self._watch(backoff):
                    stop.wait(backoff.next_s())  # a server or proxy that ends every watch at once
            except ApiError as error:
                self._failed(str(error), backoff, stop, again=error.status is not None)
            except SENSELESS as error:
                what = f"the answer for {self._path} makes no sense: {type(error).__name__}: {error}"
                self._failed(what, backoff, stop, again=True)
            except Exception as error:
                # A defect of ours must not end the thread: the plugin would go on with an old picture.
                log.exception("defect while watching")
                self._failed(f"{type(error).__name__}: {error}", backoff, stop, again=True)

    def _failed(self, error: str, backoff: Backoff, stop: threading.Event, *, again: bool) -> None:
        if again:
            self._resume_at = ""
        delay = backoff.next_s()
        log.warning("watch failed, trying again", extra={"error": error, "retryIn": f"{delay:.1f}s"})
        stop.wait(delay)

    def _list(self) -> str:
        found: dict[str, Object] = {}
        query = {**self._selectors, "limit": str(PAGE)}
        while True:
            page = msgspec.json.decode(self._client.get(self._path, query), type=Object)
            found.update((item["metadata"]["name"], item) for item in page.get("items") or ())
            metadata = page["metadata"]
            if not metadata.get("continue"):
                break
            query["continue"] = metadata["continue"]
        self._replace_all(found, int(metadata["resourceVersion"]))
        return str(metadata["resourceVersion"])

    def _replace_all(self, found: Mapping[str, Object], version: int) -> None:
        with self._lock:
            # What we wrote after the list was taken is newer than the list.
            newer = {name: item for name, item in self._objects.items() if self._versions[name] > version}
            self._objects = {**found, **newer}
            self._versions = {name: _version(item) for name, item in self._objects.items()}
        self._synced.set()
        self._on_change()

    def _watch(self, backoff: Backoff) -> bool:
        """One watch, from where the last one was; says whether anything came."""
        seconds = random.randint(*WATCH_S)  # noqa: S311 - spreads load, guards nothing
        query = {
            **self._selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._resume_at,
            "timeoutSeconds": str(seconds),
        }
        heard = False
        for line in self._client.stream(self._path, query, seconds + READ_GRACE_S):
            event = msgspec.json.decode(line, type=Object)
            if event["type"] == "ERROR":
                status = event["object"]
                raise ApiError(f"watch of {self._path}: {status.get('message')}", status.get("code"))
            self._apply(event["type"], event["object"])
            self._resume_at = str(event["object"]["metadata"]["resourceVersion"])
            heard = True
            backoff.reset()
        return heard

    def _apply(self, kind: str, item: Object) -> None:
        if kind == "BOOKMARK":
            return
        with self._lock:
            if kind != "DELETED":
                self._store(item)
            elif self._versions.get(item["metadata"]["name"], 0) <= _version(item):
                self._objects.pop(item["metadata"]["name"], None)
                self._versions[item["metadata"]["name"]] = _version(item)
        self._on_change()

    def _store(self, item: Object) -> None:
        """Keep ``item`` unless a newer state of it is known: our own writes overtake the watch."""
        name = item["metadata"]["name"]
        if _version(item) >= self._versions.get(name, 0):
            self._objects[name] = item
            self._versions[name] = _version(item)


def _version(item: Object) -> int:
    """Resource versions compare as integers (KEP-5504; true of every supported release)."""
    return int(item["metadata"]["resourceVersion"])
