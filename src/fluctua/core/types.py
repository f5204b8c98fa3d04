"""The vocabulary: small immutable records and the protocols that connect them.

Shapes use one set of letters throughout: E trajectories, T steps, M state components, P parameters,
W independent Wiener processes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.text import describe_estimate

if TYPE_CHECKING:
    Array = Any  # JAX and NumPy arrays alike; their stubs do not mix
else:
    Array = jax.Array | np.ndarray
PyTree = Any
Params = PyTree
"""Parameters θ: any pytree of floating-point arrays."""


def working_dtype(theta: Params, x: Array) -> np.dtype:
    """The precision of the states during an estimate: the finer of the parameters' and the
    states'.
    """
    return jax.numpy.result_type(x, *jax.tree.leaves(theta))


def on_host(array: Array) -> np.ndarray:
    """The numbers of an array.

    From a GPU by way of CuPy, if that is in use, which is ten times as fast as JAX.
    """
    cupy = sys.modules.get("cupy")
    if (
        cupy is not None
        and isinstance(array, jax.Array)
        and next(iter(array.devices())).platform == "gpu"
    ):
        return cupy.from_dlpack(array).get()
    return np.asarray(array)


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile by `jax.jit`, with matrix products in full precision.

    A GPU multiplies float32 matrices in TF32 by default, with 10 bits of mantissa: a neural drift
    then moves a gradient by half a standard error at 100,000 trajectories.
    """

    @functools.wraps(function)
    def traced(*arguments: Any, **named: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*arguments, **named)

    return jax.jit(traced, **options)


def put(array: np.ndarray) -> Array:
    """A NumPy array that nobody changes, as an array of JAX.

    `jnp.asarray` compiles a program for every shape.
    """
    return jax.device_put(array)


def part(array: Array, index: Any) -> Array:
    """array[index].

    By way of NumPy where that is no transfer: a slice, too, is compiled for every shape.
    """
    return put(np.asarray(array)[index]) if jax.default_backend() == "cpu" else array[index]


def end_to_end(arrays: Sequence[Array]) -> Array:
    """Their rows, one array after the other; like `part`."""
    if jax.default_backend() != "cpu":
        return jnp.concatenate(arrays)
    return put(np.concatenate([np.asarray(array) for array in arrays]))


STEPS = ("euler", "heun", "rk4")
"""Maps of one step that have a name; `fluctua.core.integrators` has them."""


class NoiseProduct(NamedTuple):
    """Noise as a product, for systems whose (M, W) matrix is too large or too structured to write
    down.

    product: (theta, x, t, context, dw (W,)) -> σ dw (M,), linear in `dw`.
    width: W, the number of Wiener processes.

    The diffusion follows from it, Q v = σ(σᵀ v)/2, by transposing the product.
    """

    product: Callable[..., Array]
    width: int


class Process(NamedTuple):
    """An Itô process dX = μ(X, t) dt + σ(X, t) dW (Eq. 1), written for one trajectory at one time.

    drift: (theta, x (M,), t, context) -> μ (M,).

    noise: the same arguments -> σ, either (M,) for independent noise on each component or (M, W);
    or a `NoiseProduct`; or None for a process that is only measured, never simulated.

    diffusion: (theta, x, t, context, v (M,)) -> Q v (M,), matrix-free products with Q = σσᵀ/2.
    Needed only when `noise` is None; the score then uses conjugate gradients.

    silent: components that never have noise of their own. The library finds them; leave it off,
    unless `step` is not Euler's.

    step: the map m of one step, X' = m(X, Δt) + σ√Δt z, that simulators and scores use: "euler", m
    = x + μΔt; "heun", "rk4"; an `Exponential`; or a function (drift, theta, x, t, dt, context) ->
    (m − x)/Δt. See `fluctua.core.integrators`.

    Arguments at the end that a callable does not use may be left off: `lambda theta, x: -theta *
    x`.

    >>> Process(drift=lambda k, x: -k * x, noise=lambda k, x: 0.3 * jnp.ones_like(x))
    """

    drift: Callable[..., Array]
    noise: Callable[..., Array] | NoiseProduct | None
    diffusion: Callable[..., Array] | None = None
    silent: tuple[int, ...] = ()
    step: str | Callable[..., Array] = "euler"


class Transition(Protocol):
    """A process of another kind, in the place of a `Process`: hashable, for one trajectory over
    one step.
    """

    def advance(
        self,
        theta: Params,
        x: Array,
        context: PyTree,
        stream: PyTree,
        draw: Callable,
        n: Array,
        t: Array,
        dt: Array,
    ) -> tuple[Array, PyTree]:
        """The next state, and what the score needs besides the two ends, or None. stream,
        draw: of a `Wiener`.
        """

    def events(
        self,
        theta: Params,
        x: Array,
        context: PyTree,
        stream: PyTree,
        n: Array,
        t: Array,
        dt: Array,
        most: int,
    ) -> PyTree:
        """What a record of that step holds besides its two ends; `most`: the largest
        `count` that `advance` left.
        """

    def score(self, theta: Params, step: Step) -> Params:
        """U of one step; the structure of θ."""

    def check(
        self, theta: Params, x: Array, t: Array, context: PyTree, where: str = ""
    ) -> Transition:
        """Raise, if the process cannot be right at this state.

        Returns it, with what was found out about it.
        """


class Memory(NamedTuple):
    """What a score remembers of the steps before. shared: the same for all trajectories. own:
    of each, (E, ...).
    """

    shared: PyTree
    own: PyTree


@runtime_checkable
class Remembering(Transition, Protocol):
    """A `Transition` whose simulated state is not what is seen of it, so that its score depends on
    the whole past.

    It brings its own start; `advance` takes and gives simulated states, everything else those that
    are seen.
    """

    def first(
        self, key: Array, theta: Params, context: PyTree, stream: PyTree, draw: Callable
    ) -> Array:
        """The simulated state at the start."""

    def seen(self, state: Array) -> Array:
        """What the trajectory holds of simulated states (..., Z). (..., M)"""

    def begin(self, theta: Params, x: Array, t: Array, context: PyTree) -> tuple[Params, Memory]:
        """∂θ ln p(x₀), and what is remembered of it."""

    def update(self, theta: Params, step: Step, memory: Memory) -> tuple[Params, Memory]:
        """U = ∂θ ln p(x'|x and all before), and what is remembered after the step."""

    def residuals(self, theta: Params, times: Times, x: Array, context: PyTree) -> Array:
        """Squares of the residuals of x (E, T+1, M), in units of what is expected: of mean 1.

        (E, T, M)
        """


@runtime_checkable
class Counting(Transition, Protocol):
    """A `Transition` whose events can be counted, to be compared with its rates."""

    def counts(self, theta: Params, step: Step) -> tuple[Array, Array]:
        """How often each event happened in one recorded step, and how often its rate says, ∫a ds.

        (R,) each
        """


AnyProcess = Process | Transition
"""What a simulator runs and a score is of."""


class Objective(NamedTuple):
    """What is maximised: J = E[g_T(X_T) + ∫ g(X_t, t) dt + Σ_n r(X_n, X_{n+1}) + g_0(X_0)] (Eq. 2,
    and two more).

    running: (theta, x, t, context) -> g, a scalar rate of reward.
    terminal: (theta, x, context) -> g_T, a scalar.
    step: (theta, x, x_next, t, dt, context) -> r, a scalar for the step as a whole and not a rate:
    work, heat, a current, anything that depends on both ends of a step. The score of a step meets
    the reward of that step.
    initial: (theta, x0, context) -> g_0, a scalar.

    Each may be None (no such reward). Arguments at the end that are not used may be left off.
    """

    running: Callable[..., Array] | None = None
    terminal: Callable[..., Array] | None = None
    step: Callable[..., Array] | None = None
    initial: Callable[..., Array] | None = None


class FunctionOfMeans(NamedTuple):
    """J = F(m₁, …, m_K), a function of expected returns m_i = E[R_i]; made by `function_of_means`.

    function: F, of K numbers. parts: the K objectives.
    """

    function: Callable[..., Array]
    parts: tuple[Any, ...]


class Rewards(NamedTuple):
    """An `Objective` as the library calls it: its rewards take all their arguments.

    A missing running or terminal reward is zero. A missing step or initial one stays None: nothing
    is computed for it.
    """

    running: Callable[..., Array]
    terminal: Callable[..., Array]
    step: Callable[..., Array] | None = None
    initial: Callable[..., Array] | None = None


class Trajectories(NamedTuple):
    """E trajectories on one time grid, simulated or measured.

    t: (T+1,) increasing, not necessarily uniform. x: (E, T+1, M).
    context: pytree with leaves (E, ...), whatever was drawn or set once a trajectory, or None.
    events: what happened within each step, a pytree with leaves (E, T, ...), for processes whose
    score needs more than the states (`Jumps`); else None.
    group: (E,) whole numbers, the device, the sample or the day that each is of, where the expected
    return is that of all devices there could be. Every group then counts the same, and errors are
    those between groups; else None.
    """

    t: Array
    x: Array
    context: PyTree = None
    events: PyTree = None
    group: Array | None = None


class Times(NamedTuple):
    """A time grid t (T+1,) and its steps dt (T,), which are formed before t is rounded to
    working precision.
    """

    t: Array
    dt: Array


class Step(NamedTuple):
    """One transition x -> x_next of one trajectory, at time t, over dt. events: what happened
    between, if known.
    """

    x: Array
    x_next: Array
    t: Array
    dt: Array
    context: PyTree = None
    events: PyTree = None


class Variances(NamedTuple):
    """between: of the means of groups, τ², without what trajectories add to it. within: of one
    trajectory, σ².
    """

    between: float
    within: float

    def worthwhile(self, group: float = 1.0, trajectory: float = 1.0) -> float:
        """Trajectories a group, n = √(c_g σ² / c_t τ²): of least variance (τ² + σ²/n)/K at a cost
        of K(c_g + c_t n).

        Args:
            group: c_g, what going to another group costs.
            trajectory: c_t, what one more trajectory costs, in the same unit.

        """
        if not (group > 0 and trajectory > 0):
            raise ValueError(
                f"costs must be positive; got {group!r} for a group, {trajectory!r} for a "
                "trajectory."
            )
        return (
            float(np.sqrt(group * self.within / (trajectory * self.between)))
            if self.between > 0
            else float("inf")
        )


class Groups(NamedTuple):
    """What K groups of trajectories say one by one: devices of an array, say.

    group: (K,) their numbers. counts: (K,) trajectories. values, value_errors: (K,) the expected
    return of each. returns, gradient: variances of the return, and of the gradient, summed over its
    components. value_stderr, stderr: the errors of the value and of the gradient, with the
    structure of θ, if these groups were all there are.
    """

    group: np.ndarray
    counts: np.ndarray
    values: np.ndarray
    value_errors: np.ndarray
    returns: Variances
    gradient: Variances
    value_stderr: Array
    stderr: Params


class Estimate(NamedTuple):
    """A gradient and how far to trust it. The first three fields have the structure of θ.

    gradient: mean over trajectories. stderr: its standard error. second_moment: mean square over
    *single* trajectories (the paper's step size needs it). value, value_stderr: the expected return
    and its standard error. count: trajectories averaged. interval: (low, high), each with the
    structure of θ, that hold the gradient with 95 %; value_interval: the same of the value. None
    where only means and errors are known, as from the fused kernels; ±1.96 stderr is then right for
    many trajectories and too narrow for few. Below 50 trajectories intervals are widened, and say
    so in print: samples so few tell little of their skewness and tails. natural: F⁻¹ times the
    gradient, of estimators made by `natural`; else None. groups: where trajectories were of several
    devices; errors are then those of the mean over all devices of which these are a sample.
    """

    gradient: Params
    stderr: Params
    second_moment: Params
    value: Array
    value_stderr: Array
    count: int  # type: ignore[assignment]
    interval: tuple[Params, Params] | None = None
    value_interval: tuple[Array, Array] | None = None
    natural: Params | None = None
    groups: Groups | None = None

    def __repr__(self) -> str:
        return describe_estimate(self)


class Substrate(Protocol):
    """A simulator or an instrument: sets θ and returns `count` trajectories."""

    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories: ...


class Score(Protocol):
    """U = ∂θ ln p(x'|x) of one transition; the structure of θ."""

    def __call__(self, process: Any, theta: Params, step: Step) -> Params: ...


class Estimates(Protocol):
    """The least that an estimator is: a function (key, theta, count) -> Estimate."""

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate: ...


class Estimator(Protocol):
    """Anything that turns θ and a number of samples into an `Estimate`.

    `fluctua.core.protocols.as_estimator` makes one of a bare function (key, theta, count) ->
    Estimate.
    """

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate: ...

    def cost(self, theta: Params) -> int:
        """Trajectories per sample."""

    @property
    def pilot(self) -> int:
        """Trajectories that a call runs on top; of an estimator that remembers, those of
        its last call.
        """

    @property
    def state(self) -> dict[str, np.ndarray]:
        """All that is remembered between calls, as plain arrays; empty where nothing is."""

    def restore(self, state: Mapping[str, np.ndarray], theta: Params) -> None:
        """Put a `state` back, to go on where another left off. theta: parameters that it is of."""
