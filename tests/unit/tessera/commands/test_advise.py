"""``tessera advise`` as a command: what it says of workloads, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from driver.model.plan import PATH
from driver.model.reported_gpus import GpuReport, encode_inventory
from tessera.cli import main
from tests.support.api_server import ObjectApi
from tests.support.gpus import gpu_of
from tests.support.usage_pages import GIB, H100
from tests.unit.tessera.test_cli import KUBECONFIG
from tests.unit.tessera.usage.test_prometheus import PrometheusApi, vector

DAY, HOURS = 86400, 48.0
SERVE = {
    "namespace": "team-a", "pod": "serve-6b7f8c9d4f-x2x9z", "claim": "c", "class": "gpu-training", "profile": "none",
    "device": "gpu-0", "gpu": "gpu-0", "node": "n",
}  # fmt: skip
BY = "max by (namespace, pod, claim, class, profile, device, gpu, node)"
DOCUMENTATION = Path(__file__).parents[4] / "docs" / "usage.md"
STEP = 7 * DAY // 1440


@pytest.fixture
def prometheus() -> Iterator[PrometheusApi]:
    without_pod = {name: value for name, value in SERVE.items() if name != "pod"}
    with PrometheusApi() as server:
        server.answers = {
            f"{BY} (max_over_time(tessera_claim_memory_used_bytes": vector((SERVE, 7 * GIB)),
            f"{BY} (max_over_time(tessera_claim_sm_active_ratio": vector((SERVE, 0.1)),
            f"{BY} (max_over_time(tessera_claim_slices": vector((SERVE, 8)),
            f"{BY} (count_over_time(": vector((SERVE, HOURS * 3600 / STEP)),
            f"{BY} (time()": vector((SERVE, HOURS * 3600)),
            "(((max by": vector((without_pod, 8 * HOURS * 3600)),
            "max by (node, gpu, product)": vector(({"node": "n", "gpu": "gpu-0", "product": H100}, 8)),
        }
        yield server


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    with ObjectApi() as api:
        api.store(f"{PATH}/n", spec={}, status={"inventory": encode_inventory([GpuReport(gpu_of(H100), 0)])})
        server = {"clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}
        file = tmp_path / "kubeconfig"
        file.write_text(yaml.safe_dump({**KUBECONFIG, **server}))
        yield file


def advise(*flags: str) -> Result:
    return CliRunner().invoke(main, ["advise", *flags])


def test_the_table_names_the_smallest_class_and_what_it_saves(prometheus: PrometheusApi, kubeconfig: Path) -> None:
    answer = advise("--prometheus", prometheus.url, "--kubeconfig", str(kubeconfig))
    assert answer.exit_code == 0, answer.output
    assert click.unstyle(answer.stdout) in DOCUMENTATION.read_text()
    assert click.unstyle(answer.stdout) == (
        "last 7 days: 1 workload of 1 would have fitted into a smaller class, which saves 336 slice-hours\n"
        "\n"
        "NAMESPACE  WORKLOAD  CLASS         MEMORY   ACTIVITY  SMALLEST CLASS         SAVES\n"
        "team-a     serve     gpu-training  7.0 GiB  10 %      gpu-inference-1g-10gb  336\n"
    )


def test_a_larger_margin_is_a_larger_class(prometheus: PrometheusApi, kubeconfig: Path) -> None:
    answer = advise("--prometheus", prometheus.url, "--kubeconfig", str(kubeconfig), "--margin", "50", "-o", "json")
    [found] = json.loads(answer.stdout)
    assert (found["smallestClass"], found["savedSliceHours"]) == ("gpu-inference-1g-20gb", 6 * HOURS)


def test_without_known_activity_it_is_said_that_only_memory_counts(prometheus: PrometheusApi, kubeconfig: Path) -> None:
    del prometheus.answers[f"{BY} (max_over_time(tessera_claim_sm_active_ratio"]
    answer = advise("--prometheus", prometheus.url, "--kubeconfig", str(kubeconfig))
    assert "gpu-inference-1g-10gb (by memory only)" in answer.stdout


def test_nothing_is_advised_without_a_day_of_data(prometheus: PrometheusApi, kubeconfig: Path) -> None:
    prometheus.answers[f"{BY} (time()"] = vector((SERVE, 5 * 3600))
    answer = advise("--prometheus", prometheus.url, "--kubeconfig", str(kubeconfig))
    assert "only 5 h of data; 24 h are needed" in answer.stdout
    short = advise("--prometheus", prometheus.url, "--since", "23h")
    assert (short.exit_code, "--since 23 h: must be at least 24h" in short.stderr) == (2, True)


def test_a_cluster_without_plans_is_an_error(prometheus: PrometheusApi, tmp_path: Path) -> None:
    with ObjectApi() as api:
        api.folder(PATH)
        file = tmp_path / "kubeconfig"
        server = {"clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}
        file.write_text(yaml.safe_dump({**KUBECONFIG, **server}))
        answer = advise("--prometheus", prometheus.url, "--kubeconfig", str(file))
    assert (answer.exit_code, "no GpuNodePlan lists a GPU" in answer.stderr) == (3, True)
