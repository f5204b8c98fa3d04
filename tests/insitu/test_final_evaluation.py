"""J of the settings reached, measured on the instrument once the training is over."""

import csv
import json

import numpy as np
import pytest

import own_lab as lab
from fluctua import insitu
from fluctua.insitu import files
from fluctua.insitu.device_training.plan import count_work
from fluctua.insitu.instrument import InstrumentError
from fluctua.store import history

PLAN = {"iterations": 3, "trajectories": 30, "probes": 2, "probe_trajectories": 30}
PROBES = 2 * 30


class Trap(lab.Trap):
    """An instrument of its own for each test, which may fail from some acquisition on."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory
        self.rng = memory["rng"]

    def acquire(self):
        self.memory["acquired"] = self.memory.get("acquired", 0) + 1
        if self.memory["acquired"] > self.memory.get("fails_after", 10**9):
            raise InstrumentError("no trigger")
        return super().acquire()

    def health(self):
        return super().health()._replace(identity=self.memory["identity"])


def make_connect(seed=0, **memory):
    memory["rng"] = np.random.default_rng(seed)
    memory["identity"] = f"trap {seed}"
    return (lambda: Trap(memory)), memory


def train(connect, folder, **changes):
    plan = insitu.Plan(**{**PLAN, "first_pause": 0.0, "attempts": 2, **changes})
    return list(insitu.run(connect, lab.ready, plan, folder))


def exact_value(force):
    """E[−(x_T − 1)²] of the device with Euler's steps, and the variance of one return."""
    mean = 0.0
    variance = 0.0
    for dt in np.diff(lab.T):
        mean += (lab.GAIN * force - mean) * dt
        variance = (1 - dt) ** 2 * variance + lab.NOISE**2 * dt
    away = mean - 1
    return -(away**2) - variance, 4 * away**2 * variance + 2 * variance**2


def read_final(folder):
    summary = json.loads((folder / "summary.json").read_text())
    with np.load(folder / "final.npz") as settings:
        return summary, float(settings["force"])


def count_recorded(folder):
    return sum(files.open(path).count for path in (folder / "recordings").glob("*.nc"))


@pytest.mark.parametrize("calibration", ["probes", "training"])
def test_the_settings_reached_are_measured(tmp_path, calibration):
    connect, _ = make_connect()
    train(connect, tmp_path / "run", calibration=calibration, final_trajectories=500)
    summary, force = read_final(tmp_path / "run")
    final = summary["final"]
    value, variance = exact_value(force)
    assert final["J_stderr"] == pytest.approx(np.sqrt(variance / 500), rel=0.2)
    assert abs(final["J"] - value) < 4 * final["J_stderr"]
    measured = (PROBES if calibration == "probes" else 0) + 3 * 30
    assert history.read(tmp_path / "run" / "history.csv")[-1].trajectories == measured
    assert summary["trajectories"] == measured + 500 == count_recorded(tmp_path / "run")
    text = (tmp_path / "run" / "summary.txt").read_text()
    assert "measured at the end with 500 trajectories" in text
    assert f"{measured + 500} trajectories on the instrument, 500 of them at the end" in text


def test_its_number_is_that_of_an_iteration_or_as_given(tmp_path):
    assert insitu.Plan(trajectories=300).final_count == 300
    assert insitu.Plan(trajectories=2).final_count == 20
    assert insitu.Plan(trajectories=300, final_trajectories=7).final_count == 7
    assert insitu.Plan(iterations=0).final_count == 0
    none = insitu.Plan(**PLAN, final_trajectories=0)
    assert count_work(insitu.Plan(**PLAN)).trajectories == count_work(none).trajectories + 30
    with pytest.raises(ValueError, match="`final_trajectories`.*got 1"):
        insitu.Plan(final_trajectories=1)
    connect, _ = make_connect()
    train(connect, tmp_path / "run", final_trajectories=0)
    summary, _ = read_final(tmp_path / "run")
    assert "final" not in summary
    assert summary["trajectories"] == PROBES + 90
    assert "at the end" not in (tmp_path / "run" / "summary.txt").read_text()


def test_an_instrument_that_fails_at_the_end_loses_nothing(tmp_path):
    """Two batches of probes and three of the training are fine. The next resume measures."""
    connect, memory = make_connect(fails_after=5)
    rows = train(connect, tmp_path / "run")
    assert len(rows) == 3
    summary, force = read_final(tmp_path / "run")
    assert "no trigger" in summary["final_failed"]
    assert summary["trajectories"] == PROBES + 90
    assert "the final evaluation failed" in (tmp_path / "run" / "summary.txt").read_text()
    with open(tmp_path / "run" / "incidents.csv", newline="") as file:
        incidents = list(csv.DictReader(file))
    assert {row["iteration"] for row in incidents} == {"final"}
    memory["fails_after"] = 10**9
    assert list(insitu.resume(connect, lab.ready, tmp_path / "run")) == []
    summary, same = read_final(tmp_path / "run")
    assert same == force
    assert summary["final"]["trajectories"] == 30
    assert summary["trajectories"] == PROBES + 90 + 30 == count_recorded(tmp_path / "run")


def test_a_complete_run_is_not_measured_again_and_a_longer_one_counts_both(tmp_path):
    connect, memory = make_connect()
    train(connect, tmp_path / "run")
    acquired = memory["acquired"]
    before = (tmp_path / "run" / "summary.txt").read_text()
    assert list(insitu.resume(connect, lab.ready, tmp_path / "run")) == []
    assert memory["acquired"] == acquired
    assert (tmp_path / "run" / "summary.txt").read_text() == before
    rows = list(
        insitu.resume(connect, lab.ready, tmp_path / "run", iterations=4, final_trajectories=40)
    )
    assert rows[-1][0].trajectories == PROBES + 90 + 30 + 30
    summary, _ = read_final(tmp_path / "run")
    assert summary["trajectories"] == PROBES + 90 + 30 + 30 + 40 == count_recorded(tmp_path / "run")
    assert not (tmp_path / "run" / "incidents.csv").exists()  # nothing counts as cut off


def test_several_devices_measure_together(tmp_path):
    connects = [make_connect(seed)[0] for seed in (0, 1)]
    train(connects, tmp_path / "run", final_trajectories=400)
    summary, force = read_final(tmp_path / "run")
    value, variance = exact_value(force)
    assert abs(summary["final"]["J"] - value) < 4 * np.sqrt(variance / 400)
    assert summary["final"]["trajectories"] == 400
    assert summary["trajectories"] == 2 * PROBES + 3 * 30 + 400
