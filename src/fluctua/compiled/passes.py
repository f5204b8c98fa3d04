"""One estimate by a kernel: the passes over its ensemble, and the tables of its baseline."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.compiled import ahead as precomputed
from fluctua.compiled import cpu, cuda, kernels
from fluctua.compiled.scalar import Unsupported
from fluctua.core import draws, simulate
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.model import Tables
from fluctua.core.streamed import Call, Swept, split_key
from fluctua.core.theorem import Sums


class NotFinite(Unsupported):
    """Numbers that are none, which JAX meets as well: it says where, whatever was to run the
    trajectories.
    """


class _Begun(NamedTuple):
    """Trajectories before their first step, as a kernel takes them. ensemble: of JAX; None
    where the kernel begins.
    """

    arrays: dict[str, Any]
    count: int  # type: ignore[assignment]
    ensemble: simulate.Ensemble | None


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

    kernel: kernels.Kernel
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
        key = self.call.key
        substrate = self.call.substrate
        first = None if pilot else self.call.first
        device = self.device
        if not kernel.begins:
            ensemble = kernels.begin_ensemble(self.call, split_key(key)[pilot], count, first)
            if device:
                own = device.ensemble(
                    precomputed.number_generator(substrate.recipe.wiener), ensemble
                )
                own |= {
                    "theta": device.parameters(self.call.theta),
                    "times": device.times(substrate),
                }
            else:
                own = precomputed.arrays(
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
            own = precomputed.numbers(
                kernel.program, kernel.layout, kernel.real, substrate, self._flat(), none
            )
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


def collect_samples(call: Call, place: str) -> Swept:
    """Returns, gradients and final states of a call, by a kernel. place: "cpu" or "cuda"."""
    model, plans, tables, substrate, _, theta, count, _ = call
    kernel = kernels.find_kernel(call, place)
    precomputed.check_generator(call.key)
    work = _Work(kernel, call, None)
    library = work.library
    real = kernel.real
    if kernel.begins:
        words = _words(
            precomputed.number_generator(substrate.recipe.wiener),
            call.key,
            theta if work.device else None,
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
        places["reward"][...] = before[0]
        places["score"] = before[1 + parameters :]
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
    if plans[0].name == "optimal" and flags & precomputed.DOMINATED:
        raise Unsupported("baseline", "one trajectory has nearly all of the weight of a step")
    if flags & precomputed.OUT_OF_RANGE:
        raise precomputed.make_range_error(real)
    flat = np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(theta)))
    return Swept(*library.rows(places, flat), finite=not flags & precomputed.NOT_FINITE)


@partial(jit, static_argnums=1)
def _stacked(sums: Sums, real: np.dtype) -> Array:
    """Reward, gradient and score with the trajectory last. (1 + 2P, E)"""
    return jnp.concatenate([sums.reward[None], sums.gradient.T, sums.score.T]).astype(real)
