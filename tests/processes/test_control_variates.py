"""Control variates of a long-run average, in place of a twin where states are noisy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua import insitu
from fluctua.core import check
from fluctua.core.scores import Step, euler
from fluctua.processes.control_variates import ControlledReward, fit_control
from problems import flat, tolerance
from steady import steady_average, steady_record

DT = 0.05
ONE = fl.Process(lambda th, x: th["k"] * (th["m"] - x), lambda th, x: th["s"] * jnp.ones(1))
ONE_THETA = {"k": jnp.array(1.5), "m": jnp.array(0.4), "s": jnp.array(0.6)}
TWO = fl.Process(
    lambda th, x: jnp.stack([-th["k"] * x[0] + th["c"] * x[1], -th["c"] * x[0] - x[1] + 0.4]),
    lambda th, x: th["s"] * jnp.array([0.5, 0.7]),
)
TWO_THETA = {"k": jnp.array(1.5), "c": jnp.array(0.8), "s": jnp.array(1.0)}
SQUARE = lambda th, x: x[0] ** 2 + x[0]
OBJECTIVE = fl.Objective(running=SQUARE)
CASES = {"one": (ONE, ONE_THETA, 1), "two": (TWO, TWO_THETA, 2)}


def gradient(name):
    process, theta, size = CASES[name]
    return flat(jax.grad(lambda th: steady_average(process, SQUARE, th, DT, size))(theta))


def make_record(name, steps, seed=3):
    process, theta, size = CASES[name]
    return steady_record(process, theta, DT, size, jax.random.key(seed), steps)


@pytest.mark.parametrize("power", [(1, 0), (0, 2), (3, 1), (2, 2)])
def test_expected_changes_are_the_moments_of_a_kick(power):
    """E[φ(X')|x] of Euler's step against a million kicks."""
    process = check.process(TWO)
    reward = ControlledReward(
        None, process, euler, (power, (4, 0)), (0.0, 0.0), (0.1, 0.2), (0.5, 0.8), DT
    )
    x = jnp.array([0.3, -0.2])
    change = reward.evaluate_changes(TWO_THETA, x, jnp.zeros(()), None)
    mean, covariance = euler(process, TWO_THETA, Step(x, x, jnp.zeros(()), DT, None))
    kicks = np.random.default_rng(0).normal(size=(1_000_000, 2)) * np.sqrt(np.diag(covariance))
    scaled = (np.asarray(mean) + kicks - [0.1, 0.2]) / [0.5, 0.8]
    drawn = (np.prod(scaled ** np.array(power), axis=1)) - reward.evaluate_terms(x)[0]
    z = (drawn.mean() / DT - float(change[0])) / (drawn.std() / DT / 1000)
    assert abs(z) < 4


@pytest.mark.parametrize("name", CASES)
def test_the_controlled_reward_of_a_linear_process_is_constant(name):
    """Poisson's equation of a quadratic reward has a quadratic solution: nothing is left."""
    process, theta, size = CASES[name]
    fitted = fit_control(process, euler, OBJECTIVE, theta, make_record(name, 20_000), 2000.0)
    assert fitted.explained > 1 - 1e-8
    value = float(steady_average(process, SQUARE, theta, DT, size))
    for x in np.random.default_rng(1).normal(size=(5, size)):
        g = fitted.objective.running(theta, jnp.asarray(x), jnp.zeros(()), None)
        assert float(g) == pytest.approx(value, rel=1e-4)


def save(path, x, theta):
    names = tuple("ab"[: x.shape[2]])
    head = insitu.files.Description(DT * np.arange(x.shape[1]), names, parameters=theta)
    insitu.files.save(path, head, x)
    return path


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_twin_with_readout_noise(tmp_path, name):
    """s² is three times QΔt and more. Gradients and J against the Lyapunov equation; the error of
    every gradient is smaller by a factor of two at least.
    """
    process, theta, size = CASES[name]
    s = 0.2
    x = np.asarray(make_record(name, 30_000, seed=5).x)
    x = x + s * np.random.default_rng(6).normal(size=x.shape)
    model = insitu.files.RecordingModel(process, OBJECTIVE, theta)
    with insitu.files.open(save(tmp_path / "noisy.nc", x, theta)) as noisy:
        plain, twin = (
            insitu.estimate_continuing(
                noisy, model, window=4.0, baseline=baseline, observation_noise=s**2
            )
            for baseline in ("time", "twin")
        )
        with pytest.raises(ValueError, match="model of the score"):
            insitu.estimate_continuing(
                noisy, model, baseline=fl.Twin(process=process), observation_noise=s**2
            )
    z = (flat(twin.estimate.gradient) - gradient(name)) / flat(twin.estimate.stderr)
    assert np.abs(z).max() < tolerance(len(z))
    assert np.all(flat(twin.estimate.stderr) < flat(plain.estimate.stderr) / 2)
    assert float(twin.estimate.value) == pytest.approx(float(plain.estimate.value))
    value = float(steady_average(process, SQUARE, theta, DT, size))
    assert abs(float(twin.estimate.value) - value) < 4 * float(twin.estimate.value_stderr)
    assert float(twin.estimate.value_stderr) > 0.5 * float(plain.estimate.value_stderr)


@pytest.mark.long
def test_errors_of_a_twin_with_readout_noise_cover(tmp_path):
    """z of 6 records; the gradient by s has no error at all, since its reward is constant."""
    repeats, s = 6, 0.2
    x = np.asarray(
        steady_record(ONE, ONE_THETA, DT, 1, jax.random.key(8), 12_000, traces=repeats).x
    )
    x = x + s * np.random.default_rng(2).normal(size=x.shape)
    model = insitu.files.RecordingModel(ONE, OBJECTIVE, ONE_THETA)
    z, last = [], []
    for number, one in enumerate(x):
        path = save(tmp_path / f"{number}.nc", one[None], ONE_THETA)
        with insitu.files.open(path) as recording:
            e = insitu.estimate_continuing(
                recording, model, window=3.0, baseline="twin", observation_noise=s**2
            ).estimate
        off = flat(e.gradient) - gradient("one")
        z.append((off / flat(e.stderr))[:2])
        last.append(off[2])
    assert np.all(np.abs(np.mean(z, axis=0)) < 4 / np.sqrt(repeats))
    assert 0.3 < np.mean(np.square(z)) < 1 + 4 * np.sqrt(2 / repeats)
    assert np.abs(last).max() < 1e-6


@pytest.mark.long
def test_a_record_that_contradicts_its_twin_is_reported(tmp_path):
    x = np.asarray(make_record("one", 20_000).x) + 0.3
    x = x + 0.05 * np.random.default_rng(6).normal(size=x.shape)
    model = insitu.files.RecordingModel(ONE, OBJECTIVE, ONE_THETA)
    path = save(tmp_path / "moved.nc", x, ONE_THETA)
    with insitu.files.open(path) as moved, pytest.warns(RuntimeWarning, match="not that of the tw"):
        insitu.estimate_continuing(
            moved, model, window=4.0, baseline="twin", observation_noise=0.05**2
        )


def test_short_records_take_fewer_terms(tmp_path):
    record = make_record("one", 2000)
    assert fit_control(ONE, euler, OBJECTIVE, ONE_THETA, record, 900.0).degree == 8
    assert fit_control(ONE, euler, OBJECTIVE, ONE_THETA, record, 250.0).degree == 2
    with pytest.raises(ValueError, match="need 100 independent samples; the record has 50"):
        fit_control(ONE, euler, OBJECTIVE, ONE_THETA, record, 50.0)
