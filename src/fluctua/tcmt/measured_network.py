"""Measured trajectories of a network: returns, evidence, twin correction and residual tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fluctua.core import baselines
from fluctua.core.arrays import Array, Params
from fluctua.core.estimator import ppgt
from fluctua.core.integrators import Substeps
from fluctua.core.likelihood import alternatives, guard
from fluctua.core.likelihood import evidence as likelihood_evidence
from fluctua.core.likelihood.unknowns import At
from fluctua.core.scores import full_score
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin.correction import TwinSamples
from fluctua.tcmt import conversion, state_scores
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.kernel import twin as kernel_twin

KICKS = 300_000
"""Components of residuals examined per call: a few per cent of its time."""


@dataclass(frozen=True)
class MeasuredNetwork:
    """Estimates from measured trajectories of the network of a task.

    task: the model.
    """

    task: Experiment

    @cached_property
    def s_plus(self) -> np.ndarray:
        """s⁺ on every lead, (L,) or (T, L); kept, since it does not depend on θ."""
        return conversion.incoming_table(self.task)

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Return the return of each measured trajectory. (E,)"""
        return state_scores.compute_returns(
            conversion.kernel_spec(self.task, theta, self.s_plus), trajectories.t, trajectories.x
        )

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int = 1,
        readout: float = 0.0,
    ) -> likelihood_evidence.Evidence:
        """Return the evidence of measured states about unknowns of the network."""
        p, slope = state_scores.linearise(at, theta, u)
        if (
            self.task.integrator != "euler"
            or self.task.copies > 1
            or not set(p) <= set(state_scores.KNOWN)
        ):
            return likelihood_evidence.collect_evidence(
                self.task.process,
                full_score,
                at,
                theta,
                u,
                trajectories,
                every=every,
                readout=readout,
            )
        spec = conversion.kernel_spec(self.task, p, self.s_plus)
        return state_scores.collect_evidence(
            self.task, spec, at, theta, u, trajectories, every, readout, slope
        )

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """Return the two parts of the twin correction on measured states.

        Score and twin are those of the network at θ.
        """
        is_served = self.task.integrator == "euler" and len(trajectories.t) == len(self.task.t)
        if (
            self.task.copies > 1
            or self.task.modulation
            or not is_served
            or not set(theta) <= set(state_scores.KNOWN)
        ):
            general = ppgt(self.task.simulator(), self.task.objective, baseline=baselines.Twin())
            return general.recorded(theta, trajectories, examined=True)
        spec = conversion.kernel_spec(self.task, theta, self.s_plus)
        parts = state_scores.collect_twin_parts(
            self.task, spec, kernel_twin.expected_lambda(spec), trajectories
        )

        direct = {name: parts.direct[name] for name in theta}
        correction = {name: parts.correction[name] for name in theta}
        return parts._replace(direct=direct, correction=correction)

    def examine(
        self,
        theta: Params,
        trajectories: Trajectories,
        readout: float,
        earlier: alternatives.Table | None,
        known_noise: bool = True,
    ) -> guard.Examination:
        """Test whether trajectories are those of the network at θ.

        The residual of a sample is its distance from the model's own steps from the sample before.
        """
        process = self.task.process
        stride = state_scores.count_steps(self.task.t[1] - self.task.t[0], trajectories.t)
        if stride > 1 and process.integrator == "euler":
            process = process._replace(integrator=Substeps(stride))
        # tests of a few residuals: copies to a GPU and back would take longer
        with state_scores.on_host():
            return guard.examine_batch(
                process,
                {name: np.asarray(v) for name, v in theta.items()},
                trajectories,
                readout=readout**2,
                limits=alternatives.FITTED,
                earlier=earlier,
                start=self.task.start,
                known_noise=known_noise,
                max_transitions=max(
                    guard.TRANSITIONS // 20, KICKS // (2 * self.task.network.sites)
                ),
            )
