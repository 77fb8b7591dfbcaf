"""The pictures of ``make demo-curation``."""

from __future__ import annotations

from driver.model.device import devices_of
from tests.demo.curation import cells, requests, side_by_side
from tests.support.gpus import gpu_of


def test_a_gpu_is_a_letter_for_each_memory_slice() -> None:
    gpu = gpu_of()
    devices = {device.name: device for device in devices_of(gpu, 0)}
    held = [devices["gpu-0-mig-3g40gb-4"], devices["gpu-0-mig-1g10gb-0"]]
    assert cells(8, held) == "1...3333"
    assert cells(8, [devices["gpu-0"]]) == "########"


def test_forty_claims_come_in_the_same_order_every_time() -> None:
    assert len(requests()) == 40
    assert requests() == requests()


def test_the_longer_picture_goes_on_alone() -> None:
    assert side_by_side(["a"], ["b", "c"]).split() == ["a", "b", "c"]
