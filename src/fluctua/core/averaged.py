"""The correction averaged over iterations: what a twin misses changes slowly, so it need not be measured afresh.

With a good twin almost all of the noise is in the correction and almost none of the mean. θ moves little in an
iteration, so the mean of the correction over the last ones is nearly that of the present,

    G = ⟨direct⟩ + ⟨correction⟩ over iterations,   weights ∝ trajectories / variance · (1 − 1/memory)^age,

and it is worth keeping for its own sake: it is the error that the twin makes in the gradient, with an error bar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.ppgt import PPGT
from fluctua.core.text import certificate_table
from fluctua.core.twin import TwinSamples
from fluctua.core.types import Array, Estimate, Estimator, Params

SUMS = ("weight", "weight_square", "correction", "square", "direct")

CAUTION = 2
"""James and Stein's factor has 1 here, for independent components. Those of a gradient share the fluctuations of Λ,
so that Σc² of pure noise strays further from Σstderr². With 2 it is still no worse than not to shrink."""


class Splits(Estimator, Protocol):
    """An estimator that gives its samples in two parts, as `ppgt(..., baseline=Twin())` does."""

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples: ...


class Certificate(NamedTuple):
    """How wrong the twin is: the mean correction over recent iterations, leaf by leaf, and its standard error.

    gradient: of the same iterations, to compare with. trajectories: as many as all of equal weight would be.
    Prints a line for each family:

    rms: √⟨c²⟩/√⟨G²⟩, the correction relative to the gradient. error: the same of the standard errors; below it
    nothing is resolved. chi²: ⟨(c/stderr)²⟩, about 1 where the twin's error does not show, and the larger the surer.
    """

    correction: Params
    stderr: Params
    gradient: Params
    trajectories: float

    @property
    def rows(self) -> list[tuple[str, float, float, float]]:
        """(family, rms, error, chi²), one for each leaf of θ."""
        leaves = jax.tree_util.tree_leaves_with_path(self.correction)
        rest = zip(leaves, jax.tree.leaves(self.stderr), jax.tree.leaves(self.gradient), strict=True)
        return [_row(path, c, error, g) for (path, c), error, g in rest]

    def __repr__(self) -> str:
        return certificate_table(self.rows, self.trajectories)


class Averaged:
    """An estimator that remembers the correction: (key, theta, count) -> Estimate.

    estimator: anything with `split`. memory: iterations over which the correction is averaged; 1 remembers nothing.
    shrink: weight the mean correction by what it is worth, (1 − 2Σstderr²/Σc²)₊ over each leaf (after James and
    Stein): of a correction that is all noise nothing is added, one that is well resolved is added whole. Its error is
    then smaller in the mean over the leaf, and its bias not zero until `memory` resolves the correction.
    carry: also hand the mean Λ of one iteration to the next as its λ̄; `split` must then take a `table`.

    What the standard error assumes: every call has its own key; and θ moved so little within `memory` that the mean
    correction did not change by more than the error bar. Then the errors of the calls are uncorrelated, though each
    θ was chosen in sight of those before, and their variances add. A lag is a bias that the error bar does not show: of
    the correction only, and gone when θ comes to rest. The second moment is gradient² + count·stderr², of one
    trajectory out of `count` that would give this error bar, which is what a rule such as `rms_ascent` asks for.

    It has a state; put it back to go on where another left off.

    >>> estimator = Averaged(ppgt(process, objective, simulator, baseline=Twin()), memory=100)
    >>> records = train(key, theta, estimator, optax.adam(0.01), count=64, iterations=500)
    >>> print(estimator.certificate)
    """

    def __init__(self, estimator: Splits, memory: float = 100, *, shrink: bool = False, carry: bool = False):
        if not hasattr(estimator, "split") or (isinstance(estimator, PPGT) and estimator.method.twin is None):
            raise TypeError(
                f"`Averaged` needs an estimator that splits its samples, such as ppgt(..., baseline=Twin()); "
                f"this {type(estimator).__name__} has no `split`."
            )
        if not memory >= 1:
            raise ValueError(f"`memory` is a number of iterations, at least 1; got {memory!r}.")
        self.estimator, self.memory, self.shrink, self.carry = estimator, memory, shrink, carry
        self._state: dict[str, np.ndarray] = {}
        self._like: Params = None

    def cost(self, theta: Params) -> int:
        """Trajectories per sample."""
        return self.estimator.cost(theta)

    @property
    def pilot(self) -> int:
        """Trajectories that a call runs besides."""
        return self.estimator.pilot

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` new trajectories and the corrections of earlier ones."""
        if count < 2:
            raise ValueError(f"`Averaged` needs two trajectories a call, to know their spread; got {count}.")
        options: dict[str, Any] = {"table": self._state["table"]} if self.carry and "table" in self._state else {}
        samples = self.estimator.split(key, theta, count, **options)
        direct, correction = _rows(samples.direct), _rows(samples.correction)
        old = self._state if self._state else _empty(direct.shape[1])
        if old["correction"].shape != direct.shape[1:]:
            raise ValueError(
                f"the state is of {old['correction'].size} parameters and θ has {direct.shape[1]}. Begin anew with "
                "another `Averaged`."
            )

        fade = 1 - 1 / self.memory
        own = count * _precision(theta, correction)
        weight = fade * old["weight"] + own
        self._state = {
            "weight": weight,
            "weight_square": fade**2 * old["weight_square"] + own**2 / count,
            "correction": fade * old["correction"] + own * correction.mean(axis=0),
            "square": fade**2 * old["square"] + own**2 * correction.var(axis=0, ddof=1) / count,
            "direct": fade * old["direct"] + own * direct.mean(axis=0),
        }
        worth = _worth(theta, self._state) if self.shrink else 1.0
        mixed = direct + worth * (own / weight) * correction
        gradient = mixed.mean(axis=0) + worth * fade * old["correction"] / weight
        # this call's two parts are correlated; the calls among each other are not
        variance = mixed.var(axis=0, ddof=1) / count + worth**2 * fade**2 * old["square"] / weight**2
        if self.carry:
            self._state["table"] = np.asarray(samples.mean_lambda)
        self._like = theta
        returns = np.asarray(samples.returns, np.float64)
        shaped = lambda flat: _shaped(theta, flat)
        return Estimate(
            shaped(gradient),
            shaped(np.sqrt(variance)),
            shaped(gradient**2 + count * variance),
            jnp.asarray(returns.mean(), samples.returns.dtype),
            jnp.asarray(returns.std(ddof=1) / np.sqrt(count), samples.returns.dtype),
            count,
        )

    @property
    def certificate(self) -> Certificate:
        """The twin's error in the gradient, with its standard error."""
        if not self._state or self._like is None:
            raise ValueError("there is no certificate yet: call the estimator, or `restore(state, theta)`.")
        return certificate_of(self._state, self._like)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """All that is remembered, as plain arrays: five numbers a parameter; empty before the first call."""
        return {name: value.copy() for name, value in self._state.items()}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params = None) -> None:
        """Put a `state` back. theta: any of the parameters it is of, for a `certificate` before the next call."""
        missing = sorted({*_empty(0)} - set(state)) if state else []
        if missing:
            raise ValueError(f"this is not the state of an `Averaged`: it has no {', '.join(map(repr, missing))}.")
        self._state = {name: np.array(value) for name, value in state.items()}
        self._like = theta


def certificate_of(state: Mapping[str, np.ndarray], theta: Params) -> Certificate:
    """What the state of an `Averaged` says about its twin. theta: any parameters that the state is of."""
    w = state["weight"]
    parts = (state["correction"] / w, np.sqrt(state["square"]) / w, (state["correction"] + state["direct"]) / w)
    correction, stderr, gradient = (_split_like(theta, flat) for flat in parts)
    return Certificate(correction, stderr, gradient, float(np.mean(w**2 / state["weight_square"])))


def _precision(theta: Params, correction: np.ndarray) -> np.ndarray:
    """1/variance of one trajectory's correction, the mean over each leaf, for every parameter. (P,)

    A first call, which has no λ̄ of an earlier one, would else drown the quieter ones that follow.
    """
    edges = np.cumsum([np.size(leaf) for leaf in jax.tree.leaves(theta)])[:-1]
    means = [np.full(v.size, v.mean()) for v in np.split(correction.var(axis=0, ddof=1), edges)]
    variance = np.concatenate(means)
    return np.divide(1.0, variance, out=np.ones_like(variance), where=variance > 0)


def _worth(theta: Params, state: Mapping[str, np.ndarray]) -> np.ndarray:
    """The positive-part James–Stein factor of each leaf's mean correction, for every parameter. (P,)"""
    edges = np.cumsum([np.size(leaf) for leaf in jax.tree.leaves(theta)])[:-1]
    factors = []
    for sums, squares in zip(np.split(state["correction"], edges), np.split(state["square"], edges), strict=True):
        size = float(np.sum(sums**2))
        factors.append(np.full(sums.size, max(0.0, 1 - CAUTION * float(np.sum(squares)) / size) if size else 0.0))
    return np.concatenate(factors)


def _empty(size: int) -> dict[str, np.ndarray]:
    return {name: np.zeros(size) for name in SUMS}


def _rows(tree: Params) -> np.ndarray:
    """Leaves (E, ...) as one matrix (E, P), in double precision: the sums run over many iterations."""
    return np.concatenate([np.asarray(v, np.float64).reshape(np.shape(v)[0], -1) for v in jax.tree.leaves(tree)], 1)


def _split_like(theta: Params, flat: np.ndarray) -> Params:
    """(P,) in the structure of θ, in double precision."""
    leaves, tree = jax.tree.flatten(theta)
    pieces = np.split(flat, np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
    return jax.tree.unflatten(tree, [v.reshape(np.shape(leaf)) for v, leaf in zip(pieces, leaves, strict=True)])


def _shaped(theta: Params, flat: np.ndarray) -> Params:
    """(P,) in the structure and precision of θ."""
    return jax.tree.map(lambda v, leaf: jnp.asarray(v, jnp.asarray(leaf).dtype), _split_like(theta, flat), theta)


def _row(path: Any, c: np.ndarray, error: np.ndarray, g: np.ndarray) -> tuple[str, float, float, float]:
    name = jax.tree_util.keystr(path, simple=True, separator=".") or "theta"
    rms = lambda v: float(np.sqrt(np.mean(np.square(v))))
    size = rms(g)
    # a correction that vanishes in every trajectory has no error bar, and is no evidence against the twin
    z = np.divide(c, error, out=np.zeros_like(c), where=error > 0)
    return name, rms(c) / size if size else 0.0, rms(error) / size if size else 0.0, float(np.mean(z**2))
