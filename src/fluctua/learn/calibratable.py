"""Models that a training can calibrate: an estimator with a twin, its evidence and its guard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.estimator import PPGT
from fluctua.core.likelihood.alternatives import FITTED, Table
from fluctua.core.likelihood.evidence import Evidence, collect_evidence, collect_score
from fluctua.core.likelihood.guard import LAWS, TRANSITIONS, Examination, Residuals, examine_batch
from fluctua.core.likelihood.unknowns import At
from fluctua.core.process import Process
from fluctua.core.recorded import evaluate_returns
from fluctua.core.simulate import Simulator
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin.correction import TwinSamples

MAX_KICKS = 1_000_000
"""Maximum number of components of residuals that are examined per call."""

_NOT_EXAMINED = Examination(Residuals(np.ones(0), np.zeros(0), 0))


class CalibratableModel(Protocol):
    """Protocol of a model in the parameters p that `SelfCalibrating` can use.

    An estimator with a twin, such as that of `ppgt`, satisfies it. A model may also have
    `evidence_score`, which computes the score of `evidence` alone, `leaves_processor`, whether the
    processor is free while `split` runs, and `misfit` and `compare_record`, which compare records
    with what the model expects of them (`fluctua.learn.predictions`).
    """

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples:
        """Gradients of simulated trajectories in two parts, direct and correction."""

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """Gradients of measured trajectories in two parts, direct and correction."""

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Returns of measured trajectories. Shape (E,)."""

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int,
        readout: float,
    ) -> Evidence:
        """Evidence of trajectories about the unknowns. readout: standard deviation of the noise."""

    def examine(
        self, theta: Params, trajectories: Trajectories, readout: float, earlier: Table | None
    ) -> Examination:
        """Test the residuals of trajectories at p. earlier: sums of the batches before."""


@dataclass(frozen=True)
class CalibratableProcess:
    """Any Itô process with a twin as a `CalibratableModel`."""

    estimator: PPGT

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples:
        """Gradients of simulated trajectories in two parts."""
        return self.estimator.split(key, theta, count)

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """Gradients of measured trajectories in two parts."""
        return self.estimator.recorded(theta, trajectories, examined=True)

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Returns of measured trajectories. Shape (E,)."""
        return evaluate_returns(self.estimator.method.model.objective, theta, trajectories)

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int,
        readout: float,
    ) -> Evidence:
        """Evidence of trajectories about the unknowns."""
        model = self.estimator.method.model
        assert isinstance(model.process, Process)  # it has a twin
        return collect_evidence(
            model.process, model.score, at, theta, u, trajectories, every=every, readout=readout
        )

    def evidence_score(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int,
        readout: float,
    ) -> np.ndarray:
        """The score of the evidence alone. every: not used. Shape (K,)."""
        model = self.estimator.method.model
        assert isinstance(model.process, Process)
        return collect_score(
            model.process, model.score, at, theta, u, trajectories, readout=readout
        )

    def examine(
        self, theta: Params, trajectories: Trajectories, readout: float, earlier: Table | None
    ) -> Examination:
        """Test the residuals of trajectories at p; skipped with a custom score."""
        model = self.estimator.method.model
        simulator = self.estimator.substrate
        law = LAWS.get(model.score)
        if law is None:
            return _NOT_EXAMINED
        start = (
            simulator.x0 if isinstance(simulator, Simulator) and simulator.recipe.fixed else None
        )
        return examine_batch(
            model.process,
            theta,
            trajectories,
            transition=law,
            readout=readout**2,
            limits=FITTED,
            earlier=earlier,
            start=start,
            max_transitions=max(TRANSITIONS, MAX_KICKS // np.shape(trajectories.x)[2]),
        )
