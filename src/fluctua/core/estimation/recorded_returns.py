"""Returns of trajectories that were measured or simulated before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fluctua.core import arrays, check, recorded, simulate
from fluctua.core import objective as objectives
from fluctua.core import process as processes
from fluctua.core import trajectories as records
from fluctua.core.estimation import method as methods


def returns(
    objective: objectives.Objective | objectives.Rewards,
    theta: arrays.Params,
    trajectories: records.Trajectories | Iterable[records.Trajectories],
    *,
    process: processes.AnyProcess | simulate.Simulator | None = None,
    block_bytes: int = recorded.BLOCK_BYTES,
) -> np.ndarray:
    """Return of each measured or simulated trajectory; their mean estimates J (Eq. 2).

        R = g_T(X_T) + Σ_n {g(X_n, t_n) Δt_n + r(X_n, X_{n+1})} + g_0(X_0)

    Args:
        objective: what is rewarded, with a `stop` or without.
        theta: θ, a pytree of floats.
        trajectories: one record, or an iterable of them (chunks of a data set larger than memory),
            which is gone through once; a generator will do.
        process: the process, or its simulator, of an estimate that these returns belong to: the
            running reward is then integrated as there, by the trapezoid rule unless the steps are
            Euler's. By default the sum is that of the equation. `overshoot="bridge"` needs it.
        block_bytes: how much of the trajectories is held at a time.

    Returns: (E,).

    >>> R = fl.returns(objective, theta, recorded)
    >>> R.shape
    (200,)
    >>> bool(np.isclose(R.mean(), fl.gradient(process, objective, theta, recorded).value))
    True
    """
    if isinstance(objective, objectives.FunctionOfMeans):
        raise ValueError(
            "a function of means is a number of all trajectories, and one trajectory has no return "
            "of it. Call `returns` for each objective that it was made of."
        )
    rewards: Any = check.objective(objective, stops=True)
    if process is not None:
        inner = process.recipe.process if isinstance(process, simulate.Simulator) else process
        rewards = methods.match_process(rewards, check.process(inner))
    elif rewards.stop is not None and rewards.stop.bridge and rewards.stop.process is None:
        raise ValueError(
            'overshoot="bridge" needs `process=`, whose noise decides how likely a path crossed '
            "the level between two times."
        )
    return recorded.evaluate_pieces(rewards, check.parameters(theta), trajectories, block_bytes)
