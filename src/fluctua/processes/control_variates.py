"""Control variates of a long-run average: a twin for measured states that are noisy.

For any function V of the state, with the transitions of the process at θ,

    E[V(Xₙ₊₁) − V(Xₙ)] = 0      in the steady state, for every θ.

The reward G(x) = g(x) + (E[V(X') | x] − V(x))/Δt has therefore the long-run average of g for every
θ, and the gradient of that average, whatever V is; ∂θ acts on g and on the transition, not on V.
Where V solves Poisson's equation G is constant, so that its products with scores have no variance:
∂θG is then the whole gradient. This is what a twin does (`fluctua.processes.lookahead`). Its V is a
path that restarts at measured states, and a state measured with noise would share that noise with
the scores around it. Here V is one function for the whole record, so that G is a reward like any
other and noise of the readout is corrected for as it is in any reward (`fluctua.insitu.readout`).

V is a polynomial, V = Σⱼ aⱼφⱼ, with the a for which G varies least along the record: a regression
of g on the changes of φⱼ. Errors of the coefficients cost variance. The fit to the record itself
causes a bias of the order of their number over the number of independent samples, which
the degree keeps below `MIN_SAMPLES`⁻¹.

E[φ(X') | x] is a sum over Gauss–Hermite points of the Gaussian transition, exact for these degrees.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params, jit, root_covariance
from fluctua.core.likelihood.kicks import Transition
from fluctua.core.objective import Objective
from fluctua.core.process import Process, Step
from fluctua.core.scores import remove_readout_bias
from fluctua.core.trajectories import Trajectories

DEGREES = {1: 8, 2: 4, 3: 4}
"""Highest degree by number of components; 2 for more of them."""
MAX_COMPONENTS = 16
"""Maximum number of components of a state with control variates."""
SAMPLED = 2**15
"""States that coefficients are fitted to, evenly spread."""
MIN_SAMPLES = 100
"""Independent samples per coefficient."""


@dataclass(frozen=True)
class ControlledReward:
    """G(x) = g(x) + (E[V(X') | x] − V(x))/Δt.

    reward: g.
    process, transition: of the steps.
    powers: exponents of the terms of V (J, M).
    coefficients: of these terms (J,).
    centre, scale: of the components (M,).
    dt: interval of the record.
    """

    reward: Any
    process: Process
    transition: Transition
    powers: tuple[tuple[int, ...], ...]
    coefficients: tuple[float, ...]
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    dt: float

    def __call__(self, theta: Params, x: Array, t: Array, context: Any) -> Array:
        """G of one state."""
        changes = self.evaluate_changes(theta, x, t, context)
        return self.reward(theta, x, t, context) + jnp.asarray(self.coefficients) @ changes

    def evaluate_changes(self, theta: Params, x: Array, t: Array, context: Any) -> Array:
        """Expected rates of change of all terms, (E[φⱼ(X') | x] − φⱼ(x))/Δt. Shape (J,)."""
        dt = jnp.asarray(self.dt, x.dtype)
        mean, covariance = self.transition(self.process, theta, Step(x, x, t, dt, context))
        points, weights = _make_hermite_points(len(self.centre), max(map(sum, self.powers)))
        root = jnp.sqrt(covariance) if x.size == 1 else root_covariance(covariance)
        ends = mean + jnp.asarray(points, x.dtype) @ root.T
        after = jax.vmap(self.evaluate_terms)(ends)
        return (jnp.asarray(weights, x.dtype) @ after - self.evaluate_terms(x)) / dt

    def evaluate_terms(self, x: Array) -> Array:
        """Terms φⱼ(x): products of powers of the scaled components. Shape (J,)."""
        scaled = (x - jnp.asarray(self.centre, x.dtype)) / jnp.asarray(self.scale, x.dtype)
        table = [jnp.ones_like(scaled)]
        for _ in range(max(map(max, self.powers))):
            table.append(table[-1] * scaled)
        terms = []
        for power in self.powers:
            factors = [table[n][i] for i, n in enumerate(power) if n]
            product = factors[0]
            for factor in factors[1:]:
                product = product * factor
            terms.append(product)
        return jnp.stack(terms)


class FittedControl(NamedTuple):
    """A reward with its control variates.

    objective: of the `ControlledReward`.
    degree: of the polynomial.
    terms: number of its coefficients.
    explained: share of the variance of the reward that it removes.
    """

    objective: Objective
    degree: int
    terms: int
    explained: float


def fit_control(
    process: Process,
    transition: Transition,
    objective: Objective,
    theta: Params,
    record: Trajectories,
    independent: float,
    *,
    readout: np.ndarray | None = None,
) -> FittedControl:
    """Fit control variates of the running reward to a record of the steady state.

    Args:
        process: drift and noise at θ, the model of the score.
        transition: the law of one step, that of the score.
        objective: with a running reward of the state.
        theta: the parameters of the record.
        record: states (E, T+1, M) at one interval.
        independent: number of independent samples in it, which bounds the degree.
        readout: variance of the measurement (M,): what is fitted is corrected for it, as the reward
            will be.

    Returns: a `FittedControl`.
    """
    size = record.x.shape[2]
    if size > MAX_COMPONENTS:
        raise ValueError(
            f"control variates are polynomials of at most {MAX_COMPONENTS} components; the state "
            f'has {size}. Use baseline "time".'
        )
    process = check.process(process)
    rewards = check.objective(objective)
    t = np.asarray(record.t, float)
    every = max(1, record.x.shape[1] * record.x.shape[0] // SAMPLED)
    x = np.asarray(record.x[:, :-1:every])
    centre = x.mean(axis=(0, 1))
    scale = x.std(axis=(0, 1))
    scale = np.where(scale > 0, scale, 1.0)
    powers = _choose_powers(size, independent)
    controlled = ControlledReward(
        rewards.running,
        process,
        transition,
        powers,
        (0.0,) * len(powers),
        tuple(centre.tolist()),
        tuple(scale.tolist()),
        float(np.mean(np.diff(t))),
    )
    dtype = jnp.result_type(*jax.tree.leaves(theta), x)
    variance = jnp.asarray(np.zeros(size) if readout is None else readout, dtype)
    rows = _evaluate(controlled, theta, jnp.asarray(x, dtype), record.context, variance)
    rows = np.asarray(rows, np.float64).reshape(-1, 1 + len(powers))
    rows = rows - rows.mean(axis=0)
    level = rows[:, 0]
    changes = rows[:, 1:]
    width = np.maximum(changes.std(axis=0), np.finfo(float).tiny)
    weights = np.linalg.lstsq(changes / width, -level, rcond=1e-10)[0] / width
    left = level + changes @ weights
    made = ControlledReward(
        **{**vars(controlled), "coefficients": tuple(np.asarray(weights, float).tolist())}
    )
    explained = 1 - float(left.var() / max(level.var(), np.finfo(float).tiny))
    return FittedControl(Objective(running=made), max(map(sum, powers)), len(powers), explained)


def _choose_powers(size: int, independent: float) -> tuple[tuple[int, ...], ...]:
    """Exponents of the terms of the highest degree that the record can determine."""
    degree = DEGREES.get(size, 2)
    while True:
        powers = _list_powers(size, degree)
        if len(powers) * MIN_SAMPLES <= independent:
            return powers
        if degree == 1:
            raise ValueError(
                f"{len(powers)} control variates need {len(powers) * MIN_SAMPLES} independent "
                f"samples; the record has {independent:.0f}. Record for longer, or use baseline "
                '"time".'
            )
        degree -= 1


def _list_powers(size: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """Exponents of all terms of degree 1 … degree."""
    powers = []
    for total in range(1, degree + 1):
        for factors in itertools.combinations_with_replacement(range(size), total):
            powers.append(tuple(factors.count(i) for i in range(size)))
    return tuple(powers)


def _make_hermite_points(size: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (N, M) and weights (N,) of a standard normal, exact up to the degree."""
    if degree <= 3 and size > 1:
        far = np.sqrt(size) * np.concatenate([np.eye(size), -np.eye(size)])
        return far, np.full(2 * size, 1 / (2 * size))
    nodes, weights = np.polynomial.hermite_e.hermegauss(degree // 2 + 1)
    weights = weights / weights.sum()
    grid = np.array(list(itertools.product(nodes, repeat=size)))
    products = np.array([np.prod(w) for w in itertools.product(weights, repeat=size)])
    return grid, products


@partial(jit, static_argnums=0)
def _evaluate(
    controlled: ControlledReward, theta: Params, x: Array, context: Any, variance: Array
) -> Array:
    """g and the changes of the terms of states x (E, N, M), without readout bias. (E, N, 1+J)"""
    t = jnp.zeros((), x.dtype)

    def one(x: Array, context: Any) -> Array:
        def together(z: Array) -> Array:
            g = controlled.reward(theta, z, t, context)
            changes = controlled.evaluate_changes(theta, z, t, context)
            return jnp.concatenate([jnp.reshape(g, 1), changes])

        return remove_readout_bias(together, variance)(x)

    return jax.vmap(jax.vmap(one, in_axes=(0, None)))(x, context)
