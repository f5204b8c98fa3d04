"""What a network is trained for: process, reward, start and time grid, put together.

Another task is a few lines: `outputs` gives s⁻ at a state, and the rest is JAX.

>>> network = rectangular(4, 5)
>>> drive = Drive(lead=0, amplitude=10.0)
>>> s_minus = outputs(network, drive)
>>> reward = lambda theta, x, t: 1 - jnp.abs(s_minus(theta, x, t)[0]) ** 2 / 100
>>> task = custom(network, drive, reward, horizon=2.0, dt=1e-2)
>>> task.estimator()(jax.random.key(0), initial_parameters(jax.random.key(1), network), 50)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from fluctua.core.arrays import Array, PyTree
from fluctua.core.baselines import Baseline, Twin, resolve_baseline
from fluctua.core.check import leading
from fluctua.core.draws import Wiener, philox
from fluctua.core.estimator import ppgt
from fluctua.core.process import NoiseProduct, Process
from fluctua.core.protocols import Estimator
from fluctua.tcmt.coupled_modes import (
    Drive,
    Frame,
    Modulation,
    checked,
    checked_drives,
    condition,
    process,
)
from fluctua.tcmt.experiment import (
    CrossPower,
    Experiment,
    Tied,
    TiedCondition,
    WeightedPower,
    accumulated,
    grid,
    outputs,
    positive,
)
from fluctua.tcmt.fused import fused
from fluctua.tcmt.kernel.twin import KernelTwin
from fluctua.tcmt.network import Network, copies

Guard = Literal["dark", "coherent"]
"""What keeps amplified noise from passing for transmitted power."""


class Task(Experiment):
    """An experiment with its estimators: what a network is trained for.

    The fields are those of `Experiment`.
    """

    __slots__ = ()

    def estimator(
        self,
        backend: str = "jax",
        *,
        baseline: Baseline | Twin | KernelTwin | str | None = None,
        wiener: Wiener = philox,
        **options: Any,
    ) -> Estimator:
        """(key, theta, count) -> Estimate.

        backend: "jax", or "cpu" and "cuda" for the fused kernels, which take further options.
        baseline: a name of `fluctua.core.baselines.TABLE` ("time" if not given) or its record; what
        a backend does not serve ("mean" and one's own on kernels, "carried" on JAX) it refuses by
        name. A `KernelTwin` is for the kernels only.
        """
        if backend == "jax":
            if options:
                raise TypeError(f'backend="jax" has no option {", ".join(map(repr, options))}.')
            if isinstance(baseline, KernelTwin):
                raise ValueError(
                    'a `KernelTwin` is for the fused kernels: use backend="cpu" or "cuda".'
                )
            plan = resolve_baseline(baseline, caller='backend="jax"', condition=self.condition)
            return ppgt(self.simulator(wiener), self.objective, baseline=plan)
        if backend not in ("cpu", "cuda"):
            raise ValueError(f'`backend` must be "jax", "cpu" or "cuda"; got {backend!r}.')
        return fused(self, device=backend, baseline=baseline, **options)


def transmission(
    network: Network,
    *,
    source: int = 0,
    to: int = 1,
    horizon: float = 20.0,
    dt: float = 1e-3,
    s: float = 10.0,
    frequency: float = 10.0,
    envelope: Callable[[Array], Array] | None = None,
    sigma_kappa: float = 0.0,
    frame: Frame = "rotating",
    guard: Guard | None = None,
    integrator: str = "euler",
) -> Task:
    """The paper's: ``J = E[(1/T) ∫ |s⁻_to / s⁺_source|² dt]``, the time-averaged fraction of power
    transmitted.

    Args:
        network: what is driven.
        source: lead that is driven.
        to: lead that is read; the source itself makes it a reflection.
        horizon: T, the time of a trajectory.
        dt: Δt, the time step.
        s: amplitude of the drive; power is counted relative to s², whatever the envelope.
        frequency: of the drive.
        envelope: t -> factor of the drive.
        sigma_kappa: σ_κ of the antagonistic modulation.
        frame: "rotating" with the drive, or "lab" (docs/network.md has the trap).
        guard: how noise is kept from counting as transmitted power, which matters where θ can
            amplify it (γ_e, γ; the paper's "wireheading"). A trajectory is then two runs of the
            device, and its score the sum of theirs. "dark": minus the power of a run without the
            drive; exact without Kerr effect, and fast (any backend). "coherent": ``Re(s⁻ s⁻'*)`` of
            two driven runs with independent noise, whose mean is ``|E s⁻|²``, the power that a
            lock-in sees; exact for any network, and what modulation scrambles does not count either
            (JAX only).
        integrator: "euler", the paper's; "heun", of second order in Δt, as is the reward then,
            which is summed by the trapezoid rule: steps ten times as long and more for the same
            bias (docs/network.md); or "rk4" (JAX only).

    Returns: the task.

    >>> transmission(network, horizon=2.0).estimator("cpu")(key, theta, 50)
    >>> guarded = transmission(network, horizon=2.0, guard="dark")
    >>> guarded.estimator("cpu")(key, {"gamma_e": jnp.ones(2)}, 50)
    """
    _a_lead(network, source=source, to=to)
    leads = network.leads
    weights = np.zeros(leads)
    weights[to] = 1 / (positive(s=s) ** 2 * positive(horizon=horizon))
    drive = Drive(source, s, 0.0, frequency, envelope)
    if guard is None:
        return _quadratic(
            network, 1, (drive,), weights, horizon, dt, sigma_kappa, frame, integrator
        )
    if guard == "dark":
        return _quadratic(
            network,
            2,
            (drive,),
            np.append(weights, -weights),
            horizon,
            dt,
            sigma_kappa,
            frame,
            integrator,
        )
    if guard == "coherent":
        both = (drive, Drive(leads + source, s, 0.0, frequency, envelope))
        reward = CrossPower(outputs(copies(network, 2), both, frame=frame), tuple(weights.tolist()))
        return assembled(
            network,
            2,
            both,
            reward,
            None,
            grid(horizon, dt),
            Modulation(sigma_kappa),
            frame,
            integrator,
        )
    raise ValueError(f'`guard` must be None, "dark" or "coherent"; got {guard!r}.')


def isolation(
    network: Network,
    *,
    source: int = 0,
    to: int = 1,
    horizon: float = 20.0,
    dt: float = 1e-3,
    s: float = 10.0,
    frequency: float = 10.0,
    envelope: Callable[[Array], Array] | None = None,
    sigma_kappa: float = 0.0,
    frame: Frame = "rotating",
    integrator: str = "euler",
) -> Task:
    """Forward minus backward: ``J = E[(1/T) ∫ (|s⁻_to / s⁺_source|² − |s⁻_source / s⁺_to|²) dt]``.

    Zero by reciprocity while χ = 0 and σ_κ = 0 (κ is symmetric), so there must be a Kerr effect to
    train.

    The two directions are two experiments on one device, not two waves at once, which a Kerr
    network would mix. They run side by side as two unconnected copies of the network, one driven
    forward and the other backward, with independent noise and modulation and one shared θ. A
    trajectory is such a pair, and its score the sum of the two copies' scores.

    Args:
        network: one copy.
        source: lead that is driven.
        to: lead that is read.
        horizon: T, the time of a trajectory.
        dt: Δt, the time step.
        s: amplitude of the drive; power is counted relative to s², whatever the envelope.
        frequency: of the drive.
        envelope: t -> factor of the drive.
        sigma_kappa: σ_κ of the antagonistic modulation.
        frame: "rotating" with the drive, or "lab" (docs/network.md has the trap).
        integrator: "euler", "heun" or "rk4", as of `transmission`.

    Returns: the task.
    """
    _a_lead(network, source=source, to=to)
    if source == to:
        raise ValueError(f"isolation is between two different leads; got {source} twice.")
    leads = network.leads
    weights = np.zeros(2 * leads)
    weights[to] = 1 / (positive(s=s) ** 2 * positive(horizon=horizon))
    weights[leads + source] = -weights[to]
    drives = (
        Drive(source, s, 0.0, frequency, envelope),
        Drive(leads + to, s, 0.0, frequency, envelope),
    )
    return _quadratic(network, 2, drives, weights, horizon, dt, sigma_kappa, frame, integrator)


def with_noise(
    task: Task, *, sigma_w: float | None = None, sigma_kappa: float | None = None
) -> Task:
    """The same experiment under another noise.

    Args:
        task: what stays.
        sigma_w: σ_W of every channel; None leaves it.
        sigma_kappa: σ_κ of every bond; None leaves it.

    Returns: the task.

    >>> with_noise(transmission(paper()), sigma_w=0.1, sigma_kappa=0.05)
    """
    if task.weights is None:
        raise ValueError(
            "only a task whose reward is a weighted output power can be put together again; build "
            "this one anew."
        )
    network = (
        task.network if sigma_w is None else task.network.replace(sigma_e=sigma_w, sigma_r=sigma_w)
    )
    if sigma_kappa is None:
        sigma_kappa = task.modulation.sigma_kappa if task.modulation else 0.0
    horizon = float(task.t[-1])
    dt = horizon / (len(task.t) - 1)
    weights = np.asarray(task.weights)
    return _quadratic(
        network,
        task.copies,
        task.drives,
        weights,
        horizon,
        dt,
        sigma_kappa,
        task.frame,
        task.integrator,
    )


def custom(
    network: Network,
    drive: Drive | Sequence[Drive],
    running: Callable[..., Array],
    *,
    horizon: float = 20.0,
    dt: float = 1e-3,
    sigma_kappa: float = 0.0,
    frame: Frame = "rotating",
    integrator: str = "euler",
) -> Task:
    """A task with any reward rate.

    Args:
        network: what is driven.
        drive: one or several.
        running: (theta, x, t) -> the rate, in JAX. Divide by `horizon` for an average.
        horizon: T, the time of a trajectory.
        dt: Δt, the time step.
        sigma_kappa: σ_κ of the antagonistic modulation.
        frame: "rotating" with the drive, or "lab".
        integrator: "euler", "heun" or "rk4", as of `transmission`.

    Returns: the task.
    """
    modulation = checked(Modulation(sigma_kappa))
    drives = checked_drives(network, drive)
    t = grid(horizon, dt)
    return Task(
        network=network,
        process=process(network, drives, frame=frame, modulation=modulation, integrator=integrator),
        objective=accumulated(running, integrator),
        t=t,
        condition=condition(network),
        simulated=network,
        drives=drives,
        frame=frame,
        modulation=modulation,
    )


def _quadratic(
    network: Network,
    count: int,
    drives: tuple[Drive, ...],
    weights: np.ndarray,
    horizon: float,
    dt: float,
    sigma_kappa: float,
    frame: Frame,
    integrator: str,
) -> Task:
    """A task whose reward is a weighted sum of output powers."""
    simulated = network if count == 1 else copies(network, count)
    fixed_weights = tuple(weights.tolist())
    reward = WeightedPower(outputs(simulated, drives, frame=frame), fixed_weights)
    t = grid(horizon, dt)
    modulation = Modulation(sigma_kappa)
    return assembled(
        network, count, drives, reward, fixed_weights, t, modulation, frame, integrator
    )


def assembled(
    network: Network,
    count: int,
    drives: tuple[Drive, ...],
    reward: Callable[..., Array],
    weights: tuple[float, ...] | None,
    t: np.ndarray,
    modulation: Modulation | None,
    frame: Frame,
    integrator: str = "euler",
) -> Task:
    """A task of `count` copies of a network that share θ. reward: of all copies, (theta of all,
    x, t).
    """
    simulated = network if count == 1 else copies(network, count)
    modulation = checked(modulation)
    drift, noise = process(
        simulated, drives, frame=frame, modulation=modulation, integrator=integrator
    )[:2]
    of_device: Callable[..., PyTree] = condition(network)
    if count > 1:
        drift = Tied(drift, count)
        reward = Tied(leading(reward, 4), count)
        of_device = TiedCondition(of_device, count)
        assert noise is not None
        if isinstance(noise, NoiseProduct):
            noise = NoiseProduct(Tied(noise.product, count), noise.width)
        else:
            noise = Tied(noise, count)
    return Task(
        network=network,
        process=Process(drift, noise, integrator=integrator),
        objective=accumulated(reward, integrator),
        t=t,
        condition=of_device,
        simulated=simulated,
        drives=drives,
        frame=frame,
        modulation=modulation,
        weights=weights,
        copies=count,
    )


def _a_lead(network: Network, **leads: int) -> None:
    for name, lead in leads.items():
        if not 0 <= lead < network.leads:
            raise ValueError(
                f"`{name}` must be one of the network's leads 0…{network.leads - 1}; got {lead}."
            )
