"""The works that are reported: exact moments against simulation, the chain's optimum against
continuous time.
"""

import functools

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import transport
from figures import assert_legible
from problems import tolerance

pytestmark = pytest.mark.long

EXAMPLES = {"overdamped": transport.moving_trap, "underdamped": transport.kicked_trap}


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    """Each exact work is one compiled program, and the best protocols are found once."""
    with pytest.MonkeyPatch.context() as patch:
        for example in EXAMPLES.values():
            patch.setattr(example, "exact_work", jax.jit(example.exact_work))
        patch.setattr(transport, "find_best", functools.cache(transport.find_best))
        yield


def off_ramp(example):
    """A protocol that is neither the start nor the optimum."""
    return jax.tree.map(
        lambda v: v + 0.5 * np.cos(np.arange(v.size).reshape(v.shape) + 1.0), example.RAMP
    )


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_exact_work_is_that_of_the_chain(key, example):
    theta = off_ramp(example)
    value, slope = jax.jit(jax.value_and_grad(example.exact_work))(theta)
    estimate = example.estimator(key, theta, 4000)
    assert abs(-estimate.value - value) < 4 * estimate.value_stderr
    flat = lambda tree: np.asarray(ravel_pytree(tree)[0])
    z = (-flat(estimate.gradient) - flat(slope)) / flat(estimate.stderr)
    assert np.abs(z).max() < tolerance(z.size), z


def test_least_work():
    """The chains' optima tend to those of continuous time with the step: 0.2 % at 100 steps,
    1.2 % at 60.
    """
    assert transport.find_best(transport.moving_trap) == pytest.approx(25 / 3, rel=2e-3)
    assert pytest.approx(2.90787, rel=1e-5) == transport.kicked_trap.LEAST
    assert transport.find_best(transport.kicked_trap) == pytest.approx(2.90787, rel=1.3e-2)


def test_protocols_are_drawn(tmp_path, monkeypatch):
    short = {name: (example, 2, 20) for name, (example, *_) in transport.PLANS.items()}
    monkeypatch.setattr(transport, "PLANS", short)
    transport.train_both(tmp_path, 1.0)
    assert "moving_trap: W" in (tmp_path / "table.txt").read_text()
    assert_legible(transport.draw(tmp_path))
