"""The paper's rule against its equations by hand, and optax's rules by name."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
from fluctua.learn.optimisers import make_optimiser, rms_ascent, scale_by_family

ALPHA, RHO, BETA, EPS = 0.05, 10.0, 0.9, 1e-8


def by_hand(means, squares, theta):
    """The equations of Optimization Details, component by component, as they are printed."""
    path, average = [np.array(theta)], None
    for mean, square in zip(means, squares, strict=True):
        h = np.sqrt(square) + EPS
        average = h if average is None else BETA * average + (1 - BETA) * h
        path.append(path[-1] + ALPHA * mean / np.clip(h, average / RHO, average * RHO))
    return path[1:]


def apply_rule(rule, means, squares, theta):
    theta, path = jnp.asarray(theta), []
    state = rule.init(theta)
    for mean, square in zip(means, squares, strict=True):
        updates, state = rule.update(
            -jnp.asarray(mean), state, theta, second_moment=jnp.asarray(square)
        )
        theta = optax.apply_updates(theta, updates)
        path.append(np.asarray(theta))
    return path


def test_equals_the_equations_with_the_clamp_at_work():
    rng = np.random.default_rng(0)
    means = rng.normal(size=(30, 4))
    squares = means**2 + rng.lognormal(sigma=2.0, size=(30, 4))
    squares[10] = 1e-9 * squares[10]  # far below the average: the clamp holds h up
    squares[20] = 1e9 * squares[20]  # and far above
    np.testing.assert_allclose(
        apply_rule(rms_ascent(), means, squares, np.zeros(4)),
        by_hand(means, squares, np.zeros(4)),
        rtol=1e-12,
    )


def test_first_step_is_the_signal_to_noise_ratio_and_uphill():
    (after,) = apply_rule(rms_ascent(0.1), [[3.0, -3.0]], [[36.0, 36.0]], np.zeros(2))
    np.testing.assert_allclose(after, [0.05, -0.05], rtol=1e-8)  # α·mean/RMS = 0.1·(±1/2)


def test_a_component_without_signal_stays():
    (after,) = apply_rule(rms_ascent(), [[0.0]], [[0.0]], np.ones(1))
    assert after == 1


def test_training_with_it_climbs():
    process = fl.Process(lambda th, x: th["f"] - x, lambda th, x: 0.3 * jnp.ones_like(x))
    objective = fl.Objective(terminal=lambda th, x: -((x[0] - 1) ** 2))
    estimator = fl.ppgt(fl.simulator(process, jnp.zeros(1), jnp.linspace(0, 2, 21)), objective)
    start = {"f": jnp.zeros(1)}
    records = list(
        fl.train(
            fl.Training(estimator, start, fl.optimisers.rms_ascent(0.2), trajectories=100),
            iterations=25,
        )
    )
    assert records[-1].estimate.value > records[0].estimate.value + 0.5  # from −0.8 to about −0.05


def test_it_says_that_it_needs_the_second_moment():
    rule = rms_ascent()
    with pytest.raises(ValueError, match="second_moment=estimate.second_moment"):
        rule.update(jnp.zeros(1), rule.init(jnp.zeros(1)), jnp.zeros(1))


@pytest.mark.parametrize(
    "wrong", [{"learning_rate": 0}, {"rho": 0.5}, {"beta": 1.0}, {"epsilon": -1}]
)
def test_wrong_numbers(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        rms_ascent(**wrong)


def test_steps_fade_with_the_iterations():
    rule = make_optimiser("sgd", 1.0, {}, decay=3.0)
    state, sizes = rule.init({"a": jnp.zeros(1)}), []
    for _ in range(10):
        step, state = rule.update({"a": jnp.ones(1)}, state)
        sizes.append(-float(step["a"][0]))
    np.testing.assert_allclose(sizes, (1 + np.arange(10) / 3) ** -0.5, rtol=1e-6)


def test_any_rule_of_optax_by_name():
    theta, gradient = {"a": jnp.ones(2)}, {"a": jnp.array([1.0, -2.0])}
    for name, options in (("adam", {"b1": 0.5}), ("sgd", {"momentum": 0.9}), ("lion", {})):
        ours, theirs = make_optimiser(name, 0.1, options), getattr(optax, name)(0.1, **options)
        a, _ = ours.update(gradient, ours.init(theta), theta, second_moment=gradient, value=1.0)
        b, _ = theirs.update(gradient, theirs.init(theta), theta)
        np.testing.assert_array_equal(a["a"], b["a"])


def test_names_and_options_that_do_not_exist():
    with pytest.raises(ValueError, match=r'got \'adm\'. Did you mean "adam"\?'):
        make_optimiser("adm", 0.1, {})
    with pytest.raises(ValueError, match="such as"):
        make_optimiser("apply_updates", 0.1, {})  # exists in optax, and is no optimiser
    with pytest.raises(ValueError, match=r'no option \'rhoo\'.*Did you mean "rho"'):
        make_optimiser("paper", 0.1, {"rhoo": 2.0})


def test_families_have_their_own_scale():
    rule = make_optimiser("sgd", 1.0, {}, {"a": 0.5, "b": 1.0})
    theta = {"a": jnp.ones(1), "b": jnp.ones(1)}
    updates, _ = rule.update(theta, rule.init(theta), theta)
    assert (updates["a"], updates["b"]) == (-0.5, -1.0)
    assert scale_by_family({"a": 2.0}).update(theta, optax.EmptyState())[0]["b"] == 1
