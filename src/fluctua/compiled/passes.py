"""Samples of one estimate by a kernel: passes over an ensemble, and tables of its baseline."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled import ahead as precomputed
from fluctua.compiled import cpu, cuda, kernels
from fluctua.compiled.scalar import Unsupported
from fluctua.core import draws, simulate, streamed
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, PyTree, jit, on_host, part
from fluctua.core.host import keys
from fluctua.core.objective import Rewards
from fluctua.core.theorem import Sums


class NotFinite(Unsupported):
    """A number that is not finite. The call is left to JAX, whose error names the time."""


class StartedEnsemble(NamedTuple):
    """Trajectories before their first step.

    arrays: by the names that passes give them.
    count: E.
    ensemble: of JAX; None if the kernel starts the trajectories itself.
    """

    arrays: dict[str, Any]
    count: int  # type: ignore[assignment]
    ensemble: simulate.Ensemble | None


class _RewardSums(NamedTuple):
    """Returns (E,), and means over the ensemble.

    to_go: mean of λ̂ₙ at every time (T+1,), of the trajectories that run if some stop.
    running: sum of the survival before every step (T,); None where nothing stops.
    """

    returns: Any
    to_go: np.ndarray
    running: np.ndarray | None


def pack_words(wiener: int, key: Array, theta: Params, real: np.dtype) -> np.ndarray:
    """Pack the words of `compute_noise_words`, and θ as `real` after them.

    One array, because every transfer to a GPU takes time.
    """
    leaves = [on_host(leaf).ravel() for leaf in jax.tree.leaves(theta)]
    parameters = np.concatenate(leaves).astype(real).view(np.uint32)
    return np.concatenate([compute_noise_words(wiener, key), parameters])


def compute_noise_words(wiener: int, key: Array) -> np.ndarray:
    """Return the noise keys of run and pilot, two words each. (4,)

    key: of the call. NumPy splits it if it knows the generator and its settings, else JAX.
    """
    words = keys.read_words(key)
    if words is None:
        return np.asarray(_split_noise_key(wiener, key))
    run_and_pilot = [keys.split_words(words, number) for number in range(2)]  # as `split_key`
    return np.concatenate([_order_words(wiener, part) for part in run_and_pilot])


@partial(jit, static_argnums=0)
def _split_noise_key(wiener: int, key: Array) -> Array:
    words = draws.philox_key_words if wiener >= 2 else jax.random.key_data
    return jnp.concatenate([words(simulate.noise_key(run)) for run in streamed.split_key(key)])


def _order_words(wiener: int, run: keys.Words) -> np.ndarray:
    """Return the words of the noise of a run, as a kernel reads them. (2,)"""
    noise = keys.split_words(run, simulate.NOISE)
    return np.array(noise[::-1] if wiener >= 2 else noise, np.uint32)


class KernelCall(NamedTuple):
    """A call and the kernel that runs it.

    kernel: loaded.
    call: one estimate.
    words: of `pack_words`, if the kernel starts its trajectories itself.
    run_key: of the run, if it is not that of the estimate with the key of the call.
    """

    kernel: kernels.Kernel
    call: streamed.Call
    words: Any
    run_key: Array | None = None

    @property
    def library(self) -> cpu.CpuLibrary | cuda.GpuLibrary:
        """The loaded passes of the kernel."""
        assert self.kernel.library is not None
        return self.kernel.library

    @property
    def device(self) -> cuda.GpuLibrary | None:
        """The library of a GPU that computes shared numbers there itself; else None."""
        return (
            self.library
            if isinstance(self.library, cuda.GpuLibrary) and self.library.source.ahead
            else None
        )

    @property
    def steps(self) -> int:
        """T."""
        return len(self.call.substrate.times.dt)

    def start_ensemble(self, count: int, *, pilot: bool) -> StartedEnsemble:
        """Start `count` trajectories of the run or of its pilot."""
        kernel = self.kernel
        key = self.call.key
        substrate = self.call.substrate
        first = None if pilot else self.call.first
        device = self.device
        if not kernel.self_starting:
            run_key = streamed.split_key(key)[pilot] if self.run_key is None else self.run_key
            ensemble = kernels.begin_ensemble(self.call, run_key, count, first)
            states = self._add_survival(ensemble)
            if device:
                arrays = device.load_ensemble(
                    precomputed.encode_generator(substrate.recipe.wiener), states
                )
                arrays |= {
                    "theta": device.load_parameters(self.call.theta),
                    "times": device.load_times(substrate),
                }
            else:
                arrays = precomputed.make_arrays(
                    kernel.program, kernel.layout, kernel.real, substrate, self._flat(), states
                )
            return StartedEnsemble(arrays, count, ensemble)

        def start(x0):
            return np.asarray(x0, kernel.real)

        stream = self.words[2:4] if pilot else self.words[:2]
        if device:
            arrays = {
                "stream": stream,
                "theta": self.words[4:],
                "times": device.load_times(substrate),
                "steady": device.is_steady(substrate),
                "x": device.keep("x", substrate.x0, start),
            }
        else:
            no_context = np.empty((0, count))
            arrays = precomputed.compute_numbers(
                kernel.program, kernel.layout, kernel.real, substrate, self._flat(), no_context
            )
            arrays |= {"stream": stream, "x": start(substrate.x0)}
        return StartedEnsemble(arrays | {"first": first or 0}, count, None)

    def _add_survival(self, ensemble: simulate.Ensemble) -> simulate.Ensemble:
        """Return the ensemble with the survival W₀ as a last component, if trajectories stop."""
        rewards = self.call.model.objective
        if rewards.stop is None:
            return ensemble
        t = part(self.call.substrate.t, 0)
        return ensemble._replace(
            x=_append_survival(rewards, self.call.theta, ensemble.x, t, ensemble.context)
        )

    def _flat(self) -> np.ndarray:
        # leaf by leaf: JAX keeps host copies of leaves, and would not of a concatenation
        return np.concatenate(
            [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(self.call.theta)]
        )

    def compute_initial_rewards(self, started: StartedEnsemble) -> tuple[Any, float]:
        """Return the rewards before the first step, of every trajectory (E,) and their sum."""
        if started.ensemble is None:
            return self.library.empty(started.count), 0.0
        ensemble = started.ensemble
        objective = self.call.model.objective
        if objective.initial is None and objective.stop is None:
            return self.library.copy(np.zeros(started.count)), 0.0
        t = part(self.call.substrate.t, 0)
        collected = _collect_start(objective, self.call.theta, ensemble.x, t, ensemble.context)
        at_start = self.library.from_jax(collected.reward)
        return at_start, self.library.total(at_start)

    def sum_rewards(self, started: StartedEnsemble) -> _RewardSums:
        """Return R of every trajectory, and the mean of λ̂ₙ at every time."""
        library = self.library
        count = started.count
        reward, first = self.compute_initial_rewards(started)
        places = {
            "reward": reward,
            "last": library.empty(self.kernel.program.state, count),
            "flags": library.make_flags(),
        }
        sums = library.run(
            "rewards_summed",
            started.arrays | places,
            count=count,
            steps=self.steps,
            sums=(self.steps, 2 + self.kernel.program.stops),
        )
        # C after the running reward of step n; that of the step itself follows
        so_far = first + np.cumsum(sums[:, 0]) + np.cumsum(np.append(0.0, sums[:-1, 1]))
        total = library.total(reward)
        to_go = np.append(total, total - so_far)
        if not self.kernel.program.stops:
            return _RewardSums(reward, to_go / count, None)
        running = sums[:, 2]
        return _RewardSums(reward, to_go * _invert(np.append(count, running)), running)

    def sum_weights(self, started: StartedEnsemble) -> tuple[Any, np.ndarray]:
        """Return R of every trajectory (E,), and ΣU², ΣλU² of every step and score (T, S, 2)."""
        library = self.library
        count = started.count
        scores = len(self.kernel.layout.scores)
        shape = (self.steps, scores, 2)
        keeps_scores = (
            isinstance(library, cpu.CpuLibrary)
            and self.steps * (scores + 1) * library.block <= cpu.KEPT_BYTES
        )
        if not scores or not keeps_scores:
            guess = self.sum_rewards(started).returns
            places = {
                "reward": self.compute_initial_rewards(started)[0],
                "guess": guess,
                "flags": library.make_flags(),
            }
            sums = np.zeros(shape)
            if scores:
                sums = library.run(
                    "weights", started.arrays | places, count=count, steps=self.steps, sums=shape
                )
            return guess, sums
        places = {
            "reward": self.compute_initial_rewards(started)[0],
            "last": library.empty(self.kernel.program.state, count),
        }
        sums = library.run(
            "returns_and_weights",
            started.arrays | places,
            count=count,
            steps=self.steps,
            sums=shape,
        )
        return places["reward"], sums

    def make_baseline(self, started: StartedEnsemble, tables: terms.Tables) -> dict[str, Any]:
        """Return the table of the baseline, and the other numbers that a sweep needs of it.

        With m the mean of all E, λ − (Em − λ)/(E − 1) = (λ − m) E/(E − 1); with the weights U² of
        `optimal`, and m the mean so weighted, λ − (mΣU² − λU²)/(ΣU² − U²) = (λ − m)/(1 − U²/ΣU²).
        With the survival W of trajectories that stop, m = Σλ/ΣW and λ − W(mΣW − λ)/(ΣW − W) = (λ −
        Wm)/(1 − W/ΣW).
        """
        real = self.kernel.real
        name = self.call.plans[0].name
        whole = {"inverse": np.zeros(self.steps, real)} if self.kernel.program.stops else {}
        if name == "none":
            return whole | {
                "bar": np.zeros(self.steps, real),
                "same": 0.0 if tables.step is None else float(tables.step[0]),
            }
        if name == "time":
            assert tables.step is not None
            table = np.asarray(tables.step)

            def drop_first(step):  # n+1: the reward at n precedes the kick
                return np.array(np.asarray(step)[1:], real)

            bar = self.library.keep("bar", tables.step, drop_first)
            return whole | {"bar": bar, "same": float(table[0])}
        if name == "mean":
            guess, to_go, running = self.sum_rewards(started)
            if running is not None:
                inverse = _invert(running).astype(real)
                return {"guess": guess, "bar": to_go[1:].astype(real), "inverse": inverse}
            return {
                "guess": guess,
                "bar": to_go[1:].astype(real),
                "scale": started.count / (started.count - 1),
            }
        guess, sums = self.sum_weights(started)
        if not np.isfinite(sums).all():
            raise NotFinite("baseline", "the weights of a step are not finite")
        weight = sums[..., 0]
        weighted = sums[..., 1]
        has_weight = weight > 0
        inverse = np.where(has_weight, 1 / np.where(has_weight, weight, 1), 0)
        bar = np.where(has_weight, weighted * inverse, 0)
        return {"guess": guess, "bar": bar.astype(real), "inverse": inverse.astype(real)}


class FinishedSweep(NamedTuple):
    """Results of a sweep.

    places: its outputs by name, each with the trajectory last, but "rows".
    finite: whether all of them are.
    """

    kernel: kernels.Kernel
    places: dict[str, Any]
    finite: bool


def collect_samples(call: streamed.Call, place: str) -> streamed.SweepResult:
    """Run a call on a kernel: returns, gradients and final states. place: "cpu" or "cuda"."""
    kernel, places, is_finite = run_sweep(call, place)
    assert kernel.library is not None
    flat = np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(call.theta)))
    result = streamed.SweepResult(*kernel.library.collect_outputs(places, flat), finite=is_finite)
    if not kernel.program.stops:
        return result
    return result._replace(last=result.last[:, :-1], survival=result.last[:, -1])


def collect_returns(call: streamed.Call) -> np.ndarray:
    """Run a call on a kernel for the CPU: its returns alone, without scores. (E,)

    Its key is that of the run itself, as for `streamed.collect_returns`.
    """
    precomputed.check_generator(call.key)
    words = keys.read_words(call.key)
    if words is None:
        raise Unsupported("key", "keys that are not split as JAX splits them now")
    kernel = kernels.find_kernel(call, "cpu")
    wiener = precomputed.encode_generator(call.substrate.recipe.wiener)
    work = KernelCall(kernel, call, _order_words(wiener, words), call.key)
    returns = work.sum_rewards(work.start_ensemble(call.count, pilot=False)).returns
    if not np.isfinite(returns).all():
        raise NotFinite("returns", "a return is not finite")
    return returns


def run_sweep(call: streamed.Call, place: str) -> FinishedSweep:
    """Run all passes of a call on a kernel. place: "cpu" or "cuda"."""
    model, plans, tables, substrate, _, theta, count, _ = call
    kernel = kernels.find_kernel(call, place)
    precomputed.check_generator(call.key)
    work = KernelCall(kernel, call, None)
    library = work.library
    real = kernel.real
    if kernel.self_starting:
        wiener = precomputed.encode_generator(substrate.recipe.wiener)
        if work.device:
            theta_type = work.device.source.theta
            words = work.device.copy_words(pack_words(wiener, call.key, theta, theta_type))
        else:
            words = compute_noise_words(wiener, call.key)
        work = work._replace(words=words)
    if call.needs_pilot:
        pilot = max(plan.pilot for plan in plans)
        tables = tables.fill_missing(
            work.sum_rewards(work.start_ensemble(pilot, pilot=True)).to_go.astype(real)
        )
    started = work.start_ensemble(count, pilot=False)
    baseline = work.make_baseline(started, tables)
    scale = baseline.pop("scale", 1.0)
    same = baseline.pop("same", 0.0)
    parameters = len(kernel.program.names)
    places = library.make_outputs(kernel.program.state, parameters, count) | {
        "flags": library.make_flags()
    }
    if started.ensemble is not None:
        x, context, _ = started.ensemble
        known = library.to_jax(baseline["guess"]) if "guess" in baseline else same
        xp = jnp if work.device else np  # NumPy compiles nothing
        guess = xp.broadcast_to(xp.asarray(known, real), count)
        t = part(substrate.t, 0)
        first = terms.start(model, theta, x, t, context, guess, tables).sums
        before = library.from_jax(_stack_sums(first, real))
        places["reward"][...] = before[0]
        places["score"] = before[1 + parameters :]
        places = library.set_gradient(places, before[1 : 1 + parameters])
    library.run(
        "sweep",
        started.arrays | baseline | places,
        count=count,
        steps=work.steps,
        scale=scale,
        same=same,
    )
    flags = library.read_flags(places["flags"])
    if plans[0].name == "optimal" and flags & precomputed.DOMINATED:
        raise Unsupported("baseline", "one trajectory has nearly all of the weight of a step")
    if flags & precomputed.OUT_OF_RANGE:
        raise precomputed.make_range_error(real)
    return FinishedSweep(kernel, places, not flags & precomputed.NOT_FINITE)


@partial(jit, static_argnums=0)
def _append_survival(rewards: Rewards, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """States with the survival W₀ as a last component. (E, M+1)"""
    survival = terms.start_survival(rewards, theta, x, t, context)
    assert survival is not None
    return jnp.concatenate([x, survival[:, None]], axis=1)


_collect_start = partial(jit, static_argnums=0)(terms.start_collection)
"""In one compiled call."""


def _invert(values: np.ndarray) -> np.ndarray:
    """Return reciprocals, and zero of zero."""
    return np.where(values > 0, 1 / np.where(values > 0, values, 1), 0)


@partial(jit, static_argnums=1)
def _stack_sums(sums: Sums, real: np.dtype) -> Array:
    """Stack reward, gradient and score with the trajectory last. (1 + 2P, E)"""
    return jnp.concatenate([sums.reward[None], sums.gradient.T, sums.score.T]).astype(real)
