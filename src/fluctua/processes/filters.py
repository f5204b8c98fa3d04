"""Coloured noise and filtered rewards, by adding components to the state.

**Colour.** White noise dW is replaced by η dt, with dη = −η/τ dt + dW/τ: an Ornstein–Uhlenbeck
process of correlation time τ that tends to white noise as τ → 0. With (X, η) for a state the
parameters of the drift would enter a row without noise, where there is no score. With the velocity
V = μ(X) + σ(X)η instead of η they enter the noisy row:

    dX = V dt,      dV = [(V·∂x + ∂t)(μ + ση) − (V − μ)/τ] dt + (σ/τ) dW,      η = (V − μ)/σ held
    fixed inside (…).

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
from fluctua.core.integrators import refuse_step
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

    The state is (X, V), (2M,): rewards that index X find it where it was.
    """

    process: Process
    start: Density


def coloured(process: Process, start: Array, *, tau: float) -> Coloured:
    """`process` with noise that has a correlation time.

    Args:
        process: an Itô process whose noise is one amplitude per component; components with
            amplitude 0 stay silent.
        start: X₀ (M,).
        tau: correlation time of the noise.

    Returns: a `Coloured`.

    """
    tau = _positive("tau", tau)
    checked = check.process(process)
    if (
        not isinstance(checked, Process)
        or checked.noise is None
        or isinstance(checked.noise, NoiseProduct)
    ):
        raise ValueError(
            "coloured noise needs a `Process` whose `noise` is one amplitude per component, (M,)."
        )
    refuse_step(
        checked,
        "coloured noise",
        "Leave `integrator` off, or set it on the process that this returns.",
    )
    x0 = jnp.asarray(start, jnp.result_type(float, jnp.asarray(start).dtype))
    if x0.ndim != 1:
        raise ValueError(f"`start` must be one state (M,); got shape {x0.shape}.")
    rows = _Coloured(checked.drift, checked.noise, tau)
    return Coloured(
        Process(rows.drift, rows.noise),
        Density(_StartDensity(rows), _StartSample(rows, tuple(x0.tolist()))),
    )


@dataclass(frozen=True)
class _Coloured:
    mu: Callable[..., Array]
    sigma: Callable[..., Array]
    tau: float

    def at(self, theta: Params, x: Array, t: Array, context: PyTree) -> tuple[Array, Array]:
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
        mu, sigma = self.at(theta, x, t, context)
        noisy = sigma != 0
        v = jnp.where(noisy, v, mu)
        eta = jnp.where(noisy, (v - mu) / jnp.where(noisy, sigma, 1), 0)

        def velocity(x: Array, t: Array) -> Array:
            mu, sigma = self.at(theta, x, t, context)
            return mu + sigma * eta

        along = jax.jvp(velocity, (x, t), (v, jnp.ones_like(t)))[1]
        return jnp.concatenate([v, jnp.where(noisy, along - (v - mu) / self.tau, 0)])

    def noise(self, theta: Params, state: Array, t: Array, context: PyTree) -> Array:
        x, _ = jnp.split(state, 2)
        _, sigma = self.at(theta, x, jnp.asarray(t, x.dtype), context)
        return jnp.concatenate([jnp.zeros_like(sigma), sigma / self.tau])


@dataclass(frozen=True)
class _StartDensity:
    """ln N(V₀; μ(X₀), σ²/2τ) over the components that have noise."""

    rows: _Coloured

    def __call__(self, theta: Params, state: Array, context: PyTree) -> Array:
        x, v = jnp.split(state, 2)
        mu, sigma = self.rows.at(theta, x, jnp.zeros((), x.dtype), context)
        noisy = sigma != 0
        scale = jnp.where(noisy, sigma, 1)
        return jnp.sum(
            jnp.where(
                noisy, -(((v - mu) / scale) ** 2) * self.rows.tau - jnp.log(jnp.abs(scale)), 0
            )
        )


@dataclass(frozen=True)
class _StartSample:
    rows: _Coloured
    x0: tuple[float, ...]

    def __call__(self, key: Array, theta: Params, context: PyTree) -> Array:
        x = jnp.asarray(self.x0)
        mu, sigma = self.rows.at(theta, x, jnp.zeros((), x.dtype), context)
        eta = jax.random.normal(key, x.shape, x.dtype) / np.sqrt(2 * self.rows.tau)
        return jnp.concatenate([x, jnp.where(sigma != 0, mu + sigma * eta, 0)])


# ------------------------------------------------------------------------------------------ filters


class Filter(NamedTuple):
    """ẏ = change(y, g, t), seen as output(y, g, t), from y = 0. size: of y."""

    size: int
    change: Callable[[Array, Array, Array], Array]
    output: Callable[[Array, Array, Array], Array]


def linear_filter(system: Any) -> Filter:
    """A filter from state space or `scipy.signal`: (A, B, C, D), (numerator, denominator), or an
    `lti` object.

    `scipy.signal.butter(2, 2 * np.pi * cutoff, analog=True)` gives a Butterworth low-pass of
    continuous time.
    """
    try:
        if isinstance(system, tuple) and len(system) == 2:
            space = scipy.signal.TransferFunction(*system).to_ss()
        else:
            space = (
                scipy.signal.StateSpace(*system) if isinstance(system, tuple) else system.to_ss()
            )
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"a filter is (A, B, C, D), (numerator, denominator) or a scipy.signal system: {error}."
        ) from None
    if getattr(space, "dt", None) is not None:
        raise ValueError(
            "the filter is of discrete time; give one of continuous time (`analog=True`)."
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
    """ẏ = (g − y)/τ."""
    return linear_filter(([1.0], [_positive("tau", tau), 1.0]))


def lock_in(frequency: float, tau: float) -> Filter:
    """A lock-in amplifier: g times 2cos ωt and 2sin ωt, each through a low-pass τ.

    Args:
        frequency: ω, an angular frequency.
        tau: τ, the time constant of both low-passes.

    Returns: the filter, which shows X² + Y².
    """
    omega = 2 * np.pi * frequency
    tau = _positive("tau", tau)

    def reference(t):
        return jnp.array([2 * jnp.cos(omega * t), 2 * jnp.sin(omega * t)])

    return Filter(2, lambda y, g, t: (reference(t) * g - y) / tau, lambda y, g, t: jnp.sum(y**2))


def moving_average(window: float, dt: float) -> Filter:
    """The mean of g over the last `window`, exact on a grid: a delay line of window/dt components.

    Args:
        window: time over which g is averaged.
        dt: step of the grid, which divides the window.

    Returns: the filter.
    """
    taps = round(_positive("window", window) / _positive("dt", dt))
    if taps < 1 or abs(taps * dt / window - 1) > 1e-6:
        raise ValueError(
            f"`window` must be a whole number of steps `dt`; got {window} / {dt} = {window / dt:g}."
        )
    return Filter(
        taps,
        lambda y, g, t: (
            (jnp.concatenate([jnp.reshape(g, (1,)).astype(y.dtype), y[:-1]]) - y) / dt
        ),  # Euler moves it by one
        lambda y, g, t: jnp.mean(y),
    )


class Filtered(NamedTuple):
    """A process with the filter's state behind its own, the reward as the filter shows it, and
    the start with y = 0.
    """

    process: Process
    objective: Objective
    start: Start


def filtered(
    process: Process, objective: Objective, start: Start, filter: Filter | Any
) -> Filtered:
    """The running reward of `objective` seen through a filter.

    Args:
        process: an Itô process.
        objective: its `running` reward goes through the filter and must not depend on θ; the others
            stay.
        start: of the process.
        filter: a `Filter`, or what `linear_filter` takes.

    Returns: a `Filtered`, for `simulator(filtered.process, filtered.start, t)` and `ppgt`.

    """
    checked = check.process(process)
    rewards = check.objective(objective)
    if (
        not isinstance(checked, Process)
        or checked.noise is None
        or isinstance(checked.noise, NoiseProduct)
    ):
        raise ValueError("a filter is added to a `Process` whose `noise` is (M,) or (M, W).")
    refuse_step(
        checked, "a filter", "Leave `integrator` off, or set it on the process that this returns."
    )
    if objective.running is None:
        raise ValueError("a filter acts on the `running` reward, and this objective has none.")
    through = filter if isinstance(filter, Filter) else linear_filter(filter)
    rows = _Filtered(checked.drift, checked.noise, rewards.running, through)

    def own(reward, states):
        return None if reward is None else _OfOwnState(reward, through.size, states)

    seen = Objective(
        rows.running,
        None if objective.terminal is None else own(rewards.terminal, 1),
        own(rewards.per_step, 2),
        own(rewards.initial, 1),
    )
    return Filtered(Process(rows.drift, rows.noise), seen, _longer(start, through.size))


@dataclass(frozen=True)
class _OfOwnState:
    """A reward of the state without the `size` components of the filter. states: its arguments
    after θ that are.
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


def _longer(start: Start, size: int) -> Start:
    """The start with `size` zeros behind it."""

    def silence(x):
        return jnp.concatenate([x, jnp.zeros(size, x.dtype)])

    if isinstance(start, Reparameterised):
        x0 = check.leading(start.x0, 2)
        return Reparameterised(lambda theta, context: silence(x0(theta, context)), start.fade)
    if isinstance(start, Density):
        density = check.leading(start.log_density, 3)
        sample = start.sample
        drawn = None if sample is None else check.leading(sample, 3)
        return Density(
            lambda theta, x, context: density(theta, x[: x.size - size], context),
            None
            if drawn is None
            else lambda key, theta, context: silence(drawn(key, theta, context)),
        )
    return silence(jnp.asarray(start, jnp.result_type(float, jnp.asarray(start).dtype)))


def _positive(name: str, value: float) -> float:
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"`{name}` must be a positive number; got {value!r}.")
    return float(value)
