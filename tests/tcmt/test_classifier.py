"""Networks that classify: exact log-likelihoods of linear networks, and what the task sets up."""

from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua import tcmt
from fluctua.core.integrators import mean_rate
from fluctua.tcmt.coupled_modes import DiagonalNoise
from fluctua.tcmt.drift import couple_bonds, coupling_matrix, find_blocks
from problems import flat, tolerance

EULER = tcmt.ReadoutTimes(2.4, 0.1, "euler")
DATA = np.array([[0.0, 0.3], [0.0, 1.0], [1.0, 0.2], [0.9, 1.0]])
EXAMPLES = tcmt.Examples(DATA, [0, 1, 1, 0])


def small_task(**options):
    network = tcmt.layered([2, 2, 2], gamma=0.3, sigma_w=0.2)
    drives = [tcmt.Drive(0, 2.0), tcmt.Drive(1, 1.5, phase=0.7)]
    settings = {"span": 2.0, "scale": 30.0, "drive": drives, "times": EULER, **options}
    return tcmt.classification(network, [0, 1], [2, 3], **settings)


def small_theta(seed=1):
    rng = np.random.default_rng(seed)
    return {"omega": rng.normal(size=6), "kappa": rng.normal(size=8)}


def exact_value(task, theta, context, points=10):
    """E[g_T] of one example: the outputs of a linear network are Gaussian, and their law over four
    quadratures is integrated by Gauss–Hermite's rule.
    """
    dt = task.t[1]

    def step(x):
        return x + mean_rate(task.process, theta, x, 0.0, dt, context) * dt

    matrix = jax.jacfwd(step)(jnp.zeros(12))
    noise = jnp.diag(DiagonalNoise(task.network)(theta) ** 2) * dt

    def advance(moments, _):
        mean, covariance = moments
        return (step(mean), matrix @ covariance @ matrix.T + noise), None

    start = (jnp.zeros(12), jnp.zeros((12, 12)))
    (mean, covariance), _ = jax.lax.scan(advance, start, length=len(task.t) - 1)
    ports = np.array([4, 5, 10, 11])  # Re and Im of the two output sites
    root = jnp.linalg.cholesky(covariance[np.ix_(ports, ports)])
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    grid = np.array(list(product(nodes, repeat=4)))
    mass = np.prod(list(product(weights / weights.sum(), repeat=4)), axis=1)

    def reward(z):
        return task.objective.terminal(theta, mean.at[ports].add(root @ z), context)

    return mass @ jax.vmap(reward)(grid)


@cache
def solve_examples():
    """J of the examples and its gradient."""
    task = small_task()
    features, labels = np.asarray(EXAMPLES.features), np.asarray(EXAMPLES.labels)

    def value(theta):
        each = lambda x, label: exact_value(task, theta, {"features": x, "label": label})
        return jax.vmap(each)(features, labels).mean()

    return jax.jit(jax.value_and_grad(value))(small_theta())


@pytest.mark.parametrize(
    ("order", "count"), [(1, 12_000), pytest.param(2, 3000, marks=pytest.mark.long)]
)
def test_gradient_is_that_of_the_exact_log_likelihood(key, order, count):
    task = small_task()
    theta = small_theta()
    value, gradient = solve_examples()
    estimate = task.estimator(EXAMPLES, fl.Twin(order=order))(key, theta, count)
    z = (flat(estimate.gradient) - flat(gradient)) / flat(estimate.stderr)
    assert np.abs(z).max() < tolerance(z.size), z
    assert abs(estimate.value - value) < 4 * estimate.value_stderr
    for name, slope in gradient.items():  # a wrong sign would show
        assert np.max(np.abs(slope) / estimate.stderr[name]) > 5, name


def test_powers_without_noise_are_those_of_the_steady_state():
    times = tcmt.ReadoutTimes(30.0, 0.1, "rk4")
    network = tcmt.layered([2, 2, 2], gamma=0.5, sigma_w=0.0)
    task = tcmt.classification(network, [0, 1], [2, 3], span=2.0, times=times)
    theta = small_theta()
    answers = task.answer(jax.random.key(0), theta, EXAMPLES)
    hop = coupling_matrix(network.bonds, np.asarray(theta["kappa"]), 6)
    decay = np.array([1.5, 1.5, 0.5, 0.5, 1.5, 1.5])
    for features, powers in zip(DATA, answers.powers[0], strict=True):
        shift = np.asarray(theta["omega"]) + np.append(2.0 * features, np.zeros(4))
        source = np.sqrt(2) * np.array([10, 10, 0, 0, 0, 0])
        psi = np.linalg.solve(np.diag(decay + 1j * shift) + 1j * hop, source)
        np.testing.assert_allclose(powers, 2 * np.abs(psi[4:]) ** 2 / 200, rtol=1e-6)
    right = answers.powers[0].argmax(axis=1) == EXAMPLES.labels
    assert answers.single_shot == answers.averaged == right.mean()


def test_a_window_averages_the_log_likelihood_of_its_states(key):
    task = small_task(window=0.5)
    theta = small_theta()
    run = task.simulator(EXAMPLES)(key, theta, 3)
    likelihood = task.objective.running.likelihood
    last = small_task()

    @jax.jit
    @jax.vmap
    def evaluate(x, context):
        rates = jax.vmap(lambda v, t: task.objective.running(theta, v, t, context))(x, run.t)
        each = jax.vmap(lambda v: likelihood(theta, v, context))(x)
        return rates, each, last.objective.terminal(theta, x[-1], context)

    rates, each, end = map(np.asarray, evaluate(run.x, run.context))
    inside = each[:, 19:] / 0.5  # t = 1.9 is the first
    np.testing.assert_allclose(rates, np.hstack([np.zeros((3, 19)), inside]), rtol=1e-12)
    np.testing.assert_allclose(end, each[:, -1], rtol=1e-12)


def test_features_as_amplitudes_are_those_of_drives():
    network = tcmt.layered([2, 2, 2])
    task = tcmt.classification(network, [1, 0], [2, 3], encoding="amplitude", span=3.0, times=EULER)
    driven = tcmt.process(network, [tcmt.Drive(1, 3.0 * 0.4), tcmt.Drive(0, 3.0 * 0.9)])
    x = np.random.default_rng(0).normal(size=12)
    context = {"features": np.array([0.4, 0.9]), "label": 0}
    here = jax.jit(task.process.drift)(small_theta(), x, 0.0, context)
    there = jax.jit(driven.drift)(small_theta(), x, 0.0, None)
    np.testing.assert_allclose(here, there, rtol=1e-12)
    assert task.powers.incoming == 18.0


def test_a_feature_on_two_sites_shifts_both():
    network = tcmt.layered([4, 2])
    task = tcmt.classification(network, [(0, 3), (1, 2)], [4, 5], span=2.0, times=EULER)
    plain = tcmt.process(network, task.process.drift.drift.drives)
    theta = {"omega": np.zeros(6)}
    shifted = {"omega": np.array([0.2, 1.0, 1.0, 0.2, 0.0, 0.0])}
    x = np.arange(12.0)
    context = {"features": np.array([0.1, 0.5]), "label": 0}
    here = jax.jit(task.process.drift)(theta, x, 0.0, context)
    there = jax.jit(plain.drift)(shifted, x, 0.0, None)
    np.testing.assert_allclose(here, there, rtol=1e-12)


def test_examples_are_drawn_alike_and_jitter_scatters(key):
    draw = jax.jit(jax.vmap(tcmt.Examples(DATA, [0, 1, 2, 3], jitter=0.1)))
    draws = draw(jax.random.split(key, 4000))
    counts = np.bincount(draws["label"], minlength=4)
    assert np.abs(counts - 1000).max() < 4 * np.sqrt(750)
    scatter = np.asarray(draws["features"]) - DATA[np.asarray(draws["label"])]
    assert abs(scatter.mean()) < 4 * 0.1 / np.sqrt(8000)
    assert abs(scatter.std() - 0.1) < 4 * 0.1 / np.sqrt(16000)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"inputs": [0, 0]}, "`inputs`.*each once"),
        ({"inputs": [0, 9]}, "`inputs`.*got 9"),
        ({"outputs": [4]}, "`outputs`.*got 4"),
        ({"outputs": [0, 3]}, "lead 0 is in `outputs` and is driven"),
        ({"inputs": [0, 2], "drive": None}, "input site 2 has no lead"),
        ({"encoding": "phase"}, "`encoding`.*'phase'"),
        ({"window": 3.0}, "`window`.*3.0"),
        ({"scale": 0.0}, "`scale`"),
        ({"drive": tcmt.Drive(0, envelope=jnp.sin)}, "constant"),
    ],
)
def test_wrong_tasks_are_refused(change, fact):
    settings = {"inputs": [0, 1], "outputs": [2, 3], "times": EULER, **change}
    with pytest.raises(ValueError, match=fact):
        tcmt.classification(tcmt.layered([2, 2, 2]), **settings)


@pytest.mark.parametrize(
    ("features", "labels", "fact"),
    [
        (DATA[:, :1], [0, 1, 1, 0], "1 features.*2"),
        (DATA, [0, 1, 2, 0], "label is 2.*2 output ports"),
    ],
)
def test_examples_that_do_not_fit_are_refused(features, labels, fact):
    with pytest.raises(ValueError, match=fact):
        small_task().estimator(tcmt.Examples(features, labels))


@pytest.mark.parametrize(
    ("features", "labels", "fact"),
    [
        (DATA, [0, 1], r"\(4, 2\) and \(2,\)"),
        (DATA, [0.5, 1, 1, 0], "whole numbers"),
        (DATA, [-1, 1, 1, 0], "whole numbers"),
        (np.full((1, 2), np.nan), [0], "finite"),
    ],
)
def test_wrong_examples_are_refused(features, labels, fact):
    with pytest.raises(ValueError, match=fact):
        tcmt.Examples(features, labels)


# ------------------------------------------------------------------------------- layered networks


def test_layers_are_joined_site_by_site():
    network = tcmt.layered([3, 2, 4])
    matrix = coupling_matrix(network.bonds, np.arange(1.0, 15.0), 9)
    np.testing.assert_array_equal(matrix[:3, 3:5], np.arange(1, 7).reshape(3, 2))
    np.testing.assert_array_equal(matrix[3:5, 5:], np.arange(7, 15).reshape(2, 4))
    assert np.count_nonzero(matrix) == 28
    assert network.lead_sites.tolist() == [0, 1, 2, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="two layers"):
        tcmt.layered([3])
    with pytest.raises(ValueError, match=r"sizes\[1\].*0"):
        tcmt.layered([3, 0])


def test_blocks_of_bonds():
    blocks = find_blocks(tcmt.layered([3, 2, 4]).bonds)
    assert [(b.first, b.left, b.right, b.shape) for b in blocks] == [
        (0, 0, 3, (3, 2)),
        (6, 3, 5, (2, 4)),
    ]
    assert sum(b.bonds for b in find_blocks(tcmt.rectangular(4, 5).bonds)) == 31
    assert find_blocks(np.zeros((0, 2), int)) == []


def test_products_of_blocks_are_those_of_the_coupling_matrix():
    rng = np.random.default_rng(0)
    for network in (tcmt.layered([8, 6, 5]), tcmt.rectangular(3, 4)):
        kappa = rng.normal(size=len(network.bonds))
        psi = rng.normal(size=network.sites) + 1j * rng.normal(size=network.sites)
        matrix = coupling_matrix(network.bonds, kappa, network.sites)

        def couple(kappa, bonds=network.bonds, psi=psi):
            product = couple_bonds(bonds, kappa, psi)
            return jnp.sum(jnp.abs(product) ** 2), product

        found_slope, product = jax.jit(jax.grad(couple, has_aux=True))(kappa)
        pull = matrix @ psi
        np.testing.assert_allclose(product, pull, rtol=1e-12, atol=1e-12)
        i, j = network.bonds.T
        slope = 2 * np.real(pull[i].conj() * psi[j] + pull[j].conj() * psi[i])
        np.testing.assert_allclose(found_slope, slope, rtol=1e-10)
