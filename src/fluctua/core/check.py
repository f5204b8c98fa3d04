"""The boundary: what was expected, what came, what to do. Checked once, before work starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from fluctua.core import arrays, stopping
from fluctua.core import objective as objectives
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.process import STEPS, AnyProcess, HistoryDependent, NoiseProduct, Process
from fluctua.core.trajectories import Times
from fluctua.core.words import close_match

# ------------------------------------------------------------------------------- user's callables


@dataclass(frozen=True)
class _Leading:
    """Calls f with its first `arity` arguments.

    Equal if f is, so that wrapping twice compiles once.
    """

    f: Callable[..., Any]
    arity: int

    def __call__(self, *args: Any) -> Any:
        return self.f(*args[: self.arity])


def drop_extra_arguments(f: Callable[..., Any], maximum: int) -> Callable[..., Any]:
    """Let `f` be called with `maximum` arguments though it may take only the first few of them."""
    if isinstance(f, _Leading):
        return f
    if not callable(f):
        raise TypeError(
            f"expected a function of up to {maximum} arguments; got {type(f).__name__}: {f!r}."
        )
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature: take them at their word
        return f
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return f
    required = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    if not 1 <= len(required) <= maximum:
        raise TypeError(
            f"`{getattr(f, '__name__', f)}` takes {len(required)} arguments; it is called with up "
            f"to {maximum} (theta, x, t, context, in the order of the documentation). Leave off "
            "the last ones only."
        )
    # one that takes them all stays itself: what else it can do (`insitu.feature_fit`) is not hidden
    return f if len(required) == len(parameters) == maximum else _Leading(f, len(required))


def process(candidate: Any) -> Any:
    """The process with callables of four arguments (five for products), checked.

    A process of another kind has checked itself.
    """
    if not isinstance(candidate, Process):
        if isinstance(candidate, type) or not all(
            hasattr(candidate, name) for name in ("advance", "score", "check")
        ):
            raise TypeError(
                "`process` must be a fluctua.Process(drift, noise), or of another kind such as "
                f"fluctua.Jumps; got {type(candidate).__name__}."
            )
        return candidate
    noise: Any = candidate.noise
    if isinstance(noise, NoiseProduct):
        if int(noise.width) < 1:
            raise ValueError(
                "`NoiseProduct.width` must be the number of Wiener processes, ≥ "
                f"1; got {noise.width}."
            )
    elif noise is not None:
        noise = drop_extra_arguments(noise, 4)
    elif candidate.diffusion is None:
        raise ValueError(
            "`Process` needs `noise`, or `diffusion` for a process that is only measured: "
            "without the diffusion there is no score."
        )
    for name, f in (("drift", candidate.drift), ("noise", noise)):
        _check_argument_order(name, f)
    _check_integrator(candidate.integrator)
    step = (
        candidate.integrator
        if isinstance(candidate.integrator, str)
        else drop_extra_arguments(candidate.integrator, 6)
    )
    return candidate._replace(
        drift=drop_extra_arguments(candidate.drift, 4), noise=noise, integrator=step
    )


def _check_integrator(step: Any) -> None:
    if (isinstance(step, str) and step not in STEPS) or not (
        isinstance(step, str) or callable(step)
    ):
        hint = close_match(step, STEPS) if isinstance(step, str) else ""
        raise ValueError(
            f"`integrator` must be {', '.join(map(repr, STEPS))}, Exponential(linear), or a "
            f"function (drift, theta, x, t, dt, context) -> (m − x)/Δt; got {step!r}.{hint}"
        )


STATE = ("x", "state")
PARAMETERS = ("theta", "th", "params", "parameters")


def _check_argument_order(name: str, f: Any) -> None:
    """Refuse f(x, theta) by the names of its arguments.

    States and parameters are arrays alike: with the two swapped it would often run.
    """
    f = f.f if isinstance(f, _Leading) else f
    try:
        first, second, *_ = inspect.signature(f).parameters
    except (TypeError, ValueError):  # no signature, or one argument
        return
    if first in STATE and second in PARAMETERS:
        raise TypeError(
            f"`{name}({first}, {second})` has its arguments swapped: it is called as "
            f"{name}(theta, x, …)."
        )


def no_reward(theta: Params, x: Array, *rest: Any) -> Array:
    """Zero, for an objective without such a reward."""
    return jnp.zeros((), x.dtype)


def objective_or_means(candidate: Any) -> objectives.Rewards | objectives.FunctionOfMeans:
    """Rewards as callables, or a function of means of such, for callers that serve both."""
    if isinstance(candidate, objectives.FunctionOfMeans):
        parts = tuple(objective(part, stops=True) for part in candidate.parts)
        return candidate._replace(parts=parts)
    return objective(candidate, stops=True)


def objective(candidate: Any, *, stops: bool = False) -> objectives.Rewards:
    """Rewards as callables of all their arguments. stops: whether the caller serves a `stop`."""
    if getattr(candidate, "stop", None) is not None and not stops:
        raise ValueError(
            "this objective has a `stop`, which is supported by gradient, gradient_samples, ppgt, "
            "evaluate and function_of_means; not here. Leave `stop` off."
        )
    if isinstance(candidate, objectives.Rewards):
        return candidate
    if isinstance(candidate, objectives.FunctionOfMeans):
        raise ValueError(
            "a function of means (`function_of_means`) is supported by gradient, gradient_samples, "
            "ppgt, the references and evaluate, with all trajectories in one call; here give one "
            "`Objective`."
        )
    if not isinstance(candidate, objectives.Objective):
        raise TypeError(
            "`objective` must be a fluctua.Objective(running, terminal); got "
            f"{type(candidate).__name__}."
        )
    if all(reward is None for reward in candidate[:4]):
        raise ValueError(
            "`Objective` needs a reward: `running`, `terminal`, `per_step` or `initial`; it has "
            "none of them."
        )
    if candidate.overshoot not in (None, "bridge"):
        raise ValueError(f'`overshoot` must be None or "bridge"; got {candidate.overshoot!r}.')
    if candidate.overshoot is not None and candidate.stop is None:
        raise ValueError("`overshoot` corrects a `stop`, and this objective has none.")
    for name in ("running", "terminal", "stop"):
        _check_argument_order(name, getattr(candidate, name))
    stop = None
    if candidate.stop is not None:
        level = drop_extra_arguments(candidate.stop, 4)
        stop = objectives.StopRule(level, bridge=candidate.overshoot == "bridge")
    return objectives.Rewards(
        no_reward if candidate.running is None else drop_extra_arguments(candidate.running, 4),
        no_reward if candidate.terminal is None else drop_extra_arguments(candidate.terminal, 3),
        None if candidate.per_step is None else drop_extra_arguments(candidate.per_step, 6),
        None if candidate.initial is None else drop_extra_arguments(candidate.initial, 3),
        stop,
    )


def require_state_rewards(rewards: objectives.Rewards, caller: str) -> None:
    """Refuse rewards of steps and of the start, by name."""
    for name in ("per_step", "initial"):
        if getattr(rewards, name) is not None:
            raise ValueError(
                f"{caller} supports `running` and `terminal` rewards; this objective "
                f"has a `{name}` one."
            )


# --------------------------------------------------------------------------------------- numbers


def count(trajectories: int, minimum: int = 1) -> None:
    """A number of trajectories."""
    whole = isinstance(trajectories, int | np.integer) and not isinstance(trajectories, bool)
    if not whole or trajectories < minimum:
        number: Any = trajectories
        hint = f" Write {int(number)}." if isinstance(number, float) and number.is_integer() else ""
        raise ValueError(
            f"`count` must be a whole number of trajectories, at least {minimum}; got "
            f"{trajectories!r}.{hint}"
        )


def key(candidate: Any) -> None:
    """A key of `jax.random`."""
    dtype = getattr(candidate, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.uint32):
        raise TypeError(
            f"`key` must be a key of jax.random, which fixes all noise; got {candidate!r}. Write "
            f"jax.random.key({candidate if isinstance(candidate, int) else 0})."
        )


def times(t: Array) -> np.ndarray:
    """(T+1,) strictly increasing."""
    t = np.asarray(t)
    if t.ndim != 1 or t.size < 2:
        raise ValueError(
            f"`t` must be at least two times, shape (T+1,); got shape {t.shape}. For T steps up to "
            "a time write jnp.linspace(0.0, time, T + 1)."
        )
    if not np.all(np.isfinite(t)):
        raise ValueError(
            f"`t` is not finite at indices {np.flatnonzero(~np.isfinite(t))[:5].tolist()}."
        )
    bad = np.flatnonzero(np.diff(t) <= 0)
    if bad.size:
        n = int(bad[0])
        raise ValueError(
            f"`t` must increase strictly; t[{n}] = {t[n]:g} is followed by t[{n + 1}] = "
            f"{t[n + 1]:g} ({bad.size} such place{'s' if bad.size > 1 else ''}). Sort the samples "
            "or drop the repeats."
        )
    return t


def grid(t: Array) -> Times:
    """Times and steps. A grid that is uniform to the rounding of its times is taken as uniform.

    In float32 the times near t = 20 are 2e-6 apart at best: differences of them would make Δt =
    1e-3 jitter by 0.2 %.
    """
    instants = times(t)
    exact = np.asarray(instants, np.float64)
    dt = np.diff(exact)
    even = (exact[-1] - exact[0]) / dt.size
    unit = np.finfo(instants.dtype).eps if np.issubdtype(instants.dtype, np.floating) else 0.0
    if np.abs(dt - even).max() <= 2 * unit * np.abs(exact).max():
        dt = np.full(dt.size, even)
    real = jnp.result_type(float)
    return Times(jnp.asarray(instants, real), arrays.put(dt.astype(real)))


def parameters(theta: Params, *, numbers: bool = True) -> Params:
    """The parameters as floating-point arrays, all finite.

    numbers: False leaves out the test for finite values, where `check_model` follows and makes it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(theta)
    if not leaves:
        raise ValueError("`theta` has no parameters.")
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array) and leaf.dtype.kind == "f":
            continue
        name = "theta" + jax.tree_util.keystr(path)
        if callable(leaf):
            raise TypeError(
                f"parameters are arrays; `{name}` is a function. Of an equinox module pass the "
                "arrays alone: theta, static = eqx.partition(module, eqx.is_inexact_array), and "
                "eqx.combine(theta, static) inside the drift."
            )
        dtype = getattr(leaf, "dtype", np.asarray(leaf).dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"parameters must be floating point to have a gradient; `{name}` is {dtype}. "
                f"Write it as a float, e.g. jnp.asarray({name}, float)."
            )
    values = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for _, leaf in leaves]
    if not numbers:
        finite = [True] * len(values)
    elif jax.default_backend() == "cpu":
        finite = [np.isfinite(np.asarray(leaf)).all() for leaf in values]
    else:  # all at once: each transfer takes a millisecond
        finite = arrays.on_host(_finite_each(values)).tolist()
    for (path, _), leaf, good in zip(leaves, values, finite, strict=True):
        if not good:
            raise _not_finite_error(path, leaf)
    return jax.tree.unflatten(jax.tree.structure(theta), values)


def host_parameters(theta: Params) -> Params:
    """The parameters as NumPy arrays, all finite: read once, after `parameters(numbers=False)`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(theta)
    values = [arrays.on_host(leaf) for _, leaf in leaves]
    for (path, _), array in zip(leaves, values, strict=True):
        if not np.isfinite(array).all():
            raise _not_finite_error(path, array)
    return jax.tree.unflatten(structure, values)


def _not_finite_error(path: Any, leaf: Array) -> ValueError:
    return ValueError(f"`theta{jax.tree_util.keystr(path)}` is not finite: {np.asarray(leaf)!r}.")


@arrays.jit
def _finite_each(values: list[Array]) -> Array:
    return jnp.stack([jnp.isfinite(array).all() for array in values]).astype(jnp.int8)


# ------------------------------------------------------------------------------ process and state


def take_first(tree: PyTree) -> PyTree:
    """The first row of every leaf, without the axis of rows.

    Through NumPy where possible: a slice is compiled for every shape.
    """
    return jax.tree.map(
        lambda leaf: leaf[0] if arrays.is_key(leaf) else arrays.put(np.asarray(leaf)[0]), tree
    )


def take_first_row(tree: PyTree) -> PyTree:
    """The first row of every leaf, as an array of one row."""
    return jax.tree.map(
        lambda leaf: leaf[:1] if arrays.is_key(leaf) else arrays.put(np.asarray(leaf)[:1]), tree
    )


def tree_signature(tree: PyTree) -> Any:
    """Structure, shapes and types of a pytree: all that code can depend on but numbers.

    Hashable.
    """
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(
        (np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf))
        for leaf in leaves
    )


def abstract_tree(signature: Any) -> PyTree:
    """The pytree of a `tree_signature`, with shapes and types in place of numbers."""
    structure, leaves = signature
    return jax.tree.unflatten(
        structure, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in leaves]
    )


def model(
    process: AnyProcess,
    rewards: objectives.Rewards,
    theta: Params,
    x: Array,
    t: Array,
    context: PyTree,
) -> None:
    """Shapes of drift, noise and rewards at one state x (M,) and time."""
    shapes(process, theta, x, t, context)
    check_rewards(rewards, theta, x, t, context, observed=isinstance(process, HistoryDependent))


def check_rewards(
    rewards: objectives.Rewards,
    theta: Params,
    x: Array,
    t: Array,
    context: PyTree,
    *,
    observed: bool = False,
) -> None:
    """Shapes of rewards at one state x (M,) and time. observed: x is a part of a hidden state."""
    for name, reward, arguments in (
        ("running", rewards.running, (theta, x, t, context)),
        ("terminal", rewards.terminal, (theta, x, context)),
        ("per_step", rewards.per_step, (theta, x, x, t, t, context)),  # Δt is a number as t is
        ("initial", rewards.initial, (theta, x, context)),
    ):
        if reward is None:
            continue
        if observed:
            _check_observed_reward(name, reward, arguments)
        got = _evaluate_shape(f"the {name} reward", reward, *arguments)
        if getattr(got, "shape", None) != ():
            raise ValueError(
                f"the {name} reward must be one number per state, shape (); got shape "
                f"{getattr(got, 'shape', type(got).__name__)}. Sum or index what it returns."
            )
        if got.dtype == bool or jnp.issubdtype(got.dtype, jnp.complexfloating):
            raise TypeError(
                f"the {name} reward must be a real number; got {got.dtype}. Write a condition as "
                "jnp.where(x[0] > 1, 1.0, 0.0), and a complex amplitude by its real part or "
                "modulus."
            )
    if rewards.stop is not None:
        if observed:
            _check_observed_reward("stop", rewards.stop.level, (theta, x, t, context))
        stopping.check_rule(rewards.stop, theta, x, t, context)


def _check_observed_reward(
    name: str, reward: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Refuse a reward that needs components that are hidden.

    JAX itself would take the last component there is.
    """
    try:
        reason = checkify.checkify(reward, errors=checkify.index_checks)(*arguments)[0].get()
    except (TypeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
    if reason:
        raise ValueError(
            f"the {name} reward cannot be formed from the {arguments[1].size} channels that are "
            f"observed ({reason}). A reward of hidden states has no return that can be "
            "computed: observe them, or reward what is observed."
        )


def _evaluate_shape(what: str, f: Callable[..., Any], theta: Params, *rest: Any) -> Any:
    """What f returns; a message of one line where θ has no such entry or f cannot be traced."""
    try:
        got = jax.eval_shape(f, theta, *rest)
    except KeyError as error:
        if not isinstance(theta, Mapping) or error.args[0] in theta:
            raise
        name = str(error.args[0])
        known = [str(key) for key in theta]
        raise ValueError(
            f"{what} uses theta[{name!r}], and theta has "
            f"{', '.join(map(repr, known))}.{close_match(name, known)}"
        ) from error
    except jax.errors.ConcretizationTypeError as error:
        raise TypeError(
            f"{what} needs the number in theta or x while JAX traces it: a Python `if`, `and`, "
            "`max` or `float`, or a function of `math`. Write jnp.where(condition, a, b), "
            "jnp.maximum, jnp.exp."
        ) from error
    if not hasattr(got, "shape"):
        raise TypeError(
            f"{what} must return an array; it returns {type(got).__name__}. Put it "
            "together with jnp.array."
        )
    return got


def shapes(process: AnyProcess, theta: Params, x: Array, t: Array, context: PyTree) -> None:
    """μ is (M,); σ is (M,) or (M, W); products are (M,)."""
    if not isinstance(process, Process):
        process.check(theta, x, t, context)
        return
    m = x.shape[0]
    source = f"The start or the record has {m} component{'s'[: m != 1]}."
    drift = _evaluate_shape("the drift", process.drift, theta, x, t, context)
    if drift.shape != (m,):
        raise ValueError(
            f"the drift must have the shape of the state, ({m},); got {drift.shape}. {source}"
        )
    v = jax.ShapeDtypeStruct((m,), x.dtype)
    if process.diffusion is not None:
        product = jax.eval_shape(process.diffusion, theta, x, t, context, v)
        if product.shape != (m,):
            raise ValueError(
                f"the diffusion product Q v must have shape ({m},); got {product.shape}."
            )
    if isinstance(process.noise, NoiseProduct):
        dw = jax.ShapeDtypeStruct((process.noise.width,), x.dtype)
        product = jax.eval_shape(process.noise.product, theta, x, t, context, dw)
        if product.shape != (m,):
            raise ValueError(f"the noise product σ dw must have shape ({m},); got {product.shape}.")
    elif process.noise is not None:
        noise = _evaluate_shape("the noise", process.noise, theta, x, t, context)
        if noise.shape != (m,) and not (noise.ndim == 2 and noise.shape[0] == m):
            equal = f"For equal noise everywhere return sigma * jnp.ones({m})."
            hint = source if noise.ndim else equal
            raise ValueError(
                f"the noise must be ({m},), one amplitude per component, or ({m}, W); got "
                f"{noise.shape}. {hint}"
            )


# -------------------------------------------------------------------------------------- results


def list_indices(indices: Sequence[int] | np.ndarray) -> str:
    """The first five indices as text."""
    return ", ".join(map(str, indices[:5])) + (", …" if len(indices) > 5 else "")


def all_finite(x: Array) -> bool:
    """Whether no number of an array is infinite or none."""
    if x.size < 2**16 and jax.default_backend() == "cpu":  # sooner than a program is compiled
        return bool(np.isfinite(np.asarray(x)).all())
    return bool(arrays.on_host(_all_finite(x)))


@arrays.jit
def _all_finite(x: Array) -> Array:
    return jnp.all(jnp.isfinite(x)).astype(jnp.int8)


def find_not_finite(x: np.ndarray, offset: int) -> list[tuple[int, int, int]]:
    """(trajectory, time index, component) of the first non-finite number of each bad trajectory."""
    bad = ~np.isfinite(x)
    places = []
    for j in np.flatnonzero(bad.any(axis=(1, 2))):
        n, i = np.argwhere(bad[j])[0]
        places.append((int(j) + offset, int(n), int(i)))
    return places


def finite_trajectories(bad: list[tuple[int, int, int]], trajectories: int) -> None:
    """Raise if `find_not_finite` found anything in recorded states."""
    if bad:
        j, n, i = bad[0]
        raise ValueError(
            f"{len(bad)} of {trajectories} trajectories are not finite: "
            f"{list_indices([row[0] for row in bad])} (trajectory {j} first at time index {n}, "
            f"component {i}). They are never averaged: remove them, e.g. "
            "x[np.isfinite(x).all(axis=(1, 2))], and their contexts. Not so if they end at "
            "a `stop`: without them J is of the others alone. Repeat their last state instead."
        )


def finite_simulation(x: Array, t: Array, offset: int = 0) -> None:
    """Refuse simulated states that overflowed, whole (E, T+1, M) or final (E, M).

    offset: number of the first trajectory.
    """
    if all_finite(x):
        return
    which = np.flatnonzero(~np.isfinite(np.asarray(x)).reshape(len(x), -1).all(axis=1))
    step = float(np.max(np.diff(np.asarray(t))))
    raise FloatingPointError(
        f"{len(which)} of {len(x)} simulated trajectories overflowed: "
        f"{list_indices(which + offset)}. The time step (up to {step:g}) is probably too large "
        "for the drift at these parameters; refine `t` or bound `theta`."
    )
