"""Functions of averages, J = F(m₁, …, m_K) with m_i = E[R_i]: contrast, fidelity, signal to noise.

By the chain rule ∇J = Σ_i ∂_iF(m) ∇m_i. One set of n trajectories gives the returns R_i and the gradients G_i of all
parts, and F'(m̂) Ḡ of them is biased in two ways, each of order 1/n: m̂ is correlated with Ḡ, and F' is curved. The
weights of trajectory j are therefore of the others (−j), and the curvature is taken off,

    F_c(m, C, n) = F(m) − tr[F''(m) C] / 2n,      w⁽ʲ⁾ = ∂_m F_c(m̂⁽⁻ʲ⁾, Ĉ⁽⁻ʲ⁾, n − 1),      Ĝ = (1/n) Σ_j w⁽ʲ⁾·G⁽ʲ⁾,

with Ĉ the covariance of the returns: what is left is of order 1/n². The value is F_c(m̂, Ĉ, n). To first order one
trajectory moves Ĝ by 1/n of Σ_i ∂_iF (G_i − Ḡ_i) + Σ_ik ∂_i∂_kF Ḡ_i (R_k − m̂_k), and by so much its sample is off the
mean: means of samples are the estimates, their errors are those of the delta method, every covariance included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.estimate import Samples
from fluctua.core.types import Array, Objective, OfMeans

FEWEST = 3
"""Trajectories: the covariance of those that are left needs two."""


def of_means(function: Callable[..., Array], *objectives: Objective) -> OfMeans:
    """J = F(E[R₁], …, E[R_K]), for `gradient`, `ppgt` and everything that trains with them.

    Unbiased to order 1/n from n trajectories, with the error of the delta method. K parts cost K sweeps over the same
    trajectories; an instrument is asked for them once.

    Args:
        function: F, of K numbers, differentiable by JAX.
        *objectives: what each of the K means is of.

    Returns: an `OfMeans`, in the place of an `Objective`.

    >>> of_means(lambda m, m2: m**2 / (m2 - m**2), objective, objective).parts == (objective, objective)
    True

    """
    if not objectives:
        raise ValueError("`of_means` needs the objectives whose means F is of; got none.")
    for objective in objectives:
        check.objective(objective)
    numbers = [jax.ShapeDtypeStruct((), jnp.result_type(float))] * len(objectives)
    try:
        shape = getattr(jax.eval_shape(function, *numbers), "shape", None)
    except TypeError as error:
        raise TypeError(f"F is called with {len(numbers)} numbers, one for each objective: {error}.") from None
    if shape != ():
        raise ValueError(f"F must return one number, shape (); got shape {shape}.")
    return OfMeans(function, objectives)


def combined(function: Callable[..., Array], parts: Sequence[Samples]) -> Samples:
    """Samples of F(E[R₁], …, E[R_K]) from those of its parts, of the same trajectories in the same order.

    Args:
        function: F, of K numbers.
        parts: K `Samples` of E trajectories, E ≥ 3.

    Returns: `Samples` whose means are the gradient and the value, and whose spread is their error.

    """
    count = parts[0].returns.shape[0]
    if count < FEWEST:
        raise ValueError(f"a function of means needs {FEWEST} trajectories at least; got {count}.")
    samples = _combined(function, tuple(parts))
    if not bool(jnp.isfinite(samples.returns).all()):
        means = [float(part.returns.mean()) for part in parts]
        raise FloatingPointError(
            f"F or its derivatives are not finite at the means {means} of {count} trajectories, or at those of all but "
            "one: the function has left its range (a square root or logarithm of a difference of means, say)."
        )
    return samples


def values_of(function: Callable[..., Array], returns: Array) -> Array:
    """Samples of the value alone, (E, K) -> (E,): their mean is F_c(m̂, Ĉ, n)."""
    count = returns.shape[0]
    mean, covariance = returns.mean(axis=0), jnp.atleast_2d(jnp.cov(returns, rowvar=False))
    f = _of_vector(function)
    return _corrected(f, mean, covariance, count) + (returns - mean) @ jax.grad(f)(mean)


@partial(jax.jit, static_argnums=0)
def _combined(function: Callable[..., Array], parts: tuple[Samples, ...]) -> Samples:
    f = _of_vector(function)
    returns = jnp.stack([part.returns for part in parts], axis=1)  # (E, K)
    rows = [jax.vmap(lambda g: ravel_pytree(g)[0])(part.gradient) for part in parts]
    gradients = jnp.stack(rows, axis=1)  # (E, K, P)
    n = returns.shape[0]
    mean, off = returns.mean(axis=0), returns - returns.mean(axis=0)
    total = off.T @ off

    def weights(off: Array) -> Array:
        """∂F_c of all trajectories but the one that is `off` (K,) from the mean."""
        others = (total - n / (n - 1) * jnp.outer(off, off)) / (n - 2)
        return jax.grad(lambda m: _corrected(f, m, others, n - 1))(mean - off / (n - 1))

    each = jnp.einsum("ek,ekp->ep", jax.vmap(weights)(off), gradients)
    each = each + off @ (jax.hessian(f)(mean) @ gradients.mean(axis=0))  # sums to zero: the spread of m̂
    _, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], parts[0].gradient))
    return Samples(jax.vmap(unravel)(each.astype(gradients.dtype)), values_of(function, returns))


def _of_vector(function: Callable[..., Array]) -> Callable[[Array], Array]:
    return lambda m: jnp.asarray(function(*m), m.dtype)


def _corrected(f: Callable[[Array], Array], mean: Array, covariance: Array, count: int) -> Array:
    """F_c: F without the bias that its curvature and the scatter of m̂ make."""
    return f(mean) - jnp.sum(jax.hessian(f)(mean) * covariance) / (2 * count)
