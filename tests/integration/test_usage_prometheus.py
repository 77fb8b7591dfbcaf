"""``tessera usage --prometheus`` against a real Prometheus, whose data of a day are those of claims as they live."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from driver.model.plan import PATH
from driver.model.reported_gpus import GpuReport, encode_inventory
from tessera.cli import main
from tests.harness.prometheus import running
from tests.support.api_server import ObjectApi
from tests.support.faulty_api import kubeconfig_of
from tests.support.gpus import gpu_of
from tests.support.usage_pages import A100, GIB, H100

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

SCRAPE_S = 30
HOUR, DAY = 3600.0, 86400.0
SLICES, MEMORY, SM = "tessera_claim_slices", "tessera_claim_memory_used_bytes", "tessera_claim_sm_active_ratio"
ALLOCATED, MEASURED = "tessera_claim_allocated_slice_seconds_total", "tessera_claim_measured_slice_seconds_total"
USED = "tessera_claim_used_slice_seconds_total"


@dataclass(frozen=True)
class Life:
    """A claim with a device, prepared from ``begin`` to ``end`` (hours before the present), then perhaps again.

    ``activity``: None if it is unknown. ``restart``: when its plugin was restarted, which changes the label instance.
    ``unscraped_until``: Prometheus saw nothing before.
    """

    namespace: str
    claim: str
    begin: float
    end: float
    slices: int = 8
    activity: float | None = 0.5
    gpu: str = "gpu-0"
    restart: float | None = None
    unscraped_until: float = 48.0
    again: tuple[float, float] | None = None

    @property
    def slice_hours(self) -> float:
        """Slice-hours of the last day."""
        lives = [(self.begin, self.end), *([self.again] if self.again else [])]
        return self.slices * sum(min(begin, 24.0) - min(end, 24.0) for begin, end in lives)

    def samples(self, now: float) -> Iterator[tuple[str, str, float, float]]:
        """Metric, labels, time and value of each scrape."""
        for begin, end in [(self.begin, self.end), *([self.again] if self.again else [])]:
            start = now - begin * HOUR
            at = start + SCRAPE_S - start % SCRAPE_S
            while at <= now - end * HOUR:
                hours = (now - at) / HOUR
                if hours <= min(self.unscraped_until, 26.0):
                    seconds = at - start
                    yield ALLOCATED, self._labels(hours), at, self.slices * seconds
                    if self.activity is not None:
                        yield MEASURED, self._labels(hours), at, self.slices * seconds
                        yield USED, self._labels(hours), at, self.slices * seconds * self.activity
                at += SCRAPE_S

    def _labels(self, hours: float) -> str:
        instance = "old" if self.restart is not None and hours > self.restart else "new"
        labels = {"namespace": self.namespace, "claim": self.claim, "class": "c", "profile": "none", "gpu": self.gpu}
        labels |= {"device": f"{self.gpu}-{self.claim}", "node": "n", "instance": instance, "source": "gpm", "pod": ""}
        return ",".join(f'{name}="{value}"' for name, value in labels.items())


SHORT = [Life("short", f"job-{i}", 23.0 - i / 10, 23.0 - i / 10 - 2 / 60, activity=0.25) for i in range(200)]
LIVES = [
    Life("long", "before-and-after", 100, 0, activity=0.75),
    Life("long", "ended-before", 100, 24.05),
    Life("mid", "began", 10.003, 0),
    Life("mid", "ended", 100, 5),
    Life("restarted", "moved", 6, 0, restart=3),
    Life("again", "recreated", 20, 15, again=(14, 4)),
    Life("unseen", "old-and-first-seen-later", 100, 0, unscraped_until=12),
    Life("unknown", "a100", 8, 0, slices=2, activity=None, gpu="gpu-1"),
    *SHORT,
]


@dataclass(frozen=True)
class Sized:
    """A pod on a full GPU, measured every minute for ``hours`` except in ``gap`` (hours before the present)."""

    pod: str
    hours: float
    memory_gib: float
    sm: float
    gap: tuple[float, float] = (0, 0)

    def samples(self, now: float) -> Iterator[tuple[str, str, float, float]]:
        labels = {"namespace": "size", "claim": self.pod, "class": "gpu-training", "profile": "none", "gpu": "gpu-0"}
        labels |= {"device": f"gpu-0-{self.pod}", "node": "n", "instance": "i", "source": "gpm", "pod": self.pod}
        text = ",".join(f'{name}="{value}"' for name, value in labels.items())
        for minute in range(int(self.hours * 60) + 1):
            at = now - (self.hours * 60 - minute) * 60
            yield ALLOCATED, text, at, 8 * 60.0 * minute
            if not self.gap[1] < (now - at) / HOUR < self.gap[0]:
                # Half of it at first: the highest value counts.
                part = 0.5 if minute < 60 else 1.0
                values = {SLICES: 8, MEMORY: self.memory_gib * GIB * part, SM: self.sm * part}
                yield from ((name, text, at, value) for name, value in values.items())


SIZED = (
    Sized("serve-6b7f8c9d4f-x2x9z", 25.5, 7, 0.1),
    Sized("busy-6b7f8c9d4f-x2x9z", 25.5, 7, 0.95),
    Sized("young-6b7f8c9d4f-x2x9z", 20, 7, 0.1),
    Sized("gappy-6b7f8c9d4f-x2x9z", 25.5, 7, 0.1, gap=(10, 5)),
)


def openmetrics(now: float) -> str:
    """All samples in the order that promtool requires: by metric, series and time."""
    gpus = {f'node="n",gpu="gpu-0",product="{H100}"': 8, f'node="n",gpu="gpu-1",product="{A100}"': 8}
    lines = ["# TYPE tessera_gpu_memory_slices gauge"]
    moments = [now - 26 * HOUR + step * 60 for step in range(26 * 60 + 1)]
    lines += [f"tessera_gpu_memory_slices{{{gpu}}} {slices} {at:.3f}" for gpu, slices in gpus.items() for at in moments]
    lines.append("# TYPE tessera_gpu_activity_unknown gauge")
    labels = 'node="n",gpu="gpu-1",reason="no activity counters on NVIDIA A100"'
    lines += [f"tessera_gpu_activity_unknown{{{labels}}} 1 {at:.3f}" for at in moments]
    series = sorted(sample for life in LIVES for sample in life.samples(now))
    sized = sorted((name, labels, at, value) for each in SIZED for name, labels, at, value in each.samples(now))
    for metric in (SLICES, MEMORY, SM):
        lines.append(f"# TYPE {metric} gauge")
        lines += [f"{name}{{{labels}}} {value} {at:.3f}" for name, labels, at, value in sized if name == metric]
    series = sorted(series + [each for each in sized if each[0] == ALLOCATED])
    for metric in (ALLOCATED, MEASURED, USED):
        lines.append(f"# TYPE {metric.removesuffix('_total')} counter")
        lines += [f"{name}{{{labels}}} {value} {at:.3f}" for name, labels, at, value in series if name == metric]
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def prometheus(prometheus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "samples").write_text(openmetrics(time.time()))
    promtool = [str(prometheus_folder / "promtool"), "tsdb", "create-blocks-from", "openmetrics"]
    subprocess.run([*promtool, str(folder / "samples"), str(folder / "data")], check=True, capture_output=True)
    with running(prometheus_folder, folder) as address:
        yield address


def usage(address: str, *flags: str) -> dict[str, Any]:
    answer = CliRunner().invoke(main, ["usage", "--prometheus", address, "-o", "json", *flags])
    assert answer.exit_code == 0, answer.output
    document: dict[str, Any] = json.loads(answer.stdout)
    return document


def test_slice_hours_of_a_day_are_those_of_the_claims(prometheus: str) -> None:
    document = usage(prometheus)
    groups = {group["key"]["namespace"]: group for group in document["groups"]}
    expected = {name: sum(life.slice_hours for life in LIVES if life.namespace == name) for name in groups}
    expected["unseen"] /= 2  # what was not scraped is nobody's guess
    found = {name: group["allocated"] for name, group in groups.items()}
    expected["size"] = 8 * sum(min(each.hours, 24) for each in SIZED)
    assert found.keys() == {"size", *(life.namespace for life in LIVES)}
    long_lived = {name: value for name, value in expected.items() if name != "short"}
    assert {name: found[name] for name in long_lived} == pytest.approx(long_lived, rel=0.005)
    # Each of the 200 claims of 2 minutes ends up to one scrape after its last sample.
    assert expected["short"] * (1 - SCRAPE_S / 120) <= found["short"] <= expected["short"]
    assert sum(found.values()) == pytest.approx(document["total"]["allocated"], abs=1e-4)
    assert document["capacity"] == pytest.approx(16 * 24, rel=0.005)


def test_used_is_the_part_with_activity_and_unknown_is_neither(prometheus: str) -> None:
    document = usage(prometheus)
    ratios = {group["key"]["namespace"]: group["usedRatio"] for group in document["groups"]}
    assert (ratios.pop("unknown"), ratios.pop("size")) == (None, None)
    assert ratios == pytest.approx({**dict.fromkeys(ratios, 0.5), "long": 0.75, "short": 0.25}, abs=0.02)
    assert document["unknownActivity"][1:] == [
        {"reason": "no activity counters on NVIDIA A100", "amount": pytest.approx(16, rel=0.005)}
    ]


@pytest.mark.parametrize("key", ["namespace", "class", "claim"])
def test_every_key_has_the_same_total(prometheus: str, key: str) -> None:
    document = usage(prometheus, "--by", key, "--since", "24h")
    total = sum(group["allocated"] for group in document["groups"])
    assert total == pytest.approx(usage(prometheus)["total"]["allocated"], rel=0.001)


def test_a_period_longer_than_the_data_is_named(prometheus: str) -> None:
    answer = CliRunner().invoke(main, ["usage", "--prometheus", prometheus, "--since", "30d"])
    assert answer.exit_code == 1
    assert "no usage of the beginning of the period" in answer.stderr


def test_workloads_that_would_have_fitted_into_less_are_named(prometheus: str, tmp_path: Path) -> None:
    with ObjectApi() as api:
        report = GpuReport(gpu_of(H100), 0)
        api.store(f"{PATH}/n", spec={}, status={"inventory": encode_inventory([report])})
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(kubeconfig_of(api.server.url)))
        flags = ["--prometheus", prometheus, "--kubeconfig", str(kubeconfig), "--since", "25h", "-o", "json"]
        answer = CliRunner().invoke(main, ["advise", *flags])
    assert answer.exit_code == 0, answer.output
    found = {each["workload"]: each for each in json.loads(answer.stdout)}
    assert found["serve"]["smallestClass"] == "gpu-inference-1g-10gb"
    assert found["serve"]["savedSliceHours"] == pytest.approx(7 * 25, rel=0.005)
    assert found["serve"]["highestMemoryBytes"] == 7 * GIB
    reasons = {name: each["reason"] for name, each in found.items()}
    assert reasons.pop("young").startswith("only 20 h of data")
    assert reasons.pop("gappy").startswith("no measurement in 20 % of its time")
    assert reasons == {"serve": None, "busy": "it has the smallest class that fits"}
