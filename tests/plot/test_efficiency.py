"""The picture of J against trajectories: its bands are what the run folders say."""

from pathlib import Path

import numpy as np
import pytest

from fluctua.plot.efficiency import Curve, bands, draw, read_curve, spent_until

RUNS = Path(__file__).parents[2] / "results" / "sample_efficiency"


def curve(label: str, seed: int, rise: float) -> Curve:
    spent = np.arange(10, 1010, 10)
    return Curve(label, 0.0, seed, spent, rise * spent / spent[-1], None)


def test_a_band_is_the_mean_and_the_range_of_its_seeds():
    band = bands([curve("twin correction", 0, 0.4), curve("twin correction", 1, 0.6)])[0]
    assert band.seeds == 2
    assert band.mean[-1] == pytest.approx(0.5)
    assert (band.low[-1], band.high[-1]) == (pytest.approx(0.4), pytest.approx(0.6))


def test_the_best_comes_first():
    labels = ["paper's rule, time-only", "twin 20 % wrong", "twin correction", "twin 5 % wrong"]
    told = [band.label for band in bands([curve(label, 0, 0.5) for label in labels])]
    assert told == ["twin correction", "twin 5 % wrong", "twin 20 % wrong", "paper's rule, time-only"]


def test_trajectories_until_a_level():
    assert spent_until(curve("twin correction", 0, 0.5), 0.25) == 500
    assert spent_until(curve("twin correction", 0, 0.5), 0.6) is None


def test_the_committed_runs_are_read_and_drawn():
    found = [read_curve(RUNS / name) for name in ("fast_0_0", "fast5_0_0", "paper_0_1")]
    assert [c.label for c in found] == ["twin correction", "twin 5 % wrong", "paper's rule, time-only"]
    assert all(c.finer is not None and c.spent[-1] > c.spent[0] for c in found)
    texts = [text.get_text() for axes in draw(found).axes for text in axes.get_legend().get_texts()]
    assert texts == ["twin correction", "twin 5 % wrong", "paper's rule, time-only"]
