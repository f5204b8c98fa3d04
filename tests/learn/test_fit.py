"""Models that are not linear in their unknowns: the most probable unknowns, by one call and by
many.

References are minima of the exact negative log-posterior of Euler's chain, in double precision.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy

import fluctua as fl
from fluctua.core.likelihood.evidence import Evidence
from fluctua.learn import kept
from fluctua.learn.belief import Belief
from fluctua.learn.fit import NEAR, fit_map, measure_bend
from problems import flat, tolerance

DT, STEPS = 0.02, 60
TIMES = np.arange(STEPS + 1) * DT
OBJECTIVE = fl.Objective(running=lambda p, x: -((x[0] - 1) ** 2))
PROCESS = fl.Process(lambda p, x: -p["k"] * x, lambda p, x: p["sigma"] * jnp.ones_like(x))
SIMULATOR = fl.simulator(PROCESS, jnp.array([1.0]), TIMES)
MODEL = fl.ppgt(SIMULATOR, OBJECTIVE, baseline=fl.Twin())
THETA = jnp.array(1.0)

BOTH = (np.array([0.0, 0.3]), np.array([1.0, 0.3]))
STARTS = {"drift": (0.0, 1.0), "noise": (0.3, 0.3), "both": BOTH}
FAR = [("drift", -4.0), ("drift", 4.0), ("noise", 0.01), ("noise", 8.0)]
TRUTHS = {"drift": 1.0, "noise": 0.6, "both": np.array([1.0, 0.6])}


def use_drift(theta, phi):
    return {"k": theta * jnp.exp(phi), "sigma": jnp.array(0.3)}


def use_noise(theta, phi):
    return {"k": theta, "sigma": phi}


def use_both(theta, phi):
    return {"k": theta * jnp.exp(phi[0]), "sigma": phi[1]}


EFFECTIVE = {"drift": use_drift, "noise": use_noise, "both": use_both}


def measure(case, truth, seed, calls, count):
    """Some batches of a device, at settings that change."""
    batches = []
    for i in range(calls):
        theta = THETA * (1 + 0.1 * i)
        key = jax.random.fold_in(jax.random.key(seed), i)
        p = EFFECTIVE[case](theta, jnp.asarray(truth, jnp.float32))
        batches.append((theta, SIMULATOR(key, p, count)))
    return batches


def calibrate(case, batches, start=None, **options):
    begin, spread = STARTS[case]
    unknown = jnp.asarray(begin if start is None else start, jnp.float32)
    spread = jnp.asarray(spread)
    estimator = fl.SelfCalibrating(
        MODEL, SIMULATOR, EFFECTIVE[case], unknown, spread, samples=0, **options
    )
    for theta, trajectories in batches:
        estimator.learn(theta, trajectories)
    return estimator


def minimise(case, batches, start=None, weights=None):
    """φ of the least −ln posterior, found from several starts."""
    begin, spread = STARTS[case]
    begin = begin if start is None else start
    prior = np.atleast_1d(np.asarray(begin, np.float32)).astype(np.float64)
    spread = np.atleast_1d(np.asarray(spread, np.float32)).astype(np.float64)
    weights = np.ones(len(batches)) if weights is None else weights

    def loss(u):
        total = np.sum((u - prior) ** 2 / spread**2) / 2
        for weight, (theta, trajectories) in zip(weights, batches, strict=True):
            k, sigma = 1.0, 0.3
            if case != "noise":
                k = np.exp(u[0])
            if case != "drift":
                sigma = abs(u[-1])
            x = np.asarray(trajectories.x, np.float64)[..., 0]
            miss = np.diff(x) + float(theta) * k * x[:, :-1] * DT
            total += weight * (np.sum(miss**2) / (2 * sigma**2 * DT) + miss.size * np.log(sigma))
        return total

    begins = (np.atleast_1d(TRUTHS[case]), np.atleast_1d(TRUTHS[case]) * 1.3)
    options = {"xatol": 1e-7, "fatol": 1e-9, "maxiter": 4000}
    search = partial(scipy.optimize.minimize, loss, method="Nelder-Mead", options=options)
    found = [search(u) for u in begins]
    return min(found, key=lambda each: each.fun).x


@pytest.mark.parametrize(
    ("case", "calls", "count"), [("drift", 1, 40), ("noise", 5, 8), ("both", 5, 8)]
)
def test_a_calibration_is_the_most_probable_one(case, calls, count):
    for seed in range(3):
        batches = measure(case, TRUTHS[case], seed, calls, count)
        known = calibrate(case, batches).calibration
        value = flat(known.unknown)
        away = (value - minimise(case, batches)) / flat(known.stderr)
        # a last step of 0.01 is taken too; float32 leaves 1e-3 of a standard deviation
        assert np.abs(away).max() < 0.02
        assert np.abs((value - TRUTHS[case]) / flat(known.stderr)).max() < tolerance(6)


@pytest.mark.filterwarnings("ignore:the calibrated model did not expect")
@pytest.mark.parametrize(("case", "start"), FAR)
def test_a_start_far_away_ends_at_the_same_point(case, start):
    """The first full step from φ = −4 would go to k = e¹⁴³, which is not finite."""
    batches = measure(case, TRUTHS[case], 0, 1, 40)
    known = calibrate(case, batches, start).calibration
    away = (flat(known.unknown) - minimise(case, batches, start)) / flat(known.stderr)
    assert np.abs(away).max() < 0.02


@pytest.mark.long
@pytest.mark.parametrize(("case", "calls", "count"), [("drift", 2, 20), ("noise", 1, 40)])
def test_error_bars_cover_by_one_call_and_by_many(case, calls, count):
    devices, pulls = 100, []
    for seed in range(devices):
        known = calibrate(case, measure(case, TRUTHS[case], seed, calls, count)).calibration
        pulls.append(float((known.unknown - TRUTHS[case]) / known.stderr))
    pulls = np.array(pulls)
    assert abs(pulls.mean()) < 0.3
    assert 0.90 <= np.mean(np.abs(pulls) < 1.96) <= 0.98


def test_what_is_forgotten_counts_for_less():
    batches = measure("drift", 1.0, 3, 3, 8)
    known = calibrate("drift", batches, forget_after=2).calibration
    expected = minimise("drift", batches, weights=[0.25, 0.5, 1.0])
    away = (flat(known.unknown) - expected) / flat(known.stderr)
    assert np.abs(away).max() < 0.02


@pytest.mark.long
def test_trajectories_are_kept_until_a_gaussian_describes_them(monkeypatch):
    few = calibrate("drift", measure("drift", 1.0, 0, 1, 4))
    assert "kept_0_0" in few.state
    # ln k to σ has a bend of 1.5σ, and 2,000 trajectories find it to 0.005
    many = calibrate("drift", measure("drift", 1.0, 0, 1, 2000))
    assert "kept_0_0" not in many.state
    monkeypatch.setattr(kept, "MAX_KEPT", 6 * len(TIMES))  # of one batch, and not of two
    assert "kept_0_0" in calibrate("drift", measure("drift", 1.0, 0, 1, 4)).state
    assert "kept_0_0" not in calibrate("drift", measure("drift", 1.0, 0, 2, 4)).state


@pytest.mark.long
def test_a_run_that_keeps_trajectories_goes_on_bit_for_bit(tmp_path):
    start, spread = (jnp.asarray(v) for v in STARTS["both"])

    def device(key, theta, count):
        return SIMULATOR(key, use_both(theta, jnp.asarray(TRUTHS["both"])), count)

    def train(folder, iterations):
        estimator = fl.SelfCalibrating(
            MODEL, device, use_both, start, spread, samples=0, forget_after=9
        )
        training = fl.Training(estimator, THETA, optax.adam(0.05), trajectories=4, seed=5)
        return fl.run(training, iterations, folder)

    whole = train(tmp_path / "whole", 4)
    train(tmp_path / "part", 2)
    rest = train(tmp_path / "part", 4)
    assert np.array_equal(flat(whole.theta), flat(rest.theta))


def with_kink(theta, phi):
    return {"k": 2 * theta - jnp.abs(phi - 0.5), "sigma": jnp.array(0.3)}


@pytest.mark.long
def test_a_fit_that_has_not_settled_says_so():
    """The likelihood has a kink at its top: no k of the model is as large as that of the device."""
    estimator = fl.SelfCalibrating(MODEL, SIMULATOR, with_kink, jnp.array(0.0), 1.0, samples=0)
    theta, trajectories = measure("drift", 1.0, 0, 1, 400)[0]
    with pytest.warns(RuntimeWarning, match="has not settled.*standard deviations.*`unknown`"):
        estimator.learn(theta, trajectories)
    assert "not settled" in estimator.event
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        calibrate("drift", [(theta, trajectories)])


def test_noise_is_not_fitted_by_the_score_of_the_drift():
    model = fl.ppgt(SIMULATOR, OBJECTIVE, baseline=fl.Twin(), score=fl.scores.drift_score)
    estimator = fl.SelfCalibrating(model, SIMULATOR, use_noise, jnp.array(0.3), 0.3, samples=0)
    with pytest.raises(ValueError, match="`drift_score`"):
        estimator.learn(*measure("noise", 0.6, 0, 1, 4)[0])


def valley(precision, steepness):
    """Evidence of two exact measurements, of u₁ − u₀² and of u₀: Rosenbrock's function."""

    def likelihood(u):
        r = precision * np.array([steepness * (u[1] - u[0] ** 2), 1 - u[0]])
        slope = precision * np.array([[-2 * steepness * u[0], steepness], [-1, 0]])
        return Evidence(-slope.T @ r, slope.T @ slope, linear=False, log_likelihood=-r @ r / 2)

    return likelihood


@pytest.mark.parametrize("start", [(0.0, 0.0), (-1.2, 1.0), (-3.0, 5.0)])
@pytest.mark.parametrize(("precision", "steepness"), [(100, 1), (3, 100), (1, 100), (0.3, 10)])
@pytest.mark.parametrize("max_steps", [6, 20])
def test_a_fit_in_a_bent_valley_climbs_and_does_not_stop_far_away(
    start, precision, steepness, max_steps
):
    """From (0, 0) the first step gains nothing and ends where the next one is 70 deviations."""
    likelihood = valley(precision, steepness)
    prior = Belief(np.zeros(2), np.full(2, 1e-4), np.zeros((2, 2)), np.zeros(2), np.ones(2, bool))

    def log_posterior(u):
        return likelihood(u).log_likelihood + prior.log_density(u)

    fit = fit_map([likelihood], prior, np.array(start), max_steps)
    mean = fit.belief.mean
    assert log_posterior(mean) >= log_posterior(np.array(start))
    assert log_posterior(mean) >= fit.log_posterior - 1e-6
    if fit.converged:
        assert fit.step_size <= NEAR
        # the maximum is ln p = −1e-4, and a step of one deviation in two unknowns gains 1
        assert log_posterior(mean) >= -1.1


def test_a_belief_has_the_gradient_and_the_variances_of_its_density():
    """Against differences of the density and against the inverse of the precision."""
    rng = np.random.default_rng(8)
    root = rng.normal(size=(5, 9))
    free = np.array([True, True, False, True, False])
    belief = Belief(
        rng.normal(size=5), np.full(5, 0.7), root @ root.T, rng.normal(size=5), free=free
    )
    u = rng.normal(size=5)
    numeric = [
        (belief.log_density(u + h) - belief.log_density(u - h)) / 2e-6 for h in 1e-6 * np.eye(5)
    ]
    np.testing.assert_allclose(belief.measure_gradient(u), numeric, rtol=1e-6)
    np.testing.assert_allclose(belief.measure_gradient(belief.mean)[free], 0, atol=1e-12)
    inverse = np.linalg.inv(belief.posterior_precision)
    np.testing.assert_allclose(belief.variance, np.diag(inverse), rtol=1e-12)
    shift = inverse @ belief.information[np.ix_(free, ~free)]
    np.testing.assert_allclose(belief.watched_shift, shift, rtol=1e-11)


def test_the_score_alone_serves_where_no_information_is_needed():
    """A likelihood with a method `score` is asked for it, with the same result."""
    prior = Belief(np.zeros(1), np.ones(1), np.zeros((1, 1)), np.zeros(1), np.ones(1, bool))

    def evidence(u):
        return Evidence(3 - np.exp(u), np.exp(u)[None], linear=False)

    class Scored:
        asked = 0

        def __call__(self, u):
            return evidence(u)

        def score(self, u):
            self.asked += 1
            return evidence(u).score

    fit = fit_map([evidence], prior, np.zeros(1))
    likelihood = Scored()
    assert measure_bend([likelihood], fit, prior) == measure_bend([evidence], fit, prior) > 0
    assert likelihood.asked == 2
