"""The twin correction against exact gradients, with twins that are right and 20 % wrong in every
parameter.

E = 8,000 puts every component eight standard errors from zero (checked below); test_exact needs
20,000. Where V is exact some components have no variance at all; `ROUNDING` stands in for their
standard errors, a thousand roundings of the largest component.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from double_well import OBJECTIVE, PROCESS, START, STEPS, THETA, euler
from fluctua.core.estimation.method import sum_parts
from problems import (
    flat,
    multiplicative,
    non_normal,
    ornstein_uhlenbeck,
    problem,
    tolerance,
    without_noise_parameters,
)

E = 8_000
ERRORS = (0.0, 0.2)
ROUNDING = 1e3 * np.finfo(float).eps


@cache
def off(error):
    """A twin whose every parameter is wrong by this fraction."""
    return lambda theta: jax.tree.map(lambda v: (1 + error) * v, theta)


def compute_z(estimate, gradient, value=None):
    """(estimate − exact)/standard error of every component, and of J last if it is known."""
    exact = flat(gradient)
    z = (flat(estimate.gradient) - exact) / np.hypot(
        flat(estimate.stderr), ROUNDING * np.abs(exact).max()
    )
    return z if value is None else np.append(z, (estimate.value - value) / estimate.value_stderr)


def variance(tree):
    return flat(jax.tree.map(lambda v: np.asarray(v).var(axis=0), tree))


@pytest.mark.parametrize(
    ("make", "kind", "order"),
    [
        (multiplicative, "density", 1),
        pytest.param(multiplicative, "fade 0", 2, marks=pytest.mark.long),
        # per-trajectory context, a grid that is not uniform, noise (3, 4)
        pytest.param(non_normal, "density", 2, marks=pytest.mark.long),
        pytest.param(non_normal, "fade part", 1, marks=pytest.mark.long),
    ],
)
def test_unbiased_however_wrong_the_twin(key, make, kind, order):
    the = problem(make, kind)
    for error, k in zip(ERRORS, jax.random.split(key, len(ERRORS)), strict=True):
        parts = the.estimator(baseline=fl.Twin(off(error), order=order, batch=2000)).split(
            k, the.theta, E
        )
        estimate = fl.reduce_samples(sum_parts(parts))
        z = compute_z(estimate, the.exact_gradient, the.exact_value)
        assert np.abs(z).max() < tolerance(len(ERRORS) * z.size), (error, z)
        if kind != "fade 0":  # whose variance is larger
            assert (np.abs(flat(the.exact_gradient)) / flat(estimate.stderr)).min() > 8
        if order == 2 and error == 0:
            # V is then the value function itself: δ = 0, and the variance is that of the direct
            # part alone.
            assert (
                np.abs(flat(parts.correction)).max() < ROUNDING * np.abs(flat(parts.direct)).max()
            )
            assert np.abs(parts.mean_lambda).max() < ROUNDING * np.abs(parts.returns).max()


@pytest.mark.long
def test_unbiased_on_recordings(key):
    the = problem(non_normal, "fixed")
    paths = the.simulator(key, the.theta, E)
    twin = fl.Twin(off(0.2), order=2, batch=2000)
    estimate = fl.gradient(
        the.process, the.objective, the.theta, paths, start=the.moving_start, baseline=twin
    )
    z = compute_z(estimate, the.exact_gradient, the.exact_value)
    assert np.abs(z).max() < tolerance(z.size), z


@pytest.mark.long
def test_unbiased_with_another_process_for_a_twin(key):
    # A twin that knows of no force and no feed, and has the wrong noise: not much of a twin.
    the = problem(non_normal)
    poor = fl.Process(lambda th, x: -x, lambda th, x: 0.3 * jnp.ones(3))
    estimate = the.estimator(baseline=fl.Twin(process=poor, order=2, batch=2000))(key, the.theta, E)
    z = compute_z(estimate, the.exact_gradient, the.exact_value)
    assert np.abs(z).max() < tolerance(z.size), z


@pytest.mark.long
def test_drift_score(key):
    the = without_noise_parameters(multiplicative, "fixed")
    twin = fl.Twin(off(0.05), order=2, batch=2000)
    estimate = the.estimator(score=fl.scores.drift_score, baseline=twin)(key, the.theta, E)
    z = compute_z(estimate, the.exact_gradient, the.exact_value)
    assert np.abs(z).max() < tolerance(z.size), z


@pytest.mark.long
def test_double_well(key):
    simulator = fl.simulator(PROCESS, START, jnp.linspace(0, 1, STEPS + 1))
    value, gradient = euler(STEPS)
    for error, k in zip(ERRORS, jax.random.split(key, len(ERRORS)), strict=True):
        twin = fl.Twin(off(error), order=2, batch=2000)
        estimate = fl.ppgt(simulator, OBJECTIVE, baseline=twin)(k, THETA, E)
        z = np.append(
            compute_z(estimate, gradient), (estimate.value - value) / estimate.value_stderr
        )
        assert np.abs(z).max() < tolerance(len(ERRORS) * z.size), (error, z)


# --------------------------------------------------------------------------------- what it is worth


def test_first_order_is_exact_where_the_reward_is_linear(key):
    # Linear drift and reward: V is linear, δ = 0, p does not depend on the state, and neither then
    # does ∂J/∂rest.
    the = linear_reward()
    few = the.estimator(baseline=fl.Twin()).split(key, the.theta, 4)
    assert np.abs(flat(few.correction)).max() < ROUNDING
    np.testing.assert_allclose(
        few.direct["rest"], np.full(4, the.exact_gradient["rest"]), rtol=ROUNDING
    )


def test_correction_is_proportional_to_the_twins_error(key):
    # There δ_k = p̃·(μ − μ̃)(X_k)Δt: of first order in the error ε, so that halving ε halves the
    # correction up to O(ε).
    the = linear_reward()
    size = [
        np.sqrt(
            variance(
                the.estimator(baseline=fl.Twin(off(error))).split(key, the.theta, 2000).correction
            )
        )
        for error in (1e-3, 5e-4)
    ]
    np.testing.assert_allclose(size[0] / size[1], 2.0, rtol=1e-2)


@cache
def linear_reward():
    """Ornstein–Uhlenbeck with g = X and g_T = 2X: J = Σ mₙΔt + 2m_T, linear in the rest
    position.
    """
    the = without_noise_parameters(ornstein_uhlenbeck, "fixed")
    drop = lambda tree: {name: v for name, v in tree.items() if name != "gain"}
    n, dt = np.arange(the.t.size), float(the.t[1])
    share = 1 - (1 - float(the.theta["k"]) * dt) ** n  # ∂mₙ/∂rest
    return the._replace(
        objective=fl.Objective(lambda th, x: x[0], lambda th, x: 2 * x[0]),
        theta=drop(the.theta),
        exact_gradient={"rest": share[:-1].sum() * dt + 2 * share[-1]},
    )


@cache
def quiet(scale):
    """The three modes, none of their noise trained, and that noise scaled."""
    the = without_noise_parameters(non_normal, "fixed")
    noise = the.process.noise
    return the._replace(process=the.process._replace(noise=lambda *args: scale * noise(*args)))


@pytest.mark.long
def test_first_order_correction_shrinks_with_the_noise(key):
    # Linear drift, quadratic reward: with the same normals d ∝ s exactly, so Λ ∝ s². The score of
    # the coupling to the force is ∝ 1/s, which makes its correction ∝ s. Without a twin λ̂ − λ̄ ∝ s
    # and the variance does not fall at all.
    loud, calm = (
        quiet(s)
        .estimator(baseline=fl.Twin())
        .split(key, quiet(s).theta, 500)
        .correction["coupling"]
        for s in (0.1, 0.05)
    )
    np.testing.assert_allclose(loud, 2 * calm, rtol=1e-8, atol=1e-10)


@pytest.mark.long
def test_gain_over_baselines_without_a_twin(key):
    the = quiet(0.05)
    moving = [
        name for name in the.theta if name != "gain"
    ]  # which is in the reward only: no score, nothing to gain
    of = lambda baseline: jax.tree.map(
        np.asarray, the.estimator(baseline=baseline).samples(key, the.theta, 2000).gradient
    )
    twins = [of(fl.Twin(off(error))) for error in (0.0, 0.05, 0.2)]
    for plain in (of(fl.baselines.optimal()), of(fl.baselines.time_only())):
        exact, rough, poor = (
            min(np.min(plain[n].var(axis=0) / with_twin[n].var(axis=0)) for n in moving)
            for with_twin in twins
        )
        # By the scaling above the gain of the exact twin grows as 1/s², until the force, which no
        # twin takes away, is all that is left. The least of three other seeds are 237, 200 and 66.
        assert exact > 100, exact
        assert rough > 80, rough
        assert poor > 25, poor
        assert exact > rough > poor


@pytest.mark.long
def test_the_table_of_one_run_serves_another(key):
    # Any λ̄ that knows only the time is unbiased; the mean Λ of other trajectories is nearly as
    # good as leaving one out.
    the = problem(non_normal)
    k_other, k_run = jax.random.split(key)
    estimator = the.estimator(baseline=fl.Twin(off(0.05), batch=2000))
    table = estimator.split(k_other, the.theta, 2000).mean_lambda
    with_table = fl.reduce_samples(sum_parts(estimator.split(k_run, the.theta, E, table)))
    z = compute_z(with_table, the.exact_gradient, the.exact_value)
    assert np.abs(z).max() < tolerance(z.size), z
    left_out = estimator(k_run, the.theta, E)
    bare = the.estimator(baseline=fl.Twin(off(0.05), baseline=fl.baselines.none(), batch=2000))(
        k_run, the.theta, E
    )
    assert (flat(with_table.stderr) <= 1.02 * flat(left_out.stderr)).all()
    assert (flat(bare.stderr) >= flat(with_table.stderr) * 0.98).all()
