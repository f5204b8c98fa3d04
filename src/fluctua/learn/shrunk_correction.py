"""How much of the correction to take: all of it where it is resolved, none of it where it is noise.

With a good twin almost all of the noise is in the correction and almost none of the mean; with a
path that noise leaves at once the correction is nearly everything. A training adds up its steps.
Over the last iterations the mean of w⟨correction⟩ misses (1 − w)b of the gradient and has the
variance w²V, b the mean of the correction and V the variance of its average, so that the mean
square error is least, leaf by leaf, at

    G = ⟨direct⟩ + w⟨correction⟩,   w = b²/(b² + V),   b² ≈ |c|² − V,   that is w = (1 − V/|c|²)₊,

with c the average of the correction over iterations, weights ∝ trajectories · (1 − 1/m)^age, where
m is `forget_after`. c is worth keeping for its own sake: it is what the twin misses of the
gradient, with an error bar.

Weights look at nothing that they weight. w of one half of a call's trajectories is that of the
other half and of the calls before, so that E[w⟨correction⟩] = E[w] b; and c is not weighted by
1/variance, which for a skewed sample goes with its mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.estimate import Estimate, sample_error
from fluctua.core.estimator import PPGT
from fluctua.core.integrators import step_at
from fluctua.core.process import NoiseProduct, Process
from fluctua.core.protocols import Estimator, EstimatorWrapper
from fluctua.core.simulate import Simulator
from fluctua.core.twin.correction import TwinSamples

SUMS = ("weight", "weight_square", "correction", "square", "direct")
"""What is remembered: Σw, Σw²/count, and of each parameter Σw⟨c⟩, Σw²Var⟨c⟩, Σw⟨d⟩."""

FIRST = 1e-3
"""Weight of a call that has no λ̄ of an earlier one although it should: it is much louder than
those that follow.
"""

FEWEST = 4
"""Trajectories of a call that has halves, each with a spread."""

COVERS = 1.96
"""Standard errors on either side of an interval of 95 %."""

Sums = Mapping[str, np.ndarray]


class Splits(Estimator, Protocol):
    """An estimator that gives its samples in two parts, as `ppgt(..., baseline=Twin())` does."""

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples: ...


class TwinErrorReport(NamedTuple):
    """What the twin misses: the mean correction over recent iterations, leaf by leaf, and its
    standard error.

    gradient: of the same iterations, to compare with. trajectories: as many as all of equal weight
    would be. Prints a line for each family:

    rms: √⟨c²⟩/√⟨G²⟩, the correction relative to the gradient. error: the same of the standard
    errors; below it nothing is resolved. chi²: ⟨(c/stderr)²⟩, about 1 where the twin misses nothing
    that shows.

    A large chi² says that the guess V misses something, not that the twin's parameters are wrong: a
    linear guess (`Twin(order=1)`) misses what noise adds to the return even where every parameter
    is exact. `measure_own_certificate` is the same of the twin on trajectories of its own, which is
    that part alone; the rest is the error of the model.
    """

    correction: Params
    stderr: Params
    gradient: Params
    trajectories: float

    @property
    def rows(self) -> list[tuple[str, float, float, float]]:
        """(family, rms, error, chi²), one for each leaf of θ."""
        leaves = jax.tree_util.tree_leaves_with_path(self.correction)
        rest = zip(
            leaves, jax.tree.leaves(self.stderr), jax.tree.leaves(self.gradient), strict=True
        )
        return [_row(path, c, error, g) for (path, c), error, g in rest]

    def __repr__(self) -> str:
        room = max(6, *(len(row[0]) for row in self.rows))
        lines = [
            f"the twin's error in the gradient, from the equivalent of {self.trajectories:,.0f} "
            "trajectories",
            f"  {'family':<{room}}  correction / gradient   standard error   chi² per component",
        ]
        for name, rms, error, chi2 in self.rows:
            lines.append(f"  {name:<{room}}  {rms:>21.2%}   {error:>14.2%}   {chi2:>18.2f}")
        return "\n".join(lines)


class Weighed(NamedTuple):
    """Direct part and correction of some trajectories, put together.

    gradient, stderr, variance (P,): the standard error has what is left out in it, the variance is
    that of sampling. worth (E, P): w of every trajectory's correction. sums: what is remembered
    with these trajectories.
    """

    gradient: np.ndarray
    stderr: np.ndarray
    variance: np.ndarray
    worth: np.ndarray
    sums: dict[str, np.ndarray]


def weigh(
    theta: Params,
    sums: Sums,
    direct: np.ndarray,
    correction: np.ndarray,
    forget_after: float,
    loud: float = 1.0,
) -> Weighed:
    """⟨direct⟩ + w⟨correction⟩ with w of other trajectories.

    Args:
        theta: parameters, whose leaves have a w each.
        sums: what is remembered of earlier calls; empty before the first.
        direct: rows (E, P).
        correction: rows (E, P).
        forget_after: calls over which `sums` fade; 1 remembers nothing and takes all of the
            correction.
        loud: how much less than others these trajectories count for `sums`.
    Returns: a `Weighed`.

    """
    count, size = direct.shape
    faded = _fade(sums if sums else _empty(size), 1 - 1 / forget_after)

    def own(rows):
        return _add_batch(faded, direct[rows], correction[rows], loud)

    whole = own(slice(None))
    worth = np.ones_like(correction)
    if forget_after > 1 and count >= FEWEST:
        halves = slice(0, None, 2), slice(1, None, 2)
        for mine, other in (halves, halves[::-1]):
            worth[mine] = _worth(theta, own(other))
    elif forget_after > 1 and sums:
        worth[:] = _worth(theta, faded)
    mixed = direct + worth * correction
    variance = _variance(mixed)
    left = 1 - worth.mean(axis=0)
    c = whole["correction"] / whole["weight"]
    spread = whole["square"] / whole["weight"] ** 2
    stderr = np.sqrt(variance + left**2 * spread) + np.abs(left * c) / COVERS
    return Weighed(mixed.mean(axis=0), stderr, variance, worth, whole)


def _variance(rows: np.ndarray) -> np.ndarray:
    """Of the mean of rows. (P,)"""
    return rows.var(axis=0, ddof=1) / len(rows)


def _fade(sums: Sums, fade: float) -> dict[str, np.ndarray]:
    powers = (fade, fade**2, fade, fade**2, fade)
    return {name: power * sums[name] for name, power in zip(SUMS, powers, strict=True)}


def _add_batch(
    sums: Sums, direct: np.ndarray, correction: np.ndarray, loud: float
) -> dict[str, np.ndarray]:
    """And another batch, which counts by its trajectories."""
    own = len(direct) * loud
    more = (
        own,
        own**2 / len(direct),
        own * correction.mean(axis=0),
        own**2 * _variance(correction),
        own * direct.mean(axis=0),
    )
    return {name: sums[name] + value for name, value in zip(SUMS, more, strict=True)}


def _worth(theta: Params, sums: Sums) -> np.ndarray:
    """(1 − V/|c|²)₊ of each leaf, for every parameter. (P,)"""
    parts = []
    for total, square in zip(
        _leaves(theta, sums["correction"]), _leaves(theta, sums["square"]), strict=True
    ):
        size = np.sum(total**2)  # both times the weight squared
        parts.append(np.full(total.size, max(0.0, 1 - np.sum(square) / size) if size else 1.0))
    return np.concatenate(parts)


class ShrunkCorrection(EstimatorWrapper):
    """An estimator that takes as much of the correction as is resolved: (key, theta, count) ->
    Estimate.

    Args:
        estimator: anything with `split`, such as ppgt(..., baseline=Twin()).
        forget_after: iterations whose steps add up: over so many the correction must be resolved
            to be taken. 1 takes all of it always, the plain unbiased estimator; the more, the
            smaller the bias that is accepted.
        carry: also hand the mean Λ of one iteration to the next as its λ̄; `split` must then take a
            `table`.

    w of each leaf of θ is that of `fluctua.learn.shrunk_correction`: from half of the call's
    trajectories for the other half, and from calls before. What is left out, (1 − w)b, is a bias
    towards the twin's gradient. It is estimated, and the standard error widened by it and by its
    own error, which assumes that θ moved so little within `forget_after` that the mean correction
    did not change by more. Where nothing is known of other trajectories, in a first call of two or
    three, w = 1.

    The second moment is gradient² + count·variance, of one trajectory out of `count`, which is what
    a rule such as `rms_ascent` asks for. It has a state; put it back to go on where another left
    off.

    """

    def __init__(self, estimator: Splits, forget_after: float = 100, *, carry: bool = False):
        if not hasattr(estimator, "split") or (
            isinstance(estimator, PPGT) and estimator.method.twin is None
        ):
            raise TypeError(
                "`ShrunkCorrection` needs an estimator that splits its samples, such as ppgt(..., "
                f"baseline=Twin()); this {type(estimator).__name__} has no `split`."
            )
        if not forget_after >= 1:
            raise ValueError(
                f"`forget_after` is a number of iterations, at least 1; got {forget_after!r}."
            )
        self.estimator = estimator
        self.forget_after = forget_after
        self.carry = carry
        self._state: dict[str, np.ndarray] = {}
        self._like: Params = None

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` new trajectories; earlier ones say how much of their
        correction to take.
        """
        if count < 2:
            raise ValueError(
                "`ShrunkCorrection` needs two trajectories a call, to know their spread; got "
                f"{count}."
            )
        options: dict[str, Any] = (
            {"table": self._state["table"]} if self.carry and "table" in self._state else {}
        )
        samples = self.estimator.split(key, theta, count, **options)
        direct = _rows(samples.direct)
        correction = _rows(samples.correction)
        if self._state and self._state["correction"].shape != direct.shape[1:]:
            raise ValueError(
                f"the state is of {self._state['correction'].size} parameters and θ has "
                f"{direct.shape[1]}. Begin anew with another `ShrunkCorrection`."
            )
        loud = FIRST if self.carry and not options else 1.0
        made = weigh(theta, self._state, direct, correction, self.forget_after, loud)
        self._state = made.sums
        self._like = theta
        if self.carry:
            self._state["table"] = np.asarray(samples.mean_lambda)
        returns = np.asarray(samples.returns, np.float64)

        return Estimate(
            _shape_like(theta, made.gradient),
            _shape_like(theta, made.stderr),
            _shape_like(theta, made.gradient**2 + count * made.variance),
            jnp.asarray(returns.mean(), samples.returns.dtype),
            jnp.asarray(sample_error(returns), samples.returns.dtype),
            count,
        )

    @property
    def certificate(self) -> TwinErrorReport:
        """What the twin misses of the gradient, with its standard error."""
        if not self._state or self._like is None:
            raise ValueError(
                "there is no certificate yet: call the estimator, or `restore(state, theta)`."
            )
        return read_certificate(self._state, self._like)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """All that is remembered, as plain arrays: three numbers a parameter; empty before
        the first call.
        """
        return {name: value.copy() for name, value in self._state.items()}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params = None) -> None:
        """Put a `state` back. theta: any of the parameters it is of, for a `certificate`
        before the next call.
        """
        missing = sorted({*SUMS} - set(state)) if state else []
        if missing:
            raise ValueError(
                "this is not the state of a `ShrunkCorrection`: it has no "
                f"{', '.join(map(repr, missing))}."
            )
        self._state = {name: np.array(state[name]) for name in (*SUMS, "table") if name in state}
        self._like = theta


def read_certificate(state: Mapping[str, np.ndarray], theta: Params) -> TwinErrorReport:
    """What the state of a `ShrunkCorrection` says about its twin. theta: any parameters that the
    state is of.
    """
    w = state["weight"]
    parts = (
        state["correction"] / w,
        np.sqrt(state["square"]) / w,
        (state["correction"] + state["direct"]) / w,
    )
    correction, stderr, gradient = (_split_like(theta, flat) for flat in parts)
    return TwinErrorReport(
        correction, stderr, gradient, float(np.mean(w**2 / state["weight_square"]))
    )


def measure_own_certificate(
    key: Array, estimator: PPGT, theta: Params, count: int
) -> TwinErrorReport:
    """What the twin misses on `count` trajectories of its own: that of its order, not of its
    parameters.

    `estimator` has a `Twin` and runs a simulator, whose start and times are used; the trajectories
    are simulated with the twin's process at the twin's parameters, so nothing is measured. Where it
    agrees with the certificate of the device, nothing shows that the model is wrong.
    """
    method = estimator.method
    substrate = estimator.substrate
    if method.twin is None or not isinstance(substrate, Simulator):
        raise TypeError(
            "`measure_own_certificate` is of an estimator with a `Twin` that runs a simulator."
        )
    twin = method.twin
    assert twin.process is not None
    at = twin.theta or (lambda theta: theta)
    drift, noise, diffusion = twin.process[:3]
    if isinstance(noise, NoiseProduct):
        product = noise.product
        own_noise: Any = NoiseProduct(lambda th, *rest: product(at(th), *rest), noise.width)
    else:

        def own_noise(th, *rest):
            return noise(at(th), *rest)  # type: ignore[misc]

    step = step_at(twin.process.integrator, lambda theta, context: at(theta))
    own = Process(
        lambda th, *rest: drift(at(th), *rest),
        own_noise,
        noiseless=twin.process.noiseless,
        integrator=step,
    )
    run = substrate._replace(recipe=substrate.recipe._replace(process=own))
    model = method.model._replace(process=own)
    alone = PPGT(method._replace(model=model, twin=twin._replace(theta=None, process=own)), run)
    weighted = ShrunkCorrection(alone, forget_after=1)
    weighted(key, theta, count)
    return weighted.certificate


def _leaves(theta: Params, array: np.ndarray) -> list[np.ndarray]:
    """(..., P) leaf by leaf."""
    return np.split(
        array, np.cumsum([np.size(leaf) for leaf in jax.tree.leaves(theta)])[:-1], axis=-1
    )


def _empty(size: int) -> dict[str, np.ndarray]:
    return {name: np.zeros(size) for name in SUMS}


def _rows(tree: Params) -> np.ndarray:
    """Leaves (E, ...) as one matrix (E, P), in double precision: the sums run over many
    iterations.
    """
    return np.concatenate(
        [np.asarray(v, np.float64).reshape(np.shape(v)[0], -1) for v in jax.tree.leaves(tree)], 1
    )


def _split_like(theta: Params, flat: np.ndarray) -> Params:
    """(P,) in the structure of θ, in double precision."""
    leaves, tree = jax.tree.flatten(theta)
    pieces = np.split(flat, np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
    return jax.tree.unflatten(
        tree, [v.reshape(np.shape(leaf)) for v, leaf in zip(pieces, leaves, strict=True)]
    )


def _shape_like(theta: Params, flat: np.ndarray) -> Params:
    """(P,) in the structure and precision of θ."""
    return jax.tree.map(
        lambda v, leaf: jnp.asarray(v, jnp.asarray(leaf).dtype), _split_like(theta, flat), theta
    )


def _row(
    path: Any, c: np.ndarray, error: np.ndarray, g: np.ndarray
) -> tuple[str, float, float, float]:
    name = jax.tree_util.keystr(path, simple=True, separator=".") or "theta"

    def rms(v):
        return float(np.sqrt(np.mean(np.square(v))))

    size = rms(g)
    # a correction that vanishes in every trajectory has no error bar, and is no evidence against
    # the twin
    z = np.divide(c, error, out=np.zeros_like(c), where=error > 0)
    return (
        name,
        rms(c) / size if size else 0.0,
        rms(error) / size if size else 0.0,
        float(np.mean(z**2)),
    )
