"""Scraping a process as Prometheus does."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.waiting import wait_for

ADDRESS = r"serving over HTTP address=\S*:(\d+) paths=\S*{path}"


def fetch(port: int, path: str = "/metrics", method: str = "GET", host: str = "127.0.0.1") -> tuple[int, str]:
    """Status and body of any request."""
    request = urllib.request.Request(f"http://{host}:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def port_in(log: Path, deadline_s: float, path: str = "/metrics") -> int:
    """The port that the process started last serves ``path`` at, as its log says."""
    address = re.compile(ADDRESS.format(path=path))
    found = wait_for(lambda: address.findall(log.read_text()), deadline_s, f"{log} names the address of {path}")
    return int(found[-1])


def families(port: int) -> dict[str, Metric]:
    """What is exported, by name as in docs/metrics.md."""
    return {exported_name(family): family for family in text_string_to_metric_families(fetch(port)[1])}


def exported_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def total(found: dict[str, Metric], name: str, suffix: str = "", **labels: str) -> float:
    """The sum of the samples called ``name`` and ``suffix`` that have these labels, whatever others they have."""
    return sum(
        sample.value
        for sample in found[name].samples
        if sample.name == name + suffix and labels.items() <= sample.labels.items()
    )
