"""All that is needed to go on after some row of a run, and its form as plain arrays for a checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.types import Params
from fluctua.learn.schedule import FIT_FROM
from fluctua.learn.train import Iterate, Record


@dataclass
class State:
    """A run between two rows.

    row: the next one. now: the next iteration. spent: trajectories. seconds: of training. tier: how many
    escalations there were; it also picks the noise, so that an iteration done again sees a fresh one.
    tier_start: iteration at which the present ensemble size began. values: J of every iteration before this one,
    abandoned branches left out. past: iterates that a rewind may go back to. memory: what the estimator remembers.
    further: named arrays of whoever runs this, such as the calibration of an instrument.
    """

    row: int
    now: Iterate
    spent: int
    seconds: float
    tier: int
    tier_start: int
    values: list[float]
    past: list[Iterate]
    memory: dict[str, np.ndarray] = field(default_factory=dict)
    further: dict[str, np.ndarray] = field(default_factory=dict)


def begin(theta: Params, optimiser_state: Any) -> State:
    """Before the first row."""
    return State(0, Iterate(0, theta, optimiser_state), 0, 0.0, 0, 0, [], [])


def after(state: State, record: Record, memory: dict[str, np.ndarray]) -> State:
    """The state after one more record. The given one is left alone."""
    return dataclasses.replace(
        state,
        row=state.row + 1,
        now=record.after,
        spent=record.trajectories,
        seconds=state.seconds + record.seconds,
        values=[*state.values, float(record.estimate.value)],
        past=list(state.past),
        memory=memory,
    )


def remember(state: State, iterate: Iterate, window: int) -> None:
    """Keep an iterate, the one before the present one, for a rewind.

    That goes back 12W iterations at most, or to the tier's start, which bounds memory and checkpoints: 12W + 1
    iterates, 5 MB with the paper's lattice and rule.
    """
    state.past.append(iterate)
    oldest = iterate.iteration - FIT_FROM * window
    state.past = [p for p in state.past if p.iteration >= oldest or p.iteration == state.tier_start]


def rewind(state: State, iteration: int) -> None:
    """Go back to where `iteration` began; what came after is forgotten."""
    if iteration < state.now.iteration:
        state.now = next(p for p in state.past if p.iteration == iteration)
    state.past = [p for p in state.past if p.iteration < iteration]
    del state.values[iteration:]


# ------------------------------------------------------------------------------------- as plain arrays


NUMBERS = ("row", "spent", "seconds", "tier", "tier_start")


def to_arrays(state: State) -> dict[str, np.ndarray]:
    """Named arrays; leaves of θ and of the optimiser's state are numbered in the order of their tree."""
    arrays = {name: np.asarray(getattr(state, name)) for name in NUMBERS}
    arrays["values"] = np.asarray(state.values, float)
    arrays |= state.further
    arrays |= {f"estimator/{name}": array for name, array in state.memory.items()}
    arrays["iteration"] = np.asarray(state.now.iteration)
    arrays |= {f"now/{i}": leaf for i, leaf in enumerate(_leaves(state.now))}
    arrays["past/iteration"] = np.array([p.iteration for p in state.past], int)
    for i, stacked in enumerate(zip(*map(_leaves, state.past), strict=True)):
        arrays[f"past/{i}"] = np.stack(stacked)
    return arrays


def from_arrays(arrays: dict[str, np.ndarray], like: Iterate) -> State:
    """The state again. like: an iterate of the same training, for the shapes and the tree."""
    template, tree = jax.tree.flatten((like.theta, like.optimiser_state))

    def iterate(iteration: int, leaves: list[np.ndarray]) -> Iterate:
        for old, new in zip(template, leaves, strict=True):
            if np.shape(old) != np.shape(new) or np.asarray(old).dtype != new.dtype:
                raise ValueError(
                    f"the checkpoint holds {new.dtype} arrays of shape {np.shape(new)} where this training has "
                    f"{np.asarray(old).dtype} of {np.shape(old)}. Is it of another system, or of an instrument with "
                    "other knobs, or is JAX in another precision (JAX_ENABLE_X64)?"
                )
        theta, state = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in leaves])
        return Iterate(iteration, theta, state)

    count = sum(name.startswith("now/") for name in arrays)
    if count != len(template):
        raise ValueError(
            f"the checkpoint has {count} arrays for parameters and optimiser, this training has {len(template)}. Is it "
            "of another system, with another optimiser, or did optax change?"
        )
    known = {*NUMBERS, "values", "iteration"}
    numbers = [int(n) for n in arrays["past/iteration"]]
    stacks = [arrays[f"past/{i}"] for i in range(count)] if numbers else []
    rest = (n for n in arrays if n not in known and not n.startswith(("now/", "past/", "estimator/")))
    return State(
        row=int(arrays["row"]),
        now=iterate(int(arrays["iteration"]), [arrays[f"now/{i}"] for i in range(count)]),
        spent=int(arrays["spent"]),
        seconds=float(arrays["seconds"]),
        tier=int(arrays["tier"]),
        tier_start=int(arrays["tier_start"]),
        values=arrays["values"].tolist(),
        past=[iterate(n, [stack[j] for stack in stacks]) for j, n in enumerate(numbers)],
        memory={n.removeprefix("estimator/"): v for n, v in arrays.items() if n.startswith("estimator/")},
        further={n: arrays[n] for n in rest},
    )


def _leaves(iterate: Iterate) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves((iterate.theta, iterate.optimiser_state))]
