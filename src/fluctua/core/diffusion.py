"""The diffusion Q = σσᵀ/2 in its three forms: diagonal, dense, and matrix-free.

Where a component has no noise of its own, or fewer Wiener processes drive the state than it has
components, Q⁻¹ is the inverse on the range of σ: the score exists where ∂θμ and ∂θQ lie in that
range. Elsewhere it is not a number, which `check_along` puts into words.

A form has three operations at one state: products Q(θ')v, differentiable in the parameters,
the solve Q⁻¹v, and Tr[Q⁻¹Q(θ')] with Q⁻¹ held fixed, whose θ'-gradient is the trace term of the
full score.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy import linalg

from fluctua.core import arrays, check, dependence
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.host import programs
from fluctua.core.objective import Rewards
from fluctua.core.process import AnyProcess, NoiseProduct, Process
from fluctua.core.text import names
from fluctua.core.trajectories import Trajectories


class Diffusion(NamedTuple):
    """Q at one state. `theta` arguments are differentiable, the rest is fixed at construction.

    apply: (theta, v) -> Q(theta) v.
    solve: v -> Q⁻¹ v.
    trace: theta -> Tr[Q⁻¹ Q(theta)], Q⁻¹ fixed.
    outside: v -> the part of v that no noise reaches; exactly 0 where there is none.
    kind: "diagonal", "dense" or "matrix-free".
    """

    apply: Callable[[Params, Array], Array]
    solve: Callable[[Array], Array]
    trace: Callable[[Params], Array]
    outside: Callable[[Array], Array]
    kind: str


def diffusion_at(
    process: Process,
    theta: Params,
    x: Array,
    t: Array,
    context: PyTree,
    moved: Callable | None = None,
) -> Diffusion:
    """Choose the form by what the process gives, and the inverse by the form.

    `moved(theta)` is the state as a function of the parameters, for starts that depend on them; it
    equals `x` at `theta`. Without it the state is a measured number.
    """
    state_at = (lambda th: x) if moved is None else moved
    diffusion = process.diffusion
    if diffusion is not None:

        def product(th, v):
            return diffusion(th, state_at(th), t, context, v)

        return _matrix_free(
            product, theta, x, process.noiseless, isinstance(process.diffusion, _Deficient)
        )
    if isinstance(process.noise, NoiseProduct):
        noise_product, width = process.noise

        def q_product(th: Params, v: Array) -> Array:
            def kick(dw):
                return noise_product(th, state_at(th), t, context, dw)

            (back,) = jax.linear_transpose(kick, jax.ShapeDtypeStruct((width,), x.dtype))(v)
            return kick(back) / 2

        return _matrix_free(
            q_product,
            theta,
            x,
            process.noiseless,
            _leaves_directions(process, theta, x, t, context),
        )

    assert process.noise is not None  # checked at the boundary
    noise = process.noise

    def sigma(th):
        return noise(th, state_at(th), t, context)

    if jnp.ndim(sigma(theta)) == 1:
        return _diagonal(sigma, theta, process.noiseless)

    def at_state(state, theta):
        return noise(theta, *state)

    constant = moved is None and not dependence.depends(at_state, (x, t, context), theta, on=0)
    return _dense(sigma, theta, constant, process.noiseless)


def _mask(noiseless: tuple[int, ...], size: int) -> np.ndarray:
    return np.isin(np.arange(size), noiseless)


def _diagonal(
    sigma: Callable[[Params], Array], theta: Params, noiseless: tuple[int, ...]
) -> Diffusion:
    def evaluate_q(th):
        return sigma(th) ** 2 / 2

    q = evaluate_q(theta)
    if not noiseless:
        return Diffusion(
            apply=lambda th, v: evaluate_q(th) * v,
            solve=lambda v: v / q,
            trace=lambda th: jnp.sum(evaluate_q(th) / q),
            outside=jnp.zeros_like,
            kind="diagonal",
        )
    # a noiseless component may have noise here; others always have, or no score
    still = _mask(noiseless, q.size) & ~(q > 0)
    safe = jnp.where(still, 1, q)
    return Diffusion(
        apply=lambda th, v: evaluate_q(th) * v,
        solve=lambda v: jnp.where(still, 0, v / safe),
        trace=lambda th: jnp.sum(jnp.where(still, 0, evaluate_q(th) / safe)),
        outside=lambda v: jnp.where(still, v, 0),
        kind="diagonal",
    )


def _dense(
    sigma: Callable[[Params], Array], theta: Params, constant: bool, noiseless: tuple[int, ...]
) -> Diffusion:
    """Q of a matrix σ (M, W).

    constant: σ is the same for all trajectories and times, so that Q⁻¹ is one matrix, and its use
        one
    product.
    """

    def evaluate_q(th: Params) -> Array:
        s = sigma(th)
        return s @ s.T / 2

    components, wieners = jnp.shape(sigma(theta))
    mask = _mask(noiseless, components)

    def outside(v):
        return jnp.where(mask, v, 0)

    if wieners < components:  # some directions have no noise: the inverse is that on the others
        noise_range = _range(sigma(theta))
        inverse = noise_range.inverse
        if wieners < components - len(noiseless):
            outside = noise_range.outside
        else:  # all but the noiseless components have noise, here as at the first state
            full_rank = noise_range.rank == components - len(noiseless)
            leaks = jnp.any(mask[:, None] & (sigma(theta) != 0))
            inverse = jnp.where(full_rank & ~leaks, inverse, jnp.nan)

        def solve(v):
            return inverse @ v
    else:
        q = evaluate_q(theta)
        factor, lower = linalg.cho_factor(q + jnp.diag(mask) if noiseless else q)
        pivots = jnp.diagonal(factor) ** 2
        # Q and its factor carry (M + W + 1) eps/2 of its diagonal (Higham, Accuracy and Stability,
        # theorem 10.3), and the pivot of a row that is a multiple of another four times that: what
        # is below is no noise
        rounding = 2 * (components + wieners + 1) * jnp.finfo(q.dtype).eps
        regular = jnp.all(mask | (pivots > rounding * jnp.diagonal(q)))
        if noiseless:  # here as at the first state
            regular &= ~jnp.any(mask[:, None] & (q != 0))
        factor = jnp.where(regular, factor, jnp.nan)
        inverse = linalg.cho_solve((factor, lower), jnp.eye(components, dtype=factor.dtype))
        inverse = jnp.where(mask[:, None], 0, inverse) if noiseless else inverse
        solve = (
            (lambda v: inverse @ v)
            if constant or noiseless
            else (lambda v: linalg.cho_solve((factor, lower), v))
        )
    return Diffusion(
        apply=lambda th, v: evaluate_q(th) @ v,
        solve=solve,
        trace=lambda th: jnp.sum(inverse * evaluate_q(th)),
        outside=outside,
        kind="dense",
    )


class _Range(NamedTuple):
    """The range of σ (M, W), W < M.

    directions: orthogonal (M, W), those without noise zero. inverse: (σσᵀ/2)⁺ (M, M). rank: of σ.
    """

    directions: Array
    inverse: Array
    rank: Array

    def outside(self, v: Array) -> Array:
        """Part of v (M,) outside of the range, beyond the rounding of the projection."""
        part = v - self.directions @ (self.directions.T @ v)
        rounding = 100 * v.size * jnp.finfo(v.dtype).eps * jnp.max(jnp.abs(v))
        return jnp.where(jnp.abs(part) <= rounding, 0, part)


def _range(sigma: Array) -> _Range:
    sigma = jax.lax.stop_gradient(sigma)
    directions, size, _ = jnp.linalg.svd(sigma, full_matrices=False)
    there = size > sigma.shape[0] * jnp.finfo(sigma.dtype).eps * jnp.max(size)
    inverse = (directions * jnp.where(there, 2 / jnp.where(there, size, 1) ** 2, 0)) @ directions.T
    return _Range(directions * there, inverse, jnp.sum(there))


@dataclass(frozen=True)
class _Deficient:
    """A product with Q or σ whose noise leaves directions without any that are no components."""

    product: Callable[..., Array]

    def __call__(self, *arguments: Any) -> Array:
        return self.product(*arguments)


def _matrix_free(
    product: Callable[[Params, Array], Array],
    theta: Params,
    x: Array,
    noiseless: tuple[int, ...],
    deficient: bool,
) -> Diffusion:
    """Q by its products alone. deficient: some directions without noise are not components."""
    import lineax  # on demand: its import takes 0.1 s

    mask = _mask(noiseless, x.size)
    structure = jax.ShapeDtypeStruct(x.shape, x.dtype)
    operator = lineax.FunctionLinearOperator(
        lambda v: product(theta, v), structure, lineax.positive_semidefinite_tag
    )
    # two digits above rounding, where the iteration can stall
    tolerance = 100 * float(jnp.finfo(x.dtype).eps)
    solver = lineax.CG(rtol=tolerance, atol=tolerance, max_steps=10 * x.size + 50)
    # noiseless components have no noise here either
    regular = jnp.all(product(theta, jnp.asarray(mask, x.dtype)) == 0) if noiseless else True

    def solve(v: Array) -> Array:
        v = jnp.where(mask, 0, v) if noiseless else v
        # lineax compares component by component: only at unit scale is `atol` relative
        scale = jnp.max(jnp.abs(v))
        scale = jnp.where(scale > 0, scale, 1)
        solution = lineax.linear_solve(operator, v / scale, solver, throw=False)
        # A stalled solve must not pass for an answer: the non-finite score is reported at the
        # boundary.
        good = (solution.result == lineax.RESULTS.successful) & regular
        return jnp.where(good, solution.value * scale, jnp.nan)

    def trace(th: Params) -> Array:
        basis = jnp.eye(x.size, dtype=x.dtype)
        # M solves: exact, and only if ∂Q/∂θ is asked
        columns = jax.lax.stop_gradient(jax.vmap(solve)(basis))
        return jnp.sum(columns * jax.vmap(lambda e: product(th, e))(basis))

    def outside(v: Array) -> Array:
        if not deficient:
            return jnp.where(mask, v, 0)
        part = v - product(theta, solve(v))  # not a number, and not 0, where no solution is found
        return jnp.where(jnp.abs(part) <= 10 * x.size * tolerance * jnp.max(jnp.abs(v)), 0, part)

    return Diffusion(apply=product, solve=solve, trace=trace, outside=outside, kind="matrix-free")


# -------------------------------------------------------------------------- where there is no score


def lacks_score(
    process: Process, theta: Params, x: Array, t: Array, context: PyTree
) -> Array | None:
    """Whether θ moves the state where no noise could: ∂θμ or ∂θQ leaves the range of σ (Girsanov).

    Of the diffusion at this very state, time and context. None where the operations of drift and
    noise never let θ there, which costs nothing; most processes are such.
    """
    which = _find_reach(process, *map(check.tree_signature, (theta, x, t, context)))
    if not which.drift and not which.noise:
        return None
    diffusion = diffusion_at(process, theta, x, t, context)
    flat, unravel = ravel_pytree(theta)

    def drift(v):
        return process.drift(unravel(v), x, t, context)

    def noise(v):
        return diffusion_matrix(process, unravel(v), x, t, context)

    lost = jnp.zeros((), bool)
    for there, f in ((which.drift, drift), (which.noise, noise)):
        if there:
            slopes = _slopes_in(f, flat, which.rotated).reshape(x.size, -1)
            lost |= jnp.any(jax.vmap(diffusion.outside, in_axes=1)(slopes) != 0)
    return lost


def _slopes_in(f: Callable[[Array], Array], flat: Array, each: bool) -> Array:
    """∂f/∂θ of each parameter, or along one direction of θ in which nothing cancels.

    One direction is as good where zeros are exact.
    """
    if each:
        fewer = flat.size <= jax.eval_shape(f, flat).size
        return (jax.jacfwd if fewer else jax.jacrev)(f)(flat)
    direction = jnp.asarray(np.random.default_rng(2).uniform(1, 2, flat.size), flat.dtype)
    return jax.jvp(f, (flat,), (direction,))[1]


class _Reach(NamedTuple):
    """Whether θ may enter the drift and Q where there is no noise.

    rotated: in directions that are not components.
    """

    drift: bool
    noise: bool
    rotated: bool


@functools.lru_cache(maxsize=256)
def _find_reach(process: Process, *signatures: Any) -> _Reach:
    """Find where θ may enter, by the operations of drift and noise.

    signatures: of theta, x, t and context.
    """
    theta, x, t, context = map(check.abstract_tree, signatures)
    rotated = _leaves_directions(process, theta, x, t, context)
    if not process.noiseless and not rotated:
        return _Reach(drift=False, noise=False, rotated=False)
    quiet = _mask(() if rotated else process.noiseless, x.size) | rotated

    def enters(f):
        return bool(
            dependence.find_slopes(functools.partial(f, process), theta, x, t, context)[quiet].any()
        )

    return _Reach(
        drift=enters(_drift),
        noise=not has_diagonal_noise(process, theta, x, t, context) and enters(diffusion_matrix),
        rotated=rotated,
    )


def _drift(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    return process.drift(theta, x, t, context)


def _leaves_directions(
    process: Process, theta: Params, x: Array, t: Array, context: PyTree
) -> bool:
    """Whether some directions without noise are not components, by the form of the noise."""
    if process.diffusion is not None:
        return isinstance(process.diffusion, _Deficient)
    if isinstance(process.noise, NoiseProduct):
        product, width = process.noise
        return isinstance(product, _Deficient) or width < x.size - len(process.noiseless)
    assert process.noise is not None  # checked at the boundary
    return jax.eval_shape(process.noise, theta, x, t, context).shape[-1] < x.size - len(
        process.noiseless
    )


def has_fewer_noises(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> bool:
    """Whether fewer Wiener processes than components drive the state, by the shape of its noise."""
    if (
        process.diffusion is not None
        or isinstance(process.noise, NoiseProduct)
        or process.noise is None
    ):
        return False
    return jax.eval_shape(process.noise, theta, x, t, context).shape[-1] < x.size


def diffusion_matrix(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """Q in full, differentiable in θ. (M, M)"""
    if process.diffusion is None and not isinstance(process.noise, NoiseProduct):
        assert process.noise is not None  # checked at the boundary
        sigma = process.noise(theta, x, t, context)
        return jnp.diag(sigma**2 / 2) if jnp.ndim(sigma) == 1 else sigma @ sigma.T / 2
    q = diffusion_at(process, theta, x, t, context)
    return jax.vmap(lambda e: q.apply(theta, e))(jnp.eye(x.size, dtype=x.dtype))


@functools.partial(arrays.jit, static_argnums=0)
def _drift_at(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    return process.drift(theta, x, t, context)


def check_finite(
    process: Process, theta: Params, x: Array, t: Array, context: PyTree, where: str
) -> None:
    """Refuse a drift or a noise that is not finite at a finite state. where: for the message."""
    if not np.isfinite(np.asarray(x)).all():
        return
    drift = np.asarray(_drift_at(process, theta, x, t, context))
    q = np.asarray(q_matrix(process, theta, x, t, context))
    for name, value in (("drift", drift), ("noise", q)):
        bad = np.flatnonzero(~np.isfinite(value.reshape(len(value), -1)).all(axis=1))
        if bad.size:
            state = np.array2string(np.asarray(x)[:8], precision=4)
            negative = np.flatnonzero(np.asarray(x) < 0)
            hint = (
                f" (component{'s' * (len(negative) > 1)} {check.list_indices(negative)} negative)"
                if negative.size
                else ""
            )
            raise FloatingPointError(
                f"the {name} is not finite {where}, component {check.list_indices(bad)}, at a "
                f"finite state x = {state}{hint}. A square root, logarithm or division in it has "
                "left its range: keep the state inside (jnp.maximum, a reflecting form) or "
                "change variables."
            )


@functools.partial(arrays.jit, static_argnums=0)
def q_matrix(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """Q as its diagonal (M,) or in full (M, M)."""
    if process.diffusion is None and not isinstance(process.noise, NoiseProduct):
        sigma = process.noise(theta, x, t, context)  # type: ignore[misc]
        return sigma**2 / 2 if sigma.ndim == 1 else sigma @ sigma.T / 2
    q = diffusion_at(process, theta, x, t, context)
    return jax.vmap(lambda e: q.apply(theta, e))(jnp.eye(x.size, dtype=x.dtype))


def _row_sizes(q: np.ndarray) -> np.ndarray:
    """The largest element of each row of Q, given as its diagonal (M,) or whole. (M,)"""
    return np.abs(q.reshape(len(q), -1)).max(axis=1)


def _null_space(q: np.ndarray, precision: float) -> np.ndarray:
    """Directions of the state that have no noise, from Q (M,) or (M, M). (M, K)"""
    if q.ndim == 1:
        return np.eye(q.size)[:, q <= 0]
    scale, vectors = np.linalg.eigh((q + q.T) / 2)
    return vectors[:, scale <= q.shape[0] * precision * max(scale[-1], 0)]


@functools.partial(arrays.jit, static_argnums=0)
def _slopes(
    process: Process, theta: Params, x: Array, t: Array, context: PyTree
) -> tuple[Array, Array]:
    """∂μ/∂θ (M, P) and ∂Q/∂θ (M, M, P)."""
    flat, unravel = ravel_pytree(theta)

    def drift(v):
        return process.drift(unravel(v), x, t, context)

    return jax.jacfwd(drift)(flat), jax.jacfwd(
        lambda v: diffusion_matrix(process, unravel(v), x, t, context)
    )(flat)


def check_regular(
    process: AnyProcess, theta: Params, x: Array, t: Array, context: PyTree, where: str = ""
) -> None:
    """Refuse a state without a score: ∂θμ or ∂θQ along a direction without noise (Girsanov)."""
    place = where or "at the first state"
    if not isinstance(process, Process):
        process.check(theta, x, t, context, place)
        return
    q = np.asarray(q_matrix(process, theta, x, t, context), dtype=float)
    if not np.all(np.isfinite(q)):
        raise ValueError(
            f"the noise is not finite {place}; theta or the noise function is at fault."
        )
    precision = float(np.finfo(x.dtype).eps)
    quiet = _row_sizes(q) == 0
    across = _null_space(q, precision)
    if not across.size:
        return
    across = across[:, ~np.any(across[quiet] != 0, axis=0)]
    drift, noise = (np.asarray(v, float) for v in _slopes(process, theta, x, t, context))
    for what, slopes in (("drift", drift[:, None]), ("noise", noise)):  # (M, ·, P)
        lost = np.where(quiet[:, None, None], slopes, 0)  # zeros of a component are exact
        part = np.einsum("ik,jk,jcp->icp", across, across, slopes)
        rounding = 100 * len(q) * precision * np.abs(slopes).max(axis=(0, 1), initial=0)
        lost = lost + np.where(np.abs(part) > rounding, part, 0)
        if np.any(lost != 0):
            i, _, p = np.unravel_index(np.argmax(np.abs(lost)), lost.shape)
            raise ValueError(
                f"the diffusion is singular {place}: state component {i} has no noise of its own, "
                f"and its {what} depends on `{names(theta)[p]}`, so there is no score for that "
                "parameter. Noise must be instrumented there (a physical channel or an injected "
                "one) and appear in `noise`; or change the state so that the parameter enters a "
                "component with noise."
            )


def check_along(process: AnyProcess, theta: Params, trajectory: Trajectories, number: int) -> None:
    """Refuse a trajectory with a state where the score does not exist, and name the first one.

    trajectory: one alone, x (1, T+1, M). number: of the trajectory, for the message.
    """
    t = np.asarray(trajectory.t)
    x = jnp.asarray(trajectory.x[0])
    context = jax.tree.map(lambda leaf: leaf[0], trajectory.context)

    def at(n):
        return f"on trajectory {number} at time index {n}"

    smooth: Any = process if isinstance(process, Process) else getattr(process, "diffusion", None)
    if not isinstance(process, Process):
        for n in range(len(t) - 1):
            check_regular(process, theta, x[n], t[n], context, at(n))
    check_steps = getattr(process, "check_steps", None)
    if check_steps is not None:  # a chain: its steps may lack a score, its states cannot
        check_steps(theta, trajectory, number)
    if not isinstance(smooth, Process):
        return
    irregular = np.asarray(_find_irregular(smooth, theta, x[:-1], jnp.asarray(t)[:-1], context))
    if not irregular.any():
        return
    n = int(np.argmax(irregular))
    shown = "".join(
        f", context{jax.tree_util.keystr(path)} = {_format_value(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(context)
    )
    where = f"{at(n)} (t = {t[n]:g}, x = {_format_value(x[n])}{shown})"
    check_regular(smooth, theta, x[n], t[n], context, where)
    sizes = _row_sizes(np.asarray(q_matrix(smooth, theta, x[n], t[n], context), float))
    noiseless = _mask(smooth.noiseless, len(sizes))
    changed = np.flatnonzero(noiseless != (sizes == 0))
    if changed.size:
        i = int(changed[0])
        before, now = ("no noise", "some") if noiseless[i] else ("noise", "none")
        raise ValueError(
            f"the noise of state component {i} comes and goes: there is {before} at the first "
            f"state, and {now} {where}. A score needs components that have noise always or never. "
            "Add noise that does not vanish."
        )
    raise ValueError(
        f"the noise matrix σ is singular {where}: it has as many columns as there are components, "
        "and one direction of the state has no noise. Give the W independent columns alone, (M, W)."
    )


def _format_value(value: Any) -> str:
    return (
        np.array2string(np.asarray(value, float).ravel()[:8], precision=4)
        if np.ndim(value)
        else f"{float(value):g}"
    )


@functools.partial(arrays.jit, static_argnums=0)
def _find_irregular(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """Whether there is no score, at states x (T, M). (T,)"""

    def at(x: Array, t: Array) -> Array:
        q = diffusion_at(process, theta, x, t, context)
        lost = lacks_score(process, theta, x, t, context)
        singular = ~jnp.all(jnp.isfinite(q.solve(q.apply(theta, jnp.ones_like(x)))))
        return singular if lost is None else singular | lost

    return jax.vmap(at)(x, t)


def _nearby_states(x: Array) -> list[Array]:
    """States off the first one, in which nothing vanishes by chance."""
    return [
        x + jnp.asarray((1 + np.abs(np.asarray(x))) * off / 2, x.dtype)
        for off in _draw_offsets(x.size)
    ]


@functools.cache
def _draw_offsets(size: int) -> np.ndarray:
    """Three directions of a state. (3, M)"""
    rng = np.random.default_rng(0)
    return np.stack([rng.normal(size=size) for _ in range(3)])


def find_noiseless(
    process: AnyProcess, theta: Params, x: Array, t: Array, context: PyTree
) -> AnyProcess:
    """The process with its noiseless components named, checked at the first state and beside it.

    A component is noiseless where its noise vanishes at all of these states. One that has none at
    the first state alone would have a score that comes and goes: it is refused.
    """
    if not isinstance(process, Process):
        return process.check(theta, x, t, context, "at the first state")
    check_regular(process, theta, x, t, context)
    q = np.asarray(q_matrix(process, theta, x, t, context), float)
    noiseless = _row_sizes(q) == 0
    directions = _null_space(q, np.finfo(x.dtype).eps).shape[1]
    _check_step(process, noiseless, directions)
    if directions > noiseless.sum():
        process = _mark_deficient(process)
    if not noiseless.any():
        return process
    for other in _nearby_states(x):
        q = np.asarray(q_matrix(process, theta, other, t, context), float)
        if (
            not np.isfinite(q).all()
            or not np.isfinite(np.asarray(_drift_at(process, theta, other, t, context))).all()
        ):
            continue
        comes = np.flatnonzero(noiseless & (_row_sizes(q) > 0))
        if comes.size:
            raise ValueError(
                f"the diffusion is singular at the first state: state component {comes[0]} has no "
                "noise there, and has some elsewhere. Start where it has, or instrument noise "
                "that does not vanish."
            )
        check_regular(
            process,
            theta,
            other,
            t,
            context,
            f"near the first state, at x = {np.round(np.asarray(other, float), 3).tolist()}",
        )
    return process._replace(noiseless=tuple(np.flatnonzero(noiseless).tolist()))


def _mark_deficient(process: Process) -> Process:
    """The process, with a mark on a product whose rank cannot be read off its form."""
    if process.diffusion is not None:
        return process._replace(diffusion=_Deficient(process.diffusion))
    if isinstance(process.noise, NoiseProduct):
        return process._replace(
            noise=process.noise._replace(product=_Deficient(process.noise.product))
        )
    return process


def _check_step(process: Process, noiseless: np.ndarray, directions: int) -> None:
    """Refuse an integrator other than Euler's where noiseless components are not named.

    Such a step must leave θ nothing without noise: noiseless components are named, others have
    noise.
    noiseless: (M,). directions: number of those without noise, of any kind.
    """
    if process.integrator == "euler":
        return
    there = tuple(np.flatnonzero(noiseless).tolist())
    if tuple(sorted(process.noiseless)) != there:
        raise ValueError(
            f"state components {list(there)} have no noise of their own, and `Process.noiseless` "
            f"names {list(process.noiseless)}: with integrator={process.integrator!r} the map of "
            f"a step depends on them. Write Process(..., noiseless={there}, integrator=...)."
        )
    if directions > len(there):
        raise ValueError(
            f"the noise leaves {directions} directions of the state without any, which are not "
            f"components of their own: with integrator={process.integrator!r} they would move "
            "with θ, and there is no score. Use Euler's step, or a state in which "
            "they are components."
        )


def are_singular(
    process: Process, new: Params, old: Params, x: Array, t: Array, context: PyTree
) -> Array | None:
    """Whether steps at `old` have no density against those at `new` (see `check_equivalent`).

    None where the operations of drift and noise never let θ there.
    """
    which = _find_reach(process, *map(check.tree_signature, (new, x, t, context)))
    rounding = 100 * x.size * jnp.finfo(x.dtype).eps
    apart = []
    if dependence.depends(functools.partial(_kick_sizes, process), new, x, t, context, on=0):
        sizes = _kick_sizes(process, new, x, t, context)
        change = jnp.abs(sizes - _kick_sizes(process, old, x, t, context))
        apart.append(change > rounding * jnp.max(jnp.abs(sizes)))
    if which.drift:
        drifts = jnp.stack([process.drift(theta, x, t, context) for theta in (new, old)])
        lost = diffusion_at(process, new, x, t, context).outside(drifts[0] - drifts[1])
        scale = jnp.max(jnp.abs(drifts), axis=0)
        apart.append(jnp.abs(lost) > rounding * (jnp.max(scale) if which.rotated else scale))
    return jnp.any(jnp.stack(apart)) if apart else None


def _kick_sizes(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """Q times a vector of ones: another number in each component where Q is another. (M,)"""
    return diffusion_at(process, theta, x, t, context).apply(theta, jnp.ones_like(x))


def check_equivalent(
    process: Process, new: Params, old: Params, x: Array, t: Array, context: PyTree, where: str
) -> None:
    """Refuse parameters whose paths have no density against each other (Girsanov).

    There is one if Q is the same at `new` and `old`, and the change of the drift lies in its range.
    """
    q_new, q_old = (
        np.asarray(q_matrix(process, theta, x, t, context), float) for theta in (new, old)
    )
    rounding = 100 * len(q_new) * float(np.finfo(x.dtype).eps)
    if np.abs(q_new - q_old).max() > rounding * np.abs(q_new).max():

        def q_at(theta):
            return q_matrix(process, theta, x, t, context)

        raise ValueError(
            f"the noise differs between the two parameters {where}, by "
            f"`{_find_responsible(q_at, new, old)}`: the paths of one have no density against "
            "those of the other (in continuous time the noise of a path is known exactly), so "
            "they cannot be reweighted. Keep the parameters of the noise as they were, or take "
            "new trajectories."
        )
    without = _null_space(q_new, np.finfo(x.dtype).eps)

    def drift_at(theta):
        return _drift_at(process, theta, x, t, context)

    change = np.asarray(drift_at(new), float) - np.asarray(drift_at(old), float)
    lost = without @ (without.T @ change)
    scale = np.maximum(*(np.abs(np.asarray(drift_at(theta), float)) for theta in (new, old)))
    # a component without noise has a unit of its own
    scale = np.where(_row_sizes(q_new) == 0, scale, scale.max())
    if np.any(np.abs(lost) > rounding * scale):

        def part(theta):
            return without.T @ np.asarray(drift_at(theta), float)

        raise ValueError(
            f"state component {np.argmax(np.abs(lost))} has no noise of its own, and its drift "
            f"differs between the two parameters {where}, by "
            f"`{_find_responsible(part, new, old)}`: what it did at one it never does at the "
            "other, so these trajectories cannot be reweighted. Keep that parameter as it was, "
            "or instrument noise there."
        )


def _find_responsible(f: Callable[[Params], Any], new: Params, old: Params) -> str:
    """The name of the parameter whose change from `old` to `new` changes f most."""
    flat, unravel = ravel_pytree(new)
    before = np.asarray(f(old), float)
    base = np.asarray(ravel_pytree(old)[0])
    moved = [p for p in range(base.size) if base[p] != flat[p]]
    far = [
        np.abs(np.asarray(f(unravel(jnp.asarray(base).at[p].set(flat[p]))), float) - before).max()
        for p in moved
    ]
    return names(new)[moved[int(np.argmax(far))]]


def check_model(
    process: AnyProcess, rewards: Rewards, theta: Params, x: Array, t: Array, context: PyTree
) -> AnyProcess:
    """The process with its noiseless components named, after all checks at the first states.

    Shapes of drift, noise and rewards at x (E, M), and that the score exists.
    """
    if x.shape[0] > 1:  # compiled for one trajectory, whatever their number
        x, context = check.take_first_row((x, context))
    code = (process, rewards, check.tree_signature(theta), check.tree_signature((x, t, context)))
    if code not in _SHAPES:
        one = check.take_first((x, t, context))
        check.model(process, rewards, theta, *one)
        _SHAPES[code] = isinstance(process, Process) and has_diagonal_noise(process, theta, *one)
        if len(_SHAPES) > MAX_SHAPES:
            _SHAPES.pop(next(iter(_SHAPES)))
    if _SHAPES[code]:
        assert isinstance(process, Process)
        without_noise = check_on_host(process, theta, x, t, context)
        if without_noise is not None:
            return _name_noiseless(process, without_noise)
        *noiseless, regular = arrays.on_host(check_quickly(process, theta, x, t, context)).tolist()
        if regular:
            return _name_noiseless(process, np.asarray(noiseless, bool))
    check.parameters(theta)
    x, t, one = check.take_first((x, t, context))
    if isinstance(process, Process):
        check_finite(process, theta, x, t, one, "at the first state")
    return find_noiseless(process, theta, x, t, one)


def _name_noiseless(process: Process, noiseless: np.ndarray) -> Process:
    """The process with its noiseless components named. noiseless: (M,)"""
    _check_step(process, noiseless, int(noiseless.sum()))
    if not noiseless.any():
        return process
    return process._replace(noiseless=tuple(np.flatnonzero(noiseless).tolist()))


_SHAPES: dict[Any, bool] = {}
"""Whether `check_quickly` serves a model, for the latest models whose shapes are right."""

MAX_SHAPES = 256


MAX_DENSE_STATE = 8
"""Components up to which `check_quickly` serves a noise that is a matrix."""


def has_diagonal_noise(
    process: Process, theta: Params, x: Array, t: Array, context: PyTree
) -> bool:
    """Whether the noise is a vector (M,)."""
    return _count_noise_axes(process, theta, x, t, context) == 1


def can_check_quickly(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> bool:
    """Whether `check_quickly` serves the noise: a vector (M,), or a small matrix (M, W)."""
    axes = _count_noise_axes(process, theta, x, t, context)
    return axes == 1 or (axes == 2 and x.size <= MAX_DENSE_STATE)


def _count_noise_axes(
    process: Process, theta: Params, x: Array, t: Array, context: PyTree
) -> int | None:
    """Axes of the noise; None where it is a product, or where there is the diffusion alone."""
    if (
        process.diffusion is not None
        or process.noise is None
        or isinstance(process.noise, NoiseProduct)
    ):
        return None
    return len(jax.eval_shape(process.noise, theta, x, t, context).shape)


def check_on_host(
    process: Process, theta: Params, x: Array, t: Array, context: PyTree
) -> np.ndarray | None:
    """Noiseless components (M,), where NumPy finds no fault at the first states; else None.

    A first estimate would wait for the compiler otherwise. Where θ may enter a component without
    noise, and for operations without a rule, None is returned; also for a θ on another device.
    """
    leaves = jax.tree.leaves(theta)
    if not all(map(arrays.is_on_host, leaves)) or any(map(arrays.is_key, jax.tree.leaves(context))):
        return None
    flat = [np.asarray(leaf) for leaf in leaves]
    x, t, context = jax.tree.map(lambda leaf: np.asarray(leaf)[0], (x, t, context))
    off = np.concatenate([np.zeros((1, x.size)), _draw_offsets(x.size)])
    states = (x + (np.abs(x) + 1) / 2 * off).astype(x.dtype)
    numbers = theta, states, t, context
    program, moved = _trace_on_host(process, *map(check.tree_signature, numbers))
    try:
        drift, sigma = program(*numbers)
    except programs.NoRule:
        return None
    q = sigma**2 / 2
    finite = np.isfinite(drift).all(axis=1) & np.isfinite(q).all(axis=1)
    lost = np.any(~(q > 0) & moved, axis=1)
    noiseless = q[0] == 0
    comes = np.any(noiseless & (q > 0), axis=1)
    beside = np.any(finite[1:] & (comes | lost)[1:]) and noiseless.any()
    # numbers that JAX may round to zero
    tiny = np.any((q > 0) & (q < np.finfo(q.dtype).tiny))
    regular = finite[0] and not lost[0] and not beside and not tiny
    good = regular and all(np.isfinite(leaf).all() for leaf in flat)
    return noiseless if good else None


@functools.lru_cache(maxsize=256)
def _trace_on_host(process: Process, *signatures: Any) -> tuple[programs.HostProgram, np.ndarray]:
    """Drift and noise at several states, and the components (M,) that θ may move."""
    noise: Any = process.noise

    def evaluate(theta: Params, states: Array, t: Array, context: PyTree) -> tuple[Array, Array]:
        def at(state: Array) -> tuple[Array, Array]:
            return process.drift(theta, state, t, context), noise(theta, state, t, context)

        return jax.vmap(at)(states)

    program = programs.HostProgram(evaluate, *map(check.abstract_tree, signatures))
    drift, sigma = program.mark_dependent(True, False, False, False)
    return program, np.logical_or.reduce(drift | sigma)


@functools.partial(arrays.jit, static_argnums=0)
def check_quickly(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """Noiseless components, then whether the slow checks would pass. (M+1,)

    The conditions of `check_finite` and `find_noiseless` in one compiled call, since they stand
    before every estimate. Where this is false, those two find the words. For a noise that
    `can_check_quickly`; a matrix passes where it clearly has noise in all directions.
    """
    x, t, context = jax.tree.map(lambda leaf: leaf[0], (x, t, context))
    if not has_diagonal_noise(process, theta, x, t, context):
        return _check_matrix(process, theta, x, t, context)
    flat, unravel = ravel_pytree(theta)
    off = jnp.asarray(np.concatenate([np.zeros((1, x.size)), _draw_offsets(x.size)]), x.dtype)
    states = x + (jnp.abs(x) + 1) / 2 * off
    noise: Any = process.noise

    def at(state: Array) -> tuple[Array, Array, Array]:
        def drift_and_q(flat: Array) -> tuple[Array, Array]:
            theta = unravel(flat)
            return process.drift(theta, state, t, context), noise(theta, state, t, context) ** 2 / 2

        slopes, (drift, q) = jax.jacfwd(lambda v: 2 * (drift_and_q(v),), has_aux=True)(flat)
        finite = jnp.all(jnp.isfinite(drift)) & jnp.all(jnp.isfinite(q))
        lost = [jnp.any(jnp.where(q[:, None] > 0, 0, v) != 0) for v in slopes]
        return finite, q, lost[0] | lost[1]

    finite, q, lost = jax.vmap(at)(states)
    noiseless = q[0] == 0
    comes = jnp.any(noiseless & (q > 0), axis=1)
    # states off the first one matter where something is noiseless, and where drift and noise are
    # numbers
    beside = jnp.any(finite & (comes | lost) & jnp.any(noiseless) & (jnp.arange(len(states)) > 0))
    regular = finite[0] & ~lost[0] & ~beside & jnp.all(jnp.isfinite(flat))
    return jnp.append(noiseless, regular).astype(jnp.int8)


def _check_matrix(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """`check_quickly` for a noise matrix (M, W), regular where no direction is without noise.

    With D the largest entry of the diagonal, the eigenvalues λ of Q/D have a sum of M at most. All
    but the smallest then have a product below e, so that λ_min ≥ det(Q/D)/e, and λ_max ≤ M.
    """
    noise: Any = process.noise
    sigma = noise(theta, x, t, context)
    q = sigma @ sigma.T / 2
    largest = jnp.max(jnp.diagonal(q))
    rest = q / jnp.where(largest > 0, largest, 1)
    pivots = []
    for _ in range(x.size):  # Cholesky: small, and without LAPACK
        pivot = rest[0, 0]
        pivots.append(pivot)
        column = rest[1:, 0]
        rest = rest[1:, 1:] - jnp.outer(column, column) / jnp.where(pivot > 0, pivot, 1)
    size = jnp.stack(pivots)
    determinant = jnp.where(jnp.all(size > 0), jnp.prod(size), 0)
    threshold = np.e * x.size * 100 * x.size * float(jnp.finfo(x.dtype).eps)
    numbers = (process.drift(theta, x, t, context), q, ravel_pytree(theta)[0])
    finite = jnp.stack([jnp.all(jnp.isfinite(v)) for v in numbers]).all()
    regular = finite & (determinant > threshold)
    return jnp.append(jnp.zeros(x.size, bool), regular).astype(jnp.int8)
