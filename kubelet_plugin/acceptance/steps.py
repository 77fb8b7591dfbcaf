"""The steps of the acceptance test: what each of them does with one GPU.

A step returns what it has found. It raises RecoverableError if it fails, and StepSkipped if the GPU or its present
state does not allow it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from driver.errors import HardwareError, RecoverableError
from driver.hardware.events import EVENT_KINDS
from driver.hardware.gpu_properties import MIB
from driver.hardware.nvml_errors import ABSENT
from driver.hardware.usage import SHORTEST_WINDOW_SECONDS
from driver.model.gpu import MigMode
from driver.model.gpu_events_and_conditions import EventKind
from driver.model.gpu_settings import TimeSlice
from driver.model.offer import DeviceKind
from driver.model.shared_memory import GIB
from driver.model.usage import UsageTarget
from kubelet_plugin.acceptance.mps_step import shared_by_mps
from kubelet_plugin.acceptance.tested_gpu import StepSkipped, TestedGpu

LISTED_FAILURES = 3
"""Most failures of one step that its message describes; the others are counted."""

TRIED_LIMIT = GIB
"""Bytes: claims have whole GiB, too."""


def functions_of_nvml(tested: TestedGpu) -> str:
    answers = tested.host.reading_answers(tested.gpu)
    if missing := [answer.function for answer in answers if answer.is_missing]:
        raise HardwareError(f"the driver lacks {', '.join(missing)}; Tessera needs driver 550 or newer")
    if all(answer.error is not None for answer in answers):
        raise HardwareError(f"no function has a value for the GPU: {', '.join(map(str, answers[:LISTED_FAILURES]))}")
    slowest = sorted(answers, key=lambda answer: -answer.microseconds)
    supported = sum(answer.error is None for answer in answers)
    listed = ", ".join(map(str, slowest[:LISTED_FAILURES]))
    return f"{len(answers)} functions answer, {supported} of them with a value; slowest: {listed}"


def published_properties(tested: TestedGpu) -> str:
    published, now = asdict(tested.gpu), asdict(tested.host.read_again(tested.gpu))
    compared = [name for name in published if name not in ("nvlink_clique", "mig_mode")]
    if differing := [name for name in compared if published[name] != now[name]]:
        texts = (f"{name} is published as {published[name]}, NVML says {now[name]}" for name in differing)
        raise HardwareError("; ".join(texts))
    return (
        f"{len(compared)} properties are as published: {tested.gpu.product_name}, {tested.gpu.memory_bytes // MIB} MiB"
    )


def listed_placements(tested: TestedGpu) -> str:
    if not tested.partitions:
        raise StepSkipped("the GPU has no MIG profiles")
    profiles = ", ".join(f"{profile.name} at {len(profile.placements)}" for profile in tested.gpu.profiles)
    return f"NVML lists {len(tested.partitions)} placements: {profiles}"


def registered_events(tested: TestedGpu) -> str:
    registered = tested.host.events_of(tested.gpu)
    kinds = {True: list[str](), False: list[str]()}
    for bit, kind in EVENT_KINDS.items():
        kinds[bool(registered & bit)].append(kind.value)
    if EventKind.XID.value not in kinds[True]:
        raise HardwareError("the GPU reports no XIDs, so that Tessera would not know its faults")
    missing = f"; not: {', '.join(kinds[False])}" if kinds[False] else ""
    return f"can be registered: {', '.join(kinds[True])}{missing}"


def activity_samples(tested: TestedGpu) -> str:
    target = UsageTarget(tested.gpu.uuid)
    try:
        tested.usage.read(target)
        if not tested.usage.has_activity(tested.gpu.uuid):
            raise StepSkipped("the GPU has no performance monitoring (GPM); it needs Hopper or newer")
        time.sleep(SHORTEST_WINDOW_SECONDS)
        activity = tested.usage.read(target).activity
    finally:
        tested.usage.keep(())
    if activity is None:
        raise HardwareError("two samples give no activity")
    values = {name: value for name, value in asdict(activity).items() if value is not None and name != "seconds"}
    return f"measured over {activity.seconds:.2f} s: {', '.join(values) or 'nothing'}"


def device_nodes(tested: TestedGpu) -> str:
    return ", ".join(node.path for node in tested.host.nodes.of_gpu(tested.gpu))


def present_partitions(tested: TestedGpu) -> str:
    """A test that was killed must leave none, so the text is the same before and after."""
    records = tested.rehearsals.stores.checkpoint.records()
    if tested.has_leftovers:
        raise HardwareError(f"the checkpoint still has a record of {tested.reference.name}")
    present = tested.host.partitions(tested.gpu)
    recorded = {device.uuid for record in records for device in record.devices}
    of_claims = sum(partition.uuid in recorded for partition in present)
    return f"{of_claims} of claims, {len(present) - of_claims} others"


def switched_mig_mode(tested: TestedGpu) -> str:
    gpu, partitions = tested.gpu, tested.rehearsals.partitions
    if not gpu.mig_capable:
        raise StepSkipped("the GPU has no MIG mode")
    if not gpu.toggles_freely:
        raise StepSkipped(f"a reset would be needed to switch the MIG mode of this {gpu.architecture} GPU")
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        partitions.switch_mig_mode(gpu)
        seconds.append(time.perf_counter() - started)
    return f"switched and back: {_milliseconds(seconds)}"


def time_slice(tested: TestedGpu) -> str:
    gpu = tested.gpu
    if tested.host.mig_enabled(gpu):
        raise StepSkipped("MIG mode is on")
    full = next(device for device in tested.inventory.devices_on(gpu) if device.kind is DeviceKind.FULL)
    try:
        with tested.recorded(full, time_slice=TimeSlice.SHORT):
            tested.host.set_time_slice(gpu, TimeSlice.SHORT)
    except HardwareError as error:
        if error.code in ABSENT:
            raise StepSkipped(str(error)) from error
        raise
    return f"set to {TimeSlice.SHORT.value} and back to {TimeSlice.DEFAULT.value}"


def memory_limit(tested: TestedGpu) -> str:
    gpu, limits = tested.gpu, tested.host.memory_limits
    reason = limits.unsupported(gpu)
    if reason is not None:
        raise StepSkipped(reason)
    with limits.trial_cgroup() as cgroup:
        limits.set(gpu, cgroup, TRIED_LIMIT)
        limited = limits.read(gpu, cgroup).limit
        limits.clear(gpu, cgroup)
        cleared = limits.read(gpu, cgroup).limit
    if (limited, cleared) != (TRIED_LIMIT, None):
        raise HardwareError(f"a limit of {TRIED_LIMIT} bytes is read as {limited}, and once it is removed as {cleared}")
    by = "the kernel (dmem)" if limits.is_enforced_by_kernel(gpu) else "the driver (misc)"
    return f"set to {TRIED_LIMIT // MIB} MiB on {cgroup}, read and removed; enforced by {by}"


def every_partition(tested: TestedGpu) -> str:
    _require_mig(tested)
    cuts, removals, failures = list[float](), list[float](), list[str]()
    for device in tested.partitions:
        if tested.is_ended():
            raise StepSkipped("the test was ended")
        try:
            cut, removal = tested.cut_and_measure(device)
        except RecoverableError as error:
            failures.append(str(error))
            if tested.has_leftovers:
                break
        else:
            cuts.append(cut)
            removals.append(removal)
    done = f"{len(cuts)} of {len(tested.partitions)} placements were cut and removed"
    if failures:
        more = f"; {len(failures) - LISTED_FAILURES} more" if len(failures) > LISTED_FAILURES else ""
        raise HardwareError(f"{done}; {'; '.join(failures[:LISTED_FAILURES])}{more}")
    differing = [
        f"{device.name} has {mib} MiB, its profile says {device.profile.memory_bytes // MIB}"
        for device, mib in tested.other_memory
        if device.profile is not None
    ]
    texts = [done, f"cut: {_milliseconds(cuts)}", f"removal: {_milliseconds(removals)}", *differing[:LISTED_FAILURES]]
    return "; ".join(texts)


def killed_plugin(tested: TestedGpu) -> str:
    """The command checks afterwards that the next process has removed the partition (``present_partitions``)."""
    _require_mig(tested)
    device = tested.partitions[0]
    with tested.recorded(device) as record:
        tested.rehearsals.partitions.make(device, record.devices[0])
        os._exit(128 + signal.SIGKILL)  # the first process of a container can't send itself SIGKILL


def _require_mig(tested: TestedGpu) -> None:
    gpu = tested.gpu
    if not tested.partitions:
        raise StepSkipped("the GPU has no MIG profiles")
    if not gpu.toggles_freely and not tested.host.mig_enabled(gpu):
        raise StepSkipped(f"MIG mode is off ({MigMode.DISABLED}), and switching it on needs a reset of the GPU")


def _milliseconds(seconds: Sequence[float]) -> str:
    """The median and the longest duration."""
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2] * 1000:.0f} ms, at most {ordered[-1] * 1000:.0f} ms"


Step = Callable[[TestedGpu], str]

PARTITIONS, KILLED_PLUGIN = "partitions", "killed-plugin"

READING_STEPS: Mapping[str, Step] = {
    "nvml-functions": functions_of_nvml,
    "properties": published_properties,
    "placements": listed_placements,
    "events": registered_events,
    "activity": activity_samples,
    "device-nodes": device_nodes,
    PARTITIONS: present_partitions,
}

CHANGING_STEPS: Mapping[str, Step] = {
    "mig-mode": switched_mig_mode,
    "time-slice": time_slice,
    "memory-limit": memory_limit,
    "mps": shared_by_mps,
    "every-partition": every_partition,
}
"""Steps that change the GPU, which must be idle."""
