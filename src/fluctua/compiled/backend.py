"""The door of simulated substrates, and the choice between JAX and a kernel of one's own process.

A kernel has the noise of the JAX path, number for number, and its gradients to rounding. What it
does not do is left to JAX, with one line that says why.
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
from fluctua.compiled.ahead import (
    DOMINATED,
    NOT_FINITE,
    OUT_OF_RANGE,
    arrays,
    check_generator,
    make_range_error,
    number_generator,
    numbers,
)
from fluctua.compiled.emit import Layout, laid_out, numbers_ahead
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import Program, describe_shapes, traced
from fluctua.core import baselines, draws, simulate
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.draws import Start, Wiener, threefry
from fluctua.core.model import Tables
from fluctua.core.process import AnyProcess
from fluctua.core.simulate import Counted, Ensemble, Recipe, Simulator, begin
from fluctua.core.streamed import Call, Swept, split_key
from fluctua.core.theorem import Sums
from fluctua.core.twin_sweep import Parts, TwinCall
from fluctua.core.words import close_match
from fluctua.processes.jumps import Jumps

WORTHWHILE = 4_000_000
"""Trajectories times steps, over all calls of a training, from which on "auto" takes a kernel. A
rule of sizes alone: the same training gives the same bits, whatever has been compiled before and
wherever it was interrupted."""

STEP_OF_JUMPS = 16
"""Steps that one of a jump process counts for: it has events within, and JAX takes 1 µs and more
for it.
"""

MOST_ON_GPU = 128
"""Parameters up to which "auto" takes a kernel: on an H200 one with 94 is 4 to 17 times as fast as
JAX, one with 256 as fast at best (`results/own`)."""

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
    integrator: str | Callable[..., Array] | None = None,
    backend: str = "auto",
) -> Simulator:
    """A simulated substrate X_{n+1} = m(X_n, Δt) + σ√Δt z, m = x + μΔt (Eq. 1, discretised), on the
    grid `t` (T+1,).

    Args:
        process: drift and noise.
        start: a fixed state (M,), a `Density`, or a `Reparameterised` start; left off where the
            process brings its own (`Observed`).
        t: the time grid.
        context: key -> pytree, drawn once a trajectory, or `Counted`.
        wiener: the source of z.
        integrator: m, that of `process` if not given: "euler"; "heun" or "rk4", which bear longer
            steps where the drift turns faster than it decays; `Exponential`. Estimators follow;
            their running rewards are integrated by the trapezoid rule.
        backend: what runs an estimator's trajectories. "cpu" compiles a kernel of the process, the
            score and the reward with the system's C++ compiler, "cuda" one for an NVIDIA GPU
            through CuPy; "jax" does not; "auto" compiles where a call, or a training with all its
            iterations, is large and kernels can do it, for the GPU where there is one, and logs one
            line where they cannot. The noise is the same, and gradients are equal to rounding.

    Returns: a `Simulator`, (key, theta, count) -> `Trajectories` with x (count, T+1, M).

    """
    if backend not in CHOICES:
        raise ValueError(
            f"`backend` is one of {', '.join(CHOICES)}; got "
            f"{backend!r}.{close_match(backend, CHOICES)}"
        )
    if backend == "cuda":
        cuda.require_cupy()
    plain = simulate.simulator(
        process, start, t, context=context, wiener=wiener, integrator=integrator
    )
    return plain if backend == "jax" else plain._replace(backend=Compiled(backend))


class NotFinite(Unsupported):
    """Numbers that are none, which JAX meets as well: it says where, whatever was to run the
    trajectories.
    """


class Compiled(NamedTuple):
    """A backend of `Simulator` that runs kernels. choice: "cpu" or "cuda" to insist, "auto" to
    leave some to JAX.
    """

    choice: str

    def samples(self, call: Call) -> Swept | None:
        """Returns, gradients and final states; None to leave them to JAX."""
        if self._leaves(call):
            return None
        try:
            return _samples(call, self.place(call.theta))
        except NotFinite:
            return None
        except Unsupported as problem:
            self._refused(problem)
            return None

    def parts(self, call: TwinCall) -> Parts | None:
        """The two parts of the gradients with a twin; None to leave them to JAX."""
        if self._leaves(call):
            return None
        try:
            key = twin.TwinKey(call, OPTIMISE, self.place(call.numbers.theta))
            return twin.parts(call, twin.twin_kernel(key, True))
        except Unsupported as problem:
            self._refused(problem)
            return None

    def _leaves(self, call: Call | TwinCall) -> bool:
        """Whether all calls of the training together are too small for "auto" to compile a
        kernel.
        """
        substrate = call.substrate
        each = STEP_OF_JUMPS if isinstance(substrate.recipe.process, Jumps) else 1
        work = simulate.planned_calls() * call.count * len(substrate.times.dt) * each
        return self.choice == "auto" and work < WORTHWHILE

    def _refused(self, problem: Unsupported) -> None:
        if self.choice != "auto":
            raise ValueError(
                f'no kernel can be made of this process: {problem}. Use backend="auto" or "jax".'
            ) from None
        _log(str(problem))

    def source(self, call: Call | TwinCall) -> str:
        """The generated text of the kernel."""
        if isinstance(call, TwinCall):
            return twin.twin_kernel(
                twin.TwinKey(call, OPTIMISE, self.place(call.numbers.theta)), False
            ).source
        return _kernel(call, self.place(call.theta), build=False).source

    def place(self, theta: Params) -> str:
        """Where kernels run. "auto" does not take work from a GPU that JAX does faster."""
        if self.choice != "auto":
            return self.choice
        if jax.default_backend() == "gpu":
            if not cuda.available():
                raise Unsupported(
                    "cupy",
                    "JAX has a GPU, and kernels for it need CuPy: pip install 'fluctua[cuda13]'",
                )
            parameters = sum(np.size(leaf) for leaf in jax.tree.leaves(theta))
            if parameters > MOST_ON_GPU:
                raise Unsupported(
                    "theta",
                    f"{parameters} parameters: on a GPU, JAX is faster from {MOST_ON_GPU} on",
                )
        return "cuda" if cuda.available() else "cpu"


def _log(why: str) -> None:
    """One line, once for each reason."""
    if why not in _logged:
        _logged.add(why)
        logging.getLogger("fluctua").warning("trajectories run on JAX, not on a kernel: %s", why)


# ----------------------------------------------------------------------------------- making kernels


class Kernel(NamedTuple):
    """A program, where its numbers are, its text and the loaded library."""

    program: Program
    layout: Layout
    source: str
    library: cpu.CpuLibrary | cuda.GpuLibrary | None
    real: np.dtype
    begins: bool  # its trajectories itself, from one state, without a context


@lru_cache(maxsize=256)
def _made(key: _Key, build: bool) -> Kernel:
    program = traced(key.model, key.recipe, key.theta, key.ensemble, key.t)
    layout = laid_out(program)
    real = np.dtype(np.float64 if key.double else np.float32)
    library: cpu.CpuLibrary | cuda.GpuLibrary | None = None
    begins = key.recipe.fixed and key.model.objective.initial is None
    if key.place == "cuda":
        ahead = numbers_ahead(program, layout)
        theta = np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(key.theta)))
        form = cuda.Form(
            program,
            layout,
            real,
            key.noise64,
            key.wiener,
            key.sweep == 2,
            begins,
            ahead=ahead,
            theta=theta,
        )
        return Kernel(
            program,
            layout,
            form.source("sweep"),
            cuda.GpuLibrary(form) if build else None,
            real,
            begins,
        )
    source = cpu.cpu_source(
        program,
        layout,
        double=key.double,
        noise64=key.noise64,
        wiener=key.wiener,
        sweep=key.sweep,
        begins=begins,
    )
    if build:
        library = cpu.CpuLibrary(
            cpu.find_or_build(source, OPTIMISE), 8 if key.double or key.noise64 else 16, real
        )
    return Kernel(program, layout, source, library, real, begins)


class _Key:
    """What a kernel is made of; equal where code, structure and types are, whatever the numbers."""

    def __init__(self, call: Call, place: str):
        ensemble = jax.eval_shape(lambda: _begun(call, call.key, 1))
        self.place = place
        self.model = call.model
        self.recipe = call.substrate.recipe
        self.t = call.substrate.t
        self.theta = call.theta
        self.ensemble = ensemble
        self.double = ensemble.x.dtype == np.float64
        self.noise64 = jnp.result_type(float) == np.float64
        self.wiener = number_generator(self.recipe.wiener)
        self.sweep = _choose_sweep(call)
        one = ensemble._replace(streams=None)
        self._identity = (
            call.model._replace(baseline=_none, initial_baseline=_none),
            self.recipe,
            describe_shapes(call.theta),
            describe_shapes(one),
            str(self.t.dtype),
            self.noise64,
            self.wiener,
            self.sweep,
            place,
        )

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._identity == other._identity


def _none(kick: Any) -> Any:
    return kick


def _kernel(call: Call, place: str, build: bool = True) -> Kernel:
    """The kernel of a call, found without beginning an ensemble if there was a call like it."""
    like = (
        call.model,
        call.plans[0].name,
        call.substrate.recipe,
        describe_shapes(call.theta),
        describe_shapes(call.substrate.x0),
        str(call.substrate.t.dtype),
        jnp.result_type(float),
        place,
        build,
    )
    if like not in _KERNELS:
        _KERNELS[like] = _made(_Key(call, place), build)
        if len(_KERNELS) > MOST_KERNELS:
            _KERNELS.pop(next(iter(_KERNELS)))
    return _KERNELS[like]


_KERNELS: dict[Any, Kernel] = {}
MOST_KERNELS = 256


def _choose_sweep(call: Call) -> int:
    name = call.plans[0].name
    known = {
        "none": baselines.none,
        "time": baselines.time_only,
        "mean": baselines.mean,
        "optimal": baselines.optimal,
    }
    if name not in known or call.model.baseline is not known[name]().of:
        raise Unsupported("baseline", f"the baseline {name!r}; kernels serve {', '.join(SWEEPS)}")
    return SWEEPS[name]


# ------------------------------------------------------------------------------------- one estimate


@partial(jit, static_argnums=(0, 1))
def _ensemble(
    recipe: Recipe, count: int, key: Array, theta: Params, x0: Array | None, first: int | None
) -> Ensemble:
    return begin(recipe, count, key, theta, x0, first)


def _begun(call: Call, key: Array, count: int, first: int | None = None) -> Ensemble:
    return _ensemble(call.substrate.recipe, count, key, call.theta, call.substrate.x0, first)


class _Begun(NamedTuple):
    """Trajectories before their first step, as a kernel takes them. ensemble: of JAX; None
    where the kernel begins.
    """

    arrays: dict[str, Any]
    count: int  # type: ignore[assignment]
    ensemble: Ensemble | None


@partial(jit, static_argnums=0)
def _words(wiener: int, key: Array, theta: Params | None) -> Array:
    """Keys of the noise of the run and of its pilot, two words each, and θ behind them. key: of a
    call

    What a kernel begins with, in one piece: it is the number of launches that takes time on a GPU.
    """
    words = draws.philox_key_words if wiener == 2 else jax.random.key_data
    pieces = [words(simulate.noise_key(noise)) for noise in split_key(key)]
    if theta is not None:
        pieces.append(jax.lax.bitcast_convert_type(ravel_pytree(theta)[0], jnp.uint32).ravel())
    return jnp.concatenate(pieces)


class _Work(NamedTuple):
    """A call and the kernel that does it."""

    kernel: Kernel
    call: Call
    words: Any  # of `_words`, where the kernel begins its trajectories

    @property
    def library(self) -> cpu.CpuLibrary | cuda.GpuLibrary:
        """The kernel, loaded."""
        assert self.kernel.library is not None
        return self.kernel.library

    @property
    def device(self) -> cuda.GpuLibrary | None:
        """The kernel on a GPU that computes there what is shared; else None."""
        return (
            self.library
            if isinstance(self.library, cuda.GpuLibrary) and self.library.form.ahead
            else None
        )

    @property
    def steps(self) -> int:
        """T."""
        return len(self.call.substrate.times.dt)

    def begun(self, count: int, *, pilot: bool) -> _Begun:
        """`count` trajectories of the run or of the pilot before their first step."""
        kernel = self.kernel
        (key, substrate) = (self.call.key, self.call.substrate)
        first = None if pilot else self.call.first
        device = self.device
        if not kernel.begins:
            ensemble = _begun(self.call, split_key(key)[pilot], count, first)
            if device:
                own = device.ensemble(number_generator(substrate.recipe.wiener), ensemble)
                own |= {
                    "theta": device.parameters(self.call.theta),
                    "times": device.times(substrate),
                }
            else:
                own = arrays(
                    kernel.program, kernel.layout, kernel.real, substrate, self._flat(), ensemble
                )
            return _Begun(own, count, ensemble)

        def start(x0):
            return np.asarray(x0, kernel.real)

        stream = self.words[2:4] if pilot else self.words[:2]
        if device:
            own = {
                "stream": stream,
                "theta": self.words[4:],
                "times": device.times(substrate),
                "x": device.kept("x", substrate.x0, start),
            }
        else:
            none = np.empty((0, count))
            own = numbers(kernel.program, kernel.layout, kernel.real, substrate, self._flat(), none)
            own |= {"stream": stream, "x": start(substrate.x0)}
        return _Begun(own | {"first": first or 0}, count, None)

    def _flat(self) -> np.ndarray:
        # leaf by leaf: what JAX has sent to the host before, it does not send again
        return np.concatenate(
            [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(self.call.theta)]
        )

    def paid(self, begun: _Begun) -> tuple[Any, float]:
        """The rewards before the first step, of every trajectory (E,) and in all."""
        if begun.ensemble is None:
            return self.library.empty(begun.count), 0.0
        ensemble = begun.ensemble
        objective = self.call.model.objective
        if objective.initial is None:
            return self.library.own(np.zeros(begun.count)), 0.0
        at_start = self.library.from_jax(
            terms.initial_rewards(objective, self.call.theta, ensemble.x, ensemble.context)
        )
        return at_start, self.library.total(at_start)

    def rewarded(self, begun: _Begun) -> tuple[Any, np.ndarray]:
        """R of every trajectory (E,), and the mean of λ̂ₙ at every time (T+1,)."""
        library = self.library
        count = begun.count
        reward, first = self.paid(begun)
        places = {
            "reward": reward,
            "last": library.empty(self.kernel.program.state, count),
            "flags": library.flags(),
        }
        sums = library.run(
            "rewards_summed",
            begun.arrays | places,
            count=count,
            steps=self.steps,
            sums=(self.steps, 2),
        )
        # C after the running reward of step n; that of the step itself follows
        so_far = first + np.cumsum(sums[:, 0]) + np.cumsum(np.append(0.0, sums[:-1, 1]))
        whole = library.total(reward)
        return reward, np.append(whole, whole - so_far) / count

    def weighed(self, begun: _Begun) -> tuple[Any, np.ndarray]:
        """R of every trajectory (E,), and ΣU² and ΣλU² of every step and score (T, S, 2)."""
        library = self.library
        count = begun.count
        scores = len(self.kernel.layout.scores)
        shape = (self.steps, scores, 2)
        at_once = (
            isinstance(library, cpu.CpuLibrary)
            and self.steps * (scores + 1) * library.block <= cpu.KEPT_BYTES
        )
        if not scores or not at_once:
            guess, _ = self.rewarded(begun)
            places = {"reward": self.paid(begun)[0], "guess": guess, "flags": library.flags()}
            sums = np.zeros(shape)
            if scores:
                sums = library.run(
                    "weights", begun.arrays | places, count=count, steps=self.steps, sums=shape
                )
            return guess, sums
        places = {
            "reward": self.paid(begun)[0],
            "last": library.empty(self.kernel.program.state, count),
        }
        sums = library.run(
            "returns_and_weights", begun.arrays | places, count=count, steps=self.steps, sums=shape
        )
        return places["reward"], sums

    def baseline(self, begun: _Begun, tables: Tables) -> dict[str, Any]:
        """The table of the baseline and what else of it a sweep takes.

        With m the mean of all E, λ − (Em − λ)/(E − 1) = (λ − m) E/(E − 1); with the weights U² of
        `optimal`, and m the mean so weighted, λ − (mΣU² − λU²)/(ΣU² − U²) = (λ − m)/(1 − U²/ΣU²).
        """
        real = self.kernel.real
        name = self.call.plans[0].name
        if name == "none":
            return {
                "bar": np.zeros(self.steps, real),
                "same": 0.0 if tables.step is None else float(tables.step[0]),
            }
        if name == "time":
            assert tables.step is not None
            table = np.asarray(tables.step)

            def after(step):
                return np.array(
                    np.asarray(step)[1:], real
                )  # n+1: the reward at n precedes the kick

            return {"bar": self.library.kept("bar", tables.step, after), "same": float(table[0])}
        if name == "mean":
            guess, to_go = self.rewarded(begun)
            return {
                "guess": guess,
                "bar": to_go[1:].astype(real),
                "scale": begun.count / (begun.count - 1),
            }
        guess, sums = self.weighed(begun)
        if not np.isfinite(sums).all():
            raise NotFinite("baseline", "the weights of a step are not finite")
        weight = sums[..., 0]
        weighted = sums[..., 1]
        some = weight > 0
        inverse = np.where(some, 1 / np.where(some, weight, 1), 0)
        bar = np.where(some, weighted * inverse, 0)
        return {"guess": guess, "bar": bar.astype(real), "inverse": inverse.astype(real)}


def _samples(call: Call, place: str) -> Swept:
    model, plans, tables, substrate, _, theta, count, _ = call
    kernel = _kernel(call, place)
    check_generator(call.key)
    work = _Work(kernel, call, None)
    library = work.library
    real = kernel.real
    if kernel.begins:
        words = _words(
            number_generator(substrate.recipe.wiener), call.key, theta if work.device else None
        )
        work = work._replace(
            words=work.device.from_jax(words) if work.device else np.asarray(words)
        )
    if call.needs_pilot:
        pilot = max(plan.pilot for plan in plans)
        tables = tables.fill_missing(work.rewarded(work.begun(pilot, pilot=True))[1].astype(real))
    begun = work.begun(count, pilot=False)
    baseline = work.baseline(begun, tables)
    scale = baseline.pop("scale", 1.0)
    same = baseline.pop("same", 0.0)
    parameters = len(kernel.program.names)
    places = library.places(kernel.program.state, parameters, count) | {"flags": library.flags()}
    if begun.ensemble is not None:
        x, context, _ = begun.ensemble
        known = library.to_jax(baseline["guess"]) if "guess" in baseline else same
        guess = jnp.broadcast_to(jnp.asarray(known, real), count)
        first = terms.start(model, theta, x, substrate.t[0], context, guess, tables).sums
        before = library.from_jax(_stacked(first, real))
        places["reward"][...], places["score"] = before[0], before[1 + parameters :]
        places = library.with_gradient(places, before[1 : 1 + parameters])
    library.run(
        "sweep",
        begun.arrays | baseline | places,
        count=count,
        steps=work.steps,
        scale=scale,
        same=same,
    )
    flags = library.read(places["flags"])
    if plans[0].name == "optimal" and flags & DOMINATED:
        raise Unsupported("baseline", "one trajectory has nearly all of the weight of a step")
    if flags & OUT_OF_RANGE:
        raise make_range_error(real)
    flat = np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(theta)))
    return Swept(*library.rows(places, flat), finite=not flags & NOT_FINITE)


@partial(jit, static_argnums=1)
def _stacked(sums: Sums, real: np.dtype) -> Array:
    """Reward, gradient and score with the trajectory last. (1 + 2P, E)"""
    return jnp.concatenate([sums.reward[None], sums.gradient.T, sums.score.T]).astype(real)
