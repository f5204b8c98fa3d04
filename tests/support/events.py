"""Jump processes with all that a kernel of them must do."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import fluctua as fl
from kept import keep_per_precision


class JumpCase(NamedTuple):
    """What an estimator and a simulator are made of."""

    process: fl.Jumps
    objective: fl.Objective
    start: object
    t: jax.Array
    theta: dict
    context: object = None


def numbers(**values):
    return {name: jnp.asarray(value, float) for name, value in values.items()}


@keep_per_precision
def driven_with_diffusion():
    """Rates of time, state and context; diffusion between the events; a random start; every
    kind of reward.
    """

    def rates(th, x, t, c):
        up, down = (
            th["up"] * (1 + 0.5 * jnp.sin(3 * t)) * c["gain"],
            th["down"] * jnp.tanh(x[0]) ** 2,
        )
        return jnp.array([up, down, th["swap"] * x[1] ** 2 / (1 + x[0] ** 2 + x[1] ** 2)])

    smooth = fl.Process(
        lambda th, x, t, c: -th["pull"] * x, lambda th, x: th["noise"] * jnp.array([1.0, 0.7])
    )
    process = fl.Jumps(rates, [[0.5, 0.0], [-0.5, 0.25], [0.0, -0.5]], smooth)
    objective = fl.Objective(
        running=lambda th, x, t: th["weight"] * x[0] ** 2 * t,
        terminal=lambda th, x, c: jnp.cos(x[1]) * c["gain"],
        per_step=lambda th, x, x_next, t, dt: th["weight"] * (x_next[1] - x[1]) * x[0],
        initial=lambda th, x: x[0] * th["mean"],
    )
    theta = numbers(up=3.0, down=1.5, swap=2.0, pull=0.6, noise=0.4, weight=0.7, mean=0.3)
    start = fl.Density(
        log_density=lambda th, x0: -jnp.sum((x0 - th["mean"]) ** 2) / 2,
        sample=lambda key, th: th["mean"] + jax.random.normal(key, (2,)),
    )
    context = lambda key: {"gain": 1 + jax.random.uniform(key)}
    return JumpCase(process, objective, start, 2 * jnp.linspace(0, 1, 13) ** 1.3, theta, context)


@keep_per_precision
def ring_of_genes():
    """A repressilator: six events, powers that depend on θ, and a parameter that the events do
    not know.
    """

    def rates(th, x):
        made = 20 * th["make"] / (1 + (jnp.roll(x, 1) / th["half"]) ** th["hill"])
        return jnp.concatenate([made, th["loss"] * x])

    changes = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [-1, 0, 0], [0, -1, 0], [0, 0, -1]]
    reward = fl.Objective(
        running=lambda th, x: th["price"] * x[0] - 0.1 * x[1] ** 2, terminal=lambda th, x: x[2]
    )
    theta = numbers(make=1.0, half=4.0, hill=2.5, loss=1.0, price=0.5)
    return JumpCase(
        fl.Jumps(rates, changes), reward, jnp.array([8.0, 2.0, 1.0]), jnp.linspace(0, 1, 9), theta
    )


@keep_per_precision
def driven():
    """Rates of time and state that vanish at a state, and every kind of reward."""

    def rates(th, x, t):
        swapped = th["swap"] * x[0] ** 2 / (1 + x[0])
        return jnp.array([th["up"] * (1 + 0.5 * jnp.sin(3 * t)), th["down"] * x[1], swapped])

    process = fl.Jumps(rates, [[1.0, 0.0], [0.0, -1.0], [-1.0, 1.0]])
    objective = fl.Objective(
        running=lambda th, x, t: th["weight"] * x[0] ** 2 * t,
        terminal=lambda th, x: jnp.sqrt(1 + x[1]),
        per_step=lambda th, x, x_next, t, dt: th["weight"] * (x_next[1] - x[1]) * x[0],
        initial=lambda th, x: x[0] * th["weight"],
    )
    theta = numbers(up=6.0, down=1.5, swap=0.8, weight=0.7)
    t = 2 * jnp.linspace(0, 1, 13) ** 1.3
    return JumpCase(process, objective, jnp.array([2.0, 0.0]), t, theta)
