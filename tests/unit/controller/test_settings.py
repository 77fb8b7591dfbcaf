"""The controller's flags: errors that name the flag, its value and what is accepted."""

from __future__ import annotations

import pytest

from controller.decision.write_and_evict import publish_held_limit
from controller.settings import controller_settings
from driver.errors import UsageError
from driver.simulator.products import find_product, product_names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "foo=3", "'foo=3': unknown class 'foo'; there are full, share, shared, clique, and the MIG", id="foo"
        ),
        pytest.param("Full=3", "the MIG profiles, such as 1g.10gb; did you mean full?", id="capitals"),
        pytest.param("1g.10gb=1,1g10gb=3", "'1g10gb=3': unknown class '1g10gb'", id="no point"),
        pytest.param("=3", "'=3': unknown class ''", id="no name"),
        pytest.param("full", "'full' is not PROFILE=WEIGHT", id="no number"),
        pytest.param("full=-1", "'full=-1' is not PROFILE=WEIGHT with a weight of 0 or more", id="negative"),
        pytest.param("full=inf", "'full=inf' is not PROFILE=WEIGHT", id="infinite"),
        pytest.param("full=nan", "'full=nan' is not PROFILE=WEIGHT", id="no number at all"),
    ],
)
def test_a_weight_of_what_nobody_asks_for_is_refused_with_what_there_is(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        controller_settings(weights=text)
    assert f"--weights {text}: " in str(refused.value)
    assert expected in str(refused.value)


def test_every_profile_of_a_known_product_can_have_a_weight() -> None:
    products = [found for name in product_names() if (found := find_product(name)) is not None]
    names = {profile.name for product in products for profile in product.profiles}
    settings = controller_settings(
        weights=", ".join(f"{name} = 2" for name in sorted(names)) + ",full=0,share=1,clique=3"
    )
    assert settings.weights == dict.fromkeys(names, 2.0) | {"full": 0.0, "share": 1.0, "clique": 3.0}


@pytest.mark.parametrize(
    ("given", "minor", "most"),
    [(None, 37, 500), (None, 36, 80), (None, None, 500), (0, 36, 0), (9, 37, 9)],
)
def test_the_limit_of_auto_is_the_given_one_or_that_of_the_version(
    given: int | None, minor: int | None, most: int
) -> None:
    assert publish_held_limit(controller_settings(publish_held_gpus=given), minor) == most
