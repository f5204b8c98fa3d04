"""The picture of J against trajectories: its bands are what the run folders, and the table kept
of them, hold.
"""

from pathlib import Path

import numpy as np
import pytest

import sample_efficiency as study
from figures import assert_legible
from fluctua.runs import lattice as runs
from fluctua.runs.config import PRESETS, apply_changes
from sample_efficiency import EXACT, Curve

pytestmark = pytest.mark.long

KEPT = Path(__file__).parents[2] / "results" / "sample_efficiency" / "curves.csv.gz"


def curve(label: str, seed: int, rise: float) -> Curve:
    spent = np.arange(10, 1010, 10)
    return Curve(label, 0.0, seed, spent, rise * spent / spent[-1], None)


def test_a_band_is_the_mean_and_the_range_of_its_seeds():
    band = study.bands([curve(EXACT, 0, 0.4), curve(EXACT, 1, 0.6)])[0]
    assert band.mean[-1] == pytest.approx(0.5)
    assert (band.low[-1], band.high[-1]) == (pytest.approx(0.4), pytest.approx(0.6))


def test_the_best_comes_first():
    labels = ["paper's rule, time-only", "twin 20 % wrong", EXACT, "twin 5 % wrong"]
    order = [band.label for band in study.bands([curve(label, 0, 0.5) for label in labels])]
    assert order == [EXACT, "twin 5 % wrong", "twin 20 % wrong", "paper's rule, time-only"]


def test_trajectories_until_a_level():
    assert study.spent_until(curve(EXACT, 0, 0.5), 0.25) == 500
    assert study.spent_until(curve(EXACT, 0, 0.5), 0.6) is None


def test_a_run_folder_becomes_a_curve_that_says_what_its_estimator_knew(tmp_path):
    tiny = {
        "lattice.rows": 2,
        "lattice.columns": 3,
        "task.horizon": 0.5,
        "task.dt": 5e-3,
        "iterations": 3,
        "backend": "cpu",
    }
    runs.complete(apply_changes(PRESETS["fast"], tiny), tmp_path / "run")
    made = study.read_curve(tmp_path / "run")
    assert made.label == "exact model as twin, Adam"
    assert made.spent.tolist() == [16, 32, 48]
    assert made.finer is not None


def test_a_training_with_a_wrong_twin_says_how_wrong(tmp_path):
    tiny = {
        "lattice.rows": 2,
        "lattice.columns": 3,
        "task.horizon": 0.5,
        "task.dt": 5e-3,
        "iterations": 3,
        "ensemble.trajectories": 8,
    }
    study.train_wrong(tmp_path / "run", 0.05, 1, 0.02, tiny)
    made = study.read_curve(tmp_path / "run")
    assert made.label == "twin 5 % wrong, score exact, Adam"
    assert (made.seed, made.spent.tolist()) == (1, [8, 16, 24])


def test_the_kept_table_is_read_and_drawn(tmp_path):
    curves = study.read_curves(KEPT)
    assert {c.sigma_kappa for c in curves} == {0.0, 0.2}
    study.write_curves(tmp_path / "curves.csv", curves)
    for one, other in zip(curves, study.read_curves(tmp_path / "curves.csv"), strict=True):
        assert one._replace(spent=0, J=0) == other._replace(spent=0, J=0)
        assert (other.spent[0], other.spent[-1], other.J[-1]) == (
            one.spent[0],
            one.spent[-1],
            one.J[-1],
        )
    figure = study.draw(curves)
    assert_legible(figure)
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {c.label for c in curves}
