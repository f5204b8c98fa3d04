"""The benchmark from installation to a trained lattice: commands, the first row, the table."""

import json
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import end_to_end
import fluctua.cli.app
from fluctua.runs import lattice
from fluctua.runs.config import PRESETS, apply_changes
from fluctua.store.history import Row


def make_row(iteration, value, ensemble=2):
    return Row(iteration, iteration, value, 0.01, ensemble, 2 * iteration, 1.0, 0.5)


def test_rows_of_the_model_are_no_candidates():
    rows = [make_row(0, 0.1), make_row(1, 0.9, ensemble=0), make_row(2, 0.6), make_row(3, 0.7)]
    assert [row.iteration for row in end_to_end.list_candidates(rows, 0.6)] == [2, 3]


def test_a_command_names_seed_backend_and_iterations():
    given = end_to_end.parse_arguments(["--seed", "3", "--max-minutes", "2"])
    command = end_to_end.make_command(Path("python"), "ports", Path("run"), given)
    text = " ".join(command)
    assert "train ports --out run" in text
    assert "--backend cpu --seed 3" in text
    assert "iterations=1000" in text
    assert "stop.max_minutes=2.0" in text


def test_a_command_that_fails_names_its_output(tmp_path):
    with pytest.raises(RuntimeError, match=r"status 3.*log"):
        end_to_end.run_timed([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")


def test_a_run_reaches_the_first_row_whose_fresh_value_is_there_too(tmp_path):
    tiny = {**end_to_end.QUICK, "backend": "cpu", "iterations": 6}
    lattice.complete(apply_changes(PRESETS["fast"], tiny), tmp_path / "run")
    rows = end_to_end.history.read(tmp_path / "run" / "history.csv")
    easy = end_to_end.find_reached(tmp_path / "run", 60.0, target=-1.0)
    assert (easy.iteration, easy.trajectories) == (1, 16)
    assert easy.minutes == pytest.approx(1 + rows[0].seconds / 60)
    # by the same seed, with other noise: equal within standard errors of 16 and 128 trajectories
    assert abs(easy.fresh - easy.J) < 5 * easy.J_stderr
    assert end_to_end.find_reached(tmp_path / "run", 0.0, target=2.0) is None


def run_here(command, log):
    """Run a command of fluctua in this process, and return its time."""
    python, _, module, *words = command
    assert (python, module) == (sys.executable, "fluctua")
    started = time.time()
    begin = time.perf_counter()
    used = time.process_time()
    done = CliRunner().invoke(fluctua.cli.app.app, words)
    log.write_text(done.output)
    assert done.exit_code == 0, done.output
    return end_to_end.Clock(time.perf_counter() - begin, time.process_time() - used, started)


@pytest.mark.long
def test_the_quick_benchmark_writes_its_report(tmp_path, capsys, monkeypatch):
    """One preset in a process of its own, as all of them are measured; the others here."""
    run_apart = end_to_end.run_timed

    def run(command, log):
        return run_apart(command, log) if "fast" in command else run_here(command, log)

    monkeypatch.setattr(end_to_end, "run_timed", run)
    path = tmp_path / "report.json"
    options = ["--quick", "--target", "-1", "--out", str(tmp_path / "runs"), "--json", str(path)]
    end_to_end.main(options)
    report = json.loads(path.read_text())
    assert [row["preset"] for row in report["presets"]] == ["fast", "unknown", "ports"]
    for row in report["presets"]:
        assert 0 < row["reached"]["minutes"] <= row["minutes"]
        assert row["seconds_before_training"] > 0
        assert row["seconds_after_training"] > 0
        assert row["processor_minutes"] > 0
    assert "| unknown | the structure alone" in capsys.readouterr().out
