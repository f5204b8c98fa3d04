"""What the commands print: names from files and folders do not steer the terminal."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua.cli.app
from fluctua.cli.app import app
from fluctua.core.words import escape_controls

MODEL = """
import jax.numpy as jnp, fluctua as fl
from fluctua.insitu.files import RecordingModel
process = fl.Process(lambda th, x: -x, noise=lambda th, x: jnp.array([1.0, 1.0]))
objective = fl.Objective(running=lambda th, x: x[0] ** 2)
model = RecordingModel(process, objective)
"""

ESCAPE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("σ_κ é\n\t✓", "σ_κ é\n\t✓"),
        ("a\x1b[2Jb\r", r"a\x1b[2Jb\r"),
        ("\x9b31m\x7f\x00", r"\x9b31m\x7f\x00"),
        ("\u202e\u2066", r"\u202e\u2066"),
        ("\udcff", r"\udcff"),
    ],
)
def test_control_characters_are_escaped(text, escaped):
    assert escape_controls(text) == escaped
    assert escape_controls(escaped) == escaped


def test_names_do_not_steer_the_terminal(tmp_path, monkeypatch):
    """Of files, folders, parameters and channels, on both streams."""
    monkeypatch.chdir(tmp_path)
    name = f"rec{ESCAPE}.npz"
    x = np.random.default_rng(0).normal(size=(20, 11, 2)).cumsum(1)
    np.savez(name, x=x, t=np.linspace(0, 1, 11), **{f"parameters.k{ESCAPE}": np.array(1.0)})
    (tmp_path / f"model{ESCAPE}.py").write_text(MODEL)
    (tmp_path / f"run{ESCAPE}").mkdir()
    for words in (
        ("inspect", name),
        ("estimate", name, "--model", f"model{ESCAPE}.py:model"),
        ("estimate", name, "--model", f"model{ESCAPE}.py:model", "--params", f"none{ESCAPE}"),
        ("convert", name, f"out{ESCAPE}.nc"),
        ("plot", f"run{ESCAPE}"),
        ("evaluate", f"run{ESCAPE}"),
        ("advise", f"nothing{ESCAPE}"),
    ):
        done = CliRunner().invoke(app, list(words))
        assert not set(ESCAPE) & set("\x1b\x07\x9b\u202e") & set(done.output), words
        assert r"\x1b]0;title\x07\x1b[2J\x9b31m\u202e" in done.output.replace("\n", ""), (
            words,
            done.output,
        )


def test_warnings_do_not_steer_the_terminal(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    CliRunner().invoke(app, ["train", "none"])
    assert r"omega\x1b[2J" in warnings.formatwarning("omega\x1b[2J", RuntimeWarning, "file.py", 1)


def test_commands_print_through_one_function():
    """`say` escapes; what is printed otherwise does not."""
    cli = Path(fluctua.cli.__file__).parent
    printing = re.compile(r"typer\.s?echo|^ *print\(", re.MULTILINE)
    assert [path.name for path in cli.rglob("*.py") if printing.search(path.read_text())] == [
        "common.py"
    ]


# ------------------------------------------------------------------------------------- wrong inputs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train rec.npz", "rec.npz is not a file of settings"),
        ("train --resume empty", "empty holds no run, or one that was killed before it began"),
        ("plot rec.npz", "rec.npz is a file, where the folder of a run was expected"),
        ("evaluate demo --params nowhere.npz", "there is no file nowhere.npz"),
        ("evaluate demo --params text.nc", "text.nc cannot be read as an .npz"),
        ("inspect empty", "empty is a folder, where a recording was expected"),
        ("watch empty --host nonsense.invalid", "Take another --port or --host"),
    ],
)
def test_wrong_inputs_are_named_in_a_line(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    np.savez("rec.npz", x=np.ones((4, 5, 2)), t=np.arange(5.0))
    Path("text.nc").write_text("hello")
    Path("empty").mkdir()
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2
    assert message in done.output
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (PermissionError(13, "Permission denied", "x.nc"), 2, "x.nc cannot be read or written: P"),
        (ConnectionError("no cluster answers"), 2, "fluctua: no cluster answers"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
    ],
)
def test_errors_of_the_system_are_a_line(monkeypatch, error, status, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("fluctua.cli.files.open_file", fail)
    done = CliRunner().invoke(app, ["inspect", "x.nc"])
    assert done.exit_code == status
    assert message in done.output
    assert bool(message) == ("fluctua:" in done.output)


@pytest.mark.parametrize("command", fluctua.cli.app.COMMANDS)
@pytest.mark.parametrize("columns", ["80", "120"])
def test_no_help_is_cut(command, columns):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": columns}).output
    cut = [line for line in shown.splitlines() if re.search(r"\w…\s*│?$", line)]
    assert not cut
    assert max(map(len, shown.splitlines())) <= int(columns)
