"""Evidence of records of an observed process about its unknowns, by its innovations.

The samples y = Cx + ε (`fluctua.Observed`) are compared with the prediction of a Kalman filter, of
mean ŷ and covariance S given all samples before. With e = y − ŷ and u the unknowns

    s = Σ ∂ᵤŷᵀS⁻¹e + ½ Σ tr{∂ᵤS S⁻¹(eeᵀ − S)S⁻¹},
    F = Σ ∂ᵤŷᵀS⁻¹∂ᵤŷ + ½ Σ tr{S⁻¹∂ᵤS S⁻¹∂ᵤS}

are the score of the record and its information. Both are exact where the drift is linear in x.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check, scores
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.likelihood.evidence import Evidence
from fluctua.core.likelihood.unknowns import At
from fluctua.core.process import Step
from fluctua.core.trajectories import Times, Trajectories
from fluctua.processes.observed import Observed, correct_prediction


def collect_innovations(
    observed: Observed, at: At, theta: Params, u: np.ndarray, trajectories: Trajectories
) -> Evidence:
    """Score and information of records about u, by the innovations of a filter.

    Args:
        observed: the process with its observation, in p.
        at: (θ, u) -> p.
        theta: the settings at which the records were taken.
        u: where the derivatives are taken, (K,).
        trajectories: records y (E, T+1, D).
    """
    with jax.enable_x64(True):  # a filter subtracts covariances that are nearly equal
        as_double = partial(jnp.asarray, dtype=jnp.float64)
        settings, context = jax.tree.map(as_double, (theta, trajectories.context))
        y = as_double(trajectories.x)
        times = check.grid(np.asarray(trajectories.t, np.float64))
        point = as_double(u)
        one = jax.tree.map(lambda leaf: leaf[0], context)
        process = observed.check(at(settings, point), y[0, 0], times.t[0], one)
        law = _InnovationLaw(process, at)
        sums = _sum_evidence(law, settings, point, times, y, context)
    return Evidence(
        np.asarray(sums.score),
        np.asarray(sums.information),
        linear=False,
        log_likelihood=float(sums.log_likelihood),
    )


class _InnovationLaw(NamedTuple):
    """Functions of a compiled sum: the process, and (θ, u) -> p."""

    process: Observed
    at: At


class _Prediction(NamedTuple):
    """Prediction of a sample: mean ŷ (T, D) and covariance S (T, D, D)."""

    mean: Array
    covariance: Array


class _InnovationSums(NamedTuple):
    """s (K,), F (K, K) and ℓ = −½ Σ (eᵀS⁻¹e + ln det S)."""

    score: Array
    information: Array
    log_likelihood: Array


@partial(jit, static_argnums=0)
def _sum_evidence(
    law: _InnovationLaw, theta: Params, u: Array, times: Times, y: Array, context: PyTree
) -> _InnovationSums:
    """Sums over all records y (E, T+1, D)."""

    def one(y: Array, context: PyTree) -> _InnovationSums:
        def predict(v: Array) -> tuple[_Prediction, _Prediction]:
            prediction = _predict_samples(law.process, law.at(theta, v), times, y, context)
            return prediction, prediction

        slope, (mean, covariance) = jax.jacfwd(predict, has_aux=True)(u)
        inverse = jnp.linalg.inv(covariance)
        innovation = y[1:] - mean
        white = jnp.einsum("tij,tj->ti", inverse, innovation)
        turned = jnp.einsum("tij,tjlk->tilk", inverse, slope.covariance)
        score = jnp.einsum("tik,ti->k", slope.mean, white)
        score += jnp.einsum("ti,tijk,tj->k", white, slope.covariance, white) / 2
        score -= jnp.einsum("tiik->k", turned) / 2
        information = jnp.einsum("tik,tij,tjl->kl", slope.mean, inverse, slope.mean)
        information += jnp.einsum("tijk,tjil->kl", turned, turned) / 2
        log_determinant = jnp.linalg.slogdet(covariance)[1]
        log_likelihood = -jnp.sum(innovation * white) / 2 - jnp.sum(log_determinant) / 2
        return _InnovationSums(score, information, log_likelihood)

    return jax.tree.map(lambda each: each.sum(axis=0), jax.vmap(one)(y, context))


def _predict_samples(
    process: Observed, p: Params, times: Times, y: Array, context: PyTree
) -> _Prediction:
    """Mean and covariance of every sample after the first, given those before it."""
    prior = process.add_first_sample(p, y[0], context)

    def body(state: scores.Gaussian, sample: Any) -> tuple[scores.Gaussian, _Prediction]:
        y, t, dt = sample
        ahead = process.predict(p, state, Step(y, y, t, dt, context))
        c, r = process.describe_readout(p, context, y.dtype)
        expected = _Prediction(c @ ahead.mean, c @ ahead.covariance @ c.T + r)
        after, _ = correct_prediction(*ahead, y - expected.mean, c, r)
        return scores.Gaussian(after.mean, after.covariance), expected

    return jax.lax.scan(body, prior, (y[1:], times.t[:-1], times.dt))[1]
