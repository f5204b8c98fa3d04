"""Conversion of a task at θ to arrays of the kernels, and of their columns to gradients of θ.

The kernels have sites, bonds, drives and ports. Their columns become the gradient of θ by the chain
rule for γ_e and γ, which enter damping, diffusion, drive and output, and by the sum over copies of
a network that share one θ.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params, is_on_host, jit, on_host, put_on_host
from fluctua.core.estimate import Estimate, Samples
from fluctua.tcmt import coupled_modes
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.kernel.options import KernelSpec
from fluctua.tcmt.kernel.run import Families, KernelResult
from fluctua.tcmt.kernel.twin import TwinResult
from fluctua.tcmt.network import parameters


def incoming_table(task: Experiment) -> np.ndarray:
    """Return s⁺ on every lead: (L,) if constant, else a row per time.

    (T, L) with Euler's step, (T+1, L) with others, which also need the end of the last step.
    """
    t = task.t[:-1] if task.integrator == "euler" else task.t
    s_plus = coupled_modes.tabulate_incoming(task.drives, task.simulated.leads, t, task.frame)
    return s_plus[0] if np.all(s_plus == s_plus[0]) else s_plus


def kernel_spec(task: Experiment, theta: Params, s_plus: np.ndarray | None = None) -> KernelSpec:
    """Return the arrays of a task at θ. s_plus: `incoming_table(task)`, if already computed."""
    network = task.simulated
    repeated = repeat_parameters(task, theta)
    c = coupled_modes.coefficients(network, repeated, offset=find_offset(task))
    if s_plus is None:
        s_plus = incoming_table(task)
    weights = np.asarray(task.weights)
    driven = np.array(sorted({drive.lead for drive in task.drives}), int)
    ports = np.flatnonzero(weights)
    return KernelSpec(
        omega=c.omega,
        kappa=c.kappa,
        chi=c.chi,
        bonds=c.bonds,
        damping=c.decay,
        noise=c.amplitude,
        dt=_uniform_step(task.t),
        steps=len(task.t) - 1,
        drive_sites=c.lead_site[driven],
        drive=s_plus[..., driven] * c.lead_coupling[driven],
        port_sites=c.lead_site[ports],
        port_gain=c.lead_coupling[ports],
        port_weight=weights[ports],
        incoming=s_plus[..., ports],
        sigma_kappa=task.modulation.sigma_kappa if task.modulation else 0.0,
        Omega=task.modulation.omega_max / task.modulation.harmonics if task.modulation else 0.1,
        harmonics=task.modulation.harmonics if task.modulation else 10,
        integrator=task.integrator,
    )


def find_offset(task: Experiment) -> float:
    """Return what is added to ω: the carrier in the lab frame, else 0."""
    return coupled_modes.carrier(task.drives) if task.frame == "lab" else 0.0


def needs_chain_rule(task: Experiment, theta: Params) -> bool:
    """Whether a gradient of θ is a sum over several columns of the kernels."""
    return task.copies > 1 or not {"gamma_e", "gamma"}.isdisjoint(theta)


def convert_columns(task: Experiment, theta: Params, columns: Families) -> Params:
    """Return gradients of θ per trajectory from columns of the kernels, summed over copies."""
    by_family = {"omega": columns.omega, "kappa": columns.kappa, "chi": columns.chi}
    if columns.damping is not None:
        by_family |= _convert_rates(task, theta, columns)
    return {
        name: jnp.asarray(
            by_family[name].reshape(len(by_family[name]), task.copies, -1).sum(axis=1),
            jnp.asarray(theta[name]).dtype,
        )
        for name in theta
    }


def collect_samples(task: Experiment, theta: Params, result: KernelResult | TwinResult) -> Samples:
    """Return gradients of θ per trajectory, from a run with `samples`."""
    assert result.samples is not None
    return Samples(convert_columns(task, theta, result.samples), jnp.asarray(result.returns))


def _convert_rates(task: Experiment, theta: Params, columns: Families) -> dict[str, np.ndarray]:
    """Return ∂/∂γ_e and ∂/∂γ from those by Γ, ln Q, the drive f = D s⁺ and the gain D.

    D = w√(2γ_e).
    """
    network = task.simulated
    repeated = repeat_parameters(task, theta)
    p = {
        name: np.asarray(value, np.float64) for name, value in parameters(network, repeated).items()
    }
    c = coupled_modes.coefficients(network, repeated)
    q = c.amplitude**2 / 2
    damping, log_q, drive, gain = (np.asarray(v) for v in columns[3:])
    gamma = damping + log_q * (network.sigma_r**2 / q)
    site = c.lead_site
    square = network.lead_weights[c.lead_site, np.arange(network.leads)] ** 2
    gamma_e = square * (damping[:, site] + log_q[:, site] * (network.sigma_e**2 / q[site]))
    driven = sorted({d.lead for d in task.drives})
    ports = np.flatnonzero(np.asarray(task.weights))
    gamma_e[:, driven] += drive / (2 * p["gamma_e"][driven])
    gamma_e[:, ports] += gain * c.lead_coupling[ports] / (2 * p["gamma_e"][ports])
    return {"gamma_e": gamma_e, "gamma": gamma}


def repeat_parameters(task: Experiment, theta: Params) -> dict[str, np.ndarray]:
    """Return θ of all copies."""
    parameters(task.network, theta)  # names and shapes are checked against one device
    values = {name: np.asarray(on_host(value), np.float64) for name, value in theta.items()}
    if task.copies == 1:
        return values
    return {name: np.tile(value, task.copies) for name, value in values.items()}


def _uniform_step(t: np.ndarray) -> float:
    return float(t[-1] - t[0]) / (len(t) - 1)


def to_estimate(theta: Params, result: KernelResult | TwinResult) -> Estimate:
    """Return means and errors as arrays of JAX, where θ is.

    A transfer to a GPU takes as long as a short run. So there is one, and a program splits it.
    """
    parts = (result.gradient, result.stderr, result.second_moment)
    numbers = (result.value, result.value_stderr)
    if all(map(is_on_host, theta.values())):
        real = jnp.result_type(float).type
        arrays = [np.asarray(getattr(p, name), v.dtype) for p in parts for name, v in theta.items()]
        *arrays, value, stderr = put_on_host([*arrays, *map(real, numbers)])
    else:
        leaves = tuple((v.size, v.dtype) for v in theta.values())
        wide = functools.reduce(np.promote_types, (dtype for _, dtype in leaves))
        flat = np.concatenate([np.asarray(getattr(p, name), wide) for p in parts for name in theta])
        *arrays, value, stderr = _split_leaves(len(parts) * leaves, flat, *numbers)
    trees = [
        dict(zip(theta, arrays[first : first + len(theta)], strict=True))
        for first in range(0, len(arrays), len(theta))
    ]
    return Estimate(trees[0], trees[1], trees[2], value, stderr, len(result.returns))


@functools.partial(jit, static_argnums=0)
def _split_leaves(
    leaves: tuple[tuple[int, np.dtype], ...], flat: Array, *numbers: Array
) -> tuple[Any, ...]:
    """Split a vector into leaves of given size and type; numbers are passed through."""
    ends = np.cumsum([size for size, _ in leaves])
    parts = zip(jnp.split(flat, ends[:-1]), leaves, strict=True)
    return *(part.astype(dtype) for part, (_, dtype) in parts), *numbers
