"""Many θ in one call: each as in a call of its own, values and gradients against exact answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import first_passage
import fluctua as fl
from fluctua.compiled import backend
from fluctua.core.estimation import many

SIGMA = 0.5
STEPS = 20
T = np.linspace(0, 1, STEPS + 1)
K = 5
THETAS = {"k": np.linspace(0.5, 1.5, K), "f": np.array([[0.0], [0.3], [1.0], [-0.5], [0.2]])}
PROCESS = fl.Process(lambda th, x: -th["k"] * x + th["f"], lambda th, x: SIGMA * jnp.ones_like(x))
OBJECTIVE = fl.Objective(
    running=lambda th, x: th["k"] * x[0], terminal=lambda th, x: x[0] ** 2 + th["f"][0]
)
RATIO = fl.function_of_means(
    lambda a, b: a / b, OBJECTIVE, fl.Objective(terminal=lambda th, x: 2 + x[0])
)
JAX = fl.simulator(PROCESS, np.array([0.4]), T, backend="jax")
STOPPING = fl.simulator(first_passage.PROCESS, np.array([first_passage.START]), T, backend="jax")
TWO_DRIFTS = {
    **{name: np.full(2, number) for name, number in first_passage.THETA.items()},
    "mu": np.array([0.2, 0.8]),
}
ROUNDING = 1e-12
"""Relative: sums of 20 steps and means of hundreds of numbers in float64, with room for other
orders of addition."""


def exact_value(theta):
    """J of Euler's chain: mean and variance of X_n by recursion."""
    dt = 1 / STEPS
    factor = 1 - theta["k"] * dt

    def step(carry, _):
        mean, variance, total = carry
        total = total + theta["k"] * mean * dt
        return (factor * mean + theta["f"][0] * dt, factor**2 * variance + SIGMA**2 * dt, total), 0

    start = (jnp.asarray(0.4), jnp.asarray(0.0), jnp.asarray(0.0))
    (mean, variance, total), _ = jax.lax.scan(step, start, None, length=STEPS)
    return total + mean**2 + variance + theta["f"][0]


find_exact = jax.jit(jax.vmap(jax.value_and_grad(exact_value)))
EXACT, EXACT_GRADIENT = jax.tree.map(np.asarray, find_exact(THETAS))


def take(tree, k):
    return jax.tree.map(lambda leaf: leaf[k], tree)


def flatten(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def assert_same(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("seed", [3, range(20, 20 + K)], ids=["common", "independent"])
def test_values_are_exact_and_those_of_separate_calls(seed):
    found = fl.evaluate_many(JAX, THETAS, count=2000, seed=seed, objective=OBJECTIVE)
    assert (np.abs(found.J - EXACT) < 4 * found.J_stderr).all()
    assert found.returns.shape == (K, 2000)
    assert found.trajectories == 2000 * K
    for k, own in enumerate(np.broadcast_to(seed, K).tolist()):
        alone = fl.evaluate(JAX, take(THETAS, k), count=2000, seed=own, objective=OBJECTIVE)
        assert_same((found.J[k], found.J_stderr[k], found.dt), (alone.J, alone.J_stderr, alone.dt))


def test_common_noise_makes_differences_precise():
    """R_a − R_b has no noise but where paths differ; independent noise adds the two variances."""
    near = {"k": 1 + 0.01 * np.arange(K), "f": np.full((K, 1), 0.3)}
    errors = {}
    exact = np.diff(find_exact(near)[0])[0]
    for name, seed in {"common": 1, "independent": range(1, 1 + K)}.items():
        found = fl.evaluate_many(JAX, near, count=2000, seed=seed, objective=OBJECTIVE)
        difference = np.asarray(found.returns[1]) - np.asarray(found.returns[0])
        errors[name] = difference.std(ddof=1) / np.sqrt(2000)
        assert abs(difference.mean() - exact) < 4 * errors[name]
    assert errors["common"] < errors["independent"] / 20


@pytest.mark.long
def test_values_of_other_systems_are_those_of_separate_calls():
    estimator = fl.ppgt(JAX, RATIO)
    measured = lambda key, theta, count: JAX(key, theta, count)
    refined = {"refine": 2}
    for system, options in (
        (estimator, {}),
        (estimator, refined),
        (measured, {"objective": RATIO}),
    ):
        found = fl.evaluate_many(system, THETAS, count=50, seed=4, **options)
        for k in range(K):
            alone = fl.evaluate(system, take(THETAS, k), count=50, seed=4, **options)
            assert_same((found.J[k], found.J_stderr[k]), (alone.J, alone.J_stderr))
        assert_same(found.returns.mean(axis=1), found.J)


@pytest.mark.long
def test_values_of_trajectories_that_stop_and_of_jumps():
    decay = fl.Jumps(lambda theta, x: theta["rate"] * x, -np.eye(1))
    rates = {"rate": np.array([0.5, 1.5])}
    survivors = fl.Objective(terminal=lambda theta, x: x[0])
    decaying = fl.simulator(decay, np.array([20.0]), T, backend="jax")
    for simulator, stack, objective in (
        (STOPPING, TWO_DRIFTS, first_passage.OBJECTIVE),
        (decaying, rates, survivors),
    ):
        found = fl.evaluate_many(simulator, stack, count=40, seed=2, objective=objective)
        for k in range(2):
            alone = fl.evaluate(simulator, take(stack, k), count=40, seed=2, objective=objective)
            assert_same((found.J[k], found.J_stderr[k]), (alone.J, alone.J_stderr))
    found = fl.evaluate_many(decaying, rates, count=1000, objective=survivors)
    assert (np.abs(found.J - 20 * np.exp(-rates["rate"])) < 4 * found.J_stderr).all()


def test_one_trajectory_per_parameter_has_no_error():
    found = fl.evaluate_many(JAX, THETAS, count=1, objective=OBJECTIVE)
    assert np.isfinite(found.J).all()
    assert np.isnan(found.J_stderr).all()
    assert "5 parameters, 1 trajectory each" in repr(found)


def test_a_long_stack_runs_in_parts(monkeypatch):
    whole = fl.evaluate_many(JAX, THETAS, count=7, objective=OBJECTIVE)
    monkeypatch.setattr(many, "CPU_TRAJECTORIES", 15)  # two θ, two, and one
    same = PROCESS._replace(drift=lambda th, x: PROCESS.drift(th, x))  # to be compiled anew
    parts = fl.simulator(same, np.array([0.4]), T, backend="jax")
    assert_same(fl.evaluate_many(parts, THETAS, count=7, objective=OBJECTIVE)[:3], whole[:3])


@pytest.mark.parametrize(
    ("common", "baseline"), [(True, "time"), (True, "optimal"), (False, "time")]
)
def test_gradients_are_exact_and_those_of_separate_calls(baseline, common):
    """10,000 trajectories: a sample is a score times a square, and z of 400 is skewed, with 0.2 %
    beyond 4 in place of 0.006 %.
    """
    count = 10_000
    estimator = fl.ppgt(JAX, OBJECTIVE, baseline=baseline)
    key = jax.random.key(5)
    keys = key if common else jax.random.split(key, K)
    found = estimator.estimate_many(keys, THETAS, count)
    for k, estimate in enumerate(found):
        alone = estimator(key if common else keys[k], take(THETAS, k), count)
        assert_same(estimate, alone)
        z = (flatten(estimate.gradient) - flatten(take(EXACT_GRADIENT, k))) / flatten(
            estimate.stderr
        )
        assert np.abs(z).max() < 4


@pytest.mark.long
def test_gradients_of_functions_of_means_and_stops_are_those_of_separate_calls():
    key = jax.random.key(6)
    for estimator, stack in (
        (fl.ppgt(JAX, RATIO), THETAS),
        (fl.ppgt(STOPPING, first_passage.OBJECTIVE), TWO_DRIFTS),
        (fl.natural(fl.ppgt(JAX, OBJECTIVE)), THETAS),
        (fl.reference.spsa(OBJECTIVE, JAX), THETAS),
    ):
        found = estimator.estimate_many(key, stack, 30)
        for k, estimate in enumerate(found[:2]):
            assert_same(estimate, estimator(key, take(stack, k), 30))


def test_kernels_take_the_same_noise():
    """A kernel computes in another order: equal to rounding, here of sums of 20 steps."""
    kernel = fl.ppgt(fl.simulator(PROCESS, np.array([0.4]), T, backend="cpu"), OBJECTIVE)
    plain = fl.ppgt(JAX, OBJECTIVE)
    key = jax.random.key(7)
    for one, other in zip(
        kernel.estimate_many(key, THETAS, 30), plain.estimate_many(key, THETAS, 30), strict=True
    ):
        np.testing.assert_allclose(flatten(one.gradient), flatten(other.gradient), rtol=1e-9)
        np.testing.assert_allclose(one.value, other.value, rtol=1e-9)


def make_oscillator(noise):
    """A position without noise, a velocity with it, from a random start under a random force."""
    process = fl.Process(
        lambda th, x, t, c: jnp.stack([x[1], -th["k"] * x[0] + th["f"][0] + c]),
        lambda th, x: noise * jnp.array([0.0, 1.0]),
    )
    start = fl.Density(
        lambda th, x0: -jnp.sum(x0**2) / 2, lambda key, th: jax.random.normal(key, (2,))
    )
    return process, start, jax.random.normal


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "wiener"),
    [
        ("plain", "threefry"),
        ("plain", "philox7"),
        ("means", "threefry"),
        ("oscillator", "philox7"),
        ("stop", "threefry"),
        ("jumps", "threefry"),
    ],
)
def test_values_by_kernels_are_those_of_jax(kind, wiener, monkeypatch):
    """The same noise, added in another order: equal to rounding of sums of 20 steps."""
    start, objective, thetas, context = np.array([0.4]), OBJECTIVE, THETAS, None
    process = PROCESS
    if kind == "means":
        objective = RATIO
    if kind == "oscillator":
        process, start, context = make_oscillator(0.3)
    if kind == "stop":
        process, objective = first_passage.PROCESS, first_passage.OBJECTIVE
        thetas = TWO_DRIFTS
    if kind == "jumps":
        process = fl.Jumps(lambda th, x: th["k"] * x, -np.eye(1))
        start = np.array([9.0])
    simulators = {
        name: fl.simulator(process, start, T, backend=name, context=context, wiener=wiener)
        for name in ("jax", "cpu")
    }
    kernels = []
    collect = backend.passes.collect_returns
    monkeypatch.setattr(
        backend.passes, "collect_returns", lambda call: kernels.append(call) or collect(call)
    )
    seeds = range(3, 3 + len(jax.tree.leaves(thetas)[0]))
    for seed in (3, seeds):
        plain, compiled = (
            fl.evaluate_many(simulator, thetas, count=40, seed=seed, objective=objective)
            for simulator in simulators.values()
        )
        np.testing.assert_allclose(compiled.returns, plain.returns, rtol=1e-9, atol=1e-9)
    assert len(kernels) == 2 * len(seeds) * (2 if kind == "means" else 1)


def test_values_without_a_score_run_on_jax():
    """k acts on a position without noise: no gradient, but a value."""
    process = fl.Process(
        lambda th, x: jnp.stack([-th["k"] * x[0], th["f"][0] - x[1]]),
        lambda th, x: jnp.array([0.0, 1.0]),
    )
    simulator = fl.simulator(process, jnp.ones(2), T, backend="cpu")
    at_end = fl.Objective(terminal=lambda th, x: x[0])
    with pytest.raises(ValueError, match="noise"):
        fl.ppgt(simulator, at_end).estimate_many(jax.random.key(0), THETAS, 4)
    found = fl.evaluate_many(simulator, THETAS, count=4, objective=at_end)
    exact = (1 - np.asarray(THETAS["k"]) / STEPS) ** STEPS
    np.testing.assert_allclose(found.J, exact, rtol=1e-12)


def test_bad_stacks_are_refused():
    key = jax.random.key(0)
    estimator = fl.ppgt(JAX, OBJECTIVE)
    uneven = THETAS | {"k": np.ones(3)}
    with pytest.raises(ValueError, match=r"`thetas`.*one more axis.*\(5, 1\), \(3,\)"):
        fl.evaluate_many(estimator, uneven)
    with pytest.raises(ValueError, match=r"`thetas`.*shapes \(1,\), \(\)"):
        estimator.estimate_many(key, take(THETAS, 0), 10)
    with pytest.raises(ValueError, match=r"`key`.*\(5,\); got keys of shape \(3,\)"):
        estimator.estimate_many(jax.random.split(key, 3), THETAS, 10)
    with pytest.raises(ValueError, match=r"`key`.*\(5,\); got keys of shape \(2,\)"):
        fl.evaluate_many(estimator, THETAS, seed=[1, 2])
    with pytest.raises(ValueError, match=r"`seed`.*-1"):
        fl.evaluate_many(estimator, THETAS, seed=[-1, 0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"`count`.*0"):
        fl.evaluate_many(estimator, THETAS, count=0)
    with pytest.raises(ValueError, match="`objective=`"):
        fl.evaluate_many(JAX, THETAS)
    with pytest.raises(ValueError, match=r"`count`.*at least 3; got 2"):
        fl.evaluate_many(fl.ppgt(JAX, RATIO), THETAS, count=2)


def test_a_path_that_explodes_is_named():
    thetas = THETAS | {"k": np.array([1.0, -1e200, 1.0, 1.0, 1.0])}
    with pytest.raises(FloatingPointError, match=r"7 of 7 returns are not finite at thetas\[1\]"):
        fl.evaluate_many(JAX, thetas, count=7, objective=OBJECTIVE)
    with pytest.raises(FloatingPointError, match="time step"):
        fl.ppgt(JAX, OBJECTIVE).estimate_many(jax.random.key(0), thetas, 30)
