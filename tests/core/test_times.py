"""Time steps are the differences of the times as given, not of their rounded copies."""

import numpy as np
import pytest

from fluctua.core import check


def test_a_grid_uniform_to_rounding_is_uniform():
    t = np.linspace(0, 20, 20_001).astype(np.float32)
    assert np.ptp(np.diff(t)) > 1e-6  # what the float32 differences would give
    assert np.asarray(check.grid(t).dt) == pytest.approx(1e-3, rel=1e-6)


def test_other_grids_keep_their_steps():
    t = np.array([0.0, 0.1, 0.25, 0.3])
    np.testing.assert_allclose(check.grid(t).dt, np.diff(t))
    np.testing.assert_allclose(check.grid(np.array([0, 1, 3])).dt, [1, 2])
