"""Tasks of benchmarks/others.py: a device that is run one trajectory at a time, in settings u ∈
[−1, 1]^P.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.optimize import lsq_linear
from scipy.signal import lfilter

import fluctua as fl
from fluctua import tcmt
from fluctua.runs.unknown import Device, EffectiveSettings


class Problem(NamedTuple):
    """A task in u ∈ [−1, 1]^P; its start is u = 0.

    measure: (seed, u) -> the return of one trajectory. value: u -> J. estimators: what makes an
    `InBox`, by what it knows. best: J that cannot be passed, if known.
    """

    name: str
    size: int
    budget: int
    measure: Callable[[int, np.ndarray], float]
    value: Callable[[np.ndarray], float]
    estimators: dict[str, Any]
    best: float | None


class InBox(NamedTuple):
    """An estimator of ∂J/∂u where θ = middle + reach u."""

    inner: Any
    middle: np.ndarray
    reach: np.ndarray
    unravel: Callable[[np.ndarray], Any]

    def __call__(self, key: Any, u: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Gradient and mean square (P,), and the trajectories spent."""
        estimate = self.inner(
            key, self.unravel(jnp.asarray(self.middle + self.reach * u, jnp.float32)), count
        )

        def flat(tree):
            return np.asarray(ravel_pytree(tree)[0], float)

        return (
            self.reach * flat(estimate.gradient),
            self.reach**2 * flat(estimate.second_moment),
            count + self.inner.pilot,
        )


# ----------------------------------------------------------------------------------------- the trap

SETTINGS, HELD, TARGET, AROUND = 20, 5, 5.0, 3.0
DT = 1 / (SETTINGS * HELD)
RAMP = TARGET * (np.arange(SETTINGS) + 0.5) / SETTINGS
OFFSETS = 0.5 * np.random.default_rng(7).standard_normal(SETTINGS)
"""By which every position of the trap is off, unknown to those who know nothing."""


def work(centres: Any, x: Any) -> Any:
    """W = Σ V(x, λ) − V(x, λ before), V = (x − λ)²/2, over all jumps, the last one to the
    target. x (…, K+1)
    """
    path = jnp.concatenate([jnp.zeros(1), centres, jnp.full(1, TARGET)])
    return jnp.sum((path[1:] ** 2 - path[:-1] ** 2) / 2 - x * (path[1:] - path[:-1]), axis=-1)


def mean_positions(centres: Any) -> Any:
    """E[x] of the Euler chain where the trap jumps, from equilibrium at 0. (K+1,)"""
    stay = (1 - DT) ** HELD
    rows = [jnp.zeros(())]
    for centre in centres:
        rows.append(stay * rows[-1] + (1 - stay) * centre)
    return jnp.stack(rows)


def trap() -> Problem:
    """An overdamped particle dragged from 0 to 5 in the time 1, J = −E[W]; 20 positions of the
    trap, 1/20 each.
    """
    middle = RAMP + OFFSETS

    def find_centres(u):
        return middle + AROUND * np.clip(u, -1, 1)

    exact = jax.jit(lambda centres: -work(centres, mean_positions(centres)))

    def measure(seed: int, u: np.ndarray) -> float:
        rng, centres = np.random.default_rng(seed), find_centres(u)
        force = np.repeat(centres, HELD) * DT + np.sqrt(2 * DT) * rng.standard_normal(
            SETTINGS * HELD
        )
        force[0] += (1 - DT) * (start := rng.standard_normal())
        x = np.append(start, lfilter([1.0], [1.0, DT - 1], force))[::HELD]
        path = np.concatenate([[0.0], centres, [TARGET]])
        return -float(np.sum(np.diff(path**2) / 2 - x * np.diff(path)))

    def place(t):
        return jnp.floor(t / (HELD * DT) + 1e-3).astype(int)

    def before(centres, t):
        return jnp.where(place(t) > 0, centres[place(t) - 1], 0.0)

    def energy(x, centre):
        return (x - centre) ** 2 / 2

    def jumps(t):
        return jnp.abs(t / (HELD * DT) - place(t)) < DT  # at the first step of a setting

    process = fl.Process(
        drift=lambda centres, x, t: centres[place(t)] - x,
        noise=lambda centres, x: np.sqrt(2.0) * jnp.ones(1),
    )
    objective = fl.Objective(
        running=lambda c, x, t: (
            jnp.where(jumps(t), energy(x[0], before(c, t)) - energy(x[0], c[place(t)]), 0.0) / DT
        ),
        terminal=lambda c, x: energy(x[0], c[-1]) - energy(x[0], TARGET),
    )
    start = fl.Density(
        sample=lambda key, theta, context: jax.random.normal(key, (1,)),
        log_density=lambda theta, x, context: -(x[0] ** 2) / 2,
    )
    simulator = fl.simulator(process, start, jnp.linspace(0, 1, SETTINGS * HELD + 1))
    made = {
        "score": fl.ppgt(simulator, objective, baseline="mean"),
        "twin": fl.ppgt(simulator, objective, baseline="twin"),
    }
    reach = np.full(SETTINGS, AROUND)
    boxed = {k: lambda v=v: InBox(v, middle, reach, lambda v: v) for k, v in made.items()}

    def device(key, theta, count):
        return simulator(key, theta + OFFSETS.astype(np.float32), count)

    unknown = jnp.zeros(SETTINGS), 0.5

    def calibrated():
        return fl.SelfCalibrating(
            made["twin"], device, lambda c, offset: c + offset, *unknown, samples=0
        )

    boxed["calibrated"] = lambda: InBox(calibrated(), RAMP, reach, lambda v: v)
    # −J is a quadratic form of the centres: its least value in the box
    hessian = -np.asarray(jax.hessian(exact)(jnp.asarray(middle)), float)
    slope = -np.asarray(jax.grad(exact)(jnp.asarray(middle)), float)
    root = np.linalg.cholesky(hessian).T
    inside = lsq_linear(root, np.linalg.solve(root.T, -slope), (-AROUND, AROUND)).x
    best = float(exact(jnp.asarray(middle + inside)))

    def value(u):
        return float(exact(jnp.asarray(find_centres(u))))

    return Problem("trap", SETTINGS, 4_000, measure, value, boxed, best)


# -------------------------------------------------------------------------------------- the lattice


ERROR = 0.2


def lattice() -> Problem:
    """5 × 8 resonators, T = 10: power transmitted from corner to corner, settings |ω| ≤ 2, 0 ≤ κ ≤
    2, |χ| ≤ 0.02.

    Every coupling has a hidden gain and every detuning a hidden offset, 20 % and 0.2.
    """
    task = tcmt.transmission(tcmt.rectangular(5, 8), horizon=10.0, dt=2.5e-3)
    network, hidden = task.network, np.random.default_rng(7)
    size = {name: len(getattr(network, name)) for name in ("omega", "kappa", "chi")}
    gain = 1 + ERROR * hidden.standard_normal(size["kappa"])
    middle = {
        "omega": ERROR * hidden.standard_normal(size["omega"]),
        "kappa": gain,
        "chi": np.zeros(size["chi"]),
    }
    reach = {"omega": np.full(size["omega"], 2.0), "kappa": gain, "chi": np.full(size["chi"], 0.02)}
    (centre, unravel), (width, _) = (
        ravel_pytree(jax.tree.map(jnp.asarray, v)) for v in (middle, reach)
    )
    centre, width = np.asarray(centre, float), np.asarray(width, float)
    run = task.estimator("cpu", baseline="none", threads=1).run  # type: ignore[attr-defined]

    def make_theta(u):
        return unravel(jnp.asarray(centre + width * np.clip(u, -1, 1), jnp.float32))

    def measure(seed: int, u: np.ndarray) -> float:
        # the kernels run two at least; the second is not looked at
        return float(run(jax.random.key(seed), make_theta(u), 2, scores=False).returns[0])

    def value(u):
        return run(jax.random.key(2**31 - 1), make_theta(u), 64, scores=False).value

    made = {
        "score": lambda: task.estimator("cpu", baseline="carried", threads=1),
        "twin": lambda: task.estimator("cpu", baseline="twin", threads=1),
    }
    boxed = {k: lambda v=v: InBox(v(), centre, width, unravel) for k, v in made.items()}

    def parameters(theta: Any) -> Any:
        """What the device makes of its settings."""
        numbers = {name: np.asarray(value, float) for name, value in theta.items()}
        return {
            **numbers,
            "omega": numbers["omega"] + middle["omega"],
            "kappa": numbers["kappa"] * gain,
        }

    def calibrated() -> Any:
        start = {"gain": jnp.ones(size["kappa"]), "offset": jnp.zeros(size["omega"])}
        return fl.SelfCalibrating(
            made["twin"](),
            Device(task, parameters),
            EffectiveSettings(),
            start,
            ERROR,
            samples=0,
            every=20,
        )

    nominal = {"omega": 0 * middle["omega"], "kappa": np.ones(size["kappa"]), "chi": middle["chi"]}

    def flat(tree):
        return np.asarray(ravel_pytree(jax.tree.map(jnp.asarray, tree))[0], float)

    boxed["calibrated"] = lambda: InBox(
        calibrated(), flat(nominal), flat({**reach, "kappa": nominal["kappa"]}), unravel
    )
    return Problem("lattice", len(centre), 2_000, measure, value, boxed, None)
