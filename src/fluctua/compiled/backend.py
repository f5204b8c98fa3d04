"""The door of simulated substrates, and the choice between JAX and a kernel of one's own process.

A kernel has the noise of the JAX path, number for number, and its gradients to rounding. What it
does not do is left to JAX, with one line that says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from fluctua.compiled import cuda, kernels, twin
from fluctua.compiled.passes import NotFinite, collect_samples
from fluctua.compiled.scalar import Unsupported
from fluctua.core import draws, simulate
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.process import AnyProcess
from fluctua.core.streamed import Call, Swept
from fluctua.core.twin import sweep as twin_sweep
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

_logged: set[str] = set()


def simulator(
    process: AnyProcess,
    start: draws.Start | None = None,
    t: Array | None = None,
    *,
    context: Callable[[Array], PyTree] | simulate.Counted | None = None,
    wiener: draws.Wiener = draws.threefry,
    integrator: str | Callable[..., Array] | None = None,
    backend: str = "auto",
) -> simulate.Simulator:
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
            return collect_samples(call, self.place(call.theta))
        except NotFinite:
            return None
        except Unsupported as problem:
            self._refused(problem)
            return None

    def parts(self, call: twin_sweep.TwinCall) -> twin_sweep.Parts | None:
        """The two parts of the gradients with a twin; None to leave them to JAX."""
        if self._leaves(call):
            return None
        try:
            key = twin.TwinKey(call, kernels.OPTIMISE, self.place(call.numbers.theta))
            return twin.parts(call, twin.twin_kernel(key, True))
        except Unsupported as problem:
            self._refused(problem)
            return None

    def _leaves(self, call: Call | twin_sweep.TwinCall) -> bool:
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

    def source(self, call: Call | twin_sweep.TwinCall) -> str:
        """The generated text of the kernel."""
        if isinstance(call, twin_sweep.TwinCall):
            return twin.twin_kernel(
                twin.TwinKey(call, kernels.OPTIMISE, self.place(call.numbers.theta)), False
            ).source
        return kernels.find_kernel(call, self.place(call.theta), build=False).source

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
