"""Trajectories that come again: noise does not repeat itself, a full buffer does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

FEWEST_SAMPLES = 64
"""Shorter trajectories may repeat by chance where the converter is coarse."""
REMEMBERED = 2**16
"""Trajectories that a new one is compared with, bit by bit."""
RECENT = 2**10
"""Trajectories that a new one is compared with, sample by sample."""
ALIKE = 0.01
"""Of the root mean square step of a channel: samples that are closer are the same ones with a
little noise.
"""


class Repeats:
    """Remembers trajectories, and knows one that comes again: noise does not repeat itself, a full
    buffer does.

    Bit for bit, or with a little noise on top: `FEWEST_SAMPLES` samples, evenly over times and
    channels, are all within `ALIKE` of those of a recent one.
    """

    def __init__(self, marks: Iterable[int] = ()) -> None:
        self.seen = dict.fromkeys(int(mark) for mark in marks)
        self.recent = np.zeros((0, FEWEST_SAMPLES))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Which trajectories came before, in this batch or an earlier one. x: (E, T+1, M)
        -> (E,)
        """
        repeated = np.zeros(len(x), bool)
        if x[0].size < FEWEST_SAMPLES:
            return repeated
        for i, one in enumerate(x):
            mark = int.from_bytes(
                hashlib.blake2b(np.ascontiguousarray(one).tobytes(), digest_size=8).digest(), "big"
            )
            repeated[i] = mark in self.seen
            self.seen[mark] = None
        repeated |= self._alike(x)
        while len(self.seen) > REMEMBERED:
            del self.seen[next(iter(self.seen))]
        return repeated

    def _alike(self, x: np.ndarray) -> np.ndarray:
        """Which trajectories are earlier ones but for a little noise. (E,)"""
        places = np.linspace(0, x[0].size - 1, FEWEST_SAMPLES).round().astype(int)
        samples = x.reshape(len(x), -1)[:, places].astype(float)
        step = np.sqrt(np.mean(np.diff(x, axis=1) ** 2, axis=(0, 1)))
        near = ALIKE * step[places % x.shape[2]]
        known = np.concatenate([self.recent, samples])
        alike = np.zeros(len(x), bool)
        for i, one in enumerate(samples):
            left = known[: len(self.recent) + i]
            for k in range(0, FEWEST_SAMPLES, 8):  # the first few places tell nearly all apart
                left = left[
                    np.all(np.abs(left[:, k : k + 8] - one[k : k + 8]) <= near[k : k + 8], axis=1)
                ]
            alike[i] = len(left) > 0
        self.recent = known[-RECENT:]
        return alike

    def marks(self) -> np.ndarray:
        """For a checkpoint."""
        return np.fromiter(self.seen, np.uint64)
