"""What a wrong model costs: in the twin alone, variance; in the score too, a bias that no error bar
shows.

An Ornstein–Uhlenbeck process dX = −k(X − rest)dt + σ dW whose gradient is known exactly for the
Euler scheme. The model has every parameter wrong by the same factor, and the trajectories are those
of the device.

    python benchmarks/wrong_model.py
"""

import argparse
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import fluctua as fl

T = jnp.linspace(0, 2, 17)
THETA = {"k": jnp.array(0.6), "rest": jnp.array(0.5), "sigma": jnp.array(1.0)}
PROCESS = fl.Process(
    lambda th, x: -th["k"] * (x - th["rest"]), lambda th, x: th["sigma"] * jnp.ones(1)
)
OBJECTIVE = fl.Objective(lambda th, x: 0.4 * x[0] - x[0] ** 2, lambda th, x: -((x[0] - 0.4) ** 2))
START = jnp.array([-0.8])


def exact():
    """∇J of the Euler scheme: mean and variance obey a closed recursion, and J is quadratic."""

    def value(th):
        m, v, total = START[0], 0.0, 0.0
        for dt in np.diff(np.asarray(T)):
            total += (0.4 * m - m**2 - v) * dt
            f = 1 - th["k"] * dt
            m, v = m + th["k"] * (th["rest"] - m) * dt, f**2 * v + th["sigma"] ** 2 * dt
        return total - (m - 0.4) ** 2 - v

    return jax.grad(value)(THETA)


def bias(factor, name, data):
    """(relative bias of ∂J/∂k, its standard error) with every parameter of the model `factor`
    times the device's.
    """

    def wrong(th):
        return jax.tree.map(lambda v: factor * v, th)

    where = {
        "twin": (THETA, fl.Twin(theta=wrong)),
        "twin and score": (wrong(THETA), fl.Twin()),
        "score": (wrong(THETA), "time"),
    }
    theta, baseline = where[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the residual guard sees 20 %, as it should
        estimate = fl.gradient(PROCESS, OBJECTIVE, theta, data, baseline=baseline)
    truth = float(exact()["k"])
    return float(estimate.gradient["k"]) / truth - 1, float(estimate.stderr["k"]) / abs(truth)


def trajectories(count, seed=1):
    """Of the device."""
    return fl.simulator(PROCESS, START, T)(jax.random.key(seed), THETA, count)


def main():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--trajectories", type=int, default=200_000)
    data = trajectories(options.parse_args().trajectories)
    print("relative error of ∂J/∂k, every parameter of the model wrong by")
    for factor in (1.0, 1.05, 1.2):
        for name in ("twin", "twin and score", "score"):
            off, error = bias(factor, name, data)
            print(f"  {factor - 1:4.0%} in the {name:<15} {off:+7.1%} ± {error:.1%}")


if __name__ == "__main__":
    main()
