"""Trainings of a device that is read at its ports alone."""

from itertools import islice

import jax
import numpy as np
import pytest

from fluctua.learn.self_calibrating import SelfCalibrating
from fluctua.runs import lattice, ports
from fluctua.runs.build import make_device_task, make_estimator, make_task
from fluctua.runs.config import apply_changes, find_config
from fluctua.runs.unknown import draw_hidden_errors
from fluctua.store import expectations, history, tables
from fluctua.store.folder import RunFolder

SMALL = {
    "lattice.rows": 2,
    "lattice.columns": 3,
    "task.horizon": 4.0,
    "backend": "cpu",
    "device.finer": 4,
}


def make_config(**changes):
    return apply_changes(find_config("ports"), {**SMALL, **changes})


def make_theta(network):
    bonds = np.ones(len(network.bonds))
    return {"omega": np.zeros(network.sites), "kappa": bonds, "chi": np.zeros(network.sites)}


@pytest.mark.parametrize(("read", "channels"), [("ports", 4), ("output", 2)])
def test_only_the_ports_are_read(read, channels):
    config = make_config(**{"device.read": read})
    task = make_task(config)
    estimator = make_estimator(config, task)
    measured = estimator.device(jax.random.key(0), make_theta(task.network), 3)
    assert measured.x.shape == (3, 81, channels)
    assert estimator.device.returns(None, measured).shape == (3,)
    # a linear device starts at zero: its first sample is readout noise alone
    scale = config.device.readout * np.exp(draw_hidden_errors(config, task.network)["readout"])
    assert np.abs(measured.x[:, 0]).max() < 5 * scale


def test_returns_are_those_of_the_true_output():
    config = make_config()
    task = make_task(config)
    estimator = make_estimator(config, task)
    theta = make_theta(task.network)
    port = estimator.device
    states = port.device(jax.random.key(0), theta, 3)
    network = make_device_task(config, task.network).network
    gamma_e = network.gamma_e[-1] * np.exp(draw_hidden_errors(config, network)["lead"][-1])
    output = states.x[..., network.sites - 1] ** 2 + states.x[..., -1] ** 2
    power = 2 * gamma_e * output / config.task.amplitude**2
    expected = np.trapezoid(power, states.t, axis=1) / config.task.horizon
    measured = port.returns(theta, port(jax.random.key(0), theta, 3))
    np.testing.assert_allclose(measured, expected, rtol=0.02)


def test_noise_of_leads_and_others_is_told_apart():
    network = make_task(make_config()).network
    noise = np.arange(6.0)
    np.testing.assert_array_equal(ports.group_noise(noise, network), [0.0, 5.0, 2.5])


def test_a_structure_that_the_ports_do_not_tell_is_refused():
    config = make_config(**{"calibration.kerr": "watch"})
    with pytest.raises(ValueError, match=r"calibration\.kerr"):
        make_estimator(config, make_task(config))


@pytest.mark.long
def test_a_run_writes_what_was_expected_and_its_doubts(tmp_path, monkeypatch):
    def doubt(self):
        if self._calls == 2:
            self._raise_doubt("the test doubts (at length)", stacklevel=2)

    monkeypatch.setattr(SelfCalibrating, "_warn_about_doubt", doubt)
    changes = {"iterations": 6, "calibration.measure_every": 2, "ensemble.trajectories": 2}
    config = make_config(**changes, **{"keep.checkpoint_seconds": 0.0})
    whole = RunFolder(tmp_path / "whole")
    with pytest.warns(RuntimeWarning, match="the test doubts"):
        list(lattice.run(config, whole.path))
    names, numbers = history.read_numbers(whole.predictions)
    assert names == expectations.COLUMNS
    measured = numbers[:, 0] % 2 == 0
    assert len(numbers) == 6
    assert np.isfinite(numbers[measured]).all()
    assert np.isnan(numbers[~measured, 1:]).all()
    record = tables.read(whole.records)
    assert record.header == {"row": 4, "iteration": 4}
    assert len(record.columns["time"]) == 80
    assert {"Re psi[0] expected", "Im psi[5] measured", "Im psi[5] stderr"} < set(record.columns)
    events = [row.event for row in history.read(whole.history)]
    assert [k for k, event in enumerate(events) if "doubt: the test doubts" in event] == [2]

    # cut short after row 3 and continued: the same files
    cut = RunFolder(tmp_path / "cut")
    rows = lattice.run(config, cut.path)
    with pytest.warns(RuntimeWarning, match="the test doubts"):
        list(islice(rows, 4))
    rows.close()
    list(lattice.resume(cut.path))
    assert cut.predictions.read_text() == whole.predictions.read_text()
    assert cut.records.read_text() == whole.records.read_text()


@pytest.mark.long
def test_a_device_read_at_its_ports_is_predicted_and_trained():
    config = make_config(**{"task.horizon": 8.0, "calibration.samples": 8})
    task = make_task(config)
    estimator = make_estimator(config, task)
    theta = make_theta(task.network)
    for k in range(41):  # it is measured in five of them
        estimate = estimator(jax.random.key(k), theta, 2)
        theta = {
            "omega": theta["omega"] + 0.05 * np.sign(estimate.gradient["omega"]),
            "kappa": np.clip(theta["kappa"] + 0.05 * np.sign(estimate.gradient["kappa"]), 0.0, 2.0),
            "chi": theta["chi"],
        }
    first, *_, last = estimator.predictions
    assert last.measured > first.measured + 0.05
    # records of 160 samples at two ports: χ² of 1280 quadratures scatters by 4 %, and what is not
    # known yet adds to it
    assert 0.85 < last.misfit < 1.3
    assert abs(last.value - last.measured) < 4 * np.hypot(last.stderr, last.measured_stderr) + 0.02
    assert not estimator.doubt
    copy = make_estimator(config, task)
    copy.restore(estimator.state)
    assert copy.predictions == estimator.predictions
    np.testing.assert_array_equal(copy.belief.mean, estimator.belief.mean)
