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
        {
            "device.kind": "easy",
            "device.gain_error": 0.0,
            "device.offset_error": 0.0,
            "device.second_neighbours": 0.0,
        },
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
    config = small(**{"calibration.kerr": "fit"})
    assert parse(tomllib.loads(dump(config))) == config
    with pytest.raises(ValueError, match="calibration.kerr.*'yes'"):
        small(**{"calibration.kerr": "yes"})
    isolation = small(**{"task.reward": "isolation"})
    task = make_task(isolation)
    with pytest.raises(ValueError, match="isolation"):
        make_estimator(isolation, task)


# ------------------------------------------------------------------------------------------- cover

SAMPLED = {
    "device.kind": "easy",
    "task.dt": 2e-3,
    "task.horizon": 10.0,
    "device.sample_every": 10,
    "calibration.samples": 0,
}
STEPS = {**SAMPLED, "device.integrator": "heun", "device.finer": 2}
RELAXATIONS = {
    "sampled": SAMPLED,
    "steps": STEPS,
    "losses": {**STEPS, "device.loss_error": 0.2},
    "leads": {**STEPS, "device.lead_error": 0.2},
    "noise": {**STEPS, "device.noise_error": 0.2},
    "readout": {**STEPS, "device.readout": 0.05},
    "prior": {**SAMPLED, "calibration.prior": 1.5},
    "hard": {
        **SAMPLED,
        "device.kind": "hard",
        "task.dt": 0.02,  # the preset's
        "device.sample_every": 1,
    },
}


def calibrate(config, calls=3):
    """An estimator after some calls at different settings, and the hidden errors."""
    task = make_task(config)
    estimator = make_estimator(config, task)
    rng = np.random.default_rng(config.seed)
    for i in range(calls):
        theta = {
            "omega": 0.3 * rng.normal(size=9),
            "kappa": 1 + 0.3 * rng.uniform(-1, 1, size=12),
            "chi": np.zeros(9),
        }
        estimator.learn(theta, estimator.device(jax.random.key(i), theta, 4))
    return estimator, draw_hidden_errors(config, task.network)


def pulls(known, true, names):
    """Errors of the unknowns in units of their error bars."""
    return np.concatenate([np.ravel((known.unknown[n] - true[n]) / known.stderr[n]) for n in names])


@pytest.mark.long
@pytest.mark.parametrize("case", RELAXATIONS)
def test_error_bars_cover_with_every_relaxation(case):
    """Root mean square of the pulls of all unknowns of three devices: 1, or less where the prior
    is wider than the errors and the data say little (1/1.5 at least).
    """
    z = []
    for seed in range(3):
        estimator, true = calibrate(small(**RELAXATIONS[case], seed=seed))
        known = estimator.calibration
        assert known.covers, known
        assert not estimator.doubt
        fitted = [name for name in known.unknown if name not in estimator.options.watch]
        z.append(pulls(known, true, fitted))
    z = np.concatenate(z)
    # neighbouring unknowns are correlated: as if there were half as many
    spread = tolerance(1) * np.sqrt(2 / (z.size / 2))
    lowest = (1 / 1.5) ** 2 if case in ("hard", "prior") else 1.0
    assert lowest * (1 - spread) < np.mean(z**2) < 1 + spread
    assert np.abs(z).max() < tolerance(z.size)


STRUCTURES = {
    "kerr": {"device.kerr_error": 0.005},
    "second": {"device.second_neighbours": 0.05},
}
IGNORED = {"calibration.kerr": "ignore", "calibration.second_neighbours": "ignore"}


@pytest.mark.long
@pytest.mark.parametrize("name", STRUCTURES)
def test_error_bars_include_a_structure_that_is_watched(name):
    config = small(**RELAXATIONS["hard"], **STRUCTURES[name])
    with pytest.warns(RuntimeWarning, match=f"structure of the model is wrong.*{name}"):
        estimator, true = calibrate(config)
    known = estimator.calibration
    assert known.structure_is_wrong
    assert "lacks what is watched" in repr(known)
    z = pulls(known, true, ("gain", "offset"))
    assert np.mean(z**2) < 2  # a few unknown terms act on all of them at once
    assert np.abs(z).max() < tolerance(z.size)
    alone = small(**RELAXATIONS["hard"], **STRUCTURES[name], **IGNORED)
    with pytest.warns(RuntimeWarning, match="need not cover"):
        blind, true = calibrate(alone)
    known = blind.calibration
    assert known.widened > 2
    assert "need not cover" in repr(known)
    # without widening they would be off by many of their error bars
    assert np.abs(known.widened * pulls(known, true, ("gain", "offset"))).max() > 10


def test_the_kind_of_a_device_sets_its_keys():
    easy = apply_changes(find_config("unknown"), {"device.readout": 0.1, "device.kind": "easy"})
    assert easy.device.readout == 0.1  # given beside the kind, in any order
    assert (easy.device.loss_error, easy.device.finer, easy.calibration.prior) == (0.0, 1, 1.0)
    assert (easy.task.integrator, easy.task.dt) == ("euler", 1e-3)
    assert parse(tomllib.loads(dump(easy))) == easy
    earlier = tomllib.loads(dump(easy))
    for name in ("kind", "loss_error", "lead_error", "noise_error", "integrator", "finer"):
        del earlier["device"][name]
    del earlier["calibration"]["prior"]
    earlier["calibration"]["kerr"] = True  # as in folders of earlier releases
    assert parse(earlier) == apply_changes(easy, {"calibration.kerr": "fit"})
    partial = parse({"preset": "unknown", "device": {"readout": 0.1}})
    assert partial.device.loss_error == 0.2


def test_the_device_takes_its_own_steps():
    config = small(**{"device.kind": "hard"})
    estimator = make_estimator(config, make_task(config))
    task = estimator.device.task
    assert task.integrator == "heun"
    assert len(task.t) - 1 == 40 * 250
    theta = {"omega": np.zeros(9), "kappa": np.ones(12), "chi": np.zeros(9)}
    measured = estimator.device(jax.random.key(0), theta, 2)
    np.testing.assert_allclose(np.diff(measured.t), 4e-3, rtol=1e-6)
