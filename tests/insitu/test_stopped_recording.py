"""Recordings of trajectories that stop, which hold something else after it."""

import warnings

import jax
import numpy as np
import pytest

import first_passage as exits
import fluctua as fl
from fluctua import insitu


@pytest.mark.long
@pytest.mark.parametrize("baseline", ["time", "mean"])
def test_a_recording_that_is_held_after_its_stop(tmp_path, baseline):
    theta = exits.parameters()
    record = exits.simulator(0.05, 20)(jax.random.key(18), theta, 200)
    x = np.array(record.x)
    outside = np.maximum.accumulate(np.abs(x[..., 0]) >= 1, axis=1)
    for path, stopped in zip(x, outside, strict=True):
        path[stopped] = path[stopped][:1]
    head = insitu.files.Description(np.asarray(record.t), ("a",), parameters=theta)
    with insitu.files.create(tmp_path / "r", head) as file:
        for path in x:
            file.append(path)
    with insitu.files.open(tmp_path / "r") as recording, warnings.catch_warnings():
        warnings.simplefilter("error")
        result = insitu.estimate(recording, exits.PROCESS, exits.OBJECTIVE, baseline=baseline)
    expected = fl.gradient(exits.PROCESS, exits.OBJECTIVE, theta, record, baseline=baseline)
    assert result.estimate.stopped == pytest.approx(expected.stopped)
    for name in theta:
        np.testing.assert_allclose(
            result.estimate.gradient[name], expected.gradient[name], rtol=1e-6
        )
