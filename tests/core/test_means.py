"""Functions of means: signal to noise of an Ornstein–Uhlenbeck readout, exactly, and the bias
of the plain plug-in.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
from fluctua.core.estimate import combine_samples
from fluctua.core.streamed import split_key
from numeric import value_and_slope
from problems import flat

STEPS, DT = 8, 0.2
PROCESS = fl.Process(lambda th, x: th["k"] * (th["a"] - x), lambda th, x: th["s"] * jnp.ones(1))
SIMULATOR = fl.simulator(PROCESS, np.zeros(1), DT * np.arange(STEPS + 1))
THETA = {"k": jnp.array(0.9), "a": jnp.array(1.1), "s": jnp.array(0.6)}
READOUT, SQUARE = (
    fl.Objective(terminal=lambda th, x: x[0]),
    fl.Objective(terminal=lambda th, x: x[0] ** 2),
)
RATIO = lambda m, m2: m**2 / (m2 - m**2)
SNR = fl.function_of_means(RATIO, READOUT, SQUARE)


def find_slopes(m, m2):
    """∂F/∂m = 2m·m₂/(m₂ − m²)² and ∂F/∂m₂ = −m²/(m₂ − m²)² of the ratio F."""
    return 2 * m * m2 / (m2 - m**2) ** 2, -(m**2) / (m2 - m**2) ** 2


def exact(th):
    """m²/P of X_T, X' = X + k(a − X)Δ + s√Δ z."""
    left = 1 - th["k"] * DT
    mean = th["a"] * (1 - left**STEPS)
    return mean**2 / (th["s"] ** 2 * DT * (1 - left ** (2 * STEPS)) / (1 - left**2))


exact_value, exact_slope = value_and_slope(exact, THETA)


def assert_exact(estimate):
    z = (flat(estimate.gradient) - flat(exact_slope)) / flat(estimate.stderr)
    assert np.abs(z).max() < 4, z
    assert abs(estimate.value - exact_value) < 4 * estimate.value_stderr


@pytest.mark.parametrize("baseline", ["twin"])
def test_signal_to_noise(key, baseline):
    assert_exact(fl.ppgt(SIMULATOR, SNR, baseline=baseline)(key, THETA, 4000))


@pytest.mark.long
def test_pathwise_reference(key):
    assert_exact(fl.reference.pathwise(SNR, SIMULATOR)(key, THETA, 4000))


@pytest.mark.long
def test_recorded_and_measured_are_streamed(key):
    """One set of trajectories: stored, in chunks, and of an instrument that is asked once."""
    asked = []

    def instrument(key, theta, count):
        asked.append(count)
        return SIMULATOR(key, theta, count)

    streamed = fl.ppgt(SIMULATOR, SNR, baseline="mean")(key, THETA, 60)
    t, x, *_ = SIMULATOR(split_key(key)[0], THETA, 60)
    x = np.asarray(x)  # whose slices compile nothing
    chunks = [fl.Trajectories(t, x[:25]), fl.Trajectories(t, x[25:])]
    for other in (
        fl.gradient(PROCESS, SNR, THETA, fl.Trajectories(t, x), baseline="mean"),
        fl.gradient(PROCESS, SNR, THETA, chunks, baseline="mean"),
        fl.ppgt(instrument, SNR, process=PROCESS, baseline="mean")(key, THETA, 60),
    ):
        for a, b in zip(jax.tree.leaves(other[:5]), jax.tree.leaves(streamed[:5]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)
    assert asked == [60]


@pytest.mark.long
def test_a_linear_function_is_the_sum_of_its_parts(key):
    both = fl.Objective(terminal=lambda th, x: 2 * x[0] - 3 * x[0] ** 2)
    linear = fl.function_of_means(lambda m, m2: 2 * m - 3 * m2, READOUT, SQUARE)
    one, other = (
        fl.ppgt(SIMULATOR, what, baseline="mean")(key, THETA, 50) for what in (both, linear)
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8)


# --------------------------------------------------------------------------------- few trajectories


@cache
def parts():
    """Gradients and returns of either part, of 120,000 trajectories that know nothing of each
    other.
    """
    known = {
        name: fl.mean_return_to_go(what, THETA, SIMULATOR(jax.random.key(1), THETA, 2000))
        for name, what in (("x", READOUT), ("x²", SQUARE))
    }
    run = lambda what, table: fl.ppgt(
        SIMULATOR, what, baseline=fl.baselines.time_only(table)
    ).samples(jax.random.key(2), THETA, 120_000)
    made = run(READOUT, known["x"]), run(SQUARE, known["x²"])
    return [jax.tree.map(np.asarray, part) for part in made]


def groups(size):
    """Each of so many trajectories, leaves (groups, size, …)."""
    whole = len(parts()[0].returns) // size * size
    return [
        jax.tree.map(lambda v: v[:whole].reshape(-1, size, *v.shape[1:]), part) for part in parts()
    ]


def estimates(size):
    """Gradient (G, P), value (G,) and both errors of every group."""
    from fluctua.core.estimate import _combine_samples

    each = jax.jit(jax.vmap(lambda a, b: _combine_samples(RATIO, (a, b))))(*groups(size))
    rows = np.stack(
        [np.asarray(each.gradient[n]) for n in THETA] + [np.asarray(each.returns)], axis=2
    )
    return rows.mean(axis=1), rows.std(axis=1, ddof=1) / np.sqrt(size)


def plain(size):
    """F'(m̂)Ḡ and F(m̂) of every group. (G, P+1)"""
    a, b = groups(size)
    m = [np.asarray(part.returns).mean(axis=1) for part in (a, b)]
    slopes = find_slopes(*m)
    gradient = [
        sum(w * part.gradient[n].mean(axis=1) for w, part in zip(slopes, (a, b), strict=True))
        for n in THETA
    ]
    return np.stack([*gradient, RATIO(*m)], axis=1)


def compute_z(rows):
    truth = np.array([*(exact_slope[n] for n in THETA), exact_value])
    return (rows.mean(axis=0) - truth) / (rows.std(axis=0, ddof=1) / np.sqrt(len(rows)))


@pytest.mark.long
def test_the_bias_of_the_plug_in_is_gone():
    """With 60 trajectories the plug-in is off by many errors of 2,000 groups, and what is left
    here is within them.
    """
    assert np.abs(compute_z(plain(60))).max() > 6
    assert np.abs(compute_z(estimates(60)[0])).max() < 4


@pytest.mark.long
def test_leaving_the_curvature_in_would_show():
    """Leave-one-out alone is not enough: the weights of the others have the curvature of F' in
    their mean.
    """
    a, b = groups(60)
    n = 60
    off = [(part.returns.sum(axis=1, keepdims=True) - part.returns) / (n - 1) for part in (a, b)]
    slopes = find_slopes(*off)
    rows = [
        sum((w * part.gradient[name]).mean(axis=1) for w, part in zip(slopes, (a, b), strict=True))
        for name in THETA
    ]
    rows.append(RATIO(*(part.returns.mean(axis=1) for part in (a, b))))
    assert np.abs(compute_z(np.stack(rows, axis=1))[:-1]).max() > 5


@pytest.mark.long
def test_errors_are_those_of_the_delta_method():
    """The scatter over 300 groups of 400 is what the groups say: within 4 errors of a variance,
    √(2/300).
    """
    rows, errors = estimates(400)
    ratio = rows.var(axis=0, ddof=1) / (errors**2).mean(axis=0)
    assert np.abs(ratio - 1).max() < 4 * np.sqrt(2 / len(rows)) + 0.05, (
        ratio
    )  # 5 %: what is of order 1/n


# ------------------------------------------------------------------------------------------ doors


@pytest.mark.long
def test_evaluate(key):
    found = fl.evaluate(fl.ppgt(SIMULATOR, SNR), THETA, count=4000)
    assert abs(found.J - exact_value) < 4 * found.J_stderr


@pytest.mark.long
def test_training_and_runs(tmp_path):
    estimator = fl.ppgt(SIMULATOR, SNR)
    training = fl.Training(estimator, THETA, optax.adam(0.05), trajectories=200)
    *_, last = fl.train(training, iterations=12)
    assert exact(jax.tree.map(np.asarray, last.next_theta)) > 1.5 * exact_value
    fl.run(training, 12, tmp_path / "run")
    assert fl.run(training, 12, tmp_path / "run") is not None


@pytest.mark.long
def test_mistakes(key):
    with pytest.raises(TypeError, match="2 numbers"):
        fl.function_of_means(lambda m: m, READOUT, SQUARE)
    with pytest.raises(ValueError, match="one number"):
        fl.function_of_means(lambda m, m2: jnp.stack([m, m2]), READOUT, SQUARE)
    with pytest.raises(ValueError, match="got none"):
        fl.function_of_means(lambda: 0.0)
    with pytest.raises(ValueError, match="3 trajectories at least; got 2"):
        fl.ppgt(SIMULATOR, SNR)(key, THETA, 2)
    root = fl.function_of_means(lambda m: jnp.sqrt(m - 100.0), READOUT)
    with pytest.raises(FloatingPointError, match="means"):
        fl.ppgt(SIMULATOR, root)(key, THETA, 10)
    with pytest.raises(ValueError, match="function_of_means"):
        fl.ppgt(SIMULATOR, SNR, baseline="twin").split(key, THETA, 10)
    with pytest.raises(ValueError, match="function_of_means"):
        fl.stationary(PROCESS, SNR, THETA, SIMULATOR(key, THETA, 3))
    samples = [fl.Samples({"a": jnp.ones(4)}, jnp.arange(4.0))]
    assert combine_samples(lambda m: m, samples).gradient["a"].shape == (4,)
