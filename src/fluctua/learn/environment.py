"""A device as a Gymnasium environment, for whoever has an agent already: an episode is one
trajectory.

An action u ∈ [−1, 1]^P stands for θ = low + (high − low)(u + 1)/2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.objective import Objective, Rewards
from fluctua.core.simulate import Ensemble, Recipe, Simulator, advance_one, begin_one
from fluctua.core.trajectories import Times


def settings_environment(measure: Callable[[Array, Params], Any], low: Params, high: Params) -> Any:
    """Settings in, return out: one step an episode.

    Args:
        measure: (key, theta) -> the return of one trajectory, simulated or measured.
        low: bounds of θ, a pytree with the structure of θ.
        high: likewise.
    Returns: a `gymnasium.Env` that observes nothing but a constant 0.

    """
    theta_of, size = _settings(low, high)

    class Settings(_gymnasium().Env):  # type: ignore[misc]
        observation_space = _space(1, 1.0)
        action_space = _space(size, 1.0)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return np.zeros(1, np.float32), {}

        def step(self, action: np.ndarray) -> Any:
            gain = measure(jax.random.key(int(self.np_random.integers(2**31))), theta_of(action))
            return np.zeros(1, np.float32), float(gain), True, False, {}

    return Settings()


def feedback_environment(
    simulator: Simulator, objective: Objective, low: Params, high: Params, *, every: int = 1
) -> Any:
    """State in, settings of the next `every` steps out; the reward is what they earn, and g_T
    besides at the end.

    Args:
        simulator: made by `fluctua.simulator`.
        objective: what is rewarded.
        low: bounds of θ, a pytree with the structure of θ.
        high: likewise.
        every: steps of the simulator between two actions.
    Returns: a `gymnasium.Env` that observes the state and the fraction of the time that is over, (M
        + 1,).

    """
    theta_of, size = _settings(low, high)
    recipe = simulator.recipe
    times = simulator.times
    x0 = simulator.x0
    rewards = check.objective(objective)
    steps = len(times.dt)
    middle = theta_of(np.zeros(size))
    if not isinstance(every, int) or every < 1 or steps % every:
        raise ValueError(f"`every` must divide the {steps} steps of the simulator; got {every!r}.")
    start = jit(lambda key: begin_one(recipe, key, middle, x0, jnp.zeros((), int)))
    width = jax.eval_shape(start, jax.random.key(0)).x.shape[0]

    class Feedback(_gymnasium().Env):  # type: ignore[misc]
        observation_space = _space(width + 1, np.inf)
        action_space = _space(size, 1.0)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.one = start(jax.random.key(int(self.np_random.integers(2**31))))
            self.n = 0
            return self.seen(), {}

        def step(self, action: np.ndarray) -> Any:
            x, gain = _several(recipe, rewards, every, times, theta_of(action), self.one, self.n)
            if rewards.initial is not None and self.n == 0:
                gain += rewards.initial(theta_of(action), self.one.x, self.one.context)
            self.one = self.one._replace(x=x)
            self.n = self.n + every
            over = self.n == steps
            gain += rewards.terminal(theta_of(action), x, self.one.context) if over else 0.0
            return self.seen(), float(gain), over, False, {}

        def seen(self) -> np.ndarray:
            return np.append(self.one.x, self.n / steps).astype(np.float32)

    return Feedback()


@partial(jit, static_argnums=(0, 1, 2))
def _several(
    recipe: Recipe,
    rewards: Rewards,
    every: int,
    times: Times,
    theta: Params,
    one: Ensemble,
    begin: Array,
) -> tuple[Array, Array]:
    """The state after `every` steps from step `begin` on, and what they earn."""

    def body(carry: tuple[Array, Array], n: Array) -> tuple[tuple[Array, Array], None]:
        (x, total) = carry
        t = times.t[n]
        dt = times.dt[n]
        total = total + rewards.running(theta, x, t, one.context) * dt
        x_next = advance_one(recipe, theta, x, one.context, one.streams, n, t, dt)
        if rewards.step is not None:
            total = total + rewards.step(theta, x, x_next, t, dt, one.context)
        return (x_next, total), None

    return jax.lax.scan(body, (one.x, jnp.zeros((), one.x.dtype)), begin + jnp.arange(every))[0]


def _settings(low: Params, high: Params) -> tuple[Callable[[np.ndarray], Params], int]:
    """θ of an action, and the number of its components."""
    (bottom, unravel) = ravel_pytree(check.parameters(low))
    (top, _) = ravel_pytree(check.parameters(high))
    alike = (
        str(jax.tree.structure(low)) == str(jax.tree.structure(high)) and bottom.shape == top.shape
    )
    if not alike or not (bottom < top).all():
        raise ValueError(
            f"`low` must lie below `high` and have its structure; got {low} and {high}."
        )
    return lambda action: unravel(
        bottom + (top - bottom) * (np.clip(action, -1, 1) + 1) / 2
    ), bottom.size


def _space(size: int, reach: float) -> Any:
    return _gymnasium().spaces.Box(-reach, reach, (size,), np.float32)


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(
            f"environments are Gymnasium's ({error}): pip install 'fluctua[gym]'."
        ) from None
    return gymnasium
