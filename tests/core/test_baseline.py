"""Baselines against sums written out as loops, and their edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.baselines import (
    Inputs,
    binned,
    mean,
    none,
    optimal,
    quantile_bins,
    split_halves,
    time_only,
)

rng = np.random.default_rng(1)


def kick(returns, score, x=None, index=3, values=None, theta=None):
    returns, score = jnp.asarray(returns, float), jnp.asarray(score, float)
    x = jnp.zeros((len(returns), 1)) if x is None else jnp.asarray(x, float)
    theta = jnp.zeros(score.shape[1]) if theta is None else theta
    return Inputs(jnp.asarray(index), theta, x, jnp.asarray(0.0), None, returns, score, values)


def bars(baseline, kick):
    """λ̄ (E, P) as an array."""
    return np.broadcast_to(np.asarray(jax.jit(baseline.function)(kick)), kick.score.shape)


def optimal_by_loop(returns, score, members=None):
    """Eq. 20 as it is printed, within `members[j]` of each trajectory."""
    count, width = score.shape
    bar = np.empty((count, width))
    for j in range(count):
        group = set(range(count)) if members is None else set(members[j])
        others = sorted(group - {j})
        for p in range(width):
            w = score[others, p] ** 2
            bar[j, p] = (
                (returns[others] * w).sum() / w.sum() if w.sum() > 0 else np.mean(returns[others])
            )
    return bar


def test_none_is_zero():
    assert np.all(bars(none(), kick(np.ones(4), np.ones((4, 2)))) == 0)


def test_mean_leaves_one_out():
    returns = rng.normal(size=6)
    bar = bars(mean(), kick(returns, np.ones((6, 2))))
    assert bar[:, 0] == pytest.approx([np.delete(returns, j).mean() for j in range(6)])


def test_optimal_is_the_printed_equation():
    returns, score = rng.normal(size=30), rng.normal(size=(30, 4))
    np.testing.assert_allclose(
        bars(optimal(), kick(returns, score)), optimal_by_loop(returns, score), rtol=1e-12
    )


def test_time_only_reads_the_table_one_step_ahead():
    table = jnp.arange(10.0)
    assert np.all(
        bars(time_only(table), kick(np.ones(2), np.ones((2, 1)), index=3, values=table)) == 4
    )
    assert np.all(
        bars(time_only(table), kick(np.ones(2), np.ones((2, 1)), index=-1, values=table)) == 0
    )


@pytest.mark.parametrize("bins", [1, 3, 7, 20])
def test_binned_is_the_printed_equation_within_bins(bins):
    returns, score, x = rng.normal(size=41), rng.normal(size=(41, 2)), rng.normal(size=(41, 2))
    bar = bars(binned(lambda theta, x: x, bins=bins), kick(returns, score, x))
    for p in range(2):
        rank = np.argsort(np.argsort(x[:, p]))
        edges = [k * 41 // bins for k in range(1, bins)]
        label = np.searchsorted(edges, rank, side="right")
        members = [np.flatnonzero(label == label[j]) for j in range(41)]
        expected = optimal_by_loop(returns, score[:, [p]], members)
        np.testing.assert_allclose(bar[:, [p]], expected, rtol=1e-11)


def test_binned_broadcasts_one_condition_to_all_parameters():
    theta = {"a": jnp.zeros((2, 2)), "b": jnp.zeros(3)}
    returns, score, x = rng.normal(size=25), rng.normal(size=(25, 7)), rng.normal(size=(25, 1))
    same = bars(binned(lambda th, x: x[0], bins=4), kick(returns, score, x, theta=theta))
    spread = binned(lambda th, x: {"a": x[0] * jnp.ones((2, 2)), "b": x[0] * jnp.ones(3)}, bins=4)
    np.testing.assert_allclose(same, bars(spread, kick(returns, score, x, theta=theta)), rtol=1e-12)


def test_binned_refuses_a_condition_that_does_not_fit():
    with pytest.raises(ValueError, match=r"broadcast to the parameters.*\(2,\).*\(3,\)"):
        bars(binned(lambda th, x: jnp.ones(2)), kick(np.ones(9), np.ones((9, 3))))


def test_ties_share_a_bin_whatever_the_order():
    values = jnp.asarray([0.0] * 7 + [1.0] * 2 + [2.0])
    assert quantile_bins(values, 5).tolist() == [3] * 7 + [4] * 3
    returns, score = rng.normal(size=12), rng.normal(size=(12, 2))
    x = rng.integers(0, 3, size=(12, 1)).astype(float)
    baseline, order = binned(lambda th, x: x[0], bins=6), rng.permutation(12)
    straight = bars(baseline, kick(returns, score, x))
    shuffled = bars(baseline, kick(returns[order], score[order], x[order]))
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-12)


def test_all_equal_states_are_one_bin_and_the_rest_are_empty():
    """The first step of a fixed start: every quantile ties."""
    returns, score = rng.normal(size=10), rng.normal(size=(10, 3))
    bar = bars(binned(lambda th, x: x[0], bins=5), kick(returns, score))
    np.testing.assert_allclose(bar, optimal_by_loop(returns, score), rtol=1e-12)


def test_a_trajectory_alone_in_its_bin_takes_the_ensemble():
    returns, score = rng.normal(size=5), rng.normal(size=(5, 2))
    x = np.arange(5.0)[:, None]
    bar = bars(binned(lambda th, x: x[0], bins=5), kick(returns, score, x))
    np.testing.assert_allclose(bar, optimal_by_loop(returns, score), rtol=1e-12)


def test_more_bins_than_trajectories():
    returns, score, x = rng.normal(size=3), rng.normal(size=(3, 1)), rng.normal(size=(3, 1))
    bar = bars(binned(lambda th, x: x[0], bins=20), kick(returns, score, x))
    np.testing.assert_allclose(bar, optimal_by_loop(returns, score), rtol=1e-12)


def test_zero_scores_fall_back_to_the_plain_mean_of_the_others():
    returns = np.array([1.0, 2.0, 4.0, 8.0])
    score = np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
    plain = [np.delete(returns, j).mean() for j in range(4)]
    for baseline in (optimal(), binned(lambda th, x: x[0], bins=2)):
        bar = bars(baseline, kick(returns, score))
        assert bar[:, 0] == pytest.approx(plain)
        # only trajectory 2 has a score: the others take its return, and it takes the plain mean of
        # theirs
        assert bar[:, 1] == pytest.approx([4, 4, plain[2], 4])


def test_one_dominant_score_does_not_cancel():
    """Σ − own would leave rounding noise of 1e20·eps where the others' weight is 1."""
    returns = np.array([5.0, 1.0, 2.0])
    score = np.array([[1e10], [1.0], [1.0]])
    bar = bars(optimal(), kick(returns, score))
    assert bar[0, 0] == pytest.approx(1.5, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_weights_neither_overflow_nor_underflow(scale):
    returns, score = rng.normal(size=8), rng.normal(size=(8, 1))
    bar = bars(optimal(), kick(returns, score * scale))
    np.testing.assert_allclose(bar, optimal_by_loop(returns, score), rtol=1e-10)


def test_own_kick_never_enters_its_own_baseline():
    """Change one trajectory's score and return: its baseline stays to the last bit of the mean."""
    returns, score, x = rng.normal(size=20), rng.normal(size=(20, 2)), rng.normal(size=(20, 1))
    for baseline in (mean(), optimal(), binned(lambda th, x: x[0], bins=3)):
        before = bars(baseline, kick(returns, score, x))
        other_returns, other_score = returns.copy(), score.copy()
        other_returns[4], other_score[4] = 77.0, -3.0
        after = bars(baseline, kick(other_returns, other_score, x))
        np.testing.assert_allclose(after[4], before[4], rtol=1e-12)
        assert not np.allclose(np.delete(after, 4, 0), np.delete(before, 4, 0))


def test_bins_must_be_positive():
    with pytest.raises(ValueError, match="`bins`.*got 0"):
        binned(lambda th, x: x, bins=0)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 1001])
def test_halves_are_equal_and_no_block_of_the_order(count):
    in_second = split_halves(count)
    assert in_second.sum() == count // 2
    if count > 100:
        near = in_second[: count // 2].mean(), in_second[::2].mean()
        np.testing.assert_allclose(near, 0.5, atol=4 * 0.5 / np.sqrt(count / 2))


def test_groups_stay_in_one_half():
    group = np.repeat([7, 3, 5, 9, 1], 4)
    in_second = split_halves(20, group).reshape(5, 4)
    assert np.all(in_second == in_second[:, :1])
    assert in_second[:, 0].sum() == 2
    assert split_halves(6, np.zeros(6, int)).sum() == 3


@pytest.mark.filterwarnings("ignore:the trajectories are not those")  # the first chunk is examined
def test_trajectories_may_be_sorted_by_their_outcome():
    """With halves of sorted trajectories the gradient was off by four standard errors."""
    process = fl.Process(lambda theta, x: -theta * x, lambda theta, x: jnp.ones(1))
    objective = fl.Objective(terminal=lambda theta, x: x[0] ** 2)
    theta = jnp.array(1.0)
    measured = fl.simulator(process, jnp.ones(1), np.linspace(0, 1, 21))(
        jax.random.key(2), theta, 1000
    )
    x = np.asarray(measured.x)
    ordered = measured._replace(x=x[np.argsort(x[:, -1, 0] ** 2)])
    for data in (
        ordered,
        [ordered._replace(x=ordered.x[k : k + 300]) for k in range(0, 1000, 300)],
    ):
        expected, found = (fl.gradient(process, objective, theta, v) for v in (measured, data))
        # the halves' means differ by chance, 2/√E of the returns' scatter
        assert abs(found.gradient - expected.gradient) < 0.3 * expected.stderr
