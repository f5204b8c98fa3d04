"""Local linearisation: exact for linear processes at any interval, second order for others."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm, solve_continuous_lyapunov

import fluctua as fl
from fluctua.core import check
from fluctua.core.integrators import integrate_exponential
from fluctua.core.scores import (
    euler,
    local_linear,
    local_linear_score,
)
from numeric import value_and_slope
from problems import flat, tolerance

MIXING = np.array([[0.5, 0.1], [-0.2, 0.4]])
LINEAR = fl.Process(
    drift=lambda th, x, t, c: th["a"] @ x + th["b"] * t + 0.3,
    noise=lambda th, x, t, c: th["s"] * jnp.asarray(MIXING),
)
THETA = {
    "a": jnp.array([[-0.5, 2.0], [-1.5, -0.2]]),
    "b": jnp.array([0.4, -0.7]),
    "s": jnp.array(1.3),
}


compute_law = jax.jit(local_linear, static_argnums=0)
compute_score = jax.jit(local_linear_score, static_argnums=0)


@pytest.mark.parametrize("interval", [1e-3, 0.3, 4.0])
def test_linear_process_is_exact(interval):
    x = np.array([0.7, -0.4])
    step = fl.scores.Step(x, x, np.asarray(0.6), np.asarray(interval))
    mean, covariance = compute_law(LINEAR, THETA, step)
    a, b = np.asarray(THETA["a"]), np.asarray(THETA["b"])
    # z = (x, s, 1) with s the time since the start is linear and autonomous: its exponential is the
    # whole answer
    big = np.zeros((4, 4))
    big[:2, :2], big[:2, 2], big[:2, 3], big[2, 3] = a, b, b * 0.6 + 0.3, 1.0
    exact = (expm(big * interval) @ np.array([*x, 0.0, 1.0]))[:2]
    np.testing.assert_allclose(mean, exact, rtol=1e-9)
    power = float(THETA["s"]) ** 2 * MIXING @ MIXING.T
    forever = solve_continuous_lyapunov(a, -power)
    f = expm(a * interval)
    np.testing.assert_allclose(covariance, forever - f @ forever @ f.T, rtol=1e-8, atol=1e-10)


@pytest.mark.long
def test_score_is_that_of_euler_for_short_steps():
    x, dt = np.array([0.7, -0.4]), 1e-6
    step = fl.scores.Step(x, x + np.array([3e-4, -5e-4]), np.asarray(0.6), np.asarray(dt))
    ours = compute_score(LINEAR, THETA, step)
    theirs = jax.jit(fl.scores.full_score, static_argnums=0)(LINEAR, THETA, step)
    np.testing.assert_allclose(flat(ours), flat(theirs), rtol=1e-4, atol=1e-3)


@pytest.mark.long
def test_nonlinear_mean_has_its_second_order():
    """E[X_Δ] of dX = −X³dt + σdW: the generator gives x + Lx Δ + L²x Δ²/2, L = μ∂ + Q∂²; Euler
    stops at Δ.
    """
    process = fl.Process(lambda th, x: -th * x**3, lambda th, x: 0.8 * jnp.ones(1))
    checked = check.process(process)
    q, x, theta = 0.32, 1.4, 1.0
    mu, mu1, mu2 = -(x**3), -3 * x**2, -6 * x
    second = mu * mu1 + q * mu2
    error = {"ours": [], "euler": []}
    for interval in (2e-3, 1e-3):
        step = fl.scores.Step(np.array([x]), np.array([x]), np.asarray(0.0), np.asarray(interval))
        exact = x + mu * interval + second * interval**2 / 2
        for name, law in (("ours", compute_law), ("euler", jax.jit(euler, static_argnums=0))):
            error[name].append(abs(float(law(checked, theta, step).mean[0]) - exact))
    assert 7 < error["ours"][0] / error["ours"][1] < 9  # third order is what is left
    assert 3.9 < error["euler"][0] / error["euler"][1] < 4.1


def test_coarse_ou_gradient_is_exact_and_euler_is_not(key):
    """dX = −kX dt + σ dW sampled every 0.5: X' = e^{−kΔ}X + noise, and ∂kE[X_T²] has a closed
    form.
    """
    k, s, interval, steps = 0.9, 0.7, 0.5, 4
    rng = np.random.default_rng(11)
    f = np.exp(-k * interval)
    spread = s * np.sqrt((1 - f**2) / (2 * k))
    x = np.full((20_000, steps + 1, 1), 1.2)
    for n in range(steps):
        x[:, n + 1] = f * x[:, n] + spread * rng.normal(size=(len(x), 1))
    process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: th["s"] * jnp.ones(1))
    objective = fl.Objective(terminal=lambda th, x: x[0] ** 2)
    theta = {"k": jnp.asarray(k), "s": jnp.asarray(s)}
    data = fl.Trajectories(interval * np.arange(steps + 1), x)

    def exact(th):
        decay = np.exp(-2 * th["k"] * interval * steps)
        return 1.44 * decay + th["s"] ** 2 * (1 - decay) / (2 * th["k"])

    _, truth = value_and_slope(exact, theta)
    ours = fl.gradient(
        process, objective, theta, data, score=local_linear_score, baseline="optimal"
    )
    z = (flat(ours.gradient) - flat(truth)) / flat(ours.stderr)
    assert np.abs(z).max() < tolerance(2)
    theirs = fl.gradient(process, objective, theta, data, baseline="optimal")
    z = (flat(theirs.gradient) - flat(truth)) / flat(theirs.stderr)
    assert np.abs(z).max() > 10


def test_start_that_moves_needs_the_full_score():
    start = fl.Reparameterised(lambda th, c: th["a"][0])
    data = fl.Trajectories(np.array([0.0, 1.0]), np.zeros((3, 2, 2)))
    with pytest.raises(ValueError, match="score=full_score"):
        fl.gradient(
            LINEAR,
            fl.Objective(terminal=lambda th, x: x[0]),
            THETA,
            data,
            start=start,
            score=local_linear_score,
        )


@pytest.mark.long
def test_a_bending_drift_is_refused_for_parameters_of_the_noise():
    """Double well: ∂J/∂s of a local linearisation is 0.975 where 1.102 is right at Δ = 0.05."""
    well = fl.Process(lambda th, x: th["a"] * (x - x**3), lambda th, x: th["s"] * jnp.ones_like(x))
    theta = {"a": jnp.array(1.0), "s": jnp.array(0.7)}
    reward = fl.Objective(terminal=lambda th, x: x[0] ** 2)
    t = np.linspace(0, 1, 2001)
    x = np.asarray(fl.simulator(well, np.ones(1), t)(jax.random.key(0), theta, 20).x)
    every = lambda n: fl.Trajectories(t[::n], x[:, ::n])
    estimate = lambda data, theta, process=well: fl.gradient(
        process, reward, theta, data, score=local_linear_score, baseline="none"
    )
    with pytest.raises(ValueError, match=r"not for theta\['s'\] here.*leave them out"):
        estimate(every(100), theta)
    estimate(every(10), theta)  # Δ = 0.005
    fixed = well._replace(noise=lambda th, x: 0.7 * jnp.ones_like(x))
    estimate(every(100), {"a": theta["a"]}, fixed)
    linear = well._replace(drift=lambda th, x: -th["a"] * x)
    straight = np.asarray(fl.simulator(linear, np.ones(1), t)(jax.random.key(1), theta, 20).x)
    estimate(fl.Trajectories(t[::200], straight[:, ::200]), theta, linear)


@pytest.mark.parametrize("order", [1, 2])
def test_integrals_of_an_exponential_are_exact_with_their_derivatives(order):
    """φ_k(z) = Σ zⁿ/(n+k)!, whose derivative in closed form is φ_k − kφ_{k+1}; a series of exact
    fractions on both sides of |z| = 1, where the method changes.
    """

    def exact(z, derivative):
        z = Fraction(z)
        terms = range(derivative, 80)
        slopes = (
            Fraction(math.perm(n, derivative), math.factorial(n + order)) * z ** (n - derivative)
            for n in terms
        )
        return float(sum(slopes))

    function = lambda z: integrate_exponential(order, z)
    for derivative in range(4):
        compiled = jax.jit(function)
        for z in (-6.5, -1.001, -0.999, -1e-3, 0.0, 0.4, 1.001, 3.0):
            value = float(compiled(z))
            np.testing.assert_allclose(value, exact(z, derivative), rtol=1e-11)
        function = jax.grad(function)


APART = check.process(
    fl.Process(
        lambda th, x, t: -th["k"] * x - th["c"] * x**3 + th["b"] * jnp.sin(t),
        lambda th, x: th["s"] * (1 + 0.1 * x**2),
    )
)


@pytest.mark.parametrize("interval", [1e-3, 0.3, 4.0])
def test_one_state_is_as_two_that_do_not_meet(interval):
    """The law of one state has no matrices, that of two has: the same numbers on the same step."""
    theta = {
        "k": jnp.array(0.9),
        "c": jnp.array(0.2),
        "b": jnp.array(0.4),
        "s": jnp.array(0.7),
    }
    ends = np.array([[0.7, -0.4], [0.5, 0.1]])

    def step(which):
        return fl.scores.Step(*ends[:, which], np.asarray(0.6), np.asarray(interval))

    both = compute_law(APART, theta, step([0, 1]))
    score = flat(compute_score(APART, theta, step([0, 1])))
    apart = np.zeros_like(score)
    for i in range(2):
        one = compute_law(APART, theta, step([i]))
        np.testing.assert_allclose(one.mean[0], both.mean[i], rtol=1e-9)
        np.testing.assert_allclose(one.covariance[0, 0], both.covariance[i, i], rtol=1e-9)
        apart += flat(compute_score(APART, theta, step([i])))
    np.testing.assert_allclose(apart, score, rtol=1e-8, atol=1e-10)
