"""Whether the interval between samples is too long for Euler's step."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.likelihood.sources import Source, load_pieces, open_source
from fluctua.core.likelihood.steps import map_steps
from fluctua.core.process import Process, Step
from fluctua.core.trajectories import Times

BATCH = 64


class EulerDefect(NamedTuple):
    """Slope of the residuals on what Euler's step leaves out, with its standard error.

    The slope is 1 if that is all that is wrong with them.
    """

    slope: float
    stderr: float

    @property
    def is_cause(self) -> bool:
        """Whether the interval explains residuals that are not zero on average."""
        return self.slope > 5 * self.stderr and abs(self.slope - 1) < max(0.3, 3 * self.stderr)

    @property
    def is_not(self) -> bool:
        """Whether something other than the interval explains them."""
        return self.stderr < 0.2 and not self.is_cause


def measure_euler_defect(
    source: Source, process: Process, theta: Params, diffusion: np.ndarray
) -> EulerDefect:
    """Slope of the residuals r on d = ½Δ²(∂ₓμ μ + ∂ₜμ), weighted by 1/2QΔ.

    d is the next term of E[x' | x] after Euler's μΔ.

    Args:
        source: trajectories.
        process: its drift is taken for right, and its step for Euler's.
        theta: parameters as they were set.
        diffusion: Q (M,), for the weights.

    Returns: an `EulerDefect`.
    """
    process = check.process(process)
    theta = check.parameters(theta)
    total = 0.0
    square = 0.0
    for _, piece in load_pieces(open_source(source), BATCH):
        x = jnp.asarray(piece.x, working_dtype(theta, piece.x))
        q = jnp.asarray(diffusion, x.dtype)
        dr, dd = _sum_defects(process, theta, x, check.grid(piece.t), piece.context, q)
        total = total + float(dr)
        square = square + float(dd)
    return EulerDefect(total / square, square**-0.5) if square > 0 else EulerDefect(0.0, np.inf)


@partial(jit, static_argnums=0)
def _sum_defects(
    process: Process, theta: Params, x: Array, times: Times, context: PyTree, q: Array
) -> tuple[Array, Array]:
    """Σ dᵀr/2QΔ and Σ dᵀd/2QΔ."""

    def one(step: Step) -> tuple[Array, Array]:
        def drift(x: Array, t: Array) -> Array:
            return process.drift(theta, x, t, step.context)

        mu = drift(step.x, step.t)
        ones = jnp.ones_like(step.t)
        d = jax.jvp(drift, (step.x, step.t), (mu, ones))[1] * step.dt**2 / 2
        # nothing is weighed without noise
        weighted = jnp.where(q > 0, d / (2 * jnp.where(q > 0, q, 1) * step.dt), 0)
        return weighted @ (step.x_next - step.x - mu * step.dt), weighted @ d

    dr, dd = map_steps(one, x, times, context)
    return dr.sum(), dd.sum()
