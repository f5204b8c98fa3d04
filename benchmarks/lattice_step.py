"""Bias of J and of its gradient against the cost of a trajectory, for Euler's, Heun's and RK4's
step of a network.

    python benchmarks/lattice_step.py                  # both networks: results/steps/lattice.csv,
    .md, .png python benchmarks/lattice_step.py --figure-only    # table and figure again, from
    lattice.csv

Two networks: the paper's lattice as it was trained (results/fig1/final_0.npz, weak Kerr), and a 4 ×
5 lattice with Kerr detunings χ|ψ|² of 10 to 30, where Euler's steps grow without reason. Each is
run without noise and with it, in float64 on JAX. With noise all steps see the same Brownian paths:
increments of long steps are sums of short ones. The gradient is that of each path, by reverse mode;
its mean is what the score estimates without bias of its own.

The reference follows the same paths by RK4 on a fine grid, with the noise spread evenly over each
step, which is of second order in the law. Bias of the gradient: the root mean square over ω, κ and
χ of |Δg|/|g|; with noise, what is left above chance (|mean|² − spread²/paths), beside what chance
hides. Cost: processor seconds per trajectory of the CPU kernel, single precision, all scores and
a time-only baseline."""

from __future__ import annotations

import argparse
import csv
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np

from fluctua import tcmt
from fluctua.core import check
from fluctua.core.integrators import mean_rate
from fluctua.plot import style
from fluctua.tcmt.conversion import kernel_spec
from fluctua.tcmt.kernel import run as kernel

jax.config.update("jax_enable_x64", True)
ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "steps"
FAMILIES = ("omega", "kappa", "chi")
BATCH = 8


class System(NamedTuple):
    """A network at θ, and the steps that are compared. finest: of the Brownian paths;
    reference: of the reference.
    """

    name: str
    network: tcmt.Network
    theta: dict[str, np.ndarray]
    horizon: float
    drive: float
    finest: float
    reference: float
    steps: dict[str, tuple[float, ...]]

    def task(self, step: str, dt: float) -> tcmt.Task:
        return tcmt.transmission(
            self.network,
            horizon=self.horizon,
            dt=dt,
            drive=tcmt.Drive(0, self.drive),
            integrator=step,
        )


def systems() -> list[System]:
    """The two networks."""
    with np.load(ROOT / "results" / "fig1" / "final_0.npz") as file:
        trained = {name: np.asarray(file[name], np.float64) for name in FAMILIES}
    rng = np.random.default_rng(5)
    small = tcmt.rectangular(4, 5)
    strong = {
        "omega": 0.5 * rng.standard_normal(20),
        "kappa": 1 + 0.3 * rng.standard_normal(len(small.bonds)),
        "chi": np.full(20, 0.1),
    }
    return [
        System(
            "the paper's lattice, trained",
            tcmt.paper(),
            trained,
            20.0,
            10.0,
            5e-4,
            2e-3,
            {
                "euler": (5e-4, 1e-3, 2e-3),
                "heun": (0.005, 0.01, 0.02, 0.04, 0.08),
                "rk4": (0.02, 0.04, 0.1),
            },
        ),
        System(
            "4 × 5 lattice, strong Kerr",
            small,
            strong,
            5.0,
            100.0,
            1e-4,
            2e-4,
            {
                "euler": (1e-4, 2e-4, 5e-4, 1e-3, 2e-3),
                "heun": (1e-3, 2e-3, 5e-3, 0.01),
                "rk4": (5e-3, 0.01, 0.02),
            },
        ),
    ]


# ----------------------------------------------------------------------------- values and gradients


def along(task: tcmt.Task, spread: bool, theta: Any, dw: Any) -> Any:
    """The return of one path. dw: increments (T, 2N). spread: each over its step, in place of
    at its end.
    """
    dt, sigma = task.t[1] - task.t[0], task.process.noise(theta)
    rate, rewards = partial(mean_rate, task.process), check.objective(task.objective)

    def step(carry: Any, each: Any) -> Any:
        (x, total), (t, kick) = carry, each
        total += rewards.running(theta, x, t, None) * dt
        if spread:
            pushed = task.process._replace(
                drift=lambda *a: task.process.drift(*a) + sigma * kick / dt
            )
            return (x + mean_rate(pushed, theta, x, t, dt, None) * dt, total), None
        return (x + rate(theta, x, t, dt, None) * dt + sigma * kick, total), None

    @jax.checkpoint
    def block(carry: Any, each: Any) -> Any:
        return jax.lax.scan(step, carry, each)

    steps = len(task.t) - 1
    size = max(d for d in range(1, int(np.sqrt(steps)) + 1) if steps % d == 0)
    blocks = jax.tree.map(
        lambda v: v.reshape(-1, size, *v.shape[1:]), (jnp.asarray(task.t[:-1]), dw)
    )
    (x, total), _ = jax.lax.scan(block, (jnp.zeros(dw.shape[1]), jnp.zeros(())), blocks)
    return total + rewards.terminal(theta, x, None)


def average_paths(
    system: System, step: str, dt: float, paths: int, spread: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """J and ∇J of the path without noise, then of `paths` paths with.

    (1 + paths,), (1 + paths, P)
    """
    task = system.task(step, dt)
    both = jax.jit(jax.vmap(jax.value_and_grad(partial(along, task, spread)), in_axes=(None, 0)))
    theta = {name: jnp.array(value) for name, value in system.theta.items()}
    fine, rows, every = (
        round(system.horizon / system.finest),
        2 * system.network.sites,
        round(dt / system.finest),
    )
    values, gradients = [], []
    for first in range(0, 1 + paths, BATCH):
        numbers = np.arange(first, first + BATCH)
        dw = np.zeros((BATCH, fine // every, rows))
        for place, number in enumerate(numbers):
            if 0 < number <= paths:
                z = np.random.default_rng([7, number]).standard_normal((fine, rows), np.float32)
                dw[place] = np.sqrt(system.finest) * z.reshape(-1, every, rows).sum(
                    axis=1, dtype=np.float64
                )
        value, gradient = both(theta, dw)
        values.append(np.asarray(value))
        gradients.append(np.concatenate([np.asarray(gradient[name]) for name in FAMILIES], axis=1))
    return np.concatenate(values)[: 1 + paths], np.concatenate(gradients)[: 1 + paths]


def seconds(system: System, step: str, dt: float) -> float:
    """Processor time per trajectory of the kernel."""
    spec = kernel_spec(system.task(step, dt), system.theta)
    count = int(np.clip(2**22 // (spec.steps * spec.sites) * 16, 64, 4096))
    options = {"threads": 1, "baseline": np.linspace(1, 0, spec.steps + 1)}
    best = np.inf
    for _ in range(5):
        started = time.process_time()
        try:
            kernel.run(spec, 0, count, **options)
        except FloatingPointError:
            return np.nan
        best = min(best, (time.process_time() - started) / count)
    return best


def half_a_step(system: System, dt: float) -> float:
    """What the noise of half a step adds to J, 2Q D²Δt/s²: kicks come at the end of a step,
    where rewards are read.
    """
    network, port = system.network, system.network.lead_sites[1]
    q = (
        network.sigma_e[1] ** 2 * network.gamma_e[1]
        + network.sigma_r[port] ** 2 * network.gamma[port]
    )
    return 2 * q * 2 * network.gamma_e[1] * dt / system.drive**2


class Row(NamedTuple):
    """One step of one network. Biases relative to J and to the gradient; `hidden`: by chance, one
    standard error.

    half_step: of J's bias, what the noise of half a step adds.
    """

    system: str
    step: str
    dt: float
    seconds: float
    still_J: float
    still_gradient: float
    J: float
    J_hidden: float
    half_step: float
    gradient: float
    gradient_hidden: float


def measure_steps(system: System, paths: int) -> list[Row]:
    """Every step against the reference."""
    j, g = average_paths(system, "rk4", system.reference, paths, spread=True)
    sizes = np.cumsum([np.size(system.theta[name]) for name in FAMILIES])[:-1]

    def parts(v):
        return np.split(v, sizes, axis=-1)

    def pairs(v, of):
        return zip(parts(v), parts(of), strict=True)

    def norm(v, of):
        return np.sqrt(np.mean([(a**2).sum() / (b**2).sum() for a, b in pairs(v, of)]))

    print(f"{system.name}: J = {j[0]:.6g} without noise, {j[1:].mean():.6g} with", flush=True)
    rows = []
    for step, sizes_of_step in system.steps.items():
        for dt in sizes_of_step:
            started = time.perf_counter()
            other_j, other_g = average_paths(system, step, dt, paths)
            dj, dg, mean = other_j - j, other_g - g, g[1:].mean(axis=0)
            chance = norm(dg[1:].std(axis=0, ddof=1) / np.sqrt(paths), mean)
            above = norm(dg[1:].mean(axis=0), mean) ** 2 - chance**2
            cost = seconds(system, step, dt) if step != "rk4" else np.nan
            row = Row(
                system.name,
                step,
                dt,
                cost,
                dj[0] / j[0],
                norm(dg[0], g[0]),
                dj[1:].mean() / j[1:].mean(),
                dj[1:].std(ddof=1) / np.sqrt(paths) / j[1:].mean(),
                half_a_step(system, dt) / j[1:].mean(),
                np.sqrt(max(above, 0.0)),
                chance,
            )
            rows.append(row)
            print(
                *(f"{v:.3g}" if isinstance(v, float) else v for v in row[1:]),
                f"({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
    return rows


# ---------------------------------------------------------------------------------- what is written


def ratio(rows: list[Row], dt: float, name: str) -> tuple[float, float, float, bool]:
    """Cost of Euler's step over that of Heun's at the same bias: (factor, bias, Heun's Δt), between
    the points.

    Where all of Heun's points are better, those of the longest of its steps, and True: they are
    bounds."""
    finite = [row for row in rows if np.isfinite(row.seconds) and np.isfinite(getattr(row, name))]
    (euler,) = [row for row in finite if row.step == "euler" and row.dt == dt]
    heun = sorted((row for row in finite if row.step == "heun"), key=lambda row: row.dt)
    bias = abs(getattr(euler, name))

    def of(f):
        return np.array([np.log(f(row)) for row in heun])

    x = of(lambda row: abs(getattr(row, name)))
    at = float(np.clip(np.log(bias), x.min(), x.max()))
    order = np.argsort(x)

    def read(f):
        return float(np.exp(np.interp(at, x[order], of(f)[order])))

    return (
        euler.seconds / read(lambda row: row.seconds),
        bias,
        read(lambda row: row.dt),
        bool(np.log(bias) > x.max()),
    )


def write_table(rows: list[Row]) -> None:
    """lattice.md."""
    heads = ["network", "step", "Δt", "ms per trajectory", "J, no noise", "gradient, no noise"]
    heads += ["J", "of it half a step's noise", "gradient"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]

    def with_error(v, e):
        return f"{v:.1e} ± {e:.0e}" if np.isfinite(v) else "overflow"

    def plain(v):
        return f"{v:.1e}" if np.isfinite(v) else "overflow"

    for row in rows:
        cost = f"{1e3 * row.seconds:.3g}" if np.isfinite(row.seconds) else "–"
        still = (plain(row.still_J), plain(row.still_gradient))
        noisy = (
            with_error(row.J, row.J_hidden),
            plain(row.half_step),
            with_error(row.gradient, row.gradient_hidden),
        )
        lines.append(
            f"| {' | '.join([row.system, row.step, f'{row.dt:g}', cost, *still, *noisy])} |"
        )
    lines += ["", "Euler's cost over Heun's at the same bias:", ""]
    lines += [
        "| network | bias of | Euler's Δt | bias | Heun's Δt | factor |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(row.system for row in rows):
        mine = [row for row in rows if row.system == name]
        for what, field in (("the gradient, no noise", "still_gradient"), ("J, with noise", "J")):
            for dt in (row.dt for row in mine if row.step == "euler" and np.isfinite(row.seconds)):
                factor, bias, long, is_bound = ratio(mine, dt, field)
                most = "> " if is_bound else ""
                lines.append(
                    f"| {name} | {what} | {dt:g} | {bias:.1e} | {most}{long:.2g} | "
                    f"{most}{factor:.0f} |"
                )
    (OUT / "lattice.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


COLOUR = {"euler": "#aa3377", "heun": "#0077bb"}


def draw(rows: list[Row]) -> None:
    """lattice.png: bias of the gradient and of J against the cost of a trajectory."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.system for row in rows))
    figure, axes = plt.subplots(
        2, len(names), figsize=(style.WIDTH, 5.2), layout="constrained", sharex="col"
    )
    for column, name in zip(axes.T, names, strict=True):
        of_system = [row for row in rows if row.system == name and np.isfinite(row.seconds)]
        for axis, still, noisy, hidden, label in zip(
            column,
            ("still_gradient", "still_J"),
            ("gradient", "J"),
            ("gradient_hidden", "J_hidden"),
            ("bias of the gradient", "bias of J"),
            strict=True,
        ):
            for step in COLOUR:
                mine = [row for row in of_system if row.step == step]
                _curve(axis, step, mine, still, noisy, hidden)
            axis.set(xscale="log", yscale="log", ylabel=label)
            axis.margins(x=0.15)
            axis.grid(alpha=0.2)
        column[0].set_title(name)
        column[1].set_xlabel("processor ms per trajectory")
    handles, labels = axes[1, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    style.save_png(figure, OUT / "lattice.png")


def _curve(axis: Any, step: str, rows: list[Row], still: str, noisy: str, hidden: str) -> None:
    """One step's biases: without noise, with it, and below what chance hides (two errors) a
    triangle.
    """

    def of(name, some):
        return np.abs([getattr(row, name) for row in some])

    def cost(some):
        return [1e3 * row.seconds for row in some]

    look = {"color": COLOUR[step], "ms": 4}
    if noisy == "J" and step == "heun":
        axis.plot(
            cost(rows), of("half_step", rows), ":", color="0.4", label="the noise of half a step"
        )
    axis.plot(cost(rows), of(still, rows), "o-", label=f"{step.capitalize()}, no noise", **look)
    is_seen = [abs(getattr(row, noisy)) > 2 * getattr(row, hidden) for row in rows]
    seen = [row for row, there in zip(rows, is_seen, strict=True) if there]
    unseen = [row for row, there in zip(rows, is_seen, strict=True) if not there]
    axis.errorbar(
        cost(seen),
        of(noisy, seen),
        of(hidden, seen),
        fmt="s--",
        mfc="none",
        lw=0.8,
        capsize=2,
        label=f"{step.capitalize()}, with noise",
        **look,
    )
    if unseen:
        limit = np.maximum(of(noisy, unseen), 2 * of(hidden, unseen))
        axis.plot(
            cost(unseen),
            limit,
            "v",
            mfc="none",
            label=f"{step.capitalize()}, with noise, at most",
            **look,
        )
    for row in rows:
        axis.annotate(
            f"{row.dt:g}",
            (1e3 * row.seconds, abs(getattr(row, still))),
            xytext=(5, 3),
            textcoords="offset points",
            fontsize=6,
            color=COLOUR[step],
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paths", type=int, default=127, help="Brownian paths")
    parser.add_argument("--figure-only", action="store_true", help="from lattice.csv")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if not options.figure_only:
        rows = [row for system in systems() for row in measure_steps(system, options.paths)]
        with (OUT / "lattice.csv").open("w", newline="", encoding="utf-8") as file:
            shown = ([f"{v:.6g}" if isinstance(v, float) else v for v in row] for row in rows)
            csv.writer(file).writerows([Row._fields, *shown])
    with (OUT / "lattice.csv").open(encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    rows = [
        Row(r["system"], r["step"], *(float(r[name]) for name in Row._fields[2:])) for r in read
    ]
    write_table(rows)
    with mpl.rc_context(style.LOOK):
        draw(rows)


if __name__ == "__main__":
    mpl.use("Agg")
    main()
