"""The devices that expressions are tried on, as entries of a ResourceSlice."""

from __future__ import annotations

from typing import Any

DRIVER = "gpu.tessera.dev"
NIC_DRIVER = "nic.example.com"
ID = "conformance.tessera.dev/id"
"""The attribute that picks a device out of all."""

Device = dict[str, Any]


def _attributes(**values: Any) -> dict[str, Any]:
    """Attributes of the kind that Python's type says; ``x__y`` is ``y`` of the standard domain."""
    kinds = {bool: "bool", int: "int", str: "string"}
    standard = "resource.kubernetes.io/"
    return {
        name.replace("std__", standard): {kinds[type(value)]: value} if not isinstance(value, dict) else value
        for name, value in values.items()
    }


def _version(text: str) -> dict[str, str]:
    return {"version": text}


def _capacity(**quantities: str) -> dict[str, Any]:
    return {name: {"value": quantity} for name, quantity in quantities.items()}


FULL: Device = {
    "attributes": _attributes(
        type="gpu",
        uuid="GPU-373ffd95-4762-50ff-b063-bb7c0efcc2d6",
        productName="NVIDIA H100 80GB HBM3",
        architecture="Hopper",
        memoryType="HBM3",
        profile="none",
        cudaComputeCapability=_version("9.0.0"),
        driverVersion=_version("570.86.15"),
        memoryBandwidth=3352,
        memorySlices=8,
        migCapable=True,
        ecc=True,
        simulated=False,
        std__numaNode=0,
        std__pcieRoot="pci0000:5a",
    ),
    "capacity": _capacity(memory="80Gi", multiprocessors="132"),
}
PARTITION: Device = {
    "attributes": _attributes(
        type="mig",
        uuid="MIG-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0",
        productName="NVIDIA H100 80GB HBM3",
        architecture="Hopper",
        memoryType="HBM3",
        profile="1g.10gb",
        cudaComputeCapability=_version("9.0.0"),
        driverVersion=_version("570.86.15"),
        memoryBandwidth=419,
        memorySlices=1,
        placementStart=6,
        migCapable=False,
        ecc=True,
        simulated=True,
        std__numaNode=1,
    ),
    "capacity": _capacity(memory="9984Mi", multiprocessors="16"),
}
SHARE: Device = {
    "attributes": _attributes(
        type="share",
        productName="NVIDIA L40S",
        architecture="Ada Lovelace",
        memoryType="GDDR6",
        cudaComputeCapability=_version("8.9.0"),
        driverVersion=_version("550.54.15"),
        memoryBandwidth=864,
        migCapable=False,
        simulated=False,
    ),
    "capacity": _capacity(memory="11520M"),
    "allowMultipleAllocations": True,
}
BARE: Device = {}
MISTYPED: Device = {
    "attributes": _attributes(
        type=1,
        productName=False,
        architecture=_version("1.0.0"),
        cudaComputeCapability="9.0.0",
        memoryBandwidth="3352",
        migCapable="true",
        simulated=1,
    ),
    "capacity": _capacity(memory="0"),
}
EDGES: Device = {
    "attributes": _attributes(
        type="",
        productName="Größe ☃ 😀",
        architecture="a.b*c",
        cudaComputeCapability=_version("1.2.3-rc.1+build.5"),
        driverVersion=_version("0.0.0"),
        memoryBandwidth=9223372036854775807,
        memorySlices=-9223372036854775808,
        placementStart=0,
        migCapable=False,
    ),
    "capacity": _capacity(memory="9223372036854775807", multiprocessors="1500m"),
}
FRACTIONS: Device = {
    "attributes": _attributes(type="gpu", memoryBandwidth=-1),
    "capacity": _capacity(memory="1536Mi", multiprocessors="1e3", tiny="1n", huge="16Ei", half="0.5"),
}
NIC: Device = {
    "attributes": _attributes(type="nic", rdmaDevice="mlx5_0", std__numaNode=0, std__pcieRoot="pci0000:5a"),
}

DEVICES: dict[str, tuple[str, Device]] = {
    "full": (DRIVER, FULL),
    "partition": (DRIVER, PARTITION),
    "share": (DRIVER, SHARE),
    "bare": (DRIVER, BARE),
    "mistyped": (DRIVER, MISTYPED),
    "edges": (DRIVER, EDGES),
    "fractions": (DRIVER, FRACTIONS),
    "nic": (NIC_DRIVER, NIC),
}
"""Driver and entry, by the name that the table calls them."""


def entry(name: str) -> Device:
    """The device as it is published: named, and with the attribute that picks it."""
    device = DEVICES[name][1]
    return {**device, "name": name, "attributes": {**device.get("attributes", {}), ID: {"string": name}}}
