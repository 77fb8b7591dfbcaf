"""A cache of one resource's objects, kept up to date by list and watch.

The client library's own informer retries without a pause and requests no bookmarks; this one backs off with jitter,
resumes from bookmarks and lists again after 410 Gone. Objects are decoded into the caller's msgspec struct, page by
page, and projected to the kept value: 5,000 slices in 71 MB instead of 1 GB. An unreadable object is skipped.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from driver.errors import NOT_FOUND, ApiError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import ListMeta, Page, page_reader, pages
from driver.kube.tolerant_json import decode
from driver.kube.types import Key, KubeObject, ObjectMeta, Unreadable
from driver.kube.work_loop import Backoff

log = logging.getLogger(__name__)

WATCH_SECONDS = (240, 480)
"""Range from which the length of a watch is drawn, so that watches of a fleet end apart."""

SILENCE_TIMEOUT_SECONDS = 90.0
"""How long a watch may bring nothing until everything is listed anew: the API server sends a bookmark each minute."""

STALE_AFTER_SECONDS = 120.0
"""Age of the last list, event or bookmark from which on a cache counts as stale: a list after silence fits in."""

FAILING_AFTER_SECONDS = 15.0
"""How long lists and watches may fail until a cache counts as stale."""

MALFORMED = (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError)
"""Errors of reading an answer that is no list, no event or no object of Kubernetes."""

S = TypeVar("S", bound=KubeObject)
T = TypeVar("T")


class Change(NamedTuple, Generic[T]):
    """The kept value of one object before and after, which differ; None where there was or is none."""

    key: Key
    old: T | None
    new: T | None


class Event(msgspec.Struct, frozen=True):
    """One line of a watch; ``object`` stays undecoded until its type is known."""

    type: str
    object: msgspec.Raw


class Status(msgspec.Struct, frozen=True):
    """An error in the middle of a watch."""

    message: str = ""
    code: int | None = None


class Bookmark(msgspec.Struct, frozen=True):
    metadata: ListMeta


class Named(msgspec.Struct, frozen=True):
    metadata: ObjectMeta


class WatchCache(Generic[S, T]):
    """One value for each object of one resource, by namespace and name. Thread-safe.

    Objects are decoded into the struct ``kind``; ``project`` returns the value to keep, or None to skip the object.
    ``on_change`` is called after every complete list, with all changes (perhaps none), and after every event that
    changed a value; one call at a time and in order, from the thread of ``run`` or of ``observe``. It must return
    quickly; an exception is logged as a defect and everything is listed anew.

    An object that can't be decoded or projected keeps its last value until it is deleted; ``unreadable`` has all such
    objects, and each is logged once.
    """

    message_if_not_installed: ClassVar[str] = ""
    """A warning that is logged once if the API server does not know the resource."""

    def __init__(
        self,
        client: KubeClient,
        path: str,
        kind: type[S],
        project: Callable[[S], T | None],
        on_change: Callable[[Sequence[Change[T]]], None] = lambda _: None,
        selectors: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._path, self._kind = client, path, kind
        self._read_plain_page = page_reader(kind)
        self._decoder = msgspec.json.Decoder(kind)
        self._project = project
        self._on_change = on_change
        self._selectors = dict(selectors or {})
        self._said_without = False
        self._clock = clock
        self._current_at = clock()
        self._failing_since: float | None = None
        self._unreadable: dict[Key, Unreadable] = {}
        self._changing = threading.RLock()  # held from a change until its report, so that reports are in order
        self._reading = threading.Condition()
        self._values: dict[Key, T] = {}
        self._versions: dict[Key, int] = {}
        self._version = 0
        self._synced = threading.Event()
        self._resume_at = ""

    @property
    def synced(self) -> bool:
        """Whether a complete list has been read at least once."""
        return self._synced.is_set()

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """Wait until everything up to ``version`` was processed, ``on_change`` included; False if that took too long.

        Own writes (``observe``) don't count: earlier writes of others may not have arrived yet.
        ``version`` must be of an object of this resource that the selectors match; any other may never be reached.
        Events of a resource come in the order of their versions, so everything written before it was processed, too.
        """
        with self._reading:
            return self._reading.wait_for(lambda: self._version >= version, timeout_s)

    def stale(self) -> str | None:
        """Why the values may be older than STALE_AFTER_SECONDS; None while lists, events or bookmarks arrive."""
        now, failing_since = self._clock(), self._failing_since
        if not self.synced:
            return f"{self._path} has not been listed yet"
        if failing_since is not None and now - failing_since > FAILING_AFTER_SECONDS:
            return f"{self._path} can't be listed or watched for {now - failing_since:.0f} s"
        silent = now - self._current_at
        return f"{self._path} has brought nothing for {silent:.0f} s" if silent > STALE_AFTER_SECONDS else None

    @property
    def api_version(self) -> str:
        """API group and version: "v1", "resource.k8s.io/v1"."""
        return self._path.removeprefix("/apis/").removeprefix("/api/").rpartition("/")[0]

    @property
    def resource(self) -> str:
        """The resource as RBAC names it: "resourceclaims"."""
        return self._path.rpartition("/")[2]

    @property
    def unreadable(self) -> list[Unreadable]:
        """The objects that can't be read at present."""
        with self._reading:
            return list(self._unreadable.values())

    def snapshot(self) -> dict[Key, T]:
        """The values by key; treat them as read-only."""
        with self._reading:
            return dict(self._values)

    def get(self, key: Key) -> T | None:
        with self._reading:
            return self._values.get(key)

    def observe(self, stored: Mapping[str, Any]) -> None:
        """Take over the answer to a write of our own before the watch brings it."""
        item = msgspec.convert(stored, self._kind)
        with self._changing:
            # The watch has brought everything up to its version, perhaps also the deletion of this object.
            latest = max(self._versions.get(item.metadata.key, 0), self._version)
            if item.metadata.version > latest:
                self._apply(item.metadata.key, item)

    def forget(self, key: Key) -> None:
        """Take over a deletion of our own; the watch brings the same later."""
        with self._changing:
            self._apply(key, None)

    def run(self, stop: threading.Event) -> None:
        """List and watch until ``stop`` is set; failures are logged, with growing delays. For a daemon thread.

        A watch resumes after a cut connection. Everything is listed anew after a refusal (such as 410 Gone), a
        malformed answer, or SILENCE_TIMEOUT_SECONDS without a bookmark.
        """
        backoff = Backoff()
        while not stop.is_set():
            try:
                self._resume_at = self._resume_at or self.load()
                if not self._watch(stop, backoff) and not self._silent(backoff):
                    stop.wait(backoff.next_s())  # a server or proxy that ends every watch at once
            except ApiError as error:
                again = self._silent(backoff) or error.status is not None
                self._failed(str(error), backoff, stop, again=again, unknown=error.status == NOT_FOUND)
            except (*MALFORMED, RecursionError) as error:
                what = f"the answer for {self._path} makes no sense: {type(error).__name__}: {error}"
                self._failed(what, backoff, stop, again=True)
            except Exception as error:
                # A defect of ours must not end the thread: the process would go on with an old picture.
                log.exception("defect while watching")
                self._failed(f"{type(error).__name__}: {error}", backoff, stop, again=True)

    def _silent(self, backoff: Backoff) -> bool:
        """Whether everything is listed anew, since nothing has come for SILENCE_TIMEOUT_SECONDS.

        If only the watch is silent, the delay does not grow: a server without bookmarks is silent repeatedly.
        """
        if self._clock() - self._current_at < SILENCE_TIMEOUT_SECONDS:
            return False
        self._resume_at = ""
        if self._failing_since is None:
            backoff.reset()
        return True

    def _failed(
        self, error: str, backoff: Backoff, stop: threading.Event, *, again: bool, unknown: bool = False
    ) -> None:
        if again:
            self._resume_at = ""
        self._failing_since = self._failing_since or self._clock()
        delay = backoff.next_s()
        if self.message_if_not_installed and unknown:
            log.log(logging.DEBUG if self._said_without else logging.WARNING, self.message_if_not_installed)
        else:
            log.warning("watch failed, trying again", extra={"error": error, "retryIn": f"{delay:.1f}s"})
        self._said_without = unknown
        stop.wait(delay)

    def load(self) -> str:
        """Read every page and keep the projected values; returns the version of the list.

        Raises ApiError and the errors in MALFORMED. ``run`` does this itself.
        """
        values: dict[Key, T] = {}
        versions: dict[Key, int] = {}
        unreadable: list[Unreadable] = []
        for page in pages(self._client, self._path, self._read_page, self._selectors):
            for item in page.items or ():
                value = item if isinstance(item, Unreadable) else self._projected(item)
                if isinstance(value, Unreadable):
                    unreadable.append(value)
                elif value is not None:
                    values[item.metadata.key], versions[item.metadata.key] = value, item.metadata.version
        with self._changing:
            keys = {item.metadata.key for item in unreadable}
            with self._reading:
                self._unreadable = {key: item for key, item in self._unreadable.items() if key in keys}
            for item in unreadable:
                self._note_unreadable(item)
            self._replace_all(values, versions, int(page.metadata.resource_version))
        self._said_without = False
        return page.metadata.resource_version

    def _read_page(self, data: bytes) -> Page[S | Unreadable]:
        """Decode a page of a list. Raises MsgspecError."""
        try:
            return self._read_plain_page(data)  # type: ignore[return-value]  # a list of S is one of S | Unreadable
        except msgspec.ValidationError:
            page = READ_RAW_PAGE(data)
            return Page(page.metadata, [self._read(item) for item in page.items or ()])

    def _read(self, data: msgspec.Raw) -> S | Unreadable:
        """Decode an object. Raises MsgspecError if it has no name either."""
        try:
            return decode(data, self._decoder)
        except msgspec.MsgspecError as error:
            return Unreadable(decode(data, NAMED).metadata, str(error))

    def _projected(self, item: S) -> T | Unreadable | None:
        try:
            return self._project(item)
        except Exception as error:
            log.debug("defect while projecting", exc_info=True)
            return Unreadable(item.metadata, f"{type(error).__name__}: {error}")

    def _note_unreadable(self, item: Unreadable) -> None:
        """Report an object that can't be read, unless that was reported already."""
        key = item.metadata.key
        with self._reading:
            is_new, self._unreadable[key] = key not in self._unreadable, item
        if is_new:
            extra = {"resource": self.resource, "object": str(key), "error": item.why}
            log.warning("an object can't be read, its last readable state is kept", extra=extra)

    def _replace_all(self, values: dict[Key, T], versions: dict[Key, int], listed_at: int) -> None:
        with self._changing:
            for key in self._unreadable.keys() & self._values.keys():
                values[key], versions[key] = self._values[key], self._versions[key]
            if listed_at >= self._version:  # else etcd was restored from a backup: versions began anew
                # Own writes after the list was taken are newer.
                for key in [key for key, version in self._versions.items() if version > listed_at]:
                    values[key], versions[key] = self._values[key], self._versions[key]
            with self._reading:
                before, self._values, self._versions = self._values, values, versions
            self._synced.set()
            keys = before.keys() | values.keys()
            changes = [Change(key, before.get(key), values.get(key)) for key in keys]
            self._on_change([change for change in changes if change.old != change.new])
            self._reached(listed_at)

    def _watch(self, stop: threading.Event, backoff: Backoff) -> bool:
        """Resume the watch, until its end or the first event after ``stop``; returns whether anything came."""
        seconds = random.randint(*WATCH_SECONDS)  # noqa: S311 - spreads load, guards nothing
        query = {
            **self._selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._resume_at,
            "timeoutSeconds": str(seconds),
        }
        received = False
        with self._client.stream(self._path, query, SILENCE_TIMEOUT_SECONDS) as lines:
            self._failing_since = None
            for line in lines:
                self._resume_at = str(self._process(decode(line, EVENT)))
                received = True
                backoff.reset()
                if stop.is_set():
                    break
        return received

    def _process(self, event: Event) -> int:
        """Process one event and return its version."""
        if event.type == "ERROR":
            status = STATUS.decode(event.object)
            raise ApiError(f"watch of {self._path}: {status.message}", status.code)
        if event.type == "BOOKMARK":
            version = int(BOOKMARK.decode(event.object).metadata.resource_version)
        else:
            item = self._read(event.object)
            version = item.metadata.version
            with self._changing:
                if version >= self._versions.get(item.metadata.key, 0):  # our own writes overtake the watch
                    self._apply(item.metadata.key, None if event.type == "DELETED" else item)
        self._reached(version)
        return version

    def _apply(self, key: Key, item: S | Unreadable | None) -> None:
        """Keep this state of an object (None: deleted) and report the change."""
        new = item if item is None or isinstance(item, Unreadable) else self._projected(item)
        if isinstance(new, Unreadable):
            self._note_unreadable(new)
            return
        with self._reading:
            self._unreadable.pop(key, None)
            old = self._values.pop(key, None)
            self._versions.pop(key, None)
            if item is not None and new is not None:
                self._values[key], self._versions[key] = new, item.metadata.version
        if old != new:
            self._on_change([Change(key, old, new)])

    def _reached(self, version: int) -> None:
        self._current_at, self._failing_since = self._clock(), None
        with self._reading:
            self._version = version
            self._reading.notify_all()


NAMED = msgspec.json.Decoder(Named)
READ_RAW_PAGE = page_reader(msgspec.Raw)
EVENT = msgspec.json.Decoder(Event)
STATUS = msgspec.json.Decoder(Status)
BOOKMARK = msgspec.json.Decoder(Bookmark)
