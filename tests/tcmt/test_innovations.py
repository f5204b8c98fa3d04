"""Evidence of noisy samples of a network, against an exact Kalman filter and over many devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

from fluctua import tcmt
from fluctua.core.trajectories import Trajectories
from fluctua.runs.unknown import Device, with_diagonals
from fluctua.tcmt import innovations
from fluctua.tcmt.conversion import kernel_spec
from fluctua.tcmt.innovations import FAMILIES, collect_sampled_evidence, count_numbers
from fluctua.tcmt.kernel.samples import DriftTerms, FilterNoise, compute_information, run_filter
from fluctua.tcmt.native import _native
from fluctua.tcmt.sample_filter import run_filter_in_jax
from fluctua.tcmt.sampled_twin import SampledTwin
from problems import tolerance

READOUT = 0.05


def simulate(task, theta, count, *, every, readout, key=0):
    """Samples of a device with Heun's steps, and the spec of the truth."""
    device = Device(task, lambda theta: theta, every, readout)
    return device(jax.random.key(key), theta, count)


def split(task, vector):
    """A vector of all numbers by family."""
    sizes = count_numbers(kernel_spec(task, {}))
    return dict(zip(FAMILIES, np.split(vector, np.cumsum(list(sizes.values()))[:-1]), strict=True))


# ------------------------------------------------------------------------- an exact Kalman filter


def exact_log_likelihood(numbers, bonds, y, interval):
    """ln p(y) of a linear network from rest, by matrix exponentials and full covariances."""
    n = y.shape[2]
    a = -1j * np.diag(numbers["omega"]).astype(complex)
    for (i, j), kappa in zip(bonds, numbers["kappa"], strict=True):
        a[i, j] -= 1j * kappa
        a[j, i] -= 1j * kappa
    a -= np.diag(numbers["damping"])
    step = scipy.linalg.expm(a * interval)
    moved = np.linalg.solve(a, step - np.eye(n)) @ numbers["force"]
    power = np.diag(numbers["noise"] ** 2).astype(complex)
    stationary = scipy.linalg.solve_continuous_lyapunov(a, -power)
    q = stationary - step @ stationary @ step.conj().T  # ∫ e^{As} 2Q e^{A†s} ds
    r = numbers["readout"] ** 2 * np.eye(n)
    mean = np.zeros((y.shape[1], n), complex)
    p = np.zeros((n, n), complex)
    total = 0.0
    for sample in y[1:]:
        mean = mean @ step.T + moved
        p = step @ p @ step.conj().T + q
        s = p + r
        e = sample - mean
        inverse = np.linalg.inv(s)
        square = np.einsum("ea,ab,eb->", e.conj(), inverse, e).real
        total -= square / 2 + len(sample) * np.linalg.slogdet(s)[1]
        gain = p @ inverse
        mean = mean + e @ gain.T
        p = p - gain @ p
    return total


def test_the_score_is_the_gradient_of_the_exact_likelihood():
    """Two resonators with a lead each: all noise is alike, and the filter is Kalman's."""
    network = tcmt.chain(2)
    task = tcmt.transmission(network, horizon=6.0, dt=1e-3, integrator="heun")
    theta = {"omega": np.array([0.3, -0.2]), "kappa": np.array([0.8]), "chi": np.zeros(2)}
    data = simulate(task, theta, 3, every=20, readout=READOUT)
    spec = kernel_spec(task, {**theta, "omega": np.array([0.32, -0.2])})
    evidence = collect_sampled_evidence(task, spec, data, READOUT)
    n = network.sites
    y = np.swapaxes(data.x[..., :n] + 1j * data.x[..., n:], 0, 1).astype(np.complex128)
    force = np.zeros(n, complex)
    force[spec.drive_sites] = spec.drive[0]
    base = {
        "omega": spec.omega,
        "kappa": spec.kappa,
        "damping": spec.damping,
        "force": force,
        "noise": spec.noise,
        "readout": READOUT,
    }

    def value(name, k, by):
        numbers = {key: np.array(v) for key, v in base.items()}
        if name == "drive":
            numbers["force"] = force * np.exp(by)
        elif name == "readout":
            numbers["readout"] = READOUT * np.exp(by)
        elif name == "noise":
            numbers["noise"][k] *= np.exp(by)
        else:
            numbers[name][k] += by
        return exact_log_likelihood(numbers, network.bonds, y, 0.02)

    score = split(task, evidence.score)
    error = split(task, np.sqrt(np.diag(evidence.information)))
    for name in ("omega", "kappa", "damping", "drive", "noise", "readout"):
        for k in range(len(score[name])):
            exact = (value(name, k, 1e-3) - value(name, k, -1e-3)) / 2e-3
            # in units of the score's own standard deviation
            assert abs(score[name][k] - exact) < 0.05 * error[name][k], name


# ------------------------------------------------------------------------------------- the kernel


def ring_with_chords():
    """Seven resonators whose bonds are no diagonals of a lattice."""
    edges = [(i, (i + 1) % 7) for i in range(7)] + [(0, 3), (1, 5)]
    return tcmt.from_edges(edges, sites=7, leads=[tcmt.Lead(0, 0.5), tcmt.Lead(4, 0.7)])


@pytest.mark.parametrize("engine", _native.engines())
@pytest.mark.parametrize(("readout", "every"), [(READOUT, 20), (0.0, 20), (READOUT, 70)])
def test_the_kernel_is_the_filter_in_jax(engine, readout, every):
    """To rounding: a state, an adjoint or a product with a wrong sign would be off by its size."""
    network = ring_with_chords()
    task = tcmt.transmission(network, horizon=2.8, dt=1e-3, integrator="heun")
    rng = np.random.default_rng(3)
    theta = {
        "omega": 0.5 * rng.normal(size=7),
        "kappa": 1 + 0.3 * rng.normal(size=9),
        "chi": 0.4 * rng.normal(size=7),
    }
    data = simulate(task, theta, 3, every=every, readout=readout)
    spec = kernel_spec(task, {**theta, "omega": theta["omega"] + 0.1})
    samples = innovations._take_samples(task, spec, data, readout)
    slow = run_filter_in_jax(
        spec, samples.x, samples.rule, None, samples.propagation.unit_variance, readout
    )
    noise = FilterNoise(
        samples.propagation.unit_variance * spec.noise**2,
        np.exp(-2 * spec.damping * samples.rule.interval),
        readout**2,
    )
    interval, steps = samples.rule
    assert steps == (1 if every == 20 else 4)
    fast = run_filter(
        spec, data.x, interval, steps, noise, states=True, dtype="float64", engine=engine
    )
    for name, value in fast.gradients._asdict().items():
        reference = np.asarray(getattr(slow.gradients, name))
        np.testing.assert_allclose(value, reference, atol=1e-10 * np.abs(reference).max() + 1e-12)
    np.testing.assert_allclose(fast.middle, slow.middle, atol=1e-12)
    np.testing.assert_allclose(fast.squares, slow.squares, rtol=1e-11)
    np.testing.assert_allclose(fast.lagged, slow.lagged, atol=1e-11)
    forward = run_filter(
        spec, data.x, interval, steps, noise, scores=False, dtype="float64", engine=engine
    )
    assert forward.gradients is None
    np.testing.assert_array_equal(forward.squares, fast.squares)


def test_information_of_terms_is_their_sum():
    rng = np.random.default_rng(4)

    def hermitian(size):
        a = rng.normal(size=(size, 2 * size)) + 1j * rng.normal(size=(size, 2 * size))
        return a @ a.conj().T

    weight, gram = hermitian(4), hermitian(9)
    start = np.array([0, 2, 2, 3, 6])
    site, feature = rng.integers(0, 4, 6), rng.integers(0, 9, 6)
    phase = rng.normal(size=6) + 1j * rng.normal(size=6)
    found = compute_information(DriftTerms(start, site, feature, phase), weight, gram)
    pairs = np.outer(phase.conj(), phase) * weight[np.ix_(site, site)]
    pairs = (pairs * gram[np.ix_(feature, feature)]).real
    member = np.repeat(np.arange(4), np.diff(start)) == np.arange(4)[:, None]
    np.testing.assert_allclose(found, member @ pairs @ member.T, rtol=1e-12)
    np.testing.assert_array_equal(found, found.T)
    with pytest.raises(ValueError, match="features that exist"):
        compute_information(DriftTerms(start, site, feature + 9, phase), weight, gram)


def test_evidence_about_unknowns_is_that_of_the_numbers_by_the_chain_rule():
    """Unknowns of several numbers at once; the score alone, and the innovations alone, agree."""
    task = tcmt.transmission(ring_with_chords(), horizon=1.0, dt=1e-3, integrator="heun")
    theta = {"omega": jnp.linspace(-1, 1, 7), "kappa": jnp.ones(9), "chi": jnp.full(7, 0.1)}
    spec = kernel_spec(task, theta)
    data = simulate(task, theta, 2, every=20, readout=READOUT)
    plain = collect_sampled_evidence(task, spec, data, READOUT)
    size = len(plain.score)
    jacobian = scipy.sparse.random_array((size, 5), density=0.3, rng=6, format="csr")
    found = collect_sampled_evidence(task, spec, data, READOUT, jacobian)
    dense = jacobian.toarray()
    np.testing.assert_allclose(found.score, dense.T @ plain.score, rtol=1e-9)
    expected = dense.T @ plain.information @ dense
    np.testing.assert_allclose(found.information, expected, rtol=1e-9)
    alone = innovations.collect_sampled_score(task, spec, data, READOUT)
    np.testing.assert_allclose(alone, plain.score, rtol=1e-12)
    squares, samples = innovations.measure_innovations(task, spec, data, READOUT)
    np.testing.assert_array_equal(squares, plain.squares)
    assert samples == plain.samples


# ------------------------------------------------------------------------------- many trajectories


def check_scores(task, theta, readout, count):
    """Scores of single trajectories have mean zero and the variance F, family by family."""
    data = simulate(task, theta, count, every=20, readout=readout)
    spec = kernel_spec(task, theta)
    rows, information = [], 0.0
    for j in range(count):
        one = Trajectories(data.t, data.x[j : j + 1])
        evidence = collect_sampled_evidence(task, spec, one, readout)
        rows.append(evidence.score)
        information = information + evidence.information / count
    scores = np.array(rows)
    expected = np.diag(information)
    used = expected > 1e-9
    z = scores.mean(axis=0)[used] / np.sqrt(expected[used] / count)
    assert np.abs(z).max() < tolerance(used.sum())
    for name, ratio in split(task, scores.var(axis=0) / np.where(used, expected, np.nan)).items():
        ratio = ratio[np.isfinite(ratio)]
        if not ratio.size:
            continue
        # χ² of `count` scores each; 8 %: the locally linear law of the information
        spread = tolerance(len(FAMILIES)) * np.sqrt(2 / (count * ratio.size))
        assert abs(ratio.mean() - 1) < spread + 0.08, name


@pytest.mark.long
@pytest.mark.parametrize("readout", [0.0, READOUT])
def test_scores_have_mean_zero_and_the_variance_of_the_information(readout):
    network = tcmt.rectangular(3, 3)
    task = tcmt.transmission(network, horizon=10.0, dt=1e-3, integrator="heun")
    rng = np.random.default_rng(1)
    theta = {
        "omega": 0.3 * rng.normal(size=9),
        "kappa": 1 + 0.3 * rng.normal(size=12),
        "chi": 2e-3 * rng.normal(size=9),
    }
    check_scores(task, theta, readout, 150)


@pytest.mark.long
def test_modulated_couplings_follow_their_record():
    """The residuals of a modulated lattice are noise where the modulation is recorded."""
    network = tcmt.rectangular(2, 3)
    task = tcmt.transmission(network, horizon=4.0, dt=2e-3, sigma_kappa=0.3, integrator="heun")
    theta = {"omega": np.zeros(6), "kappa": np.ones(7), "chi": np.zeros(6)}
    data = simulate(task, theta, 4, every=10, readout=0.0)
    evidence = collect_sampled_evidence(task, kernel_spec(task, theta), data, 0.0)
    z = (evidence.squares - 1) * np.sqrt(evidence.samples)
    assert np.abs(z).max() < tolerance(6)
    plain = data._replace(context=None)
    without = collect_sampled_evidence(task, kernel_spec(task, theta), plain, 0.0)
    assert without.squares.max() > 1.2


def test_unequal_intervals_are_refused():
    task = tcmt.transmission(tcmt.chain(2), horizon=1.0, dt=1e-2)
    x = np.zeros((1, 4, 4))
    data = Trajectories(np.array([0.0, 0.02, 0.04, 0.08]), x)
    with pytest.raises(ValueError, match=r"equally.*0\.02.*0\.04"):
        collect_sampled_evidence(task, kernel_spec(task, {"omega": jnp.zeros(2)}), data, 0.0)


def test_watched_bonds_and_noise_have_no_part_in_the_gradient():
    """Bonds across the cells stay at zero: the twin is that of the lattice without them."""
    near = tcmt.rectangular(2, 3)
    richer = with_diagonals(near, 2, 3)
    task, whole = (
        tcmt.transmission(network, horizon=1.0, dt=1e-2) for network in (near, richer.network)
    )
    fused = task.estimator("cpu", baseline="twin")
    twin = SampledTwin(fused, whole, tuple(richer.near.tolist()))
    theta = {"omega": jnp.linspace(-0.2, 0.2, 6), "kappa": jnp.ones(7), "chi": jnp.zeros(6)}
    p = {
        **theta,
        "kappa": richer.kappa(theta["kappa"], jnp.zeros(4)),
        "gamma": jnp.full(6, 0.03),
        "noise": jnp.zeros(6),
    }
    parts = twin.split(jax.random.key(0), p, 4)
    exact = fused.split(jax.random.key(0), {**theta, "gamma": p["gamma"]}, 4)
    assert set(parts.direct) == set(p)
    np.testing.assert_allclose(parts.direct["kappa"][:, richer.near], exact.direct["kappa"])
    np.testing.assert_allclose(parts.correction["omega"], exact.correction["omega"])
    np.testing.assert_allclose(parts.direct["gamma"], exact.direct["gamma"])
    assert not np.asarray(parts.direct["kappa"])[:, richer.across].any()
    assert not np.asarray(parts.direct["noise"]).any()
    louder = twin.split(jax.random.key(0), {**p, "noise": jnp.full(6, np.log(2.0))}, 64)
    quiet = twin.split(jax.random.key(0), p, 64)
    # twice the same noise: returns scatter by twice as much where they are linear in it, and by
    # four times as much where they are quadratic
    assert 2 < np.std(louder.returns) / np.std(quiet.returns) < 4
