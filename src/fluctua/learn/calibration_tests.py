"""Tests of a calibration after new trajectories, which the next gradient need not wait for.

Whether a Gaussian describes the new evidence decides what is kept for the next call; whether the
residuals are noise decides whether the model is doubted. Neither changes the calibrated unknowns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from fluctua.core.likelihood.alternatives import FamilySums, Table, discount
from fluctua.core.likelihood.guard import Examination
from fluctua.learn import fit as fitting
from fluctua.learn import kept as keeping
from fluctua.learn.belief import Belief

__all__ = [
    "Learnt",
    "Table",
    "Tested",
    "discount",
    "limit_sums",
    "pack_sums",
    "start_tests",
    "test_calibration",
    "unpack_sums",
]

PREFIX = "residuals_"
"""Of the sums of the residual tests in a state."""

MAX_TESTS = 5000
"""Maximum number of sums of residual tests kept between calls; larger systems need only one call.
"""


class Learnt(NamedTuple):
    """A calibration after new trajectories, and what is left to test.

    fit: of the unknowns.
    belief: with the new trajectories.
    likelihoods: of the batches that were fitted together.
    kept: measurements without the last batch.
    batch: the last one.
    growth: number of batches over that at their last fit, at which all are fitted again.
    examine: tests the residuals at the calibrated model for common faults, with earlier calls.
    """

    fit: fitting.Fit
    belief: Belief
    likelihoods: Sequence[fitting.Likelihood]
    kept: keeping.Kept
    batch: keeping.KeptBatch
    growth: float
    examine: Callable[[], Examination]


class Tested(NamedTuple):
    """A calibration after its tests.

    kept: all measurements, as they are kept for the next call.
    examination: of the residuals.
    """

    kept: keeping.Kept
    examination: Examination


def test_calibration(learnt: Learnt) -> Tested:
    """Test what was learnt; changes nothing."""
    if not learnt.belief.free.all():
        # needed soon for the error of the gradient, and remembered by the belief
        _ = learnt.belief.watched
    kept = keeping.Kept(learnt.belief)
    if not learnt.fit.linear:
        longer = learnt.kept.add(learnt.batch)
        described = learnt.growth == 1 and fitting.is_gaussian(
            learnt.fit, learnt.likelihoods, learnt.kept.belief
        )
        if not (longer.is_full(learnt.growth) or described):
            kept = longer
    return Tested(kept, learnt.examine())


def start_tests(learnt: Learnt) -> Future[Tested]:
    """Start `test_calibration` in a thread, beside a model that leaves the processor free."""
    pool = ThreadPoolExecutor(1)
    tests = pool.submit(test_calibration, learnt)
    pool.shutdown(wait=False)
    return tests


def limit_sums(sums: Table | None) -> Table | None:
    """The sums of residual tests, to be kept for the next call; None where they are too many."""
    size = sum(family.total.size for family in (sums or {}).values())
    return sums if size <= MAX_TESTS else None


def pack_sums(sums: Table | None) -> dict[str, np.ndarray]:
    """The sums as named arrays for a state, (4, rows, columns) each."""
    return {
        f"{PREFIX}{name}": np.stack([v.total, v.variance, v.third, np.full_like(v.total, v.terms)])
        for name, v in (sums or {}).items()
    }


def unpack_sums(state: Mapping[str, np.ndarray]) -> Table | None:
    """The sums in a state; None where it has none."""
    table = {}
    for name, packed in state.items():
        if name.startswith(PREFIX):
            total, variance, third, terms = np.asarray(packed, np.float64)
            sums = FamilySums(total, variance, third, float(terms.flat[0]))
            table[name.removeprefix(PREFIX)] = sums
    return table or None
