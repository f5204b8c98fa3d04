"""A training that fell from its best is told so, and one that did not is left alone."""

import numpy as np

from fluctua.store.history import Row
from fluctua.store.summary import find_fall


def rows(J, error=0.002):
    rng = np.random.default_rng(0)
    noisy = np.asarray(J) + error * rng.normal(size=len(J))
    return [Row(k, k, float(v), error, 16, 16 * (k + 1), 1.0, 0.1, "") for k, v in enumerate(noisy)]


def test_a_fall_is_told_with_its_peak():
    up, down = np.linspace(0.2, 0.5, 100), np.linspace(0.5, 0.1, 200)
    peak = find_fall(rows([*up, *down]), {"J": 0.1, "J_stderr": 0.001}, twin=True)["peak"]
    assert abs(peak["iteration"] - 100) < 10
    assert abs(peak["J"] - 0.5) < 0.02
    assert peak["twin"]


def test_noise_is_no_fall():
    """The highest of 5,000 means of level noise lies some four errors above; that is no fall."""
    assert find_fall(rows(np.full(5000, 0.5)), {"J": 0.5, "J_stderr": 0.0007}, twin=False) == {}
    assert (
        find_fall(rows(np.linspace(0.2, 0.5, 300)), {"J": 0.5, "J_stderr": 0.001}, twin=False) == {}
    )
    assert find_fall(rows([0.5, 0.1]), {"J": 0.1, "J_stderr": 0.001}, twin=False) == {}
