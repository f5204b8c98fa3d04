"""The correction averaged over iterations: mean, honest errors, certificate, state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
from fluctua.core.averaged import SUMS, own_certificate
from fluctua.core.ppgt import total
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
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(calls)]
    return [fl.reduce_samples(total(Gaussian().split(k, THETA, COUNT))) for k in keys]


def test_errors_are_honest():
    # The last of 6 calls, in 300 repetitions: (estimate − mean)/stderr is a standard normal, whose variance is known
    # to √(2/300) = 8 % from the repetitions; the three parameters are independent and are tested each.
    z, square = [], []
    for seed in range(300):
        estimate = run(fl.Averaged(Gaussian(), memory=4), 6, seed=seed)[-1]
        z.append((flat(estimate.gradient) - Gaussian.direct - Gaussian.correction) / flat(estimate.stderr))
        square.append(flat(estimate.stderr) ** 2)
    z = np.array(z)
    assert np.abs(z.mean(axis=0) * np.sqrt(300)).max() < tolerance(3)
    assert np.abs(z.var(axis=0) - 1).max() < tolerance(3) * np.sqrt(2 / 300)
    # What the error bar should be: this call's correction goes with its direct part, the earlier ones by themselves.
    w = 0.75 ** np.arange(6)
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
    assert certificate.trajectories == pytest.approx(20_000, rel=0.001)  # memory fades the first by 2 %
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


def test_calls_weigh_by_their_trajectories():
    averaged = fl.Averaged(Gaussian(), memory=1e12)
    counts, means = (50, 400, 100), []
    for i, count in enumerate(counts):
        averaged(jax.random.key(i), THETA, count)
        correction = Gaussian().split(jax.random.key(i), THETA, count).correction
        means.append(flat(jax.tree.map(lambda v: v.mean(0), correction)))
    expected = np.average(means, axis=0, weights=counts)
    np.testing.assert_allclose(flat(averaged.certificate.correction), expected, rtol=1e-6)


def test_a_skewed_correction_is_not_biased():
    """∂J/∂s of a process whose twin is 20 % wrong: a weight of 1/variance put it off by a third (z = −29)."""
    estimator = THE.estimator(baseline=fl.Twin(lambda th: jax.tree.map(lambda v: 1.2 * v, th)))
    kept = Kept(estimator)
    averaged = fl.Averaged(kept, memory=100)
    estimates = [averaged(jax.random.key(i), THE.theta, 64) for i in range(400)]
    # the last 300 of memory 100: their mean has the errors of the calls, not of the averages
    mean = np.mean([flat(e.gradient) for e in estimates[100:]], axis=0)
    each = [flat(fl.reduce_samples(total(samples)).stderr) for samples in kept.samples[100:]]
    error = np.sqrt(np.mean(np.square(each), axis=0) / 300) * np.sqrt(4 / 3)  # and a third more of calls before
    assert np.abs((mean - flat(THE.exact_gradient)) / error).max() < tolerance(mean.size)


class Kept:
    """An estimator whose samples are kept."""

    def __init__(self, estimator):
        self.estimator, self.samples = estimator, []

    def split(self, key, theta, count):
        self.samples.append(self.estimator.split(key, theta, count))
        return self.samples[-1]


class Correlated:
    """Corrections of p components with mean m and correlation ρ; the direct part is exact."""

    def __init__(self, mean, rho):
        self.mean, self.rho = np.asarray(mean), rho

    def split(self, key, theta, count):
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        z = np.sqrt(1 - self.rho) * rng.normal(size=(count, self.mean.size))
        z += np.sqrt(self.rho) * rng.normal(size=(count, 1))
        return fl.TwinSamples(np.zeros_like(z), self.mean + z, z[:, 0], np.zeros(5))


@pytest.mark.parametrize(("size", "rho"), [(1, 0.0), (4, 0.0), (20, 0.9), (20, 0.0), (100, 0.0), (100, 0.3)])
@pytest.mark.parametrize("mean", [0.0, 0.05, 0.3])
def test_shrinkage_is_never_worse_and_its_error_bar_covers(size, rho, mean):
    """Mean square error over that without shrinkage, at most 1 within its standard error; cover of ±1.96 stderr."""
    truth, theta = mean * np.ones(size) * (np.arange(size) % 2), np.zeros(size)
    plain, shrunk = (fl.Averaged(Correlated(truth, rho), memory=1, shrink=shrink) for shrink in (False, True))
    differences, squares, inside = [], [], []
    for seed in range(200):
        without, estimate = (e(jax.random.key(seed), theta, 64) for e in (plain, shrunk))
        without, with_, error = (np.asarray(v) for v in (without.gradient, estimate.gradient, estimate.stderr))
        squares.append(np.sum((without - truth) ** 2))
        differences.append(np.sum((with_ - truth) ** 2) - squares[-1])
        inside.append(np.mean(np.abs(with_ - truth) < 1.96 * error))
    assert np.mean(differences) <= 3 * np.std(differences) / np.sqrt(200)
    # binomial of one component a call where they are as good as one; 64 trajectories know σ to 9 %, which costs 0.4 %
    assert np.mean(inside) > 0.946 - 3 * np.sqrt(0.05 * 0.95 / 200)
    if size == 100 and rho == 0 and mean == 0:
        assert np.mean(differences) < -0.6 * np.mean(squares)  # what it is for: all noise, mostly left out


def test_a_first_call_without_a_table_hardly_counts():
    """The mean of a loud call and quiet ones is as quiet as the quiet ones, not as a hundredth of the loud one."""

    class Carries(Gaussian):
        def split(self, key, theta, count, table=None):
            samples = super().split(key, theta, count)
            return _louder(samples, 100.0) if table is None else samples

    averaged, quiet = fl.Averaged(Carries(), memory=1e12, carry=True), fl.Averaged(Gaussian(), memory=1e12)
    averaged(jax.random.key(0), THETA, 100)
    for i in range(1, 11):
        averaged(jax.random.key(i), THETA, 100)
        quiet(jax.random.key(i), THETA, 100)
    ratio = flat(averaged.certificate.stderr) / flat(quiet.certificate.stderr)
    np.testing.assert_allclose(ratio, 1.0, atol=0.01)


def _louder(samples, factor):
    return samples._replace(correction=jax.tree.map(lambda v: factor * v, samples.correction))


def test_the_state_of_precision_weights_can_be_gone_on_with():
    averaged = fl.Averaged(Gaussian(), memory=10)
    run(averaged, 3)
    state, precision = averaged.state, 0.1
    old = {name: state[name] * precision**power for name, power in zip(SUMS, (1, 2, 1, 2, 1), strict=True)}
    again = fl.Averaged(Gaussian(), memory=10)
    again.restore(old, THETA)
    np.testing.assert_allclose(flat(again.certificate.correction), flat(averaged.certificate.correction))
    assert again.state["weight"] == pytest.approx(state["weight"], rel=0.2)


def test_the_order_of_the_twin_is_told_apart_from_its_parameters():
    """A linear guess of an exact model misses what noise adds; so it does on trajectories of its own."""
    right, wrong = fl.Twin(order=1), fl.Twin(lambda th: jax.tree.map(lambda v: 1.2 * v, th), order=1)
    for twin, agrees in ((right, True), (wrong, False)):
        estimator = THE.estimator(baseline=twin)
        device = fl.Averaged(estimator, memory=1)
        device(jax.random.key(0), THE.theta, 4000)
        own = own_certificate(jax.random.key(1), estimator, THE.theta, 4000)
        rows = {row[0]: row[3] for row in device.certificate.rows}
        assert rows["sigma"] > 10  # resolved either way: no verdict on the parameters
        error = np.hypot(flat(device.certificate.stderr), flat(own.stderr))
        z = (flat(device.certificate.correction) - flat(own.correction)) / np.where(error > 0, error, 1)
        assert (np.abs(z).max() < tolerance(z.size)) == agrees, z


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
