"""Trajectories that were received before: noise does not repeat itself, a full buffer does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

MIN_SAMPLES = 64
"""Shorter trajectories may repeat by chance where the converter is coarse."""
REMEMBERED = 2**16
"""Trajectories that a new one is compared with, bit by bit."""
RECENT = 2**10
"""Trajectories that a new one is compared with, sample by sample."""
ALIKE = 0.01
"""Samples that differ by less than this share of the root mean square step are the same ones."""


class Repeats:
    """Memory of trajectories that recognises one that is received again.

    A repetition is equal bit for bit, or with a little noise on top: `MIN_SAMPLES` samples, evenly
    over times and channels, are all within `ALIKE` of those of a recent trajectory.
    """

    def __init__(self, marks: Iterable[int] = ()) -> None:
        self.seen = dict.fromkeys(int(mark) for mark in marks)
        self.recent = np.zeros((0, MIN_SAMPLES))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Find trajectories that repeat one of this or an earlier batch. x: (E, T+1, M) -> (E,)"""
        repeated = np.zeros(len(x), bool)
        if x[0].size < MIN_SAMPLES:
            return repeated
        for i, trajectory in enumerate(x):
            data = np.ascontiguousarray(trajectory).tobytes()
            mark = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
            repeated[i] = mark in self.seen
            self.seen[mark] = None
        repeated |= self._find_alike(x)
        while len(self.seen) > REMEMBERED:
            del self.seen[next(iter(self.seen))]
        return repeated

    def _find_alike(self, x: np.ndarray) -> np.ndarray:
        """Find trajectories that equal an earlier one but for a little noise. Shape (E,)."""
        places = np.linspace(0, x[0].size - 1, MIN_SAMPLES).round().astype(int)
        samples = x.reshape(len(x), -1)[:, places].astype(float)
        step = np.sqrt(np.mean(np.diff(x, axis=1) ** 2, axis=(0, 1)))
        near = ALIKE * step[places % x.shape[2]]
        known = np.concatenate([self.recent, samples])
        alike = np.zeros(len(x), bool)
        for i, trajectory in enumerate(samples):
            candidates = known[: len(self.recent) + i]
            for k in range(0, MIN_SAMPLES, 8):  # the first few places rule out nearly all
                part = slice(k, k + 8)
                distance = np.abs(candidates[:, part] - trajectory[part])
                candidates = candidates[np.all(distance <= near[part], axis=1)]
            alike[i] = len(candidates) > 0
        self.recent = known[-RECENT:]
        return alike

    def marks(self) -> np.ndarray:
        """Hashes of all remembered trajectories, for a checkpoint."""
        return np.fromiter(self.seen, np.uint64)
