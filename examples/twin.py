"""Digital twin
============

A twin that is 10 % wrong: far smaller error bars, no bias, and a certificate of its error.

A damped pendulum in a noisy bath is pushed by a force with three trained amplitudes, to come to
rest at an angle of one radian. Its twin has stiffness and friction 10 % too large. Run it with
`python examples/twin.py`.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fluctua as fl

TIMES = jnp.linspace(0, 3, 301)
NOISE = jnp.array([0.05, 0.1])  # of angle and speed


def force(theta, t):
    return jnp.sum(theta["push"] * jnp.exp(-((t - jnp.arange(3.0)) ** 2)))


def drift(theta, x, t):
    angle, speed = x
    return jnp.array(
        [speed, force(theta, t) - theta["stiffness"] * jnp.sin(angle) - theta["friction"] * speed]
    )


def ten_percent_off(theta):
    return {**theta, "stiffness": 1.1 * theta["stiffness"], "friction": 1.1 * theta["friction"]}


process = fl.Process(drift, noise=lambda theta, x: NOISE)
rest = fl.Objective(terminal=lambda theta, x: -((x[0] - 1) ** 2) - x[1] ** 2)
pendulum = fl.simulator(process, start=jnp.zeros(2), t=TIMES)
theta = {
    "push": jnp.array([0.5, 0.5, 0.5]),
    "stiffness": jnp.array(2.0),
    "friction": jnp.array(0.5),
}


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="trajectories per estimate")
    count = parser.parse_args().count
    key = jax.random.key(2)

    # The pendulum here is a simulation, so its true gradient can be had, as it could not in a
    # laboratory.
    true = fl.reference.pathwise(rest, pendulum)(jax.random.key(1), theta, 20 * count)
    plain = fl.ppgt(pendulum, rest)(key, theta, count)
    rough = fl.ppgt(pendulum, rest, baseline=fl.Twin(ten_percent_off))
    estimates = {
        "no twin, optimal baseline": plain,
        "twin 10 % off": rough(key, theta, count),
        "exact twin": fl.ppgt(pendulum, rest, baseline=fl.Twin())(key, theta, count),
        "exact twin, second order": fl.ppgt(pendulum, rest, baseline=fl.Twin(order=2))(
            key, theta, count
        ),
    }
    print(f"{'':28}{'variance, times lower':>22}   {'largest |error| / s.e.':>22}")
    for name, estimate in estimates.items():
        gain = np.median((flat(plain.stderr) / flat(estimate.stderr)) ** 2)
        error = np.hypot(flat(estimate.stderr), flat(true.stderr))
        z = np.abs(flat(estimate.gradient) - flat(true.gradient)) / error
        print(f"{name:<28}{gain:>22.1f}   {z.max():>22.1f}")

    weighted = fl.ShrunkCorrection(
        rough, forget_after=100
    )  # as a training would use it, θ moving little from call to call
    for call in range(10):
        weighted(jax.random.fold_in(key, call), theta, count)
    print(f"\n{weighted.certificate}")

    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for k, (name, estimate) in enumerate(estimates.items()):
        places = np.arange(5) + 0.15 * (k - 1.5)
        off = flat(estimate.gradient) - flat(true.gradient)
        errors = 2 * np.hypot(flat(estimate.stderr), flat(true.stderr))
        axes.errorbar(places, off, errors, fmt="o", ms=3, capsize=2, label=name)
    axes.axhline(0, color="0.6", lw=0.8)
    names = ["friction", "push 0", "push 1", "push 2", "stiffness"]
    axes.set(xticks=range(5), xticklabels=names, ylabel="error of ∂J ± 2 s.e.")
    axes.legend(frameon=False, ncols=2, fontsize="small")
    plt.show()
