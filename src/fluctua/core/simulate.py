"""Euler–Maruyama simulation of any `Process`: the substrate when there is no hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import arrays, check, draws
from fluctua.core import process as processes
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.host import rounding
from fluctua.core.integrators import mean_rate
from fluctua.core.process import AnyProcess, Process
from fluctua.core.trajectories import Times, Trajectories


class Counted(NamedTuple):
    """A context that is a counter of the noise: draw(key of the noise, trajectory) -> pytree.

    For contexts that a native kernel draws by the same law, from the same seed.
    """

    draw: Callable[[Array, Array], PyTree]


class Recipe(NamedTuple):
    """The part of a simulator that is code and not numbers.

    Hashable, so that compilations are shared.

    process: what is simulated.
    start: a start that depends on θ or chance; None for a fixed state.
    context: key -> pytree, drawn once per trajectory; or None.
    wiener: the source of noise.
    """

    process: AnyProcess
    start: draws.Density | draws.Reparameterised | None
    context: Callable[..., PyTree] | Counted | None
    wiener: draws.Wiener

    @property
    def fixed(self) -> bool:
        """Whether all trajectories begin alike: from one state, without a context."""
        return (
            self.start is None
            and self.context is None
            and (
                isinstance(self.process, Process)
                or not isinstance(self.process, processes.HistoryDependent)
            )
        )


class Backend(Protocol):
    """Backend that runs the trajectories of an estimator in place of JAX, with the same noise."""

    def samples(self, call: Any) -> Any | None:
        """Result of a `Call`; None to leave it to JAX."""

    def returns(self, call: Any) -> Any | None:
        """The returns of a `Call` whose key is that of the run; None to leave it to JAX."""

    def estimate(self, call: Any) -> Any | None:
        """The `Estimate` of a `Call`; None where single gradients are needed for it."""

    def batch_sums(self, call: Any, size: int) -> Any | None:
        """Sums over batches of `size` trajectories, as `BatchSums`; None to leave it to JAX."""

    def parts(self, call: Any) -> Any | None:
        """The parts of the gradients with a twin, of a `TwinCall`; None to leave it to JAX."""

    def is_too_small(self, call: Any) -> bool:
        """Whether a run of calls like this one is left to JAX because it is small."""

    def source(self, call: Any) -> str:
        """The program that is generated for a `Call` or a `TwinCall`."""


_planned_calls: ContextVar[int] = ContextVar("planned_calls", default=1)


@contextmanager
def plan_calls(calls: int) -> Iterator[None]:
    """Announce that the estimate made inside is one of `calls` alike.

    A backend can then weigh the whole run. `calls` must be a function of what was asked for, never
    of
    time: the choice of a backend is visible in the last bits.
    """
    token = _planned_calls.set(calls)
    try:
        yield
    finally:
        _planned_calls.reset(token)


def planned_calls() -> int:
    """Number of estimates of the run that the present one belongs to; 1 outside of `plan_calls`."""
    return _planned_calls.get()


class Simulator(NamedTuple):
    """A substrate: (key, theta, count) -> Trajectories. Made by `simulator`."""

    recipe: Recipe
    times: Times
    x0: Array | None  # a fixed start
    backend: Backend | None = None

    @property
    def t(self) -> Array:
        """The time grid. (T+1,)"""
        return self.times.t

    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories:
        """Run `count` trajectories and keep every state (E, T+1, M).

        Estimators do not need this.
        """
        check.key(key)
        check.count(count)
        theta = check.parameters(theta)
        first, context = first_state(self, key, theta)
        check.shapes(self.recipe.process, theta, *check.take_first((first, self.t, context)))
        x, context, left = _record(self.recipe, count, key, theta, self.times, self.x0)
        check.finite_simulation(x, self.t)
        warn_about_rounding(self, theta, arrays.part(x, np.s_[:, -1]), context)
        events = None
        if left is not None:
            max_count = max(1, int(left.count.max()))
            events = _find_events(self.recipe, max_count, key, theta, self.times, self.x0, x)
        return Trajectories(self.t, x, context, events)


def simulator(
    process: AnyProcess,
    start: draws.Start | None = None,
    t: Array | None = None,
    *,
    context: Callable[[Array], PyTree] | Counted | None = None,
    wiener: draws.Wiener | str = draws.threefry,
    integrator: str | Callable[..., Array] | None = None,
) -> Simulator:
    """X_{n+1} = X_n + μΔt + σ√Δt z (Eq. 1, discretised) on the grid `t` (T+1,), on JAX.

    The arguments are those of `fluctua.simulator`, which adds the choice of a backend.
    """
    process = check.process(with_integrator(process, integrator))
    generator = draws.find_generator(wiener)
    if isinstance(process, Process) and process.noise is None:
        raise ValueError(
            "this `Process` has no `noise`, so it cannot be simulated. Give `noise`, or estimate "
            "from recorded trajectories with `gradient`."
        )
    if t is None:
        raise TypeError("a simulator needs its time grid: simulator(process, start, t).")
    if isinstance(process, processes.HistoryDependent):
        refuse_start(process, start)
        return Simulator(Recipe(process, None, context, generator), check.grid(t), None)
    if start is None:
        raise TypeError("a simulator needs a start: simulator(process, start, t).")
    moving, x0 = draws.check_start(start)
    if isinstance(moving, draws.Density) and moving.sample is None:
        raise ValueError(
            "a `Density` start needs `sample` to be simulated: (key, theta, context) -> x0 (M,)."
        )
    return Simulator(Recipe(process, moving, context, generator), check.grid(t), x0)


def with_integrator(
    process: AnyProcess, integrator: str | Callable[..., Array] | None
) -> AnyProcess:
    """The process with another integrator; as it is, if None."""
    if integrator is None:
        return process
    if not isinstance(process, Process):
        raise ValueError(
            f"`integrator` is for a `Process`; a {type(process).__name__} takes steps of its own: "
            "leave it off."
        )
    return process._replace(integrator=integrator)


def match_integrator(process: AnyProcess, substrate: Any) -> AnyProcess:
    """The process of a score with the step of the simulator that it is applied to."""
    if not isinstance(substrate, Simulator):
        return process
    own, scored = (
        p if isinstance(p, Process) else getattr(p, "diffusion", None)
        for p in (substrate.recipe.process, process)
    )
    if not isinstance(own, Process) or not isinstance(scored, Process):
        return process
    if isinstance(process, Process) and scored.integrator == "euler" != own.integrator:
        process = scored = scored._replace(
            integrator=own.integrator, noiseless=scored.noiseless or own.noiseless
        )
    if scored.integrator != own.integrator or (
        own.integrator != "euler" and scored.noiseless != own.noiseless
    ):

        def name(p):
            return f"integrator={p.integrator!r}" + (
                f" with noiseless={p.noiseless}" if p.noiseless else ""
            )

        raise ValueError(
            f"the simulator has {name(own)}, and the process of the score {name(scored)}: that is "
            "the score of another process. Give both the same `integrator` and `noiseless`."
        )
    return process


def refuse_start(process: AnyProcess, start: draws.Start | None) -> None:
    """Refuse a start for a process that brings its own."""
    if start is not None and isinstance(process, processes.HistoryDependent):
        name = type(process).__name__
        raise ValueError(
            f"an `{name}` brings its own start, {name}(..., start=...): leave `start` off here."
        )


def observe(recipe: Recipe, x: Array) -> Array:
    """The observed part (..., M) of simulated states (..., Z).

    All of it, unless the process hides some.
    """
    process = recipe.process
    if isinstance(process, Process) or not isinstance(process, processes.HistoryDependent):
        return x
    return process.select_observed(x)


def first_state(substrate: Simulator, key: Array, theta: Params) -> tuple[Array, PyTree]:
    """The start of one trajectory, (1, M) and its context: what checks look at before work begins.

    key: of a run; not looked at where all trajectories begin alike.
    """
    ensemble = _draw_first(substrate, key, theta)
    warn_about_rounding(substrate, theta, ensemble.x, ensemble.context)
    return observe(substrate.recipe, ensemble.x), ensemble.context


def shape_first_state(substrate: Simulator, theta: Params) -> tuple[PyTree, PyTree]:
    """Shapes and types of `first_state`, without its numbers and their checks."""

    def draw() -> tuple[Array, PyTree]:
        ensemble = _draw_first(substrate, jax.random.key(0), theta)
        return observe(substrate.recipe, ensemble.x), ensemble.context

    return jax.eval_shape(draw)


def _draw_first(substrate: Simulator, key: Array, theta: Params) -> Ensemble:
    if substrate.recipe.fixed:  # by way of NumPy: nothing to compile, and nothing to wait for
        x = np.asarray(substrate.x0)[None]
        ensemble = Ensemble(x.astype(arrays.working_dtype(theta, substrate.x0)), None, None)
    else:
        ensemble = _start_first(substrate.recipe, key, theta, substrate.x0)
    if ensemble.x.ndim != 2:
        raise ValueError(f"a start must be one state (M,); got shape {ensemble.x.shape[1:]}.")
    return ensemble


def warn_about_rounding(substrate: Simulator, theta: Params, x: Array, context: PyTree) -> None:
    """Warn where steps are smaller than numbers near the states x (n, M) can hold."""
    rounding.warn_about_rounding(substrate.recipe.process, theta, x, substrate.times, context)


def kick(process: Process, theta: Params, x: Array, t: Array, context: PyTree, dw: Array) -> Array:
    """σ(x, t) dw for any form of the noise. (M,)"""
    if isinstance(process.noise, processes.NoiseProduct):
        return process.noise.product(theta, x, t, context, dw)
    assert process.noise is not None  # checked at the boundary
    sigma = process.noise(theta, x, t, context)
    return sigma * dw if jnp.ndim(sigma) == 1 else sigma @ dw


def noise_width(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> int:
    """W, the number of Wiener processes."""
    if isinstance(process.noise, processes.NoiseProduct):
        return process.noise.width
    assert process.noise is not None
    return jax.eval_shape(process.noise, theta, x, t, context).shape[-1]


class Ensemble(NamedTuple):
    """E trajectories at one time; or, without the first axis, one."""

    x: Array  # (E, M), as simulated: see `observe`
    context: PyTree
    streams: PyTree


def _split_keys(key: Array) -> tuple[Array, Array, Array]:
    """Keys of contexts, starts and noise."""
    k_context, k_start, k_wiener = jax.random.split(key, 3)
    return k_context, k_start, k_wiener


NOISE = 2
"""Number of the key of the noise among those of `_split_keys`."""


def noise_key(key: Array) -> Array:
    """The key that `simulator(...)(key, ...)` gives to its noise."""
    return _split_keys(key)[NOISE]


def start_trajectory(
    recipe: Recipe, key: Array, theta: Params, x0: Array | None, j: Array
) -> Ensemble:
    """Context, start and noise stream of trajectory j: functions of (key, j) and θ alone."""
    k_context, k_start, k_wiener = _split_keys(key)
    if recipe.context is None:
        context = None
    elif isinstance(recipe.context, Counted):
        context = recipe.context.draw(k_wiener, j)
    else:
        context = recipe.context(jax.random.fold_in(k_context, j))
    stream = recipe.wiener.stream(k_wiener, j)
    if isinstance(recipe.process, processes.HistoryDependent):
        x = recipe.process.draw_start(
            jax.random.fold_in(k_start, j), theta, context, stream, recipe.wiener.draw
        )
    elif recipe.start is None:
        x = jnp.asarray(x0)
    elif isinstance(recipe.start, draws.Reparameterised):
        x = recipe.start.x0(theta, context)
    else:
        assert recipe.start.sample is not None  # checked by `simulator`
        x = recipe.start.sample(jax.random.fold_in(k_start, j), theta, context)
    x = x.astype(arrays.working_dtype(theta, x))
    return Ensemble(x, context, stream)


def start_ensemble(
    recipe: Recipe,
    count: int,
    key: Array,
    theta: Params,
    x0: Array | None,
    first: Array | None = None,
) -> Ensemble:
    """Trajectories first … first + count − 1 before their first step; from 0 if `first` is None."""
    numbers = jnp.arange(count) if first is None else first + jnp.arange(count)
    return jax.vmap(lambda j: start_trajectory(recipe, key, theta, x0, j))(numbers)


@partial(arrays.jit, static_argnums=0)
def _start_first(recipe: Recipe, key: Array, theta: Params, x0: Array | None) -> Ensemble:
    return start_ensemble(recipe, 1, key, theta, x0)


def advance_diffusion(
    process: Process,
    theta: Params,
    x: Array,
    context: PyTree,
    stream: PyTree,
    draw: Callable,
    n: Array,
    t: Array,
    dt: Array,
) -> Array:
    """m(x, Δt) + σ√Δt z. (M,)"""
    z = draw(stream, n, noise_width(process, theta, x, t, context)).astype(x.dtype)
    step = mean_rate(process, theta, x, t, dt, context) * dt + kick(
        process, theta, x, t, context, jnp.sqrt(dt) * z
    )
    return (x + step).astype(x.dtype)


def transition_one(
    recipe: Recipe,
    theta: Params,
    x: Array,
    context: PyTree,
    stream: PyTree,
    n: Array,
    t: Array,
    dt: Array,
) -> tuple[Array, PyTree]:
    """The state of one trajectory after step n (M,), and its events, if the score needs them."""
    process = recipe.process
    draw = recipe.wiener.draw
    if isinstance(process, Process):
        return advance_diffusion(process, theta, x, context, stream, draw, n, t, dt), None
    return process.advance(theta, x, context, stream, draw, n, t, dt)


def advance_one(
    recipe: Recipe,
    theta: Params,
    x: Array,
    context: PyTree,
    stream: PyTree,
    n: Array,
    t: Array,
    dt: Array,
) -> Array:
    """The state of one trajectory after step n. (M,)"""
    return transition_one(recipe, theta, x, context, stream, n, t, dt)[0]


def transition(
    recipe: Recipe, theta: Params, ensemble: Ensemble, n: Array, t: Array, dt: Array
) -> tuple[Array, PyTree]:
    """The states of all trajectories after step n (E, M), and what happened between."""
    return jax.vmap(
        lambda x, context, stream: transition_one(recipe, theta, x, context, stream, n, t, dt)
    )(*ensemble)


def advance(
    recipe: Recipe, theta: Params, ensemble: Ensemble, n: Array, t: Array, dt: Array
) -> Array:
    """The states of all trajectories after step n. (E, M)"""
    return transition(recipe, theta, ensemble, n, t, dt)[0]


def enumerate_steps(times: Times) -> tuple[Array, Array, Array]:
    """(n, t_n, Δt_n) of every step, (T,) each, for a scan over the steps."""
    return jnp.arange(times.dt.shape[0]), times.t[:-1], times.dt


@partial(arrays.jit, static_argnums=(0, 1))
def _record(
    recipe: Recipe, count: int, key: Array, theta: Params, times: Times, x0: Array | None
) -> tuple[Array, PyTree, PyTree]:
    ensemble = start_ensemble(recipe, count, key, theta, x0)

    def body(x: Array, step: Any) -> tuple[Array, tuple[Array, PyTree]]:
        x, events = transition(recipe, theta, ensemble._replace(x=x), *step)
        return x, (observe(recipe, x), events)

    _, (path, events) = jax.lax.scan(body, ensemble.x, enumerate_steps(times))

    def by_trajectory(v):
        return jnp.swapaxes(v, 0, 1)

    x = jnp.concatenate([observe(recipe, ensemble.x)[:, None], by_trajectory(path)], axis=1)
    return x, ensemble.context, jax.tree.map(by_trajectory, events)


@partial(arrays.jit, static_argnums=(0, 1))
def _find_events(
    recipe: Recipe,
    max_count: int,
    key: Array,
    theta: Params,
    times: Times,
    x0: Array | None,
    x: Array,
) -> PyTree:
    """What happened within each step of the trajectories x that a run gave; leaves (E, T, ...)."""
    ensemble = start_ensemble(recipe, x.shape[0], key, theta, x0)
    process = recipe.process
    assert not isinstance(process, Process)

    def find_events(x, context, stream, when):
        return process.events(theta, x, context, stream, when[0], when[1], when[2], max_count)

    of_trajectory = jax.vmap(find_events, in_axes=(0, None, None, 0))
    return jax.vmap(of_trajectory, in_axes=(0, 0, 0, None))(
        x[:, :-1], ensemble.context, ensemble.streams, enumerate_steps(times)
    )


def sample_states(
    substrate: Simulator, key: Array, theta: Params, trajectories: Array, every: int
) -> tuple[Array, PyTree]:
    """States of the given trajectories of a simulator at every `every`-th step, and their contexts.

    (E,) -> (E, T/every + 1, M): the same numbers as `substrate(key, theta, count).x[trajectories,
    ::every]`.
    """
    return _sample_states(
        substrate.recipe, every, key, theta, substrate.times, substrate.x0, trajectories
    )


@partial(arrays.jit, static_argnums=(0, 1))
def _sample_states(
    recipe: Recipe,
    every: int,
    key: Array,
    theta: Params,
    times: Times,
    x0: Array | None,
    trajectories: Array,
) -> tuple[Array, PyTree]:
    ensemble = jax.vmap(lambda j: start_trajectory(recipe, key, theta, x0, j))(trajectories)
    n = jnp.arange(times.dt.shape[0])
    steps = jax.tree.map(lambda v: v.reshape(-1, every), (n, times.t[:-1], times.dt))

    def one(x: Array, step: Any) -> tuple[Array, None]:
        return advance(recipe, theta, ensemble._replace(x=x), *step), None

    def several(x: Array, block: Any) -> tuple[Array, Array]:
        x, _ = jax.lax.scan(one, x, block)
        return x, observe(recipe, x)

    _, path = jax.lax.scan(several, ensemble.x, steps)
    first = observe(recipe, ensemble.x)[:, None]
    return jnp.concatenate([first, jnp.swapaxes(path, 0, 1)], axis=1), ensemble.context
