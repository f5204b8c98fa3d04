"""The result of a training on an instrument: J at both ends, and the settings reached."""

import numpy as np
import pytest

import own_lab as lab
from fluctua import insitu
from fluctua.insitu.device_training.result import (
    average_end,
    describe_result,
    summarise_result,
)
from fluctua.store.history import Row


def make_rows(values, error=0.02, every=1):
    """A history in which one of `every` iterations measures."""
    return [
        Row(k, k, J, error, 0 if k % every else 100, 100 * (k + 1), 1.0, 0.1)
        for k, J in enumerate(values)
    ]


def test_the_end_is_the_mean_of_the_last_tenth():
    rows = make_rows([0.0] * 36 + [1.0, 2.0, 3.0, 4.0])
    assert average_end(rows) == (pytest.approx(2.5), pytest.approx(0.02 / np.sqrt(4)), 4)
    assert average_end(make_rows([3.0])) == (3.0, 0.02, 1)


def test_differences_between_devices_are_not_averaged_away():
    assert average_end(make_rows([0.0] * 40), devices=2).J_stderr == pytest.approx(0.02)


def test_iterations_that_did_not_measure_are_left_out():
    rows = make_rows([1.0 if k % 2 == 0 else 7.0 for k in range(40)], every=2)
    assert average_end(rows) == (pytest.approx(1.0), pytest.approx(0.02 / np.sqrt(2)), 2)
    text = describe_result(summarise_result(rows), {}, lab.ready)
    assert "mean of the last 2 iterations that measured" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "force = 0.5"),
        (4.0, "force = 4   at its upper bound"),
        (-4.0, "force = -4   at its lower bound"),
        ([4.0, 0.25, -4.0], "force = 4, 0.25, -4   2 of 3 at a bound"),
        (np.linspace(-1.0, 1.0, 7), "force = -1 … 1 (7 values)"),
    ],
)
def test_settings_are_listed_with_those_at_their_bounds(value, text):
    model = lab.ready._replace(knobs={"force": insitu.Knob(value, bounds=(-4.0, 4.0))})
    summary = summarise_result(make_rows([0.5, 1.0]))
    lines = describe_result(summary, {"force": np.array(value)}, model).splitlines()
    assert lines[0] == "J before   0.500 ± 0.020   the first iteration"
    assert lines[1] == "J after    1.000 ± 0.020   the last iteration"
    assert lines[2] == "training   2 iterations, 200 trajectories on the instrument"
    assert lines[3] == f"settings   {text}"
