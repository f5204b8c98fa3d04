"""Recordings of part of the state: which parameters can be trained, and with which score.

The score of θ_l needs the residual of every component that θ_l acts on, and a residual needs the
drift there, so every state which that drift depends on. With N(i) = {j: ∂μ_i/∂x_j ≠ 0},

    component i is usable    if i and all of N(i) are observed, and so are all components that
                             its noise is shared with;
    θ_l is trainable         if all components i with ∂μ_i/∂θ_l ≠ 0 or ∂Q_i/∂θ_l ≠ 0 are usable.

For a resonator network that is: the site and all its neighbours for ω, χ and γ; both sites and all
neighbours of both for κ. The numbers of a trainable parameter are those of full observation, to the
last digit.

Where a residual cannot be formed, or where the samples carry noise of their own, the score is that
of a Kalman filter's prediction (`fluctua.Observed`): exact for linear drifts, with hidden
resonators and readout noise alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.diffusion import diffusion_at, diffusion_matrix
from fluctua.core.display.fields import show_fields
from fluctua.core.estimate import Estimate
from fluctua.core.integrators import require_euler
from fluctua.core.objective import Objective
from fluctua.core.process import Process, Score, Step
from fluctua.core.text import names
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile

PROBES = 3
"""Random states at which a derivative must be zero to be taken as zero."""

NO_REWARD = Objective(terminal=lambda theta, x: jnp.zeros((), x.dtype))


@show_fields
class Visibility(NamedTuple):
    """Components and parameters that the observed channels allow, made by `visibility`.

    usable: components with a residual (M,).
    trainable: parameters (P,), in the order of `ravel_pytree`.
    missing: {parameter: components that would have to be measured}, for the others.

    >>> seen = [0, 1, 2, 4, 5, 6, 7, 8, 10, 11]  # both quadratures; resonator 3 is hidden
    >>> view = insitu.visibility(model.process, model.objective, theta, observed=seen, size=12)
    >>> int(view.trainable.sum()), view.trainable.size  # parameters
    (8, 19)
    """

    usable: np.ndarray
    trainable: np.ndarray
    missing: dict[str, tuple[int, ...]]


def visibility(
    process: Process,
    objective: Objective | None,
    theta: Params,
    observed: Sequence[int] | np.ndarray,
    size: int,
    *,
    t: float = 0.0,
    context: Any = None,
    seed: int = 0,
) -> Visibility:
    """Find the parameters that can be trained from some components of a state.

    A reward of hidden states is refused.

    Args:
        process: its drift and noise.
        objective: what is maximised; None leaves rewards out.
        theta: θ, a pytree of floats.
        observed: components that are seen.
        size: M, of the state.
        t: time at which derivatives are evaluated.
        context: that of one trajectory, if the process needs one.
        seed: of the states at which they are evaluated.

    Returns: the parameters that can be trained, and those that are missing.

    >>> seen = [0, 1, 2, 4, 5, 6, 7, 8, 10, 11]  # both quadratures; resonator 3 is hidden
    >>> view = insitu.visibility(model.process, model.objective, theta, observed=seen, size=12)
    >>> view.missing["omega[0]"]  # needs the quadratures of resonator 3
    (3, 9)
    """
    process = check.process(process)
    rewards = check.objective(objective or NO_REWARD)
    theta = check.parameters(theta)
    seen = np.zeros(size, bool)
    seen[np.asarray(observed, int)] = True
    flat, unravel = ravel_pytree(theta)
    rng = np.random.default_rng(seed)
    on_state = np.zeros((size, size), bool)
    on_theta = np.zeros((size, flat.size), bool)
    coupled = np.eye(size, dtype=bool)
    reward = np.zeros(size, bool)
    when = jnp.asarray(t, flat.dtype)

    def drift(p, x):
        return process.drift(unravel(p), x, when, context)

    def matrix(p, x):
        return diffusion_matrix(process, unravel(p), x, when, context)

    def at_ends(p: Array, x: Array) -> Array:
        """Whether the rewards of the start and of a step depend on a component."""
        used = jnp.zeros(size, bool)
        if rewards.initial is not None:
            used |= jax.grad(rewards.initial, 1)(unravel(p), x, context) != 0
        if rewards.per_step is not None:
            ends = jax.grad(rewards.per_step, (1, 2))(
                unravel(p), x, x[::-1], when, jnp.ones_like(when), context
            )
            used |= (ends[0] != 0) | (ends[1] != 0)
        return used

    probe = jit(
        lambda p, x: (
            jax.jacfwd(drift, 1)(p, x) != 0,
            (jax.jacrev(drift, 0)(p, x) != 0) | (jax.jacfwd(matrix, 0)(p, x) != 0).any(axis=1),
            matrix(p, x) != 0,
            (jax.jacfwd(matrix, 1)(p, x) != 0).any(axis=1),
            jax.grad(lambda x: rewards.running(unravel(p), x, when, context))(x) != 0,
            (jax.grad(lambda x: rewards.terminal(unravel(p), x, context))(x) != 0) | at_ends(p, x),
        )
    )
    for _ in range(PROBES):
        # θ is moved off its value too: κ = 0 at the moment still couples two sites
        p = flat + jnp.asarray(0.1 * rng.normal(size=flat.size), flat.dtype)
        touched = [
            np.asarray(part) for part in probe(p, jnp.asarray(rng.normal(size=size), flat.dtype))
        ]
        on_state |= touched[0] | touched[3]
        on_theta |= touched[1]
        coupled |= touched[2]
        reward |= touched[4] | touched[5]
    if (reward & ~seen).any():
        raise ValueError(
            f"the reward depends on components {_join_few(np.flatnonzero(reward & ~seen))}, which "
            "are not observed: no return can be computed. Observe them, or reward "
            "what is observed."
        )
    needs = on_state | np.eye(size, dtype=bool)
    complete: Any = ~(needs & ~seen).any(axis=1)
    usable: Any = ~(coupled & ~complete).any(axis=1)
    trainable: Any = ~(on_theta & ~usable[:, None]).any(axis=0)
    missing = {}
    for index, name in enumerate(names(theta)):
        if not trainable[index]:
            wanted = needs[coupled[on_theta[:, index]].any(axis=0)].any(axis=0) & ~seen
            missing[name] = tuple(np.flatnonzero(wanted).tolist())
    return Visibility(usable, trainable, missing)


def refuse_untrainable(view: Visibility, wanted_names: Sequence[str], label: Any = str) -> None:
    """Raise if required parameters cannot be trained. label: component -> its name."""
    bad = [name for name in wanted_names if name in view.missing]
    if bad:
        reasons = "; ".join(
            f"{name} needs {_join_few(list(dict.fromkeys(label(i) for i in view.missing[name])))}"
            for name in bad[:4]
        )
        raise ValueError(f"not trainable from the observed channels: {', '.join(bad)}. {reasons}.")


@dataclass(frozen=True)
class Embedded:
    """A callable of the whole state as one of the observed components; hidden ones are zero.

    f: the callable.
    observed: numbers of the observed components.
    size: of the whole state.
    project: whether f returns a state, of which the observed components are taken.
    states: number of arguments after θ that are states.
    """

    f: Any
    observed: tuple[int, ...]
    size: int
    project: bool
    states: int = 1

    def __call__(self, theta: Params, *rest: Any) -> Any:
        """F at the embedded state, its observed components if it is a state itself."""

        def embed(x):
            return jnp.zeros(self.size, x.dtype).at[np.array(self.observed)].set(x)

        value = self.f(theta, *map(embed, rest[: self.states]), *rest[self.states :])
        return value[np.array(self.observed)] if self.project else value


def make_observed_model(
    process: Process, objective: Objective | None, observed: Sequence[int], size: int
) -> tuple[Process, Objective]:
    """Process and objective of the observed components only, for `gradient` with `PartialScore`."""
    process = check.process(process)
    seen = tuple(int(i) for i in observed)
    if process.noise is None or not callable(process.noise):
        raise ValueError(
            "a partly observed process needs its `noise` as amplitudes (M,) or a matrix (M, W)."
        )
    require_euler(process, "a score of some components", "Leave `integrator` off.")

    def embed(f):
        return Embedded(f, seen, size, project=True)

    return Process(embed(process.drift), embed(process.noise)), make_observed_objective(
        objective, seen, size
    )


def make_observed_objective(
    objective: Objective | None, observed: Sequence[int], size: int
) -> Objective:
    """Rewards of the whole state as rewards of the observed components, on which they depend."""
    rewards = check.objective(objective or NO_REWARD)
    seen = tuple(int(i) for i in observed)

    def embed(f):
        return Embedded(f, seen, size, project=False)

    return Objective(
        embed(rewards.running),
        embed(rewards.terminal),
        None
        if rewards.per_step is None
        else Embedded(rewards.per_step, seen, size, project=False, states=2),
        None if rewards.initial is None else embed(rewards.initial),
    )


@dataclass(frozen=True)
class PartialScore:
    """`full_score` from the residuals of usable components alone. usable: of the observed ones."""

    usable: tuple[bool, ...]

    def __call__(self, process: Process, theta: Params, step: Step) -> Params:
        """U. Entries of parameters that are not trainable mean nothing."""
        q = diffusion_at(process, theta, step.x, step.t, step.context)

        def r(th):
            return step.x_next - step.x - process.drift(th, step.x, step.t, step.context) * step.dt

        keep = jnp.asarray(self.usable, step.x.dtype)
        y = q.solve(r(theta)) * keep

        def log_density(th: Params) -> Array:
            return -q.trace(th) / 2 + y @ q.apply(th, y) / (4 * step.dt) - y @ r(th) / (2 * step.dt)

        return jax.tree.map(jnp.asarray, jax.grad(log_density)(theta))


def _join_few(items: Sequence[Any] | np.ndarray) -> str:
    listed = [str(i) for i in items]
    return ", ".join(listed[:6]) + (", …" if len(listed) > 6 else "")


class VisiblePart(NamedTuple):
    """Process, reward and score of the channels that a file has. view: what they leave out."""

    view: Visibility
    process: Process
    objective: Objective
    score: Score


def select_visible(recording: RecordingFile, model: RecordingModel) -> VisiblePart | None:
    """Part of a model that the channels of a file show; None if the file has all of them."""
    if not model.hidden:
        return None
    assert isinstance(model.process, Process)
    assert model.observed is not None
    assert model.size is not None
    first = recording.trajectories(0, 1).context
    view = visibility(
        model.process,
        model.objective,
        model.theta,
        model.observed,
        model.size,
        t=float(recording.t[0]),
        context=jax.tree.map(lambda leaf: leaf[0], first),
    )
    process, objective = make_observed_model(
        model.process, model.objective, tuple(map(int, model.observed)), model.size
    )
    score = PartialScore(tuple(view.usable[np.asarray(model.observed)].tolist()))
    return VisiblePart(view, process, objective, score)


def blank_estimate(result: Estimate, view: Visibility) -> Estimate:
    """Replace parameters that cannot be trained by NaN in an estimate."""
    names = ("gradient", "stderr", "second_moment")
    return result._replace(**{name: blank_tree(getattr(result, name), view) for name in names})


def blank_tree(tree: Params, view: Visibility) -> Params:
    """Replace parameters that cannot be trained by NaN."""
    flat, unravel = ravel_pytree(tree)
    return unravel(jnp.where(jnp.asarray(view.trainable), flat, jnp.nan))
