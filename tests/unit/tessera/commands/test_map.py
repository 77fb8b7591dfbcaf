"""``tessera map`` as a command against an API server: formats, limits, and what it does without rights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from controller.report.cluster_view import ClusterView
from driver.model.plan import PATH
from driver.model.reported_gpus import GpuReport, encode_inventory
from tessera.cli import main
from tessera.commands.map import MOST_NODES
from tessera.commands.map import map as command
from tests.harness.waiting import wait_for
from tests.support.api_server import SLICES, ObjectApi
from tests.support.map_cluster import DOCS, example
from tests.support.queues import gpu_in, request
from tests.unit.tessera.test_cli import KUBECONFIG, on_a_terminal

DOCUMENTATION = (DOCS / "map.md").read_text()
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims"
SOON_S = 60.0


def add_node(api: ObjectApi, name: str, *offered: str, gpus: int = 2) -> None:
    reports = [GpuReport(gpu_in(name, number), number) for number in range(gpus)]
    pool = f"{name}-gpu.tessera.dev"
    api.store(f"/api/v1/nodes/{name}", spec={})
    api.store(f"{PATH}/{name}", spec={}, status={"mode": "Planned", "inventory": encode_inventory(reports)})
    devices = [{"name": device} for device in offered]
    spec = {"driver": "gpu.tessera.dev", "nodeName": name, "pool": {"name": pool, "resourceSliceCount": 1}}
    api.store(f"{SLICES}/{name}", spec={**spec, "devices": devices})


def hold(api: ObjectApi, claim: str, node: str, device: str) -> None:
    namespace, name = claim.split("/")
    result = {"request": "gpu", "driver": "gpu.tessera.dev", "pool": f"{node}-gpu.tessera.dev", "device": device}
    spec = {"devices": {"requests": [request("gpu-training")]}}
    status = {"allocation": {"devices": {"results": [result]}}}
    api.store(f"{CLAIMS.format(namespace)}/{name}", spec=spec, status=status)


@pytest.fixture
def api() -> Iterator[ObjectApi]:
    with ObjectApi() as server:
        add_node(server, "n1", "gpu-0", "gpu-1")
        hold(server, "team-a/train", "n1", "gpu-0")
        yield server


@pytest.fixture
def kubeconfig(api: ObjectApi, tmp_path: Path) -> Path:
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump({**KUBECONFIG, "clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}))
    return file


def run(kubeconfig: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["map", "--kubeconfig", str(kubeconfig), *flags])


@pytest.fixture(autouse=True)
def pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output that is as wide as it is: pytest-xdist sets the variable."""
    monkeypatch.delenv("COLUMNS", raising=False)


def test_the_table_shows_gpus_and_the_summary(kubeconfig: Path) -> None:
    answer = run(kubeconfig)
    assert answer.exit_code == 0, answer.output
    assert "gpu-0   [A team-a/train---" in answer.stdout
    assert "gpu-1   [+full+++" in answer.stdout
    assert answer.stdout.splitlines()[-1].split()[-3:] == ["on", "1", "GPU"]


@pytest.mark.parametrize("flags", [[], ["--summary"]])
def test_the_map_is_as_wide_as_the_terminal(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    lengths = {}
    for columns in ("60", "80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        lengths[columns] = max(map(len, run(kubeconfig, *flags).stdout.splitlines()))
    assert lengths["60"] <= 60 < lengths["200"]
    assert lengths["80"] <= 80


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "bars", "said"),
    [
        ([], 0, "--all draws all GPUs"),
        (["--all"], 2 * (MOST_NODES + 1), "33 nodes; 66 GPUs"),
        (["--free"], 2 * (MOST_NODES + 1) - 1, "33 nodes; 65 GPUs"),
        (["--node", "n1", "--node", "n-7"], 4, "2 nodes; 4 GPUs"),
        (["--node", "n1", "--summary"], 0, "1 node; 2 GPUs"),
        (["--node", "nobody"], 0, "No GPU."),
    ],
)
def test_many_nodes_are_summed_up_unless_some_are_chosen(
    api: ObjectApi, kubeconfig: Path, flags: list[str], bars: int, said: str
) -> None:
    for number in range(MOST_NODES):
        add_node(api, f"n-{number}")
    answer = run(kubeconfig, *flags)
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.count("gpu-") - answer.stdout.count("gpu-training") == bars
    assert said in answer.stdout


def keys(value: Any) -> set[str]:
    """The names of all fields of a JSON value; of ``slices`` only itself, since its keys are states."""
    if isinstance(value, list):
        return {key for each in value for key in keys(each)}
    return {key for name, each in value.items() for key in {name, *keys(each)}} if isinstance(value, dict) else set()


def test_json_has_only_documented_fields(api: ObjectApi, kubeconfig: Path) -> None:
    hold(api, "team-a/lost", "n1", "gpu-7")
    for flags in ([], ["--summary"]):
        answer = run(kubeconfig, "-o", "json", *flags)
        assert answer.exit_code == 0, answer.output
        assert {key for key in keys(json.loads(answer.stdout)) if f"`{key}`" not in DOCUMENTATION} == set()


def test_an_image_is_xml(kubeconfig: Path) -> None:
    answer = run(kubeconfig, "-o", "svg")
    assert ElementTree.fromstring(answer.stdout).tag.endswith("svg")  # noqa: S314


@pytest.mark.long
def test_colours_are_only_on_a_terminal_and_only_if_wanted(kubeconfig: Path) -> None:
    flags = ("map", "--kubeconfig", str(kubeconfig))
    assert run(kubeconfig).stdout == click.unstyle(run(kubeconfig).stdout)
    assert "\x1b[" in on_a_terminal({"NO_COLOR": ""}, *flags)
    assert "\x1b[" not in on_a_terminal({"NO_COLOR": "1"}, *flags)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, 1, "this account may not read what is needed"),
        (404, 1, "CustomResourceDefinition is not installed"),
        (500, 1, "500"),
    ],
)
def test_what_cannot_be_read_is_named(api: ObjectApi, kubeconfig: Path, status: int, code: int, said: str) -> None:
    api.once("list", *[lambda exchange: exchange.refuse(status, "no")] * 20)
    answer = run(kubeconfig)
    assert answer.exit_code == code
    assert said in answer.stderr


def test_without_a_cluster_the_exit_code_is_3(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(yaml.safe_dump(KUBECONFIG))
    assert run(tmp_path / "config").exit_code == 3


@pytest.mark.parametrize(
    "flags", [["--summary", "--all"], ["-o", "svg", "--watch"], ["-o", "svg", "--summary"], ["-o", "yaml"]]
)
def test_flags_that_make_no_sense_together_are_refused(kubeconfig: Path, flags: list[str]) -> None:
    assert run(kubeconfig, *flags).exit_code == 2


@pytest.mark.long
def test_watch_draws_again_after_a_change_and_ends_quietly(api: ObjectApi, kubeconfig: Path, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("tessera")), "map", "--kubeconfig", str(kubeconfig), "--watch"]
    log, errors = tmp_path / "out", tmp_path / "err"
    with (
        log.open("w") as output,
        errors.open("w") as told,
        subprocess.Popen([*command, "-o", "json"], stdout=output, stderr=told) as process,
    ):
        try:
            wait_for(lambda: log.read_text().count("\n") == 1, SOON_S, "the first map")
            wait_for(lambda: api.count("watch", "resourceclaims"), SOON_S, "claims are watched")
            api.store("/apis/resource.k8s.io/v1/deviceclasses/unrelated", spec={})
            hold(api, "team-b/more", "n1", "gpu-1")
            wait_for(lambda: "team-b" in log.read_text(), SOON_S, "the map with the new claim")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(SOON_S)
    first, *_, last = map(json.loads, log.read_text().splitlines())
    assert first != last
    assert [span["holder"]["claim"] for gpu in last[0]["gpus"] for span in gpu["spans"]] == ["train", "more"]
    assert (process.returncode, errors.read_text()) == (0, "")


def test_watch_draws_only_what_is_new_and_warns_once_when_it_may_be_old(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = example().view()
    stale = [replace(view, stale=f"claims can't be watched for {seconds} s") for seconds in (20, 30)]

    def views(*_: object) -> Iterator[ClusterView]:
        yield from [view, view, *stale, view]
        raise KeyboardInterrupt

    monkeypatch.setattr("tessera.commands.map.watch_cluster", views)
    answer = run(kubeconfig, "--watch")
    assert answer.exit_code == 0
    assert answer.stdout.count("PRODUCT") == 3
    assert answer.stderr == "warning: this is the last known state: claims can't be watched for 20 s\n"


def test_every_flag_is_documented() -> None:
    flags = {option for each in command.params for option in each.opts if option.startswith("--")}
    common = {"--kubeconfig", "--driver-name", "--output"}
    assert {flag for flag in flags - common if f"`{flag}" not in DOCUMENTATION} == set()
