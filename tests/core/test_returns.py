"""The return-to-go and returns of given trajectories, on grids that are not uniform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import first_passage
import fluctua as fl
from fluctua import returns_to_go
from fluctua.core import trajectories as records


def test_matches_the_sum_as_printed():
    rng = np.random.default_rng(0)
    rewards, terminal = rng.normal(size=(3, 5)), rng.normal(size=3)
    dt = np.array([0.1, 0.2, 0.05, 0.3, 0.15])
    expected = [[terminal[j] + (rewards[j, n:] * dt[n:]).sum() for n in range(6)] for j in range(3)]
    np.testing.assert_allclose(
        returns_to_go(jnp.asarray(rewards), jnp.asarray(terminal), jnp.asarray(dt)), expected
    )


# ------------------------------------------------------------------- returns of whole trajectories

TIMES = np.array([0.0, 0.1, 0.3, 0.35, 0.65])
DT = np.diff(TIMES)
THETA = {"gain": jnp.asarray(2.0), "price": jnp.asarray(0.5)}
EVERYTHING = fl.Objective(
    running=lambda th, x, t, c: th["gain"] * x[0] + t * c,
    terminal=lambda th, x: x[1] ** 2,
    per_step=lambda th, x, y, t, dt: th["price"] * (y[0] - x[0]) * dt,
    initial=lambda th, x: 3 * x[1],
)
HEUN = fl.Process(lambda th, x: -x, lambda th, x: jnp.ones_like(x), integrator="heun")


def make_trajectories(count=6):
    rng = np.random.default_rng(1)
    return fl.Trajectories(TIMES, rng.normal(size=(count, 5, 2)), rng.normal(size=count))


def add_up(trajectories, trapezoid=False):
    """The return as printed, trajectory by trajectory."""
    returns = []
    for x, c in zip(trajectories.x, trajectories.context, strict=True):
        rate = 2 * x[:, 0] + TIMES * c
        mean = (rate[:-1] + rate[1:]) / 2 if trapezoid else rate[:-1]
        steps = 0.5 * np.diff(x[:, 0]) * DT
        returns.append(mean @ DT + x[-1, 1] ** 2 + steps.sum() + 3 * x[0, 1])
    return np.array(returns)


def test_returns_of_all_rewards_are_the_sum_as_printed():
    trajectories = make_trajectories()
    found = fl.returns(EVERYTHING, THETA, trajectories)
    np.testing.assert_allclose(found, add_up(trajectories), rtol=1e-12)
    by_heun = fl.returns(EVERYTHING, THETA, trajectories, process=HEUN)
    np.testing.assert_allclose(by_heun, add_up(trajectories, trapezoid=True), rtol=1e-12)


def test_returns_in_chunks_are_those_of_one_piece():
    """Chunks of any source that is read once, also where each is held in parts."""
    trajectories = make_trajectories(7)
    parts = [records.select_trajectories(trajectories, slice(*ends)) for ends in ((0, 3), (3, 7))]
    one = 5 * 2 * 8  # bytes of a trajectory
    for source in (parts, iter(parts), trajectories):
        found = fl.returns(EVERYTHING, THETA, source, block_bytes=2 * one)
        np.testing.assert_allclose(found, add_up(trajectories), rtol=1e-12)


def test_returns_are_those_of_the_estimate():
    theta = first_passage.parameters()
    start = jnp.array([first_passage.START])
    simulator = fl.simulator(first_passage.PROCESS, start, jnp.linspace(0, 1, 11))
    trajectories = simulator(jax.random.key(0), theta, 50)
    for objective in (
        first_passage.OBJECTIVE,
        first_passage.OBJECTIVE._replace(overshoot="bridge"),
    ):
        samples = fl.gradient_samples(
            first_passage.PROCESS, objective, theta, trajectories, baseline="none"
        )
        for process in (first_passage.PROCESS, simulator):
            found = fl.returns(objective, theta, trajectories, process=process)
            np.testing.assert_allclose(found, samples.returns, rtol=1e-12)
    stopped = fl.returns(first_passage.OBJECTIVE, theta, trajectories)
    x = np.asarray(trajectories.x)[..., 0]
    ends = [next((n for n in range(11) if abs(row[n]) >= 1), 10) for row in x]
    last = x[np.arange(50), ends]
    by_hand = 0.7 * 0.1 * np.array(ends) + 1.3 * (last > 0)
    np.testing.assert_allclose(stopped, by_hand, rtol=1e-12)
    assert len(set(ends)) > 3


def test_returns_refuse_what_has_none():
    trajectories = make_trajectories()
    means = fl.function_of_means(lambda m: m**2, EVERYTHING)
    with pytest.raises(ValueError, match="function of means.*`returns` for each objective"):
        fl.returns(means, THETA, trajectories)
    bridge = first_passage.OBJECTIVE._replace(overshoot="bridge")
    with pytest.raises(ValueError, match='overshoot="bridge" needs `process=`'):
        fl.returns(bridge, first_passage.parameters(), trajectories)
    with pytest.raises(ValueError, match="no trajectories"):
        fl.returns(EVERYTHING, THETA, [])
    with pytest.raises(TypeError, match=r"fluctua\.Trajectories.*ndarray"):
        fl.returns(EVERYTHING, THETA, [trajectories.x])
    with pytest.raises(ValueError, match=r"the running reward.*shape \(\); got shape \(2,\)"):
        fl.returns(fl.Objective(running=lambda th, x: x), THETA, trajectories)
    broken = trajectories._replace(
        x=np.where(np.arange(6)[:, None, None] == 4, np.nan, 1.0) * trajectories.x
    )
    with pytest.raises(ValueError, match="trajectory 4"):
        fl.returns(EVERYTHING, THETA, broken)
