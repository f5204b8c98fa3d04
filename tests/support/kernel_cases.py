"""What kernels, on CPU and GPU, are compared with JAX on: JAX compiles each of it once for all."""

import jax
import numpy as np

import fluctua as fl
import own_processes
import problems
from fluctua.core.baselines import time_only
from kept import keep_per_precision

COUNT = 38
"""Trajectories: two blocks of lanes in single precision and five in double, a warp and a part of
one; the last one is not full. Two batches are of equal size, three are not.
"""


@keep_per_precision
def benchmark_process(name):
    """A process of the benchmark, with its objective, parameters and start."""
    return own_processes.PROCESSES[name]()


def problem_in_double(make, start):
    """Process, objective, start, times and θ of a problem, and its context."""
    problem = problems.setting(make, start)
    double = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf, float), tree)
    moving = double(problem.start) if start == "fixed" else problem.start
    numbers = moving, double(problem.t), double(problem.theta)
    return (problem.process, problem.objective, *numbers), problem.context


def know_table(t):
    """A baseline that needs no pilot, which would be one more program for JAX."""
    return time_only(np.linspace(1, 0, len(t)))


def shift_parameters(theta):
    """The parameters of a wrong model."""
    return jax.tree.map(lambda value: 1.1 * value, theta)


def sample(backend, case, baseline, **options):
    """Gradients (E, P) and returns (E,) of a backend."""
    process, objective, start, t, theta = case
    simulator = fl.simulator(process, start, t, backend=backend, **options)
    samples = fl.ppgt(simulator, objective, process=process, baseline=baseline).samples(
        jax.random.key(3), theta, COUNT
    )
    rows = [np.asarray(leaf).reshape(COUNT, -1) for leaf in jax.tree.leaves(samples.gradient)]
    return np.concatenate(rows, axis=1), np.asarray(samples.returns)


def assert_equal(case, place, relative, *, baseline, dtype=None, **options):
    """The kernel of a place gives the gradients and returns of JAX."""
    expected, found = (sample(each, case, baseline, **options) for each in ("jax", place))
    for jax_numbers, kernel_numbers in zip(expected, found, strict=True):
        assert kernel_numbers.dtype == jax_numbers.dtype
        if dtype is not None:
            assert kernel_numbers.dtype == dtype
        np.testing.assert_allclose(
            kernel_numbers, jax_numbers, rtol=0, atol=relative * np.abs(jax_numbers).max()
        )
