"""The API server as the harness uses it: a few requests, JSON in and out, with the admin's token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import urllib3

from driver.errors import ApiError

TIMEOUT_S = 60.0
MERGE_PATCH = "application/merge-patch+json"


class Api:
    """Requests to the API server at ``server``; may be used by several threads."""

    def __init__(self, server: str, token: str, authority: Path) -> None:
        self._server = server
        self._headers = {"Authorization": f"Bearer {token}"}
        once = urllib3.Retry(total=1, connect=0, redirect=0, status=0)
        self._pool = urllib3.PoolManager(ca_certs=str(authority), maxsize=8, retries=once)

    def get(self, path: str) -> dict[str, Any]:
        """The object or list at ``path``."""
        return self.request("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create ``body`` at ``path``."""
        return self.request("POST", path, body)

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Merge ``body`` into the object at ``path``."""
        return self.request("PATCH", path, body, MERGE_PATCH)

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, content: str = "application/json"
    ) -> dict[str, Any]:
        """Any request; raises ApiError with the server's message, ``status`` None where no answer came."""
        headers = {**self._headers, "Content-Type": content}
        # As kubectl and every Go client write it: the API server refuses to touch the status of an allocated claim
        # whose opaque parameters came in any other way (1.37.1 compares their bytes).
        data = None if body is None else json.dumps(body, sort_keys=True, separators=(",", ":"))
        try:
            answer = self._pool.request(method, f"{self._server}{path}", body=data, headers=headers, timeout=TIMEOUT_S)
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(f"{method} {path}: {error}") from error
        if answer.status >= 300:
            raise ApiError(f"{method} {path}: {_message(answer.data)}", answer.status)
        decoded: dict[str, Any] = json.loads(answer.data)
        return decoded

    def close(self) -> None:
        """Close the connections that are kept open."""
        self._pool.clear()


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")[:500]
