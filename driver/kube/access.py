"""Where the API server is, and who asks.

A pod's ServiceAccount, and a kubeconfig that has nothing but an address, an authority and a token, are read here.
Everything else (plugins that fetch credentials, client certificates, proxies, ...) is left to the official client,
which is loaded for it alone: it costs a process 16 MiB and a third of a second.
"""

from __future__ import annotations

import base64
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import urllib3

from driver.errors import EnvironmentFault

CONNECTIONS = 16
"""Kept open at most; one a thread that may be waiting for an answer."""

TOKEN_S = 60.0
"""How long a token that was read from a file is used: the kubelet renews it long before it ends."""

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where every pod finds the API server's authority and its own token."""

PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})

OTHERWISE = (OSError, ValueError, LookupError, TypeError, msgspec.MsgspecError)
"""What a kubeconfig that is missing or says more than we read comes to."""

POD = "KUBERNETES_SERVICE_HOST"
"""Set in every pod."""

A_KUBECONFIG = "a kubeconfig has clusters, users, contexts and current-context, as `kubectl config view` shows"

Authorization = Callable[[], str | None]
"""The header's value for the next request. Raises CredentialsError."""


class CredentialsError(Exception):
    """What shows who we are can't be had at present."""


@dataclass(frozen=True, slots=True)
class Access:
    """``host`` is the address of the API server, without a slash at its end.

    ``pool`` connects to it; ``base`` is what it wants before a path (None: ``host``). A pool for one host wants no more
    than the path that all of the server's URLs begin with, and takes 0.1 ms less for a request than one for any host.
    """

    host: str
    pool: urllib3.PoolManager | urllib3.HTTPConnectionPool
    authorization: Authorization
    base: str | None = None

    def url(self, path: str) -> str:
        """What to ask ``pool`` for."""
        return f"{self.host if self.base is None else self.base}{path}"


def load_configuration(
    kubeconfig: Path | None, environment: Mapping[str, str] = os.environ, *, named: str = "--kubeconfig"
) -> Access:
    """The kubeconfig that ``named`` names, or the pod's own ServiceAccount. Raises EnvironmentFault."""
    if kubeconfig is None and POD not in environment:
        raise EnvironmentFault(f"no kubeconfig: {named} names none, and this is no pod")
    try:
        if any(environment.get(name) for name in environment if name.lower() in PROXIES):
            raise LookupError("proxies are the client's")
        return _of_pod(environment) if kubeconfig is None else _of_file(kubeconfig)
    except OTHERWISE:
        return _by_the_client(kubeconfig, f"{named} {kubeconfig}")


def retries() -> urllib3.Retry:
    """One more try where an idle connection was closed under us; everything else is the caller's to retry."""
    return urllib3.Retry(total=1, connect=0, redirect=0, status=0)


class FileToken:
    """A token in a file that somebody renews."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError, and ValueError where there is none in it."""
        self._path = path
        self._clock = clock
        self._value = self._read()
        self._until = clock() + TOKEN_S

    def __call__(self) -> str:
        if self._clock() >= self._until:
            try:
                self._value = self._read()
            except (OSError, ValueError) as error:
                raise CredentialsError(f"the token in {self._path} can't be read: {error}") from error
            self._until = self._clock() + TOKEN_S
        return self._value

    def _read(self) -> str:
        token = self._path.read_text(encoding="utf-8").strip()
        if not token:
            raise ValueError("the file is empty")
        return f"Bearer {token}"


def _of_pod(environment: Mapping[str, str]) -> Access:
    host, port = environment[POD], environment["KUBERNETES_SERVICE_PORT"]
    authority = (SERVICE_ACCOUNT / "ca.crt").read_text(encoding="ascii")
    address = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return _access(address, authority, FileToken(SERVICE_ACCOUNT / "token"))


class _Cluster(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    server: str
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None


class _User(msgspec.Struct, forbid_unknown_fields=True):
    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")


class _Context(msgspec.Struct):
    cluster: str
    user: str


def _of_file(path: Path) -> Access:
    config = msgspec.yaml.decode(path.read_bytes())
    context = msgspec.convert(_named(config, "context", config["current-context"]), _Context)
    cluster = msgspec.convert(_named(config, "cluster", context.cluster), _Cluster)
    user = msgspec.convert(_named(config, "user", context.user), _User)
    if cluster.certificate_authority_data is not None:
        authority = base64.b64decode(cluster.certificate_authority_data, validate=True).decode("ascii")
    else:
        authority = (path.parent / (cluster.certificate_authority or "")).read_text(encoding="ascii")
    return _access(cluster.server.rstrip("/"), authority, _shown(user, path))


def _shown(user: _User, kubeconfig: Path) -> Authorization:
    if user.token is None:
        return FileToken(kubeconfig.parent / (user.token_file or ""))
    value = f"Bearer {user.token}"
    return lambda: value


def _named(config: Any, kind: str, name: str) -> Any:
    """The one entry of that name. Raises ValueError where there are none or several."""
    [entry] = [entry for entry in config[f"{kind}s"] if entry["name"] == name]
    return entry[kind]


def _access(host: str, authority: str, authorization: Authorization) -> Access:
    # One context for all connections: each would else read the authority anew.
    context = ssl.create_default_context(cadata=authority)
    manager = urllib3.PoolManager(ssl_context=context, retries=retries(), maxsize=CONNECTIONS)
    return Access(host, manager.connection_from_url(host), authorization, base=urllib3.util.parse_url(host).path or "")


def _by_the_client(kubeconfig: Path | None, called: str) -> Access:
    from kubernetes.client.api_client import ApiClient
    from kubernetes.client.configuration import Configuration
    from kubernetes.config import ConfigException, load_incluster_config

    configuration = Configuration()
    if kubeconfig is not None:
        _read_by_the_client(kubeconfig, called, configuration)
    else:
        try:
            load_incluster_config(configuration)
        except (ConfigException, *OTHERWISE) as error:
            raise EnvironmentFault(f"in-cluster configuration can't be used: {_line(error)}") from error
    configuration.retries = retries()
    configuration.connection_pool_maxsize = CONNECTIONS

    def authorization() -> str | None:
        try:
            return cast("str | None", configuration.get_api_key_with_prefix("BearerToken", alias="authorization"))
        except ConfigException as error:
            raise CredentialsError(f"the credentials can't be renewed: {error}") from error

    return Access(configuration.host, ApiClient(configuration).rest_client.pool_manager, authorization)


def _read_by_the_client(kubeconfig: Path, called: str, configuration: Any) -> None:
    import yaml
    from kubernetes.config import ConfigException, load_kube_config

    try:
        if os.pathsep not in str(kubeconfig):  # else it is a list of files, of which some may be missing
            kubeconfig.read_bytes()
        load_kube_config(str(kubeconfig), client_configuration=configuration)
    except OSError as error:
        raise EnvironmentFault(f"{called} can't be used: {error.strerror or error}: {error.filename}") from error
    except (ConfigException, yaml.YAMLError) as error:
        raise EnvironmentFault(f"{called} can't be used: {_line(error)}; {A_KUBECONFIG}") from error
    except (AttributeError, *OTHERWISE) as error:  # of the client's own code, about what it did not expect
        raise EnvironmentFault(f"{called} can't be used: it is no kubeconfig; {A_KUBECONFIG}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
