"""Mistakes that a person at the bench makes: each is answered by a sentence that says what was
expected.
"""

import json
import os
import socket

import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua.cli.app import app

MODEL = """
import jax.numpy as jnp, fluctua as fl
from fluctua.insitu.files import RecordingModel
process = fl.Process(lambda th, x: -th["k"] * x, noise=lambda th, x: jnp.array([1.0, 1.0]))
objective = fl.Objective(running=lambda th, x: x[0] ** 2)
model = RecordingModel(process, objective)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench")
    x = np.random.default_rng(0).normal(size=(20, 11, 2)).cumsum(1)
    np.savez(path / "r.npz", x=x, t=np.linspace(0, 1, 11))
    np.savez(path / "k.npz", k=np.array(1.0))
    np.savez(path / "other.npz", foo=np.array(1.0))
    (path / "model.py").write_text(MODEL)
    (path / "typo.py").write_text(MODEL + "def f(:\n")
    (path / "fails.py").write_text(MODEL + "1 / 0\n")
    (path / "note.txt").write_text("hello\n")
    (path / "full").mkdir()
    (path / "full" / "a").touch()
    return path


def read_message(*arguments):
    """What the command complains of, on one line."""
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (("--params", "k.npz", "--set", "parameter=k[3]"), "there is no 'k[3]'; parameters are k"),
        (
            ("--params", "k.npz", "--set", "readout_noise=-1"),
            "standard deviation, 0 or more; got -1",
        ),
        (("--params", "other.npz"), "needs 'k'; available are foo"),
        (("--params", "note.txt"), "is not an .npz"),
        (("--params", "none.npz"), "there is no file"),
        (
            ("--params", "k.npz", "--set", "noise=bogus"),
            "`noise` must be one of auto, file, nominal; got 'bogus'",
        ),
    ],
)
def test_estimate_names_what_is_wrong(folder, monkeypatch, options, answer):
    monkeypatch.chdir(folder)
    assert answer in read_message("estimate", "r.npz", "--model", "model.py:model", *options)


def test_a_model_that_does_not_run_is_named_with_the_line(folder):
    estimate = ("estimate", folder / "r.npz", "--params", folder / "k.npz", "--model")
    assert "SyntaxError, line 7" in read_message(*estimate, f"{folder}/typo.py:model")
    assert "ZeroDivisionError, line 7 of fails.py: division by zero" in read_message(
        *estimate, f"{folder}/fails.py:model"
    )


def test_the_file_that_is_told_is_the_file_that_is_written(folder, tmp_path):
    estimate = [
        "estimate",
        folder / "r.npz",
        "--params",
        folder / "k.npz",
        "--model",
        f"{folder}/model.py:model",
        "--out",
    ]
    done = CliRunner().invoke(app, [*map(str, estimate), str(tmp_path / "g")])
    assert done.exit_code == 0, done.output
    assert "g.npz" in done.output
    assert (tmp_path / "g.npz").is_file()


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (("--set", "bits=40"), "`bits` of a bench must be 4 to 16; got 40"),
        (("--set", "readout_noise=-1"), "`readout` of a bench must be 0 or more; got -1.0"),
        (("--set", "rows=1", "--set", "columns=1"), "2 to 400 resonators; got 1 x 1"),
    ],
)
def test_a_bench_that_cannot_be_says_why(options, answer):
    assert answer in read_message("virtual-bench", *options)


def test_a_port_in_use_is_called_so():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in read_message(
            "virtual-bench", "--port", port
        )


def test_a_bench_that_is_off_is_asked_about_on_every_kind_of_line(folder):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "switched on?" in read_message(
        "insitu", "train", f"tcp://127.0.0.1:{port}", "--out", folder / "new"
    )
    assert "positive number of seconds" in read_message(
        "insitu", "train", f"tcp://127.0.0.1:{port}", "--out", folder / "new", "--set", "timeout=-1"
    )
    pytest.importorskip("pyvisa_py")
    assert "switched on?" in read_message(
        "insitu", "train", f"TCPIP::127.0.0.1::{port}::SOCKET", "--out", folder / "new"
    )


def test_resuming_refuses_options_it_would_not_follow(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({}))
    answer = read_message(
        "insitu", "--resume", tmp_path, "--trajectories", "30", "--baseline", "optimal"
    )
    assert "--trajectories, --baseline: cannot be changed with --resume" in answer


def test_folders_that_cannot_take_a_run(folder):
    from fluctua import tcmt
    from fluctua.insitu.device_training import run_and_resume as loop
    from fluctua.insitu.networks import network_model

    model = network_model(tcmt.rectangular(2, 2), interval=0.02, points=21)
    with pytest.raises(ValueError, match=r"full is not empty. It is not a run"):
        loop.run(None, model, loop.Plan(), folder / "full")
    with pytest.raises(ValueError, match=r"note.txt cannot be written: File exists"):
        loop.run(None, model, loop.Plan(), folder / "note.txt")
    assert "is a folder; give the name of a file" in read_message("record", folder / "full")
    assert "is a file, not a folder" in read_message("record", folder / "note.txt" / "run.nc")


@pytest.mark.parametrize("command", ["evaluate", "estimate"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.json", "is the run of an instrument"),
        ("run.json", "is the run of a process of your own"),
    ],
)
def test_runs_without_a_network_are_named(tmp_path, command, name, text):
    (tmp_path / name).touch()
    (tmp_path / "final.npz").touch()
    answer = read_message(command, tmp_path)
    assert text in answer
    assert "summary.txt" in answer
    assert "Presets" not in answer


def test_help_breaks_lines_where_the_terminal_ends():
    text = (
        CliRunner()
        .invoke(app, ["estimate", "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
        .output
    )
    assert "its own noise, which is used. Where channels are missing" in text


STATES = np.random.default_rng(1).normal(size=(20, 21, 2)).cumsum(1)


@pytest.mark.parametrize("command", ["calibrate", "advise"])
@pytest.mark.parametrize(
    ("name", "states", "sentence"),
    [
        ("empty", STATES[:0], "has 0 complete trajectories"),
        (
            "nan",
            np.where(np.arange(20)[:, None, None] == 3, np.nan, STATES),
            "trajectories are not finite: 3",
        ),
        ("dead", STATES * [1, 0], "component 1 does not fluctuate"),
        ("huge", STATES * 1e200, "overflowed"),
    ],
)
def test_what_cannot_be_calibrated_is_named(folder, command, name, states, sentence):
    np.savez(folder / f"{name}.npz", x=states, t=np.linspace(0, 1, 21))
    words = (
        command,
        folder / f"{name}.npz",
        "--model",
        f"{folder}/model.py:model",
        "--params",
        folder / "k.npz",
    )
    assert sentence in read_message(*words)


READERS = {
    "advise": ("advise", "{}"),
    "inspect": ("inspect", "{}"),
    "estimate": ("estimate", "{}"),
    "calibrate": ("calibrate", "{}"),
    "convert": ("convert", "{}", "out.nc"),
    "evaluate": ("evaluate", "{}"),
    "train": ("train", "{}"),
    "params": ("estimate", "demo", "--params", "{}"),
    "params of a recording": ("estimate", "r.npz", "--model", "model.py:model", "--params", "{}"),
    "model": ("estimate", "r.npz", "--params", "k.npz", "--model", "{}:model"),
    "record": ("record", "out.nc", "--params", "{}"),
}


@pytest.mark.parametrize("kind", ["device", "pipe"])
@pytest.mark.parametrize("command", READERS)
def test_what_never_ends_is_not_read(folder, tmp_path, monkeypatch, command, kind):
    """A pipe would be waited for, and /dev/null be a configuration without changes, which
    trains for hours.
    """
    monkeypatch.chdir(folder)
    path = "/dev/null"
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    if command == "model":
        (tmp_path / "link.py").symlink_to(path)
        path = tmp_path / "link.py"
    words = [word.replace("{}", str(path)) for word in READERS[command]]
    assert f"{path} is a {kind}" in read_message(*words).replace("\n", "")


def test_a_run_that_is_a_pipe_is_no_folder(tmp_path):
    pytest.importorskip("starlette", reason="the page needs fluctua[watch]")
    os.mkfifo(tmp_path / "run")
    for words in (("plot",), ("watch",), ("train", "--resume"), ("insitu", "train", "--resume")):
        assert "there is no" in read_message(*words, tmp_path / "run")
