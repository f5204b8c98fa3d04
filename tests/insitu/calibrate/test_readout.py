"""Gradients from states measured with noise, against the exact answers of linear chains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua import insitu
from fluctua.insitu import filter_choice
from fluctua.insitu.readout import correct_objective, measure_remainder
from problems import tolerance

PROCESS = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: th["s"][None])
OBJECTIVE = fl.Objective(running=lambda th, x: x[0] ** 2, terminal=lambda th, x: 0.5 * x[0] ** 2)
THETA = {"k": jnp.array(0.8), "s": jnp.array(0.7)}
DT, STEPS = 0.1, 20


def exact():
    """∂J/∂k, ∂J/∂s of the Euler chain dX = −kX Δt + s dW from X = 1: J = Σ E[X²]Δt + E[X_T²]/2."""

    def value(th):
        def step(_, now):
            second, total = now
            return (1 - th["k"] * DT) ** 2 * second + th["s"] ** 2 * DT, total + second * DT

        second, total = jax.lax.fori_loop(0, STEPS, step, (jnp.ones(()), jnp.zeros(())))
        return total + second / 2

    return jax.jit(jax.grad(value))(THETA)


@pytest.mark.long
def test_noise_parameters_are_corrected_for(tmp_path):
    """The score of s is quadratic in the residual, and so is the reward: Cov[ε², ε²] = 2S² is due,
    not 4S².

    Twice as much would put −Σ_n 2S²/s³ − S²/(s³Δt) on ∂J/∂s: −5.8 at S = 0.2, where ∂J/∂s is 1.9.
    """
    t, variance = DT * np.arange(STEPS + 1), 0.2
    data = fl.simulator(PROCESS, jnp.ones(1), jnp.asarray(t))(jax.random.key(3), THETA, 20_000)
    noisy = np.asarray(
        data.x + np.sqrt(variance) * jax.random.normal(jax.random.key(4), data.x.shape)
    )
    insitu.files.save(
        tmp_path / "r.nc", insitu.files.Description(t, ("x",), parameters=THETA), noisy
    )
    with insitu.files.open(tmp_path / "r.nc") as r:
        result = insitu.estimate(r, PROCESS, OBJECTIVE, observation_noise=variance).estimate
    truth = exact()
    z = [float((result.gradient[n] - truth[n]) / result.stderr[n]) for n in ("k", "s")]
    assert np.abs(z).max() < tolerance(2), z
    twice = 2 * variance**2 / 0.7**3 * (STEPS - 1) + variance**2 / (0.7**3 * DT)
    assert twice > 10 * float(result.stderr["s"])


# -------------------------------------------------------------------------------- the reward itself

WEIGHTED = fl.Objective(
    running=lambda th, x: th["w"] * x[0] ** 2, terminal=lambda th, x: 0.5 * x[0] ** 2 + x[0] ** 3
)
START = {**THETA, "w": jnp.array(1.3)}


def weighted_answer():
    """J and ∂J of `WEIGHTED`, from the recursion of mean and variance; E[X³] = m³ + 3mv."""

    def value(th):
        def step(_, now):
            mean, variance, total = now
            f = 1 - th["k"] * DT
            return (
                f * mean,
                f**2 * variance + th["s"] ** 2 * DT,
                total + th["w"] * (mean**2 + variance) * DT,
            )

        mean, variance, total = jax.lax.fori_loop(
            0, STEPS, step, (jnp.ones(()), jnp.zeros(()), jnp.zeros(()))
        )
        return total + (mean**2 + variance) / 2 + mean**3 + 3 * mean * variance

    return jax.jit(jax.value_and_grad(value))(START)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """8,000 trajectories of the chain, read with a variance of 0.1."""
    t = DT * np.arange(STEPS + 1)
    data = fl.simulator(PROCESS, jnp.ones(1), jnp.asarray(t))(jax.random.key(21), START, 8_000)
    x = np.asarray(data.x + np.sqrt(0.1) * jax.random.normal(jax.random.key(22), data.x.shape))
    path = tmp_path_factory.mktemp("noisy") / "r.nc"
    insitu.files.save(path, insitu.files.Description(t, ("x",), parameters=START), x)
    with insitu.files.open(path) as recording:
        yield recording


@pytest.mark.long
@pytest.mark.parametrize("operations", [2e12, 0.0])
def test_the_value_is_that_of_the_states(noisy, monkeypatch, operations):
    """With a filter and without one.

    Uncorrected, J is off by s²(wT + ½ + 3m) and ∂J/∂w by s²T: over 7 errors.
    """
    monkeypatch.setattr(filter_choice, "MAX_OPERATIONS", operations)
    result = insitu.estimate(noisy, PROCESS, WEIGHTED, observation_noise=0.1)
    assert (result.score == "filter") is bool(operations)
    value, gradient = weighted_answer()
    e = result.estimate
    z = [(e.gradient[n] - gradient[n]) / e.stderr[n] for n in START]
    z.append((e.value - value) / e.value_stderr)
    assert np.abs(z).max() < tolerance(4), z
    assert 7 * float(e.value_stderr) < 0.1 * (1.3 * DT * STEPS + 0.5)
    assert 7 * float(e.stderr["w"]) < 0.1 * DT * STEPS


def test_a_reward_of_both_ends_of_a_step_is_corrected():
    """(x' − x)² has the noise of two samples: 2s² each step; x₀² has s²."""
    objective = fl.Objective(
        per_step=lambda th, x, x_next: (x_next[0] - x[0]) ** 2, initial=lambda th, x: x[0] ** 2
    )
    corrected = correct_objective(objective, np.array([0.1]))
    x, x_next = jnp.array([0.5]), jnp.array([2.0])
    assert float(corrected.per_step({}, x, x_next, 0.0, 0.1, None)) == pytest.approx(1.5**2 - 0.2)
    assert float(corrected.initial({}, x, None)) == pytest.approx(0.25 - 0.1)
    assert corrected.running is None


@pytest.mark.long
def test_a_reward_that_bends_within_the_noise_is_named(noisy):
    """P(X_T > 0) has no second derivative to correct with; of 10x⁴ the fourth leaves 30s⁴."""
    steep = fl.Objective(terminal=lambda th, x: jnp.where(x[0] > 0, 1.0, 0.0) + 0 * th["k"])
    with pytest.warns(RuntimeWarning, match="the reward bends on the scale of the readout noise"):
        insitu.estimate(noisy, PROCESS, steep, observation_noise=0.1)
    fourth = fl.Objective(terminal=lambda th, x: 1 + 10 * x[0] ** 4)
    left = measure_remainder(fourth, np.array([0.1]), START, noisy)
    assert left.value == pytest.approx(10 * 3 * 0.1**2, rel=1e-3)
    assert left.bound == pytest.approx(left.value, rel=1e-3)
    quadratic = measure_remainder(WEIGHTED, np.array([0.1]), START, noisy)
    assert quadratic.bound < 1e-5


def test_a_start_that_is_known_but_for_rounding_is_taken():
    """Rounding to single precision makes zero eigenvalues negative, by 1e-7; −0.001 is no
    rounding.
    """
    rng = np.random.default_rng(0)
    first = rng.normal(size=(50, 6)) @ rng.normal(size=(6, 12))
    start = filter_choice._fit_start(first, np.zeros(12))
    process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: jnp.ones(12))
    off = start.covariance - 1e-3 * np.eye(12)
    with jax.enable_x64(False):
        for covariance, fine in ((start.covariance, True), (off, False)):
            seen = fl.Observed(
                process, observe=np.eye(12), noise=0.1, start=fl.Normal(start.mean, covariance)
            )
            if fine:
                seen.check(THETA, jnp.zeros(12), jnp.zeros(()), None)
                continue
            with pytest.raises(
                ValueError, match="`covariance of the start` .* its least is -0.001"
            ):
                seen.check(THETA, jnp.zeros(12), jnp.zeros(()), None)
