"""The return-to-go on grids that are not uniform."""

import jax.numpy as jnp
import numpy as np

from fluctua import returns_to_go


def test_matches_the_sum_as_printed():
    rng = np.random.default_rng(0)
    rewards, terminal = rng.normal(size=(3, 5)), rng.normal(size=3)
    dt = np.array([0.1, 0.2, 0.05, 0.3, 0.15])
    expected = [[terminal[j] + (rewards[j, n:] * dt[n:]).sum() for n in range(6)] for j in range(3)]
    np.testing.assert_allclose(
        returns_to_go(jnp.asarray(rewards), jnp.asarray(terminal), jnp.asarray(dt)), expected
    )
