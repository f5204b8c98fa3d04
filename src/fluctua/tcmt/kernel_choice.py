"""Fused estimators of a task: the kernel for a baseline, and its options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax.numpy as jnp
import numpy as np

from fluctua.compiled.toolchain import require_cupy
from fluctua.core import baselines
from fluctua.core.baselines import resolve_baseline
from fluctua.core.check import drop_extra_arguments
from fluctua.tcmt import coupled_modes
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.fused import Carried, Fused
from fluctua.tcmt.kernel.options import Binned, KernelOptions, check_integrator, require_euler
from fluctua.tcmt.kernel.twin import KernelTwin, make_twin_options

SERVES = ("none", "time", "optimal", "binned", "twin", "carried")
"""Baselines of the kernels by name (`fluctua.core.baselines`)."""

UNGROUPED = 2**32
"""`Binned.group` for one group of all trajectories: larger than any ensemble."""

RANK = 16
"""Directions of the quadratic term of a `Twin(order=2)`; more do not help the paper's lattice
(benchmarks/estimators.py)."""


def make_fused(
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
    """Make an estimator of a task on the "cpu" or "cuda" kernels.

    Args:
        task: whose reward is a weighted output power.
        device: "cpu" or "cuda".
        baseline: a name of `SERVES` or its record. "time" (the default) runs an independent pilot,
            "carried" uses the table of the previous call; a table (T+1,) of the mean return-to-go
            is used as it is. "optimal" is "binned" with one bin; `binned(every=100, group=4096)` is
            as unbiased as the paper's, and faster. "twin" or a `KernelTwin` is the twin correction,
            with 100 to 3,000 times less variance.
        **options: those of `KernelOptions`.

    If copies of a network share θ, each copy's scores are binned by that copy's own intensities;
    the JAX reference bins by their sum. Both are unbiased.

    >>> make_fused(task, device="cpu")(jax.random.key(0), theta, 1000)
    """
    if task.weights is None:
        raise ValueError(
            "the fused kernels need a reward that is a weighted output power (`transmission`, "
            '`isolation`); this task has another. Use backend="jax".'
        )
    coupled_modes.coefficients(task.simulated, {})  # raises for leads on several resonators
    served, pilot, carries = _resolve_baseline(task, device, baseline)
    _check_integrator(task.integrator, served)
    if isinstance(served, KernelTwin) and served.rank > task.simulated.sites:
        raise ValueError(
            f"`rank` must be at most {task.simulated.sites}, the resonators of the network; got "
            f"{served.rank}."
        )
    estimator = Fused(
        task, served, _make_options(device, isinstance(served, KernelTwin), options), pilot
    )
    return Carried(estimator) if carries else estimator


def _check_integrator(integrator: str, baseline: Any) -> None:
    """Raise for an integrator that these kernels do not have, before the first call."""
    check_integrator(integrator)
    if isinstance(baseline, Binned):
        require_euler(integrator, "the kernels' binned baseline")


def _resolve_baseline(
    task: Experiment, device: str, baseline: Any
) -> tuple[str | np.ndarray | Binned | KernelTwin, int, bool]:
    """Return a baseline of the kernels, the size of its pilot, and whether it is carried."""
    if isinstance(baseline, Binned | KernelTwin):
        return baseline, 0, False
    if isinstance(baseline, np.ndarray | list | jnp.ndarray):
        return _check_table(task, baseline), 0, False
    plan = resolve_baseline(
        baseline, caller=f"backend={device!r}", serves=SERVES, condition=task.condition
    )
    if isinstance(plan, baselines.Twin):
        return _make_kernel_twin(task, plan), 0, False
    if isinstance(plan.function, baselines.Bins):
        if plan.function.condition != drop_extra_arguments(task.condition, 4):
            raise ValueError(
                f"backend={device!r} bins by the intensity on each parameter's own sites: give "
                'binned(bins=...) without a condition. Another condition needs backend="jax".'
            )
        return (
            Binned(
                plan.function.bins,
                plan.function.every,
                UNGROUPED if plan.function.group is None else plan.function.group,
            ),
            0,
            False,
        )
    if plan.name == "optimal":
        return Binned(1, len(task.t), UNGROUPED), 0, False
    if plan.values is not None:
        return _check_table(task, plan.values), 0, False
    return "none" if plan.name == "none" else "time", plan.pilot, plan.name == "carried"


def _make_options(device: str, is_twin: bool, options: dict[str, Any]) -> KernelOptions:
    """Return the options of an estimator; raise for wrong ones, or if CuPy is missing."""
    names = [f.name for f in fields(KernelOptions) if f.name not in ("backend", "noise", "scores")]
    unknown = sorted(options.keys() - set(names))
    if unknown:
        raise TypeError(
            f'backend="{device}" has no option {", ".join(unknown)}; it has {", ".join(names)}.'
        )
    make = make_twin_options if is_twin else KernelOptions
    kernel_options = make(backend=device, **options)
    if device == "cuda":
        require_cupy()
    return kernel_options


def _check_table(task: Experiment, baseline: Any) -> np.ndarray:
    table = np.asarray(baseline, np.float64)
    if table.shape != task.t.shape:
        raise ValueError(
            f"a table of the mean return-to-go must have shape {task.t.shape}; got {table.shape}."
        )
    if not np.isfinite(table).all():
        raise ValueError("the table of the mean return-to-go has a value that is not finite.")
    return table


def _make_kernel_twin(task: Experiment, twin: baselines.Twin) -> KernelTwin:
    """Return the kernels' twin for a `Twin`; raise for one that they do not have."""
    if twin.process is not None:
        raise ValueError(
            "the kernels' twin is the network itself at other parameters: give `Twin(theta=...)`. "
            'A twin with another `process` needs backend="jax".'
        )
    if twin.order == 2 and task.modulation is not None:
        raise ValueError(
            "the kernels have the quadratic term only for networks without modulation: use "
            'order=1, which follows the modulation of each trajectory, or backend="jax".'
        )
    return KernelTwin(
        theta=twin.theta, rank=min(RANK, task.simulated.sites) if twin.order == 2 else 0
    )
