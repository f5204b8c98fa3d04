"""The twin of a jump process in a kernel: the passes of a plain sweep over another objective.

The theorem holds for what the guess leaves over (`fluctua.processes.jump_twin`), so the kernel is
that of a jump process with this as its reward. The sums over the waits of a step are carried
through the loop over its events, behind their score. Three groups take the place of the parameters:
the correction (P,), which has the score, the direct part (P,), and the return itself.

One guess must serve all trajectories: its numbers are a table of the kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled import ahead as precomputed
from fluctua.compiled import cpu, cuda, emit, events, kernels, passes, trace
from fluctua.compiled.graph import Graph
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.twin import TwinKey, encode_baseline
from fluctua.core import arrays, baselines, simulate
from fluctua.core import model as terms
from fluctua.core.arrays import Array, jit
from fluctua.core.process import Step
from fluctua.core.streamed import Call
from fluctua.core.twin import backward, correction, sweep
from fluctua.core.twin.sweep import Parts, TwinCall
from fluctua.processes import jump_guess, jump_twin, jump_twin_sweep
from fluctua.processes.jump_guess import Guess

MAX_TABLE = 4096
"""Most numbers of the guess in a step; beyond, operations on arrays are faster."""


class _Rows(NamedTuple):
    """Shapes of one step of a guess, and of its end: `GuessRow`, (centre, last, its slope)."""

    row: Any
    end: tuple[Any, Any, Any]


def _describe_rows(order: int, states: int, parameters: int, dtype: Any) -> _Rows:
    size = 1 + states + (states**2 if order == 2 else 0)
    powers = jump_guess.DEGREE + 1

    def shaped(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    row = jump_twin.GuessRow(
        shaped(states),
        shaped(powers, size),
        shaped(powers, size, parameters),
        shaped(size),
        shaped(size, parameters),
    )
    return _Rows(row, (shaped(states), shaped(size), shaped(size, parameters)))


def trace_jump_twin(call: TwinCall, ensemble: simulate.Ensemble) -> trace.Program:
    """Trace one step of a jump process with its twin. ensemble: shapes before step 0."""
    recipe = call.substrate.recipe
    process = events.find_jumps(recipe)
    assert process is not None
    rewards = call.twin.model.objective
    x, context, _ = trace.drop_ensemble_axis(ensemble._replace(streams=None))
    flat, unravel = trace.flatten_parameters(call.numbers.theta)
    rows = _describe_rows(call.twin.order, x.size, flat.size, x.dtype)
    numbers = sum(np.size(leaf) for leaf in rows.row)
    if x.size > trace.MAX_STATES or numbers > MAX_TABLE:
        raise Unsupported(
            "twin", f"a guess of {numbers} numbers in a step; kernels have up to {MAX_TABLE}"
        )
    graph = Graph()
    tracer = trace.Tracer(graph)
    time = jax.ShapeDtypeStruct((), call.substrate.t.dtype)
    draws = jax.ShapeDtypeStruct((events.DRAWS,), x.dtype)
    theta, state, t, dt = (
        tracer.input(kind, value)
        for kind, value in (("theta", flat), ("x", x), ("t", time), ("dt", time))
    )
    table = tracer.tree("table", rows.row)
    end = tracer.tree("last", rows.end)

    # one event
    start = [theta, state, t, dt, context, tracer.input("p", draws)]
    happened = tracer.call(
        events.bind_event(process, unravel), [flat, x, time, time, context, draws], start
    )
    x_after, after, over, score = happened
    scored = [p for p, node in enumerate(score) if graph.value(int(node)) != 0.0]
    so_far = np.full(flat.size, graph.const(0.0))
    so_far[scored] = tracer.input("p", score[scored], events.DRAWS)

    def add_wait(
        flat: Array,
        x: Array,
        t: Array,
        dt: Array,
        begin: Array,
        after: Array,
        score: Array,
        first: Array,
        row: jump_twin.GuessRow,
    ) -> tuple[Array, ...]:
        theta = unravel(flat)
        step = Step(first, first, t, dt)
        full = jump_twin.expand_step_reward(rewards, theta, row, step)
        wait = jump_twin.Wait(x, begin, after, unravel(score))
        nothing = jump_twin.start_sums(theta, x.dtype)
        return jump_twin.add_wait(process, theta, full, step, nothing, wait)

    def carried(count: int) -> np.ndarray:
        """X_n, behind all sums of the events."""
        return tracer.input("p", x, events.DRAWS + count)

    def trace_wait(first: np.ndarray) -> list[int]:
        scalar = jax.ShapeDtypeStruct((), x.dtype)
        values = [flat, x, time, time, scalar, scalar, flat, x, rows.row]
        since = tracer.input("p", scalar)
        inputs = [theta, state, t, dt, since, after, so_far, first, table]
        residual, direct, weighted = tracer.call(add_wait, values, inputs)
        return [*score.tolist(), int(residual), *direct.tolist(), *weighted.tolist()]

    # where X_n is found depends on how many sums are not zero
    sums = trace_wait(carried(0))
    used = [k for k, node in enumerate(sums) if graph.value(node) != 0.0]
    sums = trace_wait(carried(len(used)))
    event = events.EventProgram(x_after.tolist(), int(after), int(over), sums, used, carries=True)

    # the step, after its events
    total = np.full(len(sums), graph.const(0.0))
    total[used] = tracer.input("p", np.zeros(len(used)), x.size)
    x_next = tracer.input("p", x)
    parameters = flat.size

    def finish(
        flat: Array, x: Array, x_next: Array, t: Array, dt: Array, sums: Array, row: Any
    ) -> tuple[Array, ...]:
        theta = unravel(flat)
        score, residual = sums[:parameters], sums[parameters]
        direct, weighted = jnp.split(sums[parameters + 1 :], 2)
        collected = jump_twin.TwinSums(residual, direct, weighted)
        step = Step(x, x_next, t, dt)
        return jump_twin.finish_step(rewards, theta, row, step, collected, unravel(score))

    flat_sums = jax.ShapeDtypeStruct((len(sums),), x.dtype)
    residual, score, direct, weighted, reward = tracer.call(
        finish,
        [flat, x, x, time, time, flat_sums, rows.row],
        [theta, state, x_next, t, dt, total, table],
    )

    def leave(flat: Array, x: Array, centre: Array, last: Array, slope: Array) -> tuple:
        nothing = jump_guess.GuessTable(None, None, last, None)
        of_slope = jump_guess.GuessTable(None, None, slope, None)
        guess = jump_guess.Guess(centre[None], nothing, of_slope)
        return jump_twin.finish_path(rewards, unravel(flat), guess, x, None)

    terminal, last_direct, last_reward = tracer.call(
        leave, [flat, x, *rows.end], [theta, state, *end]
    )
    zeros = [graph.const(0.0)] * parameters
    names = trace.names(call.numbers.theta)
    return trace.Program(
        graph,
        x_next.tolist(),
        int(residual),
        graph.const(0.0),
        [*score.tolist(), *zeros, graph.const(0.0)],
        [*weighted.tolist(), *direct.tolist(), int(reward)],
        int(terminal),
        [*zeros, *last_direct.tolist(), int(last_reward)],
        0,
        0,
        [*names, *(f"direct {name}" for name in names), "return"],
        event,
    )


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


def find_kernel(call: TwinCall, place: str, build: bool = True) -> kernels.Kernel:
    """Find or make the kernel of a call; raise for what kernels cannot do."""
    if not jump_twin_sweep.share_guess(call.substrate.recipe):
        raise Unsupported("twin", "a twin of `Jumps` with a random start or a context")
    return make_jump_twin_kernel(TwinKey(call, kernels.OPTIMISE, place), build)


PLANS = {0: "none", 1: "mean", 2: "optimal"}
"""Baselines of Λ by the number of `fluctua.compiled.twin.encode_baseline`; a table is "time"."""


def collect_jump_parts(call: TwinCall, place: str) -> Parts:
    """Run a call on a kernel: the two parts of the gradients. place: "cpu" or "cuda"."""
    jump_twin_sweep.refuse_call(call)
    kernel = find_kernel(call, place)
    precomputed.check_generator(call.key)
    twin, numbers, _, substrate, key, count, offset = call
    theta = numbers.theta
    x0 = jnp.asarray(substrate.x0)
    start = x0.astype(arrays.working_dtype(theta, x0))[None]
    guess = jump_twin_sweep.solve(twin, numbers, start, substrate.times, None, True)

    name = PLANS[encode_baseline(call)] if numbers.table is None else "time"
    plan = baselines.Baseline(twin.model.baseline, name=name)
    tables = terms.Tables(numbers.table, None)
    request = Call(twin.model, (plan,), tables, substrate, key, theta, count, offset)
    work = passes.KernelCall(kernel, request, None)
    started = passes.StartedEnsemble(_start_arrays(call, kernel, guess), count, None)
    baseline = work.make_baseline(started, tables)
    residual, rows = _run_sweep(work, started, baseline)
    means = baseline["bar"] if name == "mean" else work.sum_rewards(started)[1][1:]
    lambdas = jnp.append(residual.mean(), jnp.asarray(means, residual.dtype))
    carry = _split_rows(rows, residual, guess)
    jump_twin_sweep.warn_about_guess(carry.residual, carry.reward)
    ends = (jnp.broadcast_to(start, (count, start.shape[1])), substrate.times, None)
    return sweep.finish_parts(twin, numbers, carry, *ends, [lambdas])


def _run_sweep(
    work: passes.KernelCall, started: passes.StartedEnsemble, baseline: dict[str, Any]
) -> tuple[Array, Array]:
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


def _start_arrays(call: TwinCall, kernel: kernels.Kernel, guess: Guess) -> dict[str, Any]:
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


@jit
def _split_rows(rows: Array, residual: Array, guess: Guess) -> backward.Backward:
    """The sums of a sweep as `sweep.finish_parts` takes them."""
    parameters = (rows.shape[1] - 1) // 2
    first = guess.value.first
    return backward.Backward(
        correction.Guess(first[None, 1:], None),
        first[:1],
        residual,
        rows[:, -1].astype(residual.dtype),
        rows[:, parameters:-1] + guess.slope.first[0],
        rows[:, :parameters],
    )
