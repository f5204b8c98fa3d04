"""Density ratios of trajectories at two parameters: ln p_θ(X) − ln p_old(X), where it exists.

The noise must be the same at both parameters, and so must the drift of noiseless components:
otherwise the paths of one have no density against those of the other, and are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check, diffusion, draws, recorded, scores
from fluctua.core.arrays import Array, Params, jit, working_dtype
from fluctua.core.model import Moment
from fluctua.core.objective import Rewards
from fluctua.core.process import AnyProcess, Process, Score, Step
from fluctua.core.trajectories import Trajectories

RatioFunction = Callable[[Any, Params, Params, Step], scores.Ratio]
"""(process, new, old, step) -> scores.Ratio: of the densities of one step."""


class PathLaw(NamedTuple):
    """The functions that make up the density of a trajectory; hashable.

    process: of the trajectories.
    ratio: density ratio of one step.
    start: law of the first state, or None where it is fixed.
    """

    process: AnyProcess
    ratio: RatioFunction
    start: draws.Density | draws.Reparameterised | None


def select_ratio(process: AnyProcess, score: Score) -> RatioFunction:
    """The density ratio of one step under the law to which `score` belongs."""
    if not isinstance(process, Process):
        if not hasattr(process, "log_ratio"):
            raise TypeError(
                f"a {type(process).__name__} has no `log_ratio(new, old, step)`: it "
                "cannot be reweighted."
            )
        return _own_ratio
    known = {
        scores.full_score: scores.log_ratio,
        scores.drift_score: scores.log_ratio,
        scores.local_linear_score: scores.local_linear_log_ratio,
    }
    if score not in known:
        name = getattr(score, "__name__", type(score).__name__)
        raise ValueError(
            f"the density that belongs to `{name}` is not known: reweighting takes full_score, "
            "drift_score or local_linear_score."
        )
    return known[score]


def _own_ratio(process: Any, new: Params, old: Params, step: Step) -> scores.Ratio:
    return process.log_ratio(new, old, step)


def refuse_singular(law: PathLaw, theta: Params, old: Params, record: recorded.Recording) -> None:
    """Refuse parameters without a density: another start, noise or noiseless drift.

    Checks a few states of a few trajectories.
    """
    if isinstance(law.start, draws.Reparameterised):
        x0 = law.start.x0
        step = jax.vmap(lambda c, _: x0(theta, c) - x0(old, c))(record.context, record.first_states)
        if bool(jnp.any(step != 0)):
            raise ValueError(
                "the `Reparameterised` start differs between the two parameters: paths that "
                "start elsewhere have no density against these. Give the start a `Density`, or "
                "keep its parameters as they were."
            )
    steps = len(record.t) - 1
    selected = sorted({0, 1 % steps, steps // 2, steps - 1})
    for j in sorted({0, record.count // 2, record.count - 1}):
        _check_path(law, theta, old, record.read_trajectory(j), j, selected)


def _check_path(
    law: PathLaw,
    theta: Params,
    old: Params,
    trajectory: Trajectories,
    number: int,
    steps: Sequence[int] | None = None,
) -> None:
    """Refuse a singular density along one trajectory.

    number: of the trajectory, for the message.
    steps: steps to check; None for all.
    """
    smooth = (
        law.process if isinstance(law.process, Process) else getattr(law.process, "diffusion", None)
    )
    if smooth is None:
        return
    t = np.asarray(trajectory.t)
    x = np.asarray(trajectory.x[0], working_dtype(theta, trajectory.x))
    context = jax.tree.map(lambda leaf: leaf[0], trajectory.context)
    for n in range(len(t) - 1) if steps is None else steps:
        where = f"on trajectory {number} at time index {n}"
        diffusion.check_equivalent(smooth, theta, old, x[n], t[n], context, where)


def log_ratios(
    law: PathLaw, rewards: Rewards, theta: Params, olds: Params, record: recorded.Recording
) -> scores.Ratio:
    """ln p_θ − ln p_old of trajectories, for the parameters of every batch. Shape (E, B)."""
    process = diffusion.check_model(
        law.process, rewards, theta, record.first_states, record.t, record.context
    )
    law = law._replace(process=process)
    sums = _start_ratio(law, theta, olds, record.first_states, record.context)
    for n, times, x in record.iterate_blocks(recorded.BLOCK_BYTES):
        events = record.read_events(n, n + len(times.dt))
        block = recorded.StepBlock(n, times, x, record.context, events)
        sums = _add_block(law, theta, olds, sums, block)
    log, divergence = (np.asarray(v, np.float64) for v in sums)
    if np.isnan(log).any() or np.isposinf(log).any():
        bad = np.flatnonzero(~(log < np.inf).all(axis=1))
        for b, j in np.argwhere(~(log < np.inf).T)[: recorded.MAX_SEARCHED].tolist():
            old = jax.tree.map(lambda leaf: leaf[b], olds)  # noqa: B023
            _check_path(law, theta, old, record.read_trajectory(j), j)
        raise FloatingPointError(
            f"the density of {len(bad)} of {len(log)} trajectories is not finite: "
            f"{check.list_indices(bad)}."
        )
    return scores.Ratio(log, divergence)


@partial(jit, static_argnums=0)
def _start_ratio(law: PathLaw, theta: Params, olds: Params, x: Array, context: Any) -> scores.Ratio:
    batches = jax.tree.leaves(olds)[0].shape[0]
    if not isinstance(law.start, draws.Density):
        nothing = jnp.zeros((x.shape[0], batches), x.dtype)
        return scores.Ratio(nothing, nothing)
    density = law.start.log_density

    def one(x, c):
        return jax.vmap(lambda old: density(theta, x, c) - density(old, x, c))(olds)

    log = jax.vmap(one)(x, context).astype(x.dtype)
    return scores.Ratio(log, -log)


@partial(jit, static_argnums=0)
def _add_block(
    law: PathLaw, theta: Params, olds: Params, sums: scores.Ratio, block: recorded.StepBlock
) -> scores.Ratio:
    """Add the steps of a block of recorded trajectories."""

    def add_step(sums: scores.Ratio, moment: Moment) -> scores.Ratio:
        def one(x: Array, x_next: Array, context: Any, events: Any) -> scores.Ratio:
            step = Step(x, x_next, moment.t, moment.dt, context, events)
            return jax.vmap(lambda old: law.ratio(law.process, theta, old, step))(olds)

        ratios = jax.vmap(one)(moment.x, moment.x_next, moment.context, moment.events)
        return jax.tree.map(lambda total, v: total + v.astype(total.dtype), sums, ratios)

    return recorded.scan_block(add_step, sums, block)
