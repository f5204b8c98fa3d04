"""Sums over batches against exact gradients, and against single gradients of unusual structures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core import estimate as estimates
from fluctua.core.draws import Density

STATES = 4
HIDDEN = 33
STEPS = 12
T = np.linspace(0, 0.6, STEPS + 1)
BACKENDS = ["jax", "cpu"]


def flatten(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


# --------------------------------------------------------------------------------- a linear process


def make_parameters():
    """160 parameters of drift, noise, start and all rewards."""
    rng = np.random.default_rng(5)
    shapes = {
        "A": (STATES, HIDDEN),
        "b": (STATES,),
        "noise": (STATES,),
        "start": (STATES,),
        "linear": (STATES,),
        "square": (),
        "step": (),
        "end": (STATES, 2),
        "first": (),
    }
    theta = {name: rng.normal(size=shape) / 4 for name, shape in shapes.items()}
    return jax.tree.map(lambda v: np.asarray(v, np.float32), theta)


SPREAD = np.linspace(-1, 1, HIDDEN * STATES).reshape(HIDDEN, STATES) / 4
"""States → inputs of the drift: every column of A acts on all of them."""


def matrix(theta):
    return theta["A"] @ SPREAD - jnp.eye(STATES)


def noise_size(theta):
    return 0.3 * jnp.exp(theta["noise"])


PROCESS = fl.Process(
    lambda theta, x, t: matrix(theta) @ x + theta["b"] * (1 + t),
    lambda theta, x: noise_size(theta),
)
REWARDS = fl.Objective(
    running=lambda theta, x, t: theta["linear"] @ x + theta["square"] * t * jnp.sum(x**2),
    per_step=lambda theta, x, x_next: theta["step"] * jnp.sum(x * x_next),
    terminal=lambda theta, x: jnp.sum(theta["end"][:, 0] * x + theta["end"][:, 1] * x**2),
    initial=lambda theta, x: theta["first"] * jnp.sum(x**2),
)
START = Density(
    lambda theta, x: -jnp.sum((x - theta["start"]) ** 2) / (2 * 0.25),
    lambda key, theta: theta["start"] + 0.5 * jax.random.normal(key, (STATES,)),
)


def expect_return(theta, multiply):
    """J by recursion of the mean and of E[X Xᵀ]. multiply: (A, Δt) -> the matrix of a step."""
    mean = theta["start"]
    square = jnp.outer(mean, mean) + 0.25 * jnp.eye(STATES)
    total = theta["first"] * jnp.trace(square)
    dt = T[1] - T[0]
    for t in T[:-1]:
        step, push = multiply(theta, t, dt)
        rate = theta["linear"] @ mean + theta["square"] * t * jnp.trace(square)
        after = step @ mean + push
        total += rate * dt + theta["step"] * (jnp.trace(square @ step.T) + mean @ push)
        cross = jnp.outer(step @ mean, push)
        square = step @ square @ step.T + cross + cross.T + jnp.outer(push, push)
        square += dt * jnp.diag(noise_size(theta) ** 2)
        mean = after
    return total + theta["end"][:, 0] @ mean + theta["end"][:, 1] @ jnp.diag(square)


def multiply_euler(theta, t, dt):
    return jnp.eye(STATES) + matrix(theta) * dt, theta["b"] * (1 + t) * dt


@functools.cache
def expect_value_and_gradient():
    """J and its gradient at `make_parameters`, of Euler's steps."""
    evaluate = jax.jit(jax.value_and_grad(expect_return), static_argnums=1)
    return jax.tree.map(np.asarray, evaluate(make_parameters(), multiply_euler))


@pytest.mark.parametrize(("backend", "wiener"), [("jax", "philox7"), ("cpu", "threefry")])
def test_drift_noise_start_and_rewards_against_the_exact_gradient(backend, wiener):
    theta = make_parameters()
    value, exact = expect_value_and_gradient()
    substrate = fl.simulator(PROCESS, START, T, backend=backend, wiener=wiener)
    estimate = fl.ppgt(substrate, REWARDS)(jax.random.key(0), theta, 20_000)
    assert estimate.batches == 40
    assert abs(estimate.value - value) < 4 * estimate.value_stderr
    error = flatten(estimate.gradient) - flatten(exact)
    z = error / flatten(estimate.stderr)
    # Student's t with 39 degrees of freedom: 160 numbers above 5.5 by chance once in 2,000
    assert np.abs(z).max() < 5.5
    # the 33 columns of A move four states: about 30 independent numbers
    assert 0.5 < np.sqrt(np.mean(z**2)) < 1.6
    # explicit terms alone would have a bias of hundreds of standard errors
    assert np.abs(flatten(exact) / flatten(estimate.stderr)).max() > 20


# ------------------------------------------------------------------------------------ the intervals


@pytest.mark.long
@pytest.mark.parametrize("count", [128, 530])
def test_intervals_cover_skewed_gradients(count):
    """J = E[Σ exp(Xᵢ)] of 16 independent states with eight forces each, and one step."""
    states = 16
    process = fl.Process(
        lambda theta, x: theta.reshape(states, 8).sum(axis=1),
        lambda theta, x: 0.7 * jnp.ones_like(x),
    )
    objective = fl.Objective(terminal=lambda theta, x: jnp.sum(jnp.exp(x)))
    substrate = fl.simulator(process, jnp.zeros(states), np.array([0.0, 1.0]), backend="jax")
    estimator = fl.ppgt(substrate, objective, baseline="none")
    theta = jnp.zeros(8 * states)
    exact = np.exp(0.7**2 / 2)
    covered = []
    variances = []
    for seed in range(300):
        estimate = estimator(jax.random.key(seed), theta, count)
        low, high = (np.asarray(side)[::8] for side in estimate.interval)
        covered.append(np.mean((low < exact) & (exact < high)))
        variances.append(np.asarray(estimate.stderr)[::8] ** 2 * count)
    assert estimate.batches in (32, 34)
    # the states of one repetition are hardly correlated: 4,800 intervals, ± 0.3 %
    assert 0.93 < np.mean(covered) < 0.985
    spread = np.std([v.mean() for v in variances]) / np.sqrt(len(variances))
    # Uᵢ = z/σ, R = Σ exp(σ z): E[(U R)²] − E[U R]² of states that are independent
    one = np.exp(0.7**2 / 2)
    two = np.exp(2 * 0.7**2)
    others = (states - 1) * two + (states - 1) * (states - 2) * one**2
    own = two * (1 + (2 * 0.7) ** 2)
    both = 2 * (states - 1) * one * one * (1 + 0.7**2)
    known = (own + both + others) / 0.7**2 - exact**2
    assert abs(np.mean(variances) - known) < 4 * spread


# ----------------------------------------------------------------------------- unusual structures


def make_theta(*shape):
    return np.asarray(np.random.default_rng(2).normal(size=shape) / 3, np.float32)


def constant_noise(theta, x):
    return 0.4 * jnp.ones_like(x)


NEAR = fl.Objective(running=lambda theta, x: -jnp.sum((x - 0.4) ** 2))


def assert_single(drift, theta, backend, objective=NEAR, count=137):
    """The estimate by batches is that of single gradients."""
    process = fl.Process(drift, constant_noise)
    start = np.array([0.5, -0.3, 0.2, 0.1])

    def make(backend):
        simulator = fl.simulator(process, start, T[:6], backend=backend)
        return fl.ppgt(simulator, objective, baseline="none")

    estimate = make(backend)(jax.random.key(3), theta, count)
    single = estimates.reduce_samples(make("jax").samples(jax.random.key(3), theta, count))
    assert estimate.batches is not None
    expected = flatten(single.gradient)
    np.testing.assert_allclose(
        flatten(estimate.gradient), expected, rtol=0, atol=2e-5 * np.abs(expected).max()
    )
    np.testing.assert_allclose(estimate.value, single.value, rtol=1e-5)


def relax(theta, x):
    return -x


WEIGHED = fl.Objective(terminal=lambda theta, x: jnp.sum(jnp.tanh(theta)) * x[0])
UNWEIGHED = fl.Objective(terminal=lambda theta, x: x[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_of_the_terminal_reward_alone(backend):
    assert_single(relax, make_theta(140), backend, WEIGHED)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_that_do_nothing(backend):
    assert_single(relax, make_theta(140), backend, UNWEIGHED)


def take_clipped(theta, x):
    return jnp.take(theta, jnp.array([0, 1, 500, 3]), mode="clip") * x - x


def add_clipped(theta, x):
    places = jnp.array([0, 1, 9, 2])
    return jnp.zeros(STATES).at[places].add(theta[:4] * x, mode="clip") - x


def add_dropped(theta, x):
    return jnp.zeros(STATES).at[jnp.array([0, 1, 9, 2])].add(theta[:4] * x) - x


@pytest.mark.parametrize("drift", [take_clipped, add_clipped, add_dropped])
def test_indices_outside_of_an_array(drift):
    assert_single(lambda theta, x: drift(theta, x) + theta.sum() / 100, make_theta(140), "cpu")


def test_zero_has_a_sign():
    def drift(theta, x):
        side = jnp.where(x > 0, 0.0, -0.0)
        return theta[:4] * jnp.arctan2(side, -1.0) + theta.sum() / 100 - x

    assert_single(drift, make_theta(140), "cpu")


@pytest.mark.parametrize("count", ["many", None, 12.5])
def test_a_count_that_is_no_number_is_refused(count):
    process = fl.Process(lambda theta, x: theta[:4] - x, lambda theta, x: jnp.ones_like(x))
    objective = fl.Objective(terminal=lambda theta, x: x[0])
    substrate = fl.simulator(process, jnp.zeros(STATES), T, backend="jax")
    with pytest.raises(ValueError, match="whole number of trajectories"):
        fl.ppgt(substrate, objective)(jax.random.key(0), make_theta(140), count)
