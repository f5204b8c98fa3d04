"""The kernels' quantile-binned baseline against its definition, trajectory by trajectory."""

import jax
import numpy as np
import pytest

from fluctua.core.baselines import Inputs, binned
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.options import Binned
from fluctua.tcmt.native import _native
from in_turn import in_turn
from kernel_reference import binned_bars, rectangle, simulate

pytestmark = pytest.mark.long

SEED = 0x1234_5678_9ABC_DEF0
FAMILIES = ("omega", "kappa", "chi")


def deviation(actual, expected):
    return np.abs(actual - expected).max() / np.abs(expected).max()


def expected_gradient(spec, path, baseline):
    few = path._replace(scores={name: path.scores[name] for name in FAMILIES})
    return few.gradient(binned_bars(spec, path, baseline.bins, baseline.every))


CASES = [
    (50, Binned(bins=5, every=1)),
    (50, Binned(bins=5, every=7)),
    (50, Binned(bins=40, every=3)),  # most bins have one member
    (19, Binned(bins=1, every=100)),  # the optimal baseline of the whole ensemble
    (2, Binned()),
]


@pytest.mark.parametrize(
    ("case", "dtype", "engine"), in_turn(CASES, ["float32", "float64"], _native.engines())
)
def test_every_trajectory_meets_the_baseline_of_the_definition(case, dtype, engine):
    count, baseline = case
    spec = rectangle(2, 3, steps=24)
    path = simulate(spec, SEED, count)
    run = kernel.run(
        spec, SEED, count, baseline=baseline, dtype=dtype, engine=engine, samples=True, threads=2
    )
    expected = expected_gradient(spec, path, baseline)
    for name in FAMILIES:
        assert deviation(getattr(run.samples, name), expected[name]) < (
            2e-4 if dtype == "float32" else 1e-10
        ), name


def test_equal_states_share_a_bin_at_the_start():
    """From ψ = 0 all trajectories tie at step 0 and no score may turn into 0/0."""
    spec = rectangle(2, 3, steps=10).replace(start=np.zeros(6))
    path = simulate(spec, SEED, 30)
    for every in (1, 5):
        run = kernel.run(spec, SEED, 30, baseline=Binned(4, every), dtype="float64", samples=True)
        expected = expected_gradient(spec, path, Binned(4, every))
        for name in FAMILIES:
            assert deviation(getattr(run.samples, name), expected[name]) < 1e-10


def test_it_is_the_librarys_own_binned_baseline():
    spec = rectangle(2, 3, steps=12)
    path = simulate(spec, SEED, 40)
    i, j = spec.bonds.T
    power = lambda x: x[:6] ** 2 + x[6:] ** 2
    condition = lambda theta, x: {"a": power(x), "b": power(x), "c": power(x)[i] + power(x)[j]}
    theta = {"a": np.zeros(6), "b": np.zeros(6), "c": np.zeros(len(i))}
    with jax.enable_x64(True):
        find_baseline = jax.jit(binned(condition, bins=5).function)
        total = 0.0
        for n in range(spec.steps):
            u = np.concatenate([path.scores[k][:, n] for k in ("omega", "chi", "kappa")], axis=1)
            x = np.concatenate([path.psi[:, n].real, path.psi[:, n].imag], axis=1)
            to_go = path.to_go[:, n]
            kick = Inputs(np.array(n), theta, x, np.array(0.0), None, to_go, u, None)
            total = total + (to_go[:, None] - np.asarray(find_baseline(kick))) * u
    run = kernel.run(spec, SEED, 40, baseline=Binned(5, 1), dtype="float64", samples=True)
    samples = np.concatenate([run.samples.omega, run.samples.chi, run.samples.kappa], axis=1)
    assert deviation(samples, total) < 1e-10


def test_more_trajectories_than_one_piece_modulation_and_threads():
    spec = rectangle(2, 2, steps=30, sigma_kappa=0.2)
    options = {"baseline": Binned(20, 10), "samples": True}
    one = kernel.run(spec, SEED, 1100, threads=1, **options)
    three = kernel.run(spec, SEED, 1100, threads=3, **options)
    np.testing.assert_array_equal(one.samples.kappa, three.samples.kappa)
    np.testing.assert_array_equal(one.gradient.kappa, three.gradient.kappa)
    path = simulate(spec, SEED, 1100)
    power = abs(path.psi) ** 2
    assert deviation(one.samples.kappa, expected_fast(spec, path, power)) < 2e-4


def expected_fast(spec, path, power):
    """κ's gradients with sums minus one's own, in float64: the definition is too slow for 1,100."""
    from kernel_reference import find_bins

    i, j = spec.bonds.T
    total = np.zeros((len(power), len(i)))
    for n in range(spec.steps):
        for b in range(len(i)):
            group = find_bins(power[:, n - n % 10, i[b]] + power[:, n - n % 10, j[b]], 20)
            u, to_go = path.scores["kappa"][:, n, b], path.to_go[:, n]
            s0, s1 = (np.bincount(group, w, minlength=20)[group] for w in (u**2, u**2 * to_go))
            total[:, b] += (to_go - (s1 - u**2 * to_go) / (s0 - u**2)) * u
    return total


def test_the_mean_agrees_with_the_time_only_baseline_within_errors():
    spec = rectangle(2, 3, steps=200)
    table = kernel.run(spec, 99, 500, scores=False).mean_return_to_go
    a = kernel.run(spec, 1, 20_000, baseline=table)
    b = kernel.run(spec, 2, 20_000, baseline=Binned(20, 20))
    for name in FAMILIES:
        z = (getattr(a.gradient, name) - getattr(b.gradient, name)) / np.hypot(
            getattr(a.stderr, name), getattr(b.stderr, name)
        )
        assert np.abs(z).max() < 4.5


def test_what_it_does_not_do_is_refused():
    for options, message in [
        ({"baseline": Binned(), "count": 1}, "at least 2"),
        ({"baseline": Binned(), "antithetic": True}, "opposite noise"),
        ({"baseline": Binned(), "rates": True}, "Rates"),
    ]:
        count = options.pop("count", 4)
        with pytest.raises(ValueError, match=message):
            kernel.run(rectangle(), 0, count, **options)


def test_a_wrong_record_is_not_made():
    for wrong, message in [((0,), "bins=0"), ((257,), "bins=257"), ((20, 0), "every=0")]:
        with pytest.raises(ValueError, match=message):
            Binned(*wrong)


def test_a_large_ensemble_is_settled_in_groups():
    spec = rectangle(2, 3, steps=20)
    whole = kernel.run(spec, SEED, 90, baseline=Binned(4, 5, group=40), samples=True)
    parts = [
        kernel.run(spec, SEED, 30, baseline=Binned(4, 5), samples=True, first_trajectory=first)
        for first in (0, 30, 60)
    ]
    np.testing.assert_array_equal(whole.returns, np.concatenate([p.returns for p in parts]))
    each = np.concatenate([p.samples.kappa for p in parts]).astype(float)
    np.testing.assert_array_equal(whole.samples.kappa, each)
    np.testing.assert_allclose(whole.gradient.kappa, each.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(
        whole.stderr.kappa, each.std(axis=0, ddof=1) / np.sqrt(90), rtol=1e-6
    )
