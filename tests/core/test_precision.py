"""Matrix products run in full precision, on a GPU too, which would take TF32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.arrays import jit

HIDDEN = 24


def drift(theta, x):
    return theta["out"] @ jnp.tanh(theta["in"] @ x + theta["bias"]) - x


def network(dtype):
    """A neural drift of 600 weights."""
    rng = np.random.default_rng(7)
    theta = {
        "in": rng.normal(size=(HIDDEN, 12)) / np.sqrt(12),
        "bias": rng.normal(size=HIDDEN),
        "out": rng.normal(size=(12, HIDDEN)) / np.sqrt(HIDDEN),
    }
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), theta)


def test_compiled_products_ask_for_full_precision():
    product = jax.make_jaxpr(jit(lambda a: a @ a))(jnp.eye(3)).eqns[0].params["jaxpr"].eqns[0]
    assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}


def gradient(dtype):
    process = fl.Process(drift, noise=lambda theta, x: 0.5 * jnp.ones_like(x))
    objective = fl.Objective(running=lambda theta, x: -(x @ x))
    t = jnp.linspace(0, 2, 201)
    simulator = fl.simulator(process, jnp.ones(12, dtype), t, backend="jax")
    estimate = fl.ppgt(simulator, objective)(jax.random.key(0), network(dtype), 2000)
    flat = jax.flatten_util.ravel_pytree
    return np.asarray(flat(estimate.gradient)[0], float), np.asarray(
        flat(estimate.stderr)[0], float
    )


def test_single_precision_on_a_gpu_is_single_precision():
    """Rounding of 200 steps in float32 is some 1e-6; TF32 has 10 bits, 5e-4 per product."""
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here: processors multiply in full precision")
    single, _ = gradient(jnp.float32)
    double, _ = gradient(jnp.float64)
    assert np.linalg.norm(single - double) < 1e-4 * np.linalg.norm(double)
