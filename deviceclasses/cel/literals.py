"""What a literal in an expression stands for. Source: the CEL language definition ("Values", escapes)."""

from __future__ import annotations

import re

from deviceclasses.cel.values import INT_MAX, INT_MIN, UINT_MAX, EvaluationError, Uint, Value

SINGLE = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "`": "`", "?": "?",
}  # fmt: skip
ESCAPE = re.compile(r"\\(?:[xX]([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-3][0-7]{2})|(.?))", re.DOTALL)


def integer(text: str) -> int:
    """An int literal, its sign included; raises EvaluationError beyond 64 bits."""
    value = int(text, 16 if "0x" in text else 10)
    if not INT_MIN <= value <= INT_MAX:
        raise EvaluationError(f"{text} does not fit into an int; from {INT_MIN} to {INT_MAX} does")
    return value


def unsigned(text: str) -> Uint:
    """A uint literal with its suffix; raises EvaluationError beyond 64 bits."""
    digits = text[:-1]
    value = int(digits, 16 if "0x" in digits else 10)
    if value > UINT_MAX:
        raise EvaluationError(f"{text} does not fit into a uint; up to {UINT_MAX} does")
    return Uint(value)


def double(text: str) -> float:
    """A double literal; raises EvaluationError where it is too large for one."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise EvaluationError(f"{text} is too large for a double")
    return value


def string(text: str) -> Value:
    """A string or bytes literal with its quotes; raises EvaluationError for an unknown escape."""
    binary = text[0] in "bB"
    body = text[1:] if binary else text
    raw = body[0] in "rR"
    body = body[1:] if raw else body
    width = 3 if body[:3] in ('"""', "'''") and len(body) >= 6 else 1
    body = body[width:-width].replace("\r\n", "\n").replace("\r", "\n")
    if binary:
        return body.encode() if raw else b"".join(_pieces(body))
    return body if raw else ESCAPE.sub(lambda match: chr(_code_point(match)), body)


def _pieces(body: str) -> list[bytes]:
    pieces, end = [], 0
    for match in ESCAPE.finditer(body):
        if match[2] or match[3]:
            raise EvaluationError(f"bytes know no escape {match[0]}; \\x and two digits are possible")
        pieces += [body[end : match.start()].encode(), _one_byte(match)]
        end = match.end()
    return [*pieces, body[end:].encode()]


def _one_byte(match: re.Match[str]) -> bytes:
    return bytes([_code_point(match)])


def _code_point(match: re.Match[str]) -> int:
    two, four, eight, octal, single = match.groups()
    if octal:
        return int(octal, 8)
    if single is not None:
        if single not in SINGLE:
            raise EvaluationError(f"unknown escape {match[0]!r}; write a backslash as two")
        return ord(SINGLE[single])
    code = int(two or four or eight, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise EvaluationError(f"{match[0]} is no Unicode character")
    return code
