"""Tests of standardised residuals: zero on average where the process is right, and the fault's
own where it is not.
"""

import numpy as np
import pytest

from fluctua.core.likelihood import alternatives
from fluctua.core.likelihood.alternatives import FITTED, Limits

DT = 0.02
EVERYTHING = Limits(mean=0, variance=0, product=0, step=0)


def run(count, steps, seed, rate=1.0, drift=None, noise=None):
    """States (E, T+1, 2) of two coupled components with unit noise, float64."""
    rng = np.random.default_rng(seed)
    x = np.zeros((count, steps + 1, 2))
    for n in range(steps):
        mean = right(x[:, n], rate) if drift is None else drift(x[:, n])
        size = 1.0 if noise is None else noise(x[:, n])
        x[:, n + 1] = x[:, n] + mean * DT + size * np.sqrt(DT) * rng.normal(size=(count, 2))
    return x


def right(x, rate=1.0):
    return rate * (0.5 - x + 0.5 * x[..., ::-1])


def collect(x, rate=1.0):
    z = (np.diff(x, axis=1) - right(x[:, :-1], rate) * DT) / np.sqrt(DT)
    return alternatives.sum_families(
        z, z**2, x, alternatives.Places(np.arange(z.shape[1]), z.shape[1])
    )


def largest(x, limits=FITTED):
    drift = np.sqrt(np.mean(right(x[:, :-1]) ** 2, axis=(0, 1)) * DT)
    deviations = alternatives.judge(collect(x), drift, limits)
    return deviations[0] if deviations else None


def test_right_models_pass_whatever_the_size_of_a_deviation():
    """One false alarm in 10⁴ batches is allowed; 300 of them have one with 3 %."""
    shapes = [(1, 300), (4, 60), (40, 60)]
    assert not [
        seed
        for seed in range(300)
        if alternatives.judge(collect(run(*shapes[seed % 3], seed)), np.ones(2), EVERYTHING)
    ]


@pytest.mark.parametrize("count", [1, 4])
def test_sums_are_zero_on_average_and_have_their_variance(count):
    """A slow walk, where Σ z(x − x̄) about the mean of the same trajectory is off by a standard
    deviation a batch.
    """
    tables = [collect(run(count, 240 // count, seed, rate=0.01), 0.01) for seed in range(200)]
    for name in ("linear", "square", "cube", "radial", "moved 3", "variance linear", "lag 1"):
        total, variance = (
            np.array([getattr(t[name], part)[0, 0] for t in tables])
            for part in ("total", "variance")
        )
        assert abs(total.sum()) < 4.5 * np.sqrt(variance.sum()), name
        square = total**2 / variance.mean()
        assert abs(square.mean() - 1) < 4.5 * square.std() / np.sqrt(200), name


def test_sums_of_batches_add_up():
    """A gain of 3 % that no batch of 1,600 steps shows is plain after forty; fading forgets."""
    whole = None
    tables = [collect(1.03 * run(16, 100, seed)) for seed in range(40)]
    for table in tables:
        whole = alternatives.add_tables(whole, table)
    v = whole["v of all"]
    assert v.total.item() / np.sqrt(v.variance.item()) == pytest.approx(
        0.0609 * np.sqrt(64_000 / 2 * 2), abs=4.5
    )
    assert v.terms == 128_000
    faded = alternatives.discount(whole, 0.5)["v of all"]
    assert faded.total / np.sqrt(faded.variance) == pytest.approx(v.total / np.sqrt(v.variance))
    assert alternatives.discount(whole, 0.0) is None


def delay(x, samples):
    return np.concatenate([np.repeat(x[:, :1], samples, axis=1), x[:, :-samples]], axis=1)


def cubic(x):
    return right(x) - 0.4 * x**3


def growing(x):
    return np.sqrt((1 + x**2) / 1.4)


def low_pass(x):
    return (x[:, 1:] + x[:, :-1]) / 2


RNG = np.random.default_rng(0)
PLAIN = run(100, 100, 1)
FAULTS = {
    "gain of both": (1.05 * PLAIN, ("v of all",)),
    "gain of one": (PLAIN * [1.05, 1.0], ("v",)),
    "cubic": (run(400, 100, 2, drift=cubic), ("linear", "square", "cube", "offset")),
    "multiplicative": (run(100, 100, 3, noise=growing), ("variance linear", "variance square")),
    "readout": (PLAIN + 0.05 * RNG.normal(size=PLAIN.shape), ("lag 1", "v of all")),
    "filter": (low_pass(PLAIN), ("v of all", "lag 1")),
    "held": (delay(PLAIN, 3), ("step v", "step v of all")),
    "stale": (PLAIN[:10].repeat(2, axis=0), ("pairs",)),
    "jump": (PLAIN + 0.2 * (np.arange(101) > 50)[:, None], ("step", "step v", "step v of all")),
    "crosstalk": (PLAIN @ [[0.995, 0.1], [0.1, 0.995]], ("together",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_the_most_likely_one(fault):
    x, families = FAULTS[fault]
    assert largest(x).family in families


def test_nothing_is_the_matter_with_the_plain_ones():
    assert largest(PLAIN, EVERYTHING) is None


def test_small_deviations_pass_however_certain():
    assert largest(1.02 * run(2000, 100, 5)) is None  # v = 1.04
    assert largest(1.04 * run(2000, 100, 5)) is not None
