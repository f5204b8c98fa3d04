"""Run folders as training leaves them, made up: a band along the diagonal, detuned flanks,
rewinds, escalation.
"""

import csv
from pathlib import Path

import h5py
import numpy as np

from fluctua import tcmt
from fluctua.runs.reading import History


def make_trained(network, seed=0, strength=1.0):
    """θ of a made-up optimum: a waveguide from the first lead to the second."""
    rng = np.random.default_rng(seed)
    start, end = network.positions[network.lead_sites[:2]]
    along = (end - start) / np.linalg.norm(end - start)

    def off(points):
        return np.abs((points - start) @ np.array([-along[1], along[0]]))

    sites, middles = off(network.positions), off(network.positions[network.bonds].mean(axis=1))
    flank, band = np.clip(sites / 4 - 0.25, 0, 1), np.exp(-((middles / 1.5) ** 2))
    return {
        "omega": strength
        * (1.6 * flank * rng.choice([-1, 1], sites.size) + 0.08 * rng.normal(size=sites.size)),
        "kappa": 1
        + strength
        * (
            0.9 * band
            - 0.45 * (1 - band) * rng.random(band.size)
            + 0.05 * rng.normal(size=band.size)
        ),
        "chi": strength * 3e-3 * flank * rng.normal(size=sites.size),
    }


def course(network, records, *, sigma_kappa=0.0, seed=0, scale=60.0):
    """Iterations (L,) and θ at each, from uniform to `make_trained`, with diffusion on the way."""
    rng = np.random.default_rng(seed + 1)
    progress = 1 - np.exp(-np.asarray(records, float) / scale)
    aim = make_trained(network, seed, strength=1 - sigma_kappa)
    walk = lambda v: (
        0.03
        * np.abs(v).max()
        * np.cumsum(rng.normal(size=(len(records), v.size)), axis=0)
        / len(records) ** 0.5
    )
    zero = {"omega": 0.0, "kappa": 1.0, "chi": 0.0}
    return {
        name: zero[name] + progress[:, None] * (v - zero[name]) + walk(v - zero[name])
        for name, v in aim.items()
    }


def history_rows(
    iterations, *, sigma_kappa=0.0, seed=0, ensemble=None, rewind=None, start=0, slope=0.0
):
    """Rows of a history; `rewind=(at, to)` goes back once and repeats the iterations from `to`
    on.
    """
    rng = np.random.default_rng(seed)
    order = list(range(start, iterations))
    if rewind:
        at, to = rewind
        order = [*range(start, at + 1), *range(to, iterations)]
    spent, rows, length = 0, [], start + 100 if start else iterations
    for row, i in enumerate(order):
        escalated = int(20 * (i / iterations) ** (0.6 + 3 * sigma_kappa))
        count = ensemble(i) if ensemble else 1000 * max(1, min(20, escalated))
        spent += count
        top = 0.65 - 1.2 * sigma_kappa
        J = (
            0.2
            + (top - 0.2) * (0.45 * (1 - np.exp(-i / 8)) + 0.55 * (1 - np.exp(-i / (0.4 * length))))
            + slope * (i - start)
        )
        noise = (0.05 + sigma_kappa) / np.sqrt(count)
        event = "rewind" if rewind and row == rewind[0] - start + 1 else ""
        rows.append(
            [
                row,
                i,
                J + noise * rng.normal(),
                noise,
                count,
                spent,
                0.1 / (1 + i),
                0.5 * (row + 1),
                event,
            ]
        )
    return rows


def write_run(
    folder,
    *,
    network=None,
    sigma_kappa=0.0,
    iterations=400,
    seed=0,
    every=5,
    finished=True,
    dt=1e-3,
    **history,
):
    """A run folder; returns its path."""
    folder, network = Path(folder), network or tcmt.paper()
    folder.mkdir(parents=True)
    with (folder / "history.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(History._fields)
        writer.writerows(history_rows(iterations, sigma_kappa=sigma_kappa, seed=seed, **history))
    records = np.arange(history.get("start", 0), iterations, every)
    theta = course(network, records, sigma_kappa=sigma_kappa, seed=seed, scale=iterations / 5)
    with h5py.File(folder / "parameters.h5", "w") as file:
        for name, values in {"row": np.arange(len(records)), "iteration": records, **theta}.items():
            file[name] = values
        file["bonds"], file["positions"], file["lead_sites"] = (
            network.bonds,
            network.positions,
            network.lead_sites,
        )
        file.attrs.update(
            sigma_kappa=sigma_kappa, sigma_w=0.5, horizon=20.0, dt=dt, drive_amplitude=10.0
        )
    (folder / "config.toml").write_text(f"sigma_kappa = {sigma_kappa}\n")
    if finished:
        np.savez(folder / "final.npz", **{name: values[-1] for name, values in theta.items()})
    return folder


def write_figure_runs(folder, *, network=None, iterations=400, **options):
    """A folder of runs, one a σ_κ, and three continuations of the first in `inset`."""
    for k, sigma in enumerate((0.0, 0.05, 0.1, 0.2)):
        rewind = (iterations // 2, iterations // 2 - 20)
        write_run(
            folder / f"sigma-{sigma:g}",
            network=network,
            sigma_kappa=sigma,
            iterations=iterations,
            seed=k,
            rewind=rewind,
            **options,
        )
    at = iterations - 100
    kinds = (("up", 25_000, 5e-6), ("same", 20_000, 0.0), ("down", 1000, -1e-4))
    for k, (name, count, slope) in enumerate(kinds):
        write_run(
            folder / "inset" / name,
            network=network,
            iterations=iterations + 60,
            start=at,
            seed=10 + k,
            ensemble=lambda i, count=count: count,
            slope=slope,
            **options,
        )
    return folder
