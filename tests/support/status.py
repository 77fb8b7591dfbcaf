"""``tessera status`` as a command, against a real cluster."""

from __future__ import annotations

import json
from typing import Any

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.command import run_tessera

SEEN_S = 60.0


def status(cluster: Cluster, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code of ``tessera status``, and what it says of each check."""
    done = run_tessera(cluster, "status", "-o", "json", *flags)
    assert not done.stderr, done.stderr
    return done.exit_code, json.loads(done.stdout)


def told(cluster: Cluster) -> dict[str, str]:
    """What ``tessera status`` finds wrong: message by check."""
    return findings(status(cluster)[1])


def findings(checks: list[dict[str, Any]]) -> dict[str, str]:
    """What is wrong in them: message by check."""
    return {c["check"]: "; ".join(f"{f['about']} {f['message']}" for f in c["findings"]) for c in checks if not c["ok"]}


def wait_sound(cluster: Cluster) -> None:
    wait_for(lambda: not told(cluster), SEEN_S, "all is well")
