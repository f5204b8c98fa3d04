"""The word that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close_match(word: str, known: Iterable[str]) -> str:
    """` Did you mean "sigma_kappa"?`, or nothing. With a space before, to follow another sentence."""
    found = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f' Did you mean "{found[0]}"?' if found else ""
