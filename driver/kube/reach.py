"""Whether the API server answers, by the requests that are made anyway."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from driver.kube.transport import RequestObserver

UNAUTHORIZED, SERVER_ERROR = 401, 500


class ApiReach:
    """To be told of every request by a KubeClient (its ``observe``). Thread-safe.

    A refusal is an answer, too, but for one that concerns all requests: who we are is not believed, or the server is in
    trouble.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked_at: float | None = None
        self._failure: str | None = "nothing was asked yet"

    def observer(self, observe: RequestObserver | None) -> RequestObserver:
        """``observe``, and this."""

        def both(method: str, path: str, query: Mapping[str, str] | None, status: int | None, seconds: float) -> None:
            self._heard(method, path, status)
            if observe is not None:
                observe(method, path, query, status, seconds)

        return both

    def _heard(self, method: str, path: str, status: int | None) -> None:
        self._asked_at = self._clock()
        if status is None:
            self._failure = f"no answer to {method} {path}"
        elif status == UNAUTHORIZED or status >= SERVER_ERROR:
            self._failure = f"{status} to {method} {path}"
        else:
            self._failure = None

    def failure(self) -> str | None:
        """Why the last request had no proper answer; None where it had one."""
        return self._failure

    def asked_within(self, seconds: float) -> bool:
        """Whether a request ended, answered or not, in the last so many seconds."""
        return self._asked_at is not None and self._clock() - self._asked_at <= seconds
