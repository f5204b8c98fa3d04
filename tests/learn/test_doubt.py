"""Doubt of a calibrating estimator: a structure that its unknowns cannot express is found whatever
the correction, a run stops before it measures again, and the history says why. Two states, four
unknowns."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
from fluctua.core.likelihood.guard import DoubtError
from fluctua.learn.belief import CHANCE, exceeds_chance
from fluctua.learn.calibration_options import CORRECTIONS

DT, STEPS, SIGMA = 0.02, 100, 0.3
T = np.arange(STEPS + 1) * DT
START = jnp.array([0.4, 0.4])
NOMINAL = {"gain": jnp.ones(2), "rate": jnp.zeros(2)}
THETA = {"b": jnp.array([1.0, 0.6]), "k": jnp.array([1.0, 1.5])}
HIDDEN = {"gain": jnp.array([1.1, 0.9]), "rate": jnp.array([0.2, -0.1])}


def drift(p, x):
    return p["b"] - p["k"] * x + 0.5 * (x[::-1] - x)


def steady(p, x):
    return SIGMA * jnp.ones_like(x)


def effective(theta, phi):
    return {"b": phi["gain"] * theta["b"], "k": theta["k"] + phi["rate"]}


PROCESS = fl.Process(drift, steady)
SIMULATOR = fl.simulator(PROCESS, START, T)
MODEL = fl.ppgt(
    SIMULATOR, fl.Objective(running=lambda p, x: -jnp.sum((x - 1) ** 2)), baseline=fl.Twin()
)


def make_device(process=PROCESS, fault=lambda x: x):
    simulate = fl.simulator(process, START, T)

    def measure(key, theta, count):
        measured = simulate(key, effective(theta, HIDDEN), count)
        return measured._replace(x=fault(measured.x))

    return measure


def make_estimator(device, **options):
    return fl.SelfCalibrating(MODEL, device, effective, NOMINAL, 0.3, samples=0, **options)


def delay_samples(x):
    """A delay of three samples."""
    return jnp.concatenate([jnp.repeat(x[:, :1], 3, axis=1), x[:, :-3]], axis=1)


GAIN = make_device(fault=lambda x: 1.2 * x)
FAULTS = {
    "gain of 5 %": (make_device(fault=lambda x: 1.05 * x), 40, "noise amplitude"),
    "delay": (make_device(fault=delay_samples), 40, "held, stuck, delayed"),
    "multiplicative noise": (
        make_device(fl.Process(drift, lambda p, x: SIGMA * (1 + 0.3 * x))),
        40,
        "depends on",
    ),
    "cubic": (
        make_device(fl.Process(lambda p, x: drift(p, x) - 0.5 * x**3, steady)),
        2000,
        "term|drift|rate",
    ),
}


def learn(estimator, device, count):
    """Four calls at different forces."""
    for i in range(4):
        theta = {**THETA, "b": THETA["b"] * (1 + 0.3 * np.cos(i))}
        estimator.learn(theta, device(jax.random.key(i), theta, count))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_structure_is_named(fault):
    """Within four calls; the surprise of the score says nothing of any of them."""
    device, count, words = FAULTS[fault]
    estimator = make_estimator(device, on_doubt="continue")
    with pytest.warns(RuntimeWarning, match=words):
        learn(estimator, device, count)
    assert estimator.doubt
    if fault == "cubic":  # φ is far from the truth: the calls disagree, and error bars say so
        known = estimator.calibration
        away = [
            np.abs((known.unknown[n] - np.asarray(HIDDEN[n])) / known.stderr[n]).max()
            for n in HIDDEN
        ]
        assert max(away) < 4
        assert known.widened * max(away) > 25
        assert "need not cover" in repr(known)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_is_guarded(correction):
    right, wrong = (
        make_estimator(make_device(), correction=correction),
        make_estimator(GAIN, correction=correction),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for i in range(3):
            right(jax.random.key(i), THETA, 20)
    assert right.doubt == ""
    with pytest.warns(RuntimeWarning, match="noise amplitude"):
        wrong(jax.random.key(0), THETA, 20)
    with pytest.raises(DoubtError, match=r"noise amplitude.*on_doubt"):
        wrong(jax.random.key(1), THETA, 20)


def test_a_run_stops_after_doubt_and_goes_on_if_asked(tmp_path):
    calls = []

    def failing(key, theta, count):
        calls.append(count)
        return (make_device() if len(calls) < 3 else GAIN)(key, theta, count)

    def describe(estimator):
        return fl.Training(estimator, THETA, optax.sgd(1e-3), trajectories=40, seed=1)

    with (
        pytest.warns(RuntimeWarning, match="noise amplitude"),
        pytest.raises(DoubtError, match="noise amplitude"),
    ):
        fl.run(describe(make_estimator(failing)), 6, tmp_path / "run")
    assert len(calls) == 3  # nothing is measured after it
    rows = (tmp_path / "run" / "history.csv").read_text().splitlines()
    assert len(rows) == 1 + 3
    assert "doubt: the trajectories are not those of the model. The noise amplitude" in rows[-1]
    with pytest.raises(DoubtError, match="noise amplitude"):  # remembered
        fl.run(describe(make_estimator(failing)), 6, tmp_path / "run")
    assert len(calls) == 3
    again = make_estimator(failing, on_doubt="continue")
    with pytest.warns(RuntimeWarning, match="noise amplitude"):
        fl.run(describe(again), 6, tmp_path / "run")
    assert len(calls) == 6 + 1  # and the final evaluation


def test_doubt_in_the_last_iteration_ends_the_run_with_an_error(tmp_path):
    with (
        pytest.warns(RuntimeWarning, match="noise amplitude"),
        pytest.raises(DoubtError, match="noise amplitude"),
    ):
        fl.run(
            fl.Training(make_estimator(GAIN), THETA, optax.sgd(1e-3), trajectories=40),
            iterations=1,
            folder=tmp_path / "run",
        )
    assert (tmp_path / "run" / "summary.json").exists()


def test_sums_of_the_tests_are_part_of_the_state():
    """A gain of 3 % takes several calls to show; another estimator goes on where one left off."""
    device = make_device(fault=lambda x: 1.03 * x)
    whole, first, second = (make_estimator(device, on_doubt="continue") for _ in range(3))
    doubts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for i in range(12):
            estimators = (whole, first) if i < 6 else (whole, second)
            if i == 6:
                second.restore(first.state)
            for estimator in estimators:
                estimator(jax.random.key(i), THETA, 20)
            doubts.append(bool(whole.doubt))
    assert not any(doubts[:2])
    assert doubts[-1]
    assert set(whole.state) == set(second.state)
    assert all(np.array_equal(whole.state[name], second.state[name]) for name in whole.state)


def test_the_alarm_of_the_score_is_as_likely_for_few_unknowns_as_for_many():
    rng = np.random.default_rng(0)
    for degrees in (1, 4, 300):
        assert not any(exceeds_chance(chi2, degrees) for chi2 in rng.chisquare(degrees, 2000))
        # 6 standard deviations of few degrees are no measure: their law has a tail
        assert exceeds_chance(degrees + 6.5 * np.sqrt(2 * degrees) + 10, degrees)
    assert CHANCE <= 1e-3 / 20


def test_what_on_doubt_can_be():
    with pytest.raises(ValueError, match=r"`on_doubt`.*'go on'"):
        make_estimator(make_device(), on_doubt="go on")
