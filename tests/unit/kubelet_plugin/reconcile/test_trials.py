"""GPUs whose hardware refuses to be cut or switched: when they count as failing, and what ends that."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pynvml
import pytest

from driver.errors import HardwareError
from driver.model.plan import ClearedFaults, PlanSpec
from driver.step_observer import unobserved
from kubelet_plugin.claims.rehearsals import Rehearsals
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.reconcile.trials import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Trials
from kubelet_plugin.step_names import NodeStep, Observer
from tests.support.health import HealthUnderTest
from tests.support.node import start_node

CUT, SWITCH = "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlDeviceSetMigMode"
COMPUTE = "nvmlGpuInstanceCreateComputeInstance"
SMALL, NEXT, OTHER_GPU = "gpu-0-mig-1g10gb-6", "gpu-0-mig-1g10gb-5", "gpu-1-mig-1g10gb-6"


@dataclass
class FailingNode:
    """A node of eight H100, its health and its trials, by a clock of its own."""

    root: Path
    now: float = 1000.0
    observer: Observer = unobserved
    health: HealthUnderTest = field(init=False)

    def __post_init__(self) -> None:
        self.health = HealthUnderTest(start_node(self.root, observer=self.observer))
        self.start_trials()

    def start_trials(self) -> None:
        node = self.health.node
        rehearsals = Rehearsals(node.node, node.partitions_of_claims, node.cleanup)
        self.trials = Trials(rehearsals, self.health.health, lambda: self.now)

    def restart(self) -> None:
        self.health = self.health.restart()
        self.start_trials()

    def fail(self, call: str, code: int = pynvml.NVML_ERROR_UNKNOWN, times: int | None = None) -> None:
        self.health.node.simulated.faults.fail(call, code=code, gpu=0, times=times)

    def refuse(self, device: str, times: int) -> None:
        """Ask so often for a claim that can not be prepared."""
        node = self.health.node
        for number in range(times):
            with pytest.raises(HardwareError):
                node.preparer.prepare(node.api.allocate(f"refused-{device}-{number}", device))

    def prepare(self, device: str) -> ClaimReference:
        node = self.health.node
        claim = node.api.allocate(f"good-{device}", device)
        node.preparer.prepare(claim)
        return claim

    def later(self, seconds: float) -> float | None:
        self.now += seconds
        return self.trials.try_due()

    @property
    def free(self) -> set[str]:
        """The devices of gpu-0 that a new pod can get."""
        return self.health.node.offered() - self.health.taints().keys()

    @property
    def unhealthy(self) -> set[str]:
        return self.health.unhealthy()


@pytest.fixture
def failing(tmp_path: Path) -> FailingNode:
    return FailingNode(tmp_path)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (CUT, pynvml.NVML_ERROR_UNKNOWN),
        (CUT, pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES),
        (COMPUTE, pynvml.NVML_ERROR_UNKNOWN),
        (SWITCH, pynvml.NVML_ERROR_IN_USE),
    ],
)
def test_three_refusals_keep_new_pods_off_the_gpu_and_say_why(failing: FailingNode, call: str, code: int) -> None:
    failing.fail(call, code)
    failing.refuse(SMALL, 2)
    assert failing.unhealthy == set()
    failing.refuse(SMALL, 1)
    assert failing.unhealthy == {"gpu-0"}
    assert set(failing.health.taints().values()) == {"failing"}
    held = failing.health.device("gpu-0")
    assert "failing" in str(failing.health.health.unhealthy_reason(held))
    assert failing.health.health.reason_for_holders(held) is None  # it only refuses to be changed
    [(reason, message)] = failing.health.told
    assert reason == "GpuUnhealthy"
    assert "gpu-0" in message
    assert "its hardware refused 3" in message
    assert f"({code})" in message or f"({code}," in message
    assert failing.free == set()


def test_further_refusals_change_nothing_that_people_see(failing: FailingNode) -> None:
    failing.fail(CUT)
    failing.refuse(SMALL, 3)
    seen = list(failing.health.told), failing.health.changes, failing.health.taints()
    failing.refuse(SMALL, 3)
    assert seen == (failing.health.told, failing.health.changes, failing.health.taints())


def test_a_success_between_refusals_starts_the_count_again(failing: FailingNode) -> None:
    failing.fail(CUT, times=2)
    failing.refuse(SMALL, 2)
    failing.prepare(NEXT)
    failing.fail(CUT)
    failing.refuse(SMALL, 2)
    assert failing.unhealthy == set()


def test_switches_of_the_mig_mode_do_not_excuse_a_gpu_that_can_not_be_cut(failing: FailingNode) -> None:
    failing.fail(CUT)
    for number in range(3):
        failing.refuse(SMALL, 1) if number == 0 else failing.refuse(NEXT, 1)
        claim = failing.prepare("gpu-0")  # switches MIG mode off, and the next one on
        failing.health.node.preparer.unprepare(claim)
        failing.health.node.api.delete(claim)
    assert failing.unhealthy == {"gpu-0"}


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (CUT, pynvml.NVML_ERROR_INVALID_ARGUMENT),  # the request's fault
        (CUT, pynvml.NVML_ERROR_NO_PERMISSION),  # the node's
        ("nvmlDeviceGetGpuInstances", pynvml.NVML_ERROR_UNKNOWN),  # nothing was to be changed
    ],
)
def test_what_says_nothing_about_the_hardware_never_counts(failing: FailingNode, call: str, code: int) -> None:
    failing.fail(call, code)
    failing.refuse(SMALL, 4)
    assert failing.unhealthy == set()


def test_a_partition_of_somebody_else_in_the_way_never_counts(failing: FailingNode) -> None:
    node = failing.health.node
    gpu = node.node.inventory.gpus[0]
    node.host.set_mig_mode(gpu, enabled=True)
    device = failing.health.device(SMALL)
    assert device.profile is not None
    assert device.placement is not None
    node.host.create_gpu_instance(gpu, device.profile, device.placement)
    failing.refuse(SMALL, 4)
    assert failing.unhealthy == set()


def test_a_partition_that_is_in_use_when_it_is_destroyed_never_counts(failing: FailingNode) -> None:
    claim = failing.prepare(SMALL)
    failing.fail("nvmlGpuInstanceDestroy", pynvml.NVML_ERROR_IN_USE)
    for _ in range(4):
        with pytest.raises(HardwareError):
            failing.health.node.preparer.unprepare(claim)
    assert failing.unhealthy == set()


def test_the_plugin_finds_out_itself_when_the_gpu_works_again(failing: FailingNode) -> None:
    failing.fail(CUT)
    failing.refuse(SMALL, 3)
    assert failing.later(0) == pytest.approx(FIRST_PAUSE_SECONDS)
    assert failing.later(FIRST_PAUSE_SECONDS) == pytest.approx(2 * FIRST_PAUSE_SECONDS)
    assert failing.unhealthy == {"gpu-0"}
    failing.health.node.simulated.faults.clear()
    assert failing.later(2 * FIRST_PAUSE_SECONDS - 1) == pytest.approx(1)
    assert failing.unhealthy == {"gpu-0"}
    failing.later(1)
    assert failing.unhealthy == set()
    assert failing.later(0) is None
    assert failing.health.told[-1][0] == "GpuHealthy"
    assert failing.health.node.nothing_left()
    failing.prepare(SMALL)


def test_the_pauses_between_trials_grow_up_to_a_limit(failing: FailingNode) -> None:
    failing.fail(CUT)
    failing.refuse(SMALL, 3)
    pause = failing.later(0)
    pauses = []
    for _ in range(8):
        assert pause is not None
        pause = failing.later(pause)
        pauses.append(round(pause or 0))
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    assert failing.health.node.nothing_left()


def test_a_gpu_whose_mode_can_not_be_switched_is_tried_by_switching_it(failing: FailingNode) -> None:
    failing.fail(SWITCH, pynvml.NVML_ERROR_IN_USE)
    failing.refuse(SMALL, 3)
    failing.later(0)
    failing.later(FIRST_PAUSE_SECONDS)
    assert failing.unhealthy == {"gpu-0"}
    failing.health.node.simulated.faults.clear()
    failing.later(2 * FIRST_PAUSE_SECONDS)
    assert failing.unhealthy == set()


def test_where_partitions_are_held_one_offer_is_the_trial(failing: FailingNode) -> None:
    failing.prepare(SMALL)
    failing.fail(CUT)
    failing.refuse(NEXT, 3)
    failing.later(0)
    assert failing.free == set()
    failing.later(FIRST_PAUSE_SECONDS)
    masks = {failing.health.device(name).mask for name in failing.free}
    assert len(masks) == 1
    [name, *_] = sorted(failing.free)
    failing.refuse(name, 1)
    assert failing.free == set()
    failing.health.node.simulated.faults.clear()
    failing.later(2 * FIRST_PAUSE_SECONDS)
    failing.prepare(sorted(failing.free)[0])
    assert failing.unhealthy == set()


def test_a_failing_gpu_is_still_failing_after_a_restart_and_two_refusals_are_not_forgotten(
    failing: FailingNode,
) -> None:
    failing.fail(CUT)
    failing.refuse(SMALL, 2)
    failing.restart()
    failing.refuse(SMALL, 1)
    assert failing.unhealthy == {"gpu-0"}
    failing.restart()
    assert failing.unhealthy == {"gpu-0"}
    failing.health.node.simulated.faults.clear()
    failing.later(0)
    failing.later(FIRST_PAUSE_SECONDS)
    assert failing.unhealthy == set()


def test_an_operator_can_end_it(failing: FailingNode) -> None:
    failing.fail(CUT, times=3)
    failing.refuse(SMALL, 3)
    [fault] = failing.health.health.describe_faults()
    assert " failing: its hardware refused" in fault
    failing.health.health.apply_plan(PlanSpec(cleared=(str(ClearedFaults.parse(fault)),)))
    assert failing.unhealthy == set()
    assert failing.later(0) is None


def test_other_gpus_are_used_meanwhile(failing: FailingNode) -> None:
    failing.fail(CUT)
    failing.refuse(SMALL, 3)
    failing.prepare(OTHER_GPU)
    assert failing.health.health.faults_by_kind()["failing"] == 1


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "step", ["create-gpu-instance", "create-compute-instance", "destroy-compute-instance", "destroy-gpu-instance"]
)
def test_a_plugin_that_is_killed_in_a_trial_leaves_nothing_behind(tmp_path: Path, step: str, moment: str) -> None:
    armed = False

    def kill(at: NodeStep, when: str) -> None:
        if armed and (at.value, when) == (step, moment):
            raise Killed

    failing = FailingNode(tmp_path, observer=kill)
    failing.fail(CUT, times=3)
    failing.refuse(SMALL, 3)
    failing.later(0)
    armed = True
    with pytest.raises(Killed):
        failing.later(FIRST_PAUSE_SECONDS)
    armed = False
    failing.restart()
    assert failing.health.node.nothing_left()


def test_a_cordoned_gpu_is_not_tried(failing: FailingNode) -> None:
    failing.fail(CUT, times=3)
    failing.refuse(SMALL, 3)
    uuid = failing.health.node.node.inventory.gpus[0].uuid
    failing.health.health.apply_plan(PlanSpec(cordoned=(f"{uuid} fan",)))
    assert failing.later(LONGEST_PAUSE_SECONDS) is None
    failing.health.health.apply_plan(PlanSpec())
    failing.later(0)
    failing.later(FIRST_PAUSE_SECONDS)
    assert failing.unhealthy == set()


def test_a_failing_gpu_that_is_full_offers_nothing_when_it_gets_free_until_it_was_tried(failing: FailingNode) -> None:
    failing.fail(CUT)
    failing.refuse(SMALL, 3)
    claim = failing.prepare("gpu-0")
    failing.later(0)
    failing.later(FIRST_PAUSE_SECONDS)
    failing.health.node.preparer.unprepare(claim)
    assert failing.free == set()


def test_the_partition_of_a_trial_belongs_to_nobody_else(tmp_path: Path) -> None:
    """A scan in the middle of the trial takes it for none that Tessera did not create."""
    seen: list[bool] = []

    def scan(at: NodeStep, when: str) -> None:
        if (at.value, when) == ("destroy-gpu-instance", "before"):
            node = site.health.node
            node.scanner.scan_partitions(node.node.inventory, node.node.inventory.gpus)
            seen.append(node.node.inventory.foreign)

    site = FailingNode(tmp_path, observer=scan)
    site.fail(CUT, times=3)
    site.refuse(SMALL, 3)
    site.later(0)
    seen.clear()
    site.later(FIRST_PAUSE_SECONDS)
    assert seen == [False]
    assert site.unhealthy == set()


def test_a_partition_with_media_extensions_of_somebody_else_makes_no_gpu_failing(failing: FailingNode) -> None:
    failing.prepare("gpu-0-mig-1g10gbme-0")
    failing.fail(CUT, pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    failing.refuse("gpu-0-mig-1g10gbme-3", 4)
    assert failing.unhealthy == set()
