"""Objects as API servers write them."""

from __future__ import annotations

import msgspec
import pytest

from driver.kube.types import ResourceSlice


@pytest.mark.parametrize("devices", ["", ', "devices": []', ', "devices": null'])
def test_a_slice_without_devices_can_be_read_however_the_version_of_kubernetes_writes_it(devices: str) -> None:
    pool = '{"name": "p", "generation": 1, "resourceSliceCount": 2}'
    text = f'{{"metadata": {{"name": "s", "resourceVersion": "1"}}, "spec": {{"driver": "d", "nodeName": "n", "pool": {pool}{devices}}}}}'
    assert msgspec.json.decode(text, type=ResourceSlice).spec.devices == ()
