"""What ``tessera acceptance`` and the node plugin send each other: JSON over gRPC on the plugin's socket.

The socket is for root only, and the kubelet uses it for its own services.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

SERVICE, METHOD = "gpu.tessera.dev.v1alpha1.Acceptance", "Test"
"""A call with one AcceptanceRequest, which is answered by a stream of AcceptanceMessages until the test has ended."""


class AcceptanceRequest(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Which test to run.

    ``gpu``: a UUID or ``gpu-N`` with the number in its device names; "": the first idle GPU (``read_only``: the first).
    ``wait_seconds``: how long to wait for claims that hold the GPU. ``kill_plugin``: at the end the plugin cuts a
    partition and kills itself.
    """

    gpu: str = ""
    read_only: bool = True
    wait_seconds: float = 0.0
    kill_plugin: bool = False


class StepState(StrEnum):
    RUNNING = "Running"
    PASSED = "Passed"
    FAILED = "Failed"
    SKIPPED = "Skipped"


class AcceptanceStep(msgspec.Struct, frozen=True, rename="camel"):
    """A step of the test. ``detail``: what it has found, or why it failed or was skipped."""

    gpu: str
    step: str
    state: StepState
    detail: str = ""
    seconds: float = 0.0


class AcceptanceMessage(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One of: a ``step`` that begins or has ended; a ``notice`` for people; the ``node`` description at the end."""

    step: AcceptanceStep | None = None
    notice: str = ""
    node: dict[str, Any] | None = None


REQUEST, MESSAGE = msgspec.json.Decoder(AcceptanceRequest), msgspec.json.Decoder(AcceptanceMessage)
