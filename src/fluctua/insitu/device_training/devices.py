"""One instrument of a training: its substrate, its calibration, and both in a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fluctua.core.arrays import PyTree
from fluctua.core.trajectories import Trajectories
from fluctua.core.words import format_count
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.instrument.archive import Archive
from fluctua.insitu.instrument.guard import ResidualGuard
from fluctua.insitu.instrument.protocol import Instrument
from fluctua.insitu.instrument.substrate import Incident, instrument_substrate
from fluctua.insitu.model import Model
from fluctua.store import checkpoint

CALIBRATION = "calibration/"
FIRST = "first calibration/"
"""Prefixes of entries of a checkpoint."""

CUT_OFF = "cut off"
"""Incident: trajectories were measured after the last checkpoint of a killed run."""

ADVICE = "Everything acquired so far is kept; mend it and go on with the run (--resume)."
"""After a failure within a training."""

MAX_DRIFTS = 8
"""Calibrated quantities that `devices.csv` follows; the first of more."""

Connect = Callable[[], Instrument]


class CalibratedDevice:
    """One instrument of a training.

    Args:
        connect: opens it.
        model: of it.
        plan: of the training.
        guard: compares its noise with that at calibration.
        folder: of the run; recordings go below it.
        number: of this device among several, from 1; 0 for one alone.
        report: called with every incident.

    """

    def __init__(
        self,
        connect: Connect,
        model: Model,
        plan: Plan,
        *,
        guard: ResidualGuard,
        folder: Path,
        number: int,
        report: Callable[[Incident], None],
    ):
        self.model = model
        self.plan = plan
        self.guard = guard
        self.number = number
        self.report = report
        self.calibration: dict[str, Any] = {}
        self.first: dict[str, Any] = {}
        self.text = folder / (f"calibration-{number}.txt" if number else "calibration.txt")
        recordings = folder / "recordings"
        if number:
            recordings = recordings / f"device-{number}"
        self.substrate = instrument_substrate(
            connect,
            batch=plan.batch,
            retry=plan.retry,
            guard=guard,
            channels=model.channels,
            report=self.note,
            # a model that is calibrated by the training is examined by its estimator
            on_doubt=None if plan.calibration == "training" else plan.on_doubt,
            archive=Archive(recordings, model.methods.head) if plan.record else None,
        )
        self.substrate.expected = model.expected
        self.substrate.advice = ADVICE

    def note(self, incident: Incident) -> None:
        """Report an incident, with the number of the device."""
        if self.number:
            message = f"device {self.number}: {incident.message}"
            incident = incident._replace(message=message)
        self.report(incident)

    def calibrate(self) -> None:
        """Measure at random settings, and calibrate the model by that."""
        rng = np.random.default_rng(self.plan.seed)
        runs = []
        for _ in range(self.plan.probes):
            settings = self.model.probe(rng)
            runs.append((settings, self.substrate(None, settings, self.plan.probe_trajectories)))
        fit = self.model.calibrate(runs)
        self.guard.calibrate(runs, fit.values)
        if fit.report:
            checkpoint.replace(self.text, fit.report.encode())
        self.calibration = fit.values
        self.first = fit.values
        self.substrate.context = self.make_context

    def follow(self) -> None:
        """Update the calibration for the next iterations by the trajectories of the last one."""
        follow = self.model.methods.follow
        if follow is not None and self.substrate.last is not None:
            self.calibration = follow(self.calibration, *self.substrate.last)

    def use_calibration(self, values: dict[str, Any]) -> None:
        """Use a calibration that was made elsewhere; the first batch gives the noise.

        A partially observed device has no residuals of its states to guard; its innovations are
        tested by the estimator.
        """
        self.calibration = values
        self.first = self.first or values
        own = self.model.methods.self_calibration
        is_read_whole = own is None or not own.required
        if is_read_whole and self.guard.noise is None and self.substrate.last is not None:
            settings, trajectories = self.substrate.last
            self.guard.calibrate([(settings, self.strip_calibration(trajectories))], values)
        self.substrate.context = self.make_context

    def strip_calibration(self, trajectories: Trajectories) -> Trajectories:
        """The trajectories with what was recorded as their context, without the calibration."""
        context = trajectories.context or {}
        recorded = {k: v for k, v in context.items() if k not in self.calibration}
        return trajectories._replace(context=recorded or None)

    def make_context(self, count: int) -> PyTree:
        """The calibration, one row per trajectory."""
        return jax.tree.map(
            lambda v: np.broadcast_to(np.asarray(v), (count, *np.shape(v))), self.calibration
        )

    @property
    def prefix(self) -> str:
        """Prefix of its entries in a checkpoint."""
        return f"device-{self.number}/" if self.number else ""

    def arrays(self) -> dict[str, np.ndarray]:
        """Calibration, counts and what is known of the instrument, for a checkpoint."""
        archive = self.substrate.archive
        kept = {CALIBRATION + name: np.asarray(v) for name, v in self.calibration.items()}
        kept |= {FIRST + name: np.asarray(v) for name, v in self.first.items()}
        kept |= self.substrate.arrays()
        kept |= {
            "counts": np.array(json.dumps(self.substrate.counts)),
            "batches": np.array(archive.number if archive else 0),
        }
        return {self.prefix + name: array for name, array in kept.items()}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Put the `arrays` of a checkpoint back."""
        own = _select(arrays, self.prefix)
        self.substrate.counts = Counter(json.loads(str(own["counts"])))
        self.substrate.load(own)
        self.count_cut_off(int(own["batches"]))
        self.calibration = _select(own, CALIBRATION)
        self.first = _select(own, FIRST) or self.calibration
        if self.calibration:
            self.substrate.context = self.make_context

    def count_cut_off(self, batches: int) -> None:
        """Count the trajectories in the batches after a checkpoint, which are measured again.

        batches: how many the checkpoint counts.
        """
        archive = self.substrate.archive
        lost = archive.count_since(batches) if archive else 0
        if lost:
            self.substrate.counts[CUT_OFF] += lost
            verb = "is" if lost == 1 else "are"
            used = format_count(lost, "trajectory")
            text = f"{used} of what was cut off {verb} kept and not used"
            self.note(Incident(CUT_OFF, lost, text))

    def drifts(self) -> dict[str, float]:
        """Root mean square change of each calibrated quantity since the first calibration."""
        names = [name for name in list_drifting(self.first) if np.size(self.first[name])]
        return {name: _compare(self.calibration[name], self.first[name]) for name in names}


def list_drifting(values: Mapping[str, Any]) -> list[str]:
    """Names of the calibrated quantities that `devices.csv` follows: not their errors."""
    return [name for name in sorted(values) if not name.endswith("_stderr")][:MAX_DRIFTS]


def _compare(now: Any, first: Any) -> float:
    change = np.asarray(now, float) - np.asarray(first, float)
    return float(np.sqrt(np.mean(change**2)))


def _select(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The entries with a prefix, without it."""
    return {n.removeprefix(prefix): v for n, v in arrays.items() if n.startswith(prefix)}
