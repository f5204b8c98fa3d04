"""One gradient per trajectory, what is averaged from them, and estimators made of plain functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core.types import Array, Estimate, Estimates, Estimator, Params


class Samples(NamedTuple):
    """One gradient and one return per trajectory: leaves (E, ...), and (E,)."""

    gradient: Params
    returns: Array


def reduce_samples(samples: Samples) -> Estimate:
    """Mean, standard error and second moment over trajectories."""
    gradient, stderr, second_moment, value, value_stderr = _reduce(samples)
    return Estimate(gradient, stderr, second_moment, value, value_stderr, samples.returns.shape[0])


def unflatten(theta: Params, flat: Array) -> Params:
    """Rows (E, P) as leaves (E, ...) of the structure and precision of θ."""
    like, unravel = ravel_pytree(theta)
    return jax.vmap(unravel)(flat.astype(like.dtype))


@jax.jit
def _reduce(samples: Samples) -> tuple[Params, Params, Params, Array, Array]:
    count = samples.returns.shape[0]
    error = lambda v: v.std(axis=0, ddof=1) / np.sqrt(count)
    each = samples.gradient
    return (
        jax.tree.map(lambda v: v.mean(axis=0), each),
        jax.tree.map(error, each),
        jax.tree.map(lambda v: jnp.mean(v**2, axis=0), each),
        samples.returns.mean(),
        error(samples.returns),
    )


class RunningSums:
    """Sums of gradients and returns in float64, chunk after chunk, and the estimate that they make.

    parts: also keep the sums of every `parts`-th trajectory, for estimates from tenths of a recording, say.
    """

    def __init__(self, theta: Params, parts: int = 0):
        flat, self._unravel = ravel_pytree(theta)
        self.count = 0
        self.g, self.g2 = np.zeros(flat.size), np.zeros(flat.size)
        self.parts = np.zeros((parts, flat.size))
        self.shift: float | None = None
        self.r = self.r2 = 0.0

    def add(self, samples: Samples) -> None:
        """Add the trajectories of a chunk."""
        returns = np.asarray(samples.returns, np.float64)
        leaves = jax.tree.leaves(samples.gradient)
        rows = np.concatenate([np.asarray(v, np.float64).reshape(len(returns), -1) for v in leaves], 1)
        self.g += rows.sum(axis=0)
        self.g2 += (rows**2).sum(axis=0)
        if len(self.parts):
            np.add.at(self.parts, (self.count + np.arange(len(rows))) % len(self.parts), rows)
        if self.shift is None:  # returns are large against their spread
            self.shift = float(returns.mean())
        self.r += float((returns - self.shift).sum())
        self.r2 += float(((returns - self.shift) ** 2).sum())
        self.count += len(returns)

    def by_parts(self) -> np.ndarray | None:
        """Means of every `parts`-th trajectory (parts, P), if each has two at least."""
        many = len(self.parts)
        each = (self.count - np.arange(many) + many - 1) // many if many else np.zeros(0)
        return self.parts / each[:, None] if many and self.count >= 2 * many else None

    def estimate(self) -> Estimate:
        """Mean, standard error and second moment of all that was added."""
        n = self.count
        of = lambda total, square: np.sqrt(np.maximum(square / n - (total / n) ** 2, 0) / (n - 1))
        tree = lambda v: self._unravel(jnp.asarray(v, jnp.result_type(float)))
        return Estimate(
            tree(self.g / n),
            tree(of(self.g, self.g2)),
            tree(self.g2 / n),
            jnp.asarray((self.shift or 0.0) + self.r / n),
            jnp.asarray(of(self.r, self.r2)),
            n,
        )


class Bare(NamedTuple):
    """A function (key, theta, count) -> Estimate as an estimator: one trajectory a sample, nothing remembered."""

    function: Estimates

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` samples."""
        return self.function(key, theta, count)

    def cost(self, theta: Params) -> int:
        """Trajectories per sample."""
        return 1

    @property
    def pilot(self) -> int:
        """None."""
        return 0

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Nothing is remembered between calls."""
        return {}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params) -> None:
        """Nothing to put back."""


def as_estimator(given: Estimator | Estimates) -> Estimator:
    """An `Estimator` as it is; a bare function (key, theta, count) -> Estimate wrapped as one."""
    if not callable(given):
        raise TypeError(f"an estimator is called as (key, theta, count) -> Estimate; got {type(given).__name__}.")
    here = [name for name in ("cost", "pilot", "state", "restore") if hasattr(given, name)]
    if not here:
        return Bare(given)
    missing = sorted({"cost", "pilot", "state", "restore"} - set(here))
    if missing:
        raise TypeError(
            f"{type(given).__name__} has {', '.join(map(repr, here))} and lacks {', '.join(map(repr, missing))}: an "
            "`Estimator` has all four, a bare function none of them."
        )
    estimator: Any = given
    return estimator
