"""Kubeconfig files with everything inside, so that a copy of one works anywhere on the machine."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import yaml

from tests.harness.certs import Pair


def certificate_user(pair: Pair) -> dict[str, str]:
    """A user who shows a client certificate."""
    return {"client-certificate-data": _encoded(pair.certificate), "client-key-data": _encoded(pair.key)}


def token_user(token: str) -> dict[str, str]:
    """A user who shows a bearer token."""
    return {"token": token}


def kubeconfig(server: str, authority: Path, user: dict[str, str]) -> dict[str, Any]:
    """The kubeconfig of ``user`` (see above) for the API server at ``server``."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "tessera", "cluster": {"server": server, "certificate-authority-data": _encoded(authority)}}
        ],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "tessera", "context": {"cluster": "tessera", "user": "user"}}],
        "current-context": "tessera",
    }


def write_kubeconfig(file: Path, server: str, authority: Path, user: dict[str, str]) -> Path:
    """Write that kubeconfig to ``file``, readable by its owner only, and return ``file``."""
    file.touch(mode=0o600)
    file.write_text(yaml.safe_dump(kubeconfig(server, authority, user), sort_keys=False))
    return file


def _encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()
