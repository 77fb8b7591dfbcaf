"""Offers as plans write them."""

from __future__ import annotations

import pytest

from driver.model.offer import FULL, SHARE, DeviceKind, Offer, OfferKind, Spot, parsed_offers

OFFERS = {
    "GPU-1/full": Offer("GPU-1", Spot(FULL)),
    "GPU-1/share-0": Offer("GPU-1", Spot(SHARE, 0)),
    "GPU-1/share-12": Offer("GPU-1", Spot(SHARE, 12)),
    "GPU-1/1g.10gb+me@6": Offer("GPU-1", Spot(OfferKind(DeviceKind.PARTITION, "1g.10gb+me"), 6)),
}


@pytest.mark.parametrize(("text", "offer"), OFFERS.items(), ids=OFFERS)
def test_an_offer_is_written_and_read_alike(text: str, offer: Offer) -> None:
    assert str(offer) == text
    assert Offer.parse(text) == offer


@pytest.mark.parametrize(
    "text", ["", "GPU-1", "GPU-1/", "GPU-1/share-", "GPU-1/share-100", "GPU-1/1g.10gb", "a/b/full"]
)
def test_what_is_no_offer_is_skipped(text: str) -> None:
    assert Offer.parse(text) is None
    assert parsed_offers([text, "GPU-1/full"]) == {OFFERS["GPU-1/full"]}
