"""Small lattice trainings, and whether two run folders hold the same run."""

import h5py
import numpy as np

from fluctua.store import history

TINY = {
    "lattice.rows": 2,
    "lattice.columns": 3,
    "task.horizon": 0.5,
    "task.dt": 5e-3,
    "ensemble.trajectories": 16,
    "iterations": 12,
    "backend": "cpu",
    "keep.checkpoint_seconds": 0.0,
}


def read_rows(folder):
    """The history without the times, which are the clock's."""
    return [row._replace(seconds=0.0) for row in history.read(folder / "history.csv")]


def assert_same_run(one, other):
    assert read_rows(one) == read_rows(other)
    with h5py.File(one / "parameters.h5") as a, h5py.File(other / "parameters.h5") as b:
        for name in ("row", "iteration", "omega", "kappa", "chi"):
            np.testing.assert_array_equal(a[name][:], b[name][:], err_msg=name)
    with np.load(one / "final.npz") as a, np.load(other / "final.npz") as b:
        for name in ("omega", "kappa", "chi"):
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
