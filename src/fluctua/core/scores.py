"""The score U = ∂θ ln p(x'|x) of one Euler–Maruyama transition.

Given x, the next state is Gaussian: x' ~ N(x + μΔt, 2QΔt). With the residual r = x' − x − μΔt and
y = Q⁻¹r, the logarithm of its density changes with θ as

    d ln p = −½ Tr[Q⁻¹ dQ] + yᵀ dQ y / (4Δt) − yᵀ dr / (2Δt).

Each score below is the θ-gradient of the scalar on the right with Q⁻¹ and y held fixed: one reverse sweep
through the user's drift and noise, whatever the number of parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fluctua.core.diffusion import diffusion_at
from fluctua.core.types import Array, Params, Process, Step


def residual(process: Process, theta: Params, step: Step) -> Array:
    """r = x' − x − μ(x, t)Δt, the kick that the noise gave. (M,)"""
    return step.x_next - step.x - process.drift(theta, step.x, step.t, step.context) * step.dt


def drift_score(process: Process, theta: Params, step: Step) -> Params:
    """U = ½ rᵀ Q⁻¹ ∂μ/∂θ (Eq. 11), for parameters that enter the drift only.

    Parameters that also enter the noise get a wrong gradient here; `full_score` is right for both.

    >>> drift_score(process, theta, Step(x, x_next, t=0.0, dt=1e-3))
    """
    q = diffusion_at(process, theta, step.x, step.t, step.context)
    half_y = q.solve(residual(process, theta, step)) / 2
    return jax.grad(lambda th: half_y @ process.drift(th, step.x, step.t, step.context))(theta)


def full_score(
    process: Process, theta: Params, step: Step, shift: Callable[[Params], tuple[Array, Array]] | None = None
) -> Params:
    """U = −½ Tr[Q⁻¹ ∂Q] + rᵀQ⁻¹(½ ∂μ + ∂Q Q⁻¹ r / 4Δt) (Eq. 21), drift and noise both.

    Costs nothing more than `drift_score` when the noise does not depend on θ: the compiler drops the terms.

    `shift(theta) -> (δx, δx')` moves the two ends of the step with θ. It is zero in value and carries only
    a derivative: the way a start that depends on θ enters (see `fluctua.core.start.Reparameterised`).
    """
    if shift is None:
        ends = lambda th: (step.x, step.x_next)
        moved = None
    else:
        ends = lambda th: tuple(end + d for end, d in zip(step[:2], shift(th), strict=True))
        moved = lambda th: ends(th)[0]

    def r_of(th: Params) -> Array:
        x, x_next = ends(th)
        return x_next - x - process.drift(th, x, step.t, step.context) * step.dt

    q = diffusion_at(process, theta, step.x, step.t, step.context, moved)
    y = q.solve(r_of(theta))  # of `theta`, not of `th`: fixed where the gradient is taken, differentiable in the states

    def log_density(th: Params) -> Array:  # its gradient at theta is exact; its value means nothing
        quadratic = y @ q.apply(th, y) / (4 * step.dt)
        return -q.trace(th) / 2 + quadratic - y @ r_of(th) / (2 * step.dt)

    return jax.tree.map(jnp.asarray, jax.grad(log_density)(theta))
