"""v of every component, and when it is wrong."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

TOLERANCE = 0.1
"""Deviations of v from 1 that pass: a gradient wrong by a tenth."""

CERTAIN = 5.0
"""Standard errors that a deviation must have."""


class Residuals(NamedTuple):
    """v of every component, and what is wrong.

    v: (M,), 1 expected.
    stderr: its standard error.
    steps: transitions examined.
    doubled: v at twice the interval, where v is not 1 and there are two steps.
    cause: what is probably wrong, in words; empty where nothing is.
    noiseless: components without noise of their own, whose v is 1 where they move as their drift
        predicts.
    law: what v is, for the printed report.
    """

    v: np.ndarray
    stderr: np.ndarray
    steps: int
    doubled: np.ndarray | None = None
    cause: str = ""
    noiseless: tuple[int, ...] = ()
    law: str = "E[r Q⁻¹r]/2Δt"

    @property
    def wrong(self) -> np.ndarray:
        """Components whose v is not 1, beyond doubt and by more than a tenth."""
        return np.flatnonzero(is_wrong(self.v, self.stderr))

    def __repr__(self) -> str:
        each = ", ".join(f"{v:.3g}" for v in self.v[:8]) + (", …" if len(self.v) > 8 else "")
        return f"{self.law} = {each} (1 expected) from {self.steps:,} steps" + (
            f". {self.cause}" * bool(self.cause)
        )


def is_wrong(v: np.ndarray, stderr: np.ndarray) -> np.ndarray:
    """Components whose v is not 1.

    What is not finite is wrong, an error too: it excuses nothing.
    """
    known = np.isfinite(v) & np.isfinite(stderr)
    return ~(known & (np.abs(v - 1) <= np.maximum(TOLERANCE, CERTAIN * np.where(known, stderr, 0))))
