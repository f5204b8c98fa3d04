"""The most probable unknowns of a model, by damped Gauss–Newton steps.

With the prior N(m, Λ⁻¹) and the evidence s(u), F(u) of all trajectories, the posterior is largest
where its gradient g(u) = s(u) − Λ(u − m) vanishes, and

    d = (Λ + F)⁻¹ g

is a Gauss–Newton step towards that point. One is exact where s is linear in u: a drift linear in
the unknowns. Elsewhere steps follow one another until they are small. A step that overshoots is
damped, d = (Λ + F + a·diag(Λ + F))⁻¹ g with growing a (Levenberg and Marquardt).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy

from fluctua.core.arrays import Params
from fluctua.core.host.threads import map_on_cores, one_blas_thread
from fluctua.core.likelihood.evidence import Evidence
from fluctua.core.likelihood.unknowns import At
from fluctua.core.trajectories import Trajectories
from fluctua.learn.belief import Belief
from fluctua.learn.calibratable import CalibratableModel

MAX_STEPS = 20
"""Maximum number of Gauss–Newton steps per fit; a noise amplitude that starts at 10⁻⁶ takes 15."""

MAX_TRIALS = 8
"""Maximum number of trials of one step, each damped more than the one before."""

MIN_DAMPING = 1e-2
"""First damping of a step that overshoots."""

MIN_GAIN = 0.1
"""Gain of the log-posterior below which a fit has converged if the next step is short as well."""

NEAR = 1.0
"""That next step, in standard deviations of the posterior, root mean square.

A small gain alone is no sign of a maximum: steps along a bent ridge gain little.
"""

DAMPING_FACTOR = 8.0
"""Growth of the damping after a step that overshoots; decrease after one that does not."""

SETTLED = 1e-2
"""Step below which a fit has converged, in standard deviations of the posterior, root mean square.
"""

BENT = 0.03
"""Limit of `measure_bend` above which no Gaussian describes the evidence.

A Gaussian made at this limit is off by about BENT·z² of its own standard deviations where later
evidence moves the maximum by z, and by less of the later ones: the sum over many calls stays below
0.1.
"""

Likelihood = Callable[[np.ndarray], Evidence]
"""u (K,) -> the evidence of a batch of trajectories at u.

A method `score`, u -> the score of that evidence, is used where no more is needed.
"""


@dataclass(frozen=True, eq=False)
class BatchLikelihood:
    """The evidence of a batch of trajectories as a function of the unknowns.

    model: that is calibrated.
    at: (θ, u) -> p.
    theta: settings at which the trajectories were taken.
    trajectories: the batch.
    every: one of so many steps counts for the information.
    readout: standard deviation of the measurement.
    weight: of the batch.
    """

    model: CalibratableModel
    at: At
    theta: Params
    trajectories: Trajectories
    every: int
    readout: float
    weight: float = 1.0

    def __call__(self, u: np.ndarray) -> Evidence:
        """The weighted evidence at u."""
        whole = self.model.evidence(
            self.at, self.theta, u, self.trajectories, self.every, self.readout
        )
        return whole if self.weight == 1 else whole.scale(self.weight)

    def score(self, u: np.ndarray) -> np.ndarray:
        """The score of the evidence at u (K,); some models compute it alone."""
        alone = getattr(self.model, "evidence_score", None)
        if alone is None:
            return self(u).score
        return self.weight * alone(
            self.at, self.theta, u, self.trajectories, self.every, self.readout
        )


class Fit(NamedTuple):
    """A point, the evidence there, and the Gaussian posterior that it makes.

    point: where the evidence was taken, (K,).
    before: the belief without the last batch.
    latest: the evidence of the last batch.
    posterior: the belief with it.
    log_posterior: up to a constant; not a number where the evidence has no likelihood.
    linear: whether the evidence is the same at every point.
    converged: whether the belief's mean is its maximum.
    held: whether the Gauss–Newton step from here leads downhill.
    """

    point: np.ndarray
    before: Belief
    latest: Evidence
    posterior: Belief
    log_posterior: float
    linear: bool
    converged: bool = False
    held: bool = False

    @property
    def belief(self) -> Belief:
        """The posterior, whose mean stays at the point where the step from there leads downhill."""
        if not self.held:
            return self.posterior
        vector = self.posterior.vector.copy()
        vector[self.posterior.free] -= self.gradient
        return replace(self.posterior, vector=vector)

    @property
    def step(self) -> np.ndarray:
        """The Gauss–Newton step from here. Shape (K,)."""
        return self.posterior.mean - self.point

    def damp_step(self, damping: float) -> np.ndarray:
        """The step d of (Λ + F + damping·diag(Λ + F)) d = g. Shape (K,)."""
        if not damping:
            return self.step
        precision = self.posterior.posterior_precision
        damped = precision + damping * np.diag(np.diag(precision))
        step = np.zeros_like(self.point)
        with one_blas_thread():
            step[self.posterior.free] = scipy.linalg.solve(damped, self.gradient, assume_a="pos")
        return step

    @property
    def gradient(self) -> np.ndarray:
        """Gradient of the log-posterior in the free unknowns. Shape (F,)."""
        return self.posterior.measure_gradient(self.point)[self.posterior.free]

    @property
    def step_size(self) -> float:
        """The step in standard deviations of the posterior, root mean square over the unknowns."""
        with one_blas_thread():
            return self.posterior.count_deviations(self.gradient)

    def slope(self, direction: np.ndarray) -> float:
        """Derivative of the log-posterior along a direction (K,)."""
        return float(self.gradient @ direction[self.posterior.free])

    def surprise(self) -> tuple[float, int]:
        """χ² of the last batch's score against the belief before it, and its degrees of freedom."""
        latest = self.latest
        if not self.linear:  # taken at the maximum with the batch, and due at that without it
            away = self.before.mean - self.point
            latest = latest._replace(score=latest.score - latest.information @ away)
        return self.posterior.surprise(latest)


def fit_map(
    likelihoods: Sequence[Likelihood],
    prior: Belief,
    start: np.ndarray,
    max_steps: int = MAX_STEPS,
) -> Fit:
    """Find the maximum of the posterior and the Gaussian about it.

    Args:
        likelihoods: of independent batches, the newest last.
        prior: the belief without them.
        start: first point of the search, (K,).
        max_steps: maximum number of Gauss–Newton steps.

    Returns: a `Fit`.
    """
    fit = _expand(likelihoods, prior, start)
    if fit is None:
        text = "the score of the measured trajectories is not finite at the calibrated model."
        raise FloatingPointError(text)
    damping = 0.0
    moved = None
    for _ in range(max_steps):
        if fit.linear or fit.step_size <= SETTLED or _is_rounding(fit):
            return fit._replace(converged=True)
        moved = _advance(likelihoods, prior, fit, damping)
        if moved is None:
            break
        gain = moved[0].log_posterior - fit.log_posterior
        fit, damping = moved
        if gain <= MIN_GAIN and fit.step_size <= NEAR:
            return _finish(likelihoods, prior, fit)._replace(converged=True)
    if moved is None:
        # a likelihood that no step raises is at its maximum, whatever its model of the slope
        return fit._replace(converged=not math.isnan(fit.log_posterior), held=True)
    return _finish(likelihoods, prior, fit)


def measure_bend(likelihoods: Sequence[Likelihood], fit: Fit, prior: Belief) -> float:
    """Distance of the score from a linear one within the posterior, in standard deviations.

    With δ one standard deviation in every unknown, |½{g(u + δ) + g(u − δ)} − g(u)| in units of
    √(Λ + F), root mean square over the unknowns. It is the distance between the mean of the
    posterior and its maximum, which are one in a Gaussian; inf where the score is not finite.
    """
    free = fit.posterior.free
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (1, int(free.sum())))
    away = fit.posterior.scale_deviations(signs)[0]
    curvature = -fit.gradient
    for side in (1, -1):
        gradient = _measure_gradient(likelihoods, prior, fit.point + side * away)
        if not np.isfinite(gradient).all():
            return math.inf
        curvature = curvature + gradient / 2
    return fit.posterior.count_deviations(curvature)


def _measure_gradient(likelihoods: Sequence[Likelihood], prior: Belief, u: np.ndarray) -> Any:
    """Gradient of the log-posterior at u in the free unknowns; needs no information. Shape (F,)."""
    point = _round(u)
    gradient = prior.measure_gradient(point)
    for likelihood in likelihoods:
        score = getattr(likelihood, "score", None)
        gradient = gradient + (likelihood(point).score if score is None else score(point))
    return gradient[prior.free]


def _expand(likelihoods: Sequence[Likelihood], prior: Belief, u: np.ndarray) -> Fit | None:
    """Evidence and posterior near u; None where the evidence is not finite."""
    point = _round(u)
    batches = map_on_cores(lambda likelihood: likelihood(point), likelihoods)
    if not all(evidence.is_finite for evidence in batches):
        return None
    *earlier, latest = batches
    before = prior
    for evidence in earlier:
        before = before.with_evidence(evidence, point)
    posterior = before.with_evidence(latest, point)
    linear = all(evidence.linear for evidence in batches)
    log_likelihood = sum(evidence.log_likelihood for evidence in batches)
    log_posterior = log_likelihood + prior.log_density(point)
    return Fit(point, before, latest, posterior, log_posterior, linear=linear)


def _advance(
    likelihoods: Sequence[Likelihood], prior: Belief, fit: Fit, damping: float
) -> tuple[Fit, float] | None:
    """The fit at the end of a step, which is damped while it overshoots, and the next damping."""
    for _ in range(MAX_TRIALS):
        step = fit.damp_step(damping)
        moved = _expand(likelihoods, prior, fit.point + step)
        if moved is not None and _improves(fit, moved, step):
            return moved, damping / DAMPING_FACTOR if damping > MIN_DAMPING else 0.0
        damping = max(DAMPING_FACTOR * damping, MIN_DAMPING)
    return None


def _finish(likelihoods: Sequence[Likelihood], prior: Belief, fit: Fit) -> Fit:
    """The fit, held where it is if the step that leads to the posterior's mean is downhill."""
    if fit.step_size <= SETTLED:
        return fit
    moved = _expand(likelihoods, prior, fit.posterior.mean)
    return fit._replace(held=moved is None or not _improves(fit, moved, fit.step))


def _improves(fit: Fit, moved: Fit, step: np.ndarray) -> bool:
    """Whether a step leads uphill: by the posterior, or by the mean slope where it is not known."""
    if math.isnan(moved.log_posterior):
        return moved.slope(step) >= -fit.slope(step)
    return moved.log_posterior >= fit.log_posterior


def _round(u: np.ndarray) -> np.ndarray:
    """The point as the model receives it, in its precision."""
    return np.asarray(u, jnp.result_type(float)).astype(np.float64)


def _is_rounding(fit: Fit) -> bool:
    """Whether the step is below the precision of the model."""
    return np.array_equal(_round(fit.posterior.mean), fit.point)


def is_gaussian(fit: Fit, likelihoods: Sequence[Likelihood], prior: Belief) -> bool:
    """Whether a Gaussian describes the evidence of a fit; its trajectories can then be dropped."""
    return fit.converged and measure_bend(likelihoods, fit, prior) <= BENT
