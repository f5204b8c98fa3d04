"""Evaluation of the final parameters on a device, once a training is over.

A training that is simulated is evaluated by its simulator, at no cost. A device measures further
trajectories: they are counted, and their result is part of the last checkpoint, so that a run that
continues does not measure them twice. An instrument that fails at that moment costs the evaluation
alone; the next call of the same run repeats it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from fluctua.core.arrays import Params
from fluctua.core.protocols import Estimator
from fluctua.core.simulate import Simulator
from fluctua.learn.evaluate import evaluate, fresh_key, split_system
from fluctua.learn.training import check_whole_number
from fluctua.store.checkpoint import RunState
from fluctua.store.summary import DEVICE, ESTIMATOR, SIMULATOR

ENTRY = "final"
"""Of a checkpoint."""

FAILED = "failed"
"""Reason in place of a result."""

MIN_MEASURED = 20
"""Trajectories of a device in a final evaluation, where their number is not given and an iteration
has fewer."""


def check_number(count: int | None) -> None:
    """Refuse a number of trajectories of a final evaluation; None is the default, 0 is none."""
    if count is None:
        return
    check_whole_number("final_trajectories", count, 0)
    if count == 1:
        raise ValueError(
            "`final_trajectories` must be 2 or more, for an error bar, or 0 for no evaluation; "
            "got 1."
        )


def choose_number(count: int | None, size: int, minimum: int = MIN_MEASURED) -> int:
    """Trajectories to measure: as given, or by default as many as an iteration has.

    Args:
        count: as given; None is the default.
        size: trajectories of an iteration.
        minimum: of the default.
    """
    return max(size, minimum) if count is None else count


def find_source(estimator: Any) -> str:
    """Find what can evaluate J of an estimator: `SIMULATOR`, `DEVICE`, or `ESTIMATOR`."""
    substrate, objective = split_system(estimator)
    if hasattr(substrate, "measure_returns"):
        return DEVICE
    if objective is None:
        return ESTIMATOR
    simulates = isinstance(substrate, Simulator) or hasattr(substrate, "refined")
    return SIMULATOR if simulates else DEVICE


def measure(estimator: Any, theta: Params, count: int, seed: int) -> dict[str, Any]:
    """Measure J at θ on the device of an estimator, or by a call of it.

    Returns: J, J_stderr, trajectories and the source; or the reason why it failed.
    """
    source = find_source(estimator)
    try:
        if source == DEVICE:
            value = evaluate(estimator, theta, count=count, seed=seed)._asdict()
        else:
            value = _call(estimator, theta, count, seed)
    except Exception as error:  # whatever a device raises: the training is over and saved
        return {FAILED: f"{type(error).__name__}: {error}"}
    return {**value, "source": source}


def _call(estimator: Estimator, theta: Params, count: int, seed: int) -> dict[str, Any]:
    """J by one more call of an estimator, whose state stays as it was."""
    before = estimator.state
    estimate = estimator(fresh_key(seed), theta, count)
    spent = count * estimator.cost(theta) + estimator.pilot
    if before:
        estimator.restore(before, theta)
    return {
        "J": float(estimate.value),
        "J_stderr": float(estimate.value_stderr),
        "trajectories": int(spent),
    }


def hold(state: RunState, value: dict[str, Any]) -> RunState:
    """The state with the result of `measure`."""
    entry = {**value, "iteration": state.now.iteration}
    return dataclasses.replace(state, further={**state.further, ENTRY: np.array(json.dumps(entry))})


def read(state: RunState) -> dict[str, Any] | None:
    """The result of `measure` that a state holds of its own parameters; None if there is none."""
    if ENTRY not in state.further:
        return None
    entry = json.loads(str(state.further[ENTRY]))
    return entry if entry.pop("iteration") == state.now.iteration else None


def is_measured(state: RunState) -> bool:
    """Whether a state holds the J of its parameters."""
    value = read(state)
    return value is not None and FAILED not in value
