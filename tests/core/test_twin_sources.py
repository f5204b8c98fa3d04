"""With a twin, too, streams, recordings and chunks are one estimate, and none needs memory of
order E·T.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.twin.sweep import UNEVEN, choose_length, split_segments
from processes import numbers_printed_by
from streams import KEY, OBJECTIVE, PROCESS, RUN, THETA, T, same, store

EVEN = T[:13]  # 12 steps in three segments of 4, which share what is compiled
TWINS = {
    "first order": fl.Twin(batch=10),
    "second order": fl.Twin(order=2, baseline=fl.baselines.optimal()),
    "table": fl.Twin(baseline=fl.baselines.time_only(jnp.linspace(1, 0, len(T)))),
}


@pytest.mark.parametrize(
    "name", [pytest.param("first order", marks=pytest.mark.long), "second order"]
)
def test_streamed_equals_recorded_equals_chunked(name):
    # 14 steps in segments of 4, the last one short; 37 trajectories in batches of 9 and 10
    twin, whole = TWINS[name], store(37)
    streamed = fl.ppgt(RUN, OBJECTIVE, process=PROCESS, baseline=twin)(KEY, THETA, 37)
    recorded = fl.gradient(PROCESS, OBJECTIVE, THETA, whole, baseline=twin)
    x, context = np.asarray(whole.x), np.asarray(whole.context)
    parts = [fl.Trajectories(T, x[a:b], context[a:b]) for a, b in ((0, 10), (10, 11), (11, 37))]
    chunked = fl.gradient(PROCESS, OBJECTIVE, THETA, parts, baseline=twin, block_bytes=1)
    same(streamed, recorded)
    same(recorded, chunked)


def test_segments_are_as_long_as_each_other_where_that_costs_little():
    for steps in range(1, 400):
        bounds = split_segments(steps, choose_length(steps))
        assert [n for n, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
        assert (bounds[0][0], bounds[-1][1]) == (0, steps)
        assert max(stop - n for n, stop in bounds) <= UNEVEN * (np.sqrt(steps) + 1)
        assert len(bounds) <= np.ceil(np.sqrt(steps))
    for steps in (40, 60, 100, 200, 250, 300, 500, 1000, 5000):
        assert steps % choose_length(steps) == 0
    assert choose_length(61) == 8


@pytest.mark.long
def test_a_substrate_that_is_not_a_simulator():
    box = lambda key, theta, count: RUN(key, theta, count)
    twin = TWINS["first order"]
    same(
        fl.ppgt(box, OBJECTIVE, process=PROCESS, baseline=twin)(KEY, THETA, 20),
        fl.ppgt(RUN, OBJECTIVE, process=PROCESS, baseline=twin)(KEY, THETA, 20),
    )


@pytest.mark.long
def test_batches_do_not_matter_to_a_baseline_that_leaves_none_out():
    run = fl.simulator(PROCESS, np.array([0.3, -0.2]), EVEN, context=RUN.recipe.context)
    estimates = [
        fl.ppgt(
            run,
            OBJECTIVE,
            process=PROCESS,
            baseline=fl.Twin(baseline=fl.baselines.none(), batch=batch),
        )(KEY, THETA, 20)
        for batch in (20, 3)
    ]
    same(*estimates)


@pytest.mark.long
def test_one_noise_free_path_serves_all_where_all_are_alike():
    process = fl.Process(lambda th, x: th["k"] * (jnp.sin(x) - x), PROCESS.noise)
    alike = fl.simulator(process, np.array([0.3, -0.2]), EVEN)
    apart = fl.simulator(process, np.array([0.3, -0.2]), EVEN, context=lambda key: jnp.zeros(()))
    twin = fl.Twin(order=2)
    same(*(fl.ppgt(run, OBJECTIVE, baseline=twin)(KEY, THETA, 20) for run in (alike, apart)))
    paths = alike(jax.random.split(KEY)[0], THETA, 20)
    same(
        fl.gradient(process, OBJECTIVE, THETA, paths, baseline=twin),
        fl.gradient(process, OBJECTIVE, THETA, paths._replace(context=np.zeros(20)), baseline=twin),
    )


@pytest.mark.long
def test_a_noiseless_simulation_has_nothing_to_correct():
    # X is then the twin's own path: Λ = 0, and the direct part of a trajectory is the gradient of
    # its return.
    from fluctua.core.draws import no_noise

    run = RUN._replace(recipe=RUN.recipe._replace(wiener=no_noise))
    drift_only = {"k": THETA["k"]}
    process = fl.Process(PROCESS.drift, lambda th, x: 0.4 * jnp.ones_like(x))
    run = run._replace(
        recipe=run.recipe._replace(process=fl.simulator(process, np.zeros(2), T).recipe.process)
    )
    parts = fl.ppgt(run, OBJECTIVE, baseline=fl.Twin()).split(KEY, drift_only, 8)
    k_run, _ = jax.random.split(KEY)
    slope = fl.reference.pathwise(OBJECTIVE, run)(k_run, drift_only, 8).gradient
    np.testing.assert_allclose(parts.direct["k"].mean(), slope["k"], rtol=1e-12)
    assert np.abs(parts.mean_lambda).max() < 1e-13


@pytest.mark.long
def test_a_large_state_without_a_terminal_reward_in_single_precision():
    # S_T = 0 is then known to the compiler, and a product with it once came out as what happened to
    # be in memory.
    with jax.enable_x64(False):
        process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: 0.1 * jnp.ones_like(x))
        run = fl.simulator(process, jnp.ones(286), jnp.linspace(0, 1, 10))
        estimator = fl.ppgt(run, fl.Objective(lambda th, x: x @ x), baseline=fl.Twin(order=2))
        parts = estimator.split(KEY, {"k": jnp.float32(0.8)}, 16)
    # linear and quadratic: nothing but roundings is left, of returns of 286 terms or so
    assert np.abs(parts.mean_lambda).max() < 1e-4 * np.abs(parts.returns).max()


MEMORY = """
import jax, jax.numpy as jnp, fluctua as fl
from processes import peak_memory, reset_peak_memory
process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: th["s"] * jnp.ones_like(x))
objective = fl.Objective(running=lambda th, x: x @ x)
run = fl.simulator(process, jnp.ones(16), jnp.linspace(0, 2, 1_251), backend="jax")
theta = {"k": jnp.asarray(1.0), "s": jnp.asarray(0.5)}
estimator = fl.ppgt(run, objective, baseline=fl.Twin())
estimator(jax.random.key(0), theta, 512)
reset_peak_memory()
before = peak_memory()
estimate = estimator(jax.random.key(0), theta, 512)
print(peak_memory() - before, float(estimate.gradient["k"]), float(estimate.stderr["k"]))
"""


@pytest.mark.long
@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="reads the peak memory from /proc, which is Linux's",
)
def test_five_hundred_trajectories_of_1250_steps_take_30_mebibytes():
    """The states alone would be 40 MB in float32, those of the twin as much again."""
    growth, slope, error = numbers_printed_by(MEMORY)
    assert growth < 30 * 2**20
    # J/16 = ∫₀² e^{−2kt} + (q/k)(1 − e^{−2kt}) dt with q = s²/2, differentiated in k at k = 1
    a, q = np.exp(-4.0), 0.5**2 / 2
    exact = 16 * ((1 - q) * (4 * a - (1 - a)) / 2 + q * (1 - a) / 2 - 2 * q)
    # Euler's own error at Δt = 1.6e-3 is 8e-5
    assert abs(slope - exact) < 4 * error + 1e-3 * abs(exact)


# ----------------------------------------------------------------------------------------- refusals


def refuse(error, match, twin=None, count=8, theta=THETA, **options):
    with pytest.raises(error, match=match):
        fl.ppgt(RUN, OBJECTIVE, baseline=fl.Twin() if twin is None else twin, **options)(
            KEY, theta, count
        )


def test_refusals():
    refuse(ValueError, r"order.*1.*2.*got 3", fl.Twin(order=3))
    refuse(ValueError, r"Twin.batch.*got 0", fl.Twin(batch=0))
    refuse(TypeError, r"function θ -> θ̃.*lambda", fl.Twin(theta=THETA))
    refuse(TypeError, r"instance.*Twin\(\)", fl.Twin)
    refuse(
        TypeError,
        r"needs a model of the drift.*without a drift",
        fl.Twin(process=fl.Process(None, PROCESS.noise)),
    )
    refuse(TypeError, r"needs a model of the drift", fl.Twin(process=PROCESS.drift))
    refuse(ValueError, r"no pilot", fl.Twin(baseline=fl.baselines.time_only()))
    refuse(TypeError, r"must be a fluctua.baselines.Baseline", fl.Twin(baseline=None))
    refuse(ValueError, r"shape \(15,\)", fl.Twin(baseline=fl.baselines.time_only(jnp.zeros(3))))
    refuse(ValueError, r"needs no table", initial_baseline=fl.baselines.time_only(jnp.zeros(15)))
    refuse(ValueError, r"full_score.*the process", score=lambda process, theta, step: theta)
    refuse(ValueError, r"needs 2 trajectories in a batch; there is 1", count=1)
    refuse(ValueError, r"there is 1.*larger Twin.batch", fl.Twin(batch=1))
    refuse(
        ValueError,
        r"twin's parameters.*not finite",
        fl.Twin(lambda th: {**th, "k": jnp.asarray(jnp.nan)}),
    )
    small = fl.Process(lambda th, x: -x[:1], lambda th, x: jnp.ones(1))
    refuse(ValueError, r"twin's process does not fit.*\(2,\); got \(1,\)", fl.Twin(process=small))


@pytest.mark.long
def test_refusals_of_numbers():
    unstable = fl.Process(lambda th, x: 1e200 * x**3 + 1e200, PROCESS.noise)
    refuse(FloatingPointError, r"twin's noise-free path overflowed", fl.Twin(process=unstable))
    kink = fl.Process(lambda th, x: -jnp.sqrt(jnp.abs(x - jnp.array([0.3, -0.2]))), PROCESS.noise)
    refuse(FloatingPointError, r"gradient of the twin's noise-free return", fl.Twin(process=kink))


def test_second_order_refuses_what_does_not_fit_in_memory():
    process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: jnp.ones_like(x))
    run = fl.simulator(process, jnp.zeros(2000), T)
    estimator = fl.ppgt(run, fl.Objective(lambda th, x: x @ x), baseline=fl.Twin(order=2))
    with pytest.raises(ValueError, match=r"2000 × 2000 numbers.*GiB.*order=1, or Twin\(batch=33\)"):
        estimator(KEY, {"k": THETA["k"]}, 300)
