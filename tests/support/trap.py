"""A trap that is to be moved, as a run of `fluctua.run`: `python tests/support/trap.py FOLDER`."""

import sys

import jax.numpy as jnp
import optax

import fluctua as fl

PROCESS = fl.Process(lambda th, x: th["f"] - x, lambda th, x: 0.3 * jnp.ones_like(x))
OBJECTIVE = fl.Objective(terminal=lambda th, x: -((x[0] - 1) ** 2))
SIMULATOR = fl.simulator(PROCESS, jnp.zeros(1), jnp.linspace(0, 2, 21))
THETA = {"f": jnp.zeros(1)}


def describe(**changes):
    """The training of the trap, with some of its arguments changed."""
    arguments = {
        "estimator": fl.ppgt(SIMULATOR, OBJECTIVE),
        "theta": THETA,
        "optimiser": optax.adam(0.1),
        "trajectories": 20,
        "seed": 3,
    }
    return fl.Training(**{**arguments, **changes})


def run(folder, iterations=40, training=None, **options):
    """Train into a folder, or go on there, with a checkpoint after every iteration."""
    training = describe() if training is None else training
    return fl.run(training, iterations, folder, checkpoint_seconds=0.0, **options)


if __name__ == "__main__":
    run(sys.argv[1])
