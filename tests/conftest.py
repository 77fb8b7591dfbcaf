"""Hypothesis without its clock: how long one example takes says more about the machine than about the code.

``make test`` tries the same examples every time, ``make test-all`` seeks new ones. And who runs what where two
processes share the cluster tests, which also decides where figures have to be shown from.
"""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from driver.errors import UsageError
from tests.harness.versions import default_release

settings.register_profile("full", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("full"), max_examples=20, derandomize=True, print_blob=False)
settings.register_profile("many", settings.get_profile("full"), max_examples=2000)
settings.load_profile(os.environ.get("TESSERA_EXAMPLES", "full"))

# A shell that starts us in the background ignores Ctrl-C on our behalf, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

OWN_CLUSTER = ("Cluster.start(", "control_plane(")

FIRST = ("test_conformance_reasons.py", "test_smallest_profile.py", "test_kill_anywhere.py", "test_image.py")
"""Files with few tests of minutes each. Where they or the tests on the session's cluster begin last, processes idle."""


@cache
def cluster_of(file: str) -> str:
    """What tests of one file must not be separated from: the file, or all that share the session's cluster."""
    text = Path(file).read_text()
    return file if any(start in text for start in OWN_CLUSTER) else "the session's cluster"


class ByCluster(LoadScopeScheduling):  # type: ignore[misc]
    """Tests on one cluster go to one process. (xdist's own groups need a pytest older than 9.)"""

    def _split_scope(self, nodeid: str) -> str:
        return cluster_of(nodeid.partition("::")[0])


def pytest_configure() -> None:
    try:
        default_release()
    except UsageError as error:
        raise pytest.UsageError(f"KUBE: {error}") from error


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (item.path.name not in FIRST, cluster_of(str(item.path)) == str(item.path)))


def pytest_report_header() -> str:
    return f"clusters: Kubernetes {default_release().kubernetes}"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return ByCluster(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Figures that a test wants seen, whichever process it ran in: ``record_property("said in the end", ...)``."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "said in the end":
                terminalreporter.write_line(str(value))
