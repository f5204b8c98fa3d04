"""End of a run: the final evaluation and the summary."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

from fluctua.core.arrays import Params
from fluctua.core.simulate import plan_calls
from fluctua.learn.evaluate import can_refine, evaluate
from fluctua.learn.training import Length, Training
from fluctua.store import checkpoint, final, history, summary
from fluctua.store.folder import RunFolder, explain_failures


@dataclass(frozen=True)
class FinalEvaluation:
    """Options of evaluating the final parameters of a training.

    Args:
        training: what is trained.
        trajectories: how many; None for the default, 0 for no evaluation.
        planned: iterations that were first requested, which decide about kernels.
    """

    training: Training
    trajectories: int | None
    planned: int

    def __post_init__(self) -> None:
        final.check_number(self.trajectories)

    @property
    def source(self) -> str:
        """Source of the evaluation: a simulator, a device, or a call of the estimator."""
        return final.find_source(self.training.estimator)

    def measure(self, state: checkpoint.RunState) -> checkpoint.RunState:
        """Measure where there is no simulator, once, and count the trajectories."""
        source = self.source
        if source == final.SIMULATOR or self.trajectories == 0 or final.is_measured(state):
            return state
        last = max(state.now.iteration - 1, 0)
        minimum = final.MIN_MEASURED if source == final.DEVICE else 1
        count = final.choose_number(self.trajectories, self.training.ensemble_size(last), minimum)
        training = self.training
        with plan_calls(Length(None, self.planned).calls(last)):
            value = final.measure(training.estimator, state.now.theta, count, training.seed)
        spent = state.spent + value.get("trajectories", 0)
        return final.hold(replace(state, spent=spent), value)

    def summarise(self, state: checkpoint.RunState, size: int) -> dict[str, Any]:
        """Entries of a summary. size: trajectories of the last iteration."""
        value = final.read(state)
        if value is not None:
            failed = value.get(final.FAILED)
            return {"final": value} if failed is None else {summary.FAILED: failed}
        if self.trajectories == 0 or self.source != final.SIMULATOR:
            return {}
        return self._simulate(state.now.theta, self.trajectories or min(max(size, 256), 2000))

    def _simulate(self, theta: Params, count: int) -> dict[str, Any]:
        """J of new trajectories of the simulator, also with half its steps."""
        estimator: Any = self.training.estimator
        seed = self.training.seed
        value = evaluate(estimator, theta, count=count, seed=seed)._asdict()
        if not can_refine(estimator):  # a process in discrete time
            return {"final": value}
        finer = evaluate(estimator, theta, count=count, seed=seed, refine=2)._asdict()
        return {"final": value, "finer": finer, **summary.compare_steps(value, finer)}


def conclude(
    place: RunFolder, evaluation: FinalEvaluation, state: checkpoint.RunState
) -> dict[str, Any]:
    """Evaluate the final parameters where there is a simulator, and write the summary."""
    rows = history.read(place.history)
    last = rows[-1]
    numbers: dict[str, Any] = {
        **summary.summarise_rows(rows),
        "last": {"J": last.J, "J_stderr": last.J_stderr},
        "trajectories": state.spent,
        **evaluation.summarise(state, last.ensemble),
    }
    # J of a row without trajectories is the model's
    measured = [row for row in history.effective(rows) if row.ensemble]
    numbers |= summary.find_fall(measured, numbers.get("final", numbers["last"]))
    if summary.FAILED in numbers:
        warnings.warn(
            f"the final evaluation failed: {numbers[summary.FAILED]}. The training is complete "
            "and kept; the same call of `run` measures again.",
            RuntimeWarning,
            stacklevel=4,
        )
    with explain_failures(place):
        summary.write(place, numbers, format_summary(numbers))
    return numbers


def format_summary(numbers: dict[str, Any]) -> str:
    """A summary as text."""
    lines = [
        *summary.format_values(numbers),
        summary.format_training(numbers),
        *summary.format_peak(numbers),
    ]
    return "\n".join([*lines, ""])
