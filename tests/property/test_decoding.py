"""Whatever a tenant writes into the parts of an object that Kubernetes does not type, the rest of it can be read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from driver.kube.get_and_list import page_reader
from driver.kube.tolerant_json import MAX_DEPTH, decode, sanitized
from driver.kube.types import Claim
from kubelet_plugin.status.claim_status import STORED_CLAIM


def nested(depth: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * depth + "1" + closing * depth


DEEP = st.one_of(
    st.integers(1, 5000).map(lambda depth: nested(depth, "[", "]")),
    st.integers(1, 1700).map(nested),
    st.integers(1, 1000).map(lambda depth: nested(depth, '[{"]}":[],"b":', "}]")),
)
WIDE = st.integers(0, 3000).map(lambda width: f"[{','.join(['[]'] * width)}]")
NUMBERS = st.one_of(
    st.integers(1, 5000).map(lambda digits: "-" + "9" * digits), st.sampled_from(["1e999", "-1E400", "0.1e-9999", "-0"])
)
STRINGS = st.lists(
    st.sampled_from(
        [*"\\[]{}:, é😀", '\\"', "\\\\", "\\ud800", "\\uDFFF", "\\ud83d\\ude00", "\\udc00\\ud800", "\\u0000"]
    )
    | st.characters(blacklist_categories=["Cs"], blacklist_characters='"\\', min_codepoint=32)
).map(lambda parts: '"' + "".join(part if part != "\\" else "\\\\" for part in parts) + '"')
HOSTILE = st.recursive(
    st.one_of(DEEP, WIDE, NUMBERS, STRINGS, st.sampled_from(["null", "true"])),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda items: f"[{','.join(items)}]")
        | st.lists(st.tuples(STRINGS, inner), max_size=4).map(
            lambda items: "{" + ",".join(f"{key}:{value}" for key, value in items) + "}"
        )
    ),
    max_leaves=6,
)
"""JSON texts that a Kubernetes API server stores as opaque parameters, the syntax as Go's encoding/json accepts it."""

METADATA = '"metadata":{"name":"small","namespace":"team","uid":"u-1","resourceVersion":"7"}'


def claim(parameters: str) -> bytes:
    """A claim whose parameters for another driver are that text, here and in its allocation."""
    config = f'[{{"opaque":{{"driver":"example.com","parameters":{parameters}}}}}]'
    result = '{"request":"gpu","driver":"gpu.tessera.dev","pool":"p","device":"gpu-0"}'
    devices = f'{{"config":{config},"results":[{result}]}}'
    reported = f'{{"driver":"example.com","pool":"p","device":"d","data":{parameters}}}'
    status = f'{{"allocation":{{"devices":{devices}}},"devices":[{reported}]}}'
    spec = f'{{"devices":{{"config":{config},"requests":[{{"name":"gpu","exactly":{{"deviceClassName":"c"}}}}]}}}}'
    return f'{{"kind":"ResourceClaim",{METADATA},"spec":{spec},"status":{status}}}'.encode()


@given(HOSTILE)
@example(nested(1700))
@example(nested(5000, "[", "]"))
@example('"\\ud800"')
@example("1e999")
def test_a_claim_is_read_whole_whatever_another_drivers_parameters_are(parameters: str) -> None:
    data = claim(parameters)
    for read in (
        decode(data, msgspec.json.Decoder(Claim)),
        page_reader(Claim)(b'{"metadata":{"resourceVersion":"9"},"items":[' + data + b"]}").items[0],  # type: ignore[index]
    ):
        assert (str(read.metadata.key), read.spec.devices.requests[0].name) == ("team/small", "gpu")
        assert read.status.allocation is not None
        assert read.status.allocation.devices.results[0].device == "gpu-0"
    stored = decode(data, STORED_CLAIM)
    assert stored.allocated
    assert stored.entries("gpu.tessera.dev") == []


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN, st.booleans())
def test_what_every_decoder_accepts_stays_as_it_is(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        text.decode()
    except UnicodeDecodeError:
        return
    whole = json.loads(text)
    if not any("\ud800" <= character <= "\udfff" for character in str(whole)):
        assert json.loads(sanitized(text)) == whole


@given(st.integers(0, 3), st.sampled_from([("[", "]"), ('{"a":', "}")]))
def test_values_nested_deeper_than_the_limit_become_null_and_no_others(beyond: int, brackets: tuple[str, str]) -> None:
    found = sanitized(f"[{nested(MAX_DEPTH - 1 + beyond, *brackets)},2]".encode()).decode()
    expected = nested(MAX_DEPTH - 1, *brackets)
    assert found == f"[{expected if beyond == 0 else expected.replace('1', 'null')},2]"


@given(st.binary(max_size=200))
@example(b'"' + b"[" * 200)
@example(b"]" * 200)
def test_what_is_no_json_is_refused_and_nothing_else_happens(data: bytes) -> None:
    decoder = msgspec.json.Decoder(dict[str, Any])
    with pytest.raises(msgspec.MsgspecError):
        decode(b"!" + data, decoder)
