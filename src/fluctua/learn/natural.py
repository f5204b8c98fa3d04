"""The natural gradient: steps measured by how far they change the law of the paths, whatever the
parameters are.

The Fisher information of a path is made of scores alone, F = E[Σ_n U_n U_nᵀ]: no reward enters, so
it is known far better than the gradient. Scores of different steps are uncorrelated, so that sums
S_b of U over blocks of steps give the same mean, F = E[Σ_b S_b S_bᵀ], the better the more blocks.
F⁻¹∇J is the direction in which J rises most for a given KL(θ ‖ θ + s) ≈ ½ sᵀFs; it comes by
conjugate gradients from products F v = Σ S (S·v)/E, and F is never formed.

>>> estimator = natural(ppgt(simulator, objective))
>>> train(key, theta, estimator, kl_ascent(0.01), count=200, iterations=50)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check, draws, recorded, simulate, streamed
from fluctua.core import estimator as estimators
from fluctua.core import model as terms
from fluctua.core import process as processes
from fluctua.core import trajectories as records
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.baselines import none
from fluctua.core.diffusion import check_model
from fluctua.core.estimate import Estimate
from fluctua.core.objective import Objective
from fluctua.core.protocols import EstimatorWrapper
from fluctua.core.scores import full_score
from fluctua.core.text import names

ROWS = 20
"""Rows of scores for every parameter that are aimed at: F is then known to about a quarter in every
direction.
"""

DAMPING = 1e-3
"""Added to F, as a share of its diagonal: what a few rows know nothing of does not run away."""


class Fisher(NamedTuple):
    """F = Σ rowᵀ row / count, the information that one trajectory holds of the parameters.

    rows: (E·B, P), scores of each trajectory summed over each of B blocks of steps. count: E.
    theta: the parameters.
    """

    rows: Array
    count: int  # type: ignore[assignment]
    theta: Params

    @property
    def matrix(self) -> Array:
        """F in full, in the order of the flattened parameters. (P, P)"""
        return self.rows.T @ self.rows / self.count

    def product(self, v: Params) -> Params:
        """F v, never forming F."""
        flat, unravel = ravel_pytree(v)
        return unravel(_product(self.rows, flat, self.count).astype(flat.dtype))

    def solve(self, v: Params, *, damping: float = DAMPING) -> Params:
        """(F + damping·diag F)⁻¹ v by conjugate gradients."""
        flat, unravel = ravel_pytree(v)
        diagonal = np.asarray(jnp.mean(self.rows**2, axis=0), float) * len(self.rows) / self.count
        unknown = np.flatnonzero((diagonal <= 0) & (np.asarray(flat) != 0))
        if unknown.size:
            raise ValueError(
                f"`{names(self.theta)[unknown[0]]}` does not change the law of the paths (its "
                "score is zero), so no "
                "step of it has a length. Leave it out of theta, or train it with another rule."
            )
        solution, residual = _solve(
            self.rows, jnp.asarray(diagonal, flat.dtype), flat, self.count, damping
        )
        if not float(residual) < 1e-2:
            raise FloatingPointError(
                f"conjugate gradients left {float(residual):.2g} of the right-hand side: F from "
                f"{len(self.rows)} rows "
                f"is nearly singular in {flat.size} parameters. Take more trajectories or blocks, "
                "or more `damping`."
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
    """The Fisher information E[Σ_n U_n U_nᵀ] of trajectories that came from somewhere.

    Its inverse over the number of trajectories bounds the covariance of any calibration (Cramér and
    Rao).

    Args:
        process: drift and noise, or another kind of process.
        theta: the parameters at which the trajectories were taken.
        trajectories: as `gradient` takes them.
        start: as in `gradient`.
        score: as in `gradient`.
        blocks: of steps, over which scores are summed; enough for 20 rows a parameter if not given.

    Returns: a `Fisher`.

    """
    theta = check.parameters(theta)
    recording = recorded.Recording(trajectories, theta)
    nothing = check.objective(Objective(terminal=_nothing))
    moving = None if start is None else draws.check_start(start)[0]
    process = check.process(process)
    model = terms.EstimatorModel(
        process, nothing, estimators.select_score(process, score), moving, none().of, none().of
    )
    return Fisher(_recorded_rows(model, theta, recording, blocks), recording.count, theta)


@dataclass(frozen=True)
class Natural(EstimatorWrapper):
    """The estimator made by `natural`: (key, theta, count) -> Estimate with `natural` filled in."""

    estimator: Any
    damping: float = DAMPING
    blocks: int | None = None

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """∇θJ and F⁻¹∇θJ from the same `count` trajectories."""
        theta = check.parameters(theta)
        estimator = self.estimator
        if not isinstance(estimator, estimators.PPGT):
            estimate = estimator(key, theta, count)
            information = Fisher(estimator.scores(key, theta, count, self.blocks), count, theta)
        elif isinstance(
            estimator.substrate, simulate.Simulator
        ):  # replayed: the noise is a function of the key
            estimate = estimator(key, theta, count)
            information = Fisher(
                _streamed_rows(estimator, key, theta, count, self.blocks), count, theta
            )
        else:  # an instrument runs once
            trajectories = estimator.substrate(streamed.split_key(key)[0], theta, count)
            estimate = replace(estimator, substrate=lambda *_: trajectories)(key, theta, count)
            rows = _recorded_rows(
                estimator.method.model, theta, recorded.Recording(trajectories, theta), self.blocks
            )
            information = Fisher(rows, count, theta)
        return estimate._replace(natural=information.solve(estimate.gradient, damping=self.damping))


def natural(estimator: Any, *, damping: float = DAMPING, blocks: int | None = None) -> Natural:
    """An estimator whose estimates also have the natural gradient F⁻¹∇θJ, for `kl_ascent`.

    F comes from the scores of the same trajectories; no further ones are run.

    Args:
        estimator: made by `ppgt`, or one with a method scores(key, theta, count, blocks) -> (E·B,
            P).
        damping: added to F as a share of its diagonal.
        blocks: of steps, over which scores are summed; enough for 20 rows a parameter if not given.

    Returns: the estimator, a `Natural`.

    """
    if not isinstance(estimator, estimators.PPGT) and not hasattr(estimator, "scores"):
        raise TypeError(
            "`natural` needs the scores of the trajectories: an estimator made by `ppgt`, or one "
            "with `scores`; got "
            f"{type(estimator).__name__}."
        )
    if not damping >= 0:
        raise ValueError(f"`damping` must not be negative; got {damping!r}.")
    if blocks is not None:
        check.count(blocks)
    return Natural(estimator, damping, blocks)


# ----------------------------------------------------------------------------------- rows of scores


def _nothing(theta: Params, x: Array, context: Any) -> Array:
    return jnp.zeros((), x.dtype)


def blocks_for(count: int, parameters: int, steps: int, blocks: int | None = None) -> int:
    """How many blocks of steps make enough rows, one at least and as many as there are steps at
    the most.
    """
    return min(steps, max(1, -(-ROWS * parameters // count)) if blocks is None else blocks)


def _size(theta: Params) -> int:
    return ravel_pytree(theta)[0].size


def _streamed_rows(
    estimator: estimators.PPGT,
    key: Array,
    theta: Params,
    count: int,
    blocks: int | None,
) -> Array:
    substrate: Any = estimator.substrate
    k_run, _ = streamed.split_key(key)
    first, context = simulate.first_state(substrate, k_run, theta)
    model = estimator.method.model
    model = terms.mark_noiseless(
        model, check_model(model.process, model.objective, theta, first, substrate.t, context)
    )
    many = blocks_for(count, _size(theta), len(substrate.t) - 1, blocks)
    run = streamed.Run(k_run, theta, substrate.times, substrate.x0)
    rows = _sum_scores(model, substrate.recipe, count, many, run)
    return rows.reshape(-1, rows.shape[-1])


@partial(jit, static_argnums=(0, 1, 2, 3))
def _sum_scores(
    model: terms.EstimatorModel, recipe: simulate.Recipe, count: int, blocks: int, run: streamed.Run
) -> Array:
    """ΣU over each block of steps, for every trajectory. (B, E, P)"""
    theta = run.theta
    times = run.times
    ensemble = simulate.begin(recipe, count, run.key, theta, run.x0)
    total = times.dt.shape[0]

    def body(carry: Any, step: Any) -> tuple[Any, None]:
        x, rows = carry
        n, t, dt = step
        x_next, events = simulate.transition(recipe, theta, ensemble._replace(x=x), n, t, dt)
        moment = terms.Moment(n, t, dt, x, x_next, ensemble.context, events)
        score = terms.scores(model, theta, moment, times.t[:2]).score
        return (x_next, rows.at[moment.n * blocks // total].add(score)), None

    rows = jnp.zeros((blocks, count, ravel_pytree(theta)[0].size), ravel_pytree(theta)[0].dtype)
    rows = rows.at[0].add(_start_score(model, theta, ensemble.x, times, ensemble.context))
    return jax.lax.scan(body, (ensemble.x, rows), simulate.grid(times))[0][1]


def _recorded_rows(
    model: terms.EstimatorModel, theta: Params, recording: recorded.Recording, blocks: int | None
) -> Array:
    context = recording.context
    total = len(recording.t) - 1
    model = terms.mark_noiseless(
        model,
        check_model(model.process, model.objective, theta, recording.first, recording.t, context),
    )
    many = blocks_for(recording.count, _size(theta), total, blocks)
    flat = ravel_pytree(theta)[0]
    rows = jnp.zeros((many, recording.count, flat.size), flat.dtype)
    rows = rows.at[0].add(_start_score(model, theta, recording.first, recording.times, context))
    for n, times, x in recording.blocks(recorded.BLOCK_BYTES):
        block = recorded.StepBlock(n, times, x, context, recording.events(n, n + len(times.dt)))
        rows = _add_block(model, theta, rows, total, block, recording.t[:2])
    recorded.check_scores(
        rows.sum(axis=0), model.process, theta, recording.trajectory, recording.t, recording.offset
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


def _start_score(
    model: terms.EstimatorModel,
    theta: Params,
    x: Array,
    times: records.Times,
    context: Any,
) -> Array:
    """∂θ ln p₀(X₀), zero for a start that is not drawn from a density. (E, P)"""
    scores = terms.density_scores(model, theta, x, context)
    return jnp.zeros((), x.dtype) if scores is None else scores


# ------------------------------------------------------------------------------------- solving


@jit
def _product(rows: Array, v: Array, count: Array) -> Array:
    return rows.T @ (rows @ v) / count


@jit
def _solve(
    rows: Array,
    diagonal: Array,
    v: Array,
    count: Array,
    damping: Array,
) -> tuple[Array, Array]:
    """(F + damping·diag F)⁻¹ v, and the share of v that is left.

    In units in which diag F is one.
    """
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
