"""Reuse of trajectories: J and its gradient at other parameters than those of the measurement.

A trajectory X of a batch taken at θ_b has at θ the weight

    w = p_θ(X) / Σ_b (n_b/N) p_{θ_b}(X),    ln p_θ(X) = ln p₀(X₀) + Σ_n ln p_θ(X_{n+1}|X_n),

with n_b of the N trajectories in batch b: the balance heuristic (Veach and Guibas), for one batch
the ratio itself. E[w] = 1, and E[w G] = ∇J(θ) for the gradient G of each trajectory at θ. The
effective number of trajectories, ESS = (Σw)²/Σw², falls about as N exp(−2 KL): see `results/reuse`.

A large weight makes ESS small. Discarding batches with a small ESS therefore discards large
weights, and what is left has another mean: "plain" weights, the mean of wG, are unbiased however
small ESS is, but then have no error bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import baselines, check, draws, recorded
from fluctua.core import estimate as estimates
from fluctua.core import estimator as estimators
from fluctua.core import process as processes
from fluctua.core import trajectories as records
from fluctua.core.arrays import Array, Params
from fluctua.core.objective import Objective, Rewards
from fluctua.core.scores import full_score, select_score
from fluctua.core.words import format_count
from fluctua.learn import density_ratio

MINIMUM_ESS = 20.0
"""Effective trajectories below which error bars do not cover."""

Batch = tuple[Params, records.Trajectories | Iterable[records.Trajectories]]


class Reweighted(NamedTuple):
    """An estimate at θ from trajectories taken at other parameters, made by `reweighted`.

    estimate: J(θ) and ∇J(θ); its second moment includes the weights. Its errors and intervals are
        NaN where "plain" weights have too small an ESS for them.
    ess: (Σw)²/Σw², of `estimate.count` trajectories.
    kl: KL(old ‖ θ) of each batch, in nats per path.
    weights: w of every trajectory.
    """

    estimate: estimates.Estimate
    ess: float
    kl: tuple[float, ...]
    weights: np.ndarray

    def __repr__(self) -> str:
        far = ", ".join(f"{kl:.3g}" for kl in self.kl)
        line = (
            f"worth {self.ess:.1f} of {format_count(self.estimate.count, 'trajectory')}; KL from "
            f"where they were taken: {far}"
        )
        if np.isnan(self.estimate.value_stderr):
            line += (
                ";\n"
                "too few for an error bar. Averages over batches keep all of them: see `reweighted`"
            )
        return f"{line}\n{self.estimate!r}"


def reweighted(
    process: processes.AnyProcess,
    objective: Objective,
    theta: Params,
    batches: Sequence[Batch],
    *,
    weights: str = "normalised",
    minimum_ess: float = MINIMUM_ESS,
    start: draws.Density | draws.Reparameterised | None = None,
    score: processes.Score = full_score,
    baseline: baselines.Baseline | baselines.Twin | str | None = None,
    initial_baseline: baselines.Baseline | str | None = None,
) -> Reweighted:
    """Estimate J(θ) and ∇θJ(θ) from trajectories taken at other parameters, Σ w G / Σ w.

    Parameters of the noise must be what they were, and so must what moves components without noise:
    the paths of one value then have no density against those of another, and are refused by name.
    If θ was chosen by these very trajectories, the result favours it.

    Args:
        process: drift and noise, or `Jumps`.
        objective: what is maximised.
        theta: where J and its gradient are wanted.
        batches: (θ_old, trajectories) pairs on one time grid; trajectories as `gradient` takes
            them.
        weights: "normalised" (Σw = N: a bias of order 1/ESS, less variance) or "plain" (unbiased).
        minimum_ess: effective trajectories below which there is no error bar. "normalised" weights
            then raise a `ValueError` with the distance of θ. "plain" ones return their value with
            errors of NaN: it is unbiased on average over all batches, and not over those that have
            an error bar, since large weights make ESS small. 0 lets everything pass.
        start: as in `gradient`.
        score: as in `gradient`; the ratios are those of its law.
        baseline: as in `gradient`; with several batches "time" or "none".
        initial_baseline: as in `gradient`.

    Returns: a `Reweighted`.

    >>> other = {"k": jnp.array(0.9), "s": jnp.array(0.4)}  # `recorded` has k = 0.8
    >>> result = fl.reweighted(process, objective, other, [(theta, recorded)])
    >>> result.estimate.gradient["k"].shape, round(result.ess)
    ((), 195)
    """
    if weights not in ("normalised", "plain"):
        raise ValueError(f'`weights` must be "normalised" or "plain"; got {weights!r}.')
    moving = None if start is None else draws.check_start(start)[0]
    process = check.process(process)
    law = density_ratio.PathLaw(
        process,
        density_ratio.select_ratio(process, select_score(process, score)),
        moving,
    )
    theta = check.parameters(theta)
    pairs = _check_batches(theta, batches)
    worth = _weigh(law, check.objective(objective), theta, pairs)
    normalised = weights == "normalised"
    if normalised and not worth.ess >= minimum_ess:
        raise ValueError(
            f"the {len(worth.weights):,} trajectories are worth {worth.ess:.3g} at these "
            f"parameters, and `minimum_ess` is {minimum_ess:g}: KL = "
            f"{', '.join(f'{v:.3g}' for v in worth.kl)} from where they were taken. Take new ones "
            "there, or go less far."
        )
    options = {"start": start, "score": score, "initial_baseline": initial_baseline}
    samples = _sample_batches(process, objective, theta, pairs, baseline, options)
    factors = worth.relative if normalised else worth.weights
    estimate = estimates.reduce_samples(_apply_weights(samples, factors, normalised))
    if not worth.ess >= minimum_ess:
        estimate = _remove_errors(estimate)
    return Reweighted(estimate, worth.ess, worth.kl, worth.weights)


class _Worth(NamedTuple):
    """Weights of all trajectories, w and w/max w; the effective number of them; KL per batch."""

    weights: np.ndarray
    relative: np.ndarray
    ess: float
    kl: tuple[float, ...]


def _weigh(
    law: density_ratio.PathLaw, rewards: Rewards, theta: Params, pairs: list[Batch]
) -> _Worth:
    """Weigh the trajectories of all batches at θ by the balance heuristic."""
    olds = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(old for old, _ in pairs))
    recordings = [recorded.Recording(trajectories, theta) for _, trajectories in pairs]
    for (old, _), record in zip(pairs, recordings, strict=True):
        _refuse_other_grid(recordings[0], record)
        density_ratio.refuse_singular(law, theta, old, record)
    parts = [density_ratio.log_ratios(law, rewards, theta, olds, record) for record in recordings]
    count = np.array([record.count for record in recordings])
    check.count(int(count.sum()), 2)
    log = _log_weights(np.concatenate([part.log for part in parts]), count)
    relative = np.exp(log - log.max()) if np.isfinite(log).any() else np.zeros(len(log))
    ess = float(relative.sum() ** 2 / (relative**2).sum()) if relative.any() else 0.0
    kl = tuple(float(part.divergence[:, b].mean()) for b, part in enumerate(parts))
    return _Worth(np.exp(np.minimum(log, 700)), relative, ess, kl)


def _refuse_other_grid(first: recorded.Recording, record: recorded.Recording) -> None:
    size = first.first_states.shape[1]
    if not np.array_equal(record.t, first.t) or record.first_states.shape[1] != size:
        raise ValueError(
            f"all batches must share one time grid and state; got {len(first.t)} and "
            f"{len(record.t)} times, {size} and {record.first_states.shape[1]} components."
        )


def _check_batches(theta: Params, batches: Sequence[Batch]) -> list[Batch]:
    pairs = list(batches)
    if not pairs or any(
        not isinstance(pair, tuple) or len(pair) != 2 or isinstance(pair, records.Trajectories)
        for pair in pairs
    ):
        raise TypeError(
            "`batches` must be a list of pairs [(theta_old, trajectories), ...], one at least."
        )

    checked = [(check.parameters(old), trajectories) for old, trajectories in pairs]
    expected = _name_shapes(theta)
    for b, (old, _) in enumerate(checked):
        if _name_shapes(old) != expected:
            raise ValueError(
                f"the parameters of batch {b} must be like `theta`, {expected}; got "
                f"{_name_shapes(old)}."
            )
    return checked


def _name_shapes(theta: Params) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(theta)
    return {"theta" + jax.tree_util.keystr(path): v.shape for path, v in leaves}


def _sample_batches(
    process: processes.AnyProcess,
    objective: Objective,
    theta: Params,
    pairs: list[Batch],
    baseline: baselines.Baseline | baselines.Twin | str | None,
    options: dict[str, Any],
) -> estimates.Samples:
    """The gradients at θ of all trajectories, batch after batch.

    The weights of several batches have the right mean in the sum over batches only. A baseline must
    therefore be the same in all: of half of the trajectories of each, for the other half of each.
    """
    if len(pairs) == 1:
        old, trajectories = pairs[0]
        return estimators.gradient_samples(
            process, objective, theta, trajectories, baseline=baseline, taken_at=old, **options
        )
    plan = baselines.resolve_baseline(baseline, caller="several batches", serves=("none", "time"))
    assert isinstance(plan, baselines.Baseline)
    others = [plan, plan]
    if plan.pilot:
        sums = [0.0, 0.0]
        counts = [0, 0]
        for piece in _split_batches(theta, pairs):
            size = len(piece.numbers)
            mean = estimators.mean_return_to_go(objective, theta, piece.trajectories)
            sums[piece.side] = sums[piece.side] + size * mean
            counts[piece.side] += size
        others = [
            baselines.time_only(sums[1] / counts[1]),
            baselines.time_only(sums[0] / counts[0]),
        ]
    samples = []
    numbers = []
    for piece in _split_batches(theta, pairs):
        of_piece = estimators.gradient_samples(
            process,
            objective,
            theta,
            piece.trajectories,
            baseline=others[piece.side],
            taken_at=piece.old,
            **options,
        )
        samples.append(of_piece)
        numbers.append(piece.numbers)
    order = np.argsort(np.concatenate(numbers))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[order], *samples)


class _Piece(NamedTuple):
    """Some trajectories of one half of a batch.

    side: 0 for the first half, 1 for the second. numbers: of the trajectories among those of all
    batches.
    """

    old: Params
    side: int
    numbers: np.ndarray
    trajectories: records.Trajectories


def _split_batches(theta: Params, pairs: list[Batch]) -> Iterator[_Piece]:
    """The trajectories of all batches in pieces that fit into memory, each of one half."""
    before = 0
    for old, trajectories in pairs:
        count = recorded.Recording(trajectories, theta).count
        in_second = baselines.split_halves(count)
        for first, piece in recorded.iterate_pieces(trajectories, recorded.BLOCK_BYTES):
            of_piece = in_second[first : first + len(piece.x)]
            for side in (0, 1):
                rows = np.flatnonzero(of_piece == side)
                if len(rows):
                    numbers = before + first + rows
                    yield _Piece(old, side, numbers, records.select_trajectories(piece, rows))
        before += count


def _log_weights(log: np.ndarray, count: np.ndarray) -> np.ndarray:
    """ln p_θ/Σ_b (n_b/N) p_b from ln p_θ − ln p_b (N, B)."""
    share = np.log(count / count.sum()) - log  # ln (n_b/N) p_b/p_θ
    highest = share.max(axis=1)
    total = np.log(np.exp(share - highest[:, None]).sum(axis=1))
    return np.where(np.isinf(highest), -np.inf, -highest - total)


def _remove_errors(estimate: estimates.Estimate) -> estimates.Estimate:
    """The estimate with NaN for every error and interval."""
    nothing = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), estimate.gradient)
    number = jnp.full_like(estimate.value, jnp.nan)
    return estimate._replace(
        stderr=nothing,
        value_stderr=number,
        interval=(nothing, nothing),
        value_interval=(number, number),
    )


def _apply_weights(
    samples: estimates.Samples, weights: np.ndarray, normalised: bool
) -> estimates.Samples:
    """Contribution of each trajectory: their mean is the estimate and their spread its error.

    w G, or with normalised weights, about the mean m of Σ w G/Σ w, m + N w (G − m)/Σ w (delta
    method).
    """
    share = jnp.asarray(weights / weights.mean() if normalised else weights, samples.returns.dtype)

    def each(v: Array) -> Array:
        w = share.reshape(-1, *(1,) * (v.ndim - 1)).astype(v.dtype)
        mean = jnp.mean(w * v, axis=0) if normalised else 0
        return mean + w * (v - mean)

    return jax.tree.map(each, samples._replace(group=None))._replace(group=samples.group)
