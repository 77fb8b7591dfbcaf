"""Address of the API server and credentials for it.

In a pod without a proxy the ServiceAccount is read here. Everything else is left to the official client
(``driver.kube.kubeconfig``).
"""

from __future__ import annotations

import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from driver.errors import EnvironmentFault
from driver.http_client import CONNECTION_ERRORS, MAX_CONNECTIONS, Connections
from driver.kube.kubeconfig import (
    DEFAULT_NAMESPACE,
    PEM_ENCODING,
    Kubeconfig,
    KubeconfigError,
    read_kubeconfig,
    read_kubeconfig_in_own_process,
)

if TYPE_CHECKING:
    import urllib3

TOKEN_INTERVAL_SECONDS = 60.0
"""How long a token that was read from a file is used; the kubelet renews it long before it expires."""

RENEWAL_SECONDS = 300.0
"""Time before its expiry at which a token is renewed, as by the official client; at most half of its lifetime."""

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory with the certificate authority and the ServiceAccount token of a pod."""

PATH_CHARACTERS = "/:@!$&'()*+,;=~%"
"""Characters of a path that are sent as they are (RFC 3986, 3.3), and ``%`` of what is encoded already."""

PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})

POD = "KUBERNETES_SERVICE_HOST"
"""Set in every pod."""

Authorization = Callable[[], str | None]
"""Returns the value of the Authorization header for the next request. Raises CredentialsError."""


class CredentialsError(Exception):
    """Credentials are currently unavailable."""


@dataclass(frozen=True, slots=True)
class Access:
    """An API server: ``host`` is its URL without a trailing slash, ``connections`` lead to it.

    ``namespace``: the namespace of the kubeconfig's current context.
    """

    host: str
    connections: Connections | ProxiedConnections
    authorization: Authorization
    namespace: str = DEFAULT_NAMESPACE

    def target(self, path: str) -> str:
        """The target of a request: ``path`` below the path of ``host``, which a server of many clusters has.

        Other characters are percent-encoded, also those that no text has: the server refuses them.
        """
        return quote(f"{urlsplit(self.host).path}{path}", PATH_CHARACTERS, errors="surrogatepass")


def load_configuration(
    kubeconfig: Path | None,
    environment: Mapping[str, str] = os.environ,
    *,
    named: str = "--kubeconfig",
    in_own_process: bool = False,
) -> Access:
    """Read ``kubeconfig``, which the flag ``named`` names, or the pod's ServiceAccount. Raises EnvironmentFault.

    ``in_own_process``: for processes that stay; it takes a tenth of a second more, and 24 MiB less afterwards.
    """
    if kubeconfig is None and POD not in environment:
        raise EnvironmentFault(f"no kubeconfig: {named} names none, and this is no pod")
    has_proxy = any(environment.get(name) for name in environment if name.lower() in PROXIES)
    source = "in-cluster configuration" if kubeconfig is None else f"{named} {kubeconfig}"
    try:
        if kubeconfig is None and not has_proxy:
            return _from_pod(environment)
        return _from_kubeconfig(kubeconfig, read_kubeconfig_in_own_process if in_own_process else read_kubeconfig)
    except (KubeconfigError, OSError, ValueError, LookupError) as error:
        raise EnvironmentFault(f"{source} can't be used: {_line(error)}") from error


class ProxiedConnections:
    """Like Connections, through a proxy, by urllib3: HTTP, HTTPS and SOCKS proxies, with their credentials."""

    def __init__(self, proxy: str, url: str, context: ssl.SSLContext, server_name: str | None = None) -> None:
        import urllib3  # megabytes that only a proxy needs

        self.errors: tuple[type[Exception], ...] = (urllib3.exceptions.HTTPError, *CONNECTION_ERRORS)
        self._server = urllib3.util.parse_url(url)._replace(path=None).url
        options: dict[str, Any] = {
            "ssl_context": context,
            "server_hostname": server_name,
            "retries": urllib3.Retry(total=1, connect=0, redirect=0, status=0),
            "maxsize": MAX_CONNECTIONS,
        }
        if proxy.lower().startswith("socks"):
            from urllib3.contrib.socks import SOCKSProxyManager

            self._manager: urllib3.PoolManager = SOCKSProxyManager(proxy, **options)
        else:
            self._manager = urllib3.ProxyManager(proxy, **options)

    def open(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
        read_timeout_s: float | None = None,
    ) -> urllib3.BaseHTTPResponse:
        from urllib3 import Timeout

        timeout = Timeout(connect=timeout_s, read=read_timeout_s, total=None if read_timeout_s else timeout_s)
        return self._manager.urlopen(
            method, f"{self._server}{path}", headers=headers, body=body, timeout=timeout, preload_content=False
        )


class FileToken:
    """A token in a file that is renewed by others."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError, and ValueError if the file is empty."""
        self._path = path
        self._clock = clock
        self._value = self._read()
        self._until = clock() + TOKEN_INTERVAL_SECONDS

    def __call__(self) -> str:
        if self._clock() >= self._until:
            try:
                self._value = self._read()
            except (OSError, ValueError) as error:
                raise CredentialsError(f"the token in {self._path} can't be read: {error}") from error
            self._until = self._clock() + TOKEN_INTERVAL_SECONDS
        return self._value

    def _read(self) -> str:
        token = self._path.read_text(encoding="utf-8").strip()
        if not token:
            raise ValueError(f"{self._path}: the file is empty")
        return f"Bearer {token}"


class KubeconfigToken:
    """The Authorization header of a kubeconfig: renewed before it expires, by reading the kubeconfig again."""

    def __init__(
        self, config: Kubeconfig, read: Callable[[], Kubeconfig], clock: Callable[[], float] = time.time
    ) -> None:
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._take_over(config)

    def __call__(self) -> str | None:
        with self._lock:
            if self._clock() >= self._renew_at:
                self._renew()
            return self._value

    def _renew(self) -> None:
        try:
            config = self._read()
        except KubeconfigError as error:
            raise CredentialsError(f"the credentials can't be renewed: {error}") from error
        if config.authorization is not None:
            self._take_over(config)

    def _take_over(self, config: Kubeconfig) -> None:
        self._value, self._renew_at = config.authorization, math.inf
        if config.expires_at is not None:
            lifetime = config.expires_at - self._clock()
            self._renew_at = config.expires_at - min(RENEWAL_SECONDS, lifetime / 2)


def _from_pod(environment: Mapping[str, str]) -> Access:
    host, port = environment[POD], environment["KUBERNETES_SERVICE_PORT"]
    authority = (SERVICE_ACCOUNT / "ca.crt").read_text(encoding="ascii")
    address = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return _connected(address, FileToken(SERVICE_ACCOUNT / "token"), ssl.create_default_context(cadata=authority))


def _from_kubeconfig(path: Path | None, read: Callable[[Path | None], Kubeconfig]) -> Access:
    """An Access from the kubeconfig at ``path``, or (None) from this pod's ServiceAccount and proxy.

    Raises KubeconfigError, OSError and ValueError.
    """
    config = read(path)
    token_file = SERVICE_ACCOUNT / "token" if path is None else config.token_file and Path(config.token_file)
    authorization = FileToken(token_file) if token_file else KubeconfigToken(config, partial(read, path))
    access = _connected(config.server, authorization, _tls(config), config.server_name, config.proxy)
    return replace(access, namespace=config.namespace)


def _tls(config: Kubeconfig) -> ssl.SSLContext:
    """Raises OSError for invalid certificates."""
    with TemporaryDirectory() as folder:  # the ssl module reads a client's key from files only
        authority, certificate, key = (
            _written(Path(folder) / name, text)
            for name, text in (
                ("ca.crt", config.certificate_authority),
                ("tls.crt", config.client_certificate),
                ("tls.key", config.client_key),
            )
        )
        context = ssl.create_default_context(cafile=authority)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    if not config.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _written(path: Path, text: str | None) -> Path | None:
    """``path`` with ``text``, which only this user can read; None if there is no text."""
    if text is None:
        return None
    path.touch(mode=0o600)
    path.write_text(text, PEM_ENCODING)
    return path


def _connected(
    host: str,
    authorization: Authorization,
    context: ssl.SSLContext,
    server_name: str | None = None,
    proxy: str | None = None,
) -> Access:
    """An Access whose connections share ``context``: otherwise each of them reads the authority again."""
    if proxy is not None:
        return Access(host, ProxiedConnections(proxy, host, context, server_name), authorization)
    secured = context if host.startswith("https:") else None
    return Access(host, Connections(host, secured, server_name), authorization)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
