"""The Fisher information of trajectories, F = E[Σ_n U_n U_nᵀ], from the scores of their steps."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check, draws, recorded
from fluctua.core import model as terms
from fluctua.core import process as processes
from fluctua.core import trajectories as records
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.baselines import none
from fluctua.core.diffusion import check_model
from fluctua.core.display.fields import show_fields
from fluctua.core.objective import Objective
from fluctua.core.scores import full_score, select_score
from fluctua.core.text import names

ROWS = 20
"""Target number of rows of scores per parameter: F is then known to about 25 % in every direction.
"""

DAMPING = 1e-3
"""Added to F, relative to its diagonal, so that poorly known directions stay bounded."""


@show_fields
class Fisher(NamedTuple):
    """F = Σ rowᵀ row / count, the information of one trajectory about the parameters.

    rows: (E·B, P), scores of each trajectory summed over each of B blocks of steps.
    count: E, the number of trajectories.
    theta: the parameters.
    """

    rows: Array
    count: int  # type: ignore[assignment]
    theta: Params

    @property
    def matrix(self) -> Array:
        """The full matrix F, in the order of the flattened parameters. Shape (P, P)."""
        return self.rows.T @ self.rows / self.count

    def product(self, v: Params) -> Params:
        """F v, without forming F."""
        flat, unravel = ravel_pytree(v)
        return unravel(_multiply_fisher(self.rows, flat, self.count).astype(flat.dtype))

    def solve(self, v: Params, *, damping: float = DAMPING) -> Params:
        """(F + damping·diag F)⁻¹ v by conjugate gradients."""
        flat, unravel = ravel_pytree(v)
        diagonal = np.asarray(jnp.mean(self.rows**2, axis=0), float) * len(self.rows) / self.count
        unknown = np.flatnonzero((diagonal <= 0) & (np.asarray(flat) != 0))
        if unknown.size:
            raise ValueError(
                f"`{names(self.theta)[unknown[0]]}` does not change the law of the paths (its "
                "score is zero), so no step of it has a length. Leave it out of theta, or train it "
                "with another rule."
            )
        solution, residual = _solve(
            self.rows, jnp.asarray(diagonal, flat.dtype), flat, self.count, damping
        )
        if not float(residual) < 1e-2:
            raise FloatingPointError(
                f"conjugate gradients left {float(residual):.2g} of the right-hand side: F from "
                f"{len(self.rows)} rows is nearly singular in {flat.size} parameters. Take more "
                "trajectories or blocks, or more `damping`."
            )
        return unravel(solution)


def fisher(
    process: processes.AnyProcess,
    theta: Params,
    trajectories: records.Trajectories | Iterable[records.Trajectories],
    *,
    start: draws.Density | draws.Reparameterised | None = None,
    score: processes.Score = full_score,
    blocks: int | None = None,
) -> Fisher:
    """Estimate the Fisher information E[Σ_n U_n U_nᵀ] of recorded trajectories.

    Its inverse over the number of trajectories bounds the covariance of any calibration (Cramér and
    Rao).

    Args:
        process: drift and noise, or another kind of process.
        theta: the parameters at which the trajectories were taken.
        trajectories: as in `gradient`.
        start: as in `gradient`.
        score: as in `gradient`.
        blocks: number of blocks of steps over which scores are summed; by default enough for 20
            rows per parameter.

    Returns: a `Fisher`.

    >>> information = fl.fisher(process, theta, recorded)
    >>> covariance = np.linalg.inv(information.matrix) / 200  # the best that 200 can do
    >>> round(float(covariance[0, 0]) ** 0.5, 2)  # standard error of k
    0.04
    """
    theta = check.parameters(theta)
    recording = recorded.Recording(trajectories, theta)
    nothing = check.objective(Objective(terminal=_zero_reward))
    moving = None if start is None else draws.check_start(start)[0]
    process = check.process(process)
    model = terms.EstimatorModel(
        process, nothing, select_score(process, score), moving, none().function, none().function
    )
    return Fisher(sum_recorded_scores(model, theta, recording, blocks), recording.count, theta)


def _zero_reward(theta: Params, x: Array, context: Any) -> Array:
    return jnp.zeros((), x.dtype)


def count_blocks(count: int, parameters: int, steps: int, blocks: int | None = None) -> int:
    """Number of blocks of steps that make enough rows, from 1 to the number of steps."""
    return min(steps, max(1, -(-ROWS * parameters // count)) if blocks is None else blocks)


def count_parameters(theta: Params) -> int:
    """The number of parameters P."""
    return ravel_pytree(theta)[0].size


def sum_recorded_scores(
    model: terms.EstimatorModel, theta: Params, recording: recorded.Recording, blocks: int | None
) -> Array:
    """Scores of recorded trajectories, summed over each block of steps. Shape (E·B, P)."""
    context = recording.context
    total = len(recording.t) - 1
    model = terms.replace_process(
        model,
        check_model(
            model.process, model.objective, theta, recording.first_states, recording.t, context
        ),
    )
    block_count = count_blocks(recording.count, count_parameters(theta), total, blocks)
    flat = ravel_pytree(theta)[0]
    rows = jnp.zeros((block_count, recording.count, flat.size), flat.dtype)
    rows = rows.at[0].add(
        start_score(model, theta, recording.first_states, recording.times, context)
    )
    for n, times, x in recording.iterate_blocks(recorded.BLOCK_BYTES):
        block = recorded.StepBlock(
            n, times, x, context, recording.read_events(n, n + len(times.dt))
        )
        rows = _add_block(model, theta, rows, total, block, recording.t[:2])
    recorded.check_scores(
        rows.sum(axis=0),
        model.process,
        theta,
        recording.read_trajectory,
        recording.t,
        recording.offset,
    )
    return rows.reshape(-1, flat.size)


@partial(jit, static_argnums=0)
def _add_block(
    model: terms.EstimatorModel,
    theta: Params,
    rows: Array,
    total: Array,
    block: recorded.StepBlock,
    origin: Array,
) -> Array:
    """Add the scores of a block of recorded steps to the rows (B, E, P)."""

    def add(rows: Array, moment: terms.Moment) -> Array:
        score = terms.scores(model, theta, moment, origin).score
        return rows.at[moment.n * rows.shape[0] // total].add(score)

    return recorded.scan_block(add, rows, block)


def start_score(
    model: terms.EstimatorModel,
    theta: Params,
    x: Array,
    times: records.Times,
    context: Any,
) -> Array:
    """∂θ ln p₀(X₀), zero for a start that is not drawn from a density. Shape (E, P)."""
    scores = terms.density_scores(model, theta, x, context)
    return jnp.zeros((), x.dtype) if scores is None else scores


# ------------------------------------------------------------------------------------- solving


@jit
def _multiply_fisher(rows: Array, v: Array, count: Array) -> Array:
    return rows.T @ (rows @ v) / count


@jit
def _solve(
    rows: Array,
    diagonal: Array,
    v: Array,
    count: Array,
    damping: Array,
) -> tuple[Array, Array]:
    """(F + damping·diag F)⁻¹ v, and the relative residual, in units in which diag F is one."""
    unit = jnp.where(diagonal > 0, 1 / jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1)), 0)
    scaled = rows * unit
    target = v * unit

    def operator(u):
        return scaled.T @ (scaled @ u) / count + damping * u

    solution, _ = jax.scipy.sparse.linalg.cg(operator, target, tol=1e-6, maxiter=4 * v.size + 20)
    left = jnp.linalg.norm(operator(solution) - target) / jnp.maximum(
        jnp.linalg.norm(target), 1e-30
    )
    return solution * unit, left
