"""Experiments on a network: process, reward, start and time grid.

Another reward is a few lines of JAX on `outputs`, which gives s⁻ at a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.draws import Wiener, philox
from fluctua.core.integrators import integrate_by_trapezoids
from fluctua.core.objective import Objective
from fluctua.core.process import Process
from fluctua.core.simulate import Counted, Simulator, simulator
from fluctua.tcmt import coupled_modes
from fluctua.tcmt.coupled_modes import Drive
from fluctua.tcmt.network import Network, parameters


class Experiment(NamedTuple):
    """A network, how it is driven and what is rewarded. θ has the shapes of `network`.

    network: one device, N resonators.
    process: of all copies.
    objective: the reward.
    t: the time grid (T+1,); the start is zero.
    condition: conditioning quantities of binned baselines.
    simulated: the network with all its copies, CN resonators.
    drives: on the leads of `simulated`.
    frame: "rotating" or "lab".
    modulation: of the couplings; None for none.
    weights: (CL,) of the reward rate Σ_m weights_m |s⁻_m|²; None for a reward of another form.
    copies: C, independent experiments on one device, side by side in the state.
    """

    network: Network
    process: Process
    objective: Objective
    t: np.ndarray
    condition: Callable[..., PyTree]
    simulated: Network
    drives: tuple[Drive, ...]
    frame: coupled_modes.Frame = "rotating"
    modulation: coupled_modes.Modulation | None = None
    weights: tuple[float, ...] | None = None
    copies: int = 1

    @property
    def integrator(self) -> str:
        """The map of one step by its name: "euler", "heun" or "rk4"."""
        assert isinstance(self.process.integrator, str)  # as `assembly` makes it
        return self.process.integrator

    @property
    def start(self) -> Array:
        """The start state: empty resonators. (2CN,)"""
        return jnp.zeros(2 * self.simulated.sites)

    @property
    def context(self) -> Counted | None:
        """The modulation of each trajectory, from the counters of its noise."""
        if self.modulation is None:
            return None
        return Counted(coupled_modes.Draw(len(self.simulated.bonds), self.modulation.harmonics))

    def simulator(self, wiener: Wiener = philox) -> Simulator:
        """Return the simulator in JAX. The default noise is that of the kernels."""
        return simulator(self.process, self.start, self.t, context=self.context, wiener=wiener)


@dataclass(frozen=True)
class Outputs:
    """Outgoing waves s⁻ = −s⁺ + Dᵀψ: (theta, x, t) -> (L,) complex."""

    network: Network
    drives: tuple[Drive, ...]
    frame: coupled_modes.Frame = "rotating"

    def __call__(self, theta: Params, x: Array, t: Array) -> Array:
        """Return s⁻ at a state. (L,)"""
        s_plus = coupled_modes.incoming(self.drives, self.network.leads, t, self.frame)
        return coupled_modes.outgoing(
            self.network, parameters(self.network, theta), coupled_modes.to_psi(x), s_plus
        )


def outputs(
    network: Network, drive: Drive | Sequence[Drive], *, frame: coupled_modes.Frame = "rotating"
) -> Outputs:
    """Return a function that gives the outgoing waves s⁻ at a state, for rewards.

    Args:
        network: its leads.
        drive: one or several.
        frame: of the state, "rotating" or "lab".

    Returns: (theta, x, t) -> s⁻.

    >>> waves = tcmt.outputs(network, tcmt.Drive(lead=0, amplitude=10.0))
    >>> waves(theta, jnp.zeros(12), 0.0)  # all of it is reflected at an empty network
    Array([-10.+0.j,   0.+0.j], dtype=complex64)
    """
    return Outputs(network, coupled_modes.check_drives(network, drive), frame)


@dataclass(frozen=True)
class WeightedPower:
    """Reward rate g = Σ_m weights_m |s⁻_m|², over the leads with a weight."""

    s_minus: Outputs
    weights: tuple[float, ...]

    def __call__(self, theta: Params, x: Array, t: Array) -> Array:
        """Return the reward rate."""
        return jnp.asarray(self.weights, x.dtype) @ coupled_modes.abs2(self.s_minus(theta, x, t))


@dataclass(frozen=True)
class CrossPower:
    """Reward rate g = Σ_m weights_m Re(s⁻_m s⁻'_m*), of two copies of a network with L leads.

    The copies have independent noise, so E[s⁻ s⁻'*] = E[s⁻] E[s⁻]*: noise does not contribute.
    """

    s_minus: Outputs
    weights: tuple[float, ...]

    def __call__(self, theta: Params, x: Array, t: Array) -> Array:
        """Return the reward rate."""
        one, other = self.s_minus(theta, x, t).reshape(2, -1)
        return jnp.asarray(self.weights, x.dtype) @ jnp.real(one * other.conj())


def make_objective(rate: Callable[..., Array], integrator: str) -> Objective:
    """Return the objective ∫g dt, of the order of the integrator.

    Σg(X_n)Δt with Euler's step, as in the paper; the trapezoid rule with others. rate: g (theta, x,
    t, context).
    """
    objective = Objective(running=rate)
    return objective if integrator == "euler" else integrate_by_trapezoids(objective)


@dataclass(frozen=True)
class Tied:
    """A function f of `copies` copies of a network that share one θ; f gets θ repeated."""

    f: Callable[..., Any]
    copies: int

    def __call__(self, theta: Params, *rest: Any) -> Any:
        """Return f at the repeated θ."""
        return self.f(
            {name: jnp.tile(jnp.asarray(value), self.copies) for name, value in theta.items()},
            *rest,
        )


@dataclass(frozen=True)
class TiedCondition:
    """The intensity on a parameter's sites, summed over the copies."""

    condition: Callable[..., PyTree]
    copies: int

    def __call__(self, theta: Params, x: Array) -> PyTree:
        """Return one quantity per parameter of the device."""
        states = x.reshape(2, self.copies, -1).swapaxes(0, 1).reshape(self.copies, -1)
        intensities = [self.condition(theta, state) for state in states]
        return {name: sum(intensity[name] for intensity in intensities) for name in theta}


def make_grid(horizon: float, dt: float) -> np.ndarray:
    """Return the time grid of whole steps `dt` from 0 to `horizon`. (T+1,)"""
    steps = round(check_positive(horizon=horizon) / check_positive(dt=dt))
    if steps < 1 or abs(steps * dt / horizon - 1) > 1e-6:
        raise ValueError(
            f"`horizon` must be a whole number of steps `dt`; got {horizon} / {dt} = "
            f"{horizon / dt:g}."
        )
    return np.linspace(0.0, horizon, steps + 1)


def check_positive(**value: float) -> float:
    """Return the one keyword's value; raise if it is not finite and positive."""
    ((name, number),) = value.items()
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"`{name}` must be a positive number; got {number!r}.")
    return number
