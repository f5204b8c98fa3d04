"""Records at the ports: the linear network has exact answers by matrices of all its states."""

from functools import cache, partial

import jax
import numpy as np
import pytest
import scipy.integrate
import scipy.linalg

from fluctua import tcmt
from fluctua.core.trajectories import Trajectories
from fluctua.tcmt import conversion, port_records
from fluctua.tcmt.port_twin import PortTwin
from fluctua.tcmt.sampled_twin import SampledTwin

SITES = (0, 5)
READOUT = 0.05
INTERVAL = 0.05
SAMPLES = 60


@cache
def make_task():
    return tcmt.transmission(
        tcmt.rectangular(2, 3), horizon=SAMPLES * INTERVAL, dt=0.0125, integrator="heun"
    )


def make_theta(rng=None, chi=0.0):
    rng = np.random.default_rng(0) if rng is None else rng
    return {
        "omega": 0.3 * rng.normal(size=6),
        "kappa": 1 + 0.2 * rng.normal(size=7),
        "chi": np.full(6, chi),
    }


@cache
def make_spec(chi=0.0):
    rng = np.random.default_rng(0)
    spec = conversion.kernel_spec(make_task(), make_theta(rng, chi))
    factor = np.exp(0.2 * rng.normal(size=6))  # no equilibrium of noise and loss
    return spec.replace(noise=spec.noise * factor)


@cache
def make_sampled_twin():
    return SampledTwin(make_task().estimator("cpu", baseline="twin"))


def make_grid(spec, averaged=1):
    grid = port_records.make_grid(spec, SITES, INTERVAL * np.arange(SAMPLES + 1))
    assert grid.averaged == 4
    return grid._replace(averaged=averaged)


@partial(jax.jit, static_argnums=0)
def compute_moments(grid, numbers):
    """The noise-free path (T+1, N), the covariance of all samples without that of the readout
    (KD, KD), and the slopes (K, D, G).
    """
    network = port_records._linearise(grid, numbers)
    stationary = port_records._solve_stationary(grid, network, numbers.noise[None])
    (covariance,) = port_records._compute_covariances(grid, network, stationary, np.arange(SAMPLES))
    return network.path, covariance, port_records._compute_slopes(grid, numbers, network)


@partial(jax.jit, static_argnums=0)
def factor_covariance(grid, numbers):
    network = port_records._linearise(grid, numbers)
    stationary = port_records._solve_stationary(grid, network, numbers.noise[None])
    return port_records._factor_covariance(grid, numbers, network, stationary)


@partial(jax.jit, static_argnums=(0, 3))
def select_covariances(grid, numbers, sources, times):
    """The covariances (2, SD, SD) of two sources, at S of the samples."""
    network = port_records._linearise(grid, numbers)
    stationary = port_records._solve_stationary(grid, network, sources)
    return port_records._compute_covariances(grid, network, stationary, np.array(times))


def linearise(spec):
    """The noise-free record (K, D), the covariance of all samples (KD, KD), and slopes."""
    numbers = port_records.make_numbers(spec, READOUT)
    with jax.enable_x64(True):
        path, covariance, slopes = map(np.asarray, compute_moments(make_grid(spec), numbers))
    record = path[port_records.SUBSTEPS :: port_records.SUBSTEPS, SITES]
    return record, covariance + numbers.readout * np.eye(len(covariance)), slopes


def test_covariances_of_some_samples_are_those_of_all():
    spec = make_spec()
    numbers = port_records.make_numbers(spec, READOUT)
    sources = np.stack([numbers.noise] * 2)
    times = (0, 1, 4, 7)
    some = (2 * np.array(times)[:, None] + np.arange(2)).ravel()
    with jax.enable_x64(True):
        whole, part = (
            np.asarray(select_covariances(make_grid(spec), numbers, sources, chosen))
            for chosen in (tuple(range(SAMPLES)), times)
        )
    np.testing.assert_allclose(part, whole[:, some[:, None], some], rtol=1e-12)


@pytest.mark.parametrize("averaged", [2, 4, 7])
def test_covariance_of_means_is_that_of_averaged_samples(averaged):
    spec = make_spec()
    _, whole, _ = linearise(spec)
    grid = make_grid(spec, averaged)
    numbers = port_records.make_numbers(spec, READOUT)
    means = SAMPLES // averaged
    blocks = np.kron(np.eye(means, SAMPLES // averaged), np.full(averaged, 1 / averaged))
    average = np.kron(np.pad(blocks, ((0, 0), (0, SAMPLES - means * averaged))), np.eye(2))
    with jax.enable_x64(True):
        factor = np.asarray(factor_covariance(grid, numbers))
    found = factor @ factor.conj().T
    np.testing.assert_allclose(found, average @ whole @ average.T, atol=1e-12)


def test_means_of_four_samples_hold_the_information_of_all():
    spec = make_spec()
    numbers = port_records.make_numbers(spec, READOUT)
    records = draw_records(spec, 1, seed=6)
    whole, means = (
        port_records.collect_port_evidence(make_grid(spec, k), numbers, records, np.zeros((0, 7)))
        for k in (1, 4)
    )
    # against a prior of 0.2 on every number
    bits = [np.linalg.slogdet(np.eye(20) + 0.04 * e.information)[1] for e in (whole, means)]
    assert 0.98 * bits[0] < bits[1] < bits[0]


def test_modes_that_are_nearly_one_are_summed():
    """Two coupled resonators at an exceptional point: κ is half the difference of the losses."""
    spec = make_spec()
    grid = make_grid(spec)
    generator = np.diag([-1.1, -0.1]).astype(complex)
    generator[0, 1] = generator[1, 0] = -0.5j
    sources = np.array([[1.0, 0.3]])
    exact = scipy.linalg.solve_continuous_lyapunov(generator, -np.diag(sources[0]).astype(complex))
    solve = jax.jit(port_records._solve_by_modes, static_argnums=0)
    with jax.default_matmul_precision("highest"):
        found = np.asarray(solve(grid, generator, sources)[0])
    np.testing.assert_allclose(found, exact, atol=2e-3 * np.abs(exact).max())


def generator(spec):
    i, j = spec.bonds.T
    a = np.diag(-1j * spec.omega - spec.damping)
    a[i, j] -= 1j * spec.kappa
    a[j, i] -= 1j * spec.kappa
    return a


def exact_moments(spec):
    """Mean (K, D) and covariance (KD, KD) of a record, by the propagator of the whole state."""
    a = generator(spec)
    f = scipy.linalg.expm(a * INTERVAL)
    source = np.zeros(6, complex)
    source[spec.drive_sites] = np.reshape(spec.drive, -1)
    kick = np.linalg.solve(a, (f - np.eye(6)) @ source)
    stationary = scipy.linalg.solve_continuous_lyapunov(a, -np.diag(2 * spec.noise**2 + 0j))
    noise = stationary - f @ stationary @ f.conj().T
    mean, states = np.zeros(6, complex), [np.zeros((6, 6), complex)]
    means = []
    for _ in range(SAMPLES):
        mean = f @ mean + kick
        means.append(mean[list(SITES)])
        states.append(f @ states[-1] @ f.conj().T + noise)
    whole = np.zeros((SAMPLES, 2, SAMPLES, 2), complex)
    for s in range(SAMPLES):
        ahead = states[s + 1]
        for t in range(s, SAMPLES):
            whole[t, :, s] = ahead[np.ix_(SITES, SITES)]
            whole[s, :, t] = whole[t, :, s].conj().T
            ahead = f @ ahead
    covariance = whole.reshape(2 * SAMPLES, 2 * SAMPLES)
    return np.array(means), covariance + 2 * READOUT**2 * np.eye(2 * SAMPLES)


def test_record_and_its_coloured_noise_are_those_of_the_whole_state():
    spec = make_spec()
    record, covariance, _ = linearise(spec)
    mean, exact = exact_moments(spec)
    np.testing.assert_allclose(record, mean, atol=1e-9)
    np.testing.assert_allclose(covariance, exact, atol=1e-9)


def test_an_expected_record_has_mean_and_marginal_noise_of_the_whole_state():
    spec = make_spec()
    grid = port_records.make_grid(spec, SITES, INTERVAL * np.arange(SAMPLES + 1))
    expected = port_records.expect_record(grid, port_records.make_numbers(spec, READOUT))
    mean, covariance = exact_moments(spec)
    variance = np.diagonal(covariance).real.reshape(SAMPLES, 2) / 2
    # single precision, of sums of some hundred terms
    size = np.abs(mean).max()
    np.testing.assert_allclose(expected.mean, np.hstack([mean.real, mean.imag]), atol=1e-4 * size)
    np.testing.assert_allclose(expected.stderr, np.sqrt(np.hstack([variance] * 2)), rtol=1e-3)


@pytest.mark.parametrize("chi", [0.0, 3e-4])
def test_slopes_are_those_of_the_record(chi):
    spec = make_spec(chi)
    slopes = linearise(spec)[2]
    columns = {"omega": 0, "kappa": 6, "damping": 13 + (6 if chi else 0)}
    if chi:
        columns["chi"] = 13
    for name, first in columns.items():
        for k in (0, 3):
            step = np.zeros(len(getattr(spec, name)))
            step[k] = 1e-4 if name == "chi" else 1e-5
            ends = [
                linearise(spec.replace(**{name: getattr(spec, name) + side * step}))[0]
                for side in (1, -1)
            ]
            change = (ends[0] - ends[1]) / (2 * step[k])
            # trapezoids are off by (|A|h)²/12 with |A| < 5 and h = 0.025; with Kerr effect slopes
            # are those at mean intensities, off by χ|ψ|²T
            slack = 1.3e-3 if not chi else 0.1
            size = np.abs(change).max()
            np.testing.assert_allclose(slopes[:, :, first + k], change, atol=slack * size)


def test_kerr_path_is_that_of_the_equation():
    spec = make_spec(5e-3)
    record = linearise(spec)[0]
    a = generator(spec)
    source = np.zeros(6, complex)
    source[spec.drive_sites] = np.reshape(spec.drive, -1)

    def rate(t, psi):
        return a @ psi - 1j * spec.chi * np.abs(psi) ** 2 * psi + source

    times = INTERVAL * np.arange(1, SAMPLES + 1)
    solved = scipy.integrate.solve_ivp(
        rate, (0, times[-1]), np.zeros(6, complex), t_eval=times, rtol=1e-9, atol=1e-9
    ).y.T[:, SITES]
    # second order in the step of 0.025: χ|ψ|²‖A‖ h² T/12
    np.testing.assert_allclose(record, solved, atol=2e-3 * np.abs(solved).max())


def draw_records(spec, count, seed):
    mean, covariance = exact_moments(spec)
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(2, len(covariance), count))
    noise = np.linalg.cholesky(covariance) @ (z[0] + 1j * z[1]) / np.sqrt(2)
    return mean + noise.T.reshape(count, SAMPLES, 2)


@pytest.mark.parametrize("averaged", [1, 4])
def test_scores_have_mean_zero_and_the_variance_of_the_information(averaged):
    spec = make_spec()
    grid = make_grid(spec, averaged)
    numbers = port_records.make_numbers(spec, READOUT)
    powers = np.append(numbers.noise, numbers.readout)
    amplitudes = np.zeros((3, 7))  # of the input's resonator, of all others, of the readout
    amplitudes[0, 0] = 2 * powers[0]
    amplitudes[1, 1:6] = 2 * powers[1:6]
    amplitudes[2, 6] = 2 * powers[6]
    one = [
        port_records.collect_port_evidence(grid, numbers, record[None], amplitudes)
        for record in draw_records(spec, 300, seed=1)
    ]
    for name in ("", "noise_"):
        scores = np.array([getattr(e, name + "score") for e in one])
        information = getattr(one[0], name + "information")
        z = scores.sum(axis=0) / np.sqrt(300 * np.diag(information))
        assert np.abs(z).max() < 4
        # standardised along the directions of the information: variances of 300 are off by 8 %
        values, vectors = np.linalg.eigh(information)
        seen = values > 1e-3 * values[-1]
        spread = (scores @ vectors[:, seen]).std(axis=0) / np.sqrt(values[seen])
        np.testing.assert_allclose(spread, 1, atol=5 * np.sqrt(0.5 / 300))


def test_innovations_have_the_variance_of_the_noise():
    spec = make_spec()
    numbers = port_records.make_numbers(spec, READOUT)
    records = draw_records(spec, 300, seed=1)
    found = port_records.measure_innovations(make_grid(spec, 4), numbers, records)
    assert found.samples == 300 * SAMPLES
    np.testing.assert_allclose(found.squares, 1, atol=5 / np.sqrt(300 * SAMPLES))
    assert found.misfit == pytest.approx(found.squares.mean())


def test_many_records_are_the_sum_of_single_ones():
    spec = make_spec()
    grid = make_grid(spec, 4)
    numbers = port_records.make_numbers(spec, READOUT)
    records = draw_records(spec, 3, seed=2)
    none = np.zeros((0, 7))
    together = port_records.collect_port_evidence(grid, numbers, records, none)
    each = [port_records.collect_port_evidence(grid, numbers, r[None], none) for r in records]
    np.testing.assert_allclose(together.score, sum(e.score for e in each), rtol=1e-3, atol=0.5)
    likelihoods = sum(e.log_likelihood for e in each)
    np.testing.assert_allclose(together.log_likelihood, likelihoods, rtol=1e-4)


def test_a_twin_of_the_ports_is_calibrated_by_its_records():
    task = make_task()
    twin = PortTwin(make_sampled_twin(), SITES)
    spec = make_spec()
    y = draw_records(spec, 4, seed=3)
    x = np.zeros((4, SAMPLES + 1, 4))
    x[:, 1:, :2], x[:, 1:, 2:] = y.real, y.imag
    trajectories = Trajectories(INTERVAL * np.arange(SAMPLES + 1), x)
    theta = {"omega": spec.omega, "kappa": spec.kappa, "chi": spec.chi}
    noise = np.log(spec.noise / conversion.kernel_spec(task, theta).noise)

    def at(theta, u):
        return {**theta, "omega": theta["omega"] + u[:6], "noise": noise + u[6]}

    found = twin.evidence(at, theta, np.zeros(7), trajectories, readout=READOUT)
    step = 1e-2
    for k in (0, 5, 6):
        ends = [
            twin.evidence(at, theta, side * step * np.eye(7)[k], trajectories, readout=READOUT)
            for side in (1, -1)
        ]
        change = (ends[0].log_likelihood - ends[1].log_likelihood) / (2 * step)
        # the score leaves out that ω turns the noise, and takes amplitudes from some samples
        assert abs(found.score[k] - change) < 3 * np.sqrt(found.information[k, k])
    with pytest.raises(ValueError, match="4 quadratures"):
        twin.evidence(at, theta, np.zeros(7), Trajectories(trajectories.t, x[..., :3]), readout=0.1)


def test_other_drives_and_intervals_are_refused():
    spec = make_spec()
    uneven = np.append(INTERVAL * np.arange(SAMPLES), 10.0)
    with pytest.raises(ValueError, match="equally far apart"):
        port_records.make_grid(spec, SITES, uneven)
    with pytest.raises(ValueError, match="loss at every resonator"):
        port_records.make_grid(
            spec.replace(damping=np.zeros(6)), SITES, INTERVAL * np.arange(SAMPLES + 1)
        )


def test_a_thinned_record_is_one_with_fewer_samples():
    sampled = make_sampled_twin()
    spec = make_spec()
    y = draw_records(spec, 2, seed=4)
    x = np.zeros((2, SAMPLES + 1, 4))
    x[:, 1:, :2] = y.real
    x[:, 1:, 2:] = y.imag
    t = INTERVAL * np.arange(SAMPLES + 1)
    p = {"omega": spec.omega, "kappa": spec.kappa, "chi": spec.chi}
    thinned = PortTwin(sampled, SITES, thin=2).misfit(p, Trajectories(t, x), READOUT)
    fewer = PortTwin(sampled, SITES).misfit(p, Trajectories(t[::2], x[:, ::2]), READOUT)
    assert thinned == fewer
    assert thinned != PortTwin(sampled, SITES).misfit(p, Trajectories(t, x), READOUT)


def test_records_lie_about_the_expected_one_by_its_error():
    sampled = make_sampled_twin()
    spec = make_spec().replace(noise=conversion.kernel_spec(make_task(), make_theta()).noise)
    y = draw_records(spec, 400, seed=5)
    x = np.zeros((400, SAMPLES + 1, 4))
    x[:, 1:, :2] = y.real
    x[:, 1:, 2:] = y.imag
    t = INTERVAL * np.arange(SAMPLES + 1)
    found = PortTwin(sampled, SITES, thin=2).compare_record(
        make_theta(), Trajectories(t, x), READOUT
    )
    assert found.names == ("Re psi[0]", "Re psi[5]", "Im psi[0]", "Im psi[5]")
    np.testing.assert_array_equal(found.t, t[2::2])
    np.testing.assert_array_equal(found.measured, x[0, 2::2])
    mean = x[:, 2::2].mean(axis=0)
    assert np.abs((mean - found.expected) / (found.stderr / np.sqrt(400))).max() < 4.5
    spread = x[:, 2::2].std(axis=0) / found.stderr
    np.testing.assert_allclose(spread, 1, atol=5 / np.sqrt(800))


def test_records_that_tell_nothing_are_refused():
    twin = PortTwin(make_sampled_twin(), SITES)
    spec = make_spec()
    p = {"omega": spec.omega, "kappa": spec.kappa, "chi": spec.chi}
    t = INTERVAL * np.arange(SAMPLES + 1)
    x = np.zeros((2, SAMPLES + 1, 4))
    broken = x.copy()
    broken[1, 7, 0] = np.nan
    for record, times, fact in (
        (broken, t, "sample 7 of record 1"),
        (x[:0], t, "got 0 with 60"),
        (x[:, :2], t[:2], "got 2 with 1"),
        (x, 1.6 / INTERVAL * t, r"apart; got 1\.6"),
    ):
        with pytest.raises(ValueError, match=fact):
            twin.misfit(p, Trajectories(times, record), READOUT)


def test_a_step_of_a_fit_that_goes_too_far_has_no_evidence():
    twin = PortTwin(make_sampled_twin(), SITES)
    spec = make_spec()
    theta = {"omega": spec.omega, "kappa": spec.kappa, "chi": spec.chi}
    records = Trajectories(INTERVAL * np.arange(SAMPLES + 1), np.zeros((1, SAMPLES + 1, 4)))

    def at(theta, u):
        return {**theta, "omega": theta["omega"] + u}

    assert twin.evidence(at, theta, np.zeros(6), records, readout=READOUT).is_finite
    assert not twin.evidence(at, theta, np.full(6, 1e6), records, readout=READOUT).is_finite
