"""A built image in a few lines for people."""

from __future__ import annotations

from deploy.image.build import Built
from tessera.output import columns

MB = 1_000_000


def summary(built: Built) -> str:
    """Sizes by layer, the digest, where its bill of materials and the list of its files are."""
    rows = [[name, *(f"{size / MB:.1f} MB" for size in sizes)] for name, sizes in built.layers.items()]
    total = [f"{sum(sizes) / MB:.1f} MB" for sizes in zip(*built.layers.values(), strict=True)]
    table = columns(["LAYER", "UNPACKED", "COMPRESSED"], [*rows, ["all", *total]])
    return f"{table}\ndigest  {built.digest}\nSBOM    {built.sbom}\nfiles   {built.files}"
