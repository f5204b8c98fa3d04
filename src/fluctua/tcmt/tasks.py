"""What a network is trained for: process, reward, start and time grid, put together.

Another task is a few lines: `outputs` gives s⁻ at a state, and the rest is JAX.

>>> network = rectangular(4, 5)
>>> drive = Drive(lead=0, amplitude=10.0)
>>> s_minus = outputs(network, drive)
>>> reward = lambda theta, x, t: 1 - abs2(s_minus(theta, x, t)[0]) / 100    # as little reflection as possible
>>> task = custom(network, drive, reward, horizon=20.0, dt=1e-3)
>>> task.estimator()(jax.random.key(0), initial_parameters(jax.random.key(1), network), 1000)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from fluctua.core.baselines import Baseline, binned, none, time_only
from fluctua.core.check import leading
from fluctua.core.ppgt import ppgt
from fluctua.core.simulate import Counted, Simulator, simulator
from fluctua.core.twin import Twin
from fluctua.core.types import Array, Estimator, NoiseProduct, Objective, Params, Process, PyTree
from fluctua.core.wiener import Wiener, philox
from fluctua.tcmt.kernel.twin import KernelTwin
from fluctua.tcmt.modulation import Draw, Modulation, checked
from fluctua.tcmt.network import Network, copies, parameters
from fluctua.tcmt.process import (
    Drive,
    Frame,
    abs2,
    checked_drives,
    condition,
    incoming,
    outgoing,
    process,
    to_psi,
)

Guard = Literal["dark", "coherent"]
"""What keeps amplified noise from passing for transmitted power."""


class Task(NamedTuple):
    """A network to be trained. θ has the shapes of `network`; the state may be of several copies of it.

    process, objective: what any estimator needs. t (T+1,): the grid; the start is zero. condition: for binned
    baselines. copies: C, independent experiments on the one device, side by side in the state.

    What a fused kernel needs besides, `network` and `drives` being those of one device:
    simulated: the network with all its copies, CN resonators. drives: on the leads of `simulated`.
    weights: (CL,), the reward rate being Σ_m weights_m |s⁻_m|²; None for a reward of another form.
    """

    network: Network
    process: Process
    objective: Objective
    t: np.ndarray
    condition: Callable[..., PyTree]
    simulated: Network
    drives: tuple[Drive, ...]
    frame: Frame = "rotating"
    modulation: Modulation | None = None
    weights: tuple[float, ...] | None = None
    copies: int = 1

    @property
    def start(self) -> Array:
        """Empty resonators. (2CN,)"""
        return jnp.zeros(2 * self.simulated.sites)

    @property
    def context(self) -> Counted | None:
        """The modulation of each trajectory, from the counters of its noise."""
        if self.modulation is None:
            return None
        return Counted(Draw(len(self.simulated.bonds), self.modulation.harmonics))

    def simulator(self, wiener: Wiener = philox) -> Simulator:
        """The JAX substrate. The default noise is that of the kernels; `wiener.silent` runs without."""
        return simulator(self.process, self.start, self.t, context=self.context, wiener=wiener)

    def estimator(
        self,
        backend: str = "jax",
        *,
        baseline: Baseline | Twin | KernelTwin | str | None = None,
        wiener: Wiener = philox,
        **options: Any,
    ) -> Estimator:
        """(key, theta, count) -> Estimate.

        backend: "jax", or "cpu" and "cuda" for the fused kernels, which take further options. baseline:
        "none", "time" (the default), "binned" (the paper's) or "twin" (the network's own noise-free path), or a
        `Twin`, or a `Baseline` (JAX only) or a `KernelTwin` (kernels only).
        """
        if backend == "jax":
            if options:
                raise TypeError(f'backend="jax" has no option {", ".join(map(repr, options))}.')
            if isinstance(baseline, KernelTwin):
                raise ValueError('a `KernelTwin` is for the fused kernels: use backend="cpu" or "cuda".')
            plan = _baseline(self, baseline)
            return ppgt(self.process, self.objective, self.simulator(wiener), baseline=plan)
        if backend not in ("cpu", "cuda"):
            raise ValueError(f'`backend` must be "jax", "cpu" or "cuda"; got {backend!r}.')
        from fluctua.tcmt.fused import fused  # needs the compiled core, which the JAX path does not

        given: Any = "time" if baseline is None else baseline
        return fused(self, device=backend, baseline=given, **options)


def _baseline(task: Task, given: Baseline | Twin | str | None) -> Baseline | Twin:
    if isinstance(given, Baseline | Twin):
        return given
    named: dict[Any, Callable[[], Baseline | Twin]] = {
        None: time_only,
        "time": time_only,
        "none": none,
        "binned": lambda: binned(task.condition),
        "twin": Twin,
    }
    if given not in named:
        raise ValueError(
            f'`baseline` must be "none", "time", "binned", "twin", a fluctua.Baseline or a fluctua.Twin; got {given!r}.'
        )
    return named[given]()


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
) -> Task:
    """The paper's: ``J = E[(1/T) ∫ |s⁻_to / s⁺_source|² dt]``, the time-averaged fraction of power transmitted.

    source, to: leads; equal ones make it a reflection. s, frequency, envelope: the drive; power is counted
    relative to s², whatever the envelope. sigma_kappa: antagonistic modulation.

    guard: how noise is kept from counting as transmitted power, which matters where θ can amplify it (γ_e, γ; the
    paper's "wireheading"). A trajectory is then two runs of the device, and its score the sum of theirs.
    "dark": minus the power of a run without the drive; exact without Kerr effect, and fast (any backend).
    "coherent": ``Re(s⁻ s⁻'*)`` of two driven runs with independent noise, whose mean is ``|E s⁻|²``, the power that a
    lock-in sees; exact for any network, and what modulation scrambles does not count either (JAX only).

    >>> transmission(paper()).estimator()(jax.random.key(0), theta, 1000)
    >>> transmission(paper(), guard="dark").estimator("cpu")(jax.random.key(0), {"gamma_e": jnp.ones(2)}, 1000)
    """
    _a_lead(network, source=source, to=to)
    leads = network.leads
    weights = np.zeros(leads)
    weights[to] = 1 / (_positive(s=s) ** 2 * _positive(horizon=horizon))
    drive = Drive(source, s, 0.0, frequency, envelope)
    if guard is None:
        return _quadratic(network, 1, (drive,), weights, horizon, dt, sigma_kappa, frame)
    if guard == "dark":
        return _quadratic(network, 2, (drive,), np.append(weights, -weights), horizon, dt, sigma_kappa, frame)
    if guard == "coherent":
        both = (drive, Drive(leads + source, s, 0.0, frequency, envelope))
        reward = CrossPower(outputs(copies(network, 2), both, frame=frame), tuple(weights.tolist()))
        return assembled(network, 2, both, reward, None, grid(horizon, dt), Modulation(sigma_kappa), frame)
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
) -> Task:
    """Forward minus backward: ``J = E[(1/T) ∫ (|s⁻_to / s⁺_source|² − |s⁻_source / s⁺_to|²) dt]``.

    Zero by reciprocity while χ = 0 and σ_κ = 0 (κ is symmetric), so there must be a Kerr effect to train.

    The two directions are two experiments on one device, not two waves at once, which a Kerr network would
    mix. They run side by side as two unconnected copies of the network, one driven forward and the other
    backward, with independent noise and modulation and one shared θ. A trajectory is such a pair, and its
    score the sum of the two copies' scores.
    """
    _a_lead(network, source=source, to=to)
    if source == to:
        raise ValueError(f"isolation is between two different leads; got {source} twice.")
    leads = network.leads
    weights = np.zeros(2 * leads)
    weights[to] = 1 / (_positive(s=s) ** 2 * _positive(horizon=horizon))
    weights[leads + source] = -weights[to]
    drives = (Drive(source, s, 0.0, frequency, envelope), Drive(leads + to, s, 0.0, frequency, envelope))
    return _quadratic(network, 2, drives, weights, horizon, dt, sigma_kappa, frame)


def with_noise(task: Task, *, sigma_w: float | None = None, sigma_kappa: float | None = None) -> Task:
    """The same experiment under another noise: σ_W on every channel, σ_κ on every bond; None leaves it as it is.

    >>> with_noise(transmission(paper()), sigma_w=0.1, sigma_kappa=0.05)
    """
    if task.weights is None:
        raise ValueError(
            "only a task whose reward is a weighted output power can be put together again; build this one anew."
        )
    network = task.network if sigma_w is None else task.network.replace(sigma_e=sigma_w, sigma_r=sigma_w)
    if sigma_kappa is None:
        sigma_kappa = task.modulation.sigma_kappa if task.modulation else 0.0
    horizon = float(task.t[-1])
    dt, weights = horizon / (len(task.t) - 1), np.asarray(task.weights)
    return _quadratic(network, task.copies, task.drives, weights, horizon, dt, sigma_kappa, task.frame)


def custom(
    network: Network,
    drive: Drive | Sequence[Drive],
    running: Callable[..., Array],
    *,
    horizon: float = 20.0,
    dt: float = 1e-3,
    sigma_kappa: float = 0.0,
    frame: Frame = "rotating",
) -> Task:
    """A task with any reward rate running(theta, x, t), in JAX. Divide by `horizon` for an average."""
    modulation = checked(Modulation(sigma_kappa))
    drives = checked_drives(network, drive)
    return Task(
        network=network,
        process=process(network, drives, frame=frame, modulation=modulation),
        objective=Objective(running=running),
        t=grid(horizon, dt),
        condition=condition(network),
        simulated=network,
        drives=drives,
        frame=frame,
        modulation=modulation,
    )


@dataclass(frozen=True)
class Outputs:
    """s⁻ = −s⁺ + Dᵀψ: (theta, x, t) -> (L,) complex."""

    network: Network
    drives: tuple[Drive, ...]
    frame: Frame = "rotating"

    def __call__(self, theta: Params, x: Array, t: Array) -> Array:
        """s⁻. (L,)"""
        s_plus = incoming(self.drives, self.network.leads, t, self.frame)
        return outgoing(self.network, parameters(self.network, theta), to_psi(x), s_plus)


def outputs(network: Network, drive: Drive | Sequence[Drive], *, frame: Frame = "rotating") -> Outputs:
    """s⁻ as a function of (theta, x, t), for rewards."""
    return Outputs(network, checked_drives(network, drive), frame)


@dataclass(frozen=True)
class WeightedPower:
    """g = Σ_m weights_m |s⁻_m|², over the leads with a weight."""

    s_minus: Outputs
    weights: tuple[float, ...]

    def __call__(self, theta: Params, x: Array, t: Array) -> Array:
        """A rate of reward."""
        return jnp.asarray(self.weights, x.dtype) @ abs2(self.s_minus(theta, x, t))


@dataclass(frozen=True)
class CrossPower:
    """g = Σ_m weights_m Re(s⁻_m s⁻'_m*), s⁻ and s⁻' of two copies of a network with L leads each.

    The copies have independent noise, so E[s⁻ s⁻'*] = E[s⁻] E[s⁻]*: only what repeats counts.
    """

    s_minus: Outputs
    weights: tuple[float, ...]

    def __call__(self, theta: Params, x: Array, t: Array) -> Array:
        """A rate of reward."""
        one, other = self.s_minus(theta, x, t).reshape(2, -1)
        return jnp.asarray(self.weights, x.dtype) @ jnp.real(one * other.conj())


@dataclass(frozen=True)
class Tied:
    """f of `copies` copies of a network that share one θ: each family is repeated before f sees it."""

    f: Callable[..., Any]
    copies: int

    def __call__(self, theta: Params, *rest: Any) -> Any:
        """F at the repeated θ."""
        return self.f({name: jnp.tile(jnp.asarray(value), self.copies) for name, value in theta.items()}, *rest)


@dataclass(frozen=True)
class TiedCondition:
    """The intensity on a parameter's sites, summed over the copies."""

    of_copy: Callable[..., PyTree]
    copies: int

    def __call__(self, theta: Params, x: Array) -> PyTree:
        """One quantity for each parameter of the device."""
        each = x.reshape(2, self.copies, -1).swapaxes(0, 1).reshape(self.copies, -1)
        of = [self.of_copy(theta, one) for one in each]
        return {name: sum(one[name] for one in of) for name in theta}


def _quadratic(
    network: Network,
    count: int,
    drives: tuple[Drive, ...],
    weights: np.ndarray,
    horizon: float,
    dt: float,
    sigma_kappa: float,
    frame: Frame,
) -> Task:
    """A task whose reward is a weighted sum of output powers."""
    simulated = network if count == 1 else copies(network, count)
    given = tuple(weights.tolist())
    reward = WeightedPower(outputs(simulated, drives, frame=frame), given)
    return assembled(network, count, drives, reward, given, grid(horizon, dt), Modulation(sigma_kappa), frame)


def assembled(
    network: Network,
    count: int,
    drives: tuple[Drive, ...],
    reward: Callable[..., Array],
    weights: tuple[float, ...] | None,
    t: np.ndarray,
    modulation: Modulation | None,
    frame: Frame,
) -> Task:
    """A task of `count` copies of a network that share θ. reward: of all copies, (theta of all, x, t)."""
    simulated = network if count == 1 else copies(network, count)
    modulation = checked(modulation)
    drift, noise, _ = process(simulated, drives, frame=frame, modulation=modulation)
    of_device: Callable[..., PyTree] = condition(network)
    if count > 1:
        drift, reward = Tied(drift, count), Tied(leading(reward, 4), count)
        of_device = TiedCondition(of_device, count)
        assert noise is not None
        if isinstance(noise, NoiseProduct):
            noise = NoiseProduct(Tied(noise.product, count), noise.width)
        else:
            noise = Tied(noise, count)
    return Task(
        network=network,
        process=Process(drift, noise),
        objective=Objective(running=reward),
        t=t,
        condition=of_device,
        simulated=simulated,
        drives=drives,
        frame=frame,
        modulation=modulation,
        weights=weights,
        copies=count,
    )


def grid(horizon: float, dt: float) -> np.ndarray:
    """Whole steps `dt` from 0 to `horizon`. (T+1,)"""
    steps = round(_positive(horizon=horizon) / _positive(dt=dt))
    if steps < 1 or abs(steps * dt / horizon - 1) > 1e-6:
        raise ValueError(f"`horizon` must be a whole number of steps `dt`; got {horizon} / {dt} = {horizon / dt:g}.")
    return np.linspace(0.0, horizon, steps + 1)


def _positive(**value: float) -> float:
    ((name, number),) = value.items()
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"`{name}` must be a positive number; got {number!r}.")
    return number


def _a_lead(network: Network, **leads: int) -> None:
    for name, lead in leads.items():
        if not 0 <= lead < network.leads:
            raise ValueError(f"`{name}` must be one of the network's leads 0…{network.leads - 1}; got {lead}.")
