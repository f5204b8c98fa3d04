"""Control variates of a long-run average, in place of a twin where states are noisy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua import insitu
from fluctua.core import check
from fluctua.core.scores import Step, euler
from fluctua.processes.control_variates import ControlledReward, fit_control
from numeric import linear_chain, value_and_slope
from problems import flat, tolerance

DT = 0.05
ONE = fl.Process(lambda th, x: th["k"] * (th["m"] - x), lambda th, x: th["s"] * jnp.ones(1))
ONE_THETA = {"k": np.array(1.5), "m": np.array(0.4), "s": np.array(0.6)}
TWO = fl.Process(
    lambda th, x: jnp.stack([-th["k"] * x[0] + th["c"] * x[1], -th["c"] * x[0] - x[1] + 0.4]),
    lambda th, x: th["s"] * jnp.array([0.5, 0.7]),
)
TWO_THETA = {"k": np.array(1.5), "c": np.array(0.8), "s": np.array(1.0)}
SQUARE = lambda th, x: x[0] ** 2 + x[0]
OBJECTIVE = fl.Objective(running=SQUARE)
CASES = {"one": (ONE, ONE_THETA, 1), "two": (TWO, TWO_THETA, 2)}
CHAINS = {
    "one": lambda th: linear_chain([[-th["k"]]], [th["k"] * th["m"]], [th["s"]], DT),
    "two": lambda th: linear_chain(
        [[-th["k"], th["c"]], [-th["c"], -1.0]], [0.0, 0.4], th["s"] * np.array([0.5, 0.7]), DT
    ),
}


@cache
def average(name):
    """E[x₀² + x₀] of the steady state and its gradient (P,)."""

    def value(theta):
        chain = CHAINS[name](theta)
        return chain.mean[0] ** 2 + chain.covariance[0, 0] + chain.mean[0]

    exact, slope = value_and_slope(value, CASES[name][1])
    return exact, flat(slope)


def make_record(name, steps, seed=3, traces=1):
    x = CHAINS[name](CASES[name][1]).simulate(steps, traces, seed)
    return fl.Trajectories(DT * np.arange(steps + 1), x)


@pytest.mark.parametrize("power", [(1, 0), (0, 2), (3, 1), (2, 2)])
def test_expected_changes_are_the_moments_of_a_kick(power):
    """E[φ(X')|x] of Euler's step against a million kicks."""
    process = check.process(TWO)
    reward = ControlledReward(
        None, process, euler, (power, (4, 0)), (0.0, 0.0), (0.1, 0.2), (0.5, 0.8), DT
    )
    x = np.array([0.3, -0.2])

    @jax.jit
    def evaluate(x, t):
        change = reward.evaluate_changes(TWO_THETA, x, t, None)
        return change, euler(process, TWO_THETA, Step(x, x, t, DT, None)), reward.evaluate_terms(x)

    change, (mean, covariance), terms = jax.tree.map(np.asarray, evaluate(x, np.zeros(())))
    kicks = np.random.default_rng(0).normal(size=(1_000_000, 2)) * np.sqrt(np.diag(covariance))
    scaled = (np.asarray(mean) + kicks - [0.1, 0.2]) / [0.5, 0.8]
    drawn = (np.prod(scaled ** np.array(power), axis=1)) - terms[0]
    z = (drawn.mean() / DT - float(change[0])) / (drawn.std() / DT / 1000)
    assert abs(z) < 4


@pytest.mark.parametrize("name", CASES)
def test_the_controlled_reward_of_a_linear_process_is_constant(name):
    """Poisson's equation of a quadratic reward has a quadratic solution: nothing is left."""
    process, theta, size = CASES[name]
    fitted = fit_control(process, euler, OBJECTIVE, theta, make_record(name, 2000), 2000.0)
    assert fitted.explained > 1 - 1e-8
    value, _ = average(name)
    running = jax.jit(jax.vmap(lambda x: fitted.objective.running(theta, x, jnp.zeros(()), None)))
    g = running(np.random.default_rng(1).normal(size=(5, size)))
    np.testing.assert_allclose(g, value, rtol=1e-4)


def save(path, x, theta):
    names = tuple("ab"[: x.shape[2]])
    head = insitu.files.Description(DT * np.arange(x.shape[1]), names, parameters=theta)
    insitu.files.save(path, head, x)
    return path


NOISE = 0.2
"""Of the readout: s² is three times QΔt and more."""


def add_noise(x, seed):
    return x + NOISE * np.random.default_rng(seed).normal(size=x.shape)


def estimate_by(recording, model, baseline, window):
    return insitu.estimate_continuing(
        recording, model, window=window, baseline=baseline, observation_noise=NOISE**2
    ).estimate


def check_twin(name, twin, plain):
    """Gradients and J against the Lyapunov equation; the error of every gradient is smaller by a
    factor of two at least.
    """
    value, slope = average(name)
    off = flat(twin.gradient) - slope
    resolved = flat(twin.stderr) > 1e-9
    assert resolved.tolist() == [True, True, False]  # that by s, the last, has no error
    assert np.abs(off[~resolved]).max() < 1e-8
    z = off[resolved] / flat(twin.stderr)[resolved]
    assert np.abs(z).max() < tolerance(len(z))
    assert np.all(flat(twin.stderr) < flat(plain.stderr) / 2)
    assert float(twin.value) == pytest.approx(float(plain.value))
    assert abs(float(twin.value) - value) < 4 * float(twin.value_stderr)
    assert float(twin.value_stderr) > 0.5 * float(plain.value_stderr)


@pytest.mark.long
def test_a_twin_with_readout_noise(tmp_path):
    """Two states; one state alone is among the records of the test below."""
    x = add_noise(make_record("two", 30_000, seed=5).x, 6)
    model = insitu.files.RecordingModel(TWO, OBJECTIVE, TWO_THETA)
    with insitu.files.open(save(tmp_path / "noisy.nc", x, TWO_THETA)) as noisy:
        plain, twin = (estimate_by(noisy, model, baseline, 4.0) for baseline in ("time", "twin"))
        with pytest.raises(ValueError, match="model of the score"):
            estimate_by(noisy, model, fl.Twin(process=TWO), 4.0)
    check_twin("two", twin, plain)


@pytest.mark.long
def test_errors_of_a_twin_with_readout_noise_cover(tmp_path):
    """z of 6 records; the gradient by s has no error at all, since its reward is constant."""
    repeats = 6
    x = add_noise(make_record("one", 8000, seed=8, traces=repeats).x, 2)
    model = insitu.files.RecordingModel(ONE, OBJECTIVE, ONE_THETA)
    _, slope = average("one")
    z, last = [], []
    for number, one in enumerate(x):
        path = save(tmp_path / f"{number}.nc", one[None], ONE_THETA)
        with insitu.files.open(path) as recording:
            e = estimate_by(recording, model, "twin", 3.0)
            if number == 0:
                check_twin("one", e, estimate_by(recording, model, "time", 3.0))
        off = flat(e.gradient) - slope
        z.append((off / flat(e.stderr))[:2])
        last.append(off[2])
    assert np.all(np.abs(np.mean(z, axis=0)) < 4 / np.sqrt(repeats))
    assert 0.3 < np.mean(np.square(z)) < 1 + 4 * np.sqrt(2 / repeats)
    assert np.abs(last).max() < 1e-6


@pytest.mark.long
def test_a_record_that_contradicts_its_twin_is_reported(tmp_path):
    x = make_record("one", 12_000).x + 0.3
    x = x + 0.05 * np.random.default_rng(6).normal(size=x.shape)
    model = insitu.files.RecordingModel(ONE, OBJECTIVE, ONE_THETA)
    path = save(tmp_path / "moved.nc", x, ONE_THETA)
    with insitu.files.open(path) as moved, pytest.warns(RuntimeWarning, match="not that of the tw"):
        insitu.estimate_continuing(
            moved, model, window=3.0, baseline="twin", observation_noise=0.05**2
        )


def test_short_records_take_fewer_terms(tmp_path):
    record = make_record("one", 2000)
    assert fit_control(ONE, euler, OBJECTIVE, ONE_THETA, record, 900.0).degree == 8
    assert fit_control(ONE, euler, OBJECTIVE, ONE_THETA, record, 250.0).degree == 2
    with pytest.raises(ValueError, match="need 100 independent samples; the record has 50"):
        fit_control(ONE, euler, OBJECTIVE, ONE_THETA, record, 50.0)
