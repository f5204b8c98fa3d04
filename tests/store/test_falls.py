"""A fall of J is reported where it is no chance, with and without errors of single rows."""

import numpy as np
import pytest

from fluctua.store import history, summary

NOISE = 0.3
EMPTY = dict.fromkeys(history.Row._fields, 0)


def make_rows(course, seed, has_errors):
    noise = NOISE * np.random.default_rng(seed).normal(size=len(course))
    error = NOISE if has_errors else np.nan  # of one trajectory per iteration
    return [
        history.Row(**{**EMPTY, "row": i, "iteration": i, "J": J, "J_stderr": error})
        for i, J in enumerate(course + noise)
    ]


@pytest.mark.parametrize("has_errors", [True, False])
def test_falls_are_reported_and_noise_is_not(has_errors):
    """A fall of 2 is 18 standard errors of nine rows. The highest of 52 means of nine is 2.5 of
    them above the rest, and Student's t of 8 degrees exceeds 6 in 2 of 10,000 cases.
    """
    level = np.ones(60)
    fallen = np.where(np.arange(60) < 40, 3.0, 1.0)
    final = {"J": 1.0, "J_stderr": 0.05}
    for seed in range(20):
        assert summary.find_fall(make_rows(level, seed, has_errors), final) == {}
    peak = summary.find_fall(make_rows(fallen, 0, has_errors), final)["peak"]
    assert peak["J"] == pytest.approx(3.0, abs=4 * NOISE / 3)
    assert peak["J_stderr"] == pytest.approx(NOISE / 3, rel=0.8)
    assert peak["iteration"] < 40


def test_an_end_without_an_error_is_not_compared():
    rows = make_rows(np.where(np.arange(60) < 40, 3.0, 1.0), 0, True)
    assert summary.find_fall(rows, {"J": 1.0, "J_stderr": np.nan}) == {}


def test_steps_are_not_compared_by_a_few_trajectories():
    """Four standard errors: of two trajectories each that is chance in one of twenty cases."""
    final, finer = {"J": 0.0, "J_stderr": 0.1}, {"J": 0.4 * 2**0.5, "J_stderr": 0.1}
    for count, found in ((2, {}), (256, {"step_matters": pytest.approx(4.0)})):
        assert summary.compare_steps(final | {"trajectories": count}, finer) == found
