"""A small process with a context, one key, and estimates that must be the same however
trajectories come.
"""

import jax
import jax.numpy as jnp
import numpy as np

import fluctua as fl

THETA = {"k": jnp.asarray(0.8), "s": jnp.asarray(0.4)}
PROCESS = fl.Process(
    drift=lambda theta, x, t, context: -theta["k"] * x + context * jnp.cos(t),
    noise=lambda theta, x: theta["s"] * jnp.ones_like(x),
)
OBJECTIVE = fl.Objective(lambda theta, x, t: jnp.sum(x**2) * theta["k"], lambda theta, x: x[0])
T = np.r_[np.linspace(0, 1, 13), 1.3, 1.7]
KEY = jax.random.key(3)
RUN = fl.simulator(
    PROCESS, jnp.array([0.3, -0.2]), T, context=lambda key: jax.random.normal(key, (2,))
)


def same(a, b):
    for left, right in zip(jax.tree.leaves(a[:-1]), jax.tree.leaves(b[:-1]), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12)
    assert a.count == b.count


def store(count):
    """The trajectories that an estimator with key KEY streams."""
    return RUN(jax.random.split(KEY)[0], THETA, count)
