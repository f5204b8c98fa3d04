"""What is known of the unknowns of a model: a Gaussian belief from evidence, and what it says for
people.

The prior stays and what was measured fades. Two readings say when not to trust a model: the score
of new trajectories has mean zero where it is right, and so has that of unknowns that are watched
and not fitted.
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
from fluctua.core.text import with_error
from fluctua.core.words import close_match

COLLINEAR = 1e-5
"""Share of a direction that others leave of it, below which it is one of theirs; single precision
has seven digits.
"""

CHANCE = 1e-5
"""That a χ² is exceeded where the model is right, before it is spoken of: the same for few unknowns
and for many.
"""


@dataclass(frozen=True, eq=False)
class Belief:
    """A Gaussian about the unknowns: the prior, which stays, and what was measured, which fades.

    start (K,), precision (K,): mean and diagonal precision of the prior. information: I = ΣF (K,
    K).
    vector: η = Σ(Fu + s) (K,). free: which unknowns are fitted, (K,) bool; the others stay at their
    start and are watched. The posterior of those that are free has the precision Λ = prior + I and
    the mean Λ⁻¹(prior·start + η).
    """

    start: np.ndarray
    precision: np.ndarray
    information: np.ndarray
    vector: np.ndarray
    free: np.ndarray

    def faded(self, factor: float) -> Belief:
        """What was measured counts for less."""
        return replace(self, information=factor * self.information, vector=factor * self.vector)

    def with_evidence(self, news: Evidence, u: np.ndarray) -> Belief:
        """And what other trajectories say, whose evidence was taken at u."""
        vector = self.vector + news.information @ u + news.score
        return replace(self, information=self.information + news.information, vector=vector)

    @property
    def posterior_precision(self) -> np.ndarray:
        """Λ of the free unknowns. (F, F)"""
        whole = self.information + np.diag(self.precision)
        return whole if self.free.all() else whole[np.ix_(self.free, self.free)]

    @cached_property
    def _factor(self) -> Any:
        """Of Λ, for `cho_solve`."""
        return scipy.linalg.cho_factor(self.posterior_precision, lower=True)

    @cached_property
    def mean(self) -> np.ndarray:
        """The posterior mean of the free unknowns, the start of those that are watched. (K,)"""
        u = self.start.copy()
        f = self.free
        pull = (self.precision * self.start + self.vector)[f]
        if not f.all():
            pull = pull - self.information[np.ix_(f, ~f)] @ self.start[~f]
        u[f] = scipy.linalg.cho_solve(self._factor, pull)
        return u

    def deviations(self, rows: np.ndarray) -> np.ndarray:
        """Rows (S, F) of standard normals as departures of the unknowns from their mean. (S, K)"""
        factor = scipy.linalg.cholesky(self.posterior_precision, lower=True)
        spread = np.zeros((len(rows), self.start.size))
        spread[:, self.free] = scipy.linalg.solve_triangular(
            factor, rows.T, trans="T", lower=True
        ).T
        return spread

    def in_deviations(self, gradient: np.ndarray) -> float:
        """|Λ⁻¹ gradient (F,)| in standard deviations, the root mean square over the unknowns."""
        square = gradient @ scipy.linalg.cho_solve(self._factor, gradient)
        return float(np.sqrt(square / max(gradient.size, 1)))

    def surprise(self, news: Evidence) -> tuple[float, int]:
        """χ² of the score that was taken in last, against the belief before it, and its degrees of
        freedom.

        The score at the mean has the covariance F + FΛ⁻¹F if the model is right and the device is
        the one that the belief was of: its own noise, and the error of the calibration so far. The
        inverse of that is F⁻¹ − (F + Λ)⁻¹, and F + Λ is the precision of the belief with it.
        """
        f = self.free
        inner, score = (
            (news.information, news.score)
            if f.all()
            else (news.information[np.ix_(f, f)], news.score[f])
        )
        own, degrees = _square(inner, score)
        return float(own - score @ scipy.linalg.cho_solve(self._factor, score)), degrees

    def watched(self) -> tuple[np.ndarray, np.ndarray, float]:
        """What the unknowns that are watched would be if they were fitted too, (K − F,), with
        standard errors and χ².

        That is Rao's test: their score at the fit without them, less what the free unknowns explain
        of it.
        """
        f = self.free
        w = ~self.free
        u = self.mean
        cross = self.information[np.ix_(w, f)]
        score = self.vector[w] - cross @ u[f] - self.information[np.ix_(w, w)] @ u[w]
        precision = self.information[np.ix_(w, w)] - cross @ np.linalg.solve(
            self.posterior_precision, cross.T
        )
        covariance = np.linalg.inv(precision + np.diag(self.precision[w]))
        away = covariance @ score
        return u[w] + away, np.sqrt(np.diag(covariance)), float(score @ away)


def _square(information: np.ndarray, score: np.ndarray) -> tuple[float, int]:
    """sᵀF⁺s and the rank of F: offset and gain of a knob that has not moved are one direction.

    With F = LLᵀ on its pivots and s = Ly, that is |y|².
    """
    scale = np.sqrt(np.diag(information))
    seen = scale > 0
    scale = scale[seen]
    some = information[np.ix_(seen, seen)]
    if not scale.size:
        return 0.0, 0
    factor, pivots, rank, _ = scipy.linalg.lapack.dpstrf(
        some / np.outer(scale, scale), lower=1, tol=COLLINEAR
    )
    y = scipy.linalg.solve_triangular(
        factor[:rank, :rank], (score[seen] / scale)[pivots[:rank] - 1], lower=True
    )
    return float(y @ y), int(rank)


# --------------------------------------------------------------------------------------- for people


class Posterior(NamedTuple):
    """What is known of a device after some trajectories.

    unknown, stderr: with the structure of φ; those that are watched have the value that they would
    be fitted with. chi2, degrees: of the last call's score against what was expected before it;
    about one a degree where the model is right. watched_chi2, watched_degrees: of the unknowns that
    are held at their start; about one a degree where they are there.
    """

    unknown: Params
    stderr: Params
    trajectories: int
    chi2: float
    degrees: int
    watched_chi2: float
    watched_degrees: int
    watched: tuple[bool, ...]

    @property
    def structure_is_wrong(self) -> bool:
        """Whether the unknowns that are watched are not where they are held, beyond doubt."""
        return beyond(self.watched_chi2, self.watched_degrees)

    def __repr__(self) -> str:
        return _table(self)


def _table(known: Posterior) -> str:
    """What a device is known to be, a line for each family of unknowns, and how well the model
    fits.
    """
    lines = [f"calibrated with {known.trajectories:,} trajectories"]
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
        if value.size == 1:
            lines.append(
                f"  {stem} = {with_error(float(value.ravel()[0]), float(error.ravel()[0]))}   "
                f"{role}"
            )
        else:

            def rms(v):
                return float(np.sqrt(np.mean(np.square(v))))

            lines.append(
                f"  {stem}: {value.size} between {value.min():.4g} and {value.max():.4g}, rms "
                f"standard error {rms(error):.2g}   {role}"
            )
    if known.degrees:
        lines.append(f"  last call: chi² = {known.chi2:.4g}, {known.degrees} expected")
    if known.watched_degrees:
        lines.append(
            f"  watched: chi² = {known.watched_chi2:.4g}, {known.watched_degrees} expected if "
            "nothing is there"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------ helpers


def beyond(chi2: float, degrees: int) -> bool:
    """Whether a χ² exceeds what chance allows, beyond doubt."""
    return degrees > 0 and chi2 > scipy.special.chdtri(degrees, CHANCE)


def like(tree: Params, flat: np.ndarray) -> Params:
    """(K,) in the structure of φ, in double precision."""
    leaves, shape = jax.tree.flatten(tree)
    pieces = np.split(flat, np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
    return jax.tree.unflatten(
        shape, [v.reshape(np.shape(leaf)) for v, leaf in zip(pieces, leaves, strict=True)]
    )


def prior_precision(spread: Params, unknown: Params) -> np.ndarray:
    """1/spread² of every unknown. (K,)"""
    try:
        whole = jax.tree.map(
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
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(whole)])
    if not (np.isfinite(flat).all() and (flat > 0).all()):
        raise ValueError(
            f"`spread` is a standard deviation, finite and above 0; got {flat.min():g}."
        )
    return 1 / flat**2


def chosen(unknown: Params, watch: Sequence[str]) -> np.ndarray:
    """Which components of φ belong to the names in `watch`. (K,) bool"""
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
