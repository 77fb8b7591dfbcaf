"""What hardware reports, what of it keeps new pods off which devices, and what ends it."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import msgspec
import pytest

from driver.clock import written_time
from driver.hardware.host import TimeoutRunner
from driver.model.gpu_events_and_conditions import ConditionType, EventKind, GpuEvent
from driver.model.gpu_settings import GpuSharing, parse_shared
from driver.model.plan import ClearedFaults, PlanSpec
from driver.model.reported_gpus import FaultKind
from driver.model.xid import XIDS, Meaning, is_fatal
from driver.simulator import nvml_base
from driver.simulator.description import NodeDescription, load_description
from driver.simulator.node import SimulatedNode
from driver.slices.build import CORDONED
from kubelet_plugin.inventory.scan import NvmlEventListener
from tests.support.health import HealthUnderTest
from tests.support.node import NodeUnderTest, choosing, start_node
from tests.support.published import build_slices
from tests.support.running import eventually, in_thread

SMALL, SIBLING = "gpu-0-mig-1g10gb-6", "gpu-0-mig-1g10gb-5"

FATAL = sorted(number for number, xid in XIDS.items() if xid.meaning is Meaning.FATAL)
HARMLESS = sorted(number for number, xid in XIDS.items() if xid.meaning in (Meaning.APPLICATION, Meaning.NOTE))


def fails_at(event: GpuEvent) -> None:
    raise KeyError(event)


@pytest.fixture
def ill(node: NodeUnderTest) -> HealthUnderTest:
    return HealthUnderTest(node)


def cleared(ill: HealthUnderTest, gpu: int = 0) -> PlanSpec:
    """What ``tessera uncordon`` writes when it sees the slices as they are now."""
    uuid = ill.node.node.inventory.gpus[gpu].uuid
    faults = [ClearedFaults.parse(text) for text in ill.health.describe_faults()]
    return PlanSpec(cleared=tuple(str(each) for each in faults if each is not None and each.gpu == uuid)[-1:])


def partition_uuid(ill: HealthUnderTest, gpu: int = 0) -> str:
    [partition] = ill.node.partitions(gpu)
    assert partition.uuid is not None
    return partition.uuid


@pytest.mark.parametrize("number", FATAL)
def test_a_fatal_xid_keeps_new_pods_off_its_gpu_alone(ill: HealthUnderTest, number: int) -> None:
    ill.xid(2, number)
    assert ill.unhealthy() == {"gpu-2"}
    assert set(ill.taints().values()) == {f"xid-{number}"}
    assert f"XID {number}" in str(ill.health.unhealthy_reason(ill.device("gpu-2")))
    assert ill.health.unhealthy_reason(ill.device("gpu-1")) is None


@pytest.mark.parametrize("number", HARMLESS)
def test_what_a_program_did_or_what_is_only_a_note_keeps_nobody_off(ill: HealthUnderTest, number: int) -> None:
    ill.xid(0, number)
    assert ill.taints() == {}
    assert ill.health.describe_faults() == ()
    assert ill.told == []


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68, 109])
def test_the_application_faults_that_everybody_knows_are_in_the_table(number: int) -> None:
    assert not is_fatal(number, recovery_supported=True)
    assert not is_fatal(number, recovery_supported=False)


def test_a_benign_xid_does_not_overwrite_a_fatal_one(ill: HealthUnderTest) -> None:
    ill.xid(0, 48)
    for number in HARMLESS:
        ill.xid(0, number)
    assert ill.taints()["gpu-0"] == "xid-48"


def test_a_gpu_wide_xid_counts_on_a_gpu_that_is_cut(ill: HealthUnderTest) -> None:
    ill.node.preparer.prepare(ill.node.api.allocate("infer", SMALL))
    ill.xid(0, 48)
    assert {SMALL, SIBLING} <= ill.taints().keys()


def test_an_xid_of_a_partition_concerns_its_memory_alone(ill: HealthUnderTest) -> None:
    claim = ill.node.api.allocate("infer", SMALL)
    ill.node.preparer.prepare(claim)
    ill.xid(0, 48, partition_uuid(ill))
    assert ill.taints() == {SMALL: "xid-48"}
    assert ill.health.unhealthy_reason(ill.device(SIBLING)) is None
    ill.node.preparer.unprepare(claim)
    # Whatever else lies on the same memory is no better.
    assert {"gpu-0", "gpu-0-mig-1g20gb-6", SMALL} <= ill.taints().keys()
    assert SIBLING not in ill.taints()


def test_an_xid_of_a_partition_that_nobody_knows_concerns_the_whole_gpu(ill: HealthUnderTest) -> None:
    uuid = ill.node.node.inventory.gpus[0].uuid
    ill.health.handle_event(GpuEvent(EventKind.XID, uuid, 48, gpu_instance_id=7))
    assert "gpu-0" in ill.taints()


def test_an_unknown_xid_counts_only_where_the_driver_does_not_judge_itself(tmp_path: Path) -> None:
    modern = HealthUnderTest(start_node(tmp_path / "modern"))
    modern.xid(0, 999)
    assert modern.taints() == {}
    older = HealthUnderTest(start_node(tmp_path / "older", gpus=str(older_driver(tmp_path))))
    older.xid(0, 999)
    assert older.unhealthy() == {"gpu-0"}


def older_driver(folder: Path) -> Path:
    """A DGX H100 whose driver does not tell what a GPU needs."""
    known: NodeDescription = load_description("dgx-h100")
    older = known.replaced(name="older", driver_version="550.54.15")
    file = folder / "older.yaml"
    file.write_bytes(msgspec.json.encode(older))
    return file


class TestSurviving:
    """A restart of the plugin forgets nothing; what ends a fault ends it also while the plugin is away."""

    def test_a_fault_survives_a_restart_and_is_not_told_twice(self, ill: HealthUnderTest) -> None:
        ill.xid(3, 48)
        before = ill.taints()
        again = ill.restart()
        assert again.taints() == before
        assert again.told == []
        assert again.health.describe_faults() == ill.health.describe_faults()

    def test_a_fault_on_a_partition_survives_a_restart(self, ill: HealthUnderTest) -> None:
        ill.node.preparer.prepare(ill.node.api.allocate("infer", SMALL))
        ill.xid(0, 48, partition_uuid(ill))
        assert ill.restart().taints() == {SMALL: "xid-48"}

    def test_a_cordon_survives_a_restart_without_the_api_server(self, ill: HealthUnderTest) -> None:
        ill.health.apply_plan(PlanSpec(cordoned=(f"{ill.node.node.inventory.gpus[1].uuid} fan",)))
        assert ill.restart().health.faults_by_kind()["cordoned"] == 1

    def test_a_damaged_file_is_set_aside_and_says_so(
        self, ill: HealthUnderTest, caplog: pytest.LogCaptureFixture
    ) -> None:
        ill.xid(3, 48)
        file = ill.node.root / "state" / "health.json"
        for content in (b'{"version": 1, "rec', b'{"version": 2, "record": {"bootId": "x"}}', b""):
            file.write_bytes(content)
            again = ill.restart()
            assert "starting without it" in caplog.text
            assert content in [aside.read_bytes() for aside in file.parent.glob("health.json.damaged-*")]
            # NVML itself still says what the GPU needs.
            assert again.unhealthy() == {"gpu-3"}
            caplog.clear()

    def test_a_disk_that_is_full_forgets_nothing_before_the_restart(
        self, ill: HealthUnderTest, caplog: pytest.LogCaptureFixture
    ) -> None:
        (ill.node.root / "state" / ".health.json.tmp").mkdir()
        ill.xid(3, 48)
        assert ill.unhealthy() == {"gpu-3"}
        assert "a restart would lose it" in caplog.text

    def test_a_reboot_ends_every_fault_also_where_the_driver_reports_nothing(self, tmp_path: Path) -> None:
        ill = HealthUnderTest(start_node(tmp_path / "node", gpus=str(older_driver(tmp_path))))
        ill.xid(3, 48)
        ill.node.simulated.reboot()
        ill.look()
        assert ill.taints() == {}

    def test_a_reset_while_the_plugin_was_away_ends_the_faults(self, ill: HealthUnderTest) -> None:
        ill.xid(3, 48)
        ill.xid(4, 48)
        ill.node.simulated.reset_gpu(3)
        assert ill.restart().unhealthy() == {"gpu-4"}


class TestRecovering:
    """What ends a fault, and what does not."""

    def test_a_reset_ends_it(self, ill: HealthUnderTest) -> None:
        ill.xid(3, 95)
        ill.node.simulated.reset_gpu(3)
        ill.look()
        assert ill.taints() == {}
        assert [reason for reason, _ in ill.told] == ["GpuUnhealthy", "GpuUnhealthy", "GpuHealthy"]
        assert "gpu-3" in ill.told[-1][1]

    def test_each_cause_on_each_gpu_has_an_event_of_its_own_that_names_the_xid(self, ill: HealthUnderTest) -> None:
        for gpu, xid in ((3, 95), (4, 95), (5, 48), (5, 95)):
            ill.xid(gpu, xid)
        xids = [message for _, message in ill.told if "XID" in message]
        expected = (("gpu-3", 95), ("gpu-4", 95), ("gpu-5", 48), ("gpu-5", 95))
        for message, (name, number) in zip(xids, expected, strict=True):
            assert message.startswith(name)
            assert f"XID {number}" in message
        assert len(set(ill.about)) == len(ill.told)

    def test_what_nvml_says_a_gpu_needs_counts_without_any_xid(self, ill: HealthUnderTest) -> None:
        ill.node.simulated.faults.recovery(5, 2)
        ill.look()
        assert set(ill.taints().values()) == {"needs-reboot"}
        assert ill.unhealthy() == {"gpu-5"}
        ill.node.simulated.faults.recovery(5, 0)
        ill.look()
        assert ill.taints() == {}

    def test_nothing_ends_while_nvml_never_named_a_need(self, tmp_path: Path) -> None:
        ill = HealthUnderTest(start_node(tmp_path / "node", gpus=str(older_driver(tmp_path))))
        ill.xid(0, 48)
        ill.node.simulated.reset_gpu(0)
        ill.look()
        assert ill.unhealthy() == {"gpu-0"}  # nobody can tell that it was reset
        ill.health.apply_plan(cleared(ill))
        assert ill.taints() == {}

    def test_a_gpu_that_fell_off_the_bus_has_recovered_when_it_answers(self, ill: HealthUnderTest) -> None:
        ill.node.simulated.faults.lose_gpu(3)
        ill.hear()
        assert ill.unhealthy() == {"gpu-3"}
        ill.look()
        assert "GPU_IS_LOST" in str(ill.health.unhealthy_reason(ill.device("gpu-3")))
        again = ill.restart()
        ill.node.simulated.faults.return_gpu(3)
        again.look()
        assert again.taints() == {}
        assert again.health.faults_by_kind() == {"cordoned": 0}

    def test_one_that_never_stopped_answering_has_not(self, ill: HealthUnderTest) -> None:
        ill.xid(3, 79)
        ill.look()
        assert ill.unhealthy() == {"gpu-3"}

    def test_an_operator_ends_what_is_shown(self, ill: HealthUnderTest) -> None:
        ill.xid(0, 48)
        ill.xid(1, 48)
        ill.health.apply_plan(cleared(ill))
        assert ill.unhealthy() == {"gpu-1"}
        ill.look()  # NVML says still what it said before: that is dealt with
        assert ill.unhealthy() == {"gpu-1"}
        assert ill.restart().unhealthy() == {"gpu-1"}

    def test_what_happens_after_an_operator_looked_stays(self, ill: HealthUnderTest) -> None:
        ill.xid(0, 48)
        seen = cleared(ill)
        ill.xid(0, 119)  # in the same second
        ill.health.apply_plan(seen)
        assert ill.taints()["gpu-0"] == "xid-119"

    def test_the_same_xid_again_after_it_was_dealt_with_is_a_new_fault(self, ill: HealthUnderTest) -> None:
        ill.xid(0, 48)
        seen = cleared(ill)
        ill.health.apply_plan(seen)
        ill.xid(0, 48)
        ill.health.apply_plan(seen)  # the plan is heard again, as after a lost connection
        assert ill.unhealthy() == {"gpu-0"}

    def test_a_clock_that_goes_back_gives_no_fault_away(self, ill: HealthUnderTest) -> None:
        ill.xid(0, 48)
        seen = cleared(ill)
        ill.health.apply_plan(seen)
        ill.now -= 3600
        again = ill.restart()
        again.xid(0, 119)
        again.health.apply_plan(seen)
        assert again.unhealthy() == {"gpu-0"}

    def test_an_xid_by_the_hundred_writes_once(self, ill: HealthUnderTest) -> None:
        ill.xid(0, 48)
        file = ill.node.root / "state" / "health.json"
        before, changes, written = file.stat().st_mtime_ns, ill.changes, file.read_bytes()
        for _ in range(10):
            ill.xid(0, 48)
        assert (file.stat().st_mtime_ns, ill.changes) == (before, changes)
        ill.now += 120
        ill.xid(0, 48)
        assert file.read_bytes() != written  # two writes within some milliseconds may have the same time


class TestNotes:
    """What those who prepare claims report."""

    def test_a_device_in_trouble_is_tainted_alone_until_it_is_out_of_it(self, ill: HealthUnderTest) -> None:
        ill.node.preparer.prepare(ill.node.api.allocate("infer", SMALL))
        ill.health.set_condition(SMALL, ConditionType.STUCK, "a process still uses it")
        assert ill.taints() == {SMALL: "stuck"}
        assert ill.health.unhealthy_reason(ill.device(SMALL)) == "stuck: a process still uses it"
        assert ill.health.unhealthy_reason(ill.device(SIBLING)) is None
        assert ill.health.faults_by_kind() == {"stuck": 1, "cordoned": 0}
        ill.health.set_condition(SMALL, ConditionType.LOST, None)  # another trouble's end is no news
        assert ill.taints() == {SMALL: "stuck"}
        ill.health.set_condition(SMALL, ConditionType.STUCK, None)
        assert ill.taints() == {}
        assert [reason for reason, _ in ill.told] == ["GpuUnhealthy", "GpuHealthy"]

    def test_a_claim_that_cant_be_released_makes_no_other_claim_of_a_shared_gpu_unhealthy(self, tmp_path: Path) -> None:
        in_turns = GpuSharing(lambda _: 0, strategy_of=parse_shared("0=time-slicing").of)
        ill = HealthUnderTest(start_node(tmp_path, gpus="h100-1", sharing=in_turns))
        ill.health.set_condition("gpu-0-shared", ConditionType.STUCK, "default/other can't be released")
        assert ill.taints() == {"gpu-0-shared": "stuck"}
        assert ill.health.reason_for_holders(ill.device("gpu-0-shared")) is None

    def test_saying_the_same_twice_changes_nothing(self, ill: HealthUnderTest) -> None:
        ill.health.set_condition(SMALL, ConditionType.LOST, "gone")
        changes = ill.changes
        ill.now += 100
        ill.health.set_condition(SMALL, ConditionType.LOST, "gone")
        assert ill.changes == changes


def test_a_cordon_taints_every_device_of_its_gpu_and_makes_none_ill(ill: HealthUnderTest) -> None:
    gpu = ill.node.node.inventory.gpus[1]
    ill.health.apply_plan(PlanSpec(cordoned=(f"{gpu.uuid} fan on Friday",)))
    slices = build_slices(ill.node.node.pool, ill.node.node.inventory.published())
    tainted = {
        device["name"].split("-mig-")[0]
        for content in slices.values()
        for device in content.get("devices", ())
        if CORDONED in device.get("taints", ())
    }
    assert tainted == {"gpu-1"}
    assert ill.health.unhealthy_reason(ill.device("gpu-1")) is None
    assert [state.fault for state in ill.node.node.inventory.states()][:3] == [None, "cordoned: fan on Friday", None]
    ill.health.apply_plan(PlanSpec())
    assert ill.node.node.inventory.states()[1].fault is None


def test_the_controller_hears_why_a_gpu_or_a_part_of_it_is_for_nobody(ill: HealthUnderTest) -> None:
    ill.node.preparer.prepare(ill.node.api.allocate("infer", SMALL))
    ill.xid(0, 48, partition_uuid(ill))
    ill.xid(1, 74)
    first, second, *_ = ill.node.node.inventory.states()
    assert (first.fault, first.foreign) == (None, 0b1000000)
    assert second.fault == "xid-74: XID 74, NVLink error"
    assert (second.fault_kind, second.condition) == (FaultKind.UNHEALTHY, "xid-74")


def test_the_taint_says_when_by_the_nodes_own_clock(ill: HealthUnderTest) -> None:
    ill.xid(0, 140)
    [entry, *_] = ill.health.describe_faults()
    uuid = ill.node.node.inventory.gpus[0].uuid
    assert entry == f"{uuid} {written_time(int(ill.now))} xid-140: XID 140, unrecovered memory error"


class TestHearing:
    """Events reach whoever listens, whatever else is wrong with the node."""

    def test_the_cause_is_told_although_what_it_makes_the_gpu_need_is_seen_first(self, ill: HealthUnderTest) -> None:
        ill.node.simulated.faults.xid(0, 48)
        ill.look()  # by its timer, just before the event is heard
        ill.hear()
        assert set(ill.taints().values()) == {"xid-48"}

    def test_a_lost_gpu_silences_no_other(self, ill: HealthUnderTest) -> None:
        ill.node.simulated.faults.lose_gpu(0)
        for number in (48, 119):
            ill.node.simulated.faults.xid(3, number)
            ill.hear()
        heard = {text.split(" ")[2] for text in ill.health.describe_faults()}
        assert {"xid-79:", "xid-48:", "xid-119:"} <= heard

    def test_with_a_gpu_lost_the_others_are_heard_as_it_happens(self, ill: HealthUnderTest) -> None:
        ill.node.simulated.faults.lose_gpu(0)
        ill.hear()
        later = threading.Timer(0.1, lambda: ill.node.simulated.faults.xid(3, 48))
        later.start()
        event = ill.node.host.wait_for_event(10)
        later.join()
        assert event is not None
        assert event.xid == 48

    @pytest.mark.long
    def test_a_gpu_that_hangs_while_it_is_looked_at_silences_no_other(
        self, ill: HealthUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_on = threading.Event()
        # However long the others take to be heard.
        monkeypatch.setattr(nvml_base, "delay", lambda _: go_on.wait(60))
        ill.node.simulated.faults.slow(3, "nvmlDeviceGetMemoryInfo", gpu=1, times=1)
        received = list[GpuEvent]()
        looking = threading.Thread(target=ill.look)
        looking.start()
        with in_thread(
            NvmlEventListener(ill.node.host, received.append).run, lambda: ill.node.simulated.faults.xid(2, 13)
        ):
            ill.node.simulated.faults.xid(2, 48)
            eventually(lambda: 48 in [event.xid for event in received], "the XID is received")
            assert looking.is_alive()
        go_on.set()
        looking.join()

    def test_a_gpu_that_hangs_for_good_silences_no_other(
        self, ill: HealthUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        let_go = threading.Event()
        monkeypatch.setattr(nvml_base, "delay", lambda _: let_go.wait())
        monkeypatch.setattr(ill.node.host, "_timeouts", TimeoutRunner(0.1))
        ill.node.simulated.faults.slow(1, gpu=1)
        ill.look()
        received = list[GpuEvent]()
        with in_thread(
            NvmlEventListener(ill.node.host, received.append).run, lambda: ill.node.simulated.faults.xid(2, 13)
        ):
            ill.node.simulated.faults.xid(2, 48)
            try:
                eventually(lambda: 48 in [event.xid for event in received], "the XID is received")
            finally:
                let_go.set()

    def test_nothing_is_lost_between_two_waits(self, ill: HealthUnderTest) -> None:
        numbers = list(range(200, 210))
        for number in numbers:
            ill.node.simulated.faults.xid(4, number)
        assert [event.xid for event in ill.hear()] == numbers

    def test_a_gpu_that_is_back_is_heard_again(self, ill: HealthUnderTest) -> None:
        ill.node.simulated.faults.lose_gpu(0)
        ill.hear()
        ill.look()
        ill.node.simulated.faults.return_gpu(0)
        ill.look()
        ill.hear()
        ill.node.simulated.faults.xid(0, 48)
        assert [event.xid for event in ill.hear()] == [48, None]

    def test_an_event_keeps_its_data(self, ill: HealthUnderTest) -> None:
        ill.node.preparer.prepare(ill.node.api.allocate("infer", SMALL))
        ill.hear()
        [partition] = ill.node.partitions()
        ill.node.simulated.faults.xid(0, 13, partition.uuid)
        ill.node.simulated.faults.event(0, 0x4000)
        uuid = ill.node.node.inventory.gpus[0].uuid
        assert ill.hear() == [
            GpuEvent(EventKind.XID, uuid, 13, partition.gpu_instance_id, partition.compute_instance_id),
            GpuEvent(EventKind.UNAVAILABLE, uuid),
        ]
        assert "unavailable" in set(ill.taints().values())

    def test_one_who_fails_to_hear_keeps_no_other_from_it(
        self, ill: HealthUnderTest, caplog: pytest.LogCaptureFixture
    ) -> None:
        received = list[GpuEvent]()
        listener = NvmlEventListener(ill.node.host, fails_at, received.append)
        with in_thread(listener.run, lambda: ill.node.simulated.faults.xid(2, 13)):
            ill.node.simulated.faults.xid(2, 48)
            eventually(lambda: received, "the XID is received")
        assert "internal error while handling an NVML event" in caplog.text


def test_what_happens_to_a_gpu_that_is_not_ours_is_not_our_business(tmp_path: Path) -> None:
    ill = HealthUnderTest(start_node(tmp_path, choice=choosing(exclude_gpus="1")))
    ill.xid(1, 48)
    assert (ill.told, ill.health.describe_faults(), ill.changes) == ([], (), 0)


def test_a_quiet_node_writes_nothing(ill: HealthUnderTest) -> None:
    file = ill.node.root / "state" / "health.json"
    before, changes = file.stat().st_mtime_ns, ill.changes
    for _ in range(5):
        ill.hear()
        ill.look()
        ill.health.apply_plan(PlanSpec())
    assert (file.stat().st_mtime_ns, ill.changes, ill.told) == (before, changes, [])


def test_the_docs_name_the_same_xids_as_the_table() -> None:
    docs = (Path(__file__).parents[4] / "docs" / "health.md").read_text()
    for kind in (Meaning.APPLICATION, Meaning.NOTE, Meaning.FATAL):
        [row] = re.findall(rf"^\| {kind.value} \|.*\| (.*) \|$", docs, re.MULTILINE)
        assert [int(number) for number in row.split(", ")] == sorted(n for n, x in XIDS.items() if x.meaning is kind)


def test_the_simulator_tells_what_a_gpu_needs_as_the_driver_does(tmp_path: Path) -> None:
    node = SimulatedNode.open(load_description("dgx-h100"), tmp_path / "node")
    older = SimulatedNode.open(load_description(str(older_driver(tmp_path))), tmp_path / "older-node")
    answers = []
    for simulated in (node, older):
        simulated.nvml.nvmlInit()
        simulated.faults.xid(0, 48)
        handle = simulated.nvml.nvmlDeviceGetHandleByIndex(0)
        [value] = simulated.nvml.nvmlDeviceGetFieldValues(handle, [230])
        answers.append((value.nvmlReturn, value.value.uiVal))
    assert answers == [(0, 1), (3, 0)]  # NOT_SUPPORTED
