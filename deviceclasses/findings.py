"""What lint is given, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """A warning is something that may be right in a cluster that nobody sees here."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file, decoded; ``number`` counts from 1."""

    file: str
    number: int
    content: object


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing wrong in an object: where, what was found there, what would be accepted."""

    path: str
    value: str
    message: str
    severity: Severity = Severity.ERROR


@dataclass(frozen=True, slots=True)
class Finding:
    """An issue with the document and the object (``DeviceClass gpu-dev``) it is in."""

    file: str
    document: int
    object: str
    path: str
    value: str
    message: str
    severity: Severity
