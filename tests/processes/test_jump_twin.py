"""The twin of jump processes against exact answers: closed moments and master equations."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.streamed import split_key
from fluctua.processes.jumps import RandomJump

T = jnp.linspace(0.0, 2.0, 11)
THETA = {"birth": jnp.array(5.0), "death": jnp.array(1.0)}
BIRTH_DEATH = fl.Jumps(lambda th, x: jnp.array([th["birth"], th["death"] * x[0]]), [[1.0], [-1.0]])


def z_scores(estimate, exact):
    z = jax.tree.map(lambda g, e, s: (g - e) / s, estimate.gradient, exact, estimate.stderr)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(z)])


def variances(estimate):
    return np.array([float(s) ** 2 for s in jax.tree.leaves(estimate.stderr)]) * estimate.count


def solve_master_equation(process, objective, theta, start, states):
    """J of one species by the matrix exponential of each step, all kinds of rewards."""
    x = jnp.arange(float(states))[:, None]
    each = jax.vmap
    grid = x

    def step(carry, when):
        p, value = carry
        t, dt = when
        rates = each(lambda x: process.rates(theta, x, t, None))(x)
        flow = jnp.zeros((states, states))
        for r, (change,) in enumerate(process.changes):
            to = np.arange(states) + int(change)
            inside = (to >= 0) & (to < states)
            source = np.flatnonzero(inside)
            flow = flow.at[source, to[inside]].add(rates[source, r])
        kernel = jax.scipy.linalg.expm((flow - jnp.diag(flow.sum(1))) * dt)
        if objective.running:
            value += dt * p @ each(lambda x: objective.running(theta, x, t))(x)
        if objective.per_step:
            reward = each(lambda x: each(lambda y: objective.per_step(theta, x, y, t, dt))(grid))
            value += jnp.sum(p[:, None] * kernel * reward(x))
        return (p @ kernel, value), None

    p = jnp.zeros(states).at[start].set(1.0)
    value = objective.initial(theta, x[start]) if objective.initial else jnp.zeros(())
    (p, value), _ = jax.lax.scan(step, (p, value), (T[:-1], jnp.diff(T)))
    if objective.terminal:
        value += p @ each(lambda x: objective.terminal(theta, x))(x)
    return value


DRIVEN = fl.Jumps(
    lambda th, x, t: jnp.array([th["birth"] * (1 + 0.5 * jnp.sin(2 * t)), th["death"] * x[0]]),
    [[1.0], [-1.0]],
)
ALL_REWARDS = fl.Objective(
    running=lambda th, x, t: 0.3 * th["weight"] * x[0] ** 2 * jnp.cos(t),
    terminal=lambda th, x: th["weight"] * jnp.sqrt(1 + x[0]),
    per_step=lambda th, x, y, t, dt: (
        th["weight"] * (y[0] - x[0]) * jnp.sqrt(1 + x[0]) + 0.1 * y[0] ** 2
    ),
    initial=lambda th, x: th["weight"] * x[0],
)
WEIGHTED = {**THETA, "weight": jnp.array(0.7)}
DRIVEN_RUN = fl.simulator(DRIVEN, jnp.array([3.0]), T, backend="jax")


@cache
def solve_driven():
    """J and its gradient."""
    value = lambda th: solve_master_equation(DRIVEN, ALL_REWARDS, th, 3, 50)
    return jax.jit(jax.value_and_grad(value))(WEIGHTED)


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
            kept = jnp.exp(-theta["death"] * t)
            return 3 * kept + theta["birth"] / theta["death"] * (1 - kept)

        return mean(T[-1]) + 0.3 * jnp.sum(mean(T[:-1]) * jnp.diff(T))

    run = fl.simulator(BIRTH_DEATH, jnp.array([3.0]), T, backend="jax")
    samples = fl.ppgt(run, counts, baseline=fl.Twin(order=order)).samples(key, THETA, 40)
    for name, exact in jax.grad(value)(THETA).items():
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


def associate(on):
    """A + B <-> AB of 20 each, AB at the end; the second rate is zero at the start."""
    process = fl.Jumps(
        lambda th, x: jnp.array([on * th["on"] * (20 - x[0]) ** 2, th["off"] * x[0]]),
        [[1.0], [-1.0]],
    )
    return process, fl.Objective(terminal=lambda th, x: x[0])


BOUND = {"on": jnp.array(1.0), "off": jnp.array(1.0)}


@cache
def solve_association(on):
    """The gradient of J at `BOUND`."""
    case = associate(on)
    return jax.jit(jax.grad(lambda th: solve_master_equation(*case, th, 0, 21)))(BOUND)


@pytest.mark.parametrize(
    ("on", "least"), [(0.05, 20_000.0), pytest.param(1.0, 150.0, marks=pytest.mark.long)]
)
def test_an_association(key, on, least):
    """Rates that are quadratic in the state, and vanish at both ends of the state space."""
    process, objective = associate(on)
    theta, slope = BOUND, solve_association(on)
    run = fl.simulator(process, jnp.zeros(1), T, backend="jax")
    estimate = fl.ppgt(run, objective, baseline=fl.Twin(order=2))(key, theta, 1000)
    assert np.abs(z_scores(estimate, slope)).max() < 4
    plain = fl.ppgt(run, objective, baseline="mean")(key, theta, 1000)
    assert (variances(plain) > least * variances(estimate)).all()


@pytest.mark.long
def test_error_bars_cover(key):
    """z of many estimates with a wrong guess has mean zero and variance one."""
    process, objective = associate(0.05)
    theta, slope = BOUND, solve_association(0.05)
    run = fl.simulator(process, jnp.zeros(1), T, backend="jax")
    wrong = fl.Twin(order=2, theta=lambda th: {name: 1.2 * v for name, v in th.items()})
    estimator = fl.ppgt(run, objective, baseline=wrong)
    z = np.array([z_scores(estimator(k, theta, 100), slope) for k in jax.random.split(key, 100)])
    assert np.abs(z.mean(0)).max() < 4 / np.sqrt(100)
    assert np.abs(z.var(0) - 1).max() < 4 * np.sqrt(2 / 100) + 0.05  # 100 samples are not many


def test_an_absorbing_state(key):
    """Pure death: all rates become zero, and the score of an event that cannot happen is not
    asked for.
    """
    process = fl.Jumps(lambda th, x: th * x, [[-1.0]])
    left = fl.Objective(terminal=lambda th, x: x[0] ** 2)
    theta = jnp.array([1.5])
    run = fl.simulator(process, jnp.array([2.0]), T, backend="jax")
    estimate = fl.ppgt(run, left, baseline=fl.Twin(order=2))(key, theta, 50)
    kept = jnp.exp(-theta * T[-1])  # E[X²] = 2 kept (1 − kept) + (2 kept)²
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
    theta = {**THETA, "mean": jnp.array(30.0)}
    objective = fl.Objective(terminal=lambda th, x: x[0], initial=lambda th, x: 0.5 * x[0])
    run = fl.simulator(
        process, start, T, context=lambda key: jax.random.uniform(key), backend="jax"
    )

    def value(th):
        kept = jnp.exp(-th["death"] * 2.0)
        mean = th["mean"] * kept + 0.5 * th["birth"] / th["death"] * (1 - kept)
        return mean + 0.5 * th["mean"]

    estimate = fl.ppgt(run, objective, baseline=fl.Twin(batch=100))(key, theta, 600)
    exact = jax.grad(value)(theta)
    # of the events nothing is left: the spread is that of contexts and starts
    assert np.abs(z_scores(estimate, exact)).max() < 4
    assert estimate.stderr["birth"] < 0.05 * exact["birth"]


@pytest.mark.long
def test_recorded_events_give_the_parts_of_the_run_they_came_from(key):
    process, objective = associate(0.05)
    theta = BOUND
    run = fl.simulator(process, jnp.zeros(1), T, backend="jax")
    twin = fl.Twin(order=2, theta=lambda th: {name: 1.2 * v for name, v in th.items()})
    estimator = fl.ppgt(run, objective, baseline=twin)
    streamed = estimator.split(key, theta, 30)
    recorded = estimator.recorded(theta, run(split_key(key)[0], theta, 30))
    for one, other in zip(jax.tree.leaves(recorded), jax.tree.leaves(streamed), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10)
    # a table of the mean of Λ of other trajectories, in place of the baseline
    other = estimator.split(jax.random.key(9), theta, 30)
    assert other.mean_lambda.shape == (len(T),)
    with_table = estimator.split(key, theta, 30, other.mean_lambda)
    assert not np.allclose(with_table.correction["on"], streamed.correction["on"])


def test_what_it_cannot_follow_is_named(key):
    counts = fl.Objective(terminal=lambda th, x: x[0])
    size = RandomJump(
        sample=lambda key, th, x, t, c, i: jnp.ones(1),
        log_density=lambda th, change, x, t, c, i: jnp.zeros(()),
    )
    smooth = fl.Process(lambda th, x: -x, lambda th, x: jnp.ones(1))

    def estimator(scored, **options):
        run = fl.simulator(BIRTH_DEATH, jnp.array([3.0]), T, backend="jax")
        return fl.ppgt(run, counts, process=scored, baseline=fl.Twin(**options))

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
    record = fl.simulator(BIRTH_DEATH, jnp.array([3.0]), T)(key, THETA, 4)
    bare = fl.Trajectories(record.t, record.x)
    with pytest.raises(ValueError, match="events=bin_events"):
        fl.gradient(BIRTH_DEATH, counts, THETA, bare, baseline=fl.Twin())
    running = fl.Objective(running=lambda th, x: x[0])
    with pytest.raises(ValueError, match="noise-free path, and a Jumps has none"):
        fl.stationary(BIRTH_DEATH, running, THETA, record, baseline="twin", window=0.4)
    explosive = fl.Jumps(lambda th, x: th["birth"] * x**2, [[1.0]])
    run = fl.simulator(explosive, jnp.array([3.0]), T, backend="jax")
    with pytest.raises(FloatingPointError, match="rate equations of the twin overflowed"):
        fl.ppgt(run, counts, baseline=fl.Twin())(key, THETA, 4)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "cpu"])
def test_a_guess_that_explains_nothing_is_told(key, backend):
    """Two stable states: the rate equations go to one of them, the trajectories to both."""

    def rates(th, x):
        return jnp.concatenate([20 * th / (1 + (x[::-1] / 4) ** 2), x])

    process = fl.Jumps(rates, [[1, 0], [0, 1], [-1, 0], [0, -1]])
    end = fl.Objective(terminal=lambda th, x: x[0])
    start = jnp.array([6.0, 5.0])
    far = fl.simulator(process, start, jnp.linspace(0, 6, 21), backend=backend)
    with pytest.warns(RuntimeWarning, match="guess leaves a variance"):
        fl.ppgt(far, end, baseline=fl.Twin())(key, jnp.ones(1), 64)
    near = fl.simulator(process, start, jnp.linspace(0, 0.5, 21), backend=backend)
    fl.ppgt(near, end, baseline=fl.Twin())(key, jnp.ones(1), 64)
