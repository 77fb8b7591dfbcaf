"""Who may see the web page: holders of a token whose account may list what the page shows, and local users."""

from __future__ import annotations

import hashlib
import ipaddress
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from driver.config.flag_values import ListenAddress
from driver.errors import ApiError
from driver.kube.client import KubeClient, Object

TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105 - a path
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

NEEDED = (("resource.k8s.io", "resourceclaims"), ("", "pods"), ("", "nodes"))
"""Group and resource of what a viewer must be allowed to list in all namespaces."""

CACHE_SECONDS = 60.0
"""How long a verdict is used."""

MAX_VERDICTS = 256

MAX_REVIEWS, REVIEW_PERIOD_SECONDS = 20, 10.0
"""Unknown tokens that are reviewed within a period: wrong tokens must not become load of the API server."""

MAX_TOKEN = 8192

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Names in the Host header of local requests. Any other one is a foreign page that had its name resolve to this
address (DNS rebinding)."""


class AccessRefusal(NamedTuple):
    """Why a request is refused, as an HTTP status and a sentence for people."""

    status: HTTPStatus
    message: str


class ReviewedUser(msgspec.Struct, frozen=True):
    """The user of a TokenReview's status, passed on as it came."""

    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class ReviewStatus(msgspec.Struct, frozen=True):
    """The status of a TokenReview or of a SubjectAccessReview."""

    authenticated: bool = False
    allowed: bool = False
    user: ReviewedUser = ReviewedUser()


def is_loopback(address: ListenAddress) -> bool:
    """Whether only processes of the same machine, or of the same pod, reach the address."""
    if address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def check_local(headers: Mapping[str, str]) -> AccessRefusal | None:
    """Refuse what a foreign page may have made a local browser request."""
    name = headers.get("host", "")
    host = name if name.endswith("]") else name.rpartition(":")[0] or name
    if host.lower() not in LOCAL_NAMES:
        return AccessRefusal(HTTPStatus.MISDIRECTED_REQUEST, "open this page by the address 127.0.0.1 or localhost")
    if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
        return AccessRefusal(HTTPStatus.FORBIDDEN, "another site may not load this")
    return None


def bearer_token(headers: Mapping[str, str]) -> str:
    """The token of the Authorization header; empty without a usable one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip()
    usable = scheme.lower() == "bearer" and len(token) <= MAX_TOKEN and token.isascii() and token.isprintable()
    return token if usable else ""


class TokenAccess:
    """Asks the API server whose a token is, and whether that account may list what the page shows. Thread-safe."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, tuple[float, AccessRefusal | None]] = OrderedDict()
        self._reviewed: deque[float] = deque()

    def check(self, token: str) -> AccessRefusal | None:
        """Why the holder of ``token`` is refused; None if not. Waits for the API server if the token is new."""
        if not token:
            return AccessRefusal(HTTPStatus.UNAUTHORIZED, "this page needs a bearer token of the cluster")
        key = hashlib.sha256(token.encode()).digest()
        with self._lock:
            at, verdict = self._verdicts.get(key, (-CACHE_SECONDS, None))
            now = self._clock()
            if now - at < CACHE_SECONDS:
                return verdict
            if not self._may_review(now):
                return AccessRefusal(
                    HTTPStatus.SERVICE_UNAVAILABLE, "too many tokens are being checked; try again soon"
                )
        try:
            verdict = self._review(token)
        except (ApiError, msgspec.MsgspecError):
            return AccessRefusal(
                HTTPStatus.SERVICE_UNAVAILABLE, "the API server could not check the token; try again soon"
            )
        with self._lock:
            self._verdicts[key] = (now, verdict)
            self._verdicts.move_to_end(key)
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def _may_review(self, now: float) -> bool:
        while self._reviewed and now - self._reviewed[0] >= REVIEW_PERIOD_SECONDS:
            self._reviewed.popleft()
        if len(self._reviewed) >= MAX_REVIEWS:
            return False
        self._reviewed.append(now)
        return True

    def _review(self, token: str) -> AccessRefusal | None:
        review = self._status("TokenReview", TOKEN_REVIEWS, {"token": token})
        if not review.authenticated or not review.user.username:
            return AccessRefusal(HTTPStatus.UNAUTHORIZED, "the cluster does not accept this token")
        user = review.user
        about = {"user": user.username, "uid": user.uid, "groups": user.groups, "extra": user.extra}
        for group, resource in NEEDED:
            attributes = {"verb": "list", "group": group, "resource": resource}
            verdict = self._status("SubjectAccessReview", ACCESS_REVIEWS, {**about, "resourceAttributes": attributes})
            if not verdict.allowed:
                what = f"{resource}.{group}" if group else resource
                return AccessRefusal(HTTPStatus.FORBIDDEN, f"{user.username} may not list {what} in all namespaces")
        return None

    def _status(self, kind: str, path: str, spec: Object) -> ReviewStatus:
        group = path.removeprefix("/apis/").rpartition("/")[0]
        answer = self._client.create(path, {"apiVersion": group, "kind": kind, "spec": spec})
        return msgspec.convert(answer.get("status") or {}, ReviewStatus)
