"""One estimate from one or several recordings, wherever they are read."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from chaos import Chaos
from fluctua import insitu, tcmt
from fluctua.cli.app import app
from fluctua.insitu import pooling
from fluctua.insitu.estimating import estimate_model
from fluctua.insitu.pooling import EstimateOptions, estimate_files
from fluctua.insitu.recording.model import find_difference

NETWORK = tcmt.rectangular(1, 2, leads=[tcmt.Lead(0, 0.5), tcmt.Lead(1, 0.5)])
TASK = tcmt.transmission(NETWORK, horizon=0.5, dt=0.01)
THETA = tcmt.initial_parameters(jax.random.key(1), NETWORK)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    paths = [folder / f"{n}.nc" for n in range(4)]
    for n, path in enumerate(paths):
        head = insitu.files.describe(
            TASK, THETA if n < 3 else {**THETA, "kappa": 2 * THETA["kappa"]}, every=1, seed=n
        )
        for _ in insitu.files.record(path, TASK, head, 30):
            pass
    return paths


def leaves(estimate):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(estimate)]


def test_the_pool_is_the_mean_of_its_files(files):
    each = []
    for path in files[:3]:
        with insitu.files.open(path) as recording, jax.enable_x64(False):  # as it was recorded
            each.append(
                estimate_model(
                    recording, insitu.files.load_model(recording), baseline="time"
                ).estimate
            )
    pooled = estimate_files(files[:3]).result.estimate
    assert pooled.count == 90
    for name, value in pooled.gradient.items():
        mean = sum(e.count * np.asarray(e.gradient[name], np.float64) for e in each) / pooled.count
        np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-9)


def test_one_file_is_its_own_estimate(files):
    """The bits of `estimate_model`, and trajectories are counted as they are read."""
    counts = []
    one = estimate_files(files[:1], progress=lambda *count: counts.append(count)).result
    with insitu.files.open(files[0]) as recording, jax.enable_x64(False):
        expected = estimate_model(recording, insitu.files.load_model(recording), baseline="time")
    for a, b in zip(leaves(one.estimate), leaves(expected.estimate), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.parts, expected.parts)
    assert counts[-1] == (60, 60)


def test_the_same_bits_wherever_files_are_read(files, monkeypatch):
    expected = estimate_files(files[:3]).result.estimate
    pool = Chaos(EstimateOptions(), 3, seed=4, risk=0.3)
    monkeypatch.setattr(pooling, "Cluster", lambda *arguments: pool)
    actual = estimate_files(files[:3], cluster="there").result.estimate
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert pool.deaths
    assert not pool.alive


def test_other_settings_are_refused(files):
    with pytest.raises(ValueError, match=r"`kappa\[0\]` is .* in .*0\.nc and .* in .*3\.nc"):
        estimate_files([files[0], files[3]])


def test_the_command_pools(files, tmp_path):
    expected = estimate_files(files[:2]).result.estimate
    command = ["estimate", *map(str, files[:2]), "--json", "--out", str(tmp_path / "g.npz")]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    numbers = json.loads(ended.stdout)
    assert numbers["trajectories"] == 60
    assert [one["trajectories"] for one in numbers["files"]] == [30, 30]
    np.testing.assert_array_equal(
        numbers["gradient"]["kappa"], np.asarray(expected.gradient["kappa"]).tolist()
    )
    with np.load(tmp_path / "g.npz") as written:
        np.testing.assert_array_equal(written["gradient.omega"], expected.gradient["omega"])
    refused = CliRunner().invoke(app, ["estimate", *map(str, files[:2]), "--continuing"])
    assert refused.exit_code != 0
    assert "longer than two windows" in refused.output  # joined, and too short still


# ------------------------------------------------------------------- θ in the model and in the file

MODEL = """
import fluctua as fl, jax.numpy as jnp
from fluctua.insitu.files import RecordingModel
process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: 0.5 * jnp.ones(1))
objective = fl.Objective(terminal=lambda th, x: x[0])
model = RecordingModel(process, objective)
"""


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    """Recordings of a trap at k = 0.5, 1, 2 and 4, and models: none.py without `theta`, k1.py
    with k = 1.
    """
    folder, t = tmp_path_factory.mktemp("traps"), np.linspace(0, 1, 21)
    process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: 0.5 * jnp.ones(1))
    run = fl.simulator(process, jnp.ones(1), jnp.asarray(t))
    for k in (0.5, 2, 4, 1):  # the last is what k1.py expects, without parameters
        x = np.asarray(run(jax.random.key(1), {"k": jnp.array(float(k))}, 40).x)
        head = insitu.files.Description(
            t, ("x",), parameters={"k": float(k)}, settings={"laser": 10.0 * k}
        )
        insitu.files.save(folder / f"{k}.nc", head, x)
    insitu.files.save(folder / "bare.nc", insitu.files.Description(t, ("x",)), x)
    insitu.files.save(
        folder / "bare_50.nc", insitu.files.Description(t, ("x",), settings={"laser": 50.0}), x
    )
    insitu.files.save(
        folder / "bare_60.nc", insitu.files.Description(t, ("x",), settings={"laser": 60.0}), x
    )
    (folder / "none.py").write_text(MODEL)
    (folder / "k1.py").write_text(MODEL + 'model = model._replace(theta={"k": jnp.array(1.0)})\n')
    np.savez(folder / "k1.npz", k=1.0)
    return folder


def invoke(folder, command, names, *options):
    return CliRunner().invoke(app, [command, *(str(folder / name) for name in names), *options])


@pytest.mark.parametrize("command", ["estimate", "calibrate", "advise"])
def test_a_model_does_not_override_the_parameters_of_a_recording(traps, command):
    done = invoke(traps, command, ["2.nc"], "--model", f"{traps / 'k1.py'}:model")
    assert done.exit_code == 2
    words = " ".join(done.output.split())
    assert "`k` is 2.0 in" in words
    assert "and 1.0 in the `theta` of" in words


def test_a_model_that_agrees_with_its_recording_is_read(traps):
    """1.0 in single precision is 1.0 in double; a recording without parameters has those of the
    model.
    """
    answers = [
        json.loads(
            invoke(
                traps, "estimate", ["1.nc"], "--model", f"{traps / model}:model", "--json"
            ).stdout
        )
        for model in ("k1.py", "none.py")
    ]
    assert answers[0]["gradient"] == answers[1]["gradient"]
    with insitu.files.open(traps / "bare.nc") as recording:
        assert insitu.files.load_model(recording, f"{traps / 'k1.py'}:model").theta == {"k": 1.0}


@pytest.mark.parametrize(
    "options", [["--model", "k1.py:model"], ["--model", "none.py:model", "--params", "k1.npz"]]
)
def test_four_settings_are_not_pooled(traps, options):
    options = [str(traps / option) if "." in option else option for option in options]
    done = invoke(traps, "estimate", ["1.nc", "0.5.nc", "2.nc", "4.nc"], *options)
    assert done.exit_code == 2
    words = "".join(done.output.split())  # paths are broken across lines
    assert "`k`is0.5in" in words or "`k`is1.0in" in words
    assert "0.5.nc" in words


def test_other_actuators_are_not_pooled(traps):
    """Files without parameters that have those of the model: what the actuators were set to
    still differs.
    """
    files = [traps / "bare_50.nc", traps / "bare_60.nc"]
    with pytest.raises(
        ValueError, match=r"`laser` is 50\.0 in .*bare_50\.nc and 60\.0 in .*bare_60\.nc"
    ):
        estimate_files(files, EstimateOptions(model=f"{traps / 'k1.py'}:model"))
    assert (
        estimate_files(
            [files[0], traps / "bare.nc"], EstimateOptions(model=f"{traps / 'k1.py'}:model")
        ).result.estimate.count
        == 80
    )


def test_values_are_compared_in_the_lower_precision():
    assert find_difference("k", np.float32(0.1), 0.1) is None
    assert find_difference("k", 0.1, 0.1 + 2e-17 + 1e-16) is not None
    assert find_difference("w", np.array([1, 2]), np.array([1.0, 3.0])) == ("w[1]", "2.0", "3.0")
    assert find_difference("k", "left", "right") == ("k", "'left'", "'right'")
