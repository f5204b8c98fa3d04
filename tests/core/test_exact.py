"""Estimates against exact gradients, in standard errors, for every start, score and source of
paths.

E = 20,000 puts every component of every problem at least eight standard errors from zero (checked
below), so that a lost sign shows as |z| > 16 and a lost factor of two as |z| > 4. `tolerance` is
the |z| that the largest of the P + 1 comparisons of a test exceeds by chance once in a thousand
seeds, about 3.9."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua
from problems import (
    exact_return,
    flat,
    multiplicative,
    non_normal,
    ornstein_uhlenbeck,
    problem,
    tolerance,
    without_noise_parameters,
    z_scores,
)

E = 20_000
STEP = fluctua.scores.Step(
    jnp.array([0.3, -0.2, 0.9]), jnp.array([0.4, 0.2, 0.7]), 0.3, 0.07, {"force": 1.3}
)


def assert_agrees(estimate, the):
    z = z_scores(estimate, the)
    assert np.abs(z).max() < tolerance(z.size), z


def estimate_recorded(key, the, count=E, **options):
    """The estimate from paths that are only given, not simulated on the way."""
    paths = the.simulator(key, the.theta, count)
    return fluctua.gradient(
        the.process, the.objective, the.theta, paths, start=the.moving_start, **options
    )


def test_the_reference_itself_is_the_textbook_ornstein_uhlenbeck_chain():
    # Mean and variance of x' = ax + c + s·z in closed form, a = 1 − kΔt, s² = σ²Δt: no recursion or
    # autodiff.
    the = problem(ornstein_uhlenbeck)
    k, rest, sigma, gain, mean, spread = (
        float(np.squeeze(the.theta[name]))
        for name in ("k", "rest", "sigma", "gain", "mean", "spread")
    )
    dt, n = float(the.t[1]), np.arange(the.t.size)
    a = (1 - k * dt) ** n
    m = rest + (mean - rest) * a
    v = spread**2 * a**2 + sigma**2 * dt * (1 - a**2) / (1 - (1 - k * dt) ** 2)
    value = np.sum(gain * m[:-1] - m[:-1] ** 2 - v[:-1]) * dt - (m[-1] - gain) ** 2 - v[-1]
    np.testing.assert_allclose(the.exact_value, value, rtol=1e-12)
    # ∂J/∂spread, the derivative by hand: only v depends on it.
    slope = -2 * spread * (np.sum(a[:-1] ** 2) * dt + a[-1] ** 2)
    np.testing.assert_allclose(the.exact_gradient["spread"], slope, rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (ornstein_uhlenbeck, "density"),
        pytest.param(multiplicative, "fade beyond", marks=pytest.mark.long),
        (non_normal, "fade part"),
    ],
)
def test_simulated(key, make, kind):
    the = problem(make, kind)
    assert_agrees(the.estimator()(key, the.theta, E), the)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (ornstein_uhlenbeck, "fixed"),
        pytest.param(multiplicative, "fade 0", marks=pytest.mark.long),
        (non_normal, "density"),
    ],
)
def test_recorded(key, make, kind):
    the = problem(make, kind)
    estimate = estimate_recorded(key, the)
    assert_agrees(estimate, the)
    # The comparison can see a factor of two in every component. (The shortest fade has a larger
    # variance.)
    if kind != "fade 0":
        assert (np.abs(flat(the.exact_gradient)) / flat(estimate.stderr)).min() > 8


@pytest.mark.long
def test_drift_score_recorded(key):
    the = without_noise_parameters(multiplicative, "fixed")
    assert_agrees(estimate_recorded(key, the, score=fluctua.scores.drift_score), the)


def test_drift_score_is_the_full_score_where_the_noise_has_no_parameters():
    the = without_noise_parameters(non_normal)
    scores = [
        jax.jit(lambda th, score=score: score(the.process, th, STEP))(the.theta)
        for score in (fluctua.scores.drift_score, fluctua.scores.full_score)
    ]
    np.testing.assert_allclose(flat(scores[0]), flat(scores[1]), rtol=1e-12)


def test_noise_as_products_and_diffusion_as_products_are_the_noise_matrix():
    the = problem(non_normal)
    noise = the.process.noise
    products = [
        the.process._replace(
            noise=fluctua.NoiseProduct(lambda th, x, t, c, dw: noise(th, x, t, c) @ dw, width=4)
        ),
        the.process._replace(
            noise=None,
            diffusion=lambda th, x, t, c, v: noise(th, x, t, c) @ (noise(th, x, t, c).T @ v) / 2,
        ),
    ]
    scores = [
        jax.jit(lambda th, process=process: fluctua.scores.full_score(process, th, STEP))(the.theta)
        for process in (the.process, *products)
    ]
    for score in scores[1:]:
        np.testing.assert_allclose(flat(score), flat(scores[0]), rtol=1e-10)


@pytest.mark.long
def test_a_prepared_start_that_depends_on_theta_but_not_on_chance(key):
    # X₀ = mean: the limit spread → 0 of the Gaussian start, which has no density.
    whole = problem(ornstein_uhlenbeck, "fade part")
    point = {**whole.theta, "spread": jnp.zeros(())}
    at_a_point = lambda th: exact_return(
        *whole[:2], whole.t, th, th["mean"], jnp.zeros((1, 1)), 0.0, 0.0
    )
    value, slope = jax.jit(jax.value_and_grad(at_a_point))(point)
    drop = lambda tree: {name: v for name, v in tree.items() if name != "spread"}
    the = whole._replace(
        start=fluctua.Reparameterised(lambda th, c: th["mean"], fade=0.7),
        context=None,
        theta=drop(point),
        exact_value=value,
        exact_gradient=drop(slope),
    )
    assert_agrees(the.estimator()(key, the.theta, E), the)
