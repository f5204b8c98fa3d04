"""The correction averaged over iterations: mean, honest errors, certificate, state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
from problems import flat, ornstein_uhlenbeck, problem, tolerance

THE = problem(ornstein_uhlenbeck, "fixed")
TWIN = fl.Twin(lambda th: jax.tree.map(lambda v: 1.2 * v, th), order=2)
ESTIMATOR = THE.estimator(baseline=TWIN)
COUNT = 100


class Gaussian:
    """An estimator whose two parts are correlated normals with known means, one number for each of P parameters."""

    direct, correction = np.array([1.0, -2.0, 0.5]), np.array([0.3, 0.0, -0.4])

    def split(self, key, theta, count):
        z = np.random.default_rng(np.asarray(jax.random.key_data(key))).normal(size=(2, count, 3))
        direct = self.direct + 0.3 * z[0]
        correction = self.correction + 2 * z[0] + 3 * z[1]
        shape = lambda v: {"a": v[:, :2], "b": v[:, 2]}
        return fl.TwinSamples(shape(direct), shape(correction), z[0, :, 0], np.zeros(5))


THETA = {"a": jnp.zeros(2), "b": jnp.zeros(())}


def run(estimator, calls, theta=THETA, count=COUNT, seed=0):
    return [estimator(jax.random.fold_in(jax.random.key(seed), i), theta, count) for i in range(calls)]


def test_the_first_call_is_the_plain_estimate():
    averaged, plain = (
        fl.Averaged(ESTIMATOR)(jax.random.key(1), THE.theta, 200),
        ESTIMATOR(jax.random.key(1), THE.theta, 200),
    )
    for name in ("gradient", "stderr", "value", "value_stderr"):
        np.testing.assert_allclose(flat(getattr(averaged, name)), flat(getattr(plain, name)), rtol=1e-9)
    # ⟨G²⟩ of the samples is mean² + variance, here with the unbiased variance
    square = (199 / 200 * (flat(averaged.second_moment) - flat(averaged.gradient) ** 2)) + flat(plain.gradient) ** 2
    np.testing.assert_allclose(square, flat(plain.second_moment), rtol=1e-9)


def test_memory_one_remembers_nothing():
    for averaged, plain in zip(run(fl.Averaged(Gaussian(), memory=1), 3), run_plain(3), strict=True):
        np.testing.assert_allclose(flat(averaged.gradient), flat(plain.gradient), rtol=1e-9)
        np.testing.assert_allclose(flat(averaged.stderr), flat(plain.stderr), rtol=1e-9)


def run_plain(calls):
    from fluctua.core.ppgt import total

    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(calls)]
    return [fl.reduce_samples(total(Gaussian().split(k, THETA, COUNT))) for k in keys]


def test_errors_are_honest():
    # The last of 12 calls, in 300 repetitions: (estimate − mean)/stderr is a standard normal, whose variance is known
    # to √(2/300) = 8 % from the repetitions; the three parameters are independent and are tested each.
    z, square = [], []
    for seed in range(300):
        estimate = run(fl.Averaged(Gaussian(), memory=4), 12, seed=seed)[-1]
        z.append((flat(estimate.gradient) - Gaussian.direct - Gaussian.correction) / flat(estimate.stderr))
        square.append(flat(estimate.stderr) ** 2)
    z = np.array(z)
    assert np.abs(z.mean(axis=0) * np.sqrt(300)).max() < tolerance(3)
    assert np.abs(z.var(axis=0) - 1).max() < tolerance(3) * np.sqrt(2 / 300)
    # What the error bar should be: this call's correction goes with its direct part, the earlier ones by themselves.
    w = 0.75 ** np.arange(12)
    w /= w.sum()
    expected = ((0.3 + 2 * w[0]) ** 2 + (3 * w[0]) ** 2 + (2**2 + 3**2) * np.sum(w[1:] ** 2)) / COUNT
    # A variance from 100 trajectories is known to √(2/99) = 14 %, the mean of 300 of them to 0.8 %.
    np.testing.assert_allclose(np.mean(square, axis=0), expected, rtol=tolerance(3) * np.sqrt(2 / 99 / 300))


def test_unbiased_with_a_wrong_twin_and_the_certificate_shows_it(key):
    averaged = fl.Averaged(ESTIMATOR, memory=1000)
    for i in range(20):
        estimate = averaged(jax.random.fold_in(key, i), THE.theta, 1000)
    z = (flat(estimate.gradient) - flat(THE.exact_gradient)) / flat(estimate.stderr)
    assert np.abs(z).max() < tolerance(z.size), z
    # Known exactly: the mean correction is what the twin's own, direct, part misses.
    direct = [ESTIMATOR.split(jax.random.fold_in(key, i), THE.theta, 1000).direct for i in range(20)]
    missed = flat(THE.exact_gradient) - np.mean([flat(jax.tree.map(lambda v: v.mean(0), d)) for d in direct], axis=0)
    certificate = averaged.certificate
    z = (flat(certificate.correction) - missed) / np.hypot(flat(certificate.stderr), flat(estimate.stderr))
    assert np.abs(z).max() < tolerance(z.size), z
    rows = {row[0]: row[1:] for row in certificate.rows}
    assert rows["k"][2] > 100  # chi²: it is certain that the twin is wrong about k …
    assert rows["gain"] == (0.0, 0.0, 0.0)  # … and right about what is in the reward only
    # weights follow the variances of the calls, which are known to some ten per cent each: N/(1 + 0.1²) or so
    assert 18_000 < certificate.trajectories <= 20_000
    assert "chi² per component" in repr(certificate)


def test_chi_square_is_one_where_the_twin_is_right():
    class Right(Gaussian):
        correction = np.zeros(3)

    chi = []
    for seed in range(100):
        averaged = fl.Averaged(Right(), memory=50)
        run(averaged, 10, seed=seed)
        chi.append([row[3] * size for row, size in zip(averaged.certificate.rows, (2, 1), strict=True)])
    # Σ over 100 repetitions and 3 parameters of squares of standard normals: 300 ± √600
    assert abs(np.sum(chi) - 300) < tolerance(1) * np.sqrt(600)


def test_calls_weigh_by_their_number_over_their_variance():
    averaged = fl.Averaged(Gaussian(), memory=1e12)
    above, below = 0.0, 0.0
    for i, count in enumerate((50, 400, 100)):
        key = jax.random.key(i)
        averaged(key, THETA, count)
        correction = Gaussian().split(key, THETA, count).correction
        spread = jax.tree.map(lambda v: np.full(v.shape[1:], np.var(v, axis=0, ddof=1).mean()), correction)
        weight = count / flat(spread)
        above = above + weight * flat(jax.tree.map(lambda v: v.mean(0), correction))
        below = below + weight
    np.testing.assert_allclose(flat(averaged.certificate.correction), above / below, rtol=1e-6)


def test_a_noisy_first_call_does_not_drown_the_others():
    """The mean of a loud call and quiet ones is as quiet as the quiet ones, not as a hundredth of the loud one."""
    averaged = fl.Averaged(Gaussian(), memory=1e12)
    loud = Gaussian()
    averaged.estimator = type("Loud", (), {"split": lambda self, *a: _louder(loud.split(*a), 100.0)})()
    averaged(jax.random.key(0), THETA, 100)
    averaged.estimator = loud
    for i in range(1, 11):
        averaged(jax.random.key(i), THETA, 100)
    quiet = fl.Averaged(Gaussian(), memory=1e12)
    for i in range(1, 11):
        quiet(jax.random.key(i), THETA, 100)
    ratio = flat(averaged.certificate.stderr) / flat(quiet.certificate.stderr)
    np.testing.assert_allclose(ratio, 1.0, atol=0.01)  # the loud one has 1e-4 of the weight of a quiet one


def _louder(samples, factor):
    return samples._replace(correction=jax.tree.map(lambda v: factor * v, samples.correction))


def test_state_goes_on_where_it_was():
    whole, first = fl.Averaged(Gaussian()), fl.Averaged(Gaussian())
    run(whole, 3), run(first, 3)
    second = fl.Averaged(Gaussian())
    second.restore(first.state, THETA)
    np.testing.assert_array_equal(flat(second.certificate.correction), flat(first.certificate.correction))
    assert all(isinstance(v, np.ndarray) for v in first.state.values())
    key = jax.random.key(9)
    for a, b in zip(whole(key, THETA, 10)[:-1], second(key, THETA, 10)[:-1], strict=True):
        np.testing.assert_array_equal(flat(a), flat(b))


def test_the_carried_table_is_used():
    seen = []

    class Carries(Gaussian):
        def split(self, key, theta, count, table=None):
            seen.append(table)
            return super().split(key, theta, count)._replace(mean_lambda=jnp.full(5, len(seen)))

    averaged = fl.Averaged(Carries(), carry=True)
    run(averaged, 3)
    assert seen[0] is None
    np.testing.assert_array_equal(seen[2], np.full(5, 2))
    estimator = fl.Averaged(ESTIMATOR, carry=True)
    run(estimator, 2, THE.theta)
    assert estimator.state["table"].shape == (THE.t.size,)


def test_trains():
    averaged = fl.Averaged(ESTIMATOR, memory=5)
    records = list(fl.train(jax.random.key(0), THE.theta, averaged, optax.sgd(0.01), count=50, iterations=4))
    assert records[-1].trajectories == 200


def test_refusals():
    with pytest.raises(TypeError, match=r"baseline=Twin\(\).*no `split`"):
        fl.Averaged(THE.estimator())
    with pytest.raises(ValueError, match=r"at least 1; got 0"):
        fl.Averaged(ESTIMATOR, memory=0)
    with pytest.raises(ValueError, match=r"no certificate yet"):
        _ = fl.Averaged(ESTIMATOR).certificate
    with pytest.raises(ValueError, match=r"not the state.*'correction'"):
        fl.Averaged(ESTIMATOR).restore({"weight": np.zeros(())})
    with pytest.raises(ValueError, match=r"two trajectories"):
        fl.Averaged(ESTIMATOR)(jax.random.key(0), THE.theta, 1)
    averaged = fl.Averaged(Gaussian())
    averaged.restore(fl.Averaged(Gaussian()).state)
    run(averaged, 1)
    averaged.restore({**averaged.state, "correction": np.zeros(7)})
    with pytest.raises(ValueError, match=r"of 7 parameters and θ has 3"):
        run(averaged, 1)
