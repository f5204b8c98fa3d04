"""Sums over batches of trajectories: against exact answers and against single gradients."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core import estimate as estimates
from fluctua.core.draws import Density, philox
from fluctua.core.estimation import batches

PARAMETERS = 140


def flatten(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@cache
def forces():
    """dX_i = (θ_i − X_i) dt + σ dW, J = E[Σ a_i X_i(T)]: 140 forces on 20 states, seven each."""
    states = 20
    a = np.linspace(-1, 1, states)

    def drift(theta, x):
        return theta.reshape(states, -1).sum(axis=1) - x

    process = fl.Process(drift, lambda theta, x: 0.5 * jnp.ones_like(x))
    objective = fl.Objective(terminal=lambda theta, x: jnp.sum(a * x))
    theta = jnp.linspace(-1, 1, PARAMETERS)
    t = np.linspace(0, 1, 21)
    dt = t[1] - t[0]
    decay = 1 - dt
    exact = np.repeat(a * (1 - decay**20), PARAMETERS // states)
    return process, objective, theta, np.zeros(states), t, exact


@cache
def network():
    """Two layers, 158 parameters in drift, noise and every reward."""
    rng = np.random.default_rng(0)
    theta = {
        "W1": jnp.asarray(rng.normal(size=(21, 3)) / 2, jnp.float32),
        "b1": jnp.asarray(rng.normal(size=21) / 2, jnp.float32),
        "W2": jnp.asarray(rng.normal(size=(3, 21)) / 4, jnp.float32),
        "noise": jnp.asarray([0.3, 0.4, 0.5], jnp.float32),
        "reward": jnp.asarray(rng.normal(size=3), jnp.float32),
        "start": jnp.asarray(rng.normal(size=2), jnp.float32),
    }

    def drift(theta, x, t, c):
        pull = theta["W2"] @ jnp.tanh(theta["W1"] @ x + theta["b1"])
        return pull - x + (0 if c is None else c) * jnp.sin(t)

    def noise(theta, x, t, c):
        return theta["noise"] * (1 + 0.1 * x**2)

    objective = fl.Objective(
        running=lambda theta, x: theta["reward"][0] * jnp.sum(x**2),
        terminal=lambda theta, x: theta["reward"][1] * x[0],
        per_step=lambda theta, x, x_next: theta["reward"][2] * (x_next[1] - x[1]) ** 2,
        initial=lambda theta, x: theta["start"][0] * x[2],
    )
    return fl.Process(drift, noise), objective, theta


def compare(estimator, theta, count, key=3):
    """Assert that batches and single gradients agree to rounding; return the estimate."""
    estimate = estimator(jax.random.key(key), theta, count)
    single = estimates.reduce_samples(estimator.samples(jax.random.key(key), theta, count))
    assert estimate.batches is not None
    assert single.batches is None
    scale = np.abs(flatten(single.gradient)).max()
    # sums of `count` × T terms in single precision, in another order
    off = np.abs(flatten(estimate.gradient) - flatten(single.gradient)).max()
    assert off < 2e-5 * scale
    np.testing.assert_allclose(estimate.value, single.value, rtol=1e-6)
    known = flatten(single.stderr) > 0
    ratio = flatten(estimate.stderr)[known] / flatten(single.stderr)[known]
    # standard errors from B batches scatter by 1/√(2(B − 1)) each
    tolerance = 5 / np.sqrt(2 * (estimate.batches - 1))
    assert abs(np.median(ratio) - 1) < tolerance
    return estimate


def test_many_forces_against_the_exact_gradient():
    process, objective, theta, start, t, exact = forces()
    estimator = fl.ppgt(fl.simulator(process, start, t, backend="jax"), objective)
    estimate = estimator(jax.random.key(0), theta, 4000)
    assert estimate.batches == 63
    z = (np.asarray(estimate.gradient) - exact) / np.asarray(estimate.stderr)
    # seven forces on a state have one score: 20 numbers of Student's t, 62 degrees
    assert np.abs(z).max() < 4.5
    assert 0.7 < np.std(z) < 1.4
    low, high = (np.asarray(side) for side in estimate.interval)
    assert np.mean((low < exact) & (exact < high)) > 0.8


@pytest.mark.parametrize("integrator", ["euler", "heun"])
def test_batches_agree_with_single_gradients(integrator):
    process, objective, theta = network()
    substrate = fl.simulator(
        process, jnp.ones(3), np.linspace(0, 1, 24), integrator=integrator, backend="jax"
    )
    compare(fl.ppgt(substrate, objective), theta, 1000)


def test_batches_with_context_random_start_and_philox():
    process, objective, theta = network()

    def sample(key, theta, context):
        return jnp.append(theta["start"], 0.0) + 0.3 * jax.random.normal(key, (3,))

    def log_density(theta, x, context):
        return -jnp.sum((x - jnp.append(theta["start"], 0.0)) ** 2) / (2 * 0.09)

    substrate = fl.simulator(
        process,
        Density(log_density, sample),
        np.linspace(0, 1, 18),
        context=lambda key: jax.random.normal(key, (3,)),
        wiener=philox,
        backend="jax",
    )
    compare(fl.ppgt(substrate, objective, baseline="none"), theta, 777)


def test_small_chunks_change_nothing(monkeypatch):
    process, objective, theta = network()
    substrate = fl.simulator(process, jnp.ones(3), np.linspace(0, 1, 24), backend="jax")
    estimator = fl.ppgt(substrate, objective)
    whole = estimator(jax.random.key(1), theta, 1000)
    for path_bytes, rows in ((2**14, 2**9), (2**17, 2**12)):
        monkeypatch.setattr(batches, "PATH_BYTES", path_bytes)
        monkeypatch.setattr(batches, "CPU_NUMBERS", 64 * rows)
        parts = estimator(jax.random.key(1), theta, 1000)
        for a, b in zip(
            (flatten(whole.gradient), flatten(whole.stderr)),
            (flatten(parts.gradient), flatten(parts.stderr)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5 * np.abs(a).max())


def test_plan_keeps_within_memory():
    chunk = batches.plan_chunk(100_000, 2048, 10_000, 404, 50_000)
    assert chunk.batches == 1
    assert chunk.trajectories * 10_000 * 404 <= batches.PATH_BYTES
    assert batches.plan_chunk(2000, 32, 10, 8, 200) == batches.Chunk(63, 32, 2)


@pytest.mark.parametrize("count", [128, 200, 512, 1000, 2000, 2048, 100_000, 1_000_003])
def test_there_are_32_to_64_batches(count):
    size = batches.batch_size(count)
    assert 32 <= -(-count // size) <= 64


def test_errors_of_unequal_batches_are_unbiased():
    """Of normal numbers with variance 4 in batches of 16, the last with 8."""
    rng = np.random.default_rng(1)
    count = 520
    variances = []
    for _ in range(400):
        rows = 2 * rng.normal(size=(count, 1))
        sums = np.add.reduceat(rows, np.arange(0, count, 16))
        moments = estimates.compare_batches(sums, 16, count)
        returns = rows[:, 0]
        estimate = estimates.reduce_batches(np.zeros(1), moments, len(sums), 16, returns)
        np.testing.assert_allclose(estimate.gradient[0], rows.mean(), rtol=1e-4, atol=1e-6)
        variances.append(float(estimate.stderr[0]) ** 2)
    expected = 4 / count
    error = expected * np.sqrt(2 / 32) / np.sqrt(400)  # of a mean of 400 χ² with 32 degrees
    assert abs(np.mean(variances) - expected) < 4 * error


def test_other_baselines_take_single_gradients():
    process, objective, theta, start, t, _ = forces()
    substrate = fl.simulator(process, start, t, backend="jax")
    key = jax.random.key(0)
    assert fl.ppgt(substrate, objective, baseline="mean")(key, theta, 600).batches is None
    few = fl.ppgt(substrate, objective)(key, theta, 127)
    assert few.batches is None


def test_the_printed_estimate_names_its_batches():
    process, objective, theta, start, t, _ = forces()
    estimate = fl.ppgt(fl.simulator(process, start, t, backend="jax"), objective)(
        jax.random.key(0), theta, 600
    )
    assert "from 38 batches of trajectories" in str(estimate)


def test_a_step_that_is_too_large_is_refused_with_its_place():
    process, objective, theta, start, _, _ = forces()
    stiff = fl.Process(lambda theta, x: -1e6 * theta.sum() * x**3, process.noise)
    substrate = fl.simulator(stiff, start + 1, np.linspace(0, 10, 21), backend="jax")
    with pytest.raises(FloatingPointError, match="600 of 600 simulated trajectories overflowed"):
        fl.ppgt(substrate, objective)(jax.random.key(0), theta + 1, 600)
