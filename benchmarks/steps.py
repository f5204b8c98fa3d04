"""Better steps than Euler's on the processes of own_processes.py: bias of J and of the gradient,
against cost.

Bias: 2,000 trajectories in double precision whose coarse kicks are the sums of fine ones, so that
steps of all lengths see one noise. The gradient is that of the discretised process, by
differentiating its trajectories. The reference is extrapolated from Heun's two finest steps. The
double well, of one state, is integrated over its transitions instead: no trajectories, no error
bars. Cost: nanoseconds a trajectory and step of the generated CPU kernel with scores and a
time-only baseline, everyone in turn, the best of several calls. Rewards by the trapezoid rule but
where "left" says otherwise. Nothing about a process is known here that its estimator does not know.

`taskset -c 0,1 python benchmarks/steps.py --out results/steps` writes own.txt and own.png.
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.flatten_util import ravel_pytree
from matplotlib.ticker import NullFormatter

import fluctua as fl
from fluctua.core import check
from fluctua.core.integrators import integrate_by_trapezoids, mean_rate
from fluctua.plot.style import LOOK, save_png
from machine import describe_machine
from own_processes import PROCESSES, Own

LINEAR = {
    "genes": fl.integrators.Exponential(
        lambda theta: -jnp.concatenate([jnp.ones(3), theta["decay"]])
    ),
    "neural": fl.integrators.Exponential(lambda theta: -jnp.ones(4)),
}
SILENT = {"pendulum": (0,)}
FINEST = {"pendulum": 0.01, "double well": 0.01, "genes": 0.02, "kuramoto": 0.02, "neural": 0.02}
COARSER = (1, 2, 4, 8, 16, 32)
COLOURS = {"euler": "#b0452c", "heun": "#20639b", "rk4": "#3b7a57", "exponential": "#8a6bbe"}


class Bias(NamedTuple):
    """Of one step at one length: of J, and of the gradient relative to its norm; each with its
    standard error.
    """

    dt: float
    value: float
    value_error: float
    gradient: float
    gradient_error: float


def list_steps(name: str) -> dict[str, Any]:
    """The steps that a process is run with."""
    more = {"exponential": LINEAR[name]} if name in LINEAR else {}
    return {"euler": "euler", "heun": "heun", "rk4": "rk4", **more}


def set_step(name: str, own: Own, step: Any) -> fl.Process:
    """The process with a step; Euler's needs no components named."""
    return check.process(
        own.process._replace(
            integrator=step, noiseless=() if step == "euler" else SILENT.get(name, ())
        )
    )


def chains(name: str, own: Own, count: int) -> Iterator[tuple[str, float, np.ndarray, np.ndarray]]:
    """(step, Δt, returns (E,), gradients (E, P)) of every step at every length, on one noise."""
    horizon = own.dt * own.steps
    finest = round(horizon / FINEST[name] / COARSER[-1]) * COARSER[-1]
    h = horizon / finest
    theta, x0 = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), (own.theta, own.start))
    kicks = np.sqrt(h) * np.random.default_rng(0).normal(size=(finest, count, x0.size))
    runs = [("euler left", "euler", own.objective)]
    runs += [
        (label, step, integrate_by_trapezoids(own.objective))
        for label, step in list_steps(name).items()
    ]
    if own.objective.running is None:
        runs = runs[1:]
    for label, step, objective in runs:
        process, rewards = set_step(name, own, step), check.objective(objective)
        for coarser in COARSER:
            if x0.size == 1:
                value, slope = _integrate(
                    process, rewards, finest // coarser, theta, x0, h * coarser
                )
                yield (
                    label,
                    h * coarser,
                    np.asarray(value)[None],
                    np.asarray(ravel_pytree(slope)[0])[None],
                )
                continue
            dw = kicks.reshape(finest // coarser, coarser, count, -1).sum(axis=1)
            values, slopes = _differentiate(process, rewards, theta, x0, h * coarser, dw)
            yield label, h * coarser, np.asarray(values), np.asarray(slopes)


@partial(jax.jit, static_argnums=(0, 1))
def _differentiate(
    process: Any, rewards: Any, theta: Any, x0: Any, dt: Any, dw: Any
) -> tuple[Any, Any]:
    """Returns (E,) of trajectories with the kicks dw (T, E, M), and their derivatives (E, P)."""

    def value(theta: Any, dw: Any) -> Any:
        def body(carry: Any, step: Any) -> tuple[Any, None]:
            (x, reward), (t, kick) = carry, step
            x_next = (
                x
                + mean_rate(process, theta, x, t, dt, None) * dt
                + process.noise(theta, x, t, None) * kick
            )
            reward = reward + rewards.running(theta, x, t, None) * dt
            if rewards.per_step is not None:
                reward = reward + rewards.per_step(theta, x, x_next, t, dt, None)
            return (x_next, reward), None

        (x, reward), _ = jax.lax.scan(body, (x0, 0.0), (dt * jnp.arange(len(dw)), dw))
        return reward + rewards.terminal(theta, x, None)

    values, slopes = jax.vmap(jax.value_and_grad(value), in_axes=(None, 1))(theta, dw)
    return values, jax.vmap(lambda tree: ravel_pytree(tree)[0])(slopes)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _integrate(
    process: Any, rewards: Any, steps: int, theta: Any, x0: Any, dt: Any
) -> tuple[Any, Any]:
    """J of one state with a terminal reward, and its derivatives, by quadrature over the
    transitions of the chain.

    The grid is fine against every kick, so that the sums are integrals to rounding.
    """
    grid = jnp.linspace(-3.0, 3.0, 601)

    def value(theta: Any) -> Any:
        mean = jax.vmap(lambda x: x + mean_rate(process, theta, x, 0.0, dt, None) * dt)(
            grid[:, None]
        )
        width = jax.vmap(lambda x: process.noise(theta, x, 0.0, None))(grid[:, None]) * jnp.sqrt(dt)
        law = jax.nn.softmax(-(((grid - mean) / width) ** 2) / 2, axis=1)
        end = jax.vmap(lambda x: rewards.terminal(theta, x, None))(grid[:, None])
        worth, _ = jax.lax.scan(lambda worth, _: (law @ worth, None), end, length=steps)
        return worth[jnp.argmin(jnp.abs(grid - x0[0]))]

    return jax.value_and_grad(value)(theta)


def biases(name: str, own: Own, count: int) -> tuple[dict[str, list[Bias]], float]:
    """Of every step, by its length; and J."""
    rows: dict[str, list[Any]] = {}
    for label, dt, values, slopes in chains(name, own, count):
        rows.setdefault(label, []).append((dt, values, slopes))
    (_, *fine), (_, *next_to) = rows["heun"][:2]
    true_values, true_slopes = (2 * a - b for a, b in zip(fine, next_to, strict=True))
    scale, root = np.linalg.norm(true_slopes.mean(axis=0)), np.sqrt(count)

    def of(dt, values, slopes):
        return Bias(
            dt,
            float(np.mean(values - true_values)),
            float(np.std(values - true_values) / root),
            float(np.linalg.norm(np.mean(slopes - true_slopes, axis=0)) / scale),
            float(np.linalg.norm(np.std(slopes - true_slopes, axis=0)) / root / scale),
        )

    return {label: [of(*row) for row in some] for label, some in rows.items()}, float(
        true_values.mean()
    )


def costs(name: str, timed: int, repeats: int) -> dict[str, float]:
    """Nanoseconds a trajectory and step of the generated kernels, in single precision."""
    seconds, calls = {}, {}
    with jax.enable_x64(False):
        own = PROCESSES[name]()
        count = min(timed, int(4e9 / (own.cost * own.steps)))
        t = jnp.asarray(own.dt * np.arange(own.steps + 1), jnp.float32)
        for label, step in list_steps(name).items():
            process = set_step(name, own, step)
            estimator = fl.ppgt(fl.simulator(process, own.start, t, backend="cpu"), own.objective)
            calls[label] = partial(estimator, jax.random.key(0), own.theta, count)
            calls[label]()
            seconds[label] = np.inf
        for _ in range(repeats):
            for label, call in calls.items():
                begin = time.perf_counter()
                jax.block_until_ready(call().gradient)
                seconds[label] = min(seconds[label], time.perf_counter() - begin)
    return {
        label: 1e9 * s / (count + 128) / own.steps for label, s in seconds.items()
    }  # 128: the pilot


def longest(rows: list[Bias], bias: float) -> float | None:
    """The step at which the gradient is off by `bias`, by interpolation; None where noise hides
    it, or outside.
    """
    seen = [row for row in rows if row.gradient > 3 * row.gradient_error]
    if len(seen) < 2 or not seen[0].gradient <= bias <= seen[-1].gradient:
        return None
    return float(
        np.exp(
            np.interp(
                np.log(bias), *np.log([[row.gradient for row in seen], [row.dt for row in seen]])
            )
        )
    )


def table(
    name: str, rows: dict[str, list[Bias]], value: float, cost: dict[str, float]
) -> Iterator[str]:
    """Lines of text."""
    yield f"{name}: J = {value:.4g}"
    yield f"  {'step':12} {'ns':>6} {'Δt':>8} {'bias of J':>22} {'of the gradient':>20}"
    for label, some in rows.items():
        for i, row in enumerate(some):
            ns = f"{cost[label.split()[0]]:.1f}" if i == 0 else ""
            of_value, of_gradient = (
                f"± {e:.0e}" if e else "" for e in (row.value_error, row.gradient_error)
            )
            yield (
                f"  {label if i == 0 else '':12} {ns:>6} {row.dt:8.4f} {row.value:+12.2e} "
                f"{of_value:7} "
                f"{row.gradient:12.2e} {of_gradient:7}".rstrip()
            )
    bias = rows["euler"][1].gradient
    yield f"  at the bias of Euler at Δt = {rows['euler'][1].dt:.4f}, {bias:.1e} of the gradient:"
    for label in cost:
        if label == "euler":
            continue
        reached = longest(rows[label], bias)
        if reached is None:
            largest = rows[label][-1]
            hidden = largest.gradient <= 3 * largest.gradient_error
            more = f"steps more than {largest.dt / rows['euler'][1].dt:.0f} times as long"
            yield f"    {label:12} {'noise hides the bias' if hidden else more}"
            continue
        factor = reached / rows["euler"][1].dt
        speed = factor * cost["euler"] / cost[label]
        yield f"    {label:12} steps {factor:5.1f} times as long, {speed:5.1f} times as fast"
    yield ""


def read(text: str) -> dict[str, tuple[dict[str, list[Bias]], float, dict[str, float]]]:
    """What `table` wrote, of every process."""
    results: dict[str, Any] = {}
    for line in text.splitlines():
        words = line.replace("±", "").split()
        if line and not line.startswith(" ") and ": J = " in line:
            name, value = line.split(": J = ")
            results[name] = ({}, float(value), {})
            continue
        if not results or not words or words[0] in ("step", "at") or "times" in words:
            continue
        rows, _, cost = results[name]
        first = next(i for i, word in enumerate(words) if word[0].isdigit())
        if first:
            label = " ".join(words[:first])
            rows[label], cost[label.split()[0]] = [], float(words[first])
            first += 1
        numbers = [float(word) for word in words[first:]]
        dt, value, value_error, slope, slope_error = (
            numbers if len(numbers) == 5 else (*numbers[:2], 0.0, numbers[2], 0.0)
        )
        rows[label].append(Bias(dt, value, value_error, slope, slope_error))
    return results


def figure(results: dict[str, tuple[dict[str, list[Bias]], float, dict[str, float]]]) -> plt.Figure:
    """Bias of the gradient against the time of a trajectory, a panel a process."""
    with plt.rc_context(LOOK):
        return _draw(results)


def _draw(results: dict[str, tuple[dict[str, list[Bias]], float, dict[str, float]]]) -> plt.Figure:
    chart, panels = plt.subplots(2, 3, figsize=(7.2, 4.6), layout="constrained")
    panels = panels.ravel()
    for axes, (name, (rows, _, cost)) in zip(panels, results.items(), strict=False):
        own = PROCESSES[name]()
        for label, some in rows.items():
            if label not in COLOURS:
                continue
            seen = [row for row in some if row.gradient > 2 * row.gradient_error]
            microseconds = [cost[label] * own.dt * own.steps / row.dt / 1e3 for row in seen]
            axes.errorbar(
                microseconds,
                [row.gradient for row in seen],
                [row.gradient_error for row in seen],
                color=COLOURS[label],
                marker="o",
                ms=4,
                lw=1.4,
            )
        axes.set(xscale="log", yscale="log", title=name, xlabel="µs a trajectory")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[::3]:
        axes.set_ylabel("bias of the gradient, relative")
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    handles = [
        plt.Line2D([], [], color=colour, marker="o", ms=4, lw=1.4) for colour in COLOURS.values()
    ]
    panels[-1].legend(handles, COLOURS, frameon=False, loc="center", title="step")
    return chart


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(PROCESSES), choices=list(PROCESSES))
    parser.add_argument("--trajectories", type=int, default=2000, help="of the biases")
    parser.add_argument("--timed", type=int, default=20_000, help="trajectories of a timed call")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a folder")
    parser.add_argument(
        "--figure-only", action="store_true", help="the figure again, from own.txt of that folder"
    )
    options = parser.parse_args()
    if options.figure_only:
        save_png(figure(read((options.out / "own.txt").read_text())), options.out / "own.png")
        return
    jax.config.update("jax_enable_x64", True)
    lines, results = [describe_machine("cpu"), ""], {}
    for name in options.only:
        own = PROCESSES[name]()
        rows, value = biases(name, own, options.trajectories)
        results[name] = rows, value, costs(name, options.timed, options.repeats)
        for line in table(name, *results[name]):
            print(line, flush=True)
            lines.append(line)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "own.txt").write_text("\n".join(lines))
        save_png(figure(results), options.out / "own.png")


if __name__ == "__main__":
    main()
