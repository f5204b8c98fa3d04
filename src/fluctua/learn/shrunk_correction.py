"""Shrinkage of the twin's correction: all of it where it is resolved, none where it is noise.

With a good twin almost all of the noise is in the correction and almost none of the mean; with a
path that noise leaves at once the correction is nearly everything. A training adds up its steps.
Over the last iterations the mean of w⟨correction⟩ misses (1 − w)b of the gradient and has the
variance w²V, b the mean of the correction and V the variance of its average, so that the mean
square error is least, leaf by leaf, at

    G = ⟨direct⟩ + w⟨correction⟩,   w = b²/(b² + V),   b² ≈ |c|² − V,   that is w = (1 − V/|c|²)₊,

with c the average of the correction over iterations, weights ∝ trajectories · (1 − 1/m)^age, where
m is `forget_after`. c is useful by itself: it is what the twin misses of the gradient, with an
error bar.

Weights are independent of what they weight. w of one half of a call's trajectories comes from the
other half and from earlier calls, so that E[w⟨correction⟩] = E[w] b; and c is not weighted by
1/variance, which for a skewed sample is correlated with its mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params, jit
from fluctua.core.estimate import Estimate, sample_error
from fluctua.core.estimator import PPGT
from fluctua.core.integrators import map_step_parameters
from fluctua.core.process import NoiseProduct, Process
from fluctua.core.protocols import Estimator, EstimatorWrapper
from fluctua.core.simulate import Simulator
from fluctua.core.twin.correction import TwinSamples
from fluctua.learn.belief import unflatten_like

SUMS = ("weight", "weight_square", "correction", "square", "direct")
"""Entries of the state: Σw, Σw²/count, and of each parameter Σw⟨c⟩, Σw²Var⟨c⟩, Σw⟨d⟩."""

FIRST = 1e-3
"""Weight of a first call without the λ̄ of an earlier one, which has much more noise than the next.
"""

MIN_SPLIT = 4
"""Minimum number of trajectories per call for two halves that each have a spread."""

COVERS = 1.96
"""Standard errors on either side of a 95 % interval."""

Sums = Mapping[str, np.ndarray]


class Splits(Estimator, Protocol):
    """An estimator that returns its samples in two parts, as `ppgt(..., baseline=Twin())` does."""

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples: ...


class TwinErrorReport(NamedTuple):
    """Error of the twin in the gradient: its mean correction over recent iterations.

    Prints one line per family with three numbers. rms: √⟨c²⟩/√⟨G²⟩, the correction relative to the
    gradient. error: the same of the standard errors, the resolution. chi²: ⟨(c/stderr)²⟩, about 1
    where the twin misses nothing that is resolved.

    A large chi² means that the expansion V misses something, not that the twin's parameters are
    wrong. A linear expansion (`Twin(order=1)`) misses what noise adds to the return even where
    every parameter is exact. `measure_own_certificate` reports that part alone, from trajectories
    of the twin itself; the rest is the error of the model.

    correction, stderr: mean correction, leaf by leaf, and its standard error.
    gradient: of the same iterations, to compare with.
    trajectories: equivalent number of equally weighted trajectories.
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
        return [_summarise_leaf(path, c, error, g) for (path, c), error, g in rest]

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


class CombinedGradient(NamedTuple):
    """Direct part and weighted correction of some trajectories.

    gradient: (P,).
    stderr: (P,), including what is left out.
    variance: (P,), of sampling alone.
    weight: w of every trajectory's correction (E, P).
    sums: the state with these trajectories.
    """

    gradient: np.ndarray
    stderr: np.ndarray
    variance: np.ndarray
    weight: Array
    sums: dict[str, np.ndarray]


def combine_parts(
    theta: Params,
    sums: Sums,
    direct: Array,
    correction: Array,
    forget_after: float,
    loudness: float = 1.0,
) -> CombinedGradient:
    """Compute ⟨direct⟩ + w⟨correction⟩ with weights w from other trajectories.

    Args:
        theta: parameters, whose leaves have a w each.
        sums: state of earlier calls; empty before the first.
        direct: rows (E, P), of NumPy, or of JAX to add them up on their device.
        correction: rows (E, P).
        forget_after: calls over which `sums` fade; 1 keeps nothing and takes all of the
            correction.
        loudness: factor by which these trajectories count less than others in `sums`.

    Returns: a `CombinedGradient`.
    """
    count, size = direct.shape
    faded = _fade(sums if sums else _zero_sums(size), 1 - 1 / forget_after)

    def sum_with(first: int, stride: int) -> dict[str, np.ndarray]:
        moments = _measure(direct, correction, first, stride)
        return _add_batch(faded, moments, len(range(first, count, stride)), loudness)

    summed = sum_with(0, 1)
    pair = np.ones((2, size))  # of even and odd trajectories
    if forget_after > 1 and count >= MIN_SPLIT:
        for half in (0, 1):
            pair[half] = _shrinkage_weights(theta, sum_with(1 - half, 2))
    elif forget_after > 1 and sums:
        pair[:] = _shrinkage_weights(theta, faded)
    weight, gradient, variance = _mix(direct, correction, pair)
    even = len(range(0, count, 2)) / count
    left = 1 - (even * pair[0] + (1 - even) * pair[1])
    c = summed["correction"] / summed["weight"]
    spread = summed["square"] / summed["weight"] ** 2
    stderr = np.sqrt(variance + left**2 * spread) + np.abs(left * c) / COVERS
    return CombinedGradient(gradient, stderr, variance, weight, summed)


class _Moments(NamedTuple):
    """Mean of direct parts and corrections, and the variance of the latter mean. (P,) each"""

    direct: Array
    correction: Array
    variance: Array


def _measure(direct: Array, correction: Array, first: int, stride: int) -> _Moments:
    """Moments of every `stride`-th row from `first` on, added up where the rows are."""
    measure = _measure_compiled if isinstance(direct, jax.Array) else _measure_rows
    return _Moments(
        *(np.asarray(v, np.float64) for v in measure(direct, correction, first, stride))
    )


def _measure_rows(direct: Array, correction: Array, first: int, stride: int) -> _Moments:
    some = correction[first::stride]
    return _Moments(direct[first::stride].mean(axis=0), some.mean(axis=0), _estimate_variance(some))


_measure_compiled = jit(_measure_rows, static_argnums=(2, 3))


class _Mixed(NamedTuple):
    """Weights of all rows (E, P); mean of direct + weight·correction and its variance. (P,)"""

    weight: Array
    mean: Array
    variance: Array


def _mix(direct: Array, correction: Array, pair: np.ndarray) -> _Mixed:
    """Mix rows with the weights (2, P) of even and odd ones."""
    if not isinstance(direct, jax.Array):
        return _mix_rows(direct, correction, pair)
    mixed = _mix_compiled(direct, correction, jnp.asarray(pair, direct.dtype))
    moments = (np.asarray(v, np.float64) for v in (mixed.mean, mixed.variance))
    return _Mixed(mixed.weight, *moments)


def _mix_rows(direct: Array, correction: Array, pair: Array) -> _Mixed:
    weight = pair[np.arange(len(direct)) % 2]
    mixed = direct + weight * correction
    return _Mixed(weight, mixed.mean(axis=0), _estimate_variance(mixed))


_mix_compiled = jit(_mix_rows)


def _estimate_variance(rows: Array) -> Array:
    """Variance of the mean of rows. Shape (P,)."""
    return rows.var(axis=0, ddof=1) / len(rows)


def _fade(sums: Sums, fade: float) -> dict[str, np.ndarray]:
    powers = (fade, fade**2, fade, fade**2, fade)
    return {name: power * sums[name] for name, power in zip(SUMS, powers, strict=True)}


def _add_batch(sums: Sums, moments: _Moments, count: int, loudness: float) -> dict[str, np.ndarray]:
    """The sums with another batch, weighted by its trajectories."""
    weight = count * loudness
    more = (
        weight,
        weight**2 / count,
        weight * moments.correction,
        weight**2 * moments.variance,
        weight * moments.direct,
    )
    return {name: sums[name] + value for name, value in zip(SUMS, more, strict=True)}


def _shrinkage_weights(theta: Params, sums: Sums) -> np.ndarray:
    """w = (1 − V/|c|²)₊ of each leaf, for every parameter. Shape (P,)."""
    parts = []
    for total, square in zip(
        _split_leaves(theta, sums["correction"]), _split_leaves(theta, sums["square"]), strict=True
    ):
        size = np.sum(total**2)  # both times the weight squared
        parts.append(np.full(total.size, max(0.0, 1 - np.sum(square) / size) if size else 1.0))
    return np.concatenate(parts)


class ShrunkCorrection(EstimatorWrapper):
    """An estimator that takes as much of the twin's correction as is resolved.

    Args:
        estimator: anything with `split`, such as ppgt(..., baseline=Twin()).
        forget_after: iterations whose steps add up: over so many the correction must be resolved to
            be taken. 1 always takes all of it, the plain unbiased estimator; a larger number
            accepts a smaller bias.
        carry: also use the mean Λ of one iteration as λ̄ of the next; `split` must then take a
            `table`.

    w of each leaf of θ comes from half of the call's trajectories for the other half, and from
    earlier calls (`fluctua.learn.shrunk_correction`). What is left out, (1 − w)b, is a bias towards
    the twin's gradient. It is estimated, and the standard error widened by it and by its own error,
    which assumes that θ moved so little within `forget_after` that the mean correction did not
    change by more. In a first call of two or three trajectories, w = 1.

    The second moment is gradient² + count·variance, of one trajectory out of `count`, as
    `rms_ascent` needs it. The estimator has a state; restore it to continue.

    >>> twin = fl.ppgt(simulator, objective, baseline=fl.Twin())
    >>> shrunk = fl.ShrunkCorrection(twin, forget_after=50)
    >>> shrunk(key, theta, 200).count
    200
    >>> training = fl.Training(shrunk, theta, optax.adam(0.05), trajectories=20, bounds=(0.1, 2.0))
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
        """Estimate ∇θJ from `count` new trajectories, correction weighted by earlier ones."""
        if count < 2:
            raise ValueError(
                "`ShrunkCorrection` needs two trajectories per call, to know their spread; got "
                f"{count}."
            )
        options: dict[str, Any] = (
            {"table": self._state["table"]} if self.carry and "table" in self._state else {}
        )
        samples = self.estimator.split(key, theta, count, **options)
        direct = _stack_rows(samples.direct)
        correction = _stack_rows(samples.correction)
        if self._state and self._state["correction"].shape != direct.shape[1:]:
            raise ValueError(
                f"the state is of {self._state['correction'].size} parameters and θ has "
                f"{direct.shape[1]}. Make another `ShrunkCorrection`."
            )
        loudness = FIRST if self.carry and not options else 1.0
        combined = combine_parts(
            theta, self._state, direct, correction, self.forget_after, loudness
        )
        self._state = combined.sums
        self._like = theta
        if self.carry:
            self._state["table"] = np.asarray(samples.mean_lambda)
        returns = np.asarray(samples.returns, np.float64)

        return Estimate(
            _shape_like(theta, combined.gradient),
            _shape_like(theta, combined.stderr),
            _shape_like(theta, combined.gradient**2 + count * combined.variance),
            jnp.asarray(returns.mean(), samples.returns.dtype),
            jnp.asarray(sample_error(returns), samples.returns.dtype),
            count,
        )

    @property
    def certificate(self) -> TwinErrorReport:
        """Error of the twin in the gradient, with its standard error."""
        if not self._state or self._like is None:
            raise ValueError(
                "there is no certificate yet: call the estimator, or `restore(state, theta)`."
            )
        return read_certificate(self._state, self._like)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The state as plain arrays, three numbers per parameter; empty before the first call."""
        return {name: value.copy() for name, value in self._state.items()}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params = None) -> None:
        """Restore a `state`. theta: parameters like those of the state, for `certificate`."""
        missing = sorted({*SUMS} - set(state)) if state else []
        if missing:
            raise ValueError(
                "this is not the state of a `ShrunkCorrection`: it has no "
                f"{', '.join(map(repr, missing))}."
            )
        self._state = {name: np.array(state[name]) for name in (*SUMS, "table") if name in state}
        self._like = theta


def read_certificate(state: Mapping[str, np.ndarray], theta: Params) -> TwinErrorReport:
    """The error report of a twin from the state of a `ShrunkCorrection`. theta: any parameters."""
    w = state["weight"]
    parts = (
        state["correction"] / w,
        np.sqrt(state["square"]) / w,
        (state["correction"] + state["direct"]) / w,
    )
    correction, stderr, gradient = (unflatten_like(theta, flat) for flat in parts)
    return TwinErrorReport(
        correction, stderr, gradient, float(np.mean(w**2 / state["weight_square"]))
    )


def measure_own_certificate(
    key: Array, estimator: PPGT, theta: Params, count: int
) -> TwinErrorReport:
    """Error of the twin on `count` trajectories of its own: that of its order alone.

    `estimator` has a `Twin` and runs a simulator, whose start and times are used; the trajectories
    are simulated with the twin's process at the twin's parameters, so nothing is measured. Where
    the result agrees with the certificate of the device, there is no evidence of an error of the
    model.
    """
    method = estimator.method
    substrate = estimator.substrate
    if method.twin is None or not isinstance(substrate, Simulator):
        raise TypeError(
            "`measure_own_certificate` needs an estimator with a `Twin` and a simulator."
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

    step = map_step_parameters(twin.process.integrator, lambda theta, context: at(theta))
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


def _split_leaves(theta: Params, array: np.ndarray) -> list[np.ndarray]:
    """Split (..., P) leaf by leaf."""
    return np.split(
        array, np.cumsum([np.size(leaf) for leaf in jax.tree.leaves(theta)])[:-1], axis=-1
    )


def _zero_sums(size: int) -> dict[str, np.ndarray]:
    return {name: np.zeros(size) for name in SUMS}


def _stack_rows(tree: Params) -> Array:
    """Leaves (E, ...) as one matrix (E, P).

    In double precision, for sums over many iterations. Those on an accelerator stay there, in their
    own precision: copying them to the host takes longer than computing them.
    """
    leaves = jax.tree.leaves(tree)
    if all(isinstance(v, jax.Array) and _is_accelerated(v) for v in leaves):
        return jnp.concatenate([v.reshape(v.shape[0], -1) for v in leaves], 1)
    return np.concatenate(
        [np.asarray(v, np.float64).reshape(np.shape(v)[0], -1) for v in leaves], 1
    )


def _is_accelerated(array: jax.Array) -> bool:
    return all(device.platform != "cpu" for device in array.devices())


def _shape_like(theta: Params, flat: np.ndarray) -> Params:
    """(P,) in the structure and precision of θ."""
    return jax.tree.map(
        lambda v, leaf: jnp.asarray(v, jnp.asarray(leaf).dtype), unflatten_like(theta, flat), theta
    )


def _summarise_leaf(
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
