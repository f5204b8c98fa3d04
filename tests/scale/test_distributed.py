"""One estimate, whoever computes its shards: against the plain estimator, and to the bit
against another pool.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
import trap
from chaos import Chaos
from fluctua import tcmt
from fluctua.learn.evaluate import can_refine
from fluctua.scale.distributed import Distributed, close
from fluctua.scale.ranges import MIN_SHARD, cut_evenly, cut_groups
from fluctua.store import history

KEY = jax.random.key(5)
TASK = tcmt.transmission(
    tcmt.rectangular(2, 2, leads=[tcmt.Lead(0, 0.5), tcmt.Lead(3, 0.5)]), horizon=0.3, dt=0.01
)
NETWORK = tcmt.initial_parameters(jax.random.key(1), TASK.network)
RATES = {**NETWORK, "gamma_e": jnp.full(2, 0.5)}


def estimate_trap(baseline=None):
    return fl.ppgt(trap.SIMULATOR, trap.OBJECTIVE, process=trap.PROCESS, baseline=baseline)


def kernels(**options):
    return TASK.estimator("cpu", dtype="float64", **options)


CASES = {
    "jax, time": (lambda: estimate_trap(), trap.THETA),
    "jax, none": (lambda: estimate_trap("none"), trap.THETA),
    "jax, twin": (lambda: estimate_trap(fl.Twin(batch=20)), trap.THETA),
    "kernels, time": (lambda: kernels(), NETWORK),
    "kernels, none": (lambda: kernels(baseline="none", antithetic=True), NETWORK),
    "kernels, rates": (lambda: kernels(baseline="none"), RATES),
    "kernels, binned": (
        lambda: kernels(baseline=fl.baselines.binned(bins=3, every=5, group=20)),
        NETWORK,
    ),
    "kernels, twin": (lambda: kernels(baseline="twin"), NETWORK),
    "kernels, carried": (lambda: kernels(baseline="carried"), NETWORK),
}


def leaves(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def assert_same(a, b):
    for one, other in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


def chaotic(estimator, workers, shards=5, seed=0, risk=0.3):
    made = fl.distributed(estimator, None, shards=shards)
    made.pool = Chaos(made.ranged, workers, seed, risk)
    return made


@pytest.mark.parametrize("case", CASES)
def test_shards_are_the_trajectories_of_the_plain_estimator(case):
    make, theta = CASES[case]
    plain, sharded = make(), fl.distributed(make(), None, shards=5)
    for call in range(2):  # the second call of "carried" has a table
        a, b = (e(jax.random.fold_in(KEY, call), theta, 100) for e in (plain, sharded))
        scale = [
            np.abs(leaf).max() + 1e-30 for leaf in leaves(a.stderr)
        ]  # rounding is seen against the spread
        for name in ("gradient", "stderr"):
            for one, other, s in zip(
                leaves(getattr(a, name)), leaves(getattr(b, name)), scale, strict=True
            ):
                np.testing.assert_allclose(
                    other, one, rtol=0, atol=2e-5 * s, err_msg=name
                )  # float32 parameters
        np.testing.assert_allclose(b.value, a.value, rtol=2e-6)
        np.testing.assert_allclose(b.value_stderr, a.value_stderr, rtol=2e-5)
        assert (a.count, a.interval is None) == (b.count, b.interval is None)
        assert (plain.pilot, plain.cost(theta)) == (sharded.pilot, sharded.cost(theta))


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_whoever_works_and_dies(case):
    make, theta = CASES[case]
    reference = fl.distributed(make(), None, shards=5)
    expected = [reference(jax.random.fold_in(KEY, i), theta, 100) for i in range(2)]
    for workers in (1, 3, 8):
        other = chaotic(make(), workers, seed=workers)
        assert_same([other(jax.random.fold_in(KEY, i), theta, 100) for i in range(2)], expected)
        assert_same(other.state, reference.state)
        assert (
            other.event == ""
        )  # simulated trajectories that come again are no event: the history stays the same
    assert other.losses


def test_the_weights_are_on_top():
    inner = kernels(baseline="twin")
    plain = fl.ShrunkCorrection(inner, 10, carry=True)
    sharded, killed = (
        fl.distributed(fl.ShrunkCorrection(inner, 10, carry=True), None, shards=3) for _ in range(2)
    )
    killed.estimator.pool = Chaos(killed.estimator.ranged, 4, seed=2, risk=0.3)
    for call in range(3):
        a, b, c = (e(jax.random.fold_in(KEY, call), NETWORK, 60) for e in (plain, sharded, killed))
        for one, other in zip(leaves(a.gradient), leaves(b.gradient), strict=True):
            np.testing.assert_allclose(other, one, atol=1e-5 * np.abs(one).max())
        assert_same(b, c)
    assert_same(sharded.state, killed.state)
    close(killed)
    assert not killed.estimator.pool.alive


@pytest.mark.parametrize(
    ("count", "shards"), [(1000, 64), (7, 64), (100, 1), (10**9, 4000), (33, 2)]
)
def test_where_an_ensemble_is_cut_depends_on_its_size_alone(count, shards):
    edges = cut_evenly(count, shards)
    sizes = np.diff(edges)
    assert (edges[0], edges[-1], sizes.sum()) == (0, count, count)
    assert len(sizes) <= shards
    assert sizes.max() - sizes.min() <= 1
    assert len(sizes) == 1 or sizes.min() >= MIN_SHARD
    assert all(edge % 2 == 0 for edge in cut_evenly(2 * count, shards, 2))


def test_groups_stay_together():
    assert cut_groups(100, 64, 30) == [0, 25, 50, 75, 100]
    assert cut_groups(100, 2, 30) == [0, 50, 100]
    assert cut_groups(20, 64, 30) == [0, 20]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: estimate_trap("optimal"), "'optimal'"),
        (lambda: estimate_trap("mean"), "'mean'"),
        (lambda: estimate_trap(fl.baselines.binned(lambda theta, x: x[0])), "'binned'"),
        (
            lambda: estimate_trap(fl.baselines.Baseline(lambda kick: kick.returns.mean())),
            "one's own",
        ),
        (lambda: kernels(baseline="optimal"), "'optimal'"),
        (lambda: kernels(baseline=fl.baselines.binned()), "'binned'"),
    ],
)
def test_baselines_that_compare_all_trajectories_are_refused(make, name):
    with pytest.raises(ValueError, match=f"{name} compares all"):
        fl.distributed(make(), None)


def test_what_cannot_be_cut_is_refused():
    ratio = fl.ppgt(
        trap.SIMULATOR, fl.function_of_means(lambda m: m**2, trap.OBJECTIVE), process=trap.PROCESS
    )
    with pytest.raises(ValueError, match="function of means"):
        fl.distributed(ratio, None)
    with pytest.raises(TypeError, match="got function"):
        fl.distributed(lambda key, theta, count: None, None)
    with pytest.raises(ValueError, match="`shards` .* got 0"):
        fl.distributed(estimate_trap(), None, shards=0)


def test_an_error_names_the_trajectory_of_the_whole_ensemble():
    process = fl.Process(lambda th, x: th["f"] - x**3, lambda th, x: jnp.ones_like(x))
    start = fl.Density(lambda th, x: 0.0, lambda key, th: 30.0 * jax.random.normal(key, (1,)))
    t = jnp.linspace(0, 1, 6)
    estimator = fl.ppgt(fl.simulator(process, start, t), trap.OBJECTIVE, baseline="none")
    with pytest.raises(FloatingPointError, match=r"4 of 32 .*: 47, 55, 61, 62\."):
        estimator.samples(KEY, trap.THETA, 32, first=32)


class Box:
    """An instrument: nothing that it gives can be had again. Runs are numbered."""

    def __init__(self):
        self.runs = 0

    def __call__(self, key, theta, count):
        numbers = jnp.arange(self.runs, self.runs + count)
        self.runs += count
        x = jnp.stack([jnp.zeros(count), theta["f"][0] + jnp.sin(1.0 * numbers)], axis=1)[..., None]
        return fl.Trajectories(jnp.array([0.0, 1.0]), x)


@pytest.mark.filterwarnings("ignore:the trajectories are not")
def test_acquired_trajectories_are_never_asked_for_twice():
    box = Box()
    process = fl.Process(lambda th, x: th["f"] - x, lambda th, x: jnp.ones_like(x))
    sharded = chaotic(
        fl.ppgt(box, trap.OBJECTIVE, process=process, baseline="none"),
        3,
        shards=6,
        seed=1,
        risk=0.4,
    )
    estimate = sharded(KEY, trap.THETA, 96)
    ranges = [call.arguments[1:] for call in sharded.pool.computed]
    assert len(set(ranges)) == len(ranges)
    lost = sum(loss.count for loss in sharded.losses)
    assert lost > 0
    assert sharded.pilot == lost  # they count as spent
    assert sharded.event == f"lost {lost} acquired trajectories with their workers"
    assert {first for first, _ in ranges if first >= 96} <= set(range(96, 96 + lost, 16))
    assert estimate.count == 96
    assert box.runs == sum(count for _, count in ranges)
    sharded.pool.risk = 0.0
    sharded(KEY, trap.THETA, 96)
    assert (sharded.pilot, sharded.event) == (0, "")


def test_a_training_goes_on_where_it_was_cut_off(tmp_path):
    def describe(estimator):
        return fl.Training(estimator, *arguments(), trajectories=70)

    alone = fl.distributed(estimate_trap(), None, shards=4)
    whole = fl.run(describe(alone), 6, tmp_path / "whole")
    fl.run(describe(chaotic(estimate_trap(), 3, shards=4)), 3, tmp_path / "cut")
    again = chaotic(estimate_trap(), 8, shards=4, seed=9)
    ended = fl.run(describe(again), 6, tmp_path / "cut")
    assert_same(ended.theta, whole.theta)
    a, b = (
        [row._replace(seconds=0.0) for row in history.read(tmp_path / n / "history.csv")]
        for n in ("whole", "cut")
    )
    assert a == b
    assert "final" in whole.summary  # J is measured afresh, as of the estimator within
    assert can_refine(again)


def arguments():
    return trap.THETA, optax.adam(0.1)


def test_the_pool_is_closed_with_the_estimator():
    with chaotic(estimate_trap(), 2) as sharded:
        assert isinstance(sharded, Distributed)
    assert sharded.pool.alive == []
