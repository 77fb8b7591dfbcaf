"""One run of the acceptance test, and the gRPC service that starts it.

A GPU that is changed is cordoned first, by the plugin and only as long as its process runs; the test then waits until
nothing of the GPU is held or offered, and takes the GPU's lock. What it makes has records in the checkpoint. So a test
that is killed together with the plugin leaves nothing behind: the next process removes what is recorded, and does not
know the cordon.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Protocol

import grpc
import msgspec

from driver.errors import HardwareError, RecoverableError, UsageError
from driver.hardware.capture import Description
from driver.model.gpu import Gpu
from kubelet_plugin.acceptance.protocol import (
    METHOD,
    REQUEST,
    SERVICE,
    AcceptanceMessage,
    AcceptanceRequest,
    AcceptanceStep,
    StepState,
)
from kubelet_plugin.acceptance.steps import (
    CHANGING_STEPS,
    KILLED_PLUGIN,
    READING_STEPS,
    Step,
    killed_plugin,
)
from kubelet_plugin.acceptance.tested_gpu import StepSkipped, TestedGpu
from kubelet_plugin.claims.rehearsals import Rehearsals
from kubelet_plugin.health.device_health import HealthMonitor

log = logging.getLogger(__name__)

IDLE = "idle"
"""The step that waits until nothing of the GPU is held or offered."""

DESCRIPTION = "description"
"""The step that is shown if the node can't be described."""

CHECK_INTERVAL_SECONDS = 0.25

SETTLING_SECONDS = 5.0
"""From the cordon until the GPU is used: a scheduler may be about to allocate one of its devices."""

WITHDRAWAL_TIMEOUT_SECONDS = 60.0
"""Longest time until the controller has withdrawn the offers of a cordoned GPU."""

END_TIMEOUT_SECONDS = 15.0
"""How long a plugin that ends waits for a test that runs: the change of the GPU in progress, and its removal."""

CORDON_REASON = "tessera acceptance tests it"

Messages = Generator[AcceptanceMessage, None, None]
Waiting = Generator[AcceptanceMessage, None, str | None]


class UseOfGpu(Protocol):
    """What claims have of a GPU, or may get though it is cordoned."""

    def claimed_devices(self, gpu: Gpu) -> Collection[str]:
        """The names of the devices that claims hold."""

    def offers_to_withdraw(self, gpu: Gpu) -> Collection[str]:
        """The names of the devices that are published until the controller has withdrawn them."""


@dataclass(frozen=True, slots=True)
class AcceptanceTest:
    rehearsals: Rehearsals
    health: HealthMonitor
    use: UseOfGpu
    settling_seconds: float = SETTLING_SECONDS

    def run(self, request: AcceptanceRequest, ended: threading.Event) -> Messages:
        """Run the steps until ``ended`` is set. Raises UsageError if the request names no GPU of this node."""
        tested = TestedGpu(self._gpu(request), self.rehearsals, ended.is_set)
        for name, step in READING_STEPS.items():
            yield from _run(name, step, tested)
        if not request.read_only:
            log.info("the acceptance test begins", extra={"gpu": tested.gpu.uuid})
            self.health.cordon_for_test(tested.gpu, CORDON_REASON)
            try:
                yield from self._change(tested, request, ended)
            finally:
                self.health.cordon_for_test(tested.gpu, None)
                log.info("the acceptance test has ended", extra={"gpu": tested.gpu.uuid})
        yield self._described(tested)

    def _gpu(self, request: AcceptanceRequest) -> Gpu:
        inventory = self.rehearsals.stores.inventory
        named = {f"gpu-{inventory.number(gpu)}": gpu for gpu in sorted(inventory.gpus, key=inventory.number)}
        if request.gpu:
            gpu = named.get(request.gpu) or inventory.gpu(request.gpu)
            if gpu is None:
                raise UsageError(f"GPU {request.gpu!r} is not on this node; expected a UUID or {', '.join(named)}")
            return gpu
        usable = (gpu for gpu in named.values() if inventory.fault(gpu) is None and not inventory.is_reserved(gpu))
        idle = (gpu for gpu in usable if not self.use.claimed_devices(gpu))
        chosen = next(iter(named.values()) if request.read_only else idle, None)
        if chosen is None:
            raise UsageError("claims hold something of every usable GPU; name the GPU to wait for, and set --wait")
        return chosen

    def _change(self, tested: TestedGpu, request: AcceptanceRequest, ended: threading.Event) -> Messages:
        gpu, host = tested.gpu, tested.host
        steps = {**CHANGING_STEPS, **({KILLED_PLUGIN: killed_plugin} if request.kill_plugin else {})}
        reason = yield from self._wait_until_idle(tested, request.wait_seconds, ended)
        try:
            if reason is None:
                with self.rehearsals.stores.locks.hold([gpu.uuid], tested.reference.name):
                    reason, was_enabled = self._reason_not_to_change(gpu), host.mig_enabled(gpu)
                    if reason is None:
                        yield _ended(tested, IDLE, StepState.PASSED, "nothing of the GPU is held or offered")
                        try:
                            for name, step in steps.items():
                                if tested.has_leftovers:
                                    break
                                if name == KILLED_PLUGIN:
                                    yield self._described(tested)
                                yield from _run(name, step, tested)
                        finally:
                            self._restore_mig_mode(gpu, enabled=was_enabled)
        except RecoverableError as error:  # of the lock, or of the MIG mode
            reason = str(error)
        if reason is not None:
            yield _ended(tested, IDLE, StepState.FAILED, reason)

    def _restore_mig_mode(self, gpu: Gpu, *, enabled: bool) -> None:
        partitions = self.rehearsals.partitions
        try:
            if partitions.host.mig_enabled(gpu) != enabled:
                partitions.switch_mig_mode(gpu)
        except RecoverableError as error:  # a later claim switches it, and gets the error if that is still refused
            log.warning("can't restore the MIG mode after a test", extra={"gpu": gpu.uuid, "error": str(error)})

    def _wait_until_idle(self, tested: TestedGpu, wait_seconds: float, ended: threading.Event) -> Waiting:
        """Return why the GPU can't be changed; None: it is idle."""
        started, noticed = time.monotonic(), ""
        yield _begun(tested, IDLE)
        while not ended.wait(CHECK_INTERVAL_SECONDS):
            waited = time.monotonic() - started
            reason = self._reason_not_to_change(tested.gpu)
            if reason is None and waited >= self.settling_seconds:
                return None
            longest = WITHDRAWAL_TIMEOUT_SECONDS if self.use.offers_to_withdraw(tested.gpu) else 0.0
            if reason is not None and waited >= max(wait_seconds, longest):
                return reason
            if reason is not None and reason != noticed:
                yield AcceptanceMessage(notice=f"waiting: {reason}")
                noticed = reason
        return "the test was ended"

    def _reason_not_to_change(self, gpu: Gpu) -> str | None:
        inventory, host = self.rehearsals.stores.inventory, self.rehearsals.partitions.host
        if (fault := inventory.fault(gpu)) is not None:
            return fault
        if inventory.is_reserved(gpu):
            return inventory.reserved_reason("", gpu) or "the node does not know yet whether another driver has the GPU"
        if claimed := self.use.claimed_devices(gpu):
            return f"claims hold {', '.join(sorted(claimed))}"
        if offered := self.use.offers_to_withdraw(gpu):
            return f"the controller has not withdrawn its offers yet: {', '.join(sorted(offered))}"
        try:
            if partitions := host.partitions(gpu):
                return f"partitions exist that no claim of Tessera's holds: {len(partitions)}"
            if processes := host.processes(gpu):
                return f"processes run on the GPU: {processes}"
        except RecoverableError as error:
            return str(error)
        return None

    def _described(self, tested: TestedGpu) -> AcceptanceMessage:
        try:
            return AcceptanceMessage(node=self._description(tested))
        except RecoverableError as error:
            return _ended(tested, DESCRIPTION, StepState.FAILED, str(error))

    def _description(self, tested: TestedGpu) -> Description:
        """The node with the GPUs of the same product, and the measured memory of partitions."""
        inventory = self.rehearsals.stores.inventory
        product = tested.gpu.product_name
        gpus = [gpu for gpu in inventory.gpus if gpu.product_name == product and inventory.fault(gpu) is None]
        if not gpus:
            raise HardwareError(f"no {product} of this node can be used: {inventory.fault(tested.gpu)}")
        description = tested.host.describe(gpus)
        for profile in description["productFacts"]["profiles"]:
            if by_start := tested.other_memory_of(profile["id"]):
                profile["memoryByStart"] = by_start
        return description


def _run(name: str, step: Step, tested: TestedGpu) -> Messages:
    yield _begun(tested, name)
    started = time.perf_counter()
    try:
        state, detail = StepState.PASSED, step(tested)
    except StepSkipped as skipped:
        state, detail = StepState.SKIPPED, str(skipped)
    except RecoverableError as error:
        state, detail = StepState.FAILED, str(error)
    yield _ended(tested, name, state, detail, time.perf_counter() - started)


def _begun(tested: TestedGpu, name: str) -> AcceptanceMessage:
    return AcceptanceMessage(AcceptanceStep(tested.name, name, StepState.RUNNING))


def _ended(tested: TestedGpu, name: str, state: StepState, detail: str, seconds: float = 0.0) -> AcceptanceMessage:
    return AcceptanceMessage(AcceptanceStep(tested.name, name, state, detail, round(seconds, 3)))


class AcceptanceService:
    """Runs one test at a time, for whoever may connect to the plugin's socket: root."""

    def __init__(self, test: AcceptanceTest) -> None:
        self._test = test
        self._running, self._closed = threading.Lock(), False
        self._ended = threading.Event()
        """Set once nobody waits for the test that runs, or the plugin ends."""

    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.unary_stream_rpc_method_handler(self._run, REQUEST.decode, msgspec.json.encode)
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})

    def close(self) -> None:
        """End the test that runs, and wait until it has removed what it made."""
        self._closed = True
        self._ended.set()
        if self._running.acquire(timeout=END_TIMEOUT_SECONDS):
            self._running.release()
        else:
            log.warning("an acceptance test does not end; the next process removes what it made")

    def _run(self, request: AcceptanceRequest, context: grpc.ServicerContext) -> Messages:
        if not self._running.acquire(blocking=False):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another acceptance test runs on this node")
        try:
            ended = self._ended = threading.Event()
            if not self._closed and context.add_callback(ended.set):
                for message in self._test.run(request, ended):
                    if self._closed:
                        break
                    yield message
            if self._closed:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the node plugin ends")
        except (UsageError, RecoverableError) as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            self._running.release()
