"""Types of the API server's objects."""

from __future__ import annotations

import msgspec

from driver.kube.slice_types import ResourceSlice
from driver.kube.types import Claim


def test_an_empty_list_that_is_written_as_null_is_read() -> None:
    """Kubernetes 1.34 writes the devices of a slice so, every version requests and reported conditions of a claim."""
    of_slice = (
        b'{"metadata":{"name":"s","resourceVersion":"1"},"spec":{"driver":"d","pool":{"name":"p"},"devices":null}}'
    )
    assert msgspec.json.decode(of_slice, type=ResourceSlice).spec.devices == ()
    of_claim = b'{"metadata":{"name":"c"},"spec":{"devices":{"requests":null}}}'
    assert msgspec.json.decode(of_claim, type=Claim).spec.devices.requests == ()
    reported = b'{"driver":"d","pool":"p","device":"gpu-0","conditions":null}'
    of_status = b'{"metadata":{"name":"c"},"status":{"devices":[%s]}}' % reported
    assert msgspec.json.decode(of_status, type=Claim).status.devices[0].conditions == ()
