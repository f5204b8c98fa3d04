"""Twin of a partially observed process (`fluctua.Observed`).

The unknowns follow from the innovations of its filter (`fluctua.processes.observed_evidence`). The
gradient of J is that of the model's noise-free path, whose reward is a function of Cx.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from fluctua.core import check, estimator, scores
from fluctua.core.arrays import Array, Params
from fluctua.core.likelihood import alternatives, guard
from fluctua.core.likelihood.evidence import Evidence
from fluctua.core.likelihood.unknowns import At
from fluctua.core.objective import Objective, Rewards
from fluctua.core.recorded import evaluate_returns
from fluctua.core.simulate import simulator
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin.correction import Twin, TwinSamples
from fluctua.processes.observed import Observed
from fluctua.processes.observed_evidence import collect_innovations


@dataclass(frozen=True)
class ObservedTwin:
    """Model of a partially observed process, for `fluctua.SelfCalibrating`.

    Its trajectories are records y (E, T+1, D) of an `Observed`.

    hidden: estimator of the hidden process, with a twin and rewards of Cx.
    observed: the process with its observation, in the parameters p.
    rewards: functions of y.
    """

    hidden: estimator.PPGT
    observed: Observed
    rewards: Rewards

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples:
        """Gradients of simulated trajectories in two parts."""
        return self.hidden.split(key, theta, count)

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """Raise `ValueError`: a record has no residuals of the hidden states."""
        raise ValueError(
            "a partially observed process has no states for a measured correction; use "
            'correction="none" or "simulated".'
        )

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Returns of measured records. Shape (E,)."""
        return evaluate_returns(self.rewards, theta, trajectories)

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int = 1,
        readout: float = 0.0,
    ) -> Evidence:
        """Evidence of records about the unknowns. every: not used."""
        if readout:
            raise ValueError(
                "the readout noise of a partially observed process is `noise` of its "
                f"`Observed`; got readout={readout:g}. Leave `readout` at 0."
            )
        return collect_innovations(self.observed, at, theta, u, trajectories)

    def examine(
        self,
        theta: Params,
        trajectories: Trajectories,
        readout: float,
        earlier: alternatives.Table | None,
    ) -> guard.Examination:
        """Test whether the innovations of records have the variance that the model expects."""
        return guard.examine_batch(self.observed, theta, trajectories)


def make_observed_twin(
    observed: Observed, objective: Objective | Rewards, start: Array, t: Array
) -> ObservedTwin:
    """Make the model of a partially observed process for `fluctua.SelfCalibrating`.

    Args:
        observed: the process with its observation, in the parameters p.
        objective: rewards of the samples y.
        start: state at which trajectories start, (M,).
        t: times of the samples, (T+1,).

    Returns: an `ObservedTwin`. Its noise-free path takes steps of the fourth order where the filter
        takes the samples as far apart (transition=local_linear), else Euler's.
    """
    rewards = check.objective(objective)
    far = observed.transition is scores.local_linear
    process = observed.process._replace(integrator="rk4" if far else "euler")
    seen: Any = _observe_rewards(rewards, observed.observe)
    simulated = simulator(process, jnp.asarray(start), t)
    hidden = estimator.ppgt(simulated, seen, baseline=Twin())
    return ObservedTwin(hidden, replace(observed, shared=False), rewards)


@dataclass(frozen=True)
class _RewardOfSample:
    """A reward of samples as one of hidden states.

    A record, so that equal ones share a compilation. states: arguments after θ that are states.
    """

    reward: Any
    observe: tuple[tuple[float, ...], ...]
    states: int

    def __call__(self, theta: Params, *rest: Any) -> Array:
        samples = (jnp.asarray(self.observe, x.dtype) @ x for x in rest[: self.states])
        return self.reward(theta, *samples, *rest[self.states :])


def _observe_rewards(rewards: Rewards, observe: Any) -> Rewards:
    """Rewards of y as rewards of x, with y = Cx."""
    running, terminal, per_step, initial, _ = rewards  # a stop is refused by `check.objective`
    return Rewards(
        _RewardOfSample(running, observe, 1),
        _RewardOfSample(terminal, observe, 1),
        None if per_step is None else _RewardOfSample(per_step, observe, 2),
        None if initial is None else _RewardOfSample(initial, observe, 1),
    )
