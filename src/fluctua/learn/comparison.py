"""Comparison of estimators on one problem, at equal cost in trajectories."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from rich import box
from rich.console import Console
from rich.table import Table

from fluctua.core import check, protocols
from fluctua.core import estimate as estimates
from fluctua.core.arrays import Array, Params


class ComparisonRow(NamedTuple):
    """One estimator of a comparison. Arrays are over the P parameters, in flattened order.

    name: as in the table.
    samples: per call.
    trajectories: all that one call runs, pilot included.
    z: (mean over repeats − reference) / standard error, the bias in standard errors.
    variance: of the gradient per trajectory spent, so that rows compare at equal cost.
    spread: standard deviation over repeats / claimed standard error; 1 for correct error bars.
    seconds: wall time of one call, compilation left out.
    """

    name: str
    samples: int
    trajectories: int
    z: np.ndarray
    variance: np.ndarray
    spread: np.ndarray
    seconds: float


class Comparison(NamedTuple):
    """Result of `compare`; prints as a table. `fluctua.plot.compare.draw` plots it."""

    rows: tuple[ComparisonRow, ...]
    reference: str
    repeats: int

    def __repr__(self) -> str:
        table = Table(box=box.SIMPLE_HEAD, title_justify="left")
        for heading in (
            "estimator",
            "samples",
            "trajectories",
            "bias / s.e.",
            "s.d. / s.e.",
            "variance",
            "time",
        ):
            table.add_column(
                heading, no_wrap=True, justify="left" if heading == "estimator" else "right"
            )
        for row in self.rows:
            table.add_row(
                row.name,
                f"{row.samples:,}",
                f"{row.trajectories:,}",
                f"{np.sqrt(np.mean(row.z**2)):.2f} (max {np.abs(row.z).max():.1f})",
                f"{np.sqrt(np.mean(row.spread**2)):.2f}" if self.repeats > 1 else "–",
                f"{row.variance.mean():.3g}",
                f"{1e3 * row.seconds:.1f} ms",
            )
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(table)
        notes = (
            f"bias: root mean square over parameters, against {self.reference}, {self.repeats} "
            "repeats; about 1 if unbiased.\n"
            "variance: of one gradient component per trajectory spent, averaged over parameters."
        )
        return capture.get() + notes


def compare(
    key: Array,
    theta: Params,
    estimators: Mapping[str, protocols.Estimator],
    *,
    trajectories: int,
    reference: Params | estimates.Estimate | str,
    repeats: int = 8,
) -> Comparison:
    """Compare estimators at equal cost: bias, error bars, variance and time of each.

    Args:
        key: of all noise.
        theta: where the gradient is estimated.
        estimators: by the names that the table shows.
        trajectories: for one call of each, all included: an estimator whose pilot takes p and whose
            samples cost c trajectories gets (trajectories − p) // c samples.
        reference: the exact gradient, an `Estimate`, or the name of the estimator to trust.
        repeats: independent calls, from which bias and error bars are judged. An estimator with a
            state starts each of them, and ends, with its first state.

    Returns: a `Comparison`, which prints as a table.

    >>> both = {"score": estimator, "pathwise": fl.reference.pathwise(objective, simulator)}
    >>> print(fl.reference.compare(key, theta, both, trajectories=400, reference="pathwise"))
    <BLANKLINE>
      estimator   samples   trajectories      bias / s.e.   s.d. / s.e.   variance      time
     ────────────────────────────────────────────────────────────────────────────────────────
      score           272            400   ...
      pathwise        400            400   0.00 (max 0.0)   ...
    <BLANKLINE>
    bias: root mean square over parameters, against `pathwise`, 8 repeats; about 1 if unbiased.
    variance: of one gradient component per trajectory spent, averaged over parameters.
    """
    if repeats < 1:
        raise ValueError(f"`repeats` must be at least 1; got {repeats}.")
    theta = check.parameters(theta)
    runs = {
        name: _run_repeats(
            jax.random.fold_in(key, index),
            theta,
            _Candidate(name, protocols.as_estimator(candidate)),
            trajectories,
            repeats,
        )
        for index, (name, candidate) in enumerate(estimators.items())
    }
    truth, error, label = _resolve_reference(reference, runs)
    rows = []
    for name, run in runs.items():
        g = run.gradients
        pooled = np.sqrt(np.mean(run.errors**2, axis=0))  # of one call
        total = np.sqrt(pooled**2 / repeats + (0.0 if name == reference else error**2))
        z = np.where(total > 0, (g.mean(axis=0) - truth) / np.where(total > 0, total, 1), 0.0)
        spread = (
            g.std(axis=0, ddof=1) / np.where(pooled > 0, pooled, 1)
            if repeats > 1
            else np.ones_like(z)
        )
        rows.append(
            ComparisonRow(
                name,
                run.samples,
                run.trajectories,
                z,
                pooled**2 * run.trajectories,
                spread,
                run.seconds,
            )
        )
    return Comparison(tuple(rows), label, repeats)


class _Candidate(NamedTuple):
    """An estimator under the name that the table shows."""

    name: str
    estimator: protocols.Estimator

    def share(self, theta: Params, trajectories: int) -> int:
        """Number of samples per call, with the pilot of the last call."""
        cost = self.estimator.cost(theta)
        pilot = self.estimator.pilot
        samples = max(trajectories - pilot, 0) // max(cost, 1)  # 0: its last call measured nothing
        if samples < 2:
            besides = f" and {pilot:,} for its pilot" if pilot else ""
            raise ValueError(
                f"`{self.name}` costs {cost:,} trajectories per sample{besides}; {trajectories:,} "
                f"trajectories give {samples}, and an error bar needs 2. Use "
                f"trajectories={2 * cost + pilot} or more."
            )
        return samples

    def reset(self, state: Mapping[str, np.ndarray], theta: Params) -> None:
        """Restore the first state."""
        self.estimator.restore(state, theta)
        now = self.estimator.state
        if now.keys() != state.keys() or any(
            now[name].tobytes() != state[name].tobytes() for name in state
        ):
            raise ValueError(
                f"`{self.name}` has a state that `restore(state)` does not bring back, so that its "
                "repeats are not independent."
            )


class _Repeats(NamedTuple):
    """Results of repeated calls.

    gradients, errors: (repeats, P).
    samples, trajectories: per call.
    seconds: of the fastest call.
    """

    gradients: np.ndarray
    errors: np.ndarray
    samples: int
    trajectories: int
    seconds: float


def _run_repeats(
    key: Array, theta: Params, candidate: _Candidate, trajectories: int, repeats: int
) -> _Repeats:
    estimator = candidate.estimator
    begin = {name: np.array(value) for name, value in estimator.state.items()}
    samples = candidate.share(theta, trajectories)
    estimator(key, theta, samples)  # compiles
    known = candidate.share(theta, trajectories)  # a carried pilot is known after a call
    if known != samples:
        samples = known
        candidate.reset(begin, theta)
        estimator(key, theta, samples)
    spent = samples * estimator.cost(theta) + estimator.pilot
    gradients = []
    errors = []
    seconds = []
    for repeat in range(repeats):
        candidate.reset(begin, theta)
        start = time.perf_counter()
        estimate = estimator(jax.random.fold_in(key, repeat + 1), theta, samples)
        jax.block_until_ready(estimate.gradient)
        seconds.append(time.perf_counter() - start)
        gradients.append(np.asarray(ravel_pytree(estimate.gradient)[0], float))
        errors.append(np.asarray(ravel_pytree(estimate.stderr)[0], float))
    candidate.reset(begin, theta)
    return _Repeats(np.array(gradients), np.array(errors), samples, spent, min(seconds))


def _resolve_reference(
    reference: Params | estimates.Estimate | str, runs: Mapping[str, _Repeats]
) -> tuple[np.ndarray, np.ndarray | float, str]:
    if isinstance(reference, str):
        if reference not in runs:
            raise ValueError(
                f"the reference `{reference}` is not among the estimators: {', '.join(runs)}."
            )
        run = runs[reference]
        error = np.sqrt(np.mean(run.errors**2, axis=0) / len(run.errors))
        return run.gradients.mean(axis=0), error, f"`{reference}`"
    if isinstance(reference, estimates.Estimate):

        def flat(tree):
            return np.asarray(ravel_pytree(tree)[0], float)

        return flat(reference.gradient), flat(reference.stderr), "the given estimate"
    return np.asarray(ravel_pytree(reference)[0], float), 0.0, "the exact gradient"
