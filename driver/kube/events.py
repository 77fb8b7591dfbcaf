"""Events for people: what ``kubectl describe`` shows of a claim, a pod or a node.

core/v1, with count and timestamps: kubectl reads that API whatever the Event was written with, and unlike
events.k8s.io/v1, where a written note is immutable, it lets the message follow the state of things.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from driver.errors import CONFLICT, ApiError
from driver.kube.client import KubeClient, Object
from driver.kube.clock import Clock, seconds_time
from driver.kube.types import Reference
from driver.kube.work_loop import Backoff

log = logging.getLogger(__name__)

MESSAGE_BYTES = 1024
"""The API's limit for a note; longer ones end in an ellipsis."""

REASON_LETTERS = 128
NAME_LETTERS = 253
"""Limits of the API."""

QUIET_S = 60.0
"""How long an Event whose message stays the same is not written again; what happens meanwhile is counted."""

WRITES_PER_S, BURST = 5.0, 25
"""All Events together: half of what client-go's recorder may, since etcd keeps every one for an hour."""

MOST_WAITING = 1000
"""Events that wait to be written; beyond that the oldest are dropped."""

MOST_KNOWN = 4096
"""Events whose count and message are remembered."""

Type = Literal["Normal", "Warning"]
Identity = tuple[str, str, str, str, str]


@dataclass
class Waiting:
    """What is to be written about one object for one reason: the last message, when, and how often it happened."""

    about: Reference
    reason: str
    message: str
    type: Type
    at: datetime
    count: int = 0


@dataclass
class Written:
    """What the API server has of it: ``count`` times so far, ``at`` by the monotonic clock."""

    message: str
    count: int
    at: float


class Recorder:
    """Writes Events in the background: one for each object and reason, its message and count kept up to date.

    ``component`` is shown as the origin. Never raises into its callers; what can't be written is logged.
    """

    def __init__(self, client: KubeClient, component: str, instance: str, clock: Clock | None = None) -> None:
        self._client = client
        self._component, self._instance = component, instance
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._waiting: OrderedDict[Identity, Waiting] = OrderedDict()
        self._written: OrderedDict[Identity, Written] = OrderedDict()
        self._tokens, self._filled_at = float(BURST), self._clock.monotonic()

    def event(self, about: Reference, reason: str, message: str, type: Type = "Normal") -> None:  # noqa: A002 - the field's name
        """Say that this happened once (more); returns at once, from any thread.

        ``reason`` is one UpperCamelCase word or few; ``message`` a sentence of at most MESSAGE_BYTES.
        """
        key = (about.kind, about.namespace, about.name, about.uid, reason)
        with self._lock:
            now = self._clock.now()
            waiting = self._waiting.setdefault(key, Waiting(about, reason[:REASON_LETTERS], message, type, now))
            waiting.message, waiting.type, waiting.at = shortened(message), type, now
            waiting.count += 1
            if len(self._waiting) > MOST_WAITING:
                (_, dropped) = self._waiting.popitem(last=False)
                log.warning("too many Events, one is dropped", extra={"object": dropped.about.name, "reason": reason})
        self._wake.set()

    def run(self, stop: threading.Event) -> None:
        """Write until ``stop`` is set (then call ``wake`` once more)."""
        backoff = Backoff()
        while not stop.is_set():
            self._wake.clear()
            pause = self._next_due_s()
            if pause > 0:
                self._clock.wait(self._wake, pause)
            elif not self._write_next():
                self._clock.wait(stop, backoff.next_s())
            else:
                backoff.reset()

    def wake(self) -> None:
        """Get ``run`` out of whatever it waits for."""
        self._wake.set()

    # What is due, and when

    def _next_due_s(self) -> float:
        """Seconds until something may be written: 0 if at once; an hour where nothing waits."""
        with self._lock:
            due = min((self._due_s(key) for key in self._waiting), default=3600.0)
            return max(due, self._next_token_s())

    def _due_s(self, key: Identity) -> float:
        written, waiting = self._written.get(key), self._waiting[key]
        if written is None or written.message != waiting.message:
            return 0.0
        return max(0.0, written.at + QUIET_S - self._clock.monotonic())

    def _next_token_s(self) -> float:
        now = self._clock.monotonic()
        self._tokens = min(float(BURST), self._tokens + (now - self._filled_at) * WRITES_PER_S)
        self._filled_at = now
        return max(0.0, (1.0 - self._tokens) / WRITES_PER_S)

    # Writing

    def _write_next(self) -> bool:
        """Write the first that is due; False: the API server can't take it now, and it goes on waiting."""
        with self._lock:
            key = next(key for key in self._waiting if self._due_s(key) <= 0)
            waiting = self._waiting.pop(key)
            self._tokens -= 1.0
        try:
            self._remember(key, self._write(key, waiting))
        except ApiError as error:
            return self._refused(key, waiting, error)
        except Exception:
            log.exception("defect while writing an Event")
        return True

    def _refused(self, key: Identity, waiting: Waiting, error: ApiError) -> bool:
        passing = error.status is None or error.status == 429 or error.status >= 500
        log.warning(
            "an Event can't be written, trying again" if passing else "an Event can't be written",
            extra={"object": waiting.about.name, "reason": waiting.reason, "error": str(error)},
        )
        if passing:
            with self._lock:
                newer = self._waiting.setdefault(key, waiting)
                if newer is not waiting:
                    newer.count += waiting.count
        return not passing

    def _remember(self, key: Identity, written: Written) -> None:
        with self._lock:
            self._written[key] = written
            self._written.move_to_end(key)
            if len(self._written) > MOST_KNOWN:
                self._written.popitem(last=False)

    def _write(self, key: Identity, waiting: Waiting) -> Written:
        """Update the Event if there is one, else create it. Raises ApiError."""
        path = f"/api/v1/namespaces/{waiting.about.namespace or 'default'}/events"
        name = event_name(key)
        known = self._written.get(key)
        count = waiting.count + (known.count if known else 0)
        update = self._update(waiting, count)
        if known is None or self._client.patch_existing(f"{path}/{name}", update) is None:  # None: it expired
            count = self._create(path, name, waiting)
        return Written(waiting.message, count, self._clock.monotonic())

    def _create(self, path: str, name: str, waiting: Waiting) -> int:
        """Create it, or go on with the one from before our start; returns how often it happened in all."""
        try:
            self._client.create(path, self._object(name, waiting))
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            found = self._client.patch(f"{path}/{name}", self._update(waiting, None))
            return int(found.get("count") or 0) + waiting.count
        return waiting.count

    def _update(self, waiting: Waiting, count: int | None) -> Object:
        # When it happened, not when it could be written: Events are compared by their times.
        at = seconds_time(waiting.at)
        changed: Object = {"message": waiting.message, "type": waiting.type, "lastTimestamp": at}
        return changed if count is None else {**changed, "count": count}

    def _object(self, name: str, waiting: Waiting) -> Object:
        about = waiting.about
        involved = {"apiVersion": about.api_version, "kind": about.kind, "name": about.name, "uid": about.uid}
        namespace = {"namespace": about.namespace} if about.namespace else {}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": about.namespace or "default"},
            "involvedObject": {**involved, **namespace},
            "reason": waiting.reason,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
            "firstTimestamp": seconds_time(waiting.at),
            **self._update(waiting, waiting.count),
        }


def event_name(key: Identity) -> str:
    """The same for the same object and reason, after a restart, too."""
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    return f"{key[2][: NAME_LETTERS - 17].rstrip('.-')}.{digest}"


def shortened(message: str) -> str:
    """At most MESSAGE_BYTES of UTF-8, no character cut in two."""
    encoded = message.encode()
    if len(encoded) <= MESSAGE_BYTES:
        return message
    return encoded[: MESSAGE_BYTES - 3].decode(errors="ignore") + "…"
