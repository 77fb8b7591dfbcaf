"""Documents of lint: objects in files, their kinds and fields."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deviceclasses.lint.findings import Finding, Severity, misspelt
from driver.config.libyaml_loader import YamlLoader
from driver.errors import UsageError

DRA_GROUP = "resource.k8s.io"
DRA_VERSION = f"{DRA_GROUP}/v1"
SPEC = {"DeviceClass": "spec", "ResourceClaim": "spec.devices", "ResourceClaimTemplate": "spec.spec.devices"}
"""The kinds that are checked, and the path of their settings."""

SUFFIXES = {".yaml", ".yml", ".json"}
STDIN = "-"


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file, decoded; ``number`` counts from 1."""

    file: str
    number: int
    content: object


def read_documents(path: str) -> Iterator[Document | Finding]:
    """The documents of a file, a folder or standard input. Raises UsageError if there is nothing to read."""
    if path == STDIN:
        yield from parse_documents(path, sys.stdin.buffer.read())
        return
    place = Path(path)
    if not place.exists():
        raise UsageError(f"{path}: no such file or folder")
    files = [place]
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise UsageError(f"{path}: no file in this folder ends in {', '.join(sorted(SUFFIXES))}")
    for file in files:
        try:
            text = file.read_bytes()
        except OSError as error:
            raise UsageError(f"{file}: can't be read: {error.strerror}") from error
        yield from parse_documents(str(file), text)


def parse_documents(file: str, text: bytes) -> Iterator[Document | Finding]:
    """Each document, or each item of a list. A document that can't be parsed is a finding and ends the file."""
    number = 0
    try:
        for number, content in enumerate(yaml.load_all(text, _Loader), 1):
            for item in items_of(content):
                yield Document(file, number, item)
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = _place(text, mark) if mark else ""
        message = f"is not valid YAML: {getattr(error, 'problem', None) or error}"
        yield Finding(file, number + 1, "-", place, "", message, Severity.ERROR)


def _place(text: bytes, mark: yaml.Mark) -> str:
    last_line, end = text.count(b"\n"), text.rpartition(b"\n")[2]
    if mark.line > last_line:  # for libyaml, a file whose last line has no newline ends in the next line
        return f"line {last_line + 1}, column {len(end) + 1}"
    return f"line {mark.line + 1}, column {mark.column + 1}"


class _Loader(YamlLoader):
    """Refuses duplicate keys, as the API server does, and values that are not of their tag (``!!int x``)."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (LookupError, AttributeError) as error:
            message = f"{node.value!r} is not of the type {node.tag}"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        for key in keys:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is a duplicate key", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def items_of(content: object) -> Iterator[object]:
    """The objects of a document. The items of a list from the API server get the kind that the list implies."""
    fields: Mapping[str, Any] = content if isinstance(content, Mapping) else {}
    kind, items = text(fields, "kind"), fields.get("items")
    item_kind = kind.removesuffix("List")
    if not kind.endswith("List") or item_kind not in {"", *SPEC} or not isinstance(items, list) or not items:
        yield content
        return
    implied = {"apiVersion": text(fields, "apiVersion"), "kind": item_kind} if item_kind else {}
    yield from ({**implied, **item} if isinstance(item, Mapping) else item for item in items)


def text(owner: Mapping[str, Any], field: str) -> str:
    """A string field; empty if it is missing or not a string."""
    value = owner.get(field)
    return value if isinstance(value, str) else ""


def kind_of(content: object) -> str | None:
    """The kind of an object that the rules check, else None."""
    if not isinstance(content, Mapping):
        return None
    kind, (group, slash, _) = text(content, "kind"), text(content, "apiVersion").partition("/")
    # An object that lacks the group or misspells it is one of ours, too.
    is_ours = not slash or group == DRA_GROUP or misspelt(group, [DRA_GROUP]) is not None
    return kind if is_ours and kind in SPEC else None


def nothing_to_check(paths: Sequence[str], documents: Sequence[Document]) -> Finding:
    """The finding about files without any object that lint checks."""
    there = dict.fromkeys(_described(document.content) for document in documents if document.content is not None)
    contents = f"there is {', '.join(there)}" if there else "it is empty"
    message = f"nothing here is a DeviceClass, ResourceClaim or ResourceClaimTemplate, or makes pods: {contents}"
    return Finding(", ".join(paths), 1, "-", "", "", message, Severity.ERROR)


def _described(content: object) -> str:
    kind = kind_or_type(content)
    close = misspelt(kind, list(SPEC))
    return f"{kind} (did you mean {close}?)" if close else kind


def kind_or_type(content: object) -> str:
    """The kind of an object, in words what else it is."""
    if not isinstance(content, Mapping):
        return "a list" if isinstance(content, list) else "text"
    kind = text(content, "kind")
    is_empty_list = kind.endswith("List") and not content.get("items")
    return f"an empty {kind}" if is_empty_list else kind or "an object without kind"
