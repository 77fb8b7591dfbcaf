"""Suggestions for misspelt names ("did you mean")."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

SHORTEST_BEGINNING = 3
"""Characters from which on a name may be the beginning of the one that was meant."""

SIMILAR = 0.7
"""Ratio of equal characters: NVIDIA H100 and NVIDIA L4, with 0.67, are two different things."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that was probably meant, capitals and punctuation aside; None where nothing is like it.

    A name that is the beginning of others means the shortest of them; then similar spelling counts.
    """
    spelled = {_plain(candidate): candidate for candidate in known}
    plain = _plain(name)
    continued = [text for text in spelled if text and (text.startswith(plain) or plain.startswith(text))]
    if len(plain) >= SHORTEST_BEGINNING and continued:
        return spelled[min(continued, key=lambda text: (abs(len(text) - len(plain)), text))]
    containing = [text for text in spelled if len(plain) > SHORTEST_BEGINNING and plain in text]
    similar = sorted(containing, key=len) or get_close_matches(plain, spelled, n=1, cutoff=SIMILAR)
    return spelled[similar[0]] if similar else None


def meant(name: str, known: Iterable[str]) -> str:
    """``; did you mean X?``, or nothing: the end of a sentence that refuses ``name``."""
    close = nearest(name, known)
    return f"; did you mean {close}?" if close is not None else ""


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()
