"""One-step maps m of the drift, X' = m(X, Δt) + σ√Δt z: Euler's x + μΔt, and better ones.

Whatever m is, the next state is Gaussian, N(m, 2QΔt), so the score, baselines, the twin and
recordings hold with m in the place of x + μΔt. All of them call `mean_rate`, (m − x)/Δt, which is μ
itself for Euler: differences from x are never formed, and single precision does not suffer.

    heun          ½(μ(x, t) + μ(x + μΔt, t + Δt))              second order
    rk4           (k₁ + 2k₂ + 2k₃ + k₄)/6                      fourth order
    Exponential   φ₁μ(x, t) + φ₂[N(a, t + Δt) − N(x, t)]       exact for N = 0
                  with a = x + Δtφ₁μ and N = μ − Lx

The order is that of the drift. Noise enters once per step, at its end, and its own error stays of
first order: a mode that decays at a rate k has fluctuations too large by kΔt (Euler: kΔt/2). Better
steps gain where the drift turns faster than it decays, which is where Euler's grow without reason;
not where noise and decay alone balance.

A component without noise must not depend on θ within the step: it would be moved by θ, and no noise
hides that. Those components go first, with Euler's step, and the others follow with their map from
there: for a position and a velocity this is the leapfrog, its velocities half a step aside. They
must be named, `Process(..., noiseless=(0,))`, since the map depends on them.

With Euler's step a running reward is a left sum, Σg(X_n)Δt. With any other it is integrated by the
trapezoid rule, which is of second order too (`match_quadrature`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import factorial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.objective import FunctionOfMeans, Rewards
from fluctua.core.process import AnyProcess, Process

__all__ = ["Exponential"]

Rate = Callable[[Callable[..., Array], Params, Array, Array, Array, PyTree], Array]
"""(drift, theta, x, t, dt, context) -> (m − x)/Δt (M,), the drift being (theta, x, t, context) ->
μ.
"""


def heun(
    drift: Callable[..., Array], theta: Params, x: Array, t: Array, dt: Array, context: PyTree
) -> Array:
    """The mean of μ here and where it leads."""
    here = drift(theta, x, t, context)
    return (here + drift(theta, x + here * dt, t + dt, context)) / 2


def rk4(
    drift: Callable[..., Array], theta: Params, x: Array, t: Array, dt: Array, context: PyTree
) -> Array:
    """The classical rule of Runge and Kutta."""
    k1 = drift(theta, x, t, context)
    k2 = drift(theta, x + k1 * (dt / 2), t + dt / 2, context)
    k3 = drift(theta, x + k2 * (dt / 2), t + dt / 2, context)
    k4 = drift(theta, x + k3 * dt, t + dt, context)
    return (k1 + 2 * (k2 + k3) + k4) / 6


@dataclass(frozen=True)
class Exponential:
    """A step that takes a linear part L of the drift exactly.

    For decay or rotation that is fast against the rest.

    linear: (theta, t, context) -> L, its diagonal (M,) or whole (M, M). What is left of the drift,
        μ − Lx, is followed to second order.

    >>> drift = lambda theta, x: -100.0 * x + jnp.sin(x)
    >>> step = fl.integrators.Exponential(lambda theta: jnp.array([-100.0]))
    >>> stiff = fl.Process(drift, lambda theta, x: jnp.ones(1), integrator=step)
    >>> coarse = jnp.linspace(0.0, 1.0, 11)  # Euler's step would explode: 100 · 0.1 > 2
    >>> bool(jnp.abs(fl.simulator(stiff, jnp.ones(1), coarse)(key, theta, 9).x).max() < 2)
    True
    """

    linear: Callable[..., Array]

    def __post_init__(self) -> None:
        object.__setattr__(self, "linear", check.drop_extra_arguments(self.linear, 3))

    def __call__(
        self,
        drift: Callable[..., Array],
        theta: Params,
        x: Array,
        t: Array,
        dt: Array,
        context: PyTree,
    ) -> Array:
        """φ₁μ(x) + φ₂[N(a) − N(x)]."""
        part = jnp.asarray(self.linear(theta, t, context), x.dtype)
        if part.shape not in ((x.size,), (x.size, x.size)):
            raise ValueError(
                f"`Exponential.linear` must be the diagonal ({x.size},) or the whole ({x.size}, "
                f"{x.size}) of a linear part of the drift; got shape {part.shape}."
            )
        of = (lambda m, v: m * v) if part.ndim == 1 else (lambda m, v: m @ v)
        one, two = (_diagonal_phi if part.ndim == 1 else _phi)(part * dt)
        here = drift(theta, x, t, context)
        move = of(one, here) * dt
        change = drift(theta, x + move, t + dt, context) - here - of(part, move)
        return of(one, here) + of(two, change)


@dataclass(frozen=True)
class Substeps:
    """Several Euler steps of the drift in one interval.

    For samples that are some steps of a model apart.
    """

    count: int

    def __call__(
        self,
        drift: Callable[..., Array],
        theta: Params,
        x: Array,
        t: Array,
        dt: Array,
        context: PyTree,
    ) -> Array:
        """The mean of μ along the path without noise."""
        part = dt / self.count

        def step(moved: Array, n: Array) -> tuple[Array, None]:
            return moved + drift(theta, x + moved, t + n * part, context) * part, None

        moved, _ = jax.lax.scan(step, jnp.zeros_like(x), jnp.arange(self.count, dtype=x.dtype))
        return moved / dt


MAPS: dict[str, Rate] = {"heun": heun, "rk4": rk4}
"""By name, Euler's apart; another one is also named in `fluctua.core.process.STEPS`."""


def mean_rate(
    process: Process, theta: Params, x: Array, t: Array, dt: Array, context: PyTree
) -> Array:
    """(m(x, Δt) − x)/Δt of one step of one trajectory: the drift itself for Euler. (M,)"""
    if process.integrator == "euler":
        return process.drift(theta, x, t, context)
    rate: Any = (
        MAPS[process.integrator] if isinstance(process.integrator, str) else process.integrator
    )
    dt = jnp.asarray(dt, x.dtype)
    if not process.noiseless:
        return _check_shape(rate(process.drift, theta, x, t, dt, context), x)
    quiet = np.isin(np.arange(x.size), process.noiseless)
    if isinstance(rate, Exponential):  # what stands still has no linear part
        rate = Exponential(_Masked(rate.linear, tuple((~quiet).tolist())))
    first = process.drift(theta, x, t, context)

    def others(*arguments):
        return jnp.where(quiet, 0, process.drift(*arguments))

    moved = _check_shape(
        rate(others, theta, jnp.where(quiet, x + first * dt, x), t, dt, context), x
    )
    return jnp.where(quiet, first, moved)


def _check_shape(rate: Array, x: Array) -> Array:
    if jnp.shape(rate) != x.shape:
        raise ValueError(
            f"a step must give (m − x)/Δt with the shape {x.shape} of the state; got "
            f"{jnp.shape(rate)}."
        )
    return rate


@dataclass(frozen=True)
class _Masked:
    """A linear part with rows of zeros."""

    linear: Callable[..., Array]
    keep: tuple[bool, ...]

    def __call__(self, theta: Params, t: Array, context: PyTree) -> Array:
        part = self.linear(theta, t, context)
        keep = np.array(self.keep)
        return jnp.where(keep if part.ndim == 1 else keep[:, None], part, 0)


@dataclass(frozen=True)
class _Elsewhere:
    """A step whose own numbers are those at other parameters, as the drift's already are."""

    step: Callable[..., Array]
    parameters_at: Callable[[Params, PyTree], Params]

    def __call__(
        self,
        drift: Callable[..., Array],
        theta: Params,
        x: Array,
        t: Array,
        dt: Array,
        context: PyTree,
    ) -> Array:
        def here(_, *rest):
            return drift(theta, *rest)

        return self.step(here, self.parameters_at(theta, context), x, t, dt, context)


def map_step_parameters(
    step: str | Callable[..., Array], parameters_at: Callable[[Params, PyTree], Params]
) -> str | Callable[..., Array]:
    """The step of a process whose drift was mapped to other parameters.

    parameters_at: (theta, context) -> those parameters.
    """
    return step if isinstance(step, str) else _Elsewhere(step, parameters_at)


def require_euler(process: Process, what: str, instead: str) -> None:
    """Refuse a process whose integrator is not Euler's, where only that is served."""
    if process.integrator != "euler":
        raise ValueError(
            f"{what} needs Euler steps; this process has "
            f"integrator={process.integrator!r}. {instead}"
        )


def _diagonal_phi(z: Array) -> tuple[Array, Array]:
    """φ₁ = (e^z − 1)/z and φ₂ = (φ₁ − 1)/z, with their values at 0. (M,) each"""
    small = jnp.abs(z) < 0.1
    safe = jnp.where(small, 1, z)

    def series(start):
        return sum(z**k / factorial(k + start) for k in range(8))

    one = jnp.where(small, series(1), jnp.expm1(safe) / safe)
    return one, jnp.where(small, series(2), (jnp.expm1(safe) / safe - 1) / safe)


DOUBLINGS = 14
ORDER = 8
"""Relative errors of the series are (‖LΔt‖/2^d)^ORDER/ORDER!: below 1e-6 for ‖LΔt‖ up to 10,000."""


def _phi(z: Array) -> tuple[Array, Array]:
    """φ₁ and φ₂ of a matrix, (M, M) each.

    By their series at z/2^d, then φ₁(2z) = ½(e^z + 1)φ₁ and φ₂(2z) = ¼(φ₁² + 2φ₂).

    e^z is squared beside them: as 1 + zφ₁ it would carry errors of slow modes into fast ones.
    """
    eye = jnp.eye(len(z), dtype=z.dtype)
    z = z / 2**DOUBLINGS
    one = two = jnp.zeros_like(z)
    for k in reversed(range(ORDER)):
        one = z @ one + eye / factorial(k + 1)
        two = z @ two + eye / factorial(k + 2)
    whole = eye + z @ one
    for _ in range(DOUBLINGS):
        two = (one @ one + 2 * two) / 4
        one = (one + whole @ one) / 2
        whole = whole @ whole
    return one, two


# ------------------------------------------------------------------------------------- rewards


@dataclass(frozen=True)
class _Half:
    """½g at the beginning of a step."""

    running: Callable[..., Array]

    def __call__(self, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        return self.running(theta, x, t, context) / 2


@dataclass(frozen=True)
class _OnArrival:
    """½g(x', t + Δt)Δt at the end of a step, with the reward of the step that there was."""

    running: Callable[..., Array]
    step: Callable[..., Array] | None

    def __call__(
        self, theta: Params, x: Array, x_next: Array, t: Array, dt: Array, context: PyTree
    ) -> Array:
        half = self.running(theta, x_next, t + dt, context) * dt / 2
        return half if self.step is None else half + self.step(theta, x, x_next, t, dt, context)


def reward_rate(rewards: Rewards) -> Callable[..., Array]:
    """g itself, of an objective whose running reward may be by trapezoids."""
    return rewards.running.running if isinstance(rewards.running, _Half) else rewards.running


def match_quadrature(
    rewards: Rewards | FunctionOfMeans, process: AnyProcess
) -> Rewards | FunctionOfMeans:
    """The rewards with ∫g dt by the rule that fits the integrator of the process.

    A left sum is off by Δt/2 times the change of g over the horizon, as Euler's step is. A better
    step goes with the trapezoid rule.
    """
    return rewards if _has_euler_steps(process) else integrate_by_trapezoids(rewards)


def _has_euler_steps(process: AnyProcess) -> bool:
    """Whether the diffusion of a process is advanced by Euler's steps, one or several at a time."""
    inner: Any = process
    while not isinstance(inner, Process):
        inner = getattr(inner, "diffusion", None) or getattr(inner, "process", None)
        if inner is None:  # events alone
            return True
    return inner.integrator == "euler" or isinstance(inner.integrator, Substeps)


def integrate_by_trapezoids(rewards: Any) -> Any:
    """The rewards with ∫g dt by the trapezoid rule, in place of the left sum Σg(X_n)Δt.

    One half of g is collected at the beginning of a step, and the other on arrival, as a reward of
    the step. rewards: an objective, its rewards or a function of means; the same is returned.
    """
    if isinstance(rewards, FunctionOfMeans):
        parts = tuple(integrate_by_trapezoids(part) for part in rewards.parts)
        return rewards._replace(parts=parts)
    checked = check.objective(rewards, stops=True)
    if checked.running is check.no_reward or isinstance(checked.running, _Half):
        return rewards  # nothing to integrate, or done before
    return rewards._replace(
        running=_Half(checked.running), per_step=_OnArrival(checked.running, checked.per_step)
    )


TERMS = 18
"""Terms of the series of `integrate_exponential`, exact in double precision."""


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def integrate_exponential(order: int, z: Array) -> Array:
    """Integral φ_k(z) = ∫₀¹ e^{(1−s)z} s^{k−1}/(k−1)! ds, elementwise; (e^z − 1)/z for k = 1.

    A series up to |z| = 1, and φ_{k+1} = (φ_k − 1/k!)/z beyond, where that loses no digits.
    """
    return _evaluate_exponential(order, z)


@partial(jit, static_argnums=0)  # traced once, however often it is differentiated
def _evaluate_exponential(order: int, z: Array) -> Array:
    small = jnp.abs(z) < 1
    near = jnp.where(small, z, 0)
    far = jnp.where(small, 1, z)
    series = jnp.zeros_like(z)
    for n in reversed(range(TERMS)):
        series = series * near + 1 / factorial(n + order)
    closed = jnp.exp(far)
    for n in range(order):
        closed = (closed - 1 / factorial(n)) / far
    return jnp.where(small, series, closed)


@integrate_exponential.defjvp
def _differentiate_exponential(order: int, at: Any, along: Any) -> tuple[Array, Array]:
    """Derivative φ_k' = φ_k − k φ_{k+1}, which loses no digits at any order."""
    value = integrate_exponential(order, at[0])
    return value, (value - order * integrate_exponential(order + 1, at[0])) * along[0]
