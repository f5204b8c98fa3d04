"""Trainings in shards: one history, with a cluster and without, and what cannot be divided."""

import numpy as np
import pytest
from typer.testing import CliRunner

from cuda_device import has_gpu
from fluctua.cli.app import app
from fluctua.runs import lattice as runs
from fluctua.runs.build import build
from fluctua.runs.config import PRESETS, apply_changes
from fluctua.runs.evaluate import evaluate
from fluctua.scale import distributed as scaling
from fluctua.scale.distributed import Distributed
from lattice_runs import TINY, assert_same_run, read_rows

CONFIG = apply_changes(
    PRESETS["demo"],
    {
        **TINY,
        "ensemble.trajectories": 64,
        "ensemble.shards": 3,
        "baseline.kind": "carried",
        "iterations": 4,
    },
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
    runs.complete(apply_changes(CONFIG, {"ensemble.shards": 0}), tmp_path / "sum")
    for a, b in zip(read_rows(tmp_path / "shards"), read_rows(tmp_path / "sum"), strict=True):
        np.testing.assert_allclose(
            a.J, b.J, rtol=1e-5
        )  # float32, and a rule that divides by small numbers
        assert a.trajectories == b.trajectories


@pytest.mark.parametrize("kind", ["none", "time", "binned", "twin"])
def test_baselines_that_can_be_divided(kind):
    made = build(apply_changes(CONFIG, {"baseline.kind": kind})).estimator
    assert isinstance(made.estimator if kind == "twin" else made, Distributed)


def test_what_cannot_be_divided_is_said_before_a_folder_is_made(tmp_path):
    with pytest.raises(ValueError, match="'optimal' compares all"):
        runs.run(apply_changes(CONFIG, {"baseline.kind": "optimal"}), tmp_path / "run")
    with pytest.raises(ValueError, match=r"`ensemble.shards` = 3 .* `device`"):
        runs.run(
            apply_changes(CONFIG, {"device.gain_error": 0.1, "baseline.kind": "twin"}),
            tmp_path / "run",
        )
    with pytest.raises(ValueError, match=r"`ensemble.shards` = 0"):
        runs.run(apply_changes(CONFIG, {"ensemble.shards": 0}), tmp_path / "run", cluster="local")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["time", "carried", "twin"])
def test_the_gpus_are_those_of_the_workers(kind, monkeypatch):
    """The process that trains needs none, nor CuPy."""
    handed_over = []
    monkeypatch.setattr(
        scaling, "distributed", lambda estimator, *_, **__: handed_over.append(estimator)
    )
    build(apply_changes(CONFIG, {"backend": "cuda", "baseline.kind": kind}), "there")
    estimator = handed_over[0]
    inner = {"twin": "estimator", "carried": "fused"}.get(kind)
    assert (getattr(estimator, inner) if inner else estimator).options.backend == "cuda"


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_what_gpus_elsewhere_have_trained_is_measured_here():
    parts = build(CONFIG)
    here = evaluate(CONFIG, parts.theta, trajectories=8)
    assert (
        evaluate(apply_changes(CONFIG, {"backend": "cuda"}), parts.theta, trajectories=8).J
        == here.J
    )


def test_the_command_writes_shards_into_the_configuration(tmp_path):
    shown = CliRunner().invoke(app, ["train", "demo", "--cluster", "auto", "--show"])
    assert "shards = 64 " in shown.output
    shown = CliRunner().invoke(
        app, ["train", "demo", "--cluster", "auto", "--set", "ensemble.shards=7", "--show"]
    )
    assert "shards = 7 " in shown.output
    assert "shards = 0 " in CliRunner().invoke(app, ["train", "demo", "--show"]).output
