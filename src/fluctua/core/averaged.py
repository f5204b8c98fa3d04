"""The correction averaged over iterations: what a twin misses changes slowly, so it need not be measured afresh.

With a good twin almost all of the noise is in the correction and almost none of the mean. θ moves little in an
iteration, so the mean of the correction over the last ones is nearly that of the present,

    G = ⟨direct⟩ + ⟨correction⟩ over iterations,   weights ∝ trajectories · (1 − 1/memory)^age,

and it is worth keeping for its own sake: it is what the twin misses of the gradient, with an error bar.

Weights look at nothing that was measured. The variance of a skewed sample is correlated with its mean, so that a
weight of 1/variance would bias it by about −skewness·σ/count, at any memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.ppgt import PPGT
from fluctua.core.simulate import Simulator
from fluctua.core.text import certificate_table
from fluctua.core.twin import TwinSamples
from fluctua.core.types import Array, Estimate, Estimator, NoiseProduct, Params, Process

SUMS = ("weight", "weight_square", "correction", "square", "direct")
CONCENTRATION = "concentration"
"""Σ count·tr Σ²/(tr Σ)² of each leaf, Σ the covariance of the correction: 1/p of p independent alike components."""

FIRST = 1e-3
"""Weight of a call that has no λ̄ of an earlier one although it should: it is much louder than those that follow."""

COVERS = 1.96
"""Standard errors on either side of an interval of 95 %."""


class Splits(Estimator, Protocol):
    """An estimator that gives its samples in two parts, as `ppgt(..., baseline=Twin())` does."""

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples: ...


class Certificate(NamedTuple):
    """What the twin misses: the mean correction over recent iterations, leaf by leaf, and its standard error.

    gradient: of the same iterations, to compare with. trajectories: as many as all of equal weight would be.
    Prints a line for each family:

    rms: √⟨c²⟩/√⟨G²⟩, the correction relative to the gradient. error: the same of the standard errors; below it
    nothing is resolved. chi²: ⟨(c/stderr)²⟩, about 1 where the twin misses nothing that shows.

    A large chi² says that the guess V misses something, not that the twin's parameters are wrong: a linear guess
    (`Twin(order=1)`) misses what noise adds to the return even where every parameter is exact. `own_certificate` is the
    same of the twin on trajectories of its own, which is that part alone; the rest is the error of the model.
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

    Args:
        estimator: anything with `split`, such as ppgt(..., baseline=Twin()).
        memory: iterations over which the correction is averaged; 1 remembers nothing.
        shrink: take (1 − a/|c|²)₊ of each leaf's mean correction c, with a = (tr Σ − 2 ‖Σ‖)₊ and Σ the covariance of
            the estimate with c. For normal errors the mean square error over the leaf is then never above that without
            shrinkage, whatever the number of components and their correlation (Stein: 0 ≤ a ≤ 2 (tr Σ − 2 λ_max) will
            do); with few or strongly correlated components nothing is shrunk. The estimate is biased towards the
            twin's, and the standard error is widened until its interval of 95 % contains that without shrinkage.
        carry: also hand the mean Λ of one iteration to the next as its λ̄; `split` must then take a `table`.

    What the standard error assumes: every call has its own key; and θ moved so little within `memory` that the mean
    correction did not change by more than the error bar. Then the errors of the calls are uncorrelated, though each
    θ was chosen in sight of those before, and their variances add. A lag is a bias that the error bar does not show: of
    the correction only, and gone when θ comes to rest. The second moment is gradient² + count·stderr², of one
    trajectory out of `count` that would give this error bar, which is what a rule such as `rms_ascent` asks for.

    It has a state; put it back to go on where another left off.

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
        own = count * (FIRST if self.carry and not options else 1.0)
        weight = fade * old["weight"] + own
        self._state = {
            "weight": weight,
            "weight_square": fade**2 * old["weight_square"] + own**2 / count,
            "correction": fade * old["correction"] + own * correction.mean(axis=0),
            "square": fade**2 * old["square"] + own**2 * correction.var(axis=0, ddof=1) / count,
            "direct": fade * old["direct"] + own * direct.mean(axis=0),
            CONCENTRATION: fade * old[CONCENTRATION] + own * _concentration(theta, correction),
        }
        mixed = direct + (own / weight) * correction
        gradient = mixed.mean(axis=0) + fade * old["correction"] / weight
        # this call's two parts are correlated; the calls among each other are not
        variance = mixed.var(axis=0, ddof=1) / count + fade**2 * old["square"] / weight**2
        stderr = np.sqrt(variance)
        if self.shrink:
            worth = _worth(theta, self._state, own, direct, correction)
            left_out = (1 - worth) * self._state["correction"] / weight
            gradient, stderr = gradient - left_out, stderr + np.abs(left_out) / COVERS
        if self.carry:
            self._state["table"] = np.asarray(samples.mean_lambda)
        self._like = theta
        returns = np.asarray(samples.returns, np.float64)
        shaped = lambda flat: _shaped(theta, flat)
        return Estimate(
            shaped(gradient),
            shaped(stderr),
            shaped(gradient**2 + count * variance),
            jnp.asarray(returns.mean(), samples.returns.dtype),
            jnp.asarray(returns.std(ddof=1) / np.sqrt(count), samples.returns.dtype),
            count,
        )

    @property
    def certificate(self) -> Certificate:
        """What the twin misses of the gradient, with its standard error."""
        if not self._state or self._like is None:
            raise ValueError("there is no certificate yet: call the estimator, or `restore(state, theta)`.")
        return certificate_of(self._state, self._like)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """All that is remembered, as plain arrays: six numbers a parameter; empty before the first call."""
        return {name: value.copy() for name, value in self._state.items()}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params = None) -> None:
        """Put a `state` back. theta: any of the parameters it is of, for a `certificate` before the next call."""
        missing = sorted({*SUMS} - set(state)) if state else []
        if missing:
            raise ValueError(f"this is not the state of an `Averaged`: it has no {', '.join(map(repr, missing))}.")
        self._state = {name: np.array(value) for name, value in state.items()}
        if state and CONCENTRATION not in state:  # written by a version that weighted by 1/variance
            unit = self._state["weight"] / self._state["weight_square"]
            for name, power in zip(SUMS, (1, 2, 1, 2, 1), strict=True):
                self._state[name] = self._state[name] * unit**power
            self._state[CONCENTRATION] = self._state["weight"].copy()
        self._like = theta


def certificate_of(state: Mapping[str, np.ndarray], theta: Params) -> Certificate:
    """What the state of an `Averaged` says about its twin. theta: any parameters that the state is of."""
    w = state["weight"]
    parts = (state["correction"] / w, np.sqrt(state["square"]) / w, (state["correction"] + state["direct"]) / w)
    correction, stderr, gradient = (_split_like(theta, flat) for flat in parts)
    return Certificate(correction, stderr, gradient, float(np.mean(w**2 / state["weight_square"])))


def own_certificate(key: Array, estimator: PPGT, theta: Params, count: int) -> Certificate:
    """What the twin misses on `count` trajectories of its own: that of its order, not of its parameters.

    `estimator` has a `Twin` and runs a simulator, whose start and times are used; the trajectories are simulated with
    the twin's process at the twin's parameters, so nothing is measured. Where it agrees with the certificate of the
    device, nothing shows that the model is wrong.
    """
    method, substrate = estimator.method, estimator.substrate
    if method.twin is None or not isinstance(substrate, Simulator):
        raise TypeError("`own_certificate` is of an estimator with a `Twin` that runs a simulator.")
    twin = method.twin
    assert twin.process is not None
    at = twin.theta or (lambda theta: theta)
    drift, noise, diffusion = twin.process[:3]
    if isinstance(noise, NoiseProduct):
        product = noise.product
        own_noise: Any = NoiseProduct(lambda th, *rest: product(at(th), *rest), noise.width)
    else:
        own_noise = lambda th, *rest: noise(at(th), *rest)  # type: ignore[misc]
    own = Process(lambda th, *rest: drift(at(th), *rest), own_noise)
    run = substrate._replace(recipe=substrate.recipe._replace(process=own))
    model = method.model._replace(process=own)
    alone = PPGT(method._replace(model=model, twin=twin._replace(theta=None, process=own)), run)
    averaged = Averaged(alone, memory=1)
    averaged(key, theta, count)
    return averaged.certificate


def _leaves(theta: Params, array: np.ndarray) -> list[np.ndarray]:
    """(..., P) leaf by leaf."""
    return np.split(array, np.cumsum([np.size(leaf) for leaf in jax.tree.leaves(theta)])[:-1], axis=-1)


def _concentration(theta: Params, correction: np.ndarray) -> np.ndarray:
    """tr Σ²/(tr Σ)² of each leaf, Σ the covariance of one trajectory's correction, for every parameter. (P,)

    From E trajectories tr Σ² is estimated without bias (Himeno and Yamada 2014), so that noise does not pass for
    correlation; with fewer than four it is bounded by (tr Σ)².
    """
    parts = []
    for rows in _leaves(theta, correction):
        count, size = rows.shape
        centred = rows - rows.mean(axis=0)
        gram = centred @ centred.T
        trace = np.trace(gram) / (count - 1)
        ratio = 1.0
        if count > 3 and trace > 0:
            square, fourth = np.sum(gram**2) / (count - 1) ** 2, np.sum(np.diag(gram) ** 2) / (count - 1)
            unbiased = (count - 1) / (count * (count - 2) * (count - 3))
            unbiased *= (count - 1) * (count - 2) * square + trace**2 - count * fourth
            ratio = float(np.clip(unbiased / trace**2, 1 / size, 1.0))
        parts.append(np.full(size, ratio))
    return np.concatenate(parts)


def _worth(
    theta: Params, state: Mapping[str, np.ndarray], own: float, direct: np.ndarray, correction: np.ndarray
) -> np.ndarray:
    """(1 − a/|c|²)₊ of each leaf's mean correction c, a = (tr Σ − 2 ‖Σ‖)₊, for every parameter. (P,)

    Σ is the covariance of the estimate with c: that of c, and of this call's direct part with its share of c, whose
    norm is bounded by those of the two.
    """
    norm = lambda rows, part: np.sqrt(np.mean(part)) * np.sum(rows.var(axis=0, ddof=1))
    count = len(direct)
    split = [_leaves(theta, v) for v in (direct, correction, _concentration(theta, direct), state[CONCENTRATION])]
    sums = [_leaves(theta, state[name]) for name in ("correction", "square", "weight")]
    factors = []
    for d, c, of_direct, of_correction, total, squares, weight in zip(*split, *sums, strict=True):
        share = own / weight[0]
        concentration = of_correction / weight
        covariance = np.sum((d - d.mean(axis=0)) * (c - c.mean(axis=0))) / (count - 1)
        variance = np.sum(squares) / weight[0] ** 2
        trace = variance + share * covariance / count
        bound = np.sqrt(np.mean(concentration)) * variance
        bound += share * np.sqrt(norm(d, of_direct) * norm(c, concentration)) / count
        size = np.sum(total**2) / weight[0] ** 2
        factors.append(np.full(total.size, max(0.0, 1 - max(0.0, trace - 2 * bound) / size) if size else 1.0))
    return np.concatenate(factors)


def _empty(size: int) -> dict[str, np.ndarray]:
    return {name: np.zeros(size) for name in (*SUMS, CONCENTRATION)}


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
