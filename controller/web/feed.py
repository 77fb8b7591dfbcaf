"""The content of the page for all viewers: watched while anybody looks, computed once per change."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

from controller.controller import Controller
from controller.report.cluster_view import ClusterView, watch_cluster
from controller.settings import ControllerSettings
from controller.web.page_json import PageContent, content_of
from driver.errors import RecoverableError, TesseraError
from driver.kube.client import KubeClient

log = logging.getLogger(__name__)

IDLE_SECONDS = 30.0
"""How long the cluster is watched after the last viewer has gone."""

HEARTBEAT_SECONDS = 15.0
"""Longest silence of a stream: a viewer that hears nothing for longer has lost the connection."""

EXPLAINING_SECONDS = 1.0
"""Time per update in which what would help pending claims is looked for; later claims have only their reason."""

REST_FACTOR, MAX_REST_SECONDS = 4.0, 4.0
"""After an update the watch rests for a multiple of the time that it took: the leader decides in the same process."""

MAX_CHANGES = 32
"""Updates that are kept for viewers that are behind; one that is further behind loads everything again."""

LEADER_INTERVAL_SECONDS, REPEAT_SECONDS = 1.0, 10.0
"""How often the leader is asked whether it has decided, and after what time the same view is shown again."""

Views = Callable[[], Generator[ClusterView]]
Leader = Callable[[], Controller | None]


def cluster_views(client: KubeClient, settings: ControllerSettings, leader: Leader) -> Generator[ClusterView]:
    """The cluster as ``watch_cluster`` has it, but from the caches of the leader if this process leads."""
    while True:
        work = leader()
        if work is not None:
            yield from _decided_views(work, leader)
            continue
        with closing(watch_cluster(client, settings.driver_name, settings=settings)) as views:
            for view in views:
                yield view
                if leader() is not None:
                    break


def _decided_views(work: Controller, leader: Leader) -> Generator[ClusterView]:
    """What ``work`` decides from, as long as it leads. Raises RecoverableError if it does not decide."""
    shown, stale, shown_at = None, None, time.monotonic()
    while leader() is work:
        decided, failure = work.last_decision, work.failure()
        is_due = time.monotonic() - shown_at >= REPEAT_SECONDS
        if decided is None and is_due:
            raise RecoverableError(failure or "no decision has been made yet")
        if decided is not None and (decided is not shown or failure != stale or is_due):
            shown, stale, shown_at = decided, failure, time.monotonic()
            yield replace(decided, stale=failure)
        time.sleep(LEADER_INTERVAL_SECONDS)


@dataclass(frozen=True)
class PublishedContent:
    """The content at one moment."""

    version: str
    content: PageContent

    @cached_property
    def packed(self) -> bytes:
        """All of it as JSON in the format gzip."""
        return self.content.complete(self.version)


@dataclass(frozen=True)
class PublishedChange:
    """What viewers of the content before need for the content ``version``, as JSON in the format gzip."""

    version: str
    packed: bytes


class Feed:
    """Used in the thread of one event loop; a thread of its own watches the cluster while there are viewers."""

    def __init__(self, views: Views) -> None:
        """``views`` begins to watch the cluster."""
        self._views = views
        self.viewers = 0
        self._seen_at = time.monotonic()
        self._published: PublishedContent | None = None
        self._changes: dict[str, PublishedChange] = {}
        """By the version before the change, oldest first."""
        self._failure: TesseraError | None = None
        self._is_watching = False
        self._news = asyncio.Event()

    async def current(self) -> PublishedContent:
        """The newest content; begins to watch if nobody did. Raises TesseraError if the cluster can't be read."""
        self._seen_at = time.monotonic()
        while self._published is None:
            if not self._is_watching:
                self._begin()
            await self._news.wait()
            if self._failure is not None and not self._is_watching:
                raise self._failure
        return self._published

    async def changes(self, version: str) -> AsyncIterator[PublishedChange | None]:
        """The changes since ``version``, as they happen; None at least every ``HEARTBEAT_SECONDS``.

        Ends if the changes since ``version`` are not known: the viewer has to load everything again.
        """
        while self._published is not None:
            change = self._changes.get(version)
            if change is not None:
                version = change.version
                yield change
            elif version != self._published.version:
                return
            else:
                news = self._news
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), HEARTBEAT_SECONDS)
                if not news.is_set():
                    yield None

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Count a viewer while the block runs."""
        self.viewers += 1
        try:
            yield
        finally:
            self.viewers -= 1
            self._seen_at = time.monotonic()

    def _begin(self) -> None:
        self._is_watching, self._failure = True, None
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), daemon=True, name="web-watch").start()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the cluster until nobody looks any more."""
        failure: TesseraError | None = None
        try:
            with closing(self._views()) as views:
                for view in views:
                    began = time.monotonic()
                    content = content_of(view, partial(self._is_early, began))
                    _call(loop, partial(self._publish, content))
                    if not self._is_wanted():
                        break
                    time.sleep(min(MAX_REST_SECONDS, REST_FACTOR * (time.monotonic() - began)))
        except TesseraError as error:
            failure = error
        except Exception as error:
            log.exception("defect while watching for the web page")
            failure = TesseraError(f"internal error, please report it: {type(error).__name__}: {error}")
        _call(loop, partial(self._end, failure))

    def _is_early(self, began: float) -> bool:
        return time.monotonic() - began < EXPLAINING_SECONDS

    def _is_wanted(self) -> bool:
        return self.viewers > 0 or time.monotonic() - self._seen_at < IDLE_SECONDS

    def _publish(self, content: PageContent) -> None:
        before = self._published
        if before is not None and before.content == content:
            return
        after = PublishedContent(secrets.token_hex(8), content)
        if before is not None:
            self._changes[before.version] = PublishedChange(
                after.version, content.changes_since(before.content, after.version)
            )
            while len(self._changes) > MAX_CHANGES:
                del self._changes[next(iter(self._changes))]
        self._published = after
        self._tell()

    def _end(self, failure: TesseraError | None) -> None:
        """Nobody watches any more: what was published is out of date from now on."""
        self._is_watching, self._failure, self._published = False, failure, None
        self._changes.clear()
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has ended, and the process is about to
        loop.call_soon_threadsafe(function)
