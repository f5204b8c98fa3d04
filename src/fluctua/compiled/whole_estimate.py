"""Whole estimates by kernels: gradients of single trajectories are not handed to JAX.

On a GPU, start, noise, tables of baselines, sums and moments over the trajectories stay on the
device. JAX computes nothing: key, parameters and moments are few numbers, which NumPy converts.
If a check fails, the call is left to the path by single gradients, which raises the error.

On the CPU, NumPy takes the moments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.compiled import ahead, cuda, kernels, passes
from fluctua.core import arrays, check, diffusion, simulate
from fluctua.core import estimate as estimates
from fluctua.core.arrays import Params
from fluctua.core.host import threads
from fluctua.core.process import Process
from fluctua.core.streamed import Call, prepare_model, split_key, streamed_samples

MAX_SERVED = 256
"""Structures of calls that are remembered; the oldest is dropped first."""

FAILED = ahead.NOT_FINITE | ahead.OUT_OF_RANGE


class ServedCall(NamedTuple):
    """Compiled parts that calls of one structure share.

    kernel: loaded, and starts its trajectories itself.
    verdict: result of `check_quickly` after all checks have passed. (M+1,)
    is_diagonal: the noise is a vector (M,), which NumPy checks.
    """

    kernel: kernels.Kernel
    verdict: np.ndarray
    is_diagonal: bool


_SERVED: dict[Any, ServedCall | None] = {}
"""Served calls by their structure; None where a call is not served."""


def estimate_on_device(call: Call) -> estimates.Estimate | None:
    """Estimate with a kernel on a GPU; None where single gradients are needed."""
    served = _find_served(call)
    if served is None:
        return None
    ahead.check_generator(call.key)
    library = served.kernel.library
    assert isinstance(library, cuda.GpuLibrary)
    # before the passes, since a transfer waits for them
    theta = jax.tree.map(arrays.on_host, call.theta)
    wiener = ahead.encode_generator(call.substrate.recipe.wiener)
    packed = passes.pack_words(wiener, call.key, theta, library.source.theta)
    words = library.copy_words(packed)
    work = _DeviceCall(served.kernel, library, call, words, library.make_flags())
    moments = work.launch()
    passes_checks = _check_parameters(call, theta, served)  # while the device works
    table = library.to_host(moments)
    flags = library.read_flags(work.flags)
    failed = flags & (FAILED | (ahead.DOMINATED if call.plans[0].name == "optimal" else 0))
    if failed or not passes_checks:
        return None
    state = served.kernel.program.state
    return estimates.estimate_from_moments(call.theta, table, state, call.count)


def _check_parameters(call: Call, theta: Params, served: ServedCall) -> bool:
    """Whether the checks of `_prepare` have the same result at the parameters of a call.

    theta: θ of the call, as arrays of NumPy.
    """
    process = call.model.process
    assert isinstance(process, Process)
    state = np.asarray(call.substrate.x0, served.kernel.real)[None]
    t = np.asarray(call.substrate.t)[:1]
    if served.is_diagonal:
        noiseless = diffusion.check_on_host(process, theta, state, t, None)
        if noiseless is not None:
            return np.array_equal(noiseless, served.verdict[:-1])
    verdict = diffusion.check_quickly(process, call.theta, state, t, None)
    return np.array_equal(arrays.on_host(verdict), served.verdict)


def estimate_on_host(call: Call) -> estimates.Estimate | None:
    """Estimate with a kernel on the CPU; None where a number is not finite."""
    substrate = call.substrate
    key = call.key if substrate.recipe.fixed else split_key(call.key).run
    model = prepare_model(call.model, substrate, key, call.theta)
    kernel, places, is_finite = passes.run_sweep(call._replace(model=model), "cpu")
    if not is_finite:
        return None
    moments = [take_moments(values) for values in (places["reward"][:, None], places["rows"])]
    table = np.concatenate(moments, axis=1).astype(kernel.real)
    estimate = estimates.estimate_from_moments(call.theta, table, 0, call.count)
    if not kernel.program.stops:
        return estimate
    return estimate._replace(stopped=1 - float(places["last"][-1].mean(dtype=np.float64)))


def estimate_by_jax(call: Call) -> estimates.Estimate:
    """Estimate without a kernel, from single gradients."""
    plain = call._replace(substrate=call.substrate._replace(backend=None))
    gradients, returns, survival, _ = streamed_samples(plain)
    rows = estimates.unflatten(call.theta, gradients)
    return estimates.reduce_samples(estimates.Samples(rows, returns, survival=survival))


BLOCK_NUMBERS = 2**15
"""Numbers that are reduced at a time: what is computed of them stays in the cache."""


def take_moments(values: np.ndarray) -> np.ndarray:
    """Five moments of every column of values (E, K), in double precision. (5, K)

    Mean, unbiased deviation, skewness, excess kurtosis and mean square, as of
    `GpuLibrary.take_moments`. Sums are added in an order that depends on sizes alone.
    """
    count, width = values.shape
    size = max(1, BLOCK_NUMBERS // width)
    blocks = range(0, count, size)
    totals = np.empty((len(blocks), width))
    powers = np.empty((len(blocks), 3, width))

    def add(k: int) -> None:
        np.sum(values[k * size : (k + 1) * size], axis=0, dtype=np.float64, out=totals[k])

    threads.run_on_cores(add, range(len(blocks)))
    mean = totals.sum(axis=0) / count

    def add_powers(k: int) -> None:
        off = values[k * size : (k + 1) * size] - mean
        square = off * off
        powers[k, 0] = square.sum(axis=0)
        powers[k, 1] = np.einsum("ek,ek->k", square, off)
        powers[k, 2] = np.einsum("ek,ek->k", square, square)

    with np.errstate(all="ignore"):  # gradients may overflow, and one sample has no spread
        threads.run_on_cores(add_powers, range(len(blocks)))
        sums = powers.sum(axis=0)
        variance, cube, fourth = sums / count
        deviation = np.sqrt(sums[0] / (count - 1)) if count > 1 else np.full(width, np.nan)
        unit = np.where(variance > 0, variance, 1)
        kurtosis = np.where(variance > 0, fourth / unit**2 - 3, 0)
        return np.stack([mean, deviation, cube / unit**1.5, kurtosis, mean**2 + variance])


def forget_served() -> None:
    """Forget all structures, as after a change of the device."""
    _SERVED.clear()


def _find_served(call: Call) -> ServedCall | None:
    structure = kernels.describe_call(call)
    if structure not in _SERVED:
        _SERVED[structure] = _prepare(call)
        if len(_SERVED) > MAX_SERVED:
            _SERVED.pop(next(iter(_SERVED)))
    return _SERVED[structure]


def _prepare(call: Call) -> ServedCall | None:
    """Make the kernel of a call, after all checks; None where it is not served."""
    substrate = call.substrate
    process = call.model.process
    if not substrate.recipe.fixed or call.model.start is not None:
        return None
    if not isinstance(process, Process):
        return None
    key = split_key(call.key).run
    state, context = simulate.first_state(substrate, key, call.theta)
    one = check.take_first((state, substrate.t, context))
    if not diffusion.can_check_quickly(process, call.theta, *one):
        return None
    model = prepare_model(call.model, substrate, key, call.theta)
    kernel = kernels.find_kernel(call._replace(model=model), "cuda")
    on_device = isinstance(kernel.library, cuda.GpuLibrary) and kernel.library.source.ahead
    weighted = call.plans[0].name == "optimal"
    if not on_device or not kernel.self_starting or (weighted and not kernel.layout.scores):
        return None
    verdict = diffusion.check_quickly(process, call.theta, state, substrate.t, context)
    verdict = arrays.on_host(verdict).astype(np.uint32)
    if not verdict[-1]:
        return None
    is_diagonal = diffusion.has_diagonal_noise(process, call.theta, *one)
    return ServedCall(kernel, verdict, is_diagonal)


class _DeviceCall(NamedTuple):
    """A call during its passes.

    words: from `pack_words`. flags: set by the passes.
    """

    kernel: kernels.Kernel
    library: cuda.GpuLibrary
    call: Call
    words: Any
    flags: Any

    @property
    def steps(self) -> int:
        """T."""
        return len(self.call.substrate.times.dt)

    def launch(self) -> Any:
        """Launch all passes, and return their moments (5, rows), which the device fills later."""
        library = self.library
        count = self.call.count
        inputs = self._bind_inputs(self.words[:2], self.call.first or 0)
        baseline = self._make_baseline(inputs)
        scale = baseline.pop("scale", 1.0)
        state = self.kernel.program.state
        places = library.make_outputs(state, len(self.kernel.program.names), count)
        options = cuda.PassOptions(scale=scale)
        launched = library.launch("sweep", inputs | baseline | places, count, self.steps, options)
        return library.take_moments(launched, places["out"])

    def _bind_inputs(self, stream: Any, first: int) -> dict[str, Any]:
        """Return the inputs of a pass. stream: two words. first: number of a trajectory."""
        library = self.library
        substrate = self.call.substrate

        def start(x0):
            return np.asarray(x0, self.kernel.real)

        return {
            "stream": stream,
            "first": first,
            "theta": self.words[4:],
            "times": library.load_times(substrate),
            "steady": library.is_steady(substrate),
            "x": library.keep("x", substrate.x0, start),
            "flags": self.flags,
        }

    def _make_baseline(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the baseline, with the numbers of `KernelCall.make_baseline`, on the device."""
        call = self.call
        name = call.plans[0].name
        count = call.count
        if name == "none":
            return {"bar": self._load_zeros()}
        if name == "time":
            if call.needs_pilot:
                pilot = self._bind_inputs(self.words[2:4], 0)
                table = self._sum_rewards(pilot, max(plan.pilot for plan in call.plans)).to_go
            else:
                table = self._load_table()
            return {"bar": table[1:], "near": table[:1]}  # n+1: the reward at n precedes the kick
        rewards = self._sum_rewards(inputs, count)
        if name == "mean":
            scale = count / (count - 1)
            return {"guess": rewards.returns, "bar": rewards.to_go[1:], "scale": scale}
        scores = len(self.kernel.layout.scores)
        options = cuda.PassOptions((self.steps, scores, 2))
        places = {"guess": rewards.returns}
        launched = self.library.launch("weights", inputs | places, count, self.steps, options)
        return places | self.library.average_weights(launched, self.flags)

    def _load_table(self) -> Any:
        """Return λ̄ (T+1,) on the device; copied again only for another table."""

        def convert(values):
            return np.asarray(values, self.kernel.real)

        return self.library.keep("table", self.call.tables.step, convert)

    def _load_zeros(self) -> Any:
        """Return zeros (T,) on the device."""

        def convert(t):
            return np.zeros(len(t) - 1, self.kernel.real)

        return self.library.keep("zeros", self.call.substrate.t, convert)

    def _sum_rewards(self, inputs: dict[str, Any], count: int) -> _Rewards:
        library = self.library
        places = {
            "reward": library.empty(count),
            "last": library.empty(self.kernel.program.state, count),
        }
        options = cuda.PassOptions((self.steps, 2))
        launched = library.launch("rewards_summed", inputs | places, count, self.steps, options)
        return _Rewards(places["reward"], library.average_rewards(launched, places["reward"]))


class _Rewards(NamedTuple):
    """Returns (E,), and the mean of λ̂ₙ at every time (T+1,), on the device."""

    returns: Any
    to_go: Any
