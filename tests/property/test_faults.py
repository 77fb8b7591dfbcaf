"""Whatever is reported, in whatever order: nothing harmless ends a fault, and nobody clears what he has not seen."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from driver.model.gpu_events_and_conditions import EventKind, GpuEvent
from driver.model.xid import XIDS, Meaning
from kubelet_plugin.health.device_conditions import fault_of_event
from kubelet_plugin.health.recorded_faults import (
    FAULT_REPEAT_INTERVAL_SECONDS,
    HealthRecord,
    apply_boot,
    apply_fault,
    apply_operator,
    apply_recovery_action,
)

GPUS = ("GPU-a", "GPU-b")
gpus = st.sampled_from(GPUS)
xids = st.sampled_from(sorted(XIDS))
slices = st.sampled_from([None, 0b1, 0b1100])


@dataclass
class Seen:
    """What an operator saw: the newest stamp of each GPU."""

    stamps: dict[str, int] = field(default_factory=dict)


class Faults(RuleBasedStateMachine):
    """``ill`` is what should be wrong: (GPU, XID, slices), and the stamp it was given."""

    seen = Bundle("seen")

    def __init__(self) -> None:
        super().__init__()
        self.record = HealthRecord(boot_id="boot")
        self.now = 1_000_000
        self.ill: dict[tuple[str, int, int | None], int] = {}
        self.given: set[int] = set()

    @rule(gpu=gpus, xid=xids, where=slices)
    def reports(self, gpu: str, xid: int, where: int | None) -> None:
        before = self.record
        event = GpuEvent(EventKind.XID, gpu, xid)
        fault = fault_of_event(event, where, self.now, recovery_supported=True)
        self.record = self.record if fault is None else apply_fault(self.record, fault)
        if XIDS[xid].meaning is not Meaning.FATAL:
            assert self.record == before
            return
        what = (gpu, xid, where)
        if what not in self.ill or self.now - self.ill[what] >= FAULT_REPEAT_INTERVAL_SECONDS:
            stamp = self.record.last_stamp
            assert stamp not in self.given
            self.ill[what] = stamp
            self.given.add(stamp)

    @rule(seconds=st.integers(-100, 100))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(target=seen)
    def an_operator_looks(self) -> Seen:
        found = Seen()
        for fault in self.record.faults:
            found.stamps[fault.gpu] = max(fault.stamp, found.stamps.get(fault.gpu, 0))
        return found

    @rule(what=seen)
    def an_operator_clears_what_he_saw(self, what: Seen) -> None:
        self.record = apply_operator(self.record, {}, what.stamps)
        self.ill = {key: stamp for key, stamp in self.ill.items() if stamp > what.stamps.get(key[0], 0)}

    @rule(gpu=gpus)
    def it_is_reset(self, gpu: str) -> None:
        needed = apply_recovery_action(self.record, gpu, 1, self.now)
        self.given |= {needed.last_stamp}
        self.record = apply_recovery_action(needed, gpu, 0, self.now)
        self.ill = {key: stamp for key, stamp in self.ill.items() if key[0] != gpu}

    @rule()
    def the_plugin_restarts(self) -> None:
        self.record = msgspec.json.decode(msgspec.json.encode(self.record), type=HealthRecord)
        self.record = apply_boot(self.record, "boot")

    @rule()
    def nvml_says_again_that_nothing_is_needed(self) -> None:
        for gpu in GPUS:
            assert apply_recovery_action(self.record, gpu, 0, self.now) == self.record

    @invariant()
    def exactly_what_should_be_wrong_is(self) -> None:
        assert {(f.gpu, f.number, f.slices): f.stamp for f in self.record.faults} == self.ill


TestFaults = Faults.TestCase
