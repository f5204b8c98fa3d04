"""What is measured on a network, and for what: process, reward, start and time grid, put together.

Another reward is a few lines: `outputs` gives s⁻ at a state, and the rest is JAX.
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

    process, objective: what any estimator needs. t (T+1,): the grid; the start is zero. condition:
    for binned baselines. copies: C, independent experiments on the one device, side by side in the
    state.

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
    frame: coupled_modes.Frame = "rotating"
    modulation: coupled_modes.Modulation | None = None
    weights: tuple[float, ...] | None = None
    copies: int = 1

    @property
    def integrator(self) -> str:
        """The map of one step by its name: "euler", "heun" or "rk4"."""
        assert isinstance(
            self.process.integrator, str
        )  # `process` was made by one of the doors of `tasks`
        return self.process.integrator

    @property
    def start(self) -> Array:
        """Empty resonators. (2CN,)"""
        return jnp.zeros(2 * self.simulated.sites)

    @property
    def context(self) -> Counted | None:
        """The modulation of each trajectory, from the counters of its noise."""
        if self.modulation is None:
            return None
        return Counted(coupled_modes.Draw(len(self.simulated.bonds), self.modulation.harmonics))

    def simulator(self, wiener: Wiener = philox) -> Simulator:
        """The JAX substrate.

        The default noise is that of the kernels; `draws.no_noise` runs without.
        """
        return simulator(self.process, self.start, self.t, context=self.context, wiener=wiener)


@dataclass(frozen=True)
class Outputs:
    """s⁻ = −s⁺ + Dᵀψ: (theta, x, t) -> (L,) complex."""

    network: Network
    drives: tuple[Drive, ...]
    frame: coupled_modes.Frame = "rotating"

    def __call__(self, theta: Params, x: Array, t: Array) -> Array:
        """s⁻. (L,)"""
        s_plus = coupled_modes.incoming(self.drives, self.network.leads, t, self.frame)
        return coupled_modes.outgoing(
            self.network, parameters(self.network, theta), coupled_modes.to_psi(x), s_plus
        )


def outputs(
    network: Network, drive: Drive | Sequence[Drive], *, frame: coupled_modes.Frame = "rotating"
) -> Outputs:
    """s⁻, the waves that leave, for rewards.

    Args:
        network: its leads.
        drive: one or several.
        frame: of the state, "rotating" or "lab".

    Returns: (theta, x, t) -> s⁻.
    """
    return Outputs(network, coupled_modes.checked_drives(network, drive), frame)


@dataclass(frozen=True)
class WeightedPower:
    """g = Σ_m weights_m |s⁻_m|², over the leads with a weight."""

    s_minus: Outputs
    weights: tuple[float, ...]

    def __call__(self, theta: Params, x: Array, t: Array) -> Array:
        """A rate of reward."""
        return jnp.asarray(self.weights, x.dtype) @ coupled_modes.abs2(self.s_minus(theta, x, t))


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


def accumulated(rate: Callable[..., Array], integrator: str) -> Objective:
    """∫g dt: the left sum Σg(X_n)Δt of the paper with Euler's step, else of second order as the
    step, by trapezoids.

    rate: g (theta, x, t, context).
    """
    left = Objective(running=rate)
    return left if integrator == "euler" else integrate_by_trapezoids(left)


@dataclass(frozen=True)
class Tied:
    """f of `copies` copies of a network that share one θ: each family is repeated before f sees
    it.
    """

    f: Callable[..., Any]
    copies: int

    def __call__(self, theta: Params, *rest: Any) -> Any:
        """F at the repeated θ."""
        return self.f(
            {name: jnp.tile(jnp.asarray(value), self.copies) for name, value in theta.items()},
            *rest,
        )


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


def grid(horizon: float, dt: float) -> np.ndarray:
    """Whole steps `dt` from 0 to `horizon`. (T+1,)"""
    steps = round(positive(horizon=horizon) / positive(dt=dt))
    if steps < 1 or abs(steps * dt / horizon - 1) > 1e-6:
        raise ValueError(
            f"`horizon` must be a whole number of steps `dt`; got {horizon} / {dt} = "
            f"{horizon / dt:g}."
        )
    return np.linspace(0.0, horizon, steps + 1)


def positive(**value: float) -> float:
    """The one number that is named, if it is finite and above zero."""
    ((name, number),) = value.items()
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"`{name}` must be a positive number; got {number!r}.")
    return number
