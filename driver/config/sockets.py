"""Names of the node plugin's unix sockets: what the kubelet looks for, in as many characters as Linux takes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

SOCKET_PATH_LIMIT = 107
"""Characters of a unix socket's path that Linux takes (unix(7))."""

HASHED = 8
"""Characters that stand for the uid where the whole of it does not fit."""

UID = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?")


def check_pod_uid(value: str) -> str:
    """Check a pod's uid. Raises ValueError."""
    if not UID.fullmatch(value):
        raise ValueError("must be the uid of this process' pod (metadata.uid): letters, digits and dashes")
    return value


def plugin_socket(directory: Path, uid: str) -> Path:
    """Where the kubelet calls the plugin; with the ``uid`` of a pod each plugin of the node has its own."""
    if not uid:
        return directory / "dra.sock"
    return _fitting(directory, f"dra-{uid}.sock", f"dra-{_short(uid)}.sock")


def registration_socket(directory: Path, driver: str, uid: str) -> Path:
    """Where the kubelet finds the plugin."""
    if not uid:
        return directory / f"{driver}-reg.sock"
    anonymous = f"dra-{_short(f'{driver} {uid}')}-reg.sock"
    return _fitting(directory, f"{driver}-{uid}-reg.sock", f"{driver}-{_short(uid)}-reg.sock", anonymous)


def _fitting(directory: Path, *names: str) -> Path:
    """The first that fits, else the last. The first is what the Go helper for plugins takes
    (kubeletplugin.RollingUpdate); it shortens as we do, by another hash."""
    paths = [directory / name for name in names]
    return next((path for path in paths if len(str(path)) <= SOCKET_PATH_LIMIT), paths[-1])


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASHED]
