"""``python -m tests.release``, or ``make release``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from driver.errors import FatalError, TesseraError
from tests.image.__main__ import step
from tests.image.architecture import ARCHITECTURES
from tests.image.build import REPOSITORY, renew_lists
from tests.release.build import summary, write

PATH = click.Path(path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--cache", type=PATH, default=Path.home() / ".cache" / "tessera", show_default=True)
@click.option("--out", type=PATH, default=Path("dist"), show_default=True, help="Folder for the files.")
@click.option("--repository", default=REPOSITORY, show_default=True, help="Registry and name of the images.")
def main(cache: Path, out: Path, repository: str) -> None:
    """Build the files of a release: wheel, images for amd64 and arm64, chart, bills of materials, checksums.

    On Debian 12 as root, from Debian's packages as they are now and from the wheels pinned in
    deploy/image/requirements.lock. The chart names the images in REPOSITORY by their digest.

    \b
    Examples:
      make release
      make release REPOSITORY=registry.example/gpu/tessera
    """
    try:
        for architecture in ARCHITECTURES:
            with step(f"{architecture.name}: Debian's lists of packages"):
                renew_lists(cache, architecture)
        steps = {machine: lambda what, name=machine.name: step(f"{name}: {what}") for machine in ARCHITECTURES}
        dist = write(cache, out, repository, steps)
    except TesseraError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code if isinstance(error, FatalError) else 1)
    click.echo(summary(dist))


if __name__ == "__main__":
    main()
