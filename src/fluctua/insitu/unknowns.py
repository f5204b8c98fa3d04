"""Unknowns of a process, fitted to trajectories that were taken at known settings.

With φ the unknowns, N(start, spread²) their prior by the data sheet, and s(φ) the score of the
trajectories (`fluctua.core.likelihood.evidence`), the most probable φ solves

    s(φ) = (φ − start) / spread².

The process takes φ as its context, so that it is compiled once for every calibration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.likelihood.evidence import collect_evidence
from fluctua.core.process import Process
from fluctua.core.scores import full_score
from fluctua.core.trajectories import Trajectories
from fluctua.core.words import format_count
from fluctua.insitu.translation import OperatingPoint, translate_process
from fluctua.learn.belief import Belief, prior_precision, unflatten_like
from fluctua.learn.effective import Effective
from fluctua.learn.fit import fit_map
from fluctua.processes.observed import Observed
from fluctua.processes.observed_evidence import collect_innovations

SETTINGS = "settings"
UNKNOWNS = "unknowns"
"""Entries of the parameters p of a process whose unknowns are parameters too."""

Values = dict[str, Array]
"""Unknowns by name, as the context of the process has them."""

Runs = Sequence[tuple[Params, Trajectories]]
"""Settings, and the trajectories that were measured there."""


class Unknown(NamedTuple):
    """A quantity of an instrument that its data sheet gives with an error.

    start: its value by the data sheet, a number or an array.
    spread: standard deviation of the true value about that, a number or an array.

    >>> gain = insitu.Unknown(1.0, spread=0.2)
    >>> losses = insitu.Unknown(0.02 * np.ones(6), spread=0.005)
    """

    start: Any
    spread: Any


class DeviceFit(NamedTuple):
    """The calibration of one device.

    values: unknowns by name, the context of the process.
    report: text for a reader, kept as calibration.txt.

    >>> fit = insitu.DeviceFit({"gain": 0.9}, report="gain 0.90 ± 0.02")
    """

    values: Values
    report: str = ""

    def __repr__(self) -> str:
        return self.report or f"DeviceFit({self.values!r})"


def separate(parameters: Params, context: Any) -> OperatingPoint:
    """Settings, and the context with the unknowns, of parameters that hold both."""
    return OperatingPoint(parameters[SETTINGS], {**(context or {}), **parameters[UNKNOWNS]})


def join(settings: Params, values: Params) -> Params:
    """Settings and unknowns as the parameters of one process."""
    return {SETTINGS: settings, UNKNOWNS: values}


def fit_unknowns(
    process: Process | Observed, unknowns: Mapping[str, Unknown], runs: Runs
) -> DeviceFit:
    """The most probable unknowns, given trajectories at several settings and the data sheet.

    Args:
        process: drift and noise as functions of settings, its context being the unknowns.
        unknowns: by name, with spreads.
        runs: settings with the trajectories that were measured there.

    Returns: values and a table with standard errors.
    """
    if not unknowns:
        return DeviceFit({})
    start = list_starts(unknowns)
    leaves, tree = jax.tree.flatten(start)
    at = Effective(join, tree, tuple(leaf.shape for leaf in leaves))
    joined = translate_process(process, separate)
    likelihoods = [
        partial(_evaluate_likelihood, joined, at, settings, trajectories)
        for settings, trajectories in runs
    ]
    prior = _make_prior(unknowns, start)
    fit = fit_map(likelihoods, prior, prior.start)
    values = unflatten_like(start, fit.belief.mean)
    variances = np.diag(np.linalg.inv(fit.belief.posterior_precision))
    errors = unflatten_like(start, np.sqrt(variances))
    used = format_count(sum(len(each.x) for _, each in runs), "trajectory")
    head = f"CALIBRATION   {format_count(len(runs), 'setting')}, {used}\n"
    return DeviceFit(values, head + _tabulate(values, errors))


def list_starts(unknowns: Mapping[str, Unknown]) -> dict[str, Array]:
    """The values by the data sheet."""
    real = jnp.result_type(float)
    return {name: jnp.asarray(unknown.start, real) for name, unknown in unknowns.items()}


def _make_prior(unknowns: Mapping[str, Unknown], start: Params) -> Belief:
    spread = {name: unknown.spread for name, unknown in unknowns.items()}
    # in the order of the pytree: by name
    mean = np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(start)])
    size = mean.size
    empty = np.zeros((size, size))
    precision = prior_precision(spread, start)
    return Belief(mean, precision, empty, np.zeros(size), np.ones(size, bool))


def _evaluate_likelihood(
    process: Process | Observed,
    at: Effective,
    settings: Params,
    trajectories: Trajectories,
    u: np.ndarray,
) -> Any:
    if isinstance(process, Observed):
        return collect_innovations(process, at, settings, u, trajectories)
    return collect_evidence(process, full_score, at, settings, u, trajectories)


def _tabulate(values: Values, errors: Values) -> str:
    lines = []
    for name, value in values.items():
        each = zip(np.ravel(value), np.ravel(errors[name]), strict=True)
        for k, (mean, error) in enumerate(each):
            label = name if np.size(value) == 1 else f"{name}[{k}]"
            lines.append(f"  {label:<24} {mean:>12.5g} ± {error:.2g}\n")
    return "".join(lines)
