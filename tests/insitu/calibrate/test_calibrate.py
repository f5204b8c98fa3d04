"""Calibration against systems whose numbers are known, in units of standard error."""

import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu, tcmt
from fluctua.cli.app import app
from fluctua.core import check
from fluctua.core.scores import local_linear
from fluctua.insitu.calibrate.network import make_linear_model
from fluctua.insitu.calibrate.report import describe
from fluctua.insitu.calibrate.table import read_noise, tabulate_calibration
from problems import flat, tolerance

A, B, SIGMA = np.array([[-0.8, 1.0], [-1.2, -0.5]]), np.array([0.3, -0.2]), np.array([0.5, 0.7])
THETA = {"a": jnp.asarray(A), "b": jnp.asarray(B)}
PROCESS = fl.Process(lambda th, x: th["a"] @ x + th["b"], lambda th, x: jnp.asarray(SIGMA))
OBJECTIVE = fl.Objective(running=lambda th, x: x[0] ** 2)


def linear(count=192, steps=200, dt=0.01, seed=0, noise=None, observed=0.0, every=1):
    """Euler steps of dx = (Ax + b)dt + σ dW. noise: (rng, x) -> kicks of unit variance, if not
    white and constant.

    Fits take 64 trajectories at a time: multiples of 64 are of one compiled shape.
    """
    rng = np.random.default_rng(seed)
    x = np.empty((count, steps + 1, 2))
    x[:, 0] = 1.0, 0.0
    kicks = noise or (lambda rng, x: rng.normal(size=x.shape))
    for n in range(steps):
        x[:, n + 1] = x[:, n] + (x[:, n] @ A.T + B) * dt + SIGMA * np.sqrt(dt) * kicks(rng, x[:, n])
    x = x[:, ::every]
    return fl.Trajectories(
        dt * every * np.arange(x.shape[1]), x + observed * rng.normal(size=x.shape)
    )


def compute_z(fit):
    return (flat(fit.theta) - flat(THETA)) / flat(fit.stderr)


# ---------------------------------------------------------------------------------------- the drift


def test_drift_is_found_from_nowhere_in_one_step():
    fit = insitu.calibrate.fit_drift(linear(), PROCESS, jax.tree.map(jnp.zeros_like, THETA))
    assert fit.passes == 2  # the second finds nothing left to do
    assert np.abs(compute_z(fit)).max() < tolerance(6)
    assert 0.7 < np.median(flat(fit.robust_stderr) / flat(fit.stderr)) < 1.4


def test_a_fit_that_has_not_converged_warns():
    """With exp θ as the rate, the first step goes from 0.14 far beyond 0.8."""
    trap = fl.Process(lambda th, x: -jnp.exp(th["log"]) * x, lambda th, x: 0.4 * jnp.ones(1))
    times = jnp.linspace(0.0, 1.0, 21)
    truth = {"log": jnp.log(0.8)}
    data = fl.simulator(trap, jnp.ones(1), times)(jax.random.key(0), truth, 200)
    low = {"log": jnp.array(-2.0)}
    with pytest.warns(RuntimeWarning, match=r"not converged: its last pass, 2, .*most_passes"):
        insitu.calibrate.fit_drift(data, trap, low, most_passes=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = insitu.calibrate.fit_drift(data, trap, low, most_passes=20)
    assert abs(fit.theta["log"] - truth["log"]) < 4 * fit.stderr["log"]


def test_errors_of_the_drift_are_true():
    """z of 12 independent calibrations × 6 coefficients is standard normal."""
    z = np.concatenate(
        [
            compute_z(insitu.calibrate.fit_drift(linear(64, seed=s), PROCESS, THETA))
            for s in range(12)
        ]
    )
    assert kstest(z, "norm").pvalue > 1e-3


@pytest.mark.long
def test_coarse_samples_need_local_linearisation():
    coarse = linear(640, steps=800, dt=0.005, every=100)  # samples 0.5 apart
    ours = insitu.calibrate.fit_drift(coarse, PROCESS, THETA, transition=local_linear)
    assert np.abs(compute_z(ours)).max() < tolerance(6)
    assert np.abs(compute_z(insitu.calibrate.fit_drift(coarse, PROCESS, THETA))).max() > 8


def test_noisy_states_bias_least_squares_and_not_the_instrument():
    """s² = 2.25e-2 against QΔt = 1.25e-3: plain least squares finds damping that is not there."""
    noisy = linear(384, observed=0.15)
    ours = insitu.calibrate.fit_drift(noisy, PROCESS, THETA, noisy_states=True)
    assert np.abs(compute_z(ours)).max() < tolerance(6)
    plain = insitu.calibrate.fit_drift(noisy, PROCESS, THETA)
    assert np.abs(compute_z(plain)).max() > 20


def test_what_the_data_do_not_determine_is_named():
    process = fl.Process(
        lambda th, x: -(th["p"] + th["q"]) * x + th["b"], lambda th, x: jnp.asarray(SIGMA)
    )
    theta = {"p": jnp.array(0.2), "q": jnp.array(0.3), "b": jnp.zeros(2)}
    fit = insitu.calibrate.fit_drift(linear(64), process, theta)
    assert fit.unresolved == ("p", "q")
    assert np.isinf(fit.stderr["p"])
    assert np.isfinite(fit.stderr["b"]).all()


# ---------------------------------------------------------------------------------------- the noise


def test_white_noise_of_the_model_passes():
    fit = insitu.calibrate.fit_noise(linear(), PROCESS, THETA)
    z = (fit.diffusion - SIGMA**2 / 2) / fit.diffusion_stderr
    assert np.abs(z).max() < tolerance(2)
    # Q is a mean of 38,400 squares of normals, each of relative variance 2
    np.testing.assert_allclose(fit.diffusion_stderr / fit.diffusion, np.sqrt(2 / 38_400), rtol=0.3)
    assert not fit.observation_seen
    assert fit.whiteness.min() > 1e-3
    assert np.abs(fit.state_dependence_z).max() < tolerance(4)
    assert abs(fit.correlation[0, 1]) * np.sqrt(38_400) < tolerance(1)


def test_observation_noise_is_told_from_diffusion():
    fit = insitu.calibrate.fit_noise(linear(observed=0.05), PROCESS, THETA)
    assert fit.observation_seen
    assert np.abs((fit.observation_variance - 0.0025) / fit.observation_stderr).max() < tolerance(2)
    assert np.abs((fit.diffusion - SIGMA**2 / 2) / fit.diffusion_stderr).max() < tolerance(2)
    np.testing.assert_allclose(fit.quadratic_variation, SIGMA**2 / 2 + 0.0025 / 0.01, rtol=0.05)
    assert fit.whiteness.min() > 1e-3  # its own memory, of one lag, is not held against it


@pytest.mark.parametrize("observed", [0.0, 0.1])
def test_noise_of_samples_far_apart_is_unmixed(observed):
    """Samples 0.5 apart: kicks have turned from one component into the other, and E[r²]/2Δ is
    no Q of either.
    """
    coarse = linear(1024, steps=2000, dt=0.005, every=100, observed=observed)
    fit = insitu.calibrate.fit_noise(coarse, PROCESS, THETA, transition=local_linear)
    assert fit.observation_seen == bool(observed)
    # the chain's own step of 0.005 changes Q by Δt‖J‖/2 = 0.4 % at most, a fifth of an error and
    # less
    assert np.abs((fit.diffusion - SIGMA**2 / 2) / fit.diffusion_stderr).max() < tolerance(2)
    assert np.abs(
        (fit.observation_variance - observed**2) / fit.observation_stderr
    ).max() < tolerance(2)
    mixed = (fit.quadratic_variation - SIGMA**2 / 2) / fit.quadratic_variation_stderr
    assert np.abs(mixed).max() > 10


def test_observation_noise_too_small_to_be_seen_is_in_the_error_of_the_diffusion():
    """s²/Δt = 8.1e-3 is left in Q: 4.6 and 2.3 of the errors Q√(2/10,000) of its two squares,
    so rms z would be 3.6.
    """
    fits = [
        insitu.calibrate.fit_noise(linear(64, 156, seed=s, observed=0.009), PROCESS, THETA)
        for s in range(40)
    ]
    unseen = [f for f in fits if not f.observation_seen]
    assert len(unseen) > 20
    z = np.array([(f.diffusion - SIGMA**2 / 2) / f.diffusion_stderr for f in unseen])
    assert np.sqrt(np.mean(z**2)) < 2


@pytest.mark.long
@pytest.mark.parametrize("observed", [0.0, 0.1])
def test_white_noise_is_called_white_as_often_as_it_should(observed):
    """p of 60 short recordings is uniform: of lag 8 there are 6 products in 14 steps, and ε
    ties neighbouring lags.
    """
    fits = [
        insitu.calibrate.fit_noise(linear(320, 14, seed=s, observed=observed), PROCESS, THETA)
        for s in range(60)
    ]
    assert all(f.observation_seen == bool(observed) for f in fits)
    assert kstest(np.concatenate([f.whiteness for f in fits]), "uniform").pvalue > 1e-3


def test_coloured_noise_is_not_white():
    memory = {}

    def colour(rng, x):
        fresh = rng.normal(size=x.shape)
        memory["last"] = 0.5 * memory.get("last", 0.0) + np.sqrt(0.75) * fresh
        return memory["last"]

    assert insitu.calibrate.fit_noise(linear(noise=colour), PROCESS, THETA).whiteness.max() < 1e-6


def test_noise_that_depends_on_the_state_is_seen():
    fit = insitu.calibrate.fit_noise(
        linear(noise=lambda rng, x: rng.normal(size=x.shape) * (1 + 0.2 * x)), PROCESS, THETA
    )
    assert np.abs(fit.state_dependence_z).max(axis=1).min() > 8


# ------------------------------------------------------------------------------------ the residuals


def test_residuals_of_a_right_model_are_zero():
    report = insitu.calibrate.examine_residuals(linear(), PROCESS, OBJECTIVE, THETA)
    assert report.p_values.min() > 1e-3
    # nine groups: Student's t with 9 degrees of freedom, 4 errors in 6 components at 2 %; seen
    # once, fixed seed
    assert np.abs(flat(report.bias) / flat(report.bias_stderr)).max() < 5


def test_noisy_states_are_not_taken_for_a_wrong_drift():
    noisy = linear(384, observed=0.1)
    ours = insitu.calibrate.examine_residuals(noisy, PROCESS, OBJECTIVE, THETA, noisy_states=True)
    assert ours.p_values.min() > 1e-3
    assert (
        insitu.calibrate.examine_residuals(noisy, PROCESS, OBJECTIVE, THETA).p_values.max() < 1e-6
    )


@pytest.mark.long
def test_a_wrong_drift_is_found_and_its_bias_foretold():
    wrong = {"a": THETA["a"] + jnp.array([[0.4, 0.0], [0.0, 0.0]]), "b": THETA["b"]}
    data = linear(1536)
    report = insitu.calibrate.examine_residuals(data, PROCESS, OBJECTIVE, wrong)
    assert report.p_values[0] < 1e-6
    assert report.p_values[1] > 1e-3
    assert 0.1 < report.relative[0] < 0.5
    biased = fl.gradient(PROCESS, OBJECTIVE, wrong, data, baseline=fl.baselines.mean())
    right = fl.gradient(PROCESS, OBJECTIVE, THETA, data, baseline=fl.baselines.mean())
    truth = flat(biased.gradient) - flat(
        right.gradient
    )  # same trajectories: its own error is far smaller
    assert np.abs((flat(report.bias) - truth) / flat(report.bias_stderr)).max() < 5
    assert np.abs(flat(report.bias) / flat(report.bias_stderr)).max() > 4


# ------------------------------------------------------------------------------ networks, actuators


def test_linear_model_is_the_network():
    network = tcmt.rectangular(2, 2, gamma=0.1, chi=0.02, omega=0.3)
    task = tcmt.transmission(
        network,
        horizon=1.0,
        dt=0.1,
        sigma_kappa=0.2,
        drive=tcmt.Drive(0, envelope=lambda t: 1 - jnp.exp(-t)),
    )
    theta = tcmt.initial_parameters(jax.random.key(0), network)
    model = make_linear_model(task, theta)
    x = jax.random.normal(jax.random.key(1), (8,))
    sine, cosine = jax.random.normal(jax.random.key(2), (2, 4, 10))
    context = {"sine": sine, "cosine": cosine}
    ours = jax.jit(check.process(model.process).drift)(model.theta, x, 0.7, context)
    np.testing.assert_allclose(
        ours, jax.jit(check.process(task.process).drift)(theta, x, 0.7, context), rtol=1e-12
    )
    np.testing.assert_allclose(
        model.process.noise(model.theta, x), task.process.noise(theta), rtol=1e-12
    )


def network_recording(path, theta, *, seed=0, count=32, **options):
    network = tcmt.chain(3)
    task = tcmt.transmission(network, horizon=2.0, dt=0.01)
    full = {"omega": jnp.zeros(3), "kappa": jnp.ones(2), "chi": jnp.zeros(3), **theta}
    head = insitu.files.describe(task, full, seed=seed, dtype="complex128", **options)
    assert list(insitu.files.record(path, task, head, count))[-1] == count


@pytest.mark.long
def test_network_and_actuator_gains_from_the_command_line(tmp_path):
    """A heater that detunes site 1 by 0.3 a volt, and nothing else."""
    for k, volts in enumerate((0.0, 1.0, 2.0)):
        omega = jnp.array([0.0, 0.3 * volts, 0.0])
        network_recording(
            tmp_path / f"{k}.nc", {"omega": omega}, seed=k, settings={"heater": volts}
        )
    paths = [str(tmp_path / f"{k}.nc") for k in range(3)]
    done = CliRunner().invoke(app, ["calibrate", *paths, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    gains = report["gains"]
    gain, error = np.array(gains["gain"])[:, 0], np.array(gains["stderr"])[:, 0]
    truth = np.where(np.array(gains["parameters"]) == "omega[1]", 0.3, 0.0)
    assert np.abs((gain - truth) / error).max() < tolerance(len(gain))
    assert min(gains["p_values"]) > 1e-3 / len(gain)
    for one in report["files"]:
        fit, set_to = one["fit"], one["expected"]
        z = (flat(fit["theta"]) - flat(set_to)) / flat(fit["stderr"])
        assert np.abs(z).max() < tolerance(3 * len(z))


@pytest.mark.long
def test_report_says_what_is_off_and_what_to_do(tmp_path):
    network_recording(tmp_path / "r.nc", {}, observation_noise=0.05)
    np.savez(tmp_path / "wrong.npz", kappa=np.array([1.2, 1.0]))
    run = CliRunner()
    done = run.invoke(
        app,
        [
            "calibrate",
            str(tmp_path / "r.nc"),
            "--params",
            str(tmp_path / "wrong.npz"),
            "--write",
            "--out",
            str(tmp_path / "fit.npz"),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "not what was set" in done.output
    assert abs(float(re.search(r"--set readout_noise=(\S+?)\.?\n", done.output)[1]) - 0.05) < 0.003
    fitted = np.load(tmp_path / "fit.npz")
    assert abs(fitted["kappa"][0] - 1.0) < 0.05
    with insitu.files.open(tmp_path / "r.nc") as r:
        assert set(r.description.noise) >= {
            "diffusion",
            "diffusion_stderr",
            "observation_variance",
            "observation_stderr",
            "drift_kappa",
        }


@pytest.mark.long
def test_hidden_sites_leave_what_their_neighbours_tell(tmp_path):
    network_recording(tmp_path / "r.nc", {}, observe=[1, 2])
    with insitu.files.open(tmp_path / "r.nc") as r:
        calibration = insitu.calibrate.calibrate_recording(r, insitu.files.load_model(r))
    assert set(calibration.fit.unresolved) == {
        "omega[0]",
        "omega[1]",
        "chi[0]",
        "chi[1]",
        "decay[0]",
        "decay[1]",
        "kappa[0]",
        "drive_re[0]",
        "drive_im[0]",
    }
    known = np.isfinite(flat(calibration.fit.stderr))
    z = (flat(calibration.fit.theta) - flat(calibration.expected))[known] / flat(
        calibration.fit.stderr
    )[known]
    assert np.abs(z).max() < tolerance(len(z))


@pytest.mark.long
def test_what_hidden_sites_do_to_their_neighbours_is_not_called_noise(tmp_path):
    """Site 1 is driven by site 0, which nobody sees: its residual is drift, and tells nothing
    of noise.
    """
    network_recording(tmp_path / "r.nc", {}, observe=[1, 2], observation_noise=0.05)
    with insitu.files.open(tmp_path / "r.nc") as r:
        calibration = insitu.calibrate.calibrate_recording(r, insitu.files.load_model(r))
        text = describe(calibration, r.description.components)
    assert "the noise is the model's" in text
    for alarm in ("not white", "depends on the state:", "is shared"):
        assert alarm not in text
    insitu.files.put_table(tmp_path / "r.nc", "noise", tabulate_calibration(calibration, 32))
    with insitu.files.open(tmp_path / "r.nc") as r:
        variance = read_noise(r.description).observation_variance
    # Re ψ₁, Re ψ₂, Im ψ₁, Im ψ₂: what is not known of site 1 is taken as for site 2
    assert variance[0] == variance[2]
    error = calibration.noise.observation_stderr
    assert np.abs((variance - 0.0025) / error).max() < tolerance(3)


@pytest.mark.long
def test_two_experiments_side_by_side_tell_of_one_device(tmp_path):
    """Isolation: both copies have the same ω, κ, χ, Γ, and each its own drive.

    The file has κ[0] wrong by 10 %.
    """
    network = tcmt.chain(3, chi=0.01)
    task = tcmt.isolation(network, horizon=2.0, dt=0.01)
    theta = {
        "omega": jnp.array([0.1, -0.2, 0.0]),
        "kappa": jnp.array([0.9, 1.1]),
        "chi": jnp.full(3, 0.01),
    }
    model = make_linear_model(task, theta)
    x = jax.random.normal(jax.random.key(1), (12,))
    ours, theirs = (jax.jit(check.process(p).drift) for p in (model.process, task.process))
    np.testing.assert_allclose(
        ours(model.theta, x, 0.7, None), theirs(theta, x, 0.7, None), rtol=1e-12
    )
    np.testing.assert_allclose(
        model.process.noise(model.theta, x), task.process.noise(theta), rtol=1e-12
    )
    head = insitu.files.describe(task, theta, dtype="complex128", seed=2)
    assert list(insitu.files.record(tmp_path / "r.nc", task, head, 32))[-1] == 32
    insitu.files.put_table(tmp_path / "r.nc", "parameters", {**theta, "kappa": [1.0, 1.1]})
    with insitu.files.open(tmp_path / "r.nc") as r:
        calibration = insitu.calibrate.calibrate_recording(
            r, insitu.files.load_model(r), bias=False
        )
    assert calibration.fit.unresolved == ()
    assert len(calibration.fit.theta["drive_re"]) == 2
    z = (flat(calibration.fit.theta) - flat(model.theta)) / flat(calibration.fit.stderr)
    assert np.abs(z).max() < tolerance(len(z))
    set_to = (0.9 - 1.0) / float(calibration.fit.stderr["kappa"][0])
    assert (
        abs(set_to) > 10
    )  # so that the fit, which is right, cannot be the start that it was given
    assert np.abs(
        (calibration.noise.diffusion - calibration.model_diffusion)
        / calibration.noise.diffusion_stderr
    ).max() < tolerance(12)


def test_gains_need_settings_that_differ():
    fit = insitu.calibrate.fit_drift(linear(64), PROCESS, THETA)
    with pytest.raises(ValueError, match="span 0 dimensions"):
        insitu.calibrate.actuator_gains([{"v": 1.0}, {"v": 1.0}], [fit, fit])
    with pytest.raises(ValueError, match="recording 1 has no setting of v"):
        insitu.calibrate.actuator_gains([{"v": 1.0}, {}], [fit, fit])


# ------------------------------------------------------------------ drifts that tell their features


@pytest.mark.parametrize(
    ("make", "frame"), [(tcmt.transmission, "rotating"), (tcmt.isolation, "lab")]
)
def test_entries_are_the_derivatives_of_the_drift(make, frame):
    network = tcmt.rectangular(2, 3)
    task = make(network, horizon=0.1, dt=0.01, sigma_kappa=0.2, frame=frame)
    theta = {
        "omega": np.linspace(-1, 1, 6),
        "kappa": np.linspace(0.5, 1.5, 7),
        "chi": np.linspace(-0.1, 0.1, 6),
    }
    model = make_linear_model(task, theta)
    rng = np.random.default_rng(0)
    width = 12 * task.copies
    x, t = rng.normal(size=width), 0.3
    shape = (task.copies * len(network.bonds), task.modulation.harmonics)
    context = {"sine": rng.normal(size=shape), "cosine": rng.normal(size=shape)}
    drift, entry = model.process.drift, model.process.drift.entries(model.theta)
    jacobian = np.zeros((width, sum(np.size(v) for v in model.theta.values())))
    np.add.at(
        jacobian,
        (entry.row, entry.parameter),
        entry.value * np.asarray(drift.features(x, t, context))[entry.feature],
    )
    exact = jax.jit(jax.jacfwd(drift))(jax.tree.map(jnp.asarray, model.theta), x, t, context)
    np.testing.assert_allclose(
        jacobian, np.concatenate([exact[name] for name in sorted(exact)], axis=1), atol=1e-12
    )


@pytest.mark.long
@pytest.mark.parametrize("noisy", [False, True])
def test_features_change_nothing_but_the_time(noisy):
    """The same θ̂, errors and unresolved parameters as by autodiff at every step, with a
    component left out too.
    """
    network = tcmt.rectangular(2, 2)
    task = tcmt.transmission(network, horizon=0.5, dt=0.01, sigma_kappa=0.1)
    theta = {"omega": jnp.linspace(-1, 1, 4), "kappa": jnp.ones(4), "chi": jnp.full(4, 0.01)}
    data = task.simulator()(jax.random.key(0), theta, 32)
    model, usable = make_linear_model(task, theta), np.array([1, 1, 0, 1] * 2)
    options = {"diffusion": np.full(8, 0.3), "noisy_states": noisy, "usable": usable}
    ours = insitu.calibrate.fit_drift(data, model.process, model.theta, **options)
    plain = fl.Process(lambda th, x, t, c: model.process.drift(th, x, t, c), model.process.noise)
    slow = insitu.calibrate.fit_drift(data, plain, model.theta, **options)
    for a, b in (
        (ours.theta, slow.theta),
        (ours.stderr, slow.stderr),
        (ours.robust_stderr, slow.robust_stderr),
    ):
        np.testing.assert_allclose(flat(a), flat(b), rtol=1e-6, atol=1e-9)
    assert ours.unresolved == slow.unresolved == ("chi[2]", "decay[2]", "omega[2]")
