"""How results print."""

import jax.numpy as jnp
import pytest

from fluctua import Estimate
from fluctua.core.text import with_error


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.312123, 0.0042, "0.3121 ± 0.0042"),
        (-12.345, 0.5, "-12.35 ± 0.50"),
        (1234.5, 120.0, "1.23e+03 ± 1.2e+02"),
        (1e-12, 2e-13, "1e-12 ± 2e-13"),
        (0.5, 0.0, "0.5 ± 0"),
        (0.5, float("nan"), "0.5 ± ?"),
    ],
)
def test_digits_follow_the_error(value, error, text):
    assert with_error(value, error) == text


def test_estimate_prints_the_components_that_stand_out():
    g = {"a": jnp.arange(20.0), "b": jnp.asarray(-3.0)}
    e = {"a": jnp.ones(20), "b": jnp.asarray(0.1)}
    text = str(Estimate(g, e, g, jnp.asarray(0.25), jnp.asarray(0.01), 1500))
    assert "J = 0.250 ± 0.010   (1,500 trajectories)" in text
    assert "∂J/∂b" in text
    assert "∂J/∂a[19]" in text
    assert "∂J/∂a[0]" not in text
    assert "21 components in all" in text
