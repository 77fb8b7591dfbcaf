"""Events: what ``kubectl describe`` shows of a claim, a pod or a node.

core/v1, with count and timestamps: kubectl reads that API however the Event was written, and unlike events.k8s.io/v1,
where a note is immutable, it lets the message follow the present state.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from driver.clock import Clock, seconds_time
from driver.errors import CONFLICT, ApiError
from driver.kube.client import KubeClient, Object
from driver.kube.types import Reference
from driver.kube.work_loop import Backoff

log = logging.getLogger(__name__)

MESSAGE_BYTES = 1024
"""The API's limit for a note; longer ones end in an ellipsis."""

REASON_LETTERS = 128
NAME_LETTERS = 253
"""Limits of the API."""

REPEAT_INTERVAL_SECONDS = 60.0
"""Time until an Event with an unchanged message is written again, with the number of repetitions meanwhile."""

WRITES_PER_SECOND, BURST, RESERVED = 10.0, 300, 150
"""Limit of all Events together, since etcd keeps each for an hour. Repetitions leave ``RESERVED`` writes, so that new
messages on 60 claims and their pods are written at once, however many Events repeat."""

MAX_WAITING = 1000
"""Events with a new message that wait to be written; beyond that the oldest are dropped."""

MAX_KNOWN = 4096
"""Events of which count and message are remembered."""

IDLE_INTERVAL_SECONDS = 3600.0

Type = Literal["Normal", "Warning"]
Identity = tuple[str, str, str, str, str]


@dataclass
class Waiting:
    """An Event to be written: the last message and time, and how often it happened since it was written last."""

    about: Reference
    reason: str
    message: str
    type: Type
    at: datetime
    count: int = 0


@dataclass
class Written:
    """An Event as written: ``count`` in all; ``at``: when the write began, by the monotonic clock."""

    reason: str
    message: str
    count: int
    at: float


class Recorder:
    """Writes Events in the background: one for each object and reason or series, with its present message and count.

    ``component`` is shown as the origin. Raises nothing into callers; failures are logged.
    """

    def __init__(self, client: KubeClient, component: str, instance: str, clock: Clock | None = None) -> None:
        self._client = client
        self._component, self._instance = component, instance
        self._clock = clock or client.clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._waiting: OrderedDict[Identity, Waiting] = OrderedDict()
        self._repeated: OrderedDict[Identity, Waiting] = OrderedDict()
        """Those whose message is the one that was written last."""
        self._in_flight: dict[Identity, Waiting] = {}
        self._written: OrderedDict[Identity, Written] = OrderedDict()
        self._tokens, self._filled_at = float(BURST), self._clock.monotonic()

    def event(
        self,
        about: Reference,
        reason: str,
        message: str,
        type: Type = "Normal",  # noqa: A002 - the field's name
        series: str = "",
        *,
        lasting: bool = False,
    ) -> None:
        """Record that this happened once (more); returns at once, from any thread.

        ``reason`` is UpperCamelCase; ``message`` a sentence of at most MESSAGE_BYTES. An object has one Event of a
        ``series``, which has the present reason: an outdated one never stays beside it. ``lasting``: it is a state,
        which is counted when it begins, not each time that it is recorded.
        """
        key = (about.kind, about.namespace, about.name, about.uid, series or reason)
        with self._lock:
            happened = Waiting(about, reason[:REASON_LETTERS], shortened(message), type, self._clock.now(), 1)
            before = self._waiting.get(key) or self._repeated.get(key)
            last = before or self._in_flight.get(key) or self._written.get(key)
            if lasting and last is not None and last.reason == happened.reason:
                happened.count = 0
            happened.count += before.count if before is not None else 0
            self._put(key, happened)
            if len(self._waiting) > MAX_WAITING:
                (_, dropped) = self._waiting.popitem(last=False)
                log.warning("too many Events, one is dropped", extra={"object": dropped.about.name, "reason": reason})
        if before is None or key in self._waiting:
            self._wake.set()

    def _put(self, key: Identity, waiting: Waiting) -> None:
        """Add ``waiting`` to the Events with a new message or to the repeated ones; it keeps its turn among them."""
        written = self._written.get(key)
        is_new = written is None or (written.reason, written.message) != (waiting.reason, waiting.message)
        target, other = (self._waiting, self._repeated) if is_new else (self._repeated, self._waiting)
        target[key] = waiting
        other.pop(key, None)

    def run(self, stop: threading.Event) -> None:
        """Write until ``stop`` is set (then call ``wake`` once more)."""
        backoff = Backoff()
        while not stop.is_set():
            pause = self._next_due_seconds()
            if pause > 0:
                self._clock.wait(self._wake, pause)
                self._wake.clear()
            elif self._write_next():
                backoff.reset()
            else:
                self._clock.wait(stop, backoff.next_s())

    def wake(self) -> None:
        """Let ``run`` check its stop."""
        self._wake.set()

    def _next_due_seconds(self) -> float:
        """Seconds until an Event may be written; 0: at once."""
        with self._lock:
            now = self._clock.monotonic()
            self._tokens = min(float(BURST), self._tokens + (now - self._filled_at) * WRITES_PER_SECOND)
            self._filled_at = now
            if self._waiting:
                return max(0.0, (1.0 - self._tokens) / WRITES_PER_SECOND)
            due = min(map(self._due_seconds, self._repeated), default=IDLE_INTERVAL_SECONDS)
            return max(due, (RESERVED + 1.0 - self._tokens) / WRITES_PER_SECOND)

    def _due_seconds(self, key: Identity) -> float:
        """Seconds until a repeated Event may be written again; 0 if what was written is no longer remembered."""
        written = self._written.get(key)
        return 0.0 if written is None else max(0.0, written.at + REPEAT_INTERVAL_SECONDS - self._clock.monotonic())

    def _write_next(self) -> bool:
        """Write the first Event that is due; False: the API server can't take it now, and it waits again."""
        with self._lock:
            repeated = (key for key in self._repeated if self._due_seconds(key) <= 0)
            key = next(iter(self._waiting), None) or next(repeated, None)
            if key is None:
                return True  # its message was replaced meanwhile by the one that was written last
            waiting = self._waiting.pop(key, None) or self._repeated.pop(key)
            self._in_flight = {key: waiting}
            self._tokens -= 1.0
        try:
            written = self._write(key, waiting)
        except ApiError as error:
            return self._refused(key, waiting, error)
        except Exception:
            log.exception("defect while writing an Event")
            return True
        with self._lock:
            self._written[key] = written
            self._written.move_to_end(key)
            if len(self._written) > MAX_KNOWN:
                self._written.popitem(last=False)
            if (since := self._waiting.get(key) or self._repeated.get(key)) is not None:
                self._put(key, since)  # it was compared with what had been written before
        return True

    def _refused(self, key: Identity, waiting: Waiting, error: ApiError) -> bool:
        extra = {"object": waiting.about.name, "reason": waiting.reason, "error": str(error)}
        text = "an Event can't be written, trying again" if error.is_transient else "an Event can't be written"
        log.warning(text, extra=extra)
        if error.is_transient:
            with self._lock:
                if (written := self._written.get(key)) is not None:
                    written.message = ""  # it is unknown which of both is stored
                newer = self._waiting.get(key) or self._repeated.get(key)
                if newer is None:
                    self._put(key, waiting)
                else:
                    newer.count += waiting.count
                    self._put(key, newer)
        return not error.is_transient

    def _write(self, key: Identity, waiting: Waiting) -> Written:
        """Update the Event if it exists, else create it. Raises ApiError."""
        path = f"/api/v1/namespaces/{waiting.about.namespace or 'default'}/events"
        name, began = event_name(key), self._clock.monotonic()
        written = self._written.get(key)
        count = waiting.count + (written.count if written else 0)
        # The time when it happened, not when it could be written: Events are compared by their times.
        changed = {"reason": waiting.reason, "message": waiting.message, "type": waiting.type}
        changed["lastTimestamp"] = seconds_time(waiting.at)
        if written is None or self._client.patch_existing(f"{path}/{name}", {**changed, "count": count}) is None:
            count = max(1, waiting.count)  # the Event is new, or it expired
            try:
                self._client.create(path, {**self._object(name, waiting), **changed, "count": count})
            except ApiError as error:
                if error.status != CONFLICT:
                    raise
                # It was written before this process started.
                count += int(self._client.patch(f"{path}/{name}", changed).get("count") or 0)
        return Written(waiting.reason, waiting.message, count, began)

    def _object(self, name: str, waiting: Waiting) -> Object:
        about = waiting.about
        involved = {"apiVersion": about.api_version, "kind": about.kind, "name": about.name, "uid": about.uid}
        namespace = {"namespace": about.namespace} if about.namespace else {}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": about.namespace or "default"},
            "involvedObject": {**involved, **namespace},
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
            "firstTimestamp": seconds_time(waiting.at),
        }


def event_name(key: Identity) -> str:
    """The same name for the same object and reason or series, also after a restart."""
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    return f"{key[2][: NAME_LETTERS - 17].rstrip('.-')}.{digest}"


def shortened(message: str) -> str:
    """At most MESSAGE_BYTES of UTF-8, without a partial character."""
    encoded = message.encode()
    if len(encoded) <= MESSAGE_BYTES:
        return message
    return encoded[: MESSAGE_BYTES - 3].decode(errors="ignore") + "…"
