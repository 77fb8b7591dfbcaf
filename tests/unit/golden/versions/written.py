"""What the version at hand writes that another reads: files on a node, both halves of a plan, its schema."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from driver.model.gpu_settings import GpuSharing
from driver.model.plan import PlanMode, PlanSpec, PlanStatus, Summary
from kubelet_plugin.health.recorded_faults import FaultSource, HardwareFault, HealthFile, HealthRecord
from kubelet_plugin.plan.plan_file import PlanFile, PlanMemory
from tests.support.chart import rendered
from tests.support.claims import opaque
from tests.support.node import start_node

FOLDER = Path(__file__).parent
BOOT = "00000000-0000-0000-0000-000000000000"
"""Stands for the boot id of the node that wrote."""

GPU = "GPU-00000000-0000-0000-0000-000000000000"

SHORT = {"strategy": "TimeSlicing", "timeSlicing": {"interval": "Short"}}
CONFIG = opaque({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "ShareConfig", "sharing": SHORT})

CLAIMS: Mapping[str, tuple[list[str], list[dict[str, Any]]]] = {
    "full": (["gpu-0"], []),
    "partition": (["gpu-1-mig-1g10gb-6"], []),
    "two": (["gpu-1-mig-3g40gb-0", "gpu-2"], []),
    "share": (["gpu-3-share-1"], [CONFIG]),
}
"""Names of claims, the devices that each has, and their parameters."""


def folder() -> Path:
    return FOLDER / version("tessera-dra")


def write(target: Path) -> None:
    """All of it into ``target``, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        node = start_node(root, gpus="h100-pcie-4", sharing=GpuSharing(lambda _: 4))
        for claim, (devices, config) in CLAIMS.items():
            node.preparer.prepare(node.api.allocate(claim, *devices, config=config, uid=f"uid-{claim}"))
        partition = node.node.checkpoint.get("uid-partition")
        assert partition is not None
        node.node.checkpoint.put(msgspec.structs.replace(partition, uid="uid-owed", name="owed", releasing=True))
        node.node.checkpoint.put(msgspec.structs.replace(partition, uid="uid-begun", name="begun", phase="preparing"))
        boot = partition.boot
        (target / "claims").mkdir(parents=True)
        for path in sorted((root / "state" / "claims").glob("*.json")):
            (target / "claims" / path.name).write_text(path.read_text().replace(boot, BOOT) + "\n")
    for file, content in documents():
        (target / file).write_text(json.dumps(content, indent=1) + "\n")


def documents() -> Iterator[tuple[str, Any]]:
    """The other files, by name; every field has another value than its default."""
    with tempfile.TemporaryDirectory() as name:
        PlanFile(Path(name)).save(PlanMemory("abcdef", PlanMode.PLANNED, ("gpu-0", "gpu-1")), durable=False)
        xid, recovery = (
            HardwareFault(GPU, FaultSource.XID, 5, 79, 3, absent=True),
            HardwareFault(GPU, FaultSource.RECOVERY, 6, 1),
        )
        HealthFile(Path(name)).save(HealthRecord("a boot", 6, (xid, recovery), {GPU: 1}, {GPU: "fan"}))
        for file in ("plan.json", "health.json"):
            yield file, json.loads((Path(name) / file).read_text())
    yield "plan-spec.json", msgspec.to_builtins(SPEC)
    yield "plan-status.json", msgspec.to_builtins(STATUS)
    crd = next(item for item in rendered() if item["metadata"]["name"] == "gpunodeplans.gpu.tessera.dev")
    yield "crd.json", crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


SPEC = PlanSpec(
    epoch="abcdef",
    held=("gpu-0 default/a",),
    offers=(f"{GPU}/full", f"{GPU}/1g.10gb@6", f"{GPU}/share-0"),
    withdrawn=("gpu-1",),
    dedicated_to="training",
    dedicated_gpus=(f"{GPU}=dev",),
    cordoned=(f"{GPU} fan",),
    cleared=(f"{GPU} 2026-11-21T21:30:00Z",),
)
STATUS = PlanStatus(
    3,
    "abcdef",
    PlanMode.PLANNED,
    Summary(4, 2, 1),
    ("a line",),
    "[]",
    ("no",),
    (f"{GPU} now xid-79",),
    idle=("default/a 2026-11-21T21:30:00Z",),
    idle_as_of="2026-11-21T21:35:00Z",
)
