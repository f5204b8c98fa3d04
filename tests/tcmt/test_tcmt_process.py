"""The equations of motion: energy, noise power, frames, leads, modulation and the noise of the
kernels.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluctua.core.diffusion import diffusion_at
from fluctua.core.draws import no_noise
from fluctua.core.process import Step
from fluctua.core.scores import full_score
from fluctua.core.streamed import estimate_seeds
from fluctua.tcmt import (
    Drive,
    Lead,
    Modulation,
    chain,
    exact,
    outputs,
    paper,
    process,
    rectangular,
    transmission,
)
from fluctua.tcmt.coupled_modes import (
    FIRST_SITE,
    PAIR,
    Draw,
    abs2,
    channel_product,
    coefficients,
    delta_kappa,
    incoming,
    incoming_on_grid,
    to_psi,
    to_x,
)
from fluctua.tcmt.native import _native
from kernel_reference import noise_seed


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def random_state(network, seed=0):
    return np.random.default_rng(seed).normal(size=2 * network.sites)


def matrix_drift(network, p, psi, s_plus, delta=0.0):
    """The paper's equation with matrices, by hand."""
    h = np.diag(p["omega"] + p["chi"] * np.abs(psi) ** 2).astype(complex)
    for (i, j), kappa in zip(network.bonds, p["kappa"] + delta, strict=True):
        h[i, j] += kappa
        h[j, i] += kappa
    d = network.lead_weights * np.sqrt(2 * p["gamma_e"])
    gamma = (d @ d.T + np.diag(2 * p["gamma"])) / 2
    return -1j * (h - 1j * gamma) @ psi + d @ s_plus


def some_parameters(network, seed=1):
    rng = np.random.default_rng(seed)
    return {
        name: rng.uniform(0.3, 1.3, network.shape(name))
        for name in ("omega", "kappa", "chi", "gamma_e", "gamma")
    }


@pytest.mark.parametrize("leads", [None, [Lead({0: 0.8, 1: -0.6}, gamma_e=0.7), 5], [2, 2]])
def test_drift_is_the_papers_equation(leads):
    network = rectangular(2, 3, leads=leads)
    drive, modulation = Drive(1, amplitude=3.0, phase=0.4), Modulation(0.3)
    p, x, t = some_parameters(network), random_state(network), 1.7
    drift = process(network, drive, modulation=modulation).drift

    @jax.jit
    def compute(p, x):
        context = Draw(len(network.bonds), 10)(jax.random.key(3), jnp.asarray(2))
        return delta_kappa(modulation, context, t), to_psi(x), drift(p, x, t, context)

    delta, psi, got = map(np.asarray, compute(p, x))
    np.testing.assert_array_equal(psi, x[: network.sites] + 1j * x[network.sites :])
    expected = matrix_drift(network, p, psi, np.array([0, 3 * np.exp(0.4j)]), delta)
    np.testing.assert_allclose(got, np.append(expected.real, expected.imag), rtol=1e-12)


def test_energy_balance_of_a_lossless_network_to_first_order():
    """d|ψ|²/dt = |s⁺|² − |s⁻|² (no loss, no noise); the scheme misses it by O(Δt)."""
    network = rectangular(2, 3, gamma=0.0, chi=0.1)

    def missing(dt):
        task = transmission(network, horizon=2.0, dt=dt, drive=Drive(0, 1.0))
        theta = {"omega": np.linspace(-1, 1, 6)}
        x = np.asarray(task.simulator(no_noise)(jax.random.key(0), theta, 1).x)[0]
        s_minus = jax.jit(jax.vmap(lambda x, t: outputs(network, task.drives)(theta, x, t)))(
            x[:-1], np.asarray(task.t)[:-1]
        )
        leaving = (np.abs(s_minus) ** 2).sum(axis=1)
        return np.sum(x[-1] ** 2) - np.sum((1.0 - leaving) * dt)

    coarse, fine = missing(2e-3), missing(1e-3)
    assert abs(coarse / fine - 2) < 0.01
    assert abs(fine) < 2e-3


def test_stationary_noise_power_at_a_lead():
    """With σ_e = σ_r = σ every network comes to E|ψ_n|² = 2σ², so a lead carries 4γ_eσ² (Q =
    σ²Γ).
    """
    sigma, gamma_e = 0.5, 0.8
    network = rectangular(
        2, 2, leads=[Lead(0, gamma_e), Lead(3, gamma_e)], gamma=0.5, sigma_w=sigma
    )
    task = transmission(network, horizon=6.0, dt=0.02, drive=Drive(0, 1e-09))
    moments = exact.moments(task, {"omega": np.array([0.3, -0.4, 0.2, 0.9])})
    # O(Δt) of the scheme: |λ|²Δt/2 against the loss
    np.testing.assert_allclose(
        moments.covariance[-1], 2 * sigma**2 * np.eye(4), atol=0.12 * 2 * sigma**2
    )
    finer = exact.moments(
        transmission(network, horizon=6.0, dt=0.005, drive=Drive(0, 1e-09)),
        {"omega": np.array([0.3, -0.4, 0.2, 0.9])},
    )
    np.testing.assert_allclose(
        finer.covariance[-1], 2 * sigma**2 * np.eye(4), atol=0.03 * 2 * sigma**2
    )

    theta = {"omega": np.array([0.3, -0.4, 0.2, 0.9])}
    x = np.asarray(task.simulator()(jax.random.key(0), theta, 2000).x)[:, -1]
    emit = jax.jit(jax.vmap(lambda x: abs2(outputs(network, Drive(0, 0.0))(theta, x, 0.0))[1]))
    power = np.asarray(emit(x))
    error = power.std() / np.sqrt(power.size)
    assert abs(power.mean() - 4 * gamma_e * sigma**2) < 4 * error + 0.1 * 4 * gamma_e * sigma**2
    assert abs(power.mean() - 2 * gamma_e * moments.covariance[-1, 3, 3].real) < 4 * error


def test_noise_has_the_diffusion_of_the_channels():
    network = chain(
        3,
        leads=[Lead(0, 0.7, sigma_e=0.3), Lead(2, 1.1)],
        gamma=[0.1, 0.2, 0.3],
        sigma_r=[1.0, 2.0, 3.0],
    )
    amplitude = process(network, Drive(0)).noise({})
    q = [0.3**2 * 0.7 + 0.1, 4 * 0.2, 0.5**2 * 1.1 + 9 * 0.3]
    np.testing.assert_allclose(amplitude**2 / 2, q + q, rtol=1e-12)


@pytest.mark.long
def test_lead_on_several_resonators_dense_and_matrix_free_agree():
    network = rectangular(2, 3, leads=[Lead({0: 0.8, 1: 0.6}), Lead({4: 0.5, 5: 1.0})], gamma=0.1)
    dense = process(network, Drive(0))
    free = dense._replace(noise=channel_product(network))
    p, x = some_parameters(network), random_state(network)
    d = network.lead_weights * np.sqrt(2 * np.asarray(p["gamma_e"]))
    q = (d @ np.diag(network.sigma_e**2) @ d.T + np.diag(2 * p["gamma"] * network.sigma_r**2)) / 2
    assert abs(q[0, 1]) > 0.05
    for which, kind in ((dense, "dense"), (free, "matrix-free")):

        @jax.jit
        def apply(p, x, which=which, kind=kind):
            diffusion = diffusion_at(which, p, x, 0.0, None)
            assert diffusion.kind == kind
            return jax.vmap(lambda e: diffusion.apply(p, e))(jnp.eye(12))

        np.testing.assert_allclose(apply(p, x), np.kron(np.eye(2), q), atol=1e-12)
    step = Step(x, x + 0.1 * random_state(network, 5), 0.0, 0.01)
    scores = [jax.jit(full_score, static_argnums=0)(which, p, step) for which in (dense, free)]
    for name in p:
        np.testing.assert_allclose(scores[0][name], scores[1][name], rtol=1e-6, atol=1e-6)

    # the same channels in the same order: the same trajectories
    task = transmission(network, horizon=0.2, dt=0.01)
    x_dense = task.simulator()(jax.random.key(0), p, 3).x
    x_free = task._replace(process=free).simulator()(jax.random.key(0), p, 3).x
    np.testing.assert_allclose(x_dense, x_free, atol=1e-10)


def test_frames_agree_as_the_step_shrinks():
    network = rectangular(2, 3, sigma_w=0.0)
    theta = {"omega": np.linspace(-0.5, 0.5, 6)}
    j = lambda frame, dt: exact.value(transmission(network, horizon=5.0, dt=dt, frame=frame), theta)
    apart = [j("lab", dt) - j("rotating", dt) for dt in (1e-3, 5e-4)]
    assert abs(2 * apart[1] - apart[0]) < 0.05 * abs(apart[0])  # first order, to the same limit


@pytest.mark.long
def test_the_lab_frame_is_a_trap_at_the_papers_step():
    """PAPER_NOTES 2: true value 0.199; rotating 0.1989, lab 0.370."""
    quiet = paper().replace(sigma_e=0.0, sigma_r=0.0)
    assert abs(exact.value(transmission(quiet), {}) - 0.1989) < 5e-5
    assert abs(exact.value(transmission(quiet, frame="lab"), {}) - 0.370) < 5e-4


def test_drives_add_up_and_turn_against_the_first():
    drives = (
        Drive(0, 2.0, frequency=10.0),
        Drive(1, 1.0, phase=np.pi / 2, frequency=11.0, envelope=jnp.cos),
    )
    t = 0.3
    np.testing.assert_allclose(
        incoming(drives, 2, t), [2, 1j * np.cos(t) * np.exp(-1j * t)], rtol=1e-12
    )
    np.testing.assert_allclose(
        incoming(drives, 2, t, "lab"),
        [2 * np.exp(-10j * t), 1j * np.cos(t) * np.exp(-11j * t)],
        rtol=1e-12,
    )
    grid = incoming_on_grid(drives, 2, np.array([0.0, t, 1.0]))
    assert grid.shape == (2, 2)
    np.testing.assert_allclose(grid[1], incoming(drives, 2, t))


# --------------------------------------------------------------------------------------- modulation


def test_modulation_follows_the_law_of_its_counters():
    """Words of (seed, trajectory, 2³¹ + bK + k − 1, 2³² − 1), by the native generator."""
    task = transmission(chain(4), horizon=0.1, dt=0.05, sigma_kappa=0.2)
    key = jax.random.key(7)
    context = task.simulator()(key, {"omega": jnp.zeros(4)}, 3).context
    seed, trajectory, bond = noise_seed(key), 2, 1
    w = np.array(
        [_native.words(seed, trajectory, FIRST_SITE + bond * 10 + k, PAIR) for k in range(10)],
        float,
    )
    a = np.sqrt(-2 * np.log((w[:, 0] + 0.5) / 2**32)) * np.cos(2 * np.pi * w[:, 1] / 2**32)
    a, phase = a / np.linalg.norm(a), 2 * np.pi * (w[:, 2] + 0.5) / 2**32
    t = 1.3
    expected = 0.2 * np.sum(a * np.sin(np.arange(1, 11) * 0.1 * t + phase))
    one = {name: leaf[trajectory] for name, leaf in context.items()}
    np.testing.assert_allclose(delta_kappa(task.modulation, one, t)[bond], expected, rtol=1e-9)


def test_modulation_statistics():
    """E δκ = 0, E δκ² = σ_κ²/2 at any time; phases uniform; bonds and trajectories independent."""
    trajectories, bonds, modulation = 4000, 5, Modulation(0.2)
    draw = jax.jit(jax.vmap(Draw(bonds, modulation.harmonics), in_axes=(None, 0)))
    context = draw(jax.random.key(0), np.arange(trajectories))
    each = jax.jit(
        jax.vmap(Draw(bonds, modulation.harmonics).amplitude_and_phase, in_axes=(None, 0))
    )
    amplitude, phase = map(np.asarray, each(jax.random.key(0), np.arange(trajectories)))
    modulate = jax.jit(jax.vmap(lambda c, t: delta_kappa(modulation, c, t), in_axes=(0, None)))
    np.testing.assert_allclose(np.sum(amplitude**2, axis=-1), 1, rtol=1e-12)
    n = trajectories * bonds
    for t in (0.0, 3.3, 20.0):
        delta = np.asarray(modulate(context, t))
        assert abs(delta.mean()) < 4 * 0.2 / np.sqrt(2 * n)
        square = delta**2
        assert abs(square.mean() - 0.02) < 4 * square.std() / np.sqrt(n)
        correlation = np.corrcoef(delta.T)[np.triu_indices(bonds, 1)]
        assert np.abs(correlation).max() < 4.5 / np.sqrt(trajectories)
    assert abs(np.exp(1j * phase).mean()) < 4 / np.sqrt(phase.size)
    assert phase.min() > 0
    assert phase.max() < 2 * np.pi
    a2 = amplitude**2  # exchangeable: each harmonic has a tenth of the power
    np.testing.assert_allclose(a2.mean(axis=(0, 1)), 0.1, atol=5 * a2.std() / np.sqrt(n))


def test_modulation_is_the_same_without_noise_and_for_more_trajectories():
    task = transmission(chain(3), horizon=0.1, dt=0.05, sigma_kappa=0.2)
    theta, key = {"omega": jnp.zeros(3)}, jax.random.key(1)
    few, many = task.simulator(no_noise)(key, theta, 2), task.simulator()(key, theta, 5)
    np.testing.assert_array_equal(few.context["sine"], many.context["sine"][:2])


# --------------------------------------------------------------------------------- what kernels use


def test_a_step_from_plain_arrays_and_native_noise_is_the_references():
    """What a kernel does: coefficients, s⁺ on the grid and normals of one seed give the JAX
    trajectory.
    """
    network = rectangular(2, 3, leads=[Lead(0, 0.7), Lead({5: 1.2})], gamma=0.05)
    task = transmission(network, horizon=0.5, dt=0.05, drive=Drive(0, 2.0))
    theta, key, count = some_parameters(network), jax.random.key(11), 3
    x = np.asarray(task.simulator()(key, theta, count).x)

    c = coefficients(network, theta)
    s_plus = incoming_on_grid(task.drives, network.leads, task.t)
    z = _native.normals(noise_seed(key), count, len(task.t) - 1, 2 * network.sites)
    i, j = c.bonds.T
    for trajectory in range(count):
        psi = np.zeros(6, complex)
        for n in range(len(task.t) - 1):
            h = (c.omega + c.chi * np.abs(psi) ** 2) * psi
            np.add.at(h, i, c.kappa * psi[j])
            np.add.at(h, j, c.kappa * psi[i])
            drift = -1j * h - c.decay * psi
            drift[c.lead_site] += c.lead_coupling * s_plus[n]
            kick = z[trajectory, n, :6] + 1j * z[trajectory, n, 6:]
            psi = psi + drift * 0.05 + c.amplitude * np.sqrt(0.05) * kick
            np.testing.assert_allclose(x[trajectory, n + 1], to_x(psi), atol=1e-10)


def test_estimators_say_which_seeds_they_use():
    key = jax.random.key(5)
    run, pilot = jax.random.split(key)
    assert estimate_seeds(key) == (noise_seed(run), noise_seed(pilot))
    assert 0 <= noise_seed(run) < 2**64


def test_coefficients_refuse_a_lead_on_several_resonators():
    with pytest.raises(ValueError, match='backend="jax"'):
        coefficients(chain(3, leads=[Lead({0: 1.0, 1: 1.0})]), {})
