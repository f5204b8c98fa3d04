"""Baselines of one's own that look at their own return or score are refused by name; the others
are served.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.baselines import Setting, check_admissible
from problems import multiplicative, problem

THE = problem(multiplicative)  # the start is a density: both baselines are used
COUNT = 100
MIDDLE = len(THE.t) // 2


def own_return(kick):
    return kick.returns[:, None]


def whole_mean(kick):
    return kick.returns.mean()


def rank(kick):
    return jnp.argsort(jnp.argsort(kick.returns))[:, None] / len(kick.returns)


def late(kick):
    return jnp.where(kick.index > MIDDLE, kick.returns, 0.0)[:, None]


def weighted_mean(kick):
    weight = kick.score**2
    return (kick.returns[:, None] * weight).sum(axis=0) / weight.sum(axis=0)


def own_score(kick):
    return kick.score


def far_from_one(kick):
    """A level that dwarfs the returns: what is added must still be seen."""
    return 1e6 + kick.returns[:, None]


def estimate_streamed(baseline):
    return THE.estimator(baseline=baseline)(jax.random.key(0), THE.theta, COUNT)


def estimate_recorded(baseline):
    return fl.gradient(
        THE.process, THE.objective, THE.theta, paths(), start=THE.start, baseline=baseline
    )


def estimate_chunks(baseline):
    t, x = paths()[:2]
    chunks = [fl.Trajectories(t, x[:30]), fl.Trajectories(t, x[30:])]
    return fl.gradient(
        THE.process, THE.objective, THE.theta, chunks, start=THE.start, baseline=baseline
    )


def estimate_measured(baseline):
    instrument = lambda key, theta, count: THE.simulator(key, theta, count)
    estimator = fl.ppgt(
        instrument, THE.objective, process=THE.process, start=THE.start, baseline=baseline
    )
    return estimator(jax.random.key(0), THE.theta, COUNT)


def estimate_start(baseline):
    estimator = THE.estimator(baseline="none", initial_baseline=baseline)
    return estimator(jax.random.key(0), THE.theta, COUNT)


def estimate_twin(baseline):
    return estimate_streamed(fl.Twin(baseline=baseline))


def estimate_recorded_twin(baseline):
    return estimate_recorded(fl.Twin(baseline=baseline))


def paths():
    return THE.simulator(jax.random.key(1), THE.theta, COUNT)


DOORS = [
    estimate_streamed,
    estimate_recorded,
    estimate_chunks,
    estimate_measured,
    estimate_start,
    estimate_twin,
    estimate_recorded_twin,
]


@pytest.mark.parametrize("estimate", DOORS)
def test_every_door_refuses_a_baseline_that_looks_at_its_own_return(estimate):
    with pytest.raises(
        ValueError, match="`own_return` depends on the return of its own trajectory"
    ):
        estimate(fl.baselines.Baseline(own_return))


@pytest.mark.parametrize(
    ("of", "what"),
    [
        (whole_mean, "return"),
        (rank, "return"),
        (late, "return"),
        (weighted_mean, "return"),
        (far_from_one, "return"),
        (own_score, "score"),
    ],
)
def test_what_is_refused(of, what):
    with pytest.raises(
        ValueError, match=rf"`{of.__name__}` depends on the {what} of its own trajectory"
    ):
        estimate_recorded(fl.baselines.Baseline(of))


def test_a_name_of_the_library_does_not_help():
    with pytest.raises(ValueError, match="`own_return` depends on the return"):
        estimate_streamed(fl.baselines.Baseline(own_return, name="mean"))


def test_a_shape_that_does_not_broadcast_is_named():
    with pytest.raises(ValueError, match=r"must broadcast to .*\(100, 6\).* shape \(100,\)"):
        estimate_streamed(fl.baselines.Baseline(lambda kick: kick.returns))


# -------------------------------------------------------------------------------------- served


def mean_by_difference(kick):
    """Leaves one out as Σ − λ̂ⱼ, which rounds."""
    return ((kick.returns.sum() - kick.returns) / (len(kick.returns) - 1))[:, None]


def regression(kick):
    """Of the returns on the states, each trajectory left out by its leverage."""
    if kick.x is None:
        return jnp.zeros(())
    features = jnp.concatenate([jnp.ones((len(kick.x), 1)), kick.x, kick.x**2], axis=1)
    q, _ = jnp.linalg.qr(features)
    leverage = (q**2).sum(axis=1)
    fitted = q @ (q.T @ kick.returns)
    return ((fitted - leverage * kick.returns) / (1 - leverage))[:, None]


def nearest(kick):
    """Mean of 70 others: with fewer trajectories there is nothing to take."""
    if len(kick.returns) < 71:
        raise ValueError("too few")
    return jnp.stack([jnp.roll(kick.returns, k) for k in range(1, 71)]).mean(axis=0)[:, None]


def row_per_trajectory(kick):
    return jnp.linspace(0, 1, COUNT)[:, None]


def drawn_while_traced(kick):
    return jnp.asarray(np.random.default_rng().normal())


def not_a_number_here(kick):
    """Rewards are positive in its place of use; made-up returns are not."""
    return jnp.log(mean_by_difference(kick) - 1e9)


@pytest.mark.parametrize(
    "baseline",
    [
        fl.baselines.Baseline(mean_by_difference),
        fl.baselines.Baseline(regression),
        fl.baselines.Baseline(row_per_trajectory),
        fl.baselines.Baseline(drawn_while_traced),
        fl.baselines.Baseline(lambda kick: jnp.asarray(kick.t)),
        fl.baselines.Baseline(nearest, min_trajectories=71),
    ],
)
def test_what_leaves_its_own_trajectory_out_is_served(baseline):
    assert np.isfinite(estimate_recorded(baseline).value)


def test_a_baseline_is_tried_once_per_estimator():
    calls = []

    def count_calls(kick):
        calls.append(kick.returns.shape)
        return jnp.zeros(())

    estimator = THE.estimator(baseline=fl.baselines.Baseline(count_calls), initial_baseline="none")
    estimator(jax.random.key(0), THE.theta, COUNT)
    traced = len(calls)
    estimator(jax.random.key(1), THE.theta, COUNT)
    assert (64,) in calls
    assert len(calls) == traced


SINGLE = Setting(
    theta=jnp.ones(3, jnp.float32),
    t=np.arange(5.0),
    count=COUNT,
    start=lambda: (np.full((1, 2), 3e4, np.float32), None),
)


def test_single_precision_rounds_and_is_not_refused():
    check_admissible(fl.baselines.Baseline(mean_by_difference), SINGLE)
    with pytest.raises(ValueError, match="`whole_mean` depends"):
        check_admissible(fl.baselines.Baseline(whole_mean), SINGLE)


@pytest.mark.filterwarnings("error")
def test_a_baseline_that_is_not_a_number_on_made_up_returns_is_not_refused():
    check_admissible(fl.baselines.Baseline(not_a_number_here), SINGLE)
