"""Trainings in shards: one history, with a cluster and without, and what cannot be divided."""

import numpy as np
import pytest

from fluctua.runs import train as runs
from fluctua.runs.build import build
from fluctua.runs.config import PRESETS, changed
from fluctua.scale.distributed import Distributed
from lattice_runs import TINY, assert_same_run, rows_of

CONFIG = changed(
    PRESETS["demo"],
    {**TINY, "ensemble.trajectories": 64, "ensemble.shards": 3, "baseline.kind": "carried", "iterations": 4},
)


def test_a_run_in_shards_goes_on_to_the_bit(tmp_path):
    summary = runs.complete(CONFIG, tmp_path / "whole")
    for row, _ in runs.run(CONFIG, tmp_path / "cut"):
        if row.iteration == 1:
            break
    list(runs.resume(tmp_path / "cut"))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert summary["trajectories"] == 4 * 64 + 128  # the first iteration ran a pilot


def test_shards_change_the_rounding_and_nothing_else(tmp_path):
    runs.complete(CONFIG, tmp_path / "shards")
    runs.complete(changed(CONFIG, {"ensemble.shards": 0}), tmp_path / "sum")
    for a, b in zip(rows_of(tmp_path / "shards"), rows_of(tmp_path / "sum"), strict=True):
        np.testing.assert_allclose(a.J, b.J, rtol=1e-5)  # float32, and a rule that divides by small numbers
        assert a.trajectories == b.trajectories


@pytest.mark.parametrize("kind", ["none", "time", "binned", "twin"])
def test_baselines_that_can_be_divided(kind):
    made = build(changed(CONFIG, {"baseline.kind": kind})).estimator
    assert isinstance(made.estimator if kind == "twin" else made, Distributed)


def test_what_cannot_be_divided_is_said_before_a_folder_is_made(tmp_path):
    with pytest.raises(ValueError, match="'optimal' compares all"):
        runs.run(changed(CONFIG, {"baseline.kind": "optimal"}), tmp_path / "run")
    with pytest.raises(ValueError, match=r"`ensemble.shards` = 3 .* `device`"):
        runs.run(changed(CONFIG, {"device.gain_error": 0.1}), tmp_path / "run")
    with pytest.raises(ValueError, match=r"`ensemble.shards` = 0"):
        runs.run(changed(CONFIG, {"ensemble.shards": 0}), tmp_path / "run", cluster="local")
    assert not (tmp_path / "run").exists()
