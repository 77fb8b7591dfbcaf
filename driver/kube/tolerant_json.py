"""Decoding of what the API server sends, whatever tenants have put into it.

Opaque parameters and device data are stored as their author wrote them, for any driver. They are valid JSON, but more
than a decoder takes even when it only skips them: objects nested thousands of levels deep, escapes of half a surrogate
pair, bytes that are not UTF-8. The typed fields of Kubernetes have none of these.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

MAX_DEPTH = 64
"""Deepest nesting that is kept. Typed fields of the kinds that Tessera reads end at about a dozen levels."""

BRACKETS = re.compile(rb'(?:[^\[\]{}"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+([\[{]+|[\]}]+)', re.DOTALL)
"""Strings and whatever else is of no interest here, then a run of opening or of closing brackets."""

ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape sequence; the group is half a surrogate pair without its other half."""

T = TypeVar("T")


def decode(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode ``data``; where that fails, try once more without what no typed field can contain (``sanitized``).

    Raises MsgspecError if ``data`` is not JSON, or not of the decoder's type.
    """
    try:
        return decoder.decode(data)
    except (RecursionError, UnicodeDecodeError, msgspec.DecodeError):
        return decoder.decode(sanitized(bytes(data)))


def sanitized(data: bytes) -> bytes:
    """A JSON text that strict decoders accept, made of ``data``.

    Values nested deeper than MAX_DEPTH become null; half surrogate pairs and bytes that are not UTF-8 become U+FFFD.
    Takes linear time and no recursion. A text that is not JSON stays one that is not.
    """
    data = ESCAPE.sub(_whole_pair, data.decode("utf-8", "replace").encode())
    parts: list[bytes] = []
    copied = depth = end = 0
    while found := BRACKETS.match(data, end):
        start, end = found.span(1)
        if data[start] in b"[{":
            if depth <= MAX_DEPTH < depth + end - start:
                parts.append(data[copied : start + MAX_DEPTH - depth])
            depth += end - start
        else:
            if depth - (end - start) <= MAX_DEPTH < depth:
                parts.append(b"null")
                copied = start + depth - MAX_DEPTH
            depth -= end - start
    return b"".join((*parts, data[copied:]))


def _whole_pair(escape: re.Match[bytes]) -> bytes:
    return escape[0] if escape[1] is None else b"\\ufffd"
