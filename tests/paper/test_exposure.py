"""The light that a parameter sees, against a resonator that is solved by hand and against plain
trajectories.
"""

import numpy as np

from fluctua import tcmt
from fluctua.core.draws import no_noise
from fluctua.paper.training import compute_exposure
from kernel_reference import noise_seed
from run_folders import make_trained


def test_exposure_of_one_resonator_is_exact():
    """ψ = (D s/Γ)(1 − e^{−Γt}) with D = √2 and Γ = 2 + γ: two leads with γ_e = 1 on one site, s
    = 10.
    """
    network = tcmt.from_edges([], sites=1, leads=[0, 0], gamma=0.02)
    task = tcmt.transmission(network, horizon=5.0, dt=1e-3)
    got = compute_exposure(0, task, {"omega": np.zeros(1)})
    t = np.linspace(0, 5, 200_001)
    psi = 10 * np.sqrt(2) / 2.02 * (1 - np.exp(-2.02 * t))
    np.testing.assert_allclose(
        got.omega, np.trapezoid(psi**2, t), rtol=4e-3
    )  # recorded every 10 steps
    np.testing.assert_allclose(got.chi, np.trapezoid(psi**4, t), rtol=8e-3)


def test_exposure_sees_the_modulation_and_not_the_noise(key):
    network = tcmt.rectangular(3, 3)
    task = tcmt.transmission(network, horizon=4.0, dt=1e-2, sigma_kappa=0.3)
    theta = {k: np.asarray(v) for k, v in make_trained(network).items()}
    seed = noise_seed(key)
    got = compute_exposure(seed, task, theta, count=4)
    still = compute_exposure(seed, tcmt.transmission(network, horizon=4.0, dt=1e-2), theta)
    assert np.abs(got.omega / still.omega - 1).max() > 1e-2
    loud = task._replace(simulated=network.replace(sigma_e=5.0, sigma_r=5.0))
    np.testing.assert_allclose(
        compute_exposure(seed, loud, theta, count=4).kappa, got.kappa, rtol=1e-6
    )
    paths = np.asarray(task.simulator(no_noise)(key, theta, 4).x)[:, :-1]
    size = np.hypot(*np.split(paths, 2, axis=-1))
    first, second = network.bonds.T
    expected = (size[..., first] * size[..., second]).mean(axis=0).sum(axis=0) * 1e-2
    np.testing.assert_allclose(got.kappa, expected, rtol=1e-4)  # same modulation; float32
