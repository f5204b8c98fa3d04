"""Trajectories that stop, against exact answers of the chain of steps itself and of the process."""

import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm
from scipy.special import expit
from scipy.stats import binom, norm

import first_passage as exits
import fluctua as fl
from fluctua import tcmt
from fluctua.core import check
from fluctua.core.objective import StopRule
from fluctua.core.process import Step
from fluctua.core.stopping import bind_process, collect_arrival, find_crossing, is_running
from fluctua.core.streamed import split_key
from numeric import value_and_slope
from problems import tolerance

DT, STEPS = 0.05, 20  # a third of the trajectories reaches the horizon
FEW, MANY = 60, 20_000


SIMULATOR = exits.simulator(DT, STEPS)


@cache
def exact_euler():
    return value_and_slope(lambda theta: exits.euler_value(theta, DT, STEPS), exits.THETA)


@cache
def record_many():
    return SIMULATOR(jax.random.key(12), exits.parameters(), MANY)


@cache
def exact_exit():
    """Of the process itself, from an interval whose upper end is a parameter."""
    return jax.jit(jax.value_and_grad(exits.continuous_value))(exits.parameters(b=1.0))


def assert_exact(estimate, exact):
    z = exits.z_scores(estimate, *exact)
    assert np.abs(z).max() < tolerance(len(z))


# ---------------------------------------------------------------- the chain of steps, no limit


BASELINES = {
    "none": "none",
    "time": "time",
    "mean": "mean",
    "optimal": "optimal",
    "binned": fl.baselines.binned(lambda theta, x: x[0], bins=8),
}


@pytest.mark.parametrize("name", ["time", "optimal"])
def test_exit_of_the_euler_chain(name):
    """Value and gradient by an integral equation, with parameters of drift, noise and rewards."""
    estimator = fl.ppgt(SIMULATOR, exits.OBJECTIVE, baseline=BASELINES[name])
    assert_exact(estimator(jax.random.key(1), exits.parameters(), MANY), exact_euler())


@pytest.mark.long
@pytest.mark.parametrize("name", list(BASELINES))
def test_small_ensembles_are_unbiased_and_their_intervals_cover(name):
    """Of 60 trajectories some 20 are left at the end: who is left must not matter.

    The mean of so many estimates has errors of a twelfth of every slope at most.
    """
    seeds = 400 if name == "none" else 200
    value, gradient = exact_euler()
    estimator = fl.ppgt(SIMULATOR, exits.OBJECTIVE, baseline=BASELINES[name])
    theta = exits.parameters()
    made = [estimator(jax.random.key(s), theta, FEW) for s in range(seeds)]
    names = list(gradient)
    found = np.array([[float(e.value), *(float(e.gradient[n]) for n in names)] for e in made])
    off = found - [value, *gradient.values()]
    z = off.mean(axis=0) / (off.std(axis=0, ddof=1) / np.sqrt(seeds))
    assert np.abs(z).max() < tolerance(len(z))
    for k, n in enumerate(names):
        inside = sum(
            float(e.interval[0][n]) <= float(gradient[n]) <= float(e.interval[1][n]) for e in made
        )
        assert inside >= binom.ppf(1e-3 / len(names), seeds, 0.94), (n, k, inside)


@pytest.mark.long
def test_a_random_start_some_of_which_has_stopped():
    """A start of the density N(m, ½) about the boundary: ∂m of J by a finer chain of one step."""
    theta = exits.parameters(m=0.6)
    start = fl.Density(
        lambda theta, x: -jnp.sum((x - theta["m"]) ** 2),
        lambda key, theta: theta["m"] + jnp.sqrt(0.5) * jax.random.normal(key, (1,)),
    )
    objective = exits.OBJECTIVE._replace(initial=lambda theta, x: theta["m"] * x[0])
    simulator = fl.simulator(exits.PROCESS, start, DT * np.arange(3))
    estimate = fl.ppgt(simulator, objective, baseline="mean")(jax.random.key(2), theta, MANY)

    def exact(theta):
        x = np.linspace(-4.0, 5.0, 9001)
        density = np.exp(-((x - theta["m"]) ** 2)) / np.sqrt(np.pi)
        value = theta["gain"] * (x > 0) + theta["m"] * x
        inside = (x > -1) & (x < 1)
        value[inside] = exits.euler_value(theta, DT, 2, start=x[inside])
        value[inside] += theta["m"] * x[inside]
        return np.sum(density * value) * (x[1] - x[0])

    assert_exact(estimate, value_and_slope(exact, theta))


def test_a_walk_of_jumps():
    """±1 at rates up and down, looked at every half unit of time: powers of expm(QΔt)."""
    theta = {"up": jnp.array(1.2), "down": jnp.array(0.8), "gain": jnp.array(2.0)}
    sites, barrier, dt, steps = 41, 3, 0.5, 8
    place = np.arange(sites) - sites // 2

    def exact(theta):
        q = theta["up"] * np.eye(sites, k=1) + theta["down"] * np.eye(sites, k=-1)
        p = expm((q - np.diag(q.sum(axis=1))) * dt)
        stopped = np.abs(place) >= barrier
        worth = theta["gain"] * (place > 0)
        value = worth
        for _ in range(steps):
            value = np.where(stopped, worth, dt + p @ value)
        return value[sites // 2]

    process = fl.Jumps(
        lambda theta, x: jnp.stack([theta["up"], theta["down"]]), np.array([[1.0], [-1.0]])
    )
    objective = fl.Objective(
        running=lambda theta, x: jnp.ones(()),
        terminal=lambda theta, x: theta["gain"] * jnp.where(x[0] > 0, 1.0, 0.0),
        stop=lambda theta, x: jnp.abs(x[0]) >= barrier,
    )
    simulator = fl.simulator(process, np.zeros(1), dt * np.arange(steps + 1))
    estimate = fl.ppgt(simulator, objective)(jax.random.key(3), theta, 10_000)
    assert_exact(estimate, value_and_slope(exact, theta))


def test_a_chain_in_discrete_time():
    """A biased walk of ±1 that never stands still: after its stop a frozen step is impossible."""
    theta = {"bias": jnp.array(0.3)}
    sites, barrier, steps = 9, 3, 12
    place = np.arange(sites) - sites // 2

    def exact(theta):
        right = expit(theta["bias"])
        p = right * np.eye(sites, k=1) + (1 - right) * np.eye(sites, k=-1)
        value = np.zeros(sites)
        for _ in range(steps):
            value = np.where(np.abs(place) >= barrier, 0.0, 1 + p @ value)
        return value[sites // 2]

    def log_prob(theta, x, x_next):
        move = (x_next - x)[0]
        likely = jax.nn.log_sigmoid(move * theta["bias"])
        return jnp.where(jnp.abs(move) == 1, likely, -jnp.inf)

    def sample(key, theta, x):
        up = jax.random.bernoulli(key, jax.nn.sigmoid(theta["bias"]))
        return x + jnp.where(up, 1.0, -1.0)

    objective = fl.Objective(
        running=lambda theta, x: jnp.ones(()), stop=lambda theta, x: jnp.abs(x[0]) - barrier
    )
    simulator = fl.simulator(fl.Chain(sample, log_prob), np.zeros(1), np.arange(steps + 1.0))
    estimate = fl.ppgt(simulator, objective, baseline="mean")(jax.random.key(4), theta, 10_000)
    assert_exact(estimate, value_and_slope(exact, theta))


# ------------------------------------------------------------------- the overshoot and the bridge

BRIDGE = exits.OBJECTIVE._replace(stop=exits.moving_level, overshoot="bridge")


def test_the_overshoot_of_euler_steps_has_the_size_that_is_known():
    """Without a correction boundaries act as if they were 0.5826 σ√Δt further out, to O(Δt)."""
    theta = exits.THETA
    continuous_value = jax.jit(exits.continuous_value)
    true = float(continuous_value(theta | {"b": 1.0}, -1.0))
    rest = []
    for dt in (0.08, 0.02):
        bias = exits.euler_value(theta, dt, round(8 / dt)) - true
        further = exits.SHIFT * theta["sigma"] * np.sqrt(dt)
        known = float(continuous_value(theta | {"b": 1.0 + further}, -1.0 - further)) - true
        assert bias > 0.1
        rest.append(bias - known)
    # what is left is of order Δt: a quarter of it at a quarter of the step
    assert rest[0] / rest[1] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("dt", [0.2, pytest.param(0.04, marks=pytest.mark.long)])
def test_the_bridge_is_exact_for_constant_drift_and_noise(dt):
    """Time, side, and slopes in drift, noise and the boundary itself, at steps of 0.45 and 0.2 σ.

    P(τ > 6) = 3e-4 is cut off: a twentieth of the errors. A path that crosses both boundaries in
    one step is counted twice: exp(−2·2²/2·0.2) = 2e-9.
    """
    estimator = fl.ppgt(exits.simulator(dt, round(6 / dt)), BRIDGE)
    estimate = estimator(jax.random.key(5), exits.parameters(b=1.0), 5_000)
    assert estimate.stopped > 0.999
    assert_exact(estimate, exact_exit())


@pytest.mark.long
def test_a_curved_boundary():
    """Brownian motion leaves a disc of radius R from r after (R² − r²)/2σ² on average.

    The error of a flat boundary is of order Δt = 0.01, a sixth of the errors of 4,000
    trajectories.
    """
    process = fl.Process(lambda theta, x: jnp.zeros(2), lambda theta, x: theta["s"] * jnp.ones(2))
    objective = fl.Objective(
        running=lambda theta, x: jnp.ones(()),
        stop=lambda theta, x: jnp.sqrt(jnp.sum(x**2)) - theta["R"],
        overshoot="bridge",
    )
    # of 4,000 trajectories one has not left at the end
    simulator = fl.simulator(process, np.array([0.1, 0.0]), 0.01 * np.arange(301))
    theta = {"s": jnp.array(1.0), "R": jnp.array(1.0)}
    estimate = fl.ppgt(simulator, objective)(jax.random.key(17), theta, 4_000)
    assert_exact(estimate, (0.495, {"s": -0.99, "R": 1.0}))


def test_the_fraction_of_a_step_before_the_crossing():
    """By a random walk of 4,000 steps between fixed ends, for both kinds of crossing."""
    rng = np.random.default_rng(0)
    paths, fine = 2000, 4000
    walk = np.cumsum(rng.normal(size=(paths, fine)) / np.sqrt(fine), axis=1)
    time = np.arange(1, fine + 1) / fine
    process = check.process(fl.Process(lambda theta, x: jnp.zeros(1), lambda theta, x: jnp.ones(1)))
    rule = StopRule(lambda theta, x, t, context: x[0], True, process)
    cross = jax.jit(lambda step: find_crossing(rule, None, step))
    for end in (-0.4, 0.5):
        # to second order in the step of the walk its boundary is 0.5826/√4000 nearer
        near = -exits.SHIFT / np.sqrt(fine)
        bridge = -0.6 + walk - walk[:, -1:] * time + (end + 0.6) * time
        crossed = bridge >= near
        hit = crossed.any(axis=1)
        first = time[crossed.argmax(axis=1)][hit]
        step = Step(np.array([-0.6]), np.array([end]), np.array(0.0), np.array(1.0))
        crossing = cross(step)
        share = hit.mean()
        error = max(np.sqrt(share * (1 - share) / paths), 1 / paths)
        assert abs(1 - float(crossing.going_on) - share) < 4 * error
        error = first.std() / np.sqrt(len(first)) + 1 / fine
        assert abs(float(crossing.fraction[0]) - first.mean()) < 4 * error
        assert float(crossing.x[0, 0]) == pytest.approx(0, abs=1e-12)


def test_a_crossing_takes_correlated_components_along():
    """Noise along (1, ½): a path that went 0.3 further in x went 0.15 further in y."""
    process = check.process(
        fl.Process(lambda theta, x: jnp.zeros(2), lambda theta, x: jnp.array([[1.0], [0.5]]))
    )
    rule = StopRule(lambda theta, x, t, context: x[0] - 0.3, True, process)
    step = Step(np.zeros(2), np.zeros(2), np.array(0.0), np.array(1.0))
    crossing = jax.jit(lambda step: find_crossing(rule, None, step))(step)
    assert np.allclose(crossing.x, [[0.3, 0.15]])


@pytest.mark.long
def test_the_second_order_of_a_better_step():
    """Heun's step integrates running rewards by trapezoids; the bridge cuts those too."""
    theta = exits.parameters(b=1.0)
    simulator = exits.simulator(0.2, 30, integrator="heun")
    estimate = fl.ppgt(simulator, BRIDGE, baseline="none")(jax.random.key(6), theta, 10_000)
    assert_exact(estimate, exact_exit())


# ----------------------------------------------------------------------------- what a stop is


def test_the_return_is_the_time_of_the_stop():
    """Without noise to speak of x = t: the level 0.33 is first reached at 0.4 on the grid; from
    0.5 it is reached before the first step.
    """
    process = fl.Process(lambda theta, x: theta[None], lambda theta, x: jnp.full(1, 1e-6))
    objective = fl.Objective(
        running=lambda theta, x: jnp.ones(()),
        terminal=lambda theta, x: 100 * theta * jnp.round(x[0], 1),
        per_step=lambda theta, x, x_next: jnp.full((), 1000.0),
        stop=lambda theta, x, t: x[0] - 0.33,
    )
    t = np.linspace(0, 1, 11)
    for start, expected in ((0.0, 0.4 + 40 + 4000), (0.5, 50.0)):
        simulator = fl.simulator(process, np.array([start]), t)
        samples = fl.ppgt(simulator, objective, baseline="none").samples(
            jax.random.key(0), jnp.array(1.0), 3
        )
        np.testing.assert_allclose(samples.returns, expected, rtol=1e-6)
        assert not samples.survival.any()
    # no score after a stop before the first step: the explicit slope of the terminal reward alone
    np.testing.assert_allclose(samples.gradient, 50.0)


@pytest.mark.long
def test_a_stop_of_true_and_false_is_that_of_its_level():
    estimates = []
    for stop in (exits.level, lambda theta, x: jnp.abs(x[0]) >= 1):
        objective = exits.OBJECTIVE._replace(stop=stop)
        estimator = fl.ppgt(SIMULATOR, objective, baseline="mean")
        estimates.append(estimator(jax.random.key(7), exits.parameters(), FEW))
    assert float(estimates[0].gradient["mu"]) == float(estimates[1].gradient["mu"])


def test_the_estimate_tells_how_many_stopped():
    estimator = fl.ppgt(SIMULATOR, exits.OBJECTIVE, baseline="none")
    estimate = estimator(jax.random.key(8), exits.parameters(), FEW)
    assert 0.5 < estimate.stopped < 0.8
    assert f"{estimate.stopped:.1%} of the trajectories stopped" in repr(estimate)
    assert "min(τ, T)" in repr(estimate)


@pytest.mark.long
def test_a_level_that_is_far_away_changes_nothing():
    far = exits.OBJECTIVE._replace(stop=lambda theta, x: x[0] - 1e3)
    for baseline in ("time", "mean", "optimal", BASELINES["binned"]):
        results = [
            fl.ppgt(SIMULATOR, objective, baseline=baseline).samples(
                jax.random.key(9), exits.parameters(), FEW
            )
            for objective in (far, far._replace(stop=None))
        ]
        for with_stop, without in zip(
            jax.tree.leaves(results[0].gradient), jax.tree.leaves(results[1].gradient), strict=True
        ):
            np.testing.assert_allclose(with_stop, without, rtol=0, atol=1e-10)


def test_a_process_that_explodes_beyond_its_boundary():
    """x² dt from 1 is infinite at t = 1; stopped at 10, states after it do not matter."""
    process = fl.Process(
        lambda theta, x: theta * x**2 + jnp.where(x > 10, jnp.inf, 0.0),
        lambda theta, x: 0.1 * jnp.ones(1),
    )
    objective = fl.Objective(
        running=lambda theta, x: jnp.ones(()), stop=lambda theta, x: x[0] - 10.0
    )
    simulator = fl.simulator(process, np.ones(1), np.linspace(0, 3, 301))
    estimate = fl.ppgt(simulator, objective)(jax.random.key(10), jnp.array(1.0), 100)
    # τ = 0.9/θ without noise, with the last step whole
    assert float(estimate.value) == pytest.approx(0.9, abs=0.05)
    assert float(estimate.gradient) == pytest.approx(-0.9, abs=6 * float(estimate.stderr) + 0.05)


# ------------------------------------------------------------------------------------ recordings


@pytest.mark.parametrize("overshoot", [None, pytest.param("bridge", marks=pytest.mark.long)])
def test_recorded_trajectories_are_masked_after_their_stop(overshoot):
    """The numbers of the simulation, whatever the record holds after a stop, also in chunks."""
    theta = exits.parameters()
    objective = exits.OBJECTIVE._replace(overshoot=overshoot)
    key = jax.random.key(11)
    expected = fl.ppgt(SIMULATOR, objective, baseline="optimal").samples(key, theta, FEW)
    record = SIMULATOR(split_key(key).run, theta, FEW)
    x = np.array(record.x)
    outside = np.maximum.accumulate(np.abs(x[..., 0]) >= 1, axis=1)
    after = np.concatenate([np.zeros_like(outside[:, :1]), outside[:, :-1]], axis=1)
    x[after] = 7.0
    held = record._replace(x=x)
    chunks = [fl.Trajectories(held.t, x[:20]), fl.Trajectories(held.t, x[20:])]
    for source in (record, held, chunks):
        with warnings.catch_warnings():  # the guard does not look beyond the stop
            warnings.simplefilter("error")
            samples = fl.gradient_samples(
                exits.PROCESS, objective, theta, source, baseline="optimal", block_bytes=1800
            )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9),
            samples._replace(gradient=dict(samples.gradient)),
            expected._replace(gradient=dict(expected.gradient)),
        )


@pytest.mark.long
def test_two_halves_of_a_recording_serve_each_other():
    estimate = fl.gradient(exits.PROCESS, exits.OBJECTIVE, exits.parameters(), record_many())
    assert_exact(estimate, exact_euler())
    assert estimate.stopped > 0.5


@pytest.mark.long
def test_the_guard_still_sees_a_wrong_model():
    theta = exits.parameters(sigma=1.5)
    with pytest.warns(RuntimeWarning, match="not those of the process"):
        fl.gradient(exits.PROCESS, exits.OBJECTIVE, theta, record_many())


@pytest.mark.long
def test_an_observed_process_stops_by_what_is_observed():
    hidden = fl.Process(
        lambda theta, x: -theta["k"] * x + jnp.array([1.0, 0.0]), lambda theta, x: 0.5 * jnp.ones(2)
    )
    process = fl.Observed(hidden, observe=[[1.0, 0.5]], noise=0.1, start=np.zeros(2))
    objective = fl.Objective(running=lambda theta, y: y[0], stop=lambda theta, y: y[0] - 1.2)
    theta = {"k": jnp.array(0.7)}
    simulator = fl.simulator(process, t=np.linspace(0, 1, 11))
    key = jax.random.key(14)
    streamed = fl.ppgt(simulator, objective, baseline="none").samples(key, theta, 20)
    record = simulator(split_key(key).run, theta, 20)
    recorded = fl.gradient_samples(process, objective, theta, record, baseline="none")
    np.testing.assert_allclose(streamed.gradient["k"], recorded.gradient["k"], rtol=1e-9)
    assert 0 < streamed.survival.mean() < 1


# ------------------------------------------------------------------------- other entry points


def test_evaluation_and_shards_know_of_the_stop():
    value, _ = exact_euler()
    estimator = fl.ppgt(SIMULATOR, exits.OBJECTIVE)
    evaluation = fl.evaluate(estimator, exits.parameters(), count=MANY)
    assert abs(evaluation.J - float(value)) < 4 * evaluation.J_stderr
    measured = fl.evaluate(
        lambda key, theta, count: record_many(),
        exits.parameters(),
        count=MANY,
        objective=exits.OBJECTIVE,
    )
    assert abs(measured.J - float(value)) < 4 * measured.J_stderr
    key = jax.random.key(15)
    whole = estimator(key, exits.parameters(), FEW)
    shared = fl.distributed(estimator, None, shards=7)(key, exits.parameters(), FEW)
    np.testing.assert_allclose(shared.gradient["mu"], whole.gradient["mu"], rtol=1e-10)
    assert shared.stopped == pytest.approx(whole.stopped)


@pytest.mark.long
def test_a_function_of_means_of_stopped_parts():
    """Mean speed to the right boundary, P(right)/E[τ], from two parts with one stop each."""
    theta = exits.parameters()
    time = fl.Objective(running=lambda theta, x: jnp.ones(()), stop=exits.level)
    right = fl.Objective(terminal=lambda theta, x: jnp.where(x[0] > 0, 1.0, 0.0), stop=exits.level)
    ratio = fl.function_of_means(lambda p, tau: p / tau, right, time)

    def exact(theta):
        right_alone = theta | {"cost": 0.0, "gain": 1.0}
        time_alone = theta | {"cost": 1.0, "gain": 0.0}
        return exits.euler_value(right_alone, DT, STEPS) / exits.euler_value(time_alone, DT, STEPS)

    estimate = fl.ppgt(SIMULATOR, ratio, baseline="mean")(jax.random.key(16), theta, 10_000)
    assert_exact(estimate, value_and_slope(exact, theta))


RECORD = fl.Trajectories(np.arange(3.0), np.zeros((4, 3, 1)))


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        (lambda o: fl.ppgt(exits.simulator(DT, 2), o, baseline="twin"), "twin.*`stop`"),
        (lambda o: fl.natural(fl.ppgt(exits.simulator(DT, 2), o)), "Fisher.*`stop`"),
        (lambda o: fl.reference.pathwise(o, exits.simulator(DT, 2)), "has a `stop`"),
        (
            lambda o: fl.reweighted(
                exits.PROCESS, o, exits.parameters(), [(exits.parameters(), RECORD)]
            ),
            "has a `stop`",
        ),
        (
            lambda o: fl.stationary(exits.PROCESS, o, exits.parameters(), RECORD),
            "has a `stop`",
        ),
        (
            lambda o: fl.filters.filtered(exits.PROCESS, o, jnp.zeros(1), 1.0),
            "has a `stop`",
        ),
        (
            lambda o: (
                tcmt.transmission(tcmt.rectangular(1, 2))._replace(objective=o).estimator("cpu")
            ),
            "has a `stop`",
        ),
        (
            lambda o: fl.ppgt(
                fl.simulator(
                    exits.PROCESS, fl.Reparameterised(lambda th: th["mu"][None]), jnp.arange(3.0)
                ),
                o,
            ),
            "`Reparameterised`.*`stop`",
        ),
    ],
)
def test_what_does_not_serve_a_stop_refuses_it(call, fact):
    with pytest.raises(ValueError, match=fact):
        call(exits.OBJECTIVE)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"stop": exits.moving_level}, '`stop` depends on `theta`.*overshoot="bridge"'),
        ({"stop": lambda theta, x: x[None]}, r"one number per state.*got shape \(1, 1\)"),
        ({"stop": lambda theta, x: x[0] > 1, "overshoot": "bridge"}, "`stop` is bool"),
        ({"stop": lambda theta, x: (x[0] > 1).astype(int)}, "real level.*got int.*x.0. > 1"),
        ({"stop": lambda theta, x: x[:0]}, r"one number per state.*got shape \(0,\)"),
        ({"stop": lambda theta, x: jnp.log(x[0] - 1)}, r"`stop` is nan at the first state"),
        (
            {"stop": lambda theta, x: jnp.sqrt((x[0] - 0.2) ** 2) - 1, "overshoot": "bridge"},
            "derivative of `stop` by the state.*not finite.*sum",
        ),
        ({"overshoot": "shift"}, "None or \"bridge\"; got 'shift'"),
        ({"stop": None, "overshoot": "bridge"}, "`overshoot` corrects a `stop`"),
    ],
)
def test_a_rule_that_is_wrong(change, fact):
    objective = exits.OBJECTIVE._replace(**change)

    def estimate():
        estimator = fl.ppgt(exits.simulator(DT, 2), objective, baseline="none")
        return estimator(jax.random.key(0), exits.parameters(b=1.0), 4)

    with pytest.raises(ValueError, match=fact):
        estimate()


def test_a_bridge_needs_noise_between_the_times():
    walk = fl.Jumps(lambda theta, x: theta["mu"][None], jnp.array([[1.0]]))
    simulator = fl.simulator(walk, jnp.zeros(1), jnp.arange(3.0))
    with pytest.raises(ValueError, match="for a `Process`.*got a Jumps"):
        fl.ppgt(simulator, exits.OBJECTIVE._replace(overshoot="bridge"))
    bridge = exits.OBJECTIVE._replace(overshoot="bridge")
    with pytest.raises(ValueError, match="noise of the process, which is not known here"):
        fl.mean_return_to_go(bridge, exits.parameters(), RECORD)


@pytest.mark.long
def test_a_survival_that_underflows_is_a_stop():
    """A thousand steps beside the boundary in single precision: W falls to 1e-19, then to zero."""
    with jax.enable_x64(False):
        objective = exits.OBJECTIVE._replace(overshoot="bridge")
        beside = np.full((3, 1001, 1), 0.999, np.float32)
        beside[0] = 0.0
        record = fl.Trajectories(np.linspace(0, 1, 1001, dtype=np.float32), beside)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing moves: that is not the noise of the process
            samples = fl.gradient_samples(
                exits.PROCESS, objective, exits.parameters(), record, baseline="mean"
            )
    assert samples.survival.tolist() == [1.0, 0.0, 0.0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(samples.gradient))


def test_is_running_at_the_boundary():
    rule = StopRule(lambda theta, x, t, context: x[0])
    running = [float(is_running(rule, None, jnp.array([v]), 0.0, None)) for v in (-1e-9, 0.0, 1.0)]
    assert running == [1.0, 0.0, 0.0]


def test_the_mean_state_of_a_crossing_is_exact():
    """E[X at min(τ, 1)] = μ E[min(τ, 1)] of Brownian motion (Wald), in one step.

    A boundary that moves, and noise that is correlated across it. Rewards are linear in the state,
    so that the mean of the second component given the first one is all that is needed of it.
    """
    drift = np.array([0.4, 0.7])
    sigma = np.array([[1.0, 0.0], [0.6, 0.8]])
    process = check.process(fl.Process(lambda theta, x: drift, lambda theta, x: sigma))
    objective = fl.Objective(
        running=lambda theta, x: jnp.ones(()),
        terminal=lambda theta, x: jnp.array([1.0, -2.0]) @ x,
        stop=lambda theta, x, t: x[0] - 0.5 - 0.3 * t,
        overshoot="bridge",
    )
    rewards = bind_process(check.objective(objective, stops=True), process)
    nodes, weights = np.polynomial.legendre.leggauss(80)
    sides = [(-8.0, 0.4), (0.4, 8.0)]  # of the noise, on both sides of the level
    noise = np.concatenate([(b - a) / 2 * nodes + (a + b) / 2 for a, b in sides])
    weight = np.concatenate([(b - a) / 2 * weights for a, b in sides]) * norm.pdf(noise)
    only_time = rewards._replace(terminal=check.no_reward)

    def expect(rewards):
        @jax.jit
        @jax.vmap
        def collect(z):
            x_next = drift + jnp.array([1.0, 0.6]) * z
            step = Step(jnp.zeros(2), x_next, jnp.array(0.0), jnp.array(1.0))
            arrival = collect_arrival(rewards, None, step)
            at_horizon = arrival.going_on * rewards.terminal(None, x_next, None)
            return 1 + arrival.reward + at_horizon  # 1: the running reward of a whole step

        return float(weight @ np.asarray(collect(noise)))

    time = expect(only_time)
    # ∫ of the probability to be still below 0.5 with the drift 0.4 − 0.3
    root, share = (nodes + 1) / 2, weights / 2
    s = root**2
    alive = norm.cdf((0.5 - 0.1 * s) / root) - np.exp(0.1) * norm.cdf((-0.5 - 0.1 * s) / root)
    assert time == pytest.approx(share @ (2 * root * alive), abs=1e-6)
    assert expect(rewards) == pytest.approx(time * (1 + 0.4 - 2 * 0.7), abs=1e-6)


@pytest.mark.parametrize("start", ["fixed", "random"])
def test_a_level_that_is_not_a_number_is_no_level(start):
    """√x of a negative x is neither reached nor not reached."""
    first = np.array([0.2])
    if start == "random":
        first = fl.Density(
            lambda theta, x: -jnp.sum((x - 0.2) ** 2) / 2,
            lambda key, theta: 0.2 + jax.random.normal(key, (1,)),
        )
    simulator = fl.simulator(exits.PROCESS, first, DT * np.arange(3))
    objective = exits.OBJECTIVE._replace(stop=lambda theta, x: jnp.sqrt(x[0]) - 1)
    with pytest.raises((ValueError, FloatingPointError), match="`stop`"):
        fl.ppgt(simulator, objective, baseline="none")(jax.random.key(0), exits.parameters(), 200)


def test_a_record_without_numbers_after_its_stop():
    """Trajectories that stopped must not be left out: those that go on are others."""
    record = SIMULATOR(jax.random.key(18), exits.parameters(), FEW)
    x = np.array(record.x)
    x[0, 5:] = np.nan
    with pytest.raises(ValueError, match="1 of 60.*`stop`.*Repeat their last state"):
        fl.gradient(exits.PROCESS, exits.OBJECTIVE, exits.parameters(), record._replace(x=x))
