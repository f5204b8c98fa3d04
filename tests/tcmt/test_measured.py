"""Measured states of a network: the fast path against the general one on the same trajectories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua import tcmt
from fluctua.core.scores import full_score
from fluctua.learn.evidence import evidence
from fluctua.tcmt.device import Device
from fluctua.tcmt.exact import value_and_gradient
from fluctua.tcmt.fused import kernel_spec
from fluctua.tcmt.kernel.twin import expected_lambda

NETWORK = tcmt.rectangular(2, 3)
SITES, BONDS = NETWORK.sites, len(NETWORK.bonds)
RNG = np.random.default_rng(3)
GAIN, OFFSET = 1 + 0.2 * RNG.normal(size=BONDS), 0.2 * RNG.normal(size=SITES)
THETA = {"omega": jnp.linspace(-0.3, 0.3, SITES), "kappa": jnp.ones(BONDS), "chi": jnp.full(SITES, 0.003)}
START = {"gain": jnp.ones(BONDS), "kerr": jnp.zeros(SITES), "offset": jnp.zeros(SITES)}
KEY = jax.random.key(0)


def hidden(theta):
    return {"omega": theta["omega"] + OFFSET, "kappa": theta["kappa"] * GAIN, "chi": theta["chi"]}


def effective(theta, phi):
    return {
        "omega": theta["omega"] + phi["offset"],
        "kappa": theta["kappa"] * phi["gain"],
        "chi": theta["chi"] + phi["kerr"],
    }


def task_of(sigma_kappa=0.0):
    return tcmt.transmission(NETWORK, horizon=1.0, dt=4e-3, sigma_kappa=sigma_kappa)


def estimator_of(task, **options):
    spread = {"gain": 0.2, "kerr": 0.01, "offset": 0.2}
    model = task.estimator("cpu", baseline="twin")
    return fl.Calibrated(model, Device(task, hidden), effective, START, spread, **options)


@pytest.mark.parametrize("sigma_kappa", [0.0, 0.2])
def test_a_device_is_the_simulator_at_its_true_parameters(sigma_kappa):
    task = task_of(sigma_kappa)
    measured, simulated = Device(task, hidden)(KEY, THETA, 3), task.simulator()(KEY, hidden(THETA), 3)
    np.testing.assert_allclose(measured.x, simulated.x, atol=2e-5)  # float32 states of order 10
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12)
    jax.tree.map(same, measured.context, simulated.context)
    coarse = Device(task, hidden, sample_every=10)(KEY, THETA, 3)
    np.testing.assert_array_equal(coarse.x, measured.x[:, ::10])
    np.testing.assert_array_equal(coarse.t, measured.t[::10])
    noisy = Device(task, hidden, readout=0.1)(KEY, THETA, 3).x - measured.x
    assert abs(noisy.std() / 0.1 - 1) < 5 / np.sqrt(2 * noisy.size)


@pytest.mark.parametrize("sigma_kappa", [0.0, 0.2])
@pytest.mark.parametrize("every", [1, 7])
def test_evidence_is_that_of_any_process(sigma_kappa, every):
    task = task_of(sigma_kappa)
    estimator, x = estimator_of(task), Device(task, hidden)(KEY, THETA, 2)
    u = estimator.belief.start + 0.05
    fast = estimator.model.evidence(estimator.at, THETA, u, x, every)
    general = evidence(task.process, full_score, estimator.at, THETA, u, x, every)
    scale = np.sqrt(np.diag(general.information))  # standard deviations of the scores
    np.testing.assert_allclose(fast.score / scale, general.score / scale, atol=1e-3)
    np.testing.assert_allclose(fast.information, general.information, atol=1e-5 * np.abs(general.information).max())
    assert fast.linear
    assert general.linear


def test_losses_take_the_general_path():
    task = task_of()
    of = lambda theta, phi: {**hidden(theta), "gamma": jnp.full(SITES, 0.02) * phi}
    model = task.estimator("cpu", baseline="twin")
    estimator = fl.Calibrated(model, Device(task, hidden), of, jnp.array(1.3), 0.5, samples=0)
    for i in range(2):
        estimator.learn(THETA, Device(task, hidden)(jax.random.key(i), THETA, 4))
    known = estimator.calibration
    assert abs(float(known.unknown) - 1) < 4 * float(known.stderr) < 0.1


def test_the_correction_is_that_of_any_process():
    task = task_of()
    model, x = task.estimator("cpu", baseline="twin"), Device(task, hidden)(KEY, THETA, 3)
    p = {name: jnp.asarray(1.01 * value, jnp.result_type(float)) for name, value in hidden(THETA).items()}
    table = fl.time_only(expected_lambda(kernel_spec(task, p)))
    general = fl.ppgt(task.process, task.objective, task.simulator(), baseline=fl.Twin(baseline=table)).recorded(p, x)
    fast = model.recorded(p, x)
    np.testing.assert_allclose(fast.returns, general.returns, rtol=1e-4)
    np.testing.assert_allclose(model.returns(p, x), general.returns, rtol=1e-4)
    for part in ("direct", "correction"):
        for name in p:
            mine, other = (np.asarray(getattr(each, part)[name]) for each in (fast, general))
            np.testing.assert_allclose(mine, other, atol=1e-3 * np.abs(other).max(), err_msg=f"{part} of {name}")


def test_a_network_is_calibrated():
    task = task_of()
    estimator = estimator_of(task, samples=2)
    for i in range(6):
        setting = {**THETA, "kappa": THETA["kappa"] + 0.3 * np.cos(np.arange(BONDS) * i)}
        estimate = estimator(jax.random.key(i), setting, 4)
    known, true = estimator.calibration, {"gain": GAIN, "kerr": np.zeros(SITES), "offset": OFFSET}
    z = np.concatenate([np.ravel((known.unknown[n] - true[n]) / known.stderr[n]) for n in true])
    assert np.abs(z).max() < 4.5
    assert z.var() < 1 + 4.5 * np.sqrt(2 / z.size)
    assert known.stderr["gain"].max() < 0.1 < known.stderr["offset"].max() < 0.2  # a site in the far corner is dark
    exact = value_and_gradient(task, {**hidden(setting), "chi": jnp.zeros(SITES)})[1]
    away = np.asarray(estimate.gradient["omega"]) - exact["omega"]
    # χ = 0.003 and what noise adds to the gradient are not in the exact one of the linear network without them
    assert np.abs(away).max() < 0.1 * np.abs(exact["omega"]).max() + 4 * np.asarray(estimate.stderr["omega"]).max()
