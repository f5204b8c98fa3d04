"""Trajectories used again: J and its gradient at parameters other than those at which they were
taken.

A trajectory X of a batch taken at θ_b counts at θ as often as it is likelier there,

    w = p_θ(X) / Σ_b (n_b/N) p_{θ_b}(X),    ln p_θ(X) = ln p₀(X₀) + Σ_n ln p_θ(X_{n+1}|X_n),

with n_b of the N trajectories in batch b: the balance heuristic (Veach and Guibas), for one batch
the ratio itself. E[w] = 1, and E[w G] = ∇J(θ) for the gradient G of each trajectory at θ. What that
is worth is the effective number of trajectories, ESS = (Σw)²/Σw², which falls about as N exp(−2
KL): see `results/reuse`.

A large weight makes ESS small. To discard batches whose ESS is small is therefore to discard large
weights, and what is left has another mean: "plain" weights, the mean of wG, keep their value
however small ESS is, and lose their error bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path

from fluctua.core import check, sweep
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.baselines import Baseline, Twin, chosen, half, time_only
from fluctua.core.diffusion import check_equivalent, check_model
from fluctua.core.draws import Density, Reparameterised, checked_start
from fluctua.core.estimate import Estimate, Samples, reduce_samples
from fluctua.core.objective import Objective, Rewards
from fluctua.core.ppgt import gradient_samples, mean_return_to_go, score_of
from fluctua.core.process import AnyProcess, Process, Score, Step
from fluctua.core.scores import (
    Ratio,
    drift_score,
    full_score,
    local_linear_log_ratio,
    local_linear_score,
    log_ratio,
)
from fluctua.core.sources import BLOCK_BYTES, MOST_SEARCHED, Recording, over_block, pieces
from fluctua.core.trajectories import Times, Trajectories
from fluctua.learn.clip import Clip, RatioOfStep, clipped_samples

FEWEST = 20.0
"""Effective trajectories below which error bars do not cover."""

Batch = tuple[Params, Trajectories | Iterable[Trajectories]]


class Reweighted(NamedTuple):
    """An estimate at θ from trajectories that were taken elsewhere, and what they were worth there.

    estimate: J(θ) and ∇J(θ); its second moment is of what a trajectory adds, weight included. Its
    errors and intervals are NaN where "plain" weights are worth too little for them. ess:
    (Σw)²/Σw², of `estimate.count` trajectories.
    kl: KL(old ‖ θ) of each batch, in nats per path. weights: w of every trajectory.
    clipped: share of the steps that a `Clip` held.
    """

    estimate: Estimate
    ess: float
    kl: tuple[float, ...]
    weights: np.ndarray
    clipped: float = 0.0

    def __repr__(self) -> str:
        far = ", ".join(f"{kl:.3g}" for kl in self.kl)
        held = f"; {self.clipped:.1%} of the steps clipped" if self.clipped else ""
        line = (
            f"worth {self.ess:.1f} of {self.estimate.count:,} trajectories; KL from where they "
            f"were taken: {far}{held}"
        )
        if np.isnan(self.estimate.value_stderr):
            line += (
                ";\ntoo few for an error bar. Averages over batches keep all of them: see "
                "`reweighted`"
            )
        return f"{line}\n{self.estimate!r}"


def reweighted(
    process: AnyProcess,
    objective: Objective,
    theta: Params,
    batches: Sequence[Batch],
    *,
    weights: str | Clip = "normalised",
    fewest: float = FEWEST,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    baseline: Baseline | Twin | str | None = None,
    initial_baseline: Baseline | str | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Reweighted:
    """J(θ) and ∇θJ(θ) from trajectories taken at other parameters, Σ w G / Σ w.

    Parameters of the noise must be what they were, and so must what moves components without noise:
    the paths of one value then have no density against those of another, and are refused by name.
    If θ was chosen by these very trajectories, the result favours it.

    Args:
        process: drift and noise, or `Jumps`.
        objective: what is maximised.
        theta: where J and its gradient are wanted.
        batches: (θ_old, trajectories) pairs on one time grid; trajectories as `gradient` takes
            them.
        weights: "normalised" (Σw = N: a bias of order 1/ESS, less variance), "plain" (unbiased), or
            a `Clip`.
        fewest: effective trajectories below which there is no error bar. "normalised" weights then
            raise a `ValueError` that says how far θ is. "plain" ones return their value with errors
            of NaN: it is unbiased on average over all batches, and not over those that have an
            error bar, since large weights make ESS small. 0 lets everything pass.
        start: as in `gradient`.
        score: as in `gradient`; it says which law the ratios are of.
        baseline: as in `gradient`; with several batches or a `Clip`, "time" or "none".
        initial_baseline: as in `gradient`.
        block_bytes: how much of the trajectories is held at a time.

    Returns: a `Reweighted`.

    """
    if not (isinstance(weights, Clip) or weights in ("normalised", "plain")):
        raise ValueError(f'`weights` is "normalised", "plain" or a `Clip`; got {weights!r}.')
    moving = None if start is None else checked_start(start)[0]
    process = check.process(process)
    rewards = check.objective(objective)
    law = _Law(process, _ratio_of(process, score_of(process, score)), moving)
    theta, pairs = check.parameters(theta), _checked(theta, batches)
    olds = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(old for old, _ in pairs))
    records = [Recording(trajectories, theta) for _, trajectories in pairs]
    for old, record in zip((old for old, _ in pairs), records, strict=True):
        if (
            not np.array_equal(record.t, records[0].t)
            or record.first.shape[1] != records[0].first.shape[1]
        ):
            raise ValueError(
                f"all batches must share one time grid and state; got {len(records[0].t)} and "
                f"{len(record.t)} times, "
                f"{records[0].first.shape[1]} and {record.first.shape[1]} components."
            )
        _check_equivalent(law, theta, old, record)
    parts = [_log_ratios(law, rewards, theta, olds, record, block_bytes) for record in records]
    count = np.array([record.count for record in records])
    check.count(int(count.sum()), 2)
    log = _log_weights(np.concatenate([part.log for part in parts]), count)
    relative = np.exp(log - log.max()) if np.isfinite(log).any() else np.zeros(len(log))
    ess = float(relative.sum() ** 2 / (relative**2).sum()) if relative.any() else 0.0
    weight = np.exp(np.minimum(log, 700))
    kl = tuple(float(part.divergence[:, b].mean()) for b, part in enumerate(parts))
    if isinstance(weights, Clip):
        plan = chosen(baseline, door="a `Clip`", serves=("none", "time"))
        assert isinstance(plan, Baseline)
        model = sweep.Model(process, rewards, score_of(process, score), moving, plan.of, plan.of)
        runs = [
            clipped_samples(model, law.ratio, theta, old, record, weights, plan)
            for (old, _), record in zip(pairs, records, strict=True)
        ]
        estimate = reduce_samples(_joined([samples for samples, _ in runs]))
        return Reweighted(
            estimate,
            ess,
            kl,
            weight,
            float(np.average([share for _, share in runs], weights=count)),
        )
    normalised = weights == "normalised"
    if normalised and not ess >= fewest:
        raise ValueError(
            f"the {count.sum():,} trajectories are worth {ess:.3g} at these parameters, and "
            f"`fewest` is {fewest:g}: "
            f"KL = {', '.join(f'{v:.3g}' for v in kl)} from where they were taken. Take new ones "
            "there, or go less far."
        )
    options = {
        "start": start,
        "score": score,
        "initial_baseline": initial_baseline,
        "block_bytes": block_bytes,
    }
    samples = _samples(process, objective, theta, pairs, baseline, options)
    estimate = reduce_samples(_weighted(samples, relative if normalised else weight, normalised))
    return Reweighted(estimate if ess >= fewest else _without_errors(estimate), ess, kl, weight)


# ------------------------------------------------------------------------------------- checks


class _Law(NamedTuple):
    """What a path's density is made of: code, not numbers; hashable."""

    process: AnyProcess
    ratio: RatioOfStep
    start: Density | Reparameterised | None


def _ratio_of(process: AnyProcess, score: Score) -> RatioOfStep:
    """The ratio of the law whose score it is."""
    if not isinstance(process, Process):
        if not hasattr(process, "log_ratio"):
            raise TypeError(
                f"a {type(process).__name__} has no `log_ratio(new, old, step)`: it cannot be "
                "reweighted."
            )
        return _own_ratio
    known = {
        full_score: log_ratio,
        drift_score: log_ratio,
        local_linear_score: local_linear_log_ratio,
    }
    if score not in known:
        name = getattr(score, "__name__", type(score).__name__)
        raise ValueError(
            f"the density that belongs to `{name}` is not known: reweighting takes full_score, "
            "drift_score or "
            "local_linear_score."
        )
    return known[score]


def _own_ratio(process: Any, new: Params, old: Params, step: Step) -> Ratio:
    return process.log_ratio(new, old, step)


def _checked(theta: Params, batches: Sequence[Batch]) -> list[Batch]:
    pairs = list(batches)
    if not pairs or any(
        not isinstance(pair, tuple) or len(pair) != 2 or isinstance(pair, Trajectories)
        for pair in pairs
    ):
        raise TypeError(
            "`batches` must be a list of pairs [(theta_old, trajectories), ...], one at least."
        )

    def shapes(tree):
        return {
            "theta" + jax.tree_util.keystr(path): v.shape for path, v in tree_leaves_with_path(tree)
        }

    checked = [(check.parameters(old), trajectories) for old, trajectories in pairs]
    for b, (old, _) in enumerate(checked):
        if shapes(old) != shapes(theta):
            raise ValueError(
                f"the parameters of batch {b} must be like `theta`, {shapes(theta)}; got "
                f"{shapes(old)}."
            )
    return checked


def _check_equivalent(law: _Law, theta: Params, old: Params, record: Recording) -> None:
    """Refuse what has no density: another start, other noise, another drift without noise.

    At some states.
    """
    if isinstance(law.start, Reparameterised):
        x0 = law.start.x0
        at = jax.vmap(lambda c, _: x0(theta, c) - x0(old, c))(record.context, record.first)
        if bool(jnp.any(at != 0)):
            raise ValueError(
                "the `Reparameterised` start differs between the two parameters: paths that start "
                "elsewhere have no "
                "density against these. Give the start a `Density`, or keep its parameters as they "
                "were."
            )
    steps = len(record.t) - 1
    for j in sorted({0, record.count // 2, record.count - 1}):
        _check_path(
            law, theta, old, record.trajectory(j), j, sorted({0, 1 % steps, steps // 2, steps - 1})
        )


def _check_path(
    law: _Law,
    theta: Params,
    old: Params,
    trajectory: Trajectories,
    number: int,
    steps: Sequence[int] | None = None,
) -> None:
    """`check_equivalent` along a trajectory. number: its own. steps: those to look at; all, if
    None.
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
        check_equivalent(smooth, theta, old, x[n], t[n], context, where)


# ------------------------------------------------------------------------------------- gradients


def _samples(
    process: AnyProcess,
    objective: Objective,
    theta: Params,
    pairs: list[Batch],
    baseline: Baseline | Twin | str | None,
    options: dict[str, Any],
) -> Samples:
    """The gradients at θ of all trajectories, batch after batch.

    The weights of several batches have the right mean in the sum over batches only. A baseline must
    therefore be the same in all: of half of the trajectories of each, for the other half of each.
    """
    if len(pairs) == 1:
        old, trajectories = pairs[0]
        return gradient_samples(
            process, objective, theta, trajectories, baseline=baseline, taken_at=old, **options
        )
    plan = chosen(baseline, door="several batches", serves=("none", "time"))
    assert isinstance(plan, Baseline)
    cuts = [half(Recording(trajectories, theta).count) for _, trajectories in pairs]

    def halves() -> Iterator[tuple[Params, int, Trajectories]]:
        for (old, trajectories), cut in zip(pairs, cuts, strict=True):
            for first, piece in pieces(trajectories, cut, options["block_bytes"]):
                yield old, int(first >= cut), piece

    sums = [0.0, 0.0]
    counts = [0, 0]
    for _, side, piece in halves() if plan.pilot else ():
        sums[side] = sums[side] + len(piece.x) * mean_return_to_go(objective, theta, piece)
        counts[side] += len(piece.x)
    of_other = [
        time_only(sums[1 - side] / counts[1 - side]) if plan.pilot else plan for side in (0, 1)
    ]
    return _joined(
        [
            gradient_samples(
                process, objective, theta, piece, baseline=of_other[side], taken_at=old, **options
            )
            for old, side, piece in halves()
        ]
    )


# ------------------------------------------------------------------------------------- weights


def _log_ratios(
    law: _Law, rewards: Rewards, theta: Params, olds: Params, record: Recording, block_bytes: int
) -> Ratio:
    """ln p_θ − ln p_old of the trajectories of a batch, at the parameters of every batch. (E, B)"""
    process = check_model(law.process, rewards, theta, record.first, record.t, record.context)
    law = law._replace(process=process)
    sums = _ratio_of_start(law, theta, olds, record.first, record.context)
    for n, times, x in record.blocks(block_bytes):
        beside = record.context, record.events(n, n + len(times.dt))
        sums = _ratio_of_block(law, theta, olds, sums, times, x, beside)
    log, divergence = (np.asarray(v, np.float64) for v in sums)
    if np.isnan(log).any() or np.isposinf(log).any():
        bad = np.flatnonzero(~(log < np.inf).all(axis=1))
        for b, j in np.argwhere(~(log < np.inf).T)[:MOST_SEARCHED].tolist():
            old = jax.tree.map(lambda leaf: leaf[b], olds)  # noqa: B023
            _check_path(law, theta, old, record.trajectory(j), j)
        raise FloatingPointError(
            f"the density of {len(bad)} of {len(log)} trajectories is not finite: {check.few(bad)}."
        )
    return Ratio(log, divergence)


@partial(jit, static_argnums=0)
def _ratio_of_start(law: _Law, theta: Params, olds: Params, x: Array, context: PyTree) -> Ratio:
    batches = jax.tree.leaves(olds)[0].shape[0]
    if not isinstance(law.start, Density):
        nothing = jnp.zeros((x.shape[0], batches), x.dtype)
        return Ratio(nothing, nothing)
    density = law.start.log_density

    def one(x, c):
        return jax.vmap(lambda old: density(theta, x, c) - density(old, x, c))(olds)

    log = jax.vmap(one)(x, context).astype(x.dtype)
    return Ratio(log, -log)


@partial(jit, static_argnums=0)
def _ratio_of_block(
    law: _Law,
    theta: Params,
    olds: Params,
    sums: Ratio,
    times: Times,
    x: Array,
    beside: tuple[PyTree, PyTree],
) -> Ratio:
    """Add the steps of a block. x (E, b+1, M)."""

    def added(sums: Ratio, states: Any, when: Any) -> Ratio:
        _, t, dt = when

        def one(x: Array, x_next: Array, context: PyTree, events: PyTree) -> Ratio:
            at = Step(x, x_next, t, dt, context, events)
            return jax.vmap(lambda old: law.ratio(law.process, theta, old, at))(olds)

        return jax.tree.map(
            lambda total, v: total + v.astype(total.dtype), sums, jax.vmap(one)(*states)
        )

    return over_block(added, sums, 0, times, x, beside)


def _log_weights(log: np.ndarray, count: np.ndarray) -> np.ndarray:
    """ln p_θ/Σ_b (n_b/N) p_b from ln p_θ − ln p_b (N, B)."""
    share = np.log(count / count.sum()) - log  # ln (n_b/N) p_b/p_θ
    most = share.max(axis=1)
    return np.where(
        np.isinf(most), -np.inf, -most - np.log(np.exp(share - most[:, None]).sum(axis=1))
    )


def _without_errors(estimate: Estimate) -> Estimate:
    """The estimate with NaN for every error and interval."""
    nothing = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), estimate.gradient)
    number = jnp.full_like(estimate.value, jnp.nan)
    return estimate._replace(
        stderr=nothing,
        value_stderr=number,
        interval=(nothing, nothing),
        value_interval=(number, number),
    )


def _joined(samples: list[Samples]) -> Samples:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *samples)


def _weighted(samples: Samples, weights: np.ndarray, normalised: bool) -> Samples:
    """What each trajectory adds: w G, or about the mean m of Σ w G/Σ w, m + N w (G − m)/Σ w (delta
    method).

    Their mean is the estimate and their spread its error.
    """
    share = jnp.asarray(weights / weights.mean() if normalised else weights, samples.returns.dtype)

    def each(v: Array) -> Array:
        w = share.reshape(-1, *(1,) * (v.ndim - 1)).astype(v.dtype)
        mean = jnp.mean(w * v, axis=0) if normalised else 0
        return mean + w * (v - mean)

    return jax.tree.map(each, samples._replace(group=None))._replace(group=samples.group)
