"""What people bring along who come from NVIDIA's DRA driver or device plugin, and how Tessera says the same (pure).

Source: NVIDIA's k8s-dra-driver-gpu, its Helm chart and the attributes of its ResourceSlices; k8s-device-plugin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deviceclasses.lint.claim_fields import selectors_of
from deviceclasses.lint.findings import Issue, Severity
from driver.config.flag_values import NVIDIA_DRIVER
from driver.config.strict_schema import shown

CLASSES = {
    NVIDIA_DRIVER: "gpu-training, a full GPU",
    "mig.nvidia.com": "gpu-inference, any partition, or gpu-inference-1g-10gb for one profile",
}
"""The classes of its chart whose devices Tessera has, and the like of them here."""

RESOURCE_PREFIX, OF_PARTITIONS = "nvidia.com/", "nvidia.com/mig-"
"""Beginnings of the extended resources of NVIDIA's device plugin: all, and those of MIG devices by profile."""

OTHER_CLASSES = (
    "vfio.gpu.nvidia.com",
    "compute-domain-daemon.nvidia.com",
    "compute-domain-default-channel.nvidia.com",
)


def of_nvidia_class(name: str) -> str:
    """The end of a message about an unknown class; empty if NVIDIA's chart has none of that name."""
    if name in OTHER_CLASSES:
        return "; it is a class of NVIDIA's DRA driver for devices that Tessera does not have"
    return f"; it is a class of NVIDIA's DRA driver: write {CLASSES[name]}" if name in CLASSES else ""


def nvidia_selectors(owner: Mapping[str, Any], path: str, driver: str) -> Iterator[Issue]:
    """Warnings about selectors that read attributes of NVIDIA's DRA driver."""
    for place, expression in selectors_of(owner, path):
        if driver != NVIDIA_DRIVER and NVIDIA_DRIVER in expression:
            yield Issue(place, shown(expression), of_nvidia_domain(driver), Severity.WARNING)


def nvidia_parameters(name: str, path: str, driver: str) -> Iterator[Issue]:
    """A warning about parameters for the driver ``name`` if that is NVIDIA's."""
    if name == NVIDIA_DRIVER and driver != NVIDIA_DRIVER:
        message = f"parameters for NVIDIA's DRA driver, which Tessera ignores: its driver is {driver}"
        yield Issue(path, shown(name), f"{message}, its parameters are in docs/workloads.md", Severity.WARNING)


def of_nvidia_domain(driver: str) -> str:
    return (
        f"{NVIDIA_DRIVER} is the domain of NVIDIA's DRA driver, which Tessera's devices do not have: write {driver}; "
        "type, productName, architecture, profile, parentUUID and the capacity memory have the same names"
    )


def class_for_resource(name: str) -> str:
    """The class that gives what NVIDIA's device plugin gives for an extended resource."""
    if name.startswith(OF_PARTITIONS):
        profile = name.removeprefix(OF_PARTITIONS).replace(".", "-")
        return f"gpu-inference-{profile}"
    return "gpu-dev" if name.endswith(".shared") else "gpu-training"
