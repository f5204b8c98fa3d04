"""Runs: what is in the folder, that a kill at any moment costs nothing, and what is refused
before time is spent.
"""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fluctua.cli import progress
from fluctua.cli.app import app
from fluctua.runs import lattice as runs
from fluctua.runs.config import PRESETS, apply_changes, digest, read_stamp
from fluctua.runs.reading import read_course, read_run
from fluctua.store import checkpoint, course, history
from fluctua.store import folder as runfolder
from lattice_runs import TINY, assert_same_run, read_rows
from processes import environment_to_die_in, read_until, wait_until, wait_until_busy

CONFIG = apply_changes(PRESETS["demo"], TINY)
ESCALATING = apply_changes(
    CONFIG,
    {
        "iterations": 170,
        "ensemble.schedule": "escalation",
        "ensemble.window": 10,
        "ensemble.budgets": list(range(16, 96, 4)),
        "optimiser.rule": "paper",
        "keep.parameters_every": 7,
        "keep.checkpoint_seconds": 0.1,
    },
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    runs.complete(CONFIG, folder)
    return folder


@pytest.fixture
def run_copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


# --------------------------------------------------------------------------------------- the folder


def test_the_folder_explains_itself(finished):
    for name in (
        "config.toml",
        "history.csv",
        "parameters.h5",
        "final.npz",
        "summary.txt",
        "summary.json",
    ):
        assert (finished / name).exists(), name
    assert not (finished / "figures").exists()  # commands draw, trainings do not
    rows = history.read(finished / "history.csv")
    assert [row.iteration for row in rows] == list(range(12))
    assert rows[-1].trajectories == 12 * 16 + 128  # and the pilot of the first iteration
    with h5py.File(finished / "parameters.h5") as file:
        assert file["omega"].shape == (12, 6)
        assert file["kappa"].shape == (12, 7)
        assert file["bonds"].shape == (7, 2)
        assert file["positions"].shape == (6, 2)
        assert file["lead_sites"][:].tolist() == [0, 5]
        assert file["omega"].maxshape[0] is None
        assert dict(file.attrs)["horizon"] == 0.5
        np.testing.assert_array_equal(file["kappa"][0], np.ones(7))
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["finer"]["dt"] == 2.5e-3
    assert summary["bounds"]["kappa"] == [0.0, 2.0]
    assert "kappa in [0, 2]" in (finished / "summary.txt").read_text()


def test_parameters_are_recorded_on_a_grid_and_at_the_end(tmp_path):
    config = apply_changes(CONFIG, {"keep.parameters_every": 5})
    records = [record for _, record in runs.run(config, tmp_path / "run")]
    course = read_course(tmp_path / "run" / "parameters.h5")
    assert course.iteration.tolist() == [0, 5, 10, 11]
    for i, theta in zip(course.iteration, course.kappa, strict=True):
        np.testing.assert_array_equal(theta, records[i].theta["kappa"])
    with np.load(tmp_path / "run" / "final.npz") as final:
        np.testing.assert_array_equal(final["kappa"], records[-1].next_theta["kappa"])


def test_budgets_stop(tmp_path):
    config = apply_changes(CONFIG, {"stop.max_trajectories": 200})
    assert (
        list(runs.run(config, tmp_path / "a"))[-1][0].trajectories == 192
    )  # 128 + 4·16; another would be 208
    config = apply_changes(CONFIG, {"stop.max_minutes": 1e-9})
    assert len(list(runs.run(config, tmp_path / "b"))) == 1


def test_ensemble_in_steps(tmp_path):
    config = apply_changes(
        CONFIG, {"ensemble.schedule": "steps", "ensemble.steps": [[0, 4], [3, 8]], "iterations": 5}
    )
    assert [row.ensemble for row, _ in runs.run(config, tmp_path / "a")] == [4, 4, 4, 8, 8]


def test_a_carried_table_leaves_the_estimate_unbiased():
    """Its mean over many seeds is that of the time-only baseline with a pilot, in standard
    errors.
    """
    import jax

    from fluctua.runs.build import build

    parts = build(CONFIG)
    sums = []
    for kind in ("carried", "time"):
        estimator = build(apply_changes(CONFIG, {"baseline.kind": kind})).estimator
        estimates = [estimator(jax.random.key(i), parts.theta, 64) for i in range(20)]
        mean = np.mean([e.gradient["kappa"] for e in estimates], axis=0)
        sums.append(
            (mean, np.sqrt(np.mean([np.square(e.stderr["kappa"]) for e in estimates], axis=0) / 20))
        )
    (a, da), (b, db) = sums
    assert np.abs((a - b) / np.hypot(da, db)).max() < 4
    assert np.mean(da) < 1.2 * np.mean(db)


@pytest.mark.long
def test_the_jax_backend_trains_too(tmp_path):
    config = apply_changes(CONFIG, {"backend": "jax", "baseline.kind": "binned", "iterations": 2})
    values = [row.J for row, _ in runs.run(config, tmp_path / "jax")]
    same_noise = apply_changes(config, {"backend": "cpu"})
    assert values == pytest.approx(
        [row.J for row, _ in runs.run(same_noise, tmp_path / "cpu")], rel=1e-4
    )


def test_a_run_with_heun_steps_goes_on_with_them(tmp_path):
    config = apply_changes(CONFIG, {"task.integrator": "heun", "task.dt": 0.05, "iterations": 4})
    runs.complete(config, tmp_path / "whole")
    list(runs.run(apply_changes(config, {"iterations": 2}), tmp_path / "run"))
    list(runs.resume(tmp_path / "run", {"iterations": 4}))
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert read_run(tmp_path / "run").task.integrator == "heun"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["final"]["dt"] == 0.05


def test_a_folder_that_says_nothing_of_steps_has_eulers_and_goes_on_to_the_bit(finished, tmp_path):
    list(runs.run(apply_changes(CONFIG, {"iterations": 7}), tmp_path / "run"))
    settings = tmp_path / "run" / "config.toml"
    text = re.sub(r"(?m)^step = .*\n|^# run .*\n", "", settings.read_text())
    settings.write_text(f"{text}# run {read_stamp(settings)} keys {digest(text)}\n")
    list(runs.resume(tmp_path / "run", {"iterations": 12}))
    assert_same_run(finished, tmp_path / "run")


# ------------------------------------------------------------------------------------ what is shown


def show(rows, config, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    list(progress.watch_run(((row, None) for row in rows), config, console=console))
    return console.file.getvalue()


def test_display_at_a_terminal_and_in_a_log(finished):
    rows = history.read(finished / "history.csv")
    rows[5] = rows[5]._replace(event="escalate 2000; rewind 3")
    for terminal in (True, False):
        text = show(rows, CONFIG, terminal)
        assert (
            "iteration 6: no longer improving; 2,000 trajectories from here on, from iteration 4 "
            "again" in text
        )
        assert "12 of 12" in text
    panel = show(rows, CONFIG, True)
    for part in ("gain", "320", "16 per iteration", "s per iteration", "left", "█"):
        assert part in panel


def test_sparkline_and_events():
    assert progress.draw_sparkline([0, 1, 2, 3], 4) == "▁▃▆█"
    assert progress.draw_sparkline([1.0] * 5, 3) == "▁▁▁"
    assert progress.draw_sparkline(list(range(100)), 8) == progress.BARS
    row = history.Row(0, 0, 0.0, 0.0, 10, 10, 0.0, 2.0)
    doubt = row._replace(event="unexpected χ² 120 of 44; doubt: the records")
    assert "unexpected χ² 120 of 44" in progress.describe_event(doubt)


# --------------------------------------------------------------------------- escalation and rewinds


@pytest.fixture(scope="module")
def escalated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "escalated"
    runs.complete(ESCALATING, folder)
    return folder


@pytest.mark.long
def test_escalation_rewinds_and_goes_on(escalated):
    rows = history.read(escalated / "history.csv")
    events = [row for row in rows if row.event]
    assert any("rewind" in row.event for row in events)
    assert [row.row for row in rows] == list(range(len(rows)))
    for row in events:
        parts = dict(part.split() for part in row.event.split("; "))
        after = rows[row.row + 1]
        assert after.ensemble == int(parts["escalate"]) > row.ensemble
        assert after.iteration == int(parts.get("rewind", row.iteration + 1))
    kept = history.effective(rows)
    assert [row.iteration for row in kept] == list(range(170))
    assert [row.trajectories for row in rows] == list(
        np.cumsum([row.ensemble for row in rows]) + 128
    )


def test_a_rewound_iteration_begins_from_the_same_parameters_with_fresh_noise(escalated):
    rows = history.read(escalated / "history.csv")
    again = next(rows[r.row + 1] for r in rows if "rewind" in r.event)
    before = next(r for r in rows if r.iteration == again.iteration)
    assert before.row < again.row
    assert before.J != again.J
    config = apply_changes(ESCALATING, {"keep.parameters_every": 1, "iterations": 170})
    thetas = {}
    folder = escalated.parent / "every"
    for row, record in runs.run(config, folder):
        thetas[row.row] = np.asarray(record.theta["kappa"])
        if row.row == again.row:
            break
    np.testing.assert_array_equal(thetas[before.row], thetas[again.row])


# ---------------------------------------------------------------------------- stopping and going on


def command(*arguments, environment=os.environ):
    environment = {**environment, "JAX_ENABLE_X64": "1"}  # the precision of this process
    return subprocess.Popen(
        [sys.executable, "-m", "fluctua", "train", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def wait_for_row(folder, number, process):
    rows = folder / "history.csv"
    wait_until(lambda: rows.exists() and rows.read_text().count("\n") > number, process)


@pytest.mark.long
def test_killed_at_random_moments_and_resumed_it_is_the_run_left_alone(escalated, tmp_path):
    """SIGKILL, several times, somewhere in training, saving or concluding: through the command, for
    real.

    The end is resumed here, and so was the whole run made.
    """
    from fluctua.runs.config import dump

    (tmp_path / "tiny.toml").write_text(dump(ESCALATING))
    killed = tmp_path / "killed"
    draw, kills, arguments = random.Random(7), 0, [tmp_path / "tiny.toml", "--out", killed]
    environment = environment_to_die_in(tmp_path)
    for target in (1, 40, 90, 150):
        process = command(*arguments, environment=environment)
        wait_for_row(killed, target, process)
        time.sleep(draw.uniform(0, 0.15))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        process.stdout.close()
        arguments = ["--resume", killed]
    assert kills >= 3
    list(runs.resume(killed))
    assert_same_run(escalated, killed)
    assert any("rewind" in row.event for row in read_rows(killed))


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    folder = tmp_path / "run"
    options = [
        x for key, value in TINY.items() if key != "iterations" for x in ("--set", f"{key}={value}")
    ]
    process = command("demo", *options, "--iterations", "100000", "--out", folder)
    wait_for_row(folder, 3, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    assert f"Continue with: fluctua train --resume {folder}" in " ".join(output.split())
    done = len(history.read(folder / "history.csv"))
    assert (
        int(checkpoint.read(checkpoint.list_checkpoints(folder / "checkpoints")[-1])["row"]) == done
    )
    assert (folder / "final.npz").exists()


@pytest.mark.long
def test_a_second_ctrl_c_gives_up_an_iteration_that_would_take_hours(tmp_path):
    folder = tmp_path / "run"
    options = [
        x for key, value in TINY.items() if key != "iterations" for x in ("--set", f"{key}={value}")
    ]
    long = ["--set", "ensemble.schedule=steps", "--set", "ensemble.steps=[[0, 4], [3, 50000000]]"]
    process = command("demo", *options, *long, "--baseline", "none", "--out", folder)
    wait_for_row(folder, 2, process)
    wait_until_busy(
        process, 1.0
    )  # in the next iteration; should it not be, the first signal alone ends the run
    process.send_signal(signal.SIGINT)
    read_until(process, "a second signal drops the iteration")
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 130, printed
    assert f"Continue with: fluctua train --resume {folder}" in " ".join(printed.split())
    assert len(history.read(folder / "history.csv")) == 3
    assert (folder / "final.npz").exists()


def test_stopped_by_the_caller_and_extended(finished, tmp_path):
    for row, _ in runs.run(apply_changes(CONFIG, {"iterations": 7}), tmp_path / "run"):
        if row.iteration == 4:
            break
    assert len(history.read(tmp_path / "run" / "history.csv")) == 5
    list(runs.resume(tmp_path / "run"))
    with pytest.raises(ValueError, match="nothing is left to do.*its 7 iterations.*--iterations"):
        runs.resume(tmp_path / "run")
    list(runs.resume(tmp_path / "run", {"iterations": 12}))
    assert_same_run(finished, tmp_path / "run")


def test_killed_before_its_summary_a_longer_run_is_concluded(run_copy):
    early = (run_copy / "summary.json").read_bytes()
    rows = runs.resume(run_copy, {"iterations": 14})
    for _ in range(2):
        next(rows)
        assert not list(run_copy.glob("summary.*"))
    rows.close()
    (run_copy / "summary.json").write_bytes(early)  # as earlier versions left it
    assert not list(runs.resume(run_copy))
    assert json.loads((run_copy / "summary.json").read_text())["rows"] == 14


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(finished, run_copy):
    newest = checkpoint.list_checkpoints(run_copy / "checkpoints")[-1]
    content = bytearray(newest.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 0xFF
    newest.write_bytes(content)
    reports = []
    list(runs.resume(run_copy, report=reports.append))
    assert len(reports) == 1
    assert newest.name in reports[0]
    assert "damaged" in reports[0]
    assert_same_run(finished, run_copy)


def test_cut_short_or_all_damaged_it_starts_again(finished, run_copy):
    for path in checkpoint.list_checkpoints(run_copy / "checkpoints"):
        path.write_bytes(path.read_bytes()[:100])
    reports = []
    list(runs.resume(run_copy, report=reports.append))
    assert len(reports) == 3
    assert_same_run(finished, run_copy)


def test_checksum_notices_what_the_format_does_not(tmp_path):
    path = checkpoint.write(tmp_path, 3, {"a": np.arange(3.0)}, keep=2)
    assert checkpoint.read(path)["a"].tolist() == [0, 1, 2]
    with np.load(path) as file:
        np.savez(
            path, a=np.arange(3.0) + 1, sha256=file["sha256"]
        )  # a valid .npz with other numbers
    with pytest.raises(checkpoint.Damaged, match="checksum"):
        checkpoint.read(path)


# ----------------------------------------------------------------------------------------- branches


def test_a_branch_goes_on_from_where_another_run_stands(finished, tmp_path):
    """With nothing changed it is what the run itself would have done; also when it is resumed
    from its start.
    """
    list(runs.run(apply_changes(CONFIG, {"iterations": 7}), tmp_path / "trunk"))
    rows = [
        row for row, _ in runs.branch(tmp_path / "trunk", tmp_path / "branch", {"iterations": 12})
    ]
    expected = read_rows(finished)[7:]
    assert [row._replace(seconds=0.0, row=row.row + 7) for row in rows] == expected
    for path in checkpoint.list_checkpoints(tmp_path / "branch" / "checkpoints"):
        path.unlink()
    (tmp_path / "branch" / "summary.json").unlink()
    assert [row.J for row, _ in runs.resume(tmp_path / "branch")] == [row.J for row in expected]


@pytest.mark.long
def test_a_branch_with_another_ensemble_by_command(finished, tmp_path):
    done = invoke(
        "train",
        "--from",
        finished,
        "--trajectories",
        8,
        "--iterations",
        14,
        "--out",
        tmp_path / "few",
    )
    assert done.exit_code == 0, done.output
    assert [(row.iteration, row.ensemble) for row in read_rows(tmp_path / "few")] == [
        (12, 8),
        (13, 8),
    ]
    assert (tmp_path / "few" / "figures" / "learning.png").stat().st_size > 1000
    done = invoke("train", "--from", finished, "--out", tmp_path / "none")
    assert "nothing would be left to do: it has run its 12 iterations" in " ".join(
        done.output.split()
    )
    done = invoke(
        "train",
        "--from",
        finished,
        "--set",
        "optimiser.rule=paper",
        "--iterations",
        14,
        "--out",
        tmp_path / "none",
    )
    assert done.exit_code == 2
    assert "arrays for parameters and optimiser" in " ".join(done.output.split())


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.long
def test_two_processes_cannot_train_into_one_folder(tmp_path):
    rows = runs.run(CONFIG, tmp_path / "run")
    next(rows)
    for arguments in (["demo", "--out", tmp_path / "run"], ["--resume", tmp_path / "run"]):
        other = command(*arguments)
        output, _ = other.communicate(timeout=300)
        assert other.returncode == 2
        assert f"another process (process {os.getpid()}) is training into" in " ".join(
            output.split()
        )
    rows.close()
    assert len(list(runs.resume(tmp_path / "run"))) == 11


def test_folders_that_cannot_take_a_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        runs.run(CONFIG, tmp_path / "file" / "run")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.tex").write_text("")
    for replace in (False, True):
        with pytest.raises(ValueError, match="not empty. It is not a run"):
            runs.run(CONFIG, tmp_path / "own", replace=replace)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(runfolder.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(ValueError, match=r"1 MiB free, and this run takes about \d+ MiB"):
        runs.run(CONFIG, tmp_path / "new")


def test_an_earlier_run_is_replaced_only_when_asked(run_copy):
    with pytest.raises(ValueError, match="--resume .*--replace"):
        runs.run(CONFIG, run_copy)
    assert (
        len(list(runs.run(apply_changes(CONFIG, {"iterations": 2}), run_copy, replace=True))) == 2
    )


def test_a_disk_that_fills_up_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    rows = runs.run(CONFIG, tmp_path / "run")
    next(rows)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(course, "append", full)
    with pytest.raises(
        RuntimeError, match="No space left.*make room, then: fluctua train --resume"
    ):
        next(rows)
    monkeypatch.undo()
    rows.close()
    assert len(list(runs.resume(tmp_path / "run"))) == 11


def test_wrong_configurations_leave_no_folder(tmp_path):
    for changes, message in (
        ({"optimiser.rule": "adm"}, "adam"),
        ({"task.dt": 0.3}, "whole number of steps"),
        ({"lattice.rows": 1, "lattice.columns": 1}, "two resonators"),
        ({"backend": "jax"}, "does not support the baseline .carried."),
    ):
        with pytest.raises(ValueError, match=message):
            runs.run(apply_changes(CONFIG, changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_a_resumed_run_may_not_change(finished):
    with pytest.raises(ValueError, match="`seed` cannot change, only iterations"):
        runs.resume(finished, {"seed": 3})
    with pytest.raises(ValueError, match="there is no run folder"):
        runs.resume(finished / "nowhere")
    with pytest.raises(ValueError, match="not the folder of a run"):
        runs.resume(finished / "checkpoints")


# ----------------------------------------------------------------------------------------- commands


def test_evaluate_command(finished):
    measurements = json.loads(invoke("evaluate", finished, "--trajectories", 32, "--json").output)
    assert [m["dt"] for m in measurements] == [5e-3, 2.5e-3]
    quiet = invoke(
        "evaluate",
        finished,
        "--params",
        finished / "final.npz",
        "--trajectories",
        8,
        "--set",
        "task.sigma_w=0",
        "--set",
        "task.sigma_kappa=0.1",
        "--set",
        "task.dt=0.01",
        "--json",
    )
    (only,) = json.loads(quiet.output)
    assert (only["sigma_w"], only["sigma_kappa"], only["dt"]) == (0, 0.1, 0.01)
    assert "spread of returns" in invoke("evaluate", finished, "--trajectories", 8).output


def test_evaluate_command_says_what_is_wrong(finished, tmp_path):
    shutil.copy(finished / "final.npz", tmp_path / "lonely.npz")
    done = invoke("evaluate", "paper", "--params", tmp_path / "lonely.npz")
    assert done.exit_code == 2
    assert "`omega` must have shape (143,) for this lattice; got (6,)" in done.output
    assert "no final.npz" in invoke("evaluate", tmp_path).output


def test_plot_command_and_help(run_copy):
    done = invoke("plot", run_copy)
    assert done.exit_code == 0, done.output
    assert (run_copy / "figures" / "learning.pdf").exists()
    assert "not the folder of a run" in invoke("plot", run_copy / "checkpoints").output
    shown = invoke("train", "paper", "--set", "task.sigma_kappa=0.2", "--show").output
    assert "sigma_kappa = 0.2" in shown


def test_estimate_command_reads_the_final_parameters(finished):
    done = invoke(
        "estimate",
        "paper",
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
        "--params",
        finished / "final.npz",
    )
    assert done.exit_code == 0, done.output
    longer = invoke(
        "estimate",
        "paper",
        "--set",
        "lattice.rows=2",
        "--set",
        "lattice.columns=3",
        "--set",
        "task.horizon=0.5",
        "--set",
        "task.dt=0.05",
        "--set",
        "task.integrator=heun",
        "--trajectories",
        8,
    )
    assert "Δt = 0.05 (heun)" in longer.output
    assert (
        "binned baseline"
        in invoke(
            "estimate", "paper", "--set", "task.integrator=heun", "--baseline", "binned"
        ).output
    )
