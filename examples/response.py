"""Response in time
================

How a mean would follow a small step, from a record in which nothing is changed.

A particle is driven round a ring, dx = (f + A sin x) dt + √(2D) dW. How does the mean of sin x
follow a small step of the amplitude A of its potential? Force and diffusion are unknown: both are
fitted to other parts of the record. At the end the step is made, in a simulation of many
particles, and compared. Run it with `python examples/response.py`.
"""

import argparse

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fluctua as fl

DT = 0.02
TORQUE, AMPLITUDE, DIFFUSION = 1.0, 1.5, 0.5
TURN = 2 * np.pi


def simulate(particles, steps, seed, change=0.0, settle=1000):
    """Angles (particles, steps + 1), modulo a turn; the amplitude changes by a share at step 0."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, TURN, particles)
    path = [x]
    for n in range(-settle, steps):
        force = TORQUE + AMPLITUDE * (1 + change * (n >= 0)) * np.sin(x)
        x = x + force * DT + np.sqrt(2 * DIFFUSION * DT) * rng.normal(size=particles)
        path = [x] if n < 0 else [*path, x]
    return np.array(path).T % TURN


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=10_000, help="of the record")
parser.add_argument("--particles", type=int, default=50_000, help="for which the step is made")
options = parser.parse_args()
x = simulate(20, options.steps, seed=0)
record = fl.Trajectories(DT * np.arange(x.shape[1]), x[..., None])

basis = fl.response.fourier(harmonics=3)  # 1, cos x, sin x, …
particle = fl.Process(
    drift=lambda p, x: p["torque"] + p["amplitude"] * (p["force"] @ basis(x)[1:])[None],
    noise=lambda p, x: jnp.sqrt(2 * p["D"]) * jnp.ones(1),
)
start = {"torque": 0.0, "amplitude": 1.0, "force": jnp.zeros(6), "D": 1.0}
answer = fl.response.step_response(
    particle,
    lambda p, x: jnp.sin(x[0]),
    start,
    record,
    window=2.0,
    period=TURN,
    calibration=fl.response.CrossFitted(("torque", "force", "D")),
)
print(answer)

up, down = (simulate(options.particles, 100, 1, change) for change in (0.1, -0.1))  # same noise
made = (np.sin(up) - np.sin(down)).mean(axis=0) / 0.2
for m in (20, 50, 100):
    chi, error = answer.response["amplitude"][m], answer.stderr["amplitude"][m]
    print(f"t = {m * DT:.1f}: from the record {chi:.3f} ± {error:.3f}, step made {made[m]:.3f}")

# %%
# The whole response with two standard errors, and the step that was made.

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
chi, error = answer.response["amplitude"], 2 * answer.stderr["amplitude"]
t = DT * np.arange(len(chi))
axes.fill_between(t, chi - error, chi + error, alpha=0.3, lw=0)
axes.plot(t, chi, label="from the record")
axes.plot(t[: len(made)], made[: len(t)], "k--", lw=1, label="step made")
axes.set(xlabel="time since the step", ylabel="response of ⟨sin x⟩")
axes.legend(frameon=False)
plt.show()
