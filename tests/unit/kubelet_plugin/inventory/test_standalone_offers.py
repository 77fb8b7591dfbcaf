"""The disjoint offers of a node without controller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from driver.errors import UsageError
from driver.model.device import devices_of
from driver.model.gpu import Gpu, MigMode
from driver.model.gpu_settings import parse_layouts, parse_share_counts
from kubelet_plugin.inventory.standalone_offers import check_layouts, setting_warnings, standalone_offers
from kubelet_plugin.settings import node_settings
from tests.support.gpus import H100, gpu_of

A100 = replace(gpu_of("NVIDIA A100-SXM4-40GB"), mig_mode=MigMode.ENABLED)


def offers(gpu: Gpu, layout: str = "", shares: int = 0) -> set[str]:
    return {device.name for device in standalone_offers(gpu, devices_of(gpu, 0, shares), parse_layouts(layout))}


@pytest.mark.parametrize(
    ("gpu", "shares", "layout", "expected"),
    [
        pytest.param(gpu_of(), 0, "", {"gpu-0"}, id="full"),
        pytest.param(gpu_of("NVIDIA L4"), 0, "", {"gpu-0"}, id="full without MIG"),
        pytest.param(gpu_of(), 2, "", {"gpu-0-share-0", "gpu-0-share-1"}, id="shares"),
        pytest.param(A100, 0, "", {"gpu-0-mig-7g40gb-0"}, id="Ampere in MIG mode"),
        pytest.param(replace(A100, mig_mode=MigMode.DISABLED), 0, "0=1g.5gb", {"gpu-0"}, id="Ampere not in MIG mode"),
        pytest.param(A100, 0, "0=4g.20gb,3g.20gb", {"gpu-0-mig-4g20gb-0", "gpu-0-mig-3g20gb-4"}, id="Ampere"),
        pytest.param(gpu_of(), 0, "1=1g.10gb", {"gpu-0"}, id="the layout of another GPU"),
        pytest.param(
            gpu_of(),
            0,
            f"all=7g.80gb;{H100}=3g.40gb,2g.20gb,1g.10gb,1g.10gb",
            {"gpu-0-mig-3g40gb-4", "gpu-0-mig-2g20gb-0", "gpu-0-mig-1g10gb-2", "gpu-0-mig-1g10gb-3"},
            id="placed so that all fit",
        ),
    ],
)
def test_a_gpu_offers(gpu: Gpu, shares: int, layout: str, expected: set[str]) -> None:
    assert offers(gpu, layout, shares) == expected


def refusal(layout: str, shares: str = "", gpu: Gpu | None = None) -> str:
    with pytest.raises(UsageError) as refused:
        check_layouts(parse_layouts(layout), parse_share_counts(shares), [gpu or gpu_of()])
    return str(refused.value)


def test_a_layout_that_a_gpu_can_not_have_is_refused_with_what_would_be_accepted() -> None:
    named = f"--layout 0=3g.40gb,9g.99gb: GPU 0 ({H100}, GPU-0): 9g.99gb is no profile of it, accepted are 1g.10gb, "
    assert refusal("0=3g.40gb,9g.99gb").startswith(named)
    assert refusal("all=2g.20gb,3g.40gb,3g.40gb,1g.10gb").endswith(
        "these partitions do not fit together, accepted would be 2g.20gb,3g.40gb,1g.10gb"
    )
    assert refusal("0=1g.10gb+me,1g.10gb+me").endswith("accepted would be 1g.10gb+me")
    assert refusal("0=3g.40gb", "all=4").endswith("--shares divides it into 4 shares: remove one of the two")
    assert refusal("0=3g.40gb", gpu=gpu_of("NVIDIA L4")).endswith("it has no MIG: remove its layout")


def test_a_layout_without_effect_is_told() -> None:
    waiting = replace(A100, mig_mode=MigMode.DISABLED)
    found = [*setting_warnings(node_settings(node_name="n", layout="all=1g.5gb;7=1g.5gb"), [waiting])]
    name = f"GPU 0 ({waiting.product_name}, GPU-0)"
    assert found[0] == f"--layout 7: no GPU here has that name; there are {waiting.product_name} (0)"
    assert found[1].startswith(f"--layout: {name} is not in MIG mode, which takes a reset to change: add it to --mig-g")
    assert len(found) == 2
