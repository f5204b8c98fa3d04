"""Estimators side by side on one problem, at equal cost in trajectories."""

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

from fluctua.core import check
from fluctua.core.estimate import as_estimator
from fluctua.core.types import Array, Estimate, Estimator, Params


class Row(NamedTuple):
    """One estimator. Arrays are over the P parameters, in flattened order.

    z: (mean over repeats − reference) / standard error, the bias in standard errors.
    variance: of the gradient per trajectory spent, so that rows compare at equal cost.
    spread: standard deviation over repeats / claimed standard error; 1 where the error bars are honest.
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
    """What `compare` found; prints itself as a table. `fluctua.plot.compare.draw` plots it."""

    rows: tuple[Row, ...]
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
            table.add_column(heading, no_wrap=True, justify="left" if heading == "estimator" else "right")
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
            f"bias: root mean square over parameters, against {self.reference}, {self.repeats} repeats; about 1 if "
            "unbiased.\nvariance: of one gradient component per trajectory spent, averaged over parameters."
        )
        return capture.get() + notes


def compare(
    key: Array,
    theta: Params,
    estimators: Mapping[str, Estimator],
    *,
    trajectories: int,
    reference: Params | Estimate | str,
    repeats: int = 8,
) -> Comparison:
    """Spend the same number of trajectories on every estimator and see what each makes of them.

    Args:
        key: of all noise.
        theta: where the gradient is estimated.
        estimators: by the names that the table shows.
        trajectories: for one call of each; an estimator that costs c trajectories per sample gets trajectories // c
            samples.
        reference: the exact gradient, an `Estimate`, or the name of the estimator to trust.
        repeats: independent calls, from which bias and the honesty of the error bars are judged.

    Returns: a `Comparison`, which prints itself as a table.

    >>> both = {"ppgt": estimator, "spsa": spsa(objective, simulator)}
    >>> print(compare(key, theta, both, trajectories=400, reference="ppgt"))

    """
    if repeats < 1:
        raise ValueError(f"`repeats` must be at least 1; got {repeats}.")
    theta = check.parameters(theta)
    runs = {}
    for index, (name, given) in enumerate(estimators.items()):
        estimator = as_estimator(given)
        cost = estimator.cost(theta)
        samples = trajectories // cost
        if samples < 2:
            raise ValueError(
                f"`{name}` costs {cost:,} trajectories per sample; {trajectories:,} trajectories buy {samples}, and an "
                f"error bar needs 2. Use trajectories={2 * cost} or more."
            )
        runs[name] = (
            samples,
            cost,
            _repeat(jax.random.fold_in(key, index), theta, estimator, samples, repeats),
        )

    truth, error, label = _reference(reference, runs)
    rows = []
    for name, (samples, cost, (g, stderr, seconds)) in runs.items():
        pooled = np.sqrt(np.mean(stderr**2, axis=0))  # of one call
        total = np.sqrt(pooled**2 / repeats + (0.0 if name == reference else error**2))
        z = np.where(total > 0, (g.mean(axis=0) - truth) / np.where(total > 0, total, 1), 0.0)
        spread = g.std(axis=0, ddof=1) / np.where(pooled > 0, pooled, 1) if repeats > 1 else np.ones_like(z)
        rows.append(Row(name, samples, samples * cost, z, pooled**2 * samples * cost, spread, seconds))
    return Comparison(tuple(rows), label, repeats)


def _repeat(
    key: Array, theta: Params, estimator: Estimator, samples: int, repeats: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Gradients and errors (repeats, P), and the seconds of the fastest call."""
    estimator(key, theta, samples)  # compiles
    gradients, errors, seconds = [], [], []
    for repeat in range(repeats):
        begun = time.perf_counter()
        estimate = estimator(jax.random.fold_in(key, repeat + 1), theta, samples)
        jax.block_until_ready(estimate.gradient)
        seconds.append(time.perf_counter() - begun)
        gradients.append(np.asarray(ravel_pytree(estimate.gradient)[0], float))
        errors.append(np.asarray(ravel_pytree(estimate.stderr)[0], float))
    return np.array(gradients), np.array(errors), min(seconds)


def _reference(reference: Params | Estimate | str, runs: Mapping) -> tuple[np.ndarray, np.ndarray | float, str]:
    if isinstance(reference, str):
        if reference not in runs:
            raise ValueError(f"the reference `{reference}` is not among the estimators: {', '.join(runs)}.")
        _, _, (g, stderr, _) = runs[reference]
        return g.mean(axis=0), np.sqrt(np.mean(stderr**2, axis=0) / len(g)), f"`{reference}`"
    if isinstance(reference, Estimate):
        flat = lambda tree: np.asarray(ravel_pytree(tree)[0], float)
        return flat(reference.gradient), flat(reference.stderr), "the given estimate"
    return np.asarray(ravel_pytree(reference)[0], float), 0.0, "the exact gradient"
