"""The two trap problems of NESTbench25: least mean work to move a trap, overdamped and underdamped.

Steps and rows are those of the C++ engines. A protocol is piecewise linear with free ends, so that
it may jump at both; the underdamped one also has a kick in its first and its last rows.

Known to the training: the equations. Their drift is affine and the work quadratic, so that a twin
of second order is the exact value function, and a few trajectories make a gradient.

The underdamped engine counts U(x, c') − U(x, c) at every switch while its positions move with the
velocity before a step. A force F for one step Δt then costs F·vΔt and gives the kinetic energy
F·vΔt + (FΔt)²/2: fast protocols gain energy from nothing, and zigzags score below any bound.
Trainings here count F·(v + v')/2·Δt instead, which is the energy given, and their kicks last 40
rows, so that the two sums differ little. `loophole` is the training on the engine's own sum, for
comparison.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fluctua as fl
from fluctua.core.arrays import Array, Params
from nestbench_protocols import (
    ROWS,
    Log,
    find_row,
    follow_engine,
    interpolate_knots,
    read_protocol,
)

BEGIN = 0.0
END = 5.0
QUALITY = 7.0
OMEGA = 2 * np.pi * 1090e-6
"""ω₀ of the cantilever, per microsecond. Times are in units of 1/ω₀ here, velocities of ω₀ nm."""


class Trap(NamedTuple):
    """A trap problem.

    dt: length of a step. duration: of the protocol. damping: share of the velocity that a step
    loses; None without mass. kick_rows: length of a kick. midpoint: whether the work counts the
    mean velocity of a step, not the one before it. theta: start of a training, a ramp.
    """

    dt: float
    duration: float
    damping: float | None
    kick_rows: int
    midpoint: bool
    theta: Params

    @property
    def t(self) -> Array:
        """Time grid (T+1,); the last step may end after the protocol, as the engine's does."""
        return jnp.arange(int(np.ceil(self.duration / self.dt - 1e-6)) + 1) * self.dt

    def centre(self, theta: Params, t: Array) -> Array:
        """Centre of the trap during the step that begins at t."""
        return self.at_row(theta, find_row(t, self.dt, self.duration / ROWS))

    def at_row(self, theta: Params, row: Array) -> Array:
        """Centre of the trap in a row; kicks are in 1,000 lengths times rows."""
        centre = interpolate_knots(theta["knots"], row)
        if not self.kick_rows:
            return centre
        first, last = theta["kicks"] * (1000 / self.kick_rows)
        return centre + first * (row < self.kick_rows) + last * (row >= ROWS - self.kick_rows)

    def tabulate(self, theta: Params) -> np.ndarray:
        """Rows of the file (rows, 1)."""
        rows = jax.vmap(lambda row: self.at_row(theta, row))(jnp.arange(ROWS, dtype=float))
        return np.asarray(rows, float)[:, None]


def overdamped(knots: int = 9) -> Trap:
    """The problem `trap_overdamped`."""
    return Trap(1e-3, 1.0, None, 0, False, {"knots": jnp.linspace(BEGIN, END, knots)})


def underdamped(knots: int = 3, kick_rows: int = 40, *, midpoint: bool = True) -> Trap:
    """The problem `trap_underdamped`."""
    dt = 0.01 * OMEGA
    theta = {"knots": jnp.linspace(BEGIN, END, knots), "kicks": jnp.zeros(2)}
    damping = -float(np.expm1(-dt / QUALITY))
    return Trap(dt, 0.15 * 2 * np.pi, damping, kick_rows, midpoint, theta)


def make_process(trap: Trap) -> fl.Process:
    """Drift and noise whose Euler step is the engine's."""
    if trap.damping is None:

        def drift(theta: Params, x: Array, t: Array) -> Array:
            return trap.centre(theta, t) - x

        return fl.Process(drift, lambda theta, x: jnp.sqrt(2.0) * jnp.ones(1))

    rate = trap.damping / trap.dt
    noise = np.sqrt((1 - (1 - trap.damping) ** 2) / trap.dt)

    def drift_with_mass(theta: Params, x: Array, t: Array) -> Array:
        return jnp.array([x[1], rate * (QUALITY * (trap.centre(theta, t) - x[0]) - x[1])])

    return fl.Process(drift_with_mass, lambda theta, x: jnp.array([0.0, noise]))


def make_start(trap: Trap) -> fl.Density:
    """Thermal equilibrium in the trap at its first place."""
    size = 1 if trap.damping is None else 2
    return fl.Density(
        lambda theta, x: -jnp.sum(x**2) / 2, lambda key, theta: jax.random.normal(key, (size,))
    )


def find_energy(x: Array, centre: Array | float) -> Array:
    """Potential energy."""
    return (x[0] - centre) ** 2 / 2


def make_objective(trap: Trap) -> fl.Objective:
    """Minus the work: the potential energy gained, less the heat of every step (first law).

    Without `midpoint` this is the engine's sum of U(x, c') − U(x, c) over all switches, term by
    term; written so, no large numbers cancel where a kick is switched on and off.
    """

    def heat(theta: Params, x: Array, x_next: Array, t: Array) -> Array:
        return (x_next[0] - x[0]) * ((x_next[0] + x[0]) / 2 - trap.centre(theta, t))

    def heat_of_velocity(theta: Params, x: Array, x_next: Array, t: Array, dt: Array) -> Array:
        return (x[0] - trap.centre(theta, t)) * (x[1] + x_next[1]) / 2 * dt

    return fl.Objective(
        initial=lambda theta, x: find_energy(x, BEGIN),
        per_step=heat_of_velocity if trap.midpoint else heat,
        terminal=lambda theta, x: -find_energy(x, END),
    )


def make_estimator(trap: Trap, backend: str = "auto") -> Any:
    """Estimator of the gradient of minus the mean work."""
    simulator = fl.simulator(make_process(trap), make_start(trap), trap.t, backend=backend)
    return fl.ppgt(simulator, make_objective(trap), baseline=fl.Twin(order=2))


def exact_work(trap: Trap, theta: Params) -> Array:
    """Mean work of the discrete chain, by the recursion of its mean and covariance."""
    process = make_process(trap)
    reward = make_objective(trap).per_step
    size = 1 if trap.damping is None else 2
    noise = process.noise(theta, jnp.zeros(size)) ** 2 * trap.dt

    def advance(x: Array, t: Array) -> Array:
        return x + process.drift(theta, x, t) * trap.dt

    slope = jax.jacobian(advance)(jnp.zeros(size), 0.0)  # the same at all times

    def step(carry: tuple[Array, Array], t: Array) -> tuple[tuple[Array, Array], Array]:
        mean, covariance = carry
        after = advance(mean, t)
        spread = slope @ covariance @ slope.T + jnp.diag(noise)
        if trap.midpoint:
            heat = reward(theta, mean, after, t, trap.dt)
            scatter = (covariance[0, 1] + (covariance @ slope.T)[0, 1]) * trap.dt / 2
        else:
            heat = reward(theta, mean, after, t)
            scatter = (spread[0, 0] - covariance[0, 0]) / 2
        return (after, spread), heat + scatter

    begin = (jnp.zeros(size), jnp.eye(size))
    (mean, covariance), heat = jax.lax.scan(step, begin, trap.t[:-1])
    gained = find_energy(mean, END) + (covariance[0, 0] - 1) / 2
    return gained - jnp.sum(heat)


class Works(NamedTuple):
    """Mean work of an underdamped protocol, by the engine's sum and by the energy given."""

    engine: float
    midpoint: float


def compare_sums(protocol: np.ndarray) -> Works:
    """Mean work of the rows of a file (rows, 1) by both sums, without noise.

    Noise adds less than 10⁻³ to either.
    """
    trap = underdamped()
    dt = trap.dt
    x = 0.0
    v = 0.0
    engine = 0.0
    midpoint = 0.0
    for row in follow_engine(0.01, trap.duration / OMEGA, trap.duration / OMEGA / ROWS):
        force = protocol[row, 0] - x
        after = x + v * dt
        speed = v + trap.damping * (QUALITY * force - v)
        engine += (force - (after - x) / 2) * (after - x)
        midpoint += force * (v + speed) / 2 * dt
        x = after
        v = speed
    gained = (x - END) ** 2 / 2
    return Works(gained + engine, gained + midpoint)


def train(trap: Trap, seed: int, iterations: int, trajectories: int) -> dict[str, Any]:
    """Train from a ramp; Adam with a cosine decay."""
    log = Log()
    rule = optax.adam(optax.cosine_decay_schedule(0.3, iterations))
    training = fl.Training(
        make_estimator(trap), trap.theta, rule, trajectories=trajectories, seed=seed
    )
    return log.result(trap.tabulate(log.train(training, iterations)))


def train_overdamped(seed: int, *, quick: bool = False) -> dict[str, Any]:
    """Train the overdamped trap."""
    return train(overdamped(), seed, 5 if quick else 150, 64 if quick else 1000)


def train_underdamped(seed: int, *, quick: bool = False) -> dict[str, Any]:
    """Train the underdamped trap, on the work that is done."""
    return train(underdamped(), seed, 5 if quick else 150, 64 if quick else 128)


def train_loophole(seed: int, *, quick: bool = False) -> dict[str, Any]:
    """Train the underdamped trap on the engine's sum, with kicks of one row."""
    return train(underdamped(kick_rows=1, midpoint=False), seed, 5 if quick else 150, 128)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Mean work of protocols of the underdamped trap, by two sums."
    )
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        works = compare_sums(read_protocol(path))
        print(f"{path.name}: engine {works.engine:.3f}, midpoint {works.midpoint:.3f}")
