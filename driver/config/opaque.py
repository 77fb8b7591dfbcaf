"""Opaque device parameters in classes and claims, ``gpu.tessera.dev/v1alpha1``.

Strict: unknown kinds, unknown fields and wrong types are refused, all of them at once, each with its path.
The API group is fixed; it does not follow the driver name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from driver.errors import ClaimError

API_VERSION = "gpu.tessera.dev/v1alpha1"


class Parameters(BaseModel):
    """What every kind has in common."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    apiVersion: Literal["gpu.tessera.dev/v1alpha1"] = "gpu.tessera.dev/v1alpha1"  # noqa: N815 - Kubernetes' own spelling


class GpuConfig(Parameters):
    """For a full GPU. It has no settings yet: its presence says that the class means full GPUs."""

    kind: Literal["GpuConfig"]


class MigDeviceConfig(Parameters):
    """For a MIG partition. It has no settings yet, as GpuConfig."""

    kind: Literal["MigDeviceConfig"]


AnyParameters = GpuConfig | MigDeviceConfig

_ADAPTER: TypeAdapter[AnyParameters] = TypeAdapter(Annotated[AnyParameters, Field(discriminator="kind")])


def parse_parameters(raw: Mapping[str, Any], where: str) -> AnyParameters:
    """``raw`` as one of the kinds. Raises ClaimError listing every fault; ``where`` names the object."""
    try:
        return _ADAPTER.validate_python({"apiVersion": None, **raw})
    except ValidationError as error:
        faults = "; ".join(_describe(fault["loc"], fault["msg"], fault["input"]) for fault in error.errors())
        raise ClaimError(
            f"{where}: opaque parameters are not valid: {faults} "
            f"(accepted: apiVersion {API_VERSION}, kind GpuConfig or MigDeviceConfig, no other fields)"
        ) from error


def _describe(location: tuple[int | str, ...], message: str, found: object) -> str:
    # A discriminated union puts the kind in front of the path; people did not write it there.
    path = ".".join(str(part) for part in location if part not in {"GpuConfig", "MigDeviceConfig"})
    shown = repr(found) if not isinstance(found, Mapping) else "the object"
    return f"{path or 'kind'}: {message} (found {shown})"
