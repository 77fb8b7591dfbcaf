"""Usage at present: the /metrics pages of all node plugins, read in parallel through the API server or directly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import fsum, isfinite
from urllib.parse import quote

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from driver.errors import FORBIDDEN, ApiError, EnvironmentFault, FatalError
from driver.http_client import MAX_CONNECTIONS
from driver.kube.client import KubeClient
from driver.kube.get_and_list import read_all, read_pods
from driver.kube.slice_types import ResourceSlice
from driver.slices.publisher import SLICES
from tessera.status.snapshot import NODE_PLUGIN
from tessera.tables_and_drawings import counted, printable
from tessera.usage.http_reader import HttpReader
from tessera.usage.prometheus import GPU_SLICES, GPU_UNKNOWN
from tessera.usage.report import GpuOfNode, GpuSlices, Reading, UsageRecord, gpu_of

METRICS_PORT = "metrics"
"""Name of the port in the chart's pods."""

MAX_NAMED_NODES = 10
"""Nodes without an answer that are listed with their reason each."""

CLAIM_PREFIX = "tessera_claim_"
NO_USAGE = "serves no usage metrics; start its plugin with --usage-interval"


SERIES_LABELS = ("node", "gpu", "namespace", "claim", "device", "class", "source")
"""Labels of a device of a claim."""
OF_SHARE = "shared"
"""Value of ``source`` for a share of a GPU."""

SHARED_DEVICE = "-shared-"
"""In the label ``device`` of a part of a GPU that is shared by memory."""

Series = tuple[str, ...]


@dataclass
class UsagePage:
    """What pages say: devices of claims, GPUs, reasons of unknown activity."""

    devices: dict[Series, UsageRecord] = field(default_factory=dict)
    gpus: dict[GpuOfNode, GpuSlices] = field(default_factory=dict)
    reasons: dict[GpuOfNode, str] = field(default_factory=dict)

    def add(self, other: UsagePage) -> None:
        self.devices |= other.devices
        self.gpus |= other.gpus
        self.reasons |= other.reasons


def parse_page(text: str) -> UsagePage | None:
    """Parse a page; None if its process measures no usage. Raises ValueError if it is no page of metrics."""
    values: dict[Series, dict[str, float]] = defaultdict(dict)
    page, metrics = UsagePage(), 0
    for name, labels, value in _samples(text):
        metrics += 1
        gpu = gpu_of(labels)
        if name == GPU_SLICES and value > 0:
            page.gpus[gpu] = GpuSlices(labels.get("product", ""), value)
        elif name == GPU_UNKNOWN:
            page.reasons[gpu] = labels.get("reason", "")
        elif name.startswith(CLAIM_PREFIX) and isfinite(value):
            series = tuple(labels.get(label, "") for label in SERIES_LABELS)
            values[series][name.removeprefix(CLAIM_PREFIX)] = value
    if not metrics:
        raise ValueError("has no metrics")
    if not page.gpus and not values:
        return None
    page.devices = {series: _device(series, found, page.gpus) for series, found in values.items() if "slices" in found}
    return page


def _samples(text: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    # The library has no error type of its own: hostile text ends in errors of any kind.
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, float(sample.value)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"is no page of Prometheus metrics: {str(error)[:100]}") from error


def _device(series: Series, values: Mapping[str, float], gpus: Mapping[GpuOfNode, GpuSlices]) -> UsageRecord:
    node, gpu, namespace, claim, device, device_class, source = series
    slices = values["slices"]
    activity = [values[name] for name in ("sm_active_ratio", "dram_active_ratio") if name in values]
    used, total = values.get("memory_used_bytes"), values.get("memory_total_bytes")
    if source == OF_SHARE and total is not None and SHARED_DEVICE not in device:  # of the whole GPU
        whole = gpus.get(GpuOfNode(node, gpu))
        total = None if whole is None else total * slices / whole.slices
    return UsageRecord(
        GpuOfNode(node, gpu),
        slices,
        slices * min(max(activity), 1.0) if activity else None,
        namespace,
        claim,
        device_class,
        None if used is None or total is None else (used, total),
        values.get("idle_seconds"),
    )


def read_cluster(client: KubeClient, driver: str, namespace: str) -> Reading:
    """Read the pages of all node plugins in the pods of ``namespace``.

    Nodes that publish devices and have no such pod are named in a warning, and those that do not answer. Raises
    ApiError if the API server does not answer, EnvironmentFault if there is no plugin, FatalError without the rights.
    """
    try:
        slices = read_all(client, SLICES, ResourceSlice, {"fieldSelector": f"spec.driver={driver}"})
        publishing = {item.spec.node_name for item in slices} - {""}
    except msgspec.MsgspecError as error:
        raise FatalError(f"the API server's list of ResourceSlices can't be read: {error}") from error
    sources: dict[str, list[Callable[[], str]]] = {name: [] for name in publishing}
    for pod in read_pods(client, namespace):
        if pod.spec.service_account_name != NODE_PLUGIN or not pod.spec.node_name or pod.has_ended:
            continue
        of_node, port = sources.setdefault(pod.spec.node_name, []), pod.port(METRICS_PORT)
        if port is not None:
            pods, name = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods", quote(pod.metadata.name, safe="")
            of_node.append(partial(_text, client, f"{pods}/http:{name}:{port}/proxy/metrics"))
    if not sources:
        raise EnvironmentFault(f"no pod of a node plugin in namespace {namespace}, and no node publishes devices of "
                               f"{driver}: check --namespace and --driver-name, or `tessera status`")  # fmt: skip
    return read_pages(sources)


def _text(client: KubeClient | HttpReader, path: str) -> str:
    return client.get(path).decode("utf-8", "replace")


def read_urls(urls: Sequence[str]) -> Reading:
    """Read pages directly. Raises UsageError if an address is not one."""
    readers = [HttpReader("--node-metrics", url) for url in urls]
    return read_pages({reader.name: [partial(_text, reader, "")] for reader in readers})


def read_pages(sources: Mapping[str, Sequence[Callable[[], str]]]) -> Reading:
    """Read the pages of each node: of two plugins, as there are during an update, one answer is sufficient."""
    nodes = sorted(sources)
    with ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="page") as pool:
        outcomes = list(pool.map(lambda node: _read_node(sources[node]), nodes))
    total, failures = UsagePage(), {}
    for node, outcome in zip(nodes, outcomes, strict=True):
        if isinstance(outcome, str):
            failures[node] = outcome
            continue
        for page in outcome:
            total.add(page)
    if failures and len(failures) == len(nodes):
        raise EnvironmentFault(f"no node could be read: {'; '.join(_warnings(failures))}")
    capacity = fsum(gpu.slices for gpu in total.gpus.values())
    return Reading(list(total.devices.values()), total.gpus, total.reasons, capacity, _warnings(failures))


def _read_node(sources: Sequence[Callable[[], str]]) -> list[UsagePage] | str:
    """The pages of a node's plugins, or why there is none."""
    pages, reason = [], "publishes devices, but no pod of a node plugin with a metrics port runs there"
    for source in sources:
        try:
            page = parse_page(source())
        except ApiError as error:
            if error.status == FORBIDDEN and "pods/proxy" in str(error):
                raise FatalError(f"{error}; the ClusterRole is in docs/usage.md") from error
            reason = f"can't be read: {printable(str(error))}"
        except ValueError as error:
            reason = f"its page {printable(str(error))}"
        else:
            if page is not None:
                pages.append(page)
            else:
                reason = NO_USAGE
    return pages or reason


def _warnings(failures: Mapping[str, str]) -> list[str]:
    """A line for each of the first nodes, and one that names the others."""
    named = [f"{printable(node)} {reason}" for node, reason in list(failures.items())[:MAX_NAMED_NODES]]
    if rest := list(failures)[MAX_NAMED_NODES:]:
        named.append(f"{counted(len(rest), 'more node')} without usage: {printable(', '.join(rest))}")
    return named
