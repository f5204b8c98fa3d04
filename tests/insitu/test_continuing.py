"""One long record of a steady state: its stretches, gradient, calibration and advice, against
exact answers.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu, tcmt
from fluctua.cli.app import app
from fluctua.core import check
from fluctua.processes.stationary import stationary
from problems import flat, tolerance
from steady import steady_average, steady_record

DT = 0.05
THETA = {"k": jnp.array(1.5), "c": jnp.array(0.8)}
PROCESS = fl.Process(
    lambda th, x: jnp.stack([-th["k"] * x[0] + th["c"] * x[1], -th["c"] * x[0] - x[1] + 0.4]),
    lambda th, x: jnp.array([0.5, 0.7]),
)
SQUARE = lambda th, x: x[0] ** 2 + x[0]
OBJECTIVE = fl.Objective(running=SQUARE)
MODEL = insitu.files.RecordingModel(PROCESS, OBJECTIVE, THETA)
SOURCE = """
import fluctua as fl, jax.numpy as jnp
from fluctua.insitu.files import RecordingModel
process = fl.Process(
    lambda th, x: jnp.stack([-th["k"] * x[0] + th["c"] * x[1], -th["c"] * x[0] - x[1] + 0.4]),
    lambda th, x: jnp.array([0.5, 0.7]),
)
objective = fl.Objective(running=lambda th, x: x[0] ** 2 + x[0])
model = RecordingModel(process, objective)
"""


@functools.cache
def exact():
    return jax.jit(jax.grad(lambda th: steady_average(PROCESS, SQUARE, th, DT, 2)))(THETA)


def save(path, x, t=None):
    t = DT * np.arange(x.shape[1]) if t is None else t
    insitu.files.save(
        path, insitu.files.Description(t, ("a", "b"), parameters=THETA), np.asarray(x)
    )
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    data = steady_record(PROCESS, THETA, DT, 2, jax.random.key(5), 40_000)
    path = save(tmp_path_factory.mktemp("trace") / "trace.nc", data.x)
    with insitu.files.open(path) as recording:
        yield recording


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(SOURCE)
    return f"{path}:model"


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


# ---------------------------------------------------------------------------------------- stretches


def test_a_cut_recording_is_the_same_samples(tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 11, 2))
    head = insitu.files.Description(
        DT * np.arange(11), ("a", "b"), context={"f": ()}, parameters=THETA
    )
    insitu.files.save(tmp_path / "r.nc", head, x, {"f": np.array([3.0, 4.0])})
    with insitu.files.open(tmp_path / "r.nc") as recording:
        cut = recording.cut(3)
        assert cut.x.shape == (6, 4, 2)
        np.testing.assert_array_equal(
            cut.x[:], [one[3 * k : 3 * k + 4] for one in x for k in range(3)]
        )
        np.testing.assert_array_equal(cut.x[4, 1:3], x[1, 4:6])
        np.testing.assert_array_equal(cut.x[1:5:2, 0], x[[0, 1], [3, 0]])
        assert cut.x[3:3].shape == (0, 4, 2)
        np.testing.assert_array_equal(cut.context["f"], [3, 3, 3, 4, 4, 4])
        np.testing.assert_array_equal(cut.t, recording.t[:4])
        with pytest.raises(ValueError, match=r"1 to 10 steps .* got 11"):
            recording.cut(11)


def test_stretches_are_ten_correlation_times_long(trace):
    pieces = insitu.files.split_record(trace, MODEL)
    assert pieces.length == pytest.approx(10 * pieces.memory, rel=0.01)
    assert pieces.recording.count == 2000 // pieces.length
    # eigenvalues of the drift: both components are correlated over about 1/Re λ, twice that
    # integrated
    rate = np.abs(np.linalg.eigvals(np.array([[-1.5, 0.8], [-0.8, -1.0]])).real).min()
    assert 0.5 < pieces.memory * rate / 2 < 1.5
    assert pieces.effective == pytest.approx(2000 / pieces.autocorrelation_time)


def test_short_records_and_drifts_that_depend_on_time_are_refused(tmp_path, trace):
    with insitu.files.open(save(tmp_path / "short.nc", trace.x[:, :200])) as short:
        with pytest.raises(
            ValueError, match=r"too short: 1 × 9\.95 .* correlated over .* 20 stretches of 2"
        ):
            insitu.files.split_record(short, MODEL)
        with pytest.raises(ValueError, match=r"longer than two windows|too short"):
            insitu.estimate_continuing(short, MODEL)
    driven = fl.Process(lambda th, x, t: -th["k"] * x + jnp.sin(t), PROCESS.noise)
    with pytest.raises(ValueError, match="depends on time"):
        insitu.files.split_record(trace, insitu.files.RecordingModel(driven, OBJECTIVE, THETA))
    with pytest.raises(ValueError, match="`running`"):
        insitu.estimate_continuing(trace, MODEL._replace(objective=fl.Objective(terminal=SQUARE)))


# ----------------------------------------------------------------------------------------- gradient


def test_the_gradient_of_a_file_is_that_of_its_record(trace):
    answer = insitu.estimate_continuing(trace, MODEL)
    same = stationary(PROCESS, SQUARE, THETA, trace.trajectories(load=True))
    np.testing.assert_array_equal(flat(answer.estimate.gradient), flat(same.estimate.gradient))
    assert np.abs(
        (flat(answer.estimate.gradient) - flat(exact())) / flat(answer.estimate.stderr)
    ).max() < tolerance(2)
    assert answer.residuals.cause == ""
    assert answer.continuing.window == same.window
    twin = insitu.estimate_continuing(trace, MODEL, baseline="twin")
    assert np.abs(
        (flat(twin.estimate.gradient) - flat(exact())) / flat(twin.estimate.stderr)
    ).max() < tolerance(2)
    assert (flat(twin.estimate.stderr) < flat(answer.estimate.stderr)).all()


@pytest.mark.long
def test_observation_noise_is_corrected_for(tmp_path):
    """s² is 7 and 14 times QΔt: the kick and the reward after it share the noise of a sample."""
    s, rng = 0.3, np.random.default_rng(3)
    average = float(steady_average(PROCESS, SQUARE, THETA, DT, 2))
    x = np.asarray(steady_record(PROCESS, THETA, DT, 2, jax.random.key(8), 200_000).x)
    z = {}
    with insitu.files.open(save(tmp_path / "noisy.nc", x + s * rng.normal(size=x.shape))) as noisy:
        for name, variance in (("corrected", s**2), ("not", None)):
            with pytest.warns(RuntimeWarning) if variance is None else _nothing():
                answer = insitu.estimate_continuing(
                    noisy, MODEL, window=3.0, observation_noise=variance
                )
            off = [
                *(flat(answer.estimate.gradient) - flat(exact())),
                float(answer.estimate.value) - average,
            ]
            z[name] = np.array(off) / [
                *flat(answer.estimate.stderr),
                float(answer.estimate.value_stderr),
            ]
    assert np.abs(z["corrected"]).max() < tolerance(3)
    assert np.abs(z["not"][:2]).max() > 6
    assert z["not"][2] > 6


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


CHAIN = tcmt.transmission(tcmt.chain(3, sigma_w=0.5), horizon=240.0, dt=0.02)
SET = {"omega": jnp.array([0.3, -0.2, 0.1]), "kappa": jnp.array([1.0, 0.8])}


def steady_chain():
    """J and ∂J of the chain's steady state, as a fraction of the power sent in."""
    running = check.objective(CHAIN.objective).running
    power = lambda th, x: 240.0 * running(th, x, jnp.zeros(()), None)
    average = lambda th: steady_average(CHAIN.process, power, th, 0.02, 6)
    return jax.jit(jax.value_and_grad(average))(SET)


def chain_trace(path, seed, **options):
    head = insitu.files.describe(CHAIN, SET, seed=seed, dtype="complex128", settle=30.0, **options)
    assert list(insitu.files.record(path, CHAIN, head, 1)) == [1]
    return path


@pytest.mark.long
def test_errors_of_network_traces_cover(tmp_path):
    """z of 12 traces × 5 components, against the Lyapunov equation."""
    value, gradient = steady_chain()
    z = []
    for seed in range(12):
        with insitu.files.open(chain_trace(tmp_path / f"{seed}.nc", seed)) as recording:
            answer = insitu.estimate_continuing(
                recording, insitu.files.load_model(recording), window=6.0
            )
        e = answer.estimate
        z.append(
            [
                *(flat(e.gradient) - flat(gradient)) / flat(e.stderr),
                (e.value - value) / e.value_stderr,
            ]
        )
    z = np.array(z)
    # components of one trace err together: 12 independent values of each
    assert np.all(np.abs(z.mean(axis=0)) < 4 / np.sqrt(12))
    assert np.mean(z**2) < 1 + 4 * np.sqrt(2 / 12)
    assert np.mean(z**2) > 0.3


@pytest.mark.long
def test_hidden_channels_leave_the_others_as_they_are(tmp_path):
    answers = {}
    for name, observe in (("all", None), ("some", [1, 2])):
        with insitu.files.open(chain_trace(tmp_path / name, 3, observe=observe)) as recording:
            answers[name] = insitu.estimate_continuing(
                recording, insitu.files.load_model(recording), window=6.0
            )
    view = answers["some"].view
    assert set(view.missing) == {"omega[0]", "omega[1]", "kappa[0]", "kappa[1]"}
    whole, part = (flat(answers[name].estimate.gradient) for name in ("all", "some"))
    np.testing.assert_allclose(part[view.trainable], whole[view.trainable], rtol=1e-9)
    assert np.isnan(part[~view.trainable]).all()
    assert np.isfinite(flat(answers["some"].continuing.bias_bound)[view.trainable]).all()


def test_a_settled_record_is_the_end_of_a_longer_one(tmp_path):
    short = tcmt.transmission(CHAIN.network, horizon=2.0, dt=0.02)
    head = insitu.files.describe(short, SET, seed=4, every=5, settle=1.03, dtype="complex128")
    assert int(head.simulation["settle"]) == 55  # whole samples
    list(insitu.files.record(tmp_path / "r.nc", short, head, 2))
    long = short._replace(t=0.02 * np.arange(156))
    key = jax.random.split(jax.random.key(4))[0]
    x = long.simulator()(key, SET, 2).x[:, ::5][:, -21:]
    with insitu.files.open(tmp_path / "r.nc") as recording:
        np.testing.assert_allclose(recording.x[:], x, atol=1e-12)
    with pytest.raises(ValueError, match="`settle`.*-1"):
        insitu.files.describe(short, SET, settle=-1.0)


# -------------------------------------------------------------------------------------- calibration


@pytest.mark.long
def test_a_calibration_from_one_trace(trace):
    calibration = insitu.calibrate.calibrate_recording(trace, MODEL)
    z = (flat(calibration.fit.theta) - flat(THETA)) / flat(calibration.fit.stderr)
    assert np.abs(z).max() < tolerance(2)
    q = np.array([0.5, 0.7]) ** 2 / 2
    assert np.abs(
        (calibration.noise.diffusion - q) / calibration.noise.diffusion_stderr
    ).max() < tolerance(2)
    assert calibration.stretches.recording.count == calibration.fit.trajectories
    assert calibration.residuals.p_values.min() > 1e-3
    assert np.abs(
        flat(calibration.residuals.bias) / flat(calibration.residuals.bias_stderr)
    ).max() < tolerance(2)


@pytest.mark.long
def test_the_bias_of_a_wrong_model_is_what_it_does_to_the_long_run_gradient(tmp_path):
    data = steady_record(PROCESS, THETA, DT, 2, jax.random.key(6), 200_000)
    wrong = fl.Process(
        lambda th, x: PROCESS.drift(th, x) + jnp.stack([0.3 * x[0], 0.0]), PROCESS.noise
    )
    window = 4.0
    right, biased = (
        stationary(process, SQUARE, THETA, data, window=window) for process in (PROCESS, wrong)
    )
    stretches = insitu.files.open(save(tmp_path / "long.nc", data.x)).cut(1000)
    report = insitu.calibrate.examine_residuals(
        stretches, wrong, OBJECTIVE, THETA, window=round(window / DT), components=("a", "b")
    )
    difference = flat(biased.estimate.gradient) - flat(right.estimate.gradient)
    # the same kicks are in both gradients: their difference is known better than either
    error = np.hypot(
        flat(report.bias_stderr),
        (biased.batches - right.batches).std(axis=0) / np.sqrt(len(right.batches)),
    )
    assert np.abs((flat(report.bias) - difference) / error).max() < tolerance(2)
    assert np.abs(flat(report.bias) / flat(report.bias_stderr)).max() > 5


# ------------------------------------------------------------------------------------- command line


@pytest.mark.long
def test_commands_take_a_single_trace(trace, model):
    alone = run("estimate", trace.path, "--model", model)
    assert alone.exit_code == 2
    assert "1 complete trajectories" in alone.stderr
    assert "--continuing" in alone.stderr
    done = run(
        "estimate", trace.path, "--model", model, "--continuing", "--set", "window=4", "--json"
    )
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    z = [(answer["gradient"][n] - float(exact()[n])) / answer["stderr"][n] for n in THETA]
    assert np.abs(z).max() < tolerance(2)
    assert answer["continuing"]["window"] == pytest.approx(4.0)
    assert answer["continuing"]["change"]["z"] < answer["continuing"]["change"]["limit"]
    shown = run("estimate", trace.path, "--model", model, "--continuing")
    assert "independent samples" in shown.stdout
    assert "batches)" in shown.stdout
    for wrong, fact in (
        (("--set", "window=4"), "--continuing"),
        (("--continuing", "--set", "window=soon"), "soon"),
    ):
        refused = run("estimate", trace.path, "--model", model, *wrong)
        assert refused.exit_code == 2
        assert fact in refused.stderr

    calibrated = run("calibrate", trace.path, "--model", model, "--json")
    assert calibrated.exit_code == 0, calibrated.output
    numbers = json.loads(calibrated.stdout)["files"][0]
    assert numbers["stretches"]["count"] * numbers["stretches"]["length"] <= 2000
    text = run(
        "calibrate", trace.path, "--model", model, "--set", "bias=false", "--continuing"
    ).stdout
    assert "RECORD" in text
    assert "stretches" in text

    assert "--continuing" in run("advise", trace.path, "--model", model).stderr
    advice = run("advise", trace.path, "--model", model, "--continuing", "--error", "0.2")
    assert advice.exit_code == 0, advice.output
    assert "HOW LONG A RECORD" in advice.stdout
    numbers = json.loads(
        run("advise", trace.path, "--model", model, "--continuing", "--json").stdout
    )
    assert numbers["continuing"]["duration"] == pytest.approx(2000)
    assert numbers["stretches"]["effective"] > 500


@pytest.mark.long
def test_a_trace_that_drifts_is_named(tmp_path, trace, model):
    ramp = np.linspace(0, 1, 40_001)[:, None]
    refused = run(
        "estimate", save(tmp_path / "steep.nc", trace.x[:] + ramp), "--model", model, "--continuing"
    )
    assert refused.exit_code == 2
    assert "Record for longer" in refused.stderr
    assert "component" in refused.stderr.split("not in a steady state")[1]
    path = save(tmp_path / "drift.nc", trace.x[:] + 0.2 * ramp)
    done = run("estimate", path, "--model", model, "--continuing", "--set", "window=4")
    assert done.exit_code == 0, done.output
    assert "not in a steady state" in done.stderr
    assert (
        run(
            "estimate", path, "--model", model, "--continuing", "--set", "window=4", "--strict"
        ).exit_code
        == 1
    )


@pytest.mark.long
def test_record_settles_on_the_command_line(tmp_path):
    path = tmp_path / "trace.nc"
    options = [
        "--set",
        "lattice.rows=1",
        "--set",
        "lattice.columns=2",
        "--set",
        "task.horizon=600",
        "--set",
        "task.dt=0.05",
        "--settle",
        "20",
        "--set",
        "start.chi_std=0",
    ]
    made = run("record", path, *options, "--trajectories", "1")
    assert made.exit_code == 0, made.output
    assert "--continuing" in made.stdout
    with insitu.files.open(path) as recording:
        assert np.abs(recording.x[0, 0]).max() > 0.1  # not at rest
        assert recording.t[0] == 0
    answer = json.loads(
        run("estimate", path, "--continuing", "--baseline", "twin", "--json").stdout
    )
    network = tcmt.rectangular(1, 2, sigma_w=0.5)
    task = tcmt.transmission(network, horizon=600.0, dt=0.05)
    running = check.objective(task.objective).running
    power = lambda th, x: 600.0 * running(th, x, jnp.zeros(()), None)
    theta = {"omega": jnp.zeros(2), "kappa": jnp.ones(1)}
    average = lambda th: steady_average(task.process, power, th, 0.05, 4)
    gradient = jax.jit(jax.grad(average))(theta)
    z = [
        (np.array(answer["gradient"][n]) - gradient[n]) / np.array(answer["stderr"][n])
        for n in theta
    ]
    assert np.abs(np.concatenate(z)).max() < tolerance(3)
