"""Records with gaps and several records: an Ornstein–Uhlenbeck process whose answer is exact."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core import check
from fluctua.core.scores import Step, full_score
from fluctua.processes.stationary import autocorrelation_time, memory_time, stationary
from numeric import linear_chain, value_and_slope
from problems import flat

DT = 0.05
PROCESS = fl.Process(lambda th, x: th["k"] * (th["m"] - x), lambda th, x: 0.6 * jnp.ones(1))
THETA = {"k": np.array(1.5), "m": np.array(0.4)}
SQUARE = lambda th, x: x[0] ** 2
LOST = 7
"""Samples that are missing in every gap."""


def make_chain(theta):
    return linear_chain([[-theta["k"]]], [theta["k"] * theta["m"]], [0.6], DT)


def average_square(theta):
    chain = make_chain(theta)
    return chain.mean[0] ** 2 + chain.covariance[0, 0]


@cache
def exact():
    _, slope = value_and_slope(average_square, THETA)
    return np.array([slope["k"], slope["m"]])


def cut(x, starts):
    """Pieces of a trace x (N, 1) that begin at `starts`; samples are missing before each."""
    ends = [*(start - LOST for start in starts[1:]), len(x)]
    return [
        fl.Trajectories(DT * np.arange(last - first), x[None, first:last])
        for first, last in zip(starts, ends, strict=True)
    ]


@pytest.fixture(scope="module")
def trace():
    return make_chain(THETA).simulate(12_000, 1, 0)[0]


STARTS = [0, 3000, 3020, 7500]


def test_one_record_in_a_list_is_that_record(trace):
    record = fl.Trajectories(DT * np.arange(len(trace)), trace[None])
    one = stationary(PROCESS, SQUARE, THETA, record)
    same = stationary(PROCESS, SQUARE, THETA, [record])
    np.testing.assert_array_equal(one.batches, same.batches)
    assert one.pieces is None
    assert same.pieces.count == 1
    assert same.duration == one.duration


def test_products_never_reach_across_a_gap(trace):
    """Batches against their definition, piece by piece in plain loops."""
    pieces = cut(trace, STARTS)
    window = 2.0
    answer = stationary(PROCESS, SQUARE, THETA, pieces, window=window)
    lags = round(window / DT)
    length = round(answer.length / DT)
    model = check.process(PROCESS)
    score = jax.vmap(
        lambda x, after: jnp.stack(
            jax.tree.leaves(full_score(model, THETA, Step(x, after, jnp.zeros(()), DT, None)))
        )
    )
    score = jax.jit(score)
    # the last sample of all is the end of a step and no reward
    samples = np.concatenate([piece.x[0, :, 0] for piece in pieces])[:-1]
    mean = np.mean(samples**2)
    expected = []
    for piece in pieces:
        x = piece.x[0]
        u = np.asarray(score(x[:-1], x[1:]))
        g = x[:-1, 0] ** 2 - mean
        for start in range(lags, len(g) - length + 1, length):
            products = [g[n] * u[n - lags : n].sum(axis=0) for n in range(start, start + length)]
            expected.append(np.mean(products, axis=0))
    expected = np.array(expected) / (1 - lags / len(samples))
    np.testing.assert_allclose(answer.batches, expected, rtol=1e-6, atol=1e-9)
    assert len(answer.starts) == len(expected)


def test_a_piece_shorter_than_a_window_is_left_out_and_reported(trace):
    pieces = cut(trace, STARTS)
    answer = stationary(PROCESS, SQUARE, THETA, pieces, window=2.0)
    without = stationary(PROCESS, SQUARE, THETA, [pieces[0], *pieces[2:]], window=2.0)
    assert len(answer.batches) == len(without.batches)
    assert answer.pieces.count == 4
    assert answer.pieces.left_out == 1
    short = len(pieces[1].t) - 1
    assert answer.pieces.lost == pytest.approx(short * DT)
    batches = len(answer.batches) * answer.length
    assert answer.pieces.used == pytest.approx(batches / answer.duration)
    assert answer.duration == pytest.approx(DT * sum(len(piece.t) - 1 for piece in pieces))
    assert "left out" in repr(answer)


def test_correlations_of_pieces_are_those_of_the_process():
    """1 + 2Σρ of an autoregression with ρ(k) = r^k is (1 + r)/(1 − r), in pieces of about four
    correlation times too; across their ends there is no correlation.
    """
    r, rng = 0.9, np.random.default_rng(2)
    each, count = 80, 4000
    x = np.zeros((count, each))
    x[:, 0] = rng.normal(size=count)
    for n in range(1, each):
        x[:, n] = r * x[:, n - 1] + np.sqrt(1 - r**2) * rng.normal(size=count)
    cuts = each * np.arange(1, count)
    known = (1 + r) / (1 - r)
    # summed to five of its own values; N = 320,000: errors of √(2(2·5+1)·τ/N) of it (Sokal)
    error = np.sqrt(2 * 11 * known / x.size)
    series = x.reshape(1, -1)
    measured = autocorrelation_time(series, cuts)
    assert abs(measured / known - 1) < 4 * error
    assert abs(memory_time(series, cuts) / known - 1) < 4 * error
    # pairs across ends, k of them at lag k in each piece, would take this much
    missing = 2 * r / (1 - r) ** 2 / each
    assert measured - autocorrelation_time(series) > missing / 2


def test_records_that_do_not_belong_together_are_refused(trace):
    def record(dt=DT, x=trace, context=None):
        return fl.Trajectories(dt * np.arange(len(x)), x[None], context)

    for records, fact in (
        ([], "got none"),
        ([record(), record(dt=2 * DT)], "0.05 to 0.1"),
        ([record(), record(x=np.repeat(trace, 2, axis=1))], r"\[1, 2\]"),
        ([record(context=np.array([1.0])), record(context=np.array([2.0]))], "one context"),
    ):
        with pytest.raises(ValueError, match=fact):
            stationary(PROCESS, SQUARE, THETA, records)
    gap = record()._replace(t=DT * (np.arange(len(trace)) + (np.arange(len(trace)) > 500)))
    with pytest.raises(ValueError, match=r"uniform.*list of records"):
        stationary(PROCESS, SQUARE, THETA, gap)


def unexamined_score(process, theta, step):
    """The full score, as one of one's own: its law is not known, and residuals are not examined."""
    return full_score(process, theta, step)


@pytest.mark.long
def test_errors_of_pieces_cover():
    """80 records of 14,000 steps with gaps, in pieces of unequal lengths, against the answer.

    Their scatter is the error that each of them has. Gaps that are short against the correlations
    do not make it smaller: it is that of the whole records.
    """
    repeats = 80
    x = make_chain(THETA).simulate(14_000, repeats, 4)

    def average(records):
        options = {"window": 3.0, "score": unexamined_score}
        return stationary(PROCESS, SQUARE, THETA, records, **options).estimate

    errors, scatter, covered, wholes = [], [], [], []
    for number, one in enumerate(x):
        e = average(cut(one, [0, 3000, 5000, 5020, 9500]))
        errors.append(flat(e.gradient) - exact())
        scatter.append(flat(e.stderr))
        low, high = (flat(side) for side in e.interval)
        covered.append((low < exact()) & (exact() < high))
        if number < 30:
            whole = fl.Trajectories(DT * np.arange(len(one)), one[None])
            wholes.append(scatter[-1] / flat(average(whole).stderr))
    deviation = np.std(errors, axis=0, ddof=1)
    # a window of 4.5 time constants leaves 1 % of the gradient out
    lost = 0.011 * np.abs(exact())
    assert np.all(np.abs(np.mean(errors, axis=0)) < 4 * deviation / np.sqrt(repeats) + lost)
    # a standard deviation from 120 of them is known to 1/√240, for skewed ones to 1.5 times that
    assert np.all(np.abs(np.mean(scatter, axis=0) / deviation - 1) < 4 * 1.5 / np.sqrt(240))
    missed = 1 - np.mean(covered, axis=0)
    assert np.all(missed < 0.05 + 4 * np.sqrt(0.05 * 0.95 / repeats))
    assert np.all(np.mean(wholes, axis=0) > 1 - 4 * np.std(wholes, axis=0) / np.sqrt(30))
