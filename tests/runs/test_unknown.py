"""Training on a device with hidden errors: what is drawn, what is found, what is counted, and
going on after a kill.
"""

import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluctua import tcmt
from fluctua.learn.self_calibrating import SelfCalibrating
from fluctua.runs import lattice as runs
from fluctua.runs.build import make_estimator, make_task
from fluctua.runs.conditions import is_unknown
from fluctua.runs.config import apply_changes, dump, find_config, parse
from fluctua.runs.evaluate import evaluate
from fluctua.runs.unknown import Device, draw_hidden_errors, with_diagonals
from lattice_runs import assert_same_run
from problems import tolerance

SMALL = {
    "backend": "cpu",
    "iterations": 4,
    "lattice.rows": 3,
    "lattice.columns": 3,
    "task.horizon": 1.0,
    "task.dt": 4e-3,
    "keep.checkpoint_seconds": 0.0,
    "calibration.measure_every": 1,
}


def small(**more):
    return apply_changes(find_config("unknown"), {**SMALL, **more})


def test_hidden_errors_are_those_of_the_seed():
    config = find_config("unknown")
    assert is_unknown(config)
    assert not is_unknown(find_config("fast"))
    network = make_task(small()).network
    one, again, other = (draw_hidden_errors(small(seed=seed), network) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one["gain"], again["gain"])
    assert not np.array_equal(one["gain"], other["gain"])
    whole = draw_hidden_errors(config, make_task(config).network)
    assert abs(whole["gain"].std() / 0.2 - 1) < 4 / np.sqrt(2 * 262)
    assert abs(whole["offset"].std() / 0.2 - 1) < 4 / np.sqrt(2 * 143)
    assert not whole["second"].any()


def test_bonds_across_the_cells_are_in_their_places():
    network = make_task(small()).network
    richer = with_diagonals(network, 3, 3)
    assert len(richer.across) == 8
    kappa = np.asarray(richer.kappa(np.ones(len(network.bonds)), np.full(8, 0.05)))
    bonds = richer.network.bonds
    steps = (
        np.abs(bonds // 3 - (bonds // 3)[:, ::-1])[:, 0]
        + np.abs(bonds % 3 - (bonds % 3)[:, ::-1])[:, 0]
    )
    np.testing.assert_allclose(kappa, np.where(steps == 1, 1, 0.05))


def test_a_run_counts_what_it_measures_and_goes_on_bit_for_bit(tmp_path):
    config = small(**{"calibration.measure_every": 2})
    summary = runs.complete(config, tmp_path / "whole")
    assert summary["trajectories"] == 4
    assert summary["calibration"]["trajectories"] == 4
    assert "structure alone" in summary["how"]
    runs.complete(apply_changes(config, {"iterations": 2}), tmp_path / "part")
    list(runs.resume(tmp_path / "part", {"iterations": 4}))
    assert_same_run(tmp_path / "whole", tmp_path / "part")
    assert (
        "unknowns   rms error after 4 trajectories: gain "
        in (tmp_path / "whole" / "summary.txt").read_text()
    )


def test_J_is_that_of_the_device():
    config = small(**{"device.second_neighbours": 0.05, "task.horizon": 8.0})
    theta = {"omega": np.zeros(9), "kappa": np.ones(12), "chi": np.zeros(9)}
    plain = apply_changes(
        config,
        {"device.gain_error": 0.0, "device.offset_error": 0.0, "device.second_neighbours": 0.0},
    )
    of_device, of_model = (evaluate(c, theta, trajectories=64) for c in (config, plain))
    assert abs(of_device.J - of_model.J) > 5 * of_model.J_stderr


def with_leads(theta, phi):
    return {"omega": theta["omega"] + phi["offset"], "gamma_e": phi["lead"]}


def with_offsets(theta, phi):
    return {"omega": theta["omega"] + phi["offset"]}


def test_J_is_what_the_output_of_the_device_says():
    effective = with_leads
    """Leads that couple by 20 % more than the model believes put out 20 % more power per |ψ|²."""
    task = tcmt.transmission(tcmt.chain(2), horizon=4.0, dt=4e-3)
    leads = np.full(2, 1.2)
    theta = {"omega": jnp.zeros(2)}
    device = Device(task, lambda theta: {**theta, "gamma_e": leads})
    start = {"lead": jnp.ones(2), "offset": jnp.zeros(2)}
    if effective is with_offsets:
        start.pop("lead")
    model = task.estimator("cpu", baseline="twin")
    exact = task.estimator("cpu")(jax.random.key(9), {**theta, "gamma_e": jnp.asarray(leads)}, 4000)

    def measure(substrate):
        estimator = SelfCalibrating(model, substrate, effective, start, 0.2, every=20)
        estimate = estimator(jax.random.key(1), theta, 100)
        return float(estimate.value - exact.value) / float(estimate.value_stderr)

    assert abs(measure(device)) < tolerance(1)
    of_model = measure(lambda *arguments: device(*arguments))  # its states alone
    if effective is with_leads:
        assert abs(of_model) < tolerance(1)
    else:
        assert of_model < -10


@pytest.mark.parametrize("there", [0.0, 0.2])
def test_a_structure_that_is_wrong_is_found(there):
    config = small(
        **{
            "device.second_neighbours": there,
            "calibration.second_neighbours": "watch",
            "calibration.samples": 0,
        }
    )
    task = make_task(config)
    estimator = make_estimator(config, task)
    theta = {"omega": np.zeros(9), "kappa": np.ones(12), "chi": np.zeros(9)}
    for i in range(2):
        estimator.learn(theta, estimator.device(jax.random.key(i), theta, 4))
    assert estimator.calibration.structure_is_wrong == (there > 0)
    assert np.all(estimator.phi["second"] == 0)


def test_keys_are_checked_and_read_back():
    config = small(**{"calibration.kerr": True})
    assert parse(tomllib.loads(dump(config))) == config
    with pytest.raises(ValueError, match="calibration.kerr.*'yes'"):
        small(**{"calibration.kerr": "yes"})
    isolation = small(**{"task.reward": "isolation"})
    task = make_task(isolation)
    with pytest.raises(ValueError, match="isolation"):
        make_estimator(isolation, task)
