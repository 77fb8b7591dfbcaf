"""``tessera drain``: cordon a GPU and evict its pods (``gpu_drain``), by the rules of ``controller.eviction``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from controller.eviction.evictor import Evictor
from controller.eviction.recent_evictions import RecentEvictions
from driver.clock import wait_until
from driver.errors import ApiError, FatalError, StateError
from driver.model.plan import TAINTS_FIELD
from driver.slices.slice_names import Pool
from tessera.cluster_options import client_of, with_driver_name, with_kubeconfig
from tessera.commands.maintenance.gpu_drain import GpuDrain, HeldClaims, HoldState
from tessera.commands.maintenance.plan_editor import PlanEditor
from tessera.gpu_names_and_faults import GpuName, find
from tessera.progress import Progress
from tessera.status.snapshot import NAMESPACE
from tessera.tables_and_drawings import columns, counted, printable, show, with_output

POLL_INTERVAL_SECONDS = 1.0

QUIET_SWEEPS = 2
"""Sweeps in a row that must find nothing to wait for: the scheduler may just have allocated a device that it saw
before the cordon."""

RESULTS = {
    HoldState.EVICTABLE: "would be evicted",
    HoldState.ENDING: "being released",
    HoldState.REFUSED: "not now",
    HoldState.PROTECTED: "stay",
}


@click.command()
@click.argument("gpu", metavar="GPU")
@click.option("--reason", help="Of the cordon; shown by `tessera status`.  [default: unchanged]")
@click.option("--dry-run", is_flag=True, help="Change nothing; print which pods would be evicted, and why others stay.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds to wait for the pods.",
)
@click.option("--namespace", default=NAMESPACE, show_default=True, help="Release namespace, which records evictions.")
@with_kubeconfig
@with_driver_name
@with_output("text", "json")
def drain(
    gpu: str,
    reason: str | None,
    dry_run: bool,
    timeout: float,
    namespace: str,
    kubeconfig: Path | None,
    driver_name: str,
    output: str,
) -> None:
    """Cordon a GPU, and evict the pods that use it, so that their controllers replace them on other GPUs.

    GPU is a UUID, or NODE/gpu-N. The pods of a claim are evicted together or not at all. Those that nothing would
    replace, or that a PodDisruptionBudget protects, stay and are listed; nothing is deleted. Run it again to continue.

    Exit code 0: no claim has a device of the GPU (--dry-run: all pods would be evicted); 1: some stay.

    \b
    Examples:
      tessera drain node-a/gpu-3 --dry-run
      tessera drain node-a/gpu-3 --reason "fan replacement on Friday" --timeout 1800
      tessera drain GPU-0f3c9d1e-7a41-4b8e-9c60-1d2e3f4a5b6c -o json
    """
    client = client_of(kubeconfig, "tessera-command")
    cluster, progress = PlanEditor(client, driver_name), Progress()
    name = find(gpu, cluster.names())
    evictor = Evictor(client, None, RecentEvictions(client, namespace))
    gpu_drain = GpuDrain(client, evictor, driver_name, name, progress.log)
    if dry_run:
        held = gpu_drain.sweep(evicts=False)
        _show(output, name, held, [], is_dry_run=True)
        sys.exit(1 if any(claims.state in {HoldState.REFUSED, HoldState.PROTECTED} for claims in held) else 0)
    cluster.cordon(name, reason)
    progress.log(f"cordoned {name} ({name.uuid})")
    with _cordon_kept(name, progress):
        until = time.monotonic() + timeout
        progress.show(f"waiting for node {name.node} to follow the cordon")
        if not wait_until(timeout, lambda: _is_followed(cluster, gpu_drain, name, driver_name), POLL_INTERVAL_SECONDS):
            raise FatalError(
                f"no pod was evicted: the node plugin of {name.node} has not followed the cordon within {timeout:g} s, "
                "so that new pods could still get the GPU (does it run? tessera status)"
            )
        rest = Rest(gpu_drain, progress)
        wait_until(until - time.monotonic(), rest.is_settled, POLL_INTERVAL_SECONDS)
        progress.clear()
        if rest.error is not None:
            raise rest.error
        _show(output, name, rest.held, gpu_drain.evicted)
        if rest.held:
            raise FatalError(f"{name} is still in use: {counted(sum(len(held.claims) for held in rest.held), 'claim')}")


class Rest:
    """What is left on the GPU, and the error of the last look if it could not be read."""

    def __init__(self, gpu_drain: GpuDrain, progress: Progress) -> None:
        self._drain, self._progress = gpu_drain, progress
        self._quiet_sweeps = 0
        self.held: list[HeldClaims] = []
        self.error: ApiError | None = None

    def is_settled(self) -> bool:
        """Evict what can be evicted; whether there is nothing more to wait for. Raises ApiError if that is lasting."""
        try:
            self.held, self.error = self._drain.sweep(evicts=True), None
        except ApiError as error:
            if not error.is_transient:
                raise
            self.error = error
            self._progress.show(f"waiting: {error}")
            return False
        waits = [held for held in self.held if held.state in {HoldState.ENDING, HoldState.REFUSED}]
        self._quiet_sweeps = 0 if waits else self._quiet_sweeps + 1
        if waits:
            parts = (f"{', '.join(held.claims)}{f' ({held.reason})' if held.reason else ''}" for held in waits)
            self._progress.show(f"waiting for {'; '.join(parts)}")
        return self._quiet_sweeps >= QUIET_SWEEPS


def _is_followed(cluster: PlanEditor, gpu_drain: GpuDrain, name: GpuName, driver: str) -> bool:
    """Whether no device of the GPU can be allocated any more; False while that can't be read."""
    plan = cluster.plans.get(name.node)
    try:
        slices = cluster.read_slices()
        # Where the API server keeps no taints, only the free devices of the GPU leave the slices.
        untainted = gpu_drain.held_devices() if plan is not None and TAINTS_FIELD in plan.status.dropped else set()
    except ApiError as error:
        if not error.is_transient:
            raise
        return False
    except msgspec.MsgspecError as error:
        raise StateError(f"a ResourceSlice can't be read: {error}") from error
    pool = Pool(name.node, driver).name
    devices = (device for item in slices if item.spec.pool.name == pool for device in item.spec.devices)
    return all(device.taints or device.name in untainted for device in devices if name.has(device.name))


@contextmanager
def _cordon_kept(name: GpuName, progress: Progress) -> Iterator[None]:
    """Say, whatever ends the block early, that the GPU stays cordoned, and how to continue or undo it."""
    try:
        yield
    except (KeyboardInterrupt, ApiError, FatalError, StateError) as error:
        progress.clear()
        raise FatalError(
            f"{str(error) or 'interrupted'}; {name} stays cordoned: tessera drain {name} continues, "
            f"tessera uncordon {name} admits new pods again"
        ) from error


def _show(
    output: str, name: GpuName, held: Sequence[HeldClaims], evicted: Sequence[str], *, is_dry_run: bool = False
) -> None:
    facts: dict[str, Any] = {"node": name.node, "gpu": f"gpu-{name.number}", "uuid": name.uuid, "dryRun": is_dry_run}
    facts |= {"evicted": list(evicted), "claims": [asdict(claims) for claims in held]}
    show(output, [facts], _as_text(name, held, evicted, is_dry_run=is_dry_run))


def _as_text(name: GpuName, held: Sequence[HeldClaims], evicted: Sequence[str], *, is_dry_run: bool) -> str:
    if not held and is_dry_run:
        return f"no claim has a device of {name} ({name.uuid})"
    if not held:
        return f"drained {name} ({name.uuid}): {counted(len(evicted), 'pod')} evicted"
    rows = [
        [printable(", ".join(cell)) or "-" for cell in (claims.claims, claims.devices, claims.pods)]
        + [f"{RESULTS[claims.state]}{f': {printable(claims.reason)}' if claims.reason else ''}"]
        for claims in held
    ]
    remedies = [f"  {', '.join(claims.pods)}: {claims.remedy}" for claims in held if claims.remedy]
    return "\n".join([columns(["CLAIM", "DEVICES", "PODS", "RESULT"], rows), *map(printable, remedies)])
