"""Measured states of a network: the fast path against the general one on the same trajectories."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua import tcmt
from fluctua.core.likelihood.evidence import collect_evidence
from fluctua.core.scores import full_score
from fluctua.runs.unknown import Device
from fluctua.tcmt.conversion import kernel_spec
from fluctua.tcmt.exact import value_and_gradient
from fluctua.tcmt.kernel.cpu import sum_measured_scores
from fluctua.tcmt.kernel.options import KernelJob, KernelOptions
from fluctua.tcmt.kernel.twin import expected_lambda
from fluctua.tcmt.losses import DriftCalibratedTwin
from fluctua.tcmt.state_scores import collect_evidence as of_network
from fluctua.tcmt.state_scores import sum_states

NETWORK = tcmt.rectangular(2, 3)
SITES, BONDS = NETWORK.sites, len(NETWORK.bonds)
RNG = np.random.default_rng(3)
GAIN, OFFSET = 1 + 0.2 * RNG.normal(size=BONDS), 0.2 * RNG.normal(size=SITES)
THETA = {
    "omega": jnp.linspace(-0.3, 0.3, SITES),
    "kappa": jnp.ones(BONDS),
    "chi": jnp.full(SITES, 0.003),
}
START = {"gain": jnp.ones(BONDS), "kerr": jnp.zeros(SITES), "offset": jnp.zeros(SITES)}
KEY = jax.random.key(0)


def hide(theta):
    return {"omega": theta["omega"] + OFFSET, "kappa": theta["kappa"] * GAIN, "chi": theta["chi"]}


def effective(theta, phi):
    return {
        "omega": theta["omega"] + phi["offset"],
        "kappa": theta["kappa"] * phi["gain"],
        "chi": theta["chi"] + phi["kerr"],
    }


def make_task(sigma_kappa=0.0):
    return tcmt.transmission(NETWORK, horizon=1.0, dt=4e-3, sigma_kappa=sigma_kappa)


def make_estimator(task, **options):
    spread = {"gain": 0.2, "kerr": 0.01, "offset": 0.2}
    model = task.estimator("cpu", baseline="twin")
    return fl.SelfCalibrating(model, Device(task, hide), effective, START, spread, **options)


@pytest.mark.long
@pytest.mark.parametrize("sigma_kappa", [0.0, 0.2])
def test_a_device_is_the_simulator_at_its_true_parameters(sigma_kappa):
    task = make_task(sigma_kappa)
    measured, simulated = (
        Device(task, hide)(KEY, THETA, 3),
        task.simulator()(KEY, hide(THETA), 3),
    )
    np.testing.assert_allclose(measured.x, simulated.x, atol=2e-5)  # float32 states of order 10
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12)
    jax.tree.map(same, measured.context, simulated.context)
    coarse = Device(task, hide, sample_every=10)(KEY, THETA, 3)
    np.testing.assert_array_equal(coarse.x, measured.x[:, ::10])
    np.testing.assert_array_equal(coarse.t, measured.t[::10])
    noisy = Device(task, hide, readout=0.1)(KEY, THETA, 3).x - measured.x
    assert abs(noisy.std() / 0.1 - 1) < 5 / np.sqrt(2 * noisy.size)


@pytest.mark.parametrize(("sigma_kappa", "every"), [(0.0, 7), (0.2, 1)])
def test_evidence_is_that_of_any_process(sigma_kappa, every):
    task = make_task(sigma_kappa)
    estimator, x = make_estimator(task), Device(task, hide)(KEY, THETA, 2)
    u = estimator.belief.start + 0.05
    fast = estimator.model.evidence(estimator.at, THETA, u, x, every=every)
    general = collect_evidence(task.process, full_score, estimator.at, THETA, u, x, every=every)
    scale = np.sqrt(np.diag(general.information))  # standard deviations of the scores
    np.testing.assert_allclose(fast.score / scale, general.score / scale, atol=1e-3)
    np.testing.assert_allclose(
        fast.information, general.information, atol=1e-5 * np.abs(general.information).max()
    )
    assert fast.linear
    assert general.linear


def reference(spec, x, stride):
    """ΣU of ω, κ, χ and Γ in double precision: the noise-free network from each sample to the
    next.
    """
    psi = np.asarray(x, np.float64)[..., :SITES] + 1j * np.asarray(x, np.float64)[..., SITES:]
    coupling, force = np.zeros((SITES, SITES)), np.zeros(SITES, complex)
    i, j = spec.bonds.T
    coupling[i, j] = coupling[j, i] = spec.kappa
    force[spec.drive_sites] = spec.drive[0]
    state, mean, bright = psi[:, :-1], 0, 0
    for _ in range(stride):
        power = np.abs(state) ** 2
        mean, bright = mean + state / stride, bright + power * state / stride
        turn = (spec.omega + spec.chi * power) * state + state @ coupling
        state = state + spec.dt * (-1j * turn - spec.damping * state + force)
    zeta = ((psi[:, 1:] - state) / spec.noise**2).conj()
    total = lambda v: v.sum(axis=(0, 1))
    kappa = total((zeta[..., i] * mean[..., j] + zeta[..., j] * mean[..., i]).imag)
    return np.concatenate(
        [total((zeta * mean).imag), kappa, total((zeta * bright).imag), -total((zeta * mean).real)]
    )


@pytest.mark.parametrize("stride", [1, 10])
def test_scores_of_samples_some_steps_apart(stride):
    """23 intervals: a whole block of the kernel and a part of one."""
    task = make_task()
    spec = kernel_spec(task, {**hide(THETA), "gamma": np.linspace(0.01, 0.03, SITES)})
    x = np.asarray(Device(task, hide)(KEY, THETA, 2).x)[:, : 24 * stride : stride]
    exact = reference(spec, x, stride)
    sums = sum_measured_scores(KernelJob(spec, 0, 1, KernelOptions(dtype="float64")), x, stride)
    np.testing.assert_allclose(sums, exact, rtol=1e-9, atol=1e-9 * np.abs(exact).max())
    single = sum_measured_scores(
        KernelJob(spec, 0, 1), x, stride
    )  # 46 terms with 7 digits of states of order 10
    np.testing.assert_allclose(single, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


def test_information_is_the_slope_of_the_score():
    """The score is linear in the unknowns, so that a difference is its derivative: of losses
    beside detunings too.
    """
    task = make_task()
    lossy = lambda theta, u: {
        **effective(theta, {**START, "offset": u[:SITES]}),
        "gamma": 0.02 + u[SITES:],
    }
    x, zero = Device(task, hide)(KEY, THETA, 1), np.zeros(2 * SITES)
    noise = kernel_spec(
        task, THETA
    ).noise  # a loss has noise, and the weight of a step is not asked here
    spec = lambda u: kernel_spec(task, lossy(THETA, jnp.asarray(u))).replace(noise=noise)
    found = lambda u: of_network(task, spec(u), lossy, THETA, u, x, 1)
    first = found(zero)
    assert first.linear
    scale = np.abs(first.information).max()
    for k in (0, SITES + 1):
        step = np.zeros(2 * SITES)
        step[k] = 0.5
        slope = (first.score - found(step).score) / 0.5
        np.testing.assert_allclose(first.information[k], slope, atol=1e-3 * scale)  # float32 states


def test_samples_ten_steps_apart_calibrate_losses():
    """Euler's score of such samples takes (ω² + Σκ²)Δt/2, here 0.05, for a loss; the model's
    own path does not.
    """
    lossy = lambda theta, phi: {**effective(theta, phi), "gamma": phi["gamma"]}
    truth = {"gain": GAIN, "kerr": np.zeros(SITES), "offset": OFFSET, "gamma": np.full(SITES, 0.02)}
    network = tcmt.transmission(NETWORK, horizon=4.0, dt=4e-3)
    device = Device(network, hide, sample_every=10)
    start = {**START, "gamma": jnp.full(SITES, 0.05)}
    spread = {"gain": 0.2, "kerr": 0.01, "offset": 0.2, "gamma": 0.05}
    model = DriftCalibratedTwin(network.estimator("cpu", baseline="twin"))
    estimator = fl.SelfCalibrating(model, device, lossy, start, spread, samples=0)
    for i in range(3):
        setting = {**THETA, "kappa": THETA["kappa"] + 0.3 * np.cos(np.arange(BONDS) * i)}
        estimator.learn(setting, device(jax.random.key(i), setting, 8))
    known = estimator.calibration
    z = np.concatenate([np.ravel((known.unknown[n] - truth[n]) / known.stderr[n]) for n in truth])
    assert np.abs(z).max() < 4.5
    assert np.median(known.stderr["gamma"]) < 0.01  # 0.05 would show


@pytest.mark.long
def test_the_correction_for_readout_is_that_of_any_process():
    """½ Tr[S ∂²U] by the network's moments against derivatives of the general score on the same
    noisy states.
    """
    task, readout = make_task(), 0.05
    x = Device(task, hide, readout=readout)(KEY, THETA, 1)
    estimator = make_estimator(task)
    u = estimator.belief.start + 0.05
    spec = kernel_spec(task, estimator.at(THETA, jnp.asarray(u)))
    change = {}
    for noise in (0.0, readout):
        sums = sum_states(task, spec, x, 1, True, noise)
        general = collect_evidence(
            task.process, full_score, estimator.at, THETA, u, x, readout=noise
        )
        order = np.concatenate(
            [SITES + np.arange(BONDS), SITES + BONDS + np.arange(SITES), np.arange(SITES)]
        )
        factor = np.concatenate(
            [np.asarray(THETA["kappa"]), np.ones(2 * SITES)]
        )  # φ: gain, kerr, offset
        change[noise] = (sums.scores[order] * factor, general.score)
    mine, other = (change[readout][k] - change[0.0][k] for k in (0, 1))
    # powers of order 10 and a readout of 0.05: the next order is 1e-3 of the first
    for a, b in zip(*(np.split(v, [BONDS, BONDS + SITES]) for v in (mine, other)), strict=True):
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


@pytest.mark.long
@pytest.mark.parametrize("sample_every", [1, 10])
def test_noise_of_the_readout_is_taken_off(sample_every):
    """Without the correction gains and offsets are off by many of their errors; with it they
    are not.
    """
    task, readout = tcmt.transmission(NETWORK, horizon=4.0, dt=4e-3), 0.2
    device = Device(task, hide, sample_every=sample_every, readout=readout)
    worst = {}
    widened = {}
    for known in (0.0, readout):
        estimator = make_estimator(task, samples=0, readout=known)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the one that does not know says so
            for i in range(4):
                setting = {**THETA, "kappa": THETA["kappa"] + 0.3 * np.cos(np.arange(BONDS) * i)}
                estimator.learn(setting, device(jax.random.key(i), setting, 8))
        found, true = estimator.calibration, {"gain": GAIN, "offset": OFFSET}
        z = np.concatenate([(found.unknown[n] - true[n]) / found.stderr[n] for n in true])
        worst[known] = np.abs(z).max()
        widened[known] = found.widened
    assert worst[readout] < 4.5
    assert widened[readout] == 1
    # calls disagree where the noise is not known, and the error bars include that
    assert widened[0.0] * worst[0.0] > 6
    assert worst[0.0] < 4.5


@pytest.mark.long
def test_losses_take_the_general_path():
    task = make_task()
    of = lambda theta, phi: {**hide(theta), "gamma": jnp.full(SITES, 0.02) * phi}
    model = task.estimator("cpu", baseline="twin")
    estimator = fl.SelfCalibrating(model, Device(task, hide), of, jnp.array(1.3), 0.5, samples=0)
    for i in range(2):
        estimator.learn(THETA, Device(task, hide)(jax.random.key(i), THETA, 4))
    known = estimator.calibration
    assert abs(float(known.unknown) - 1) < 4 * float(known.stderr) < 0.1


@pytest.mark.long
def test_the_correction_is_that_of_any_process():
    task = make_task()
    model, x = task.estimator("cpu", baseline="twin"), Device(task, hide)(KEY, THETA, 3)
    p = {
        name: jnp.asarray(1.01 * value, jnp.result_type(float))
        for name, value in hide(THETA).items()
    }
    table = fl.baselines.time_only(expected_lambda(kernel_spec(task, p)))
    general = fl.ppgt(
        task.simulator(), task.objective, process=task.process, baseline=fl.Twin(baseline=table)
    ).recorded(p, x)
    fast = model.recorded(p, x)
    np.testing.assert_allclose(fast.returns, general.returns, rtol=1e-4)
    np.testing.assert_allclose(model.returns(p, x), general.returns, rtol=1e-4)
    for part in ("direct", "correction"):
        for name in p:
            mine, other = (np.asarray(getattr(each, part)[name]) for each in (fast, general))
            np.testing.assert_allclose(
                mine, other, atol=1e-3 * np.abs(other).max(), err_msg=f"{part} of {name}"
            )


def test_a_network_is_calibrated():
    task = make_task()
    estimator = make_estimator(task, samples=2)
    for i in range(6):
        setting = {**THETA, "kappa": THETA["kappa"] + 0.3 * np.cos(np.arange(BONDS) * i)}
        estimate = estimator(jax.random.key(i), setting, 4)
    known, true = estimator.calibration, {"gain": GAIN, "kerr": np.zeros(SITES), "offset": OFFSET}
    z = np.concatenate([np.ravel((known.unknown[n] - true[n]) / known.stderr[n]) for n in true])
    assert np.abs(z).max() < 4.5
    assert z.var() < 1 + 4.5 * np.sqrt(2 / z.size)
    assert (
        known.stderr["gain"].max() < 0.1 < known.stderr["offset"].max() < 0.2
    )  # a site in the far corner is dark
    exact = value_and_gradient(task, {**hide(setting), "chi": jnp.zeros(SITES)})[1]
    away = np.asarray(estimate.gradient["omega"]) - exact["omega"]
    # χ = 0.003 and what noise adds to the gradient are not in the exact one of the linear network
    # without them
    assert (
        np.abs(away).max()
        < 0.1 * np.abs(exact["omega"]).max() + 4 * np.asarray(estimate.stderr["omega"]).max()
    )
