"""The Ising problem of NESTbench25: reverse a magnet of 32 × 32 spins with little entropy produced.

The engine updates one spin at a time by Glauber's rule, in a fixed order: first all sites whose row
and column have an even sum, then the others. Sites of one colour do not interact, so a sweep is two
parallel updates, and `fluctua.Chain` has the engine's own law, without a surrogate. A protocol
file has 1,000 rows of T and h for 100 sweeps. A row lasts 102.4 spins, so that the five rows of
half a sweep belong to five groups of its sites.

The entropy produced is counted in the form of work,

    σ = Σ_k [φ_{k+1}(x_{k+1}) − φ_k(x_k) − change of φ by the flips],   φ = −K Σ_bonds s s' − b Σ s,

with K = 1/T and b = h/T: on every trajectory the same number as the engine's, in which the part of
the return-to-go that the state before a step determines is left out.

Known to the training: the law of the engine, and that T must rise on the way. The parameters are K
and b at knots, with jumps allowed at both ends. A magnet of 8 × 8 spins comes first: the entropy
per spin is nearly the same where it is warm, and a trajectory costs a sixteenth. The default and
the learned protocol of the benchmark are not used.
"""

from __future__ import annotations

import argparse
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.figure import Figure

import fluctua as fl
from fluctua.core.arrays import Array, Params
from fluctua.plot.style import LOOK, WIDTH, letter, save_png

SIDE = 32
"""Of the engine's magnet."""

SWEEPS = 100
ROWS = 1000
ROWS_PER_SWEEP = ROWS // SWEEPS
COLD = 1 / 0.7
"""K at both ends; b is −COLD at the beginning and COLD at the end."""


def visit_order(side: int) -> np.ndarray:
    """Sites in the order in which the engine updates them. (sites,)"""
    row, column = np.divmod(np.arange(side**2), side)
    return np.argsort((row + column) % 2, kind="stable")


def protocol_rows(side: int) -> np.ndarray:
    """Row of the protocol at which each site is updated in each sweep. (SWEEPS, sites)"""
    sites = side**2
    tau = np.arange(SWEEPS * sites)
    row = (tau / (SWEEPS * sites / ROWS)).astype(int)
    rows = np.empty((SWEEPS, sites), int)
    rows[:, visit_order(side)] = row.reshape(SWEEPS, sites)
    return rows


def interpolation(knots: int) -> np.ndarray:
    """Weights of equidistant knots in each row, linear between them. (ROWS, knots)"""
    place = np.linspace(0, knots - 1, ROWS)
    return np.maximum(1 - np.abs(place[:, None] - np.arange(knots)), 0)


def add_neighbours(spins: Array) -> Array:
    """Sum over the four neighbours of each site, periodic. spins: (side, side)."""
    return sum(jnp.roll(spins, shift, axis) for axis in (0, 1) for shift in (1, -1))


def reduced_energy(K: Array, b: Array, spins: Array) -> Array:
    """φ = −K Σ_bonds s s' − b Σ s."""
    bonds = jnp.sum(spins * (jnp.roll(spins, 1, 0) + jnp.roll(spins, 1, 1)))
    return -K * bonds - b * jnp.sum(spins)


def read_boundary(theta: Params, t: Array) -> tuple[Array, Array]:
    """K and b at which φ is counted before the sweep at t; those of the problem at both ends."""
    row = jnp.clip((t * ROWS_PER_SWEEP).astype(int), 0, ROWS - 1)
    weights = jnp.asarray(interpolation(len(theta["K"])), theta["K"].dtype)[row]
    inside = (t > 0) & (t < SWEEPS)
    K = jnp.where(inside, weights @ theta["K"], COLD)
    return K, jnp.where(inside, weights @ theta["b"], jnp.where(t > 0, COLD, -COLD))


class Magnet(NamedTuple):
    """A magnet of side × side spins ±1, periodic, that follows a protocol of K and b."""

    side: int = SIDE

    @property
    def even(self) -> np.ndarray:
        """Sites that are updated first. (side, side)"""
        return np.indices((self.side, self.side)).sum(axis=0) % 2 == 0

    def shape(self, x: Array) -> Array:
        """The spins on their lattice. (side, side)"""
        return x.reshape(self.side, self.side)

    def read_fields(self, theta: Params, t: Array) -> tuple[Array, Array]:
        """K and b of every site in the sweep that begins at t. (side, side) each"""
        weights = jnp.asarray(interpolation(len(theta["K"])), theta["K"].dtype)
        first = (t * ROWS_PER_SWEEP).astype(int)
        rows = jax.lax.dynamic_slice_in_dim(weights, first, ROWS_PER_SWEEP)
        row_of_site = self.shape(protocol_rows(self.side)[0])
        one_hot = jax.nn.one_hot(row_of_site, ROWS_PER_SWEEP, dtype=weights.dtype)
        return one_hot @ (rows @ theta["K"]), one_hot @ (rows @ theta["b"])

    def local_fields(self, theta: Params, x: Array, x_next: Array, t: Array) -> Array:
        """K Σs + b of each site when it is updated.

        Even sites see the odd ones as they were, odd sites the even ones as they are now.
        """
        K, b = self.read_fields(theta, t)
        before, after = (add_neighbours(self.shape(v)) for v in (x, x_next))
        return K * jnp.where(self.even, before, after) + b

    def sample(self, key: Array, theta: Params, x: Array, t: Array) -> Array:
        """One sweep of heat-bath (Glauber) updates."""
        K, b = self.read_fields(theta, t)
        spins = self.shape(x)
        threshold = jax.random.uniform(key, spins.shape, x.dtype)
        for colour in (self.even, ~self.even):
            up = jax.nn.sigmoid(2 * (K * add_neighbours(spins) + b))
            spins = jnp.where(colour, jnp.where(threshold < up, 1.0, -1.0).astype(x.dtype), spins)
        return spins.ravel()

    def log_prob(self, theta: Params, x: Array, x_next: Array, t: Array) -> Array:
        """ln p of a sweep: the sum over its sites."""
        pull = self.local_fields(theta, x, x_next, t)
        return jnp.sum(jax.nn.log_sigmoid(2 * self.shape(x_next) * pull))

    def produce_entropy(self, theta: Params, x: Array, x_next: Array, t: Array, dt: Array) -> Array:
        """Entropy produced in one sweep, as work."""
        before, after = (self.shape(v) for v in (x, x_next))
        flips = jnp.sum((after - before) * self.local_fields(theta, x, x_next, t))
        rise = reduced_energy(*read_boundary(theta, t + dt), after)
        return flips + rise - reduced_energy(*read_boundary(theta, t), before)

    def reward(self, theta: Params, x: Array, x_next: Array, t: Array, dt: Array) -> Array:
        """Minus the entropy produced in one sweep."""
        return -self.produce_entropy(theta, x, x_next, t, dt)


@cache
def make_estimator(side: int) -> Any:
    """Estimator of ∇J, from all spins down, with a time-only baseline; J = −⟨σ⟩.

    One for all seeds: it is compiled once.
    """
    magnet = Magnet(side)
    chain = fl.Chain(magnet.sample, magnet.log_prob)
    t = jnp.arange(SWEEPS + 1.0)
    simulator = fl.simulator(chain, -jnp.ones(side**2), t, backend="jax")
    return fl.ppgt(simulator, fl.Objective(per_step=magnet.reward), baseline="time")


# ------------------------------------------------------------------------------------- protocols


def start(knots: int) -> Params:
    """Half a period of a sine: T rises from 0.7 to 4.7 and returns, h turns from −1.3 to 1.3."""
    phase = np.pi * np.linspace(0, 1, knots)
    temperature = 0.7 + 4 * np.sin(phase)
    return from_columns(temperature, -1.3 * np.cos(phase))


def from_columns(temperature: np.ndarray, magnetic_field: np.ndarray) -> Params:
    """K = 1/T and b = h/T at the knots."""
    return {
        "K": jnp.asarray(1 / temperature, float),
        "b": jnp.asarray(magnetic_field / temperature, float),
    }


def to_protocol(theta: Params) -> np.ndarray:
    """T and h of every row, as the engine reads them. (ROWS, 2)"""
    weights = interpolation(len(theta["K"]))
    K, b = (weights @ np.asarray(theta[name], float) for name in ("K", "b"))
    return np.stack([1 / K, b / K], axis=1)


# ------------------------------------------------------------------------------------- trainings


class Stage(NamedTuple):
    """A part of a training: side of the magnet, iterations, trajectories in each, first rate."""

    side: int
    iterations: int
    trajectories: int
    rate: float


KNOTS = 24
STAGES = (Stage(8, 600, 4096, 0.03), Stage(SIDE, 300, 2048, 0.01))
QUICK = (Stage(4, 3, 8, 0.03), Stage(8, 2, 8, 0.005))
BOUNDS = ({"K": 0.005, "b": -np.inf}, {"K": 2.0, "b": np.inf})
"""T stays between 0.5 and 200."""


def train(
    seed: int, *, quick: bool = False, stages: tuple[Stage, ...] = STAGES, knots: int = KNOTS
) -> dict[str, Any]:
    """A protocol of little entropy production; Adam, with steps that shrink to zero in each stage.

    Returns: `protocol` (ROWS, 2), `trajectories` that were simulated (of all sizes), `minutes`, and
        `history`, J at every iteration over the number of spins, in units of the engine's magnet.
    """
    began = time.perf_counter()
    theta = start(6 if quick else knots)
    history: list[float] = []
    trajectories = 0
    for stage in QUICK if quick else stages:
        decay = optax.cosine_decay_schedule(stage.rate, stage.iterations)
        training = fl.Training(
            make_estimator(stage.side),
            theta,
            optax.adam(decay),
            trajectories=stage.trajectories,
            bounds=BOUNDS,
            seed=seed,
        )
        for record in fl.train(training, iterations=stage.iterations):
            history.append(float(record.estimate.value) * (SIDE / stage.side) ** 2)
        theta = record.next_theta
        trajectories += record.trajectories
    return {
        "protocol": to_protocol(theta),
        "trajectories": trajectories,
        "minutes": (time.perf_counter() - began) / 60,
        "history": history,
    }


def write_result(folder: Path, seed: int, result: dict[str, Any]) -> None:
    """Write the protocol of one seed, and its learning curve."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / f"ising_seed{seed}.dat", result["protocol"], fmt="%.7g")
    curve = np.array([np.arange(len(result["history"])), result["history"]]).T
    counts = f"trajectories {result['trajectories']}, minutes {result['minutes']:.2f}"
    np.savetxt(
        folder / f"ising_history{seed}.csv",
        curve,
        fmt=["%d", "%.5g"],
        delimiter=",",
        header=f"{counts}, {jax.devices()[0].device_kind}\niteration,J",
        comments="# ",
    )


def draw(folder: Path, seeds: list[int]) -> Figure:
    """Learning curves and protocols of all seeds, from their files."""
    with mpl.rc_context(LOOK):
        figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.2), layout="constrained")
        for seed in seeds:
            protocol = np.loadtxt(folder / f"ising_seed{seed}.dat")
            curve = np.loadtxt(folder / f"ising_history{seed}.csv", delimiter=",")
            axes[0].plot(curve[:, 0], -curve[:, 1], lw=0.5, label=f"seed {seed}")
            phase = (np.arange(ROWS) + 0.5) / ROWS
            axes[1].plot(phase, protocol[:, 0])
            axes[2].plot(phase, protocol[:, 1])
        axes[0].set(xlabel="iteration", ylabel="entropy produced", yscale="log")
        axes[0].yaxis.set_major_formatter(mpl.ticker.ScalarFormatter())
        axes[0].yaxis.set_minor_formatter(mpl.ticker.ScalarFormatter())
        axes[0].legend()
        axes[1].set(xlabel="time", ylabel="temperature", yscale="log")
        axes[2].set(xlabel="time", ylabel="magnetic field")
        for panel, axis in zip("abc", axes, strict=True):
            letter(axis, panel)
    return figure


def main() -> None:
    """Train all seeds and write their protocols."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/nestbench"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="a few iterations, to try it out")
    options = parser.parse_args()
    for seed in options.seeds:
        result = train(seed, quick=options.quick)
        write_result(options.out, seed, result)
        print(
            f"seed {seed}: J = {np.mean(result['history'][-20:]):.2f} in the last iterations, "
            f"{result['trajectories']:,} trajectories, {result['minutes']:.1f} minutes",
            flush=True,
        )
    save_png(draw(options.out, options.seeds), options.out / "ising.png")


if __name__ == "__main__":
    main()
