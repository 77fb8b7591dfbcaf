"""JSON requests to the API server.

The official client has a part in it only where its configuration is needed (``access``): its typed models cost 27
times the time and 6 times the memory of decoding with msgspec, and drop unknown fields in silence.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import msgspec
import urllib3

from driver.errors import ApiError
from driver.kube.access import Access, CredentialsError
from driver.kube.access import load_configuration as load_configuration

REQUEST_TIMEOUT_S = 10.0
"""A whole request; four of them fit the kubelet's 45 s deadline."""

MERGE_PATCH = "application/merge-patch+json"

ERROR_TEXT_LIMIT = 500
"""Characters of the server's message that go into an error."""

JSON = "application/json"
APPLY_PATCH = "application/apply-patch+yaml"
"""Server-side apply; JSON is YAML, and the only form that every supported API server takes."""

CUT_OFF = (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)

Object = dict[str, Any]

RequestObserver = Callable[[str, str, Mapping[str, str] | None, int | None, float], None]
"""Told of each request when it is over: method, path, query, HTTP status (None where no whole answer came), seconds."""


class _Seen:
    """The status of a request under way, once it is known."""

    status: int | None = None


class KubeClient:
    """One API server. Thread-safe. Paths are absolute (``/apis/resource.k8s.io/v1/...``).

    Every method raises ApiError, whose ``status`` is None where no answer came.
    """

    def __init__(self, access: Access, user_agent: str, observe: RequestObserver | None = None) -> None:
        """``observe`` is called by the thread that asked; a watch is over for it as soon as it has begun."""
        self._access = access
        self._headers = {"Accept": JSON, "User-Agent": user_agent}
        self._observe = observe

    def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        return self._request("GET", path, query=query)

    def get_object(self, path: str) -> Object:
        return _object("GET", path, self.get(path))

    def create(self, path: str, body: Object) -> Object:
        return _object("POST", path, self._request("POST", path, body=body))

    def replace(self, path: str, body: Object, query: Mapping[str, str] | None = None) -> Object:
        return _object("PUT", path, self._request("PUT", path, query=query, body=body))

    def patch(self, path: str, body: Object) -> Object:
        """Merge ``body`` into the object; None deletes a key. No precondition unless it names a resourceVersion."""
        return _object("PATCH", path, self._request("PATCH", path, body=body, content=MERGE_PATCH))

    def apply(self, path: str, body: Object, manager: str) -> Object:
        """Server-side apply: what ``manager`` applied before and ``body`` no longer has goes; others' fields stay.

        A field that somebody else manages too becomes ours. ``metadata.uid`` in ``body`` makes it about that very
        object: status 409 for another of its name, 404 where there is none (a subresource is never created).
        """
        query = {"fieldManager": manager, "force": "true"}
        return _object("PATCH", path, self._request("PATCH", path, query=query, body=body, content=APPLY_PATCH))

    def delete(self, path: str, uid: str | None = None, grace_s: int | None = None) -> None:
        """Delete the object; with ``uid`` only that very one (else status 409). ``grace_s``: not its own grace."""
        body: Object = {"preconditions": {"uid": uid}} if uid else {}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        self._request("DELETE", path, body=body or None)

    def stream(self, path: str, query: Mapping[str, str], read_timeout_s: float) -> Iterator[bytes]:
        """Lines of a watch until the server ends it. A cut connection raises ApiError."""
        timeout = urllib3.Timeout(connect=REQUEST_TIMEOUT_S, read=read_timeout_s)
        with self._observed("GET", path, query) as seen:
            response = self._open("GET", path, query, None, timeout)
            seen.status = response.status
        pending = b""
        try:
            for chunk in response.stream(64 * 1024):
                *lines, pending = (pending + chunk).split(b"\n")
                yield from (line for line in lines if line)
        except CUT_OFF as error:
            raise ApiError(f"watch of {path} was cut off: {error}") from error
        finally:
            response.close()

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = JSON,
    ) -> bytes:
        with self._observed(method, path, query) as seen:
            response = self._open(method, path, query, body, urllib3.Timeout(total=REQUEST_TIMEOUT_S), content)
            try:
                answer = bytes(response.read())
            except CUT_OFF as error:
                raise ApiError(f"{method} {path}: the answer was cut off: {error}") from error
            finally:
                response.release_conn()
            seen.status = response.status
        return answer

    @contextmanager
    def _observed(self, method: str, path: str, query: Mapping[str, str] | None) -> Iterator[_Seen]:
        seen = _Seen()
        started = time.perf_counter()
        try:
            yield seen
        except ApiError as error:
            seen.status = error.status
            raise
        finally:
            if self._observe is not None:
                self._observe(method, path, query, seen.status, time.perf_counter() - started)

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | None,
        timeout: urllib3.Timeout,
        content: str = JSON,
    ) -> Any:
        url = self._access.url(path) + (f"?{urlencode(query)}" if query else "")
        headers = dict(self._headers)
        try:
            if (shown := self._access.authorization()) is not None:
                headers["Authorization"] = shown
            if body is not None:
                headers["Content-Type"] = content
            response = self._access.pool.urlopen(
                method,
                url,
                headers=headers,
                body=None if body is None else msgspec.json.encode(body),
                timeout=timeout,
                preload_content=False,
            )
        except CUT_OFF as error:
            raise ApiError(f"{method} {path}: no answer from {self._access.host}: {_cause(error)}") from error
        except CredentialsError as error:
            raise ApiError(f"{method} {path}: {error}") from error
        except ValueError:
            # The error's own text, and its traceback, would show the token.
            raise ApiError(
                f"{method} {path}: the token can't be sent as an HTTP header: a line break or another "
                "unprintable character is in it; check the kubeconfig's token or tokenFile"
            ) from None
        if response.status >= http.client.BAD_REQUEST:
            raise _refusal(method, path, response)
        return response


def _cause(error: BaseException) -> str:
    """What was at the bottom of it, without the layers that each repeat where they were going."""
    while True:
        inner = getattr(error, "reason", None) or error.__cause__ or (error.args[-1] if error.args else None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    return str((error.strerror if isinstance(error, OSError) else None) or error or type(error).__name__)


def _refusal(method: str, path: str, response: Any) -> ApiError:
    """The server's refusal, with the message of its Status object where it sent one."""
    try:
        body = bytes(response.read())
    except CUT_OFF:
        body = b""
    finally:
        response.release_conn()
    try:
        message = str(_decode(body)["message"])
    except (msgspec.MsgspecError, KeyError):
        message = body.decode("utf-8", "replace") or str(response.reason)
    return ApiError(f"{method} {path}: {response.status}: {message[:ERROR_TEXT_LIMIT]}", response.status)


def _object(method: str, path: str, body: bytes) -> Object:
    try:
        return _decode(body)
    except msgspec.MsgspecError as error:
        raise ApiError(f"{method} {path}: the answer is no JSON object: {error}") from error


def _decode(body: bytes) -> Object:
    return msgspec.json.decode(body, type=dict[str, Any])
