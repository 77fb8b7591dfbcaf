"""Suggestions for misspelt names ("did you mean")."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` most like ``name``, capitals aside; None where nothing is like it."""
    spelled = {candidate.casefold(): candidate for candidate in known}
    found = get_close_matches(name.casefold(), spelled, n=1)
    return spelled[found[0]] if found else None


def meant(name: str, known: Iterable[str]) -> str:
    """``; did you mean X?``, or nothing: the end of a sentence that refuses ``name``."""
    close = nearest(name, known)
    return f"; did you mean {close}?" if close is not None else ""
