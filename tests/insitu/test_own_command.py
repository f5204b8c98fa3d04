"""`fluctua insitu train` and `check` of an instrument and a model of one's own."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import own_lab
from fluctua.cli.app import app
from fluctua.insitu import files
from fluctua.insitu.instrument.archive import Archive
from fluctua.store import history
from processes import environment_to_die_in, wait_until

PLAN = "--iterations 4 --trajectories 40 --set learning_rate=0.5 --set probes=2"
OWN = f"--model lab.py:model --out run {PLAN}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that holds lab.py."""
    (tmp_path / "lab.py").write_text(Path(own_lab.__file__).read_text())
    (tmp_path / "broken.py").write_text("import numpy\n\nnumpy.nothing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run(words):
    return CliRunner().invoke(app, ["insitu", *words.split()])


def message(words, status):
    """What the command prints, on one line."""
    done = run(words)
    assert done.exit_code == status, done.output
    return " ".join(done.output.split())


@pytest.mark.long
@pytest.mark.parametrize("driver", ["lab.py:Trap", "lab.py:open_trap", "lab.py:trap", "lab:Trap"])
def test_an_instrument_is_trained_and_continued_from_elsewhere(folder, monkeypatch, driver):
    done = run(f"train {driver} {OWN}")
    assert done.exit_code == 0, done.output
    assert "1 setting, 81 times × 1 channel, 0.0125 apart" in done.output
    rows = history.read(folder / "run" / "history.csv")
    assert len(rows) == 4
    assert rows[-1].J > rows[0].J
    assert rows[-1].trajectories == 4 + 2 * 50 + 4 * 40  # those of the check are counted
    assert "gain" in (folder / "run" / "calibration.txt").read_text()
    summary = (folder / "run" / "summary.txt").read_text()
    assert summary in done.output
    with np.load(folder / "run" / "final.npz") as settings:
        assert f"force = {settings['force']:.4g}\n" in summary
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    if driver == "lab:Trap":
        monkeypatch.chdir(folder)  # a module is looked for where the command runs
    done = run(f"train --resume {folder / 'run'} --iterations 5")
    assert done.exit_code == 0, done.output
    rows = history.read(folder / "run" / "history.csv")
    assert rows[-1].trajectories == 4 + 2 * 50 + 5 * 40 + 40  # the first end measured 40


@pytest.mark.parametrize("command", ["estimate", "calibrate"])
def test_a_batch_of_a_run_needs_a_model_whose_unknowns_are_fixed(folder, command):
    settings = {"force": np.array(0.625)}
    trap = own_lab.Trap()
    trap.set(settings)
    trap.arm(4)
    Archive(folder / "recordings").add(trap.acquire(), settings, np.ones(4, bool), "")
    (batch,) = (folder / "recordings").glob("*.nc")
    np.savez(folder / "final.npz", force=2.0)
    words = [command, str(batch), "--model", "lab.py:ready", "--params", "final.npz"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    answer = " ".join(done.output.split())
    assert "lab.py:ready has unknowns (gain)" in answer
    assert "was recorded at force = 0.625" in answer


@pytest.mark.long
def test_several_instruments_are_trained_together(folder):
    text = (folder / "lab.py").read_text()
    text += "\n\nclass Second(Trap):\n    def health(self):\n"
    text += "        return super().health()._replace(identity='trap 8')\n"
    (folder / "lab.py").write_text(text)
    done = run(f"train lab.py:Trap lab.py:Second {OWN}")
    assert done.exit_code == 0, done.output
    assert (folder / "run" / "calibration-2.txt").exists()
    assert "2 devices" in done.output
    rows = history.read(folder / "run" / "history.csv")
    assert rows[-1].trajectories == 2 * (4 + 2 * 50) + 4 * 40


@pytest.mark.long
@pytest.mark.parametrize(
    ("driver", "text"),
    [
        ("Fails", "failed 2 times in a row, at last with: no trigger"),
        ("Crashes", "`acquire` of the driver raised KeyError, line"),
    ],
)
def test_a_failure_costs_one_batch_and_the_run_goes_on(folder, driver, text):
    """Acquisitions: two of the check, two probes, one per iteration; the third iteration fails."""
    words = f"train lab.py:{driver} {OWN} --set attempts=2"
    answer = message(words, 2)
    assert text in answer
    assert ("go on with the run (--resume)" in answer) == (driver == "Fails")
    before = history.read(folder / "run" / "history.csv")
    assert len(before) == 3
    (folder / "mended").touch()
    message("train --resume run", 0)
    after = history.read(folder / "run" / "history.csv")
    assert after[:3] == before
    assert len(after) == 4
    assert after[-1].trajectories == 4 + 2 * 50 + 4 * 40


@pytest.mark.long
def test_a_killed_training_goes_on(folder):
    words = "train lab.py:Trap --model lab.py:model --out run --iterations 100000 --trajectories 20"
    command = [sys.executable, "-m", "fluctua", "insitu", *words.split()]
    environment = environment_to_die_in(folder, JAX_PLATFORMS="cpu")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    rows = folder / "run" / "history.csv"
    try:
        wait_until(lambda: rows.exists() and len(history.read(rows)) >= 3, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    before = history.read(rows)
    last = before[-1].iteration
    again = f"train --resume run --iterations {last + 3}"
    command = [*command[:4], *again.split()]  # in a new process, as after a kill
    subprocess.run(command, env=environment, check=True, capture_output=True)
    after = history.read(rows)
    assert [row.iteration for row in after] == list(range(last + 3))
    assert after[:last] == before[:last]
    recorded = [files.open(path).count for path in (folder / "run" / "recordings").glob("*.nc")]
    # the check is not recorded, and the final evaluation comes after the last row
    assert after[-1].trajectories == sum(recorded) + 4 - 20


@pytest.mark.long
def test_another_model_is_refused_by_name(folder):
    message(f"train lab.py:Trap {OWN}", 0)
    answer = message("train --resume run --model lab.py:faint --iterations 5", 2)
    assert "`process.noise`" in answer
    answer = message("train lab.py:Short --resume run --iterations 5", 2)
    assert "81 times, and a record of the instrument has 41" in answer
    (folder / "lab.py").rename(folder / "moved.py")
    answer = message("train --resume run --iterations 5", 2)
    assert "there is no file" in answer
    assert "where they moved: fluctua insitu train INSTRUMENT" in answer
    message("train moved.py:Trap --model moved.py:model --resume run --iterations 5", 0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("lab.py:Trap --out run", "needs its model"),
        ("lab.py:Trap tcp://127.0.0.1:1 --out run", "needs its model"),
        (f"lap.py:Trap {OWN}", 'there is no file lap.py: a driver .* Did you mean "lab.py"?'),
        (f"lab.py:Trp {OWN}", "lab.py does not define 'Trp'"),
        (f"labs:Trap {OWN}", "there is no module labs"),
        (f"broken.py:Trap {OWN}", "broken.py does not run: AttributeError, line 3 of broken.py"),
        (f"broken:Trap {OWN}", "broken does not run: AttributeError, line 3 of broken.py"),
        (f"lab.py:wrong {OWN}", "lab.py:wrong must be a driver .* got int"),
        (f"lab.py:number {OWN}", "it is int, without `set`, `arm`, `acquire`"),
        (f"lab.py:Deaf {OWN}", "it is Deaf, without `arm`, `acquire`, `health`, `close`"),
        (f"lab.py:Needs {OWN}", "lab.py:Needs needs address, and a driver is opened without"),
        (f"lab.py:Off {OWN}", "lab.py:Off failed while connecting: KeyError, line .* of lab.py"),
        (f"localhost:5025 {OWN}", 'is no instrument.*Did you mean "tcp://localhost:5025"?'),
        ("lab.py:Trap --model lab.py:wrong --out run", "must be a model .* got int"),
        ("lab.py:Trap --model lab.py:none --out run", "does not define 'none'"),
        ("lab.py:Trap --model lab.py:drift --out run", "this one needs settings, x, t, unknowns"),
        (f"lab.py:Trap {OWN} --set kerr=true", "--set kerr: neither driver nor model has"),
        (f"lab.py:Trap {OWN} --set timeout=3", "--set timeout: neither driver nor model has"),
        (f"lab.py:Trap {OWN} --set gain=high", "--set gain takes a number; got 'high'"),
        (f"lab.py:Trap {OWN} --set start=5.0", "force starts at 5, outside its bounds"),
        (f"lab.py:Narrow {OWN}", "takes force from -3 to 3; the bounds of the model are -4"),
        (f"lab.py:Other {OWN}", "has limits of torque: it lacks force"),
        (f"lab.py:Mute {OWN}", "`set` of the driver raised KeyError"),
        (f"lab.py:Short {OWN}", "the model has 81 times, and a record of the instrument has 41"),
        (f"lab.py:Slow {OWN}", "samples from 0 to 2, 0.025 apart"),
        (f"lab.py:Wide {OWN}", "the model has 1 channels, and a sample of the instrument has 2"),
        (f"lab.py:Flat {OWN} --set attempts=1", "the same as earlier ones"),
        (
            "lab.py:Trap lab.py:trap --model lab.py:model --out run --trajectories 8 "
            "--calibration training",
            "is of one device, and there are 2",
        ),
    ],
)
def test_mistakes_are_explained_before_the_training(folder, words, text):
    answer = message(f"train {words}", 2)
    assert re.search(text.replace("(", r"\(").replace("?", r"\?"), answer), answer
    assert not (folder / "run").exists()


def test_a_record_that_the_check_refuses_is_no_run_to_go_on_with(folder):
    text = (folder / "lab.py").read_text()
    text += "\n\nclass Truncated(Trap):\n    def acquire(self):\n"
    text += "        t, x, *rest = super().acquire()\n        return Batch(t, x[:, :41], *rest)\n"
    (folder / "lab.py").write_text(text)
    answer = message(f"train lab.py:Truncated {OWN} --set attempts=2", 2)
    assert "failed 2 times in a row" in answer
    assert "go on with the run" not in answer
    assert not (folder / "run").exists()


def test_words_that_are_no_action_are_explained(folder):
    assert "For an instrument: fluctua insitu train lab.py:Trap" in message("lab.py:Trap", 2)
    assert 'Did you mean "check"?' in message("chek lab.py:Trap", 2)
    assert "give train, check or demo first" in message("", 2)
    assert "leave out lab.py:Trap" in message("demo lab.py:Trap", 2)
    (folder / "run").mkdir()
    (folder / "run" / "note.txt").touch()
    assert "run is not empty" in message(f"train lab.py:Trap {OWN}", 2)


def test_a_folder_with_a_run_advises_options_that_the_command_has(folder):
    (folder / "run").mkdir()
    for name in ("plan.json", "history.csv", "final.npz"):
        (folder / "run" / name).touch()
    answer = message(f"train lab.py:Trap {OWN}", 2)
    assert "Go on with it: fluctua insitu train --resume run; or choose another folder." in answer
    assert "--replace" not in answer


def test_a_check_is_printed(folder):
    answer = message("check lab.py:Trap --model lab.py:model --iterations 10", 0)
    for text in (
        "instrument lab.py:Trap (trap 7)",
        "force start 0 within -4 … 4 pN (limits -10 … 10)",
        "81 times × 1 channel, 0.0125 apart",
        "channels position in µm",
        "standard errors",
        "squared residuals",
        "gain 0.",
        "to connect",
        "10 iterations: 3,600 trajectories in 39 acquisitions",
        "used 62 trajectories",
        "ok the instrument fits its model",
    ):
        assert text in answer


def test_a_check_ends_with_1_where_something_is_wrong(folder):
    words = "--model lab.py:model --set check_trajectories=8"
    assert "PROBLEM the instrument takes force" in message(f"check lab.py:Narrow {words}", 1)
    assert "failed while connecting: KeyError" in message(f"check lab.py:Off {words}", 1)
    assert "lap.py" in message(f"check lap.py:Trap {words}", 2)
    assert "--out: not for a check" in message(f"check lab.py:Trap {words} --out run", 2)
    assert "give an instrument" in message("check", 2)
    answer = message("check lab.py:Trap", 2)
    assert "lab.py:Trap is an instrument of your own and needs its model: add --model" in answer
    assert "train" not in answer


def test_a_check_as_json_and_a_model_from_the_driver(folder):
    done = run(
        "check lab.py:Trap --model lab.py:model_from_driver --json --set gain=0.5 "
        "--set check_trajectories=2"
    )
    assert done.exit_code == 0, done.output
    (check,) = json.loads(done.output)
    assert check["ok"]
    assert check["trajectories"] == 4
    assert check["knobs"][0]["bounds"] == {"low": -5.0, "high": 5.0}
    assert check["training"]["trajectories"] == 30_600
    seconds = check["training"]["seconds"]
    assert 0 < seconds["least"] < seconds["most"]
