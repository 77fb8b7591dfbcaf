"""Claims that NVIDIA's DRA driver prepared, after this driver has taken over its name on the node."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from driver.config.flag_values import NVIDIA_DRIVER
from driver.errors import ClaimError
from driver.hardware.host_paths import boot_id
from driver.hardware.usage import UsageReader
from driver.model.gpu import Gpu, Partition
from driver.model.reported_gpus import FaultKind
from driver.step_observer import Moment, unobserved
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.inventory.published_devices import PublishPolicy
from kubelet_plugin.status.claim_status import device_statuses
from kubelet_plugin.step_names import NodeStep, Observer
from kubelet_plugin.usage.labels import ClaimLabels
from kubelet_plugin.usage.sampler import UsageSampler
from kubelet_plugin.usage.totals_file import TotalsFile
from tests.support.care import Care
from tests.support.claims import NODE, ClaimApi, result
from tests.support.node import NodeUnderTest, choosing, paths_of, start_node
from tests.support.nvidia_claims import (
    answer,
    nvidia_checkpoint,
    nvidia_claim,
    nvidia_file,
    of_gpu,
    of_partition,
    partition_name,
    write_checkpoint,
    write_spec,
)
from tests.unit.kubelet_plugin.claims.test_preparer_crashes import Crash, crash_at

ON_GPU_99 = {"gpu": {"info": {"uuid": "GPU-99"}, "device": answer("u", NODE, "gpu-99")}, "mig": None}
OF_NO_INSTANCE = {"giId": 10**30, "ciId": 0, "migUUID": "MIG-1", "parentUUID": "GPU-1"}
IMPOSSIBLE = {"gpu": None, "mig": {"concrete": OF_NO_INSTANCE, "device": answer("u", NODE, "gpu-" + "9" * 5000)}}
OURS = f"{NODE}-{NVIDIA_DRIVER}"


@dataclass
class NvidiaNode:
    """A node on which NVIDIA's driver prepared claims. ``start`` starts ours under its name."""

    root: Path
    api: ClaimApi = field(default_factory=ClaimApi)
    claims: dict[str, dict[str, Any]] = field(default_factory=dict)
    boot: str | None = None
    """The boot id in its file; None: that of the node."""

    def __post_init__(self) -> None:
        self.before = start_node(self.root)
        self.gpus = self.before.node.inventory.gpus
        if self.boot is None:
            self.boot = boot_id(paths_of(self.before.simulated))

    def cut(self, gpu: Gpu, start: int, *, complete: bool = True, profile: str = "1g.10gb") -> Partition:
        host, of_name = self.before.host, gpu.profile_named(profile)
        assert of_name is not None
        host.set_mig_mode(gpu, enabled=True)
        place = next(place for place in of_name.placements if place.start == start)
        partition = host.create_gpu_instance(gpu, of_name, place)
        return host.create_compute_instance(gpu, partition) if complete else partition

    def prepared(self, name: str, *devices: Callable[[str], Mapping[str, Any]], **more: Any) -> ClaimReference:
        """A claim that its driver prepared, with its CDI spec; ``devices`` make an entry from the claim's uid."""
        uid = f"uid-{name}"
        made = [device(uid) for device in devices]
        self.claims[uid] = nvidia_claim(name, NODE, *made, **more)
        names = [(device["gpu"] or device["mig"])["device"]["DeviceName"] for device in made]
        if more.get("state", "PrepareCompleted") == "PrepareCompleted":
            write_spec(self.root / "cdi", uid, {device: {} for device in names})
        return self.api.allocate(name, *(result(n, driver=NVIDIA_DRIVER, pool=NODE) for n in names), uid=uid)

    def small(self, name: str, gpu: int = 0, start: int = 6) -> tuple[ClaimReference, Partition]:
        partition = self.cut(self.gpus[gpu], start)
        return self.prepared(name, lambda uid: of_partition(self.gpus[gpu], partition, uid, NODE)), partition

    def whole(self, name: str, gpu: int = 0, **more: Any) -> ClaimReference:
        return self.prepared(name, lambda uid: of_gpu(self.gpus[gpu], uid, NODE), **more)

    def start(self, observer: Observer = unobserved, content: Any = None, **flags: Any) -> NodeUnderTest:
        write_checkpoint(self.kubelet_dir, content or nvidia_checkpoint(self.claims, self.boot or ""))
        return self.again(observer, **flags)

    def again(self, observer: Observer = unobserved, driver: str = NVIDIA_DRIVER, **flags: Any) -> NodeUnderTest:
        # Paths of sockets are short, and nothing listens here.
        choice = replace(choosing(driver_name=driver, **flags), kubelet_dir=self.kubelet_dir)
        return start_node(self.root, self.api, observer, choice=choice)

    @property
    def kubelet_dir(self) -> Path:
        return self.root / "kubelet"

    @property
    def specs(self) -> list[str]:
        return sorted(path.name for path in (self.root / "cdi").iterdir())


@pytest.fixture
def nvidia(tmp_path: Path) -> NvidiaNode:
    return NvidiaNode(tmp_path)


def faults(node: NodeUnderTest) -> dict[int, str | None]:
    """Why GPUs offer nothing, by number."""
    return {report.number: report.fault for report in node.node.inventory.states() if report.fault}


def offering(node: NodeUnderTest) -> list[int]:
    """The numbers of the GPUs of which something is published."""
    return [gpu.number for gpu in node.node.inventory.published() if gpu.offers and not gpu.unpublished]


def test_the_gpu_of_an_adopted_claim_is_published_by_nobody_and_says_who_holds_it(nvidia: NvidiaNode) -> None:
    _, partition = nvidia.small("infer")
    old_name = partition_name(nvidia.gpus[0], partition)
    node = nvidia.start()
    assert offering(node) == [1, 2, 3, 4, 5, 6, 7]
    [told] = faults(node).values()
    assert told == (
        f"claim default/infer, which NVIDIA's DRA driver prepared, holds {old_name} of it: nothing is offered until "
        "its pod ends"
    )
    assert [r.number for r in node.node.inventory.states() if r.fault_kind is FaultKind.ADOPTED] == [0]
    assert "gpu-0-monitor" not in {monitor.name for monitor in node.node.inventory.monitors()}
    assert [(about, reason) for about, reason, _ in node.adoptions] == [("ResourceClaim/infer", "ClaimAdopted")]


@pytest.mark.parametrize(
    "policy",
    [PublishPolicy(complete=True), PublishPolicy(kept=frozenset({"gpu-0"})), PublishPolicy(held=frozenset({"gpu-0"}))],
    ids=["complete", "published before", "held by a plan"],
)
def test_no_mode_publishes_the_gpu(nvidia: NvidiaNode, policy: PublishPolicy) -> None:
    nvidia.small("infer")
    published = nvidia.start().node.inventory.published(policy)
    assert [gpu.number for gpu in published if gpu.unpublished] == [0]


def test_a_repeated_prepare_answers_what_the_other_driver_answered(nvidia: NvidiaNode) -> None:
    claim, partition = nvidia.small("infer")
    node = nvidia.start()
    [device] = node.preparer.prepare(claim)
    old_name = partition_name(nvidia.gpus[0], partition)
    assert (device.pool, device.device, device.requests) == (NODE, old_name, ("gpu",))
    assert device.cdi_device_ids == (f"k8s.{NVIDIA_DRIVER}/claim={claim.uid}-{old_name}",)
    assert node.partitions() == [partition]
    for spec in nvidia.specs:
        (nvidia.root / "cdi" / spec).unlink()
    with pytest.raises(ClaimError, match="its CDI spec, of NVIDIA's DRA driver, is gone; delete the pod"):
        node.preparer.prepare(claim)


def test_what_ours_allocated_on_that_gpu_is_refused_and_names_the_holder(nvidia: NvidiaNode) -> None:
    nvidia.small("infer")
    node = nvidia.start()
    late = nvidia.api.allocate("late", result("gpu-0", driver=NVIDIA_DRIVER, pool=OURS))
    with pytest.raises(ClaimError, match=r"reserved for another driver: claim default/infer, which NVIDIA's"):
        node.preparer.prepare(late)


def test_at_unprepare_spec_and_partition_go_and_the_gpu_is_offered_for_good(nvidia: NvidiaNode) -> None:
    claim, _ = nvidia.small("infer")
    node = nvidia.start()
    file = nvidia_file(nvidia.kubelet_dir)
    before = file.read_bytes()
    node.preparer.unprepare(claim)
    node.preparer.unprepare(claim)
    assert not node.partitions()
    assert not nvidia.specs
    node.scanner.scan(node.node.inventory)
    assert not faults(node)
    assert offering(node) == list(range(8))
    assert file.read_bytes() == before
    again = nvidia.again()
    assert offering(again) == list(range(8))
    assert not again.adoptions


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "step",
    [
        NodeStep.MARK_RELEASING,
        NodeStep.REMOVE_CDI_SPEC,
        NodeStep.DESTROY_COMPUTE_INSTANCE,
        NodeStep.DESTROY_GPU_INSTANCE,
        NodeStep.REMOVE_RECORD,
    ],
)
def test_a_kill_at_any_step_of_unprepare_is_healed(nvidia: NvidiaNode, step: NodeStep, moment: Moment) -> None:
    claim, _ = nvidia.small("infer")
    node = nvidia.start(crash_at(step, moment))
    with pytest.raises(Crash):
        node.preparer.unprepare(claim)
    again = nvidia.again()
    again.preparer.unprepare(claim)
    assert not again.partitions()
    assert not nvidia.specs
    assert not nvidia.again().adoptions


def test_the_same_claim_prepared_again_by_the_other_driver_is_adopted_again(nvidia: NvidiaNode) -> None:
    claim = nvidia.whole("train")
    nvidia.start().preparer.unprepare(claim)
    nvidia.whole("train")
    assert offering(nvidia.start()) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("sign", ["setting", "a partition that its file does not name"])
def test_partitions_that_somebody_made_by_hand_stay(nvidia: NvidiaNode, sign: str) -> None:
    claim, partition = nvidia.small("infer")
    kept = [partition]
    if sign != "setting":
        kept.append(nvidia.cut(nvidia.gpus[0], 5))
    node = nvidia.start(existing_partitions="publish" if sign == "setting" else "ignore")
    node.preparer.unprepare(claim)
    assert set(node.partitions()) == set(kept)
    assert not nvidia.specs


def test_a_partition_with_another_uuid_is_somebody_elses(nvidia: NvidiaNode) -> None:
    claim, partition = nvidia.small("infer")
    host, gpu = nvidia.before.host, nvidia.gpus[0]
    host.destroy_compute_instance(gpu, partition)
    host.destroy_gpu_instance(gpu, partition)
    other = nvidia.cut(gpu, 6)
    node = nvidia.start()
    node.preparer.unprepare(claim)
    assert node.partitions() == [other]


def test_a_device_that_two_claims_share_goes_with_the_last(nvidia: NvidiaNode) -> None:
    first, partition = nvidia.small("first")
    second = nvidia.prepared("second", lambda uid: of_partition(nvidia.gpus[0], partition, uid, NODE))
    node = nvidia.start()
    node.preparer.unprepare(first)
    assert node.partitions() == [partition]
    assert offering(node) == [1, 2, 3, 4, 5, 6, 7]
    node.preparer.unprepare(second)
    assert not node.partitions()


@pytest.mark.parametrize("other_is", ["adopted under another name", "ours"])
def test_a_partition_stays_while_another_claim_has_its_place(nvidia: NvidiaNode, other_is: str) -> None:
    other, partition = nvidia.small("other")
    claim = nvidia.prepared("claim", lambda uid: of_partition(nvidia.gpus[0], partition, uid, NODE))
    name = partition_name(nvidia.gpus[0], partition)
    renamed = json.dumps(nvidia.claims[claim.uid]).replace(name, name.replace("mig-", "mig-1g"))
    nvidia.claims[claim.uid] = json.loads(renamed)
    node = nvidia.start()
    if other_is == "ours":
        record = node.node.checkpoint.get(other.uid)
        assert record is not None
        node.node.checkpoint.put(msgspec.structs.replace(record, adopted=None))
    node.preparer.unprepare(claim)
    assert node.partitions() == [partition]


def test_a_kill_while_claims_are_adopted_leaves_no_partition_behind(nvidia: NvidiaNode) -> None:
    first, second = (nvidia.small(name, start=start)[0] for name, start in (("first", 5), ("second", 6)))
    nvidia.start().node.checkpoint.path(second.uid).unlink()
    node = nvidia.again()
    for claim in (first, second):
        node.preparer.unprepare(claim)
    assert not node.partitions()


def test_an_adopted_claim_whose_record_was_damaged_is_released_once(nvidia: NvidiaNode) -> None:
    claim, _ = nvidia.small("infer")
    nvidia.start().node.checkpoint.path(claim.uid).write_text("{")
    node = nvidia.again()
    assert offering(node) == [1, 2, 3, 4, 5, 6, 7]
    node.preparer.unprepare(claim)
    node.preparer.unprepare(claim)
    assert not nvidia.again().node.checkpoint.unrecorded


def test_a_claim_of_the_same_name_does_not_release_the_adopted_one(nvidia: NvidiaNode) -> None:
    claim = nvidia.whole("train")
    node = nvidia.start()
    nvidia.api.allocate("train", result("gpu-1", driver=NVIDIA_DRIVER, pool=OURS), uid="another")
    with pytest.raises(ClaimError, match="the API server has uid another"):
        node.preparer.prepare(claim)
    assert offering(node) == [1, 2, 3, 4, 5, 6, 7]


def test_a_claim_that_was_not_finished_must_end_and_its_partition_goes_with_it(nvidia: NvidiaNode) -> None:
    half = nvidia.cut(nvidia.gpus[0], 6, complete=False)
    claim = nvidia.prepared("half", lambda uid: of_partition(nvidia.gpus[0], half, uid, NODE), state="PrepareStarted")
    node = nvidia.start()
    assert offering(node) == [1, 2, 3, 4, 5, 6, 7]
    assert [(about, reason) for about, reason, _ in node.adoptions] == [("ResourceClaim/half", "ClaimMustEnd")]
    with pytest.raises(ClaimError, match="began to prepare it and did not finish; delete the pod"):
        node.preparer.prepare(claim)
    node.preparer.unprepare(claim)
    assert not node.partitions()


@pytest.mark.parametrize(
    ("config", "why"), [({"mpsControlDaemonID": "a1b2"}, "MPS control daemon"), ({}, "")], ids=["mps", "plain"]
)
def test_a_claim_with_an_mps_daemon_must_end_soon(nvidia: NvidiaNode, config: dict[str, Any], why: str) -> None:
    claim = nvidia.whole("train", **config)
    node = nvidia.start()
    [(_, reason, message)] = node.adoptions
    assert reason == ("ClaimMustEnd" if why else "ClaimAdopted")
    assert why in message
    assert [device.device for device in node.preparer.prepare(claim)] == ["gpu-0"]


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[]",
        '{"v3": {"preparedClaims": {}}}',
        json.dumps(nvidia_checkpoint({"u": nvidia_claim("a", NODE, state="PrepareCompleted")})).replace(
            '"devices": []', '"devices": [{"npu": {}}]'
        ),
        '{"v2": {"preparedClaims": {"u": {"preparedDevices": "none"}}}}',
        json.dumps(nvidia_checkpoint({"u": nvidia_claim("a", NODE, ON_GPU_99)})).replace("preparedDevices", "prepared"),
        json.dumps(nvidia_checkpoint({"../../u": nvidia_claim("a", NODE)})),
        json.dumps(nvidia_checkpoint({"u": nvidia_claim("../../a", NODE)})),
        json.dumps(nvidia_checkpoint({"u": {**nvidia_claim("a", NODE), "namespace": "/"}})),
        json.dumps(nvidia_checkpoint({"u": nvidia_claim("a", NODE, IMPOSSIBLE)})),
        json.dumps(nvidia_checkpoint({"u": nvidia_claim("a", NODE, ON_GPU_99, state="PrepareStarted")})),
    ],
)
def test_a_file_that_can_not_be_understood_holds_every_gpu_and_crashes_nothing(
    nvidia: NvidiaNode, content: str
) -> None:
    node = nvidia.start(content=content)
    inventory = node.node.inventory
    late = replace(inventory.gpus[0], uuid="GPU-late", minor=8, index=8)
    inventory.update([*inventory.gpus, late], {})
    assert not offering(node)
    assert len(faults(node)) == 9
    assert all("delete the file and restart the plugin" in str(fault) for fault in faults(node).values())
    assert [(about, reason) for about, reason, _ in node.adoptions] == [(f"Node/{NODE}", "ClaimMustEnd")]


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: os.truncate(_created(path), 1 << 34),
    ],
    ids=["directory", "pipe", "endless", "huge"],
)
def test_what_is_no_file_of_a_sensible_size_is_not_read_and_holds_every_gpu(
    nvidia: NvidiaNode, make: Callable[[Path], None]
) -> None:
    file = nvidia_file(nvidia.kubelet_dir)
    file.parent.mkdir(parents=True)
    make(file)
    assert not offering(nvidia.again())


def _created(path: Path) -> Path:
    path.touch()
    return path


def test_claims_of_an_earlier_boot_hold_nothing(tmp_path: Path) -> None:
    nvidia = NvidiaNode(tmp_path, boot="another")
    claim = nvidia.whole("train")
    node = nvidia.start()
    assert offering(node) == list(range(8))
    with pytest.raises(ClaimError, match="another driver of this name published that; delete the pod"):
        node.preparer.prepare(claim)


def test_claims_of_the_first_version_get_their_names_from_the_api_server(tmp_path: Path) -> None:
    nvidia = NvidiaNode(tmp_path, boot="")
    claim = nvidia.whole("train")
    gone = nvidia.whole("gone", gpu=1)
    nvidia.api.delete(gone)
    content = nvidia_checkpoint(nvidia.claims)
    del content["v2"]
    node = nvidia.start(content=content)
    assert offering(node) == [1, 2, 3, 4, 5, 6, 7]
    node.preparer.unprepare(claim)
    assert offering(node) == list(range(8))


def test_a_claim_that_was_deleted_meanwhile_is_released(nvidia: NvidiaNode) -> None:
    claim, _ = nvidia.small("infer")
    _, stays = nvidia.small("stays", gpu=1)
    node = nvidia.start()
    nvidia.api.delete(claim)
    care = Care(node)
    care.look_long()
    assert not node.partitions(0)
    assert node.partitions(1) == [stays]
    assert care.reasons(f"Node/{NODE}") == ["OrphanReleased"]


def test_a_claim_with_admin_access_holds_nothing(nvidia: NvidiaNode) -> None:
    claim = nvidia.whole("watch")
    [of_file] = nvidia.claims.values()
    of_file["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True
    node = nvidia.start()
    assert offering(node) == list(range(8))
    assert [device.device for device in node.preparer.prepare(claim)] == ["gpu-0"]


def test_a_claim_of_a_gpu_that_nvml_does_not_have_renames_no_other_gpu(nvidia: NvidiaNode) -> None:
    gone = replace(nvidia.gpus[0], uuid="GPU-gone")
    nvidia.prepared("virtual", lambda uid: of_gpu(gone, uid, NODE))
    before, again = nvidia.start().node.inventory, nvidia.again().node.inventory
    assert [again.number(gpu) for gpu in again.gpus] == [before.number(gpu) for gpu in before.gpus]


@pytest.mark.parametrize("driver", [NVIDIA_DRIVER, "another.example.com"])
def test_a_device_with_admin_access_and_for_its_own_use_is_held(nvidia: NvidiaNode, driver: str) -> None:
    nvidia.whole("both")
    [of_file] = nvidia.claims.values()
    watched = {"request": "watch", "driver": driver, "pool": NODE, "device": "gpu-0", "adminAccess": True}
    of_file["status"]["allocation"]["devices"]["results"].append(watched)
    assert offering(nvidia.start()) == [1, 2, 3, 4, 5, 6, 7]


def test_a_claim_allocated_anew_from_ours_releases_what_was_adopted(nvidia: NvidiaNode) -> None:
    nvidia.whole("train")
    node = nvidia.start()
    moved = nvidia.api.allocate("train", result("gpu-1", driver=NVIDIA_DRIVER, pool=OURS))
    assert [device.device for device in node.preparer.prepare(moved)] == ["gpu-1"]
    assert 0 in offering(node)


def test_the_status_of_an_adopted_claim_is_not_written(nvidia: NvidiaNode) -> None:
    nvidia.whole("train")
    assert not device_statuses(nvidia.start().node.checkpoint.records())


class Unlabelled:
    """What a sampler asks for besides the hardware; nobody follows its samples."""

    def read_labels(self, _record: ClaimRecord) -> ClaimLabels:
        return ClaimLabels((), {})

    def check(self, _devices: object) -> None:
        """Nothing is due."""


def test_usage_counts_the_partition_under_its_old_name(nvidia: NvidiaNode) -> None:
    _, partition = nvidia.small("infer")
    node = nvidia.start()
    parts: Any = Unlabelled()
    reader = UsageReader(node.simulated.nvml, time.time)
    sampler = UsageSampler(
        node.node, reader, parts, TotalsFile(nvidia.root / "state", ""), 15.0, (parts.check,), time.time
    )
    sampler.sample()
    [(key, usage)] = sampler.devices.items()
    assert key == ("uid-infer", partition_name(nvidia.gpus[0], partition))
    assert (usage.totals.slices, usage.device.profile) == (1.0, "1g.10gb")
    assert usage.reading is not None
    assert usage.reading.memory_total


def test_under_another_driver_name_nothing_is_adopted(nvidia: NvidiaNode) -> None:
    nvidia.whole("train")
    nvidia.start().node.checkpoint.path("uid-train").unlink()
    node = nvidia.again(driver="gpu.tessera.dev")
    assert offering(node) == list(range(8))
    assert not node.records()
