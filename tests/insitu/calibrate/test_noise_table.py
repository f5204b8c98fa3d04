"""A calibration kept in its recording and used by the estimate, against the exact gradient of a
linear network.
"""

import functools
import json
import re
import signal
import time

import h5py
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu, tcmt
from fluctua.cli.app import app
from fluctua.insitu.calibrate.table import scale_process_noise
from fluctua.tcmt import exact
from forks import start_python
from problems import tolerance

NETWORK = tcmt.chain(3, gamma=0.2)
NOMINAL = tcmt.transmission(NETWORK, horizon=2.0, dt=0.02)
THETA = {"omega": jnp.array([0.3, -0.2, 0.4]), "kappa": jnp.array([0.9, 1.2])}
FACTOR = 1.5
"""Of the true σ_W over the nominal one: Q is 2.25 times what the file's network says."""
TRUE = tcmt.with_noise(NOMINAL, sigma_w=0.5 * FACTOR)


def record(path, task, count, **options):
    """A file that describes NOMINAL, with trajectories of `task`."""
    head = insitu.files.describe(NOMINAL, THETA, dtype="complex128", seed=3, **options)
    assert list(insitu.files.record(path, task, head, count))[-1] == count


def read_report(*arguments):
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def compute_z(answer, gradient):
    names = sorted(gradient)
    pick = lambda table: np.concatenate([np.ravel(table[n]) for n in names])
    return (pick(answer["gradient"]) - pick(gradient)) / pick(answer["stderr"])


@functools.cache
def compute_exact_gradient():
    """∂J at the true noise."""
    return exact.value_and_gradient(TRUE, THETA)[1]


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Twice the noise power and more, seen through detectors with s² = 0.4 QΔt of the quietest
    resonator.
    """
    path = tmp_path_factory.mktemp("r") / "r.nc"
    record(path, TRUE, 1500, observation_noise=0.03)
    written = CliRunner().invoke(app, ["calibrate", str(path), "--set", "bias=false", "--write"])
    assert written.exit_code == 0, written.output
    assert "fluctua estimate uses it" in written.output
    return path


@pytest.mark.long
def test_the_files_own_noise_makes_the_gradient_right(noisy):
    """|z| of five components against the exact gradient at the true noise.

    Q is known to 0.4 %, and the gradient to 5 % at best: what the error of Q adds to an error bar
    is (0.4/5)²/2 of it. The nominal Q makes the gradient 2.25 times too large, which is (1 −
    1/2.25)/5 % = 11 standard errors; the noise of the detectors, left alone, another part.
    """
    gradient = compute_exact_gradient()
    own = read_report("estimate", noisy)
    assert own["used"]["noise"] == "file"
    assert np.abs(compute_z(own, gradient)).max() < tolerance(5)
    np.testing.assert_allclose(own["used"]["diffusion_ratio"], FACTOR**2, rtol=0.03)
    nominal = read_report("estimate", noisy, "--set", "noise=nominal")
    assert nominal["used"]["noise"] == "nominal"
    assert np.abs(compute_z(nominal, gradient)).max() > 8


@pytest.mark.long
def test_the_nominal_noise_is_wrong_by_the_ratio_of_powers(noisy):
    """With the detectors corrected for, what is left of the error is the factor 2.25 and
    nothing else.
    """
    gradient = compute_exact_gradient()
    nominal = read_report(
        "estimate", noisy, "--set", "noise=nominal", "--set", "readout_noise=0.03"
    )
    assert np.abs(
        compute_z(nominal, {n: FACTOR**2 * g for n, g in gradient.items()})
    ).max() < tolerance(5)


@pytest.mark.long
def test_the_table_says_where_it_comes_from(noisy):
    with insitu.files.open(noisy) as r:
        assert r.count == 1500
        table = r.description.noise
        noise = insitu.calibrate.read_noise(r.description)
    assert (table["transition"], int(table["trajectories"])) == ("euler", 1500)
    assert table["software"].startswith("fluctua")
    assert "1,500 trajectories, euler transition" in noise.origin
    assert set(noise.drift) == {"omega", "kappa", "chi", "decay", "drive_re", "drive_im"}
    for name in THETA:
        z = (noise.drift[name] - np.asarray(THETA[name])) / noise.drift_stderr[name]
        assert np.abs(z).max() < tolerance(5)
    done = CliRunner().invoke(app, ["estimate", str(noisy)])
    ratio, spread = re.search(
        r"(\S+) times the model's .* observation noise of (\S+)", done.output
    ).groups()
    assert float(ratio) == pytest.approx(FACTOR**2, rel=0.03)
    assert float(spread) == pytest.approx(0.03, rel=0.1)


@pytest.mark.long
def test_parameters_as_calibrated_where_the_knobs_were_off(tmp_path):
    """The file has κ[0] 20 % too high and the drive 10 % too low: ∂J/∂κ[1] comes out twice too
    large.

    A drift that is wrong by Δμ also puts Δμ times its score on every trajectory, which the returns
    multiply: errors are four times larger, so that the bias is 5 of them and not 20.
    """
    path = tmp_path / "r.nc"
    record(path, NOMINAL, 1500)
    with insitu.files.open(path) as r:
        drive = dict(r.description.drive)
    insitu.files.put_table(path, "parameters", {"omega": THETA["omega"], "kappa": [1.1, 1.2]})
    insitu.files.put_table(path, "drive", {**drive, "amplitude": 0.9 * drive["amplitude"]})
    _, gradient = exact.value_and_gradient(NOMINAL, THETA)
    with insitu.files.open(path) as r:
        table = insitu.calibrate.tabulate_calibration(
            insitu.calibrate.calibrate_recording(r, insitu.files.load_model(r), bias=False), r.count
        )
    insitu.files.put_table(path, "noise", table)
    wrong, right = (
        read_report("estimate", path),
        read_report("estimate", path, "--set", "theta=calibrated"),
    )
    assert compute_z(wrong, gradient)[1] > tolerance(5)
    assert wrong["gradient"]["kappa"][1] > 1.5 * gradient["kappa"][1]
    assert right["stderr"]["kappa"][1] < 0.5 * wrong["stderr"]["kappa"][1]
    assert "theta=calibrated" in " ".join(wrong["used"]["notes"])
    assert np.abs(compute_z(right, gradient)).max() < tolerance(5)


# ------------------------------------------------------------------------ refusals and warnings


def small(path, **noise):
    insitu.files.save(
        path,
        insitu.files.Description(np.arange(5.0), ("a", "b"), parameters={"k": 1.0}, noise=noise),
        np.random.default_rng(0).normal(size=(4, 5, 2)),
    )
    return path


MODEL = insitu.files.RecordingModel(
    fl.Process(lambda th, x: -th["k"] * x, lambda th, x: jnp.array([1.0, 2.0])),
    fl.Objective(terminal=lambda th, x: x[0]),
    {"k": jnp.array(1.0)},
)


def test_the_model_has_its_own_noise_without_a_table_or_where_it_is_asked_for(tmp_path):
    with insitu.files.open(small(tmp_path / "bare.nc")) as r:
        bare = insitu.calibrate.apply_calibration(r, MODEL)
    table = {"diffusion": 2.0, "observation_variance": [0.1, 0.2]}
    with insitu.files.open(small(tmp_path / "r.nc", **table)) as r:
        nominal = insitu.calibrate.apply_calibration(r, MODEL, noise="nominal")
    for applied in (bare, nominal):
        assert applied.model == MODEL
        assert applied.ratio is None
        assert applied.observation_variance is None


def test_a_table_of_somebody_else_will_do(tmp_path):
    with insitu.files.open(
        small(tmp_path / "r.nc", diffusion=2.0, observation_variance=[0.1, 0.2])
    ) as r:
        applied = insitu.calibrate.apply_calibration(r, MODEL)
    np.testing.assert_allclose(applied.ratio, [4.0, 1.0])  # 2 over σ²/2 = 0.5 and 2
    np.testing.assert_allclose(applied.observation_variance, [0.1, 0.2])
    np.testing.assert_allclose(
        applied.model.process.noise(MODEL.theta, jnp.ones(2), 0.0, None), [2.0, 2.0]
    )
    assert "of unknown origin" in applied.notes[0]


@pytest.mark.parametrize(
    ("noise", "options", "message"),
    [
        ({}, {"noise": "file"}, "calibrate .*r.nc --write"),
        ({}, {"theta": "calibrated"}, "calibrate .*r.nc --write"),
        ({"diffusion": [1.0, -0.1]}, {}, "diffusion of -0.1 for b"),
        (
            {"diffusion": [1.0, 2.0, 3.0]},
            {},
            r"each of the 2 components, or one for all; got shape \(3,\)",
        ),
        ({"diffusion": 1.0}, {"theta": "calibrated"}, "no fitted drift"),
        (
            {"diffusion": 1.0, "drift_z": 1.0},
            {"theta": "calibrated"},
            "is of z, and this model has other",
        ),
        ({}, {"noise": "guess"}, "one of auto, file, nominal"),
    ],
)
def test_what_a_table_must_have(tmp_path, noise, options, message):
    with (
        insitu.files.open(small(tmp_path / "r.nc", **noise)) as r,
        pytest.raises(ValueError, match=message),
    ):
        insitu.calibrate.apply_calibration(r, MODEL, **options)


def test_noise_is_scaled_in_all_its_forms():
    """Q -> S Q S whether noise comes as amplitudes, as a matrix, as a product or as a
    matrix-free diffusion.
    """
    from fluctua.core import check
    from fluctua.core.diffusion import diffusion_matrix

    sigma, scale = jnp.array([[1.0, 0.5], [0.0, 2.0]]), np.array([3.0, 0.5])
    q = sigma @ sigma.T / 2
    drift = lambda th, x: -x
    forms = [
        fl.Process(drift, lambda th, x: sigma),
        fl.Process(drift, fl.NoiseProduct(lambda th, x, t, c, dw: sigma @ dw, 2)),
        fl.Process(drift, None, lambda th, x, t, c, v: q @ v),
    ]
    for process in forms:
        scaled_q = diffusion_matrix(
            check.process(scale_process_noise(check.process(process), scale)),
            {},
            jnp.ones(2),
            0.0,
            None,
        )
        np.testing.assert_allclose(scaled_q, np.diag(scale) @ q @ np.diag(scale), rtol=1e-6)


# -------------------------------------------------------------------------------------------- kills

WRITES = """
import sys
import numpy as np
from fluctua.insitu.recording.writer import put_table

print("ready", flush=True)
k = 0
while True:
    table = {"diffusion": np.full(2, k + 1.0), "drift_a": np.full(100, float(k))}
    put_table(sys.argv[1], "noise", table)
    k += 1
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process")
def test_a_kill_while_a_table_is_written_costs_nothing(tmp_path):
    path, rng = tmp_path / "r.nc", np.random.default_rng(1)
    x = rng.normal(size=(30, 50, 2))
    insitu.files.save(path, insitu.files.Description(np.arange(50.0), ("a", "b")), x)
    for _ in range(6):
        child = start_python(WRITES, path)
        assert child.stdout.readline() == "ready\n"
        time.sleep(float(rng.uniform(0.0, 0.1)))
        child.kill()
        assert child.wait() == -signal.SIGKILL
        with h5py.File(path) as file:  # any program opens it, and the table is whole
            np.testing.assert_array_equal(file["x"][:], x)
            if "noise" in file:
                table = file["noise"]
                assert table["diffusion"][0] == table["drift_a"][0] + 1
