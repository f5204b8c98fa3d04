"""Responses of a simulated ring from scores and from correlations, against the exact response."""

import jax
import numpy as np
import pytest

import colloid
import colloid_methods as methods

DT = 0.02
RING = methods.Ring(np.array([2.0, -1.5, 0.3]), 0.3)
TIMES = np.array([0.2, 0.5, 1.0])
PLACES = np.round(TIMES / DT).astype(int)


def test_the_theorem_gives_the_exact_response_and_the_later_velocity_does_not():
    fine = 1e-3
    chi = methods.exact_response(RING, fine, 1000, order=30)[[200, 500, 1000]]
    exact = methods.exact_correlations(RING, TIMES, points=64)
    assert np.allclose(exact.theorem, chi, rtol=2e-3)  # the Euler step of `chi`
    assert np.all(exact.program / chi - 1 > [0.03, 0.09, 0.18])


def test_without_drive_both_forms_are_those_of_equilibrium():
    # a potential alone has no current: χ = C(0) − C(t), at long times the variance of sin θ
    still = methods.Ring(np.array([0.0, 0.7, 0.0]), 0.5)
    exact = methods.exact_correlations(still, [50.0], points=64)
    x = methods.TURN * np.arange(512) / 512
    weight = np.exp(0.7 / 0.5 * np.sin(x))
    sine = np.sin(x)
    variance = np.average(sine**2, weights=weight) - np.average(sine, weights=weight) ** 2
    assert np.allclose(exact.theorem, variance, rtol=1e-6)
    assert np.allclose(exact.program, variance, rtol=1e-6)


def test_correlations_of_a_record_are_the_sums_of_their_definition():
    a, b = np.random.default_rng(0).normal(size=(2, 3, 6))
    direct = [np.mean(a[:, k:] * b[:, : 6 - k]) for k in range(6)]
    assert np.allclose(methods.correlate(a, b), direct)


def test_robust_smoothing_keeps_a_parabola_and_drops_an_outlier():
    x = np.linspace(-1, 1, 41)
    y = 2 - x + 3 * x**2
    spoiled = y.copy()
    spoiled[17] += 5
    assert np.allclose(methods.smooth_robustly(y, 15), y)
    assert np.allclose(methods.smooth_robustly(spoiled, 15), y, atol=1e-3)


def test_filtered_positions_have_correlated_increments():
    rng = np.random.default_rng(1)
    x = np.cumsum(rng.normal(size=(20, 5000)), axis=1)
    tracked = (1 - colloid.FILTER) * x[:, 1:] + colloid.FILTER * x[:, :-1]
    share = colloid.FILTER
    expected = share * (1 - share) / (share**2 + (1 - share) ** 2)
    assert abs(methods.correlate_increments(x)) < 4 / np.sqrt(x.size)
    assert abs(methods.correlate_increments(tracked) - expected) < 4 / np.sqrt(x.size)


def test_a_record_that_is_missing_is_named(tmp_path):
    with pytest.raises(SystemExit, match="trajNESS_data"):
        colloid.read_record(tmp_path)


@pytest.fixture(scope="module")
def record():
    return methods.simulate_ring(RING, DT, 3000, 40, seed=0)


@pytest.mark.long
def test_both_methods_give_the_exact_response_of_a_simulated_ring(record):
    exact = methods.exact_response(RING, DT, PLACES[-1])[PLACES]
    with jax.enable_x64(True):
        answer = methods.respond_by_scores(record, DT, 1, 2, window=1.0)
    chi, error = methods.at_times(answer, "amplitude", TIMES)
    assert np.abs((chi - exact) / error).max() < 4

    def theorem(x):
        return methods.respond_by_correlations(x, DT).theorem[PLACES]

    error = methods.resample(record, theorem, repeats=30)
    assert np.abs((theorem(record) - exact) / error).max() < 4


@pytest.mark.long
def test_the_drift_is_that_of_stochastic_force_inference(record):
    pytest.importorskip("SFI", reason="the drift is compared with StochasticForceInference")
    with jax.enable_x64(True):
        rival, rival_error, D = methods.infer_by_sfi(record, DT, 1)
        answer = methods.respond_by_scores(record, DT, 1, 1, window=1.0)
    own = np.asarray(answer.theta["force"])
    # two fits of one record, whose Gram matrices differ by a term of the order of the step
    assert np.abs((own - rival) / rival_error).max() < 2
    assert np.abs((rival - RING.force) / rival_error).max() < 4
    assert pytest.approx(float(answer.theta["D"]), rel=0.02) == D
