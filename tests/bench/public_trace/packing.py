"""How few GPUs could hold a set of requests if everything could be arranged anew: no placement can do better.

H100 (NVML's placements): a GPU has 7 compute and 8 memory slices. 1g takes 1 and 1, 2g 2 and 2, 3g 3 and 4, 4g 4 and
4. What keeps within both has legal placements, except that there is one 4g at most and that no 1g has the last memory
slice. So there is room beside a 4g for one 3g, or for a 2g and a 1g, or for three 1g; beside a 3g for another one, or
for at most two 2g and 1g, which have four slices together; otherwise for at most three 2g and 1g, which have seven.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from driver.model.offer import FULL
from tests.bench.placement.trace import NODE_GPUS, Request

ONE, TWO, THREE, FOUR = "1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb"
SIZES = frozenset({1, 2, 4, NODE_GPUS})
"""Numbers of GPUs in one request. Each divides the next: nodes that are filled with the largest first have no gaps."""


def gpus_needed(counts: Mapping[Request, int]) -> int:
    """The fewest GPUs of whole nodes that hold all requests. Raises ValueError for what it knows no bound of."""
    whole, partitions = 0, dict.fromkeys((ONE, TWO, THREE, FOUR), 0)
    for request, count in counts.items():
        if request.key == FULL and request.count in SIZES:
            whole += request.count * count
        elif request.count == 1 and request.key.profile in partitions:
            partitions[request.key.profile] += count
        else:
            raise ValueError(f"no bound is known for {request}")
    return whole + partition_gpus(partitions[ONE], partitions[TWO], partitions[THREE], partitions[FOUR])


@lru_cache(maxsize=100_000)
def partition_gpus(ones: int, twos: int, threes: int, fours: int) -> int:
    """The fewest GPUs that hold so many partitions: over every number of pairs of a 4g and a 3g, and of two 3g."""
    return min(
        _with_pairs(ones, twos, threes - mixed - 2 * equal, fours - mixed) + mixed + equal
        for mixed in range(min(threes, fours) + 1)
        for equal in range((threes - mixed) // 2 + 1)
    )


def _with_pairs(ones: int, twos: int, threes: int, fours: int) -> int:
    """As ``partition_gpus``, where no 3g and no 4g share a GPU with another of them. A 2g takes the room of two 1g."""
    lacking_twos = twos - fours - 2 * threes
    lacking_room = ones + 2 * twos - 3 * fours - 4 * threes
    empty = max(0, -(-lacking_twos // 3), -(-lacking_room // 7))
    return fours + threes + empty
