"""The twin correction: the paper's estimator with a digital twin to explain most of the return.

The score needs μ, ∂μ/∂θ and Q at the measured states, so wherever it can be had there is a model of
the process too, its twin. The twin's noise-free path x̄ₙ from the same X₀ and context, with what a
departure d = x − x̄ₙ from it is worth, makes a guess at the return-to-go,

    Vₙ(x) = vₙ + pₙ·d  [+ ½ dᵀSₙd],                    V_T the expansion of g_T at x̄_T,

and the estimator is split into what follows from the guess and what is left for the score to find:

    G = ∂θ rewards + Σₙ ∂θ E[Vₙ₊₁(Xₙ₊₁)|Xₙ]                     "direct"
      + Σₙ (Λₙ₊₁ − λ̄ₙ) Uₙ                                       "correction"
    Λₙ = g_T(X_T) − V_T(X_T) + Σ_{k≥n} δ_k,     δ_k = g(X_k)Δt + E[V_{k+1}(X_{k+1})|X_k] − V_k(X_k).

Nothing in this is an approximation: λ̂ₙ₊₁ = Vₙ₊₁(Xₙ₊₁) + Λₙ₊₁ + Σ_{k>n}{V_{k+1}(X_{k+1}) −
E[V_{k+1}(X_{k+1})|X_k]}, and given Xₙ the first meets Uₙ as ∂θE[V|Xₙ] and the braces meet it as
zero, whatever x̄, p and S are. A wrong twin costs variance and no bias, as long as μ and Q of the
score are right.

A reward r(Xₙ, Xₙ₊₁) of a step is treated as V is: its expansion r̃ in Xₙ₊₁ about m(Xₙ), of the
order of the twin, has a mean given Xₙ that is known. ∂θE[r̃|Xₙ] joins the direct part, the kick
meets r − r̃ besides Λₙ₊₁, and δ has r − r̃ + E[r̃|Xₙ]. For r at most linear (order 2: quadratic) in
Xₙ₊₁ nothing of it is left to the score.

Here are the records, one step of one trajectory, and the boundary; `fluctua.core.twin.sweep` takes
all trajectories of a run or a recording back through time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.baselines import Baseline, Twin, check_baseline, resolve_baseline
from fluctua.core.diffusion import diffusion_at
from fluctua.core.draws import Density, Reparameterised
from fluctua.core.integrators import mean_rate
from fluctua.core.model import EstimatorModel
from fluctua.core.process import Process, Step
from fluctua.core.scores import drift_score, full_score

HESSIAN_BYTES = 2**30
"""The most that the Hessians of a batch may take.

The sweep holds a few times as much on the way.
"""


class TwinSamples(NamedTuple):
    """One gradient per trajectory in its two parts, leaves (E, ...); their sum is the sample.

    direct: what the twin predicts at the measured states.
    correction: what it missed; its mean is the twin's error in the gradient.
    returns: (E,).
    mean_lambda: the mean of Λₙ at every time (T+1,), `values` for a time-only baseline of other
        trajectories.
    """

    direct: Params
    correction: Params
    returns: Array
    mean_lambda: Array


class TwinModel(NamedTuple):
    """Code of a twin, without numbers; hashable.

    model: as without a twin, its baselines being those of Λ and of the start.
    process: the twin's.
    order: 1 or 2, of the guess V.
    """

    model: EstimatorModel
    process: Process
    order: int


class Numbers(NamedTuple):
    """θ, θ̃, and the table of the baseline of Λ, if it has one."""

    theta: Params
    twin: Params
    table: Array | None = None


class Guess(NamedTuple):
    """V at one time, without its constant.

    slope: p (…, M). bend: S (…, M, M), or None for a linear guess.
    """

    slope: Array
    bend: Array | None

    def at(self, d: Array) -> Array:
        """p·d + ½dᵀSd for one departure d (M,)."""
        return self.slope @ d + (0.0 if self.bend is None else d @ self.bend @ d / 2)


# ------------------------------------------------------------------------- one trajectory, one step


def noise_worth(
    process: Process, theta: Params, guess: Guess, x: Array, t: Array, context: PyTree
) -> Array:
    """tr(SQ): the rate at which noise adds to a quadratic V; zero for a linear one."""
    if guess.bend is None:
        return jnp.zeros((), x.dtype)
    q = diffusion_at(process, theta, x, t, context)
    if q.kind == "diagonal":
        return jnp.diagonal(guess.bend) @ q.apply(theta, jnp.ones_like(x))
    # S is symmetric: rows are columns
    return jnp.trace(jax.vmap(lambda row: q.apply(theta, row))(guess.bend))


def expand(
    twin: TwinModel,
    numbers: Numbers,
    guess: Guess,
    xbar: Array,
    t: Array,
    dt: Array,
    context: PyTree,
) -> tuple[Guess, Array]:
    """V at x̄ₙ from V at x̄ₙ₊₁, and vₙ − vₙ₊₁: one step of the reverse sweep through the twin.

    Vₙ expands φ(x) = g(x)Δt + E[Vₙ₊₁(Xₙ₊₁)|Xₙ = x] about x̄ₙ, so that p follows the adjoint p =
    ∇gΔt + (1 + ∂μ̃Δt)ᵀp' and S the Riccati-like recursion of a chain without control.
    """

    def drift(x):
        return mean_rate(twin.process, numbers.twin, x, t, dt, context)

    here = jax.lax.stop_gradient(drift(xbar))

    def phi(x: Array) -> Array:
        d = x - xbar + (drift(x) - here) * dt  # zero at x̄, where the twin goes to x̄ₙ₊₁
        reward = twin.model.objective.running(numbers.theta, x, t, context)
        if twin.model.objective.per_step is not None:
            step = step_guess(twin, numbers.theta, x, x + drift(x) * dt, t, dt, context)
            worth = noise_worth(twin.process, numbers.twin, step.guess, x, t, context)
            reward = reward + worth + step.value / dt
        return (
            (reward + noise_worth(twin.process, numbers.twin, guess, x, t, context)) * dt
            + guess.at(d)
        ).astype(x.dtype)

    gain, slope = jax.value_and_grad(phi)(xbar)
    return Guess(slope, None if guess.bend is None else jax.hessian(phi)(xbar)), gain


def expand_terminal(
    twin: TwinModel, theta: Params, xbar: Array, context: PyTree
) -> tuple[Guess, Array]:
    """V_T: g_T expanded about x̄_T, and v_T."""

    def end(x):
        return twin.model.objective.terminal(theta, x, context).astype(x.dtype)

    value, slope = jax.value_and_grad(end)(xbar)
    return Guess(slope, jax.hessian(end)(xbar) if twin.order == 2 else None), value


class StepGuess(NamedTuple):
    """r̃ of a step from x: r(x, m + d) = value + guess.at(d) to the order of the twin."""

    value: Array
    guess: Guess


def step_guess(
    twin: TwinModel, theta: Params, x: Array, m: Array, t: Array, dt: Array, context: PyTree
) -> StepGuess:
    """The reward of a step expanded in its end, about m."""
    per_step = twin.model.objective.per_step
    assert per_step is not None

    def end(z):
        return per_step(theta, x, z, t, dt, context).astype(x.dtype)

    value, slope = jax.value_and_grad(end)(m)
    return StepGuess(value, Guess(slope, jax.hessian(end)(m) if twin.order == 2 else None))


class DirectTerms(NamedTuple):
    """Terms of one measured step that the twin predicts.

    slope: ∂θ{gΔt + r + E[r̃ + Vₙ₊₁|Xₙ]} (P,). expected: the value in the braces, with r̃ for r and
    without vₙ₊₁. reward: gΔt + r. unexplained: r − r̃, which the kick of the step meets.
    """

    slope: Array
    expected: Array
    reward: Array
    unexplained: Array


def direct_terms(
    twin: TwinModel, numbers: Numbers, guess: Guess, step: Step, xbar: Array, origin: Array
) -> DirectTerms:
    """Predict the terms of one measured step by the twin. origin: the first two times of the grid.

    With e = m(Xₙ) − x̄ₙ₊₁ this is (p + Se)·∂θμΔt + tr(S∂θQ)Δt + ∂θgΔt. A start that moves with θ
    displaces both ends of the step, x by w(t)dX₀ and the argument of V by −w(t + Δt)dX₀ (see
    `Reparameterised`).
    """
    x, x_next, t, dt, context, _ = step
    model = twin.model
    theta = numbers.theta
    process = twin.model.process
    assert isinstance(process, Process)  # `check_twin` saw to it
    ahead = jax.lax.stop_gradient(mean_rate(twin.process, numbers.twin, xbar, t, dt, context))
    # `drift_score` leaves out the noise's dependence on θ, and what replaces part of its work must
    # do so too
    of_noise = (lambda th: th) if model.score is full_score else jax.lax.stop_gradient
    moving = model.start if isinstance(model.start, Reparameterised) else None
    shift = None if moving is None else moving.shift(theta, context)

    def displace(th: Params, t: Array) -> Array:
        """w(t)dX₀, by which a start that moves with θ displaces the state at t; else 0."""
        if moving is None or shift is None:
            return jnp.zeros((), x.dtype)
        return moving.weight(t, origin[0], origin[1] - origin[0]) * shift(th)

    def expected(th: Params) -> tuple[Array, Array]:
        state = x + displace(th, t)
        # differences of like numbers first: d and the drifts are small against x, and single
        # precision shows it
        e = (
            (state - xbar)
            + (mean_rate(process, th, state, t, dt, context) - ahead) * dt
            - displace(th, t + dt)
        )
        g = model.objective.running(th, state, t, context)
        worth = noise_worth(process, of_noise(th), guess, state, t, context)
        return ((g + worth) * dt + guess.at(e)).astype(x.dtype), g.astype(x.dtype)

    (value, g), slope = jax.value_and_grad(expected, has_aux=True)(theta)
    per_step = model.objective.per_step
    if per_step is None:
        running = g * dt.astype(g.dtype)
        return DirectTerms(ravel_pytree(slope)[0], value, running, jnp.zeros((), x.dtype))

    mu = jax.lax.stop_gradient(mean_rate(process, theta, x, t, dt, context))
    # settled before the kick, and fixed below
    of_step = step_guess(twin, theta, x, x + mu * dt, t, dt, context)

    def expected_step(th: Params) -> Array:
        state = x + displace(th, t)
        drifted = (mean_rate(process, th, state, t, dt, context) - mu) * dt
        moved = (state - x) + drifted - displace(th, t + dt)  # zero in value
        worth = noise_worth(process, of_noise(th), of_step.guess, state, t, context)
        return (of_step.value + of_step.guess.at(moved) + worth * dt).astype(x.dtype)

    def reward(th: Params) -> Array:
        ends = (x + displace(th, t), x_next + displace(th, t + dt))
        return per_step(th, *ends, t, dt, context).astype(x.dtype)

    mean, mean_slope = jax.value_and_grad(expected_step)(theta)
    r, explicit = jax.value_and_grad(reward)(theta)
    left = r - of_step.value - of_step.guess.at((x_next - x) - mu * dt)
    total = jax.tree.map(lambda *parts: sum(parts), slope, mean_slope, explicit)
    reward_here = g * dt.astype(g.dtype) + r
    return DirectTerms(ravel_pytree(total)[0], value + mean, reward_here, left)


# ------------------------------------------------------------------------------------------ checks


def check_twin(twin: Twin, score: Callable[..., Any], process: Any) -> Twin:
    """The twin with its process filled in; refused if the score is not one it can stand in for."""
    if not isinstance(process, Process):
        raise ValueError(
            f"a `Twin` follows a noise-free path, and a {type(process).__name__} has none: use "
            "another baseline."
        )
    twin = check_options(twin)
    if score not in (full_score, drift_score):
        raise ValueError(
            "a Twin takes over part of the score's work by differentiating the drift and the "
            "noise, so it must be the work that the score did: use score=full_score (or "
            "drift_score), and put the law of your own score into the process."
        )
    own = process if twin.process is None else twin.process
    if not isinstance(own, Process) or own.drift is None:
        raise TypeError(
            "a twin needs a model of the drift: Twin(process=Process(drift, noise)), or no "
            "`process` at all to use the one of the score; got "
            f"{type(own).__name__}{' without a drift' if isinstance(own, Process) else ''}."
        )
    # a twin with Euler's errors is a bad one
    if own.integrator == "euler" != process.integrator and isinstance(process.integrator, str):
        own = own._replace(
            integrator=process.integrator, noiseless=own.noiseless or process.noiseless
        )
    return twin._replace(process=check.process(own))


def check_options(twin: Twin) -> Twin:
    """The twin with its order a number and its baseline a record; refused if they are wrong."""
    if twin.order not in (1, 2):
        raise ValueError(
            f"`Twin.order` is 1 (a linear guess) or 2 (a quadratic one); got {twin.order!r}."
        )
    if int(twin.batch) != twin.batch or twin.batch < 1:
        raise ValueError(
            f"`Twin.batch` must be a whole number of trajectories, at least 1; got {twin.batch!r}."
        )
    if twin.theta is not None and not callable(twin.theta):
        raise TypeError(
            f"`Twin.theta` is a function θ -> θ̃; got {type(twin.theta).__name__}. For fixed "
            "parameters write Twin(theta=lambda theta: fixed)."
        )
    baseline = check_twin_baseline(twin.baseline)
    return twin._replace(order=int(twin.order), baseline=baseline)


def check_twin_baseline(choice: Baseline | str | None) -> Baseline:
    """A baseline for Λ, for which no pilot is run."""
    if choice is None:
        raise TypeError(
            "`Twin.baseline` must be a fluctua.baselines.Baseline or a name, such as "
            "mean(); got None."
        )
    baseline = resolve_baseline(
        choice, caller="a Twin's Λ", serves=("none", "time", "mean", "optimal", "binned", "own")
    )
    assert isinstance(baseline, Baseline)
    if baseline.pilot:
        raise ValueError(
            "a time-only baseline of the twin's Λ needs its `values` (T+1,), the `mean_lambda` "
            "of other trajectories; no pilot is run for it. Use Twin(baseline=mean()) or give "
            "time_only(values)."
        )
    return baseline


def check_initial_baseline(choice: Baseline | str) -> Baseline:
    """A baseline for the draw of X₀, which meets V₀ and Λ₀ one after the other."""
    baseline = resolve_baseline(
        choice, caller="the draw of X₀", serves=("none", "time", "mean", "optimal", "own")
    )
    if not isinstance(baseline, Baseline) or baseline.pilot or baseline.values is not None:
        raise ValueError(
            "with a Twin the `initial_baseline` is one that needs no table, such as optimal(), "
            "mean() or none(): it is applied to the twin's guess and to what is left of it, each "
            "with its own mean."
        )
    return baseline


def check_batches(
    baseline: Baseline, first: Baseline, start: Any, count: int, batch: int, t: Array
) -> None:
    """Refuse batches that are too small for their baselines to leave one out."""
    check_baseline(baseline._replace(min_trajectories=1), count, t)
    min_trajectories = max(
        baseline.min_trajectories, first.min_trajectories if isinstance(start, Density) else 1
    )
    smallest = count // -(-count // batch)
    if smallest < min_trajectories:
        raise ValueError(
            f"the baseline of the twin's Λ leaves one out and needs {min_trajectories} "
            f"trajectories in a batch; there {'is' if smallest == 1 else 'are'} {smallest}. Take "
            "more, a larger Twin.batch, or Twin(baseline=none())."
        )


def twin_parameters(twin: Twin, theta: Params) -> Params:
    """θ̃."""
    if twin.theta is None:
        return theta
    try:
        return check.parameters(twin.theta(theta))
    except ValueError as error:
        raise ValueError(f"the twin's parameters, Twin.theta(theta): {error}") from None


_FITS: dict[Any, None] = {}
"""Twins whose shapes were found to fit, the latest."""

MAX_FITS = 256


def check_fit(
    twin: TwinModel, numbers: Numbers, x: Array, t: Array, context: PyTree, batch: int
) -> None:
    """Refuse a twin with another state than the measured one, or with too large Hessians."""
    code = (twin.process, check.tree_signature(numbers.twin), check.tree_signature((x, t, context)))
    if code not in _FITS:
        try:
            check.shapes(twin.process, numbers.twin, *check.take_first((x, t, context)))
        except ValueError as error:
            raise ValueError(
                f"the twin's process does not fit the measured states: {error}"
            ) from None
        _FITS[code] = None
        if len(_FITS) > MAX_FITS:
            _FITS.pop(next(iter(_FITS)))
    size = x.shape[1]
    needed = size**2 * batch * x.dtype.itemsize
    if twin.order == 2 and needed > HESSIAN_BYTES:
        limit = HESSIAN_BYTES // (size**2 * x.dtype.itemsize)
        advice = f"Use order=1, or Twin(batch={limit}) at most." if limit else "Use order=1."
        raise ValueError(
            f"a twin of order 2 keeps a Hessian of {size} × {size} numbers for each of {batch} "
            f"trajectories, {needed / 2**30:.1f} GiB. {advice}"
        )


def check_path(xbar: Array, t: Array) -> None:
    """Refuse a noise-free path that overflowed."""
    if check.all_finite(xbar):
        return
    step = float(np.max(np.diff(np.asarray(t))))
    raise FloatingPointError(
        "the twin's noise-free path overflowed. Its drift is unstable at its parameters with a "
        f"time step of up to {step:g}: bound Twin.theta, refine `t`, or do without a twin."
    )


def check_guess(guess: Guess) -> None:
    """Refuse a noise-free return without derivatives."""
    for name, array in (("gradient", guess.slope), ("Hessian", guess.bend)):
        if array is not None and not check.all_finite(array):
            raise FloatingPointError(
                f"the {name} of the twin's noise-free return is not finite. Its path is; a "
                "derivative of the twin's drift or of a reward on that path is not (sqrt or abs "
                "at zero?), or the adjoint grows without bound. Write it so that it has one, or "
                "give the twin a smooth `process`."
            )
