"""No baseline shifts the mean, and the error bars are honest: many small ensembles with each
baseline.

One z per seed and component, z_s = (G_s − exact)/ε, with ε² the mean of the squared standard errors
over the seeds. (Samples are skewed, so that each ensemble's own standard error is correlated with
its estimate: that alone would shift the mean of G_s/ε_s by about skewness/2√E, a tenth or two.) If
the estimate is unbiased and its error bar right, then over S seeds, for each of the P + 1
comparisons (gradient and J),

    √S · mean z  is standard normal             → bounded by `tolerance(P + 1)`, 3.80 here,
    Σ z²         is chi-squared with S degrees  → within its quantiles at the same level, 0.55 …
    1.64 of S.

By Bonferroni each of the two bounds is met by chance once in a thousand seeds. A bias of 0.4
standard errors of an ensemble of 200 is seen, and so are error bars wrong by 0.3.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

import fluctua
from problems import flat, multiplicative, problem, tolerance, z_scores

SEEDS, E, ALARM = 100, 200, 1e-3


def conditions(th, x, t, c):
    """For each parameter the quantity that bins its baseline: some shared, some broadcast."""
    return {
        "k": x[0] ** 2,
        "sigma": x[0],
        "eta": x[0],
        "gain": x[0],
        "mean": x**2,
        "spread": jnp.abs(x[0]),
    }


BASELINES = {
    "none": {"baseline": fluctua.baselines.none()},
    "mean": {"baseline": fluctua.baselines.mean()},
    "optimal": {"baseline": fluctua.baselines.optimal()},
    "binned, three in a bin": {
        "baseline": fluctua.baselines.binned(conditions, bins=E // 3)
    },  # few share a mean
    "time only": {"baseline": fluctua.baselines.time_only(pilot=50)},
    "optimal, initial from a pilot": {
        "baseline": fluctua.baselines.optimal(),
        "initial_baseline": fluctua.baselines.time_only(pilot=50),
    },
}


def many_estimates(the, key, seeds, count, **options):
    estimator = the.estimator(**options)
    return [estimator(jax.random.fold_in(key, s), the.theta, count) for s in range(seeds)]


def pooled_z(estimates, the):
    """(G_s − exact)/ε for every seed and comparison, (S, P+1); ε² is the mean squared standard
    error.
    """
    error = lambda e: np.append(flat(e.stderr), e.value_stderr)
    own = np.array([z_scores(e, the) for e in estimates])
    errors = np.array([error(e) for e in estimates])
    return own * errors / np.sqrt(np.mean(errors**2, axis=0))


def recorded_estimates(the, key, seeds, count):
    """From trajectories alone: nothing can be run for the baseline, so one half serves the
    other.
    """
    run = the.estimator().substrate
    made = (run(jax.random.fold_in(key, s), the.theta, count) for s in range(seeds))
    return [
        fluctua.gradient(the.process, the.objective, the.theta, data, start=the.start)
        for data in made
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", [*BASELINES, "time, of the other half"])
def test_unbiased_with_honest_error_bars(key, name):
    the = problem(multiplicative)
    if name in BASELINES:
        estimates = many_estimates(the, key, SEEDS, E, **BASELINES[name])
    else:
        estimates = recorded_estimates(the, key, SEEDS, E)
    z = pooled_z(estimates, the)
    comparisons = z.shape[1]

    mean = z.mean(axis=0) * np.sqrt(SEEDS)
    assert np.abs(mean).max() < tolerance(comparisons, ALARM), mean

    squares = np.sum(z**2, axis=0)
    tail = ALARM / (2 * comparisons)
    assert squares.min() > chi2.ppf(tail, SEEDS), squares / SEEDS
    assert squares.max() < chi2.isf(tail, SEEDS), squares / SEEDS
