"""What a baseline is for: where the mean reward is large, the return says little and its mean
can go.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import fluctua
from problems import flat, ornstein_uhlenbeck, problem, tolerance

E = 4000


@pytest.mark.long
def test_optimal_baseline_gains_tenfold_where_the_mean_reward_is_large(key):
    # A constant reward of 50 per unit time, and all parameters enter through a score: drift, noise
    # or start.
    whole = problem(ornstein_uhlenbeck)
    gain = whole.theta["gain"]
    keep = lambda tree: {name: v for name, v in tree.items() if name != "gain"}
    the = whole._replace(
        objective=fluctua.Objective(
            lambda th, x, t, c: 50 + whole.objective.running({"gain": gain}, x, t, c),
            lambda th, x, c: whole.objective.terminal({"gain": gain}, x, c),
        ),
        theta=keep(whole.theta),
    )
    exact = flat(keep(whole.exact_gradient))  # a constant reward does not change it
    plain, based = (
        the.estimator(baseline=baseline)(key, the.theta, E)
        for baseline in (fluctua.baselines.none(), fluctua.baselines.optimal())
    )
    ratio = (flat(plain.stderr) / flat(based.stderr)) ** 2
    # Variances from 4,000 samples are uncertain by 10 % (kurtosis ~ 40); the least gain measured is
    # 60.
    assert ratio.min() > 10, ratio
    for estimate in (plain, based):
        z = (flat(estimate.gradient) - exact) / flat(estimate.stderr)
        assert np.abs(z).max() < tolerance(2 * z.size), z


def test_time_only_baseline_is_nearly_as_good_as_the_leave_one_out_mean(key):
    # Both subtract the mean return-to-go. A pilot of 400 knows it to 1/20 of its standard
    # deviation, which changes the variance by 2/20 per standard deviation of the pilot at most: 0.3
    # is three of them.
    the = problem(ornstein_uhlenbeck, "fixed")
    pilot, others = (
        the.estimator(baseline=baseline)(key, the.theta, E)
        for baseline in (fluctua.baselines.time_only(pilot=400), fluctua.baselines.mean())
    )
    ratio = (flat(pilot.stderr) / flat(others.stderr)) ** 2
    np.testing.assert_allclose(ratio, jnp.ones(ratio.size), atol=0.3)
