"""Kernels for a GPU give the numbers of the JAX path on the same noise; emulated where there is
none.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import events
import first_passage
import fluctua as fl
import problems
from cuda_device import has_gpu
from fluctua.compiled import backend, cuda, jump_twin, kernels, passes, twin, whole_estimate
from fluctua.compiled.scalar import Unsupported
from fluctua.core.draws import philox
from kernel_cases import (
    assert_equal,
    benchmark_process,
    problem_in_double,
    sample,
    shift_parameters,
)
from own_processes import PROCESSES

pytestmark = pytest.mark.long


@pytest.fixture
def kernels_of_device(device):
    """Kernels are made afresh: those of an emulated device are no use to another one."""
    caches = (
        kernels.make_kernel,
        twin.make_twin_kernel,
        jump_twin.make_jump_twin_kernel,
        cuda.compile_module,
        cuda.is_available,
    )
    prepared = (kernels.KERNELS.clear, whole_estimate.forget_served)
    clear = [*prepared, *(kept.cache_clear for kept in caches)]
    for forget in clear:
        forget()
    yield device
    for forget in clear:
        forget()


on_a_gpu = pytest.mark.skipif(
    not has_gpu(), reason="no GPU, or no CuPy; emulated, the cases beside it have to do"
)


def in_double_precision(make, start, baseline):
    case, context = problem_in_double(make, start)
    assert_equal(case, "cuda", 1e-9, baseline=baseline, context=context)


def of_the_benchmark(name, baseline, relative, **options):
    with (
        jax.enable_x64(False),
        jax.default_matmul_precision("highest"),
    ):  # on a GPU, JAX's own is TF32
        own = benchmark_process(name)
        case = (own.process, own.objective, own.start, np.arange(41) * own.dt, own.theta)
        assert_equal(case, "cuda", relative, baseline=baseline, **options)


@pytest.mark.usefixtures("kernels_of_device")
def test_arrays_of_an_ensemble_that_jax_begins(monkeypatch):  # all kinds of rewards; a random start
    monkeypatch.setattr(cuda, "HELPERS", 0)
    in_double_precision(problems.driven_rotor, "density", "optimal")


@pytest.mark.usefixtures("kernels_of_device")
@pytest.mark.parametrize("nodes", [0, cuda.MAX_UNROLLED])  # one step after the other, and several
def test_an_ensemble_that_the_kernel_begins(monkeypatch, nodes):
    monkeypatch.setattr(cuda, "MAX_UNROLLED", nodes)
    of_the_benchmark(
        "pendulum", "optimal", 2e-5, wiener=philox
    )  # as on the CPU, and 1e-6 of the noise's functions


@pytest.mark.usefixtures("kernels_of_device")
@pytest.mark.parametrize("memory", [cuda.NORMAL_BYTES, 0])  # of four steps, and of one
@pytest.mark.parametrize("helpers", [0, cuda.HELPERS])
def test_the_fastest_noise(monkeypatch, memory, helpers):
    monkeypatch.setattr(cuda, "NORMAL_BYTES", memory)
    monkeypatch.setattr(cuda, "HELPERS", helpers)
    of_the_benchmark("pendulum", "time", 2e-5, wiener="philox7")


@pytest.mark.usefixtures("kernels_of_device")
def test_a_twin_with_the_fastest_noise():
    of_the_benchmark("pendulum", fl.Twin(batch=25), 1e-4, wiener="philox7")


@pytest.mark.usefixtures("kernels_of_device")
def test_a_better_step():
    with jax.enable_x64(False):
        own = benchmark_process("pendulum")
        process = own.process._replace(noiseless=(0,), integrator="rk4")
        t = np.arange(41) * (8 * own.dt)
        case = (process, own.objective, own.start, t, own.theta)
        assert_equal(case, "cuda", 2e-5, baseline="time")


@pytest.mark.usefixtures("kernels_of_device")
def test_uneven_steps():  # equal ones share their numbers
    with jax.enable_x64(False):
        own = benchmark_process("pendulum")
        t = np.cumsum(np.where(np.arange(41) % 3 == 0, 1.7, 1.0)) * own.dt
        case = (own.process, own.objective, own.start, t, own.theta)
        assert_equal(case, "cuda", 2e-5, baseline="mean")


@pytest.mark.usefixtures("kernels_of_device")
def test_sums_that_registers_do_not_hold(monkeypatch):
    monkeypatch.setattr(cuda, "REGISTERS", 5)  # of the pendulum, six
    of_the_benchmark("pendulum", "time", 2e-5)


@pytest.mark.usefixtures("kernels_of_device")
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_numbers_that_single_precision_does_not_hold(place):
    with jax.enable_x64(False):
        process = fl.Process(lambda theta, x: -(theta**2) * x, lambda theta, x: jnp.ones(1))
        objective = fl.Objective(running=lambda theta, x: x[0])
        theta = jnp.float32(
            1e-25
        )  # kernels have its square from double precision: below the least number of all
        case = (process, objective, np.ones(1), np.arange(5) * 0.1, theta)
        with pytest.raises(ValueError, match="range of float32"):
            sample(place, case, "none")


@pytest.mark.usefixtures("kernels_of_device")
def test_a_twin():
    of_the_benchmark("pendulum", fl.Twin(batch=25), 1e-4)  # two batches


@pytest.mark.usefixtures("kernels_of_device")
def test_events_of_a_self_starting_kernel():
    with jax.enable_x64(False):
        assert_equal(events.ring_of_genes()[:5], "cuda", 2e-5, baseline="optimal")


@pytest.mark.usefixtures("kernels_of_device")
@pytest.mark.parametrize(("order", "baseline"), [(2, "mean"), (1, "optimal")])
def test_a_twin_of_jumps(order, baseline):  # a protocol, all kinds of rewards, a wrong model
    twin = fl.Twin(order=order, baseline=baseline, theta=shift_parameters)
    assert_equal(events.driven()[:5], "cuda", 1e-9, baseline=twin)


@pytest.mark.usefixtures("kernels_of_device")
def test_a_twin_of_jumps_in_single_precision():
    with jax.enable_x64(False):
        assert_equal(events.ring_of_genes()[:5], "cuda", 2e-5, baseline=fl.Twin(order=2))


@pytest.mark.usefixtures("kernels_of_device")
def test_a_parameter_that_enters_a_noiseless_component_later_is_refused_by_name():
    process = fl.Process(
        lambda theta, x, t: jnp.array([x[1] + theta * (t > 0.5), -x[1]]),
        lambda theta, x: jnp.array([0.0, 0.5]),
    )
    objective = fl.Objective(terminal=lambda theta, x: x[0])
    case = (process, objective, np.zeros(2), np.linspace(0, 1, 21), np.array(0.3))
    with pytest.raises(ValueError, match=r"index 11 \(t = 0.55.*component 0 .*`theta`"):
        sample("cuda", case, "time")


@pytest.mark.usefixtures("kernels_of_device")
@pytest.mark.parametrize(("overshoot", "baseline"), [(None, "time"), ("bridge", "mean")])
def test_trajectories_that_stop(overshoot, baseline):
    *case, context = first_passage.moving_interval(overshoot)
    assert_equal(case, "cuda", 1e-9, baseline=baseline, context=context)


@on_a_gpu
@pytest.mark.parametrize("baseline", ["none", "time", "mean"])
def test_trajectories_that_stop_in_single_precision(baseline):
    with jax.enable_x64(False):
        times = np.linspace(0, 1, 21)
        theta = first_passage.parameters()
        case = (first_passage.PROCESS, first_passage.OBJECTIVE, np.array([0.2]), times, theta)
        assert_equal(case, "cuda", 2e-5, baseline=baseline)


@on_a_gpu
def test_events_with_diffusion_between_and_a_context():
    *case, context = events.driven_with_diffusion()
    assert_equal(case, "cuda", 1e-9, baseline="mean", context=context)


@on_a_gpu
def test_a_twin_of_second_order():
    of_the_benchmark("genes", fl.Twin(batch=25, order=2), 1e-3)


@on_a_gpu
def test_dense_noise_a_context_and_a_start_that_moves():
    in_double_precision(problems.non_normal, "fade part", "mean")


@on_a_gpu
@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("baseline", ["time", "mean", "optimal", "twin"])
def test_processes_of_the_benchmark(name, baseline):
    of_the_benchmark(name, baseline, 2e-4)


@on_a_gpu
def test_a_call_repeats_itself_to_the_last_bit():
    own = benchmark_process("pendulum")
    case = (own.process, own.objective, own.start, np.linspace(0, 1, 41), own.theta)
    calls = [sample("cuda", case, "optimal") for _ in range(2)]
    for a, b in zip(*calls, strict=True):
        np.testing.assert_array_equal(a, b)


def pendulum_estimator(baseline, **options):
    own = benchmark_process("pendulum")
    simulator = fl.simulator(
        own.process, own.start, np.arange(42) * 0.05, backend="cuda", **options
    )
    return fl.ppgt(simulator, own.objective, baseline=baseline), own.theta


def refuse_samples(*_):
    raise AssertionError("the estimate was left to the path by single gradients")


def assert_same_estimate(estimator, theta, count, monkeypatch, relative):
    """The estimate that the device makes is that of the single gradients."""
    key = jax.random.key(5)
    expected = fl.reduce_samples(estimator.samples(key, theta, count))
    with monkeypatch.context() as patch:
        patch.setattr(passes, "collect_samples", refuse_samples)
        got = estimator(key, theta, count)
    assert got.count == expected.count
    for name in ("gradient", "stderr", "second_moment", "value", "value_stderr"):
        pairs = zip(*(jax.tree.leaves(getattr(v, name)) for v in (got, expected)), strict=True)
        for one, other in pairs:
            assert isinstance(one, jax.Array)
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_allclose(one, other, rtol=relative)
    # an interval ends where its width, not its distance from zero, is what must agree
    for one, other in zip(
        (*got.interval, *got.value_interval),
        (*expected.interval, *expected.value_interval),
        strict=True,
    ):
        width = (
            jax.tree.map(lambda low, high: high - low, *expected.interval)
            if isinstance(one, dict)
            else expected.value_interval[1] - expected.value_interval[0]
        )
        jax.tree.map(
            lambda a, b, w: np.testing.assert_allclose(a, b, atol=100 * relative * float(w)),
            one,
            other,
            width,
        )


BASELINES = ["none", "time", "mean", "optimal", "table"]


@pytest.mark.usefixtures("kernels_of_device")
@pytest.mark.parametrize("baseline", BASELINES)
def test_a_whole_estimate_on_the_device(monkeypatch, baseline):
    table = fl.baselines.time_only(jnp.linspace(1, 0, 42))
    with jax.enable_x64(True):
        estimator, theta = pendulum_estimator(table if baseline == "table" else baseline)
        theta = jax.tree.map(lambda leaf: np.asarray(leaf, float), theta)
        assert_same_estimate(estimator, theta, 70, monkeypatch, 1e-9)


@pytest.mark.usefixtures("kernels_of_device")
@pytest.mark.parametrize("count", [2, 1100])  # no moments of tails; more than one block's threads
def test_a_whole_estimate_in_single_precision(monkeypatch, count):
    with jax.enable_x64(False):
        estimator, theta = pendulum_estimator("time", wiener="philox7")
        assert_same_estimate(estimator, theta, count, monkeypatch, 1e-4)


@pytest.mark.usefixtures("kernels_of_device")
def test_a_whole_estimate_with_a_noise_matrix(monkeypatch):
    process = fl.Process(
        lambda theta, x: -theta["k"] * x,
        lambda theta, x: theta["s"] * jnp.array([[1.0, 0.2, 0.1], [0.2, 1.0, 0.3]]),
    )
    objective = fl.Objective(running=lambda theta, x: x[0] * x[1])
    simulator = fl.simulator(process, jnp.ones(2), jnp.linspace(0, 1, 22), backend="cuda")
    theta = {"k": jnp.array(0.7), "s": jnp.array(0.3)}
    estimator = fl.ppgt(simulator, objective, baseline="mean")
    assert_same_estimate(estimator, theta, 50, monkeypatch, 1e-9)
    with pytest.raises(ValueError, match="singular"):  # not as at the first call
        estimator(jax.random.key(0), theta | {"s": jnp.array(0.0)}, 50)


@on_a_gpu
@pytest.mark.parametrize("baseline", ["none", "time", "mean", "optimal"])
def test_a_whole_estimate_transfers_nothing_by_jax(baseline):
    estimator, theta = pendulum_estimator(baseline)
    keys = jax.random.split(jax.random.key(0))
    first, second = keys[0], keys[1]
    estimator(first, theta, 40)
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(estimator(second, theta, 40))


@pytest.mark.usefixtures("kernels_of_device")
def test_one_trajectory_has_no_error(monkeypatch):
    estimator, theta = pendulum_estimator("none")
    estimate = estimator(jax.random.key(0), theta, 1)
    assert np.isnan(jax.tree.leaves(estimate.stderr)).all()
    assert np.isnan(jax.tree.leaves(estimate.interval)).all()
    assert np.isfinite(jax.tree.leaves(estimate.gradient)).all()


@pytest.mark.usefixtures("kernels_of_device")
def test_checks_of_numbers_at_every_call():
    """A later call with other numbers is checked like the first one."""
    process = fl.Process(
        lambda theta, x: theta["k"] * x**3 + theta["drive"] * jnp.array([0.0, 1.0]),
        lambda theta, x: theta["s"] * jnp.ones(2),
    )
    objective = fl.Objective(terminal=lambda theta, x: x[0] + x[1])
    simulator = fl.simulator(process, jnp.ones(2), jnp.linspace(0, 1, 11), backend="cuda")
    estimator = fl.ppgt(simulator, objective)
    theta = {"k": jnp.array(-1.0), "drive": jnp.array(0.1), "s": jnp.array([0.5, 0.5])}
    key = jax.random.key(1)
    good = estimator(key, theta, 40)
    with pytest.raises(ValueError, match=r"theta\['k'\]. is not finite"):
        estimator(key, theta | {"k": jnp.array(jnp.nan)}, 40)
    with pytest.raises(ValueError, match=r"component 1 .*`drive`"):
        estimator(key, theta | {"s": jnp.array([0.5, 0.0])}, 40)
    with pytest.raises(FloatingPointError, match="time step"):
        estimator(key, theta | {"k": jnp.array(60.0)}, 40)
    again = estimator(key, theta, 40)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(good), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("cupy", "gpu", "parameters", "place"),
    [
        (True, True, 3, "cuda"),
        (True, False, 256, "cuda"),
        (False, False, 256, "cpu"),
        (True, True, 256, None),
        (False, True, 3, None),
    ],
)
def test_auto_leaves_to_jax_what_it_does_faster(monkeypatch, cupy, gpu, parameters, place):
    monkeypatch.setattr(cuda, "is_available", lambda: cupy)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if gpu else "cpu")
    choose = lambda: backend.Compiled("auto").choose_place(np.zeros(parameters))
    if place is not None:
        assert choose() == place
        return
    with pytest.raises(Unsupported, match="256 parameters" if cupy else "CuPy"):
        choose()


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_the_message_says_what_to_do():
    own = PROCESSES["double well"]()
    with pytest.raises((ImportError, RuntimeError), match="backend='cpu'"):
        fl.simulator(own.process, own.start, jnp.linspace(0, 1, 11), backend="cuda")
