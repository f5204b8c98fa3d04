"""J of given settings, measured on a bench."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Params
from fluctua.core.estimate import sample_error
from fluctua.insitu.instrument.substrate import InstrumentSubstrate
from fluctua.insitu.model import Model


class Level(NamedTuple):
    """J of some settings, measured on the bench."""

    J: float
    stderr: float


def measure_level(
    model: Model, substrate: InstrumentSubstrate, settings: Params, count: int
) -> Level:
    """Measure J at given settings with `count` new trajectories."""
    t, x = substrate(None, settings, count)[:2]
    running = model.objective.running
    assert running is not None
    rate = jax.vmap(jax.vmap(lambda x: running(settings, x, 0.0)))(jnp.asarray(x[:, :-1]))
    returns = np.asarray(rate.sum(axis=1) * (t[1] - t[0]))
    return Level(float(returns.mean()), float(sample_error(returns)))
