"""``python -m tests.size``, or ``make size``: lines and modules of the product and of the tests, by area.

A module is a .py file, except an __init__.py with nothing but a docstring. Generated code is not counted.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from tessera.tables_and_drawings import columns

PROJECT = Path(__file__).parents[1]
PRODUCT = ("driver", "kubelet_plugin", "controller", "deviceclasses", "tessera")
GENERATED = "generated"
MOST_MODULES = 12
"""A folder of the product with more modules than this is listed."""


@dataclass(frozen=True)
class Module:
    """A counted file; ``folder`` is relative to the project."""

    folder: Path
    lines: int


@dataclass(frozen=True)
class Area:
    """A line of the table."""

    part: str
    area: str
    lines: int
    modules: int


def modules(top: Path) -> Iterator[Module]:
    """The modules below the folder ``top``."""
    for file in sorted(top.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if GENERATED not in file.parts and not (file.name == "__init__.py" and _is_docstring(text)):
            yield Module(file.parent.relative_to(PROJECT), text.count("\n"))


def _is_docstring(text: str) -> bool:
    body = ast.parse(text).body
    return not body or (len(body) == 1 and isinstance(body[0], ast.Expr))


def areas() -> list[Area]:
    """The packages of the product, then the folders of the tests, each followed by the total."""
    folders = sorted(path.name for path in (PROJECT / "tests").iterdir() if any(path.glob("*.py")))
    product = [_area("product", name, PROJECT / name) for name in PRODUCT]
    total = Area("product", "total", sum(each.lines for each in product), sum(each.modules for each in product))
    tests = [_area("tests", f"tests/{name}", PROJECT / "tests" / name) for name in folders]
    return [*product, total, *tests, _area("tests", "total", PROJECT / "tests")]


def crowded() -> dict[str, int]:
    """The product's folders with more than ``MOST_MODULES`` modules, and how many they have."""
    counts = Counter(str(module.folder) for name in PRODUCT for module in modules(PROJECT / name))
    return {name: count for name, count in sorted(counts.items()) if count > MOST_MODULES}


def _area(part: str, name: str, top: Path) -> Area:
    found = list(modules(top))
    return Area(part, name, sum(each.lines for each in found), len(found))


@click.command()
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(output: str) -> None:
    """Print lines and modules by area, and the product's folders with more than 12 modules."""
    found, full = areas(), crowded()
    if output == "json":
        folders = [{"folder": name, "modules": count} for name, count in full.items()]
        click.echo(json.dumps([*map(asdict, found), *folders], indent=2))
        return
    rows = [[each.part, each.area, str(each.lines), str(each.modules)] for each in found]
    click.echo(columns(["PART", "AREA", "LINES", "MODULES"], rows))
    click.echo(f"\nfolders of the product with more than {MOST_MODULES} modules: {len(full)}")
    for name, count in full.items():
        click.echo(f"  {name}: {count}")


if __name__ == "__main__":
    main()
