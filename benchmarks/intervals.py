"""Cover of 95 % intervals of gradient and return, at small ensembles, on problems whose answers are
exact.

The problems are those of the tests (tests/support/problems.py): affine drifts, rewards and noise at
most quadratic, whose samples have skewness of up to 30 and kurtosis of up to 2,000.

    python benchmarks/intervals.py
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from fluctua.core.estimate import Samples, reduce_samples
from fluctua.processes.stationary import average_batches
from problems import flat, multiplicative, non_normal, ornstein_uhlenbeck, problem

PROBLEMS = {
    "Ornstein–Uhlenbeck": ornstein_uhlenbeck,
    "non-normal": non_normal,
    "multiplicative noise": multiplicative,
}
SIZES = (2, 3, 5, 10, 20, 50, 200, 2000)


def cover(make, size, repeats, seed=0):
    """Fraction of intervals that hold the exact answer, for every component and the return: (95
    %, ±1.96 stderr).
    """
    the = problem(make)
    samples = the.estimator().samples(jax.random.key(seed), the.theta, size * repeats)
    rows = [np.asarray(v).reshape(size * repeats, -1) for v in jax.tree.leaves(samples.gradient)]
    each = np.concatenate(rows, axis=1).reshape(repeats, size, -1)
    truth, value = flat(the.exact_gradient), float(the.exact_value)
    inside, plain = [], []
    for g, r in zip(each, np.asarray(samples.returns).reshape(repeats, size), strict=True):
        e = reduce_samples(Samples(jnp.asarray(g), jnp.asarray(r)))
        low, high = (
            np.append(side, end) for side, end in zip(e.interval, e.value_interval, strict=True)
        )
        exact = np.append(truth, value)
        inside.append((low < exact) & (exact < high))
        error = np.append(e.stderr, e.value_stderr)
        plain.append(np.abs(np.append(e.gradient, e.value) - exact) < 1.96 * error)
    return np.mean(inside, axis=0), np.mean(plain, axis=0)


def cover_of_records(steps, window, length, repeats, seed=0):
    """The same for dJ/dk of a long-run average, J = E[x²], from Ornstein–Uhlenbeck records of so
    many steps each.

    The batches of `fluctua.stationary` with this window and batch length, of all records at once.
    """
    k, s, dt, rng = 1.5, 0.8, 0.05, np.random.default_rng(seed)
    decay = 1 - k * dt
    exact = -2 * s**2 * dt**2 * decay / (1 - decay**2) ** 2
    x = np.empty((repeats, steps + 1))
    x[:, 0] = s * np.sqrt(dt / (1 - decay**2)) * rng.normal(size=repeats)
    for n in range(steps):
        x[:, n + 1] = decay * x[:, n] + s * np.sqrt(dt) * rng.normal(size=repeats)
    score = -x[:, :-1] * (x[:, 1:] - decay * x[:, :-1]) / s**2
    total = np.concatenate([np.zeros((repeats, 1)), np.cumsum(score, axis=1)], axis=1)
    n, g = np.arange(window, steps), x[:, :-1] ** 2
    each = (g[:, n] - g.mean(axis=1, keepdims=True)) * (total[:, n] - total[:, n - window])
    many = each.shape[1] // length
    batches = each[:, : many * length].reshape(repeats, many, length).mean(axis=2)
    estimates = [average_batches(jnp.zeros(()), row[:, None], row) for row in batches]
    inside = [e.interval[0] < exact < e.interval[1] for e in estimates]
    plain = [abs(e.gradient - exact) < 1.96 * e.stderr for e in estimates]
    return many, np.array([np.mean(inside)]), np.array([np.mean(plain)])


def main():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--repeats", type=int, default=1000)
    repeats = options.parse_args().repeats
    jax.config.update("jax_enable_x64", True)
    print(f"{'':24}{'interval, mean (least) over components':>40}{'±1.96 stderr':>20}")
    for size in SIZES:
        for name, make in PROBLEMS.items():
            inside, plain = cover(make, size, repeats)

            def with_least(v):
                return f"{v.mean():.3f} ({v.min():.2f})"

            print(f"{size:>6}  {name:<20}{with_least(inside):>36}{with_least(plain):>22}")
    for steps in (2500, 8000, 80_000):
        size, inside, plain = cover_of_records(steps, 70, 140, repeats)
        print(
            f"{size:>6}  {'batches of a record':<20}{with_least(inside):>36}{with_least(plain):>22}"
        )


if __name__ == "__main__":
    main()
