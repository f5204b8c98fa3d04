"""Markov chains in discrete time: a sampler of one step and its log-probability.

Spins, p-bits, cellular and tabular models. One step of the time grid takes X to X' with the
probability (or density) p(X'|X, t; θ), and its score is

    U = ∂θ ln p(X'|X, t; θ),

by automatic differentiation of the log-probability. The rest of the theorem is unchanged.

One step may be a sweep over many sites. If sites are updated once each, in a fixed order or by the
colours of a checkerboard, the two ends of the step determine all updates: ln p is the sum over the
sites, each with the values of its neighbours at its update. What the two ends do not determine,
such as a site that was chosen at random and not flipped, is stored in a component of the state.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.dependence import depends
from fluctua.core.display import records
from fluctua.core.likelihood.step_law import displace_zeros, examine_steps
from fluctua.core.process import Step
from fluctua.core.scores import Ratio
from fluctua.core.simulate import Simulator, first_state
from fluctua.core.trajectories import Trajectories

MAX_TRIED = 20_000
"""Simulated steps in which sampler and log-probability are compared."""

MAX_TRIED_NUMBERS = 4_000_000
"""Limit of these steps times the components of the state."""

TRIAL = 0x5C
"""Seed of the trajectories of this comparison."""

MAX_CHECKED = 256
"""Chains whose checks at the first state are remembered."""

_CHECKED: dict[Any, None] = {}
"""Chains that passed, with structure and shapes of their arguments; the latest."""


@dataclass(frozen=True)
class Chain:
    """A Markov chain in discrete time: spins, p-bits, cellular automata with noise, tables.

    Use it in place of a `Process`. States are real numbers: write spins as ±1.0.

    sample: (key, theta, x (M,), t, context) -> x_next (M,), one step. None for a chain that is
        only measured, never simulated.
    log_prob: (theta, x, x_next, t, context) -> ln p(x_next | x), one number, normalised over
        x_next. A sweep over many sites has the sum over its sites.

    Arguments at the end that a callable does not use may be left off. t is the time at which the
    step begins: with t = jnp.arange(T + 1) the number of the step.

    The two ends must determine everything that was random in a step. A sampler that picks a site
    at random keeps its number in one more component of the state, which `log_prob` reads from
    `x_next`.

    >>> def field(theta, x):  # of three spins that are coupled to their sum
    ...     return theta["coupling"] * x.sum() + theta["bias"]
    >>> def sample(key, theta, x):
    ...     up = jax.random.bernoulli(key, jax.nn.sigmoid(2 * field(theta, x)), (3,))
    ...     return jnp.where(up, 1.0, -1.0)
    >>> def log_prob(theta, x, x_next):
    ...     return jnp.sum(jax.nn.log_sigmoid(2 * x_next * field(theta, x)))
    >>> simulator = fl.simulator(fl.Chain(sample, log_prob), -jnp.ones(3), t=jnp.arange(11.0))
    >>> theta = {"coupling": jnp.array(0.5), "bias": jnp.array(0.2)}
    >>> simulator(key, theta, 20).x.shape
    (20, 11, 3)
    """

    sample: Callable[..., Array] | None
    log_prob: Callable[..., Array]

    def __post_init__(self) -> None:
        for name, first in (("sample", "key"), ("log_prob", "theta")):
            f = getattr(self, name)
            if f is None and name == "sample":
                continue
            _check_order(name, f, first)
            object.__setattr__(self, name, check.drop_extra_arguments(f, 5))

    def __repr__(self) -> str:
        return records.describe_parts("Chain", records.name_parts(vars(self)))

    def _repr_html_(self) -> str:
        return records.render_parts("Chain", records.name_parts(vars(self)))

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
    ) -> tuple[Array, None]:
        """Simulate a step. The two ends are all that its score needs."""
        if not isinstance(stream, jax.Array):
            raise ValueError(
                "a `Chain` is simulated with JAX's own generator: leave `wiener` of the simulator "
                "off."
            )
        return self.draw_next(jax.random.fold_in(stream, n), theta, x, t, context), None

    def draw_next(self, key: Array, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        """Draw the state after one step. Shape (M,)."""
        if self.sample is None:
            raise ValueError(
                "this `Chain` has no `sample`, so it cannot be simulated. Give one, or estimate "
                "from recorded trajectories with `gradient`."
            )
        return jnp.asarray(self.sample(key, theta, x, t, context)).astype(x.dtype)

    def events(self, *arguments: Any) -> None:
        """Nothing: a record of a chain consists of its states."""
        return None

    def log_probability(self, theta: Params, step: Step) -> Array:
        """ln p of one step, as a function of θ."""
        value = self.log_prob(theta, step.x, step.x_next, step.t, step.context)
        return jnp.asarray(value).astype(step.x.dtype)

    def score(self, theta: Params, step: Step) -> Params:
        """U of one step; NaN where the step is impossible, whatever its derivative."""
        value, slope = jax.value_and_grad(lambda th: self.log_probability(th, step))(theta)
        return jax.tree.map(lambda u: jnp.where(jnp.isfinite(value), u, jnp.nan), slope)

    def log_ratio(self, new: Params, old: Params, step: Step) -> Ratio:
        """ln p_new − ln p_old of one recorded step."""
        log = self.log_probability(new, step) - self.log_probability(old, step)
        return Ratio(log, -log)

    def check(
        self, theta: Params, x: Array, t: Array, context: PyTree, where: str = "at the first state"
    ) -> Chain:
        """Check shapes, one step from this state, and that every parameter of `sample` has a score.

        A chain that passed at the first state is not checked again for other numbers.
        """
        code = (self, check.tree_signature(theta), check.tree_signature((x, t, context)))
        if where in ("", "at the first state") and code in _CHECKED:
            return self
        arguments = (theta, x, t, context)
        if self.sample is None:
            _check_log_prob(self, theta, Step(x, x, t, jnp.ones_like(t), context))
        else:
            x_next = _check_sample(self, arguments, where)
            step = Step(x, x_next, t, jnp.ones_like(t), context)
            _check_log_prob(self, theta, step)
            self.check_step(theta, step, where, "`sample` drew")
            _refuse_unscored(self, arguments)
        _remember(code)
        return self

    def check_sampler(self, substrate: Simulator, theta: Params) -> None:
        """Refuse a simulator whose steps `log_prob` does not describe.

        Some trajectories are simulated for it, once for each chain, grid and kind of parameters.
        """
        steps = len(substrate.t) - 1
        code = (self, substrate.recipe, check.tree_signature(theta), steps)
        if code in _CHECKED:
            return
        state = first_state(substrate, jax.random.key(TRIAL), theta)[0]
        tried = min(MAX_TRIED, MAX_TRIED_NUMBERS // state.size)
        count = max(2, tried // max(steps, 8))
        trajectories = substrate(jax.random.key(TRIAL), theta, count)
        cause = examine_steps(self, theta, trajectories, tried, compare=False).cause
        if cause:
            raise ValueError(
                f"`sample` and `log_prob` of the `Chain` do not agree. {cause} ({count} "
                "trajectories were simulated at these parameters.)"
            )
        displaced = displace_zeros(self, theta, trajectories, tried) or ()
        causes = (self._compare_at(substrate, other, count, tried) for other in displaced)
        faults = list(itertools.takewhile(bool, causes))
        if faults and len(faults) == len(displaced):
            raise ValueError(
                f"`sample` and `log_prob` of the `Chain` do not agree. {faults[0]} ({count} "
                "trajectories were simulated with other numbers for the parameters that are zero: "
                "at zero a sign, a factor and an index do not show.)"
            )
        _remember(code)

    def _compare_at(self, substrate: Simulator, theta: Params, count: int, tried: int) -> str:
        """Describe what is wrong with the steps simulated at these parameters; empty if nothing."""
        trajectories = substrate(jax.random.key(TRIAL), theta, count)
        return examine_steps(self, theta, trajectories, tried, compare=False).cause

    def check_steps(self, theta: Params, trajectory: Trajectories, number: int) -> None:
        """Refuse a trajectory with a step that has no probability, and name the first one.

        trajectory: one alone, x (1, T+1, M). number: of the trajectory, for the message.
        """
        x = jnp.asarray(trajectory.x[0])
        t = jnp.asarray(trajectory.t)
        context = jax.tree.map(lambda leaf: leaf[0], trajectory.context)
        for n in range(len(t) - 1):
            step = Step(x[n], x[n + 1], t[n], t[n + 1] - t[n], context)
            self.check_step(theta, step, f"on trajectory {number} at time index {n}")

    def check_step(
        self, theta: Params, step: Step, where: str = "", source: str = "there is"
    ) -> None:
        """Refuse a step to which `log_prob` gives no probability, and name its two ends."""
        value, slope = jax.value_and_grad(lambda th: self.log_probability(th, step))(theta)
        ends = f"from x = {_format_state(step.x)} to {_format_state(step.x_next)}"
        if not np.isfinite(np.asarray(value)):
            raise ValueError(
                f"{source} a step {ends} {where or 'at the first state'}, and `log_prob` gives it "
                f"ln p = {float(value):g}. Both must describe the same chain: every step that "
                "happens needs a probability above zero, finite in this precision."
            )
        bad = [
            "theta" + jax.tree_util.keystr(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(slope)
            if not np.isfinite(np.asarray(leaf)).all()
        ]
        if bad:
            raise ValueError(
                f"the derivative of `log_prob` by `{bad[0]}` is not finite {ends} "
                f"{where or 'at the first state'}, though ln p = {float(value):g} is. Write it "
                "with jax.nn.log_sigmoid or log_softmax in place of logarithms of probabilities."
            )


def _remember(code: Any) -> None:
    _CHECKED[code] = None
    if len(_CHECKED) > MAX_CHECKED:
        _CHECKED.pop(next(iter(_CHECKED)))


def _check_order(name: str, f: Any, first: str) -> None:
    """Refuse callables whose first arguments are swapped, by their names."""
    expected = {
        "sample": "sample(key, theta, x, t, context)",
        "log_prob": "log_prob(theta, x, x_next, t, context)",
    }[name]
    try:
        parameters = list(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return
    others = {"key": check.PARAMETERS + check.STATE, "theta": (*check.STATE, "key")}[first]
    swapped = name == "log_prob" and " ".join(parameters).startswith("theta x_next x")
    if parameters and (parameters[0] in others or swapped):
        raise TypeError(
            f"`{name}({', '.join(parameters)})` has its arguments in another order: it is called "
            f"as {expected}."
        )


def _check_sample(chain: Chain, arguments: tuple, where: str) -> Array:
    """The state after one step, after a check of its shape and numbers. Shape (M,)."""
    x = arguments[1]
    assert chain.sample is not None
    got = chain.sample(jax.random.key(0), *arguments)
    shape = getattr(got, "shape", None)
    if shape != x.shape:
        form = type(got).__name__ if shape is None else f"shape {shape}"
        raise ValueError(f"`sample` must return one state, shape {x.shape}; got {form}.")
    if jnp.issubdtype(got.dtype, jnp.complexfloating):
        raise TypeError(
            f"`sample` must return real numbers; got {got.dtype}. Stack real and imaginary parts "
            "as components."
        )
    bad = np.flatnonzero(~np.isfinite(np.asarray(got, float)))
    if bad.size:
        raise ValueError(
            f"`sample` gave a state that is not finite {where or 'at the first state'}, from x = "
            f"{_format_state(x)}: component {bad[0]} is {float(got[bad[0]])}."
        )
    return jnp.asarray(got).astype(x.dtype)


def _check_log_prob(chain: Chain, theta: Params, step: Step) -> None:
    """Refuse a log-probability that is not one real number."""
    got = jax.eval_shape(chain.log_prob, theta, step.x, step.x_next, step.t, step.context)
    shape = getattr(got, "shape", None)
    if shape != ():
        form = type(got).__name__ if shape is None else f"shape {shape}"
        raise ValueError(
            f"`log_prob` must be one number per step, shape (); got {form}. The sites of a sweep "
            "are independent given their neighbours: return their sum, jnp.sum(...)."
        )
    if not jnp.issubdtype(got.dtype, jnp.floating):
        raise TypeError(f"`log_prob` must be a real floating-point number; got {got.dtype}.")


def _refuse_unscored(chain: Chain, arguments: tuple) -> None:
    """Refuse a parameter of the sampler that the log-probability lacks: its score is missing."""
    theta, *rest = arguments
    leaves, structure = jax.tree.flatten(theta)
    paths = jax.tree_util.tree_leaves_with_path(theta)
    x = rest[0]

    def sample(key: Array, *values: Any) -> Array:
        assert chain.sample is not None
        return chain.sample(key, jax.tree.unflatten(structure, values), *rest)

    def log_prob(x_next: Array, *values: Any) -> Array:
        x, t, context = rest
        return chain.log_prob(jax.tree.unflatten(structure, values), x, x_next, t, context)

    for i, (path, _) in enumerate(paths):
        moves = depends(sample, jax.random.key(0), *leaves, on=i + 1)
        if moves and not depends(log_prob, x, *leaves, on=i + 1):
            raise ValueError(
                f"`sample` depends on `theta{jax.tree_util.keystr(path)}` and `log_prob` does not: "
                "the score of that parameter would be zero, and its gradient wrong. Both must "
                "describe the same chain."
            )


def _format_state(x: Array) -> str:
    """The first components of a state as text."""
    values = np.asarray(x, float)
    more = f", … ({values.size} components)" if values.size > 8 else ""
    return "[" + ", ".join(f"{value:g}" for value in values[:8]) + more + "]"
