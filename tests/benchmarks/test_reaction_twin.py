"""The comparison of twins on reaction networks: one short line of each table."""

import jax
import numpy as np
import pytest

import reaction_twin

pytestmark = pytest.mark.long


def test_errors_and_bias_of_a_row():
    """Two components of size 3 and 4; estimates 10 % off in the first, without noise."""
    exact = np.array([3.0, 4.0])
    off = np.array([[3.3, 4.0], [3.3, 4.0]])
    row = reaction_twin.Row("weak, t = 2", "some", exact, {100: off, 400: off})
    assert row.error(100) == pytest.approx(0.3 / 5)
    assert row.variance == 0
    assert row.bias == pytest.approx((0.3 / 5, 0.0))


def test_the_twin_beats_the_score(key):
    methods = reaction_twin.methods("weak, t = 2")
    exact = reaction_twin.flatten(
        reaction_twin.association(*reaction_twin.CASES["weak, t = 2"]).exact
    )
    errors = {
        name: np.abs(methods[name](key, 200) - exact).max()
        for name in ("score, mean", "twin, order 2")
    }
    assert errors["twin, order 2"] < 0.02
    assert errors["score, mean"] > errors["twin, order 2"]


def test_the_rival_is_biased():
    pytest.importorskip("stochastix", reason="pip install stochastix==0.2.0")
    gumbel = reaction_twin.use_gumbel("weak, t = 2", 3.0)
    found = gumbel(jax.random.key(0), 400)
    assert np.abs(np.abs(found) - 2.46).max() < 0.15  # the exact gradient is −3.24, 3.58


def test_gains_on_a_hard_network():
    ratios = reaction_twin.compare_variances(reaction_twin.associate_few(2), 500)
    assert ratios["score"][0] == pytest.approx(1)
    assert ratios["order 2"][0] > 50
