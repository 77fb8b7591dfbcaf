"""``python -m tests.fuzz``: hostile objects against the controller's reading and deciding."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from tests.fuzz.run import fuzz


@click.command()
@click.option("--objects", type=click.IntRange(100), default=1_000_000, show_default=True, help="How many to send.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the random objects.")
def main(objects: int, seed: int) -> None:
    """Send hostile objects to the controller's caches while it decides, and report what failed.

    \b
    Examples:
      python -m tests.fuzz
      python -m tests.fuzz --objects 10000 --seed 7
    """
    report = fuzz(objects, seed, lambda line: click.echo(line, err=True))
    for name, value in asdict(report).items():
        click.echo(f"{name:26} {value:.3f}" if isinstance(value, float) else f"{name:26} {value}")
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
