"""GET requests to servers other than the API server: pages of node plugins, and Prometheus."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlencode

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError
from urllib3.util import Url, make_headers, parse_url

from driver.errors import ApiError, UsageError
from driver.kube.client import innermost_cause
from tessera.tables_and_drawings import printable

CONNECT_TIMEOUT_SECONDS, HTTP_TIMEOUT_SECONDS = 10.0, 150.0
"""Prometheus itself ends a query after 120 s."""

ANSWER_LIMIT = 128 * 1024 * 1024
CHUNK = 256 * 1024
QUOTED_ERROR_LIMIT = 300


class HttpReader:
    """Reads from one server. Certificates are checked against the system's authorities, or those of $SSL_CERT_FILE."""

    def __init__(self, flag: str, address: str, token_file: Path | None = None) -> None:
        """``flag`` names the address in messages. Raises UsageError: no http(s) URL, or no readable token."""
        try:
            url = parse_url(address)
        except LocationParseError:
            url = Url()
        if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
            raise UsageError(f"{flag}: is no address such as http://prometheus.monitoring:9090")
        self.name = Url(url.scheme, None, url.host, url.port, url.path).url
        """The address, without a password."""
        self._base = self.name.rstrip("/")
        self._headers = {"User-Agent": "tessera-usage"}
        if url.auth is not None:
            if token_file is not None:
                raise UsageError(f"{flag}: has a user and password; with a token file leave them out")
            self._headers.update(make_headers(basic_auth=unquote(url.auth)))
        if token_file is not None:
            self._headers["Authorization"] = f"Bearer {_token(token_file)}"
        self._pool = urllib3.PoolManager(retries=urllib3.Retry(total=0, redirect=0))

    def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        """The body of a 200, or of an error that says in JSON what is wrong. Raises ApiError."""
        url = f"{self._base}{path}" + (f"?{urlencode(query)}" if query else "")
        deadline = time.monotonic() + HTTP_TIMEOUT_SECONDS
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_SECONDS, read=HTTP_TIMEOUT_SECONDS)
        try:
            response = self._pool.urlopen(
                "GET", url, headers=self._headers, timeout=timeout, redirect=False, preload_content=False
            )
            try:
                body = self._body(response, deadline)
            finally:
                response.close()
        except (HTTPError, http.client.HTTPException, OSError) as error:
            raise ApiError(f"no answer: {printable(innermost_cause(error)[:QUOTED_ERROR_LIMIT])}") from error
        kind = response.headers.get("Content-Type", "")
        if response.status != http.client.OK and not kind.startswith("application/json"):
            text = printable(" ".join(body.decode("utf-8", "replace").split()))[:QUOTED_ERROR_LIMIT]
            raise ApiError(f"status {response.status}: {text or response.reason}", response.status)
        return body

    def _body(self, response: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
        parts, size = [], 0
        for part in response.stream(CHUNK, decode_content=True):
            parts.append(part)
            size += len(part)
            if size > ANSWER_LIMIT:
                raise ApiError(f"the answer is larger than {ANSWER_LIMIT // 1024**2} MiB")
            if time.monotonic() > deadline:
                raise ApiError(f"the answer takes longer than {HTTP_TIMEOUT_SECONDS:.0f} s")
        return b"".join(parts)


def _token(file: Path) -> str:
    try:
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prometheus-token-file {file}: can't be read: {error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise UsageError(f"--prometheus-token-file {file}: must have one line with a token")
    return token
