"""What the settings that name GPUs come to on those that are there."""

from __future__ import annotations

from collections.abc import Sequence

from driver.config.names import meant
from driver.model.device import MOST_SHARES
from driver.model.gpu import Gpu
from driver.model.selection import Selection
from driver.model.shares import FEWEST_SHARES, ShareCounts


def share_warnings(shares: ShareCounts, shares_only: Selection, gpus: Sequence[Gpu]) -> list[str]:
    """One line for each setting without effect on ``gpus``: a name of no GPU, or only shares where there are none."""
    known = _known(gpus)
    products = sorted({gpu.product_name for gpu in gpus})
    return [
        *(
            f"--shares {name}: no GPU here has that name{known}{meant(name, products)}"
            for name in shares.unmatched(gpus)
        ),
        *(f"--shares-only {name}: no GPU here has that name{known}" for name in shares_only.unmatched(gpus)),
        *(
            f"--shares-only: GPU {gpu.index} ({gpu.product_name}, {gpu.uuid}) has no number of shares: "
            f"set --shares {gpu.index}=R, R from {FEWEST_SHARES} to {MOST_SHARES}"
            for gpu in gpus
            if gpu in shares_only and not shares.of(gpu)
        ),
    ]


def mig_warnings(mig_gpus: Selection, gpus: Sequence[Gpu]) -> list[str]:
    """One line for each name of no GPU in ``--mig-gpus``."""
    return [f"--mig-gpus {name}: no GPU here has that name{_known(gpus)}" for name in mig_gpus.unmatched(gpus)]


def _known(gpus: Sequence[Gpu]) -> str:
    """``; there are NVIDIA L4 (0, 1), ...``: the GPUs by product, with their indices."""
    indices: dict[str, list[str]] = {}
    for gpu in gpus:
        indices.setdefault(gpu.product_name, []).append(str(gpu.index))
    return "; there are " + (", ".join(f"{name} ({', '.join(at)})" for name, at in sorted(indices.items())) or "none")
