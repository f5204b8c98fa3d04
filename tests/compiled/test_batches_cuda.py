"""Sums over batches by a kernel for a GPU are those of JAX; emulated where there is no GPU."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.compiled import cuda
from fluctua.compiled.blocks import gpu
from fluctua.core.baselines import time_only
from fluctua.core.draws import Density, no_noise, philox, philox7
from fluctua.core.estimation import batches
from kernel_cases import know_table
from own_processes import kuramoto
from schedules import SCHEDULES, make_schedule

pytestmark = pytest.mark.long


@pytest.fixture
def gpu_kernels(device):
    """Kernels are made afresh: those of an emulated device are no use to another one."""
    forget = (gpu.forget_kernels, cuda.compile_module.cache_clear, cuda.is_available.cache_clear)
    for each in forget:
        each()
    yield device
    for each in forget:
        each()


def flatten(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def assert_alike(process, objective, start, t, theta, *, count=300, baseline=None, **options):
    """The estimates of a kernel and of JAX agree to rounding."""
    baseline = know_table(t) if baseline is None else baseline
    estimates = []
    for backend in ("jax", "cuda"):
        substrate = fl.simulator(process, start, t, backend=backend, **options)
        estimator = fl.ppgt(substrate, objective, baseline=baseline)
        estimates.append(estimator(jax.random.key(2), theta, count))
    expected, got = estimates
    assert got.batches == expected.batches
    for name in ("gradient", "stderr"):
        a = flatten(getattr(expected, name))
        b = flatten(getattr(got, name))
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-4 * np.abs(a).max())
    np.testing.assert_allclose(got.value, expected.value, rtol=1e-5)


@functools.cache
def network(widths=(3, 9, 7, 3)):
    """A drift of three layers, with noise that depends on state and θ."""
    rng = np.random.default_rng(0)
    theta = {
        "layers": [
            {
                "W": np.asarray(rng.normal(size=(m, n)) / 2, np.float32),
                "b": np.asarray(rng.normal(size=m) / 3, np.float32),
            }
            for n, m in itertools.pairwise(widths)
        ],
        "noise": np.asarray(rng.uniform(0.3, 0.5, 3), np.float32),
        "reward": np.asarray([0.7, -0.4, 0.2], np.float32),
    }

    def drift(theta, x, t, c):
        h = x
        for layer in theta["layers"][:-1]:
            h = jnp.tanh(layer["W"] @ h + layer["b"])
        push = 0.0 if c is None else c
        return theta["layers"][-1]["W"] @ h + theta["layers"][-1]["b"] - x + push * jnp.cos(t)

    objective = fl.Objective(
        running=lambda theta, x: -jnp.sum((x - theta["reward"][0]) ** 2),
        terminal=lambda theta, x: theta["reward"][1] * x[0],
        per_step=lambda theta, x, x_next: theta["reward"][2] * x_next[1] * x[1],
    )
    process = fl.Process(drift, lambda theta, x, t, c: theta["noise"] * (1 + 0.1 * x**2))
    return process, objective, theta


T = np.linspace(0, 0.5, 9)


@pytest.fixture(autouse=True)
def _few_parameters(monkeypatch):
    monkeypatch.setattr(batches, "MIN_PARAMETERS", 100)


def test_network(gpu_kernels):
    assert_alike(*_case(), count=601, baseline="time")


def test_single_precision_throughout(gpu_kernels):
    with jax.enable_x64(False):
        assert_alike(*_case(), count=150, baseline="time")


def test_batches_smaller_than_a_block(gpu_kernels):
    assert_alike(*_case(), count=150, baseline="time")


def _case():
    process, objective, theta = network()
    return process, objective, np.ones(3, np.float32), T, theta


@pytest.mark.parametrize("integrator", ["heun"])
def test_integrators(gpu_kernels, integrator):
    assert_alike(*_case(), integrator=integrator)


@pytest.mark.parametrize("wiener", [philox, philox7], ids=["philox", "philox7"])
def test_generators(gpu_kernels, wiener):
    assert_alike(*_case(), wiener=wiener)


def test_without_noise(gpu_kernels):
    process, objective, start, t, theta = _case()
    values = []
    for backend in ("jax", "cuda"):
        substrate = fl.simulator(process, start, t, backend=backend, wiener=no_noise)
        estimator = fl.ppgt(substrate, objective, baseline=know_table(t))
        values.append(estimator(jax.random.key(2), theta, 300).value)
    np.testing.assert_allclose(values[1], values[0], rtol=1e-5)


def test_context_and_random_start(gpu_kernels):
    process, objective, theta = network()

    def log_density(theta, x, context):
        return -jnp.sum((x - theta["reward"]) ** 2) / 0.18

    def sample(key, theta, context):
        return theta["reward"] + 0.3 * jax.random.normal(key, (3,))

    start = Density(log_density, sample)

    def context(key):
        return jax.random.normal(key, (3,))

    assert_alike(process, objective, start, T, theta, context=context)


def test_couplings(gpu_kernels):
    own = kuramoto()
    assert_alike(own.process, own.objective, own.start, T, own.theta)


def test_elements_that_are_counted_by_columns(gpu_kernels):
    theta = jnp.asarray(np.random.default_rng(4).normal(size=(12, 9)) / 4, jnp.float32)

    def drift(theta, x):
        return jnp.tanh(theta @ x).reshape(3, 4)[:, :3].ravel(order="F") - x

    process = fl.Process(drift, lambda theta, x: 0.3 * jnp.ones_like(x))
    objective = fl.Objective(running=lambda theta, x: -jnp.sum((x - jnp.arange(9) / 9) ** 2))
    start = np.linspace(0, 1, 9, dtype=np.float32)
    assert_alike(process, objective, start, T, theta, count=150)


def test_one_thread_adds_what_goes_to_one_place(gpu_kernels):
    """Forces along edges, several of which end at a node: two threads would lose one of them."""
    rng = np.random.default_rng(3)
    begins, ends = rng.integers(0, 9, (2, 30))
    theta = {
        "force": np.asarray(rng.normal(size=30), np.float32),
        "W": np.asarray(rng.normal(size=(9, 9)) / 4, np.float32),
    }

    def drift(theta, x):
        forces = theta["force"] * jnp.sin(x[begins] - x[ends])
        return jnp.zeros_like(x).at[ends].add(forces) + jnp.tanh(theta["W"] @ x)

    process = fl.Process(drift, lambda theta, x: 0.3 * jnp.ones_like(x))
    objective = fl.Objective(running=lambda theta, x: -jnp.sum((x - 0.5) ** 2))
    assert_alike(process, objective, np.linspace(0, 1, 9), T, theta, count=150)
    (kernel,) = gpu._kernels.values()
    added = [
        part.split("{")[0]
        for part in kernel.kernel.text.functions.split("__syncthreads();")
        if re.search(r"\] \+= v\d+;", part)
    ]
    assert added
    assert all("% TEAM == team" in heads and "= team;" not in heads for heads in added)


def test_a_pilot_keeps_rewards_alone(gpu_kernels, monkeypatch):
    """States of all its trajectories would fill a GPU: its blocks run at once."""
    paths = []
    launch = gpu._launch

    def spy(kernel, arrays, extent, sums):
        results = launch(kernel, arrays, extent, sums)
        paths.append((sums is None, extent.pieces * extent.piece, results["path"].size))
        return results

    monkeypatch.setattr(gpu, "_launch", spy)
    assert_alike(*_case(), count=150, baseline="time")
    (pilot,) = [path for path in paths if path[0]]
    assert pilot == (True, 128, 128 * (len(T) - 1))


def test_double_precision(gpu_kernels):
    process, objective, theta = network()
    with jax.enable_x64(True):
        double = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), theta)
        assert_alike(process, objective, np.ones(3), T, double)


def test_arrays_that_do_not_fit_are_left_to_jax(gpu_kernels):
    with pytest.raises(gpu.Unsupported, match="more than a GPU has memory for"):
        gpu.choose_block_shape(2000, 100, 4, 64, large=True)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_parameters_of_the_terminal_reward_alone(gpu_kernels, weight):
    """Nothing is summed over steps; with weight 0 no parameter does anything."""
    process = fl.Process(lambda theta, x: -x, lambda theta, x: jnp.ones_like(x))

    def end(theta, x):
        return x[0] * (1 + (jnp.sum(jnp.tanh(theta)) if weight else 0.0))

    theta = np.linspace(-1, 1, 140)
    t = np.linspace(0, 1, 4)
    assert_alike(process, fl.Objective(terminal=end), np.ones(3), t, theta, count=140)


def layers(widths):
    """A drift of tanh layers, and its weights."""
    rng = np.random.default_rng(1)
    theta = [
        np.asarray(rng.normal(size=(m, n)) / np.sqrt(n), np.float32)
        for n, m in itertools.pairwise(widths)
    ]

    def drift(theta, x):
        h = x
        for matrix in theta[:-1]:
            h = jnp.tanh(matrix @ h)
        return theta[-1] @ h - x

    process = fl.Process(drift, lambda theta, x: 0.3 * jnp.ones_like(x))
    objective = fl.Objective(running=lambda theta, x: -jnp.sum((x - 0.5) ** 2))
    return process, objective, np.zeros(widths[0], np.float32), np.linspace(0, 0.1, 4), theta


@pytest.mark.parametrize(
    "widths",
    [(3, 37, 41, 3), (17, 129, 31, 17), (4, 129, 79, 4)],
    ids=["in block", "odd", "outside"],
)
def test_products_of_large_layers(gpu_kernels, widths):
    """By tensor cores; sums and weights are in the block's memory or outside of it."""
    count = 150 if widths[1] > 64 else 300
    assert_alike(*layers(widths), count=count)
    (kernel,) = gpu._kernels.values()
    assert kernel.kernel.real == np.float32
    outside = kernel.kernel.text.sizes["PRODUCTS"] > gpu.MAX_BLOCK_SUMS
    assert outside == (widths[1] * widths[2] > gpu.MAX_BLOCK_SUMS)


def test_a_known_table_needs_no_pilot_and_batches_are_compared_on_the_device(gpu_kernels):
    process, objective, start, t, theta = layers((3, 12, 9, 3))
    table = np.linspace(1.0, 0.0, len(t), dtype=np.float32)
    estimates = []
    for backend in ("jax", "cuda"):
        substrate = fl.simulator(process, start, t, backend=backend)
        estimator = fl.ppgt(substrate, objective, baseline=time_only(table))
        estimates.append(estimator(jax.random.key(2), theta, 300))
    expected, got = estimates
    (kernel,) = gpu._kernels.values()
    assert kernel.places is not None
    for name in ("gradient", "stderr", "interval"):
        a = flatten(getattr(expected, name))
        b = flatten(getattr(got, name))
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-4 * np.abs(a).max())


@pytest.mark.parametrize("name", ["interp", "row"])
def test_tables_that_are_read_by_the_time(gpu_kernels, name):
    process, objective = make_schedule(SCHEDULES[name])
    theta = np.asarray(np.sin(np.arange(150)), np.float32)
    assert_alike(process, objective, np.array([0.2, 0.1]), np.linspace(0, 1, 21), theta)
