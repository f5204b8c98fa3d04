"""Whether trajectories begin where their process does."""

from __future__ import annotations

import jax
import numpy as np
import scipy

from fluctua.core.arrays import Array, put
from fluctua.core.diffusion import q_matrix
from fluctua.core.likelihood import alternatives
from fluctua.core.likelihood.sample import Sample


def compare_start(sample: Sample, start: Array, scale: np.ndarray) -> str:
    """Describe trajectories that start further from `start` than one step's kicks; else "".

    A record of an autonomous process that begins some samples late is one of the same process:
    nothing else shows it.
    """
    one = jax.tree.map(lambda leaf: leaf[0], sample.context)
    q = np.asarray(
        q_matrix(
            sample.law.process,
            sample.theta,
            put(np.asarray(start, sample.x.dtype)),
            sample.t[0],
            one,
        )
    )
    q = (q if q.ndim == 1 else np.diagonal(q))[sample.components]
    readout = np.asarray(sample.readout, np.float64)[sample.components]
    expected = (2 * q * (sample.t[1] - sample.t[0]) + 2 * readout) * scale[sample.components]
    away = (sample.x[:, 0] - np.asarray(start))[:, sample.components].astype(np.float64)
    square = away[:, expected > 0] ** 2 / expected[expected > 0]
    if not square.size:
        return ""
    # noise of the readout is half of what is expected at most: one sample has it once
    chance = (
        scipy.special.chdtri(square.size, alternatives.CHANCE) / square.size / 2
        if readout.any()
        else 0.0
    )
    if not square.mean() > max(1.0, chance):
        return ""
    i = int(sample.components[expected > 0][np.argmax(square.mean(axis=0))])
    return (
        f"The trajectories do not begin where the process does: component {i} starts "
        f"{np.sqrt(square.mean(axis=0).max()):.3g} kicks of one step away. The record begins late "
        "or early (a shift of the time axis), or the start is another."
    )
