"""Recordings from the simulator, so that everything can be tried without hardware."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params
from fluctua.core.simulate import sample_states
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.model import tabulate_task
from fluctua.insitu.recording.writer import append_to, create
from fluctua.tcmt.tasks import Task

BATCH_BYTES = 64 * 2**20


def describe(
    task: Task,
    theta: Params,
    *,
    every: int = 1,
    observe: Sequence[int] | None = None,
    observation_noise: float = 0.0,
    seed: int = 0,
    dtype: str = "complex64",
    provenance: str = "",
    settings: dict[str, Any] | None = None,
    settle: float = 0.0,
) -> Description:
    """Make the head of a simulated recording of a network's task.

    Args:
        task: what is simulated.
        theta: its parameters.
        every: steps between two samples.
        observe: sites that are recorded; all if not given.
        observation_noise: standard deviation of the readout.
        seed: of the noise.
        dtype: of the file.
        provenance: where the data come from, for people.
        settings: of the actuators.
        settle: time for which the network runs before the first sample, for a record that begins in
            the steady state.

    Returns: the description that `record` and `create` take.

    >>> head = insitu.files.describe(task, theta, every=2, observe=[0, 5], observation_noise=0.01)
    >>> head.channels
    ('psi[0]', 'psi[5]')
    """
    steps = len(task.t) - 1
    sites = task.simulated.sites
    if every < 1 or steps % every:
        raise ValueError(f"`every` must divide the {steps} steps of the simulation; got {every}.")
    if not (np.isfinite(observation_noise) and observation_noise >= 0):
        raise ValueError(
            f"`observation_noise` is a standard deviation, 0 or more; got {observation_noise}."
        )
    seen = np.arange(sites) if observe is None else np.array(sorted(set(observe)), int)
    if seen.size == 0 or seen.min() < 0 or seen.max() >= sites:
        raise ValueError(f"`observe` names resonators 0…{sites - 1}; got {list(observe or ())}.")
    tables: dict[str, Any] = tabulate_task(task._replace(t=task.t[::every]))
    tables["network"]["observed"] = seen
    shape = None
    if task.modulation is not None:
        each = (len(task.simulated.bonds), task.modulation.harmonics)
        shape = {"sine": each, "cosine": each}
    how = {"seed": seed, "dt": (task.t[-1] - task.t[0]) / steps, "every": every}
    if not (np.isfinite(settle) and settle >= 0):
        raise ValueError(f"`settle` is a time, 0 or more; got {settle}.")
    if settle:
        how["settle"] = every * int(np.ceil(settle / how["dt"] / every - 1e-9))  # in steps
    return Description(
        t=task.t[::every],
        channels=tuple(f"psi[{n}]" for n in seen),
        dtype=dtype,
        units="sqrt(photons)",
        time_units="1/kappa",
        context=shape,
        parameters={name: np.asarray(value, np.float64) for name, value in theta.items()},
        settings=settings or {},
        simulation={**how, "observation_noise": observation_noise},
        provenance=provenance or "simulated by fluctua",
        **tables,
    )


def record(
    path: str | Path,
    task: Task,
    description: Description,
    count: int,
    *,
    append: bool = False,
    replace: bool = False,
) -> Iterator[int]:
    """Simulate until the recording has `count` trajectories. The file is complete at any moment.

    Trajectory j is the same whether the recording was interrupted before it or not. What would not
    fit on the disk is refused before it begins.

    Args:
        path: the file.
        task: what is simulated.
        description: of `describe`.
        count: trajectories in the end.
        append: continue an existing recording.
        replace: overwrite an existing recording.

    Returns: a generator of the number of trajectories after each; close it to stop early.

    >>> head = insitu.files.describe(task, theta)
    >>> for done in insitu.files.record("simulated.nc", task, head, count=5):
    ...     pass
    >>> done
    5
    """
    check.count(count)
    if append and Path(path).exists():
        writer = append_to(path, trajectories=count)
        _refuse_different(path, writer.description, description)
    else:
        writer = create(path, description, replace=replace, trajectories=count)
    how = description.simulation
    key, noise_key = jax.random.split(jax.random.key(int(how["seed"])))
    theta = {
        name: jnp.asarray(value, jnp.result_type(float))
        for name, value in description.parameters.items()
    }
    every = int(how["every"])
    spread = float(how["observation_noise"])
    seen = np.asarray(description.network["observed"])
    columns = np.concatenate([seen, seen + task.simulated.sites])
    before = int(how.get("settle", 0))
    substrate = _extend_grid(task, before).simulator()
    each = (before // every + len(description.t)) * 2 * task.simulated.sites * 4
    batch = max(1, min(256, count, BATCH_BYTES // each))
    with writer:
        while writer.count < count:
            # a fixed size compiles once; the rest is left out
            j = jnp.arange(writer.count, writer.count + batch)
            x, context = sample_states(substrate, key, theta, j, every)
            x = x[:, -len(description.t) :]
            check.finite_simulation(x, substrate.t)
            if spread:
                x = x + spread * _draw_normals(noise_key, j, x.shape[1:]).astype(x.dtype)
            states = np.asarray(x)[:, :, columns]
            for k in range(min(batch, count - writer.count)):
                one = (
                    None
                    if context is None
                    else {name: np.asarray(leaf[k]) for name, leaf in context.items()}
                )
                writer.append(states[k], one)
                yield writer.count


def _extend_grid(task: Task, steps: int) -> Task:
    """Extend the time grid of a task by so many steps before its start."""
    if not steps:
        return task
    dt = (task.t[-1] - task.t[0]) / (len(task.t) - 1)
    return task._replace(t=np.concatenate([task.t[0] - dt * np.arange(steps, 0, -1), task.t]))


def _draw_normals(key: Array, trajectories: Array, shape: tuple[int, ...]) -> Array:
    """Draw standard normals of each trajectory, whichever batch it is in. Shape (E, …)."""
    return jax.vmap(lambda j: jax.random.normal(jax.random.fold_in(key, j), shape))(trajectories)


def _refuse_different(path: str | Path, stored: Description, planned: Description) -> None:
    """Refuse to append trajectories of another system, θ or grid."""
    different = [
        group
        for group in ("parameters", "network", "drive", "simulation")
        if not _are_equal(getattr(stored, group), getattr(planned, group))
    ]
    if stored.dtype != planned.dtype or not np.array_equal(stored.t, planned.t):
        different.append("time grid or precision")
    if different:
        raise ValueError(
            f"{path} was recorded with another {', '.join(different)}; trajectories of two "
            "experiments do not belong in one file. Append with the same options as before, or "
            "choose another name."
        )


def _are_equal(a: Any, b: Any) -> bool:
    return set(a) == set(b) and all(np.array_equal(a[name], b[name]) for name in a)
