"""The self-calibrating estimator: posterior, gradient, error bar, forgetting, wrong structure,
state; against the exact moments of an Ornstein–Uhlenbeck chain whose every number is hidden.
"""

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
from fluctua.core.likelihood.evidence import Evidence, collect_evidence, collect_score
from fluctua.core.scores import full_score
from fluctua.learn.belief import Belief, Posterior
from fluctua.learn.calibratable import CalibratableProcess
from problems import flat, tolerance

DT, STEPS, SIGMA, START = 0.02, 60, 0.3, 0.4
T = np.arange(STEPS + 1) * DT
OBJECTIVE = fl.Objective(running=lambda p, x: -((x[0] - 1) ** 2))
PROCESS = fl.Process(lambda p, x: -p["k"] * x + p["b"], lambda p, x: SIGMA * jnp.ones_like(x))
CUBIC = fl.Process(
    lambda p, x: -p["k"] * x + p["b"] - p["cubic"] * x**3, lambda p, x: SIGMA * jnp.ones_like(x)
)
SIMULATOR = fl.simulator(PROCESS, jnp.array([START]), T)
MODEL = fl.ppgt(SIMULATOR, OBJECTIVE, baseline=fl.Twin())
THETA = {"b": jnp.array(0.6), "k": jnp.array(1.2)}
NOMINAL = {"gain": jnp.array(1.0), "loss": jnp.array(0.0), "offset": jnp.array(0.0)}


def effective(theta, phi):
    """The force has a gain and an offset, the stiffness an offset: linear in φ."""
    return {"b": phi["gain"] * theta["b"] + phi["offset"], "k": theta["k"] + phi["loss"]}


def make_device(hidden, process=PROCESS, of=effective):
    simulate = fl.simulator(process, jnp.array([START]), T)
    return lambda key, theta, count: simulate(key, of(theta, hidden), count)


def draw_hidden(seed, spread=0.2):
    z = np.random.default_rng(seed).normal(size=3)
    return {
        name: jnp.asarray(value + spread * n)
        for (name, value), n in zip(NOMINAL.items(), z, strict=True)
    }


@jax.jit
def exact(theta, phi):
    """J of the Euler chain, by its mean and variance."""
    p = effective(theta, phi)

    def step(carry, _):
        m, v = carry
        return (m + (p["b"] - p["k"] * m) * DT, (1 - p["k"] * DT) ** 2 * v + SIGMA**2 * DT), (
            m - 1
        ) ** 2 + v

    return -jax.lax.scan(step, (jnp.array(START), jnp.array(0.0)), length=STEPS)[1].sum() * DT


exact_slope = jax.jit(jax.grad(exact))


def settings(i):
    return {"b": jnp.asarray(0.6 + 0.5 * (-1) ** i), "k": jnp.asarray(1.2 + 0.2 * i)}


def least_squares(batches, spread):
    """Posterior mean and covariance by linear regression of increments on features, in double
    precision.
    """
    precision, pull = np.eye(3) / spread**2, np.array([1.0, 0.0, 0.0]) / spread**2
    for theta, x in batches:
        now, dx = x[:, :-1, 0].ravel(), np.diff(x[:, :, 0]).ravel()
        features = np.stack([np.full_like(now, theta["b"]), -now, np.ones_like(now)])
        rest = dx / DT + float(theta["k"]) * now
        precision += features @ features.T * DT / SIGMA**2
        pull += features @ rest * DT / SIGMA**2
    return np.linalg.solve(precision, pull), np.linalg.inv(precision)


def test_the_calibration_is_the_exact_posterior():
    device = make_device(draw_hidden(1))
    estimator, batches = fl.SelfCalibrating(MODEL, device, effective, NOMINAL, 0.2, samples=0), []
    for i in range(4):
        theta = settings(i)
        key = jax.random.split(jax.random.key(i), 3)[0]
        batches.append((theta, np.asarray(device(key, theta, 20).x, np.float64)))
        estimator(jax.random.key(i), theta, 20)
    mean, covariance = least_squares(batches, 0.2)
    known = estimator.calibration
    # float32 leaves 1e-7 of features of order one in each of 4,800 steps; the posterior is 0.05
    # wide
    np.testing.assert_allclose(flat(known.unknown), mean, atol=2e-5)
    np.testing.assert_allclose(flat(known.stderr), np.sqrt(np.diag(covariance)), rtol=1e-5)
    assert known.trajectories == 80
    assert "gain" in repr(known)


def test_information_of_every_tenth_step_is_nearly_that_of_all():
    x = make_device(draw_hidden(1))(jax.random.key(0), THETA, 10)
    estimator = fl.SelfCalibrating(MODEL, make_device(draw_hidden(1)), effective, NOMINAL, 0.2)
    all_, some = (
        collect_evidence(
            PROCESS, full_score, estimator.at, THETA, estimator.belief.start, x, every=every
        )
        for every in (1, 10)
    )
    np.testing.assert_array_equal(some.score, all_.score)
    np.testing.assert_allclose(some.information, all_.information, rtol=0.1)
    assert all_.linear


def test_the_score_alone_is_that_of_the_evidence():
    """And the information of several trajectories is the sum over them."""
    data = make_device(draw_hidden(2))(jax.random.key(3), THETA, 5)
    estimator = fl.SelfCalibrating(MODEL, None, effective, NOMINAL, 0.2)
    u = estimator.belief.mean
    common = (PROCESS, full_score, estimator.at, THETA, u)
    whole = collect_evidence(*common, data)
    np.testing.assert_allclose(collect_score(*common, data), whole.score, rtol=1e-12)
    single = [collect_evidence(*common, data._replace(x=data.x[j : j + 1])) for j in range(5)]
    total = sum(evidence.information for evidence in single)
    np.testing.assert_allclose(whole.information, total, rtol=1e-5)


class Apart(CalibratableProcess):
    """A model that leaves the processor free, as one on a GPU does."""

    leaves_processor = True

    def split(self, key, theta, count):
        if self.fails:
            raise FloatingPointError("the model is gone")
        return super().split(key, theta, count)

    fails = False


@pytest.mark.parametrize("hidden", [draw_hidden(4), {**draw_hidden(4), "gain": jnp.array(9.0)}])
def test_tests_beside_the_model_change_nothing(hidden):
    """The same estimates, states and events as where the tests come first."""
    pair = [
        fl.SelfCalibrating(
            model, make_device(hidden), effective, NOMINAL, 0.2, on_doubt="continue", simulated=8
        )
        for model in (CalibratableProcess(MODEL), Apart(MODEL))
    ]
    for i in range(3):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            one, other = (e(jax.random.key(i), settings(i), 10) for e in pair)
        assert pair[0].event == pair[1].event
        assert pair[0].doubt == pair[1].doubt
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)
    assert bool(pair[0].doubt) == (hidden["gain"] > 5)
    states = [e.state for e in pair]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name])


def test_a_model_that_fails_loses_no_tests(monkeypatch):
    """What was measured is learnt and tested, and the error of the model is raised."""
    estimator = fl.SelfCalibrating(
        Apart(MODEL), make_device(draw_hidden(4)), effective, NOMINAL, 0.2
    )
    monkeypatch.setattr(Apart, "fails", True)
    with pytest.raises(FloatingPointError, match="the model is gone"):
        estimator(jax.random.key(0), THETA, 10)
    assert estimator.calibration.trajectories == 10
    assert any(name.startswith("residuals_") for name in estimator.state)


@pytest.mark.long
@pytest.mark.parametrize("correction", ["none", "simulated", "measured"])
def test_the_error_bar_covers_the_calibration_too(correction):
    # Devices drawn from the prior: (gradient − exact)/stderr is then a standard normal, over
    # devices and noise. The direct part alone misses ∂v/∂k, what noise does: the component of k is
    # not asked of it.
    repetitions, z, alone = 40, [], []
    for seed in range(repetitions):
        hidden = draw_hidden(seed)
        estimator = fl.SelfCalibrating(
            MODEL,
            make_device(hidden),
            effective,
            NOMINAL,
            0.2,
            correction=correction,
            simulated=100,
        )
        for i in range(3):
            estimator.options = replace(estimator.options, samples=8 * (i == 2))
            estimate = estimator(jax.random.fold_in(jax.random.key(seed), i), settings(i), 4)
        away = flat(estimate.gradient) - flat(exact_slope(settings(2), hidden))
        z.append(away / flat(estimate.stderr))
        if correction == "simulated":
            estimator.options = replace(estimator.options, samples=0)
            alone.append(away / flat(estimator(jax.random.key(seed), settings(2), 4).stderr))
    z = np.array(z)[:, : 1 if correction == "none" else 2]
    assert np.abs(z.mean(axis=0) * np.sqrt(repetitions)).max() < tolerance(2)
    # errors of `measured` are estimated from four trajectories, which widens z as Student's t with
    # three degrees: its variance is 3 and its tails are heavy, so that the cover is what is
    # compared
    cover = np.mean(np.abs(z) < 1.96, axis=0)
    lowest = 0.85 if correction == "measured" else 0.95
    assert cover.min() > lowest - tolerance(2) * np.sqrt(0.05 * 0.95 / repetitions)
    if correction != "measured":
        assert np.abs(z.var(axis=0) - 1).max() < tolerance(2) * np.sqrt(2 / repetitions)
    if correction == "simulated":  # without the calibration's error the bar is far too short
        assert np.mean(np.abs(np.array(alone)[:, 0]) < 1.96) < 0.8


@pytest.mark.long
def test_noise_of_the_readout_is_taken_off():
    """y = x + ε on every sample, 800 trajectories; the stiffness is told by how x scatters,
    with a variance of 0.03.
    """
    hidden, errors = draw_hidden(1), {}
    device, noise = make_device(hidden), 0.05

    def noisy(key, theta, count):
        x = device(key, theta, count)
        return x._replace(x=x.x + noise * jax.random.normal(jax.random.split(key, 5)[3], x.x.shape))

    for readout in (0.0, noise, "measured"):
        estimator = fl.SelfCalibrating(
            MODEL, noisy, effective, NOMINAL, 0.5, samples=0, readout=readout
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the one that does not know says so
            for i in range(4):
                estimator.learn(settings(i), noisy(jax.random.key(i), settings(i), 200))
        errors[readout] = float(estimator.phi["loss"] - hidden["loss"])
    # 48,000 steps: the process leaves √(0.09/(48,000 · 0.03 · 0.02)) = 0.06, and products of ε half
    # as much
    assert abs(errors[noise]) < 4 * 0.07
    # S itself to √(2 · (0.0018 + 2 · 0.0025)²/12,000) of 0.0025 a batch: 1 to 2 % of what is taken
    # off, 4
    assert abs(errors["measured"]) < 4 * 0.1
    assert abs(errors[0.0]) > 2  # S/(0.03 · Δt) = 4 is taken for stiffness


@pytest.mark.long
def test_forgetting_follows_a_device_that_drifts():
    errors = {}
    widened = {}
    for memory in (np.inf, 6):
        hidden = dict(NOMINAL)
        estimator = fl.SelfCalibrating(
            MODEL,
            make_device(hidden),
            effective,
            NOMINAL,
            0.5,
            forget_after=memory,
            samples=0,
            on_doubt="continue",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the one that forgets nothing says so
            for i in range(30):
                hidden["offset"] = jnp.asarray(0.03 * i)
                estimator(jax.random.key(i), settings(i % 3), 20)
        known = estimator.calibration
        errors[memory] = (float(known.unknown["offset"]) - 0.03 * 29) / float(
            known.stderr["offset"]
        )
        widened[memory] = known.widened
    assert abs(errors[6]) < 4  # its lag of 6 · 0.03 is within its error bar
    # the other lags by as much as ever; its calls disagree, and its error bar includes that
    assert widened[np.inf] * errors[np.inf] < -8
    assert abs(errors[np.inf]) < 4


def test_a_device_that_jumps_is_noticed():
    hidden = dict(NOMINAL)
    estimator = fl.SelfCalibrating(MODEL, make_device(hidden), effective, NOMINAL, 0.2, samples=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for i in range(5):
            estimator(jax.random.key(i), settings(i % 3), 20)
    hidden["offset"] = jnp.asarray(1.0)
    with pytest.warns(RuntimeWarning, match="did not expect"):
        estimator(jax.random.key(9), settings(1), 20)


@pytest.mark.long
def test_a_device_that_jumps_is_learnt_anew(tmp_path):
    """What was measured before the jump is gone, the history says when, and nothing is
    forgotten without one.
    """
    hidden = dict(NOMINAL)
    device, calls = make_device(hidden), []

    def jumping(key, theta, count):
        calls.append(count)
        hidden["offset"] = jnp.asarray(0.0 if len(calls) <= 5 else 1.0)
        return device(key, theta, count)

    estimator = fl.SelfCalibrating(MODEL, jumping, effective, NOMINAL, 0.5, samples=0, renew=True)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # it is dealt with
        fl.run(
            fl.Training(estimator, THETA, optax.sgd(1e-6), trajectories=20),
            iterations=8,
            folder=tmp_path / "run",
            on_row=lambda row, record: rows.append(row),
        )
    assert [row.iteration for row in rows if row.event.startswith("renewed χ²")] == [5]
    alone = fl.SelfCalibrating(MODEL, device, effective, NOMINAL, 0.5, samples=0)
    key = jax.random.key(0)
    for row in rows[5:]:
        measured = device(jax.random.split(jax.random.fold_in(key, row.iteration), 3)[0], THETA, 20)
        alone.learn(THETA, measured)
    # settings move by 1e-6 of a gradient; the posterior of three batches is that of the same three
    # batches
    np.testing.assert_allclose(flat(estimator.phi), flat(alone.phi), atol=1e-3)


@pytest.mark.long
def test_the_surprise_is_chi_squared():
    values = []
    for seed in range(40):
        estimator = fl.SelfCalibrating(
            MODEL, make_device(draw_hidden(seed)), effective, NOMINAL, 0.2, samples=0
        )
        for i in range(2):
            estimator(jax.random.fold_in(jax.random.key(seed), i), settings(i), 4)
            values.append(estimator.calibration.chi2 / estimator.calibration.degrees)
    # of 1 to 3 degrees of freedom, so that the variance of one is at most 2
    assert abs(np.mean(values) - 1) < tolerance(1) * np.sqrt(2 / len(values))


@pytest.mark.parametrize("rank", [3, 6])
def test_the_surprise_is_that_of_its_covariance(rank):
    """sᵀ(F + FΛ⁻¹F)⁺s by its eigenvalues; offset and gain of a knob that rests are one
    direction of F.
    """
    rng = np.random.default_rng(rank)
    half, precision, away = (
        rng.normal(size=(6, rank)),
        np.exp(rng.normal(size=6)),
        rng.normal(size=(6, 6)),
    )
    inner = half @ half.T
    before = Belief(np.zeros(6), precision, away @ away.T, np.zeros(6), np.ones(6, bool))
    score = half @ rng.normal(size=rank)
    covariance = inner + inner @ np.linalg.solve(before.posterior_precision, inner)
    expected = score @ np.linalg.pinv(covariance, rcond=1e-9) @ score
    news = Evidence(score, inner, True)
    chi2, degrees = before.with_evidence(news, before.mean).surprise(news)
    assert degrees == rank
    np.testing.assert_allclose(chi2, expected, rtol=1e-6)


def richer(theta, phi):
    return {**effective(theta, phi), "cubic": phi["cubic"]}


@pytest.mark.long
@pytest.mark.parametrize("cubic", [0.0, 0.5])
def test_a_wrong_structure_is_found_and_mended(cubic):
    hidden = {**draw_hidden(3), "cubic": jnp.asarray(cubic)}
    simulate = fl.simulator(CUBIC, jnp.array([START]), T)
    model = fl.ppgt(simulate, OBJECTIVE, process=CUBIC, baseline=fl.Twin())
    device = make_device(hidden, CUBIC, richer)
    start = {**NOMINAL, "cubic": jnp.array(0.0)}
    made = lambda watch: fl.SelfCalibrating(
        model, device, richer, start, 0.5, watch=watch, samples=0, on_doubt="continue"
    )
    watching, fitting = made(["cubic"]), made([])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        for i in range(8):
            for estimator in (watching, fitting):
                estimator(jax.random.key(i), {"b": jnp.asarray(1.0 + i), "k": jnp.asarray(1.2)}, 50)
    known = watching.calibration
    assert float(watching.phi["cubic"]) == 0
    assert known.structure_is_wrong == (cubic > 0)
    assert any("cubic" in str(w.message) for w in warned) == (cubic > 0)
    # what would be fitted is what is fitted
    np.testing.assert_allclose(
        known.unknown["cubic"], fitting.calibration.unknown["cubic"], rtol=1e-3, atol=1e-4
    )
    error = float(fitting.calibration.stderr["cubic"])
    assert abs(float(fitting.phi["cubic"]) - cubic) < 4 * error


@pytest.mark.long
def test_doubt_names_what_is_watched_where_residuals_fail_too():
    hidden = {**draw_hidden(3), "cubic": jnp.asarray(1.5)}
    simulate = fl.simulator(CUBIC, jnp.array([START]), T)
    model = fl.ppgt(simulate, OBJECTIVE, process=CUBIC, baseline=fl.Twin())
    start = {**NOMINAL, "cubic": jnp.array(0.0)}
    device = make_device(hidden, CUBIC, richer)
    watching = fl.SelfCalibrating(model, device, richer, start, 0.5, watch=["cubic"], samples=0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        watching(jax.random.key(0), {"b": jnp.asarray(3.0), "k": jnp.asarray(1.2)}, 300)
    assert any("not those of the model" in str(w.message) for w in warned)
    assert "most of all cubic" in watching.doubt


@pytest.mark.long
def test_unknown_noise_and_a_bent_drift_are_fitted_by_several_steps():
    process = fl.Process(
        lambda p, x: p["a"] * jnp.sin(p["w"] * x), lambda p, x: p["sigma"] * jnp.ones_like(x)
    )
    simulate = fl.simulator(process, jnp.array([0.5]), T)
    model = fl.ppgt(simulate, OBJECTIVE, process=process, baseline=fl.Twin())
    hidden = {"sigma": jnp.array(0.36), "w": jnp.array(1.4)}
    of = lambda theta, phi: {"a": theta, **phi}
    device = lambda key, theta, count: simulate(key, of(theta, hidden), count)
    start = {"sigma": jnp.array(0.3), "w": jnp.array(1.0)}
    estimator = fl.SelfCalibrating(model, device, of, start, 0.5, samples=0)
    for i in range(3):
        estimator(jax.random.key(i), jnp.array(1.5), 100)
    known = estimator.calibration
    z = (flat(known.unknown) - flat(hidden)) / flat(known.stderr)
    assert np.abs(z).max() < tolerance(2)
    assert float(known.stderr["sigma"]) < 0.01


def with_conversion(theta, phi):
    return {**effective(theta, NOMINAL), "detector": phi}


@pytest.mark.long
def test_J_has_the_error_of_the_conversion_or_that_of_the_device():
    """States do not tell what a detector makes of them: the prior is what is known of it."""
    objective = fl.Objective(running=lambda p, x: p["detector"] * x[0])
    model = fl.ppgt(SIMULATOR, objective, baseline=fl.Twin())
    device = make_device(NOMINAL)

    def measure_returns(theta, trajectories):
        return 1.3 * DT * trajectories.x[:, :-1, 0].sum(axis=1)

    def measure(**options):
        estimator = fl.SelfCalibrating(
            model, device, with_conversion, jnp.array(1.0), 0.2, **options
        )
        return estimator(jax.random.key(0), THETA, 50)

    believed, measured, without = measure(), measure(returns=measure_returns), measure(samples=0)
    np.testing.assert_allclose(measured.value, 1.3 * believed.value, rtol=1e-5)
    sampling = float(without.value_stderr)
    np.testing.assert_allclose(measured.value_stderr, 1.3 * sampling, rtol=1e-5)
    expected = np.hypot(sampling, 0.2 * float(believed.value))
    np.testing.assert_allclose(believed.value_stderr, expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"`returns`.*\(50,\).*\(\)"):
        measure(returns=lambda theta, trajectories: 0.0)


def test_calls_that_measure_nothing_cost_nothing():
    estimator = fl.SelfCalibrating(
        MODEL, make_device(draw_hidden(1)), effective, NOMINAL, 0.2, measure_every=3
    )
    records = list(
        fl.train(fl.Training(estimator, THETA, optax.sgd(0.0), trajectories=4), iterations=7)
    )
    assert [record.trajectories for record in records] == [4, 4, 4, 8, 8, 8, 12]
    assert estimator.calibration.trajectories == 12
    assert [record.estimate.count for record in records] == [4, 0, 0, 4, 0, 0, 4]


def describe(estimator, **options):
    return fl.Training(estimator, THETA, optax.adam(0.05), trajectories=4, seed=5, **options)


def test_a_run_goes_on_bit_for_bit(tmp_path):
    made = lambda: fl.SelfCalibrating(
        MODEL, make_device(draw_hidden(1)), effective, NOMINAL, 0.2, measure_every=2
    )
    whole = fl.run(describe(made(), bounds=(0.1, 3.0)), 5, tmp_path / "whole")
    fl.run(describe(made(), bounds=(0.1, 3.0)), 3, tmp_path / "part")
    rest = fl.run(describe(made(), bounds=(0.1, 3.0)), 5, tmp_path / "part")
    assert np.array_equal(flat(whole.theta), flat(rest.theta))


def test_an_empty_state_is_that_before_the_first_call():
    estimator = fl.SelfCalibrating(MODEL, make_device(draw_hidden(1)), effective, NOMINAL, 0.2)
    begin = estimator.state
    before = estimator(jax.random.key(0), THETA, 4)
    estimator(jax.random.key(1), THETA, 4)
    estimator.restore(begin)
    again = estimator(jax.random.key(0), THETA, 4)
    assert begin == {}
    assert np.array_equal(flat(before.gradient), flat(again.gradient))
    assert estimator.calibration.trajectories == 4


@pytest.mark.long
def test_a_weighted_correction_is_the_measured_one_where_it_is_resolved(tmp_path):
    """With steps=1 all of it is taken; a run that takes a part goes on bit for bit."""
    made = lambda **options: fl.SelfCalibrating(
        MODEL, make_device(draw_hidden(1)), effective, NOMINAL, 0.2, samples=0, **options
    )
    all_of_it, measured, part = (
        made(correction="weighted", steps=1),
        made(correction="measured"),
        made(correction="weighted"),
    )
    for i in range(3):
        key = jax.random.key(i)
        estimates = [estimator(key, settings(i), 8) for estimator in (all_of_it, measured, part)]
    first, second, third = (flat(e.gradient) for e in estimates)
    np.testing.assert_allclose(first, second, rtol=1e-5)
    assert np.abs(third - second).max() > 1e-3
    whole = fl.run(describe(made(correction="weighted")), 4, tmp_path / "whole")
    fl.run(describe(made(correction="weighted")), 3, tmp_path / "part")
    rest = fl.run(describe(made(correction="weighted")), 4, tmp_path / "part")
    assert np.array_equal(flat(whole.theta), flat(rest.theta))


def test_what_is_wrong_is_named():
    device = make_device(draw_hidden(1))
    with pytest.raises(TypeError, match="split"):
        fl.SelfCalibrating(lambda *_: None, device, effective, NOMINAL, 0.2)
    with pytest.raises(TypeError, match="has a twin"):
        fl.SelfCalibrating(fl.ppgt(SIMULATOR, OBJECTIVE), device, effective, NOMINAL, 0.2)
    with pytest.raises(ValueError, match="'simulatd'"):
        fl.SelfCalibrating(MODEL, device, effective, NOMINAL, 0.2, correction="simulatd")
    with pytest.raises(ValueError, match="got -0.2"):
        fl.SelfCalibrating(MODEL, device, effective, NOMINAL, -0.2)
    with pytest.raises(ValueError, match="got 'gian'"):
        fl.SelfCalibrating(MODEL, device, effective, NOMINAL, 0.2, watch=["gian"])
    with pytest.raises(ValueError, match="`forget_after`.*0.5"):
        fl.SelfCalibrating(MODEL, device, effective, NOMINAL, 0.2, forget_after=0.5)
    with pytest.raises(ValueError, match="`readout`.*'known'"):
        fl.SelfCalibrating(MODEL, device, effective, NOMINAL, 0.2, readout="known")
    with pytest.raises(ValueError, match="`samples`.*-1"):
        fl.SelfCalibrating(MODEL, device, effective, NOMINAL, 0.2, samples=-1)
    estimator = fl.SelfCalibrating(MODEL, device, effective, NOMINAL, 0.2)
    with pytest.raises(ValueError, match="'calls'"):
        estimator.restore({"information": np.eye(3)})
    dense = fl.Process(PROCESS.drift, lambda p, x: p["sigma"] * jnp.eye(1))
    model = fl.ppgt(fl.simulator(dense, jnp.array([START]), T), OBJECTIVE, baseline=fl.Twin())
    noisy = fl.SelfCalibrating(
        model, device, lambda th, phi: {**th, "sigma": phi}, jnp.array(0.3), 0.1
    )
    with pytest.raises(ValueError, match="unknowns of the noise"):
        noisy(jax.random.key(0), THETA, 4)


def find_best(phi, k):
    """The force b at which J is highest, and −∂²J/∂b²: J is quadratic in b."""
    J = lambda b: exact({"b": b, "k": k}, phi)
    slope, bend = jax.jit(lambda b: (jax.grad(J)(b), -jax.grad(jax.grad(J))(b)))(jnp.array(0.0))
    slope, bend = float(slope), float(bend)
    return slope / bend, bend


@pytest.mark.long
def test_training_recovers_from_a_jump(tmp_path):
    """Regret after the jump is what the new calibration's error allows: ½ (∂²J/∂b∂φ · δφ)²/A,
    δφ of its posterior.
    """
    k, hidden, calls = THETA["k"], dict(NOMINAL), []
    device = make_device(hidden, of=lambda b, phi: effective({"b": b, "k": k}, phi))

    def jumping(key, b, count):
        calls.append(count)
        hidden["offset"] = jnp.asarray(0.0 if len(calls) <= 4 else 1.0)
        return device(key, b, count)

    of = lambda b, phi: effective({"b": b, "k": k}, phi)
    estimator = fl.SelfCalibrating(MODEL, jumping, of, NOMINAL, 0.5, samples=0, renew=True)
    b, bend = find_best({**NOMINAL, "offset": jnp.asarray(0.0)}, k)
    rows = []
    result = fl.run(
        fl.Training(estimator, jnp.asarray(b), optax.sgd(1 / bend), trajectories=20),
        iterations=9,
        folder=tmp_path / "run",
        on_row=lambda row, record: rows.append(row),
    )
    assert [row.iteration for row in rows if row.event] == [4]
    J = lambda b: float(exact({"b": jnp.asarray(b), "k": k}, hidden))
    top, bend = find_best(hidden, k)
    lost, regret = J(top) - J(b), J(top) - J(result.theta)
    slope = jax.jit(jax.grad(lambda phi, b: exact_slope({"b": b, "k": k}, phi)["b"]))(
        hidden, jnp.asarray(top)
    )
    covariance = np.linalg.inv(estimator.belief.posterior_precision)
    allowed = float(flat(slope) @ covariance @ flat(slope)) / (2 * bend)
    # a χ² of one degree times `allowed`: four Newton steps from afar leave nothing
    assert regret < tolerance(1) ** 2 * allowed
    assert lost > 20 * tolerance(1) ** 2 * allowed


@pytest.mark.long
def test_another_task_keeps_what_is_known(tmp_path):
    """The model of a schedule is asked from its call on, also after a kill; the calibration
    goes on.
    """
    away = fl.ppgt(
        SIMULATOR, fl.Objective(running=lambda p, x: -((x[0] + 1) ** 2)), baseline=fl.Twin()
    )
    made = lambda: fl.SelfCalibrating(
        lambda call: MODEL if call < 3 else away,
        make_device(draw_hidden(1)),
        effective,
        NOMINAL,
        0.2,
        samples=0,
    )
    rows = []
    on_row = lambda row, record: rows.append((row, record))
    whole = made()
    fl.run(describe(whole), 5, tmp_path / "whole", on_row=on_row)
    assert [row.event for row, _ in rows] == ["", "", "", "new task", ""]
    assert whole.calibration.trajectories == 20
    one = fl.SelfCalibrating(away, make_device(draw_hidden(1)), effective, NOMINAL, 0.2, samples=0)
    for row, record in rows[:4]:
        estimate = one(jax.random.fold_in(jax.random.key(5), row.iteration), record.theta, 4)
    assert np.array_equal(flat(estimate.gradient), flat(rows[3][1].estimate.gradient))
    fl.run(describe(made()), 4, tmp_path / "part")
    rest = []
    on_row = lambda row, record: rest.append((row, record))
    fl.run(describe(made()), 5, tmp_path / "part", on_row=on_row)
    assert rest[-1][0].event == ""
    assert np.array_equal(flat(rest[-1][1].next_theta), flat(rows[-1][1].next_theta))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "offset = 0.000 ± 0.010   fitted"),
        (3, "offset = 0.000 ± 0.010, 0.500 ± 0.010, 1.000 ± 0.010   fitted"),
        (7, "offset: 7 between 0 and 1, rms standard error 0.01   fitted"),
    ],
)
def test_few_values_are_listed(count, text):
    unknown = {"offset": np.linspace(0.0, 1.0, count)}
    stderr = {"offset": np.full(count, 0.01)}
    assert text in repr(Posterior(unknown, stderr, 4, 1.0, 1, 0.0, 0, (False,) * count))
