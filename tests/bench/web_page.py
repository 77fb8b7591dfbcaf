"""The controller's web page with 1,000 nodes: how soon a browser shows them, and what it costs the controller.

``python -m tests.bench.web_page`` measures it alone; part of ``make bench``. A real controller reads recorded lists
over HTTP from a test server, which accepts its writes; the browser is a real Chromium.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import click
import yaml

from driver.model.plan import PATH
from tests.bench.cluster_map import kubeconfig_of
from tests.bench.fleet.recorded import record
from tests.bench.fleet.replaying import folder_of
from tests.bench.results import Figure, machine, table
from tests.harness.waiting import wait_for
from tests.support.api_server import Exchange, HttpServer
from tests.support.plugin import TESSERA
from tests.support.ports import kept_port
from tests.support.web_page import browser

NODES = 1000
"""With eight GPUs each; three quarters of them are held."""

RUNS = 5
PROCESSES = 3
"""Controllers that are measured: the order in which they load the lists makes a difference of up to 20 MiB."""

SOON_S = 120.0
BOOKMARK_INTERVAL_S = 5.0
MIB = 1 << 20

PAINTED = """
const done = arguments[0];
const look = () => {
  const first = document.querySelector('.node .gpu');
  if (!first) return requestAnimationFrame(look);
  requestAnimationFrame(() => setTimeout(() => done([performance.now(), document.querySelectorAll('.node').length])));
};
look();
"""
"""Milliseconds from the start of the navigation until the first nodes are on the screen, and the number of nodes."""


def figures(where: str) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="tessera-recorded-") as name:
        folder = Path(name)
        record(NODES, folder / "lists")
        with _api(folder / "lists") as url:
            (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig_of(url)))
            off = [_settled_bytes_without(folder) for _ in range(PROCESSES)]
            visits = [_visit(folder) for _ in range(PROCESSES)]
    without = statistics.median(off) / MIB
    unvisited, visited = (
        statistics.median(each) / MIB - without for each in ([v.unvisited for v in visits], [v.visited for v in visits])
    )
    first_paint = statistics.median(paint for visit in visits for paint in visit.paints)
    return [
        Figure("web.1000nodes_first_paint_ms", first_paint, "ms", 1000, None, where),
        Figure(
            "web.1000nodes_first_viewer_s", statistics.median(v.first_state for v in visits), "s", None, None, where
        ),
        Figure("web.off_mib", without, "MiB", None, None, where),
        Figure("web.unvisited_growth_mib", unvisited, "MiB", 15, None, where),
        Figure("web.1000nodes_visited_growth_mib", visited, "MiB", 15, None, where),
    ]


def _settled_bytes_without(folder: Path) -> int:
    with _controller(folder) as process:
        return _settled_bytes(process)


class Visit(NamedTuple):
    """Bytes of a controller before and after its page was viewed, seconds and milliseconds that viewers waited."""

    unvisited: int
    visited: int
    first_state: float
    paints: list[float]


def _visit(folder: Path) -> Visit:
    with kept_port() as port, _controller(folder, "--web-address", f"127.0.0.1:{port}") as process:
        unvisited = _settled_bytes(process)
        page = f"http://127.0.0.1:{port}/"
        began = time.perf_counter()
        with urlopen(f"{page}api/state") as answer:  # noqa: S310 - an address of this machine
            assert len(json.load(answer)["nodes"]) == NODES
        first_state = time.perf_counter() - began
        paints = _first_paints(page)
        return Visit(unvisited, _settled_bytes(process), first_state, paints)


def _first_paints(page: str) -> list[float]:
    found = []
    with browser() as driver:
        driver.set_script_timeout(SOON_S)
        for _ in range(RUNS):
            driver.get("about:blank")
            driver.get(page)
            milliseconds, nodes = driver.execute_async_script(PAINTED)
            assert nodes == NODES
            found.append(float(milliseconds))
    return found


@contextmanager
def _api(lists: Path) -> Iterator[str]:
    """A server of the recorded lists, in which plans can be changed. Other writes are lost; watches have bookmarks.

    A watch that stays silent makes the controller list everything again, which costs it memory of its own.
    """
    ended = threading.Event()
    pages = (json.loads(page.read_bytes()) for page in (lists / folder_of(PATH)).iterdir())
    plans = {f"{PATH}/{item['metadata']['name']}": item for page in pages for item in page["items"]}
    versions = itertools.count(2_000_000)

    def answer(exchange: Exchange) -> None:
        file = lists / folder_of(exchange.route) / exchange.query.get("continue", "0")
        if exchange.command != "GET":
            written = json.loads(exchange.body or b"{}")
            found = _merged(
                plans.get(exchange.route, {"metadata": {"name": exchange.route.rpartition("/")[2]}}), written
            )
            found["metadata"]["resourceVersion"] = str(next(versions))
            if exchange.route in plans:
                plans[exchange.route] = found
            exchange.send_json(found)
        elif "watch" in exchange.query:
            exchange.begin_stream()
            while not ended.wait(BOOKMARK_INTERVAL_S):
                # Changes of plans are not sent, so the controller must not take its own later writes for sent ones.
                version = exchange.query["resourceVersion"] if exchange.route == PATH else str(next(versions))
                exchange.send_line(
                    json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}).encode()
                )
        elif file.exists():
            exchange.send(200, file.read_bytes())
        else:
            exchange.refuse(404, "not recorded")

    with HttpServer(answer) as server:
        try:
            yield server.url
        finally:
            ended.set()


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A merge patch."""
    both = {name: _merged(old[name], part) if isinstance(part, dict) and isinstance(old.get(name), dict) else part
            for name, part in new.items()}  # fmt: skip
    return {name: part for name, part in {**old, **both}.items() if part is not None}


@contextmanager
def _controller(folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [TESSERA, "controller", "--kubeconfig", str(folder / "kubeconfig"), "--settle-s", "0", *flags]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_for(lambda: b"wrote plans" in (folder / "log").read_bytes(), SOON_S, "the controller leads")
            yield process
        finally:
            process.terminate()


def _settled_bytes(process: subprocess.Popen[bytes]) -> int:
    """The memory of the process, once it has stopped changing."""
    last: list[int] = []

    def is_settled() -> bool:
        last.append(_memory(process.pid))
        return len(last) > 3 and max(last[-3:]) - min(last[-3:]) < MIB // 4

    wait_for(is_settled, SOON_S, "its memory does not change any more", interval_s=3.0)
    return last[-1]


def _memory(pid: int) -> int:
    """Bytes of memory of the process; of memory that it shares with others, its part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    click.echo(table(figures(machine())))
