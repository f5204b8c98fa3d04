"""Tests over every step of recorded trajectories: the drift, the scores, independence."""

import re
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.likelihood.alternatives import EVERY_STEP, judge
from fluctua.core.likelihood.guard import examine, examine_batch, find_wrong_score

T = np.linspace(0, 2, 201)
CENTRE = {"c": jnp.array(0.5)}
REWARD = fl.Objective(terminal=lambda theta, x: x[0])


@cache
def make_trap(rate):
    return fl.Process(lambda theta, x: rate * (theta["c"] - x), lambda theta, x: 0.5 * jnp.ones(1))


@cache
def record_trap(rate, count, end=2.0):
    """Every 0.01."""
    t = np.linspace(0, end, round(100 * end) + 1)
    record = fl.simulator(make_trap(rate), np.zeros(1), t)(jax.random.key(5), CENTRE, count)
    return fl.Trajectories(t, np.asarray(record.x))


def warn_texts(*arguments, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fl.gradient(*arguments, **options)
    return [str(one.message) for one in caught]


def test_a_rate_outside_of_theta_is_seen_in_every_step():
    """Along its own drift a rate off by ε shows at ε√Σd²: 20 % in 400,000 steps at 9 errors.

    20,000 steps, those of a sample, have 2 of them.
    """
    data = record_trap(1.2, 2000)
    cause = examine(make_trap(1.0), CENTRE, data).cause
    factor, errors = re.search(r"about (\S+) times .* \((\S+) standard errors", cause).groups()
    assert abs(float(factor) - 1.2) < 4 * 0.2 / float(errors)
    d = np.asarray(1.0 * (0.5 - data.x[:, :-1])) * np.sqrt(0.01) / 0.5
    assert abs(float(errors) - 0.2 * np.sqrt(np.sum(d**2))) < 4
    assert examine_batch(make_trap(1.0), CENTRE, data).residuals.cause == ""
    assert examine(make_trap(1.2), CENTRE, data).cause == ""


def test_chunks_and_whole_give_the_same_sums():
    data = record_trap(1.2, 2000)
    x = np.asarray(data.x)
    parts = [fl.Trajectories(T, x[:1000]), fl.Trajectories(T, x[1000:])]
    whole = examine(make_trap(1.0), CENTRE, data)
    chunks = examine(make_trap(1.0), CENTRE, parts[0], every=parts)
    assert (whole.steps, chunks.steps) == (400_000, 400_000)
    np.testing.assert_allclose(whole.v, chunks.v, rtol=1e-5)


def test_samples_too_far_apart_for_euler_are_named():
    """kΔt = 0.1: an Euler step is off by 5 % of the drift, which 400,000 steps show."""
    fine = record_trap(1.0, 10_000, end=4.0)
    coarse = fl.Trajectories(np.linspace(0, 4, 41), np.asarray(fine.x)[:, ::10])
    (text,) = warn_texts(make_trap(1.0), REWARD, CENTRE, coarse)
    assert "too far apart for Euler's step" in text
    score = fl.scores.local_linear_score
    assert not warn_texts(make_trap(1.0), REWARD, CENTRE, coarse, score=score)


def test_scores_of_jumps_show_a_rate():
    """A death rate 5 % off passes the count of events, whose limit is a tenth."""

    @cache
    def make(scale):
        return fl.Jumps(
            lambda theta, x: jnp.array([10.0, scale * theta["d"] * x[0]]), [[1.0], [-1.0]]
        )

    theta = {"d": jnp.array(1.0)}
    t = np.linspace(0, 1, 6)
    data = fl.simulator(make(1.05), jnp.array([10.0]), t)(jax.random.key(0), theta, 1500)
    (text,) = warn_texts(make(1.0), REWARD, theta, data)
    better = float(re.search(r"zero.* (\S+) in place of 1 would", text).group(1))
    # 1,500 trajectories with about 10 deaths each: an error of 0.8 %
    assert abs(better - 1.05) < 4 * 0.008
    assert not warn_texts(make(1.05), REWARD, theta, data)


def test_scores_that_do_not_average_to_zero():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(1000, 3)) * np.array([1.0, 5.0, 0.0])
    assert find_wrong_score(scores) is None
    scores[:, 1] += 1.5  # 9 standard errors
    finding = find_wrong_score(scores)
    assert finding.column == 1
    assert finding.statistic == pytest.approx(9.1, abs=3)
    assert finding.effect == pytest.approx(1.5 / (25 + 1.5**2), rel=0.4)
    assert find_wrong_score(scores[:60]) is None


def test_a_rare_event_is_not_a_wrong_score():
    """Scores N − ε of rare events are skewed: no alarm in 4,000, where one in 20,000 is due.

    Σs² is small where few events happened, so that T is far below zero by chance.
    """
    rng = np.random.default_rng(1)
    for rate in (0.05, 0.3):
        each = (find_wrong_score(rng.poisson(rate, (200, 1)) - rate) for _ in range(2000))
        assert not any(each)


def test_no_deviation_is_no_finding():
    assert judge({}, np.ones(1), EVERY_STEP) == []


def test_copies_of_trajectories_are_noticed():
    data = record_trap(1.0, 60)
    x = np.asarray(data.x)
    doubled = fl.Trajectories(T, np.concatenate([x, x[7:9]]))
    text = warn_texts(make_trap(1.0), REWARD, CENTRE, doubled)[0]
    assert "2 of 62 trajectories are copies of others: number 60 is number 7." in text
    assert not warn_texts(make_trap(1.0), REWARD, CENTRE, data)


def test_a_coarse_converter_makes_no_copies():
    """Few samples of some trajectories agree; the trajectories differ."""
    x = np.round(np.asarray(record_trap(1.0, 2000).x), 1)
    assert len(np.unique(x, axis=0)) == 2000
    assert len(np.unique(x[:, [0, 1, 100, 101, 199, 200]], axis=0)) < 2000
    texts = warn_texts(make_trap(1.0), REWARD, CENTRE, fl.Trajectories(T, x))
    assert not any("copies" in text for text in texts)


@pytest.mark.parametrize("shared", [1, 0])
def test_pieces_of_one_record_are_noticed(shared):
    """Neighbouring pieces, with a sample in common or without."""
    long = record_trap(1.0, 1, end=50.0)
    x = np.asarray(long.x)[0]
    pieces = np.stack([x[i : i + 40 + shared] for i in range(0, 4960, 40)])
    (text,) = warn_texts(make_trap(1.0), REWARD, CENTRE, fl.Trajectories(T[: 40 + shared], pieces))
    assert "begin where the one before ended" in text
    shuffled = np.random.default_rng(0).permutation(pieces)
    assert not warn_texts(
        make_trap(1.0), REWARD, CENTRE, fl.Trajectories(T[: 40 + shared], shuffled)
    )
