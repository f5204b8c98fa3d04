"""The check of a virtual bench over its socket, by its own model and by name."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua.cli.app import app
from fluctua.insitu.bench import device, server
from fluctua.insitu.bench.box import Bench, FaultPlan, parse_fault

SHEET = device.Sheet(2, 2, seed=3, interval=0.02, ageing=0.0)


def check(bench, *words):
    """Exit status, and what the check report."""
    with server.background(bench) as port:
        command = ["insitu", "check", f"tcp://127.0.0.1:{port}", "--json", "--set", "points=101"]
        done = CliRunner().invoke(app, [*command, *words])
    return done.exit_code, json.loads(done.stdout)[0]


@pytest.mark.long
def test_a_bench_goes_with_its_own_model():
    bench = Bench(SHEET)
    status, report = check(bench, "--iterations", "10")
    assert (status, report["problems"]) == (0, [])
    assert bench.shots == report["trajectories"] == 62
    assert [knob["limits"]["high"] for knob in report["knobs"]] == [3.0, 2.5]
    assert report["notes"] == ["knobs that the model does not have: chi"]
    assert report["record"]["channels"][4] == "Im psi[0]"
    assert np.abs(np.array(report["residuals"]["residuals"]["v"]) - 1).max() < 0.1
    assert report["training"]["trajectories"] == 6 * 50 + 10 * 300 + 300  # and at the end


@pytest.mark.long
def test_a_knob_that_was_left_turned_is_seen_in_the_residuals():
    """χ stays as an earlier training left it; the model has none."""
    bench = Bench(SHEET)
    bench.settings["chi"] = np.full(4, 0.05)
    status, report = check(bench)
    assert status == 1
    assert "not those of the model" in report["problems"][0]


def test_a_bench_that_repeats_itself_is_found():
    status, report = check(Bench(SHEET, FaultPlan((parse_fault("frozen@2x9"),))))
    assert status == 1
    assert "the same as earlier ones" in report["problems"][0]


def test_bounds_beyond_the_limits_of_the_bench_are_refused():
    status, report = check(Bench(SHEET), "--set", "omega_max=4")
    assert (status, report["trajectories"]) == (1, 0)
    assert "takes omega from -3 to 3; the bounds of the model are -4 … 4" in report["problems"][0]
