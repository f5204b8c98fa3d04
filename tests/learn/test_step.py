"""The step of an optimiser: by NumPy, compiled, or as it is, with the numbers of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
from fluctua.core.estimate import Estimate
from fluctua.learn import step as steps
from fluctua.learn.training import Bounds

THETA = {"kappa": jnp.linspace(0.5, 1.5, 7), "omega": jnp.linspace(-1.0, 1.0, 5)}


def draw_estimate(seed):
    rng = np.random.default_rng(seed)

    def draw():
        return {name: jnp.asarray(rng.normal(size=v.shape), v.dtype) for name, v in THETA.items()}

    squares = {name: 1 + v**2 for name, v in draw().items()}
    return Estimate(draw(), draw(), squares, jnp.asarray(0.3), jnp.asarray(0.1), 100)


def run(rule, count=5):
    """θ after some steps, by `OptimiserStep` and by JAX, and the step."""
    step = steps.OptimiserStep(optax.with_extra_args_support(rule), Bounds(-0.9, 1.4).project)
    start = steps.OptimiserResult(THETA, rule.init(THETA))
    ours = start
    theirs = start
    for seed in range(count):
        estimate = draw_estimate(seed)
        ours = step(*ours, estimate)
        fields = (estimate.gradient, estimate.second_moment, estimate.value, estimate.natural)
        theirs = step.apply(steps.StepArguments(*theirs, *fields))
    return ours, theirs, step


@pytest.mark.parametrize("rule", [fl.optimisers.rms_ascent(0.05), optax.adam(0.1), optax.lion(0.1)])
def test_numpy_takes_the_steps_of_jax_to_the_bit(rule):
    ours, theirs, step = run(rule)
    assert [type(way) for way in step._steps.values()] == [steps._HostStep]
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert isinstance(a, jax.Array)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert float(ours.theta["kappa"].max()) <= np.float32(1.4)  # projected


def test_rules_without_a_rule_of_numpy_are_compiled_once():
    ours, theirs, step = run(optax.apply_if_finite(optax.adam(0.1), 3))
    (compiled,) = step._steps.values()
    assert compiled._cache_size() == 1
    for a, b in zip(jax.tree.leaves(ours.theta), jax.tree.leaves(theirs.theta), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_rule_that_looks_at_numbers_runs_as_it_is():
    def update(updates, state, params=None, *, value=None, **extra):
        factor = 0.1 if float(value) < 0 else 0.2  # value is −J
        return jax.tree.map(lambda g: -factor * g, updates), state

    rule = optax.GradientTransformationExtraArgs(lambda theta: optax.EmptyState(), update)
    ours, theirs, step = run(rule, count=2)
    assert list(step._steps.values()) == [step.apply]
    np.testing.assert_array_equal(ours.theta["omega"], theirs.theta["omega"])


def test_a_rule_that_selects_by_numbers_runs_as_it_is():
    def update(updates, state, params=None, **extra):
        largest = max(float(g[g == g.max()][0]) for g in jax.tree.leaves(updates))
        return jax.tree.map(lambda g: -0.1 * g / largest, updates), state

    rule = optax.GradientTransformationExtraArgs(lambda theta: optax.EmptyState(), update)
    ours, theirs, step = run(rule, count=2)
    assert list(step._steps.values()) == [step.apply]
    np.testing.assert_array_equal(ours.theta["omega"], theirs.theta["omega"])


def test_a_state_may_hold_other_things_than_numbers():
    def update(updates, state, params=None, **extra):
        return jax.tree.map(lambda g: -0.1 * g, updates), state

    rule = optax.GradientTransformationExtraArgs(lambda theta: {"name": "plain"}, update)
    ours, theirs, _ = run(rule, count=2)
    assert ours.state == {"name": "plain"}
    np.testing.assert_array_equal(ours.theta["omega"], theirs.theta["omega"])


def test_a_step_does_not_depend_on_the_types_of_steps_before_it():
    """θ of a Python number takes the type of the gradient, but the θ after a step does not."""
    theta = jnp.asarray(2.0)
    gradient = np.float32(-0.3)
    estimate = Estimate(gradient, gradient, gradient, np.float32(-0.7), gradient, 100)
    rule = optax.chain(optax.add_decayed_weights(0.1), optax.scale(-0.1))
    first, fresh = (
        steps.OptimiserStep(optax.with_extra_args_support(rule), None) for _ in range(2)
    )
    assert theta.weak_type
    after = first(theta, rule.init(theta), estimate)
    assert not after.theta.weak_type
    np.testing.assert_array_equal(first(*after, estimate).theta, fresh(*after, estimate).theta)


def test_many_parameters_are_left_to_jax(monkeypatch):
    monkeypatch.setattr(steps, "MAX_PARAMETERS", 3)
    _, _, step = run(optax.sgd(0.1), count=2)
    assert not isinstance(next(iter(step._steps.values())), steps._HostStep)


def test_a_missing_field_of_the_estimate_is_named():
    step = steps.OptimiserStep(fl.optimisers.kl_ascent(), None)
    with pytest.raises(ValueError, match="F⁻¹∇J"):
        step(THETA, optax.EmptyState(), draw_estimate(0))
