"""Markov chains in discrete time against exact answers: powers of transition matrices, and all 512
states of an Ising magnet of 3 × 3 spins.
"""

import logging
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.scipy.stats import norm

import fluctua as fl
from fluctua.compiled import backend
from fluctua.core.draws import philox
from fluctua.core.estimator import gradient_samples
from fluctua.core.likelihood import step_law
from fluctua.core.likelihood.guard import examine
from fluctua.core.streamed import split_key
from fluctua.processes import chain as chains
from numeric import value_and_slope

T = np.arange(7.0)
RECORDED = 8000
"""Trajectories of every record: one program simulates them, and one looks at their steps."""


@pytest.fixture
def _unchecked(monkeypatch):
    """A chain that passed with other numbers is compared with its sampler again."""
    monkeypatch.setattr(chains, "_CHECKED", {})


def z_scores(estimate, exact):
    z = [
        (np.asarray(estimate.gradient[name]) - exact[name]) / np.asarray(estimate.stderr[name])
        for name in exact
    ]
    return np.concatenate([np.ravel(part) for part in z])


# ------------------------------------------------------------------------- a chain of three states


PULL = np.array([[0.0, 1.0, -1.0], [0.5, 0.0, 0.2], [-0.3, 0.4, 0.0]])


def logits(theta, x, t, context):
    driven = theta["drive"] * jnp.cos(0.7 * t) * jnp.arange(3.0)
    pulled = theta["pull"] * jnp.asarray(PULL)[x[0].astype(int)]
    return pulled + driven + context * jnp.array([0.0, 0.0, 1.0])


@jax.jit
def sample(key, theta, x, t, context):
    return jax.random.categorical(key, logits(theta, x, t, context))[None]


@jax.jit
def log_prob(theta, x, x_next, t, context):
    log = jax.nn.log_softmax(logits(theta, x, t, context))[x_next[0].astype(int)]
    return jnp.where(x_next[0] < 3, log, -jnp.inf)


THREE = fl.Chain(sample, log_prob)
THETA = {"pull": jnp.array(0.8), "drive": jnp.array(0.3)}
REWARDS = {
    "running": fl.Objective(running=lambda th, x, t: jnp.sin(1 + t) * x[0] ** 2),
    "terminal": fl.Objective(terminal=lambda th, x: th["pull"] * (x[0] == 2)),
    "per_step": fl.Objective(
        per_step=lambda th, x, x_next, t, dt: th["drive"] * (1 + t) * dt * x_next[0] * (x[0] == 1)
    ),
}


def coin(key):
    """The context: 0 or 1."""
    return jax.random.bernoulli(key).astype(float)


def three_states(kind, theta):
    """J by products of transition matrices, averaged over both contexts."""
    states = np.arange(3.0)

    def value(context):
        p = np.array([0.0, 1.0, 0.0])
        total = 0.0
        for t in T[:-1]:
            driven = theta["drive"] * np.cos(0.7 * t) * states
            weights = np.exp(theta["pull"] * PULL + driven + context * np.array([0.0, 0.0, 1.0]))
            matrix = weights / weights.sum(axis=1, keepdims=True)
            if kind == "running":
                total += p @ (np.sin(1 + t) * states**2)
            if kind == "per_step":
                total += p[1] * matrix[1] @ (theta["drive"] * (1 + t) * states)
            p = p @ matrix
        return total + (theta["pull"] * p[2] if kind == "terminal" else 0.0)

    return (value(0.0) + value(1.0)) / 2


@cache
def exact_three(kind):
    """J and its gradient at THETA."""
    return value_and_slope(lambda theta: three_states(kind, theta), THETA)


def three_simulator(**options):
    return fl.simulator(THREE, jnp.array([1.0]), T, context=coin, **options)


@cache
def three_record():
    return three_simulator()(jax.random.key(7), THETA, RECORDED)


BASELINES = {
    "time": "time",
    "mean": "mean",
    "optimal": "optimal",
    "binned": fl.baselines.binned(lambda theta, x: x[0], bins=3),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("running", marks=pytest.mark.long),
        pytest.param("terminal", marks=pytest.mark.long),
        "per_step",
    ],
)
def test_three_states_by_powers_of_the_transition_matrix(key, kind):
    objective = REWARDS[kind]
    value, exact = exact_three(kind)
    estimate = fl.ppgt(three_simulator(), objective)(key, THETA, 20_000)
    assert np.abs(z_scores(estimate, exact)).max() < 4
    assert abs(estimate.value - value) < 4 * estimate.value_stderr
    # large enough for the test to fail if a sign or an index were lost
    assert max(abs(exact[name]) / estimate.stderr[name] for name in exact) > 15


@pytest.mark.long
@pytest.mark.parametrize("name", ["mean", "optimal", "binned"])
def test_other_baselines(key, name):
    _, exact = exact_three("running")
    estimator = fl.ppgt(three_simulator(), REWARDS["running"], baseline=BASELINES[name])
    assert np.abs(z_scores(estimator(key, THETA, 8000), exact)).max() < 4


@pytest.mark.long
def test_intervals_cover(key):
    """200 estimates of 100 trajectories each: 95 % of the intervals hold the exact derivative."""
    _, exact = exact_three("running")
    estimator = fl.ppgt(three_simulator(), REWARDS["running"])
    gradients, returns = estimator.samples(key, THETA, 20_000)[:2]
    rows = {name: np.split(np.asarray(leaf), 200) for name, leaf in gradients.items()}
    covered = []
    for j, part in enumerate(np.split(np.asarray(returns), 200)):
        samples = fl.Samples({name: parts[j] for name, parts in rows.items()}, part)
        low, high = fl.reduce_samples(samples).interval
        covered += [bool(low[name] < exact[name] < high[name]) for name in exact]
    assert abs(np.mean(covered) - 0.95) < 4 * np.sqrt(0.95 * 0.05 / len(covered))


def test_a_score_is_the_derivative_of_the_log_probability(key):
    step = fl.scores.Step(jnp.array([1.0]), jnp.array([2.0]), 3.0, 1.0, 1.0)
    states = np.arange(3.0)
    weights = np.exp(0.8 * PULL[1] + 0.3 * np.cos(0.7 * 3.0) * states + np.array([0.0, 0.0, 1.0]))
    p = weights / weights.sum()
    by_hand = {
        "pull": PULL[1, 2] - p @ PULL[1],
        "drive": np.cos(0.7 * 3.0) * (2 - p @ states),
    }
    for name, value in jax.jit(THREE.score)(THETA, step).items():
        np.testing.assert_allclose(value, by_hand[name], rtol=1e-12)


# ------------------------------------------------------------------------------ recorded steps


def test_recorded_trajectories_have_the_scores_of_their_run(key):
    streamed = fl.ppgt(three_simulator(), REWARDS["per_step"], baseline="mean").samples(
        key, THETA, RECORDED
    )
    record = three_simulator()(split_key(key)[0], THETA, RECORDED)
    assert record.events is None
    recorded = gradient_samples(THREE, REWARDS["per_step"], THETA, record, baseline="mean")
    for name in THETA:
        np.testing.assert_allclose(
            recorded.gradient[name], streamed.gradient[name], rtol=1e-9, atol=1e-9
        )
    measured = fl.Chain(None, log_prob)  # a chain that cannot be simulated
    other = gradient_samples(measured, REWARDS["per_step"], THETA, record, baseline="mean")
    np.testing.assert_array_equal(other.gradient["pull"], recorded.gradient["pull"])
    with pytest.raises(ValueError, match="no `sample`, so it cannot be simulated"):
        fl.simulator(measured, jnp.array([1.0]), T, context=coin)(key, THETA, 2)


@pytest.mark.long
def test_reuse_at_other_parameters():
    there = {"pull": jnp.array(1.1), "drive": jnp.array(0.1)}
    objective = REWARDS["running"]
    value, exact = value_and_slope(lambda th: three_states("running", th), there)
    record = three_record()
    result = fl.reweighted(THREE, objective, there, [(THETA, record)])
    assert np.abs(z_scores(result.estimate, exact)).max() < 4
    assert abs(result.estimate.value - value) < 4 * result.estimate.value_stderr
    assert 0.3 * RECORDED < result.ess < RECORDED
    plain = fl.gradient(THREE, objective, THETA, record)
    assert abs(plain.value - value) > 6 * plain.value_stderr  # the weights matter


def test_the_guard_passes_what_fits_and_names_what_does_not():
    record = three_record()
    report = examine(THREE, THETA, record)
    assert not report.cause
    assert np.abs(report.v - 1).max() < 4 * report.stderr.max()
    other = THETA | {"pull": jnp.array(1.1)}
    assert "mean score of `pull` is not zero" in examine(THREE, other, record).cause
    with pytest.warns(RuntimeWarning, match="not those of the process.*pull"):
        fl.gradient(THREE, REWARDS["running"], other, record)


@pytest.mark.long
def test_the_guard_compares_with_the_sampler():
    """Steps of a chain that differs in what θ does not reach: PULL alone, at θ = 0."""
    record = three_record()
    moved = fl.Chain(
        lambda key, theta, x, t, context: sample(key, theta, x, t, context + 0.5), log_prob
    )
    assert "from where `sample` takes it" in examine(moved, THETA, record).cause


def test_an_impossible_step_is_named():
    record = three_record()
    x = np.array(record.x)
    x[7, 4] = 5.0
    broken = record._replace(x=x)
    with pytest.raises(ValueError, match="to .5. on trajectory 7 at time index 3.*ln p = -inf"):
        fl.gradient(THREE, REWARDS["terminal"], THETA, broken)


# ------------------------------------------------------------------------------ an Ising magnet


SIDE = 3
SITES = SIDE * SIDE
BONDS = np.zeros((SITES, SITES))
for site in range(SITES):
    row, column = divmod(site, SIDE)
    BONDS[site, (row + 1) % SIDE * SIDE + column] = 1
    BONDS[site, row * SIDE + (column + 1) % SIDE] = 1
BONDS = BONDS + BONDS.T
SEEN_NEW = np.tril(BONDS, -1)  # site by site: those before have their new values
SEEN_OLD = np.triu(BONDS, 1)
SWEEPS = np.arange(5.0)
ALL_DOWN = -np.ones(SITES)
PROTOCOL = {"T": jnp.array([1.5, 3.0, 2.5, 1.2]), "h": jnp.array([-0.8, -0.2, 0.3, 0.9])}


def couplings(theta, t):
    """1/T and h/T in the sweep at t."""
    now = t.astype(int)
    return 1 / theta["T"][now], theta["h"][now] / theta["T"][now]


@jax.jit
def sweep(key, theta, x, t):
    K, b = couplings(theta, t)
    uniform = jax.random.uniform(key, (SITES,))

    def visit(i, x):
        up = jax.nn.sigmoid(2 * (K * jnp.asarray(BONDS)[i] @ x + b))
        return x.at[i].set(jnp.where(uniform[i] < up, 1.0, -1.0))

    return jax.lax.fori_loop(0, SITES, visit, x)


def local_fields(theta, x, x_next, t):
    K, b = couplings(theta, t)
    return K * (SEEN_NEW @ x_next + SEEN_OLD @ x) + b


@jax.jit
def log_prob_of_sweep(theta, x, x_next, t):
    return jnp.sum(jax.nn.log_sigmoid(2 * x_next * local_fields(theta, x, x_next, t)))


def heat(theta, x, x_next, t):
    """−ΔE/T of the flips of a sweep."""
    return jnp.sum((x_next - x) * local_fields(theta, x, x_next, t))


MAGNET = fl.Chain(sweep, log_prob_of_sweep)
REVERSAL = fl.Objective(
    running=lambda theta, x, t: 0.1 * jnp.sum(x),
    terminal=lambda theta, x: 0.05 * jnp.sum(x) ** 2 + jnp.sum(x * (BONDS @ x)) / 10,
    per_step=heat,
)


def enumerate_magnet(theta):
    """J from the probabilities of all 512 states, (2,) * 9, one spin after the other."""
    spins = np.array([-1.0, 1.0])
    states = np.stack(np.meshgrid(*[spins] * SITES, indexing="ij"), axis=-1)  # (2, ..., 2, 9)
    p = np.zeros((2,) * SITES)
    p[(0,) * SITES] = 1.0
    total = 0.0
    for t in SWEEPS[:-1]:
        K, b = couplings(theta, t)
        total += 0.1 * np.sum(p * states.sum(axis=-1))
        for i in range(SITES):
            field = K * (states @ BONDS[i]) + b
            up = 1 / (1 + np.exp(-2 * field))
            whole = np.sum(p, axis=i, keepdims=True)
            new = np.where(states[..., i] > 0, up, 1 - up) * whole
            total += np.sum((new - p) * states[..., i] * field)
            p = new
    last = 0.05 * states.sum(axis=-1) ** 2 + np.sum(states * (states @ BONDS), axis=-1) / 10
    return total + np.sum(p * last)


@pytest.mark.long
def test_a_magnet_by_all_of_its_states(key):
    value, exact = value_and_slope(enumerate_magnet, PROTOCOL)
    run = fl.simulator(MAGNET, ALL_DOWN, SWEEPS)
    estimate = fl.ppgt(run, REVERSAL)(key, PROTOCOL, 20_000)
    assert np.abs(z_scores(estimate, exact)).max() < 4
    assert abs(estimate.value - value) < 4 * estimate.value_stderr
    assert np.abs(exact["h"] / estimate.stderr["h"]).max() > 20
    assert np.abs(exact["T"] / estimate.stderr["T"]).max() > 8


def test_log_probabilities_of_a_sweep_add_up_to_one():
    spins = np.array([-1.0, 1.0])
    states = np.stack(np.meshgrid(*[spins] * SITES, indexing="ij"), axis=-1).reshape(-1, SITES)
    x = jnp.asarray(states[137])
    each = jax.vmap(lambda y: jnp.exp(log_prob_of_sweep(PROTOCOL, x, y, jnp.array(1.0))))
    total = np.asarray(jax.jit(each)(states))
    np.testing.assert_allclose(total.sum(), 1, rtol=1e-12)


@jax.jit
def seen_before(theta, x, x_next, t):
    K, b = couplings(theta, t)
    return jnp.sum(jax.nn.log_sigmoid(2 * x_next * (K * BONDS @ x + b)))


@jax.jit
def seen_in_reverse(theta, x, x_next, t):
    K, b = couplings(theta, t)
    return jnp.sum(jax.nn.log_sigmoid(2 * x_next * (K * (SEEN_OLD @ x_next + SEEN_NEW @ x) + b)))


@jax.jit
def mean_over_sites(theta, x, x_next, t):
    return log_prob_of_sweep(theta, x, x_next, t) / SITES


@pytest.mark.long
@pytest.mark.parametrize(
    ("law", "message"),
    [
        (seen_before, "mean score of `T.*` is not zero"),
        (seen_in_reverse, "mean score of `T.*` is not zero"),
        (mean_over_sites, r"square of the score is 0\.1\d+ times"),
    ],
)
def test_a_sweep_in_another_order_is_noticed(key, law, message):
    run = fl.simulator(fl.Chain(sweep, law), ALL_DOWN, SWEEPS)
    with pytest.raises(ValueError, match=message):
        fl.ppgt(run, REVERSAL)(key, PROTOCOL, 100)


def test_scores_of_rare_steps_are_not_squared():
    """Thirty steps of 20,000 tell a square to 18 %, which would pass for a wrong factor."""
    rng = np.random.default_rng(0)
    rare = np.where(np.arange(20_000) < 30, 1.0, 0.0) - 30 / 20_000
    score = np.stack([rng.normal(size=20_000), rare, 0.3 * rng.normal(size=20_000)], axis=1)
    directions = step_law._choose_directions(score, np.array([1]))
    assert directions[0, 1] > 0  # its mean is judged
    assert (directions[1:, 1] == 0).all()
    np.testing.assert_allclose(np.abs(directions[1:, [0, 2]] * [1.0, 0.3]), 1, atol=0.03)


@pytest.mark.long
@pytest.mark.usefixtures("_unchecked")
def test_rare_flips_are_no_alarm(key):
    """A cold magnet that hardly ever flips: the scores have one sign, and nothing is wrong."""
    cold = {"T": np.full(4, 0.4), "h": np.full(4, -1.0)}
    run = fl.simulator(MAGNET, ALL_DOWN, SWEEPS)
    assert np.isfinite(fl.ppgt(run, REVERSAL)(key, cold, 20_000).gradient["T"]).all()


# ------------------------------------------------------ randomness that the states do not determine


RING = 4


@jax.jit
def flip_one(key, theta, x):
    """A random site, kept in the last component, gets a new spin."""
    k_site, k_spin = jax.random.split(key)
    site = jax.random.randint(k_site, (), 0, RING)
    pull = theta * (x[(site - 1) % RING] + x[(site + 1) % RING])
    spin = jnp.where(jax.random.bernoulli(k_spin, jax.nn.sigmoid(2 * pull)), 1.0, -1.0)
    return x.at[site].set(spin).at[RING].set(site)


@jax.jit
def log_prob_of_one(theta, x, x_next):
    site = x_next[RING].astype(int)
    pull = theta * (x[(site - 1) % RING] + x[(site + 1) % RING])
    same = jnp.all(x_next[:RING].at[site].set(x[site]) == x[:RING])
    return jnp.where(same, jax.nn.log_sigmoid(2 * x_next[site] * pull) - np.log(RING), -jnp.inf)


def test_a_site_that_is_chosen_at_random(key):
    chain = fl.Chain(flip_one, log_prob_of_one)
    start = jnp.array([1.0, 1.0, 1.0, -1.0, 0.0])
    bonds = fl.Objective(terminal=lambda theta, x: jnp.sum(x[:RING] * jnp.roll(x[:RING], 1)))
    estimate = fl.ppgt(fl.simulator(chain, start, np.arange(13.0)), bonds, baseline="none")(
        key, jnp.array(0.4), 8000
    )
    spins = np.array([-1.0, 1.0])
    states = np.stack(np.meshgrid(*[spins] * RING, indexing="ij"), axis=-1)

    def value(theta):
        p = np.zeros((2,) * RING)
        p[1, 1, 1, 0] = 1.0
        for _ in range(12):
            new = 0.0
            for i in range(RING):
                pull = theta * (states[..., i - 1] + states[..., (i + 1) % RING])
                chance = 1 / (1 + np.exp(-2 * states[..., i] * pull))
                new = new + chance * np.sum(p, axis=i, keepdims=True) / RING
            p = new
        return np.sum(p * np.sum(states * np.roll(states, 1, -1), axis=-1))

    whole, exact = value_and_slope(value, 0.4)
    assert abs(estimate.gradient - exact) < 4 * estimate.stderr
    assert exact > 20 * estimate.stderr
    assert abs(estimate.value - whole) < 4 * estimate.value_stderr


# ---------------------------------------------------------------------------------- trainings


@pytest.mark.long
def test_a_training_finds_the_best_bias(key, tmp_path):
    """p-bits with P(up) = sigmoid(b), and J = −((3/4)P − 0.6)² by a function of means: b = ln 4."""
    bit = fl.Chain(
        jax.jit(lambda key, b, x: jax.random.bernoulli(key, jax.nn.sigmoid(b), x.shape)),
        jax.jit(lambda b, x, x_next: jnp.sum(jax.nn.log_sigmoid((2 * x_next - 1) * b))),
    )
    mean = fl.Objective(running=lambda b, x: jnp.mean(x) / 4)
    run = fl.simulator(bit, np.zeros(3), np.arange(5.0))  # X₀ = 0 is one of four states
    aim = fl.function_of_means(jax.jit(lambda m: -((m - 0.6) ** 2)), mean)
    estimator = fl.ppgt(run, aim)
    training = fl.Training(estimator, np.array(0.0), optax.adam(0.2), trajectories=400)
    result = fl.run(training, iterations=40, folder=tmp_path / "run")
    assert abs(result.theta - np.log(4)) < 0.15
    assert "finer" not in result.summary  # steps of a chain cannot be split
    with pytest.raises(ValueError, match="the steps of a Chain cannot be split"):
        fl.evaluate(estimator, result.theta, refine=2)


@pytest.mark.long
def test_the_ruin_of_a_gambler(key):
    """A walk from 2 that stops at 0 or 5: its time, and a reward on one side, by matrix powers."""
    walk = fl.Chain(
        lambda key, b, x: x + jnp.where(jax.random.bernoulli(key, jax.nn.sigmoid(b)), 1.0, -1.0),
        jax.jit(lambda b, x, x_next: jax.nn.log_sigmoid(b * (x_next - x)[0])),
    )
    ruin = fl.Objective(
        running=lambda b, x: jnp.ones(()),
        terminal=lambda b, x: 3.0 * (x[0] >= 5),
        stop=lambda b, x: (x[0] <= 0) | (x[0] >= 5),
    )

    def value(b):
        p = np.zeros(6)
        p[2] = 1.0
        time = 0.0
        for _ in range(60):
            inside = p[1:5].copy()
            time += inside.sum()
            up = inside / (1 + np.exp(-b))
            p[1:5] = 0.0
            p[2:6] += up
            p[0:4] += inside - up
        return time + 3 * p[5]

    run = fl.simulator(walk, jnp.array([2.0]), np.arange(61.0))
    estimate = fl.ppgt(run, ruin)(key, jnp.array(0.2), 10_000)
    whole, exact = value_and_slope(value, 0.2)
    assert abs(estimate.gradient - exact) < 4 * estimate.stderr
    assert abs(estimate.value - whole) < 4 * estimate.value_stderr
    assert exact > 20 * estimate.stderr


@pytest.mark.long
def test_the_long_run_of_one_spin(key):
    """J = 2π − 1 with π = p₊/(1 − p₋ + p₊) of the two probabilities to be up, from one record."""

    @jax.jit
    def draw_spin(key, b, x):
        return jnp.where(jax.random.bernoulli(key, jax.nn.sigmoid(0.5 * x + b)), 1.0, -1.0)

    @jax.jit
    def spin_law(b, x, x_next):
        return jnp.sum(jax.nn.log_sigmoid(x_next * (0.5 * x + b)))

    spin = fl.Chain(draw_spin, spin_law)

    def value(b):
        stay = 1 / (1 + np.exp(-b - 0.5))
        rise = 1 / (1 + np.exp(-b + 0.5))
        return 2 * rise / (1 - stay + rise) - 1

    record = fl.simulator(spin, np.ones(1), np.arange(20_001.0))(key, jnp.array(0.3), 1)
    average = fl.stationary(spin, lambda b, x: x[0], jnp.array(0.3), record).estimate
    whole, exact = value_and_slope(value, 0.3)
    assert abs(average.gradient - exact) < 4 * average.stderr
    assert abs(average.value - whole) < 4 * average.value_stderr
    assert exact > 5 * average.stderr


@pytest.mark.long
def test_a_density_of_the_start(key):
    start = fl.Density(
        log_density=lambda b, x: jnp.sum(jax.nn.log_sigmoid(x * b)),
        sample=lambda key, b: jnp.where(
            jax.random.bernoulli(key, jax.nn.sigmoid(b), (2,)), 1.0, -1.0
        ),
    )

    @jax.jit
    def law(b, x, x_next):
        return jnp.sum(jnp.where(x == x_next, np.log(0.9), np.log(0.1))) + 0 * b

    still = fl.Chain(
        jax.jit(lambda key, b, x: jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, -x)), law
    )
    run = fl.simulator(still, start, np.arange(3.0))
    total = fl.Objective(terminal=lambda b, x: jnp.sum(x))
    estimate = fl.ppgt(run, total)(key, jnp.array(0.7), 4000)
    up = 1 / (1 + np.exp(-0.7))
    exact = 4 * 0.8**2 * up * (1 - up)  # of J = 2·0.8²(2σ(b) − 1)
    assert abs(estimate.gradient - exact) < 4 * estimate.stderr
    assert exact > 10 * estimate.stderr


# -------------------------------------------------------------------------------------- checks


def chain_with(**changes):
    parts = {"sample": sample, "log_prob": log_prob} | changes
    return fl.Chain(**parts)


def estimate_with(key, chain, theta=THETA, **options):
    run = fl.simulator(chain, jnp.array([1.0]), T, context=coin, **options)
    return fl.ppgt(run, REWARDS["running"])(key, theta, 20_000)


def other_law(change):
    def law(theta, x, x_next, t, context):
        def log(theta=theta, t=t):
            return log_prob(theta, x, x_next, t, context)

        return change(log, theta, t)

    return law


WRONG = {
    "a factor": (
        lambda log, th, t: 0.5 * log(),
        r"square of the score is 0\.(49|5).* times the curvature",
    ),
    "a sign": (
        lambda log, th, t: log(theta=th | {"pull": -th["pull"]}),
        "mean score of `(pull|drive)` is not zero",
    ),
    "another time": (
        lambda log, th, t: log(t=t + 1),
        "mean score of `drive`, in parts of the time, is not zero",
    ),
    "no score": (
        lambda log, th, t: log(theta=th | {"pull": 0.8}),
        r"`sample` depends on `theta\['pull'\]` and `log_prob` does not",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_sampler_of_another_chain_is_refused(key, name):
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        estimate_with(key, chain_with(log_prob=other_law(change)))


def test_wrong_chains_are_refused_by_name(key):
    with pytest.raises(
        ValueError, match=r"`sample` must return one state, shape \(1,\); got shape"
    ):
        estimate_with(key, chain_with(sample=lambda key, *rest: sample(key, *rest)[0]))
    with pytest.raises(ValueError, match="`sample` gave a state that is not finite.*nan"):
        estimate_with(key, chain_with(sample=lambda *a: sample(*a) * jnp.nan))
    with pytest.raises(TypeError, match="`sample` must return real numbers; got complex"):
        estimate_with(key, chain_with(sample=lambda *a: sample(*a) * 1j))
    with pytest.raises(ValueError, match=r"`log_prob` must be one number.*got shape \(1,\)"):
        estimate_with(key, chain_with(log_prob=lambda *a: log_prob(*a)[None]))
    with pytest.raises(TypeError, match="`log_prob` must be a real floating-point number; got int"):
        estimate_with(key, chain_with(log_prob=lambda *a: jnp.array(0)))
    with pytest.raises(ValueError, match="`sample` drew a step.*ln p = -inf"):
        estimate_with(key, chain_with(log_prob=lambda *a: log_prob(*a) - jnp.inf))
    with pytest.raises(ValueError, match="derivative of `log_prob` by `theta.'drive'.` is not fin"):
        estimate_with(
            key,
            chain_with(log_prob=lambda th, *a: log_prob(th, *a) + jnp.sqrt(0 * th["drive"])),
        )
    with pytest.raises(TypeError, match=r"sample\(theta, x, key\).* in another order"):
        fl.Chain(lambda theta, x, key: x, log_prob)
    with pytest.raises(TypeError, match=r"log_prob\(theta, x_next, x\).* in another order"):
        fl.Chain(sample, lambda theta, x_next, x: 0.0)
    with pytest.raises(TypeError, match="expected a function"):
        fl.Chain(sample, 3.0)
    with pytest.raises(ValueError, match="JAX's own generator"):
        estimate_with(key, THREE, wiener=philox)
    with pytest.raises(
        ValueError, match="a `Twin` follows a noise-free path, and a Chain has none"
    ):
        fl.ppgt(three_simulator(), REWARDS["running"], baseline="twin")
    with pytest.raises(ValueError, match="`pathwise` differentiates.*those of a Chain may jump"):
        fl.reference.pathwise(REWARDS["running"], three_simulator())
    with pytest.raises(ValueError, match="integrator.*Chain"):
        estimate_with(key, THREE, integrator="heun")


def test_chains_run_on_jax(key, caplog, monkeypatch):
    with pytest.raises(ValueError, match="no kernel can be made of this process: `Chain`"):
        estimate_with(key, THREE, backend="cpu")
    monkeypatch.setattr(backend, "MIN_KERNEL_WORK", 1)
    monkeypatch.setattr(backend, "_logged", set())
    with caplog.at_level(logging.WARNING, "fluctua"):
        estimate_with(key, THREE, backend="auto")
    assert "trajectories run on JAX, not on a kernel: `Chain`" in caplog.text


# ------------------------------------------------------------------------- parameters of zero


def pull(theta, x):
    return theta["coupling"] @ x + theta["bias"]


@jax.jit
def draw_bits(key, theta, x):
    up = jax.nn.sigmoid(2 * pull(theta, x))
    return jnp.where(jax.random.uniform(key, x.shape) < up, 1.0, -1.0)


@jax.jit
def bits_law(theta, x, x_next):
    return jnp.sum(jax.nn.log_sigmoid(2 * x_next * pull(theta, x)))


HIDDEN_AT_ZERO = {
    "a sign": lambda theta: jax.tree.map(jnp.negative, theta),
    "a factor": lambda theta: jax.tree.map(lambda v: 2 * v, theta),
    "an index": lambda theta: theta | {"coupling": theta["coupling"].T},
}


FIRST_BIT = fl.Objective(terminal=lambda theta, x: x[0])


def estimate_bits(key, law):
    run = fl.simulator(fl.Chain(draw_bits, law), -np.ones(3), np.arange(6.0))
    theta = {"coupling": np.zeros((3, 3)), "bias": np.zeros(3)}
    return fl.ppgt(run, FIRST_BIT)(key, theta, 10)


def test_parameters_of_zero_are_no_alarm(key):
    assert np.isfinite(estimate_bits(key, bits_law).gradient["coupling"]).all()


@pytest.mark.parametrize("name", HIDDEN_AT_ZERO)
def test_parameters_of_zero_hide_nothing(key, name):
    """−w, 2w and wᵀ are one law at w = 0, with other scores and the identities of Bartlett."""
    change = HIDDEN_AT_ZERO[name]
    with pytest.raises(ValueError, match="mean score of `(bias|coupling).*that are zero"):
        estimate_bits(key, lambda theta, x, x_next: bits_law(change(theta), x, x_next))


@jax.jit
def draw_coin(key, theta, x):
    return jax.random.bernoulli(key, theta["base"] + theta["w"], x.shape) * 1.0


@jax.jit
def coin_law(theta, x, x_next):
    p = theta["base"] + theta["w"]
    return jnp.sum(jnp.log(jnp.where(x_next > 0.5, p, 1 - p)))


COIN_RUN = fl.simulator(fl.Chain(draw_coin, coin_law), np.zeros(1), np.arange(6.0))


@pytest.mark.parametrize("base", [0.001, 0.5, 0.999])
@pytest.mark.usefixtures("_unchecked")
def test_a_zero_beside_the_edge_of_its_range(key, base):
    """A probability of 0.999 + w exists on one side of w = 0 only, as far as it is displaced."""
    theta = {"base": jnp.array(base), "w": jnp.array(0.0)}
    estimate = fl.ppgt(COIN_RUN, FIRST_BIT)(key, theta, 4000)
    assert abs(float(estimate.gradient["w"]) - 1) < 4 * float(estimate.stderr["w"])


@jax.jit
def laplace_step(key, theta, x):
    return theta["a"] * x + theta["s"] * jax.random.laplace(key, x.shape)


@jax.jit
def laplace_law(theta, x, x_next):
    return jnp.sum(-jnp.abs(x_next - theta["a"] * x) / theta["s"] - jnp.log(theta["s"]))


@jax.jit
def normal_law(theta, x, x_next):
    """Of the same mean and variance."""
    return jnp.sum(norm.logpdf(x_next, theta["a"] * x, jnp.sqrt(2.0) * theta["s"]))


def test_a_density_with_a_kink(key):
    """|x' − ax| has no curvature but at its kink; E[x_T²] by its recursion."""
    theta = {"a": jnp.array(0.8), "s": jnp.array(0.4)}

    def square(theta):
        value = 0.25
        for _ in range(5):
            value = theta["a"] ** 2 * value + 2 * theta["s"] ** 2
        return value

    objective = fl.Objective(terminal=lambda theta, x: x[0] ** 2)
    _, exact = value_and_slope(square, theta)
    for law in (laplace_law, normal_law):
        run = fl.simulator(fl.Chain(laplace_step, law), jnp.array([0.5]), np.arange(6.0))
        if law is normal_law:
            with pytest.raises(ValueError, match="square of the score is"):
                fl.ppgt(run, objective)(key, theta, 4000)
            continue
        estimate = fl.ppgt(run, objective)(key, theta, 4000)
        for name in theta:
            assert abs(estimate.gradient[name] - exact[name]) < 4 * estimate.stderr[name]
