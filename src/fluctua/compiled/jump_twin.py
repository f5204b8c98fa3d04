"""Kernels of a jump process with a twin: the passes of a plain sweep over another objective.

One guess must serve all trajectories: its numbers are a table of the kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled import ahead as precomputed
from fluctua.compiled import cpu, cuda, emit, kernels, passes
from fluctua.compiled.jump_twin_trace import trace_jump_twin
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.twin import TwinKey, encode_baseline
from fluctua.core import arrays, baselines, simulate, streamed
from fluctua.core import model as terms
from fluctua.core.twin import sweep
from fluctua.processes import jump_twin_checks, jump_twin_sweep
from fluctua.processes.jump_guess import ReturnGuess


@lru_cache(maxsize=64)
def make_jump_twin_kernel(key: TwinKey, build: bool) -> kernels.Kernel:
    """Trace and write the kernel of a jump process with a twin. build: compile it too."""
    program = trace_jump_twin(key.call, key.ensemble)
    layout = emit.make_layout(program)
    real = np.dtype(key.ensemble.x.dtype)
    double = real == np.float64
    weighted = key.baseline == 2
    library: cpu.CpuLibrary | cuda.GpuLibrary | None = None
    if key.place == "cuda":
        source_on_gpu = cuda.GpuSource(
            program, layout, real, key.noise64, key.wiener, weighted, self_starting=True
        )
        source = source_on_gpu.write("sweep")
        library = cuda.GpuLibrary(source_on_gpu) if build else None
    else:
        source = cpu.write_cpu_source(
            program,
            layout,
            double=double,
            noise64=key.noise64,
            wiener=key.wiener,
            sweep=2 if weighted else 1,
            self_starting=True,
        )
        if build:
            built = cpu.find_or_build(source, key.optimise)
            library = cpu.CpuLibrary(built, 8 if double or key.noise64 else 16, real)
    return kernels.Kernel(program, layout, source, library, real, self_starting=True)


def find_kernel(call: sweep.TwinCall, place: str, build: bool = True) -> kernels.Kernel:
    """Find or make the kernel of a call; raise for what kernels cannot do."""
    if not jump_twin_checks.can_share_guess(call.substrate.recipe):
        raise Unsupported("twin", "a twin of `Jumps` with a random start or a context")
    return make_jump_twin_kernel(TwinKey(call, kernels.OPTIMISE, place), build)


BASELINES = {0: "none", 1: "mean", 2: "optimal"}
"""Baselines of Λ by the number of `fluctua.compiled.twin.encode_baseline`; a table is "time"."""


def collect_jump_parts(call: sweep.TwinCall, place: str) -> sweep.Parts:
    """Run a call on a kernel: the two parts of the gradients. place: "cpu" or "cuda"."""
    jump_twin_checks.refuse_call(call)
    kernel = find_kernel(call, place)
    precomputed.check_generator(call.key)
    twin, numbers, _, substrate, key, count, offset = call
    theta = numbers.theta
    x0 = jnp.asarray(substrate.x0)
    start = x0.astype(arrays.working_dtype(theta, x0))[None]
    guess = jump_twin_checks.solve_and_check(twin, numbers, start, substrate.times, None, True)

    name = BASELINES[encode_baseline(call)] if numbers.table is None else "time"
    plan = baselines.Baseline(twin.model.baseline, name=name)
    tables = terms.Tables(numbers.table, None)
    request = streamed.Call(twin.model, (plan,), tables, substrate, key, theta, count, offset)
    work = passes.KernelCall(kernel, request, None)
    started = passes.StartedEnsemble(_start_arrays(call, kernel, guess), count, None)
    baseline = work.make_baseline(started, tables)
    residual, rows = _run_sweep(work, started, baseline)
    means = baseline["bar"] if name == "mean" else work.sum_rewards(started)[1][1:]
    lambdas = jnp.append(residual.mean(), jnp.asarray(means, residual.dtype))
    carry = jump_twin_sweep.split_rows(rows, residual, guess)
    jump_twin_checks.warn_about_guess(carry.residual, carry.reward)
    ends = (jnp.broadcast_to(start, (count, start.shape[1])), substrate.times, None)
    return sweep.finish_parts(twin, numbers, carry, *ends, [lambdas])


def _run_sweep(
    work: passes.KernelCall, started: passes.StartedEnsemble, baseline: dict[str, Any]
) -> tuple[arrays.Array, arrays.Array]:
    """Λ₀ (E,), and the three groups of each trajectory (E, 2P + 1)."""
    library = work.library
    program = work.kernel.program
    count = started.count
    places = library.make_outputs(program.state, len(program.names), count)
    places |= {"flags": library.make_flags()}
    numbers = {name: value for name, value in baseline.items() if name not in ("scale", "same")}
    library.run(
        "sweep",
        started.arrays | numbers | places,
        count=count,
        steps=work.steps,
        scale=baseline.get("scale", 1.0),
        same=baseline.get("same", 0.0),
    )
    flags = library.read_flags(places["flags"])
    if flags & precomputed.NOT_FINITE:
        raise passes.NotFinite("state", "a state or a gradient that is not finite")
    if work.call.plans[0].name == "optimal" and flags & precomputed.DOMINATED:
        raise Unsupported("baseline", "one trajectory has nearly all of the weight of a step")
    flat = np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(work.call.theta)))
    residual, rows, _ = library.collect_outputs(places, flat)
    return jnp.asarray(residual), jnp.asarray(rows)


def _start_arrays(
    call: sweep.TwinCall, kernel: kernels.Kernel, guess: ReturnGuess
) -> dict[str, Any]:
    """The arrays of a pass: numbers computed ahead with the guess, key and start."""
    steps = len(call.substrate.times.dt)
    pieces = [
        guess.centre[:-1],
        guess.value.powers,
        guess.slope.powers,
        guess.value.collected,
        guess.slope.collected,
    ]
    table = np.concatenate([np.asarray(v, float).reshape(steps, -1) for v in pieces], axis=1)
    end = (guess.centre[-1], guess.value.last, guess.slope.last)
    last = np.concatenate([np.ravel(np.asarray(v, float)) for v in end])
    leaves = jax.tree.leaves(call.numbers.theta)
    flat = np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in leaves])
    numbers = precomputed.compute_numbers(
        kernel.program,
        kernel.layout,
        kernel.real,
        call.substrate,
        flat,
        np.empty((0, call.count)),
        {"table": table, "last": last},
    )
    words = jax.random.key_data(simulate.noise_key(call.key))
    return numbers | {
        "stream": np.ascontiguousarray(words, np.uint32),
        "x": np.ascontiguousarray(call.substrate.x0, kernel.real),
        "first": call.offset,
    }
