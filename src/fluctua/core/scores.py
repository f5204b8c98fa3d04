"""The score U = ∂θ ln p(x'|x) of one transition.

**Euler–Maruyama.** Given x, the next state is Gaussian: x' ~ N(x + μΔt, 2QΔt), μ being the mean
rate of a better step than Euler's where the process has one (`fluctua.core.integrators`). With the
residual r = x' − x − μΔt and y = Q⁻¹r, the logarithm of its density changes with θ as

    d ln p = −½ Tr[Q⁻¹ dQ] + yᵀ dQ y / (4Δt) − yᵀ dr / (2Δt).

Each score below is the θ-gradient of the scalar on the right with Q⁻¹ and y held fixed: one reverse
sweep through the user's drift and noise, whatever the number of parameters.

**Local linearisation** (Ozaki; Shoji and Ozaki), over intervals that are too long for Euler. Around
the state x at the start of an interval the drift is replaced by its linear part,

    dX = [μ + J(X − x) + a s] ds + σ dW,     J = ∂μ/∂x,     a = ∂μ/∂t + Σ_kl Q_kl ∂²μ/∂x_k∂x_l,

which has a Gaussian transition over any interval Δ, exact where the drift is linear in the state
and constant in time:

    E[X_Δ] = x + ∫₀^Δ e^{J(Δ−s)} (μ + a s) ds,     Cov[X_Δ] = ∫₀^Δ e^{Js} 2Q e^{Jᵀs} ds.

The integrals are Taylor series over Δ/2^d, then doubled d times. Doubling adds covariances, so it
does not lose digits where e^{−J} would grow. For one state they are functions of JΔ alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import cho_factor, cho_solve

from fluctua.core import check
from fluctua.core.arrays import Array, Params, root_covariance
from fluctua.core.diffusion import (
    are_singular,
    diffusion_at,
    diffusion_matrix,
    has_fewer_noises,
    lacks_score,
)
from fluctua.core.integrators import integrate_exponential, mean_rate
from fluctua.core.process import AnyProcess, Process, Score, Step, Transition

__all__ = [
    "Step",
    "drift_score",
    "euler",
    "full_score",
    "local_linear",
    "local_linear_score",
    "residual",
]

DOUBLINGS = 6
LogDensity = Callable[[Params], Array]
"""θ' -> a number whose gradient at θ is the score of one step."""

ORDER = 6
"""Relative errors of the series are (‖J‖Δ/2^d)^ORDER/ORDER!: 1e-7 at ‖J‖Δ = 10."""


def residual(process: Process, theta: Params, step: Step) -> Array:
    """Kick that the noise gave in one step, r = x' − m(x, Δt); m = x + μΔt for Euler's step.

    Args:
        process: its drift.
        theta: θ, a pytree of floats.
        step: the two ends of one step of one trajectory.

    Returns: (M,).

    >>> step = fl.scores.Step(jnp.array([1.0]), jnp.array([1.1]), t=0.0, dt=0.01)
    >>> fl.scores.residual(process, theta, step).round(3)  # 1.1 − 1 + 0.8 · 0.01
    Array([0.108], dtype=float32)
    """
    process = check.process(process)
    return (
        step.x_next
        - step.x
        - mean_rate(process, theta, step.x, step.t, step.dt, step.context) * step.dt
    )


def drift_score(process: Process, theta: Params, step: Step) -> Params:
    """Score of parameters that enter the drift only, U = ½ rᵀ Q⁻¹ ∂μ/∂θ (Eq. 11).

    Parameters that also enter the noise get a wrong gradient here; `full_score` is right for both.

    Args:
        process: its drift and noise.
        theta: θ, a pytree of floats.
        step: the two ends of one step of one trajectory.

    Returns: U, a pytree like θ.

    >>> step = fl.scores.Step(jnp.array([1.0]), jnp.array([1.1]), t=0.0, dt=0.01)
    >>> score = fl.scores.drift_score(process, theta, step)
    >>> round(float(score["k"]), 4)  # −x (x' − x + kxΔt) / s²
    -0.675
    """
    process = check.process(process)
    score = jax.grad(drift_log_density(process, theta, step))(theta)
    return _mask_undefined(process, theta, step, score)


def drift_log_density(process: Process, theta: Params, step: Step) -> LogDensity:
    """θ' -> ½ rᵀQ⁻¹ μ(θ') with the residual at θ: its gradient at θ is `drift_score`."""
    q = diffusion_at(process, theta, step.x, step.t, step.context)
    half_y = q.solve(residual(process, theta, step)) / 2
    return lambda th: half_y @ mean_rate(process, th, step.x, step.t, step.dt, step.context)


def full_score(
    process: Process,
    theta: Params,
    step: Step,
    shift: Callable[[Params], tuple[Array, Array]] | None = None,
) -> Params:
    """Score of parameters of drift and noise (Eq. 21). The default.

        U = −½ Tr[Q⁻¹ ∂Q] + rᵀQ⁻¹(½ ∂μ + ∂Q Q⁻¹ r / 4Δt)

    Costs nothing more than `drift_score` when the noise does not depend on θ: the compiler drops
    the terms.

    Args:
        process: its drift and noise.
        theta: θ, a pytree of floats.
        step: the two ends of one step of one trajectory.
        shift: θ -> (δx, δx') moves the two ends of the step with θ. It is zero in value and carries
            only a derivative: the way a start that depends on θ enters (see `Reparameterised`).

    Returns: U, a pytree like θ.

    >>> step = fl.scores.Step(jnp.array([1.0]), jnp.array([1.1]), t=0.0, dt=0.01)
    >>> score = fl.scores.full_score(process, theta, step)
    >>> {name: round(float(value), 1) for name, value in score.items()}
    {'k': -0.7, 's': 15.7}
    """
    process = check.process(process)
    score = jax.grad(full_log_density(process, theta, step, shift))(theta)
    return _mask_undefined(process, theta, step, jax.tree.map(jnp.asarray, score))


def full_log_density(
    process: Process,
    theta: Params,
    step: Step,
    shift: Callable[[Params], tuple[Array, Array]] | None = None,
) -> LogDensity:
    """θ' -> a number whose gradient at θ is `full_score`; the value itself has no meaning."""
    if shift is None:

        def ends(th):
            return (step.x, step.x_next)

        moved = None
    else:

        def ends(th):
            return tuple(end + d for end, d in zip(step[:2], shift(th), strict=True))

        def moved(th):
            return ends(th)[0]

    def evaluate_residual(th: Params) -> Array:
        x, x_next = ends(th)
        return x_next - x - mean_rate(process, th, x, step.t, step.dt, step.context) * step.dt

    q = diffusion_at(process, theta, step.x, step.t, step.context, moved)
    # of `theta`, not of `th`: fixed where the gradient is taken, differentiable in the states
    y = q.solve(evaluate_residual(theta))

    def log_density(th: Params) -> Array:
        quadratic = y @ q.apply(th, y) / (4 * step.dt)
        return -q.trace(th) / 2 + quadratic - y @ evaluate_residual(th) / (2 * step.dt)

    return log_density


def _mask_undefined(process: Process, theta: Params, step: Step, score: Params) -> Params:
    """The score of a step; NaN where θ moves the state without noise at this very state."""
    lost = lacks_score(process, theta, step.x, step.t, step.context)
    if lost is None:
        return score
    return jax.tree.map(lambda u: jnp.where(lost, jnp.nan, u), score)


def find_log_density(score: Score) -> Callable[[Process, Params, Step], LogDensity] | None:
    """The function whose gradient a score is; None for a score that is not of the library.

    The weighted sum of many scores is the gradient of the weighted sum: one reverse pass. Not a
    number where θ moves the state without noise.
    """
    known: dict[Score, Callable[[Process, Params, Step], LogDensity]] = {
        full_score: full_log_density,
        drift_score: drift_log_density,
        local_linear_score: local_linear_log_density,
    }
    if score not in known:
        return None
    find = known[score]

    def masked(process: Process, theta: Params, step: Step) -> LogDensity:
        log_density = find(process, theta, step)
        if score is local_linear_score:
            return log_density
        lost = lacks_score(process, theta, step.x, step.t, step.context)
        if lost is None:
            return log_density
        return lambda th: jnp.where(lost, jnp.nan, 1) * log_density(th)

    return masked


# ------------------------------------------------------------------------ ratios of densities


class Ratio(NamedTuple):
    """Two densities of one step.

    log: ln p_new(x'|x) − ln p_old(x'|x).
    divergence: KL(old ‖ new) of its law given x, or what has it for its mean over steps taken at
        `old`.
    """

    log: Array
    divergence: Array


def log_ratio(process: Process, new: Params, old: Params, step: Step) -> Ratio:
    """½ r̄ᵀQ⁻¹(μ_new − μ_old), with r̄ the mean of the two residuals (Girsanov), and ¼ ΔμᵀQ⁻¹Δμ Δt.

    For parameters that have one Q: the densities themselves are never formed, so nothing cancels.
    Not a number where there is no ratio (`check_equivalent`).
    """
    x, x_next, t, dt, context, _ = step
    drifts = [mean_rate(process, theta, x, t, dt, context) for theta in (new, old)]
    change = drifts[0] - drifts[1]
    mean = (drifts[0] + drifts[1]) / 2
    pull = diffusion_at(process, new, x, t, context).solve(change)
    log = (x_next - x - mean * dt) @ pull / 2
    apart = are_singular(process, new, old, x, t, context)
    if apart is not None:
        log = jnp.where(apart, jnp.nan, log)
    return Ratio(log, dt * change @ pull / 4)


def local_linear_log_ratio(process: Process, new: Params, old: Params, step: Step) -> Ratio:
    """ln N(x') at `new` less that at `old`, of the locally linear laws.

    The divergence is its negative.
    """
    log = _log_normal(process, new, step) - _log_normal(process, old, step)
    return Ratio(log, -log)


# ------------------------------------------------------------------------ local linearisation


class Gaussian(NamedTuple):
    """The law of the next state. mean (M,), covariance (M, M)."""

    mean: Array
    covariance: Array


def euler(process: Process, theta: Params, step: Step) -> Gaussian:
    """Law of one step of the simulator, N(x + μΔt, 2QΔt).

    With another `Process.integrator` than Euler's, the mean is its map. Pass it as `transition=`;
    it is the default.

    Args:
        process: its drift and noise.
        theta: θ, a pytree of floats.
        step: one step of one trajectory; its `x_next` is not used.

    Returns: mean (M,) and covariance (M, M).

    >>> step = fl.scores.Step(jnp.array([1.0]), None, t=0.0, dt=0.01)
    >>> law = fl.scores.euler(process, theta, step)
    >>> law.mean.round(4), law.covariance.round(4)  # 1 − 0.8 · 0.01, 0.4² · 0.01
    (Array([0.992], dtype=float32), Array([[0.0016]], dtype=float32))
    """
    x, _, t, dt, context, _ = step
    process = check.process(process)
    drift = mean_rate(process, theta, x, t, dt, context)
    return Gaussian(x + drift * dt, 2 * dt * diffusion_matrix(process, theta, x, t, context))


def local_linear(process: Process, theta: Params, step: Step) -> Gaussian:
    """Law of one interval of the linearised process, the diffusion held at its value at x.

    For samples too far apart for Euler's step; exact for a linear drift and constant noise. Pass it
    as `transition=` to fits and to `Observed`.

    Args:
        process: its drift and noise.
        theta: θ, a pytree of floats.
        step: one interval of one trajectory; its `x_next` is not used.

    Returns: mean (M,) and covariance (M, M).

    >>> step = fl.scores.Step(jnp.array([1.0]), None, t=0.0, dt=1.0)
    >>> law = fl.scores.local_linear(process, theta, step)
    >>> bool(jnp.isclose(law.mean[0], jnp.exp(-0.8)))
    True
    """
    process = check.process(process)
    x, _, t, dt, context, _ = step

    def drift(x, t):
        return process.drift(theta, x, t, context)

    q = diffusion_matrix(process, theta, x, t, context).astype(x.dtype)
    if x.size == 1:
        return _linearise_one_state(drift, step, q)
    mu = drift(x, t)
    jacobian = jax.jacfwd(drift)(x, t)
    if process.noiseless or has_fewer_noises(process, theta, x, t, context):
        a = _singular_ramp(drift, x, jnp.asarray(t, x.dtype), q)
    else:
        a = _ramp(drift, x, jnp.asarray(t, x.dtype), root_covariance(q).T)
    h = dt / 2**DOUBLINGS
    f, forced, c = _expand_short_step(jacobian, jnp.stack([mu, a], axis=1), 2 * q, h)
    (f, forced, c, _), _ = jax.lax.scan(
        lambda now, _: (_double_step(*now), None), (f, forced, c, h), length=DOUBLINGS
    )
    return Gaussian(x + forced[:, 0] + forced[:, 2], (c + c.T) / 2)


def local_linear_score(process: Process, theta: Params, step: Step) -> Params:
    """Score for samples that are too far apart for Euler's step. Pass it as `score=`.

        U = ∂θ ln N(x'; E[X_Δ], Cov[X_Δ])

    Exact for a linear drift whatever the interval. For others the error is that of freezing J and Q
    over it.

    Args:
        process: its drift and noise.
        theta: θ, a pytree of floats.
        step: the two ends of one interval of one trajectory.

    Returns: U, a pytree like θ.

    >>> coarse = fl.Trajectories(t[::50], recorded.x[:, ::50])  # three samples per trajectory
    >>> score = fl.scores.local_linear_score
    >>> fl.gradient(process, objective, theta, coarse, score=score).count
    200
    """
    score = jax.grad(local_linear_log_density(process, theta, step))(theta)
    return jax.tree.map(jnp.asarray, score)


def local_linear_log_density(process: Process, theta: Params, step: Step) -> LogDensity:
    """θ' -> ln N(x'; E[X_Δ], Cov[X_Δ]), whose gradient is `local_linear_score`."""
    return lambda th: _log_normal(process, th, step)


def _log_normal(process: Process, theta: Params, step: Step) -> Array:
    """ln N(x'; E[X_Δ], Cov[X_Δ]), but for a constant."""
    mean, covariance = local_linear(process, theta, step)
    if step.x.size == 1:
        variance = covariance[0, 0]
        return -(jnp.log(variance) + (step.x_next[0] - mean[0]) ** 2 / variance) / 2
    factor = cho_factor(covariance, lower=True)
    r = step.x_next - mean
    return -jnp.sum(jnp.log(jnp.diagonal(factor[0]))) - r @ cho_solve(factor, r) / 2


def _linearise_one_state(drift: Callable[[Array, Array], Array], step: Step, q: Array) -> Gaussian:
    """Locally linear transition of one state, without matrices; see `local_linear`.

    With z = JΔ the mean is x + μΔ φ₁(z) + aΔ² φ₂(z) and the variance 2QΔ φ₁(2z).
    """
    x, _, t, dt, _, _ = step
    one = jnp.ones_like(x)

    def slope(y: Array) -> tuple[Array, Array]:
        return jax.jvp(lambda v: drift(v, t), (y,), (one,))

    (mu, jacobian), (_, bend) = jax.jvp(slope, (x,), (one,))
    now = jnp.asarray(t, x.dtype)
    in_time = jax.jvp(lambda s: drift(x, s), (now,), (jnp.ones_like(now),))[1]
    z = jacobian * dt
    moved = mu * dt * integrate_exponential(1, z)
    bent = (in_time + q[0] * bend) * dt**2 * integrate_exponential(2, z)
    return Gaussian(x + moved + bent, 2 * q * dt * integrate_exponential(1, 2 * z))


def _ramp(drift: Callable[[Array, Array], Array], x: Array, t: Array, root: Array) -> Array:
    """∂μ/∂t + Σ_kl Q_kl ∂²μ/∂x_k∂x_l, the mean rate of change of μ that J does not see (Itô).

    (M,)
    """
    in_time = jax.jvp(lambda s: drift(x, s), (t,), (jnp.ones_like(t),))[1]

    def along(v):
        return jax.jvp(lambda y: jax.jvp(lambda z: drift(z, t), (y,), (v,))[1], (x,), (v,))[1]

    return in_time + jnp.sum(jax.vmap(along)(root), axis=0)


def _singular_ramp(drift: Callable[[Array, Array], Array], x: Array, t: Array, q: Array) -> Array:
    """The same from Q itself, Σ_k ∂²μ[e_k, Q e_k]: a root of a singular Q has no derivative in θ.

    (M,)
    """
    in_time = jax.jvp(lambda s: drift(x, s), (t,), (jnp.ones_like(t),))[1]

    def slope(y, v):
        return jax.jvp(lambda z: drift(z, t), (y,), (v,))[1]

    def across(e, row):
        return jax.jvp(lambda y: slope(y, e), (x,), (row,))[1]

    return in_time + jnp.sum(jax.vmap(across)(jnp.eye(x.size, dtype=x.dtype), q), axis=0)


def _expand_short_step(j: Array, columns: Array, s: Array, h: Array) -> tuple[Array, Array, Array]:
    """e^{Jh}, integrals of the forces (M, 3) and the covariance over a short h, as series in h.

    The integrals are [∫e^{J(h−s)}μ, ∫e^{J(h−s)}a, ∫e^{J(h−s)}a s], the covariance ∫e^{Js} S
    e^{Jᵀs}.
    """
    eye = jnp.eye(j.shape[0], dtype=j.dtype)
    f = eye
    power = eye
    forced = columns * h
    v = columns * h
    ramp = columns[:, 1] * h**2 / 2
    w = columns[:, 1] * h**2 / 2
    c = s * h
    term = s * h
    for k in range(1, ORDER + 1):
        power = j @ power * (h / k)
        f = f + power
        v = j @ v * (h / (k + 1))
        w = j @ w * (h / (k + 2))
        forced = forced + v
        ramp = ramp + w
        half = j @ term
        term = (half + half.T) * (h / (k + 1))
        c = c + term
    return f, jnp.concatenate([forced, ramp[:, None]], axis=1), c


def _double_step(f: Array, forced: Array, c: Array, h: Array) -> tuple[Array, Array, Array, Array]:
    """The same over 2h.

    The ramp starts the second half at h: its ∫ gains h times that of a constant force.
    """
    forced = forced + f @ forced + jnp.zeros_like(forced).at[:, 2].set(h * forced[:, 1])
    return f @ f, forced, c + f @ c @ f.T, 2 * h


# ------------------------------------------------------------------------- noise of the measurement

UNROLLED = 2
"""Maximum number of components whose second derivatives are unrolled, which is faster."""


def remove_readout_bias(
    function: Callable[[Array], Array], variance: Array
) -> Callable[[Array], Array]:
    """f − ½ Tr[S ∂²f]: f(z) without what noise of variance S (M,) on z adds on average.

    Exact if f is quadratic.
    """

    def corrected(z: Array) -> Array:
        value = function(z)

        def add(i: Array | int, total: Array) -> Array:
            e = (jnp.arange(z.shape[0]) == i).astype(z.dtype)

            def slope(v):
                return jax.jvp(function, (v,), (e,))[1]

            return total + variance[i] * jax.jvp(slope, (z,), (e,))[1]

        total = jnp.zeros_like(value)
        if z.shape[0] <= UNROLLED:
            for i in range(z.shape[0]):
                total = add(i, total)
        else:
            total = jax.lax.fori_loop(0, z.shape[0], add, total)
        return value - total / 2

    return corrected


@dataclass(frozen=True)
class CorrectedScore:
    """U − ½ Tr[S ∂²U]: a score without the bias of measured ends.

    The second derivatives are in both ends of the step, measured with noise of variance S (M,).
    """

    score: Score
    variance: tuple[float, ...] | Array  # S, (M,)

    def __call__(self, process: Process, theta: Params, step: Step) -> Params:
        """The score without the part that the noise adds on average."""
        s = jnp.asarray(self.variance, step.x.dtype)
        m = s.shape[0]
        _, unravel = ravel_pytree(self.score(process, theta, step))

        def flat(z: Array) -> Array:
            moved = step._replace(x=step.x + z[:m], x_next=step.x_next + z[m:])
            return ravel_pytree(self.score(process, theta, moved))[0]

        return unravel(remove_readout_bias(flat, jnp.tile(s, 2))(jnp.zeros(2 * m, step.x.dtype)))


def select_score(process: AnyProcess, score: Score) -> Score:
    """The score of a process: the given one of an Itô process, else that of the process."""
    if isinstance(process, Process):
        return score
    if score is not full_score:
        raise ValueError(f"a {type(process).__name__} brings its own score: leave `score` off.")
    return _own_score


def _own_score(process: Transition, theta: Params, step: Step) -> Params:
    return process.score(theta, step)
