"""How a plan's status describes a node's GPUs: every fact of theirs, so that the controller knows as much of a device
that could be offered as the node does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import msgspec

from driver.errors import StateError
from driver.model.gpu import Gpu, NvLink, Profile


@dataclass(frozen=True, slots=True)
class GpuState:
    """What a node knows of a GPU.

    ``number`` is the one in its device names; ``shares`` into how many it is divided (0: none); ``foreign`` the bit
    mask of memory slices under partitions that Tessera did not make; ``fault`` why it can't be used at present.
    """

    gpu: Gpu
    number: int
    shares: int = 0
    shares_only: bool = False
    foreign: int = 0
    fault: str | None = None


class Described(msgspec.Struct, frozen=True):
    """Every GPU of a node without its profiles, and which of ``geometries`` those are: most GPUs are cut alike."""

    gpus: tuple[tuple[GpuState, int], ...] = ()
    geometries: tuple[tuple[Profile, ...], ...] = ()


DESCRIBED = msgspec.json.Decoder(Described)


def described(states: Iterable[GpuState]) -> str:
    """The inventory of a status: one string, which the API server need not look into (5 ms less at each write)."""
    states = tuple(states)
    geometries = tuple(dict.fromkeys(state.gpu.profiles for state in states))
    plain = (replace(state, gpu=replace(state.gpu, profiles=())) for state in states)
    places = (geometries.index(state.gpu.profiles) for state in states)
    return msgspec.json.encode(Described(tuple(zip(plain, places, strict=True)), geometries)).decode()


def states_of(inventory: str) -> list[GpuState]:
    """What ``described`` was given; nothing where a node has not told yet. Raises StateError where it can't be read."""
    if not inventory:
        return []
    try:
        told = DESCRIBED.decode(inventory)
        geometries = tuple(map(_shared_profiles, told.geometries))
        return [replace(state, gpu=_shared(state.gpu, geometries[place])) for state, place in told.gpus]
    except (msgspec.MsgspecError, LookupError) as error:
        raise StateError(f"status.inventory of a plan can't be read: {error}") from error


@lru_cache(1024)
def _shared_profiles(profiles: tuple[Profile, ...]) -> tuple[Profile, ...]:
    """The one tuple of all that are equal: a cluster has few geometries and many GPUs."""
    return profiles


@lru_cache(1024)
def _shared_links(
    generation: int | None, links: int, bandwidth: int | None, peers: tuple[tuple[str, int], ...]
) -> NvLink:
    return NvLink(generation, links, bandwidth, dict(peers))


def _shared(gpu: Gpu, profiles: tuple[Profile, ...]) -> Gpu:
    """``gpu`` with these profiles; what many GPUs have in common is there once."""
    texts: dict[str, Any] = {name: sys.intern(text) for name in TEXTS if isinstance(text := getattr(gpu, name), str)}
    link = gpu.nvlink
    if link is not None:
        link = _shared_links(link.generation, link.links, link.bandwidth, tuple(link.peers.items()))
    return replace(gpu, profiles=profiles, nvlink=link, **texts)


TEXTS = tuple(each.name for each in fields(Gpu) if each.name != "uuid" and "str" in str(each.type))
"""The texts that GPUs have in common."""


def line(state: GpuState) -> str:
    """A GPU in a line, for people."""
    gpu = state.gpu
    mode = f", MIG {gpu.mig_mode}" if gpu.mig_capable else ""
    shares = f", {state.shares} shares" if state.shares else ""
    fault = f"; can't be used: {state.fault}" if state.fault else ""
    return f"gpu-{state.number} {gpu.uuid}: {gpu.product_name}{mode}{shares}{fault}"
