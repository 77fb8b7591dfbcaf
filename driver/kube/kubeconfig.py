"""Kubeconfigs, read with the official client.

The official client takes 24 MiB as long as a process lives. For processes that stay this file is also a program: it
reads the kubeconfig, runs its exec plugin, writes the result into a pipe and ends. Secrets pass through the pipe only.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

FORMAT = "a kubeconfig has clusters, users, contexts and current-context, as `kubectl config view` shows"

MALFORMED = (ValueError, LookupError, TypeError, AttributeError)
"""Errors of the official client for files that are not kubeconfigs."""

PEM_ENCODING = "latin-1"
"""Certificates may have comments in any encoding."""

DEFAULT_NAMESPACE = "default"
"""The namespace where a context names none, as for kubectl."""


class KubeconfigError(Exception):
    """The kubeconfig can't be used."""


class Kubeconfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the current context of a kubeconfig says about its server and user.

    ``authorization`` is the value of the header, valid until ``expires_at`` (Unix time; None: without end);
    ``token_file`` has the token instead. Certificates and key are PEM texts. ``namespace`` is that of the context.
    """

    server: str
    authorization: str | None = None
    expires_at: float | None = None
    token_file: str | None = None
    certificate_authority: str | None = None
    client_certificate: str | None = None
    client_key: str | None = None
    verify: bool = True
    server_name: str | None = None
    proxy: str | None = None
    namespace: str = DEFAULT_NAMESPACE


_official_client = threading.Lock()
"""Held while it reads: it gives a second thread the name of a certificate's file that it has still to write."""

_Answer = tuple[Kubeconfig | str, list[str]]
"""What the program writes: the kubeconfig or why it can't be used, and what the official client logged."""


def read_kubeconfig(path: Path | None) -> Kubeconfig:
    """Read the kubeconfig at ``path``; None: the ServiceAccount and the proxy of this pod. Raises KubeconfigError."""
    import yaml
    from kubernetes.config import ConfigException

    try:
        with _official_client:
            return _read(path)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise KubeconfigError(f"{error.strerror or error}{where}") from error
    except (ConfigException, yaml.YAMLError) as error:
        raise KubeconfigError(" ".join(str(error).split()) + ("" if path is None else f"; {FORMAT}")) from error
    except MALFORMED as error:
        raise KubeconfigError(f"it is no kubeconfig; {FORMAT}") from error


def read_kubeconfig_in_own_process(path: Path | None) -> Kubeconfig:
    """The same without loading the official client into this process."""
    reading, writing = os.pipe()
    command = [sys.executable, "-P", __file__, str(writing), *([] if path is None else [str(path)])]
    with os.fdopen(reading, "rb") as pipe:
        try:
            process = subprocess.Popen(command, pass_fds=[writing])
        except OSError as error:
            raise KubeconfigError(f"the process that reads it can't be started: {error}") from error
        finally:
            os.close(writing)
        with process:
            answer = pipe.read()
    try:
        decoded: _Answer = msgspec.json.decode(answer, type=_Answer)
    except msgspec.MsgspecError as error:
        raise KubeconfigError(f"the process that reads it ended with status {process.returncode}") from error
    result, problems = decoded
    if isinstance(result, str):
        raise KubeconfigError(result)
    for problem in problems:
        log.error("the kubeconfig has a problem", extra={"error": problem})
    return result


def main(writing: int, path: Path | None) -> None:
    """Write the result of ``read_kubeconfig`` to the file descriptor ``writing``."""
    problems = BufferingHandler(1000)  # what the official client logs, such as the failure of an exec plugin
    problems.setLevel(logging.WARNING)
    logging.getLogger().addHandler(problems)
    result: Kubeconfig | str
    try:
        result = read_kubeconfig(path)
    except KubeconfigError as error:
        result = str(error)
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(msgspec.json.encode((result, [record.getMessage() for record in problems.buffer])))


def _read(path: Path | None) -> Kubeconfig:
    from kubernetes.client.configuration import Configuration
    from kubernetes.client.rest import should_bypass_proxies
    from kubernetes.config import load_incluster_config
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    configuration: Any = Configuration()
    expires_at = token_file = None
    namespace = DEFAULT_NAMESPACE
    if path is None:
        load_incluster_config(configuration)
    else:
        if os.pathsep not in str(path):  # else it is a list of files, some of which may be missing
            path.read_bytes()
        files = KubeConfigMerger(str(path))
        loader = KubeConfigLoader(files.config, config_base_path=None, config_persister=files.save_changes)
        loader.load_and_set(configuration)
        expires_at = loader.expiry.timestamp() if "expiry" in vars(loader) else None
        context = files.config["contexts"].get_with_name(files.config["current-context"])["context"]
        token_file = _token_file(files.config, context)
        namespace = context.safe_get("namespace") or DEFAULT_NAMESPACE
    is_direct = not configuration.proxy or should_bypass_proxies(configuration.host, configuration.no_proxy or "")
    return Kubeconfig(
        server=configuration.host,
        authorization=configuration.api_key.get("BearerToken"),
        expires_at=expires_at,
        token_file=token_file,
        certificate_authority=_pem(configuration.ssl_ca_cert),
        client_certificate=_pem(configuration.cert_file),
        client_key=_pem(configuration.key_file),
        verify=configuration.verify_ssl,
        server_name=configuration.tls_server_name,
        proxy=None if is_direct else configuration.proxy,
        namespace=namespace,
    )


def _token_file(config: Any, context: Any) -> str | None:
    """The tokenFile of the user of ``context``, which the official client reads only once."""
    user = config["users"].get_with_name(context["user"], safe=True) if context.safe_get("user") else None
    account = user["user"] if user is not None else None
    if not account or account.safe_get("auth-provider") or account.safe_get("token"):
        return None
    token_file = account.safe_get("tokenFile")
    return None if not token_file else str(Path(account.path).parent / token_file)


def _pem(path: str | None) -> str | None:
    return None if not path else Path(path).read_text(PEM_ENCODING)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
