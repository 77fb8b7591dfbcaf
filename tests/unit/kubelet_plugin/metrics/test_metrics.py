"""What the node plugin measures, and that docs/metrics.md tells of exactly that."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from driver.errors import ApiError, ClaimError, HardwareError, RecoverableError, StateError
from driver.kube.types import Claim, ReportedDevice
from driver.model.device import Device
from driver.model.plan import NodeConditionType
from kubelet_plugin.changes import ChangeNotifier
from kubelet_plugin.checkpoint.gpu_and_claim_locks import KeyedLocks, LockTimeoutError
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.health.device_health import GPU_UNHEALTHY
from kubelet_plugin.health.node_problems import NodeConditions
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.metrics.metrics import Metrics, NodeGauges
from kubelet_plugin.metrics.metrics_interface import failure_kind
from kubelet_plugin.status.events import EventReason, PluginEvents
from kubelet_plugin.step_names import NodeStep
from tests.support.api_server import ObjectApi
from tests.support.claims import DRIVER, ClaimApi
from tests.support.metrics import exported_name
from tests.support.node import NodeUnderTest, start_node

DOCS = Path(__file__).parents[4] / "docs" / "metrics.md"
ROW = re.compile(r"\| `(\w+)` \| (\w+) \|([^|]*)\|")
SMALL, OTHER, FULL = "gpu-0-mig-1g10gb-0", "gpu-0-mig-1g10gb-1", "gpu-1"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"


Sources = tuple[ClaimStores, Callable[[], set[str]], Any]
"""What the gauges are computed from."""


class Measured:
    """A node whose every part is measured, and what a scrape would say of it."""

    def __init__(self, root: Path) -> None:
        self.metrics = Metrics()
        self.api = ClaimApi()
        self.node: NodeUnderTest = start_node(root, self.api, took=self.metrics.observe_step)
        self.published: set[str] = set()
        self.ill: set[str] = set()
        self.node_conditions = NodeConditions(ChangeNotifier(), PluginEvents(lambda *_: None, "n"))
        self.metrics.registry.register(NodeGauges(*self.sources))

    @property
    def sources(self) -> Sources:
        return self.node.node, lambda: self.published, self

    def faults_by_kind(self) -> Mapping[str, int]:
        return {"xid": 2, "new-kind": 1}

    def prepare(self, claim: ClaimReference) -> None:
        with self.metrics.measure("prepare", claim):
            self.node.preparer.prepare(claim)

    def unprepare(self, claim: ClaimReference) -> None:
        with self.metrics.measure("unprepare", claim):
            self.node.preparer.unprepare(claim)

    def unhealthy_reason(self, device: Device) -> str | None:
        return "is ill" if device.name in self.ill else None

    def value(self, name: str, **labels: str) -> float:
        return value(self.metrics.registry, name, **labels)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, labels)
    assert found is not None, f"{name}{labels} is not exported"
    return found


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    return Measured(tmp_path)


def documented(process: str = "node") -> dict[str, tuple[str, frozenset[str]]]:
    """(type, labels) by name, as in the table of the docs for that process, without the usage of claims."""
    node, _, rest = DOCS.read_text().partition("\n## Usage of claims")
    controller = rest.partition("\nThe controller exports")[2]
    rows = ROW.findall({"node": node, "controller": controller}[process])
    return {name: (kind, frozenset(re.findall(r"\w+", labels))) for name, kind, labels in rows}


def test_the_docs_table_is_what_is_exported(measured: Measured) -> None:
    measured.prepare(measured.api.allocate("one", SMALL))
    with ObjectApi() as api, pytest.raises(ApiError):
        api.server.client(observe=measured.metrics.observe_request).get(f"{CLAIMS}/none")
    families = list(measured.metrics.registry.collect())
    labels = {exported_name(family): {key for s in family.samples for key in s.labels} - {"le"} for family in families}
    exported = {exported_name(family): (family.type, frozenset(labels[exported_name(family)])) for family in families}
    assert documented() == exported


def test_every_metric_explains_itself_and_is_named_as_prometheus_wants(measured: Measured) -> None:
    for family in measured.metrics.registry.collect():
        assert family.documentation.endswith("."), family.name
        assert re.fullmatch(r"(tessera|process)_[a-z_]+", family.name)
        assert family.type != "histogram" or family.name.endswith("_seconds")


def test_a_prepare_and_an_unprepare_are_timed_as_a_whole_and_step_by_step(measured: Measured) -> None:
    claim = measured.api.allocate("one", SMALL)
    measured.prepare(claim)
    measured.unprepare(claim)
    assert measured.value("tessera_prepare_duration_seconds_count", result="success") == 1
    assert measured.value("tessera_unprepare_duration_seconds_count", result="success") == 1
    for step in (
        NodeStep.READ_CLAIM,
        NodeStep.CREATE_GPU_INSTANCE,
        NodeStep.WRITE_PREPARED,
        NodeStep.DESTROY_GPU_INSTANCE,
    ):
        assert measured.value("tessera_step_duration_seconds_count", step=step.value) == 1
    whole = measured.value("tessera_prepare_duration_seconds_sum", result="success")
    assert 0 < measured.value("tessera_step_duration_seconds_sum", step="create-gpu-instance") < whole


def test_a_claim_becomes_ready_once(measured: Measured) -> None:
    claim = measured.api.allocate("one", SMALL)
    read = measured.api.read("default", "one")
    metadata = msgspec.structs.replace(read.metadata, creation_timestamp="2026-01-01T00:00:00Z")
    created = msgspec.structs.replace(read, metadata=metadata)
    for _ in range(2):
        measured.metrics.claim_read(created)
        measured.prepare(claim)
    reported = msgspec.structs.replace(created.status, devices=(ReportedDevice(DRIVER, "pool", SMALL),))
    other = msgspec.structs.replace(metadata, uid="uid-reported-before-a-restart")
    measured.metrics.claim_read(Claim(other, created.spec, reported))
    with measured.metrics.measure("prepare", ClaimReference("default", "one", other.uid)):
        pass
    assert measured.value("tessera_claim_ready_duration_seconds_count") == 1
    assert measured.value("tessera_claim_ready_duration_seconds_sum") > 0


def test_a_failed_prepare_counts_as_an_error_and_as_a_fault_of_its_kind(measured: Measured) -> None:
    claim = measured.api.allocate("one", SMALL)
    measured.api.away = True
    with pytest.raises(ApiError):
        measured.prepare(claim)
    assert measured.value("tessera_prepare_duration_seconds_count", result="error") == 1
    assert measured.value("tessera_prepare_duration_seconds_count", result="success") == 0
    assert measured.value("tessera_faults_total", kind="api") == 1
    assert measured.value("tessera_step_duration_seconds_count", step="read-claim") == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ClaimError(""), "claim"),
        (HardwareError(""), "hardware"),
        (ApiError(""), "api"),
        (StateError(""), "state"),
        (LockTimeoutError(""), "lock"),
        (KeyError(""), "defect"),
        (RecoverableError(""), "other"),
    ],
)
def test_faults_are_told_apart_by_what_failed(error: Exception, kind: str) -> None:
    assert failure_kind(error) == kind


def test_gauges_say_what_is_held_and_what_is_still_offered(measured: Measured) -> None:
    measured.prepare(measured.api.allocate("one", SMALL))
    measured.prepare(measured.api.allocate("two", FULL))
    measured.published = {SMALL, OTHER, FULL}
    assert measured.value("tessera_partitions") == 1
    assert measured.value("tessera_prepared_claims") == 2
    assert measured.value("tessera_held_devices", type="mig") == 1
    assert measured.value("tessera_held_devices", type="gpu") == 1
    assert measured.value("tessera_offers", type="mig") == 1
    assert measured.value("tessera_offers", type="gpu") == 0
    assert measured.value("tessera_gpus") == 8
    assert measured.value("tessera_unhealthy_gpus") == 0
    assert measured.value("tessera_oldest_unfinished_claim_age_seconds") == 0


def test_a_gpu_is_unhealthy_if_any_of_its_devices_is_and_faults_are_counted_by_kind(measured: Measured) -> None:
    measured.ill = {SMALL, OTHER, FULL}
    assert measured.value("tessera_unhealthy_gpus") == 2
    assert measured.value("tessera_gpu_faults", kind="xid") == 2
    assert measured.value("tessera_gpu_faults", kind="new-kind") == 1
    assert measured.value("tessera_gpu_faults", kind="stuck") == 0


def test_a_condition_of_the_node_is_a_gauge_while_it_lasts(measured: Measured) -> None:
    assert measured.value("tessera_node_conditions", type="Unregistered") == 0
    measured.node_conditions.set(NodeConditionType.UNREGISTERED, "nobody came")
    assert measured.value("tessera_node_conditions", type="Unregistered") == 1
    measured.node_conditions.set(NodeConditionType.UNREGISTERED, None)
    assert measured.value("tessera_node_conditions", type="Unregistered") == 0


def record(**fields: Any) -> ClaimRecord:
    return ClaimRecord(version=1, namespace="default", name="one", uid="uid-1", devices=(), **fields)


def test_a_claim_that_is_still_to_be_released_has_an_age_and_is_not_prepared(measured: Measured) -> None:
    checkpoint = measured.node.node.checkpoint
    checkpoint.put(record(phase="prepared", releasing=True))
    written = checkpoint.path("uid-1").stat().st_mtime
    registry = CollectorRegistry()
    registry.register(NodeGauges(*measured.sources, lambda: written + 90))
    assert value(registry, "tessera_releasing_claims") == 1
    assert value(registry, "tessera_prepared_claims") == 0
    assert value(registry, "tessera_oldest_unfinished_claim_age_seconds") == pytest.approx(90)


def test_a_record_that_goes_during_a_scrape_is_no_defect(measured: Measured) -> None:
    measured.node.node.checkpoint.put(record(phase="preparing"))
    measured.node.node.checkpoint.path("uid-1").unlink()
    assert measured.value("tessera_oldest_unfinished_claim_age_seconds") == 0


def test_waiting_for_a_lock_is_measured(measured: Measured) -> None:
    locks = KeyedLocks(waited=measured.metrics.lock_waited)
    asks = threading.Event()

    def wait() -> None:
        asks.set()
        with locks.hold(["gpu"], "second"):
            pass

    second = threading.Thread(target=wait)
    with locks.hold(["gpu"], "first"):
        assert measured.value("tessera_lock_wait_seconds_count") == 1
        second.start()
        assert asks.wait(60)
    second.join(60)
    assert measured.value("tessera_lock_wait_seconds_count") == 2


def test_requests_are_counted_by_verb_resource_and_answer(measured: Measured) -> None:
    with ObjectApi() as api:
        api.store(f"{CLAIMS}/one")
        client = api.server.client(observe=measured.metrics.observe_request)
        client.get(f"{CLAIMS}/one")
        client.get(f"{CLAIMS}/one")
        with pytest.raises(ApiError):
            client.get(f"{CLAIMS}/two")
        client.apply(f"{CLAIMS}/one/status", {"metadata": {"name": "one"}}, "test")
        cut = [lambda exchange: exchange.cut()] * 2  # a deletion is repeated once, on a new connection
        api.once("DELETE", *cut)
        with pytest.raises(ApiError):
            client.delete(f"{CLAIMS}/one")
        with client.stream(CLAIMS, {"watch": "true", "resourceVersion": "0"}, 5) as lines:
            next(iter(lines))
    count = "tessera_api_requests_total"
    assert measured.value(count, verb="get", resource="resourceclaims", code="200") == 2
    assert measured.value(count, verb="get", resource="resourceclaims", code="404") == 1
    assert measured.value(count, verb="patch", resource="resourceclaims/status", code="200") == 1
    assert measured.value(count, verb="delete", resource="resourceclaims", code="error") == 1
    assert measured.value(count, verb="watch", resource="resourceclaims", code="200") == 1
    assert measured.value("tessera_api_request_duration_seconds_count", verb="get", resource="resourceclaims") == 3


def test_no_label_tells_whose_claim_it_was_or_which_gpu(measured: Measured) -> None:
    claim = measured.api.allocate("secret-project", SMALL)
    measured.prepare(claim)
    measured.published = {SMALL}
    text = generate_latest(measured.metrics.registry).decode()
    uuids = {gpu.uuid for gpu in measured.node.node.inventory.gpus}
    for name in ("secret-project", claim.uid, SMALL, "default", *uuids):
        assert name not in text


def test_how_many_series_there_are_does_not_depend_on_how_many_claims_there_were(measured: Measured) -> None:
    def series() -> int:
        return sum(len(family.samples) for family in measured.metrics.registry.collect())

    measured.prepare(measured.api.allocate("one", SMALL))
    before = series()
    for start in range(1, 5):
        measured.prepare(measured.api.allocate(f"more-{start}", f"gpu-0-mig-1g10gb-{start}"))
    assert series() == before


def test_what_others_find_is_counted_by_kind(measured: Measured) -> None:
    measured.metrics.count_orphan("cdi-spec")
    measured.metrics.slices_written(3, 0.2)
    assert measured.value("tessera_orphans_total", kind="cdi-spec") == 1
    assert measured.value("tessera_orphans_total", kind="claim") == 0
    assert measured.value("tessera_slice_writes_total") == 3
    assert measured.value("tessera_publish_duration_seconds_sum") == pytest.approx(0.2)


def test_an_unknown_claim_is_unprepared_with_success(measured: Measured) -> None:
    measured.unprepare(ClaimReference("default", "never", "uid-never"))
    assert measured.value("tessera_unprepare_duration_seconds_count", result="success") == 1


def test_repairs_and_faults_that_people_are_told_of_are_counted_once_however_many_pods_hear_of_them(
    measured: Measured,
) -> None:
    heard: list[tuple[object, ...]] = []
    teller = PluginEvents(lambda *told: heard.append(told), "node-a", measured.metrics.count_event)
    claim = measured.api.allocate("one", SMALL)
    teller.remember_pods(measured.api.read("default", "one"))
    teller.claim(claim, EventReason.REPAIRED, "was cut again")
    teller.claim(claim, EventReason.REPAIR_FAILED, "can't be cut again")
    teller.claim(claim, EventReason.PREPARE_FAILED, "which the work itself counts")
    teller.node(GPU_UNHEALTHY, "gpu-0")
    assert len(heard) == 7
    assert measured.value("tessera_repairs_total", kind="device") == 1
    assert measured.value("tessera_repairs_total", kind="release") == 0
    assert measured.value("tessera_faults_total", kind="device-lost") == 1
    assert measured.value("tessera_faults_total", kind="gpu") == 1
