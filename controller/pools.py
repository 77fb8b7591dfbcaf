"""Whether the scheduler takes a pool for complete (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class PoolPart(NamedTuple):
    """What one slice says of its pool: its generation, and how many slices that has."""

    pool: str
    generation: int
    slices: int


def incomplete_pools(parts: Iterable[PoolPart]) -> dict[str, str]:
    """By pool, what is missing. The newest generation counts: slices of older ones are ignored by the scheduler."""
    newest: dict[str, list[PoolPart]] = {}
    for part in parts:
        known = newest.get(part.pool)
        if known is None or part.generation > known[0].generation:
            newest[part.pool] = [part]
        elif part.generation == known[0].generation:
            known.append(part)
    return {pool: _missing(found) for pool, found in newest.items() if len(found) < found[0].slices}


def _missing(found: list[PoolPart]) -> str:
    [first, *_] = found
    return f"is incomplete: it has {len(found)} of the {first.slices} slices of its generation {first.generation}"
