"""Words for people: hints, counted nouns, and texts that a terminal can show."""

from __future__ import annotations

import difflib
import os
import unicodedata
from collections.abc import Iterable
from typing import Any

STEERING = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction of the text after them."""


def escape_controls(text: str) -> str:
    r"""Replace control characters, but newline and tab, by `\x1b`, `\u202e` and the like.

    >>> escape_controls("omega\x1b[2J")
    'omega\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(_escape(c) for c in text)


def _escape(c: str) -> str:
    steers = unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"
    return c.encode("unicode_escape").decode() if steers or c in STEERING else c


def close_match(word: str, known: Iterable[str]) -> str:
    """` Did you mean "sigma_kappa"?`, or nothing.

    With a space before, to follow another sentence.
    """
    matches = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f' Did you mean "{matches[0]}"?' if matches else ""


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun: `1 trajectory`, `2,000 trajectories`, `3 batches`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def can_redraw(console: Any) -> bool:
    """Whether lines can be drawn again: at a terminal, but not in the output of a notebook's cell.

    Kernels of Jupyter announce a terminal to the commands of their cells (a pseudo-terminal, and
    FORCE_COLOR), whose output keeps every line that was ever drawn.
    """
    return console.is_terminal and "JPY_PARENT_PID" not in os.environ
