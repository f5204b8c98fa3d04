"""A trap that is to be moved, as a run of `fluctua.run`: `python tests/support/trap.py FOLDER
run|resume`.
"""

import sys

import jax.numpy as jnp
import optax

import fluctua as fl

PROCESS = fl.Process(lambda th, x: th["f"] - x, lambda th, x: 0.3 * jnp.ones_like(x))
OBJECTIVE = fl.Objective(terminal=lambda th, x: -((x[0] - 1) ** 2))
SIMULATOR = fl.simulator(PROCESS, jnp.zeros(1), jnp.linspace(0, 2, 21))
THETA = {"f": jnp.zeros(1)}
OPTIONS = {"count": 20, "iterations": 40, "seed": 3, "checkpoint_seconds": 0.0}


def arguments():
    return fl.ppgt(PROCESS, OBJECTIVE, SIMULATOR), THETA, optax.adam(0.1)


if __name__ == "__main__":
    how = {"run": fl.run, "resume": fl.resume}[sys.argv[2]]
    how(sys.argv[1], *arguments(), **OPTIONS)
