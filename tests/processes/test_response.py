"""Responses in time from unperturbed records, against exact responses of the Euler chain."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.signal import lfilter

import fluctua as fl
import ring
from fluctua.processes import cross_fit, response_sums
from fluctua.processes.response import CrossFitted, compare_strides, fourier, step_response

DT = 0.05
K, KT = 1.5, 0.5
DECAY = 1 - K * DT
VARIANCE = 2 * KT * DT / (1 - DECAY**2)
THETA = {"f": np.array(0.0), "k": np.array(K), "kT": np.array(KT)}
OU = fl.Process(
    lambda th, x: th["f"] - th["k"] * x, lambda th, x: jnp.sqrt(2 * th["kT"]) * np.ones(1)
)
MEAN = lambda th, x: x[0]
SQUARE = lambda th, x: x[0] ** 2
ENERGY = lambda th, x: th["k"] * x[0] ** 2 / 2

RING = {"torque": 1.0, "amplitude": 1.5, "D": 0.5}
RING_DT = 0.02
TURN = 2 * np.pi
SINE = lambda th, x: jnp.sin(x[0])
BASIS = fourier(2)


def amplitude_of_noise(th, x):
    return jnp.sqrt(2 * th["D"]) * jnp.ones(1)


SINE_RING = fl.Process(
    lambda th, x: th["torque"] + th["amplitude"] * jnp.sin(x), amplitude_of_noise
)
FOURIER_RING = fl.Process(
    lambda th, x: th["torque"] + th["amplitude"] * (th["force"] @ BASIS(x)[1:])[None],
    amplitude_of_noise,
)
FOURIER_START = {
    "torque": np.array(0.0),
    "amplitude": np.array(1.0),
    "force": np.array([0.0, 1.0, 0.0, 0.0]),
    "D": np.array(1.0),
}
FITTED = CrossFitted(("torque", "force", "D"))


@cache
def ou_record(seed, steps, traces=1):
    """Traces that begin in the steady state. Not to be written to."""
    z = np.random.default_rng(seed).normal(size=(traces, steps + 1)) * np.sqrt(2 * KT * DT)
    z[:, 0] *= np.sqrt(VARIANCE / (2 * KT * DT))
    x = lfilter([1.0], [1.0, -DECAY], z, axis=1)
    return fl.Trajectories(DT * np.arange(steps + 1), x[..., None])


def ring_record(seed, steps, traces):
    x = ring.simulate(RING, RING_DT, steps, traces, seed)
    return fl.Trajectories(RING_DT * np.arange(steps + 1), x)


def exact_ou(lags):
    """⟨x⟩ to the force, ⟨x²⟩ to the stiffness and to kT, of X' = aX + fΔ + √(2kTΔ) z."""
    m = np.arange(lags + 1)
    grown = (1 - DECAY ** (2 * m)) / (1 - DECAY**2)
    return {
        "f": (1 - DECAY**m) / K,
        "k": -2 * DECAY * DT * VARIANCE * grown,
        "kT": 2 * DT * grown,
    }


def largest_z(answer, name, exact):
    """Largest deviation in standard errors; where there is no error, there is no deviation."""
    error = answer.stderr[name]
    off = answer.response[name] - exact
    assert np.all(np.abs(off[error == 0]) < 1e-12)
    return np.max(np.abs(off[error > 0]) / error[error > 0])


def holds(answer, name, exact):
    """Whether χ lies within one and a half joint bands: batches of ⟨x²⟩ are skewed."""
    low, high = (side[name] for side in answer.band)
    chi = answer.response[name]
    return np.all((chi - 1.5 * (chi - low) <= exact) & (exact <= chi + 1.5 * (high - chi)))


# ------------------------------------------------------------------------- exact answers


def test_mean_answers_a_force():
    answer = step_response(OU, MEAN, THETA, ou_record(0, 15_000, 4), window=2.0)
    exact = exact_ou(40)
    assert answer.t[-1] == pytest.approx(2.0)
    assert largest_z(answer, "f", exact["f"]) < 4
    low, high = (side["f"] for side in answer.band)
    assert np.all((low <= exact["f"] + 1e-12) & (exact["f"] - 1e-12 <= high))
    # of the other parameters ⟨x⟩ is independent, by symmetry
    assert largest_z(answer, "k", 0) < 4
    assert answer.stderr["f"][-1] < 0.05 * exact["f"][-1]  # the test can see the response
    assert "∂J/∂f" in repr(answer)


def test_mean_square_answers_stiffness_and_temperature():
    answer = step_response(OU, SQUARE, THETA, ou_record(0, 15_000, 4), window=1.0)
    exact = exact_ou(20)
    for name in ("k", "kT"):
        assert holds(answer, name, exact[name]), name
        assert not holds(answer, name, 1.5 * exact[name]), name


def test_reward_with_parameters_of_its_own():
    """⟨kx²/2⟩ jumps by ⟨x²⟩/2 when k does."""
    answer = step_response(OU, ENERGY, THETA, ou_record(2, 15_000, 4), window=1.0)
    exact = VARIANCE / 2 + K / 2 * exact_ou(20)["k"]
    assert answer.response["k"][0] == pytest.approx(VARIANCE / 2, rel=0.1)
    assert holds(answer, "k", exact)


def test_reward_of_steps():
    """The mean velocity answers a force at once, and its last step knows the force already:
    a^{m−1}. k(ΔX)²/Δ has an explicit part from the first step on.
    """
    record = ou_record(3, 15_000, 4)
    velocity = fl.Objective(per_step=lambda th, x, x_next: x_next[0] - x[0])
    answer = step_response(OU, velocity, THETA, record, window=1.0)
    exact = np.append(0.0, DECAY ** np.arange(20))
    assert largest_z(answer, "f", exact) < 4
    heat = fl.Objective(per_step=lambda th, x, x_next: th["k"] * (x_next[0] - x[0]) ** 2)
    answer = step_response(OU, heat, THETA, record, window=0.5)
    m = np.arange(1, 11)
    before = -2 * DECAY * DT * VARIANCE * (1 - DECAY ** (2 * m - 2)) / (1 - DECAY**2)
    square = (K * DT) ** 2 * VARIANCE + 2 * KT * DT
    exact = (square + K * (2 * K * DT**2 * VARIANCE + (K * DT) ** 2 * before)) / DT
    assert largest_z(answer, "k", np.append(0.0, exact)) < 4
    with pytest.raises(ValueError, match="`per_step`.*stride"):
        step_response(OU, heat, THETA, record, window=0.5, stride=2)


def test_ring_with_torque():
    record = ring_record(0, 6000, 10)
    answer = step_response(SINE_RING, SINE, RING, record, window=2.0, period=TURN)
    exact = ring.exact_response(*RING.values(), RING_DT, 100)
    for i, name in enumerate(RING):
        assert largest_z(answer, name, exact[:, i]) < 4, name
    assert largest_z(answer, "torque", 0) > 10


def test_exact_response_of_the_ring_tends_to_that_of_its_generator():
    """The Euler chain differs from continuous time by O(Δt): halving Δt halves it."""
    continuous = ring.generator_response(*RING.values(), [0.5, 1.0, 3.0])
    off = []
    for dt in (0.01, 0.005):
        rows = [round(t / dt) for t in (0.5, 1.0, 3.0)]
        off.append(ring.exact_response(*RING.values(), dt, rows[-1])[rows, 1] - continuous)
    np.testing.assert_allclose(off[1], off[0] / 2, rtol=0.05)
    assert np.all(np.abs(off[1]) < 1e-3)


@pytest.mark.long
def test_events_of_a_jump_process():
    """Births at rate b, deaths at rate d each: ⟨n⟩ answers b by (1 − e^{−dt})/d, in exact time."""
    birth, death, dt = 6.0, 2.0, 0.05
    theta = {"b": np.array(birth), "d": np.array(death)}
    rates = jax.jit(lambda th, x: jnp.stack([th["b"], th["d"] * x[0]]))
    jumps = fl.Jumps(rates, [[1.0], [-1.0]])
    simulate = fl.simulator(jumps, jnp.array([3.0]), dt * np.arange(4001))
    whole = simulate(jax.random.key(0), theta, 4)
    settled = lambda leaf: np.asarray(leaf)[:, 100:]  # five relaxation times on
    events = jax.tree.map(settled, whole.events)
    record = fl.Trajectories(np.asarray(whole.t)[100:], settled(whole.x), None, events)
    answer = step_response(jumps, MEAN, theta, record, window=1.0)
    grown = (1 - np.exp(-death * answer.t)) / death
    assert largest_z(answer, "b", grown) < 4
    assert largest_z(answer, "d", -birth / death * grown) < 4
    with pytest.raises(ValueError, match="Jumps.*stride"):
        step_response(jumps, MEAN, theta, record, window=1.0, stride=2)
    with pytest.raises(ValueError, match="Jumps is not fitted"):
        step_response(jumps, MEAN, theta, record, window=1.0, calibration=CrossFitted(("b",)))


def test_end_of_the_response_is_the_gradient_of_the_average():
    record = ou_record(4, 60_000)
    answer = step_response(OU, SQUARE, THETA, record, window=3.0)
    whole = fl.stationary(OU, SQUARE, THETA, record, window=3.0)
    for name in ("k", "kT"):
        apart = answer.response[name][-1] - whole.estimate.gradient[name]
        assert abs(apart) < 0.2 * answer.stderr[name][-1]  # of one record, but for its ends
        ratio = answer.stderr[name][-1] / whole.estimate.stderr[name]
        assert 0.75 < ratio < 1.33


# ---------------------------------------------------------------------------- mutations


def test_a_product_with_the_reward_at_the_kick_itself_is_seen(monkeypatch):
    """Lags from 0 instead of 1 delay the response by one step."""
    right = response_sums.correlate

    def wrong(kicks, g, grid):
        now = (g[: len(kicks), None] * kicks).mean(axis=0)
        return jnp.concatenate([now[None], right(kicks, g, grid)[:-1]])

    monkeypatch.setattr(response_sums, "correlate", wrong)
    reward = lambda th, x: x[0]  # of its own: nothing compiled before is used
    answer = step_response(OU, reward, THETA, ou_record(0, 15_000, 4), window=2.0)
    assert largest_z(answer, "f", exact_ou(40)["f"]) > 10


def test_increments_that_are_not_wrapped_are_seen():
    record = ring_record(1, 6000, 2)
    with pytest.warns(RuntimeWarning, match="not those of the process"):
        wrong = step_response(SINE_RING, SINE, RING, record, window=0.5)
    right = step_response(SINE_RING, SINE, RING, record, window=0.5, period=TURN)
    unwrapped = record._replace(x=np.unwrap(record.x, axis=1) - 40 * np.pi)
    same = step_response(SINE_RING, SINE, RING, unwrapped, window=0.5, period=TURN)
    np.testing.assert_allclose(same.response["torque"], right.response["torque"], atol=1e-9)
    assert wrong.residuals.v[0] > 3
    assert abs(right.residuals.v[0] - 1) < 0.1


# ------------------------------------------------------------------------- fitted drifts


def test_ring_with_a_fitted_drift():
    """Nothing is known of the force but that it is periodic; D is fitted too."""
    record = ring_record(2, 6000, 10)
    answer = step_response(
        FOURIER_RING, SINE, FOURIER_START, record, window=2.0, period=TURN, calibration=FITTED
    )
    exact = RING["amplitude"] * ring.exact_response(*RING.values(), RING_DT, 100)[:, 1]
    assert largest_z(answer, "amplitude", exact) < 4
    assert largest_z(answer, "amplitude", 0) > 3
    truth = {"torque": RING["torque"], "D": RING["D"], "force": np.zeros(4)}
    truth["force"][1] = RING["amplitude"]
    for name, value in truth.items():
        z = (answer.theta[name] - value) / answer.theta_stderr[name]
        assert np.all(np.abs(z) < 4), name
    assert answer.theta_stderr["amplitude"] == 0
    assert answer.fold_values.shape == (5, 6)
    assert answer.fitted[0] == "D"
    assert "fitted in 5 folds" in repr(answer)
    # the amplitude is that of the fitted force: at short times its error is most of the whole
    assert np.all(
        answer.stderr["amplitude"][1:10] > 1.5 * answer.sampling_stderr["amplitude"][1:10]
    )


def test_folds_never_share_data_with_their_scores():
    batches = [response_sums.KickBatch(j, n) for j in range(2) for n in range(10)]
    folds = cross_fit.assign_folds(batches, 5)
    for fold in range(5):
        own = {batches[j] for j in np.flatnonzero(folds == fold)}
        others = [batches[j] for j in cross_fit.select_others(batches, folds, fold)]
        for one in own:
            assert all(a.trace != one.trace or abs(a.number - one.number) > 1 for a in others)
        assert len(others) >= len(batches) - len(own) - 2

    record = ou_record(5, 20_000)
    options = {"window": 1.0, "calibration": CrossFitted(("k",), folds=3)}
    before = step_response(OU, MEAN, THETA, record, **options)
    x = record.x.copy()
    x[:, :4500] = ou_record(6, 4499).x  # of the first fold, and not of its guard
    after = step_response(OU, MEAN, THETA, record._replace(x=x), **options)
    assert after.fold_values[0] == pytest.approx(before.fold_values[0], abs=1e-12)
    assert np.all(np.abs(after.fold_values[1:] - before.fold_values[1:]) > 1e-4)


def test_fit_is_least_squares():
    """For one fold all others: k̂ = −ΣxΔx/Σx²Δ, k̂T = Σ(Δx + k̂xΔ)²/2NΔ of their batches."""
    record = ou_record(5, 20_000)
    start = {**THETA, "k": np.array(0.4), "kT": np.array(3.0)}
    answer = step_response(
        OU, MEAN, start, record, window=1.0, calibration=CrossFitted(("k", "kT"), folds=2)
    )
    x, step = record.x[0, :-1, 0], np.diff(record.x[0, :, 0])
    kicks = len(x) + 1 - 20  # every kick meets 20 rewards
    length = kicks // answer.batches
    half = -(-answer.batches // 2)
    here = np.s_[(half + 1) * length : answer.batches * length]  # the second half but for the guard
    k = -np.sum((x * step)[here]) / np.sum(x[here] ** 2) / DT
    kT = np.mean((step + k * x * DT)[here] ** 2) / (2 * DT)
    np.testing.assert_allclose(answer.fold_values[0], [k, kT], rtol=1e-4)


@pytest.mark.filterwarnings("ignore:the trajectories are not those")
def test_baseline_by_regression():
    """Less noise, the same answer, and an error of the drift that hardly counts."""
    record = ou_record(8, 20_000, 2)
    square = lambda x: jnp.array([1.0, x[0], x[0] ** 2])
    exact = exact_ou(20)
    plain = step_response(OU, MEAN, THETA, record, window=1.0)
    better = step_response(OU, MEAN, THETA, record, window=1.0, baseline=square)
    assert largest_z(better, "f", exact["f"]) < 4
    assert np.all(better.stderr["f"][1:5] < 0.7 * plain.stderr["f"][1:5])
    wrong = {**THETA, "k": np.array(1.2 * K)}
    plain = step_response(OU, MEAN, wrong, record, window=1.0)
    better = step_response(OU, MEAN, wrong, record, window=1.0, baseline=square)
    assert largest_z(plain, "f", exact["f"]) > 5
    assert largest_z(better, "f", exact["f"]) < 4


def test_covariance_of_parameters_from_other_data():
    """By the slope of χ in the parameters: that of χ at parameters a little to either side."""
    record = ou_record(5, 20_000)
    sigma = 0.1
    covariance = np.diag([0.0, sigma**2, 0.0])
    answer = step_response(OU, SQUARE, THETA, record, window=1.0, calibration=covariance)
    sides = [
        step_response(OU, SQUARE, {**THETA, "k": np.array(K + d)}, record, window=1.0)
        for d in (0.01, -0.01)
    ]
    for name in THETA:
        slope = (sides[0].response[name] - sides[1].response[name]) / 0.02
        added = np.sqrt(answer.stderr[name] ** 2 - answer.sampling_stderr[name] ** 2)
        np.testing.assert_allclose(added, sigma * np.abs(slope), rtol=0.01, atol=1e-5)
    assert answer.theta_stderr["k"] == pytest.approx(sigma)
    assert np.max(added) > 1e-3


# ------------------------------------------------------------------------- records


def test_several_records_of_different_lengths():
    pair = ou_record(8, 20_000, 2)
    apart = [pair._replace(x=pair.x[j : j + 1]) for j in range(2)]
    together = step_response(OU, MEAN, THETA, pair, window=1.0)
    same = step_response(OU, MEAN, THETA, apart, window=1.0)
    np.testing.assert_allclose(same.response["f"], together.response["f"], atol=1e-12)
    shorter = apart[1]._replace(t=apart[1].t[:12_001], x=apart[1].x[:, :12_001])
    answer = step_response(OU, MEAN, THETA, [apart[0], shorter], window=1.0)
    assert largest_z(answer, "f", exact_ou(20)["f"]) < 4


def test_context_of_every_trace():
    """Forces that differ from trace to trace move the means, and not the response."""
    force = np.array([-0.3, 0.0, 0.2, 0.4])
    pushed = fl.Process(
        lambda th, x, t, context: th["f"] + context["f"] - th["k"] * x,
        lambda th, x: jnp.sqrt(2 * th["kT"]) * jnp.ones(1),
    )
    record = ou_record(17, 10_000, 4)
    x = record.x + force[:, None, None] / K
    record = record._replace(x=x, context={"f": force})
    answer = step_response(pushed, MEAN, THETA, record, window=1.0)
    assert largest_z(answer, "f", exact_ou(20)["f"]) < 4


def test_stride_of_the_score():
    """Sampled exactly, the locally linear score is right at every stride: χ = (1 − e^{−kt})/k."""
    decay = np.exp(-K * DT)
    z = np.random.default_rng(11).normal(size=(4, 15_001))
    z[:, 1:] *= np.sqrt(1 - decay**2)
    x = np.sqrt(KT / K) * lfilter([1.0], [1.0, -decay], z, axis=1)
    record = fl.Trajectories(DT * np.arange(15_001), x[..., None])
    answers = compare_strides(
        (1, 3), OU, MEAN, THETA, record, window=1.2, score=fl.scores.local_linear_score
    )
    for answer in answers.responses:
        assert largest_z(answer, "f", (1 - np.exp(-K * answer.t)) / K) < 4
        assert len(answer.t) == 24 // answer.stride + 1
    assert "stride" in repr(answers)


@pytest.mark.long
def test_noise_of_tracking_shows_in_the_fit_by_stride():
    """A moving mean of two positions correlates increments by 1/2 and halves D of one sample."""
    record = ou_record(5, 20_000)
    x = (record.x[:, 1:] + record.x[:, :-1]) / 2
    filtered = fl.Trajectories(record.t[1:], x)
    with pytest.warns(RuntimeWarning, match="not those of the process"):
        table = compare_strides(
            (1, 4),
            OU,
            MEAN,
            THETA,
            filtered,
            window=1.0,
            calibration=CrossFitted(("k", "kT"), folds=2),
        )
    one, four = (float(answer.theta["kT"]) for answer in table.responses)
    assert one < 0.65 * KT
    assert four > 1.3 * one


def test_window_by_itself():
    answer = step_response(OU, MEAN, THETA, ou_record(5, 20_000))
    assert 3 / K < answer.t[-1] < 10 / K
    short = step_response(OU, MEAN, THETA, ou_record(13, 4000))
    assert short.batches >= 10
    assert short.t[-1] < answer.t[-1]


def test_table():
    answer = step_response(OU, MEAN, THETA, ou_record(5, 20_000), window=1.0)
    columns = answer.tabulate()
    assert list(columns)[:4] == ["t", "f", "f stderr", "f sampling stderr"]
    assert {len(column) for column in columns.values()} == {21}


def test_fourier_basis():
    phase = 2 * np.pi * 0.3 / 4.0
    expected = [1, np.cos(phase), np.sin(phase), np.cos(2 * phase), np.sin(2 * phase)]
    np.testing.assert_allclose(jax.jit(fourier(2, period=4.0))(np.array([0.3, 9.0])), expected)
    with pytest.raises(ValueError, match="harmonic.*got 0"):
        fourier(0)


# ------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": "all"}, "'all'"),
        ({"window": 0.01}, "`window`.*0.01"),
        ({"window": 60.0}, "too short"),
        ({"stride": 0}, "`stride`.*0"),
        ({"period": [1.0, 2.0]}, "`period`.*2"),
        ({"period": -1.0}, "positive.*-1.0"),
        ({"calibration": CrossFitted(("mass",))}, "'mass'"),
        ({"calibration": np.eye(2)}, r"covariance.*\(2, 2\)"),
        ({"calibration": CrossFitted(("k",)), "score": fl.scores.drift_score}, "drift_score"),
    ],
)
def test_bad_options_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        step_response(OU, MEAN, THETA, ou_record(15, 8000), **{"window": 0.5, **change})


def test_bad_records_are_refused():
    record = ou_record(15, 2000)
    with pytest.raises(ValueError, match="none"):
        step_response(OU, MEAN, THETA, [])
    uneven = record._replace(t=record.t + 0.02 * (np.arange(2001) % 2))
    with pytest.raises(ValueError, match="uniform"):
        step_response(OU, MEAN, THETA, uneven)
    with pytest.raises(ValueError, match="uniform.*0.1"):
        step_response(OU, MEAN, THETA, [record, record._replace(t=2 * record.t)])
    with pytest.raises(ValueError, match="`terminal`"):
        step_response(OU, fl.Objective(MEAN, terminal=MEAN), THETA, record)
    with pytest.raises(ValueError, match="`parameters`.*'k'"):
        CrossFitted("k")
    with pytest.raises(ValueError, match="`folds`.*1"):
        CrossFitted(("k",), folds=1)


def test_parameters_that_act_alike_are_refused_by_name():
    twice = fl.Process(lambda th, x: -(th["a"] + th["b"]) * x, lambda th, x: jnp.ones(1))
    theta = {"a": np.array(0.5), "b": np.array(1.0)}
    with pytest.raises(ValueError, match="does not determine a, b"):
        step_response(twice, MEAN, theta, ou_record(16, 8000), calibration=CrossFitted(("a", "b")))


# ------------------------------------------------------------------------- cover


def gather_cover(answers, names, exact, at):
    """χ, errors, and whether intervals at some times and bands hold the exact answers."""
    rows = []
    for answer in answers:
        chi, error, inside, together = [], [], [], []
        for name in names:
            low, high = (side[name] for side in answer.interval)
            inside.append(((low <= exact[name]) & (exact[name] <= high))[at])
            low, high = (side[name] for side in answer.band)
            together.append(np.all((low <= exact[name]) & (exact[name] <= high)))
            chi.append((answer.response[name] - exact[name])[at])
            error.append(answer.stderr[name][at])
        rows.append((chi, error, inside, together))
    return [np.array(column) for column in zip(*rows, strict=True)]


def check_cover(off, error, inside, together):
    """No bias, errors as large as the scatter, intervals and bands that hold 95 %.

    To four errors each; a standard deviation from n samples of kurtosis 4 is known to 0.85/√n.
    """
    n = len(off)
    assert np.all(np.abs(off.mean(axis=0)) < 4 * off.std(axis=0) / np.sqrt(n))
    ratio = off.std(axis=0) / np.sqrt(np.mean(error**2, axis=0))
    assert np.all(np.abs(ratio - 1) < 4 * 0.85 / np.sqrt(n)), ratio
    least = 0.95 - 4 * np.sqrt(0.95 * 0.05 / n)
    assert np.all(inside.mean(axis=0) > least), inside.mean(axis=0)
    assert np.all(together.mean(axis=0) > least), together.mean(axis=0)


@pytest.mark.long
def test_errors_and_bands_cover():
    """Of known parameters, over 80 records of one trace with 50 batches or so."""
    answers = [
        step_response(OU, SQUARE, THETA, ou_record(1000 + seed, 6000), window=1.0)
        for seed in range(80)
    ]
    assert min(answer.batches for answer in answers) > 20
    check_cover(*gather_cover(answers, ("k", "kT"), exact_ou(20), [1, 5, 20]))


@pytest.mark.long
def test_errors_cover_with_a_fitted_drift():
    """And do not without that of the calibration, which the error of the products leaves out.

    48 records of 24 traces, each of which is one batch: as many shapes as one record has.
    """
    records, steps, traces = 48, 800, 24
    exact = RING["amplitude"] * ring.exact_response(*RING.values(), RING_DT, 40)[:, 1]
    x = ring.simulate(RING, RING_DT, steps, records * traces, 2000)
    near = {**FOURIER_START, "torque": np.array(0.9), "D": np.array(0.52)}
    near["force"] = 1.4 * FOURIER_START["force"]
    answers = [
        step_response(
            FOURIER_RING,
            SINE,
            near,
            fl.Trajectories(RING_DT * np.arange(steps + 1), each),
            window=0.8,
            period=TURN,
            calibration=CrossFitted(FITTED.parameters, folds=3),
        )
        for each in np.split(x, records)
    ]
    columns = gather_cover(answers, ("amplitude",), {"amplitude": exact}, [1, 5, 15, 40])
    check_cover(*columns)
    bare = np.array([answer.sampling_stderr["amplitude"][1] for answer in answers])
    off = columns[0][:, 0, 0]
    assert off.std() > 1.5 * np.sqrt(np.mean(bare**2))
