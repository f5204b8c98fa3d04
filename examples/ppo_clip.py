r"""PPO's clipped surrogate
=======================

The surrogate of PPO for a process in continuous time, and its bias away from its batch.

A batch of trajectories taken at `old` is used for several steps of θ. Each step of a trajectory has
its own ratio ρₙ = p_θ(Xₙ₊₁\|Xₙ) / p_old(Xₙ₊₁\|Xₙ), which is clipped to 1 ± ε::

    value = R + Σₙ {min[ρₙAₙ, clip(ρₙ)Aₙ] − Aₙ},    Aₙ = λ̂ₙ₊₁ − λ̄ₙ₊₁.

It never runs out of trajectories, and it is biased to first order in θ − old: states, and the
rewards that follow a step, are still those of `old`. The ratios tend to 1 with the time step, so
that the clip does not bound the distance of whole trajectories. `fluctua.reweighted` is unbiased
and reports when a batch is used up.

Run it with `python examples/ppo_clip.py`.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import fluctua as fl


def log_density(process, theta, x, x_next, t, dt):
    """ln p_θ(x′|x) of one Euler step, up to a constant. The noise must not depend on θ."""
    mean = x + process.drift(theta, x, t) * dt
    variance = process.noise(theta, x) ** 2 * dt
    return -jnp.sum((x_next - mean) ** 2 / variance) / 2


def log_ratios(process, theta, old, batch):
    """ln ρₙ of every step. Shape (E, T)."""

    def one_step(x, x_next, t, dt):
        return log_density(process, theta, x, x_next, t, dt) - log_density(
            process, old, x, x_next, t, dt
        )

    one_path = jax.vmap(one_step)
    every_path = jax.vmap(one_path, in_axes=(0, 0, None, None))
    return every_path(batch.x[:, :-1], batch.x[:, 1:], batch.t[:-1], jnp.diff(batch.t))


def compute_returns_to_go(objective, theta, batch):
    """λ̂ₙ of every trajectory. Shape (E, T + 1)."""
    rates = jnp.zeros(batch.x[:, :-1, 0].shape)
    if objective.running is not None:
        one_path = jax.vmap(objective.running, in_axes=(None, 0, 0))
        rates = jax.vmap(one_path, in_axes=(None, 0, None))(theta, batch.x[:, :-1], batch.t[:-1])
    terminal = jax.vmap(objective.terminal, in_axes=(None, 0))(theta, batch.x[:, -1])
    return fl.returns_to_go(rates, terminal, jnp.diff(batch.t))


def subtract_baseline(to_go):
    """λ̂ − λ̄, where λ̄ is the mean of the other half of the trajectories."""
    half = len(to_go) // 2
    first = to_go[:half] - to_go[half:].mean(axis=0)
    second = to_go[half:] - to_go[:half].mean(axis=0)
    return jnp.concatenate([first, second])


def clipped_values(process, objective, theta, old, batch, epsilon=0.2, center=subtract_baseline):
    """The surrogate of each trajectory, whose mean PPO maximises by θ. Shape (E,)."""
    to_go = compute_returns_to_go(objective, theta, batch)
    advantage = jax.lax.stop_gradient(center(to_go)[:, 1:])
    ratio = jnp.exp(log_ratios(process, theta, old, batch))
    free = ratio * advantage
    held = jnp.clip(ratio, 1 - epsilon, 1 + epsilon) * advantage
    return to_go[:, 0] + jnp.sum(jnp.minimum(free, held) - advantage, axis=1)


def clipped_gradient(process, objective, theta, old, batch, epsilon=0.2):
    """The gradient of PPO's surrogate at θ, from trajectories taken at `old`."""
    return jax.grad(
        lambda theta: clipped_values(process, objective, theta, old, batch, epsilon).mean()
    )(theta)


if __name__ == "__main__":
    process = fl.Process(lambda f, x, t: f - x, lambda f, x: 0.5 * jnp.ones(1))
    objective = fl.Objective(terminal=lambda f, x: -((x[0] - 1) ** 2))
    simulator = fl.simulator(process, jnp.zeros(1), jnp.linspace(0, 2, 41))
    rule = optax.adam(0.1)
    f = jnp.array(0.0)
    state = rule.init(f)
    for iteration in range(12):
        old = f
        batch = simulator(jax.random.key(iteration), old, 200)
        value = compute_returns_to_go(objective, old, batch)[:, 0].mean()
        for _ in range(4):  # steps per batch
            gradient = clipped_gradient(process, objective, f, old, batch)
            updates, state = rule.update(-gradient, state)
            f = f + updates
        print(f"iteration {iteration:2d}   J = {value:+.3f}   f = {f:.3f}")

    there = old + 0.3
    exact = fl.reweighted(process, objective, there, [(old, batch)]).estimate
    clipped = clipped_gradient(process, objective, there, old, batch, epsilon=1e9)
    print(f"\n0.3 away from its batch: ∇J = {exact.gradient:.2f} ± {exact.stderr:.2f} reweighted,")
    print(f"{clipped:.2f} by the surrogate without a clip: the difference is its bias")

    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for distance in (0.0, 0.1, 0.2, 0.3, 0.4):
        there = old + distance
        exact = fl.reweighted(process, objective, there, [(old, batch)]).estimate
        clipped = clipped_gradient(process, objective, there, old, batch, epsilon=1e9)
        axes.errorbar(distance, exact.gradient, 2 * exact.stderr, fmt="C0o", capsize=3)
        axes.plot(distance, clipped, "C1s")
    axes.plot([], [], "C0o", label="reweighted, ± 2 standard errors")
    axes.plot([], [], "C1s", label="surrogate without a clip")
    axes.set(xlabel="distance θ − old", ylabel="∇J")
    axes.legend(frameon=False)
    plt.show()
