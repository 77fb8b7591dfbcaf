"""Address of the API server and credentials for it.

In a pod, the ServiceAccount is read here: the official client would add 16 MiB and 0.2 s to the start of every process.
Kubeconfigs, and proxies in a pod, are left to the official client.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import urllib3

from driver.errors import EnvironmentFault

MAX_CONNECTIONS = 16
"""Maximum pooled connections: one per thread with a request in flight."""

TOKEN_INTERVAL_SECONDS = 60.0
"""How long a token that was read from a file is used; the kubelet renews it long before it expires."""

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory with the certificate authority and the ServiceAccount token of a pod."""

PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})

POD = "KUBERNETES_SERVICE_HOST"
"""Set in every pod."""

KUBECONFIG_FORMAT = "a kubeconfig has clusters, users, contexts and current-context, as `kubectl config view` shows"

INVALID = (OSError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of the official client for files that are missing or are not kubeconfigs."""

Authorization = Callable[[], str | None]
"""Returns the value of the Authorization header for the next request. Raises CredentialsError."""


class CredentialsError(Exception):
    """Credentials are currently unavailable."""


@dataclass(frozen=True, slots=True)
class Access:
    """An API server: ``host`` is its URL without a trailing slash, ``pool`` connects to it.

    ``base`` is the prefix of each path for ``pool`` (None: ``host``). A pool for one host takes 0.1 ms less per request
    than one for any host, and expects paths instead of URLs.
    """

    host: str
    pool: urllib3.PoolManager | urllib3.HTTPConnectionPool
    authorization: Authorization
    base: str | None = None

    def url(self, path: str) -> str:
        """The URL or path to request from ``pool``."""
        return f"{self.host if self.base is None else self.base}{path}"


def load_configuration(
    kubeconfig: Path | None, environment: Mapping[str, str] = os.environ, *, named: str = "--kubeconfig"
) -> Access:
    """Read ``kubeconfig``, which the flag ``named`` names, or the pod's ServiceAccount. Raises EnvironmentFault."""
    if kubeconfig is not None:
        return _from_kubeconfig(kubeconfig, f"{named} {kubeconfig}")
    if POD not in environment:
        raise EnvironmentFault(f"no kubeconfig: {named} names none, and this is no pod")
    try:
        if any(environment.get(name) for name in environment if name.lower() in PROXIES):
            return _from_pod_with_proxy()
        return _from_pod(environment)
    except (OSError, ValueError, LookupError) as error:
        raise EnvironmentFault(f"in-cluster configuration can't be used: {_line(error)}") from error


def retries() -> urllib3.Retry:
    """One retry if an idle connection was closed by the server; other retries are up to the caller."""
    return urllib3.Retry(total=1, connect=0, redirect=0, status=0)


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


def _from_pod(environment: Mapping[str, str]) -> Access:
    host, port = environment[POD], environment["KUBERNETES_SERVICE_PORT"]
    authority = (SERVICE_ACCOUNT / "ca.crt").read_text(encoding="ascii")
    address = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return _direct(address, FileToken(SERVICE_ACCOUNT / "token"), ssl.create_default_context(cadata=authority))


def _from_pod_with_proxy() -> Access:
    from kubernetes.client.configuration import Configuration
    from kubernetes.config import ConfigException, load_incluster_config

    configuration = Configuration()
    try:
        load_incluster_config(configuration)
    except ConfigException as error:
        raise ValueError(str(error)) from error
    return _from_configuration(configuration)


def _from_kubeconfig(path: Path, called: str) -> Access:
    import yaml
    from kubernetes.client.configuration import Configuration
    from kubernetes.config import ConfigException, load_kube_config

    configuration = Configuration()
    try:
        if os.pathsep not in str(path):  # else it is a list of files, some of which may be missing
            path.read_bytes()
        load_kube_config(str(path), client_configuration=configuration)
        return _from_configuration(configuration, _token_file(path))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise EnvironmentFault(f"{called} can't be used: {error.strerror or error}{where}") from error
    except (ConfigException, yaml.YAMLError) as error:
        raise EnvironmentFault(f"{called} can't be used: {_line(error)}; {KUBECONFIG_FORMAT}") from error
    except INVALID as error:
        raise EnvironmentFault(f"{called} can't be used: it is no kubeconfig; {KUBECONFIG_FORMAT}") from error


def _token_file(path: Path) -> FileToken | None:
    """The current user's tokenFile, which the official client reads only once. Raises OSError and ValueError."""
    from kubernetes.config.kube_config import KubeConfigMerger

    config = KubeConfigMerger(str(path)).config
    context = config["contexts"].get_with_name(config["current-context"])["context"]
    user = config["users"].get_with_name(context["user"], safe=True) if context.safe_get("user") else None
    entry = user["user"] if user is not None else None
    if not entry or entry.safe_get("auth-provider") or entry.safe_get("token") or not entry.safe_get("tokenFile"):
        return None
    return FileToken(Path(entry.path).parent / entry["tokenFile"])


def _from_configuration(configuration: Any, token: Authorization | None = None) -> Access:
    """An Access from the configuration of the official client; ``token`` replaces its token."""
    from kubernetes.client.api_client import ApiClient
    from kubernetes.config import ConfigException

    def authorization() -> str | None:
        try:
            return cast("str | None", configuration.get_api_key_with_prefix("BearerToken", alias="authorization"))
        except ConfigException as error:
            raise CredentialsError(f"the credentials can't be renewed: {error}") from error

    if configuration.proxy:
        configuration.retries = retries()
        configuration.connection_pool_maxsize = MAX_CONNECTIONS
        return Access(configuration.host, ApiClient(configuration).rest_client.pool_manager, token or authorization)
    return _direct(configuration.host, token or authorization, _tls(configuration), configuration.tls_server_name)


def _tls(configuration: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _direct(host: str, authorization: Authorization, context: ssl.SSLContext, server_name: str | None = None) -> Access:
    """An Access without a proxy. All connections share ``context``: otherwise each reads the authority again."""
    manager = urllib3.PoolManager(
        ssl_context=context, server_hostname=server_name, retries=retries(), maxsize=MAX_CONNECTIONS
    )
    return Access(host, manager.connection_from_url(host), authorization, base=urllib3.util.parse_url(host).path or "")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
