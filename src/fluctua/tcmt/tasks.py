"""Tasks that a network is trained for: transmission, isolation, or any reward.

Another task is a few lines of JAX on `outputs`, which gives s⁻ at a state.

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

from fluctua.core import baselines, check
from fluctua.core.arrays import Array
from fluctua.core.draws import Wiener, philox
from fluctua.core.estimator import ppgt
from fluctua.core.protocols import Estimator
from fluctua.tcmt import experiment
from fluctua.tcmt.assembly import Dynamics, assemble, assemble_power
from fluctua.tcmt.coupled_modes import Drive, Frame, Modulation, check_drives
from fluctua.tcmt.kernel.twin import KernelTwin
from fluctua.tcmt.kernel_choice import make_fused
from fluctua.tcmt.network import Network, repeat_network

DRIVE = Drive(lead=0, amplitude=10.0, frequency=10.0)
"""The drive of the paper."""

Guard = Literal["dark", "coherent"]
"""How amplified noise is kept from counting as transmitted power."""


class Task(experiment.Experiment):
    """An experiment with its estimators: what a network is trained for.

    Made by `transmission`, `isolation` and `custom`. The fields are those of `Experiment`: network,
    process, objective, t, condition, simulated, drives, frame, modulation, weights, copies.

    >>> estimator = task.estimator("cpu", baseline="twin")  # "cuda" for a GPU, "jax" for any
    >>> estimator(key, theta, 64).count
    64
    >>> task.simulator()(key, theta, 4).x.shape  # [Re ψ, Im ψ] of six resonators
    (4, 21, 12)
    """

    __slots__ = ()

    def estimator(
        self,
        backend: str = "jax",
        *,
        baseline: baselines.Baseline | baselines.Twin | KernelTwin | str | None = None,
        wiener: Wiener = philox,
        **options: Any,
    ) -> Estimator:
        """Return an estimator (key, theta, count) -> Estimate.

        Args:
            backend: "jax", or "cpu" and "cuda" for the fused kernels.
            baseline: a name of `fluctua.core.baselines.TABLE` ("time" if not given) or its record.
                Refused are "mean" and a baseline of your own on kernels, "carried" and a
                `KernelTwin` on JAX.
            wiener: source of the noise on JAX.
            **options: of the fused kernels.

        Returns: the estimator.
        """
        if backend == "jax":
            if options:
                raise TypeError(f'backend="jax" has no option {", ".join(map(repr, options))}.')
            if isinstance(baseline, KernelTwin):
                raise ValueError(
                    'a `KernelTwin` needs the fused kernels: use backend="cpu" or "cuda".'
                )
            plan = baselines.resolve_baseline(
                baseline, caller='backend="jax"', condition=self.condition
            )
            return ppgt(self.simulator(wiener), self.objective, baseline=plan)
        if backend not in ("cpu", "cuda"):
            raise ValueError(f'`backend` must be "jax", "cpu" or "cuda"; got {backend!r}.')
        check.objective(self.objective)  # a `stop` is refused: these kernels have none
        return make_fused(self, device=backend, baseline=baseline, **options)


def transmission(
    network: Network,
    *,
    drive: Drive = DRIVE,
    to: int = 1,
    horizon: float = 20.0,
    dt: float = 1e-3,
    sigma_kappa: float = 0.0,
    frame: Frame = "rotating",
    guard: Guard | None = None,
    integrator: str = "euler",
) -> Task:
    """Return the paper's task: the mean fraction of power that is transmitted.

        J = E[(1/T) ∫ |s⁻_to / s⁺_drive|² dt]

    Args:
        network: the device.
        drive: power is relative to the square of its amplitude, whatever the envelope.
        to: lead that is read; the lead of the drive makes it a reflection.
        horizon: T, the time of a trajectory.
        dt: Δt, the time step.
        sigma_kappa: σ_κ of the antagonistic modulation.
        frame: "rotating" with the drive, or "lab", whose Euler steps are unstable
            (docs/network.md).
        guard: keeps noise from counting as transmitted power, which matters if θ can amplify it
            (γ_e, γ; the paper's "wireheading"). A trajectory is then two runs of the device, and
            its score the sum of theirs. "dark" subtracts the power of a run without the drive;
            exact without Kerr effect, and fast (any backend). "coherent" rewards `Re(s⁻ s⁻'*)` of
            two driven runs with independent noise, whose mean is `|E s⁻|²`, the power that a
            lock-in measures; exact for any network, and power that modulation makes incoherent does
            not count either (JAX only).
        integrator: "euler", the paper's; "heun", of second order in Δt, with rewards summed by the
            trapezoid rule: steps at least ten times as long for the same bias (docs/network.md);
            or "rk4" (JAX only).

    Returns: the task.

    >>> task = tcmt.transmission(network, horizon=2.0, integrator="heun", dt=0.02)
    >>> task.estimator("cpu")(key, theta, 50).count
    50
    >>> guarded = tcmt.transmission(network, horizon=2.0, guard="dark")  # noise does not count
    """
    _check_leads(network, drive=drive.lead, to=to)
    leads = network.leads
    weights = np.zeros(leads)
    weights[to] = _relative_power(drive, horizon)
    dynamics = Dynamics(
        experiment.make_grid(horizon, dt), Modulation(sigma_kappa), frame, integrator
    )
    if guard is None:
        return Task(*assemble_power(network, 1, (drive,), weights, dynamics))
    if guard == "dark":
        both = np.append(weights, -weights)
        return Task(*assemble_power(network, 2, (drive,), both, dynamics))
    if guard == "coherent":
        drives = (drive, drive._replace(lead=leads + drive.lead))
        s_minus = experiment.outputs(repeat_network(network, 2), drives, frame=frame)
        reward = experiment.CrossPower(s_minus, tuple(weights.tolist()))
        return Task(*assemble(network, 2, drives, reward, dynamics))
    raise ValueError(f'`guard` must be None, "dark" or "coherent"; got {guard!r}.')


def isolation(
    network: Network,
    *,
    drive: Drive = DRIVE,
    to: int = 1,
    horizon: float = 20.0,
    dt: float = 1e-3,
    sigma_kappa: float = 0.0,
    frame: Frame = "rotating",
    integrator: str = "euler",
) -> Task:
    """Return the task of isolation: forward minus backward transmission.

        J = E[(1/T) ∫ (|s⁻_to / s⁺_drive|² − |s⁻_drive / s⁺_to|²) dt]

    Zero by reciprocity while χ = 0 and σ_κ = 0 (κ is symmetric): training needs a Kerr effect.

    The two directions are two experiments on one device, not two waves at once, which a Kerr
    network would mix. They run side by side as two unconnected copies of the network, one driven
    forward and the other backward, with independent noise and modulation and one shared θ. A
    trajectory is such a pair, and its score the sum of the two copies' scores.

    Args:
        network: the device.
        drive: the forward drive; backward, the same drive is on lead `to`. Power is relative to the
            square of its amplitude, whatever the envelope.
        to: lead that is read.
        horizon: T, the time of a trajectory.
        dt: Δt, the time step.
        sigma_kappa: σ_κ of the antagonistic modulation.
        frame: "rotating" with the drive, or "lab", whose Euler steps are unstable
            (docs/network.md).
        integrator: "euler", "heun" or "rk4", as of `transmission`.

    Returns: the task.

    >>> task = tcmt.isolation(network, horizon=0.2, dt=1e-2)
    >>> estimate = task.estimator("cpu")(key, theta, 50)  # 50 pairs of forward and backward
    """
    source = drive.lead
    _check_leads(network, drive=source, to=to)
    if source == to:
        raise ValueError(f"isolation needs two different leads; got {source} twice.")
    leads = network.leads
    weights = np.zeros(2 * leads)
    weights[to] = _relative_power(drive, horizon)
    weights[leads + source] = -weights[to]
    drives = (drive, drive._replace(lead=leads + to))
    dynamics = Dynamics(
        experiment.make_grid(horizon, dt), Modulation(sigma_kappa), frame, integrator
    )
    return Task(*assemble_power(network, 2, drives, weights, dynamics))


def with_noise(
    task: Task, *, sigma_w: float | None = None, sigma_kappa: float | None = None
) -> Task:
    """Return the same task with another noise.

    Args:
        task: whose reward is a weighted output power.
        sigma_w: σ_W of every channel; None keeps it.
        sigma_kappa: σ_κ of every bond; None keeps it.

    Returns: the task.

    >>> quiet = tcmt.with_noise(task, sigma_w=0.1)
    >>> modulated = tcmt.with_noise(task, sigma_kappa=0.05)
    """
    if task.weights is None:
        raise ValueError(
            "`with_noise` needs a reward that is a weighted output power; build another task."
        )
    network = (
        task.network if sigma_w is None else task.network.replace(sigma_e=sigma_w, sigma_r=sigma_w)
    )
    if sigma_kappa is None:
        sigma_kappa = task.modulation.sigma_kappa if task.modulation else 0.0
    return _rebuild(task, network, sigma_kappa)


def scale_noise(task: Task, factor: np.ndarray) -> Task:
    """Return the same task with the noise amplitude of every resonator times a factor. (N,)

    The reward is a weighted output power, and every lead sits on one resonator.
    """
    network = task.network.scale_noise(factor)
    return _rebuild(task, network, task.modulation.sigma_kappa if task.modulation else 0.0)


def _rebuild(task: Task, network: Network, sigma_kappa: float) -> Task:
    """Return a task of weighted output power with another network and modulation."""
    horizon = float(task.t[-1])
    t = experiment.make_grid(horizon, horizon / (len(task.t) - 1))
    dynamics = Dynamics(t, Modulation(sigma_kappa), task.frame, task.integrator)
    weights = np.asarray(task.weights)
    return Task(*assemble_power(network, task.copies, task.drives, weights, dynamics))


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
    """Return a task with any reward rate.

    Args:
        network: the device.
        drive: one or several.
        running: (theta, x, t) -> the rate, in JAX. Divide by `horizon` for an average.
        horizon: T, the time of a trajectory.
        dt: Δt, the time step.
        sigma_kappa: σ_κ of the antagonistic modulation.
        frame: "rotating" with the drive, or "lab".
        integrator: "euler", "heun" or "rk4", as of `transmission`.

    Returns: the task.

    >>> drive = tcmt.Drive(lead=0, amplitude=10.0)
    >>> waves = tcmt.outputs(network, drive)
    >>> absorbed = lambda theta, x, t: 1 - jnp.sum(jnp.abs(waves(theta, x, t)) ** 2) / 100
    >>> task = tcmt.custom(network, drive, absorbed, horizon=0.2, dt=1e-2)
    >>> estimate = task.estimator("jax")(key, theta, 20)
    """
    drives = check_drives(network, drive)
    dynamics = Dynamics(
        experiment.make_grid(horizon, dt), Modulation(sigma_kappa), frame, integrator
    )
    return Task(*assemble(network, 1, drives, running, dynamics))


def _relative_power(drive: Drive, horizon: float) -> float:
    """Return 1/(s²T), the weight of an output power in the mean transmitted fraction."""
    amplitude = experiment.check_positive(amplitude=drive.amplitude)
    return 1 / (amplitude**2 * experiment.check_positive(horizon=horizon))


def _check_leads(network: Network, **leads: int) -> None:
    for name, lead in leads.items():
        if not 0 <= lead < network.leads:
            raise ValueError(
                f"`{name}` must be one of the network's leads 0…{network.leads - 1}; got {lead}."
            )
