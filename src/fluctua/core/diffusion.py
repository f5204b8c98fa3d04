"""The diffusion Q = σσᵀ/2 in its three forms: diagonal, dense, and matrix-free.

A form knows three things at one state: products Q(θ')v with parameters that may be differentiated, the
solve Q⁻¹v, and Tr[Q⁻¹Q(θ')] with Q⁻¹ held fixed, whose θ'-gradient is the trace term of the full score.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax
import numpy as np
from jax.extend.core import Var
from jax.scipy.linalg import cho_factor, cho_solve

from fluctua.core import check
from fluctua.core.types import Array, NoiseProduct, Params, Process, PyTree, Rewards


class Diffusion(NamedTuple):
    """Q at one state. `theta` arguments are differentiable, the rest is fixed at construction."""

    apply: Callable[[Params, Array], Array]  # (theta, v) -> Q(theta) v
    solve: Callable[[Array], Array]  # v -> Q⁻¹ v
    trace: Callable[[Params], Array]  # theta -> Tr[Q⁻¹ Q(theta)], Q⁻¹ fixed
    kind: str


def diffusion_at(
    process: Process, theta: Params, x: Array, t: Array, context: PyTree, moved: Callable | None = None
) -> Diffusion:
    """Choose the form by what the process gives, and the inverse by the form.

    `moved(theta)` is the state as a function of the parameters, for starts that depend on them; it
    equals `x` at `theta`. Without it the state is a measured number.
    """
    at = (lambda th: x) if moved is None else moved
    if process.diffusion is not None:
        return _matrix_free(lambda th, v: process.diffusion(th, at(th), t, context, v), theta, x)  # type: ignore[misc]
    if isinstance(process.noise, NoiseProduct):
        product, width = process.noise

        def q_product(th: Params, v: Array) -> Array:
            kick = lambda dw: product(th, at(th), t, context, dw)
            (back,) = jax.linear_transpose(kick, jax.ShapeDtypeStruct((width,), x.dtype))(v)
            return kick(back) / 2

        return _matrix_free(q_product, theta, x)

    assert process.noise is not None  # checked at the boundary
    noise = process.noise
    sigma = lambda th: noise(th, at(th), t, context)
    if jnp.ndim(sigma(theta)) == 1:
        return _diagonal(sigma, theta)
    constant = moved is None and not depends(lambda *state: noise(theta, *state), x, t, context)
    return _dense(sigma, theta, constant)


def _diagonal(sigma: Callable[[Params], Array], theta: Params) -> Diffusion:
    q_of = lambda th: sigma(th) ** 2 / 2
    q = q_of(theta)
    return Diffusion(
        apply=lambda th, v: q_of(th) * v,
        solve=lambda v: v / q,
        trace=lambda th: jnp.sum(q_of(th) / q),
        kind="diagonal",
    )


def depends(f: Callable[..., Array], *arguments: PyTree) -> bool:
    """Whether the value of f depends on that of its arguments, as far as its operations show."""
    program = jax.make_jaxpr(f)(*arguments).jaxpr
    dependent = set(program.invars)
    for step in program.eqns:
        if any(isinstance(v, Var) and v in dependent for v in step.invars):
            dependent.update(step.outvars)
    return any(isinstance(v, Var) and v in dependent for v in program.outvars)


def _dense(sigma: Callable[[Params], Array], theta: Params, constant: bool) -> Diffusion:
    """constant: σ is the same for all trajectories and times, so that Q⁻¹ is one matrix, and its use one product."""

    def q_of(th: Params) -> Array:
        s = sigma(th)
        return s @ s.T / 2

    q = q_of(theta)
    factor = cho_factor(q)
    inverse = cho_solve(factor, jnp.eye(q.shape[0], dtype=q.dtype))
    return Diffusion(
        apply=lambda th, v: q_of(th) @ v,
        solve=(lambda v: inverse @ v) if constant else (lambda v: cho_solve(factor, v)),
        trace=lambda th: jnp.sum(inverse * q_of(th)),
        kind="dense",
    )


def _matrix_free(product: Callable[[Params, Array], Array], theta: Params, x: Array) -> Diffusion:
    structure = jax.ShapeDtypeStruct(x.shape, x.dtype)
    operator = lineax.FunctionLinearOperator(lambda v: product(theta, v), structure, lineax.positive_semidefinite_tag)
    tolerance = 100 * float(jnp.finfo(x.dtype).eps)  # two digits above rounding, where the iteration can stall
    solver = lineax.CG(rtol=tolerance, atol=tolerance, max_steps=10 * x.size + 50)

    def solve(v: Array) -> Array:
        scale = jnp.max(jnp.abs(v))  # lineax compares component by component: only at unit scale is `atol` relative
        scale = jnp.where(scale > 0, scale, 1)
        solution = lineax.linear_solve(operator, v / scale, solver, throw=False)
        # A stalled solve must not pass for an answer: the non-finite score is reported at the boundary.
        return jnp.where(solution.result == lineax.RESULTS.successful, solution.value * scale, jnp.nan)

    def trace(th: Params) -> Array:
        basis = jnp.eye(x.size, dtype=x.dtype)
        columns = jax.lax.stop_gradient(jax.vmap(solve)(basis))  # M solves: exact, and only if ∂Q/∂θ is asked
        return jnp.sum(columns * jax.vmap(lambda e: product(th, e))(basis))

    return Diffusion(apply=product, solve=solve, trace=trace, kind="matrix-free")


def diffusion_matrix(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """Q in full, differentiable in θ. (M, M)"""
    if process.diffusion is None and not isinstance(process.noise, NoiseProduct):
        assert process.noise is not None  # checked at the boundary
        sigma = process.noise(theta, x, t, context)
        return jnp.diag(sigma**2 / 2) if jnp.ndim(sigma) == 1 else sigma @ sigma.T / 2
    q = diffusion_at(process, theta, x, t, context)
    return jax.vmap(lambda e: q.apply(theta, e))(jnp.eye(x.size, dtype=x.dtype))


@partial(jax.jit, static_argnums=0)
def _drift_at(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    return process.drift(theta, x, t, context)


def check_finite(process: Process, theta: Params, x: Array, t: Array, context: PyTree, where: str) -> None:
    """Raise where the drift or the noise is not finite though the state is, and say at which."""
    if not bool(jnp.all(jnp.isfinite(x))):
        return
    drift, q = np.asarray(_drift_at(process, theta, x, t, context)), np.asarray(q_matrix(process, theta, x, t, context))
    for name, value in (("drift", drift), ("noise", q)):
        bad = np.flatnonzero(~np.isfinite(value.reshape(len(value), -1)).all(axis=1))
        if bad.size:
            state = np.array2string(np.asarray(x)[:8], precision=4)
            negative = np.flatnonzero(np.asarray(x) < 0)
            hint = f" (component{'s' * (len(negative) > 1)} {check.few(negative)} negative)" if negative.size else ""
            raise FloatingPointError(
                f"the {name} is not finite {where}, component {check.few(bad)}, at a finite state x = {state}{hint}. "
                "A square root, logarithm or division in it has left its range: keep the state inside (jnp.maximum, a "
                "reflecting form) or change variables."
            )


@partial(jax.jit, static_argnums=0)
def q_matrix(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """Q as its diagonal (M,) or in full (M, M)."""
    if process.diffusion is None and not isinstance(process.noise, NoiseProduct):
        sigma = process.noise(theta, x, t, context)  # type: ignore[misc]
        return sigma**2 / 2 if sigma.ndim == 1 else sigma @ sigma.T / 2
    q = diffusion_at(process, theta, x, t, context)
    return jax.vmap(lambda e: q.apply(theta, e))(jnp.eye(x.size, dtype=x.dtype))


def check_regular(process: Process, theta: Params, x: Array, t: Array, context: PyTree, where: str = "") -> None:
    """Raise if Q is singular, and name the component without noise."""
    q = np.asarray(q_matrix(process, theta, x, t, context), dtype=float)
    place = where or "at the first state"
    if not np.all(np.isfinite(q)):
        raise ValueError(f"the noise is not finite {place}; theta or the noise function is at fault.")
    if q.ndim == 1:
        weak = np.flatnonzero(q <= 0)
    else:
        scale, vectors = np.linalg.eigh((q + q.T) / 2)
        floor = q.shape[0] * np.finfo(x.dtype).eps * max(scale[-1], 0)
        weak = np.unique([np.argmax(np.abs(vectors[:, k])) for k in np.flatnonzero(scale <= floor)])
    if weak.size:
        names = ", ".join(map(str, weak[:8])) + (", …" if weak.size > 8 else "")
        raise ValueError(
            f"the diffusion is singular {place}: state component{'s' if weak.size > 1 else ''} {names} "
            f"{'have' if weak.size > 1 else 'has'} no noise of {'their' if weak.size > 1 else 'its'} own, so "
            "the score diverges. Noise must be instrumented there (a physical channel or an injected one) and "
            "appear in `noise`."
        )


def check_model(process: Process, rewards: Rewards, theta: Params, x: Array, t: Array, context: PyTree) -> None:
    """Shapes of drift, noise and rewards at the first states x (E, M), and that the diffusion is regular."""
    check.model(process, rewards, theta, x, t, context)
    one = jax.tree.map(lambda leaf: leaf[0], context)
    check_finite(process, theta, x[0], t[0], one, "at the first state")
    check_regular(process, theta, x[0], t[0], one)
