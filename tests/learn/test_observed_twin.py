"""Calibration of a process that is seen in part: score and information of its innovations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.scores import local_linear
from fluctua.learn.effective import Effective
from fluctua.learn.observed_twin import make_observed_twin
from fluctua.processes.observed import log_likelihood

T = np.linspace(0.0, 6.0, 61)
HIDDEN = {"offset": np.array([0.4, -0.3]), "noise": np.array(0.15)}
THETA = {"drive": jnp.array(1.2)}
FEW = 4
"""Records of most tests: what they have in common is compiled for one number."""


def drift(p, x):
    """Three resonators in a row; the first is driven, the last is read. x = [Re ψ, Im ψ]."""
    psi = x[:3] + 1j * x[3:]
    detuning = jnp.array([0.0, p["offset"][0], p["offset"][1]])
    neighbours = jnp.array([psi[1], psi[0] + psi[2], psi[1]])
    rate = -(0.3 + 1j * detuning) * psi - 1j * neighbours + p["drive"] * jnp.array([1.0, 0, 0])
    return jnp.concatenate([rate.real, rate.imag])


def noise(p, x):
    return p["noise"] * jnp.ones(6)


READ = np.eye(6)[[2, 5]]
OBSERVED = fl.Observed(
    fl.Process(drift, noise),
    observe=READ,
    noise=0.01,
    start=jnp.zeros(6),
    transition=local_linear,
)
POWER = fl.Objective(running=lambda p, y: jnp.sum(y**2) / T[-1])


def effective(theta, phi):
    return {**theta, **phi}


def make_model():
    return make_observed_twin(OBSERVED, POWER, jnp.zeros(6), T)


def simulate(key, theta, count):
    """Records of the hidden device, with steps ten times as fine."""
    fine = fl.Observed(OBSERVED.process, observe=READ, noise=0.01, start=jnp.zeros(6))
    grid = np.linspace(0.0, 6.0, 601)
    records = fl.simulator(fine, t=grid)(key, effective(theta, HIDDEN), count)
    return fl.Trajectories(T, records.x[:, ::10])


def find_evidence(u, records):
    leaves, tree = jax.tree.flatten(HIDDEN)
    at = Effective(effective, tree, tuple(np.shape(leaf) for leaf in leaves))
    return make_model().evidence(at, THETA, u, records)


TRUTH = np.array([0.15, 0.4, -0.3])  # noise, offsets: in the order of the pytree


def test_the_score_is_the_gradient_of_the_likelihood():
    records = simulate(jax.random.key(0), THETA, FEW)
    u = TRUTH + np.array([0.02, 0.1, -0.05])

    def likelihood(u):
        p = {"drive": 1.2, "noise": u[0], "offset": u[1:]}
        return float(log_likelihood(OBSERVED, p, records).sum())

    h = 1e-5
    slopes = [(likelihood(u + h * e) - likelihood(u - h * e)) / (2 * h) for e in np.eye(3)]
    evidence = find_evidence(u, records)
    np.testing.assert_allclose(evidence.score, slopes, rtol=1e-6)
    gain = find_evidence(TRUTH, records).log_likelihood - evidence.log_likelihood
    assert abs(gain - (likelihood(TRUTH) - likelihood(u))) < 1e-6


@pytest.mark.long
def test_the_score_has_mean_zero_and_the_information_as_covariance():
    """χ² of 60 scores at the truth: 3 expected, with a variance of 6."""
    records = simulate(jax.random.key(1), THETA, 60)
    each = [find_evidence(TRUTH, records._replace(x=records.x[k : k + 1])) for k in range(60)]
    scores = np.array([e.score for e in each])
    information = np.mean([e.information for e in each], axis=0)
    some = find_evidence(TRUTH, records._replace(x=records.x[:FEW]))
    np.testing.assert_allclose(some.score, scores[:FEW].sum(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(some.information, sum(e.information for e in each[:FEW]), rtol=1e-9)
    mean = scores.mean(axis=0)
    assert 60 * mean @ np.linalg.solve(information, mean) < 16  # 3 degrees, chance 0.1 %
    chi2 = np.einsum("ei,ei->e", scores, np.linalg.solve(information, scores.T).T)
    assert abs(chi2.mean() - 3) < 4 * chi2.std() / np.sqrt(60)


@pytest.mark.long
def test_the_direct_part_is_the_gradient_of_the_noise_free_power():
    p = {**effective(THETA, HIDDEN), "noise": jnp.array(1e-6)}
    split = make_model().split(jax.random.key(0), p, 2)

    def power(offset):
        psi = np.zeros(3, complex)
        total = 0.0
        fine = np.linspace(0.0, 6.0, 6001)
        h = fine[1]
        rate = -np.diag(0.3 + 1j * np.append(0.0, offset))
        rate = rate - 1j * (np.eye(3, k=1) + np.eye(3, k=-1))
        force = np.array([1.2, 0, 0])
        for _ in fine[1:]:
            middle = psi + (rate @ psi + force) * h / 2
            total += abs(middle[2]) ** 2 * h
            psi = psi + (rate @ middle + force) * h
        return total / 6.0

    h = 1e-4
    offset = HIDDEN["offset"]
    slopes = [(power(offset + h * e) - power(offset - h * e)) / (2 * h) for e in np.eye(2)]
    np.testing.assert_allclose(split.direct["offset"][0], slopes, rtol=2e-3)  # steps of 0.1


@pytest.mark.long
def test_a_device_that_is_seen_at_one_port_is_calibrated_as_it_trains():
    estimator = fl.SelfCalibrating(
        make_model(),
        simulate,
        effective,
        {"offset": jnp.zeros(2), "noise": jnp.array(0.2)},
        spread={"offset": 0.4, "noise": 0.1},
        samples=0,
    )
    for k in range(4):
        estimate = estimator(jax.random.key(10 + k), {"drive": jnp.array(1.0 + 0.2 * k)}, FEW)
    posterior = estimator.calibration
    for name, true in HIDDEN.items():
        z = (np.asarray(posterior.unknown[name]) - true) / np.asarray(posterior.stderr[name])
        assert np.abs(z).max() < 4
    assert np.max(posterior.stderr["offset"]) < 0.1
    assert not estimator.doubt
    assert estimate.gradient["drive"] > 0


def test_what_cannot_be_served_is_refused():
    model = make_model()
    records = simulate(jax.random.key(0), THETA, FEW)
    with pytest.raises(ValueError, match='correction="none"'):
        model.recorded(effective(THETA, HIDDEN), records)
    with pytest.raises(ValueError, match=r"readout=0.1"):
        model.evidence(None, THETA, TRUTH, records, 1, 0.1)
    with pytest.raises(ValueError, match="2 channels"):
        find_evidence(TRUTH, records._replace(x=records.x[..., :1]))
