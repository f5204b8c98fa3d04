"""The comparison on reaction networks: its exact answers, and a line for each estimator."""

import jax
import numpy as np
import pytest

import fluctua as fl
import reactions

pytestmark = pytest.mark.long


def test_in_equilibrium_only_the_ratio_of_the_rates_counts():
    exact = reactions.association(0.05, 1.0, 50.0).exact
    assert abs(exact["on"] + exact["off"]) < 1e-9 * abs(exact["on"])


def test_the_exact_gradient_is_that_of_the_scores(key):
    system = reactions.association(0.05, 1.0, 2.0)
    run = fl.simulator(system.process, system.start, system.t)
    estimate = fl.ppgt(run, system.objective, baseline="mean")(key, system.theta, 4000)
    z = jax.tree.map(
        lambda g, e, s: float((g - e) / s), estimate.gradient, system.exact, estimate.stderr
    )
    assert np.abs(list(z.values())).max() < 4


def test_a_line_for_each_estimator():
    system = reactions.association(0.05, 1.0, 0.5)
    lines = reactions.rows(system, trajectories=200, repeats=2, reference=40)
    assert len(lines) == 2 + len(reactions.estimators(system))
    assert all("±" in line for line in lines[2:])
