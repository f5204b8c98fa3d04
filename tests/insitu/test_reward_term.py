"""The term of readout noise that a reward and a score share, against its exact average."""

import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core import check
from fluctua.core.scores import drift_score
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.readout import compute_reward_term, correct_objective


@pytest.mark.parametrize("variance", [0.05, 0.2])
def test_the_term_of_a_bent_reward_is_its_covariance_with_the_score(variance):
    """By Stein's lemma Cov[g̃(y), U(y)] = S E[g̃'(y)] ∂U, exactly for a score linear in y."""
    process = fl.Process(lambda k, x: -k * x, noise=lambda k, x: jnp.ones_like(x))
    objective = fl.Objective(terminal=lambda k, x: jnp.cos(2 * x[0]))
    k = jnp.array(0.7)
    start = 0.3
    end = 0.8
    step = 0.1
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    y = end + np.sqrt(variance) * nodes  # the sample at the end, with readout noise
    x = np.stack([np.full_like(y, start), y], axis=1)[..., None]
    data = Trajectories(jnp.array([0.0, step]), jnp.asarray(x, jnp.float32), None)
    term = compute_reward_term(
        check.process(process),
        check.objective(objective),
        drift_score,
        jnp.array([variance]),
        k,
        data,
    )
    corrected = correct_objective(objective, np.array([variance])).terminal
    g = np.array([float(corrected(k, jnp.array([v]), None)) for v in y])
    score = -start * (y - start + float(k) * start * step)  # ∂_k ln N(y; x − kxΔt, Δt), Q = ½
    expected = weights @ (g * score) - (weights @ g) * (weights @ score)
    assert weights @ np.asarray(term)[:, 0] == pytest.approx(expected, rel=1e-4)
