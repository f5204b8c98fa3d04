"""Jump processes against exact answers: closed moments, and truncated master equations by the
matrix exponential.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.draws import philox
from fluctua.core.estimator import gradient_samples
from fluctua.core.likelihood.guard import examine
from fluctua.core.streamed import split_key
from fluctua.processes import jumps
from fluctua.processes.jumps import Jumps, RandomJump, bin_events

T = jnp.linspace(0.0, 2.0, 11)


def z_scores(estimate, exact):
    z = jax.tree.map(lambda g, e, s: (g - e) / s, estimate.gradient, exact, estimate.stderr)
    return np.array(jax.tree.leaves(z))


def master_equation(process, theta, states, start, objective):
    """J on the grid: p(t + Δt) = p(t) exp(AΔt), from the rates and changes of a process without
    diffusion.
    """
    place = {state: i for i, state in enumerate(states)}
    x = jnp.asarray(states, float)
    rates = jax.vmap(lambda x: process.rates(theta, x, 0.0, None))(x)
    moves = [
        (i, r, place[tuple(np.add(state, change))])
        for i, state in enumerate(states)
        for r, change in enumerate(process.changes)
        if tuple(np.add(state, change)) in place  # what leaves the truncated space is turned back
    ]
    source, reaction, target = np.array(moves).T
    flow = rates[source, reaction]
    generator = (
        jnp.zeros((len(states), len(states)))
        .at[source, target]
        .add(flow)
        .at[source, source]
        .add(-flow)
    )
    step = jax.scipy.linalg.expm(generator * (T[1] - T[0]))
    p = jnp.zeros(len(states)).at[place[tuple(start)]].set(1.0)
    reward_rates = (
        jax.vmap(lambda x: objective.running(theta, x))(x)
        if objective.running
        else jnp.zeros(len(states))
    )
    p, rewards = jax.lax.scan(lambda p, dt: (p @ step, dt * p @ reward_rates), p, jnp.diff(T))
    return rewards.sum() + (
        p @ jax.vmap(lambda x: objective.terminal(theta, x))(x) if objective.terminal else 0.0
    )


BIRTH_DEATH = Jumps(lambda th, x: jnp.array([th["birth"], th["death"] * x[0]]), [[1.0], [-1.0]])
RATES = {"birth": jnp.array(5.0), "death": jnp.array(1.0)}
COUNT = fl.Objective(terminal=lambda th, x: x[0], running=lambda th, x: 0.3 * x[0])


def birth_death_value(theta):
    m = lambda t: (
        3 * jnp.exp(-theta["death"] * t)
        + theta["birth"] / theta["death"] * (1 - jnp.exp(-theta["death"] * t))
    )
    return m(T[-1]) + 0.3 * jnp.sum(m(T[:-1]) * jnp.diff(T))


BASELINES = {
    "time": fl.baselines.time_only(),
    "optimal": fl.baselines.optimal(),
}


@pytest.mark.parametrize("baseline", ["time", "optimal"])
def test_birth_and_death(key, baseline):
    run = fl.simulator(BIRTH_DEATH, jnp.array([3.0]), T)
    estimate = fl.ppgt(run, COUNT, process=BIRTH_DEATH, baseline=BASELINES[baseline])(
        key, RATES, 4000
    )
    assert np.abs(z_scores(estimate, jax.jit(jax.grad(birth_death_value))(RATES))).max() < 4
    assert abs(estimate.value - birth_death_value(RATES)) < 4 * estimate.value_stderr


@pytest.mark.long
def test_recorded_events_have_the_score_of_the_run_they_came_from(key):
    run = fl.simulator(BIRTH_DEATH, jnp.array([3.0]), T)
    streamed = fl.ppgt(run, COUNT, process=BIRTH_DEATH, baseline=fl.baselines.mean()).samples(
        key, RATES, 200
    )
    record = run(split_key(key)[0], RATES, 200)
    recorded = gradient_samples(BIRTH_DEATH, COUNT, RATES, record, baseline=fl.baselines.mean())
    for name in RATES:
        np.testing.assert_allclose(
            recorded.gradient[name], streamed.gradient[name], rtol=1e-9, atol=1e-9
        )
    some = lambda part: fl.Trajectories(
        record.t, *(jax.tree.map(lambda v: v[part], tree) for tree in record[1:])
    )
    halves = [some(slice(0, 70)), some(slice(70, 200))]
    chunked = gradient_samples(
        BIRTH_DEATH, COUNT, RATES, halves, baseline=fl.baselines.mean(), block_bytes=4000
    )
    np.testing.assert_allclose(
        chunked.gradient["death"], recorded.gradient["death"], rtol=1e-9, atol=1e-9
    )


def test_lists_of_events_are_laid_on_the_grid(key):
    record = fl.simulator(BIRTH_DEATH, jnp.array([3.0]), T)(key, RATES, 20)
    after, channel, _ = record.events
    there = np.asarray(channel) >= 0
    times = [np.asarray(T[:-1, None] + after[j])[there[j]] for j in range(20)]
    channels = [np.asarray(channel[j])[there[j]] for j in range(20)]
    laid = bin_events(T, times, channels, [[1.0], [-1.0]])
    np.testing.assert_array_equal(laid.channel, channel)
    np.testing.assert_allclose(laid.after, np.where(there, after, 0), atol=1e-12)


def test_sizes_of_events_are_laid_on_the_grid():
    """A list per trajectory, of unequal lengths; a table also where it has as many rows as there
    are trajectories.
    """
    times = [[0.1, 0.6], [], [0.3]]
    channels = [[0, 0], [], [0]]
    grid = np.linspace(0, 1, 5)
    laid = bin_events(grid, times, channels, [[[1.0], [2.0]], [], [[3.0]]])
    expected = [[1, 0, 2, 0], [0, 0, 0, 0], [0, 3, 0, 0]]
    np.testing.assert_array_equal(laid.change[:, :, 0, 0], expected)
    laid = bin_events(grid, times, [[0, 2], [], [1]], [[1.0], [2.0], [3.0]])
    expected = [[1, 0, 3, 0], [0, 0, 0, 0], [0, 2, 0, 0]]
    np.testing.assert_array_equal(laid.change[:, :, 0, 0], expected)


def test_functions_of_random_sizes_may_leave_off_arguments(key):
    size = RandomJump(lambda key, th: th["m"] * jnp.ones(1), lambda th, change: jnp.zeros(()))
    process = Jumps(lambda th, x: jnp.ones(1), size)
    x = fl.simulator(process, jnp.zeros(1), T)(key, {"m": jnp.array(2.0)}, 20).x
    assert x.max() > 0
    np.testing.assert_array_equal(x % 2, 0)


@pytest.mark.long
def test_two_state_promoter(key):
    """Off <-> on; on makes product, which decays: (on, product)."""
    process = Jumps(
        lambda th, x: jnp.array(
            [th["on"] * (1 - x[0]), th["off"] * x[0], th["make"] * x[0], th["decay"] * x[1]]
        ),
        [[1, 0], [-1, 0], [0, 1], [0, -1]],
    )
    theta = {
        "on": jnp.array(0.8),
        "off": jnp.array(1.1),
        "make": jnp.array(6.0),
        "decay": jnp.array(0.9),
    }
    spread = fl.Objective(terminal=lambda th, x: (x[1] - 3.0) ** 2)
    states = [(on, n) for on in (0, 1) for n in range(40)]
    exact = jax.jit(jax.grad(lambda th: master_equation(process, th, states, (0, 0), spread)))(
        theta
    )
    run = fl.simulator(process, jnp.zeros(2), T)
    estimate = fl.ppgt(run, spread, process=process, baseline=fl.baselines.mean())(key, theta, 8000)
    assert np.abs(z_scores(estimate, exact)).max() < 4


@pytest.mark.long
def test_dimerisation(key):
    """2A -> B and back, a rate that is quadratic in the state."""
    process = Jumps(
        lambda th, x: jnp.array([th["bind"] * x[0] * (x[0] - 1) / 2, th["split"] * x[1]]),
        [[-2, 1], [2, -1]],
    )
    theta = {"bind": jnp.array(0.05), "split": jnp.array(0.5)}
    dimers = fl.Objective(running=lambda th, x: x[1])
    states = [(20 - 2 * b, b) for b in range(11)]
    exact = jax.jit(jax.grad(lambda th: master_equation(process, th, states, (20, 0), dimers)))
    run = fl.simulator(process, jnp.array([20.0, 0.0]), T)
    estimate = fl.ppgt(run, dimers, process=process, baseline=fl.baselines.mean())(key, theta, 4000)
    assert np.abs(z_scores(estimate, exact(theta))).max() < 4


@pytest.mark.long
def test_diffusion_with_jumps_of_random_size(key):
    """dX = −kX dt + s dW + ν dN, ν ~ N(m, 1) at rate a: the moments of the Euler chain are
    closed.
    """
    size = RandomJump(
        sample=lambda key, th, x, t, c, i: th["m"] + jax.random.normal(key, (1,)),
        log_density=lambda th, change, x, t, c, i: -jnp.sum((change - th["m"]) ** 2) / 2,
    )
    smooth = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: th["s"] * jnp.ones(1))
    process = Jumps(lambda th, x: jnp.array([th["a"]]), size, smooth)
    theta = {"k": jnp.array(0.7), "s": jnp.array(0.5), "a": jnp.array(1.5), "m": jnp.array(0.4)}
    square = fl.Objective(terminal=lambda th, x: x[0] ** 2)
    steps, dt = len(T) - 1, float(T[1] - T[0])

    def value(th):
        def step(_, now):
            mean, variance = now
            decay = 1 - th["k"] * dt
            kicks = th["s"] ** 2 + th["a"] * (th["m"] ** 2 + 1)
            return decay * mean + th["a"] * th["m"] * dt, decay**2 * variance + kicks * dt

        mean, variance = jax.lax.fori_loop(0, steps, step, (jnp.ones(()), jnp.zeros(())))
        return mean**2 + variance

    run = fl.simulator(process, jnp.array([1.0]), T)
    estimate = fl.ppgt(run, square, process=process, baseline=fl.baselines.mean())(key, theta, 8000)
    exact, slope = jax.jit(jax.value_and_grad(value))(theta)
    assert np.abs(z_scores(estimate, slope)).max() < 4
    assert abs(estimate.value - exact) < 4 * estimate.value_stderr
    recorded = fl.gradient(
        process, square, theta, run(key, theta, 4000), baseline=fl.baselines.mean()
    )
    assert np.abs(z_scores(recorded, slope)).max() < 4


def test_bad_input_is_named(key):
    run = lambda process: fl.simulator(process, jnp.array([3.0]), T)(key, RATES, 2)
    with pytest.raises(ValueError, match=r"rate of event 1 is -3"):
        run(Jumps(lambda th, x: jnp.array([1.0, -x[0]]), [[1.0], [-1.0]]))
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        run(Jumps(lambda th, x: jnp.ones(3), [[1.0], [-1.0]]))
    with pytest.raises(ValueError, match=r"1 components.*2"):
        run(Jumps(lambda th, x: jnp.ones(1), [[1.0, 2.0]]))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        Jumps(lambda th, x: jnp.ones(2), [1.0, -1.0])
    with pytest.raises(ValueError, match=r"Jumps.*score"):
        fl.ppgt(run, COUNT, process=BIRTH_DEATH, score=fl.scores.drift_score)
    record = fl.simulator(BIRTH_DEATH, jnp.array([3.0]), T)(key, RATES, 4)
    with pytest.raises(ValueError, match=r"events=bin_events"):
        fl.gradient(BIRTH_DEATH, COUNT, RATES, fl.Trajectories(record.t, record.x))
    with pytest.raises(ValueError, match=r"`wiener`"):
        fl.simulator(BIRTH_DEATH, jnp.array([3.0]), T, wiener=philox)(key, RATES, 2)
    with pytest.raises(ValueError, match=r"trajectory 0.*from 0 to below 2.*5"):
        bin_events(T, [[0.1, 5.0]], [[0, 0]], [[1.0], [-1.0]])


@pytest.mark.long
@pytest.mark.parametrize(
    "death", [lambda x: 4 - x, lambda x: 1 / jnp.abs(4 - x)], ids=["negative", "infinite"]
)
def test_a_rate_that_turns_bad_on_the_way_is_not_averaged(key, death):
    process = Jumps(lambda th, x: jnp.array([5.0, th["death"] * death(x[0])]), [[1.0], [-1.0]])
    with pytest.raises(
        (ValueError, FloatingPointError), match=r"rate .*trajectory \d+|trajectory \d+.* rate"
    ):
        fl.ppgt(fl.simulator(process, jnp.array([3.0]), T), COUNT)(key, RATES, 50)


@pytest.mark.parametrize("backend", ["jax", "cpu"])
def test_a_process_that_explodes_ends(key, monkeypatch, backend):
    """Pairs give birth: from ten on, infinitely many within a time of about 0.1."""
    monkeypatch.setattr(jumps, "MAX_EVENTS", 500)
    process = fl.Jumps(lambda theta, x: theta * x * (x - 1), [[1.0]])
    run = fl.simulator(process, jnp.array([10.0]), jnp.linspace(0, 1, 3), backend=backend)
    with pytest.raises(FloatingPointError, match="time index 0, from x = .10.0.*explodes"):
        fl.ppgt(run, fl.Objective(terminal=lambda theta, x: x[0]), process=process)(
            key, jnp.array(1.0), 4
        )


@pytest.mark.long
def test_states_in_single_precision_on_a_grid_in_double(key):
    """The float32 next to 0.7 lies below it: a step that waits for 0.7 itself would never end."""
    with jax.enable_x64(True):
        start, theta = jax.tree.map(lambda v: v.astype(jnp.float32), (jnp.array([3.0]), RATES))
        process = Jumps(
            lambda th, x: jnp.array([th["birth"], th["death"] * x[0]], x.dtype), [[1.0], [-1.0]]
        )
        record = fl.simulator(process, start, jnp.array([0.0, 0.7, 1.4]))(key, theta, 2)
    assert record.x.dtype == np.float32


def test_events_that_are_not_those_of_the_rates_are_told(key):
    """N/∫a dt is 1 within 1/√∫a dt of each event; a wrong rate or another unit of time is named."""
    record = fl.simulator(BIRTH_DEATH, jnp.array([3.0]), T)(key, RATES, 300)
    fits = examine(BIRTH_DEATH, RATES, record)
    assert not fits.cause
    np.testing.assert_allclose(fits.v, 1, atol=4 * fits.stderr.max())
    assert abs(fits.stderr[0] * np.sqrt(300 * 5.0 * 2.0) - 1) < 0.1  # birth: ∫a dt is known
    with pytest.warns(RuntimeWarning, match=r"events / ∫ rate dt.*Event 1 happens 0.6\d* times"):
        fl.gradient(BIRTH_DEATH, COUNT, {**RATES, "death": jnp.array(1.5)}, record)
    slow = record._replace(
        t=record.t / 1e3, events=record.events._replace(after=record.events.after / 1e3)
    )
    assert "times are multiplied by 1000" in examine(BIRTH_DEATH, RATES, slow).cause
