"""The filter of sampled states in JAX: the reference of the CPU's kernel, and with modulation.

The equations are those of `fluctua.tcmt.innovations`; the kernel is `fluctua.tcmt.kernel.samples`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, PyTree, jit
from fluctua.tcmt import coupled_modes, state_scores
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.kernel.options import KernelSpec
from fluctua.tcmt.kernel.samples import FilterGradients, FilterResult


class FlowRule(NamedTuple):
    """Interval between samples, and Runge–Kutta steps per interval."""

    interval: float
    steps: int


class _IntervalNoise(NamedTuple):
    """Noise of an interval relative to its amplitude: q/a² (N,), and e^{−2ΓΔ} (N,)."""

    unit_variance: Array
    decay: Array


class _Samples(NamedTuple):
    """Samples y (T+1, E, N), complex, and δκ of `tabulate_shifts`."""

    y: Array
    shifts: Array | None


class _Graph(NamedTuple):
    """The numbers of a network, and its neighbours."""

    numbers: state_scores.NetworkNumbers
    slots: state_scores.NeighbourSlots


class _Amplitudes(NamedTuple):
    """Logarithms of the noise amplitudes √(2Q) (N,) and of the readout noise ()."""

    noise: Array
    readout: Array


class _FilterPass(NamedTuple):
    """Result of the filter and of its pass back in JAX.

    middle: states at the middles of the intervals (T, E, N), complex.
    adjoint: gradients of ℓ by drifts there (T, E, N), complex: Re λ*f per unit of time.
    by_noise, by_readout: gradients by logarithms of amplitudes (N,) and ().
    squares, lagged: see `SampledEvidence`.
    """

    middle: Any
    adjoint: Any
    by_noise: Any
    by_readout: Any
    squares: Any
    lagged: Any


def tabulate_shifts(
    task: Experiment, context: PyTree, t: np.ndarray, rule: FlowRule
) -> Array | None:
    """Return δκ at the times of the Runge–Kutta stages (T, 2 steps + 1, E, B); None without."""
    if context is None or task.modulation is None:
        return None
    modulation = task.modulation
    offsets = np.arange(2 * rule.steps + 1) / (2 * rule.steps) * rule.interval
    when = jnp.asarray(t[:-1, None] + offsets)

    def shift(one: PyTree) -> Array:
        each = functools.partial(coupled_modes.delta_kappa, modulation, one)
        return jax.vmap(jax.vmap(each))(when)

    return jnp.moveaxis(jax.vmap(shift)(jax.tree.map(jnp.asarray, context)), 0, 2)


def _flow(rule: FlowRule, graph: _Graph, psi: Array, shift: Array | None) -> Array:
    """Return the state an interval later, by classical Runge–Kutta steps. psi (E, N)."""
    h = rule.interval / rule.steps

    def drift(psi: Array, stage: int) -> Array:
        delta = None if shift is None else shift[stage]
        return state_scores.compute_drift(*graph, psi, graph.numbers.force, delta)

    for k in range(rule.steps):
        k1 = drift(psi, 2 * k)
        k2 = drift(psi + h / 2 * k1, 2 * k + 1)
        k3 = drift(psi + h / 2 * k2, 2 * k + 1)
        k4 = drift(psi + h * k3, 2 * k + 2)
        psi = psi + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return psi


def _compute_gains(
    law: _IntervalNoise, amplitudes: _Amplitudes, count: int, noisy: bool
) -> tuple[Array, Array]:
    """Return gains K and variances S of the samples 1…count, from a state that is known. (T, N)"""
    q = law.unit_variance * jnp.exp(2 * amplitudes.noise)
    if not noisy:
        ones = jnp.ones((count, q.size), q.dtype)
        return ones, q * ones
    readout = jnp.exp(2 * amplitudes.readout)

    def advance(p: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        s = p + readout
        gain = p / s
        return law.decay * (1 - gain) * p + q, (gain, s)

    return jax.lax.scan(advance, q, None, count)[1]


def run_filter_in_jax(
    spec: KernelSpec,
    x: np.ndarray,
    rule: FlowRule,
    shifts: Array | None,
    unit_variance: np.ndarray,
    readout: float,
) -> FilterResult:
    """Run the filter and its pass back in JAX.

    Args:
        spec: the network, with a constant drive.
        x: samples (E, T+1, 2N).
        rule: of the flow between them.
        shifts: of `tabulate_shifts`.
        unit_variance: variance of the noise of an interval per a² (N,).
        readout: standard deviation of the measurement.
    """
    y = np.swapaxes(state_scores.to_complex(x), 0, 1)
    real = jnp.result_type(float)
    law = _IntervalNoise(
        jnp.asarray(unit_variance, real),
        jnp.asarray(np.exp(-2 * spec.damping * rule.interval), real),
    )
    amplitudes = _Amplitudes(
        jnp.asarray(np.log(spec.noise), real),
        jnp.asarray(np.log(readout) if readout else -np.inf, real),
    )
    graph = _Graph(state_scores.tabulate_network(spec), state_scores.list_slots(spec))
    recorded = _Samples(jnp.asarray(y, jnp.result_type(1j)), shifts)
    passed = _run_filter(rule, bool(readout), graph, recorded, law, amplitudes)
    passed = jax.tree.map(np.asarray, passed)
    return FilterResult(
        passed.squares.astype(np.float64),
        passed.lagged.astype(np.float64),
        _sum_products(spec, passed),
        np.swapaxes(passed.middle, 0, 1),
    )


@functools.partial(jit, static_argnums=(0, 1))
def _run_filter(
    rule: FlowRule,
    noisy: bool,
    graph: _Graph,
    samples: _Samples,
    law: _IntervalNoise,
    amplitudes: _Amplitudes,
) -> _FilterPass:
    """Run the filter and its pass back. noisy: whether there is readout noise.

    Zeros are added to the states before and after every interval; the gradients by them are λ.
    """
    y, shifts = samples
    count = len(y) - 1
    zeros = jnp.zeros_like(y[1:])

    def log_likelihood(before: Array, after: Array, gains: Array, variances: Array) -> Any:
        def advance(psi: Array, at: Any) -> tuple[Array, Any]:
            sample, shift, gain, first, second = at
            begin = psi + first
            predicted = _flow(rule, graph, begin, shift) + second
            e = sample - predicted
            return predicted + gain * e, (e, (begin + predicted) / 2)

        start = jnp.zeros_like(y[0]) if noisy else y[0]
        each = (y[1:], shifts, gains, before, after)
        _, (e, middle) = jax.lax.scan(advance, start, each)
        z = e / jnp.sqrt(2 * variances)[:, None, :]
        square = z.real**2 + z.imag**2
        value = -jnp.sum(square) - y.shape[1] * jnp.sum(jnp.log(variances))
        follow = jnp.mean((z[1:].conj() * z[:-1]).real, axis=(0, 1))
        return value, (middle, jnp.mean(square, axis=(0, 1)), follow)

    (gains, variances), pull = jax.vjp(lambda a: _compute_gains(law, a, count, noisy), amplitudes)
    gradients, (middle, squares, lagged) = jax.grad(
        log_likelihood, argnums=(0, 1, 2, 3), has_aux=True
    )(zeros, zeros, gains, variances)
    before, after, by_gain, by_variance = gradients
    by = pull((by_gain, by_variance))[0]
    # the gradient of a real function by a complex number is conjugate in JAX
    adjoint = (before + after).conj() / 2
    return _FilterPass(middle, adjoint, by.noise, by.readout, squares, lagged)


def _sum_products(spec: KernelSpec, passed: _FilterPass) -> FilterGradients:
    """Return the sums of λ and ψ that scores are made of."""
    n = spec.sites
    psi = passed.middle.reshape(-1, n)
    adjoint = passed.adjoint.reshape(-1, n)
    cross = (adjoint.conj().T @ psi).astype(np.complex128)  # Σ λ_a* ψ_b
    i, j = spec.bonds.T
    cubic = np.sum(adjoint.conj() * psi * np.abs(psi) ** 2, axis=0, dtype=np.complex128)
    return FilterGradients(
        np.diag(cross),
        (cross[i, j] + cross[j, i]).imag,
        np.asarray(cubic.imag),
        adjoint.sum(axis=0, dtype=np.complex128),
        passed.by_noise.astype(np.float64),
        float(passed.by_readout),
    )
