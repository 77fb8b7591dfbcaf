"""Reading YAML with libyaml, where PyYAML has it: its own scanner needs seconds for what is deeply nested."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

HEX = rb"[0-9a-fA-F]{2}"
SURROGATES = re.compile(rb"(?<!\\)((?:\\\\)*)(\\u[dD][89abAB]" + HEX + rb"\\u[dD][c-fC-F]" + HEX + rb")")
"""A character beyond 16 bits as JSON escapes it, which libyaml refuses."""


class YamlLoader(yaml.SafeLoader):
    """libyaml scans and parses, PyYAML composes: libyaml's recursion in C would end the process where this raises.

    Raises YAMLError, RecursionError if it is too deeply nested, ValueError and ArithmeticError for what is not of its
    tag.
    """

    def __init__(self, stream: bytes | str) -> None:
        super().__init__("")
        if isinstance(stream, str):
            stream = stream.encode()
        if stream.lstrip().startswith((b"{", b"[")):
            stream = SURROGATES.sub(_as_utf8, stream)
        self._parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(stream)

    def check_event(self, *choices: Any) -> bool:
        return bool(self._parser.check_event(*choices))

    def peek_event(self) -> yaml.Event:
        event: yaml.Event = self._parser.peek_event()
        return event

    def get_event(self) -> yaml.Event:
        event: yaml.Event = self._parser.get_event()
        return event


def _as_utf8(escaped: re.Match[bytes]) -> bytes:
    character: str = json.loads(b'"' + escaped[2] + b'"')
    return escaped[1] + character.encode()


def read_yaml(text: bytes | str) -> Any:
    """The content of the only document. Raises YAMLError."""
    try:
        return YamlLoader(text).get_single_data()
    except (ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise yaml.YAMLError(str(error)) from error
