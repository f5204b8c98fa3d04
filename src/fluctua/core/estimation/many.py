"""Many θ in one call: a stack of K parameters, and one compiled program for all of them.

A stack is a pytree like θ whose leaves have one more axis in front, of length K. Noise is common to
all θ, from one key, or independent, from K keys. Row k is what a call with key k and θ k gives, to
rounding. With common noise a difference between two θ has less variance than either value, and JAX
draws the noise once for all of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import arrays, check, simulate, streamed
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params
from fluctua.core.objective import Rewards

CPU_TRAJECTORIES = 2**12
GPU_TRAJECTORIES = 2**17
"""Trajectories of all θ that advance together; the rest of a stack follows in the same program."""


class ThetaStack(NamedTuple):
    """K parameters and the keys of their noise.

    keys: one key for all, or K of them. thetas: leaves (K, ...).
    """

    keys: Array
    thetas: Params
    size: int
    common: bool

    def rows(self, stop: int | None = None) -> list[tuple[Array, Params]]:
        """Key and parameters of each, or of the first `stop`.

        Parameters are NumPy arrays: checks of them compile and transfer nothing.
        """
        host = jax.tree.map(arrays.on_host, self.thetas)

        def select_row(k: int) -> tuple[Array, Params]:
            theta = jax.tree.map(lambda leaf: leaf[k, ...], host)
            return self.keys if self.common else self.keys[k], theta

        return [select_row(k) for k in range(self.size if stop is None else stop)]


def check_stack(key: Array, thetas: Params) -> ThetaStack:
    """The stack of these parameters, after a check of its shapes. key: one, or one per θ."""
    checked = check.parameters(thetas)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(checked)]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) > 1 or sizes & {(), (0,)}:
        raise ValueError(
            "`thetas` must be a stack of K parameters: every leaf of θ with one more axis in "
            f"front, of the same length K; got shapes {', '.join(map(str, shapes))}. Stack a list "
            "by jax.tree.map(lambda *leaves: jnp.stack(leaves), *list)."
        )
    check.key(key)
    (size,) = sizes.pop()
    words = 0 if arrays.is_key(key) else 1  # a raw key is two words
    shape = np.shape(key)[: np.ndim(key) - words]
    if shape not in ((), (size,)):
        raise ValueError(
            f"`key` must be one key, for noise common to all θ, or one per θ, ({size},); got keys "
            f"of shape {shape}. Write jax.random.split(key, {size})."
        )
    return ThetaStack(key, checked, size, shape == ())


@partial(arrays.jit, static_argnums=(0, 1, 2, 3))
def collect_returns(
    rewards: Rewards,
    recipe: simulate.Recipe,
    count: int,
    stacked: tuple[str, ...],
    run: streamed.Run,
) -> Array:
    """R of every trajectory of K runs, none of which is stored. Shape (K, count).

    stacked: fields of `run` that have an axis of length K; the runs share the others.
    """

    def collect(rows: dict[str, Any]) -> Array:
        return streamed.collect_returns(rewards, recipe, count, run._replace(**rows))

    return map_runs(collect, {name: getattr(run, name) for name in stacked}, count)


def sweep_stack(call: streamed.Call, stack: ThetaStack) -> streamed.SweepResult:
    """Returns (K, E), gradients (K, E, P) and final states (K, E, M) of K runs like `call`.

    Those of a key and θ that gave numbers that are not finite are among them.
    """
    substrate = call.substrate
    run = streamed.Run(stack.keys, stack.thetas, substrate.times, substrate.x0)
    passes = streamed.plan_passes(call)
    return _sweep_stack(
        call.model, substrate.recipe, call.count, passes, stack.common, run, call.tables
    )


@partial(arrays.jit, static_argnums=(0, 1, 2, 3, 4))
def _sweep_stack(
    model: terms.EstimatorModel,
    recipe: simulate.Recipe,
    count: int,
    passes: streamed.Passes,
    common: bool,
    run: streamed.Run,
    tables: terms.Tables,
) -> streamed.SweepResult:
    def sweep(rows: dict[str, Any]) -> streamed.SweepResult:
        one = run._replace(**rows)
        keys = streamed.split_key(one.key)
        return streamed.sweep(
            model, recipe, count, passes, one._replace(key=keys.run), keys.pilot, tables
        )

    rows = {"theta": run.theta} if common else {"theta": run.theta, "key": run.key}
    return map_runs(sweep, rows, max(count, passes.pilot))


def map_runs(function: Any, rows: dict[str, Any], count: int) -> Any:
    """The results of `function` for all rows, as many at once as fit.

    count: numbers of a row that are held while it runs, such as its trajectories.
    """
    most = CPU_TRAJECTORIES if jax.default_backend() == "cpu" else GPU_TRAJECTORIES
    return jax.lax.map(function, rows, batch_size=max(1, most // count))


def are_finite(swept: streamed.SweepResult) -> np.ndarray:
    """Whether all numbers of a run are finite, for each of the K. Shape (K,)."""
    return np.asarray(_are_finite(swept.last, swept.gradients))


@arrays.jit
def _are_finite(*values: Array) -> Array:
    each = [jnp.isfinite(v).reshape(v.shape[0], -1).all(axis=1) for v in values]
    return jnp.stack(each).all(axis=0)
