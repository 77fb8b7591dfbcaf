"""Usage over a period, from the counters of slice-seconds in Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from math import fsum, isfinite
from pathlib import Path
from typing import Annotated

import msgspec

from driver.errors import ApiError, EnvironmentFault, FatalError
from driver.kube.tolerant_json import decode
from tessera.tables_and_drawings import printable
from tessera.usage.http_reader import QUOTED_ERROR_LIMIT, HttpReader
from tessera.usage.report import GpuOfNode, GpuSlices, Reading, UsageRecord, gpu_of

ALLOCATED_METRIC = "tessera_claim_allocated_slice_seconds_total"
MEASURED_METRIC = "tessera_claim_measured_slice_seconds_total"
USED_METRIC = "tessera_claim_used_slice_seconds_total"
GPU_SLICES, GPU_UNKNOWN = "tessera_gpu_memory_slices", "tessera_gpu_activity_unknown"

SERIES = "namespace, claim, class, profile, device, gpu, node"
"""Labels of a device of a claim. Others, such as the plugin's instance, change with its pod; the counters go on."""

LOOKBACK = "5m"
"""A series without a sample in this time before the period did not exist then."""

NEW_CLAIM_SLICE_SECONDS = 2400
"""A counter that is first seen at less (5 minutes of 8 slices) began in the period; otherwise it was not scraped
before, and what it counted until then may lie before the period."""

UNMEASURED_RATIO = 0.02
"""A smaller part of the allocated time without a reading does not count as unknown: the time until the next reading."""

STEPS = 288
"""Moments at which the number of GPUs in the period is read: every 5 minutes of a day."""

HOUR = 3600.0
MAX_WARNINGS = 5


class Sample(msgspec.Struct, frozen=True):
    """An element of an instant vector: labels; time and value."""

    metric: dict[str, str]
    value: tuple[float, str]


class Vector(msgspec.Struct, frozen=True, rename="camel"):
    result_type: str
    result: tuple[Sample, ...]


class Answer(msgspec.Struct, frozen=True, rename="camel"):
    """What /api/v1/query answers."""

    status: Annotated[str, msgspec.Meta(max_length=64)]
    data: Vector | None = None
    error: str = ""
    warnings: tuple[str, ...] = ()


READ_ANSWER = msgspec.json.Decoder(Answer)


class Prometheus:
    """Instant queries to one server, all as of the same moment by its clock."""

    def __init__(self, address: str, token_file: Path | None = None) -> None:
        """Raises UsageError."""
        self._http = HttpReader("--prometheus", address, token_file)
        self.name = self._http.name
        self._at: float | None = None
        self.warnings: dict[str, None] = {}

    def query(self, expression: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Labels and values. Raises EnvironmentFault if there is no answer, FatalError if it is no result."""
        if self._at is None:
            self._at = max((sample.value[0] for sample in self._ask({"query": "vector(1)"})), default=time.time())
        for sample in self._ask({"query": expression, "time": f"{self._at:.3f}"}):
            yield sample.metric, self._number(sample.value[1])

    def _ask(self, query: Mapping[str, str]) -> tuple[Sample, ...]:
        try:
            body = self._http.get("/api/v1/query", query)
        except ApiError as error:
            raise EnvironmentFault(f"--prometheus {self.name}: {error}") from error
        try:
            answer = decode(body, READ_ANSWER)
        except msgspec.MsgspecError as error:
            raise FatalError(f"--prometheus {self.name}: answers something else than Prometheus: {error}") from error
        if answer.status != "success":
            said = printable(answer.error)[:QUOTED_ERROR_LIMIT] or "it does not say why"
            raise FatalError(f"--prometheus {self.name}: refuses a query: {said}")
        if answer.data is None or answer.data.result_type != "vector":
            raise FatalError(f"--prometheus {self.name}: answers something else than a vector")
        for text in answer.warnings[:MAX_WARNINGS]:
            self.warnings.setdefault(f"Prometheus: {printable(text)[:QUOTED_ERROR_LIMIT]}")
        return answer.data.result

    def _number(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not isfinite(value):
            raise FatalError(f"--prometheus {self.name}: a value is no finite number: {printable(text)[:40]}")
        return value


def growth(metric: str, seconds: float) -> str:
    """An expression for what each counter counted in the period, by SERIES.

    Its last value less that of the beginning, which is exact, also for claims that began or ended in the period.
    increase() would leave out what a claim used until its first sample. It is taken for counters that began anew,
    as those of a claim that was created again by the same name and got the same device.
    """
    period = f"{seconds:.0f}s"
    last = f"max by ({SERIES}) (last_over_time({metric}[{period}]))"
    start = f"max by ({SERIES}) (last_over_time({metric}[{LOOKBACK}] offset {period}))"
    first = f"min by ({SERIES}) (min_over_time({metric}[{period}]))"
    old = f"min by ({SERIES}) (min_over_time({ALLOCATED_METRIC}[{period}])) > {NEW_CLAIM_SLICE_SECONDS}"
    anew = f"max by ({SERIES}) (resets({metric}[{period}])) > 0"
    increase = f"max by ({SERIES}) (increase({metric}[{period}]))"
    return f"((({last} unless {anew}) - ({start} or ({first} and {old}) or {last} * 0)) or {increase})"


def read_period(prometheus: Prometheus, seconds: float, labels: Sequence[str]) -> Reading:
    """Usage by ``labels`` of the metrics (namespace, claim, class) and GPU. Raises EnvironmentFault, FatalError."""
    check_labels(prometheus)
    by = ", ".join((*labels, "node", "gpu"))
    period = f"{seconds:.0f}s"
    allocated_at, measured_at, used_at = (
        dict(_by_device(prometheus, f"sum by ({by}) {growth(metric, seconds)}", labels))
        for metric in (ALLOCATED_METRIC, MEASURED_METRIC, USED_METRIC)
    )
    devices = []
    for key, allocated in allocated_at.items():
        measured = min(measured_at.get(key, 0.0), allocated)
        if measured > (1 - UNMEASURED_RATIO) * allocated:
            measured = allocated
        if measured:
            devices.append(_device(key, labels, measured, min(used_at.get(key, 0.0), measured)))
        if measured < allocated:
            devices.append(_device(key, labels, allocated - measured, None))
    gpus = read_gpus(prometheus, seconds)
    unknown = prometheus.query(f"max by (node, gpu, reason) (last_over_time({GPU_UNKNOWN}[{period}]))")
    reasons = {gpu_of(gpu_labels): gpu_labels.get("reason", "") for gpu_labels, _ in unknown}
    if not gpus and not devices:
        raise FatalError(
            f"--prometheus {prometheus.name}: has no {GPU_SLICES} in the period: does it scrape the node plugins, and "
            "do they run with --usage-interval?"
        )
    covered = list(prometheus.query(f"count(last_over_time({GPU_SLICES}[{LOOKBACK}] offset {period}))"))
    late = "Prometheus has no usage of the beginning of the period: the figures are of a shorter time"
    step = max(round(seconds / STEPS), 1)
    total = prometheus.query(f"sum(sum_over_time(max by (node, gpu) ({GPU_SLICES})[{period}:{step}s]))")
    capacity = fsum(value for _, value in total) * step / HOUR
    warnings = [*([] if covered else [late]), *prometheus.warnings]
    return Reading(devices, gpus, reasons, capacity, warnings, seconds)


def read_gpus(prometheus: Prometheus, seconds: float) -> dict[GpuOfNode, GpuSlices]:
    """The GPUs of the period. Raises EnvironmentFault, FatalError."""
    sizes = prometheus.query(f"max by (node, gpu, product) (last_over_time({GPU_SLICES}[{seconds:.0f}s]))")
    return {gpu_of(labels): GpuSlices(labels.get("product", ""), value) for labels, value in sizes if value > 0}


def check_labels(prometheus: Prometheus) -> None:
    """Raises FatalError if the labels of the metrics were overwritten by those of the scraped pod."""
    if list(prometheus.query(f'count({{__name__=~"{ALLOCATED_METRIC}|{GPU_SLICES}", exported_namespace!=""}})')):
        raise FatalError(
            f"--prometheus {prometheus.name}: has the claims' namespaces as exported_namespace: scrape the node "
            "plugins with honor_labels: true (honorLabels of a PodMonitor), docs/usage.md"
        )


Key = tuple[str, ...]
"""Values of the labels that were asked for, then node and GPU."""


def _by_device(prometheus: Prometheus, expression: str, labels: Sequence[str]) -> Iterator[tuple[Key, float]]:
    """Slice-hours by labels, node and GPU."""
    for found, value in prometheus.query(expression):
        yield tuple(found.get(label, "") for label in (*labels, "node", "gpu")), max(value, 0.0) / HOUR


def _device(key: Key, labels: Sequence[str], allocated: float, used: float | None) -> UsageRecord:
    *values, node, gpu = key
    named = dict(zip(labels, values, strict=True))
    return UsageRecord(
        GpuOfNode(node, gpu),
        allocated,
        used,
        named.get("namespace", ""),
        named.get("claim", ""),
        named.get("class", ""),
    )
