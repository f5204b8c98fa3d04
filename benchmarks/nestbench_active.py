"""The active particle of NESTbench25: reach a target distribution, and extract work on the way.

The training minimises Δ + 10⁻³⟨W⟩, with Δ the mean square difference of the histogram p of the
final radius from a target q, over the bins that the target has: a function of means, one per bin.
The reward of bin k comes at the end, so that its gradient is ∂p_k = ⟨1_k S⟩ with the whole score S
= Σ U_n of a trajectory. One sweep with the final radius as reward and no baseline gives the radius
and, divided by it, S: the derivatives of all bins at once. A second sweep over the same
trajectories gives ∂⟨W⟩.

Δ determines some directions of the controls, and ⟨W⟩ falls slowly along the others. A step
therefore minimises the model |q − p − ∂p δ|²/K + 10⁻³ ∂⟨W⟩ δ + μ|δ|²/2 within the bounds of the
controls and a largest change (Gauss–Newton).

Known to the training: the equations and the target. No twin: the reward has jumps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from scipy.optimize import lsq_linear

import fluctua as fl
from fluctua.core.arrays import Array, Params
from fluctua.core.protocols import PlainEstimator
from nestbench_protocols import ROWS, Log, interpolate_knots

DURATION = 0.44
STEPS = 275
"""Of a trajectory in the training; the engine takes 1,100."""
STIFFNESS = 4.0
"""κ before and after the protocol."""
SWIM = 5.0
"""λ after the protocol, and at the start of a training."""
WORK_WEIGHT = 1e-3
INNERMOST = 0.001
WIDTH = (5.0 - INNERMOST) / 100
"""First edge and width of the engine's bins."""
LOW = {"stiffness": 1.0, "swim": 0.0}
HIGH = {"stiffness": 7.0, "swim": 11.0}
"""The engine clips protocols to these."""
KNOTS = 31
LARGEST_CHANGE = 0.5
DAMPING = 1e-5
"""μ, for directions that the trajectories do not determine."""


def read_target(path: Path) -> np.ndarray:
    """Densities of the target (K,), checked to be those of the engine's first K bins."""
    centres, densities = np.loadtxt(path).T
    expected = INNERMOST + (np.arange(len(centres)) + 0.5) * WIDTH
    if not np.allclose(centres, expected, atol=WIDTH / 2):
        raise ValueError(f"{path} must have the centres of the first bins; got {centres[:3]}…")
    return densities


def control(theta: Params, name: str, t: Array) -> Array:
    """Value of a control at time t."""
    return interpolate_knots(theta[name], jnp.clip(t * (ROWS / DURATION), 0, ROWS - 1))


def drift(theta: Params, x: Array, t: Array) -> Array:
    """Drift of the two positions and the angle."""
    swim = control(theta, "swim", t)
    stiffness = control(theta, "stiffness", t)
    return jnp.array(
        [swim * jnp.cos(x[2]) - stiffness * x[0], swim * jnp.sin(x[2]) - stiffness * x[1], 0.0]
    )


def draw_start(key: Array, theta: Params) -> Array:
    """Passive equilibrium, with any angle."""
    place, angle = jax.random.split(key)
    position = jax.random.normal(place, (2,)) / np.sqrt(STIFFNESS)
    return jnp.append(position, 2 * jnp.pi * jax.random.uniform(angle))


def make_simulator(steps: int = STEPS, backend: str = "auto") -> Any:
    """Simulate the particle with the engine's Euler step, of another length."""
    process = fl.Process(drift, lambda theta, x: jnp.sqrt(2.0) * jnp.ones(3))
    start = fl.Density(lambda theta, x: -STIFFNESS * half_square(x), draw_start)
    return fl.simulator(process, start, jnp.linspace(0.0, DURATION, steps + 1), backend=backend)


def half_square(x: Array) -> Array:
    """Potential energy per stiffness, r²/2."""
    return (x[0] ** 2 + x[1] ** 2) / 2


def work_of_step(theta: Params, x: Array, x_next: Array, t: Array, dt: Array) -> Array:
    """Work of the change of the stiffness after a step, at the place where the step ended."""
    change = control(theta, "stiffness", t + dt) - control(theta, "stiffness", t)
    return change * half_square(x_next)


WORK = fl.Objective(
    initial=lambda theta, x: (theta["stiffness"][0] - STIFFNESS) * half_square(x),
    per_step=work_of_step,
    terminal=lambda theta, x: (STIFFNESS - theta["stiffness"][-1]) * half_square(x),
)
RADIUS = fl.Objective(terminal=lambda theta, x: jnp.sqrt(2 * half_square(x)))


@dataclass(frozen=True)
class HistogramEstimator(PlainEstimator):
    """Gradient of −Δ − 10⁻³⟨W⟩, with the Gauss–Newton step in the place of the natural gradient.

    target: densities of the first K bins. simulator: of the particle.
    """

    target: np.ndarray
    simulator: Any

    @cached_property
    def radius(self) -> Any:
        """Estimator whose samples are the final radius, and the score times it."""
        return fl.ppgt(self.simulator, RADIUS, baseline="none")

    @cached_property
    def work(self) -> Any:
        """Estimator of the gradient of the mean work."""
        return fl.ppgt(self.simulator, WORK)

    @property
    def pilot(self) -> int:
        """Trajectories of the baseline of the work."""
        return self.work.pilot

    def __call__(self, key: Array, theta: Params, count: int) -> fl.Estimate:
        """Estimate from `count` trajectories, which both sweeps share."""
        samples = self.radius.samples(key, theta, count)
        radius = np.asarray(samples.returns, float)
        scores = flatten_rows(samples.gradient) / radius[:, None]
        place = np.floor((radius - INNERMOST) / WIDTH).astype(int)
        inside = (place >= 0) & (place < len(self.target))
        hit = np.zeros((count, len(self.target)))
        hit[inside, place[inside]] = 1 / WIDTH
        density = hit.mean(axis=0)
        slopes = (hit - density).T @ scores / (count - 1)  # (K, P)
        work = self.work.samples(key, theta, count)

        weight = 2 * (density - self.target) / len(self.target)
        each = ((hit - density) @ weight)[:, None] * scores
        each = each + WORK_WEIGHT * flatten_rows(work.gradient)
        _, unravel = ravel_pytree(theta)
        gradient = jax.vmap(unravel)(jnp.asarray(-each, jnp.float32))
        off = np.mean((density - self.target) ** 2)
        # the scatter of the density adds its variance to Δ
        scatter = np.mean(density * (1 / WIDTH - density)) / (count - 1)
        value = off - scatter + WORK_WEIGHT * np.asarray(work.returns, float)
        value = value + (hit - density) @ weight
        estimate = fl.reduce_samples(fl.Samples(gradient, jnp.asarray(-value, jnp.float32)))
        change = find_step(
            np.asarray(ravel_pytree(theta)[0], float),
            Model(self.target - density, slopes, WORK_WEIGHT * flatten_rows(work.gradient).mean(0)),
            [np.asarray(ravel_pytree(spread_bound(b, theta))[0], float) for b in (LOW, HIGH)],
        )
        return estimate._replace(natural=unravel(jnp.asarray(change, jnp.float32)))


@dataclass(frozen=True)
class Model:
    """Quadratic model of Δ + 10⁻³⟨W⟩ about given controls.

    missing: target less density (K,). slopes: ∂p (K, P). work: 10⁻³ ∂⟨W⟩ (P,).
    """

    missing: np.ndarray
    slopes: np.ndarray
    work: np.ndarray


def find_step(theta: np.ndarray, model: Model, bounds: list[np.ndarray]) -> np.ndarray:
    """Change of the controls that minimises the model within the bounds. Shape (P,)."""
    scale = np.sqrt(2 / len(model.missing))
    size = len(theta)
    matrix = np.vstack([scale * model.slopes, np.sqrt(DAMPING) * np.eye(size)])
    vector = np.concatenate([scale * model.missing, -model.work / np.sqrt(DAMPING)])
    low = np.maximum(bounds[0] - theta, -LARGEST_CHANGE) - 1e-6  # solvers need room
    high = np.minimum(bounds[1] - theta, LARGEST_CHANGE) + 1e-6
    return lsq_linear(matrix, vector, (low, high)).x


def flatten_rows(tree: Params) -> np.ndarray:
    """Leaves (E, ...) side by side, (E, P), in the order of `ravel_pytree`."""
    leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def spread_bound(bound: dict[str, float], theta: Params) -> Params:
    """A bound per control as one per knot."""
    return {name: jnp.full_like(values, bound[name]) for name, values in theta.items()}


def follow_natural(schedule: Any) -> optax.GradientTransformationExtraArgs:
    """Step along `natural`, scaled by a schedule."""

    def update(updates: Params, state: Array, params: Params = None, *, natural: Params, **_: Any):
        return jax.tree.map(lambda n: schedule(state) * n, natural), state + 1

    return optax.GradientTransformationExtraArgs(lambda theta: jnp.zeros([], int), update)


def tabulate(theta: Params) -> np.ndarray:
    """Rows of the file (rows, 2): stiffness and swimming speed."""
    rows = jnp.arange(ROWS, dtype=float)
    columns = [
        jax.vmap(lambda row, name=name: interpolate_knots(theta[name], row))(rows)
        for name in ("stiffness", "swim")
    ]
    return np.asarray(jnp.stack(columns, axis=1), float)


def train(seed: int, *, quick: bool = False, target: np.ndarray) -> dict[str, Any]:
    """Train from the default protocol, which holds the final values from the start."""
    log = Log()
    iterations = 3 if quick else 80
    knots = 5 if quick else KNOTS
    theta = {"stiffness": jnp.full(knots, STIFFNESS), "swim": jnp.full(knots, SWIM)}
    training = fl.Training(
        HistogramEstimator(target, make_simulator(50 if quick else STEPS)),
        theta,
        follow_natural(optax.cosine_decay_schedule(1.0, iterations)),
        trajectories=500 if quick else 20_000,
        bounds=(LOW, HIGH),
        seed=seed,
    )
    return log.result(tabulate(log.train(training, iterations)))
