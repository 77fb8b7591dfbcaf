"""Settings of the controller: parsed once, at the edge, and frozen."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from driver.config.flag_values import (
    DEFAULT_DRIVER,
    ListenAddress,
    check_driver_name,
    check_namespace,
    parse_listen_address,
)
from driver.config.suggestions import meant
from driver.errors import UsageError
from driver.model.offer import FULL, SHARE, SHARED, OfferKind, partition_kind
from driver.placement.measure import CLIQUE_CLASS, FULL_CLASS, SHARE_CLASS, SHARED_CLASS

PROFILE = re.compile(r"\d+g\.\d+gb([+-][a-z.]+)*")
"""Names of MIG profiles as in NVML: 1g.10gb, 1g.24gb+me.all, 2g.48gb-me."""

OTHER_CLASSES = (FULL_CLASS, SHARE_CLASS, SHARED_CLASS, CLIQUE_CLASS)


def _weights(value: object) -> object:
    """``1g.10gb=3,7g.80gb=1`` as a mapping."""
    if not isinstance(value, str):
        return value
    return dict(_weight(part.strip()) for part in value.split(",") if part.strip())


def _weight(part: str) -> tuple[str, float]:
    name, _, number = (piece.strip() for piece in part.partition("="))
    try:
        weight = float(number)
    except ValueError:
        weight = -1.0
    if not 0 <= weight < float("inf"):
        raise ValueError(f"{part!r} is not PROFILE=WEIGHT with a weight of 0 or more, such as 1g.10gb=3")
    if name not in OTHER_CLASSES and not PROFILE.fullmatch(name):
        there = f"there are {', '.join(OTHER_CLASSES)}, and the MIG profiles, such as 1g.10gb"
        raise ValueError(f"{part!r}: unknown class {name!r}; {there}{meant(name, OTHER_CLASSES)}")
    return name, weight


def _minimum(value: object) -> object:
    """``full=8,1g.10gb=2`` as a mapping, ``none`` as an empty one, ``auto`` as None."""
    if not isinstance(value, str) or value == "auto":
        return None if value == "auto" else value
    if value == "none":
        return {}
    return dict(_count(part.strip()) for part in value.split(",") if part.strip())


def _count(part: str) -> tuple[OfferKind, int]:
    name, _, number = (piece.strip() for piece in part.partition("="))
    kinds = {"full": FULL, "share": SHARE, "shared": SHARED}
    if not number.isdecimal() or not (name in kinds or PROFILE.fullmatch(name)):
        raise ValueError(f"{part!r} is not KIND=COUNT; accepted are auto, none, and such as full=8,1g.10gb=2,share=4")
    return kinds.get(name) or partition_kind(name), int(number)


def _listen(value: object) -> object:
    return parse_listen_address(value) if isinstance(value, str) else value


def _identity() -> str:
    return f"{socket.gethostname()}_{os.getpid()}"


class ControllerSettings(BaseModel):
    """The settings of ``tessera controller``; field names are the flags' names, and their help says what they mean.

    ``min_published``: None (``auto``): as ListedDevices says. ``settle_s``: how long a fence takes to reach all API
    servers. ``fence_minutes``: how long a withdrawn device stays fenced, since a decision of the scheduler may be that
    late. ``publish_held``: whether nodes without offers publish their held devices; ``auto``: in clusters of at
    most ``publish_held_gpus`` GPUs (None: by the version of Kubernetes). ``web_tls_cert``: None: plain HTTP.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kubeconfig: Path | None = None
    driver_name: Annotated[str, AfterValidator(check_driver_name)] = DEFAULT_DRIVER
    namespace: Annotated[str, AfterValidator(check_namespace)] = "tessera"
    identity: Annotated[str, Field(min_length=1, max_length=253)] = Field(default_factory=_identity)
    offers: Annotated[int, Field(ge=1, le=100)] = 2
    min_published: Annotated[dict[OfferKind, int] | None, BeforeValidator(_minimum)] = None
    settle_s: Annotated[float, Field(ge=0, le=60)] = 1.0
    linger_s: Annotated[float, Field(ge=0, le=600)] = 10.0
    fence_minutes: Annotated[float, Field(ge=1, le=120)] = 15.0
    weights: Annotated[dict[str, float], BeforeValidator(_weights)] = Field(default_factory=dict)
    unused_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    publish_held: Literal["always", "auto"] = "auto"
    publish_held_gpus: Annotated[int | None, Field(ge=0)] = None
    offer_mode: Literal["auto", "counters", "disjoint"] = "auto"
    evict_conflicting: bool = True
    evict_failed_starts_s: Annotated[float, Field(ge=0, le=3600)] = 120.0
    kueue: bool = False
    node_labels: Literal["none", "tessera", "all"] = "tessera"
    metrics_address: Annotated[ListenAddress | None, BeforeValidator(_listen)] = None
    health_address: Annotated[ListenAddress | None, BeforeValidator(_listen)] = None
    web_address: Annotated[ListenAddress | None, BeforeValidator(_listen)] = None
    web_tls_cert: Path | None = None
    web_tls_key: Path | None = None

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.web_tls_cert is None) != (self.web_tls_key is None):
            raise ValueError("--web-tls-cert and --web-tls-key: give both or none")
        return self


def controller_settings(**values: object) -> ControllerSettings:
    """Settings from flags; None means the default. Raises UsageError naming every flag that is wrong."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return ControllerSettings.model_validate(given)
    except ValidationError as error:
        faults = (_described(fault["loc"], fault["msg"], fault["input"]) for fault in error.errors())
        raise UsageError("; ".join(faults)) from error


def _described(location: tuple[int | str, ...], message: str, found: object) -> str:
    if not location:  # about several flags, which it names
        return message.removeprefix("Value error, ")
    flag = "--" + ".".join(str(part) for part in location).replace("_", "-")
    if found is None or isinstance(found, dict):
        return f"{flag}: {message}"
    return f"{flag} {found}: {message.removeprefix('Value error, ')}"
