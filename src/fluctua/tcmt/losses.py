"""Twin of a network whose losses are calibrated by the drift alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.likelihood import alternatives, guard
from fluctua.core.likelihood import evidence as likelihood_evidence
from fluctua.core.likelihood.unknowns import At
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin.correction import TwinSamples
from fluctua.tcmt import conversion, state_scores
from fluctua.tcmt.fused import Fused
from fluctua.tcmt.kernel import options as kernel_options


@dataclass(frozen=True)
class DriftCalibratedTwin:
    """Twin of a network for `fluctua.SelfCalibrating` that finds losses γ by the drift alone.

    The noise of the losses is that of the model. A `Fused` also uses the noise, which determines γ
    better where samples are close, and is wrong where they are far apart or the readout has
    noise.
    """

    fused: Fused

    @property
    def leaves_processor(self) -> bool:
        """Whether the processor is free while trajectories are simulated."""
        return self.fused.leaves_processor

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples:
        """Return direct part and correction of simulated trajectories."""
        return self.fused.split(key, theta, count)

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """Return direct part and correction of measured trajectories."""
        return self.fused.recorded(theta, trajectories)

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Return the return of each measured trajectory. (E,)"""
        return self.fused.returns(theta, trajectories)

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int = 1,
        readout: float = 0.0,
    ) -> likelihood_evidence.Evidence:
        """Return the evidence of measured trajectories about the unknowns."""
        kernel_options.require_euler(self.fused.task.integrator, "the calibration of losses")
        p, slope = state_scores.linearise(at, theta, u)
        spec = conversion.kernel_spec(self.fused.task, p, self.fused.s_plus)
        return state_scores.collect_evidence(
            self.fused.task, spec, at, theta, u, trajectories, every, readout, slope
        )

    def examine(
        self,
        theta: Params,
        trajectories: Trajectories,
        readout: float,
        earlier: alternatives.Table | None,
    ) -> guard.Examination:
        """Test whether trajectories are those of the network at θ, with an unknown noise."""
        return self.fused.examine(theta, trajectories, readout, earlier, known_noise=False)
