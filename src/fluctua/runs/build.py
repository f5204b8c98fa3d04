"""Build the parts of a training from a configuration: task, start, estimator, optimiser, bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from fluctua import tcmt
from fluctua.compiled.toolchain import require_cupy
from fluctua.core.arrays import Array, Params
from fluctua.core.baselines import Twin, binned
from fluctua.core.protocols import Estimator
from fluctua.learn import training
from fluctua.learn.optimisers import make_optimiser
from fluctua.runs.conditions import is_unknown
from fluctua.runs.config import Config
from fluctua.tcmt.fused import Carried
from fluctua.tcmt.kernel.twin import KernelTwin

FAMILIES = ("omega", "kappa", "chi")

GROUP = 4096
"""Trajectories that share the bins of a binned baseline."""


MAX_STEPS = 10**8


class LatticeParts(NamedTuple):
    """The parts of a training, built from a configuration.

    task: the network task.
    key: of the noise; that of the start was split off.
    theta: the start, inside the bounds.
    estimator: of ∇θJ.
    rule: the optimiser.
    bounds: of the parameters.
    """

    task: tcmt.Task
    key: Array
    theta: Params
    estimator: Estimator
    rule: optax.GradientTransformationExtraArgs
    bounds: training.Bounds

    def describe(self, trajectories: int | Callable[[int], int]) -> training.Training:
        """The training of these parts with so many trajectories per iteration."""
        return training.Training(
            self.estimator, self.theta, self.rule, trajectories=trajectories, bounds=self.bounds
        )


def resolve_backend(name: str) -> str:
    """The backend that "auto" stands for: cuda where CuPy finds a GPU, else cpu."""
    if name != "auto":
        return name
    try:
        import cupy

        return "cuda" if cupy.cuda.runtime.getDeviceCount() > 0 else "cpu"
    except Exception:  # no CuPy, no driver, no device: cupy has an error of its own for each
        return "cpu"


def make_network(config: Config, sigma_w: float | None = None) -> tcmt.Network:
    """The lattice of a configuration."""
    lattice = config.lattice
    sites = lattice.rows * lattice.columns
    if sites < 2:
        raise ValueError("`lattice` needs two resonators at least, one for each lead; got 1 × 1.")
    leads = [tcmt.Lead(0, lattice.gamma_e), tcmt.Lead(sites - 1, lattice.gamma_e)]
    sigma = config.task.sigma_w if sigma_w is None else sigma_w
    return tcmt.rectangular(
        lattice.rows, lattice.columns, leads=leads, gamma=lattice.gamma, sigma_w=sigma
    )


def make_task(
    config: Config,
    *,
    sigma_w: float | None = None,
    sigma_kappa: float | None = None,
    dt: float | None = None,
    network: tcmt.Network | None = None,
    integrator: str | None = None,
) -> tcmt.Task:
    """The task of a configuration, optionally with other noise, step, network or integrator."""
    t = config.task
    steps = t.horizon / (t.dt if dt is None else dt)
    if not 0 < steps <= MAX_STEPS:
        raise ValueError(
            f"`task.horizon` = {t.horizon:g} with `task.dt` = {t.dt if dt is None else dt:g} is "
            f"{steps:.3g} steps; at most {MAX_STEPS:,} are run."
        )
    make = tcmt.transmission if t.reward == "transmission" else tcmt.isolation
    return make(
        make_network(config, sigma_w) if network is None else network,
        horizon=t.horizon,
        dt=t.dt if dt is None else dt,
        drive=tcmt.Drive(0, t.amplitude, frequency=t.frequency),
        sigma_kappa=t.sigma_kappa if sigma_kappa is None else sigma_kappa,
        integrator=t.integrator if integrator is None else integrator,
    )


def make_device_task(
    config: Config,
    network: tcmt.Network,
    *,
    sigma_kappa: float | None = None,
    dt: float | None = None,
) -> tcmt.Task:
    """The task on the device's own grid, with its own integrator.

    Args:
        config: of the training.
        network: the true one.
        sigma_kappa: another modulation.
        dt: another step of the model; the device's steps are `device.finer` times shorter.
    """
    d = config.device
    return make_task(
        config,
        sigma_kappa=sigma_kappa,
        dt=(config.task.dt if dt is None else dt) / d.finer,
        network=network,
        integrator=config.task.integrator if d.integrator == "same" else d.integrator,
    )


def make_estimator(config: Config, task: tcmt.Task, cluster: str | None = None) -> Estimator:
    """The estimator on the configured backend, which must be resolved.

    cluster: address of a Ray cluster, for its shards.
    """
    shards = config.ensemble.shards
    if not shards:
        if cluster is not None:
            raise ValueError(
                "this run has no shards, so that a cluster has nothing to compute apart: "
                "`ensemble.shards` = 0. A run that was started with --cluster has them."
            )
        return _make_undivided(config, task)
    if is_unknown(config):
        raise ValueError(
            f"`ensemble.shards` = {shards} is for lattices that are known; this one has a `device`."
        )
    from fluctua.scale.distributed import distributed

    if cluster is None or config.backend != "cuda":
        return distributed(_make_undivided(config, task), cluster, shards=shards)
    # the GPUs are those of the workers: this machine need not have one
    estimator = _make_undivided(dataclasses.replace(config, backend="cpu"), task)
    return distributed(_move_to_gpus(estimator), cluster, shards=shards)


def _move_to_gpus(estimator: Any) -> Any:
    """The estimator with CUDA kernels in place of the CPU's."""
    from fluctua.learn.shrunk_correction import ShrunkCorrection

    if isinstance(estimator, ShrunkCorrection):
        return ShrunkCorrection(
            _move_to_gpus(estimator.estimator), estimator.forget_after, carry=estimator.carry
        )
    if isinstance(estimator, Carried):
        return Carried(_move_to_gpus(estimator.fused))
    return dataclasses.replace(
        estimator, options=dataclasses.replace(estimator.options, backend="cuda")
    )


def _make_undivided(config: Config, task: tcmt.Task) -> Estimator:
    backend = config.backend
    b = config.baseline
    if backend == "cuda":
        require_cupy()  # here, before a folder is made
    if is_unknown(config):
        from fluctua.runs.unknown import make_self_calibrating

        return make_self_calibrating(
            config,
            task,
            lambda network: make_task(config, network=network),
            lambda network: make_device_task(config, network),
        )
    if b.kind == "twin":
        from fluctua.learn.shrunk_correction import ShrunkCorrection

        splits: Any = task.estimator(backend, baseline=_make_twin(config, task))
        # λ̄ from the iteration before: a twin that is 5 % wrong keeps most of its gain with it, and
        # little without
        return ShrunkCorrection(splits, forget_after=b.forget_after, carry=backend != "jax")
    # groups keep the cost linear in the ensemble, and 200 in a bin are as good as more
    if b.kind == "binned":
        kernels: dict[str, Any] = {} if backend == "jax" else {"every": b.every, "group": GROUP}
        return task.estimator(backend, baseline=binned(bins=b.bins, **kernels))
    return task.estimator(backend, baseline=b.kind)


def _make_twin(config: Config, task: tcmt.Task) -> Twin | KernelTwin:
    b = config.baseline
    if b.rank and task.modulation is not None:
        raise ValueError(
            f"`baseline.rank` = {b.rank} is for the quadratic term, which exists for lattices "
            "without modulation: set it to 0, or `task.sigma_kappa` to 0."
        )
    if config.backend == "jax":
        return Twin(order=2 if b.rank else 1)
    return KernelTwin(rank=b.rank)


def build(config: Config, cluster: str | None = None) -> LatticeParts:
    """Build all parts of a training. `config.backend` must be resolved.

    cluster: address of a Ray cluster, for its shards.
    """
    task = make_task(config)
    o = config.optimiser
    scales = {name: getattr(o, f"{name}_scale") for name in FAMILIES}
    rule = make_optimiser(o.rule, o.learning_rate, o.options, scales, o.decay)
    sides = {name: getattr(config.bounds, name) for name in FAMILIES}
    low = {name: side[0] for name, side in sides.items()}
    high = {name: side[1] for name, side in sides.items()}
    bounds = training.check_bounds((low, high))
    k_start, k_run = jax.random.split(jax.random.key(config.seed))
    start = tcmt.initial_parameters(k_start, task.network, chi_std=config.start.chi_std)
    estimator = make_estimator(config, task, cluster)
    return LatticeParts(task, k_run, bounds.project(start), estimator, rule, bounds)
