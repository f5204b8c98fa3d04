"""How much of the correction is taken: weights that do not look at it, error, cover,
certificate, state.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
from fluctua.core.estimation.method import sum_parts
from fluctua.core.twin.correction import TwinSamples
from fluctua.learn.shrunk_correction import combine_parts, measure_own_certificate
from problems import flat, ornstein_uhlenbeck, problem, tolerance

THE = problem(ornstein_uhlenbeck, "fixed")
TWIN = fl.Twin(lambda th: jax.tree.map(lambda v: 1.2 * v, th), order=2)
ESTIMATOR = THE.estimator(baseline=TWIN)
COUNT = 100


class Gaussian:
    """An estimator whose two parts are correlated normals with known means, one number for each
    of P parameters.
    """

    direct, correction = np.array([1.0, -2.0, 0.5]), np.array([0.3, 0.0, -0.4])

    def split(self, key, theta, count):
        z = np.random.default_rng(np.asarray(jax.random.key_data(key))).normal(size=(2, count, 3))
        direct = self.direct + 0.3 * z[0]
        correction = self.correction + 2 * z[0] + 3 * z[1]
        shape = lambda v: {"a": v[:, :2], "b": v[:, 2]}
        return TwinSamples(shape(direct), shape(correction), z[0, :, 0], np.zeros(5))


THETA = {"a": jnp.zeros(2), "b": jnp.zeros(())}


def run(estimator, calls, theta=THETA, count=COUNT, seed=0):
    return [
        estimator(jax.random.fold_in(jax.random.key(seed), i), theta, count) for i in range(calls)
    ]


def test_memory_one_takes_all_of_it():
    for weighted, plain in zip(
        run(fl.ShrunkCorrection(Gaussian(), forget_after=1), 3), run_plain(3), strict=True
    ):
        np.testing.assert_allclose(flat(weighted.gradient), flat(plain.gradient), rtol=1e-9)
        np.testing.assert_allclose(flat(weighted.stderr), flat(plain.stderr), rtol=1e-9)


def run_plain(calls):
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(calls)]
    return [fl.reduce_samples(sum_parts(Gaussian().split(k, THETA, COUNT))) for k in keys]


def test_a_first_call_without_halves_takes_all_of_it():
    key = jax.random.key(1)
    weighted, plain = (
        fl.ShrunkCorrection(ESTIMATOR)(key, THE.theta, 3),
        ESTIMATOR(key, THE.theta, 3),
    )
    for name in ("gradient", "stderr", "value", "value_stderr"):
        np.testing.assert_allclose(
            flat(getattr(weighted, name)), flat(getattr(plain, name)), rtol=1e-9
        )


@pytest.mark.parametrize("count", [3, 16])
def test_weights_do_not_look_at_what_they_weight(count):
    """E[w⟨c⟩] = E[w] E[c] of a skewed correction.

    A w of the same sample puts it off: the larger c, the larger w.
    """
    rng, theta, repetitions, off, same = np.random.default_rng(0), np.zeros(1), 1500, [], []
    for _ in range(repetitions):
        sums = {}
        for _ in range(2):  # the second call has a past
            c = rng.exponential(size=(count, 1)) - 0.8
            made = combine_parts(theta, sums, np.zeros_like(c), c, 50.0)
            sums = made.sums
        off.append(made.gradient[0] - np.mean(made.weight) * 0.2)
        worth = max(0.0, 1 - sums["square"][0] / sums["correction"][0] ** 2)
        same.append(worth * (c.mean() - 0.2))
    z = lambda v: np.mean(v) / (np.std(v) / np.sqrt(repetitions))
    assert abs(z(off)) < tolerance(2)
    if count == 16:  # with three a call most of the sample is of the call before
        assert abs(z(same)) > 5


class Mean:
    """Corrections with mean b; the direct part is exact, and zero."""

    def __init__(self, size, mean, rho):
        self.size, self.mean, self.rho = size, mean, rho

    def rows(self, rng, count):
        z = np.sqrt(1 - self.rho) * rng.normal(size=(count, self.size))
        return self.mean + z + np.sqrt(self.rho) * rng.normal(size=(count, 1))


@pytest.mark.parametrize(
    ("size", "rho", "ratio"), [(1, 0.0, 1.0), (20, 0.9, 0.0), (20, 0.9, 10.0), (100, 0.0, 1.0)]
)
def test_the_error_is_nearly_the_least_and_the_bar_covers(size, rho, ratio):
    """Over 2·memory calls: mean square error against b²V/(b² + V), the least of any w; ratio =
    b²/V.
    """
    memory, count, repetitions = 5, 32, 60
    variance = 1 / (2 * memory * count)  # of one component's mean over the calls
    problem, rng = Mean(size, np.sqrt(ratio * variance), rho), np.random.default_rng(1)
    theta, squares, inside = np.zeros(size), [], []
    for _ in range(repetitions):
        sums, taken = {}, []
        for call in range(4 * memory):
            c = problem.rows(rng, count)
            made = combine_parts(theta, sums, np.zeros_like(c), c, memory)
            sums = made.sums
            taken += [made.gradient] * (call >= 2 * memory)
        squares.append(np.mean((np.mean(taken, axis=0) - problem.mean) ** 2) / variance)
        inside.append(np.mean(np.abs(made.gradient - problem.mean) < 1.96 * made.stderr))
    least, error = ratio / (1 + ratio), np.std(squares) / np.sqrt(repetitions)
    if size == 100:
        # |c|²/V is known to √(2 + 4 ratio)/√100: what the error of w adds is of second order, 2 %
        # at most; with ratio 0 it is all there is, w² with √⟨w²⟩ = √2/10 where |c|² is above its
        # mean
        assert np.mean(squares) < 1.1 * least + 0.01 + 4 * error
    else:  # with one component w is hardly known: at worst 1.7 times the plain estimate, at b² = 3V
        assert np.mean(squares) < 1.7 + 4 * error
    # 32 trajectories know σ to an eighth: Student's t of 31 degrees is within 1.96 in 94 % of all
    assert np.mean(inside) > 0.94 - 4 * np.sqrt(0.06 * 0.94 / repetitions)


def test_unbiased_with_a_wrong_twin_and_the_certificate_shows_it(key):
    weighted = fl.ShrunkCorrection(ESTIMATOR, forget_after=1000)
    for i in range(20):
        estimate = weighted(jax.random.fold_in(key, i), THE.theta, 1000)
    z = (flat(estimate.gradient) - flat(THE.exact_gradient)) / flat(estimate.stderr)
    assert np.abs(z).max() < tolerance(z.size), z
    # Known exactly: the mean correction is what the twin's own, direct, part misses.
    direct = [
        ESTIMATOR.split(jax.random.fold_in(key, i), THE.theta, 1000).direct for i in range(20)
    ]
    missed = flat(THE.exact_gradient) - np.mean(
        [flat(jax.tree.map(lambda v: v.mean(0), d)) for d in direct], axis=0
    )
    certificate = weighted.certificate
    z = (flat(certificate.correction) - missed) / np.hypot(
        flat(certificate.stderr), flat(estimate.stderr)
    )
    assert np.abs(z).max() < tolerance(z.size), z
    rows = {row[0]: row[1:] for row in certificate.rows}
    assert rows["k"][2] > 100  # chi²: it is certain that the twin is wrong about k …
    assert rows["gain"] == (0.0, 0.0, 0.0)  # … and right about what is in the reward only
    assert certificate.trajectories == pytest.approx(
        20_000, rel=0.001
    )  # memory fades the first by 2 %
    assert "chi² per component" in repr(certificate)


@pytest.mark.long
def test_chi_square_is_one_where_the_twin_is_right():
    class Right(Gaussian):
        correction = np.zeros(3)

    chi = []
    for seed in range(100):
        weighted = fl.ShrunkCorrection(Right(), forget_after=50)
        run(weighted, 10, seed=seed)
        chi.append(
            [row[3] * size for row, size in zip(weighted.certificate.rows, (2, 1), strict=True)]
        )
    # Σ over 100 repetitions and 3 parameters of squares of standard normals: 300 ± √600
    assert abs(np.sum(chi) - 300) < tolerance(1) * np.sqrt(600)


def test_calls_weigh_by_their_trajectories():
    weighted = fl.ShrunkCorrection(Gaussian(), forget_after=1e12)
    counts, means = (50, 400, 100), []
    for i, count in enumerate(counts):
        weighted(jax.random.key(i), THETA, count)
        correction = Gaussian().split(jax.random.key(i), THETA, count).correction
        means.append(flat(jax.tree.map(lambda v: v.mean(0), correction)))
    expected = np.average(means, axis=0, weights=counts)
    np.testing.assert_allclose(flat(weighted.certificate.correction), expected, rtol=1e-6)


@pytest.mark.long
def test_a_skewed_correction_is_not_biased():
    """∂J/∂s of a process whose twin is 20 % wrong: a weight of 1/variance put it off by a third
    (z = −29).
    """
    estimator = THE.estimator(baseline=fl.Twin(lambda th: jax.tree.map(lambda v: 1.2 * v, th)))
    kept = Kept(estimator)
    weighted = fl.ShrunkCorrection(kept, forget_after=100)
    estimates = [weighted(jax.random.key(i), THE.theta, 64) for i in range(400)]
    # what is left out is within the error of the average that did not resolve it
    mean = np.mean([flat(e.gradient) for e in estimates[100:]], axis=0)
    each = [flat(fl.reduce_samples(sum_parts(samples)).stderr) for samples in kept.samples[100:]]
    error = np.sqrt(np.mean(np.square(each), axis=0) / 300)
    assert np.abs((mean - flat(THE.exact_gradient)) / error).max() < tolerance(mean.size)


class Kept:
    """An estimator whose samples are kept."""

    def __init__(self, estimator):
        self.estimator, self.samples = estimator, []

    def split(self, key, theta, count):
        self.samples.append(self.estimator.split(key, theta, count))
        return self.samples[-1]


def test_a_first_call_without_a_table_hardly_counts():
    """The mean of a loud call and quiet ones is as quiet as the quiet ones, not as a hundredth
    of the loud one.
    """

    class Carries(Gaussian):
        def split(self, key, theta, count, table=None):
            samples = super().split(key, theta, count)
            return _louder(samples, 100.0) if table is None else samples

    weighted, quiet = (
        fl.ShrunkCorrection(Carries(), forget_after=1e12, carry=True),
        fl.ShrunkCorrection(Gaussian(), forget_after=1e12),
    )
    weighted(jax.random.key(0), THETA, 100)
    for i in range(1, 11):
        weighted(jax.random.key(i), THETA, 100)
        quiet(jax.random.key(i), THETA, 100)
    ratio = flat(weighted.certificate.stderr) / flat(quiet.certificate.stderr)
    np.testing.assert_allclose(ratio, 1.0, atol=0.01)


def _louder(samples, factor):
    return samples._replace(correction=jax.tree.map(lambda v: factor * v, samples.correction))


@pytest.mark.long
def test_the_order_of_the_twin_is_told_apart_from_its_parameters():
    """A linear guess of an exact model misses what noise adds; so it does on trajectories of
    its own.
    """
    right, wrong = (
        fl.Twin(order=1),
        fl.Twin(lambda th: jax.tree.map(lambda v: 1.2 * v, th), order=1),
    )
    for twin, agrees in ((right, True), (wrong, False)):
        estimator = THE.estimator(baseline=twin)
        device = fl.ShrunkCorrection(estimator, forget_after=1)
        device(jax.random.key(0), THE.theta, 4000)
        own = measure_own_certificate(jax.random.key(1), estimator, THE.theta, 4000)
        rows = {row[0]: row[3] for row in device.certificate.rows}
        assert rows["sigma"] > 10  # resolved either way: no verdict on the parameters
        error = np.hypot(flat(device.certificate.stderr), flat(own.stderr))
        z = (flat(device.certificate.correction) - flat(own.correction)) / np.where(
            error > 0, error, 1
        )
        assert (np.abs(z).max() < tolerance(z.size)) == agrees, z


def test_state_goes_on_where_it_was():
    whole, first = fl.ShrunkCorrection(Gaussian()), fl.ShrunkCorrection(Gaussian())
    run(whole, 3), run(first, 3)
    second = fl.ShrunkCorrection(Gaussian())
    second.restore(first.state, THETA)
    np.testing.assert_array_equal(
        flat(second.certificate.correction), flat(first.certificate.correction)
    )
    assert all(isinstance(v, np.ndarray) for v in first.state.values())
    key = jax.random.key(9)
    for a, b in zip(whole(key, THETA, 10)[:-1], second(key, THETA, 10)[:-1], strict=True):
        np.testing.assert_array_equal(flat(a), flat(b))


@pytest.mark.long
def test_the_carried_table_is_used():
    seen = []

    class Carries(Gaussian):
        def split(self, key, theta, count, table=None):
            seen.append(table)
            return super().split(key, theta, count)._replace(mean_lambda=jnp.full(5, len(seen)))

    weighted = fl.ShrunkCorrection(Carries(), carry=True)
    run(weighted, 3)
    assert seen[0] is None
    np.testing.assert_array_equal(seen[2], np.full(5, 2))
    estimator = fl.ShrunkCorrection(ESTIMATOR, carry=True)
    run(estimator, 2, THE.theta)
    assert estimator.state["table"].shape == (THE.t.size,)


def test_trains():
    weighted = fl.ShrunkCorrection(ESTIMATOR, forget_after=5)
    records = list(
        fl.train(fl.Training(weighted, THE.theta, optax.sgd(0.01), trajectories=50), iterations=4)
    )
    assert records[-1].trajectories == 200


def test_refusals():
    with pytest.raises(TypeError, match=r"baseline=Twin\(\).*no `split`"):
        fl.ShrunkCorrection(THE.estimator())
    with pytest.raises(ValueError, match=r"at least 1; got 0"):
        fl.ShrunkCorrection(ESTIMATOR, forget_after=0)
    with pytest.raises(ValueError, match=r"no certificate yet"):
        _ = fl.ShrunkCorrection(ESTIMATOR).certificate
    with pytest.raises(ValueError, match=r"not the state.*'correction'"):
        fl.ShrunkCorrection(ESTIMATOR).restore({"weight": np.zeros(())})
    with pytest.raises(ValueError, match=r"two trajectories"):
        fl.ShrunkCorrection(ESTIMATOR)(jax.random.key(0), THE.theta, 1)
    weighted = fl.ShrunkCorrection(Gaussian())
    weighted.restore(fl.ShrunkCorrection(Gaussian()).state)
    run(weighted, 1)
    weighted.restore({**weighted.state, "correction": np.zeros(7)})
    with pytest.raises(ValueError, match=r"of 7 parameters and θ has 3"):
        run(weighted, 1)
