"""`fluctua.simulator`, and the choice between JAX and a compiled kernel of the process.

A kernel draws the noise of the JAX path, number for number, and its gradients agree to rounding.
What kernels cannot do runs on JAX, and one logged line gives the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import jax

from fluctua.compiled import (
    cuda,
    jump_twin,
    kernels,
    passes,
    toolchain,
    twin,
    whole_estimate,
)
from fluctua.compiled.blocks import gpu
from fluctua.compiled.blocks import kernel as array_kernels
from fluctua.compiled.scalar import Unsupported
from fluctua.core import arrays, draws, simulate, streamed
from fluctua.core.estimate import Estimate
from fluctua.core.estimation import batches
from fluctua.core.process import AnyProcess
from fluctua.core.twin import sweep as twin_sweep
from fluctua.core.words import close_match
from fluctua.processes.jumps import Jumps

MIN_KERNEL_WORK = 4_000_000
"""Trajectories times steps, over all calls of a training, from which "auto" takes a kernel.

The rule depends on sizes alone: the same training gives the same bits, whatever was compiled
before and wherever it was interrupted."""

QUICK_NUMBERS = 100
QUICK_SHARE = 40
"""Components of state and θ up to which a kernel for the CPU is compiled sooner than JAX compiles,
in 0.4 to 1 s instead of 1.4 to 4 s (`benchmarks/latency.py`): it pays from that part of
`MIN_KERNEL_WORK` on. Less is often tried once and changed. So do kernels that sum over batches: 0.6
to 1.2 s instead of 2 to 4 s (`benchmarks/many_parameters.py`)."""

JUMP_STEP_WORK = 16
"""Work of one step of a jump process, in other steps: JAX takes 1 µs or more for its events."""

MAX_GPU_PARAMETERS = 128
"""Parameters up to which "auto" takes a kernel on a GPU.

On an H200 a kernel with 94 is 3.5 to 20 times as fast as JAX. With 256 and the optimal baseline it
is 0.8 to 1.5 times as fast, and its twin takes 24 s to compile (`results/own`)."""

CHOICES = ("auto", "jax", "cpu", "cuda")

_logged: set[str] = set()


def simulator(
    process: AnyProcess,
    start: draws.Start | None = None,
    t: arrays.Array | None = None,
    *,
    context: Callable[[arrays.Array], arrays.PyTree] | simulate.Counted | None = None,
    wiener: draws.Wiener | str = draws.threefry,
    integrator: str | Callable[..., arrays.Array] | None = None,
    backend: str = "auto",
) -> simulate.Simulator:
    """Simulate a process on a time grid: the substrate of an estimator.

        X_{n+1} = m(X_n, Δt) + σ√Δt z,   m = x + μΔt   (Eq. 1, discretised)

    Args:
        process: drift and noise.
        start: a fixed state (M,), a `Density`, or a `Reparameterised` start; omitted where the
            process has its own (`Observed`).
        t: the time grid (T+1,).
        context: key -> pytree, drawn once per trajectory, or `Counted`.
        wiener: the source of z. "threefry", JAX's own; "philox"; "philox7", the fastest in kernels;
            "none"; or a `Wiener`.
        integrator: m; that of `process` if not given. "euler"; "heun" or "rk4", which allow longer
            steps where the drift rotates faster than it decays; `Exponential`. Estimators use the
            same integrator, and the trapezoid rule for running rewards unless it is Euler's.
        backend: what runs an estimator's trajectories. "cpu" compiles a kernel of the process, the
            score and the reward with the system's C++ compiler, "cuda" one for an NVIDIA GPU
            through CuPy; "jax" compiles none. "auto" compiles one where a call, or a training with
            all its iterations, is large enough, for the GPU if there is one; where kernels cannot
            do it, it runs on JAX and logs the reason. The noise is the same with all of them, and
            gradients are equal to rounding.

    Returns: a `Simulator`, (key, theta, count) -> `Trajectories` with x (count, T+1, M).

    >>> simulator = fl.simulator(process, start=jnp.ones(1), t=jnp.linspace(0.0, 1.0, 101))
    >>> simulator(key, theta, 5).x.shape
    (5, 101, 1)
    >>> heun = fl.simulator(process, jnp.ones(1), t, integrator="heun")  # smaller errors per step
    """
    if backend not in CHOICES:
        raise ValueError(
            f"`backend` must be one of {', '.join(CHOICES)}; got {backend!r}."
            f"{close_match(backend, CHOICES)}"
        )
    if backend == "cuda":
        toolchain.require_cupy()
    plain = simulate.simulator(
        process, start, t, context=context, wiener=wiener, integrator=integrator
    )
    return plain if backend == "jax" else plain._replace(backend=Compiled(backend))


class Compiled(NamedTuple):
    """A backend of `Simulator` that runs kernels.

    choice: "cpu" or "cuda" raises where no kernel can be made, "auto" then leaves the call to JAX.
    """

    choice: str

    def samples(self, call: streamed.Call) -> streamed.SweepResult | None:
        """Return returns, gradients and final states of a call; None leaves it to JAX."""
        if self.is_too_small(call):
            return None
        try:
            return passes.collect_samples(call, self.choose_place(call.theta))
        except passes.NotFinite:
            return None
        except Unsupported as problem:
            self._refuse(problem)
            return None

    def returns(self, call: streamed.Call) -> arrays.Array | None:
        """Return the returns of a call whose key is that of the run; None leaves it to JAX.

        A GPU leaves it too. No kernel is not an error: JAX needs no score for returns.
        """
        try:
            if self.is_too_small(call) or self.choose_place(call.theta) != "cpu":
                return None
            return passes.collect_returns(call)
        except Unsupported:
            return None

    def estimate(self, call: streamed.Call) -> Estimate | None:
        """Return the estimate of a call; None where single gradients are needed for it."""
        if self.is_too_small(call):
            return None
        try:
            if self.choose_place(call.theta) == "cuda":
                return whole_estimate.estimate_on_device(call)
            return whole_estimate.estimate_on_host(call)
        except passes.NotFinite:
            return whole_estimate.estimate_by_jax(call)
        except Unsupported as problem:
            self._refuse(problem)
            return whole_estimate.estimate_by_jax(call)

    def batch_sums(self, call: streamed.Call, size: int) -> batches.BatchSums | None:
        """Return sums over batches of `size` trajectories; None leaves the call to JAX."""
        quick = jax.default_backend() == "cpu" and not cuda.is_available()
        if self.is_too_small(call, quick):
            return None
        try:
            if self.choose_place(None) == "cuda":
                return gpu.sum_batches_on_gpu(call, size)
            return array_kernels.sum_batches_by_kernel(call, size)
        except Unsupported as problem:
            return self._add_single_gradients(call, size, problem)

    def _add_single_gradients(
        self, call: streamed.Call, size: int, problem: Unsupported
    ) -> batches.BatchSums | None:
        """Return the sums of gradients by a kernel whose arrays are written out.

        problem: of a kernel on arrays, which has rules for fewer operations.
        """
        if self.is_too_small(call):
            _log(str(problem))
            return None
        try:
            swept = passes.collect_samples(call, self.choose_place(call.theta))
        except passes.NotFinite:
            return None
        except Unsupported:
            self._refuse(problem)
            return None
        return array_kernels.add_gradients(swept, size)

    def parts(self, call: twin_sweep.TwinCall) -> twin_sweep.Parts | None:
        """Return the two parts of the gradients with a twin; None leaves the call to JAX."""
        if self.is_too_small(call):
            return None
        try:
            place = self.choose_place(call.numbers.theta)
            if isinstance(call.substrate.recipe.process, Jumps):
                return jump_twin.collect_jump_parts(call, place)
            key = twin.TwinKey(call, kernels.OPTIMISE, place)
            return twin.collect_parts(call, twin.make_twin_kernel(key, True))
        except passes.NotFinite:
            return None
        except Unsupported as problem:
            self._refuse(problem)
            return None

    def is_too_small(self, call: streamed.Call | twin_sweep.TwinCall, quick: bool = False) -> bool:
        """Return whether all calls of a run together are too few for "auto" to compile a kernel.

        quick: its kernel compiles sooner than JAX, whatever its size.
        """
        substrate = call.substrate
        step_work = JUMP_STEP_WORK if isinstance(substrate.recipe.process, Jumps) else 1
        work = simulate.planned_calls() * call.count * len(substrate.times.dt) * step_work
        least = MIN_KERNEL_WORK // (QUICK_SHARE if quick or _compiles_quickly(call) else 1)
        return self.choice == "auto" and work < least

    def _refuse(self, problem: Unsupported) -> None:
        if self.choice != "auto":
            raise ValueError(
                f'no kernel can be made of this process: {problem}. Use backend="auto" or "jax".'
            ) from None
        _log(str(problem))

    def source(self, call: streamed.Call | twin_sweep.TwinCall) -> str:
        """Return the generated text of the kernel of a call."""
        if isinstance(call, twin_sweep.TwinCall):
            place = self.choose_place(call.numbers.theta)
            if isinstance(call.substrate.recipe.process, Jumps):
                return jump_twin.find_kernel(call, place, build=False).source
            key = twin.TwinKey(call, kernels.OPTIMISE, place)
            return twin.make_twin_kernel(key, False).source
        large = batches.is_large(call.theta, batches.MIN_TRAJECTORIES)
        if large and batches.is_summable(call) and self.choose_place(None) == "cpu":
            return array_kernels.write_array_kernel(call, array_kernels.BLOCK).source
        return kernels.find_kernel(call, self.choose_place(call.theta), build=False).source

    def choose_place(self, theta: arrays.Params | None) -> str:
        """Return "cpu" or "cuda". "auto" leaves to JAX what it does faster on a GPU.

        theta: of a kernel with sums per trajectory; None for one with sums over batches.
        """
        if self.choice != "auto":
            return self.choice
        if jax.default_backend() == "gpu":
            if not cuda.is_available():
                raise Unsupported(
                    "cupy",
                    "JAX has a GPU, and kernels for it need CuPy: pip install 'fluctua[cuda13]'",
                )
            parameters = sum(leaf.size for leaf in jax.tree.leaves(theta))
            if parameters > MAX_GPU_PARAMETERS:
                raise Unsupported(
                    "theta",
                    f"{parameters} parameters: on a GPU, JAX is faster above {MAX_GPU_PARAMETERS}",
                )
        return "cuda" if cuda.is_available() else "cpu"


def _compiles_quickly(call: streamed.Call | twin_sweep.TwinCall) -> bool:
    """Whether the kernel of a call is for the CPU and has few numbers. By sizes alone."""
    if not isinstance(call, streamed.Call) or jax.default_backend() != "cpu":
        return False
    start = call.substrate.x0
    plain = not isinstance(call.substrate.recipe.process, Jumps) and start is not None
    numbers = sum(leaf.size for leaf in jax.tree.leaves((start, call.theta)))
    return plain and numbers <= QUICK_NUMBERS and not cuda.is_available()


def _log(why: str) -> None:
    """Log one line, once per reason."""
    if why not in _logged:
        _logged.add(why)
        logging.getLogger("fluctua").warning("trajectories run on JAX, not on a kernel: %s", why)
