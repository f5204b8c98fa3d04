"""Estimates of a nonlinear system without closed moments against the partial differential
equations of the paper.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua
from double_well import (
    END,
    OBJECTIVE,
    PROCESS,
    START,
    STEPS,
    THETA,
    euler,
    running,
    solve,
    terminal,
)
from problems import flat, tolerance

E = 20_000


@pytest.mark.long
def test_grid_solution_is_converged_and_is_the_limit_of_the_euler_scheme():
    *_, value, gradient = solve()
    *_, rough_value, rough = solve(points=301, steps=100)
    # Second order: the error of the fine grid is a third of its distance from the rough one.
    # Measured: 7e-6 for J and at most 3e-5 for the gradient, a hundredth of the standard errors
    # below.
    assert abs(value - rough_value) / 3 < 2e-5
    assert np.abs(gradient - rough).max() / 3 < 6e-5
    # Euler's error is first order in Δt (up to 3e-3 here): 2G(Δt/2) − G(Δt) meets Eq. (3) in every
    # parameter.
    fine, coarse = euler(2 * STEPS), euler(STEPS)
    assert abs(2 * fine[0] - coarse[0] - value) < 2e-5
    np.testing.assert_allclose(2 * fine[1] - coarse[1], gradient, atol=1e-4)


def test_estimate_agrees_with_the_adjoint_equation(key):
    *_, value, gradient = solve()
    t = jnp.linspace(0, END, STEPS + 1)
    estimator = fluctua.ppgt(fluctua.simulator(PROCESS, START, t), OBJECTIVE)
    estimate = estimator(key, THETA, E)
    error = flat(estimate.stderr)
    # What Δt = 0.01 does to the expectation is less than half of what chance does to the estimate …
    assert (np.abs(euler(STEPS)[1] - gradient) / error).max() < 0.5
    # … so half a standard error is granted for it, on top of the tolerance for P + 1 comparisons.
    z = np.append(
        (flat(estimate.gradient) - gradient) / error,
        (estimate.value - value) / estimate.value_stderr,
    )
    assert np.abs(z).max() < tolerance(z.size) + 0.5, z
    # Against the gradient of the scheme itself nothing is granted.
    z = (flat(estimate.gradient) - euler(STEPS)[1]) / error
    assert np.abs(z).max() < tolerance(z.size), z
    # Every component is resolved: a lost sign would show as |z| > 12.
    assert (np.abs(gradient) / error).min() > 6


@pytest.mark.long
def test_adjoint_is_the_mean_return_to_go(key):
    since = 0.5
    # Feynman–Kac: λ(x, t) = E[λ̂ | X_t = x], from trajectories that all start at x at time t.
    x, t, adjoint, *_ = solve()
    times = jnp.linspace(since, END, 1 + round((END - since) / 0.01))
    places = (-1.2, 0.3, 1.4)
    for place, k in zip(places, jax.random.split(key, len(places)), strict=True):
        paths = fluctua.simulator(PROCESS, jnp.array([place]), times)(k, THETA, 4000)
        rewards = running(THETA, paths.x[:, :-1, 0], times[:-1])
        to_go = fluctua.returns_to_go(rewards, terminal(THETA, paths.x[:, -1, 0]), jnp.diff(times))
        exact = np.interp(place, x, adjoint[np.searchsorted(t, since - 1e-9)])
        mean, error = to_go[:, 0].mean(), to_go[:, 0].std() / 4000**0.5
        # Half a standard error for Δt, as above; two times and three places make six comparisons.
        assert abs(mean - exact) / error < tolerance(6) + 0.5
