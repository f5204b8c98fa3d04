"""PPO's surrogate: what it is by hand, and how far it is from J, in closed form for a constant
force.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl

SIGMA, HORIZON, STEPS = 0.7, 2.0, 16
DT = HORIZON / STEPS
PUSHED = fl.Process(lambda f, x: f * jnp.ones(1), lambda f, x: SIGMA * jnp.ones(1))
SQUARE = fl.Objective(terminal=lambda f, x: x[0] ** 2)
OLD, NEW = jnp.array(0.3), jnp.array(0.5)
RUN = fl.simulator(PUSHED, jnp.zeros(1), jnp.linspace(0, HORIZON, STEPS + 1))
PATHS = RUN(jax.random.key(0), OLD, 20_000)


def clipped(theta, epsilon, paths=PATHS, **options):
    return fl.reweighted(PUSHED, SQUARE, theta, [(OLD, paths)], weights=fl.Clip(epsilon), **options)


def test_without_a_clip_it_changes_one_step_at_a_time():
    """E[X_T²] with step n alone at the new force: ((T − Δ)f + Δf')² + σ²T.

    The surrogate adds up their differences.
    """
    found = clipped(NEW, 1e9)
    old, new = float(OLD), float(NEW)
    one = (HORIZON - DT) * old + DT * new
    value = (HORIZON * old) ** 2 + SIGMA**2 * HORIZON + STEPS * (one**2 - (HORIZON * old) ** 2)
    assert abs(found.estimate.value - value) < 4 * found.estimate.value_stderr
    assert abs(found.estimate.gradient - 2 * HORIZON * one) < 4 * found.estimate.stderr
    # the bias, of first order: 2T(T − Δ)(f' − f) is missing
    missing = 2 * HORIZON**2 * new - float(found.estimate.gradient)
    assert abs(missing - 2 * HORIZON * (HORIZON - DT) * (new - old)) < 4 * found.estimate.stderr
    assert missing > 8 * found.estimate.stderr
    assert found.clipped == 0


def test_equals_the_formula_by_hand():
    few = fl.Trajectories(PATHS.t, PATHS.x[:6])
    epsilon = 0.05
    found = clipped(NEW, epsilon, few, baseline="none")
    x = np.asarray(few.x)[..., 0]
    kick, change = np.diff(x, axis=1), float(NEW - OLD)
    rho = np.exp(change * (kick - float(NEW + OLD) / 2 * DT) / SIGMA**2)
    score = (kick - float(NEW) * DT) / SIGMA**2
    advantage = np.broadcast_to(x[:, -1:] ** 2, rho.shape)
    held = np.clip(rho, 1 - epsilon, 1 + epsilon) * advantage
    free = rho * advantage
    np.testing.assert_allclose(
        found.estimate.value, np.mean(x[:, -1] ** 2 + (np.minimum(free, held) - advantage).sum(1))
    )
    np.testing.assert_allclose(
        found.estimate.gradient, np.mean((np.where(free <= held, free, 0) * score).sum(1))
    )
    assert 0 < found.clipped < 1
    np.testing.assert_allclose(found.clipped, np.mean(held < free))


def test_where_the_trajectories_were_taken_it_is_the_plain_estimate():
    few = fl.Trajectories(PATHS.t, PATHS.x[:500])
    found, plain = clipped(OLD, 0.2, few), fl.gradient(PUSHED, SQUARE, OLD, few)
    np.testing.assert_allclose(found.estimate.gradient, plain.gradient, rtol=1e-9)
    np.testing.assert_allclose(found.estimate.value, plain.value, rtol=1e-12)


def test_the_clip_is_blind_to_small_steps():
    """The same distance of the path, 16 times as many steps: fewer of them are held."""
    fine = fl.simulator(PUSHED, jnp.zeros(1), jnp.linspace(0, HORIZON, 16 * STEPS + 1))(
        jax.random.key(1), OLD, 500
    )
    few = fl.Trajectories(PATHS.t, PATHS.x[:500])
    coarse, finer = clipped(NEW, 0.1, few), clipped(NEW, 0.1, fine)
    np.testing.assert_allclose(coarse.kl, finer.kl, rtol=1e-9)
    assert coarse.clipped > 0.05
    assert finer.clipped < coarse.clipped / 10


def test_starts_with_a_density_have_a_ratio_of_their_own():
    """X₀ ~ N(m, 1) and nothing after but noise: one step at the new mean, E[X_T] = m'."""
    process = fl.Process(lambda m, x: jnp.zeros(1), lambda m, x: 0.5 * jnp.ones(1))
    start = fl.Density(
        lambda m, x: -jnp.sum((x - m) ** 2) / 2, lambda key, m: m + jax.random.normal(key, (1,))
    )
    paths = fl.simulator(process, start, jnp.linspace(0, 1, 4))(jax.random.key(2), OLD, 20_000)
    objective = fl.Objective(terminal=lambda m, x: x[0])
    found = fl.reweighted(
        process, objective, NEW, [(OLD, paths)], weights=fl.Clip(1e9), start=start
    )
    assert abs(found.estimate.value - NEW) < 4 * found.estimate.value_stderr
    assert abs(found.estimate.gradient - 1) < 4 * found.estimate.stderr


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="`epsilon`.*-0.1"):
        fl.Clip(-0.1)
    with pytest.raises(ValueError, match="optimal"):
        clipped(NEW, 0.2, baseline="optimal")
