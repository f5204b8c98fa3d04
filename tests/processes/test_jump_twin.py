"""The twin of jump processes against exact answers: closed moments and master equations."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm

import fluctua as fl
from fluctua.core.streamed import split_key
from fluctua.processes.jumps import RandomJump
from numeric import value_and_slope

T = np.linspace(0.0, 2.0, 11)
THETA = {"birth": np.array(5.0), "death": np.array(1.0)}
BIRTH_DEATH = fl.Jumps(lambda th, x: jnp.array([th["birth"], th["death"] * x[0]]), [[1.0], [-1.0]])


def z_scores(estimate, exact):
    return np.array(
        [
            (float(estimate.gradient[name]) - exact[name]) / float(estimate.stderr[name])
            for name in exact
        ]
    )


def variances(estimate):
    return np.array([float(s) ** 2 for s in jax.tree.leaves(estimate.stderr)]) * estimate.count


def solve_master_equation(rates, rewards, theta, start, states):
    """J of births and deaths by the matrix exponential of each step.

    rates: (theta, x (N,), t) -> those of a birth and of a death. rewards: of `fl.Objective`, of
    all states together; `per_step` of all pairs.
    """
    x = np.arange(float(states))
    p = np.zeros(states)
    p[start] = 1.0
    value = 0.0
    if rewards.initial:
        value += rewards.initial(theta, x[None, start])
    for t, dt in zip(T[:-1], np.diff(T), strict=True):
        birth, death = (rate * np.ones(states) for rate in rates(theta, x, t))
        flow = np.diag(birth[:-1], 1) + np.diag(death[1:], -1)
        kernel = expm((flow - np.diag(flow.sum(axis=1))) * dt)
        if rewards.running:
            value += dt * p @ rewards.running(theta, x[None], t)
        if rewards.per_step:
            gains = rewards.per_step(theta, x[None, :, None], x[None, None, :], t, dt)
            value += np.sum(p[:, None] * kernel * gains)
        p = p @ kernel
    return value + (p @ rewards.terminal(theta, x[None]) if rewards.terminal else 0.0)


DRIVEN = fl.Jumps(
    lambda th, x, t: jnp.array([th["birth"] * (1 + 0.5 * jnp.sin(2 * t)), th["death"] * x[0]]),
    [[1.0], [-1.0]],
)


def make_rewards(array):
    """Every kind of reward. array: `jax.numpy`, or `numpy` for the master equation."""
    return fl.Objective(
        running=lambda th, x, t: 0.3 * th["weight"] * x[0] ** 2 * array.cos(t),
        terminal=lambda th, x: th["weight"] * array.sqrt(1 + x[0]),
        per_step=lambda th, x, y, t, dt: (
            th["weight"] * (y[0] - x[0]) * array.sqrt(1 + x[0]) + 0.1 * y[0] ** 2
        ),
        initial=lambda th, x: th["weight"] * x[0],
    )


ALL_REWARDS = make_rewards(jnp)
WEIGHTED = {**THETA, "weight": np.array(0.7)}
DRIVEN_RUN = fl.simulator(DRIVEN, jnp.array([3.0]), T, backend="jax")


@cache
def solve_driven():
    """J and its gradient."""
    rates = lambda th, x, t: (th["birth"] * (1 + 0.5 * np.sin(2 * t)), th["death"] * x)
    rewards = make_rewards(np)
    return value_and_slope(lambda th: solve_master_equation(rates, rewards, th, 3, 50), WEIGHTED)


@cache
def estimate_plainly():
    """Variances of the gradients without a twin."""
    plain = fl.ppgt(DRIVEN_RUN, ALL_REWARDS, baseline="mean")
    return variances(plain(jax.random.key(7), WEIGHTED, 2000))


@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_trajectory_of_a_linear_network_gives_the_gradient(key, order):
    """Linear rates and rewards: the guess is the mean of the return, up to its time steps."""
    counts = fl.Objective(terminal=lambda th, x: x[0], running=lambda th, x: 0.3 * x[0])

    def value(theta):
        def mean(t):
            kept = np.exp(-theta["death"] * t)
            return 3 * kept + theta["birth"] / theta["death"] * (1 - kept)

        return mean(T[-1]) + 0.3 * np.sum(mean(T[:-1]) * np.diff(T))

    run = fl.simulator(BIRTH_DEATH, jnp.array([3.0]), T, backend="jax")
    samples = fl.ppgt(run, counts, baseline=fl.Twin(order=order)).samples(key, THETA, 40)
    for name, exact in value_and_slope(value, THETA)[1].items():
        np.testing.assert_allclose(samples.gradient[name], exact, rtol=2e-7)
    assert np.std(samples.returns) > 1  # the returns themselves are as noisy as ever


OTHER = fl.Jumps(lambda th, x: jnp.array([th["rate"][0], th["rate"][1] * x[0]]), [[1.0], [-1.0]])


@pytest.mark.long
@pytest.mark.parametrize(
    ("twin", "least"),
    [
        (fl.Twin(), 15.0),
        (fl.Twin(order=2, baseline="none"), 40.0),
        (fl.Twin(order=2, baseline="optimal"), 40.0),
        (fl.Twin(order=2, theta=lambda th: {name: 1.4 * v for name, v in th.items()}), 15.0),
        (fl.Twin(theta=lambda th: {"rate": jnp.array([4.0, 1.2])}, process=OTHER), 2.0),
    ],
    ids=["linear", "quadratic", "optimal", "wrong", "another"],
)
def test_all_rewards_with_a_protocol(key, twin, least):
    value, slope = solve_driven()
    estimate = fl.ppgt(DRIVEN_RUN, ALL_REWARDS, baseline=twin)(key, WEIGHTED, 2000)
    assert np.abs(z_scores(estimate, slope)).max() < 4
    assert abs(estimate.value - value) < 4 * estimate.value_stderr
    assert (estimate_plainly() > least * variances(estimate)).all()


# A + B <-> AB of 20 each, AB at the end; the second rate is zero at the start.
ASSOCIATION = fl.Jumps(
    lambda th, x: jnp.array([th["on"] * (20 - x[0]) ** 2, th["off"] * x[0]]), [[1.0], [-1.0]]
)
BOUND = fl.Objective(terminal=lambda th, x: x[0])
ASSOCIATION_RUN = fl.simulator(ASSOCIATION, jnp.zeros(1), T, backend="jax")
SLOW = {"on": np.array(0.05), "off": np.array(1.0)}
WRONG = fl.Twin(order=2, theta=lambda th: {name: 1.2 * v for name, v in th.items()})


@cache
def solve_association(on):
    """The gradient of J."""
    rates = lambda th, x, t: (th["on"] * (20 - x) ** 2, th["off"] * x)
    value = lambda th: solve_master_equation(rates, BOUND, th, 0, 21)
    return value_and_slope(value, {**SLOW, "on": on})[1]


@pytest.mark.parametrize(
    ("on", "least"), [(0.05, 20_000.0), pytest.param(1.0, 150.0, marks=pytest.mark.long)]
)
def test_an_association(key, on, least):
    """Rates that are quadratic in the state, and vanish at both ends of the state space."""
    theta = {**SLOW, "on": np.array(on)}
    twin = fl.ppgt(ASSOCIATION_RUN, BOUND, baseline=fl.Twin(order=2))
    estimate = twin(key, theta, 1000)
    assert np.abs(z_scores(estimate, solve_association(on))).max() < 4
    plain = fl.ppgt(ASSOCIATION_RUN, BOUND, baseline="mean")(key, theta, 1000)
    assert (variances(plain) > least * variances(estimate)).all()


@pytest.mark.long
def test_error_bars_cover(key):
    """z of many estimates with a wrong guess has mean zero and variance one."""
    estimator = fl.ppgt(ASSOCIATION_RUN, BOUND, baseline=WRONG)
    slope = solve_association(0.05)
    z = np.array([z_scores(estimator(k, SLOW, 100), slope) for k in jax.random.split(key, 100)])
    assert np.abs(z.mean(0)).max() < 4 / np.sqrt(100)
    assert np.abs(z.var(0) - 1).max() < 4 * np.sqrt(2 / 100) + 0.05  # 100 samples are not many


def test_an_absorbing_state(key):
    """Pure death: all rates become zero, and the score of an event that cannot happen is not
    asked for.
    """
    process = fl.Jumps(lambda th, x: th * x, [[-1.0]])
    left = fl.Objective(terminal=lambda th, x: x[0] ** 2)
    theta = np.array([1.5])
    run = fl.simulator(process, jnp.array([2.0]), T, backend="jax")
    estimate = fl.ppgt(run, left, baseline=fl.Twin(order=2))(key, theta, 50)
    kept = np.exp(-theta * T[-1])  # E[X²] = 2 kept (1 − kept) + (2 kept)²
    exact = -T[-1] * kept * (2 + 4 * kept)
    np.testing.assert_allclose(estimate.gradient, exact, rtol=1e-4)  # of time steps of 0.3/rate


@pytest.mark.long
def test_random_starts_and_contexts_have_guesses_of_their_own(key):
    """Births at a rate of the context, from a Poisson-like start of mean θ."""
    process = fl.Jumps(
        lambda th, x, t, c: jnp.array([th["birth"] * c, th["death"] * x[0]]), [[1.0], [-1.0]]
    )
    start = fl.Density(
        log_density=lambda th, x0: -jnp.sum((x0 - th["mean"]) ** 2) / 2,
        sample=lambda key, th: th["mean"] + jax.random.normal(key, (1,)),
    )
    theta = {**THETA, "mean": np.array(30.0)}
    objective = fl.Objective(terminal=lambda th, x: x[0], initial=lambda th, x: 0.5 * x[0])
    run = fl.simulator(
        process, start, T, context=lambda key: jax.random.uniform(key), backend="jax"
    )

    def value(th):
        kept = np.exp(-th["death"] * 2.0)
        mean = th["mean"] * kept + 0.5 * th["birth"] / th["death"] * (1 - kept)
        return mean + 0.5 * th["mean"]

    estimate = fl.ppgt(run, objective, baseline=fl.Twin(batch=100))(key, theta, 600)
    _, exact = value_and_slope(value, theta)
    # of the events nothing is left: the spread is that of contexts and starts
    assert np.abs(z_scores(estimate, exact)).max() < 4
    assert estimate.stderr["birth"] < 0.05 * exact["birth"]


@pytest.mark.long
def test_recorded_events_give_the_parts_of_the_run_they_came_from(key):
    count = 100
    estimator = fl.ppgt(ASSOCIATION_RUN, BOUND, baseline=WRONG)
    streamed = estimator.split(key, SLOW, count)
    recorded = estimator.recorded(SLOW, ASSOCIATION_RUN(split_key(key)[0], SLOW, count))
    for one, other in zip(jax.tree.leaves(recorded), jax.tree.leaves(streamed), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10)
    # a table of the mean of Λ of other trajectories, in place of the baseline
    other = estimator.split(jax.random.key(9), SLOW, count)
    assert other.mean_lambda.shape == (len(T),)
    with_table = estimator.split(key, SLOW, count, other.mean_lambda)
    assert not np.allclose(with_table.correction["on"], streamed.correction["on"])


def test_what_it_cannot_follow_is_named(key):
    size = RandomJump(
        sample=lambda key, th, x, t, c, i: jnp.ones(1),
        log_density=lambda th, change, x, t, c, i: jnp.zeros(()),
    )
    smooth = fl.Process(lambda th, x: -x, lambda th, x: jnp.ones(1))

    def estimator(scored, **options):
        run = fl.simulator(BIRTH_DEATH, jnp.array([3.0]), T, backend="jax")
        return fl.ppgt(run, BOUND, process=scored, baseline=fl.Twin(**options))

    with pytest.raises(ValueError, match="RandomJump"):
        estimator(fl.Jumps(lambda th, x: th["birth"], size))
    with pytest.raises(ValueError, match="`diffusion`"):
        estimator(fl.Jumps(BIRTH_DEATH.rates, [[1.0], [-1.0]], smooth))
    with pytest.raises(TypeError, match="`Jumps` too; got Process"):
        estimator(BIRTH_DEATH, process=smooth)
    with pytest.raises(ValueError, match="order.*got 3"):
        estimator(BIRTH_DEATH, order=3)
    with pytest.raises(ValueError, match="other `Jumps`"):
        estimator(fl.Jumps(lambda th, x: jnp.array([1.0, x[0]]), [[1.0], [-1.0]]))(key, THETA, 4)
    bad = fl.Jumps(lambda th, x: jnp.ones(1), [[1.0, 1.0]])
    with pytest.raises(ValueError, match="does not fit the states.*1 components.*2"):
        estimator(BIRTH_DEATH, process=bad)(key, THETA, 4)
    bare = fl.Trajectories(T, np.full((4, len(T), 1), 3.0))
    with pytest.raises(ValueError, match="events=bin_events"):
        fl.gradient(BIRTH_DEATH, BOUND, THETA, bare, baseline=fl.Twin())
    running = fl.Objective(running=lambda th, x: x[0])
    with pytest.raises(ValueError, match="noise-free path, and a Jumps has none"):
        fl.stationary(BIRTH_DEATH, running, THETA, bare, baseline="twin", window=0.4)
    explosive = fl.Jumps(lambda th, x: th["birth"] * x**2, [[1.0]])
    run = fl.simulator(explosive, jnp.array([3.0]), T, backend="jax")
    with pytest.raises(FloatingPointError, match="rate equations of the twin overflowed"):
        fl.ppgt(run, BOUND, baseline=fl.Twin())(key, THETA, 4)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "cpu"])
def test_a_guess_that_explains_nothing_is_told(key, backend):
    """Two stable states: the rate equations go to one of them, the trajectories to both."""

    def rates(th, x):
        return jnp.concatenate([20 * th / (1 + (x[::-1] / 4) ** 2), x])

    process = fl.Jumps(rates, [[1, 0], [0, 1], [-1, 0], [0, -1]])
    end = fl.Objective(terminal=lambda th, x: x[0])
    start = jnp.array([6.0, 5.0])
    far = fl.simulator(process, start, np.linspace(0, 6, 21), backend=backend)
    with pytest.warns(RuntimeWarning, match="guess leaves a variance"):
        fl.ppgt(far, end, baseline=fl.Twin())(key, np.ones(1), 64)
    near = fl.simulator(process, start, np.linspace(0, 0.5, 21), backend=backend)
    fl.ppgt(near, end, baseline=fl.Twin())(key, np.ones(1), 64)
