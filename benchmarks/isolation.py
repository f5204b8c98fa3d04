"""A Kerr lattice that was trained to isolate: power forward and backward, against iteration and
against the drive.

Reads a folder of `fluctua train isolation`, leaves the tables in --out and draws them:
`python benchmarks/isolation.py --run runs/isolation`; without --run the tables in --out are drawn
again."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fluctua import tcmt
from fluctua.core.arrays import Params
from fluctua.plot.network import draw_panel
from fluctua.plot.style import FAMILY, LOOK, WIDTH, letter, save
from fluctua.runs.build import make_network, make_task
from fluctua.runs.config import Config, load
from fluctua.runs.evaluate import load_parameters
from fluctua.runs.reading import read_run
from fluctua.tcmt import exact

FORWARD, BACKWARD, DIFFERENCE = "#0072b2", "#d55e00", "0.25"
DIRECTIONS = {"forward": (0, 1), "backward": (1, 0)}
"""Leads that the power comes in at and goes out of."""
SHOWN = 8
"""Resonators in the last panel, those whose Kerr detuning differs most."""
AMPLITUDES = np.round(30 ** (np.arange(36) / 44), 3)
"""Up to 15: beyond, the Kerr detunings are too large for the preset's steps."""


class Power(NamedTuple):
    """A time-averaged fraction of power, with its standard error."""

    mean: float
    stderr: float


def measure_direction(
    config: Config, direction: str, amplitude: float | None = None, **options: float
) -> tcmt.Task:
    """One direction of the experiment. options: sigma_w and dt, where they are not those of the
    configuration.
    """
    t = config.task
    source, to = DIRECTIONS[direction]
    return tcmt.transmission(
        make_network(config, options.get("sigma_w")),
        drive=tcmt.Drive(
            source, t.amplitude if amplitude is None else amplitude, frequency=t.frequency
        ),
        to=to,
        horizon=t.horizon,
        dt=options.get("dt", t.dt),
        sigma_kappa=t.sigma_kappa,
    )


def power(task: tcmt.Task, theta: Params, trajectories: int, seed: int = 0) -> Power:
    """The transmitted fraction, measured."""
    result = task.estimator("cpu", baseline="none").run(
        jax.random.key(seed), theta, trajectories, scores=False
    )
    return Power(result.value, result.value_stderr)


def both_ways(
    config: Config,
    theta: Params,
    trajectories: int,
    amplitude: float | None = None,
    **options: float,
):
    """Power forward and backward, with independent noise.

    (forward, its error, backward, its error)
    """
    ways = [measure_direction(config, way, amplitude, **options) for way in DIRECTIONS]
    return [
        number for k, task in enumerate(ways) for number in power(task, theta, trajectories, seed=k)
    ]


def course(folder: Path, config: Config, every: int, trajectories: int) -> dict[str, np.ndarray]:
    """Power both ways and every χ at every so many records of a run."""
    records = read_run(folder).course
    last = len(records.iteration) - 1
    places = sorted({*range(0, last, every), last})
    rows = [both_ways(config, records.theta(k), trajectories) for k in places]
    columns = dict(
        zip(
            ("forward", "forward_stderr", "backward", "backward_stderr"),
            np.transpose(rows),
            strict=True,
        )
    )
    chi = {f"chi_{n}": records.chi[places, n] for n in range(records.chi.shape[1])}
    return {"iteration": records.iteration[places], **columns, **chi}


def against_drive(config: Config, theta: Params, trajectories: int) -> dict[str, np.ndarray]:
    """Power both ways at other amplitudes of the drive, without noise and with it."""
    quiet = [both_ways(config, theta, 2, s, sigma_w=0.0)[::2] for s in AMPLITUDES]
    noisy = [both_ways(config, theta, trajectories, s) for s in AMPLITUDES]
    names = (
        "forward",
        "backward",
        "noisy_forward",
        "noisy_forward_stderr",
        "noisy_backward",
        "noisy_backward_stderr",
    )
    values = np.hstack([np.array(quiet), np.array(noisy)])
    return {"amplitude": AMPLITUDES, **dict(zip(names, values.T, strict=True))}


def detunings(config: Config, theta: Params, every: int = 100) -> dict[str, np.ndarray]:
    """Every resonator's ω, χ and time-averaged |ψ|² without noise, both ways. (N,)"""
    seen = {}
    for way in DIRECTIONS:
        run = measure_direction(config, way, sigma_w=0.0).estimator("cpu", baseline="none").run
        amplitudes = run(jax.random.key(0), theta, 2, scores=False, record_every=every).trajectories
        seen[f"intensity_{way}"] = np.mean(np.abs(amplitudes[0, :-1]) ** 2, axis=0)
    own = {name: np.asarray(theta[name], float) for name in ("omega", "chi")}
    return {"site": np.arange(len(own["chi"])), **own, **seen}


def numbers(config: Config, theta: Params, trajectories: int) -> str:
    """What the README quotes: both ways at two steps, and the checks without Kerr effect."""
    lines = []
    for dt in (config.task.dt, config.task.dt / 2):
        forward, error, backward, other = both_ways(config, theta, trajectories, dt=dt)
        difference = f"{forward - backward:.4f} ± {np.hypot(error, other):.4f}"
        contrast = 10 * np.log10(forward / backward)
        lines.append(
            f"Δt = {dt:g}: forward {forward:.4f} ± {error:.4f}, backward {backward:.4f} ± "
            f"{other:.4f}, "
            f"J = {difference}, {contrast:.1f} dB ({trajectories:,} trajectories each)"
        )
    linear = {**theta, "chi": 0 * theta["chi"]}
    quiet = both_ways(config, linear, 2, sigma_w=0.0)[::2]
    lines.append(
        f"χ = 0, no noise: forward {quiet[0]:.6f}, backward {quiet[1]:.6f}, J = "
        f"{quiet[0] - quiet[1]:.1e}"
    )
    for sigma_w in (0.0, config.task.sigma_w):
        value = exact.value(make_task(config, sigma_w=sigma_w), linear)
        lines.append(f"χ = 0, σ_W = {sigma_w:g}, exact moments: J = {value:.1e}")
    lines.append(str(tcmt.stability(make_task(config), theta)))
    return "\n".join(lines) + "\n"


def write(path: Path, columns: dict[str, np.ndarray]) -> None:
    np.savetxt(
        path,
        np.column_stack(list(columns.values())),
        "%.7g",
        ",",
        header=",".join(columns),
        comments="",
    )


def read(path: Path) -> dict[str, np.ndarray]:
    table = np.genfromtxt(path, delimiter=",", names=True)
    return {name: table[name] for name in table.dtype.names}


def draw(out: Path) -> Figure:
    """The network, power both ways against iteration and against the drive, and what χ learnt."""
    config = load(out / "config.toml")
    network = make_network(config)
    theta = load_parameters(out / "final.npz", network)
    run, drive, sites = (read(out / f"{name}.csv") for name in ("course", "drive", "sites"))
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
        grid = figure.add_gridspec(2, 1, height_ratios=(1.25, 1))
        top = grid[0].subgridspec(1, 2, width_ratios=(1.15, 1))
        (diagram,) = draw_panel(figure, top[0], network, theta)
        letter(diagram, "a")
        _curves(figure.add_subplot(top[1]), run)
        bottom = grid[1].subgridspec(1, 3)
        _drive(figure.add_subplot(bottom[0]), drive, config.task.amplitude)
        _kerr(figure.add_subplot(bottom[1]), run)
        _sites(figure.add_subplot(bottom[2]), sites)
        return figure


def _curves(axes: Axes, run: dict[str, np.ndarray]) -> None:
    for way, ink in (("forward", FORWARD), ("backward", BACKWARD)):
        reach = 2 * run[f"{way}_stderr"]
        axes.fill_between(
            run["iteration"], run[way] - reach, run[way] + reach, color=ink, alpha=0.25, lw=0
        )
        axes.plot(run["iteration"], run[way], color=ink, label=way)
    axes.plot(
        run["iteration"],
        run["forward"] - run["backward"],
        color=DIFFERENCE,
        ls=(0, (4, 2)),
        label="difference, $J$",
    )
    axes.set(xlabel="iteration", ylabel="fraction of power transmitted", ylim=(-0.03, 1))
    axes.legend(loc="upper left", ncols=3, columnspacing=1)
    letter(axes, "b")


def _drive(axes: Axes, drive: dict[str, np.ndarray], trained: float) -> None:
    s = drive["amplitude"]
    for way, ink in (("forward", FORWARD), ("backward", BACKWARD)):
        axes.plot(s, drive[way], color=ink)
        axes.plot(s, drive[f"noisy_{way}"], "o", ms=2, color=ink, mec="none")
    axes.plot([], [], color="0.3", label="no noise")
    axes.plot([], [], "o", ms=2, color="0.3", label="with noise")
    axes.legend(loc="lower left")
    axes.axvline(trained, color="0.6", lw=0.6, ls=(0, (4, 3)))
    axes.text(0.95 * trained, 0.97, "trained here", fontsize=7, color="0.4", ha="right", va="top")
    axes.set(
        xscale="log", xlabel="drive amplitude $s^+$", ylabel="fraction of power", ylim=(-0.03, 1)
    )
    axes.set_xticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axes.minorticks_off()
    letter(axes, "c")


def _kerr(axes: Axes, run: dict[str, np.ndarray]) -> None:
    for name in run:
        if name.startswith("chi_"):
            axes.plot(run["iteration"], 1e3 * run[name], color=FAMILY["chi"], lw=0.8, alpha=0.6)
    axes.set(xlabel="iteration", ylabel=r"Kerr $10^3\chi_n$")
    letter(axes, "d")


def _sites(axes: Axes, sites: dict[str, np.ndarray]) -> None:
    """Detunings while driven: ω + χ|ψ|² either way, and ω alone."""
    order = np.argsort(
        -np.abs(sites["chi"] * (sites["intensity_forward"] - sites["intensity_backward"]))
    )[:SHOWN]
    place = np.arange(len(order))
    axes.plot(place, sites["omega"][order], "_", ms=9, color="0.4", label=r"$\omega_n$")
    for way, ink in (("forward", FORWARD), ("backward", BACKWARD)):
        shifted = sites["omega"] + sites["chi"] * sites[f"intensity_{way}"]
        axes.plot(place, shifted[order], "o", ms=4, color=ink, label=way)
    axes.axhline(0, color="0.8", lw=0.6, zorder=0)
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.55, 0.98),
        ncols=3,
        handletextpad=0.1,
        columnspacing=0.8,
    )
    axes.set_xticks(place, [f"{int(n)}" for n in sites["site"][order]])
    axes.set(xlabel="resonator", ylabel=r"detuning $\omega_n+\chi_n|\psi_n|^2$")
    letter(axes, "e")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a folder of `fluctua train isolation`")
    parser.add_argument("--out", type=Path, default=Path("results/isolation"))
    parser.add_argument("--trajectories", type=int, default=1000, help="of the final measurements")
    options = parser.parse_args()
    out = options.out
    if options.run:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("config.toml", "final.npz", "summary.txt"):
            shutil.copyfile(options.run / name, out / name)
        config = load(out / "config.toml")
        theta = load_parameters(out / "final.npz", make_network(config))
        write(out / "course.csv", course(options.run, config, every=10, trajectories=64))
        write(out / "drive.csv", against_drive(config, theta, trajectories=64))
        write(out / "sites.csv", detunings(config, theta))
        (out / "numbers.txt").write_text(
            numbers(config, theta, options.trajectories), encoding="utf-8"
        )
    print((out / "numbers.txt").read_text(encoding="utf-8"))
    for path in save(draw(out), out / "isolation"):
        print(path)


if __name__ == "__main__":
    main()
