"""Rules for values of a configuration: what is allowed, in words, and a check."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fluctua.core.words import close_match


class Rule(NamedTuple):
    """A rule for one key.

    allowed: in words, after "must be".
    accept: (value) -> the value as it is stored, or None if it does not fit.
    words: allowed words, for suggestions.
    """

    allowed: str
    accept: Callable[[Any], Any]
    words: tuple[str, ...] = ()

    def __call__(self, key: str, value: Any) -> Any:
        """The accepted value, or an error that names the key, what is allowed and the value."""
        accepted = self.accept(value)
        if accepted is None:
            hint = close_match(value, self.words) if isinstance(value, str) else ""
            raise ValueError(f"`{key}` must be {self.allowed}; got {value!r}.{hint}")
        return accepted


SEEDS = 2**63 - 1
"""The largest seed."""


def whole_number(minimum: int, maximum: int | None = None) -> Rule:
    """A whole number."""
    limit = "" if maximum is None else f" and at most {maximum:,}"

    def fits(v):
        return _is_whole(v) and v >= minimum and (maximum is None or v <= maximum)

    return Rule(f"a whole number, at least {minimum:,}{limit}", lambda v: v if fits(v) else None)


def number(
    *, above: float = -math.inf, minimum: float = -math.inf, below: float = math.inf
) -> Rule:
    """A finite number, stored as a float."""
    limits = {"above": above, "at least": minimum, "below": below}
    parts = [f"{words} {limit:g}" for words, limit in limits.items() if math.isfinite(limit)]

    def fits(v):
        return _is_number(v) and above < v < below and v >= minimum

    return Rule(f"a number {' and '.join(parts)}".rstrip(), lambda v: float(v) if fits(v) else None)


def word(*words: str) -> Rule:
    """One of several words."""
    return Rule(
        "one of " + ", ".join(f'"{w}"' for w in words), lambda v: v if v in words else None, words
    )


def word_or_flag(no: str, other: str, yes: str) -> Rule:
    """One of three words; earlier files have false for the first and true for the last."""
    words = (no, other, yes)
    names: dict[Any, str] = {no: no, other: other, yes: yes, False: no, True: yes}
    plain = word(*words)
    return plain._replace(accept=lambda v: names.get(v) if isinstance(v, str | bool) else None)


def flag() -> Rule:
    """True or false."""
    return Rule("true or false", lambda v: v if isinstance(v, bool) else None)


def text() -> Rule:
    """Any string; it is checked where it is used."""
    return Rule("a string", lambda v: v if isinstance(v, str) else None)


def interval() -> Rule:
    """An interval [lower, upper]."""

    def accept(v: Any) -> tuple[float, float] | None:
        fits = isinstance(v, Sequence) and len(v) == 2 and all(map(_is_number, v)) and v[0] <= v[1]
        return (float(v[0]), float(v[1])) if fits else None

    return Rule("[lower, upper] with lower ≤ upper", accept)


def rising_sizes() -> Rule:
    """Ensemble sizes, each larger than the one before."""

    def accept(v: Any) -> tuple[int, ...] | None:
        fits = (
            isinstance(v, list | tuple) and len(v) > 0 and all(_is_whole(n) and n >= 2 for n in v)
        )
        return tuple(v) if fits and all(a < b for a, b in itertools.pairwise(v)) else None

    return Rule("a list of whole numbers, each at least 2 and larger than the one before", accept)


def steps() -> Rule:
    """A schedule [[iteration, trajectories], …] from iteration 0 on."""

    def accept(v: Any) -> tuple[tuple[int, int], ...] | None:
        if not isinstance(v, list | tuple) or any(
            not isinstance(p, list | tuple) or len(p) != 2 for p in v
        ):
            return None
        if not all(_is_whole(i) and _is_whole(n) and n >= 2 for i, n in v):
            return None
        begins = [i for i, _ in v]
        rising = all(a < b for a, b in itertools.pairwise(begins))
        return tuple((i, n) for i, n in v) if rising and (not v or begins[0] == 0) else None

    return Rule(
        "[[iteration, trajectories], …], iterations rising from 0, at least 2 trajectories", accept
    )


def table() -> Rule:
    """Names with numbers, words or truth values."""

    def fits(v):
        return isinstance(v, dict) and all(
            isinstance(x, str | bool) or _is_number(x) for x in v.values()
        )

    return Rule("a table such as { b1 = 0.9 }", lambda v: dict(v) if fits(v) else None)


def _is_whole(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool)


def _is_number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
