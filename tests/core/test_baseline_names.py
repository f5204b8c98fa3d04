"""One table of baselines: names and records are the same thing, one default, and refusals by
name.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua import tcmt
from fluctua.core import baselines
from fluctua.insitu import Plan
from fluctua.runs.config import Config
from problems import flat

PROCESS = fl.Process(lambda th, x: th["f"] - x, lambda th, x: 0.3 * jnp.ones_like(x))
OBJECTIVE = fl.Objective(running=lambda th, x: x[0] ** 2, terminal=lambda th, x: x[0])
THETA = {"f": jnp.array([0.5])}
T = np.linspace(0, 1, 12)
RUN = fl.simulator(PROCESS, np.zeros(1), T)
KEY = jax.random.key(3)
DATA = fl.Trajectories(T, np.asarray(RUN(KEY, THETA, 31).x))
SMALL = tcmt.transmission(tcmt.rectangular(2, 2), horizon=0.1, dt=1e-3)
COUPLED = tcmt.initial_parameters(jax.random.key(1), SMALL.network)


def part(low, high):
    return fl.Trajectories(DATA.t, DATA.x[low:high])


def test_one_default_at_every_door():
    assert baselines.DEFAULT == "time"
    assert fl.ppgt(RUN, OBJECTIVE).method.baseline.name == "time"
    assert SMALL.estimator().method.baseline.name == "time"
    assert SMALL.estimator("cpu").baseline == "time"
    assert Config().baseline.kind == "time"
    assert set(baselines.TABLE) == {"none", "time", "mean", "optimal", "binned", "twin", "carried"}


@pytest.mark.parametrize("name", ["time", "optimal", "twin"])
def test_a_name_is_its_record(name):
    by_name = fl.ppgt(RUN, OBJECTIVE, baseline=name)(KEY, THETA, 20)
    by_record = fl.ppgt(RUN, OBJECTIVE, baseline=baselines.TABLE[name]())(KEY, THETA, 20)
    np.testing.assert_array_equal(flat(by_name.gradient), flat(by_record.gradient))


def list_halves(count):
    """Numbers of the trajectories of both halves."""
    in_second = baselines.split_halves(count)
    return np.flatnonzero(~in_second), np.flatnonzero(in_second)


def test_each_half_of_a_recording_takes_the_table_of_the_other():
    halves = [DATA._replace(x=DATA.x[rows]) for rows in list_halves(31)]
    tables = [fl.mean_return_to_go(OBJECTIVE, THETA, other) for other in halves[::-1]]
    each = [
        flat(
            fl.gradient(
                PROCESS, OBJECTIVE, THETA, own, baseline=fl.baselines.time_only(table)
            ).gradient
        )
        * len(own.x)
        for own, table in zip(halves, tables, strict=True)
    ]
    ours = fl.gradient(PROCESS, OBJECTIVE, THETA, DATA)
    np.testing.assert_allclose(flat(ours.gradient), sum(each) / 31, rtol=1e-5)


@pytest.mark.long
def test_chunks_and_small_blocks_are_the_whole():
    whole = fl.gradient(PROCESS, OBJECTIVE, THETA, DATA)
    chunks = [part(0, 5), part(5, 20), part(20, 31)]
    for source, size in ((chunks, 2**20), (DATA, 3 * 12 * 4)):
        ours = fl.gradient(PROCESS, OBJECTIVE, THETA, source, block_bytes=size)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


def test_a_measured_substrate_runs_no_pilot():
    counts = []

    def substrate(key, theta, count):
        counts.append(count)
        return RUN(key, theta, count)

    estimator = fl.ppgt(substrate, OBJECTIVE, process=PROCESS)
    estimator(KEY, THETA, 20)
    assert counts == [20]
    assert estimator.pilot == 0
    assert fl.ppgt(RUN, OBJECTIVE).pilot == 128


def test_the_halves_go_with_an_initial_baseline_that_looks_across():
    start = fl.Density(lambda th, x0: -jnp.sum((x0 - th["f"]) ** 2) / 2)
    mixed = fl.gradient(PROCESS, OBJECTIVE, THETA, DATA, start=start, initial_baseline="optimal")
    each = []
    halves = list_halves(31)
    for rows, others in (halves, halves[::-1]):
        table = fl.mean_return_to_go(OBJECTIVE, THETA, DATA._replace(x=DATA.x[others]))
        made = fl.gradient_samples(
            PROCESS,
            OBJECTIVE,
            THETA,
            DATA,
            start=start,
            baseline=fl.baselines.time_only(table),
            initial_baseline="optimal",
        )
        each.append(np.asarray(made.gradient["f"])[rows])
    np.testing.assert_allclose(flat(mixed.gradient), np.concatenate(each).mean(axis=0), rtol=1e-5)


@pytest.mark.long
def test_kernels_serve_optimal_and_carried():
    reference = SMALL.estimator("jax", baseline="optimal")(KEY, COUPLED, 40)
    ours = SMALL.estimator("cpu", baseline="optimal", dtype="float64")(KEY, COUPLED, 40)
    np.testing.assert_allclose(flat(ours.gradient), flat(reference.gradient), rtol=1e-3, atol=1e-6)
    carried = SMALL.estimator("cpu", baseline="carried")
    carried(KEY, COUPLED, 10)
    assert carried.pilot == 128
    carried(KEY, COUPLED, 10)
    assert carried.pilot == 0
    assert carried.state["table"].shape == (101,)


def test_kernels_take_the_options_of_binned():
    made = SMALL.estimator("cpu", baseline=fl.baselines.binned(bins=5, every=7, group=50))
    assert (made.baseline.bins, made.baseline.every, made.baseline.group) == (5, 7, 50)
    default = SMALL.estimator("cpu", baseline="binned").baseline
    assert (default.bins, default.every) == (20, 1)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            lambda: fl.ppgt(RUN, OBJECTIVE, baseline="carried"),
            r"'carried'; it supports none, time, mean",
        ),
        (lambda: fl.ppgt(RUN, OBJECTIVE, baseline="optmal"), 'Did you mean "optimal"'),
        (lambda: fl.ppgt(RUN, OBJECTIVE, baseline="binned"), r"binned\(lambda"),
        (
            lambda: fl.ppgt(
                RUN, OBJECTIVE, baseline=fl.baselines.binned(lambda th, x: x[0], every=2)
            ),
            "`every` = 2",
        ),
        (
            lambda: SMALL.estimator("jax", baseline="carried"),
            "backend=\"jax\" does not support the baseline 'carried'",
        ),
        (lambda: SMALL.estimator("jax", baseline=fl.baselines.binned(group=10)), "`group` = 10"),
        (
            lambda: SMALL.estimator("cpu", baseline="mean"),
            "'mean'; it supports none, time, optimal, binned",
        ),
        (
            lambda: SMALL.estimator(
                "cpu", baseline=fl.baselines.Baseline(lambda kick: kick.returns)
            ),
            "one's own",
        ),
        (
            lambda: SMALL.estimator("cpu", baseline=fl.baselines.binned(lambda th, x: x[0])),
            "without a condition",
        ),
        (lambda: SMALL.estimator("cpu", baseline=np.full(101, np.nan)), "not finite"),
        (lambda: Plan(baseline="binned"), "training does not support the baseline 'binned'"),
        (
            lambda: fl.baselines.time_only(jnp.array([1.0, jnp.nan])),
            "not finite at 1 of 2 times, first at index 1",
        ),
        (lambda: fl.baselines.time_only(pilot=0), "got 0"),
        (lambda: fl.baselines.binned(lambda th, x: x[0], every=0), "`every`.*got 0"),
    ],
)
def test_refusals(ask, words):
    with pytest.raises(ValueError, match=words):
        ask()


def test_a_number_of_trajectories_is_no_table():
    with pytest.raises(TypeError, match=r"time_only\(pilot=128\)"):
        fl.baselines.time_only(128)
    with pytest.raises(TypeError, match="got float"):
        fl.ppgt(RUN, OBJECTIVE, baseline=0.5)
