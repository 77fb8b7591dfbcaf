"""An audit log of what the release's ServiceAccounts ask of the API server, for ``tests/audit``.

``TESSERA_AUDIT_DIR`` names a folder into which every cluster then writes one, named after itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

VARIABLE = "TESSERA_AUDIT_DIR"
ACCOUNTS = ("tessera-node", "tessera-controller", "tessera-uninstall")
NAMESPACE = "tessera"

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    # Every request once, when it is over; of a watch also the beginning.
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "users": [f"system:serviceaccount:{NAMESPACE}:{account}" for account in ACCOUNTS]},
        {"level": "None"},
    ],
}


def audit_flags(policy: Path, log: Path) -> list[str]:
    """Flags of a kube-apiserver that writes ``log``, a line of JSON a request; ``policy`` is a file made for it."""
    policy.write_text(json.dumps(POLICY))
    return [f"--audit-policy-file={policy}", f"--audit-log-path={log}", "--audit-log-maxsize=10000"]


def flags_of_the_suite(cluster: Path) -> list[str]:
    """The same for the cluster with this directory, where the environment asks for it; else none."""
    folder = os.environ.get(VARIABLE)
    return audit_flags(cluster / "audit-policy.json", Path(folder) / f"{cluster.name}.jsonl") if folder else []
