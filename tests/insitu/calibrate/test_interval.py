"""Whether Euler's interval is why a calibration complains, and errors from few trajectories."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm
from scipy.stats import t as student
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu
from fluctua.cli.app import app
from fluctua.core.likelihood.interval import measure_euler_defect
from problems import tolerance

PROCESS = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: 0.5 * jnp.ones(1))
FREE = fl.Process(lambda th, x: 0.0 * th["k"] * x, lambda th, x: 0.5 * jnp.ones(1))
THETA = {"k": jnp.array(1.0)}


def ornstein_uhlenbeck(rng, count, dt, steps=40, k=1.0):
    """Exact samples of dX = −kX dt + 0.5 dW from X = 1. (E, T+1, 1)"""
    f = np.exp(-k * dt)
    x = np.ones((count, steps + 1, 1))
    for n in range(steps):
        x[:, n + 1] = f * x[:, n] + 0.5 * np.sqrt((1 - f**2) / (2 * k)) * rng.normal(
            size=(count, 1)
        )
    return fl.Trajectories(dt * np.arange(steps + 1), x)


def test_the_interval_is_named_where_it_is_the_cause():
    """r = x(e^{−kΔ} − 1 + kΔ) on average and d = ½k²Δ²x: the slope is the ratio.

    A wrong k at a short interval: not.
    """
    dt = 0.2
    data = ornstein_uhlenbeck(np.random.default_rng(0), 2000, dt)
    defect = measure_euler_defect(data, PROCESS, THETA, np.array([0.125]))
    expected = (np.exp(-dt) - 1 + dt) / (dt**2 / 2)
    assert abs(defect.slope - expected) < 4 * defect.stderr
    assert defect.stderr < 0.1
    assert defect.is_cause
    wrong = ornstein_uhlenbeck(np.random.default_rng(1), 2000, 0.2, k=1.5)
    defect = measure_euler_defect(wrong, PROCESS, THETA, np.array([0.125]))
    assert not defect.is_cause
    assert defect.is_not


def test_errors_from_few_trajectories_cover():
    """12 trajectories, 300 times over: ±1.96 errors of Q cover 95 %; without Student's factor
    it would be 92 %.
    """
    rng, true, count = np.random.default_rng(2), 0.125, 12
    inside = []
    for _ in range(300):
        dw = rng.normal(size=(count, 30, 1))
        x = np.concatenate([np.zeros((count, 1, 1)), np.cumsum(0.5 * 0.1 * dw, axis=1)], axis=1)
        noise = insitu.calibrate.fit_noise(fl.Trajectories(0.01 * np.arange(31), x), FREE, THETA)
        inside.append(
            abs(noise.quadratic_variation[0] - true) < 1.96 * noise.quadratic_variation_stderr[0]
        )
    assert noise.trajectories == count
    share = np.mean(inside)
    assert abs(share - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 300)
    each = np.mean((0.5 * 0.1 * dw) ** 2, axis=(1, 2)) / (2 * 0.01)
    few = student.isf(0.025, count - 1) / norm.isf(0.025)
    np.testing.assert_allclose(
        noise.quadratic_variation_stderr, few * each.std(ddof=1) / np.sqrt(count), rtol=1e-5
    )
    raw = student.cdf(1.96, count - 1) - student.cdf(-1.96, count - 1)
    assert raw < 0.93


@pytest.mark.long
def test_a_recording_with_defaults_calibrates_cleanly(tmp_path):
    """The defaults of `record` but a smaller lattice and a shorter time; nothing in the report
    begins with →.
    """
    path = str(tmp_path / "r.nc")
    lattice = "--set lattice.rows=2 --set lattice.columns=2 --set task.horizon=3"
    options = ["record", path, *lattice.split(), "--trajectories", "64"]
    run(*options)
    done = run("calibrate", path)
    assert "→" not in done.output
    run(*options, "--replace", "--set", "task.dt=0.002", "--every", "30")
    done = run("calibrate", path)
    assert "The cause is Euler's interval" in done.output


# -------------------------------------------------------------------------- the score of `estimate`

MODEL = """
import fluctua as fl, jax.numpy as jnp
from fluctua.insitu.files import RecordingModel
process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: 0.5 * jnp.ones(1))
objective = fl.Objective(terminal=lambda th, x: x[0] ** 2)
model = RecordingModel(process, objective)
"""


def write(folder, name, dt, steps, count=2000):
    """Exact samples of the process, saved as a recording. Returns the options that read it."""
    data = ornstein_uhlenbeck(np.random.default_rng(5), count, dt, steps)
    insitu.files.save(
        folder / name, insitu.files.Description(data.t, ("x",), parameters=THETA), data.x
    )
    (folder / "model.py").write_text(MODEL)
    return [str(folder / name), "--model", f"{folder / 'model.py'}:model"]


def run(*arguments):
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.long
def test_estimate_follows_the_transition_of_the_calibration(tmp_path):
    """E[X_T²] = e^{−2kT} + (1 − e^{−2kT})/8k: samples 1 apart put 8 standard errors on Euler's
    gradient.
    """
    file = write(tmp_path, "r.nc", 1.0, 10, count=20_000)
    k, duration = 1.0, 10.0
    decay = np.exp(-2 * k * duration)
    exact = -2 * duration * decay * (1 - 1 / (8 * k)) - (1 - decay) / (8 * k**2)
    before = json.loads(run("estimate", *file, "--json").stdout)
    assert before["transition"] == "euler"
    assert abs(before["gradient"]["k"] - exact) > 8 * before["stderr"]["k"]
    insitu.files.put_table(file[0], "noise", {"diffusion": 0.125, "transition": "local-linear"})
    after = json.loads(run("estimate", *file, "--json").stdout)
    assert (after["transition"], after["sampling"]) == ("local-linear", None)
    assert abs(after["gradient"]["k"] - exact) < tolerance(1) * after["stderr"]["k"]


@pytest.mark.long
def test_every_command_follows_the_transition_that_calibrate_wrote(tmp_path):
    file = write(tmp_path, "r.nc", 0.5, 10, count=40)
    run("calibrate", *file, "--score", "local-linear", "--write", "--set", "bias=false")
    one = run("estimate", *file)
    assert "local-linear score" in one.stdout
    assert "does not suit" not in one.stderr
    pooled = json.loads(run("estimate", file[0], *file, "--json").stdout)
    assert [each["transition"] for each in pooled["files"]] == ["local-linear"] * 2
    assert (
        json.loads(run("advise", *file, "--json").stdout)["sampling"]["verdict"] == "faster"
    )  # wΔ = 0.5 > 0.25
    assert "does not suit" in run("estimate", *file, "--score", "euler").stderr
    insitu.files.put_table(file[0], "noise", {"diffusion": 0.125, "transition": "exact"})
    assert "`noise.transition`" in CliRunner().invoke(app, ["estimate", *file]).output


@pytest.mark.long
def test_estimate_warns_where_advice_says_that_euler_does_not_suit(tmp_path):
    """K + Kᵀ = −2: a bias of 3Δ by the rule of thumb, 5 % at Δ = 0.0167."""
    for dt, suits in ((0.016, True), (0.018, False)):
        file = write(tmp_path, f"{dt}.nc", dt, 20)
        done = run("estimate", *file, "--json")
        judged = json.loads(done.stdout)["sampling"]
        advised = json.loads(run("advise", *file, "--json").stdout)["sampling"]
        assert judged["verdict"] == advised["verdict"] == ("good" if suits else "faster")
        assert ("Euler's score does not suit" in done.stderr) is not suits
    assert "5% at 0.017" in done.stderr
    assert "does not suit" in run("estimate", file[0], *file).stderr
    assert "does not suit" not in run("estimate", *file, "--score", "local-linear").stderr


@pytest.mark.long
def test_a_simulation_step_by_step_suits_euler(tmp_path):
    path = str(tmp_path / "r.nc")
    lattice = "--set lattice.rows=1 --set lattice.columns=2 --set task.dt=0.05"
    options = ["record", path, *lattice.split(), "--trajectories", "4", "--replace"]
    for every, suits in ((1, True), (2, False)):  # 40 samples in both
        run(*options, "--set", f"task.horizon={2 * every}", "--every", str(every))
        assert ("does not suit" in run("estimate", path).stderr) is not suits
