"""What goes wrong around a run: files swapped, cut, damaged or gone, disks that refuse, numbers
out of range.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua.cli.app import app
from fluctua.runs import lattice as runs
from fluctua.runs.config import PRESETS, apply_changes, dump, load
from fluctua.store import checkpoint, course, history
from fluctua.store import folder as runfolder
from lattice_runs import TINY, assert_same_run

CONFIG = apply_changes(PRESETS["demo"], TINY)
MORE = {"iterations": 15}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    runs.complete(CONFIG, folder)
    return folder


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "longer"
    runs.complete(apply_changes(CONFIG, MORE), folder)
    return folder


@pytest.fixture
def run_copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


# ------------------------------------------------------------------------------------- fingerprints


@pytest.mark.long
def test_a_configuration_that_was_cut_off_is_refused_wherever_it_was_cut(run_copy):
    """Most cuts are valid TOML, of another run."""
    text = (run_copy / "config.toml").read_text()
    for end in range(0, len(text) - 1, 7):
        (run_copy / "config.toml").write_text(text[:end])
        with pytest.raises(ValueError, match=r"config\.toml"):
            runs.resume(run_copy, MORE)
    (run_copy / "config.toml").write_text(text.replace("seed = 0", "seed = 1"))
    with pytest.raises(ValueError, match=r"the keys in .*config\.toml"):
        runs.resume(run_copy, MORE)


@pytest.mark.parametrize("edit", [("sigma_w = 0.5", "sigma_w = 0.6"), ("rows = ", "rows = 1")])
def test_an_edited_configuration_is_noticed_by_every_command_that_computes_with_it(
    run_copy, tmp_path, edit
):
    path = run_copy / "config.toml"
    path.write_text(path.read_text().replace(*edit, 1))
    for arguments in (
        ("evaluate", run_copy),
        ("estimate", run_copy),
        ("train", "--resume", run_copy),
        ("train", "--from", run_copy, "--out", tmp_path / "branch"),
    ):
        answer = invoke(*arguments)
        assert answer.exit_code == 2
        assert "the keys in" in answer.output
    assert not (tmp_path / "branch").exists()


@pytest.mark.parametrize("name", ["config.toml", "history.csv", "parameters.h5", "checkpoints"])
def test_a_file_of_another_run_is_refused(run_copy, tmp_path, name):
    other = tmp_path / "other"
    runs.complete(apply_changes(CONFIG, {"seed": 1}), other)
    if name == "checkpoints":
        shutil.rmtree(run_copy / name)
        shutil.copytree(other / name, run_copy / name)
    else:
        shutil.copy(other / name, run_copy / name)
    with pytest.raises(ValueError, match="is of another run: its fingerprint is"):
        runs.resume(run_copy, MORE)


def test_folders_without_fingerprints_go_on(run_copy, longer):
    """As earlier versions left them."""
    config = load(run_copy / "config.toml")
    old = dump(config).replace("forget_after = 100.0", "memory = 100.0\ntwin_error = 0.0")
    old = old.replace('integrator = "euler"', 'step = "euler"')
    old = old.replace("forget_after = ", "memory = ")
    assert "twin_error" in old
    assert "forget_after" not in old
    assert 'step = "euler"' in old
    (run_copy / "config.toml").write_text(old)
    rows = [line.rpartition(",")[0] for line in (run_copy / "history.csv").read_text().splitlines()]
    (run_copy / "history.csv").write_text("\n".join(rows) + "\n")
    with h5py.File(run_copy / "parameters.h5", "r+") as file:
        del file.attrs[course.RUN]
    for path in checkpoint.list_checkpoints(run_copy / "checkpoints"):
        arrays = checkpoint.read(path)
        del arrays["run"]
        checkpoint.replace(path, checkpoint.pack(arrays))
    list(runs.resume(run_copy, MORE))
    assert_same_run(longer, run_copy)
    assert {owner for _, owner in history.read_with_owners(run_copy / "history.csv")} != {""}


def test_a_twin_that_is_wrong_on_purpose_is_no_configuration():
    assert apply_changes(CONFIG, {"baseline.twin_error": 0.0}) == CONFIG
    with pytest.raises(ValueError, match=r"`baseline.twin_error` = 0.05"):
        apply_changes(CONFIG, {"baseline.twin_error": 0.05})


def test_a_summary_says_what_its_estimator_knew(finished):
    assert (
        "no model beyond the score's, carried baseline, Adam"
        in (finished / "summary.txt").read_text()
    )


# ------------------------------------------------------------------------------------------- set-up


class Killed(BaseException):
    """In place of a SIGKILL: nothing after it is done."""


@pytest.mark.parametrize("write", range(5))
@pytest.mark.parametrize("how", ["run", "replace", "resume"])
def test_a_kill_during_set_up_leaves_a_folder_that_can_be_used(tmp_path, monkeypatch, write, how):
    done, real = [], os.replace

    def settle(*paths):
        if len(done) == write:
            raise Killed
        done.append(paths)
        real(*paths)

    monkeypatch.setattr(os, "replace", settle)
    with pytest.raises(Killed):
        next(runs.run(apply_changes(CONFIG, {"iterations": 2}), tmp_path / "run"))
    monkeypatch.undo()
    assert len(done) == write
    config = apply_changes(CONFIG, {"iterations": 2})
    if how == "resume" and write == 0:
        with pytest.raises(ValueError, match="killed before it began"):
            runs.resume(tmp_path / "run")
    elif how == "resume":
        assert len(list(runs.resume(tmp_path / "run"))) == 2
    elif how == "run" and write == 4:  # its first checkpoint: a row is written, so it is a run
        with pytest.raises(ValueError, match="--replace"):
            runs.run(config, tmp_path / "run")
    else:
        assert len(list(runs.run(config, tmp_path / "run", replace=how == "replace"))) == 2


# ---------------------------------------------------------------------------------- files and disks


def damage_run(path, how):
    content = path.read_bytes()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "a directory":
        path.unlink()
        path.mkdir()
    elif how == "without a family":
        with h5py.File(path, "r+") as file:
            del file["kappa"]
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["empty", "cut", "a directory", "without a family", "gone"])
def test_parameters_that_are_damaged_are_set_aside_and_the_run_goes_on(run_copy, longer, how):
    damage_run(run_copy / "parameters.h5", how)
    shown = invoke("plot", run_copy)
    assert shown.exit_code == 2
    assert "parameters.h5" in shown.output
    reports = []
    rows = [row.J for row, _ in runs.resume(run_copy, MORE, report=reports.append)]
    assert rows == [row.J for row in history.read(longer / "history.csv")[12:]]
    assert len(reports) == (how != "gone")
    with h5py.File(run_copy / "parameters.h5") as file:
        assert file["iteration"][:].tolist() == [12, 13, 14]


@pytest.mark.parametrize(
    "name", ["history.csv", "config.toml", "final.npz", "summary.json", ".lock"]
)
@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file_in_the_place_of_one_is_named(run_copy, name, kind):
    path = run_copy / name
    path.unlink()
    {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
    }[kind]()
    with pytest.raises(ValueError, match=f"{name} is a {kind}"):
        runs.resume(run_copy, MORE)
    with pytest.raises(ValueError, match=f"{name} is a {kind}"):
        runs.run(CONFIG, run_copy, replace=True)
    shown = invoke("plot", run_copy)
    assert shown.exit_code == 2
    assert f"{name} is a {kind}" in " ".join(shown.output.split())


def test_a_file_in_the_place_of_the_checkpoints_is_named(run_copy):
    shutil.rmtree(run_copy / "checkpoints")
    (run_copy / "checkpoints").write_text("")
    with pytest.raises(ValueError, match="checkpoints is not a folder"):
        runs.resume(run_copy, MORE)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
@pytest.mark.parametrize("name", ["signal.csv", "parameters.h5"])
def test_what_is_no_file_in_the_place_of_a_table_is_set_aside(run_copy, longer, name, kind):
    path, reports = run_copy / name, []
    path.unlink()
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    list(runs.resume(run_copy, MORE, report=reports.append))
    assert f"{name} is a {kind}" in reports[0]
    assert history.read_numbers(run_copy / "signal.csv")[1][-1, 0] == 14


def swap(path, first, second):
    lines = path.read_text().splitlines(keepends=True)
    lines[first], lines[second] = lines[second], lines[first]
    path.write_text("".join(lines))


@pytest.mark.parametrize(("first", "second"), [(1, 2), (3, 9), (11, 12)])
def test_swapped_lines_of_a_history_are_noticed(run_copy, first, second):
    swap(run_copy / "history.csv", first, second)
    message = f"history.csv has row {second - 1} where row {first - 1} was expected"
    with pytest.raises(ValueError, match=message):
        runs.resume(run_copy, MORE)
    shown = invoke("plot", run_copy)
    assert shown.exit_code == 2
    assert message in " ".join(shown.output.split())


def test_lines_of_a_history_that_come_twice_or_not_are_noticed(run_copy):
    path = run_copy / "history.csv"
    lines = path.read_text().splitlines(keepends=True)
    for wrong in (lines[:4] + lines[3:], lines[:4] + lines[5:]):
        path.write_text("".join(wrong))
        with pytest.raises(ValueError, match="where row 3 was expected"):
            runs.resume(run_copy, MORE)


def test_swapped_lines_of_a_signal_are_noticed(run_copy, longer):
    swap(run_copy / "signal.csv", 4, 7)
    damaged_text, reports = (run_copy / "signal.csv").read_text(), []
    with pytest.raises(ValueError, match="row 6 where row 3 was expected"):
        history.read_numbers(run_copy / "signal.csv")
    list(runs.resume(run_copy, MORE, report=reports.append))
    assert "signal.csv is damaged" in reports[0]
    assert (run_copy / "signal.damaged").read_text() == damaged_text
    assert history.read_numbers(run_copy / "signal.csv")[1][:, 0].tolist() == [12, 13, 14]


def test_checkpoints_that_are_gone_cost_time_alone(run_copy, longer):
    shutil.rmtree(run_copy / "checkpoints")
    list(runs.resume(run_copy, MORE))
    assert_same_run(longer, run_copy)


@pytest.mark.parametrize("number", [30, 28])
def test_a_folder_that_cannot_be_written(run_copy, tmp_path, monkeypatch, number):
    def refuses(*words, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(runfolder, "open", refuses, raising=False)
    for call in (lambda: runs.resume(run_copy, MORE), lambda: runs.run(CONFIG, tmp_path / "new")):
        with pytest.raises(ValueError, match=f"cannot be written: {os.strerror(number)}"):
            call()


def test_a_folder_that_is_removed_while_it_is_written(tmp_path):
    rows = runs.run(apply_changes(CONFIG, {"keep.checkpoint_seconds": 0.0}), tmp_path / "run")
    next(rows)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"run was removed or emptied while"):
        next(rows)


@pytest.mark.long
def test_a_limit_on_the_size_of_files_is_named_and_nothing_is_lost(finished, tmp_path):
    """`ulimit -f`, as on file systems that have one."""
    (tmp_path / "tiny.toml").write_text(dump(CONFIG))
    limited = (
        f"ulimit -f 20; {sys.executable} -m fluctua train {tmp_path / 'tiny.toml'} --out "
        f"{tmp_path / 'run'}"
    )
    # The precision of this process; compiled functions would be too large to be kept.
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    done = subprocess.run(
        ["bash", "-c", limited], capture_output=True, text=True, timeout=120, env=environment
    )
    message = " ".join(done.stderr.split())
    assert done.returncode == 2, done
    assert "File too large" in message
    assert "ulimit -f" in message
    list(runs.resume(tmp_path / "run"))
    assert_same_run(finished, tmp_path / "run")


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 2**63),
        ("task.horizon", 1e308),
        ("task.amplitude", 1e308),
        ("lattice.rows", 10**12),
        ("ensemble.trajectories", 10**9),
        ("task.dt", 1e-300),
    ],
)
def test_numbers_out_of_range_are_named(tmp_path, key, value):
    done = invoke("train", "demo", "--set", f"{key}={value}", "--out", tmp_path / "run")
    assert done.exit_code == 2, done.output
    assert key in done.output
    assert not (tmp_path / "run").exists()


def test_more_iterations_than_a_disk_can_hold(tmp_path):
    with pytest.raises(ValueError, match="MiB free, and this run takes"):
        runs.run(apply_changes(CONFIG, {"iterations": 10**12}), tmp_path / "run")


def test_parameters_from_files_that_do_not_hold_them(finished, tmp_path):
    np.save(tmp_path / "one.npy", np.ones(6))
    np.savez(tmp_path / "complex.npz", omega=np.ones(6) + 1j)
    (tmp_path / "cut.npz").write_bytes((finished / "final.npz").read_bytes()[:100])
    lattice = [
        "--set",
        "lattice.rows=2",
        "--set",
        "lattice.columns=3",
        "--set",
        "task.horizon=0.5",
        "--set",
        "task.dt=0.005",
        "--trajectories",
        8,
    ]
    for name, fact in (
        ("one.npy", "one array without a name"),
        ("complex.npz", "complex128"),
        ("cut.npz", "cannot"),
    ):
        shutil.copy(finished / "config.toml", tmp_path / "config.toml")
        for words in (
            ["estimate", "paper", *lattice, "--params", tmp_path / name],
            ["evaluate", tmp_path / "config.toml", "--params", tmp_path / name],
        ):
            done = invoke(*words)
            assert done.exit_code == 2, done.output
            assert fact in " ".join(done.output.split())


def test_a_backend_that_is_not_there_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match="CuPy"):
        runs.run(apply_changes(CONFIG, {"backend": "cuda"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
