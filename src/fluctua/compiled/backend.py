"""The door of simulated substrates, and the choice between JAX and a kernel of one's own process.

A kernel has the noise of the JAX path, number for number, and its gradients to rounding. What it does not do is left
to JAX, with one line that says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.compiled import cpu, cuda, twin
from fluctua.compiled.ahead import arrays, check_generator, numbers, wiener_of
from fluctua.compiled.emit import Layout, laid_out
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import Program, shape_of, traced
from fluctua.core import baselines, draws, simulate, sweep
from fluctua.core.baselines import Baseline
from fluctua.core.draws import Start, Wiener, threefry
from fluctua.core.simulate import Counted, Ensemble, Recipe, Simulator, begin
from fluctua.core.sources import Call, run_and_pilot
from fluctua.core.sweep import Model, Sums, Tables
from fluctua.core.text import close_match
from fluctua.core.twin_sweep import Parts, TwinCall
from fluctua.core.types import AnyProcess, Array, Params, PyTree

WORTHWHILE = 4_000_000
"""Trajectories times steps of a call from which on "auto" takes a kernel. A rule of sizes alone: the same call gives
the same bits, whatever has been compiled before."""

MOST_ON_GPU = 128
"""Parameters whose sums a thread can hold: on an H200 a kernel with 94 is 13 times as fast as JAX, one with 256 half as
fast (`results/own`)."""

CHOICES = ("auto", "jax", "cpu", "cuda")
SWEEPS = {"none": 1, "time": 1, "mean": 1, "optimal": 2}
"""The sweep of native/sweep.hpp for each baseline that a kernel serves."""

OPTIMISE = "-O2"

_logged: set[str] = set()


def simulator(
    process: AnyProcess,
    start: Start | None = None,
    t: Array | None = None,
    *,
    context: Callable[[Array], PyTree] | Counted | None = None,
    wiener: Wiener = threefry,
    backend: str = "auto",
) -> Simulator:
    """A simulated substrate X_{n+1} = X_n + μΔt + σ√Δt z (Eq. 1, discretised) on the grid `t` (T+1,).

    Args:
        process: drift and noise.
        start: a fixed state (M,), a `Density`, or a `Reparameterised` start; left off where the process brings its own
            (`Observed`).
        t: the time grid.
        context: key -> pytree, drawn once a trajectory, or `Counted`.
        wiener: the source of z.
        backend: what runs an estimator's trajectories. "cpu" compiles a kernel of the process, the score and the reward
            with the system's C++ compiler, "cuda" one for an NVIDIA GPU through CuPy; "jax" does not; "auto" compiles
            for large calls of what kernels can do, for the GPU where there is one, and logs one line where they cannot.
            The noise is the same, and gradients are equal to rounding.

    Returns: a `Simulator`, (key, theta, count) -> `Trajectories` with x (count, T+1, M).

    """
    if backend not in CHOICES:
        raise ValueError(f"`backend` is one of {', '.join(CHOICES)}; got {backend!r}.{close_match(backend, CHOICES)}")
    if backend == "cuda":
        cuda.require_cupy()
    plain = simulate.simulator(process, start, t, context=context, wiener=wiener)
    return plain if backend == "jax" else plain._replace(backend=Compiled(backend))


class Compiled(NamedTuple):
    """A backend of `Simulator` that runs kernels. choice: "cpu" or "cuda" to insist, "auto" to leave some to JAX."""

    choice: str

    def samples(self, call: Call) -> tuple[Array, Array, Array] | None:
        """Returns (E,), gradients (E, P), final states (E, M); None to leave them to JAX."""
        if self.choice == "auto" and call.count * len(call.substrate.times.dt) < WORTHWHILE:
            return None
        try:
            return _samples(call, self.place(call.theta))
        except Unsupported as problem:
            self._refused(problem)
            return None

    def parts(self, call: TwinCall) -> Parts | None:
        """The two parts of the gradients with a twin; None to leave them to JAX."""
        if self.choice == "auto" and call.count * len(call.substrate.times.dt) < WORTHWHILE:
            return None
        try:
            key = twin.TwinKey(call, OPTIMISE, self.place(call.numbers.theta))
            return twin.parts(call, twin.twin_kernel(key, True))
        except Unsupported as problem:
            self._refused(problem)
            return None

    def _refused(self, problem: Unsupported) -> None:
        if self.choice != "auto":
            raise ValueError(
                f'no kernel can be made of this process: {problem}. Use backend="auto" or "jax".'
            ) from None
        _log(str(problem))

    def source(self, call: Call | TwinCall) -> str:
        """The generated text of the kernel."""
        if isinstance(call, TwinCall):
            return twin.twin_kernel(twin.TwinKey(call, OPTIMISE, self.place(call.numbers.theta)), False).source
        return _kernel(call, self.place(call.theta), build=False).source

    def place(self, theta: Params) -> str:
        """Where kernels run. "auto" does not take work from a GPU that JAX does faster."""
        if self.choice != "auto":
            return self.choice
        if jax.default_backend() == "gpu":
            if not cuda.available():
                raise Unsupported("cupy", "JAX has a GPU, and kernels for it need CuPy: pip install 'fluctua[cuda13]'")
            parameters = sum(np.size(leaf) for leaf in jax.tree.leaves(theta))
            if parameters > MOST_ON_GPU:
                raise Unsupported("theta", f"{parameters} parameters: on a GPU, JAX is faster from {MOST_ON_GPU} on")
        return "cuda" if cuda.available() else "cpu"


def _log(why: str) -> None:
    """One line, once for each reason."""
    if why not in _logged:
        _logged.add(why)
        logging.getLogger("fluctua").warning("trajectories run on JAX, not on a kernel: %s", why)


# ------------------------------------------------------------------------------------------ making kernels


class Kernel(NamedTuple):
    """A program, where its numbers are, its text and the loaded library."""

    program: Program
    layout: Layout
    source: str
    library: cpu.Library | cuda.Library | None
    real: np.dtype
    begins: bool  # its trajectories itself: on a GPU, from one state, without a context


@lru_cache(maxsize=256)
def _made(key: _Key, build: bool) -> Kernel:
    program = traced(key.model, key.recipe, key.theta, key.ensemble, key.t)
    layout = laid_out(program)
    real = np.dtype(np.float64 if key.double else np.float32)
    library: cpu.Library | cuda.Library | None = None
    if key.place == "cuda":
        begins = key.recipe.start is None and key.recipe.context is None and key.model.objective.initial is None
        form = cuda.Form(program, layout, real, key.noise64, key.wiener, key.sweep == 2, begins)
        return Kernel(program, layout, form.source("sweep"), cuda.Library(form) if build else None, real, begins)
    source = cpu.cpu_source(program, layout, double=key.double, noise64=key.noise64, wiener=key.wiener, sweep=key.sweep)
    if build:
        library = cpu.Library(cpu.library_of(source, OPTIMISE), 8 if key.double or key.noise64 else 16, real)
    return Kernel(program, layout, source, library, real, False)


class _Key:
    """What a kernel is made of; equal where code, structure and types are, whatever the numbers."""

    def __init__(self, call: Call, place: str):
        ensemble, self.place = _begun(call, call.key, 1), place
        self.model, self.recipe, self.t = call.model, call.substrate.recipe, call.substrate.t
        self.theta, self.ensemble = call.theta, ensemble
        self.double = ensemble.x.dtype == np.float64
        self.noise64 = jnp.result_type(float) == np.float64
        self.wiener = wiener_of(self.recipe.wiener)
        self.sweep = _sweep_of(call)
        one = jax.tree.map(lambda leaf: leaf[:1], ensemble._replace(streams=None))
        self._identity = (
            call.model._replace(baseline=_none, initial_baseline=_none), self.recipe,
            shape_of(call.theta), shape_of(one), str(self.t.dtype), self.noise64, self.wiener, self.sweep, place,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._identity == other._identity


def _none(kick: Any) -> Any:
    return kick


def _kernel(call: Call, place: str, build: bool = True) -> Kernel:
    """The kernel of a call, found without beginning an ensemble if there was a call like it."""
    like = (call.model, call.plans[0].name, call.substrate.recipe, shape_of(call.theta), shape_of(call.substrate.x0),
            str(call.substrate.t.dtype), jnp.result_type(float), place, build)  # fmt: skip
    if like not in _KERNELS:
        _KERNELS[like] = _made(_Key(call, place), build)
        if len(_KERNELS) > MOST_KERNELS:
            _KERNELS.pop(next(iter(_KERNELS)))
    return _KERNELS[like]


_KERNELS: dict[Any, Kernel] = {}
MOST_KERNELS = 256


def _sweep_of(call: Call) -> int:
    name = call.plans[0].name
    known = {"none": baselines.none, "time": baselines.time_only, "mean": baselines.mean, "optimal": baselines.optimal}
    if name not in known or call.model.baseline is not known[name]().of:
        raise Unsupported("baseline", f"the baseline {name!r}; kernels serve {', '.join(SWEEPS)}")
    return SWEEPS[name]


# ------------------------------------------------------------------------------------------ one estimate


@partial(jax.jit, static_argnums=(0, 1))
def _ensemble(recipe: Recipe, count: int, key: Array, theta: Params, x0: Array | None, first: int | None) -> Ensemble:
    return begin(recipe, count, key, theta, x0, first)


def _begun(call: Call, key: Array, count: int, first: int | None = None) -> Ensemble:
    return _ensemble(call.substrate.recipe, count, key, call.theta, call.substrate.x0, first)


def _of(kernel: Kernel, call: Call, make: Callable, ensemble: Any) -> dict[str, Any]:
    """`arrays` or `numbers` of a call."""
    # leaf by leaf: what JAX has sent to the host before, it does not send again
    flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(call.theta)])
    return make(kernel.program, kernel.layout, kernel.real, call.substrate, flat, ensemble)


def _seed(kernel: Kernel, call: Call, key: Array, count: int, first: int | None) -> dict[str, Any]:
    """The same of an ensemble that the kernel begins: its start, and the key of its noise."""
    wiener = wiener_of(call.substrate.recipe.wiener)
    check_generator(key)
    return _of(kernel, call, numbers, np.empty((0, count))) | {
        "x": np.asarray(call.substrate.x0, kernel.real),
        "stream": np.asarray(_noise_words(wiener, key)),
        "first": first or 0,
    }


@partial(jax.jit, static_argnums=0)
def _noise_words(wiener: int, key: Array) -> Array:
    """The key of the noise, as `native/sweep.cuh` takes it. (2,)"""
    noise = simulate.noise_key(key)
    return draws.philox_key_words(noise) if wiener == 2 else jax.random.key_data(noise)


class _Work(NamedTuple):
    """A call and the kernel that does it."""

    kernel: Kernel
    call: Call

    def begun(self, key: Array, count: int, first: int | None = None) -> tuple[Ensemble | None, dict[str, Any]]:
        """An ensemble before its first step, None where the kernel begins it, and the arrays for a kernel."""
        if self.kernel.begins:
            return None, _seed(self.kernel, self.call, key, count, first)
        ensemble = _begun(self.call, key, count, first)
        return ensemble, _of(self.kernel, self.call, arrays, ensemble)

    @property
    def library(self) -> cpu.Library | cuda.Library:
        """The kernel, loaded."""
        assert self.kernel.library is not None
        return self.kernel.library

    @property
    def steps(self) -> int:
        """T."""
        return len(self.call.substrate.times.dt)

    def rewarded(self, begun: tuple[Ensemble | None, dict[str, Any]], count: int) -> tuple[Array, np.ndarray]:
        """R of every trajectory (E,), and the mean of λ̂ₙ at every time (T+1,)."""
        (ensemble, arrays), library, (model, theta) = begun, self.library, (self.call.model, self.call.theta)
        context, at_start = None, np.zeros(1)
        reward, last = library.empty(count), library.empty(self.kernel.program.state, count)
        if ensemble is not None:
            context = ensemble.context
            at_start = np.array(sweep.at_start(model.objective, theta, ensemble.x, context))
            reward = library.own(at_start)
        arrays = {**arrays, "reward": reward, "last": last}
        sums = library.run("rewards_summed", arrays, count=count, steps=self.steps, sums=(self.steps, 2))
        returns = _returned(model, theta, library.to_jax(reward), library.to_jax(last), context)
        # C after the running reward of step n; that of the step itself follows
        so_far = at_start.sum(dtype=float) + np.cumsum(sums[:, 0]) + np.cumsum(np.append(0.0, sums[:-1, 1]))
        whole = np.asarray(returns, float).sum()
        return returns, np.append(whole, whole - so_far) / count


@partial(jax.jit, static_argnums=0)
def _returned(model: Model, theta: Params, reward: Array, last: Array, context: PyTree) -> Array:
    """R (E,) after the last step, at states (M, E)."""
    return reward + sweep.terminal(model, theta, last.T, context)


@partial(jax.jit, static_argnums=0)
def _finished(
    model: Model, theta: Params, sums: Sums, last: Array, t: Array, context: PyTree, guess: Array
) -> tuple[Array, Array, Array]:
    """Returns (E,), gradients (E, P) and states (E, M) after the last step; the guess is made good by ΣU.

    sums, last: with the trajectory last, as kernels leave them.
    """
    flat, x = ravel_pytree(theta)[0].dtype, last.T
    sums = Sums(sums.reward, sums.gradient.T.astype(flat), sums.score.T.astype(flat))
    returns = sums.reward + sweep.terminal(model, theta, x, context)
    gradients = sweep.finish(model, theta, sums, x, t, context)
    return returns, gradients + (returns - guess)[:, None] * sums.score, x


def _samples(call: Call, place: str) -> tuple[Array, Array, Array]:
    model, plans, tables, substrate, key, theta, count, number = call
    k_run, k_pilot = run_and_pilot(key)
    kernel = _kernel(call, place)
    work = _Work(kernel, call)
    library, real = work.library, kernel.real
    if call.needs_pilot:
        pilot = max(plan.pilot for plan in plans)
        tables = tables.filled(jnp.asarray(work.rewarded(work.begun(k_pilot, pilot), pilot)[1], real))
    begun = work.begun(k_run, count, number)
    ensemble, arrays = begun
    guess: Any = np.zeros((), real)
    to_go = None
    if any(plan.needs_returns for plan in plans):
        guess, to_go = work.rewarded(begun, count)
    elif tables.step is not None:
        guess = np.asarray(tables.step)[0]
    guess = guess.astype(real)

    context = None if ensemble is None else ensemble.context
    if ensemble is None:  # nothing has been paid, and no draw has a score
        wide = lambda: library.empty(len(kernel.program.names), count)
        arrays |= {"guess": library.full(guess, count), "reward": library.empty(count), "gradient": wide(),
                   "score": wide()}  # fmt: skip
    else:
        guess = jnp.broadcast_to(guess, (count,))
        first = sweep.initial_sums(model, theta, ensemble.x, substrate.t[0], context, guess, tables)
        arrays |= {"guess": library.own(guess), "reward": library.own(first.reward),
                   "gradient": library.own(first.gradient.T), "score": library.own(first.score.T)}  # fmt: skip
    arrays |= {"last": library.empty(kernel.program.state, count), "dominated": library.flag()}
    arrays, scale = _with_baseline(work, plans[0], tables, arrays, count, to_go)
    library.run("sweep", arrays, count=count, steps=work.steps, scale=scale)
    if plans[0].name == "optimal" and bool(arrays["dominated"][0]):
        raise Unsupported("baseline", "one trajectory has nearly all of the weight of a step")
    sums = Sums(*(library.to_jax(arrays[name]) for name in ("reward", "gradient", "score")))
    return _finished(model, theta, sums, library.to_jax(arrays["last"]), substrate.t, context, guess)


def _with_baseline(
    work: _Work, plan: Baseline, tables: Tables, arrays: dict[str, Any], count: int, to_go: np.ndarray | None
) -> tuple[dict[str, Any], float]:
    """The arrays of the sweep with the table of its baseline, and the factor of what leaves itself out.

    With m the mean of all E, λ − (Em − λ)/(E − 1) = (λ − m) E/(E − 1); with the weights U² of `optimal`, and m the mean
    so weighted, λ − (mΣU² − λU²)/(ΣU² − U²) = (λ − m)/(1 − U²/ΣU²).
    """
    real, steps = work.kernel.real, work.steps
    if plan.name == "none":
        return arrays | {"bar": np.zeros(steps, real)}, 1.0
    if plan.name == "time":
        assert tables.step is not None
        return arrays | {
            "bar": np.array(np.asarray(tables.step)[1:], real)
        }, 1.0  # n+1: the reward at n precedes the kick
    assert to_go is not None
    if plan.name == "mean":
        return arrays | {"bar": to_go[1:].astype(real)}, count / (count - 1)
    scores = len(work.kernel.layout.scores)
    sums = np.zeros((steps, 0, 2))
    if scores:
        sums = work.library.run("weights", arrays, count=count, steps=steps, sums=(steps, scores, 2))
    if not np.isfinite(sums).all():
        raise Unsupported("baseline", "the weights of a step are not finite")
    weight, weighted = sums[..., 0], sums[..., 1]
    some = weight > 0
    inverse = np.where(some, 1 / np.where(some, weight, 1), 0)
    bar = np.where(some, weighted * inverse, 0)
    return arrays | {"bar": bar.astype(real), "inverse": inverse.astype(real)}, 1.0
