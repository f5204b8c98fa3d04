"""Advice from a recording, against systems whose gradient, variance and Euler bias are known."""

import dataclasses
import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu
from fluctua.cli.app import app
from fluctua.core.estimate import Estimate
from fluctua.insitu.advice import judge_sampling
from fluctua.learn.repetitions import PARTS, repetitions

PROCESS = fl.Process(drift=lambda th, x: th["a"] - x, noise=lambda th, x: 0.5 * jnp.ones(2))
OBJECTIVE = fl.Objective(terminal=lambda th, x: jnp.sum(x))
THETA = {"a": jnp.array([0.3, -0.2])}
T = np.linspace(0, 1, 51)
MODEL = """
import fluctua as fl, jax.numpy as jnp
from fluctua.insitu.files import RecordingModel
process = fl.Process(lambda th, x: th['a'] - x, lambda th, x: 0.5 * jnp.ones(2))
objective = fl.Objective(terminal=lambda th, x: jnp.sum(x))
model = RecordingModel(process, objective)
"""


def result(samples):
    """Estimate and parts as `insitu.estimate` gives them, from gradients of single trajectories
    {name: (E, P)}.
    """
    count = len(next(iter(samples.values())))
    mean = {n: v.mean(axis=0) for n, v in samples.items()}
    error = {n: v.std(axis=0) / np.sqrt(count - 1) for n, v in samples.items()}
    rows = np.concatenate([samples[n] for n in sorted(samples)], axis=1)
    parts = np.array([rows[k::PARTS].mean(axis=0) for k in range(PARTS)])
    return Estimate(mean, error, mean, jnp.zeros(()), jnp.zeros(()), count), parts


def test_as_many_as_needed_give_the_error_asked_for():
    """Normal samples with known ∂J and V: S = Σ_i (∂_iJ)²/V_i is found, its error is the
    spread, and E = P/(Sε²).
    """
    rng = np.random.default_rng(0)
    g = {"a": 0.3 * np.arange(1.0, 6), "b": np.array([0.5])}
    truth, size = sum(np.sum(v**2) / 4.0 for v in g.values()), sum(v.size for v in g.values())
    advices = []
    for _ in range(200):
        advices.append(
            repetitions(
                *result({n: v + 2 * rng.normal(size=(400, v.size)) for n, v in g.items()}),
                error=0.2,
            )
        )
    s = np.array([f.signal for f in advices])
    assert abs(s[:, 0].mean() - truth) < 4 * s[:, 0].std() / np.sqrt(200)
    assert 0.8 < s[:, 1].mean() / s[:, 0].std() < 1.25
    clear = [f for f in advices if not f.whole.at_least]
    assert len(clear) > 190
    assert np.median([f.whole.trajectories for f in clear]) == pytest.approx(
        size / (truth * 0.04), rel=0.1
    )
    assert clear[0].reached == pytest.approx(0.2 * np.sqrt(clear[0].whole.trajectories / 400))
    assert clear[0].training.trajectories == pytest.approx(clear[0].whole.trajectories * 0.04)


def test_advice_does_not_depend_on_units():
    """k per hour in place of k per second, in one array with another parameter: the same number
    of trajectories.
    """
    rng = np.random.default_rng(4)
    samples = np.array([0.3, -0.1]) + rng.normal(size=(400, 2))
    one, other = (
        repetitions(*result({"a": samples * unit}))
        for unit in (np.ones(2), np.array([1.0, 3600.0]))
    )
    assert other.whole.trajectories == pytest.approx(one.whole.trajectories)
    assert other.signal == pytest.approx(one.signal)
    assert one.weakest.name == other.weakest.name == "a[1]"
    assert one.weakest.z == pytest.approx(other.weakest.z)


def test_few_trajectories_do_not_raise_the_signal():
    """From 20 trajectories 1/V̂ is 19/17 times 1/V on average."""
    rng = np.random.default_rng(5)
    s = [
        repetitions(*result({"a": 1 + rng.normal(size=(20, 10))})).signal.value for _ in range(400)
    ]
    assert abs(np.mean(s) - 10) < 4 * np.std(s) / np.sqrt(400)
    assert 4 * np.std(s) / np.sqrt(400) < 10 * (19 / 17 - 1)


def test_a_share_of_the_components():
    """Ten components of 1…10 times the error of one trajectory: eight of them need the third's,
    (1/(3ε))².
    """
    rng = np.random.default_rng(1)
    samples = {"a": np.arange(1.0, 11) + rng.normal(size=(10_000, 10))}
    advice = repetitions(*result(samples), error=0.01, share=0.8)
    assert advice.components.trajectories == pytest.approx(1e4 / 9, rel=0.05)
    assert (advice.clear, advice.trainable) == (10, 10)


def test_no_gradient_gets_a_bound_and_no_number():
    """Without a gradient the bound must hold for the smallest that would have been missed: more
    than was recorded.
    """
    advice = repetitions(*result({"a": np.random.default_rng(2).normal(size=(500, 30))}), error=0.1)
    assert advice.reached is None
    assert advice.whole.at_least
    assert advice.whole.trajectories > 500
    assert advice.components.at_least
    with pytest.raises(ValueError, match="`share` in"):
        repetitions(*result({"a": np.ones((40, 1))}), share=0.0)


def test_parts_are_the_whole(tmp_path):
    data = fl.simulator(PROCESS, jnp.zeros(2), jnp.asarray(T))(jax.random.key(1), THETA, 57)
    insitu.files.save(
        tmp_path / "r.nc",
        insitu.files.Description(T, ("a", "b"), parameters=THETA),
        np.asarray(data.x),
    )
    with insitu.files.open(tmp_path / "r.nc") as r:
        whole = insitu.estimate(r, PROCESS, OBJECTIVE, baseline="none", chunk_bytes=10 * 51 * 2 * 8)
    each = np.array([len(range(k, 57, PARTS)) for k in range(PARTS)])
    np.testing.assert_allclose(each @ whole.parts / 57, whole.estimate.gradient["a"], rtol=1e-9)


# ------------------------------------------------------------------------------------- the interval


def turning(dt, ratio, **options):
    """Two components that turn into each other at rate 1, the second with `ratio` times the
    noise power.
    """
    process = fl.Process(
        lambda th, x: jnp.array([[-0.1, 1.0], [-1.0, -0.1]]) @ x, lambda th, x: jnp.ones(2)
    )
    data = fl.Trajectories(dt * np.arange(20), np.random.default_rng(0).normal(size=(3, 20, 2)))
    return judge_sampling(process, {"k": jnp.zeros(())}, data, np.array([1.0, ratio]), **options)


def test_loud_neighbours_ask_for_faster_sampling():
    """K + Kᵀ = [[−0.2, √q − 1/√q], [·, −0.2]] for a noise ratio q: norm √q − 1/√q + 0.2; ‖J‖ is
    √1.01.
    """
    even, uneven = turning(0.01, 1.0), turning(0.01, 100.0)
    assert even.rate == pytest.approx(np.sqrt(1.01))
    assert even.euler == pytest.approx(0.01 * 0.75 * np.sqrt(1.01))
    assert uneven.euler == pytest.approx(0.01 * 1.5 * (10 - 0.1 + 0.2))
    assert (even.verdict, uneven.verdict) == ("good", "faster")
    assert uneven.longest == pytest.approx(0.05 / 15.15)
    assert turning(0.01, 100.0, local_linear=True).verdict == "good"


def test_readout_asks_for_slower_sampling():
    quiet = turning(0.01, 1.0, observation_variance=np.array([1e-3, 1e-3]))
    assert quiet.readout == pytest.approx(np.full(2, 0.1))
    assert (quiet.verdict, quiet.readout_dominates) == ("good", False)
    loud = turning(0.01, 1.0, observation_variance=np.array([1.2e-2, 1e-3]))
    assert loud.readout_dominates
    assert (loud.shortest, loud.verdict) == (pytest.approx(0.048), "slower")
    assert (
        turning(0.01, 100.0, observation_variance=np.array([2e-2, 0.0])).verdict == "local-linear"
    )
    with pytest.raises(ValueError, match="diffusion .*-1"):
        turning(0.01, -1.0)


# -------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """dX = (a − X)dt + 0.5 dW from 0, reward X_T; ∂J/∂a = 1 − (1 − Δt)^T; and the model file."""
    folder = tmp_path_factory.mktemp("r")
    data = fl.simulator(PROCESS, jnp.zeros(2), jnp.asarray(T))(jax.random.key(3), THETA, 1000)
    insitu.files.save(
        folder / "r.nc",
        insitu.files.Description(T, ("a", "b"), parameters=THETA),
        np.asarray(data.x),
    )
    (folder / "model.py").write_text(MODEL)
    return folder


def invoke(folder, *options):
    return CliRunner().invoke(
        app, ["advise", str(folder / "r.nc"), "--model", f"{folder / 'model.py'}:model", *options]
    )


def test_the_command_agrees_with_the_exact_answer(recording):
    """G = (R − E R) U, both Gaussian: V = Var(R) Var(U) + Cov(R, U)², with Var(U) = 1/σ² = 4
    and Cov the slope.
    """
    report = json.loads(invoke(recording, "--error", "0.2", "--json").output)
    f = (1 - 0.02) ** np.arange(50)
    slope = 0.02 * f.sum()
    variance = 2 * 0.25 * 0.02 * np.sum(f**2) / 0.25 + slope**2
    needed = variance / slope**2 / 0.2**2  # two components: 2 over 2 slope²/V
    whole, signal, error = report["repetitions"]["whole"], *report["repetitions"]["signal"].values()
    assert not whole["at_least"]
    assert abs(signal - 2 * slope**2 / variance) < 4 * error
    assert whole["trajectories"] == pytest.approx(
        needed, rel=4 * error / signal + 0.1
    )  # 0.1: V from 1,000 trajectories, twice 5 %
    assert report["sampling"]["euler"] == pytest.approx(0.06)  # K + Kᵀ = −2


def test_the_command_in_words(recording):
    done = invoke(recording, "--rate", "10", "--error", "0.2")
    assert done.exit_code == 0, done.output
    for words in ("HOW MANY REPETITIONS", "at 10 Hz", "None seen", "The interval is right"):
        assert words in done.output


def test_a_file_of_another_model_is_reported_in_words(recording):
    np.savez(recording / "other.npz", a=np.array([1.5, -1.5]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = invoke(recording, "--params", str(recording / "other.npz"))
    assert done.exit_code == 0, done.output
    assert "→ the file is not of this model" in done.output


def test_parameters_as_calibrated(recording, tmp_path):
    """The file has a = (1.5, −1.5), and its trajectories are those of a = (0.3, −0.2)."""
    shutil.copy(recording / "model.py", tmp_path)
    with insitu.files.open(recording / "r.nc") as r:
        head = dataclasses.replace(r.description, parameters={"a": np.array([1.5, -1.5])})
        insitu.files.save(tmp_path / "r.nc", head, r.x[:])
    words = ["--model", f"{tmp_path / 'model.py'}:model", "--write", "--set", "bias=false"]
    done = CliRunner().invoke(app, ["calibrate", str(tmp_path / "r.nc"), *words])
    assert done.exit_code == 0, done.output
    as_set = invoke(tmp_path).output
    assert "→ the file is not of this model" in as_set
    assert "--set theta=calibrated" in as_set
    fitted = invoke(tmp_path, "--set", "theta=calibrated")
    assert fitted.exit_code == 0, fitted.output
    assert "not of this model" not in fitted.output
    np.savez(tmp_path / "a.npz", a=np.zeros(2))
    two = invoke(tmp_path, "--set", "theta=calibrated", "--params", str(tmp_path / "a.npz"))
    assert "two sources of the parameters" in two.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trajectories", "9"], "a recording has the noise that it has"),
        (["--set", "sigma_w=0.1"], "no key 'sigma_w' here; keys are dt, scale, noise, theta"),
        (["--set", "theta=calibrated"], "has no calibration in it"),
        (["--set", "theta=fitted"], "one of set, calibrated; got 'fitted'"),
        (["--score", "exact"], "one of auto, euler, local-linear"),
    ],
)
def test_what_is_wrong_is_said(recording, options, message):
    done = invoke(recording, *options)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "binned"}, 'needs the baseline "time" or "none"'),
        ({"noise": "file"}, "--write"),
        ({"share": 2.0}, "`share` in"),
    ],
)
def test_options_of_the_library_are_checked(recording, options, message):
    model = insitu.files.RecordingModel(PROCESS, OBJECTIVE, THETA)
    with insitu.files.open(recording / "r.nc") as r, pytest.raises(ValueError, match=message):
        insitu.advise_file(r, model, **options)


@pytest.mark.long
def test_a_trap_hears_nothing_of_resonators(tmp_path):
    """Samples a tenth of a relaxation time apart, in a trap: Euler is off by 30 %, and no Kerr
    effect is in it.
    """
    t = np.linspace(0, 2, 21)
    x = np.asarray(
        fl.simulator(PROCESS, jnp.zeros(2), jnp.asarray(t))(jax.random.key(4), THETA, 40).x
    )
    insitu.files.save(
        tmp_path / "r.nc", insitu.files.Description(t, ("a", "b"), parameters=THETA), x
    )
    (tmp_path / "model.py").write_text(MODEL)
    for score in ("euler", "local-linear"):
        done = invoke(tmp_path, "--error", "0.02", "--score", score)
        assert done.exit_code == 0, done.output
        assert "wΔt = 0.1" in done.output
        assert "Kerr" not in done.output
        assert "resonator" not in done.output
