"""Long records of real life: gaps, several files, a slow drift, against an exact answer."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu
from fluctua.cli.app import app
from fluctua.insitu.long_record import prepare_record
from fluctua.insitu.recording.trend import remove_trend, subtract_trend
from problems import flat, tolerance
from steady import steady_average, steady_record

DT = 0.05
PROCESS = fl.Process(lambda th, x: th["k"] * (th["m"] - x), lambda th, x: 0.6 * jnp.ones(1))
THETA = {"k": jnp.array(1.5), "m": jnp.array(0.4)}
SQUARE = lambda th, x: x[0] ** 2
MODEL = insitu.files.RecordingModel(PROCESS, fl.Objective(running=SQUARE), THETA)
SOURCE = """
import fluctua as fl, jax.numpy as jnp
from fluctua.insitu.files import RecordingModel
process = fl.Process(lambda th, x: th["k"] * (th["m"] - x), lambda th, x: 0.6 * jnp.ones(1))
model = RecordingModel(process, fl.Objective(running=lambda th, x: x[0] ** 2))
"""


def exact():
    return flat(jax.grad(lambda th: steady_average(PROCESS, SQUARE, th, DT, 1))(THETA))


def save(path, x, t, **parameters):
    named = {
        f"parameters.{name}": np.asarray(value) for name, value in (THETA | parameters).items()
    }
    np.savez(path, x=np.asarray(x)[None], t=t, **named)
    return path


@pytest.fixture(scope="module")
def trace():
    return np.asarray(steady_record(PROCESS, THETA, DT, 1, jax.random.key(1), 30_000).x[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(SOURCE)
    return f"{path}:model"


def damage(x):
    """A trace with two jumps of its times, a run of NaN and single NaN close together."""
    t = DT * np.arange(len(x))
    x = x.copy()
    x[12_000:12_030] = np.nan
    x[20_000] = x[20_010] = np.nan
    keep = np.ones(len(x), bool)
    keep[4000:4500] = False
    keep[25_000] = False
    return x[keep], t[keep]


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def z_scores(estimate, allowed=0.0):
    """Deviations in standard errors, after what is allowed in units of the gradient."""
    off = np.maximum(np.abs(flat(estimate.gradient) - exact()) - allowed * np.abs(exact()), 0)
    return off / flat(estimate.stderr)


# --------------------------------------------------------------------------------------------- gaps


def test_pieces_are_the_samples_between_gaps(tmp_path, trace):
    x, t = damage(trace)
    with insitu.files.open(save(tmp_path / "gaps.npz", x, t)) as recording:
        record = prepare_record([recording])
    pieces = record.list_records()
    # 4000 | 4500 … NaN … 20000 | nine samples | 20011 … 25000 | the rest
    bounds = [(0, 4000), (4500, 12_000), (12_030, 20_000), (20_001, 20_010), (20_011, 25_000)]
    bounds.append((25_001, len(trace)))
    assert [piece.x.shape[1] for piece in pieces] == [last - first for first, last in bounds]
    for piece, (first, last) in zip(pieces, bounds, strict=True):
        np.testing.assert_array_equal(piece.x[0], trace[first:last])
    assert record.notes == (
        "cut at 2 jumps of the times and 3 runs of samples that are not finite",
    )


def test_a_record_without_gaps_is_left_as_it_is(tmp_path, trace):
    with insitu.files.open(save(tmp_path / "whole.npz", trace, DT * np.arange(30_001))) as one:
        record = prepare_record([one])
        assert record.recording is one
        assert record.pieces is None
    uneven = DT * np.arange(30_001)
    uneven[500] = uneven[499] + 0.01
    path = save(tmp_path / "uneven.npz", trace, uneven)
    with insitu.files.open(path) as other, pytest.raises(ValueError, match=r"only 0\.01 apart"):
        prepare_record([other])


@pytest.mark.parametrize("baseline", ["time", "twin"])
def test_the_gradient_of_a_record_with_gaps(tmp_path, trace, baseline):
    x, t = damage(trace)
    with insitu.files.open(save(tmp_path / "gaps.npz", x, t)) as recording:
        answer = insitu.estimate_continuing(recording, MODEL, window=4.0, baseline=baseline)
    assert np.all(z_scores(answer.estimate) < tolerance(2))
    assert answer.continuing.pieces.count == 6
    assert answer.continuing.pieces.left_out == 1
    assert answer.residuals.cause == ""


@pytest.mark.long
def test_commands_take_gaps_and_several_files(tmp_path, trace, model):
    x, t = damage(trace)
    first = save(tmp_path / "a.npz", x[:15_000], t[:15_000])
    second = save(tmp_path / "b.npz", x[15_000:], t[15_000:] - t[15_000])
    options = ("--model", model, "--continuing", "--set", "window=4")
    done = run("estimate", first, second, *options, "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    z = [
        (answer["gradient"][n] - e) / answer["stderr"][n]
        for n, e in zip("km", exact(), strict=True)
    ]
    assert np.abs(z).max() < tolerance(2)
    assert answer["continuing"]["pieces"]["count"] == 7
    assert answer["continuing"]["duration"] < DT * len(x)
    # one estimate of both files, with the error of both
    alone = json.loads(run("estimate", first, *options, "--json").stdout)
    assert answer["continuing"]["batches"] > 1.7 * alone["continuing"]["batches"]
    ratio = answer["stderr"]["m"] / alone["stderr"]["m"]
    # known to 1/√(2·batches) each, for skewed batches 1.5 times that
    limit = 4 * 1.5 / np.sqrt(2 * alone["continuing"]["batches"])
    assert abs(ratio - 1 / np.sqrt(2)) < limit
    shown = run("estimate", first, second, *options)
    assert "one record of 2 files: a.npz, b.npz" in shown.stdout
    assert "left out" in shown.stdout
    other = save(tmp_path / "c.npz", x[15_000:], t[15_000:], k=jnp.array(1.7))
    refused = run("estimate", first, other, *options)
    assert refused.exit_code == 2
    assert "1.7" in refused.stderr


# --------------------------------------------------------------------------------------- slow drift


def wander(samples):
    """An offset that moves by three standard deviations of the state, in one and a half turns."""
    return 0.6 * np.cos(3 * np.pi * (np.arange(samples) + 0.5) / samples)[:, None]


def test_a_trend_of_a_whole_trace_is_that_of_its_cosines(trace):
    x = trace + wander(len(trace))
    by_fit = subtract_trend(x, np.arange(len(x)), 8000.0, np.zeros(0, int), "x")
    np.testing.assert_allclose(by_fit.x, remove_trend(x, 8000.0, "x"), atol=1e-9)
    np.testing.assert_allclose(by_fit.x.mean(axis=0), x.mean(axis=0), atol=1e-12)


def test_a_trend_with_gaps_is_that_of_the_times_that_there_are(trace):
    """Least squares on half of the samples find an offset that the basis has, to the noise."""
    position = np.concatenate([np.arange(9000), np.arange(21_000, 30_001)])
    offset = np.cos(2 * np.pi * (position + 0.5) / 30_001)[:, None]
    x = trace[position]
    plain, moved = (
        subtract_trend(v, position, 10_000.0, np.array([9000]), "x").x for v in (x, x + offset)
    )
    np.testing.assert_allclose(moved - moved.mean(), plain - plain.mean(), atol=1e-9)


def test_a_drift_that_is_as_fast_as_the_system_is_refused(trace):
    with pytest.raises(ValueError, match=r"--detrend would take .* Give a time of"):
        subtract_trend(trace, np.arange(len(trace)), 300.0, np.zeros(0, int), "x")
    with pytest.raises(ValueError, match="nothing in it varies so slowly"):
        subtract_trend(trace, np.arange(len(trace)), 1e6, np.zeros(0, int), "x")


@pytest.mark.long
def test_a_slow_drift_is_subtracted(tmp_path, trace, model):
    x, t = damage(trace)
    offset = damage(wander(len(trace)))[0]
    # an offset that is there on average is taken for the system's own
    path = save(tmp_path / "drift.npz", x + offset - np.nanmean(offset), t)
    options = ("--model", model, "--continuing", "--set", "window=4", "--json")
    drifting = run("estimate", path, *options)
    assert drifting.exit_code == 2 or "not in a steady state" in drifting.stderr
    done = run("estimate", path, *options, "--detrend", 500)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    note = next(line for line in answer["used"]["notes"] if line.startswith("detrended"))
    lost = float(note.split("about ")[1].split("%")[0]) / 100
    assert 0 < lost < 0.02
    off = np.array([answer["gradient"][n] - e for n, e in zip("km", exact(), strict=True)])
    stderr = np.array([answer["stderr"][n] for n in "km"])
    assert np.all(np.abs(off) < tolerance(2) * stderr + lost * np.abs(exact()))
    for wrong, fact in (
        (("--detrend", "-1", "--continuing"), "positive time; got -1"),
        (("--detrend", "500"), "--continuing"),
    ):
        refused = run("estimate", path, "--model", model, *wrong)
        assert refused.exit_code == 2
        assert fact in refused.stderr


@pytest.mark.long
def test_errors_of_detrended_records_cover():
    """70 records of 12,000 steps with gaps and a drift, against the answer.

    Window and trend leave out at most 1.1 % and 2 % of the gradient.
    """
    repeats = 70
    x = np.asarray(
        steady_record(PROCESS, THETA, DT, 1, jax.random.key(9), 12_000, traces=repeats).x
    )
    position = np.concatenate([np.arange(5000), np.arange(5300, 12_001)])
    cuts = np.array([5000])
    errors, covered = [], []
    for one in x:
        offset = wander(len(one))[position]
        drifting = one[position] + offset - offset.mean()
        steady = subtract_trend(drifting, position, 6000.0, cuts, "x").x
        pieces = [
            fl.Trajectories(DT * np.arange(len(part)), part[None])
            for part in np.split(steady, cuts)
        ]
        e = fl.stationary(PROCESS, SQUARE, THETA, pieces, window=3.0).estimate
        errors.append(flat(e.gradient) - exact())
        low, high = (flat(side) for side in e.interval)
        covered.append((low < exact()) & (exact() < high))
    allowed = 0.031 * np.abs(exact())
    deviation = np.std(errors, axis=0, ddof=1) / np.sqrt(repeats)
    assert np.all(np.abs(np.mean(errors, axis=0)) < 4 * deviation + allowed)
    missed = 1 - np.mean(covered, axis=0)
    assert np.all(missed < 0.05 + 4 * np.sqrt(0.05 * 0.95 / repeats))
