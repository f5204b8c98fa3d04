"""Streams, recordings and chunks are one estimate, and none needs memory of order E·T."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from processes import numbers_printed_by
from streams import KEY, OBJECTIVE, PROCESS, RUN, THETA, T, same, store

BASELINES = {
    "optimal": fl.baselines.optimal(),
    "binned": fl.baselines.binned(lambda theta, x: {"k": x[0], "s": x[1]}, bins=4),
    "table": fl.baselines.time_only(jnp.linspace(1, 0, len(T))),
}


@pytest.mark.parametrize(
    "name", ["optimal", "binned", pytest.param("table", marks=pytest.mark.long)]
)
def test_streamed_equals_recorded_equals_chunked(name):
    baseline, whole = BASELINES[name], store(37)
    streamed = fl.ppgt(RUN, OBJECTIVE, process=PROCESS, baseline=baseline)(KEY, THETA, 37)
    recorded = fl.gradient(PROCESS, OBJECTIVE, THETA, whole, baseline=baseline)
    x, context = np.asarray(whole.x), np.asarray(whole.context)
    parts = [fl.Trajectories(T, x[a:b], context[a:b]) for a, b in ((0, 10), (10, 11), (11, 37))]
    tiny = 37 * 2 * 8 * 3  # three steps of all trajectories at a time
    chunked = fl.gradient(PROCESS, OBJECTIVE, THETA, parts, baseline=baseline, block_bytes=tiny)
    same(streamed, recorded)
    same(recorded, chunked)


def test_a_substrate_that_is_not_a_simulator():
    box = lambda key, theta, count: RUN(key, theta, count)
    measured = fl.ppgt(box, OBJECTIVE, process=PROCESS, baseline="optimal")(KEY, THETA, 20)
    same(measured, fl.ppgt(RUN, OBJECTIVE, process=PROCESS, baseline="optimal")(KEY, THETA, 20))


def test_lazy_arrays_are_read_block_by_block(tmp_path):
    whole = store(37)
    path = tmp_path / "x.npy"
    np.save(path, np.asarray(whole.x))
    lazy = fl.Trajectories(T, np.load(path, mmap_mode="r"), whole.context)
    same(
        fl.gradient(PROCESS, OBJECTIVE, THETA, whole),
        fl.gradient(PROCESS, OBJECTIVE, THETA, lazy, block_bytes=37 * 2 * 8 * 2),
    )


def test_trajectories_do_not_depend_on_how_many_there_are():
    np.testing.assert_array_equal(store(20).x, np.asarray(store(37).x)[:20])


def test_mean_return_to_go_is_the_table_a_pilot_makes():
    table = fl.mean_return_to_go(OBJECTIVE, THETA, RUN(jax.random.split(KEY)[1], THETA, 20))
    same(
        fl.ppgt(RUN, OBJECTIVE, process=PROCESS, baseline=fl.baselines.time_only(table))(
            KEY, THETA, 20
        ),
        fl.ppgt(RUN, OBJECTIVE, process=PROCESS, baseline=fl.baselines.time_only(pilot=20))(
            KEY, THETA, 20
        ),
    )


MEMORY = """
import jax, jax.numpy as jnp, fluctua as fl
from processes import peak_memory, reset_peak_memory
process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: th["s"] * jnp.ones_like(x))
objective = fl.Objective(running=lambda th, x: x[0] ** 2)
run = fl.simulator(process, jnp.ones(8), jnp.linspace(0, 2, 1_251), backend="jax")
theta = {"k": jnp.asarray(1.0), "s": jnp.asarray(0.5)}
estimator = fl.ppgt(run, objective, baseline=fl.baselines.optimal())
estimator(jax.random.key(0), theta, 1_000)
reset_peak_memory()
before = peak_memory()
estimate = estimator(jax.random.key(0), theta, 1_000)
print(peak_memory() - before, float(estimate.value), float(estimate.value_stderr))
"""


@pytest.mark.long
@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="reads the peak memory from /proc, which is Linux's",
)
def test_a_thousand_trajectories_of_1250_steps_take_20_mebibytes():
    """The states alone would be 40 MB in float32. A second pass replays the noise."""
    growth, value, error = numbers_printed_by(MEMORY)
    assert growth < 20 * 2**20
    second, total, dt = 1.0, 0.0, 2 / 1250  # E[x²] of Euler's chain, k = 1 and s = ½
    for _ in range(1250):
        total += second * dt
        second = (1 - dt) ** 2 * second + 0.5**2 * dt
    assert abs(value - total) < 4 * error
