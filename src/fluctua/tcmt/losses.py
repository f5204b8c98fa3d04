"""A network's twin whose losses are calibrated by what they do to the drift."""

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
class OfLosses:
    """A network's twin for `fluctua.SelfCalibrating`, in p with losses γ: these are found by what
    they do to the drift.

    Their noise is taken as the model has it. A `Fused` also asks the noise, which tells more about
    γ where it is all that moves a sample, and is wrong where samples are far apart or the readout
    has noise of its own.
    """

    fused: Fused

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples:
        """The two parts of simulated trajectories."""
        return self.fused.split(key, theta, count)

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """The two parts of measured trajectories."""
        return self.fused.recorded(theta, trajectories)

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Their returns. (E,)"""
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
        """What they say about the unknowns."""
        kernel_options.require_euler(self.fused.task.integrator, "the calibration of losses")
        p, slope = state_scores.at_point(at, theta, u)
        spec = conversion.kernel_spec(self.fused.task, p, self.fused.s_plus)
        return state_scores.evidence(
            self.fused.task, spec, at, theta, u, trajectories, every, readout, slope
        )

    def examine(
        self,
        theta: Params,
        trajectories: Trajectories,
        readout: float,
        earlier: alternatives.Table | None,
    ) -> guard.Examination:
        """Whether they are those of the network at θ, whose noise is not what calibrated
        its losses.
        """
        return self.fused.examine(theta, trajectories, readout, earlier, known_noise=False)
