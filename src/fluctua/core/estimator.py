"""The physical policy gradient theorem (Eqs. 12 and 13) as two functions: from given trajectories,
and as an estimator that runs a substrate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check, recorded, streamed
from fluctua.core.arrays import Array, Params, concatenate_rows, put
from fluctua.core.baselines import (
    Baseline,
    Setting,
    Twin,
    check_admissible,
    check_baseline,
    check_unsorted,
    half,
    resolve_baseline,
    time_only,
    use_other_half,
)
from fluctua.core.diffusion import check_model
from fluctua.core.draws import Density, Reparameterised, check_score, check_start
from fluctua.core.estimate import Estimate, Samples, combined, labelled, reduce_samples, unflatten
from fluctua.core.integrators import match_quadrature
from fluctua.core.likelihood.guard import LAWS, warn_about_residuals
from fluctua.core.likelihood.linearisation import check_linearisation
from fluctua.core.model import EstimatorModel, Tables, has_random_start, mark_noiseless
from fluctua.core.objective import FunctionOfMeans, Objective, Rewards
from fluctua.core.process import AnyProcess, Counting, Process, Remembering, Score, Step, Transition
from fluctua.core.protocols import PlainEstimator
from fluctua.core.recorded import BLOCK_BYTES, Recording, pieces
from fluctua.core.scores import full_score, local_linear
from fluctua.core.simulate import Simulator, first_state, match_integrator, refuse_start
from fluctua.core.streamed import split_key
from fluctua.core.trajectories import Substrate, Trajectories
from fluctua.core.twin import sweep as twin_sweep
from fluctua.core.twin.correction import (
    Numbers,
    TwinModel,
    TwinSamples,
    check_batches,
    check_initial_baseline,
    check_twin,
    twin_parameters,
)


def gradient(
    process: AnyProcess,
    objective: Objective | FunctionOfMeans,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    baseline: Baseline | Twin | str | None = None,
    initial_baseline: Baseline | str | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Estimate:
    """∇θJ from trajectories that came from somewhere: no simulator is needed.

    Args:
        process: drift and noise that the score uses, of the system or a calibrated model of it.
        objective: what is maximised, or a function of means (`function_of_means`).
        theta: the parameters at which the trajectories were taken, any pytree of floats.
        trajectories: one record, or an iterable of them (chunks of a data set larger than memory,
            on one time grid; arrays that load when sliced, such as memory maps and h5py data sets,
            are read block by block). Chunks give the same result as one piece. An iterable is gone
            through more than once, so it must start afresh each
            time: a list, or an object with `__iter__`, not a generator.
        start: None for a start that does not depend on θ.
        score: ∂θ ln p(x'|x) of one step; `local_linear_score` for samples that are far apart.
        baseline: what is taken off the return-to-go, a name ("time" if not given: each half of the
            trajectories takes the mean return-to-go of the other; "none", "mean", "optimal",
            "twin") or a record.
        initial_baseline: for the draw of X₀; `baseline` if not given ("optimal" with a `Twin`).
        block_bytes: how much of the trajectories is held at a time.

    Returns: an `Estimate`.

    """
    choices: Choices = {
        "start": start,
        "score": score,
        "baseline": baseline,
        "initial_baseline": initial_baseline,
    }
    # not through `gradient_samples`: a warning of the guard points at the caller, so many frames
    # above
    return reduce_samples(
        _recorded(_method(process, objective, **choices), theta, trajectories, block_bytes)
    )


class Choices(TypedDict, total=False):
    """Options that the doors of the theorem share; `gradient` explains them."""

    start: Density | Reparameterised | None
    score: Score
    baseline: Baseline | Twin | str | None
    initial_baseline: Baseline | str | None


def gradient_samples(
    process: AnyProcess,
    objective: Objective | FunctionOfMeans,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    block_bytes: int = BLOCK_BYTES,
    taken_at: Params | None = None,
    **choices: Unpack[Choices],
) -> Samples:
    """The gradients of the single trajectories, whose mean is `gradient(...)`.

    Args:
        process: drift and noise that the score uses.
        objective: what is maximised.
        theta: the parameters of the gradient.
        trajectories: one record, or an iterable of them.
        block_bytes: how much of the trajectories is held at a time.
        taken_at: the parameters at which the trajectories were taken, if not `theta`: the guard
            compares residuals at those. Gradients are not weighted by how likely a trajectory is at
            `theta`; `fluctua.reweighted` does that.
        **choices: `start`, `score`, `baseline` and `initial_baseline` as for `gradient`.

    Returns: `Samples`.
    """
    return _recorded(
        _method(process, objective, **choices), theta, trajectories, block_bytes, taken_at
    )


def ppgt(
    substrate: Substrate,
    objective: Objective | FunctionOfMeans,
    *,
    process: AnyProcess | None = None,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    baseline: Baseline | Twin | str | None = None,
    initial_baseline: Baseline | str | None = None,
) -> PPGT:
    """An estimator of ∇θJ that runs a substrate: (key, theta, count) -> `Estimate`.

    A simulator is streamed: the trajectories are never stored, and are replayed when the baseline
    needs the returns first.

    Args:
        substrate: a `simulator`, or any (key, theta, count) -> Trajectories.
        objective: what is maximised, or a function of means (`function_of_means`).
        process: drift and noise that the score uses. That of the simulator if not given; any other
            substrate needs one, and a calibrated model of it will do.
        start: the simulator's own if not given.
        score: ∂θ ln p(x'|x) of one step.
        baseline: what is taken off the return-to-go, a name ("time" if not given: from an
            independent pilot on a simulator, from the other half of the trajectories elsewhere;
            "none", "mean", "optimal", "twin") or a record. A `Twin` is a model that explains most
            of the return.
        initial_baseline: for the draw of X₀; `baseline` if not given ("optimal" with a `Twin`).

    Returns: the estimator, a `PPGT`.

    """
    if not callable(substrate):
        raise TypeError(
            "the first argument of `ppgt` is a substrate: a simulator, or any function "
            f"(key, theta, count) -> Trajectories; got {type(substrate).__name__}. Write "
            "ppgt(simulator(process, start, t), objective)."
        )
    if isinstance(substrate, Simulator):
        start = substrate.recipe.start if start is None else start
        own = substrate.recipe.process
        process = own if process is None else match_integrator(process, substrate)
    elif process is None:
        raise TypeError(
            "`ppgt` needs `process=`, the drift and noise of the score, for a substrate that is "
            f"not a simulator; got {type(substrate).__name__} without one."
        )
    return PPGT(_method(process, objective, start, score, baseline, initial_baseline), substrate)


class Method(NamedTuple):
    """The theorem with all its choices made. twin: checked, with a process of its own; None without
    one.

    baseline: λ̄ of the return-to-go, or with a twin that of Λ. means: of an objective that is a
    function of means; the objective of `model` is then its first part.
    """

    model: EstimatorModel
    baseline: Baseline
    initial_baseline: Baseline
    twin: Twin | None
    means: FunctionOfMeans | None = None

    @property
    def objective(self) -> Rewards | FunctionOfMeans:
        """What is maximised."""
        return self.means or self.model.objective


@dataclass(frozen=True)
class PPGT(PlainEstimator):
    """The estimator made by `ppgt`: (key, theta, count) -> Estimate.

    It costs one trajectory per sample; the noise-free paths of a twin are not counted.
    """

    method: Method
    substrate: Substrate

    @property
    def pilot(self) -> int:
        """Trajectories that a call runs besides, for its baseline."""
        if self.method.twin or not isinstance(self.substrate, Simulator):
            return 0
        return max(plan.pilot for plan in _plans(self.method))

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` trajectories."""
        return reduce_samples(self.samples(key, theta, count))

    def samples(
        self,
        key: Array,
        theta: Params,
        count: int,
        *,
        first: int | None = None,
        table: Array | None = None,
    ) -> Samples:
        """The gradients of the single trajectories.

        first: number of the first one, of a simulator; 0 if not given. table: λ̄ of `pilot_table`,
        known already.
        """
        if self.method.means and not isinstance(self.substrate, Simulator):
            check.count(count)
            theta = check.parameters(theta)
            k_run, _ = split_key(key)  # the parts are of the same trajectories: measured once
            measured = self.substrate(k_run, theta, count)
            return _recorded(
                self.method, theta, measured, BLOCK_BYTES, examined=_is_examined(self.substrate)
            )
        return _combine_parts(
            self.method,
            lambda method: PPGT(method, self.substrate)._samples(key, theta, count, first, table),
        )

    def pilot_table(self, key: Array, theta: Params) -> Array | None:
        """λ̄ (T+1,) from the pilot of a time-only baseline; None where no pilot is run."""
        if not self.pilot or self.method.means or not isinstance(self.substrate, Simulator):
            return None
        plans = _plans(self.method)
        return streamed.pilot_table(
            self.method.model, plans, self.substrate, key, check.parameters(theta)
        )

    def _samples(
        self,
        key: Array,
        theta: Params,
        count: int,
        first: int | None = None,
        table: Array | None = None,
    ) -> Samples:
        check.count(count)
        theta = check.parameters(theta, numbers=not isinstance(self.substrate, Simulator))
        if not isinstance(self.substrate, Simulator):
            k_run, _ = split_key(key)
            measured = self.substrate(k_run, theta, count)
            return _recorded(
                self.method, theta, measured, BLOCK_BYTES, examined=_is_examined(self.substrate)
            )
        if self.method.twin:
            return total(self.split(key, theta, count, first=first or 0))
        plans = _plans(self.method)

        simulator = self.substrate

        def start():
            return first_state(simulator, split_key(key)[0], theta)

        _check_baselines(self.method, Setting(theta, self.substrate.t, count, start))
        tables = _tables(plans) if table is None else _tables(plans).fill_missing(table)
        call = streamed.Call(
            self.method.model, plans, tables, self.substrate, key, theta, count, first
        )
        flat, returns = streamed.streamed_samples(call)
        return Samples(unflatten(theta, flat), returns)

    def split(
        self, key: Array, theta: Params, count: int, table: Array | None = None, *, first: int = 0
    ) -> TwinSamples:
        """The gradients in two parts, direct and correction, of an estimator with a `Twin`.

        table: λ̄ as a function of time (T+1,), the `mean_lambda` of other trajectories, in place of
        `Twin.baseline`.
        first: number of the first trajectory, of a simulator.
        """
        if self.method.twin is None:
            raise ValueError(
                "`split` is of the twin correction: make the estimator with ppgt(..., "
                "baseline=Twin())."
            )
        check.objective(self.method.objective)
        check.count(count)
        theta = check.parameters(theta)
        k_run, _ = split_key(key)
        if not isinstance(self.substrate, Simulator):
            measured = self.substrate(k_run, theta, count)
            return self.recorded(theta, measured, table, examined=_is_examined(self.substrate))
        model, numbers, batch = _with_twin(self.method, theta, table, count, self.substrate.t)

        simulator = self.substrate

        def start():
            return first_state(simulator, k_run, theta)

        _check_baselines(self.method, Setting(theta, self.substrate.t, count, start))
        return _parts(
            theta,
            twin_sweep.streamed_parts(model, numbers, batch, self.substrate, k_run, count, first),
        )

    def source(self, theta: Params) -> str:
        """The program that is generated for a simulator with a compiled backend, with the
        names of the parameters.
        """
        substrate = self.substrate
        backend = substrate.backend if isinstance(substrate, Simulator) else None
        if not isinstance(substrate, Simulator) or backend is None:
            raise ValueError(
                'nothing is generated for this substrate: use simulator(..., backend="auto") or '
                '"cpu".'
            )
        theta = check.parameters(theta)
        first, context = first_state(substrate, jax.random.key(0), theta)
        model = self.method.model
        process = check_model(model.process, model.objective, theta, first, substrate.t, context)
        model = mark_noiseless(model, process)
        key = jax.random.key(0)
        if self.method.twin:
            twin, numbers, batch = _with_twin(self.method, theta, None, 2, substrate.t)
            twin = twin._replace(model=twin.model._replace(process=model.process))
            return backend.source(twin_sweep.TwinCall(twin, numbers, batch, substrate, key, 2))
        plans = _plans(self.method)
        return backend.source(streamed.Call(model, plans, _tables(plans), substrate, key, theta, 1))

    def recorded(
        self,
        theta: Params,
        trajectories: Trajectories,
        table: Array | None = None,
        *,
        examined: bool = False,
    ) -> TwinSamples:
        """The two parts of measured trajectories, of an estimator with a `Twin`.

        table: λ̄ as in `split`. examined: whether the residual guard has seen the trajectories
        already.
        """
        if trajectories.group is not None:
            several = len(np.unique(np.asarray(trajectories.group)))
            raise ValueError(
                f"trajectories of {several} devices have errors between devices, which the two "
                "parts of a twin do not "
                "keep apart: call the estimator itself."
            )
        return _recorded_split(
            self.method, theta, trajectories, table, BLOCK_BYTES, examined=examined
        )


def total(parts: TwinSamples) -> Samples:
    """Direct + correction."""
    return Samples(jax.tree.map(jnp.add, parts.direct, parts.correction), parts.returns)


def mean_return_to_go(
    objective: Objective | Rewards, theta: Params, trajectories: Trajectories
) -> Array:
    """E[λ̂ₙ] at every time: the `values` of a time-only baseline, from other trajectories.

    Args:
        objective: what is maximised.
        theta: θ, a pytree of floats.
        trajectories: recorded or simulated at θ.

    Returns: (T+1,).
    """
    recording = Recording(trajectories, theta)
    x = jnp.asarray(trajectories.x, recording.dtype)
    return recorded.mean_return_to_go(
        check.objective(objective), theta, recording.times, x, recording.context
    )


# ----------------------------------------------------------------------------------- what is behind


def _method(
    process: AnyProcess,
    objective: Objective | FunctionOfMeans,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    baseline: Baseline | Twin | str | None = None,
    initial_baseline: Baseline | str | None = None,
) -> Method:
    refuse_start(process, start)
    moving = None if start is None else check_start(start)[0]
    process = check.process(process)
    checked = match_quadrature(check.objective_or_means(objective), process)
    means = checked if isinstance(checked, FunctionOfMeans) else None
    rewards = checked.parts[0] if isinstance(checked, FunctionOfMeans) else checked
    score = select_score(process, score)
    check_score(score, moving)
    plan = resolve_baseline(baseline, caller="an estimator of any process")
    check_unsorted(plan, "an estimator of any process")
    initial: Baseline | Twin
    if isinstance(plan, Twin):
        twin = check_twin(plan, score, process)
        step = twin.baseline
        initial = check_initial_baseline(
            "optimal" if initial_baseline is None else initial_baseline
        )
    else:
        twin = None
        step = plan
        initial = plan
        if initial_baseline is not None:
            initial = resolve_baseline(
                initial_baseline,
                caller="the draw of X₀",
                serves=("none", "time", "mean", "optimal", "own"),
            )
    assert isinstance(step, Baseline)
    assert isinstance(initial, Baseline)
    return Method(
        EstimatorModel(process, rewards, score, moving, step.of, initial.of),
        step,
        initial,
        twin,
        means,
    )


def select_score(process: AnyProcess, score: Score) -> Score:
    """Itô processes have several scores to choose from; others bring their own."""
    if isinstance(process, Process):
        return score
    if score is not full_score:
        raise ValueError(f"a {type(process).__name__} brings its own score: leave `score` off.")
    return _own_score


def _own_score(process: Transition, theta: Params, step: Step) -> Params:
    return process.score(theta, step)


def _combine_parts(method: Method, samples: Callable[[Method], Samples]) -> Samples:
    """The samples of a method, from those of its parts where the objective is a function of
    means.
    """
    if method.means is None:
        return samples(method)

    def alone(part):
        return samples(method._replace(model=method.model._replace(objective=part), means=None))

    return combined(method.means.function, [alone(part) for part in method.means.parts])


def _recorded(
    method: Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    block_bytes: int,
    taken_at: Params | None = None,
    examined: bool = False,
) -> Samples:
    if method.means:
        samples = _combine_parts(
            method,
            lambda part: _recorded(part, theta, trajectories, block_bytes, taken_at, examined),
        )
        return labelled(samples, trajectories)
    if method.twin:
        split = _recorded_split(method, theta, trajectories, None, block_bytes, taken_at, examined)
        return labelled(total(split), trajectories)
    theta = check.parameters(theta)
    recording = Recording(trajectories, theta)
    _guard(method, theta if taken_at is None else taken_at, trajectories, recording, examined)
    for plan in _plans(method):
        check_baseline(plan, recording.count, recording.t)

    def start():
        return (recording.first, recording.context)

    _check_baselines(method, Setting(theta, recording.t, recording.count, start))
    if not any(plan.needs_returns for plan in _plans(method)):
        parts = [
            samples
            for _, samples in _by_pieces(
                method, theta, trajectories, recording.count, block_bytes, None
            )
        ]
        joined = (
            parts[0]
            if len(parts) == 1
            else jax.tree.map(lambda *leaves: concatenate_rows(leaves), *parts)
        )
        return labelled(joined, trajectories)
    model = method.model
    tables = _tables(method[1:3])
    if any(
        plan.pilot for plan in _plans(method)
    ):  # beside a baseline that looks across all trajectories
        means = jnp.stack(
            _average_halves(method, theta, trajectories, recording.count, block_bytes, None),
            axis=1,
        )
        tables = Tables(*(means if plan.pilot else plan.values for plan in method[1:3]))
        of = [use_other_half if plan.pilot else plan.of for plan in method[1:3]]
        model = model._replace(baseline=of[0], initial_baseline=of[1])
    flat, returns = recorded.recorded_samples(model, tables, recording, theta, block_bytes)
    return labelled(Samples(unflatten(theta, flat), returns), trajectories)


def chunked_samples(
    process: AnyProcess,
    objective: Objective,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    count: int,
    *,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    baseline: Baseline | str | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[Trajectories, Samples]]:
    """Trajectories with their gradients, a few at a time and in order, for sums over recordings of
    any length.

    The arguments are those of `gradient`. count: trajectories in all. baseline: one that does not
    look across trajectories; "time" reads everything twice, "none" once. block_bytes: how much is
    held at a time. progress: called with the number of trajectories that were just read.
    """
    check.objective(objective)
    plan = resolve_baseline(baseline, caller="an estimate chunk by chunk", serves=("none", "time"))
    method = _method(process, objective, start, score, plan, None)
    return _by_pieces(method, check.parameters(theta), trajectories, count, block_bytes, progress)


def _by_pieces(
    method: Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    count: int,
    block_bytes: int,
    progress: Callable[[int], None] | None,
) -> Iterator[tuple[Trajectories, Samples]]:
    cut = 0
    means = None
    if any(plan.pilot for plan in _plans(method)):
        cut = half(count)
        means = _average_halves(method, theta, trajectories, count, block_bytes, progress)
    for first, piece in pieces(trajectories, cut, block_bytes):
        other = None if means is None else means[0 if first >= cut else 1]
        tables = Tables(*(other if plan.pilot else plan.values for plan in method[1:3]))
        recording = Recording(piece, theta, first)
        flat, returns = recorded.recorded_samples(
            method.model, tables, recording, theta, block_bytes
        )
        yield piece, Samples(unflatten(theta, flat), returns)
        if progress:
            progress(len(piece.x))


def _average_halves(
    method: Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    count: int,
    block_bytes: int,
    progress: Callable[[int], None] | None,
) -> list[Array]:
    """The mean return-to-go (T+1,) of either half: independent of the trajectories of the other."""
    if count < 2:
        raise ValueError(
            "a time-only baseline takes the mean return-to-go of other trajectories, and there is "
            "1 trajectory. Take "
            'more, or give time_only(values), or baseline="none".'
        )
    sums: list[Any] = [0.0, 0.0]
    counts = [0, 0]
    cut = half(count)
    for first, piece in pieces(trajectories, cut, block_bytes):
        recording = Recording(piece, theta, first)
        x = jnp.asarray(piece.x, recording.dtype)
        rewards = method.model.objective
        mean = recorded.mean_return_to_go(rewards, theta, recording.times, x, recording.context)
        side = int(first >= cut)
        sums[side] = sums[side] + len(piece.x) * np.asarray(mean, np.float64)
        counts[side] += len(piece.x)
        if progress:
            progress(len(piece.x))
    return [put(total / n) for total, n in zip(sums, counts, strict=True)]


def _recorded_split(
    method: Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    table: Array | None,
    block_bytes: int,
    taken_at: Params | None = None,
    examined: bool = False,
) -> TwinSamples:
    theta = check.parameters(theta)
    recording = Recording(trajectories, theta)
    _guard(method, theta if taken_at is None else taken_at, trajectories, recording, examined)
    model, numbers, batch = _with_twin(method, theta, table, recording.count, recording.t)

    def start():
        return (recording.first, recording.context)

    _check_baselines(method, Setting(theta, recording.t, recording.count, start))
    return _parts(theta, twin_sweep.recorded_parts(model, numbers, batch, recording, block_bytes))


def _with_twin(
    method: Method, theta: Params, table: Array | None, count: int, t: Array
) -> tuple[TwinModel, Numbers, int]:
    twin = method.twin
    assert twin is not None
    assert twin.process is not None  # `check_twin` fills it in
    baseline = method.baseline if table is None else time_only(table)
    check_batches(baseline, method.initial_baseline, method.model.start, count, twin.batch, t)
    model = TwinModel(method.model._replace(baseline=baseline.of), twin.process, twin.order)
    return model, Numbers(theta, twin_parameters(twin, theta), baseline.values), twin.batch


def _is_examined(substrate: Substrate) -> bool:
    """Whether an instrument has compared the residuals with its calibration (`examines`), which
    knows its noise.
    """
    return bool(getattr(substrate, "examines", False))


def _guard(
    method: Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    recording: Recording,
    examined: bool = False,
) -> None:
    """Whether the residuals are the noise of the process.

    A score of one's own may know another law: not asked.
    """
    process, objective, score = method.model[:3]
    check_model(process, objective, theta, recording.first, recording.t, recording.context)
    counted = isinstance(process, Counting) and jax.tree.leaves(
        recording.events(0, 1)
    )  # none: the score says so
    if isinstance(process, Remembering) or counted:
        warn_about_residuals(process, theta, trajectories, stacklevel=4)
    law = LAWS.get(score)
    if law is local_linear and isinstance(process, Process):
        check_linearisation(process, theta, trajectories)
    if law is not None and isinstance(process, Process) and not examined:
        warn_about_residuals(process, theta, trajectories, transition=law, stacklevel=4)


def _plans(method: Method) -> tuple[Baseline, ...]:
    """The baselines that are used: the initial one only where the start is drawn from a density."""
    return method[1:3] if has_random_start(method.model) else method[1:2]


def _check_baselines(method: Method, setting: Setting) -> None:
    check_admissible(method.baseline, setting)
    if has_random_start(method.model):
        check_admissible(method.initial_baseline, setting, of_start=True)


def _tables(plans: tuple[Baseline, ...]) -> Tables:
    return Tables(plans[0].values, plans[-1].values)


def _parts(theta: Params, parts: twin_sweep.Parts) -> TwinSamples:
    direct, correction, returns, mean_lambda = parts
    return TwinSamples(unflatten(theta, direct), unflatten(theta, correction), returns, mean_lambda)
