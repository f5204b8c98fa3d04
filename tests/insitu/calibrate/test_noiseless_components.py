"""Calibration, advice and guard of an oscillator whose position has no noise of its own, in
units of standard error.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu
from fluctua.cli.app import app
from fluctua.core.likelihood.guard import examine
from fluctua.core.scores import local_linear
from fluctua.insitu.advice import judge_sampling
from problems import flat, tolerance

MODEL = """
import jax.numpy as jnp
import fluctua as fl

def drift(theta, x):
    return jnp.array([x[1], -theta["k"] * x[0] - theta["friction"] * x[1]])

from fluctua.insitu.files import RecordingModel
process = fl.Process(drift, lambda theta, x: jnp.array([0.0, 0.6]))
objective = fl.Objective(terminal=lambda theta, x: x[0] ** 2)
model = RecordingModel(process, objective)
"""
THETA = {"k": jnp.array(2.0), "friction": jnp.array(0.5)}
Q = 0.6**2 / 2
exec(MODEL)
PROCESS, END = globals()["process"], globals()["objective"]
MATRIX = np.array([[0.0, 1.0], [-2.0, -0.5]])


def oscillator(dt, count, steps, seed=0, readout=(0.0, 0.0)):
    """Samples with the exact Gaussian transition of the oscillator, from rest at 1."""
    from scipy.linalg import expm

    size = np.zeros((4, 4))  # Van Loan: e^{J dt} and the covariance at once
    size[:2, :2], size[2:, 2:], size[:2, 2:] = -MATRIX, MATRIX.T, np.diag([0.0, 2 * Q])
    whole = expm(size * dt)
    step = whole[2:, 2:].T
    root = np.linalg.cholesky(step @ whole[:2, 2:])
    rng = np.random.default_rng(seed)
    x = np.empty((count, steps + 1, 2))
    x[:, 0] = 1.0, 0.0
    for n in range(steps):
        x[:, n + 1] = x[:, n] @ step.T + rng.normal(size=(count, 2)) @ root.T
    return fl.Trajectories(
        dt * np.arange(steps + 1), x + np.asarray(readout) * rng.normal(size=x.shape)
    )


def euler_steps(dt, count, steps, key):
    return fl.simulator(PROCESS, jnp.array([1.0, 0.0]), dt * jnp.arange(steps + 1))(
        key, THETA, count
    )


def compute_z(fit, theta=THETA):
    return (flat(fit.theta) - flat(theta)) / flat(fit.stderr)


FAR_OFF = {"k": jnp.array(1.0), "friction": jnp.array(0.0)}


@pytest.mark.long
def test_drift_and_noise_of_the_noisy_row_from_euler_steps(key):
    """The position's residual is zero to rounding: nothing divides by it."""
    data = euler_steps(0.02, 192, 150, key)
    fit = insitu.calibrate.fit_drift(data, PROCESS, FAR_OFF)
    assert np.abs(compute_z(fit)).max() < tolerance(2)
    assert 0.7 < np.median(flat(fit.robust_stderr) / flat(fit.stderr)) < 1.4
    noise = insitu.calibrate.fit_noise(data, PROCESS, THETA)
    assert noise.diffusion[0] == 0
    assert abs(noise.diffusion[1] - Q) < tolerance(1) * noise.diffusion_stderr[1]
    assert not noise.observation_seen


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_positions_and_velocities_sampled_far_apart(seed):
    """ωΔ = 0.4: the law of both rows is that of the noise of one."""
    data = oscillator(0.3, 384, 30, seed)
    fit = insitu.calibrate.fit_drift(data, PROCESS, FAR_OFF, transition=local_linear)
    assert np.abs(compute_z(fit)).max() < tolerance(2)
    assert 0.7 < np.median(flat(fit.robust_stderr) / flat(fit.stderr)) < 1.4
    noise = insitu.calibrate.fit_noise(data, PROCESS, THETA, transition=local_linear)
    assert abs(noise.diffusion[1] - Q) < tolerance(1) * noise.diffusion_stderr[1]
    assert (
        np.abs(compute_z(insitu.calibrate.fit_drift(data, PROCESS, FAR_OFF))).max() > 8
    )  # Euler's is another system


def test_readout_noise_of_a_noiseless_component_is_seen():
    data = oscillator(0.05, 320, 100, readout=(0.02, 0.0))
    noise = insitu.calibrate.fit_noise(data, PROCESS, THETA)
    assert noise.observation_seen
    assert abs(noise.observation_variance[0] - 0.02**2) < tolerance(1) * noise.observation_stderr[0]
    assert not insitu.calibrate.fit_noise(
        data._replace(x=oscillator(0.05, 320, 100).x), PROCESS, THETA
    ).observation_seen


@pytest.mark.long
def test_the_guard_takes_an_identity_for_one(key):
    exact, steps = oscillator(0.05, 100, 100), euler_steps(0.05, 100, 100, key)
    for data in (exact, steps, steps._replace(x=np.asarray(steps.x, np.float32))):
        found = examine(PROCESS, THETA, data)
        assert (found.noiseless, found.v[0], found.cause) == ((0,), 1, "")
    assert not examine(PROCESS, THETA, oscillator(0.5, 100, 40), transition=local_linear).cause


@pytest.mark.long
def test_the_guard_sees_a_noiseless_component_that_does_not_follow_its_drift():
    data = oscillator(0.02, 100, 100)
    other = data._replace(
        x=data.x * np.array([1.2, 1.0])
    )  # the position in another unit than its velocity
    found = examine(PROCESS, THETA, other)
    assert 0 in found.wrong
    assert "Component 0 has no noise of its own" in found.cause
    assert "readout" not in found.cause
    blurred = examine(PROCESS, THETA, oscillator(0.02, 100, 100, readout=(0.01, 0.0)))
    assert "readout" in blurred.cause
    assert not examine(
        PROCESS, THETA, oscillator(0.02, 100, 100, readout=(0.01, 0.0)), readout=[1e-4, 0.0]
    ).cause


def test_the_guard_of_one_wiener_process_on_two_components(key):
    push = jnp.array([1.0, 2.0])
    process = fl.Process(lambda th, x: th["a"] * push - 0.5 * x, lambda th, x: 0.3 * push[:, None])
    data = fl.simulator(process, jnp.zeros(2), 0.05 * jnp.arange(41))(
        key, {"a": jnp.array(0.4)}, 100
    )
    found = examine(process, {"a": jnp.array(0.4)}, data)
    np.testing.assert_allclose(found.v, found.v[0])  # one noise, one number
    assert np.all(np.abs(found.v - 1) < 4 * found.stderr)
    assert (
        "noise amplitude"
        in examine(process, {"a": jnp.array(0.4)}, data._replace(x=data.x * 3)).cause
    )


def test_a_parameter_of_a_noiseless_component_is_refused_by_name(key):
    process = fl.Process(
        lambda th, x: PROCESS.drift(th, x) * jnp.array([th["friction"], 1.0]), PROCESS.noise
    )
    for fit in (insitu.calibrate.fit_drift, insitu.calibrate.fit_noise):
        with pytest.raises(ValueError, match="component 0 has no noise.*`friction`"):
            fit(euler_steps(0.05, 4, 20, key), process, THETA)


def test_the_interval_of_an_oscillator_in_any_units():
    """Its rate is ω = √2 whatever the position is counted in, and a position is no dead channel."""
    data = oscillator(0.02, 8, 40)
    mine = judge_sampling(PROCESS, THETA, data, np.array([0.0, Q]))
    milli = fl.Process(
        lambda th, x: PROCESS.drift(th, x * jnp.array([1e-3, 1])) * jnp.array([1e3, 1]),
        PROCESS.noise,
    )
    other = judge_sampling(
        milli, THETA, data._replace(x=data.x * np.array([1e3, 1.0])), np.array([0.0, Q])
    )
    assert other.euler == pytest.approx(mine.euler, rel=0.5)  # balanced to a factor of two
    assert 0.75 * np.sqrt(2) * 0.02 < mine.euler < 3 * np.sqrt(2) * 0.02
    assert mine.verdict == "good"


# ------------------------------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Set to k = 2.3, and really k = 2: 384 runs, Δ = 0.02."""
    folder = tmp_path_factory.mktemp("oscillator")
    (folder / "model.py").write_text(MODEL)
    data = oscillator(0.02, 384, 100, seed=3)
    head = insitu.files.Description(data.t, ("x", "v"), parameters={"k": 2.3, "friction": 0.5})
    insitu.files.save(folder / "r.nc", head, data.x)
    return folder


def command(folder, name, *options):
    done = CliRunner().invoke(
        app, [name, str(folder / "r.nc"), "--model", f"{folder / 'model.py'}:model", *options]
    )
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.long
def test_calibrate_then_estimate_and_advise(folder):
    """With what `calibrate --write` measured, `estimate` gives the gradient of the true
    oscillator.
    """
    parsed = json.loads(command(folder, "calibrate", "--write", "--json"))["files"][0]
    fit = parsed["fit"]
    # Euler's interval biases k by about ωΔ/2 of friction and k: below a standard error here
    for name, true in (("k", 2.0), ("friction", 0.5)):
        assert abs(fit["theta"][name] - true) < tolerance(2) * fit["stderr"][name] + 0.03
    assert parsed["guard"]["v"][0] == 1
    found = json.loads(command(folder, "estimate", "--set", "theta=calibrated", "--json"))

    def value(theta):
        """E[x_T²] of the oscillator, by its transition over one interval."""
        j = jnp.array([[0.0, 1.0], [-theta["k"], -theta["friction"]]])
        size = jnp.block([[-j, jnp.diag(jnp.array([0.0, 2 * Q]))], [jnp.zeros((2, 2)), j.T]])
        whole = jax.scipy.linalg.expm(size * 2.0)
        step = whole[2:, 2:].T
        return step[0, 0] ** 2 + (step @ whole[:2, 2:])[0, 0]

    exact = jax.jit(jax.grad(value))(THETA)
    for name in THETA:
        assert abs(found["gradient"][name] - exact[name]) < 4 * found["stderr"][name] + 0.05 * abs(
            exact[name]
        )
    assert found["residuals"]["cause"] == ""
    advice = json.loads(command(folder, "advise", "--json"))
    assert advice["sampling"]["rate"] == pytest.approx(np.sqrt(2.3), rel=1e-6)
    assert advice["observation"] is None


@pytest.mark.long
def test_the_report_in_words(folder):
    report = command(folder, "calibrate")
    assert "x has no noise of its own, and moves as its drift predicts" in report
    assert "the noise is the model's" in report
    assert "k " in report
    assert "not what was set" in report
