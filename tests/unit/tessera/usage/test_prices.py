"""The prices file: which entry counts, and what is said of files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.errors import UsageError
from tessera.usage.prices import read_prices

EXAMPLE = Path(__file__).parents[4] / "deploy" / "examples" / "usage" / "prices.yaml"


@pytest.mark.parametrize(
    ("product", "price"),
    [
        ("NVIDIA H100 80GB HBM3", 2.40),
        ("NVIDIA A100-SXM4-80GB", 1.50),
        ("NVIDIA A100-SXM4-40GB", 1.10),
        ("NVIDIA L4", 0.35),
        ("NVIDIA L40S", None),
    ],
)
def test_the_first_entry_that_matches_is_the_price(product: str, price: float | None) -> None:
    assert read_prices(EXAMPLE).price_of(product) == price


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the whole: Input should be a valid dictionary"),
        ("currency: EUR", "prices: Field required"),
        ("{currency: '=EUR', prices: [{product: a, perGpuHour: 1}]}", "currency: String should match"),
        ("{currency: EUR, prices: [{product: a, perGpuHour: '1'}]}", "prices[0].perGpuHour: Input should be a valid"),
        ("{currency: EUR, prices: [{product: a, perGpuHour: -1}]}", "greater than or equal to 0 (found -1)"),
        ("{currency: EUR, prices: [{product: a, perGpuHour: .inf}]}", "finite"),
        ("{currency: EUR, prices: [{product: a, perHour: 1}]}", "prices[0].perHour: Extra inputs are not permitted"),
        ("{currency: EUR, prices: []}", "at least 1 item"),
        ("currency: [", "is no YAML"),
        ("currency: !!python/object:os.system {}", "is no YAML"),
        ("# " + "x" * 2**20, "larger than 1 MiB"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_prices(file)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"--prices {file}: ")


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(UsageError, match="--prices /nowhere: can't be read: No such file"):
        read_prices(Path("/nowhere"))
