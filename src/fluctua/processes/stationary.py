"""Continuing tasks: the gradient of a long-run average from one long record, or a few.

In the steady state every kick is answered by all rewards that follow it, so that with kicks Uₙ and rewards gₙ = g(Xₙ)

    ∇J = E[∂θ g] + Σ_{k≥1} E[(gₙ₊ₖ − J) Uₙ],        J = E[g],

of which the record gives the sum up to a window w, as the mean over n of (gₙ − ḡ) zₙ with the eligibility trace
zₙ = Uₙ₋₁ + … + Uₙ₋w (Baxter and Bartlett). What later rewards would add is lost: too short a window is a bias, too
long a one is noise. The sum over the window that follows, w … 2w, measures that bias.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy import stats

from fluctua.core import check
from fluctua.core.diffusion import check_model
from fluctua.core.ppgt import score_of
from fluctua.core.scores import full_score
from fluctua.core.sources import Recording
from fluctua.core.text import describe_estimate, with_error
from fluctua.core.types import (
    AnyProcess,
    Array,
    Estimate,
    Objective,
    Params,
    PyTree,
    Rewards,
    Score,
    Step,
    Trajectories,
)

PLATEAU = 5.0
"""The window that "auto" takes, in integrated autocorrelation times of the reward (twice what errors need)."""
FEWEST = 10
"""Batches that an error is taken from, at the least; each is longer than the window and the correlations."""
BLOCK = 4096
"""Steps whose scores are computed together."""


class Stationary(NamedTuple):
    """The gradient of a long-run average and what it rests on.

    estimate: `stderr` by batch means; `count` is the number of batches. window: in units of time.
    autocorrelation_time: of the reward, integrated, in units of time. missing: what the window that follows would add
    to the gradient, as θ; missing_stderr: its error. A plateau is where the one is within a few of the other.
    """

    estimate: Estimate
    window: float
    autocorrelation_time: float
    missing: Params
    missing_stderr: Params

    def __repr__(self) -> str:
        flat = lambda tree: ravel_pytree(tree)[0]
        missing, error = flat(self.missing), flat(self.missing_stderr)
        worst = int(np.argmax(np.abs(missing) / np.where(error > 0, error, np.inf)))
        return (
            describe_estimate(self.estimate).replace("trajectories)", "batches)", 1)
            + f"\n  window {self.window:.4g}, autocorrelation time {self.autocorrelation_time:.4g}; "
            + f"the next window would add {with_error(float(missing[worst]), float(error[worst]))} at most"
        )


def stationary(
    process: AnyProcess,
    reward: Callable[..., Array] | Objective,
    theta: Params,
    record: Trajectories,
    *,
    window: float | str = "auto",
    score: Score = full_score,
) -> Stationary:
    """∇θ of the long-run average of a reward, from one trace or a few.

    Args:
        process: drift and noise that the score uses, or another kind of process.
        reward: (theta, x, t, context) -> g, a number; or an `Objective` with `running` alone.
        theta: the parameters at which the record was taken.
        record: `Trajectories` in the steady state, x (E, T+1, M), on a uniform grid; E may be 1.
        window: time over which a kick is remembered; "auto" takes five autocorrelation times of the reward.
        score: ∂θ ln p(x'|x) of one step.

    Returns: a `Stationary`, with the gradient, its error by batch means, and what the window leaves out.

    """
    process, theta = check.process(process), check.parameters(theta)
    objective = reward if isinstance(reward, Objective) else Objective(running=reward)
    if objective.terminal is not None or objective.running is None:
        raise ValueError("a long-run average has a `running` reward and no `terminal` one.")
    rewards = check.objective(objective)
    recording = Recording(record, theta)
    times = recording.times
    dt = float(times.dt[0])
    if np.ptp(np.asarray(times.dt)) > 1e-6 * dt:
        raise ValueError("a continuing record needs a uniform time grid: its correlations are taken by lag.")
    check_model(process, rewards, theta, recording.first, recording.t, recording.context)
    g, explicit, u = _traces(process, rewards, score_of(process, score), theta, recording)

    steps = g.shape[1]
    memory = autocorrelation_time(g)
    lags = _window(window, memory, dt, steps)
    length = max(2 * lags, int(np.ceil(10 * memory)))  # of a batch: correlations across its ends are a tenth of it
    batches = (steps - 2 * lags) // length * len(g)
    if batches < FEWEST:
        raise ValueError(
            f"the record is too short: {len(g)} × {steps * dt:.4g} units of time hold {max(batches, 0)} stretches of "
            f"{length * dt:.4g}, which is what a window of {lags * dt:.4g} and an autocorrelation time of "
            f"{memory * dt:.3g} need; {FEWEST} make an error bar. Record for longer, or give a shorter `window`."
        )
    near = _batch_means(g, u, explicit, 0, lags, length)
    far = _batch_means(g, u, 0 * explicit, lags, 2 * lags, length)
    flat, unravel = ravel_pytree(theta)
    shaped = lambda v: unravel(jnp.asarray(v, flat.dtype))
    student = stats.t.ppf(0.8413447, len(near) - 1)  # one standard error of a few batches
    error = lambda means: student * means.std(axis=0, ddof=1) / np.sqrt(len(means))
    blocks = g[:, : steps // length * length].reshape(-1, length).mean(axis=1)
    estimate = Estimate(
        shaped(near.mean(axis=0)),
        shaped(error(near)),
        shaped((near**2).mean(axis=0)),
        jnp.asarray(g.mean()),
        jnp.asarray(error(blocks)),
        len(near),
    )
    return Stationary(estimate, lags * dt, memory * dt, shaped(far.mean(axis=0)), shaped(error(far)))


def autocorrelation_time(g: np.ndarray) -> float:
    """1 + 2Σ_k ρ(k), in steps, of series g (E, T): summed to five times its own value (Sokal's window)."""
    centred = g - g.mean()
    size = 2 ** int(np.ceil(np.log2(2 * g.shape[1])))
    power = np.abs(np.fft.rfft(centred, size, axis=1)) ** 2
    covariance = np.fft.irfft(power, size, axis=1)[:, : g.shape[1]].sum(axis=0)
    if not covariance[0] > 0:
        raise ValueError("the reward does not vary along the record: there is nothing to learn from.")
    total = 2 * np.cumsum(covariance / covariance[0]) - 1
    done = np.arange(total.size) >= 5 * total
    return float(total[np.argmax(done)] if done.any() else total[-1])


def _window(window: float | str, memory: float, dt: float, steps: int) -> int:
    if isinstance(window, str):
        if window != "auto":
            raise ValueError(f'`window` is a time or "auto"; got {window!r}.')
        lags = int(np.ceil(PLATEAU * memory))
    else:
        lags = round(window / dt) if np.isfinite(window) else 0
    if not lags >= 1:
        raise ValueError(f"`window` must be a step ({dt:g}) at least; got {window}.")
    if 2 * lags >= steps:
        raise ValueError(
            f"the record, {steps * dt:.4g} units of time, must be longer than two windows of {lags * dt:.4g} (the "
            f"reward's autocorrelation time is {memory * dt:.3g}). Record for longer."
        )
    return lags


def _batch_means(g: np.ndarray, u: np.ndarray, explicit: np.ndarray, first: int, last: int, length: int) -> np.ndarray:
    """Means over stretches of (gₙ − ḡ)(Uₙ₋₁₋first + … + Uₙ₋last) + ∂θ g. (B, P)"""
    total = np.concatenate([np.zeros_like(u[:, :1]), np.cumsum(u, axis=1)], axis=1)  # Σ_{k<n} U_k at n
    n = np.arange(last, g.shape[1])
    trace = total[:, n - first] - total[:, n - last]
    each = (g[:, n] - g.mean())[..., None] * trace + explicit[:, n]
    whole = each.shape[1] // length * length
    return each[:, :whole].reshape(len(g), -1, length, u.shape[2]).mean(axis=2).reshape(-1, u.shape[2])


def _traces(
    process: AnyProcess, rewards: Rewards, score: Score, theta: Params, recording: Recording
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """gₙ (E, T), ∂θ gₙ (E, T, P) and Uₙ (E, T, P) in double precision."""
    steps = len(recording.t) - 1
    parts = []
    for n in range(0, steps, BLOCK):
        times, x = recording.block(n, min(n + BLOCK, steps))
        events = recording.events(n, min(n + BLOCK, steps))
        parts.append(_of_block(process, rewards, score, theta, times, x, recording.context, events))
    g, explicit, u = (np.concatenate([np.asarray(part[i], np.float64) for part in parts], axis=1) for i in range(3))
    return g, explicit, u


@partial(jax.jit, static_argnums=(0, 1, 2))
def _of_block(
    process: AnyProcess,
    rewards: Rewards,
    score: Score,
    theta: Params,
    times: Any,
    x: Array,
    context: PyTree,
    events: Any,
) -> tuple[Array, Array, Array]:
    def one(
        x: Array, x_next: Array, t: Array, dt: Array, events: PyTree, context: PyTree
    ) -> tuple[Array, Array, Array]:
        g, explicit = jax.value_and_grad(lambda th: rewards.running(th, x, t, context).astype(x.dtype))(theta)
        u = score(process, theta, Step(x, x_next, t, dt, context, events))
        return g, ravel_pytree(explicit)[0], ravel_pytree(u)[0]

    along = jax.vmap(one, in_axes=(0, 0, 0, 0, 0, None))
    return jax.vmap(along, in_axes=(0, 0, None, None, 0, 0))(
        x[:, :-1], x[:, 1:], times.t[:-1], times.dt, events, context
    )
