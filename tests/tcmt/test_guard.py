"""Guards against wireheading: a return that amplified noise cannot raise, and its gradient
without bias.
"""

from functools import cache

import jax
import numpy as np
import pytest

from fluctua import tcmt
from fluctua.tcmt import exact

NETWORK = tcmt.chain(3, sigma_w=1.0)
SHORT = {"horizon": 2.0, "dt": 2e-2}
THETA = {
    "omega": np.array([0.2, -0.1, 0.3]),
    "kappa": np.array([0.8, 1.1]),
    "gamma_e": np.array([0.7, 1.6]),
    "gamma": np.array([0.02, 0.05, 0.03]),
}


@cache
def silent():
    """J and its gradient without noise: what both guards measure in a linear network."""
    return exact.value_and_gradient(
        tcmt.transmission(NETWORK.replace(sigma_e=0.0, sigma_r=0.0), **SHORT), THETA
    )


@pytest.mark.long
def test_the_dark_run_takes_away_exactly_the_noise():
    value, gradient = silent()
    guarded, slopes = exact.value_and_gradient(
        tcmt.transmission(NETWORK, guard="dark", **SHORT), THETA
    )
    bare = exact.value(tcmt.transmission(NETWORK, **SHORT), THETA)
    assert bare > 1.02 * value
    assert guarded == pytest.approx(value, rel=1e-12)
    for name in THETA:
        np.testing.assert_allclose(slopes[name], gradient[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("guard", "backend", "count"), [("dark", "cpu", 20_000), ("coherent", "jax", 3000)]
)
def test_guarded_gradients_are_those_without_noise(key, guard, backend, count):
    value, gradient = silent()
    estimate = tcmt.transmission(NETWORK, guard=guard, **SHORT).estimator(backend)(
        key, THETA, count
    )
    assert abs(estimate.value - value) < 4 * estimate.value_stderr
    for name in THETA:
        z = (np.asarray(estimate.gradient[name]) - gradient[name]) / np.asarray(
            estimate.stderr[name]
        )
        assert np.abs(z).max() < 4, name


def test_the_dark_kernel_equals_the_reference(key):
    task = tcmt.transmission(NETWORK, guard="dark", horizon=0.5, dt=1e-2)
    a = task.estimator("jax")(key, THETA, 20)
    b = task.estimator("cpu", dtype="float64")(key, THETA, 20)
    for name in THETA:
        size = np.abs(a.gradient[name]).max()
        np.testing.assert_allclose(b.gradient[name], a.gradient[name], rtol=0, atol=1e-9 * size)


@pytest.mark.long
def test_coherent_power_ignores_noise_of_a_nonlinear_network(key):
    """With a Kerr effect only the mean field counts: |E s⁻|² from one ensemble is Re E[s⁻ s⁻'*]
    of pairs.
    """
    network = NETWORK.replace(chi=0.03)
    pairs = tcmt.transmission(network, guard="coherent", **SHORT).estimator("jax")(key, THETA, 4000)
    plain = tcmt.transmission(network, **SHORT)
    field = (
        plain.estimator("cpu")
        .run(jax.random.fold_in(key, 1), THETA, 40_000, record_every=1)
        .trajectories
    )
    out = np.sqrt(2 * 1.6) * field[:, :-1, 2].mean(axis=0)
    coherent = np.mean(np.abs(out) ** 2) / 100
    assert (
        abs(pairs.value - coherent) < 4 * pairs.value_stderr + 1e-4
    )  # |mean|² of 40,000: 2σ²·2γ_e/4e4/100


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match='None, "dark" or "coherent"; got \'bright\''):
        tcmt.transmission(NETWORK, guard="bright")
    with pytest.raises(ValueError, match='this task has another.*backend="jax"'):
        tcmt.transmission(NETWORK, guard="coherent", **SHORT).estimator("cpu")
    with pytest.raises(ValueError, match="build another task"):
        tcmt.with_noise(tcmt.transmission(NETWORK, guard="coherent", **SHORT), sigma_w=0.1)
