"""Fisher information and natural gradient: closed forms, invariance, and steps of a known
length.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import fluctua as fl
from fluctua.core.streamed import split_key
from problems import tolerance

K, M, SIGMA, X0 = 0.8, 0.4, 0.6, 1.5
T = jnp.linspace(0, 2, 21)
THETA = {"k": jnp.array(K), "m": jnp.array(M), "sigma": jnp.array(SIGMA)}
PROCESS = fl.Process(
    lambda th, x: -th["k"] * (x - th["m"]), lambda th, x: th["sigma"] * jnp.ones(1)
)
OBJECTIVE = fl.Objective(running=lambda th, x: -((x[0] - 1) ** 2))
RUN = fl.simulator(PROCESS, jnp.array([X0]), T)


def exact_fisher():
    """Of the Euler chain x' = x − kΔ(x − m) + σ√Δ z: sums of E[(x − m)²], E[x − m], and 2/σ² a
    step for σ.
    """
    dt, n = 0.1, np.arange(20)
    a = (1 - K * dt) ** n
    mean = (X0 - M) * a
    variance = SIGMA**2 * dt * (1 - a**2) / (1 - (1 - K * dt) ** 2)
    kk = np.sum(mean**2 + variance) * dt / SIGMA**2
    km = -K * np.sum(mean) * dt / SIGMA**2
    mm = K**2 * 2 / SIGMA**2
    return np.array([[kk, km, 0], [km, mm, 0], [0, 0, 2 * 20 / SIGMA**2]])


@pytest.mark.parametrize("blocks", [1, 7])
def test_fisher_of_an_ornstein_uhlenbeck_process(blocks):
    count = 20_000
    found = fl.fisher(PROCESS, THETA, RUN(jax.random.key(0), THETA, count), blocks=blocks)
    each = np.einsum(
        "bep,beq->epq", *2 * [np.asarray(found.rows).reshape(blocks, count, 3)]
    )  # one F a trajectory
    np.testing.assert_allclose(found.matrix, each.mean(axis=0), rtol=1e-9)
    z = (each.mean(axis=0) - exact_fisher()) / (each.std(axis=0) / np.sqrt(count))
    assert np.abs(z).max() < tolerance(6), z
    assert np.all(np.diag(exact_fisher()) > 8 * np.diag(each.std(axis=0)) / np.sqrt(count))


def test_more_blocks_know_it_better():
    paths = RUN(jax.random.key(1), THETA, 2000)
    spread = {}
    for blocks in (1, 20):
        rows = np.asarray(fl.fisher(PROCESS, THETA, paths, blocks=blocks).rows).reshape(
            blocks, 2000, 3
        )
        spread[blocks] = (rows**2).sum(axis=0).var(axis=0)
    # of σ exactly: one sum of 20 has kurtosis like a normal, 2F²; 20 terms have 2F²/20 and the
    # terms' own kurtosis
    assert np.all(spread[20] < spread[1] / 2)


def test_products_and_solutions_are_those_of_the_matrix():
    information = fl.fisher(PROCESS, THETA, RUN(jax.random.key(2), THETA, 500))
    v = {"k": jnp.array(0.3), "m": jnp.array(-1.0), "sigma": jnp.array(2.0)}
    flat = np.asarray(ravel_pytree(v)[0])
    matrix = np.asarray(information.matrix)
    np.testing.assert_allclose(ravel_pytree(information.product(v))[0], matrix @ flat, rtol=1e-9)
    for damping in (0.0, 0.1):
        damped = matrix + damping * np.diag(np.diag(matrix))
        solution = ravel_pytree(information.solve(v, damping=damping))[0]
        np.testing.assert_allclose(solution, np.linalg.solve(damped, flat), rtol=1e-5)


@pytest.mark.long
def test_streamed_recorded_and_replayed_scores_are_the_same():
    estimator = fl.natural(fl.ppgt(RUN, OBJECTIVE), blocks=5, damping=0.0)
    key, count = jax.random.key(3), 400
    estimate = estimator(key, THETA, count)
    paths = RUN(split_key(key)[0], THETA, count)
    information = fl.fisher(PROCESS, THETA, paths, blocks=5)
    direction = information.solve(estimate.gradient, damping=0.0)
    for name, value in direction.items():
        np.testing.assert_allclose(estimate.natural[name], value, rtol=1e-5)
    calls = []
    measured = lambda *given: calls.append(1) or RUN(*given)  # an instrument: asked once
    other = fl.natural(
        fl.ppgt(measured, OBJECTIVE, process=PROCESS, baseline="none"), blocks=5, damping=0.0
    )(key, THETA, count)
    plain = fl.gradient(PROCESS, OBJECTIVE, THETA, paths, baseline="none")
    np.testing.assert_allclose(other.gradient["k"], plain.gradient["k"], rtol=1e-9)
    np.testing.assert_allclose(
        other.natural["k"], information.solve(plain.gradient, damping=0.0)["k"], rtol=1e-5
    )
    assert len(calls) == 1


@pytest.mark.long
def test_the_direction_does_not_depend_on_the_parameters():
    """θ = f(φ): the natural gradient is a vector of the tangent space, n_θ = ∂f/∂φ n_φ.

    The plain one is not.
    """
    mix = jnp.array([[1.0, 0.5], [-0.3, 2.0]])
    to_theta = lambda phi: {"k": jnp.exp(mix[0] @ phi), "m": mix[1] @ phi}
    phi = jnp.linalg.solve(mix, jnp.array([jnp.log(K), M]))
    known = lambda th: {**THETA, **th}
    by_theta = fl.Process(
        lambda th, x: PROCESS.drift(known(th), x), lambda th, x: SIGMA * jnp.ones(1)
    )
    by_phi = fl.Process(
        lambda p, x: PROCESS.drift(known(to_theta(p)), x), lambda p, x: SIGMA * jnp.ones(1)
    )
    found = []
    for process, parameters in ((by_theta, to_theta(phi)), (by_phi, phi)):
        run = fl.simulator(process, jnp.array([X0]), T)
        estimator = fl.natural(fl.ppgt(run, OBJECTIVE, process=process), damping=0.0)
        estimate = estimator(jax.random.key(4), parameters, 500)
        step, _ = kl_step(estimate, 0.02)
        found.append((parameters, estimate, step))
    (theta, of_theta, step_theta), (_, of_phi, step_phi) = found
    pushed = lambda v: jax.jvp(to_theta, (phi,), (v,))[1]
    for name in theta:
        np.testing.assert_allclose(of_theta.natural[name], pushed(of_phi.natural)[name], rtol=1e-5)
        np.testing.assert_allclose(step_theta[name], pushed(step_phi)[name], rtol=1e-5)
    plain = pushed(of_phi.gradient)
    assert abs(plain["k"] / of_theta.gradient["k"] - plain["m"] / of_theta.gradient["m"]) > 0.1


def kl_step(estimate, kl):
    rule = fl.optimisers.kl_ascent(kl)
    return rule.update(
        jax.tree.map(jnp.negative, estimate.gradient), rule.init(None), natural=estimate.natural
    )


@pytest.mark.long
def test_a_step_is_as_long_as_asked_and_leads_uphill():
    """½ sᵀFs = δ exactly with the estimated F, and KL of the paths to the first order beyond."""
    theta = {"k": jnp.array(K), "m": jnp.array(M)}
    process = fl.Process(lambda th, x: -th["k"] * (x - th["m"]), lambda th, x: SIGMA * jnp.ones(1))
    run = fl.simulator(process, jnp.array([X0]), T)
    paths = run(jax.random.key(5), theta, 4000)
    estimator = fl.natural(
        fl.ppgt(lambda *_: paths, OBJECTIVE, process=process), damping=0.0, blocks=20
    )
    estimate = estimator(jax.random.key(0), theta, 4000)
    information = fl.fisher(process, theta, paths, blocks=20)
    for kl in (1e-5, 1e-2):
        step, _ = kl_step(estimate, kl)
        flat = ravel_pytree(step)[0]
        np.testing.assert_allclose(flat @ information.matrix @ flat / 2, kl, rtol=1e-4)
        moved = fl.reweighted(
            process, OBJECTIVE, jax.tree.map(jnp.add, theta, step), [(theta, paths)]
        )
        # F of 80,000 rows is known to 2/√80,000 = 0.7 %; the terms beyond are of order step/θ
        order = max(abs(step[name] / theta[name]) for name in theta)
        assert abs(moved.kl[0] / kl - 1) < 0.03 + 4 * order
        assert moved.estimate.value > estimate.value
    assert order > 0.1


@pytest.mark.long
def test_it_trains_and_is_resumed(tmp_path):
    theta = {"k": jnp.array(K), "m": jnp.array(M)}
    process = fl.Process(lambda th, x: -th["k"] * (x - th["m"]), lambda th, x: SIGMA * jnp.ones(1))
    run = fl.simulator(process, jnp.array([X0]), T)
    estimator = fl.ppgt(run, OBJECTIVE, process=process)
    rule = fl.optimisers.kl_ascent(0.01)
    training = fl.Training(fl.natural(estimator), theta, rule, trajectories=100)
    whole = fl.run(training, 12, tmp_path / "whole")
    fl.run(training, 5, tmp_path / "cut")
    cut = fl.run(training, 12, tmp_path / "cut")
    np.testing.assert_array_equal(whole.theta["m"], cut.theta["m"])
    assert whole.summary["final"]["J"] > float(fl.evaluate(estimator, theta).J) + 0.1


def test_parameters_without_a_score_are_named():
    objective = fl.Objective(terminal=lambda th, x: th["gain"] * x[0])
    run = fl.simulator(PROCESS, jnp.array([X0]), T)
    with pytest.raises(ValueError, match="`gain`"):
        fl.natural(fl.ppgt(run, objective, process=PROCESS))(
            jax.random.key(0), {**THETA, "gain": jnp.array(1.0)}, 50
        )


def test_mistakes_are_named():
    with pytest.raises(TypeError, match="function"):
        fl.natural(lambda key, theta, count: None)
    with pytest.raises(ValueError, match="`damping`.*-1"):
        fl.natural(fl.ppgt(RUN, OBJECTIVE), damping=-1)
    with pytest.raises(ValueError, match="`kl`.*0"):
        fl.optimisers.kl_ascent(0)
    estimator = fl.ppgt(RUN, OBJECTIVE)
    with pytest.raises(ValueError, match="natural"):
        next(
            fl.train(
                fl.Training(estimator, THETA, fl.optimisers.kl_ascent(0.01), trajectories=20),
                iterations=1,
            )
        )
    record = next(
        fl.train(fl.Training(estimator, THETA, optax.sgd(0.1), trajectories=20), iterations=1)
    )
    assert record.estimate.natural is None
