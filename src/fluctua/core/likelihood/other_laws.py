"""Guard of processes that are no diffusions: filtered samples, counted events, steps of chains."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.likelihood.mistakes import UNITS
from fluctua.core.likelihood.report import Residuals, is_wrong
from fluctua.core.likelihood.sample import choose_rows, load_rows
from fluctua.core.likelihood.step_law import examine_steps
from fluctua.core.process import Counting, HistoryDependent, Step, StepLaw, Transition
from fluctua.core.trajectories import Trajectories


def examine_other(
    process: Transition, theta: Params, data: Trajectories, max_transitions: int
) -> Residuals:
    """Compare trajectories with the law of a process that is no diffusion."""
    if isinstance(process, HistoryDependent):
        return examine_samples(process, theta, data, max_transitions)
    if isinstance(process, Counting):
        return examine_counts(process, theta, data, max_transitions)
    assert isinstance(process, StepLaw)
    return examine_steps(process, theta, data, max_transitions)


def examine_samples(
    process: HistoryDependent, theta: Params, data: Trajectories, max_transitions: int
) -> Residuals:
    """Innovations of each channel over what the filter predicts, v = 1 where it is right."""
    rows = choose_rows(data, max_transitions)
    samples = load_rows(data.x, rows)
    x = jnp.asarray(samples, working_dtype(theta, samples))
    context = jax.tree.map(lambda leaf: jnp.asarray(load_rows(leaf, rows)), data.context)
    checked: Any = process.check(
        theta, x[0, 0], jnp.asarray(data.t)[0], jax.tree.map(lambda leaf: leaf[0], context)
    )
    each = np.asarray(checked.residuals(theta, check.grid(data.t), x, context), float)
    v = each.mean(axis=(0, 1))
    count = each.shape[0] * each.shape[1]
    residuals = Residuals(v, each.std(axis=(0, 1)) / np.sqrt(count), count)
    if not residuals.wrong.size:
        return residuals
    return residuals._replace(
        cause=f"The innovations of channel{'s' * (len(residuals.wrong) > 1)} "
        f"{check.list_indices(residuals.wrong)} have not the "
        "variance that the filter predicts: the process, its start, what is observed, the readout "
        "noise or a unit is "
        "another one, or the drift bends too much within the uncertainty of the hidden state for "
        "an extended filter."
    )


def examine_counts(
    process: Counting, theta: Params, data: Trajectories, max_transitions: int
) -> Residuals:
    """Events of each kind over the number that their rates expect, v = N/∫a dt.

    N is Poissonian, so that the error of v is 1/√∫a dt.
    """
    rows = choose_rows(data, max_transitions)
    x, context, events = (
        jax.tree.map(lambda leaf: jnp.asarray(load_rows(leaf, rows)), tree)
        for tree in (data.x, data.context, data.events)
    )
    times = check.grid(data.t)
    happened, expected = (
        np.asarray(part, float)
        for part in _sum_counts(
            process,
            theta,
            x.astype(working_dtype(theta, x)),
            times.t[:-1],
            times.dt,
            context,
            events,
        )
    )
    there = expected > 0
    v = np.where(there, happened / np.where(there, expected, 1), np.where(happened > 0, np.inf, 1))
    stderr = np.where(
        there, np.sqrt(np.maximum(happened, expected)) / np.where(there, expected, 1), 1
    )
    residuals = Residuals(v, stderr, x.shape[0] * (x.shape[1] - 1), law="events / ∫ rate dt")
    if not residuals.wrong.size:
        return residuals
    fits = [
        factor
        for factor in (*UNITS, 60.0, 1 / 60)
        if not is_wrong(v / factor, stderr / factor).any()
    ]
    i = int(residuals.wrong[0])
    cause = (
        f"Event {i} happens {v[i]:.3g} times as often as by its rate: a rate, a parameter or a "
        "unit is another."
    )
    return residuals._replace(
        cause=f"They fit if the times are multiplied by {fits[0]:g} (another unit)."
        if fits
        else cause
    )


@partial(jit, static_argnums=0)
def _sum_counts(
    process: Counting, theta: Params, x: Array, t: Array, dt: Array, context: PyTree, events: PyTree
) -> tuple[Array, Array]:
    """Sums over trajectories x (E, T+1, M) and steps. (R,) each"""

    def one(
        x: Array, x_next: Array, t: Array, dt: Array, context: PyTree, events: PyTree
    ) -> tuple[Array, Array]:
        return process.counts(theta, Step(x, x_next, t, dt, context, events))

    along = jax.vmap(jax.vmap(one, in_axes=(0, 0, 0, 0, None, 0)), in_axes=(0, 0, None, None, 0, 0))
    happened, expected = along(x[:, :-1], x[:, 1:], t, dt, context, events)
    return happened.sum(axis=(0, 1)), expected.sum(axis=(0, 1))
