"""Signal to noise
===============

Train a detector for its mean²/variance: a function of averages, not an average.

A cantilever (position, velocity) in noise is pushed by a weak force and read out at the time 6. Its
damping, and for how long the force is on, may be chosen. No reward of a single run says how good
the choice was: the ratio is of many runs together, J = F(E[x], E[x²]). Its gradient is F' times
those of the two averages, without the bias of plugging in. Run it with
`python examples/signal_to_noise.py`.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import fluctua as fl

T = jnp.linspace(0.0, 6.0, 301)


def drift(theta, x, t):
    on = jax.nn.sigmoid((jnp.exp(theta["width"]) - t) / 0.1)
    return jnp.array([x[1], 0.6 * on - x[0] - jnp.exp(theta["damping"]) * x[1]])


process = fl.Process(drift, noise=lambda theta, x: jnp.array([0.0, 0.25]))
simulator = fl.simulator(process, jnp.zeros(2), T)
readout = fl.Objective(terminal=lambda theta, x: x[0])
square = fl.Objective(terminal=lambda theta, x: x[0] ** 2)
ratio = fl.function_of_means(
    lambda mean, mean_square: mean**2 / (mean_square - mean**2), readout, square
)
START = {"damping": jnp.log(0.3), "width": jnp.log(4.0)}


def exact_ratio(theta):
    """By the recursion of mean and covariance: the drift is linear."""
    dt = T[1] - T[0]
    a = jnp.eye(2) + dt * jnp.array([[0.0, 1.0], [-1.0, -jnp.exp(theta["damping"])]])

    def step(carry, t):
        m, p = carry
        return (
            m + dt * drift(theta, m, t),
            a @ p @ a.T + dt * jnp.diag(jnp.array([0.0, 0.25**2])),
        ), None

    (m, p), _ = jax.lax.scan(step, (jnp.zeros(2), jnp.zeros((2, 2))), T[:-1])
    return m[0] ** 2 / p[0, 0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--count", type=int, default=500, help="trajectories per iteration")
    options = parser.parse_args()
    estimator = fl.ppgt(simulator, ratio)
    first, exact = estimator(jax.random.key(1), START, 2000), jax.grad(exact_ratio)(START)
    for name in START:
        print(
            f"∂J/∂{name} = {first.gradient[name]:.2f} ± {first.stderr[name]:.2f}, exactly "
            f"{exact[name]:.2f}"
        )
    training = fl.Training(estimator, START, optax.adam(0.05), trajectories=options.count)
    records = list(fl.train(training, iterations=options.iterations))
    last = records[-1]
    print(
        f"signal to noise: {exact_ratio(START):.3f} before, {exact_ratio(last.next_theta):.3f} "
        "after, exactly"
    )
    print({name: round(float(jnp.exp(value)), 2) for name, value in last.next_theta.items()})
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    values = [record.estimate.value for record in records]
    errors = [record.estimate.value_stderr for record in records]
    axes.errorbar(range(len(records)), values, errors, fmt=".", lw=0.8, label="estimated")
    axes.plot([exact_ratio(record.theta) for record in records], "k", lw=1, label="exact")
    axes.set(xlabel="iteration", ylabel="signal to noise ± one s.e.")
    axes.legend(frameon=False)
    plt.show()
