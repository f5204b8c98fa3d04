"""Comparison of the steps of a chain with their log-probability.

For steps x → x' drawn with the probability p(x'|x; θ), the score U = ∂θ ln p obeys, along any
direction d of the parameters,

    E[d·U] = 0,     v = E[(d·U)²] / E[−d·∂U·d] = 1     (the identities of Bartlett),

given the past of the step. A log-probability of another chain breaks the first, which is
tested for all steps, for parts of the time and for parts of the state. One with a wrong factor (the
mean over the sites of a sweep in place of their sum) breaks the second. Beside them, recorded steps
are compared with steps that the sampler draws from the same states: ln p and every component must
have the same mean.

Steps given their past are independent of it, so sums over all steps have the error √Σ(…)². Rare
events need care: where none was seen, U is small, of one sign, and has hardly any spread. The error
of ΣU is therefore at least √Σ(−∂U), and v is not judged before a hundred steps contribute to it.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.likelihood.report import Residuals
from fluctua.core.likelihood.sample import choose_rows, load_rows
from fluctua.core.process import Step, StepLaw
from fluctua.core.text import names
from fluctua.core.trajectories import Trajectories

MAX_NUMBERS = 4_000_000
"""Most steps times parameters that are examined."""

CERTAIN = 6.0
"""Standard errors that a deviation must have; there are many means, and they are skewed."""

SUSPECTS = 16
"""Number of parameters whose mean score is examined more closely."""

BLOCKS = 16
"""Parts of the time, and of the state along a random direction, with means of their own."""

UNLIKELY = 18.0
"""−ln of the probability with which chance may exceed a sum of squares."""

DISPLACEMENT = 0.2
"""Distance from zero at which sampler and log-probability are compared, in units of 1/√E[U²]. A
wrong sign then has 0.4 √N standard errors after N steps, a factor of two 0.2 √N."""

SIZES = 2.0 ** -np.arange(11)
"""Distances from θ at which likelihoods are compared, in units of 1/√E[U²]."""

DIFFERENCE = 0.05
"""Distance from θ for differences of the score, in units of 1/√E[(d·U)²]. The curvature of a law
with a kink is then off by some per cent, less than a tenth."""

DIRECTIONS = 8
"""Random directions of the parameters, for v."""

MIN_CONTRIBUTIONS = 100
"""Steps that must contribute to v before it is judged."""


def examine_steps(
    process: StepLaw,
    theta: Params,
    data: Trajectories,
    max_transitions: int,
    compare: bool = True,
) -> Residuals:
    """v along random directions of the parameters, and the most likely fault of the steps.

    compare: whether to compare with steps that the sampler draws, if there is one.
    """
    steps = _collect_steps(theta, data, max_transitions)
    log, score = (np.asarray(part, np.float64) for part in _score_steps(process, theta, steps))
    possible = np.isfinite(log) & np.isfinite(score).all(axis=1)
    if not possible.all():  # refused elsewhere, with its place
        steps = jax.tree.map(lambda leaf: np.asarray(leaf)[possible], steps)
        log = log[possible]
        score = score[possible]
    if not len(log):
        return Residuals(np.ones(0), np.zeros(0), 0)
    blocks = _split_steps(steps)
    each = [_sum_squares(score, block) for block in blocks.values()]
    apparent = np.max(each, axis=0)
    suspects = np.argsort(-apparent, kind="stable")[:SUSPECTS]
    directions = _choose_directions(score, suspects)
    along = score @ directions.T
    curvature = np.asarray(_compute_curvatures(process, theta, directions, steps), np.float64).T
    closely = np.s_[:, : len(suspects)]
    labels = np.array(names(theta))[suspects]
    cause = _judge_means(along[closely], curvature[closely], blocks, labels)
    if cause and not _confirm_means(process, theta, steps, directions[: len(suspects)], blocks):
        cause = ""
    # random directions first, which are printed
    order = np.roll(np.arange(len(directions)), -len(suspects))
    v, stderr = _compare_squares(along[:, order], curvature[:, order])
    residuals = Residuals(v, stderr, len(log), cause=cause, law="score² / information")
    if not cause and residuals.wrong.size:  # of kinks, |x' − m|, derivatives see nothing
        differences = _difference_scores(process, theta, directions[order], steps)
        smooth, error = _compare_squares(along[:, order], differences)
        others = residuals._replace(v=smooth, stderr=error)
        residuals = residuals if others.wrong.size else others
    if not cause and residuals.wrong.size:
        factor = residuals.v[residuals.wrong[0]]
        cause = (
            f"The square of the score is {factor:.3g} times the curvature of ln p: "
            "`log_prob` has a wrong factor, or the shape of another law. A sweep has the sum over "
            "its sites, not their mean."
        )
    if not cause and compare and getattr(process, "sample", None) is not None:
        cause = _compare_with_sampler(process, theta, steps, log)
    return residuals._replace(cause=cause)


def displace_zeros(
    process: StepLaw, theta: Params, data: Trajectories, max_transitions: int
) -> tuple[Params, Params] | None:
    """θ ± δ with δ at the parameters that are zero; None if there are none.

    A parameter of zero hides its sign, its factor and its place: −w, 2w and wᵀ are the same law at
    w = 0, whatever their scores, which obey both identities. Moved by a part of its error from one
    step, 1/√E[U²], such a law differs. There are two sides because one may lie outside of the
    parameters that are allowed: a probability of 0.99 + w.
    """
    vector, unravel = ravel_pytree(theta)
    flat = np.asarray(vector)
    if flat.all():
        return None
    steps = _collect_steps(theta, data, max_transitions)
    square = np.nanmean(np.asarray(_score_steps(process, theta, steps)[1], np.float64) ** 2, axis=0)
    scale = 1 / np.sqrt(np.maximum(square, 1))
    signs = np.random.default_rng(2).choice([-1.0, 1.0], size=flat.size)
    move = np.where(flat == 0, DISPLACEMENT * signs * scale, 0).astype(flat.dtype)
    return unravel(jnp.asarray(flat + move)), unravel(jnp.asarray(flat - move))


def _collect_steps(theta: Params, data: Trajectories, max_transitions: int) -> Step:
    """Steps of some trajectories, one per row: leaves (N, ...)."""
    parameters = sum(np.size(leaf) for leaf in jax.tree.leaves(theta))
    limit = min(max_transitions, max(1, MAX_NUMBERS // max(1, parameters)))
    rows = choose_rows(data, limit)
    x = load_rows(data.x, rows)
    x = x.astype(working_dtype(theta, x))
    context = jax.tree.map(lambda leaf: load_rows(leaf, rows), data.context)
    times = check.grid(data.t)
    count = len(rows)
    length = x.shape[1] - 1

    def by_step(leaf: Array) -> Array:
        return np.repeat(np.asarray(leaf), length, axis=0)

    return Step(
        x=x[:, :-1].reshape(-1, x.shape[2]),
        x_next=x[:, 1:].reshape(-1, x.shape[2]),
        t=np.tile(np.asarray(times.t[:-1]), count),
        dt=np.tile(np.asarray(times.dt), count),
        context=jax.tree.map(by_step, context),
    )


@partial(jit, static_argnums=0)
def _score_steps(process: StepLaw, theta: Params, steps: Step) -> tuple[Array, Array]:
    """ln p (N,) and U (N, P) of every step."""

    def one(step: Step) -> tuple[Array, Array]:
        value, slope = jax.value_and_grad(lambda th: process.log_probability(th, step))(theta)
        return value, ravel_pytree(slope)[0]

    return jax.vmap(one)(steps)


@partial(jit, static_argnums=0)
def _compute_curvatures(process: StepLaw, theta: Params, directions: Array, steps: Step) -> Array:
    """d·∂U·d of every step along each direction. Shape (K, N)."""
    flat, unravel = ravel_pytree(theta)

    def along(direction: Array) -> Array:
        direction = direction.astype(flat.dtype)

        def slope(v: Array, step: Step) -> Array:
            log = jax.grad(lambda u: process.log_probability(unravel(u), step))
            return direction @ log(v)

        return jax.vmap(lambda step: direction @ jax.grad(slope)(flat, step))(steps)

    return jax.lax.map(along, directions)


def _choose_directions(score: np.ndarray, suspects: np.ndarray) -> np.ndarray:
    """Suspected parameters one by one, then random signs, in units of the score. Shape (K, P).

    Parameters whose score is that of a few rare steps are left out of the random ones: the square
    of such a score is hardly known.
    """
    rng = np.random.default_rng(0)
    scale = np.sqrt(np.mean(score**2, axis=0))
    unit = np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0)
    one_by_one = np.eye(len(scale))[suspects]
    signs = rng.choice([-1.0, 1.0], size=(DIRECTIONS, len(scale)))
    return np.concatenate([one_by_one, signs * _is_known(score)]) * unit


def _is_known(along: np.ndarray) -> np.ndarray:
    """Whether enough steps contribute to the squares of each column (N, K), both signs. (K,)"""
    squares = along**2
    seen = squares.sum(axis=0)
    contributions = seen**2 / np.maximum(np.sum(squares**2, axis=0), np.finfo(float).tiny)
    z = np.abs(along.sum(axis=0)) / np.sqrt(np.maximum(seen, np.finfo(float).tiny))
    return (contributions >= MIN_CONTRIBUTIONS) & (z <= CERTAIN)


def _split_steps(steps: Step) -> dict[str, np.ndarray]:
    """The block of each step (N,): all in one, by time, and by the state along a direction."""
    x = np.asarray(steps.x, np.float64)
    direction = np.random.default_rng(1).normal(size=x.shape[1])
    spread = x.std(axis=0)
    place = x @ np.where(spread > 0, direction / np.where(spread > 0, spread, 1), 0)
    return {
        "": np.zeros(len(x), int),
        ", in parts of the time,": _split_evenly(np.asarray(steps.t, np.float64)),
        ", in parts of the state,": _split_evenly(place),
    }


def _split_evenly(values: np.ndarray) -> np.ndarray:
    """Blocks of about as many values each; equal values share one. (N,) int."""
    edges = np.unique(np.quantile(values, np.arange(1, BLOCKS) / BLOCKS))
    return np.searchsorted(edges, values, side="right")


def _sum_squares(
    along: np.ndarray, block: np.ndarray, curvature: np.ndarray | None = None
) -> np.ndarray:
    """Σ z² over the blocks, with z the sum of `along` (N, K) in each over its error. Shape (K,).

    curvature: d·∂U·d (N, K), whose negative is the variance that is expected.
    """
    shape = (block.max() + 1, along.shape[1])
    sums = np.zeros(shape)
    variance = np.zeros(shape)
    np.add.at(sums, block, along)
    np.add.at(variance, block, along**2)
    if curvature is not None:
        expected = np.zeros(shape)
        np.add.at(expected, block, -curvature)
        variance = np.maximum(variance, expected)
    return np.sum(sums**2 / np.where(variance > 0, variance, 1), axis=0)


def _judge_means(
    along: np.ndarray, curvature: np.ndarray, blocks: dict[str, np.ndarray], labels: np.ndarray
) -> str:
    """The fault of the mean scores (N, K) of some parameters as text; empty without one.

    A sum of B squares exceeds B + 2√(Bu) + 2u with a probability below e⁻ᵘ (Laurent and Massart).
    """
    for part, block in blocks.items():
        squares = _sum_squares(along, block, curvature)
        count = len(np.unique(block))
        limit = count + 2 * np.sqrt(count * UNLIKELY) + 2 * UNLIKELY
        worst = int(np.argmax(squares))
        if squares[worst] > limit:
            return (
                f"The mean score of `{labels[worst]}`{part} is not zero (χ² = "
                f"{squares[worst]:.0f}, {count} expected): the steps are those of another chain "
                "or of other parameters than `log_prob` describes."
            )
    return ""


def _confirm_means(
    process: StepLaw, theta: Params, steps: Step, directions: np.ndarray, blocks: dict
) -> bool:
    """Whether other parameters make the steps more likely than chance allows.

    The ratio of the likelihoods at θ + εd and θ has the mean 1, so that its logarithm exceeds u
    with a probability below e⁻ᵘ; so has a mean of ratios over fixed ε, each block with its own. A
    rare event that was not seen has a mean score far from zero, and no such gain.
    """
    flat, unravel = ravel_pytree(theta)
    log = np.asarray(_score_steps(process, theta, steps)[0], np.float64)
    sizes = np.concatenate([SIZES, -SIZES])
    for direction in directions:
        gains = []
        for size in sizes:
            moved = unravel(jnp.asarray(flat + size * direction, flat.dtype))
            value = np.asarray(_score_steps(process, moved, steps)[0], np.float64)
            if np.isfinite(value).all():  # else these are no parameters: a probability above 1
                gains.append(value - log)
        if not gains:
            return True
        for block in blocks.values():
            sums = np.array([np.bincount(block, gain) for gain in gains])
            best = sums.max(axis=0)
            mixture = best + np.log(np.sum(np.exp(sums - best), axis=0) / len(sizes))
            if mixture.sum() > UNLIKELY:
                return True
    return False


def _difference_scores(
    process: StepLaw, theta: Params, directions: np.ndarray, steps: Step
) -> np.ndarray:
    """d·∂U·d of every step by differences of the score, (N, K): kinks of ln p count in its mean."""
    flat, unravel = ravel_pytree(theta)
    score = np.asarray(_score_steps(process, theta, steps)[1], np.float64)
    columns = []
    for direction in directions:
        size = DIFFERENCE / np.sqrt(max(np.mean((score @ direction) ** 2), 1.0))
        ends = []
        for sign in (1, -1):
            moved = unravel(jnp.asarray(flat + sign * size * direction, flat.dtype))
            ends.append(np.asarray(_score_steps(process, moved, steps)[1], np.float64) @ direction)
        columns.append((ends[0] - ends[1]) / (2 * size))
    return np.nan_to_num(np.stack(columns, axis=1))


def _compare_squares(along: np.ndarray, curvature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """v along each direction and its standard error; 1 ± 0 where it cannot be judged."""
    squares = along**2
    expected = -curvature.sum(axis=0)
    known = _is_known(along) & (expected != 0)
    divisor = np.where(known, expected, 1)
    v = np.where(known, squares.sum(axis=0) / divisor, 1)
    spread = np.sqrt(np.sum((squares + v * curvature) ** 2, axis=0)) / np.abs(divisor)
    return v, np.where(known, spread, 0)


def _compare_with_sampler(process: StepLaw, theta: Params, steps: Step, log: np.ndarray) -> str:
    """The difference from steps that the sampler draws from the same states; empty without one."""
    x_next, redrawn = (
        np.asarray(part, np.float64) for part in _redraw(process, theta, steps, jax.random.key(0))
    )
    possible = np.isfinite(redrawn)
    surprise = _count_errors((log - redrawn)[possible, None])
    moved = _count_errors(np.asarray(steps.x_next, np.float64) - x_next)
    i = int(np.argmax(np.abs(moved)))
    if abs(moved[i]) > CERTAIN:
        return (
            f"Component {i} is {moved[i]:+.1f} standard errors from where `sample` takes it: the "
            "steps are those of another chain or of other parameters."
        )
    if abs(surprise[0]) > CERTAIN:
        side = "more" if surprise[0] > 0 else "less"
        return (
            f"The steps are {side} probable than those that `sample` draws, by "
            f"{abs(surprise[0]):.1f} standard errors of the mean ln p."
        )
    return ""


def _count_errors(differences: np.ndarray) -> np.ndarray:
    """Sums of the columns in units of their standard errors."""
    error = np.sqrt(np.sum(differences**2, axis=0))
    return differences.sum(axis=0) / np.where(error > 0, error, 1)


@partial(jit, static_argnums=0)
def _redraw(process: StepLaw, theta: Params, steps: Step, key: Array) -> tuple[Array, Array]:
    """Other ends (N, M) of the steps, drawn by the sampler, and their ln p (N,)."""

    def one(n: Array, step: Step) -> tuple[Array, PyTree]:
        own = jax.random.fold_in(key, n)
        x_next = process.draw_next(own, theta, step.x, step.t, step.context)
        return x_next, process.log_probability(theta, step._replace(x_next=x_next))

    return jax.vmap(one)(jnp.arange(len(steps.t)), steps)
