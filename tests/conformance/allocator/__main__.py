"""``make conformance-allocator``: compare with the real scheduler, and keep its answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import click

from tests.conformance.allocator import answers
from tests.conformance.allocator.judge import WAVE, judging, our_answer, wave_of
from tests.harness.progress import Progress

LIMIT_S = 60.0
"""For one scenario: the real scheduler has 10 s, and is about a hundred times as fast."""


@click.command()
@click.option("--scenarios", default=2000, show_default=True, help="Number of scenarios.")
@click.option("--first", default=0, show_default=True, help="Number of the first scenario.")
@click.option("--keep/--no-keep", default=True, show_default=True, help="Write the answers to answers.json.")
def main(scenarios: int, first: int, *, keep: bool) -> None:
    """Ask the real scheduler and Tessera's allocator what becomes of generated claims; fail if they differ."""
    numbers = list(range(first, first + scenarios))
    progress = Progress()
    with judging("allocator") as judge, progress.part(f"{scenarios} scenarios", scenarios / 15):
        real = judge.answers(numbers)
        release = judge.release
    ours = {number: answer for start in range(0, scenarios, WAVE) for number, answer in _ours(numbers[start:][:WAVE])}
    different = [each for each in numbers if real[each] != ours[each]]
    for each in different:
        click.echo(f"scenario {each}\nscheduler: {real[each]}\nTessera:   {ours[each]}\n")
    if keep and not different:
        answers.write(release, real)
    click.echo(answers.summary(real, different))
    raise SystemExit(1 if different else 0)


def _ours(numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Tessera's answers for the scenarios of one wave, whose slices are all in the cluster."""
    wave = wave_of(numbers)
    for each in wave:
        ends = time.monotonic() + LIMIT_S
        yield each.number, our_answer(each, [other for other in wave if other is not each], partial(_is_past, ends))


def _is_past(moment: float) -> bool:
    return time.monotonic() > moment


if __name__ == "__main__":
    main()
