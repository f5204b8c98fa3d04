"""What one process holds while it trains an instrument: estimator, optimiser, instruments, log."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fluctua.core import protocols
from fluctua.core.arrays import Params
from fluctua.core.estimate import Groups
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.device_training.choice import MakeEstimator, resolve_estimator
from fluctua.insitu.device_training.device_table import DeviceTable
from fluctua.insitu.device_training.incidents import IncidentLog
from fluctua.insitu.device_training.instruments import Instruments
from fluctua.insitu.device_training.optimiser import make_optimiser
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.device_training.plan_file import hold_plan
from fluctua.insitu.instrument.substrate import DOUBT, Incident
from fluctua.insitu.model import Model
from fluctua.learn import training
from fluctua.learn.self_calibrating import SelfCalibrating
from fluctua.store import checkpoint, final, journal, loop

FINAL = "final"
"""In incidents.csv, the evaluation after the last iteration."""


class TrainingSession:
    """A training while it runs.

    Args:
        model: of the instruments.
        plan: of the training.
        instruments: that are trained.
        log: of incidents.
        make: makes the estimator; by default `ppgt` with the plan's baseline.

    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        instruments: Instruments,
        log: IncidentLog,
        make: MakeEstimator | None,
    ):
        self.model = model
        self.plan = plan
        self.instruments = instruments
        self.log = log
        self.groups: Groups | None = None
        self.table = DeviceTable(instruments.folder, instruments.devices)
        own = model.find_self_calibration() if plan.calibration == "training" else None
        self.self_calibration = own
        if own is not None:
            self.estimator: protocols.Estimator = self._make_self_calibrating()
        else:
            shared = instruments.model
            made = resolve_estimator(plan, make)(
                instruments.substrate, shared.objective, process=shared.process
            )
            self.estimator = protocols.as_estimator(made)

    def _make_self_calibrating(self) -> SelfCalibrating:
        """The estimator whose model every measured batch refines."""
        plan = self.plan
        own = self.self_calibration
        assert own is not None
        device = self.instruments.devices[0]

        # what is known of the instrument is in the estimator; the calibration in the context is the
        # guard's
        def measure(key: Any, theta: Params, count: int) -> Trajectories:
            return device.strip_calibration(self.instruments.substrate(key, theta, count))

        return SelfCalibrating(
            own.model,
            measure,
            own.effective,
            own.start,
            own.spread,
            forget_after=plan.forget_after or np.inf,
            renew=plan.renew,
            samples=0,
            measure_every=plan.measure_every,
            every=own.every,
            refit=own.refit,
            readout=plan.readout or own.readout,
            returns=own.returns,
            on_doubt=plan.on_doubt,
        )

    def make_loop(self) -> loop.Loop:
        """The training, with what happens after an iteration."""
        described = training.Training(
            self.estimator,
            self.model.start,
            make_optimiser(self.plan, self.model.learning_rate_scale),
            trajectories=self.plan.trajectories,
            bounds=(self.model.lower, self.model.upper),
            seed=self.plan.seed,
        )
        length = training.Length(self.plan.iterations)
        return loop.Loop(described, length, advance=self.advance, conclude=self.measure_final)

    def calibrate(self) -> None:
        """Calibrate each instrument at random settings; at none if the training calibrates."""
        self.instruments.count_cut_off()
        if isinstance(self.estimator, SelfCalibrating):
            self.follow()
        else:
            self.instruments.calibrate()

    def follow(self) -> None:
        """Update the calibration for the next iterations by the trajectories of the last one."""
        if isinstance(self.estimator, SelfCalibrating):
            assert self.self_calibration is not None
            values = self.self_calibration.context(self.estimator.phi)
            self.instruments.devices[0].use_calibration(values)
        else:
            self.instruments.follow()

    def report_calibration(self) -> None:
        """Write the calibration by the trajectories of the training."""
        if isinstance(self.estimator, SelfCalibrating) and self.estimator.calibration.trajectories:
            text = f"{self.estimator.calibration!r}\n"
            checkpoint.replace(self.instruments.devices[0].text, text.encode())

    def arrays(self) -> dict[str, np.ndarray]:
        """State of the instruments, and the plan, for a checkpoint."""
        return self.instruments.arrays() | hold_plan(dataclasses.asdict(self.plan))

    def advance(self, state: checkpoint.RunState, record: training.Record) -> loop.Advance:
        """State and row after a record, and the calibration that follows from it."""
        self._check_doubt()
        self.follow()
        self.groups = record.estimate.groups
        self.table.add(state.row, self.instruments.health(), self.groups)
        events = (self.log.summarise(), getattr(self.estimator, "event", ""))
        row = journal.make_row(state.row, record, "; ".join(filter(None, events)))
        self.log.iteration = str(record.iteration + 1)
        new = checkpoint.add_record(state, record, self.estimator.state)
        new = dataclasses.replace(new, further=self.arrays())
        return loop.Advance(new, row._replace(trajectories=self.instruments.spent))

    def _check_doubt(self) -> None:
        """Log a doubt about a model that is calibrated as it goes, and stop before its step."""
        if isinstance(self.estimator, SelfCalibrating) and DOUBT in self.estimator.event:
            stops = self.plan.on_doubt == "stop"
            lost = self.plan.trajectories if stops else 0
            self.log.add(Incident(DOUBT, lost, self.estimator.doubt))
            self.estimator.check_doubt()

    def measure_final(self, state: checkpoint.RunState) -> checkpoint.RunState:
        """Measure J with the settings reached, once; a failure is an incident."""
        if not self.plan.final_count or not state.row or final.is_measured(state):
            return state
        self.log.iteration = FINAL
        value = final.measure(
            self.estimator, state.now.theta, self.plan.final_count, self.plan.seed
        )
        if final.FAILED in value:
            self.log.note(FINAL, f"the final evaluation failed: {value[final.FAILED]}")
        value["spent"] = self.instruments.spent
        return final.hold(dataclasses.replace(state, further=self.arrays()), value)

    def close(self) -> None:
        """Write the report of several devices, and close files and instruments."""
        self.instruments.report(self.groups)
        self.table.close()
        self.instruments.close()
