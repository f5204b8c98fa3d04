"""Long-run averages from one record, against the exact stationary law of the Euler chain."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.signal import lfilter

import fluctua as fl
from fluctua import tcmt
from fluctua.core import check
from fluctua.processes.stationary import autocorrelation_time, memory_time, stationary
from fluctua.tcmt import exact as exact_moments
from numeric import linear_chain, value_and_slope
from steady import steady_average

OU = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: th["s"] * jnp.ones(1))
THETA = {"k": np.array(1.5), "s": np.array(0.8)}
DT = 0.05
SQUARE = lambda th, x: x[0] ** 2


def stationary_square(theta):
    """E[X²] of X' = (1 − kΔ)X + s√Δ z."""
    return theta["s"] ** 2 * DT / (1 - (1 - theta["k"] * DT) ** 2)


@cache
def exact_slope():
    return value_and_slope(stationary_square, THETA)[1]


LONG = 80_000
SHORT = 8000
"""Steps of nearly all records: what is compiled for one serves them all."""


@cache
def record(seed, steps, traces=1):
    """From the stationary law on. Not to be written to."""
    chain = linear_chain([[-THETA["k"]]], [0.0], [THETA["s"]], DT)
    return fl.Trajectories(DT * np.arange(steps + 1), chain.simulate(steps, traces, seed))


def unexamined_score(process, theta, step):
    """The full score, as one of one's own: its law is not known, and residuals are not examined."""
    return fl.scores.full_score(process, theta, step)


@cache
def answer_records():
    """Long-run averages from 60 records."""
    return [
        stationary(OU, SQUARE, THETA, record(s, SHORT), window=2.0, score=unexamined_score)
        for s in range(60)
    ]


def test_gradient_of_a_long_run_average():
    traces = 4
    answer = stationary(OU, SQUARE, THETA, record(100, LONG // traces, traces))
    exact = exact_slope()
    for name in THETA:
        z = (answer.estimate.gradient[name] - exact[name]) / answer.estimate.stderr[name]
        assert abs(z) < 4, (name, z)
    assert abs(answer.estimate.value - stationary_square(THETA)) < 4 * answer.estimate.value_stderr
    assert "window" in repr(answer)


def test_rewards_of_steps():
    """r = (X' − X)²/2 + kX'X: both ends, own kick and explicit θ.

    E[X'X] = aP, E[(X' − X)²] = (kΔ)²P + s²Δ.
    """
    with_step_reward = fl.Objective(
        per_step=lambda th, x, x_next: (x_next[0] - x[0]) ** 2 / 2 + th["k"] * x_next[0] * x[0]
    )

    def exact(th):
        p, a = stationary_square(th), 1 - th["k"] * DT
        return ((1 - a) ** 2 * p + th["s"] ** 2 * DT + 2 * th["k"] * a * p) / (2 * DT)

    answer = stationary(OU, with_step_reward, THETA, record(101, LONG))
    value, slope = value_and_slope(exact, THETA)
    for name in THETA:
        z = (answer.estimate.gradient[name] - slope[name]) / answer.estimate.stderr[name]
        assert abs(z) < 4, (name, z)
    assert abs(answer.estimate.value - value) < 4 * answer.estimate.value_stderr
    with pytest.raises(ValueError, match="`initial`"):
        stationary(OU, fl.Objective(SQUARE, initial=SQUARE), THETA, record(0, SHORT))
    with pytest.raises(ValueError, match="twin.*`per_step`"):
        stationary(OU, with_step_reward, THETA, record(0, SHORT), baseline="twin")


def test_a_short_window_keeps_its_share():
    """Of dJ/dk a window of w steps has the share 1 − (1 − kΔ)^{2w}, and the next window has
    what it says is missing.
    """
    w = 4
    answer = stationary(OU, SQUARE, THETA, record(101, LONG), window=w * DT)
    whole, decay = exact_slope()["k"], float(1 - THETA["k"] * DT)
    share = 1 - decay ** (2 * w)
    assert abs(answer.estimate.gradient["k"] - share * whole) < 4 * answer.estimate.stderr["k"]
    assert (
        abs(answer.estimate.gradient["k"] - whole) > 8 * answer.estimate.stderr["k"]
    )  # the test can see the window
    assert abs(answer.missing["k"] - share * (1 - share) * whole) < 4 * answer.missing_stderr["k"]


@pytest.mark.long
def test_errors_cover():
    answers = answer_records()
    check_errors(answers)
    exact = exact_slope()
    inside = []
    for answer in answers:
        low, high = answer.estimate.interval
        inside.append([low[n] < exact[n] < high[n] for n in THETA])
        low, high = answer.estimate.value_interval
        inside[-1].append(low < stationary_square(THETA) < high)
    assert np.all(np.mean(inside, axis=0) > 0.95 - 4 * np.sqrt(0.95 * 0.05 / 60))


def check_errors(answers):
    """No bias, and errors as large as the scatter, to four errors each.

    A standard deviation from n samples of kurtosis 4 is known to 0.85/√n. Mean squares of z would
    be those of the few records with a small error: gradient and error of a record are correlated.
    """
    exact = exact_slope()
    off = np.array([[float(a.estimate.gradient[n]) - exact[n] for n in THETA] for a in answers])
    error = np.array([[float(a.estimate.stderr[n]) for n in THETA] for a in answers])
    n = len(answers)
    assert np.all(np.abs(off.mean(axis=0)) < 4 * off.std(axis=0) / np.sqrt(n))
    ratio = off.std(axis=0) / np.sqrt(np.mean(error**2, axis=0))
    assert np.all(np.abs(ratio - 1) < 4 * 0.85 / np.sqrt(n)), ratio


def test_autocorrelation_time_of_an_autoregression():
    rng, decay = np.random.default_rng(0), 0.9
    x = lfilter([1.0], [1.0, -decay], rng.normal(size=200_000))
    exact = (1 + decay) / (1 - decay)
    assert abs(autocorrelation_time(x[None]) / exact - 1) < 4 * np.sqrt(
        2 * (2 * 5 + 1) * exact / x.size
    )  # Sokal's error


def test_an_oscillating_series_remembers_longer_than_its_integral_says():
    """ρ(k) = rᵏcos ωk: the sum over k is small, the envelope is not; Σ|ρ| = (2/π) of the
    envelope's for small ω.
    """
    rng, r, omega = np.random.default_rng(1), 0.98, 0.5
    z = lfilter([1.0], [1.0, -r * np.exp(1j * omega)], rng.normal(size=(200_000, 2)) @ [1, 1j])
    envelope = 1 + 2 * r / (1 - r)
    assert autocorrelation_time(z.real[None]) < 0.1 * envelope
    assert abs(memory_time(z.real[None]) / (2 / np.pi * envelope) - 1) < 0.25


@pytest.mark.long
def test_auto_doubles_its_window_until_the_next_adds_nothing():
    """A reward of a fast and a slow component is correlated like the fast one, and answers
    kicks like the slow one.
    """
    process = fl.Process(
        lambda th, x: jnp.stack([th["slow"] * (th["set"] - x[0]), -8.0 * x[1]]),
        lambda th, x: jnp.array([0.3, 4.0]),
    )
    theta = {"slow": np.array(0.25), "set": np.array(1.0)}
    reward = lambda th, x: x[0] + x[1]
    chain = linear_chain(np.diag([-0.25, -8.0]), [0.25, 0.0], [0.3, 4.0], DT)
    data = fl.Trajectories(DT * np.arange(200_001), chain.simulate(200_000, 1, 1))
    short = stationary(process, reward, theta, data, window=1.0)
    assert abs(short.estimate.gradient["set"] - 1) > 8 * short.estimate.stderr["set"]
    assert short.missing["set"] > 8 * short.missing_stderr["set"]
    assert (
        short.bias_bound["set"]
        > 1 - short.estimate.gradient["set"] - 2 * short.estimate.stderr["set"]
    )
    answer = stationary(process, reward, theta, data)
    assert answer.window > 4 * 5 * answer.autocorrelation_time / 2
    assert abs(answer.estimate.gradient["set"] - 1) < 4 * answer.estimate.stderr["set"]


CASCADE = fl.Process(
    lambda th, x: jnp.stack([th["push"] - 0.2 * x[0], 0.8 * x[0] - 4.0 * x[1]]),
    lambda th, x: jnp.array([0.3, 1.5]),
)
PUSH = {"push": np.array(0.2)}
FAST = lambda th, x: x[1]
"""The slow component moves the mean of the reward, E[x₁] = push, and has 3 % of its variance."""


def cascade(seed, steps):
    chain = linear_chain([[-0.2, 0.0], [0.8, -4.0]], [0.2, 0.0], [0.3, 1.5], DT)
    return fl.Trajectories(DT * np.arange(steps + 1), chain.simulate(steps, 1, seed))


@pytest.mark.long
def test_a_slow_mode_with_a_small_share_of_the_reward_sizes_the_window():
    """The reward forgets within 0.7, and the mode that the parameter excites within 2/0.2 (1 +
    2Σρ of a decay).
    """
    answer = stationary(CASCADE, FAST, PUSH, cascade(100, 100_000))
    assert answer.autocorrelation_time < 2
    assert abs(answer.memory / 10 - 1) < 0.4
    assert answer.window > 4 / 0.2  # four time constants leave 2 %
    assert abs(answer.estimate.gradient["push"] - 1) < 4 * answer.estimate.stderr["push"]
    assert not answer.cut


def test_a_record_too_short_for_its_slowest_state_has_the_bias_in_its_interval():
    data = cascade(101, 6000)  # 300 units of time: ten windows of 20 do not fit
    answer = stationary(CASCADE, FAST, PUSH, data)
    given = stationary(CASCADE, FAST, PUSH, data, window=answer.window)
    assert answer.cut
    assert not given.cut
    assert answer.estimate.gradient == given.estimate.gradient
    for side, sign in ((0, -1), (1, 1)):
        wider = sign * (
            answer.estimate.interval[side]["push"] - given.estimate.interval[side]["push"]
        )
        assert wider == pytest.approx(float(answer.bias_bound["push"]))
    assert "correlation time of the slowest state" in repr(answer)


@pytest.mark.long
def test_intervals_of_two_time_scales_cover():
    """They covered 37 % of records of 1,000 units of time, whose gradients were 33 % too small."""
    seeds = 20
    answers = [
        stationary(CASCADE, FAST, PUSH, cascade(seed, 20_000), score=unexamined_score)
        for seed in range(seeds)
    ]
    inside = [
        low["push"] < 1 < high["push"] for low, high in (one.estimate.interval for one in answers)
    ]
    gradients = np.array([one.estimate.gradient["push"] for one in answers])
    assert np.mean(inside) > 0.95 - 4 * np.sqrt(0.95 * 0.05 / seeds)
    assert abs(gradients.mean() - 1) < 4 * gradients.std() / np.sqrt(seeds)


@pytest.mark.long
def test_the_mean_reward_takes_nothing_off_the_gradient():
    """ḡ answers the kicks too: a window of w of N steps lost w/N of the gradient, here 4.3 %, five
    errors of the mean.

    x forgets within a step, X' = fΔ + s√Δ z, so that ∂E[x]/∂f = Δ and no window is too short.
    """
    process = fl.Process(lambda f, x: f - x / DT, lambda f, x: 0.8 * jnp.ones(1))
    seeds, steps, theta = 500, 460, np.array(0.0)
    t = DT * np.arange(steps + 1)
    x = 0.8 * np.sqrt(DT) * np.random.default_rng(3).normal(size=(seeds, 1, steps + 1, 1))
    reward = lambda f, x: x[0]
    options = {"window": 20 * DT, "score": unexamined_score}
    gradients = np.array(
        [
            stationary(process, reward, theta, fl.Trajectories(t, one), **options).estimate.gradient
            for one in x
        ]
    )
    assert abs(gradients.mean() - DT) < 3.5 * gradients.std() / np.sqrt(seeds)


# --------------------------------------------------------------------------------------------- twin


@pytest.mark.parametrize(("order", "wrong"), [(1, 1.0), (2, 1.3)])
def test_a_twin_is_unbiased_and_saves_variance(order, wrong):
    """dJ/dk = −σ²/2k² on a fine grid; measured gains of one trace: 8 with order 1 and 20 with
    order 2.
    """
    data = record(101, LONG)
    twin = fl.Twin(theta=lambda th: jax.tree.map(lambda v: wrong * v, th), order=order)
    plain, answer = (stationary(OU, SQUARE, THETA, data, baseline=b) for b in ("time", twin))
    exact = exact_slope()
    assert abs(exact["k"] / (-(THETA["s"] ** 2) / (2 * THETA["k"] ** 2)) - 1) < 2 * DT
    for name in THETA:
        gap, error = answer.estimate.gradient[name] - exact[name], answer.estimate.stderr[name]
        assert abs(gap) < 4 * error + 1e-6, (
            name
        )  # an exact twin leaves no noise, only what is beyond two windows
        assert (plain.estimate.stderr[name] / error) ** 2 > 3, name
    assert answer.estimate.value == plain.estimate.value


def test_a_twin_fills_in_what_a_short_window_cuts_off():
    """The tail of the kicks beyond the window is in the twin's guess."""
    answer = stationary(
        OU, SQUARE, THETA, record(101, LONG), window=4 * DT, baseline=fl.Twin(order=2)
    )
    whole, decay = exact_slope()["k"], float(1 - THETA["k"] * DT)
    cut = decay ** (2 * 8) * whole  # a path of one window, on top of the window of the score
    assert abs(answer.estimate.gradient["k"] - whole) < 4 * answer.estimate.stderr["k"] + abs(cut)
    assert abs(cut) < 0.3 * abs(whole)


CHAIN = tcmt.transmission(tcmt.chain(3, sigma_w=0.5), horizon=1.0, dt=0.02)


@pytest.mark.long
def test_a_driven_network_in_its_steady_state():
    """Against the Lyapunov equation, which agrees with the exact moments of a long run."""
    theta = {"omega": np.array([0.3, -0.2, 0.1]), "kappa": np.array([1.0, 0.8])}
    rewards = check.objective(CHAIN.objective)
    power = lambda th, x: rewards.running(th, x, jnp.zeros(()), None)
    average = lambda th: steady_average(CHAIN.process, power, th, 0.02, 6)
    value, exact = jax.jit(jax.value_and_grad(average))(theta)
    long = tcmt.transmission(CHAIN.network, horizon=40.0, dt=0.02)
    late = (
        exact_moments.rewards(long, {**theta, "chi": np.zeros(3)})[-1] * 40.0
    )  # a task's reward is per horizon
    assert abs(float(value) / late - 1) < 1e-6

    drift = lambda x: CHAIN.process.drift(theta, x, jnp.zeros(()), None)
    slope, force = jax.jit(lambda x: (jax.jacfwd(drift)(x), drift(x)))(np.zeros(6))
    sigma = CHAIN.process.noise(theta, np.zeros(6), np.zeros(()), None)
    chain = linear_chain(slope, force, sigma, 0.02)
    data = fl.Trajectories(0.02 * np.arange(20_001), chain.simulate(20_000, 1, 0))
    plain = stationary(CHAIN.process, power, theta, data, window=10.0)
    twin = stationary(CHAIN.process, power, theta, data, window=10.0, baseline=fl.Twin(order=2))
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    for answer in (plain, twin):
        z = (flat(answer.estimate.gradient) - flat(exact)) / flat(answer.estimate.stderr)
        assert np.abs(z).max() < 4.5, z  # five components
    assert np.median((flat(plain.estimate.stderr) / flat(twin.estimate.stderr)) ** 2) > 30
    assert np.all(np.abs(flat(exact)) > 12 * flat(twin.estimate.stderr))  # a sign would show


@pytest.mark.long
def test_errors_with_a_twin_cover():
    twin = fl.Twin(theta=lambda th: {"k": 1.2 * th["k"], "s": 0.8 * th["s"]})
    check_errors(
        [
            stationary(OU, SQUARE, THETA, record(seed, SHORT), window=2.0, baseline=twin)
            for seed in range(60)
        ]
    )


def test_twins_that_cannot_be_are_named():
    short = record(0, SHORT)
    with pytest.raises(ValueError, match=r"optimal.*time, twin"):
        stationary(OU, SQUARE, THETA, short, baseline="optimal")
    with pytest.raises(ValueError, match=r"Twin\(baseline='optimal'\)"):
        stationary(OU, SQUARE, THETA, short, baseline=fl.Twin(baseline="optimal"))
    grows = fl.Twin(theta=lambda th: {"k": -1e30 * th["k"], "s": th["s"]})
    with pytest.raises(FloatingPointError, match=r"twin's path .* not finite"):
        stationary(OU, SQUARE, THETA, short, baseline=grows)


# --------------------------------------------------------------------------------------- steadiness


@pytest.mark.long
def test_a_record_that_changes_is_noticed():
    data = record(101, LONG)
    assert not stationary(OU, SQUARE, THETA, data).change.seen
    drifting = data._replace(x=data.x + 0.35 * np.linspace(0, 1, LONG + 1)[:, None])
    with pytest.warns(
        RuntimeWarning, match=r"the mean of component 0 differs by 0\.[12]\d+ .* standard errors"
    ):
        assert stationary(OU, SQUARE, THETA, drifting).change.seen
    hotter = data._replace(x=data.x * np.where(np.arange(LONG + 1) < LONG / 2, 1.0, 1.1)[:, None])
    with pytest.warns(
        RuntimeWarning, match=r"(the reward|the mean square of component 0) differs by 0\.0\d+"
    ):
        stationary(OU, SQUARE, THETA, hotter)


@pytest.mark.long
def test_a_steady_record_is_seldom_said_to_change():
    assert not any(answer.change.seen for answer in answer_records()[:40])


def test_a_record_of_another_process_is_noticed():
    with pytest.warns(RuntimeWarning, match=r"not those of the process"):
        stationary(OU, SQUARE, THETA | {"s": np.array(1.6)}, record(0, SHORT))


def test_a_reward_that_depends_on_theta_has_its_explicit_term():
    answer = stationary(OU, lambda th, x: th["k"] * x[0] ** 2, THETA, record(101, LONG))
    _, exact = value_and_slope(lambda th: th["k"] * stationary_square(th), THETA)
    for name in THETA:
        assert abs(answer.estimate.gradient[name] - exact[name]) < 4 * answer.estimate.stderr[name]


def test_bad_records_are_named():
    short = record(0, 40)
    with pytest.raises(ValueError, match=r"longer than two windows|too short"):
        stationary(OU, SQUARE, THETA, short)
    with pytest.raises(
        ValueError, match=r"too short: 1 × 10 .* autocorrelation time of .* an error bar needs 10"
    ):
        stationary(OU, SQUARE, THETA, record(0, 200), window=0.5)
    with pytest.raises(ValueError, match=r"`window`.*soon"):
        stationary(OU, SQUARE, THETA, short, window="soon")
    with pytest.raises(ValueError, match=r"`window`.*0\.05.*0"):
        stationary(OU, SQUARE, THETA, short, window=0.0)
    with pytest.raises(ValueError, match=r"does not vary"):
        stationary(OU, lambda th, x: 0.0 * x[0], THETA, short)
    with pytest.raises(ValueError, match=r"uniform"):
        stationary(
            OU, SQUARE, THETA, fl.Trajectories(np.array([0.0, 1.0, 3.0]), np.ones((1, 3, 1)))
        )
    with pytest.raises(ValueError, match=r"terminal"):
        stationary(OU, fl.Objective(terminal=SQUARE), THETA, short)
