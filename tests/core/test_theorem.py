"""Eq. 13 on arrays alone: no process, no simulator."""

from __future__ import annotations

import numpy as np
import pytest

from fluctua.core.theorem import StepTerms, add_step, finish_sums, start_sums

E, T, P = 5, 7, 3


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "running": rng.normal(size=(T, E)),
        "arrival": rng.normal(size=(T, E)),
        "score": rng.normal(size=(T, E, P)),
        "explicit": rng.normal(size=(T, E, P)),
        "terminal": rng.normal(size=E),
    }


def no_baseline(to_go, score):
    return np.zeros(())


def step(arrays, n):
    return StepTerms(*(arrays[name][n] for name in ("running", "arrival", "score", "explicit")))


def add_all(arrays, returns, steps):
    sums = start_sums(returns, np.zeros(E), None, np.zeros((E, P)), no_baseline)
    for terms in steps:
        sums = add_step(sums, returns, terms, no_baseline)
    return sums


def test_sums_are_the_double_sum_of_the_theorem(arrays):
    """Each score meets the step reward of its own step, and what is collected after it."""
    returns = arrays["running"].sum(0) + arrays["arrival"].sum(0) + arrays["terminal"]
    sums = add_all(arrays, returns, [step(arrays, n) for n in range(T)])
    later = [
        arrays["running"][n + 1 :].sum(0) + arrays["arrival"][n:].sum(0) + arrays["terminal"]
        for n in range(T)
    ]
    expected = np.einsum("te,tep->ep", np.array(later), arrays["score"])
    expected = expected + arrays["explicit"].sum(0)
    np.testing.assert_allclose(finish_sums(sums, np.zeros((E, P))), expected, rtol=1e-5)


def test_a_guess_of_the_return_is_corrected_exactly(arrays):
    returns = arrays["running"].sum(0) + arrays["arrival"].sum(0) + arrays["terminal"]
    steps = [step(arrays, n) for n in range(T)]
    known = finish_sums(add_all(arrays, returns, steps), np.zeros((E, P)))
    guessed = add_all(arrays, np.full(E, 0.3), steps)
    corrected = finish_sums(guessed, np.zeros((E, P)), missing=returns - 0.3)
    np.testing.assert_allclose(corrected, known, rtol=1e-4, atol=1e-5)


def test_a_trajectory_that_stopped_adds_nothing(arrays):
    """Stopped after `life` steps, it has the sums of a record of that length."""
    life = np.array([7, 3, 0, 5, 1])
    returns = np.ones(E)
    masked = [step(arrays, n)._replace(survival=(n < life) * 1.0) for n in range(T)]
    sums = add_all(arrays, returns, masked)
    for j in range(E):
        short = add_all(arrays, returns, [step(arrays, n) for n in range(life[j])])
        for whole, part in zip(sums, short, strict=True):
            np.testing.assert_allclose(whole[j], part[j], rtol=1e-6)
