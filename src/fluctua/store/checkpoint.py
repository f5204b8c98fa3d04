"""Checkpoints: arrays in one .npz with a checksum, written atomically.

A file appears under its name only when it is complete and on the disk, so a kill at any moment
leaves the earlier ones intact. Pickle is never used.

`RunState` is everything needed to continue after a row of a run, also as plain arrays.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Params
from fluctua.learn.optimisers import FIT_FROM
from fluctua.learn.training import Iterate, Record

CHECKSUM = "sha256"


class Damaged(ValueError):
    """A file that is incomplete, or whose checksum does not fit."""


def write(folder: Path, number: int, arrays: Mapping[str, np.ndarray], keep: int) -> Path:
    """Write `row-<number>.npz`, and remove all but the last `keep`."""
    folder.mkdir(exist_ok=True)  # not its parents: a run folder that was removed stays so
    path = folder / f"row-{number:08d}.npz"
    replace(path, pack(arrays))
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of an .npz with its checksum."""
    named = {name: np.asarray(value) for name, value in arrays.items()}
    memory = io.BytesIO()
    stamped: dict[str, Any] = {**named, CHECKSUM: np.frombuffer(checksum(named), np.uint8)}
    np.savez(memory, **stamped)
    return memory.getvalue()


def read(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a checkpoint; raise `Damaged` with the reason."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        zipfile.BadZipFile,
        NotImplementedError,
    ) as error:
        raise Damaged(f"it is not a complete .npz ({error})") from None
    stated = arrays.pop(CHECKSUM, None)
    if stated is None or stated.tobytes() != checksum(arrays):
        raise Damaged("its checksum does not fit its contents")
    return arrays


def read_newest(
    folder: Path, report: Callable[[str], None]
) -> tuple[Path, dict[str, np.ndarray]] | None:
    """The newest readable checkpoint and its path; None if there is none.

    Damaged ones are reported and set aside, and the one before is tried.
    """
    for path in reversed(list_checkpoints(folder)):
        try:
            return path, read(path)
        except Damaged as error:
            name = set_aside(path)
            report(
                f"checkpoint {path.name} is damaged: {error}. It is kept as {name}; trying the one "
                "before it."
            )
    return None


def set_aside(path: Path) -> str:
    """Rename a damaged file so that it is neither read nor lost, and return its new name."""
    aside = path.with_suffix(".damaged")
    number = 1
    while aside.exists():
        aside = path.with_suffix(f".damaged-{number}")
        number = number + 1
    path.rename(aside)
    return aside.name


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest first."""
    return sorted(folder.glob("row-*.npz"))


def checksum(arrays: Mapping[str, np.ndarray]) -> bytes:
    """SHA-256 of names, types, shapes and contents."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {np.shape(arrays[name])}\n".encode())
        digest.update(array.tobytes())
    return digest.digest()


def replace(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old file or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rename_durably(partial, path)


def rename_durably(partial: Path, path: Path) -> None:
    """Give a complete file its name, and sync the directory."""
    os.replace(partial, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# ------------------------------------------------------------------------------------------ state


@dataclass
class RunState:
    """The state of a run between two rows.

    row: index of the next row.
    now: the next iteration.
    spent: trajectories so far.
    seconds: of training.
    tier: number of escalations; it also selects the noise, so that a repeated iteration has fresh
        noise.
    tier_start: iteration at which the present ensemble size began.
    values: J of every iteration before this one, abandoned branches left out.
    past: iterates to which a rewind may return.
    memory: state of the estimator.
    further: named arrays of the caller, such as the calibration of an instrument.
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


def start_state(theta: Params, optimiser_state: Any) -> RunState:
    """The state before the first row."""
    return RunState(0, Iterate(0, theta, optimiser_state), 0, 0.0, 0, 0, [], [])


def add_record(state: RunState, record: Record, memory: dict[str, np.ndarray]) -> RunState:
    """The state after one more record. The given one is not modified."""
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


def keep_iterate(state: RunState, iterate: Iterate, window: int) -> None:
    """Keep an iterate, the one before the present one, for a rewind.

    A rewind goes back at most 12W iterations, or to the tier's start, which bounds memory and
    checkpoints: 12W + 1 iterates, 5 MB with the paper's lattice and rule.
    """
    state.past.append(iterate)
    oldest = iterate.iteration - FIT_FROM * window
    state.past = [p for p in state.past if p.iteration >= oldest or p.iteration == state.tier_start]


def rewind(state: RunState, iteration: int) -> None:
    """Return to the beginning of `iteration`; later iterates and values are dropped."""
    if iteration < state.now.iteration:
        state.now = next(p for p in state.past if p.iteration == iteration)
    state.past = [p for p in state.past if p.iteration < iteration]
    del state.values[iteration:]


# ---------------------------------------------------------------------------------- as plain arrays


NUMBERS = ("row", "spent", "seconds", "tier", "tier_start")


def to_arrays(state: RunState) -> dict[str, np.ndarray]:
    """The state as named arrays.

    Leaves of θ and of the optimiser's state are numbered in the order of their tree.
    """
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


def from_arrays(arrays: dict[str, np.ndarray], like: Iterate) -> RunState:
    """Restore the state from arrays. like: an iterate of the same training, for shapes and tree."""
    template, tree = jax.tree.flatten((like.theta, like.optimiser_state))

    def iterate(iteration: int, leaves: list[np.ndarray]) -> Iterate:
        for old, new in zip(template, leaves, strict=True):
            if np.shape(old) != np.shape(new) or np.asarray(old).dtype != new.dtype:
                raise ValueError(
                    f"the checkpoint holds {new.dtype} arrays of shape {np.shape(new)} where this "
                    f"training has {np.asarray(old).dtype} of {np.shape(old)}. Is it of another "
                    "system, or of an instrument with other knobs, or is JAX in another precision "
                    "(JAX_ENABLE_X64)?"
                )
        theta, state = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in leaves])
        return Iterate(iteration, theta, state)

    count = sum(name.startswith("now/") for name in arrays)
    if count != len(template):
        raise ValueError(
            f"the checkpoint has {count} arrays for parameters and optimiser, this training has "
            f"{len(template)}. Is it of another system, with another optimiser, or did optax "
            "change?"
        )
    known = {*NUMBERS, "values", "iteration"}
    numbers = [int(n) for n in arrays["past/iteration"]]
    stacks = [arrays[f"past/{i}"] for i in range(count)] if numbers else []
    rest = (
        n for n in arrays if n not in known and not n.startswith(("now/", "past/", "estimator/"))
    )
    return RunState(
        row=int(arrays["row"]),
        now=iterate(int(arrays["iteration"]), [arrays[f"now/{i}"] for i in range(count)]),
        spent=int(arrays["spent"]),
        seconds=float(arrays["seconds"]),
        tier=int(arrays["tier"]),
        tier_start=int(arrays["tier_start"]),
        values=arrays["values"].tolist(),
        past=[iterate(n, [stack[j] for stack in stacks]) for j, n in enumerate(numbers)],
        memory={
            n.removeprefix("estimator/"): v for n, v in arrays.items() if n.startswith("estimator/")
        },
        further={n: arrays[n] for n in rest},
    )


def _leaves(iterate: Iterate) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves((iterate.theta, iterate.optimiser_state))]
