"""Gymnasium environment
=====================

A noisy device as an environment for agents of other libraries, with settings or with feedback.

`SettingsEnvironment`: an action is the settings of a whole trajectory, the reward its return.
`FeedbackEnvironment`: the agent sees the state and sets the parameters of the next few time steps.
Settings that follow the state can do better than any that do not, and need an instrument that is
fast enough. An action u ∈ [−1, 1]^P stands for θ = low + (high − low)(u + 1)/2.

Run it with `python examples/gymnasium_environment.py` (pip install 'fluctua[gym]');
`stable_baselines3.PPO("MlpPolicy", FeedbackEnvironment()).learn(10_000)` trains an agent.
"""

import gymnasium
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fluctua as fl

TIMES = np.linspace(0, 1, 41)
LOW = {"force": jnp.array([-2.0]), "k": jnp.array([0.0])}
HIGH = {"force": jnp.array([4.0]), "k": jnp.array([2.0])}


def drift(theta, x):
    return -theta["k"] * x + theta["force"]


def noise(theta, x):
    return 0.4 * jnp.ones(1)


def running(theta, x):
    return -((x[0] - 1) ** 2) - 0.01 * theta["force"][0] ** 2


def terminal(theta, x):
    return -2 * (x[0] - 1) ** 2


simulator = fl.simulator(fl.Process(drift, noise), jnp.array([0.7]), TIMES)


def decode_action(action):
    """The parameters that an action stands for, the leaves of θ in the order of the pytree."""
    share = (np.clip(action, -1, 1) + 1) / 2
    leaves, tree = jax.tree.flatten(LOW)
    highest = jax.tree.leaves(HIGH)
    values = [low + (high - low) * u for low, high, u in zip(leaves, highest, share, strict=True)]
    return jax.tree.unflatten(tree, values)


class SettingsEnvironment(gymnasium.Env):
    """Settings in, return out: one step per episode. It observes a constant 0."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        theta = decode_action(action)
        key = jax.random.key(int(self.np_random.integers(2**31)))
        x = simulator(key, theta, 1).x[0]
        rewards = jax.vmap(running, in_axes=(None, 0))(theta, x[:-1])
        total = jnp.sum(rewards * np.diff(TIMES)) + terminal(theta, x[-1])
        return np.zeros(1, np.float32), float(total), True, False, {}


class FeedbackEnvironment(gymnasium.Env):
    """State in, settings of the next `every` steps out. It observes the state and the time."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, every=5):
        if (len(TIMES) - 1) % every:
            raise ValueError(f"`every` must divide the {len(TIMES) - 1} steps; got {every}.")
        self.every = every

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = jnp.array([0.7])
        self.n = 0
        return self.observe(), {}

    def step(self, action):
        theta = decode_action(action)
        reward = 0.0
        for _ in range(self.every):
            dt = TIMES[self.n + 1] - TIMES[self.n]
            kick = np.sqrt(dt) * self.np_random.standard_normal(1)
            reward += float(running(theta, self.x)) * dt
            self.x += drift(theta, self.x) * dt + noise(theta, self.x) * kick
            self.n += 1
        over = self.n == len(TIMES) - 1
        if over:
            reward += float(terminal(theta, self.x))
        return self.observe(), reward, over, False, {}

    def observe(self):
        return np.append(self.x, TIMES[self.n]).astype(np.float32)


def average_return(environment, policy, episodes=100):
    """Mean return and its standard error. policy: observation -> action."""
    totals = []
    for episode in range(episodes):
        observation, _ = environment.reset(seed=episode)
        total = 0.0
        over = False
        while not over:
            observation, reward, over, _, _ = environment.step(policy(observation))
            total += reward
        totals.append(total)
    return np.mean(totals), np.std(totals, ddof=1) / np.sqrt(episodes)


def hold(observation):
    """The same settings always: force 1, k 1, so that x rests at 1."""
    return np.zeros(2, np.float32)


def steer(observation):
    """A force towards x = 1, with k = 0."""
    force = 4.0 * (1 - observation[0])
    return np.array([(force + 2) / 3 - 1, -1.0], np.float32)


if __name__ == "__main__":
    for name, environment, policy in (
        ("settings, held", SettingsEnvironment(), hold),
        ("feedback, held", FeedbackEnvironment(), hold),
        ("feedback, steered", FeedbackEnvironment(), steer),
    ):
        mean, error = average_return(environment, policy)
        print(f"{name:18} J = {mean:.3f} ± {error:.3f}")

    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    environment = FeedbackEnvironment()
    for policy, colour in ((hold, "C0"), (steer, "C1")):
        for episode in range(15):
            observations = [environment.reset(seed=episode)[0]]
            while observations[-1][1] < TIMES[-1]:
                observations.append(environment.step(policy(observations[-1]))[0])
            x, t = np.array(observations).T
            label = policy.__name__ if episode == 0 else None
            axes.plot(t, x, colour, lw=0.8, label=label)
    axes.axhline(1, color="0.6", lw=0.8, ls=":")
    axes.set(xlabel="time", ylabel="position")
    axes.legend(frameon=False, loc="upper left")
    plt.show()
