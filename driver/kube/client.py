"""JSON requests to the API server. ``driver.http_client`` has the connections, and repeats what a closed one lost.

The official client is used for its configuration only (``credentials``): its typed models take 27 times as long and 6
times the memory of decoding with msgspec, and drop unknown fields silently.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

import msgspec

from driver.clock import Clock
from driver.errors import CONFLICT, NOT_FOUND, SERVER_ERROR, ApiError, accepted_status
from driver.http_client import CHUNK_BYTES
from driver.kube.credentials import Access, CredentialsError
from driver.kube.credentials import load_configuration as load_configuration
from driver.kube.tolerant_json import decode

REQUEST_TIMEOUT_SECONDS = 10.0
"""Timeout of a complete request; four of them fit into the kubelet's deadline of 45 s."""

MERGE_PATCH = "application/merge-patch+json"

ERROR_TEXT_LIMIT = 500
"""Maximum length of the server's message in an error, in characters."""

JSON = "application/json"
APPLY_PATCH = "application/apply-patch+yaml"
"""Server-side apply. JSON is valid YAML, and the YAML type is the only one that every supported API server accepts."""

Object = dict[str, Any]

RequestObserver = Callable[[str, str, Mapping[str, str] | None, int | None, float], None]
"""Called after each request: method, path, query, HTTP status (None if no complete response arrived), seconds."""


UNAUTHORIZED = 401


class _Outcome:
    """The HTTP status of a request in progress, once it is known."""

    status: int | None = None


class ServerClock(Clock):
    """The API server's clock, by the header Date (RFC 9110, whole seconds) of its last response.

    Ages are computed with it: the times in objects are the API server's, and the clock of this machine may differ.
    Before the first response it is that of this machine.
    """

    def __init__(self) -> None:
        self.last_date: tuple[str, float] = "", 0.0
        """The header, and the monotonic time at which it arrived."""

    def now(self) -> datetime:
        date, arrived_at = self.last_date
        with suppress(ValueError):
            return _read_date(date) + timedelta(seconds=self.monotonic() - arrived_at)
        return super().now()


@lru_cache(maxsize=1)
def _read_date(header: str) -> datetime:
    """Raises ValueError. The same header is read again and again: decisions ask for the ages of all pending pods."""
    return parsedate_to_datetime(header)


class KubeClient:
    """A client of one API server. Thread-safe. Paths are absolute (``/apis/resource.k8s.io/v1/...``).

    ``clock`` is the API server's. Every method raises ApiError; its ``status`` is None if no response arrived.
    """

    def __init__(self, access: Access, user_agent: str, observe: RequestObserver | None = None) -> None:
        """``observe`` is called in the thread of the request, for a watch as soon as it has begun."""
        self._access = access
        self._headers = {"Accept": JSON, "User-Agent": user_agent}
        self._observe = observe
        self.clock = ServerClock()

    def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        return self._request("GET", path, query=query)

    def get_object(self, path: str) -> Object:
        return self._object("GET", path)

    def find(self, path: str) -> Object | None:
        """Get an object; None if it does not exist."""
        with accepted_status(NOT_FOUND):
            return self.get_object(path)
        return None

    def create(self, path: str, body: Object, query: Mapping[str, str] | None = None) -> Object:
        return self._object("POST", path, body, query)

    def replace(self, path: str, body: Object, query: Mapping[str, str] | None = None) -> Object:
        return self._object("PUT", path, body, query)

    def patch(self, path: str, body: Object, query: Mapping[str, str] | None = None) -> Object:
        """Merge ``body`` into the object; None deletes a key. Without a resourceVersion there is no precondition."""
        return self._object("PATCH", path, body, query, MERGE_PATCH)

    def patch_existing(self, path: str, body: Object) -> Object | None:
        """Like ``patch``; None if the object does not exist, or does not have the ``metadata.uid`` in ``body``."""
        try:
            return self.patch(path, body)
        except ApiError as error:
            replaced = error.status == CONFLICT and "uid" in body.get("metadata", {})
            if error.status != NOT_FOUND and not replaced:
                raise
        return None

    def create_or_patch(self, path: str, body: Object, new: Object | None = None) -> Object:
        """Merge ``body`` into the object at ``path``; if it does not exist, create ``new`` (by default ``body``)."""
        patched = self.patch_existing(path, body)
        return self.create(path.rpartition("/")[0], new or body) if patched is None else patched

    def apply(self, path: str, body: Object, manager: str, *, force: bool = True) -> None:
        """Server-side apply: fields that ``manager`` applied before and that are not in ``body`` are removed.

        ``force``: take over fields of other managers; otherwise other values of theirs are refused with status 409.
        With ``metadata.uid`` in ``body``, another object of the same name is refused with status 409, too, and no
        object with 404 or 409 (nothing is created).
        """
        query = {"fieldManager": manager, "force": str(force).lower()}
        self._object("PATCH", path, body, query, content=APPLY_PATCH)

    def delete(
        self, path: str, uid: str | None = None, grace_s: int | None = None, *, missing_ok: bool = False
    ) -> None:
        """Delete the object, with ``uid`` only if it has that uid (else status 409).

        ``grace_s`` replaces the object's own grace period. ``missing_ok``: the object may be gone already.
        """
        body: Object = {"preconditions": {"uid": uid}} if uid else {}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        with accepted_status(*([NOT_FOUND] if missing_ok else [])):
            self._request("DELETE", path, body or None)

    @contextmanager
    def stream(self, path: str, query: Mapping[str, str], read_timeout_s: float) -> Iterator[Iterator[bytes]]:
        """Begin a watch and yield its lines until the server ends it; the block's end closes the connection.

        Raises ApiError if the server refuses it, or the connection is cut or silent too long.
        """
        with self._observed("GET", path, query) as outcome:
            response = self._open("GET", path, query, read_timeout_s=read_timeout_s)
            outcome.status = response.status
        try:
            yield self._lines(path, response)
        finally:
            response.close()

    def _object(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        content: str = JSON,
    ) -> Object:
        answer = self._request(method, path, body, query, content)
        try:
            return decode(answer, OBJECT)
        except msgspec.MsgspecError as error:
            raise ApiError(f"{method} {path}: the answer is no JSON object: {error}") from error

    def _request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        content: str = JSON,
    ) -> bytes:
        with self._observed(method, path, query) as outcome:
            response = self._open(method, path, query, body, content)
            try:
                answer = bytes(response.read())
            except self._access.connections.errors as error:
                raise ApiError(f"{method} {path}: the answer was cut off: {error}") from error
            outcome.status = response.status
        return answer

    @contextmanager
    def _observed(self, method: str, path: str, query: Mapping[str, str] | None) -> Iterator[_Outcome]:
        outcome = _Outcome()
        started = time.perf_counter()
        try:
            yield outcome
        except ApiError as error:
            outcome.status = error.status
            raise
        finally:
            if self._observe is not None:
                self._observe(method, path, query, outcome.status, time.perf_counter() - started)

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | None = None,
        content: str = JSON,
        read_timeout_s: float | None = None,
    ) -> Any:
        access = self._access
        target = access.target(path) + (f"?{urlencode(query, errors='surrogatepass')}" if query else "")
        headers = dict(self._headers)
        try:
            encoded = None if body is None else msgspec.json.encode(body)
        except ValueError as error:
            raise ApiError(f"{method} {path}: the object can't be sent: {error}") from error
        try:
            if (authorization := access.authorization()) is not None:
                headers["Authorization"] = authorization
            if body is not None:
                headers["Content-Type"] = content
            response = access.connections.open(
                method, target, headers, encoded, REQUEST_TIMEOUT_SECONDS, read_timeout_s
            )
        except access.connections.errors as error:
            raise ApiError(f"{method} {path}: no answer from {access.host}: {innermost_cause(error)}") from error
        except CredentialsError as error:
            raise ApiError(f"{method} {path}: {error}") from error
        except ValueError:
            # The text and traceback of the original error contain the token.
            raise ApiError(
                f"{method} {path}: the token can't be sent as an HTTP header: a line break or another "
                "unprintable character is in it; check the kubeconfig's token or tokenFile"
            ) from None
        self.clock.last_date = response.headers.get("Date", ""), time.monotonic()
        if response.status >= http.client.MULTIPLE_CHOICES:  # a redirect, too: the token is not sent elsewhere
            raise self._refusal(method, path, response)
        return response

    def _refusal(self, method: str, path: str, response: Any) -> ApiError:
        """The error for an HTTP error status, with the message of the Status object if the server sent one."""
        try:
            body = bytes(response.read())
        except self._access.connections.errors:
            body = b""
        try:
            message = str(decode(body, OBJECT)["message"])
        except (msgspec.MsgspecError, KeyError):
            message = body.decode("utf-8", "replace") or str(response.reason)
        return ApiError(f"{method} {path}: {response.status}: {message[:ERROR_TEXT_LIMIT]}", response.status)

    def _lines(self, path: str, response: Any) -> Iterator[bytes]:
        pending = b""
        try:
            for chunk in response.stream(CHUNK_BYTES):
                *lines, pending = (pending + chunk).split(b"\n")
                yield from (line for line in lines if line)
        except self._access.connections.errors as error:
            raise ApiError(f"watch of {path} was cut off: {error}") from error


class ApiReach:
    """Whether the API server answers, from the requests of a KubeClient (its ``observe``). Thread-safe.

    A refused request counts as answered, unless the status concerns all requests: 401 and server errors.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requested_at: float | None = None
        self._failure: str | None = "no request was made yet"

    def observer(self, observe: RequestObserver | None) -> RequestObserver:
        """An observer that updates this object and calls ``observe``."""

        def both(method: str, path: str, query: Mapping[str, str] | None, status: int | None, seconds: float) -> None:
            self._update(method, path, status)
            if observe is not None:
                observe(method, path, query, status, seconds)

        return both

    def _update(self, method: str, path: str, status: int | None) -> None:
        self._requested_at = self._clock()
        if status is None:
            self._failure = f"no answer to {method} {path}"
        elif status == UNAUTHORIZED or status >= SERVER_ERROR:
            self._failure = f"{status} to {method} {path}"
        else:
            self._failure = None

    def failure(self) -> str | None:
        """Why the last request failed; None if it was answered."""
        return self._failure

    def requested_within(self, seconds: float) -> bool:
        """Whether a request ended, answered or not, within the last ``seconds``."""
        return self._requested_at is not None and self._clock() - self._requested_at <= seconds


def innermost_cause(error: BaseException) -> str:
    """The message of the innermost error; the outer ones repeat the address."""
    while True:
        inner = getattr(error, "reason", None) or error.__cause__ or (error.args[-1] if error.args else None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    return str((error.strerror if isinstance(error, OSError) else None) or error or type(error).__name__)


OBJECT = msgspec.json.Decoder(Object)
