"""Seconds of one estimate with a dense noise matrix that is the same everywhere: 1,000 trajectories
of 100 steps.

python benchmarks/dense_noise.py --size 200
"""

import argparse
import time

import jax
import jax.numpy as jnp

import fluctua as fl


def estimator(size, steps):
    """A chain of `size` overdamped beads whose noise is correlated along it."""
    sigma = jnp.exp(-jnp.abs(jnp.arange(size)[:, None] - jnp.arange(size)[None, :]) / 3.0)
    process = fl.Process(lambda k, x: -k * x, lambda k, x: sigma)
    objective = fl.Objective(terminal=lambda k, x: jnp.sum(x**2))
    return fl.ppgt(
        process, objective, fl.simulator(process, jnp.ones(size), jnp.linspace(0, 1, steps + 1))
    )


def main():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("size", 200), ("trajectories", 1000), ("steps", 100)):
        options.add_argument(f"--{name}", type=int, default=default)
    arguments = options.parse_args()
    run, theta = estimator(arguments.size, arguments.steps), jnp.ones(arguments.size)
    seconds = []
    for key in range(3):
        begun = time.perf_counter()
        jax.block_until_ready(run(jax.random.key(key), theta, arguments.trajectories).gradient)
        seconds.append(time.perf_counter() - begun)
    print(
        f"M = {arguments.size}: {min(seconds[1:]):.2f} s an estimate, {seconds[0]:.2f} s with "
        "compilation"
    )


if __name__ == "__main__":
    main()
