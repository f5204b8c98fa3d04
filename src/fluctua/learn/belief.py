"""Gaussian belief about the unknowns of a model, updated by evidence from trajectories.

The prior stays and measurements fade. Two tests show when not to trust a model: the score of new
trajectories has mean zero where the model is right, and so has the score of unknowns that are
watched and not fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy

from fluctua.core.arrays import Params
from fluctua.core.likelihood.evidence import Evidence
from fluctua.core.text import names, with_error
from fluctua.core.words import close_match, format_count

COLLINEAR = 1e-5
"""Relative pivot below which a direction counts as collinear; single precision has seven digits."""

FIDELITY = 0.05
"""Relative accuracy of the variance of scores: of transitions that are taken as locally linear."""

MAX_LISTED = 6
"""Maximum number of values of one family of unknowns that a report lists."""

CHANCE = 1e-5
"""Probability that χ² of a correct model is reported, for any number of unknowns."""


@dataclass(frozen=True, eq=False)
class Belief:
    """A Gaussian about the unknowns: the prior, which stays, and measurements, which fade.

    The posterior of the free unknowns has the precision Λ = prior + I and the mean Λ⁻¹(prior·start
    + η).

    start: mean of the prior (K,).
    precision: diagonal precision of the prior (K,).
    information: I = ΣF (K, K).
    vector: η = Σ(Fu + s) (K,).
    free: which unknowns are fitted, (K,) bool; the others stay at their start and are watched.
    """

    start: np.ndarray
    precision: np.ndarray
    information: np.ndarray
    vector: np.ndarray
    free: np.ndarray

    def fade(self, factor: float) -> Belief:
        """The belief with the weight of all measurements multiplied by `factor`."""
        return replace(self, information=factor * self.information, vector=factor * self.vector)

    def with_evidence(self, latest: Evidence, u: np.ndarray) -> Belief:
        """The belief with further evidence, taken at u."""
        vector = self.vector + latest.information @ u + latest.score
        return replace(self, information=self.information + latest.information, vector=vector)

    def log_density(self, u: np.ndarray) -> float:
        """Logarithm of the density at u (K,), up to a constant."""
        away = u - self.start
        prior = float(self.precision @ away**2)
        return float(self.vector @ u) - (prior + float(u @ self.information @ u)) / 2

    def measure_gradient(self, u: np.ndarray) -> np.ndarray:
        """Gradient of the logarithm of the density at u (K,). Shape (K,)."""
        return self.precision * (self.start - u) + self.vector - self.information @ u

    @cached_property
    def posterior_precision(self) -> np.ndarray:
        """Λ of the free unknowns. Shape (F, F)."""
        f = self.free
        precision = self.information.copy() if f.all() else self.information[np.ix_(f, f)]
        np.fill_diagonal(precision, precision.diagonal() + self.precision[f])
        return precision

    @cached_property
    def _factor(self) -> Any:
        """Cholesky factor of Λ, for `cho_solve`."""
        return scipy.linalg.cho_factor(self.posterior_precision, lower=True)

    @cached_property
    def mean(self) -> np.ndarray:
        """Posterior mean of the free unknowns, and the start of the watched ones. Shape (K,)."""
        u = self.start.copy()
        f = self.free
        pull = (self.precision * self.start + self.vector)[f]
        if not f.all():
            pull = pull - self.information[np.ix_(f, ~f)] @ self.start[~f]
        u[f] = scipy.linalg.cho_solve(self._factor, pull)
        return u

    def scale_deviations(self, rows: np.ndarray) -> np.ndarray:
        """Standard normals (S, F) as deviations of the unknowns from their mean. Shape (S, K)."""
        spread = np.zeros((len(rows), self.start.size))
        spread[:, self.free] = scipy.linalg.solve_triangular(
            self._factor[0], rows.T, trans="T", lower=True
        ).T
        return spread

    @cached_property
    def variance(self) -> np.ndarray:
        """Posterior variances of the free unknowns, diag Λ⁻¹. Shape (F,)."""
        # Λ = LLᵀ: the squares of L⁻¹ by column, a sixth of the work of Λ⁻¹
        inverse, _ = scipy.linalg.lapack.dtrtri(self._factor[0], lower=1)
        lower = np.tril(inverse)
        return np.einsum("ij,ij->j", lower, lower)

    @cached_property
    def watched_shift(self) -> np.ndarray:
        """Shift of the posterior mean per unit of each watched unknown of the device. (F, W)

        The score of the free unknowns has the mean F_fw w at a device with w, which a fit without
        w absorbs: the fit is off by Λ⁻¹F_fw w.
        """
        cross = self.information[np.ix_(self.free, ~self.free)]
        return scipy.linalg.cho_solve(self._factor, cross)

    def count_deviations(self, gradient: np.ndarray) -> float:
        """|Λ⁻¹ gradient (F,)| in standard deviations, the root mean square over the unknowns."""
        square = gradient @ scipy.linalg.cho_solve(self._factor, gradient)
        return float(np.sqrt(square / max(gradient.size, 1)))

    def surprise(self, latest: Evidence) -> tuple[float, int]:
        """χ² of the last score against the belief before it, and its degrees of freedom.

        The score at the mean has the covariance F + FΛ⁻¹F if the model is right and the device has
        not changed: its own noise, and the error of the calibration so far. The inverse of that is
        F⁻¹ − (F + Λ)⁻¹, and F + Λ is the precision of the belief with the new score.
        """
        f = self.free
        information = latest.information
        score = latest.score
        if not f.all():
            information = information[np.ix_(f, f)]
            score = score[f]
        own, degrees = _compute_pseudo_square(information, score)
        return float(own - score @ scipy.linalg.cho_solve(self._factor, score)), degrees

    @cached_property
    def watched(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Values (K − F,) of the watched unknowns if they were fitted, their errors and χ².

        Rao's test: their score at the fit without them, less what the free unknowns explain of it.
        """
        f = self.free
        w = ~self.free
        u = self.mean
        cross = self.information[np.ix_(w, f)]
        score = self.vector[w] - cross @ u[f] - self.information[np.ix_(w, w)] @ u[w]
        precision = self.information[np.ix_(w, w)] - cross @ self.watched_shift
        covariance = np.linalg.inv(precision + np.diag(self.precision[w]))
        away = covariance @ score
        return u[w] + away, np.sqrt(np.diag(covariance)), float(score @ away)


def _compute_pseudo_square(information: np.ndarray, score: np.ndarray) -> tuple[float, int]:
    """sᵀF⁺s and the rank of F.

    F is singular where a setting has not moved: its offset and gain are then one direction. With F
    = LLᵀ on its pivots and s = Ly, sᵀF⁺s = |y|².
    """
    scale = np.sqrt(np.diag(information))
    seen = scale > 0
    scale = scale[seen]
    if not scale.size:
        return 0.0, 0
    factor, pivots, rank, _ = scipy.linalg.lapack.dpstrf(
        information[np.ix_(seen, seen)] / np.outer(scale, scale), lower=1, tol=COLLINEAR
    )
    y = scipy.linalg.solve_triangular(
        factor[:rank, :rank], (score[seen] / scale)[pivots[:rank] - 1], lower=True
    )
    return float(y @ y), int(rank)


@dataclass(frozen=True)
class Disagreement:
    """Sums of the surprise (`Belief.surprise`) of the calls after the first.

    A model with the right structure expects one per degree of freedom. Where the structure is
    wrong, the unknowns that fit best change with the settings, and χ² grows.

    chi2, degrees: sums over the calls.
    calls: how many.
    """

    chi2: float = 0.0
    degrees: float = 0.0
    calls: float = 0.0

    def add(self, chi2: float, degrees: int, share: float = 1.0) -> Disagreement:
        """Add another call. share: weight of the earlier calls, below 1 where they fade."""
        return Disagreement(
            share * self.chi2 + chi2, share * self.degrees + degrees, share * self.calls + 1
        )

    @property
    def ratio(self) -> float:
        """χ² per degree of freedom; 1 before there is a second call."""
        return self.chi2 / self.degrees if self.degrees else 1.0

    @property
    def is_systematic(self) -> bool:
        """Whether χ² exceeds chance and the accuracy `FIDELITY` of the scores' variance."""
        return exceeds_chance(self.chi2 / (1 + FIDELITY), int(self.degrees))

    @property
    def inflation(self) -> float:
        """Factor on the variance of the unknowns, 1 where the calls agree.

        A call's score then has the variance F(1 + τ²) in place of F, with τ² = χ²/degrees − 1. An
        error of the structure does not average out over n calls as noise does: it is taken to be
        the same in all of them, and the variance (nF)⁻¹ + τ²F⁻¹ = (nF)⁻¹(1 + nτ²).
        """
        return 1 + self.calls * (self.ratio - 1) if self.is_systematic else 1.0


# --------------------------------------------------------------------------------------- for people


class Posterior(NamedTuple):
    """The calibrated unknowns of a device, with errors and tests of the model.

    unknown, stderr: with the structure of φ; watched unknowns have the value with which they would
        be fitted.
    trajectories: number measured so far.
    chi2, degrees: of the last call's score against the belief before it; about 1 per degree of
        freedom where the model is right.
    watched_chi2, watched_degrees: of the unknowns that are held at their start; about 1 per degree
        of freedom where they belong there.
    watched: which unknowns are held, one entry per component of φ.
    widened: factor by which errors were multiplied because calls disagree; 1 where they agree.
    """

    unknown: Params
    stderr: Params
    trajectories: int
    chi2: float
    degrees: int
    watched_chi2: float
    watched_degrees: int
    watched: tuple[bool, ...]
    widened: float = 1.0

    @property
    def covers(self) -> bool:
        """Whether no test contradicts the structure of the model, on which errors rely."""
        return self.widened == 1 and not self.structure_is_wrong

    @property
    def caveat(self) -> str:
        """Why the errors need not cover, as a sentence; empty where no test fails."""
        if self.structure_is_wrong:
            return (
                "the model lacks what is watched: errors of the fitted unknowns include its effect "
                "in the size that was found, and cover to that accuracy only"
            )
        if self.widened > 1:
            return (
                f"calls disagree: errors are {self.widened:.2g} times those of the noise, and need "
                "not cover. There are few measurements yet, the structure of the model is wrong, "
                "or the device changes"
            )
        return ""

    @property
    def structure_is_wrong(self) -> bool:
        """Whether the watched unknowns differ from their start by more than chance."""
        return exceeds_chance(self.watched_chi2, self.watched_degrees)

    def __repr__(self) -> str:
        return _format_posterior(self)


def explain_watched(known: Posterior, start: np.ndarray) -> str:
    """Explain why the structure of the model is wrong. start: where unknowns are held, (K,)."""

    def flat(tree: Params) -> np.ndarray:
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    watched = np.asarray(known.watched)
    z = np.abs((flat(known.unknown) - start)[watched] / flat(known.stderr)[watched])
    worst = np.flatnonzero(watched)[int(np.argmax(z))]
    return (
        "the structure of the model is wrong: what it leaves out is there, with χ² = "
        f"{known.watched_chi2:.4g} for {known.watched_degrees} degrees of freedom, most of "
        f"all {names(known.unknown)[worst]} ({np.max(z):.1f} standard errors). Take it out of "
        "`watch` to have it fitted."
    )


def _format_posterior(known: Posterior) -> str:
    """One line per family of unknowns, and χ² of the model."""
    lines = [f"calibrated with {format_count(known.trajectories, 'trajectory')}"]
    rows = zip(
        jax.tree_util.tree_leaves_with_path(known.unknown),
        jax.tree.leaves(known.stderr),
        strict=True,
    )
    begin = 0
    for (path, value), error in rows:
        stem = jax.tree_util.keystr(path, simple=True, separator=".") or "phi"
        value = np.asarray(value)
        error = np.asarray(error)
        role = "watched" if known.watched[begin] else "fitted"
        begin += value.size
        if value.size <= MAX_LISTED:
            pairs = zip(value.ravel().tolist(), error.ravel().tolist(), strict=True)
            listed = ", ".join(with_error(*pair) for pair in pairs)
            lines.append(f"  {stem} = {listed}   {role}")
        else:
            rms = float(np.sqrt(np.mean(np.square(error))))
            lines.append(
                f"  {stem}: {value.size} between {value.min():.4g} and {value.max():.4g}, rms "
                f"standard error {rms:.2g}   {role}"
            )
    if known.degrees:
        lines.append(f"  last call: chi² = {known.chi2:.4g}, {known.degrees} expected")
    if known.watched_degrees:
        lines.append(
            f"  watched: chi² = {known.watched_chi2:.4g}, {known.watched_degrees} expected if "
            "nothing is there"
        )
    if known.caveat:
        lines.append(f"  {known.caveat}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------ helpers


def exceeds_chance(chi2: float, degrees: int) -> bool:
    """Whether χ² is larger than chance allows (`CHANCE`)."""
    return degrees > 0 and chi2 > scipy.special.chdtri(degrees, CHANCE)


def unflatten_like(tree: Params, flat: np.ndarray) -> Params:
    """The numbers of `flat` (K,) in the structure of `tree`, in double precision."""
    leaves, structure = jax.tree.flatten(tree)
    parts = np.split(flat, np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
    shaped = [part.reshape(np.shape(leaf)) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def prior_precision(spread: Params, unknown: Params) -> np.ndarray:
    """1/spread² of every unknown. Shape (K,)."""
    try:
        spreads = jax.tree.map(
            lambda s, sub: jax.tree.map(
                lambda leaf: np.broadcast_to(np.asarray(s, np.float64), np.shape(leaf)), sub
            ),
            spread,
            unknown,
        )
    except ValueError as error:
        raise ValueError(
            f"`spread` must have the structure of `unknown`, {jax.tree.structure(unknown)}, or be "
            f"a prefix: {error}"
        ) from None
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(spreads)])
    if not (np.isfinite(flat).all() and (flat > 0).all()):
        raise ValueError(
            f"`spread` is a standard deviation, finite and above 0; got {flat.min():g}."
        )
    return 1 / flat**2


def find_watched(unknown: Params, watch: Sequence[str]) -> np.ndarray:
    """Components of φ that belong to the names in `watch`. Shape (K,), bool."""
    if not watch:
        return np.zeros(sum(np.size(leaf) for leaf in jax.tree.leaves(unknown)), bool)
    known = list(unknown) if isinstance(unknown, Mapping) else []
    for name in watch:
        if isinstance(watch, str) or name not in known:
            raise ValueError(
                "`watch` is a list of names of `unknown`, which has "
                f"{', '.join(map(repr, known)) or 'none'}; got "
                f"{watch if isinstance(watch, str) else name!r}.{close_match(str(name), known)}"
            )
    marked = [
        np.full(np.size(leaf), name in watch)
        for name in sorted(unknown)
        for leaf in jax.tree.leaves(unknown[name])
    ]
    return np.concatenate(marked)
