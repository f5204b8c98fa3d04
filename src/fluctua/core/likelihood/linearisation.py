"""Whether local linearisation serves parameters of the noise."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.dependence import depends
from fluctua.core.diffusion import diffusion_matrix
from fluctua.core.likelihood.sample import MINIMUM, choose_rows, load_rows
from fluctua.core.process import Process
from fluctua.core.trajectories import Trajectories

MAX_BEND = 0.01


def check_linearisation(
    process: Process, theta: Params, trajectories: Trajectories | Iterable[Trajectories]
) -> None:
    """Refuse `local_linear_score` for parameters of the noise where the drift bends within a kick.

    Its law is Gaussian. A drift that is not linear skews the law by about |J(x + k) − J(x)| Δ, with
    J = ∂μ/∂x and k a kick of one interval, which parameters of the drift bear and those of the
    noise do not: their gradient is wrong by a tenth at 0.04 in a double well, and has the wrong
    sign at 1.
    """
    data = trajectories if isinstance(trajectories, Trajectories) else next(iter(trajectories))
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], data.context)
    x = jnp.asarray(np.asarray(data.x[0]), working_dtype(theta, data.x))
    leaves, tree = jax.tree.flatten_with_path(theta)
    in_noise = []
    for i, (path, leaf) in enumerate(leaves):

        def noise(v: Array, theta: Params, *state: Any, i: int = i) -> Array:
            others = jax.tree.leaves(theta)
            return diffusion_matrix(
                process, jax.tree.unflatten(tree, [*others[:i], v, *others[i + 1 :]]), *state
            )

        if depends(noise, leaf, theta, x[0], jnp.asarray(data.t)[0], one, on=0):
            in_noise.append("theta" + jax.tree_util.keystr(path))
    if not in_noise:
        return
    rows = choose_rows(data, MINIMUM)[:MINIMUM]
    some = jnp.asarray(load_rows(data.x, rows), x.dtype)
    steps = np.unique(np.linspace(0, len(data.t) - 2, 20).astype(int))
    context = jax.tree.map(lambda leaf: jnp.asarray(load_rows(leaf, rows)), data.context)
    times = check.grid(data.t)
    bend = float(
        _measure_bend(process, theta, some[:, steps], times.t[steps], times.dt[steps], context)
    )
    if bend > MAX_BEND:
        raise ValueError(
            f"local linearisation is not for {', '.join(in_noise)} here: the parameters enter the "
            f"noise, and the drift bends within a kick (|J(x + kick) − J(x)| Δ = {bend:.2g}, "
            f"{MAX_BEND} at most). Sample faster, or keep them fixed: leave them out of theta."
        )


@partial(jit, static_argnums=0)
def _measure_bend(
    process: Process, theta: Params, x: Array, t: Array, dt: Array, context: PyTree
) -> Array:
    """Root mean square of |J(x + k) − J(x)| Δ over states x (E, n, M).

    k: one standard deviation of a kick along each axis.
    """

    def one(x: Array, t: Array, dt: Array, context: PyTree) -> Array:
        slope = jax.jacfwd(lambda x: process.drift(theta, x, t, context))
        kick = jnp.sqrt(2 * dt * jnp.diagonal(diffusion_matrix(process, theta, x, t, context)))
        return jnp.max(jnp.abs(slope(x + kick) - slope(x))) * dt

    each = jax.vmap(jax.vmap(one, in_axes=(0, 0, 0, None)), in_axes=(0, None, None, 0))(
        x, t, dt, context
    )
    return jnp.sqrt(jnp.mean(each**2))
