"""``make conformance-allocator``: compare with the real scheduler, and keep its answers."""

from __future__ import annotations

import click

from tessera.simulate.allocatable_devices import FailureKind
from tests.conformance.allocator import answers
from tests.conformance.allocator.judge import WAVE, judging, our_answers
from tests.harness.progress import Progress


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
    waves = (numbers[start : start + WAVE] for start in range(0, scenarios, WAVE))
    ours = {number: answer for wave in waves for number, answer in our_answers(wave, wave)}
    undecided = {each for each in numbers if FailureKind.TOO_LONG in (real[each], ours[each])}
    different = [each for each in numbers if real[each] != ours[each] and each not in undecided]
    for each in different:
        click.echo(f"scenario {each}\nscheduler: {real[each]}\nTessera:   {ours[each]}\n")
    if undecided:
        click.echo(f"not compared, because a search took too long: {', '.join(map(str, sorted(undecided)))}")
    if keep and not different:
        answers.write(release, {each: answer for each, answer in real.items() if each not in undecided})
    click.echo(answers.summary(real, different))
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
