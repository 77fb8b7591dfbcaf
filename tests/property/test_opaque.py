"""Whatever JSON stands in a claim, its parameters are understood or refused; nothing else happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.config.opaque_parameters import parse_parameters
from driver.errors import ClaimError
from driver.model.gpu_settings import TimeSlice

VERSION = "gpu.tessera.dev/v1alpha1"
KNOWN = ["apiVersion", "kind", "sharing", "strategy", "timeSlicing", "timeSlicingConfig", "interval", "mpsConfig"]
VALUES = [VERSION, "resource.nvidia.com/v1beta1", "GpuConfig", "MigDeviceConfig", "ShareConfig", "TimeSlicing", "Short"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(VALUES)
KEYS = st.sampled_from(KNOWN) | st.text(max_size=9)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=20
)
NEARLY = st.fixed_dictionaries(
    {"apiVersion": st.sampled_from(VALUES[:2]), "kind": st.sampled_from(VALUES[2:5])},
    optional={"sharing": st.dictionaries(KEYS, JSON, max_size=4)},
)


@pytest.mark.long
@given(JSON | NEARLY)
def test_random_json_is_parsed_or_refused_with_its_place_and_nothing_else(raw: object) -> None:
    try:
        parsed = parse_parameters(raw, "here")
    except ClaimError as error:
        refusal = str(error)
    else:
        assert parsed.time_slice is None or isinstance(parsed.time_slice, TimeSlice)
        return
    assert refusal.startswith("here: opaque parameters are not valid: ")
