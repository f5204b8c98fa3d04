"""Processes as a user writes them, with the same drift and noise for torchsde."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.objective import Objective
from fluctua.core.process import Process


class Own(NamedTuple):
    """A process to measure.

    start: (M,). dt: of a step. steps: of a run. cost: ns a trajectory and step that JAX takes on a
    core or two, by order of magnitude; slower runs are cut short by it. torch: (torch, theta, y (E,
    M)) -> drift and noise (E, M); None if it is not measured.
    """

    process: Process
    objective: Objective
    theta: Params
    start: Array
    dt: float
    steps: int
    cost: float
    torch: Callable[[Any, Any, Any], tuple[Any, Any]] | None


def pendulum() -> Own:
    """Two states, three parameters, one of them of the noise; the README's."""

    def drift(theta: Params, x: Array) -> Array:
        angle, speed = x
        return jnp.array([speed, -theta["stiffness"] * jnp.sin(angle) - theta["friction"] * speed])

    def of_torch(torch: Any, theta: Any, y: Any) -> tuple[Any, Any]:
        angle, speed = y.T
        force = -theta["stiffness"] * torch.sin(angle) - theta["friction"] * speed
        return torch.stack([speed, force], 1), torch.stack(
            [0 * speed, theta["shaking"] + 0 * speed], 1
        )

    theta = {"stiffness": jnp.array(2.0), "friction": jnp.array(0.5), "shaking": jnp.array(0.4)}

    def noise(theta, x):
        return jnp.array([0.0, theta["shaking"]])

    energy = Objective(running=lambda theta, x: x[1] ** 2 / 2)
    return Own(
        Process(drift, noise), energy, theta, jnp.array([1.0, 0.0]), 0.0025, 2000, 100, of_torch
    )


def double_well() -> Own:
    """One state, four parameters: the depth and width of the wells, their tilt, the temperature."""

    def drift(theta, x):
        return theta["a"] * x - theta["b"] * x**3 + theta["tilt"]

    def noise(theta, x):
        return jnp.sqrt(2 * theta["heat"]) * jnp.ones_like(x)

    def of_torch(torch: Any, theta: Any, y: Any) -> tuple[Any, Any]:
        return theta["a"] * y - theta["b"] * y**3 + theta["tilt"], torch.sqrt(
            2 * theta["heat"]
        ) + 0 * y

    theta = {
        "a": jnp.array(1.0),
        "b": jnp.array(1.0),
        "tilt": jnp.array(0.1),
        "heat": jnp.array(0.2),
    }
    crossed = Objective(terminal=lambda theta, x: jnp.tanh(4 * x[0]))
    return Own(Process(drift, noise), crossed, theta, jnp.array([-1.0]), 0.005, 2000, 80, of_torch)


def genes() -> Own:
    """Three genes that repress each other in a ring: 6 states, 12 parameters, noise that grows
    with the rates.
    """

    def rates(xp: Any, theta: Any, messenger: Any, protein: Any, repressor: Any) -> tuple[Any, Any]:
        """Production and decay of messengers, then of proteins, each of three genes."""
        made = theta["strength"] / (1 + (repressor / theta["threshold"]) ** 2) + 0.05
        translated = theta["translation"] * messenger
        decayed = theta["decay"] * protein
        return xp.concatenate([made, translated], -1), xp.concatenate([messenger, decayed], -1)

    def of_jax(theta: Params, x: Array) -> tuple[Array, Array]:
        made, lost = rates(jnp, theta, x[:3], x[3:], jnp.roll(x[3:], 1))
        return made - lost, jnp.sqrt((jnp.abs(made) + jnp.abs(lost)) / 50)

    def of_torch(torch: Any, theta: Any, y: Any) -> tuple[Any, Any]:
        made, lost = rates(torch, theta, y[:, :3], y[:, 3:], torch.roll(y[:, 3:], 1, 1))
        return made - lost, torch.sqrt((torch.abs(made) + torch.abs(lost)) / 50)

    theta = {
        "strength": jnp.array([8.0, 9.0, 10.0]),
        "threshold": jnp.array([1.0, 1.1, 1.2]),
        "translation": jnp.array([1.0, 0.9, 1.1]),
        "decay": jnp.array([1.0, 1.1, 0.9]),
    }
    process = Process(lambda theta, x: of_jax(theta, x)[0], lambda theta, x: of_jax(theta, x)[1])
    expressed = Objective(running=lambda theta, x: x[3])
    return Own(
        process,
        expressed,
        theta,
        jnp.array([2.0, 1.0, 0.5, 1.0, 2.0, 3.0]),
        0.01,
        1000,
        500,
        of_torch,
    )


def kuramoto(sites: int = 16) -> Own:
    """Phases with dense couplings K (256 for 16 sites) and frequencies that are known."""
    omega = np.linspace(-1, 1, sites)

    def drift(theta: Params, x: Array) -> Array:
        return omega + jnp.sum(theta * jnp.sin(x[None, :] - x[:, None]), axis=1)

    def of_torch(torch: Any, theta: Any, y: Any) -> tuple[Any, Any]:
        pull = (theta * torch.sin(y[:, None, :] - y[:, :, None])).sum(2)
        return torch.as_tensor(omega, dtype=y.dtype, device=y.device) + pull, 0.3 + 0 * y

    def noise(theta, x):
        return 0.3 * jnp.ones_like(x)

    order = Objective(
        running=lambda theta, x: jnp.mean(jnp.cos(x)) ** 2 + jnp.mean(jnp.sin(x)) ** 2
    )
    near = np.exp(-np.abs(np.subtract.outer(np.arange(sites), np.arange(sites))) / 2) / 2
    start = jnp.asarray(np.linspace(0, 3, sites), jnp.float32)
    return Own(
        Process(drift, noise),
        order,
        jnp.asarray(near, jnp.float32),
        start,
        0.01,
        200,
        10_000,
        of_torch,
    )


def neural(states: int = 4, hidden: int = 10) -> Own:
    """A drift −x + W₂ tanh(W₁x + b₁) + b₂ with 94 weights, to be kept at a target."""

    def drift(theta: Params, x: Array) -> Array:
        return theta["W2"] @ jnp.tanh(theta["W1"] @ x + theta["b1"]) + theta["b2"] - x

    def of_torch(torch: Any, theta: Any, y: Any) -> tuple[Any, Any]:
        return torch.tanh(y @ theta["W1"].T + theta["b1"]) @ theta["W2"].T + theta[
            "b2"
        ] - y, 0.3 + 0 * y

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"W1": (hidden, states), "b1": (hidden,), "W2": (states, hidden), "b2": (states,)}
    theta = {
        name: jax.random.normal(k, shape) / 2
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }

    def noise(theta, x):
        return 0.3 * jnp.ones_like(x)

    target = Objective(running=lambda theta, x: -jnp.sum((x - 0.5) ** 2))
    return Own(Process(drift, noise), target, theta, jnp.zeros(states), 0.01, 500, 2000, of_torch)


def weather(sites: int = 40) -> Own:
    """Lorenz's model of 1996: 40 states on a ring, four parameters, chaotic."""

    def rate(xp: Any, theta: Any, x: Any) -> Any:
        before = xp.roll(x, 1, -1)
        ahead = xp.roll(x, -1, -1)
        two_before = xp.roll(x, 2, -1)
        return theta["flow"] * (ahead - two_before) * before - theta["decay"] * x + theta["force"]

    def drift(theta: Params, x: Array) -> Array:
        return rate(jnp, theta, x)

    def noise(theta: Params, x: Array) -> Array:
        return theta["noise"] * jnp.ones_like(x)

    def of_torch(torch: Any, theta: Any, y: Any) -> tuple[Any, Any]:
        return rate(torch, theta, y), theta["noise"] + 0 * y

    theta = {
        "flow": jnp.array(1.0),
        "decay": jnp.array(1.0),
        "force": jnp.array(8.0),
        "noise": jnp.array(0.5),
    }
    energy = Objective(running=lambda theta, x: jnp.mean(x**2) / 2)
    start = jnp.asarray(8 + np.sin(np.arange(sites)), jnp.float32)
    return Own(Process(drift, noise), energy, theta, start, 0.002, 500, 2000, of_torch)


def springs(masses: int = 32) -> Own:
    """A chain of 32 masses with a spring and a friction each: 64 states, 64 parameters.

    Noise is in the velocities alone.
    """

    def rate(xp: Any, theta: Any, place: Any, speed: Any) -> Any:
        edge = 0 * place[..., :1]
        padded = xp.concatenate([edge, place, edge], -1)
        force = padded[..., :-2] - 2 * place + padded[..., 2:]
        return theta["stiffness"] * force - theta["friction"] * speed

    def drift(theta: Params, x: Array) -> Array:
        place, speed = x[:masses], x[masses:]
        return jnp.concatenate([speed, rate(jnp, theta, place, speed)])

    def noise(theta: Params, x: Array) -> Array:
        return jnp.concatenate([jnp.zeros(masses), 0.3 * jnp.ones(masses)]).astype(x.dtype)

    def of_torch(torch: Any, theta: Any, y: Any) -> tuple[Any, Any]:
        place, speed = y[:, :masses], y[:, masses:]
        sigma = torch.concatenate([0 * place, 0.3 + 0 * speed], -1)
        return torch.concatenate([speed, rate(torch, theta, place, speed)], -1), sigma

    theta = {
        "stiffness": jnp.linspace(0.5, 1.5, masses),
        "friction": jnp.linspace(0.2, 0.4, masses),
    }
    still = Objective(running=lambda theta, x: -jnp.sum(x[:masses] ** 2))
    start = jnp.asarray(np.r_[np.sin(np.arange(masses)), np.zeros(masses)], jnp.float32)
    return Own(Process(drift, noise), still, theta, start, 0.01, 500, 3000, of_torch)


def schedule(knots: int = 200, end: float = 2.0) -> Own:
    """A particle in a trap whose centre follows 200 knots in time: one state."""
    times = np.linspace(0, end, knots).astype(np.float32)
    target = np.sin(np.pi * times)

    def drift(theta: Params, x: Array, t: Array) -> Array:
        return 4 * (jnp.interp(t, times, theta) - x)

    def noise(theta: Params, x: Array, t: Array) -> Array:
        return 0.4 * jnp.ones_like(x)

    follow = Objective(running=lambda theta, x, t: -jnp.sum((x - jnp.sin(np.pi * t)) ** 2))
    theta = jnp.asarray(0.5 * target, jnp.float32)
    return Own(Process(drift, noise), follow, theta, jnp.zeros(1), 0.004, 500, 500, None)


PROCESSES: dict[str, Callable[[], Own]] = {
    "pendulum": pendulum,
    "double well": double_well,
    "genes": genes,
    "kuramoto": kuramoto,
    "neural": neural,
}

FURTHER: dict[str, Callable[[], Own]] = {
    "weather": weather,
    "springs": springs,
    "schedule": schedule,
}
"""Processes of other shapes: many states, noise in half of them, many knots in time."""
