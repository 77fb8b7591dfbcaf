"""Opaque device parameters in classes and claims: ours, and NVIDIA's translated.

Strict: a wrong apiVersion, kind, field, value or type is refused, all of them at once, each with its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from driver.config.parameters import NVIDIA, TESSERA, AnyParameters, GpuConfig, MigDeviceConfig, ShareConfig, translate
from driver.config.schema import Fault, Group, InvalidParameters, Strict, shown, validate, wrong_name
from driver.config.suggestions import nearest
from driver.model.device import DeviceKind

__all__ = [
    "FITTING",
    "AnyParameters",
    "GpuConfig",
    "InvalidParameters",
    "MigDeviceConfig",
    "ShareConfig",
    "devices_for",
    "parse_parameters",
]

FITTING: Mapping[type[AnyParameters], DeviceKind] = {
    GpuConfig: DeviceKind.FULL,
    MigDeviceConfig: DeviceKind.PARTITION,
    ShareConfig: DeviceKind.SHARE,
}
"""Which kind of device each kind of parameters is for."""

GROUPS = {group.api_version: group for group in (TESSERA, NVIDIA)}


def parse_parameters(raw: object, where: str, device: DeviceKind | None = None) -> AnyParameters:
    """``raw`` (decoded JSON or YAML) as one of our kinds; ``device`` says what kind of device it is for, if known.

    Raises InvalidParameters, a ClaimError that lists every fault; ``where`` names the object in it.
    """
    if not isinstance(raw, Mapping):
        raise InvalidParameters(where, [Fault("parameters", shown(raw), "must be an object with apiVersion and kind")])
    faults, group = _group(raw)
    wrong, model = _model(raw, group)
    faults += wrong
    settings = {name: value for name, value in raw.items() if name not in {"apiVersion", "kind"}}
    parsed = validate(model, settings) if model else []
    if isinstance(parsed, list) or faults:
        raise InvalidParameters(where, [*faults, *(parsed if isinstance(parsed, list) else [])])
    return cast("AnyParameters", parsed) if group is TESSERA else translate(parsed, device)


def devices_for(raw: object) -> frozenset[DeviceKind]:
    """The kinds of devices that ``raw`` is for; none where it is not valid."""
    try:
        return frozenset(kind for kind in DeviceKind if FITTING[type(parse_parameters(raw, "", kind))] is kind)
    except InvalidParameters:
        return frozenset()


def _group(raw: Mapping[Any, Any]) -> tuple[list[Fault], Group]:
    """The API version's kinds; where there is no such version, those that were most probably meant."""
    found = raw.get("apiVersion")
    known = found if isinstance(found, str) else ""
    if known in GROUPS:
        return [], GROUPS[known]
    return [wrong_name("apiVersion", found, list(GROUPS), {})], GROUPS[nearest(known, GROUPS) or TESSERA.api_version]


def _model(raw: Mapping[Any, Any], group: Group) -> tuple[list[Fault], type[Strict] | None]:
    """The kind's schema; where there is no such kind, the one that was most probably meant, if any."""
    found = raw.get("kind")
    known = found if isinstance(found, str) else ""
    if known in group.kinds:
        return [], group.kinds[known]
    close = nearest(known, group.kinds) if known not in group.refused else None
    return [wrong_name("kind", found, list(group.kinds), group.refused)], group.kinds[close] if close else None
