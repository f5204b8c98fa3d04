"""Partially observed processes with readout noise: y = Cx + ε, ε ~ N(0, R), at every sample.

The measured record is not Markov, but the theorem needs only the score of what is measured,

    Uₙ = ∂θ ln p(yₙ₊₁ | y₀ … yₙ) = ∂θ ln N(yₙ₊₁; ŷ, S),     U₋₁ = ∂θ ln p(y₀),

whose predictive density a Kalman filter gives. With F, Σ the transition of one step, x' ~ N(f(x),
Σ) and F = ∂f/∂x,

    m⁻ = f(m),     P⁻ = F P Fᵀ + Σ,     ŷ = C m⁻,     S = C P⁻ Cᵀ + R,
    K = P⁻CᵀS⁻¹,   m' = m⁻ + K(y − ŷ),   P' = (1 − KC) P⁻ (1 − KC)ᵀ + K R Kᵀ.

The score needs ∂θm and ∂θP along with m and P: tangents, carried from step to step. For a drift
that is linear in x and noise that does not depend on it this is exact, and P, K, S and their
tangents are the same for all trajectories: one recursion. Otherwise it is the extended filter, with
f and F of each trajectory averaged over N(m, P) to second order,

    f̄(m) = f + ½ Σ_kl P_kl ∂_k∂_l f,     F̄ = ∂f̄/∂m,

which for drifts of third degree leaves the skewness of the hidden state as the only error.
`core.likelihood` tests for it in the innovations y − ŷ, whose covariance must be S; on a simulator
`fluctua.reference.finite_differences` measures it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular

from fluctua.core import arrays, check, dependence, scores
from fluctua.core import process as processes
from fluctua.core import trajectories as records
from fluctua.core.arrays import Array, Params, PyTree, root_covariance
from fluctua.core.diffusion import diffusion_matrix
from fluctua.core.integrators import require_euler
from fluctua.core.simulate import advance_diffusion
from fluctua.core.text import names

READOUT = 2**30
"""Index of the draw of the first readout; above any step of the process."""


class Normal(NamedTuple):
    """Prior knowledge of the hidden state at the first sample, X₀ ~ N(mean, covariance).

    mean: (M,), or a function (theta, context) of it.
    covariance: (M, M), (M,) if diagonal, or a number; or a function (theta, context) of it.

    >>> prior = fl.Normal(mean=jnp.ones(1), covariance=0.04)  # X₀ is known to ± 0.2
    >>> seen = fl.Observed(process, observe=[[1.0]], noise=0.01, start=prior)
    >>> fl.simulator(seen, t=t)(key, theta, 5).x.shape
    (5, 101, 1)
    """

    mean: Any
    covariance: Any


@dataclasses.dataclass(frozen=True)
class Observed:
    """A process observed through y = Cx + ε; its trajectories and rewards are functions of y.

    Use it in place of a `Process` where not every component is measured, or not exactly.

    process: of the hidden state x (M,).
    observe: C (D, M); np.eye(M)[[0, 2]] for components 0 and 2.
    noise: R, the covariance of ε, (D, D), (D,) if diagonal, or a number; or a function (theta,
        context) of that. 0 or None where the readout is exact.
    start: X₀, a known state (M,) or a `Normal`.
    transition: the law of one step, `euler`, or `local_linear` for records sampled too slowly for
        Euler steps.
    shared: whether one covariance serves all trajectories; determined by the library, do not set
        it.

    >>> seen = fl.Observed(process, observe=[[1.0]], noise=0.01, start=jnp.ones(1))  # y = x + ε
    >>> readout = fl.simulator(seen, t=t)(key, theta, 50)
    >>> fl.gradient(seen, objective, theta, readout).count
    50
    """

    process: processes.Process
    _: dataclasses.KW_ONLY
    observe: Any
    noise: Any = 0.0
    start: Any
    transition: Callable[[processes.Process, Params, processes.Step], scores.Gaussian] = (
        scores.euler
    )
    shared: bool = False

    def __post_init__(self) -> None:
        process = check.process(self.process)
        if not isinstance(process, processes.Process):
            raise TypeError(f"`Observed` needs a `Process`; got {type(process).__name__}.")
        require_euler(
            process,
            "an `Observed`",
            "Leave `integrator` off, or use transition=local_linear for long steps.",
        )
        if callable(self.observe):
            raise TypeError(
                "`observe` is the matrix C of y = C x + noise, and no function. For components 0 "
                "and 2 of M write np.eye(M)[[0, 2]]."
            )
        c = np.asarray(self.observe, float)
        if c.ndim != 2 or c.size == 0 or not np.isfinite(c).all():
            raise ValueError(
                f"`observe` must be a finite matrix C (channels, state); got shape {c.shape}. For "
                "components 0 and 2 of M write np.eye(M)[[0, 2]]."
            )
        start = self.start if isinstance(self.start, Normal) else Normal(self.start, 0.0)
        if not isinstance(self.start, Normal) and callable(self.start):
            raise TypeError(
                "`start` of an `Observed` is a state (M,) or a Normal(mean, covariance), which may "
                "depend on θ."
            )
        noise = 0.0 if self.noise is None else self.noise
        object.__setattr__(self, "process", process)
        object.__setattr__(self, "observe", _hashable(c))
        object.__setattr__(self, "noise", _hashable(noise))
        object.__setattr__(self, "start", Normal(*map(_hashable, start)))
        if not callable(self.noise):
            _check_covariance("noise", self.noise, len(c))

    # -------------------------------------------------------------------------------- its simulator

    def draw_start(
        self, key: Array, theta: Params, context: PyTree, stream: PyTree, draw: Callable
    ) -> Array:
        """(y, x) at the start."""
        if self.process.noise is None:
            raise ValueError("the hidden `Process` has no `noise`, so it cannot be simulated.")
        mean, _ = self._prior(theta, context)
        spread = _square_root(_evaluate(self.start.covariance, theta, context), mean.size)
        x = mean + spread @ jax.random.normal(key, mean.shape, mean.dtype)
        return self._add_readout(theta, x, context, stream, draw, 0)

    def advance(
        self,
        theta: Params,
        x: Array,
        context: PyTree,
        stream: PyTree,
        draw: Callable,
        n: Array,
        t: Array,
        dt: Array,
    ) -> tuple[Array, None]:
        """(y, x) after a step.

        The hidden path is that of the process by itself with the same noise.
        """
        hidden = advance_diffusion(
            self.process, theta, x[len(self.observe) :], context, stream, draw, n, t, dt
        )
        return self._add_readout(theta, hidden, context, stream, draw, n + 1), None

    def select_observed(self, state: Array) -> Array:
        """The observed part y of (y, x)."""
        return state[..., : len(self.observe)]

    def events(self, *arguments: Any) -> None:
        """None: a record holds nothing besides y."""

    def _add_readout(
        self,
        theta: Params,
        x: Array,
        context: PyTree,
        stream: PyTree,
        draw: Callable,
        n: Array | int,
    ) -> Array:
        channels = len(self.observe)
        z = draw(stream, READOUT + n, channels).astype(x.dtype)
        root = _square_root(_evaluate(self.noise, theta, context), channels)
        y = jnp.asarray(self.observe, x.dtype) @ x + root @ z
        return jnp.concatenate([y.astype(x.dtype), x])

    # ------------------------------------------------------------------------------------ its score

    def score_start(
        self, theta: Params, x: Array, t: Array, context: PyTree
    ) -> tuple[Params, processes.ScoreState]:
        """∂θ ln p(y₀), and mean and covariance of X₀ given y₀ with their tangents."""

        def first(theta: Params) -> FilteredState:
            mean, covariance = self._prior(theta, context)
            return self._add_first_sample(
                theta, mean.astype(x.dtype), covariance.astype(x.dtype), x, context
            )[0]

        flat, unravel = ravel_pytree(theta)
        now, slopes = _differentiate_along(
            lambda v: first(unravel(v)), (flat,), (jnp.eye(flat.size, dtype=flat.dtype),)
        )
        score = slopes.log_density.astype(flat.dtype)
        # not a number where θ moves what is known, which `check` refuses by name
        if callable(self.start.mean):
            score = jnp.where(jnp.any(_find_moved(self, theta, context)), jnp.nan, score)
        return unravel(score), self._pack_memory(now, slopes)

    def update(
        self, theta: Params, step: processes.Step, memory: processes.ScoreState
    ) -> tuple[Params, processes.ScoreState]:
        """∂θ ln p(y' | y and all before it), and the filtered hidden state after it."""
        mean, mean_slope = memory.own[:2]
        covariance, covariance_slope = memory.shared or memory.own[2:]
        flat, unravel = ravel_pytree(theta)

        def one(v, mean, covariance):
            return self._add_sample(unravel(v), mean, covariance, step)[0]

        directions = (jnp.eye(flat.size, dtype=flat.dtype), mean_slope, covariance_slope)
        now, slopes = _differentiate_along(one, (flat, mean, covariance), directions)
        return unravel(slopes.log_density.astype(flat.dtype)), self._pack_memory(now, slopes)

    def score(self, theta: Params, step: processes.Step) -> Params:
        """Raise: the score of one step depends on all samples before it."""
        raise ValueError(
            "the score of an `Observed` depends on all samples before the step: `gradient` and "
            "`ppgt` carry them along."
        )

    def _pack_memory(self, now: FilteredState, slopes: FilteredState) -> processes.ScoreState:
        mean = (now.mean, slopes.mean)
        covariance = (now.covariance, slopes.covariance)
        if self.shared:
            return processes.ScoreState(covariance, mean)
        return processes.ScoreState(None, mean + covariance)

    # ----------------------------------------------------------------------------------- the filter

    def _prior(self, theta: Params, context: PyTree) -> scores.Gaussian:
        mean, covariance = (jnp.asarray(_evaluate(v, theta, context)) for v in self.start)
        size = len(self.observe[0])
        if mean.shape != (size,):
            raise ValueError(
                f"`observe` has {size} columns, one for each component of the state; the start has "
                f"shape {mean.shape}."
            )
        return scores.Gaussian(mean, _as_matrix(covariance, mean.size).astype(mean.dtype))

    def _add_first_sample(
        self, theta: Params, mean: Array, covariance: Array, y: Array, context: PyTree
    ) -> tuple[FilteredState, Array]:
        """X₀ given y₀.

        Channels that are known before the readout (a known state, an exact readout) carry no
        information.
        """
        c = jnp.asarray(self.observe, y.dtype)
        r = _as_matrix(_evaluate(self.noise, theta, context), y.size).astype(y.dtype)
        there = jnp.diagonal(c @ covariance @ c.T + r) > 0
        r = jnp.where(there[:, None] & there, r, jnp.diag(~there).astype(y.dtype))
        c = jnp.where(there[:, None], c, 0)
        return correct_prediction(mean, covariance, jnp.where(there, y - c @ mean, 0), c, r)

    def add_first_sample(self, theta: Params, y: Array, context: PyTree) -> scores.Gaussian:
        """Mean and covariance of the hidden state, given the first sample y (D,)."""
        mean, covariance = self._prior(theta, context)
        known = mean.astype(y.dtype), covariance.astype(y.dtype)
        now, _ = self._add_first_sample(theta, *known, y, context)
        return scores.Gaussian(now.mean, now.covariance)

    def predict(
        self, theta: Params, state: scores.Gaussian, step: processes.Step
    ) -> scores.Gaussian:
        """Mean and covariance of the hidden state at the end of a step."""
        mean, covariance = state

        def law(x):
            return self.transition(
                self.process, theta, processes.Step(x, x, step.t, step.dt, step.context)
            )

        def average(x):
            """Mean of the next state, which is differentiated, and what comes with it."""
            made = law(x)
            if self.shared:
                return made.mean, made
            averaged = _average_drift(lambda x: law(x).mean, x, covariance)
            return averaged, made._replace(mean=averaged)

        # at zero: one matrix for all trajectories, and seen to be one
        at = jnp.zeros_like(mean) if self.shared else mean
        slope, (ahead, noise) = jax.jacfwd(average, has_aux=True)(at)
        if self.shared:
            ahead = ahead + slope @ mean
        return scores.Gaussian(ahead, slope @ covariance @ slope.T + noise)

    def describe_readout(self, theta: Params, context: PyTree, dtype: Any) -> tuple[Array, Array]:
        """C (D, M) and R (D, D) as arrays."""
        c = jnp.asarray(self.observe, dtype)
        r = _as_matrix(_evaluate(self.noise, theta, context), len(self.observe)).astype(dtype)
        return c, r

    def _add_sample(
        self, theta: Params, mean: Array, covariance: Array, step: processes.Step
    ) -> tuple[FilteredState, Array]:
        """The hidden state given one more sample, step.x_next."""
        ahead, predicted = self.predict(theta, scores.Gaussian(mean, covariance), step)
        c, r = self.describe_readout(theta, step.context, mean.dtype)
        return correct_prediction(ahead, predicted, step.x_next - c @ ahead, c, r)

    def residuals(self, theta: Params, times: records.Times, x: Array, context: PyTree) -> Array:
        """eᵢ(S⁻¹e)ᵢ of the innovations e, whose mean is 1 for a correct model. Shape (E, T, D)."""
        return _filter_trajectories(self, theta, times, x, context)[1][:, 1:]

    # ----------------------------------------------------------------------------------- the checks

    def check(
        self, theta: Params, x: Array, t: Array, context: PyTree, where: str = "at the first state"
    ) -> Observed:
        """Check shapes, covariances and the noise of every channel, and fill in `shared`."""
        channels, size = np.shape(self.observe)
        mean = self._prior(theta, context).mean
        if jnp.shape(x) != (channels,):
            raise ValueError(
                f"trajectories of this `Observed` hold its {channels} channels, y = Cx, not the "
                f"state; got {jnp.shape(x)[0]} components."
            )
        _check_covariance("noise", np.asarray(_evaluate(self.noise, theta, context)), channels)
        _check_covariance(
            "covariance of the start",
            np.asarray(_evaluate(self.start.covariance, theta, context)),
            size,
        )
        here = jnp.asarray(mean, arrays.working_dtype(theta, x))
        check.shapes(self.process, theta, here, t, context)
        seen, moves = (np.asarray(v) for v in _find_channels(self, theta, here, t, context))
        if not seen.all():
            raise ValueError(
                f"channel {np.flatnonzero(~seen)[0]} is known before it is measured {where}: "
                "neither the readout nor the process puts noise into it within a step. Give it "
                "readout noise in `noise`."
            )
        if moves.any():
            i, p = np.argwhere(moves)[0]
            raise ValueError(
                f"channel {i} at the start is exactly known and depends on `{names(theta)[p]}`, "
                f"{where}: there is no score for that parameter. Give the start a covariance, or "
                "the readout noise."
            )
        forms = tuple(map(check.tree_signature, (theta, here, t, context)))
        linear = _is_linear(self.process, *forms)
        return dataclasses.replace(self, shared=linear and _shares_covariance(self, *forms))


def log_likelihood(process: Observed, theta: Params, trajectories: records.Trajectories) -> Array:
    """ln p(y₀ … y_T; θ) of every trajectory, by the filter; differentiable in θ. Shape (E,)."""
    y = jnp.asarray(trajectories.x)
    return _filter_trajectories(
        process, theta, check.grid(trajectories.t), y, trajectories.context
    )[0]


class FilteredState(NamedTuple):
    """The hidden state given all samples so far.

    log_density: ln p of the last sample.
    mean: (M,).
    covariance: (M, M).
    """

    log_density: Array
    mean: Array
    covariance: Array


def correct_prediction(
    mean: Array, covariance: Array, innovation: Array, c: Array, r: Array
) -> tuple[FilteredState, Array]:
    """Correct a prediction by its innovation e; also eᵢ(S⁻¹e)ᵢ, whose mean is 1."""
    s = c @ covariance @ c.T + r
    factor = jnp.linalg.cholesky((s + s.T) / 2)
    # once for all trajectories
    inverse = solve_triangular(factor, jnp.eye(innovation.size, dtype=s.dtype), lower=True)
    gain = covariance @ c.T @ inverse.T @ inverse
    rest = jnp.eye(mean.size, dtype=mean.dtype) - gain @ c
    white = inverse @ innovation
    constant = mean.dtype.type(np.log(2 * np.pi)) * innovation.size / 2
    log_density = -jnp.sum(jnp.log(jnp.diagonal(factor))) - white @ white / 2 - constant
    after = FilteredState(
        log_density, mean + gain @ innovation, rest @ covariance @ rest.T + gain @ r @ gain.T
    )
    return after, innovation * (inverse.T @ white)


def _average_drift(f: Callable[[Array], Array], x: Array, covariance: Array) -> Array:
    """E[f(X)] of X ~ N(x, P) to second order, f + ½ Σ_kl P_kl ∂_k∂_l f.

    Exact for f of third degree.
    """

    def along(e, p):
        return jax.jvp(lambda x: jax.jvp(f, (x,), (p,))[1], (x,), (e,))[1]

    return f(x) + jnp.sum(jax.vmap(along)(jnp.eye(x.size, dtype=x.dtype), covariance), axis=0) / 2


def _differentiate_along(
    f: Callable[..., Any], at: tuple[Any, ...], along: tuple[Any, ...]
) -> tuple[Any, Any]:
    """f and its derivatives along each of P directions, leaves (P, ...)."""
    return jax.vmap(lambda *v: jax.jvp(f, at, v), out_axes=(None, 0))(*along)


@functools.partial(arrays.jit, static_argnums=0)
def _filter_trajectories(
    process: Observed, theta: Params, times: records.Times, x: Array, context: PyTree
) -> tuple[Array, Array]:
    """ln p of every trajectory (E,), and eᵢ(S⁻¹e)ᵢ of every sample (E, T+1, D)."""

    def one(y: Array, context: PyTree) -> tuple[Array, Array]:
        prior = process._prior(theta, context)
        known = prior.mean.astype(y.dtype), prior.covariance.astype(y.dtype)
        now, first = process._add_first_sample(theta, *known, y[0], context)

        def body(now: FilteredState, sample: Any) -> tuple[FilteredState, Array]:
            y, t, dt = sample
            after, ratio = process._add_sample(
                theta, now.mean, now.covariance, processes.Step(y, y, t, dt, context)
            )
            return after._replace(log_density=now.log_density + after.log_density), ratio

        now, ratio = jax.lax.scan(body, now, (y[1:], times.t[:-1], times.dt))
        return now.log_density, jnp.concatenate([first[None], ratio])

    return jax.vmap(one)(x, context)


@functools.partial(arrays.jit, static_argnums=0)
def _find_channels(
    process: Observed, theta: Params, x: Array, t: Array, context: PyTree
) -> tuple[Array, Array]:
    """Channels with noise (D,), and those known at the start that depend on θ (D, P)."""
    c = jnp.asarray(process.observe, x.dtype)
    _, prior = process._prior(theta, context)
    r = _as_matrix(_evaluate(process.noise, theta, context), len(process.observe))
    slope = jax.jacfwd(lambda x: process.process.drift(theta, x, t, context))(x)
    spread = (
        prior + slope @ prior @ slope.T + diffusion_matrix(process.process, theta, x, t, context)
    )
    return jnp.diagonal(c @ spread @ c.T + r) > 0, _find_moved(process, theta, context)


def _find_moved(process: Observed, theta: Params, context: PyTree) -> Array:
    """Channels that are exactly known at the start and depend on a parameter. Shape (D, P)."""
    flat, unravel = ravel_pytree(theta)
    c = jnp.asarray(process.observe, flat.dtype)
    _, prior = process._prior(theta, context)
    r = _as_matrix(_evaluate(process.noise, theta, context), len(process.observe))
    moves = jax.jacfwd(lambda v: c @ process._prior(unravel(v), context).mean)(flat) != 0
    known = ~(jnp.diagonal(c @ prior @ c.T + r) > 0)
    return moves & known[:, None]


@functools.lru_cache(maxsize=256)
def _is_linear(process: processes.Process, *forms: Any) -> bool:
    """Whether the drift is linear in x and the noise independent of it, for all times and θ.

    Decided from the traced operations. forms: shapes of theta, x, t and context.
    """
    arguments = [check.abstract_tree(form) for form in forms]
    noise = functools.partial(diffusion_matrix, process)
    if dependence.varies_in_slope(process.drift, *arguments, on=1):
        return False
    return not dependence.depends(noise, *arguments, on=1)


@functools.lru_cache(maxsize=256)
def _shares_covariance(process: Observed, *forms: Any) -> bool:
    """Whether the covariances do not depend on the context, as far as tracing shows.

    forms: shapes of theta, x, t and context.
    """
    shared = dataclasses.replace(process, shared=True)
    theta, x, t, context = (check.abstract_tree(form) for form in forms)

    def covariances(theta: Params, t: Array, context: PyTree) -> tuple[Array, Array]:
        mean, prior = shared._prior(theta, context)
        y = jnp.zeros(len(shared.observe), x.dtype)
        now, _ = shared._add_first_sample(
            theta, mean.astype(x.dtype), prior.astype(x.dtype), y, context
        )
        after, _ = shared._add_sample(
            theta, now.mean, now.covariance, processes.Step(y, y, t, jnp.ones_like(t), context)
        )
        return now.covariance, after.covariance

    if not jax.tree.leaves(context):
        return True
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), context)
    try:
        jax.eval_shape(
            jax.vmap(covariances, in_axes=(None, None, 0), out_axes=None), theta, t, rows
        )
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------ numbers


def _hashable(value: Any) -> Any:
    """A function of (theta, context), or numbers as nested tuples that share compilations."""
    if callable(value):
        return check.drop_extra_arguments(value, 2)
    return _as_tuples(np.asarray(value, float).tolist())


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _evaluate(value: Any, theta: Params, context: PyTree) -> Any:
    return value(theta, context) if callable(value) else jnp.asarray(value, float)


def _as_matrix(value: Any, size: int) -> Array:
    """The full covariance matrix of a number, a diagonal or a matrix."""
    v = jnp.asarray(value)
    return v if v.ndim == 2 else jnp.diag(jnp.broadcast_to(v, (size,)))


def _square_root(value: Any, size: int) -> Array:
    """A with A Aᵀ = covariance, also where it is singular."""
    v = jnp.asarray(value)
    if v.ndim < 2:
        return jnp.diag(jnp.sqrt(jnp.broadcast_to(v, (size,))))
    return root_covariance(v)


def _check_covariance(name: str, value: Any, size: int) -> None:
    entries = np.asarray(value)
    v = np.asarray(entries, float)
    if v.shape not in ((), (size,), (size, size)):
        raise ValueError(
            f"`{name}` must be a number, ({size},) or ({size}, {size}); got shape {v.shape}."
        )
    least = np.nan
    if np.isfinite(v).all():
        least = float(np.linalg.eigvalsh((v + v.T) / 2)[0] if v.ndim == 2 else v.min())
    # rounding moves each entry by eps/2 of itself, and so an eigenvalue by eps/2 ‖V‖ at most (Weyl)
    rounding = np.finfo(entries.dtype if entries.dtype.kind == "f" else float).eps
    slack = max(1e-12, size * rounding) * np.abs(v).max(initial=0) if v.ndim == 2 else 0.0
    if not least >= -slack or (v.ndim == 2 and not np.allclose(v, v.T)):
        raise ValueError(
            f"`{name}` is a covariance, symmetric with no negative eigenvalue; its least is "
            f"{least:g}: {v.tolist()}."
        )
