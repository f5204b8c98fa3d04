"""One long trace
==============

The gradient of a long-run average from a single record, without any restart.

A particle is watched in an optical trap that is stiffer further out. The trace is cut out of an
experiment that was running anyway, so there is no start to speak of. Which way do the stiffness k,
the cubic part c and the temperature move the mean square displacement? Compared with the Boltzmann
distribution. Run it with `python examples/one_trace.py`.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fluctua as fl

DT = 0.02
KNOBS = {"k": 1.0, "c": 0.5, "kT": 0.6}


def laboratory(steps: int, seed: int = 3) -> np.ndarray:
    """Stands for the detector: positions (steps + 1,), in units of the trap, friction 1."""
    kick = np.random.default_rng(seed).normal(size=steps + 500) * np.sqrt(2 * KNOBS["kT"] * DT)
    x = np.zeros(steps + 501)
    for n in range(steps + 500):
        x[n + 1] = x[n] - (KNOBS["k"] * x[n] + KNOBS["c"] * x[n] ** 3) * DT + kick[n]
    return x[500:]


def boltzmann(theta):
    """⟨x²⟩ in the steady state of the trap, for short steps."""
    x = jnp.linspace(-8, 8, 4001)
    weight = jnp.exp(-(theta["k"] * x**2 / 2 + theta["c"] * x**4 / 4) / theta["kT"])
    return jnp.sum(x**2 * weight) / jnp.sum(weight)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200_000)
x = laboratory(parser.parse_args().steps)

trap = fl.Process(
    drift=lambda theta, x: -theta["k"] * x - theta["c"] * x**3,
    noise=lambda theta, x: jnp.sqrt(2 * theta["kT"]) * jnp.ones(1),
)
theta = {name: jnp.array(value) for name, value in KNOBS.items()}
record = fl.Trajectories(DT * np.arange(len(x)), x[None, :, None])  # one trajectory, one component

spread = lambda theta, x: x[0] ** 2
plain = fl.stationary(trap, spread, theta, record)
twin = fl.stationary(trap, spread, theta, record, baseline=fl.Twin(order=2))
exact = jax.grad(boltzmann)(theta)
print(f"{plain}\n\nwith the trap's own model as a twin\n{twin}\n")
for name in KNOBS:
    gain = float((plain.estimate.stderr[name] / twin.estimate.stderr[name]) ** 2)
    print(
        f"Boltzmann: ∂J/∂{name} = {float(exact[name]):.4f}; the twin saves {gain:.1f} times the "
        "record"
    )

# %%
# The first percent of the trace, and both gradients beside Boltzmann's.

figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
left.plot(record.t[: len(x) // 100], x[: len(x) // 100], lw=0.6)
left.set(xlabel="time", ylabel="position")
for shift, answer, label in ((-0.1, plain, "plain"), (0.1, twin, "with a twin")):
    places = np.arange(3) + shift
    slopes = [answer.estimate.gradient[name] for name in KNOBS]
    errors = [2 * answer.estimate.stderr[name] for name in KNOBS]
    right.errorbar(places, slopes, errors, fmt="o", ms=3, capsize=3, label=label)
right.plot(range(3), [exact[name] for name in KNOBS], "kx", label="Boltzmann")
right.set(xticks=range(3), xticklabels=KNOBS, ylabel="∂J ± 2 standard errors")
right.legend(frameon=False)
plt.show()
