"""In-situ training that calibrates as it goes, over the socket of a small bench whose numbers
nobody is told.
"""

import json
from contextlib import contextmanager

import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua.cli.app import app
from fluctua.insitu.bench import device, server
from fluctua.insitu.bench.box import Bench
from fluctua.insitu.device_training import run_and_resume as loop
from fluctua.insitu.instrument.virtual import VirtualBench
from fluctua.insitu.networks import network_model
from fluctua.store import history
from problems import flat

SHEET = device.Sheet(rows=2, columns=2, seed=3, ageing=0.0)
HIDDEN = device.draw_hidden(SHEET)
POINTS = 101
MODEL = network_model(SHEET.nominal, interval=SHEET.interval, points=POINTS)


def plan(**changes):
    return loop.Plan(
        **{
            "iterations": 8,
            "trajectories": 4,
            "calibration": "training",
            "first_pause": 0.01,
            "longest_pause": 0.3,
            **changes,
        }
    )


@contextmanager
def serving(bench):
    with server.background(bench) as port:
        yield lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=POINTS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of eight iterations, of which every other one measures, and the bench after it."""
    folder, bench = tmp_path_factory.mktemp("insitu") / "whole", Bench(SHEET)
    with serving(bench) as connect:
        rows = [row for row, _ in loop.run(connect, MODEL, plan(measure_every=2), folder)]
    return folder, bench, rows


def read_state(folder):
    """What the estimator knew at the last checkpoint."""
    with np.load(max((folder / "checkpoints").iterdir())) as arrays:
        return {
            n.removeprefix("estimator/"): np.array(arrays[n])
            for n in arrays.files
            if n.startswith("estimator/")
        }


def test_nothing_is_measured_but_what_trains_and_the_end(whole):
    folder, bench, rows = whole
    assert bench.shots == rows[-1].trajectories + 20 == 16 + 20
    assert [row.trajectories for row in rows] == [4, 4, 8, 8, 12, 12, 16, 16]
    assert rows[-2].J > 1.5 * rows[0].J  # both measured
    assert "calibrated with 16 trajectories" in (folder / "calibration.txt").read_text()
    assert len(list((folder / "recordings").glob("batch-*.nc"))) == 4 + 1


def test_the_model_is_that_of_the_hidden_box(whole):
    """Offsets, gains and losses in standard errors of what 16 trajectories tell."""
    own = MODEL.find_self_calibration()
    estimator = fl.SelfCalibrating(
        own.model, None, own.effective, own.start, own.spread, every=own.every
    )
    estimator.restore(read_state(whole[0]))
    calibration = estimator.calibration
    truth = {
        f"{name}_{part}": getattr(HIDDEN, part)[name]
        for name in ("omega", "kappa")
        for part in ("offset", "gain")
    }
    truth["loss"] = np.log(HIDDEN.gamma / SHEET.nominal.gamma)
    assert calibration.trajectories == 16
    z = np.concatenate(
        [(calibration.unknown[n] - v) / calibration.stderr[n] for n, v in truth.items()]
    )
    assert np.abs(z).max() < 4
    assert np.median(calibration.stderr["omega_offset"]) < 0.1  # of the prior's 0.5


def test_a_stopped_run_goes_on_bit_for_bit(whole, tmp_path):
    folder, bench, rows = whole
    again = Bench(SHEET)
    with serving(again) as connect:
        first_part = loop.run(connect, MODEL, plan(measure_every=2), tmp_path / "run")
        for row, _ in first_part:
            if row.iteration == 4:
                break
        first_part.close()
        rest = [row for row, _ in loop.resume(connect, MODEL, tmp_path / "run")]
    assert [row.iteration for row in rest] == [5, 6, 7]
    assert again.shots == bench.shots
    with np.load(folder / "final.npz") as one, np.load(tmp_path / "run" / "final.npz") as other:
        assert np.array_equal(flat(dict(one)), flat(dict(other)))
    mine, theirs = read_state(folder), read_state(tmp_path / "run")
    assert "information" in mine
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.long
def test_the_history_says_when_something_was_dealt_with(tmp_path):
    bench = Bench(SHEET)
    with serving(bench) as connect:
        connect().line.write("DIAG:FAUL NAN,2")
        connect().line.write("DIAG:FAUL RANDOM,6")
        for row, _ in loop.run(connect, MODEL, plan(iterations=5, renew=True), tmp_path / "run"):
            if row.iteration == 2:
                bench.hidden.offset["omega"][:] += 1.0  # somebody has knocked against the table
    rows = history.read(tmp_path / "run" / "history.csv")
    assert rows[1].event == "1 invalid"
    assert rows[3].event.startswith("renewed χ²")
    assert rows[4].event.startswith("4 unlike the calibration")  # random codes are no noise
    assert bench.shots - 20 == rows[-1].trajectories == 5 * 4 + 1 + 4  # 20 at the end


def test_a_plan_that_cannot_be_is_named(tmp_path):
    with pytest.raises(ValueError, match="'trainig'"):
        plan(calibration="trainig")
    with pytest.raises(ValueError, match=r"`forget_after`.*0\.5"):
        plan(forget_after=0.5)
    without = MODEL._replace(methods=MODEL.methods._replace(self_calibration=None))
    with pytest.raises(ValueError, match="`unknowns`, `x0` and `t`"):
        loop.run(lambda: None, without, plan(), tmp_path / "none")
    with pytest.raises(ValueError, match="'gain'"):
        network_model(SHEET.nominal, interval=0.01, spread={"gain": 0.2})


def test_the_command_line_takes_it(tmp_path):
    with server.background(Bench(SHEET)) as port:
        words = [
            "insitu",
            "train",
            f"tcp://127.0.0.1:{port}",
            "--out",
            str(tmp_path / "run"),
            "--set",
            "points=101",
        ]
        done = CliRunner().invoke(
            app,
            [*words, "--calibration", "training", "--iterations", "2", "--set", "forget_after=20"],
        )
    assert done.exit_code == 0, done.output
    assert "8 trajectories" in done.output  # four of the check
    kept = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (kept["calibration"], kept["forget_after"], kept["trajectories"]) == (
        "training",
        20.0,
        2,
    )
