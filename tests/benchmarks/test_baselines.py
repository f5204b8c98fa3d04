"""The picture of a comparison."""

import jax
import pytest

import baselines
import fluctua as fl
from figures import assert_legible

pytestmark = pytest.mark.long


def test_a_comparison_is_drawn():
    estimators = {
        "policy gradient": fl.ppgt(
            baselines.simulator, baselines.objective, process=baselines.process
        ),
        "pathwise": fl.reference.pathwise(baselines.objective, baselines.simulator),
    }
    exact = estimators["pathwise"](jax.random.key(1), baselines.THETA, 40)
    result = fl.reference.compare(
        jax.random.key(0), baselines.THETA, estimators, trajectories=160, reference=exact, repeats=2
    )
    figure = baselines.draw(result)
    assert_legible(figure)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(estimators)
