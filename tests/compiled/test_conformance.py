"""A kernel gives the numbers of the JAX path, on the same noise: to rounding, whatever the
process and the baseline.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import events
import first_passage
import fluctua as fl
import problems
from fluctua.compiled import cpu
from fluctua.core.draws import philox
from kernel_cases import (
    COUNT,
    assert_equal,
    benchmark_process,
    problem_in_double,
    shift_parameters,
)


@pytest.mark.parametrize(
    ("make", "start", "baseline"),
    [
        (
            problems.non_normal,
            "fade part",
            "mean",
        ),  # dense noise, context, time-dependent, a start that moves with θ
        # running, step, initial and terminal rewards; a random start
        pytest.param(problems.driven_rotor, "density", "optimal", marks=pytest.mark.long),
        (
            problems.multiplicative,
            "fixed",
            "none",
        ),  # noise that depends on the state, fewer components than noises
    ],
)
def test_double_precision(make, start, baseline):
    with jax.enable_x64(True):
        case, context = problem_in_double(make, start)
        assert_equal(case, "cpu", 1e-9, baseline=baseline, context=context)


@pytest.mark.long
def test_weights_of_a_long_run_whose_scores_are_not_kept(monkeypatch):
    monkeypatch.setattr(cpu, "KEPT_BYTES", 0)
    with jax.enable_x64(True):
        case, context = problem_in_double(problems.driven_rotor, "density")
        assert_equal(case, "cpu", 1e-9, baseline="optimal", context=context)


def pendulum(t):
    own = benchmark_process("pendulum")
    return own.process, own.objective, own.start, t, own.theta


@pytest.mark.parametrize(
    ("wiener", "baseline"),
    [("threefry", "time"), (philox, "optimal"), ("philox7", "time")],
    ids=["threefry", "philox", "philox7"],
)
def test_single_precision_with_a_silent_component(wiener, baseline):
    with jax.enable_x64(False):
        case = pendulum(np.linspace(0, 1, 41))
        # JAX reads the kick off the rounded states: 40 kicks of 0.4·√0.025, each with an error of
        # 6e-8·|x|
        assert_equal(case, "cpu", 1e-5, baseline=baseline, dtype=np.float32, wiener=wiener)


@pytest.mark.parametrize("baseline", ["mean", fl.Twin(batch=13)], ids=["mean", "twin"])
def test_the_fastest_noise_of_several_components(baseline):
    """Twenty-one steps: segments of a twin begin within the four steps of a block. Its batches
    are of unequal size.
    """
    with jax.enable_x64(True):
        process = fl.Process(
            lambda theta, x: -theta["k"] * x + jnp.roll(x, 1) ** 2,
            lambda theta, x: theta["s"] * jnp.ones(3),
        )
        theta = {"k": np.array(1.3), "s": np.array(0.2)}
        objective = fl.Objective(running=lambda theta, x: x[0] * x[2])
        case = (process, objective, np.array([0.1, 0.2, 0.3]), np.linspace(0, 1, 22), theta)
        assert_equal(case, "cpu", 1e-9, baseline=baseline, wiener="philox7")


def test_weights_of_a_pendulum_whose_scores_are_not_kept(monkeypatch):
    monkeypatch.setattr(cpu, "KEPT_BYTES", 0)
    with jax.enable_x64(True):
        assert_equal(pendulum(np.linspace(0, 2, 21)), "cpu", 1e-9, baseline="optimal")


LINEAR = fl.integrators.Exponential(
    lambda theta: jnp.array([[0.0, 0.0], [0.0, -1.0]]) * theta["friction"]
)


@pytest.mark.parametrize(
    ("step", "baseline"),
    [
        pytest.param("rk4", "optimal", marks=pytest.mark.long),
        pytest.param(LINEAR, "none", marks=pytest.mark.long),
        ("heun", "twin"),
    ],
)
def test_better_steps_in_double_precision(step, baseline):
    with jax.enable_x64(True):
        process, *rest = pendulum(np.linspace(0, 2, 21))
        process = process._replace(noiseless=(0,), integrator=step)
        assert_equal((process, *rest), "cpu", 1e-9, baseline=baseline)


@pytest.mark.long
def test_jumps_with_diffusion_in_double_precision():
    with jax.enable_x64(True):
        *case, context = events.driven_with_diffusion()
        assert_equal(case, "cpu", 1e-9, baseline="time", context=context)


@pytest.mark.long
def test_jumps_in_single_precision():
    with jax.enable_x64(False):
        *case, _ = events.ring_of_genes()
        # some 60 events, each with a time that is known to 6e-8; no choice of a channel is as
        # near as that
        assert_equal(case, "cpu", 1e-5, baseline="optimal", dtype=np.float32)


def test_changes_of_random_size_stay_on_jax():
    size = fl.RandomJump(lambda key, theta, x: jnp.ones(1), lambda theta, change: jnp.zeros(()))
    process = fl.Jumps(lambda theta, x: theta[None], size)
    simulator = fl.simulator(process, jnp.zeros(1), jnp.linspace(0, 1, 5), backend="cpu")
    estimator = fl.ppgt(simulator, fl.Objective(terminal=lambda theta, x: x[0]), process=process)
    with pytest.raises(ValueError, match="RandomJump.*random size"):
        estimator(jax.random.key(0), jnp.array(2.0), COUNT)


def test_a_twin_in_double_precision():
    """Of a wrong model, with all kinds of rewards and a random start, in two batches."""
    twin = fl.Twin(theta=shift_parameters, batch=20, order=2)
    with jax.enable_x64(True):
        (process, objective, start, t, theta), _ = problem_in_double(
            problems.driven_rotor, "density"
        )
        results = []
        for backend in ("jax", "cpu"):
            simulator = fl.simulator(process, start, t, backend=backend)
            estimator = fl.ppgt(simulator, objective, process=process, baseline=twin)
            results.append(
                jax.tree.map(np.asarray, estimator.split(jax.random.key(3), theta, COUNT))
            )
        assert "direct term of" in estimator.source(theta)
    for of_jax, of_kernel in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(of_kernel, of_jax, rtol=0, atol=1e-9 * np.abs(of_jax).max())


def split_jumps(backend, case, twin):
    """The parts of the gradients with a twin of a jump process."""
    simulator = fl.simulator(case.process, case.start, case.t, backend=backend)
    estimator = fl.ppgt(simulator, case.objective, baseline=twin)
    parts = estimator.split(jax.random.key(3), case.theta, COUNT)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(parts)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("order", "baseline"),
    [
        (2, "mean"),
        (1, "optimal"),
        (2, "none"),
        (1, fl.baselines.time_only(np.linspace(0.4, 0.1, 13))),
    ],
)
def test_a_twin_of_jumps_in_double_precision(order, baseline):
    """Of a wrong model, with a protocol and all kinds of rewards."""
    with jax.enable_x64(True):
        case = events.driven()
        twin = fl.Twin(order=order, baseline=baseline, theta=shift_parameters)
        results = [split_jumps(backend, case, twin) for backend in ("jax", "cpu")]
    for of_jax, of_kernel in zip(*results, strict=True):
        np.testing.assert_allclose(of_kernel, of_jax, rtol=0, atol=1e-11 * np.abs(of_jax).max())


@pytest.mark.long
def test_a_twin_of_jumps_in_single_precision():
    with jax.enable_x64(False):
        case = events.ring_of_genes()
        results = [split_jumps(backend, case, fl.Twin(order=2)) for backend in ("jax", "cpu")]
    # times are known to 6e-8 and kernels divide to 1e-7; some 60 events
    for of_jax, of_kernel in zip(*results, strict=True):
        np.testing.assert_allclose(of_kernel, of_jax, rtol=0, atol=1e-5 * np.abs(of_jax).max())


def test_a_twin_of_jumps_with_guesses_of_their_own_stays_on_jax():
    case = events.driven()
    simulator = fl.simulator(
        case.process, case.start, case.t, context=lambda key: jnp.ones(()), backend="cpu"
    )
    estimator = fl.ppgt(simulator, case.objective, baseline=fl.Twin())
    with pytest.raises(ValueError, match="random start or a context"):
        estimator(jax.random.key(0), case.theta, COUNT)


@pytest.mark.parametrize("baseline", ["optimal", "twin"])
def test_a_kernel_refuses_a_parameter_that_enters_a_silent_component_later(baseline):
    """`f` moves the angle, which has no noise, after t = 1/2: named where it does, as on JAX."""
    process, objective, start, t, theta = pendulum(np.linspace(0, 1, 21))
    late = lambda th, x, t: process.drift(th, x) + jnp.array([th["f"] * (t > 0.5), 0.0])
    moved = fl.Process(late, process.noise)
    run = fl.simulator(moved, start, t, backend="cpu")
    with pytest.raises(ValueError, match=r"index 11 \(t = 0.55.*component 0 .*`f`"):
        fl.ppgt(run, objective, baseline=baseline)(
            jax.random.key(3), theta | {"f": np.array(0.1)}, COUNT
        )


@pytest.mark.parametrize(
    ("overshoot", "baseline"),
    [
        (None, "mean"),  # kernels weigh trajectories alike with a bridge and without
        *(
            pytest.param("bridge", baseline, marks=pytest.mark.long)
            for baseline in ("none", "time", "mean")
        ),
    ],
)
def test_trajectories_that_stop_in_double_precision(overshoot, baseline):
    *case, context = first_passage.moving_interval(overshoot)
    # the last one left has a baseline of what rounding leaves of the others: 1e-12 of their weight
    assert_equal(case, "cpu", 1e-9, baseline=baseline, context=context)


@pytest.mark.long
def test_trajectories_that_stop_in_single_precision():
    with jax.enable_x64(False):
        process = first_passage.PROCESS
        theta = first_passage.parameters()
        times = np.linspace(0, 1, 21)
        case = (process, first_passage.OBJECTIVE, np.array([0.2]), times, theta)
        # as without a stop; no state is as near to a level as that
        assert_equal(case, "cpu", 1e-5, baseline="mean", dtype=np.float32)


def test_kernels_name_what_they_do_not_stop():
    simulator = first_passage.simulator(0.1, 5, backend="cpu")
    theta = first_passage.parameters()
    optimal = fl.ppgt(simulator, first_passage.OBJECTIVE, baseline="optimal")
    with pytest.raises(ValueError, match="baseline 'optimal' with a `stop`"):
        optimal(jax.random.key(0), theta, COUNT)
    walk = fl.Jumps(lambda theta, x: theta["mu"][None], jnp.array([[1.0]]))
    jumping = fl.simulator(walk, jnp.zeros(1), jnp.arange(3.0), backend="cpu")
    with pytest.raises(ValueError, match="jump processes that stop"):
        fl.ppgt(jumping, first_passage.OBJECTIVE, baseline="none")(jax.random.key(0), theta, COUNT)
