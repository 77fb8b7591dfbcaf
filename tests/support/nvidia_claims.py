"""What NVIDIA's DRA driver leaves on a node: its checkpoint and the CDI specs of claims, in its format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from driver.config.flag_values import NVIDIA_DRIVER
from driver.model.gpu import Gpu, Partition


def answer(uid: str, pool: str, device: str, request: str = "gpu") -> dict[str, Any]:
    """A device as the kubelet was answered: Go's names of the fields."""
    ids = [f"k8s.{NVIDIA_DRIVER}/claim={uid}-{device}"]
    return {"Requests": [request], "PoolName": pool, "DeviceName": device, "CDIDeviceIDs": ids}


def of_gpu(gpu: Gpu, uid: str, pool: str) -> dict[str, Any]:
    """A full GPU in ``preparedDevices``."""
    return {"gpu": {"info": {"uuid": gpu.uuid}, "device": answer(uid, pool, f"gpu-{gpu.minor}")}, "mig": None}


def partition_name(gpu: Gpu, partition: Partition) -> str:
    profile = gpu.profile_with_id(partition.profile_id)
    assert profile is not None
    label = profile.name.replace(".", "").replace("+", "-")
    return f"gpu-{gpu.minor}-mig-{label}-{profile.id}-{partition.placement.start}"


def of_partition(gpu: Gpu, partition: Partition, uid: str, pool: str) -> dict[str, Any]:
    """A partition in ``preparedDevices``."""
    concrete = {
        "parentMinor": gpu.minor,
        "giId": partition.gpu_instance_id,
        "ciId": partition.compute_instance_id,
        "migUUID": partition.uuid,
        "parentUUID": gpu.uuid,
        "parentPCIBusID": gpu.pci_bus_id,
    }
    return {
        "gpu": None,
        "mig": {"concrete": concrete, "device": answer(uid, pool, partition_name(gpu, partition))},
    }


def nvidia_claim(
    name: str, pool: str, *devices: Mapping[str, Any], state: str = "PrepareCompleted", **config: Any
) -> dict[str, Any]:
    """An entry of ``preparedClaims``; ``config`` is the state of its devices' configuration."""
    answers = [(device["gpu"] or device["mig"])["device"] for device in devices]
    results = [
        {"request": device["Requests"][0], "driver": NVIDIA_DRIVER, "pool": pool, "device": device["DeviceName"]}
        for device in answers
    ]
    completed = state == "PrepareCompleted"
    return {
        "checkpointState": state,
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": name}],
        },
        **({"preparedDevices": [{"devices": list(devices), "configState": config}]} if completed else {}),
        "name": name,
        "namespace": "default",
    }


def nvidia_checkpoint(claims: Mapping[str, Mapping[str, Any]], boot: str = "") -> dict[str, Any]:
    """The file's content: both versions, the older one with completed claims only and without their names."""
    completed = {
        uid: {"status": claim["status"], "preparedDevices": claim["preparedDevices"]}
        for uid, claim in claims.items()
        if claim["checkpointState"] == "PrepareCompleted"
    }
    v2 = {"checksum": 1907653214, "preparedClaims": dict(claims), **({"nodeBootID": boot} if boot else {})}
    return {"checksum": 2398041234, "v1": {"preparedClaims": completed}, "v2": v2}


def nvidia_file(kubelet_dir: Path) -> Path:
    return kubelet_dir / "plugins" / NVIDIA_DRIVER / "checkpoint.json"


def write_checkpoint(kubelet_dir: Path, content: Mapping[str, Any] | str) -> Path:
    file = nvidia_file(kubelet_dir)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def write_spec(cdi_dir: Path, uid: str, devices: Mapping[str, Mapping[str, Any]]) -> Path:
    """The CDI spec of a claim; ``devices`` are container edits by device."""
    file = cdi_dir / f"k8s.{NVIDIA_DRIVER}-claim_{uid}.yaml"
    entries = [{"name": f"{uid}-{device}", "containerEdits": edits} for device, edits in devices.items()]
    cdi_dir.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": f"k8s.{NVIDIA_DRIVER}/claim", "devices": entries}))
    return file
