"""``python -m tests.image``, or ``make image``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import click

from driver.errors import FatalError, TesseraError
from tests.image.architecture import ARCHITECTURES
from tests.image.build import REPOSITORY, ensure_image, summary

MACHINES = {machine.name: machine for machine in ARCHITECTURES}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--cache", type=click.Path(path_type=Path), default=Path.home() / ".cache" / "tessera", show_default=True)
@click.option("--name", help=f"The image's name.  [default: {REPOSITORY}:VERSION]")
@click.option("--architecture", type=click.Choice(list(MACHINES)), help="[default: that of this machine]")
def main(cache: Path, name: str | None, architecture: str | None) -> None:
    """Build the container image as an OCI archive, without a Docker engine, on Debian 12 as root.

    From Debian's packages, as apt knows them now, and from the wheels pinned in deploy/image/requirements.lock.
    What was built before of the same inputs is taken from the cache. Prints the archive's path; everything else goes
    to standard error.

    \b
    Examples:
      make image
      ctr -n k8s.io images import "$(make -s image)"
      python -m tests.image --name registry.example/gpu/tessera:1 --architecture arm64
    """
    try:
        names = [name or f"{REPOSITORY}:{version('tessera-dra')}"]
        built = ensure_image(cache, names, step, MACHINES[architecture] if architecture else None)
    except TesseraError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code if isinstance(error, FatalError) else 1)
    click.echo(summary(built), err=True)
    click.echo(built.archive)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print on standard error what is done, and how long it took."""
    click.echo(f"{what} ...", err=True, nl=False)
    began = time.monotonic()
    yield
    click.echo(f" {time.monotonic() - began:.1f} s", err=True)


if __name__ == "__main__":
    main()
