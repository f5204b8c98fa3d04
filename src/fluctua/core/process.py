"""What a user writes about a system: drift and noise, or the transition of another kind.

`Process` is the usual case. The protocols below it are for processes that are not diffusions: with
events (`fluctua.Jumps`), in discrete time (`fluctua.Chain`), or seen through an instrument
(`fluctua.Observed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.display import records
from fluctua.core.trajectories import Times

STEPS = ("euler", "heun", "rk4")
"""Maps of one step that have a name; `fluctua.core.integrators` has them."""


class NoiseProduct(NamedTuple):
    """Noise as a product, for an (M, W) matrix that is too large or too structured to write down.

    product: (theta, x, t, context, dw (W,)) -> σ dw (M,), linear in `dw`.
    width: W, the number of Wiener processes.

    The diffusion follows from it, Q v = σ(σᵀ v)/2, by transposing the product.

    >>> def current(theta, x, t, context, dw):  # three bonds in a ring move charge between sites
    ...     return theta["s"] * (dw - jnp.roll(dw, 1))
    >>> ring = fl.Process(lambda theta, x: -x, fl.NoiseProduct(current, width=3))
    >>> x = fl.simulator(ring, start=jnp.zeros(3), t=t)(key, theta, 5).x
    >>> bool(jnp.allclose(x.sum(axis=2), 0.0, atol=1e-5))  # the total charge stays
    True
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
    noiseless: components that never have noise of their own. The library finds them; leave it off,
        unless the integrator is not Euler's. They then move first, by μΔt, and the map moves the
        others from there: for a position and a velocity, another step than Heun's of both.
    integrator: the map m of one step, X' = m(X, Δt) + σ√Δt z, that simulators and scores use:
        "euler", m = x + μΔt; "heun", "rk4"; an `Exponential`; or a function (drift, theta, x, t,
        dt, context) -> (m − x)/Δt. See `fluctua.core.integrators`.

    Arguments at the end that a callable does not use may be left off: `lambda theta, x: -theta *
    x`.

    >>> drift = lambda theta, x: jnp.array([x[1], -theta["k"] * x[0] - x[1]])
    >>> noise = lambda theta, x: jnp.array([0.0, theta["s"]])  # the velocity alone is shaken
    >>> pendulum = fl.Process(drift, noise, noiseless=(0,), integrator="heun")
    >>> fl.simulator(pendulum, start=jnp.array([1.0, 0.0]), t=t)(key, theta, 5).x.shape
    (5, 101, 2)
    """

    drift: Callable[..., Array]
    noise: Callable[..., Array] | NoiseProduct | None
    diffusion: Callable[..., Array] | None = None
    noiseless: tuple[int, ...] = ()
    integrator: str | Callable[..., Array] = "euler"

    def __repr__(self) -> str:
        return records.describe_parts("Process", records.name_parts(self._asdict()))

    def _repr_html_(self) -> str:
        return records.render_parts("Process", records.name_parts(self._asdict()))


class Step(NamedTuple):
    """One transition x -> x_next of one trajectory.

    x: the state before (M,).
    x_next: the state after (M,).
    t: the time of x.
    dt: the length of the step.
    context: of the trajectory, or None.
    events: what happened within the step, or None where it is not known.

    >>> x = recorded.x[0]
    >>> step = fl.scores.Step(x[0], x[1], t=t[0], dt=t[1] - t[0])
    >>> score = fl.scores.full_score(process, theta, step)
    >>> sorted(score)
    ['k', 's']
    """

    x: Array
    x_next: Array
    t: Array
    dt: Array
    context: PyTree = None
    events: PyTree = None


class Score(Protocol):
    """U = ∂θ ln p(x'|x) of one transition; the structure of θ."""

    def __call__(self, process: Any, theta: Params, step: Step) -> Params: ...


class Transition(Protocol):
    """A process of another kind, in the place of a `Process`: hashable, for one trajectory."""

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
        """The next state, and what the score needs besides the two ends, or None.

        stream, draw: of a `Wiener`.
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
        max_count: int,
    ) -> PyTree:
        """Record of that step besides its two ends.

        max_count: the largest `count` that `advance` returned.
        """

    def score(self, theta: Params, step: Step) -> Params:
        """U of one step; the structure of θ."""

    def check(
        self, theta: Params, x: Array, t: Array, context: PyTree, where: str = ""
    ) -> Transition:
        """The process with what was found out about it; refused if it is wrong at this state."""


class ScoreState(NamedTuple):
    """State of a score that depends on the past.

    shared: the same for all trajectories. own: of each, (E, ...).
    """

    shared: PyTree
    own: PyTree


@runtime_checkable
class HistoryDependent(Transition, Protocol):
    """A `Transition` of which only a part of the simulated state is observed.

    Its score depends on the whole past. It brings its own start. `advance` takes and returns
    simulated states, every other method observed ones.
    """

    def draw_start(
        self, key: Array, theta: Params, context: PyTree, stream: PyTree, draw: Callable
    ) -> Array:
        """The simulated state at the start. Shape (Z,)."""

    def select_observed(self, state: Array) -> Array:
        """The observed part (..., M) of simulated states (..., Z)."""

    def score_start(
        self, theta: Params, x: Array, t: Array, context: PyTree
    ) -> tuple[Params, ScoreState]:
        """∂θ ln p(x₀), and the state of the score after it."""

    def update(self, theta: Params, step: Step, state: ScoreState) -> tuple[Params, ScoreState]:
        """U = ∂θ ln p(x'|x and all before), and the state of the score after the step."""

    def residuals(self, theta: Params, times: Times, x: Array, context: PyTree) -> Array:
        """Squared residuals of x (E, T+1, M) over their expectation: of mean 1. Shape (E, T, M)."""


@runtime_checkable
class Counting(Transition, Protocol):
    """A `Transition` whose events can be counted, to be compared with its rates."""

    def counts(self, theta: Params, step: Step) -> tuple[Array, Array]:
        """Number of events of each kind in one recorded step, and the number expected, ∫a ds.

        Shape (R,) each.
        """


@runtime_checkable
class StepLaw(Transition, Protocol):
    """A `Transition` whose steps have a probability, to be compared with how often they happen."""

    def log_probability(self, theta: Params, step: Step) -> Array:
        """ln p of one step, as a function of θ."""

    def draw_next(self, key: Array, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        """Draw the state after one step. Shape (M,)."""

    def check_steps(self, theta: Params, trajectory: Any, number: int) -> None:
        """Refuse a trajectory with a step that has no probability, and name the first one."""

    def check_sampler(self, substrate: Any, theta: Params) -> None:
        """Refuse a simulator whose steps are not those of the log-probability."""


AnyProcess = Process | Transition
"""What a simulator runs and a score is of."""
