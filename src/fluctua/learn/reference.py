"""Reference estimators of the gradient, to compare the policy gradient with.

They need what a laboratory does not have: a simulator to differentiate through (`pathwise`) or
noise that can be repeated (`finite_differences`, `spsa`). Their answers are known to be right.

`compare` runs estimators on one problem at equal cost in trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fluctua.core import check, protocols, simulate, streamed
from fluctua.core import estimate as estimates
from fluctua.core import objective as objectives
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.diffusion import check_model
from fluctua.core.estimation import many
from fluctua.core.integrators import match_quadrature
from fluctua.learn.comparison import compare

__all__ = ["compare", "finite_differences", "pathwise", "spsa"]

BATCH = 256  # trajectories held at once by the reverse sweep of `pathwise`


@dataclass(frozen=True)
class Yardstick(protocols.PlainEstimator):
    """The estimator made by `pathwise`, `finite_differences` or `spsa`."""

    kernel: Any  # (rewards, recipe, count, run, *sizes) -> gradients (E, P), returns (E,)
    runs: Any  # θ -> trajectories per sample
    objective: objectives.Rewards | objectives.FunctionOfMeans
    substrate: simulate.Simulator
    options: tuple[float | None, ...] = ()

    def cost(self, theta: Params) -> int:
        """Trajectories per sample."""
        return self.runs(theta)

    def __call__(self, key: Array, theta: Params, count: int) -> estimates.Estimate:
        """Average over `count` noise realisations."""
        return estimates.reduce_samples(
            _draw_samples(
                self.kernel, self.substrate, self.objective, key, theta, count, *self.options
            )
        )


def pathwise(
    objective: objectives.Objective | objectives.FunctionOfMeans, substrate: simulate.Simulator
) -> Yardstick:
    """Make an estimator of pathwise derivatives, G = dR/dθ through the simulation with fixed noise.

    For smooth paths and rewards that are simulated; also known as reparameterised gradient.

    A `Density` start is differentiated through its `sample` function. Memory grows as √T: the
    reverse sweep recomputes intermediate states.

    Args:
        objective: what is maximised.
        substrate: a `simulator`.

    Returns: an estimator that runs one trajectory per sample.

    >>> estimate = fl.reference.pathwise(objective, simulator)(key, theta, 200)
    >>> bool(estimate.stderr["k"] < estimator(key, theta, 200).stderr["k"])  # smooth and simulated
    True
    """
    simulated = _require_simulator(substrate, "pathwise")
    if hasattr(simulated.recipe.process, "log_probability"):  # a chain
        raise ValueError(
            "`pathwise` differentiates the states of a trajectory, and those of a "
            f"{type(simulated.recipe.process).__name__} may jump with θ, whose derivative is then "
            "zero and not the gradient: use finite_differences with a larger `step`, or spsa."
        )
    return Yardstick(_pathwise, _count_one, _check_rewards(objective, substrate), simulated)


def finite_differences(
    objective: objectives.Objective | objectives.FunctionOfMeans,
    substrate: simulate.Simulator,
    *,
    step: float | None = None,
) -> Yardstick:
    """Make an estimator of central differences under the same noise, with a bias of order h².

        G_p = [R(θ + h e_p) − R(θ − h e_p)] / 2h

    Args:
        objective: what is maximised.
        substrate: a `simulator`; a `Density` start is drawn from the same key on both sides.
        step: h relative to the size of θ_p, or to 1 if that is larger; by default the cube root of
            the rounding unit.

    Returns: an estimator that runs two trajectories per sample and parameter, and one for the
    value.

    >>> estimate = fl.reference.finite_differences(objective, simulator)(key, theta, 200)
    >>> estimate.count
    200
    """
    simulated = _require_simulator(substrate, "finite_differences")
    return Yardstick(
        _estimate_differences,
        _count_differences,
        _check_rewards(objective, substrate),
        simulated,
        (_check_step(step),),
    )


def spsa(
    objective: objectives.Objective | objectives.FunctionOfMeans,
    substrate: simulate.Simulator,
    *,
    step: float | None = None,
) -> Yardstick:
    """Make an estimator of central differences in random directions (SPSA).

        G = Δ [R(θ + hΔ) − R(θ − hΔ)] / 2h,   Δ_p = ±1 at random per trajectory

    Args:
        objective: what is maximised.
        substrate: a `simulator`; both sides run under the same noise.
        step: as in `finite_differences`.

    Returns: an estimator that runs two trajectories per sample, whatever the number of parameters.

    >>> estimate = fl.reference.spsa(objective, simulator, step=0.01)(key, theta, 200)
    >>> estimate.count
    200
    """
    return Yardstick(
        _spsa,
        _count_two,
        _check_rewards(objective, substrate),
        _require_simulator(substrate, "spsa"),
        (_check_step(step),),
    )


def _count_one(theta: Params) -> int:
    return 1


def _count_two(theta: Params) -> int:
    return 2


def _count_differences(theta: Params) -> int:
    return 2 * ravel_pytree(theta)[0].size + 1


# ---------------------------------------------------------------------------------------- checks


def _require_simulator(substrate: Any, name: str) -> simulate.Simulator:
    if not isinstance(substrate, simulate.Simulator):
        raise TypeError(
            f"`{name}` needs a simulator whose noise it can repeat; got "
            f"{type(substrate).__name__}. Hardware has no noise twice: use `ppgt`."
        )
    return substrate


def _check_step(step: float | None) -> float | None:
    if step is not None and not step > 0:
        raise ValueError(f"the finite-difference `step` must be positive; got {step}.")
    return step


def _check_rewards(
    objective: objectives.Objective | objectives.FunctionOfMeans, substrate: simulate.Simulator
) -> objectives.Rewards | objectives.FunctionOfMeans:
    """The rewards, integrated as the simulator integrates the process."""
    rewards = check.objective_or_means(objective)
    for part in rewards.parts if isinstance(rewards, objectives.FunctionOfMeans) else (rewards,):
        check.objective(part)  # refuses a `stop`, which a derivative of the path misses
    return match_quadrature(rewards, _require_simulator(substrate, "a reference").recipe.process)


def _draw_samples(
    kernel: Any,
    substrate: simulate.Simulator,
    objective: objectives.Rewards | objectives.FunctionOfMeans,
    key: Array,
    theta: Params,
    count: int,
    *options: Any,
) -> estimates.Samples:
    check.key(key)
    check.count(count)
    theta = check.parameters(theta)
    if isinstance(objective, objectives.FunctionOfMeans):  # every part under the same noise
        parts = [
            _draw_samples(kernel, substrate, part, key, theta, count, *options)
            for part in objective.parts
        ]
        return estimates.combine_samples(objective.function, parts)
    first, context = simulate.first_state(substrate, key, theta)
    check_model(substrate.recipe.process, objective, theta, first, substrate.t, context)
    flat, unravel = ravel_pytree(theta)
    each, returns = kernel(
        objective,
        substrate.recipe,
        count,
        streamed.Run(key, theta, substrate.times, substrate.x0),
        *(_step_sizes(flat, h) for h in options),
    )
    check.finite_simulation(returns[:, None], substrate.t)
    return estimates.Samples(jax.vmap(unravel)(each), returns)


def _step_sizes(flat: Array, step: float | None) -> Array:
    """h of every parameter. The cube root balances truncation h² against rounding eps/h."""
    relative = float(jnp.finfo(flat.dtype).eps) ** (1 / 3) if step is None else step
    return relative * jnp.maximum(1, jnp.abs(flat))


# --------------------------------------------------------------------------------------- kernels


def compute_return(
    recipe: simulate.Recipe, objective: objectives.Rewards, run: streamed.Run, j: Array
) -> Array:
    """R of trajectory j under its own noise, as a function of θ."""
    theta = run.theta
    x, context, stream = simulate.start_trajectory(recipe, run.key, theta, run.x0, j)
    per_step = objective.per_step
    reward = jnp.zeros((), x.dtype)
    if objective.initial is not None:
        reward = objective.initial(theta, simulate.observe(recipe, x), context).astype(x.dtype)

    def body(carry: Any, step: Any) -> tuple[Any, None]:
        x, reward = carry
        n, t, dt = step
        reward = reward + objective.running(theta, simulate.observe(recipe, x), t, context) * dt
        x_next = simulate.advance_one(recipe, theta, x, context, stream, n, t, dt)
        if per_step is not None:
            ends = simulate.observe(recipe, x), simulate.observe(recipe, x_next)
            reward = reward + per_step(theta, *ends, t, dt, context).astype(x.dtype)
        return (x_next, reward), None

    @jax.checkpoint
    def segment(carry: Any, steps: Any) -> tuple[Any, None]:
        return jax.lax.scan(body, carry, steps)[0], None

    total = run.times.dt.shape[0]
    length = max(1, int(total**0.5))
    whole = total // length * length
    steps = simulate.enumerate_steps(run.times)
    segments = jax.tree.map(lambda v: v[:whole].reshape(-1, length), steps)
    carry, _ = jax.lax.scan(segment, (x, reward), segments)
    (x, reward), _ = jax.lax.scan(body, carry, jax.tree.map(lambda v: v[whole:], steps))
    return reward + objective.terminal(theta, simulate.observe(recipe, x), context)


@partial(jit, static_argnums=(0, 1, 2))
def _pathwise(
    objective: objectives.Rewards, recipe: simulate.Recipe, count: int, run: streamed.Run
) -> tuple[Array, Array]:
    def one(j: Array) -> tuple[Array, Array]:
        value, slope = jax.value_and_grad(
            lambda th: compute_return(recipe, objective, run._replace(theta=th), j)
        )(run.theta)
        return ravel_pytree(slope)[0], value

    return jax.lax.map(one, jnp.arange(count), batch_size=min(count, BATCH))


@partial(jit, static_argnums=(0, 1, 2))
def _estimate_differences(
    objective: objectives.Rewards,
    recipe: simulate.Recipe,
    count: int,
    run: streamed.Run,
    h: Array,
) -> tuple[Array, Array]:
    flat, unravel = ravel_pytree(run.theta)

    def collect(row: dict[str, Array]) -> Array:
        """R at θ with one component moved. θ is made here: a stack of 2P + 1 would grow as P²."""
        theta = unravel(flat.at[row["component"]].add(row["h"]))
        return streamed.collect_returns(objective, recipe, count, run._replace(theta=theta))

    numbers = jnp.arange(flat.size)
    rows = {
        "component": jnp.concatenate([numbers[:1], numbers, numbers]),
        "h": jnp.concatenate([jnp.zeros_like(h[:1]), h, -h]),
    }
    returns = many.map_runs(collect, rows, max(count, flat.size))
    middle, above, below = jnp.split(returns, [1, 1 + flat.size])
    # the difference of what the parameters actually became, not 2h: rounding of θ ± h cancels
    width = (flat + h) - (flat - h)
    return ((above - below) / width[:, None]).T, middle[0]


@partial(jit, static_argnums=(0, 1, 2))
def _spsa(
    objective: objectives.Rewards,
    recipe: simulate.Recipe,
    count: int,
    run: streamed.Run,
    h: Array,
) -> tuple[Array, Array]:
    flat, unravel = ravel_pytree(run.theta)
    k_signs, k_run = jax.random.split(run.key)
    numbers = jnp.arange(count)
    signs = jax.vmap(
        lambda j: jax.random.rademacher(jax.random.fold_in(k_signs, j), flat.shape, flat.dtype)
    )(numbers)
    rows = jnp.concatenate([flat + signs * h, flat - signs * h])
    # θ number j of either sign has trajectory j alone
    stack = run._replace(
        key=k_run, theta=jax.vmap(unravel)(rows), first=jnp.concatenate([numbers, numbers])
    )
    returns = many.collect_returns(objective, recipe, 1, ("theta", "first"), stack)
    up, down = jnp.split(returns, 2)
    return (up - down) / (2 * h) * signs, (up + down)[:, 0] / 2
