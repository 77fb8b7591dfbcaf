"""Many objects written to the API server at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from tests.harness.progress import Part

WRITERS = 12
BATCH = 600
"""What is prepared ahead: a fleet's slices are some hundred megabytes of JSON."""

T = TypeVar("T")


def in_parallel(part: Part, work: Callable[[T], object], items: Iterable[T]) -> int:
    """Call ``work`` for each, several at a time; says how many there were. The first error ends it."""
    rest, done = iter(items), 0
    with ThreadPoolExecutor(WRITERS) as pool:
        while batch := list(islice(rest, BATCH)):
            for future in [pool.submit(work, item) for item in batch]:
                future.result()
            done += len(batch)
            part.tick(f"{done} done")
    return done
