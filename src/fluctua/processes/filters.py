"""Coloured noise and filtered rewards, by adding components to the state.

**Colour.** White noise dW is replaced by η dt, with dη = −η/τ dt + dW/τ: an Ornstein–Uhlenbeck
process of correlation time τ that tends to white noise as τ → 0. With (X, η) for a state the
parameters of the drift would enter a row without noise, where there is no score. With the velocity
V = μ(X) + σ(X)η instead of η they enter the noisy row:

    dX = V dt,      dV = [(V·∂x + ∂t)(μ + ση) − (V − μ)/τ] dt + (σ/τ) dW,

with η = (V − μ)/σ held fixed inside (…).

With η₀ drawn from its stationary law N(0, 1/2τ), the start V₀ = μ(X₀) + σ(X₀)η₀ has a density that
depends on θ.

**Filters.** A reward that is seen through a filter, dy = (Ay + Bg(X))dt, is a reward of the state
(X, y).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.draws import Density, Reparameterised, Start
from fluctua.core.integrators import require_euler
from fluctua.core.objective import Objective
from fluctua.core.process import NoiseProduct, Process

__all__ = [
    "Filter",
    "coloured",
    "filtered",
    "linear_filter",
    "lock_in",
    "low_pass",
    "moving_average",
]


class Coloured(NamedTuple):
    """A process with coloured noise and its start, for `simulator(process, start, t)`.

    process: of the state (X, V), (2M,); rewards that index X need no change.
    start: X₀ with a velocity drawn from its stationary law.
    """

    process: Process
    start: Density


def coloured(process: Process, start: Array, *, tau: float) -> Coloured:
    """Replace the white noise of a process by noise with a correlation time.

    Args:
        process: an Itô process whose noise is one amplitude per component; components with
            amplitude 0 stay noiseless.
        start: X₀ (M,).
        tau: correlation time of the noise.

    Returns: a `Coloured`.

    >>> red = fl.filters.coloured(process, start=jnp.ones(1), tau=0.1)
    >>> simulator = fl.simulator(red.process, red.start, t)  # the state has a velocity too
    >>> simulator(key, theta, 5).x.shape
    (5, 101, 2)
    """
    tau = _check_positive("tau", tau)
    checked = check.process(process)
    if (
        not isinstance(checked, Process)
        or checked.noise is None
        or isinstance(checked.noise, NoiseProduct)
    ):
        raise ValueError(
            "coloured noise needs a `Process` whose `noise` is one amplitude per component, (M,)."
        )
    require_euler(
        checked,
        "coloured noise",
        "Leave `integrator` off, or set it on the process that this returns.",
    )
    x0 = jnp.asarray(start, jnp.result_type(float, jnp.asarray(start).dtype))
    if x0.ndim != 1:
        raise ValueError(f"`start` must be one state (M,); got shape {x0.shape}.")
    rows = _ColouredRows(checked.drift, checked.noise, tau)
    return Coloured(
        Process(rows.drift, rows.noise),
        Density(_StartDensity(rows), _StartSample(rows, tuple(x0.tolist()))),
    )


@dataclass(frozen=True)
class _ColouredRows:
    """Drift and noise of (X, V)."""

    mu: Callable[..., Array]
    sigma: Callable[..., Array]
    tau: float

    def evaluate(self, theta: Params, x: Array, t: Array, context: PyTree) -> tuple[Array, Array]:
        mu = self.mu(theta, x, t, context)
        sigma = self.sigma(theta, x, t, context)
        if jnp.shape(sigma) != jnp.shape(mu):
            raise ValueError(
                f"coloured noise is one amplitude per component, {jnp.shape(mu)}; `noise` has "
                f"shape {jnp.shape(sigma)}."
            )
        return mu, sigma

    def drift(self, theta: Params, state: Array, t: Array, context: PyTree) -> Array:
        x, v = jnp.split(state, 2)
        t = jnp.asarray(t, x.dtype)
        mu, sigma = self.evaluate(theta, x, t, context)
        noisy = sigma != 0
        v = jnp.where(noisy, v, mu)
        eta = jnp.where(noisy, (v - mu) / jnp.where(noisy, sigma, 1), 0)

        def velocity(x: Array, t: Array) -> Array:
            mu, sigma = self.evaluate(theta, x, t, context)
            return mu + sigma * eta

        along = jax.jvp(velocity, (x, t), (v, jnp.ones_like(t)))[1]
        return jnp.concatenate([v, jnp.where(noisy, along - (v - mu) / self.tau, 0)])

    def noise(self, theta: Params, state: Array, t: Array, context: PyTree) -> Array:
        x, _ = jnp.split(state, 2)
        _, sigma = self.evaluate(theta, x, jnp.asarray(t, x.dtype), context)
        return jnp.concatenate([jnp.zeros_like(sigma), sigma / self.tau])


@dataclass(frozen=True)
class _StartDensity:
    """ln N(V₀; μ(X₀), σ²/2τ) over the components that have noise."""

    rows: _ColouredRows

    def __call__(self, theta: Params, state: Array, context: PyTree) -> Array:
        x, v = jnp.split(state, 2)
        mu, sigma = self.rows.evaluate(theta, x, jnp.zeros((), x.dtype), context)
        noisy = sigma != 0
        scale = jnp.where(noisy, sigma, 1)
        log_density = -(((v - mu) / scale) ** 2) * self.rows.tau - jnp.log(jnp.abs(scale))
        return jnp.sum(jnp.where(noisy, log_density, 0))


@dataclass(frozen=True)
class _StartSample:
    """Draw (X₀, V₀)."""

    rows: _ColouredRows
    x0: tuple[float, ...]

    def __call__(self, key: Array, theta: Params, context: PyTree) -> Array:
        x = jnp.asarray(self.x0)
        mu, sigma = self.rows.evaluate(theta, x, jnp.zeros((), x.dtype), context)
        eta = jax.random.normal(key, x.shape, x.dtype) / np.sqrt(2 * self.rows.tau)
        return jnp.concatenate([x, jnp.where(sigma != 0, mu + sigma * eta, 0)])


# ------------------------------------------------------------------------------------------ filters


class Filter(NamedTuple):
    """A filter of one signal g, with a state y that starts at 0.

    size: number of components of y.
    change: (y, g, t) -> ẏ (size,).
    output: (y, g, t) -> the filtered signal, a number.

    >>> own = fl.filters.Filter(  # a detector that saturates
    ...     size=1,
    ...     change=lambda y, g, t: jnp.array([g - y[0]]) / 0.1,
    ...     output=lambda y, g, t: jnp.tanh(y[0]),
    ... )
    >>> behind = fl.filters.filtered(process, objective, start=jnp.ones(1), filter=own)
    """

    size: int
    change: Callable[[Array, Array, Array], Array]
    output: Callable[[Array, Array, Array], Array]


def linear_filter(system: Any) -> Filter:
    """A filter from (A, B, C, D), (numerator, denominator) or an `lti` object of `scipy.signal`.

    `scipy.signal.butter(2, 2 * np.pi * cutoff, analog=True)` gives a Butterworth low-pass of
    continuous time.

    Args:
        system: the filter in one of these forms, of continuous time.

    Returns: the filter.

    >>> import scipy.signal
    >>> butterworth = fl.filters.linear_filter(scipy.signal.butter(2, 2 * np.pi * 5.0, analog=True))
    >>> butterworth.size
    2
    """
    try:
        if not isinstance(system, tuple):
            space = system.to_ss()
        elif len(system) == 2:
            space = scipy.signal.TransferFunction(*system).to_ss()
        else:
            space = scipy.signal.StateSpace(*system)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"a filter is (A, B, C, D), (numerator, denominator) or a scipy.signal system: {error}."
        ) from None
    if getattr(space, "dt", None) is not None:
        raise ValueError(
            "the filter has discrete time; it must have continuous time (`analog=True`)."
        )
    a, b, c, d = (np.asarray(matrix, float) for matrix in (space.A, space.B, space.C, space.D))
    if b.shape[1] != 1 or c.shape[0] != 1:
        raise ValueError(
            "a reward is one number: the filter must have one input and one output, not "
            f"{d.shape[::-1]}."
        )
    growth = np.linalg.eigvals(a).real.max() if a.size else -1.0
    if growth >= 0:
        raise ValueError(
            f"the filter is unstable: an eigenvalue of A has the real part {growth:.3g}, not below "
            "zero."
        )
    return Filter(
        len(a),
        lambda y, g, t: jnp.asarray(a) @ y + b[:, 0] * g,
        lambda y, g, t: jnp.asarray(c[0]) @ y + d[0, 0] * g,
    )


def low_pass(tau: float) -> Filter:
    """A low-pass of first order, ẏ = (g − y)/τ.

    For a detector or an amplifier with one time constant.

    Args:
        tau: τ, the time constant.

    Returns: the filter.

    >>> detector = fl.filters.low_pass(tau=0.2)
    >>> behind = fl.filters.filtered(process, objective, start=jnp.ones(1), filter=detector)
    """
    return linear_filter(([1.0], [_check_positive("tau", tau), 1.0]))


def lock_in(frequency: float, tau: float) -> Filter:
    """A lock-in amplifier: g times 2cos ωt and 2sin ωt, each through a low-pass τ.

    Args:
        frequency: ω, an angular frequency.
        tau: τ, the time constant of both low-passes.

    Returns: the filter, which shows X² + Y².

    >>> amplifier = fl.filters.lock_in(frequency=20.0, tau=0.3)
    >>> behind = fl.filters.filtered(process, objective, start=jnp.ones(1), filter=amplifier)
    """
    omega = 2 * np.pi * frequency
    tau = _check_positive("tau", tau)

    def reference(t):
        return jnp.array([2 * jnp.cos(omega * t), 2 * jnp.sin(omega * t)])

    return Filter(2, lambda y, g, t: (reference(t) * g - y) / tau, lambda y, g, t: jnp.sum(y**2))


def moving_average(window: float, dt: float) -> Filter:
    """The mean of g over the last `window`, exact on a grid: a delay line of window/dt components.

    Args:
        window: time over which g is averaged.
        dt: step of the grid, which divides the window.

    Returns: the filter.

    >>> boxcar = fl.filters.moving_average(window=0.05, dt=0.01)
    >>> boxcar.size  # components of the delay line
    5
    """
    taps = round(_check_positive("window", window) / _check_positive("dt", dt))
    if taps < 1 or abs(taps * dt / window - 1) > 1e-6:
        raise ValueError(
            f"`window` must be a whole number of steps `dt`; got {window} / {dt} = {window / dt:g}."
        )

    def change(y: Array, g: Array, t: Array) -> Array:
        newest = jnp.reshape(g, (1,)).astype(y.dtype)
        return (jnp.concatenate([newest, y[:-1]]) - y) / dt  # an Euler step shifts by one tap

    return Filter(taps, change, lambda y, g, t: jnp.mean(y))


class Filtered(NamedTuple):
    """A process that carries the state of a filter, made by `filtered`.

    process: of the state (x, y), y being that of the filter.
    objective: its running reward is the output of the filter.
    start: of the process, with y = 0.
    """

    process: Process
    objective: Objective
    start: Start


def filtered(
    process: Process, objective: Objective, start: Start, filter: Filter | Any
) -> Filtered:
    """Pass the running reward of an objective through a filter.

    Args:
        process: an Itô process.
        objective: its `running` reward goes through the filter and must not depend on θ; its other
            rewards stay.
        start: of the process.
        filter: a `Filter`, or an argument of `linear_filter`.

    Returns: a `Filtered`, for `simulator(filtered.process, filtered.start, t)` and `ppgt`.

    >>> behind = fl.filters.filtered(process, objective, jnp.ones(1), fl.filters.low_pass(0.2))
    >>> simulator = fl.simulator(behind.process, behind.start, t)
    >>> estimate = fl.ppgt(simulator, behind.objective)(key, theta, 50)
    """
    checked = check.process(process)
    rewards = check.objective(objective)
    if (
        not isinstance(checked, Process)
        or checked.noise is None
        or isinstance(checked.noise, NoiseProduct)
    ):
        raise ValueError("a filter is added to a `Process` whose `noise` is (M,) or (M, W).")
    require_euler(
        checked, "a filter", "Leave `integrator` off, or set it on the process that this returns."
    )
    if objective.running is None:
        raise ValueError("a filter acts on the `running` reward, and this objective has none.")
    chain = filter if isinstance(filter, Filter) else linear_filter(filter)
    rows = _Filtered(checked.drift, checked.noise, rewards.running, chain)

    def adapt(reward, states):
        return None if reward is None else _RewardWithoutFilter(reward, chain.size, states)

    seen = Objective(
        rows.running,
        None if objective.terminal is None else adapt(rewards.terminal, 1),
        adapt(rewards.per_step, 2),
        adapt(rewards.initial, 1),
    )
    return Filtered(Process(rows.drift, rows.noise), seen, _append_zeros(start, chain.size))


@dataclass(frozen=True)
class _RewardWithoutFilter:
    """A reward of the process alone, given states with `size` components of a filter at their end.

    states: number of arguments after θ that are states.
    """

    reward: Callable[..., Array]
    size: int
    states: int

    def __call__(self, theta: Params, *rest: Any) -> Array:
        own = (x[: x.size - self.size] for x in rest[: self.states])
        return self.reward(theta, *own, *rest[self.states :])


@dataclass(frozen=True)
class _Filtered:
    mu: Callable[..., Array]
    sigma: Callable[..., Array]
    reward: Callable[..., Array]
    filter: Filter

    def _split(self, state: Array) -> tuple[Array, Array]:
        return state[: state.size - self.filter.size], state[state.size - self.filter.size :]

    def drift(self, theta: Params, state: Array, t: Array, context: PyTree) -> Array:
        x, y = self._split(state)
        change = self.filter.change(y, self.reward(theta, x, t, context), t)
        return jnp.concatenate([self.mu(theta, x, t, context), change.astype(x.dtype)])

    def noise(self, theta: Params, state: Array, t: Array, context: PyTree) -> Array:
        x, y = self._split(state)
        sigma = self.sigma(theta, x, t, context)
        return jnp.concatenate([sigma, jnp.zeros((y.size, *jnp.shape(sigma)[1:]), x.dtype)])

    def running(self, theta: Params, state: Array, t: Array, context: PyTree) -> Array:
        x, y = self._split(state)
        return self.filter.output(y, self.reward(theta, x, t, context), t)


def _append_zeros(start: Start, size: int) -> Start:
    """Append `size` zeros to a start."""

    def append(x):
        return jnp.concatenate([x, jnp.zeros(size, x.dtype)])

    if isinstance(start, Reparameterised):
        x0 = check.drop_extra_arguments(start.x0, 2)
        return Reparameterised(lambda theta, context: append(x0(theta, context)), start.fade)
    if isinstance(start, Density):
        density = check.drop_extra_arguments(start.log_density, 3)
        sample = start.sample
        draw = None if sample is None else check.drop_extra_arguments(sample, 3)
        return Density(
            lambda theta, x, context: density(theta, x[: x.size - size], context),
            None if draw is None else lambda key, theta, context: append(draw(key, theta, context)),
        )
    return append(jnp.asarray(start, jnp.result_type(float, jnp.asarray(start).dtype)))


def _check_positive(name: str, value: float) -> float:
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"`{name}` must be a positive number; got {value!r}.")
    return float(value)
