"""The fused estimator of a task: which kernel serves a baseline, and which options it takes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax.numpy as jnp
import numpy as np

from fluctua.core import baselines
from fluctua.core.baselines import resolve_baseline
from fluctua.core.check import drop_extra_arguments
from fluctua.tcmt import coupled_modes
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.fused import Carried, Fused
from fluctua.tcmt.kernel.cuda import require_cupy
from fluctua.tcmt.kernel.options import (
    Binned,
    KernelOptions,
    check_integrator,
    require_euler,
)
from fluctua.tcmt.kernel.twin import KernelTwin, twin_options

SERVES = ("none", "time", "optimal", "binned", "twin", "carried")
"""Baselines by name (`fluctua.core.baselines`)."""

EVERYONE = 2**32
"""A group of trajectories that no ensemble fills."""

RANK = 16
"""Directions of the quadratic term of a `Twin(order=2)`: plenty for the paper's lattice
(benchmarks/estimators.py).
"""


def fused(
    task: Experiment,
    *,
    device: str,
    baseline: baselines.Baseline
    | baselines.Twin
    | Binned
    | KernelTwin
    | np.ndarray
    | str
    | None = None,
    **options: Any,
) -> Fused | Carried:
    """An estimator of a task on the "cpu" or "cuda" kernels.

    baseline: a name of `SERVES` or its record. "time" (the default) runs an independent pilot,
    "carried" takes the table of the call before; a table (T+1,) of the mean return-to-go is taken
    as it is. "optimal" is "binned" with one bin; `binned(every=100, group=4096)` is as unbiased as
    the paper's, and faster. "twin" or a `KernelTwin`: the twin correction, in which a digital twin
    of the network says what to expect, at 100 to 3,000 times less variance.
    options: those of `KernelOptions`.

    Where copies of a network share θ, each copy's scores are binned by that copy's own intensities;
    the JAX reference bins by their sum. Both are unbiased.

    >>> fused(task, device="cpu")(jax.random.key(0), theta, 1000)
    """
    if task.weights is None:
        raise ValueError(
            "the fused kernels know rewards that are weighted output powers (`transmission`, "
            "`isolation`); this "
            'task has a reward of its own. Use backend="jax".'
        )
    coupled_modes.coefficients(
        task.simulated, {}
    )  # refuses leads on several resonators, and says what to do
    made, pilot, carries = _served(task, device, baseline)
    _check_integrator(task.integrator, device, made)
    if isinstance(made, KernelTwin) and made.rank > task.simulated.sites:
        raise ValueError(
            f"`rank` is at most the {task.simulated.sites} resonators of the network; got "
            f"{made.rank}."
        )
    estimator = Fused(task, made, _options(device, isinstance(made, KernelTwin), options), pilot)
    return Carried(estimator) if carries else estimator


def _check_integrator(integrator: str, device: str, baseline: Any) -> None:
    """Refuse an integrator that these kernels do not have, before the first call."""
    check_integrator(integrator)
    if isinstance(baseline, Binned):
        require_euler(integrator, "the kernels' binned baseline")
    if isinstance(baseline, KernelTwin) and device == "cuda":
        require_euler(integrator, "the twin on the GPU")


def _served(
    task: Experiment, device: str, baseline: Any
) -> tuple[str | np.ndarray | Binned | KernelTwin, int, bool]:
    """A baseline as the kernels take it, the trajectories of its pilot, and whether it is
    carried on.
    """
    if isinstance(baseline, Binned | KernelTwin):
        return baseline, 0, False
    if isinstance(baseline, np.ndarray | list | jnp.ndarray):
        return _table(task, baseline), 0, False
    plan = resolve_baseline(
        baseline, caller=f"backend={device!r}", serves=SERVES, condition=task.condition
    )
    if isinstance(plan, baselines.Twin):
        return _kernel_twin(task, plan), 0, False
    if isinstance(plan.function, baselines.Bins):
        if plan.function.condition != drop_extra_arguments(task.condition, 4):
            raise ValueError(
                f"backend={device!r} bins by the intensity on each parameter's own sites: leave "
                "out the condition, "
                'binned(bins=...). One of your own runs with backend="jax".'
            )
        return (
            Binned(
                plan.function.bins,
                plan.function.every,
                EVERYONE if plan.function.group is None else plan.function.group,
            ),
            0,
            False,
        )
    if plan.name == "optimal":
        return Binned(1, len(task.t), EVERYONE), 0, False
    if plan.values is not None:
        return _table(task, plan.values), 0, False
    return "none" if plan.name == "none" else "time", plan.pilot, plan.name == "carried"


def _options(device: str, is_twin: bool, options: dict[str, Any]) -> KernelOptions:
    """KernelOptions of an estimator: what is wrong, or missing on this machine, is said before the
    first call.
    """
    names = [f.name for f in fields(KernelOptions) if f.name not in ("backend", "noise", "scores")]
    unknown = sorted(options.keys() - set(names))
    if unknown:
        raise TypeError(
            f'backend="{device}" has no option {", ".join(unknown)}; it has {", ".join(names)}.'
        )
    made = (
        twin_options(backend=device, **options)
        if is_twin
        else KernelOptions(backend=device, **options)
    )
    if device == "cuda":
        require_cupy()
    return made


def _table(task: Experiment, baseline: Any) -> np.ndarray:
    table = np.asarray(baseline, np.float64)
    if table.shape != task.t.shape:
        raise ValueError(
            f"a table is the mean return-to-go at each time, {task.t.shape}; got {table.shape}."
        )
    if not np.isfinite(table).all():
        raise ValueError("the table of the mean return-to-go holds a value that is not finite.")
    return table


def _kernel_twin(task: Experiment, twin: baselines.Twin) -> KernelTwin:
    """What the kernels make of a twin of the library."""
    if twin.process is not None:
        raise ValueError(
            "the kernels' twin is the network itself at parameters of its own: give "
            "`Twin(theta=...)`. A twin with "
            'another `process` runs with backend="jax".'
        )
    if twin.order == 2 and task.modulation is not None:
        raise ValueError(
            "the kernels have the quadratic term for networks without modulation only: use "
            "order=1, which follows each "
            'trajectory\'s modulation, or backend="jax".'
        )
    return KernelTwin(
        theta=twin.theta, rank=min(RANK, task.simulated.sites) if twin.order == 2 else 0
    )
