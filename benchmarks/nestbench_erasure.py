"""Fast erasure of NESTbench25: bring a particle into the left well, wherever it was.

The engine scores the probability to be on the right a whole period after a protocol of half a
period. That reward is flat at the default protocol, and nearly flat at a good one. The training
has a curriculum of rewards on the energy E = ((x + 5)² + v²)/2 in the left well at the end of the
protocol, which is 1 in equilibrium and lets a particle escape above 12.5:

    −E      brings both wells to the left
    −E²     shortens the tail
    −100 σ((E − 12.5)/2)    nearly the probability to escape, in per cent

The force jumps at x = c₀. A score needs ∂θ of the drift at given states, which misses the jump: the
sign is tanh((x − c₀)/w) in the training, and the engine has the sharp one.

Known to the training: the equations, with a step five times as long as the engine's. The twin is
the smoothed model itself, of second order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fluctua as fl
from fluctua.core.arrays import Array, Params
from nestbench_protocols import ROWS, Log, interpolate_knots

WELL = 5.0
"""The wells are at ±5 before and after the protocol."""
QUALITY = 7.0
DURATION = np.pi
"""Half a period, in units of 1/ω₀."""
STEPS = 917
SMOOTHING = 0.5
"""w."""
KNOTS = 21
BARRIER = 12.5


def control(theta: Params, name: str, t: Array) -> Array:
    """Value of a control at time t."""
    return interpolate_knots(theta[name], jnp.clip(t * (ROWS / DURATION), 0, ROWS - 1))


def make_process(steps: int = STEPS, smoothing: float = SMOOTHING) -> fl.Process:
    """Drift and noise whose Euler step is the engine's, of another length."""
    dt = DURATION / steps
    damping = -float(np.expm1(-dt / QUALITY))
    noise = float(np.sqrt((1 - (1 - damping) ** 2) / dt))

    def drift(theta: Params, x: Array, t: Array) -> Array:
        side = jnp.tanh((x[0] - control(theta, "divide", t)) / smoothing)
        force = side * control(theta, "distance", t) - x[0]
        return jnp.array([x[1], damping / dt * (QUALITY * force - x[1])])

    return fl.Process(drift, lambda theta, x: jnp.array([0.0, noise]))


def draw_start(key: Array, theta: Params) -> Array:
    """Either well, in equilibrium."""
    side, thermal = jax.random.split(key)
    state = jax.random.normal(thermal, (2,))
    return state.at[0].add(WELL * (2.0 * jax.random.bernoulli(side) - 1.0))


def log_density(theta: Params, x: Array) -> Array:
    """Logarithm of the density of the start, up to a constant."""
    wells = jnp.array([-WELL, WELL])
    return jax.scipy.special.logsumexp(-((x[0] - wells) ** 2) / 2) - x[1] ** 2 / 2


def find_energy(x: Array) -> Array:
    """Energy in the left well."""
    return ((x[0] + WELL) ** 2 + x[1] ** 2) / 2


ENERGY = fl.Objective(terminal=lambda theta, x: -find_energy(x))
SQUARE = fl.Objective(terminal=lambda theta, x: -(find_energy(x) ** 2) / BARRIER)
ESCAPE = fl.Objective(
    terminal=lambda theta, x: -100 * jax.nn.sigmoid((find_energy(x) - BARRIER) / 2)
)


class Stage(NamedTuple):
    """A part of the training: a reward, and how long it is followed by Adam with cosine decay."""

    objective: fl.Objective
    iterations: int
    trajectories: int
    rate: float


STAGES = (
    Stage(ENERGY, 400, 256, 1.0),
    Stage(SQUARE, 200, 512, 0.3),
    Stage(ESCAPE, 400, 2500, 0.3),
)
QUICK = tuple(stage._replace(iterations=2, trajectories=64) for stage in STAGES)


def make_estimator(objective: fl.Objective, steps: int = STEPS, backend: str = "auto") -> Any:
    """Estimator of the gradient of a reward at the end of the protocol."""
    simulator = fl.simulator(
        make_process(steps),
        fl.Density(log_density, draw_start),
        jnp.linspace(0.0, DURATION, steps + 1),
        backend=backend,
    )
    return fl.ppgt(simulator, objective, baseline=fl.Twin(order=2))


def tabulate(theta: Params) -> np.ndarray:
    """Rows of the file (rows, 2): c₀ and c₁."""
    rows = jnp.arange(ROWS, dtype=float)
    columns = [
        jax.vmap(lambda row, name=name: interpolate_knots(theta[name], row))(rows)
        for name in ("divide", "distance")
    ]
    return np.asarray(jnp.stack(columns, axis=1), float)


def train(seed: int, *, quick: bool = False) -> dict[str, Any]:
    """Train from a single well in the middle."""
    log = Log()
    theta = {"divide": jnp.zeros(KNOTS), "distance": jnp.zeros(KNOTS)}
    for stage in QUICK if quick else STAGES:
        training = fl.Training(
            make_estimator(stage.objective, 60 if quick else STEPS),
            theta,
            optax.adam(optax.cosine_decay_schedule(stage.rate, stage.iterations)),
            trajectories=stage.trajectories,
            seed=seed,
        )
        theta = log.train(training, stage.iterations)
    return log.result(tabulate(theta))
