"""The boundary: what was expected, what came, what to do. Checked once, before work starts."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.start import Density, Reparameterised
from fluctua.core.types import Array, NoiseProduct, Objective, Params, Process, PyTree, Rewards, Times, Trajectories

if TYPE_CHECKING:
    from fluctua.core.baselines import Baseline
    from fluctua.core.recording import Recording

# ------------------------------------------------------------------------------- user's callables


@dataclass(frozen=True)
class _Leading:
    """Calls f with its first `arity` arguments. Equal if f is, so that wrapping twice compiles once."""

    f: Callable[..., Any]
    arity: int

    def __call__(self, *args: Any) -> Any:
        return self.f(*args[: self.arity])


def leading(f: Callable[..., Any], most: int) -> Callable[..., Any]:
    """Let `f` be called with `most` arguments though it may take only the first few of them."""
    if isinstance(f, _Leading):
        return f
    if not callable(f):
        raise TypeError(f"expected a function of up to {most} arguments; got {type(f).__name__}: {f!r}.")
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature: take them at their word
        return f
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return f
    required = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    if not 1 <= len(required) <= most:
        raise TypeError(
            f"`{getattr(f, '__name__', f)}` takes {len(required)} arguments; it is called with up to {most} "
            "(theta, x, t, context, in the order of the documentation). Leave off the last ones only."
        )
    # one that takes them all stays itself: what else it can do (`insitu.feature_fit`) is not hidden
    return f if len(required) == len(parameters) == most else _Leading(f, len(required))


def process(given: Process) -> Process:
    """Callables of four arguments (five for products)."""
    if not isinstance(given, Process):
        raise TypeError(f"`process` must be a fluctua.Process(drift, noise); got {type(given).__name__}.")
    noise: Any = given.noise
    if isinstance(noise, NoiseProduct):
        if int(noise.width) < 1:
            raise ValueError(f"`NoiseProduct.width` must be the number of Wiener processes, ≥ 1; got {noise.width}.")
    elif noise is not None:
        noise = leading(noise, 4)
    elif given.diffusion is None:
        raise ValueError(
            "`Process` needs `noise`, or `diffusion` for a process that is only measured: without the "
            "diffusion there is no score."
        )
    return Process(leading(given.drift, 4), noise, given.diffusion)


def _no_reward(theta: Params, x: Array, *rest: Any) -> Array:
    return jnp.zeros((), x.dtype)


def objective(given: Objective | Rewards) -> Rewards:
    """Both rewards as callables; a missing one is zero."""
    if isinstance(given, Rewards):
        return given
    if not isinstance(given, Objective):
        raise TypeError(f"`objective` must be a fluctua.Objective(running, terminal); got {type(given).__name__}.")
    if given.running is None and given.terminal is None:
        raise ValueError("`Objective` needs a `running` reward, a `terminal` reward, or both; got neither.")
    return Rewards(
        _no_reward if given.running is None else leading(given.running, 4),
        _no_reward if given.terminal is None else leading(given.terminal, 3),
    )


def start(given: Any) -> tuple[Density | Reparameterised | None, Array | None]:
    """(a start that depends on θ or chance, None) or (None, a fixed state)."""
    if isinstance(given, Density):
        sample = None if given.sample is None else leading(given.sample, 3)
        return Density(leading(given.log_density, 3), sample), None
    if isinstance(given, Reparameterised):
        if not given.fade >= 0:
            raise ValueError(f"`Reparameterised.fade` is a time and must not be negative; got {given.fade}.")
        return Reparameterised(leading(given.x0, 2), given.fade), None
    if callable(given):
        raise TypeError(
            "a start that is a function of theta must say how its sensitivity is to be had: wrap it in "
            "fluctua.Reparameterised(x0) or give a fluctua.Density(log_density, sample)."
        )
    x0 = jnp.asarray(given)
    if x0.ndim != 1:
        raise ValueError(f"a fixed start must be one state (M,); got shape {x0.shape}.")
    if not jnp.issubdtype(x0.dtype, jnp.floating):
        x0 = x0.astype(jnp.result_type(float))
    if not bool(jnp.all(jnp.isfinite(x0))):
        raise ValueError(f"the start has non-finite components: {np.flatnonzero(~np.isfinite(x0)).tolist()}.")
    return None, x0


def score_for_start(score: Any, given: Any) -> None:
    """A start that moves with θ needs a score that can move the ends of a step."""
    if isinstance(given, Reparameterised) and "shift" not in inspect.signature(score).parameters:
        raise ValueError(
            "a `Reparameterised` start moves the states with θ, which this score does not differentiate; "
            "use score=full_score."
        )


# --------------------------------------------------------------------------------------- numbers


def count(given: int, fewest: int = 1) -> None:
    """A number of trajectories."""
    if isinstance(given, bool) or int(given) != given or given < fewest:
        raise ValueError(f"`count` must be a whole number of trajectories, at least {fewest}; got {given!r}.")


def times(t: Array) -> np.ndarray:
    """(T+1,) strictly increasing."""
    t = np.asarray(t)
    if t.ndim != 1 or t.size < 2:
        raise ValueError(f"`t` must be at least two times, shape (T+1,); got shape {t.shape}.")
    if not np.all(np.isfinite(t)):
        raise ValueError(f"`t` is not finite at indices {np.flatnonzero(~np.isfinite(t))[:5].tolist()}.")
    bad = np.flatnonzero(np.diff(t) <= 0)
    if bad.size:
        n = int(bad[0])
        raise ValueError(
            f"`t` must increase strictly; t[{n}] = {t[n]:g} is followed by t[{n + 1}] = {t[n + 1]:g} "
            f"({bad.size} such place{'s' if bad.size > 1 else ''}). Sort the samples or drop the repeats."
        )
    return t


def grid(t: Array) -> Times:
    """Times and steps. A grid that is uniform to the rounding of its times is taken as uniform.

    In float32 the times near t = 20 are 2e-6 apart at best: differences of them would make Δt = 1e-3 jitter by 0.2 %.
    """
    given = times(t)
    exact = np.asarray(given, np.float64)
    dt = np.diff(exact)
    even = (exact[-1] - exact[0]) / dt.size
    unit = np.finfo(given.dtype).eps if np.issubdtype(given.dtype, np.floating) else 0.0
    if np.abs(dt - even).max() <= 2 * unit * np.abs(exact).max():
        dt = np.full(dt.size, even)
    return Times(jnp.asarray(given, jnp.result_type(float)), jnp.asarray(dt, jnp.result_type(float)))


def parameters(theta: Params) -> Params:
    """Floating-point arrays, all finite."""
    leaves = jax.tree_util.tree_leaves_with_path(theta)
    if not leaves:
        raise ValueError("`theta` has no parameters.")
    for path, leaf in leaves:
        name = "theta" + jax.tree_util.keystr(path)
        dtype = getattr(leaf, "dtype", np.asarray(leaf).dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"parameters must be floating point to have a gradient; `{name}` is {dtype}. "
                f"Write it as a float, e.g. jnp.asarray({name}, float)."
            )
        if not np.all(np.isfinite(np.asarray(leaf))):
            raise ValueError(f"`{name}` is not finite: {np.asarray(leaf)!r}.")
    return jax.tree.map(jnp.asarray, theta)


def baseline(given: Baseline | None, trajectories: int, t: Array) -> None:
    """Enough trajectories to leave one out; a table that fits the grid."""
    if given is None:
        fewest, values = 2, None
    else:
        fewest, values = given.fewest, given.values
    if trajectories < fewest:
        raise ValueError(
            f"a leave-one-out baseline needs at least {fewest} trajectories; got {trajectories}. "
            "Take more, or use baseline=none() or time_only()."
        )
    if values is not None and values.shape != (len(t),):
        raise ValueError(
            f"the values of a time-only baseline must be the mean return-to-go at each of the {len(t)} times, "
            f"shape ({len(t)},); got {values.shape}."
        )


# ------------------------------------------------------------------------------ process and state


def model(process: Process, rewards: Rewards, theta: Params, x: Array, t: Array, context: PyTree) -> None:
    """Shapes of drift, noise and rewards at the first states x (E, M), and that the diffusion is regular."""
    one = jax.tree.map(lambda leaf: leaf[0], context)
    shapes(process, theta, x[0], t[0], one)
    for name, reward, arguments in (
        ("running", rewards.running, (theta, x[0], t[0], one)),
        ("terminal", rewards.terminal, (theta, x[0], one)),
    ):
        got = jax.eval_shape(reward, *arguments)
        if getattr(got, "shape", None) != ():
            raise ValueError(
                f"the {name} reward must be one number per state, shape (); got shape "
                f"{getattr(got, 'shape', type(got).__name__)}. Sum or index what it returns."
            )
    diffusion(process, theta, x[0], t[0], one)


def shapes(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> None:
    """μ is (M,); σ is (M,) or (M, W); products are (M,)."""
    m = x.shape[0]
    drift = jax.eval_shape(process.drift, theta, x, t, context)
    if drift.shape != (m,):
        raise ValueError(f"the drift must have the shape of the state, ({m},); got {drift.shape}.")
    v = jax.ShapeDtypeStruct((m,), x.dtype)
    if process.diffusion is not None:
        product = jax.eval_shape(process.diffusion, theta, x, t, context, v)
        if product.shape != (m,):
            raise ValueError(f"the diffusion product Q v must have shape ({m},); got {product.shape}.")
    if isinstance(process.noise, NoiseProduct):
        dw = jax.ShapeDtypeStruct((process.noise.width,), x.dtype)
        product = jax.eval_shape(process.noise.product, theta, x, t, context, dw)
        if product.shape != (m,):
            raise ValueError(f"the noise product σ dw must have shape ({m},); got {product.shape}.")
    elif process.noise is not None:
        noise = jax.eval_shape(process.noise, theta, x, t, context)
        if noise.shape != (m,) and not (noise.ndim == 2 and noise.shape[0] == m):
            raise ValueError(
                f"the noise must be ({m},), one amplitude per component, or ({m}, W); got {noise.shape}."
                + (f" For equal noise everywhere return sigma * jnp.ones({m})." if noise.ndim == 0 else "")
            )


@partial(jax.jit, static_argnums=0)
def _q_matrix(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """Q as its diagonal (M,) or in full (M, M)."""
    from fluctua.core.diffusion import diffusion_at

    if process.diffusion is None and not isinstance(process.noise, NoiseProduct):
        sigma = process.noise(theta, x, t, context)  # type: ignore[misc]
        return sigma**2 / 2 if sigma.ndim == 1 else sigma @ sigma.T / 2
    q = diffusion_at(process, theta, x, t, context)
    return jax.vmap(lambda e: q.apply(theta, e))(jnp.eye(x.size, dtype=x.dtype))


def diffusion(process: Process, theta: Params, x: Array, t: Array, context: PyTree, where: str = "") -> None:
    """Raise if Q is singular, and name the component without noise."""
    q = np.asarray(_q_matrix(process, theta, x, t, context), dtype=float)
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


def rounding(process: Process, theta: Params, recording: Recording) -> None:
    """Warn when the precision of the states is coarse against the kicks that the score reads off them."""
    t, one = recording.t, jax.tree.map(lambda leaf: leaf[0], recording.context)
    q = np.asarray(_q_matrix(process, theta, recording.first[0], t[0], one))
    kick = np.sqrt(2 * (q if q.ndim == 1 else np.diag(q)) * float(t[1] - t[0]))
    coarse = np.flatnonzero(recording.rounding > 0.01 * kick)
    if coarse.size:
        i = coarse[np.argmax(recording.rounding[coarse] / kick[coarse])]
        warnings.warn(
            f"the states are rounded to about {recording.rounding[i]:.1e} (component {i}), more than a hundredth of a "
            f"typical kick ({kick[i]:.1e}): the score will carry rounding noise. Record in float64 and use "
            'jax.config.update("jax_enable_x64", True).',
            RuntimeWarning,
            stacklevel=5,
        )


# -------------------------------------------------------------------------------------- results


def _few(indices: Sequence[int] | np.ndarray) -> str:
    return ", ".join(map(str, indices[:5])) + (", …" if len(indices) > 5 else "")


def first_bad(x: np.ndarray, offset: int) -> list[tuple[int, int, int]]:
    """(trajectory, time index, component) of the first non-finite number of each bad trajectory."""
    bad = ~np.isfinite(x)
    found = []
    for j in np.flatnonzero(bad.any(axis=(1, 2))):
        n, i = np.argwhere(bad[j])[0]
        found.append((int(j) + offset, int(n), int(i)))
    return found


def finite_trajectories(bad: list[tuple[int, int, int]], trajectories: int) -> None:
    """Raise if `first_bad` found anything in recorded states."""
    if bad:
        j, n, i = bad[0]
        raise ValueError(
            f"{len(bad)} of {trajectories} trajectories are not finite: {_few([row[0] for row in bad])} (trajectory "
            f"{j} first at time index {n}, component {i}). They are never averaged: remove them, e.g. "
            "x[np.isfinite(x).all(axis=(1, 2))], and their contexts."
        )


def finite_simulation(x: Array, t: Array) -> None:
    """Simulated states, whole (E, T+1, M) or final (E, M), did not overflow."""
    if bool(jnp.all(jnp.isfinite(x))):
        return
    which = np.flatnonzero(~np.isfinite(np.asarray(x)).reshape(len(x), -1).all(axis=1))
    step = float(np.max(np.diff(np.asarray(t))))
    raise FloatingPointError(
        f"{len(which)} of {len(x)} simulated trajectories overflowed: {_few(which)}. The time step (up to "
        f"{step:g}) is probably too large for the drift at these parameters; refine `t` or bound `theta`."
    )


def finite_scores(
    flat: Array, process: Process, theta: Params, trajectory: Callable[[int], Trajectories], t: Array
) -> None:
    """Per-trajectory gradients (E, P) are numbers; if not, look for the state where the diffusion fails."""
    if bool(jnp.all(jnp.isfinite(flat))):
        return
    which = np.flatnonzero(~np.isfinite(np.asarray(flat)).all(axis=1))
    j = int(which[0])
    one = trajectory(j)
    context = jax.tree.map(lambda leaf: leaf[0], one.context)
    for n in range(len(t) - 1):
        diffusion(process, theta, jnp.asarray(one.x[0, n]), t[n], context, f"on trajectory {j} at time index {n}")
    raise FloatingPointError(
        f"the gradients of {len(which)} of {len(flat)} trajectories are not finite: {_few(which)}. The states "
        "and the diffusion are; a derivative of the drift, noise or reward is not (sqrt or abs at zero?), or a "
        "matrix-free solve did not converge."
    )
