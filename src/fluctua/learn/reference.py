"""Reference estimators of the gradient, to compare the policy gradient with.

They need what a laboratory does not have: a simulator to differentiate through (`pathwise`) or
noise that can be repeated (`finite_differences`, `spsa`). Their answers are known to be right.

`compare` runs estimators on one problem at equal cost in trajectories.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from rich import box
from rich.console import Console
from rich.table import Table

from fluctua.core import check, protocols, simulate, streamed
from fluctua.core import estimate as estimates
from fluctua.core import objective as objectives
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.diffusion import check_model
from fluctua.core.estimation import many
from fluctua.core.integrators import match_quadrature

__all__ = ["compare", "finite_differences", "pathwise", "spsa"]

BATCH = 256  # trajectories held at once by the reverse sweep of `pathwise`


@dataclass(frozen=True)
class Yardstick(protocols.PlainEstimator):
    """The estimator made by `pathwise`, `finite_differences` or `spsa`."""

    kernel: Any  # (rewards, recipe, count, run, *sizes) -> gradients (E, P), returns (E,)
    runs: Any  # θ -> trajectories per sample
    objective: objectives.Rewards | objectives.FunctionOfMeans
    substrate: simulate.Simulator
    options: tuple[float | None, ...] = ()

    def cost(self, theta: Params) -> int:
        """Trajectories per sample."""
        return self.runs(theta)

    def __call__(self, key: Array, theta: Params, count: int) -> estimates.Estimate:
        """Average over `count` noise realisations."""
        return estimates.reduce_samples(
            _draw_samples(
                self.kernel, self.substrate, self.objective, key, theta, count, *self.options
            )
        )


def pathwise(
    objective: objectives.Objective | objectives.FunctionOfMeans, substrate: simulate.Simulator
) -> Yardstick:
    """Estimator G = dR/dθ through the simulation with fixed noise (reparameterised gradient).

    A `Density` start is differentiated through its `sample` function. Memory grows as √T: the
    reverse sweep recomputes intermediate states.

    Args:
        objective: what is maximised.
        substrate: a `simulator`.

    Returns: an estimator that runs one trajectory per sample.
    """
    simulated = _require_simulator(substrate, "pathwise")
    if hasattr(simulated.recipe.process, "log_probability"):  # a chain
        raise ValueError(
            "`pathwise` differentiates the states of a trajectory, and those of a "
            f"{type(simulated.recipe.process).__name__} may jump with θ, whose derivative is then "
            "zero and not the gradient: use finite_differences with a larger `step`, or spsa."
        )
    return Yardstick(_pathwise, _one, _check_rewards(objective, substrate), simulated)


def finite_differences(
    objective: objectives.Objective | objectives.FunctionOfMeans,
    substrate: simulate.Simulator,
    *,
    step: float | None = None,
) -> Yardstick:
    """Estimator G_p = [R(θ + h e_p) − R(θ − h e_p)] / 2h, both under the same noise; error O(h²).

    Args:
        objective: what is maximised.
        substrate: a `simulator`; a `Density` start is drawn from the same key on both sides.
        step: h relative to the size of θ_p, or to 1 if that is larger; by default the cube root of
            the rounding unit.

    Returns: an estimator that runs two trajectories per sample and parameter, and one for the
    value.
    """
    simulated = _require_simulator(substrate, "finite_differences")
    return Yardstick(
        _differences,
        _two_each_and_one,
        _check_rewards(objective, substrate),
        simulated,
        (_check_step(step),),
    )


def spsa(
    objective: objectives.Objective | objectives.FunctionOfMeans,
    substrate: simulate.Simulator,
    *,
    step: float | None = None,
) -> Yardstick:
    """Estimator G = Δ [R(θ + hΔ) − R(θ − hΔ)] / 2h, with random signs Δ_p = ±1 per trajectory.

    Args:
        objective: what is maximised.
        substrate: a `simulator`; both sides run under the same noise.
        step: as in `finite_differences`.

    Returns: an estimator that runs two trajectories per sample, whatever the number of parameters.
    """
    return Yardstick(
        _spsa,
        _two,
        _check_rewards(objective, substrate),
        _require_simulator(substrate, "spsa"),
        (_check_step(step),),
    )


def _one(theta: Params) -> int:
    return 1


def _two(theta: Params) -> int:
    return 2


def _two_each_and_one(theta: Params) -> int:
    return 2 * ravel_pytree(theta)[0].size + 1


# ---------------------------------------------------------------------------------------- checks


def _require_simulator(substrate: Any, name: str) -> simulate.Simulator:
    if not isinstance(substrate, simulate.Simulator):
        raise TypeError(
            f"`{name}` needs a simulator whose noise it can repeat; got "
            f"{type(substrate).__name__}. Hardware cannot be asked for the same noise twice: use "
            "`ppgt`."
        )
    return substrate


def _check_step(step: float | None) -> float | None:
    if step is not None and not step > 0:
        raise ValueError(f"the finite-difference `step` must be positive; got {step}.")
    return step


def _check_rewards(
    objective: objectives.Objective | objectives.FunctionOfMeans, substrate: simulate.Simulator
) -> objectives.Rewards | objectives.FunctionOfMeans:
    """The rewards, integrated as the simulator integrates the process."""
    rewards = check.objective_or_means(objective)
    for part in rewards.parts if isinstance(rewards, objectives.FunctionOfMeans) else (rewards,):
        check.objective(part)  # refuses a `stop`, which a derivative of the path misses
    return match_quadrature(rewards, _require_simulator(substrate, "a reference").recipe.process)


def _draw_samples(
    kernel: Any,
    substrate: simulate.Simulator,
    objective: objectives.Rewards | objectives.FunctionOfMeans,
    key: Array,
    theta: Params,
    count: int,
    *options: Any,
) -> estimates.Samples:
    check.key(key)
    check.count(count)
    theta = check.parameters(theta)
    if isinstance(objective, objectives.FunctionOfMeans):  # every part under the same noise
        parts = [
            _draw_samples(kernel, substrate, part, key, theta, count, *options)
            for part in objective.parts
        ]
        return estimates.combine_samples(objective.function, parts)
    first, context = simulate.first_state(substrate, key, theta)
    check_model(substrate.recipe.process, objective, theta, first, substrate.t, context)
    flat, unravel = ravel_pytree(theta)
    each, returns = kernel(
        objective,
        substrate.recipe,
        count,
        streamed.Run(key, theta, substrate.times, substrate.x0),
        *(_step_sizes(flat, h) for h in options),
    )
    check.finite_simulation(returns[:, None], substrate.t)
    return estimates.Samples(jax.vmap(unravel)(each), returns)


def _step_sizes(flat: Array, step: float | None) -> Array:
    """h of every parameter. The cube root balances truncation h² against rounding eps/h."""
    relative = float(jnp.finfo(flat.dtype).eps) ** (1 / 3) if step is None else step
    return relative * jnp.maximum(1, jnp.abs(flat))


# --------------------------------------------------------------------------------------- kernels


def compute_return(
    recipe: simulate.Recipe, objective: objectives.Rewards, run: streamed.Run, j: Array
) -> Array:
    """R of trajectory j under its own noise, as a function of θ."""
    theta = run.theta
    x, context, stream = simulate.start_trajectory(recipe, run.key, theta, run.x0, j)
    per_step = objective.per_step
    reward = jnp.zeros((), x.dtype)
    if objective.initial is not None:
        reward = objective.initial(theta, simulate.observe(recipe, x), context).astype(x.dtype)

    def body(carry: Any, step: Any) -> tuple[Any, None]:
        x, reward = carry
        n, t, dt = step
        reward = reward + objective.running(theta, simulate.observe(recipe, x), t, context) * dt
        x_next = simulate.advance_one(recipe, theta, x, context, stream, n, t, dt)
        if per_step is not None:
            ends = simulate.observe(recipe, x), simulate.observe(recipe, x_next)
            reward = reward + per_step(theta, *ends, t, dt, context).astype(x.dtype)
        return (x_next, reward), None

    @jax.checkpoint
    def segment(carry: Any, steps: Any) -> tuple[Any, None]:
        return jax.lax.scan(body, carry, steps)[0], None

    total = run.times.dt.shape[0]
    length = max(1, int(total**0.5))
    whole = total // length * length
    steps = simulate.enumerate_steps(run.times)
    segments = jax.tree.map(lambda v: v[:whole].reshape(-1, length), steps)
    carry, _ = jax.lax.scan(segment, (x, reward), segments)
    (x, reward), _ = jax.lax.scan(body, carry, jax.tree.map(lambda v: v[whole:], steps))
    return reward + objective.terminal(theta, simulate.observe(recipe, x), context)


@partial(jit, static_argnums=(0, 1, 2))
def _pathwise(
    objective: objectives.Rewards, recipe: simulate.Recipe, count: int, run: streamed.Run
) -> tuple[Array, Array]:
    def one(j: Array) -> tuple[Array, Array]:
        value, slope = jax.value_and_grad(
            lambda th: compute_return(recipe, objective, run._replace(theta=th), j)
        )(run.theta)
        return ravel_pytree(slope)[0], value

    return jax.lax.map(one, jnp.arange(count), batch_size=min(count, BATCH))


@partial(jit, static_argnums=(0, 1, 2))
def _differences(
    objective: objectives.Rewards,
    recipe: simulate.Recipe,
    count: int,
    run: streamed.Run,
    h: Array,
) -> tuple[Array, Array]:
    flat, unravel = ravel_pytree(run.theta)
    up = flat + jnp.diag(h)
    down = flat - jnp.diag(h)
    rows = jnp.concatenate([flat[None], up, down])
    stack = run._replace(theta=jax.vmap(unravel)(rows))
    returns = many.collect_returns(objective, recipe, count, ("theta",), stack)
    middle, above, below = jnp.split(returns, [1, 1 + flat.size])
    # the difference of what the parameters actually became, not 2h: rounding of θ ± h cancels
    width = jnp.diagonal(up - down)
    return ((above - below) / width[:, None]).T, middle[0]


@partial(jit, static_argnums=(0, 1, 2))
def _spsa(
    objective: objectives.Rewards,
    recipe: simulate.Recipe,
    count: int,
    run: streamed.Run,
    h: Array,
) -> tuple[Array, Array]:
    flat, unravel = ravel_pytree(run.theta)
    k_signs, k_run = jax.random.split(run.key)
    numbers = jnp.arange(count)
    signs = jax.vmap(
        lambda j: jax.random.rademacher(jax.random.fold_in(k_signs, j), flat.shape, flat.dtype)
    )(numbers)
    rows = jnp.concatenate([flat + signs * h, flat - signs * h])
    # θ number j of either sign has trajectory j alone
    stack = run._replace(
        key=k_run, theta=jax.vmap(unravel)(rows), first=jnp.concatenate([numbers, numbers])
    )
    returns = many.collect_returns(objective, recipe, 1, ("theta", "first"), stack)
    up, down = jnp.split(returns, 2)
    return (up - down) / (2 * h) * signs, (up + down)[:, 0] / 2


# ------------------------------------------------------------------------------------------ compare


class ComparisonRow(NamedTuple):
    """One estimator of a comparison. Arrays are over the P parameters, in flattened order.

    name: as in the table.
    samples: per call.
    trajectories: all that one call runs, pilot included.
    z: (mean over repeats − reference) / standard error, the bias in standard errors.
    variance: of the gradient per trajectory spent, so that rows compare at equal cost.
    spread: standard deviation over repeats / claimed standard error; 1 for correct error bars.
    seconds: wall time of one call, compilation left out.
    """

    name: str
    samples: int
    trajectories: int
    z: np.ndarray
    variance: np.ndarray
    spread: np.ndarray
    seconds: float


class Comparison(NamedTuple):
    """Result of `compare`; prints as a table. `fluctua.plot.compare.draw` plots it."""

    rows: tuple[ComparisonRow, ...]
    reference: str
    repeats: int

    def __repr__(self) -> str:
        table = Table(box=box.SIMPLE_HEAD, title_justify="left")
        for heading in (
            "estimator",
            "samples",
            "trajectories",
            "bias / s.e.",
            "s.d. / s.e.",
            "variance",
            "time",
        ):
            table.add_column(
                heading, no_wrap=True, justify="left" if heading == "estimator" else "right"
            )
        for row in self.rows:
            table.add_row(
                row.name,
                f"{row.samples:,}",
                f"{row.trajectories:,}",
                f"{np.sqrt(np.mean(row.z**2)):.2f} (max {np.abs(row.z).max():.1f})",
                f"{np.sqrt(np.mean(row.spread**2)):.2f}" if self.repeats > 1 else "–",
                f"{row.variance.mean():.3g}",
                f"{1e3 * row.seconds:.1f} ms",
            )
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(table)
        notes = (
            f"bias: root mean square over parameters, against {self.reference}, {self.repeats} "
            "repeats; about 1 if unbiased.\n"
            "variance: of one gradient component per trajectory spent, averaged over parameters."
        )
        return capture.get() + notes


def compare(
    key: Array,
    theta: Params,
    estimators: Mapping[str, protocols.Estimator],
    *,
    trajectories: int,
    reference: Params | estimates.Estimate | str,
    repeats: int = 8,
) -> Comparison:
    """Compare estimators at equal cost: bias, error bars, variance and time of each.

    Args:
        key: of all noise.
        theta: where the gradient is estimated.
        estimators: by the names that the table shows.
        trajectories: for one call of each, all included: an estimator whose pilot takes p and whose
            samples cost c trajectories gets (trajectories − p) // c samples.
        reference: the exact gradient, an `Estimate`, or the name of the estimator to trust.
        repeats: independent calls, from which bias and error bars are judged. An estimator with a
            state starts each of them, and ends, with its first state.

    Returns: a `Comparison`, which prints as a table.

    >>> both = {"ppgt": estimator, "spsa": spsa(objective, simulator)}
    >>> print(compare(key, theta, both, trajectories=400, reference="ppgt"))
    """
    if repeats < 1:
        raise ValueError(f"`repeats` must be at least 1; got {repeats}.")
    theta = check.parameters(theta)
    runs = {
        name: _run_repeats(
            jax.random.fold_in(key, index),
            theta,
            _Candidate(name, protocols.as_estimator(candidate)),
            trajectories,
            repeats,
        )
        for index, (name, candidate) in enumerate(estimators.items())
    }
    truth, error, label = _resolve_reference(reference, runs)
    rows = []
    for name, run in runs.items():
        g = run.gradients
        pooled = np.sqrt(np.mean(run.errors**2, axis=0))  # of one call
        total = np.sqrt(pooled**2 / repeats + (0.0 if name == reference else error**2))
        z = np.where(total > 0, (g.mean(axis=0) - truth) / np.where(total > 0, total, 1), 0.0)
        spread = (
            g.std(axis=0, ddof=1) / np.where(pooled > 0, pooled, 1)
            if repeats > 1
            else np.ones_like(z)
        )
        rows.append(
            ComparisonRow(
                name,
                run.samples,
                run.trajectories,
                z,
                pooled**2 * run.trajectories,
                spread,
                run.seconds,
            )
        )
    return Comparison(tuple(rows), label, repeats)


class _Candidate(NamedTuple):
    """An estimator under the name that the table shows."""

    name: str
    estimator: protocols.Estimator

    def share(self, theta: Params, trajectories: int) -> int:
        """Number of samples per call, with the pilot of the last call."""
        cost = self.estimator.cost(theta)
        pilot = self.estimator.pilot
        samples = max(trajectories - pilot, 0) // max(cost, 1)  # 0: its last call measured nothing
        if samples < 2:
            besides = f" and {pilot:,} for its pilot" if pilot else ""
            raise ValueError(
                f"`{self.name}` costs {cost:,} trajectories per sample{besides}; {trajectories:,} "
                f"trajectories buy {samples}, and an error bar needs 2. Use "
                f"trajectories={2 * cost + pilot} or more."
            )
        return samples

    def reset(self, state: Mapping[str, np.ndarray], theta: Params) -> None:
        """Restore the first state."""
        self.estimator.restore(state, theta)
        now = self.estimator.state
        if now.keys() != state.keys() or any(
            now[name].tobytes() != state[name].tobytes() for name in state
        ):
            raise ValueError(
                f"`{self.name}` remembers what it has seen: `restore(state)` does not bring back "
                "the state that it came with, so that its repeats are not independent."
            )


class _Repeats(NamedTuple):
    """Results of repeated calls.

    gradients, errors: (repeats, P).
    samples, trajectories: per call.
    seconds: of the fastest call.
    """

    gradients: np.ndarray
    errors: np.ndarray
    samples: int
    trajectories: int
    seconds: float


def _run_repeats(
    key: Array, theta: Params, candidate: _Candidate, trajectories: int, repeats: int
) -> _Repeats:
    estimator = candidate.estimator
    begin = {name: np.array(value) for name, value in estimator.state.items()}
    samples = candidate.share(theta, trajectories)
    estimator(key, theta, samples)  # compiles
    known = candidate.share(theta, trajectories)  # one that remembers knows its pilot after a call
    if known != samples:
        samples = known
        candidate.reset(begin, theta)
        estimator(key, theta, samples)
    spent = samples * estimator.cost(theta) + estimator.pilot
    gradients = []
    errors = []
    seconds = []
    for repeat in range(repeats):
        candidate.reset(begin, theta)
        start = time.perf_counter()
        estimate = estimator(jax.random.fold_in(key, repeat + 1), theta, samples)
        jax.block_until_ready(estimate.gradient)
        seconds.append(time.perf_counter() - start)
        gradients.append(np.asarray(ravel_pytree(estimate.gradient)[0], float))
        errors.append(np.asarray(ravel_pytree(estimate.stderr)[0], float))
    candidate.reset(begin, theta)
    return _Repeats(np.array(gradients), np.array(errors), samples, spent, min(seconds))


def _resolve_reference(
    reference: Params | estimates.Estimate | str, runs: Mapping[str, _Repeats]
) -> tuple[np.ndarray, np.ndarray | float, str]:
    if isinstance(reference, str):
        if reference not in runs:
            raise ValueError(
                f"the reference `{reference}` is not among the estimators: {', '.join(runs)}."
            )
        run = runs[reference]
        error = np.sqrt(np.mean(run.errors**2, axis=0) / len(run.errors))
        return run.gradients.mean(axis=0), error, f"`{reference}`"
    if isinstance(reference, estimates.Estimate):

        def flat(tree):
            return np.asarray(ravel_pytree(tree)[0], float)

        return flat(reference.gradient), flat(reference.stderr), "the given estimate"
    return np.asarray(ravel_pytree(reference)[0], float), 0.0, "the exact gradient"
