"""Waiting for a process that was just started to serve, and showing its log when it does not."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from driver.errors import EnvironmentFault
from tests.harness.processes import ProcessRecord
from tests.harness.waiting import POLL_S

LOG_LINES = 20
PROBE_TIMEOUT_S = 10.0

Probe = Callable[[], bool]


def wait_ready(record: ProcessRecord, probe: Probe, log: Path, deadline_s: float) -> None:
    """Wait until ``probe`` says yes. Raises EnvironmentFault with the end of ``log`` if the process ends or is late."""
    end = time.monotonic() + deadline_s
    while not probe():
        if not record.alive:
            raise EnvironmentFault(f"{record.name} ended right after its start{log_end(log)}")
        if time.monotonic() > end:
            raise EnvironmentFault(f"{record.name} was not ready within {deadline_s:g} s{log_end(log)}")
        time.sleep(POLL_S)


def http_ok(url: str, authority: Path | None = None) -> Probe:
    """Asks whether ``url`` answers 200; ``authority`` is what an https server's certificate must come from."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    context = ssl.create_default_context(cafile=str(authority)) if authority else None

    def probe() -> bool:
        connection = (
            HTTPSConnection(host, port, timeout=PROBE_TIMEOUT_S, context=context)
            if context
            else HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
        )
        try:
            connection.request("GET", parts.path)
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    return probe


def accepts(path: Path) -> Probe:
    """Asks whether somebody accepts connections on the unix socket ``path``."""

    def probe() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(path))
            except OSError:
                return False
        return True

    return probe


def log_end(log: Path) -> str:
    """The last lines of a log, to go at the end of an error."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return f"; it left no log in {log}"
    return f"; the end of {log}:\n" + "\n".join(lines)
