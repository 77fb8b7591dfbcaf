"""Manifests in files, and the DeviceClasses of the Helm chart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from deviceclasses.lint.documents_and_findings import Document, Finding, Severity, items_of
from driver.config.shared_flags import DEFAULT_DRIVER
from driver.errors import UsageError

SUFFIXES = {".yaml", ".yml", ".json"}
STDIN = "-"


def shipped_classes(driver: str = DEFAULT_DRIVER) -> list[dict[str, Any]]:
    """The DeviceClasses of the Helm chart as it renders them for a driver of this name (templates/classes.yaml)."""
    folder = files("deviceclasses") / "manifests"
    texts = [each.read_text("utf-8") for each in folder.iterdir() if Path(each.name).suffix in SUFFIXES]
    partition = (folder / "partitions" / "class.yaml.in").read_text("utf-8")
    profiles = yaml.safe_load((folder / "partitions" / "profiles.yaml").read_text("utf-8"))
    for profile, cards in profiles.items():
        name = f"gpu-inference-{profile.replace('.', '-')}"
        texts.append(partition.replace("NAME", name).replace("PROFILE", profile).replace("CARDS", cards))
    # The API group of the parameters has the same name as the default driver and stays.
    named = [
        text.replace(f'"{DEFAULT_DRIVER}"', f'"{driver}"').replace(f"driver: {DEFAULT_DRIVER}\n", f"driver: {driver}\n")
        for text in texts
    ]
    return [content for text in named for content in yaml.safe_load_all(text) if isinstance(content, dict)]


def read_documents(path: str) -> Iterator[Document | Finding]:
    """The documents of a file, a folder or standard input. Raises UsageError if there is nothing to read."""
    if path == STDIN:
        yield from _documents(path, sys.stdin.buffer.read())
        return
    place = Path(path)
    if not place.exists():
        raise UsageError(f"{path}: no such file or folder")
    found = [place]
    if place.is_dir():
        found = sorted(each for each in place.rglob("*") if each.suffix in SUFFIXES and each.is_file())
        if not found:
            raise UsageError(f"{path}: no file in this folder ends in {', '.join(sorted(SUFFIXES))}")
    for file in found:
        try:
            text = file.read_bytes()
        except OSError as error:
            raise UsageError(f"{file}: can't be read: {error.strerror}") from error
        yield from _documents(str(file), text)


def _documents(file: str, text: bytes) -> Iterator[Document | Finding]:
    """Each document, or each item of a list. A document that can't be parsed is a finding and ends the file."""
    number = 0
    try:
        for number, content in enumerate(yaml.load_all(text, _Loader), 1):
            for item in items_of(content):
                yield Document(file, number, item)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        message = f"is not valid YAML: {getattr(error, 'problem', None) or error}"
        yield Finding(file, number + 1, "-", place, "", message, Severity.ERROR)


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, as the API server does, and values that are not of their tag (``!!int x``)."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (LookupError, AttributeError) as error:
            message = f"{node.value!r} is not of the type {node.tag}"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is a duplicate key", key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)
