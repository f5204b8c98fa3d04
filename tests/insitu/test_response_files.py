"""`fluctua estimate --continuing --response` on files, against the library and exact answers."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
import ring
from fluctua.cli.app import app
from fluctua.insitu.recording.writer import put_table
from fluctua.store import tables

THETA = {"torque": 1.0, "amplitude": 1.5, "D": 0.5}
DT = 0.02
TURN = f"{2 * np.pi!r}"
MODEL = """
import jax.numpy as jnp, fluctua as fl
from fluctua.insitu.files import RecordingModel
process = fl.Process(
    drift=lambda p, x: p["torque"] + p["amplitude"] * jnp.sin(x),
    noise=lambda p, x: jnp.sqrt(2 * p["D"]) * jnp.ones(1),
)
model = RecordingModel(process, fl.Objective(running=lambda p, x: jnp.sin(x[0])))
"""


def write_record(path, seed, theta=THETA, steps=4000):
    x = ring.simulate(THETA, DT, steps, 4, seed)
    parameters = {f"parameters.{name}": np.array(value) for name, value in theta.items()}
    np.savez(path, x=x, t=DT * np.arange(steps + 1), **parameters)
    return fl.Trajectories(DT * np.arange(steps + 1), x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("response")
    (path / "ring.py").write_text(MODEL)
    write_record(path / "one.npz", 0)
    write_record(path / "two.npz", 1, steps=3000)
    write_record(path / "other.npz", 2, {**THETA, "torque": 1.1})
    return path


def invoke(folder, monkeypatch, *words):
    monkeypatch.chdir(folder)
    line = ["estimate", *words, "--model", "ring.py:model", "--continuing", "--response"]
    return CliRunner().invoke(app, line)


def test_files_are_one_record(folder, monkeypatch, tmp_path):
    """The table of two files has the exact response within its errors; fitted values too."""
    keys = ["--set", f"period={TURN}", "--set", "window=1", "--set", "fit=torque,amplitude,D"]
    out = tmp_path / "chi.csv"
    done = invoke(folder, monkeypatch, "one.npz", "two.npz", *keys, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "fitted in 5 folds" in done.output
    assert f"written to {out}" in done.output
    columns = tables.read(out).columns
    exact = ring.exact_response(*THETA.values(), DT, 50)
    assert columns["t"][-1] == pytest.approx(1.0)
    for i, name in enumerate(THETA):
        z = (columns[name] - exact[:, i])[1:] / columns[f"{name} stderr"][1:]
        assert np.all(np.abs(z) < 4), name


def test_json_table_and_figure(folder, monkeypatch, tmp_path):
    keys = ["--set", f"period={TURN}", "--set", "window=0.4", "--set", "stride=[1,2]", "--json"]
    keys += ["--set", f"figure={tmp_path / 'chi.png'}", "--out", str(tmp_path / "chi.npz")]
    done = invoke(folder, monkeypatch, "one.npz", *keys)
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)
    assert [one["stride"] for one in numbers["responses"]] == [1, 2]
    assert len(numbers["responses"][1]["columns"]["t"]) == 11
    with np.load(tmp_path / "chi.npz") as arrays:
        expected = numbers["responses"][0]["columns"]["torque"]
        np.testing.assert_allclose(arrays["torque"], expected)
    assert (tmp_path / "chi.png").stat().st_size > 5000


def test_gaps_are_not_crossed(folder, monkeypatch, tmp_path):
    """Samples that are missing leave pieces, whose response is that of the whole."""
    x = ring.simulate(THETA, DT, 12_000, 1, 4)
    t = DT * np.arange(12_001)
    kept = np.r_[0:5000, 5500:12_001]
    parameters = {f"parameters.{name}": np.array(value) for name, value in THETA.items()}
    np.savez(tmp_path / "gap.npz", x=x[:, kept], t=t[kept], **parameters)
    (tmp_path / "ring.py").write_text(MODEL)
    keys = ["--set", f"period={TURN}", "--set", "window=0.4", "--json"]
    done = invoke(tmp_path, monkeypatch, "gap.npz", *keys)
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)
    assert "cut at 1 jump" in numbers["used"][0]
    columns = numbers["responses"][0]["columns"]
    exact = ring.exact_response(*THETA.values(), DT, 20)[:, 0]
    z = (np.array(columns["torque"]) - exact)[1:] / np.array(columns["torque stderr"])[1:]
    assert np.all(np.abs(z) < 4)


def test_calibration_of_the_file_is_in_the_errors(folder, monkeypatch, tmp_path):
    """θ and its errors in the noise table take the place of those that were set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ring.py").write_text(MODEL)
    write_record(tmp_path / "set.npz", 3, {**THETA, "torque": 0.8})
    runner = CliRunner()
    assert runner.invoke(app, ["convert", "set.npz", "set.nc"]).exit_code == 0
    values = {"torque": 1.0, "amplitude": 1.5, "D": 0.5}
    errors = {"torque": 0.3, "amplitude": 0.0, "D": 0.0}
    table = {"diffusion": np.array([0.5])}
    for name, value in values.items():
        table |= {f"drift_{name}": value, f"drift_{name}_stderr": errors[name]}
    put_table("set.nc", "noise", table)
    keys = ["--set", f"period={TURN}", "--set", "window=0.4", "--json"]
    done = invoke(tmp_path, monkeypatch, "set.nc", *keys, "--set", "theta=calibrated")
    assert done.exit_code == 0, done.output
    one = json.loads(done.stdout)["responses"][0]
    assert one["theta"]["torque"] == pytest.approx(1.0)
    assert one["theta_stderr"]["torque"] == pytest.approx(0.3)
    total = np.array(one["columns"]["amplitude stderr"])
    assert np.all(total[1:] > 1.2 * np.array(one["columns"]["amplitude sampling stderr"])[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one.npz", "other.npz"], "`torque` is 1.0 in one.npz and 1.1 in other.npz"),
        (["one.npz", "--set", "readout_noise=0.1"], "readout"),
        (["one.npz", "--set", "fit=mass"], "'mass'"),
        (["one.npz", "--set", "folds=3"], "folds"),
        (["one.npz", "--set", "stride=1.5"], "stride"),
        (["one.npz", "--set", "figure=chi.txt"], "chi.txt"),
        (["one.npz", "--out", "chi.txt"], "chi.txt"),
        (["one.npz", "--baseline", "twin"], "--baseline twin"),
        (["one.npz", "--cluster", "local"], "--cluster"),
        (["one.npz", "--set", "window=500"], "too short"),
    ],
)
def test_bad_options_are_refused(folder, monkeypatch, words, message):
    done = invoke(folder, monkeypatch, *words)
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_response_is_of_a_continuing_record(folder, monkeypatch):
    monkeypatch.chdir(folder)
    line = ["estimate", "one.npz", "--model", "ring.py:model"]
    done = CliRunner().invoke(app, [*line, "--response"])
    assert done.exit_code == 2
    assert "--continuing" in done.output
    done = CliRunner().invoke(app, [*line, "--continuing", "--set", "stride=2"])
    assert done.exit_code == 2
    assert "--response" in done.output
