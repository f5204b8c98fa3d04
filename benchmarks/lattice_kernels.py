"""The generated kernel on resonator lattices, beside the kernels that were written for them by
hand, on the CPU.

The same noise (Philox), so that gradients are compared too. CPU time of the process, best of five
calls: `python benchmarks/lattice_kernels.py`.
"""

import time

import jax
import numpy as np

import fluctua as fl
from fluctua import tcmt
from fluctua.core.draws import philox

LATTICES = {"5 × 8": (tcmt.rectangular(5, 8), 512, 2000), "11 × 13": (tcmt.paper(), 256, 500)}


def seconds(call, repeats=5):
    """CPU time of all threads."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        call()
        best = min(best, time.process_time() - began)
    return best


def measure(network, count, steps):
    """ns a site and step of either kernel, and their largest difference relative to the largest
    gradient.
    """
    task = tcmt.transmission(network, horizon=steps * 1e-3)
    theta = tcmt.initial_parameters(jax.random.key(0), network, train=("omega", "kappa"))
    simulator = fl.simulator(task.process, task.start, task.t, wiener=philox, backend="cpu")
    generated = fl.ppgt(task.process, task.objective, simulator, baseline="none")
    by_hand = task.estimator("cpu", baseline="none")
    size, gradients = count * steps * network.sites, []
    for estimator in (generated, by_hand):

        def call(estimator=estimator):
            return estimator(jax.random.key(1), theta, count)

        gradients.append(np.concatenate(jax.tree.leaves(call().gradient)))
        yield 1e9 * seconds(call) / size
    yield np.abs(gradients[0] - gradients[1]).max() / np.abs(gradients[1]).max()


if __name__ == "__main__":
    for name, (network, count, steps) in LATTICES.items():
        generated, by_hand, difference = measure(network, count, steps)
        print(
            f"{name}: generated {generated:.2f} ns a site and step of CPU time, by hand "
            f"{by_hand:.2f}; ",
            end="",
        )
        print(f"gradients differ by {difference:.0e}")
