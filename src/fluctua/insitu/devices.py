"""The instruments of a training: substrate, calibration and checkpoint of each, and `devices.csv`,
which follows them.

`devices.csv` has one row an iteration: `row`, as in `history.csv`, and for device k from 1 on `k
COLUMN`,

    J, error            its expected return and the error from its trajectories; NaN where it took
    no part trajectories, lost  averaged in this iteration; discarded so far
    failures            so far, retried ones included
    up, rate            whether it answers; how fast it is, relative to the median
    guard               noise of its last batch over that at calibration, of the component furthest
    off drift NAME          root mean square of how far a calibrated quantity has moved since the
    first calibration
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from fluctua.core.arrays import PyTree
from fluctua.core.estimate import Groups
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.instrument.device_array import DeviceHealth
from fluctua.insitu.instrument.guard import ResidualGuard
from fluctua.insitu.instrument.protocol import Instrument
from fluctua.insitu.instrument.substrate import Archive, Incident, Retry, instrument_substrate
from fluctua.insitu.model import Model
from fluctua.store import checkpoint, history

FILE = "devices.csv"
COLUMNS = ("J", "error", "trajectories", "lost", "failures", "up", "rate", "guard")
CALIBRATION = "calibration/"
FIRST = "first calibration/"
CUT_OFF = "cut off"
MOST_DRIFTS = 8
"""Calibrated quantities that `devices.csv` follows; the first of more."""


class CalibratedDevice:
    """One instrument of a training.

    Args:
        connect: opens it.
        model: of it.
        guard: compares its noise with that at calibration.
        probes: settings of the calibration, trajectories at each, and the seed that draws them.
        folder: of the run; recordings go to `recordings`/, or nowhere if that is None.
        place: of this device among several, from 1; 0 for one alone.
        batch: trajectories an acquisition.
        retry: of failed acquisitions.
        on_doubt: what follows a batch that is not what the calibrated process does; see `measured`.
        report: is told of every incident.

    """

    def __init__(
        self,
        connect: Callable[[], Instrument],
        model: Model,
        guard: ResidualGuard,
        *,
        probes: tuple[int, int, int],
        folder: Path,
        recordings: str | None,
        place: int,
        batch: int,
        retry: Retry,
        on_doubt: str | None,
        report: Callable[[Incident], None],
    ):
        self.model = model
        self.guard = guard
        self.probes = probes
        self.place = place
        self.report = report
        self.calibration: dict[str, Any] = {}
        self.first: dict[str, Any] = {}
        self.text = folder / (f"calibration-{place}.txt" if place else "calibration.txt")
        inner = f"{recordings}/device-{place}" if place else recordings
        self.substrate = instrument_substrate(
            connect,
            batch=batch,
            retry=retry,
            guard=guard,
            channels=model.channels,
            report=self.note,
            on_doubt=on_doubt,
            archive=None if inner is None else Archive(folder / inner, model.head),
        )

    def note(self, incident: Incident) -> None:
        """An incident with the number of the device."""
        self.report(
            incident._replace(message=f"device {self.place}: {incident.message}")
            if self.place
            else incident
        )

    def calibrate(self) -> None:
        """Trajectories at random settings, and what they say of the instrument."""
        probes, trajectories, seed = self.probes
        rng = np.random.default_rng(seed)
        runs = []
        for _ in range(probes):
            settings = self.model.probe(rng)
            runs.append((settings, self.substrate(None, settings, trajectories)))
        fit = self.model.calibrate(runs)
        self.guard.calibrate(runs, fit.values)
        if fit.report:
            checkpoint.replace(self.text, fit.report.encode())
        self.calibration = self.first = fit.values
        self.substrate.context = self.context

    def follow(self) -> None:
        """The calibration of the iterations to come, from the trajectories of this one."""
        if self.model.follow is not None and self.substrate.last is not None:
            self.calibration = self.model.follow(self.calibration, *self.substrate.last)

    def take(self, values: dict[str, Any]) -> None:
        """The calibration by whoever else follows the instrument; the first batch says what
        its noise is.
        """
        self.calibration = values
        self.first = self.first or values
        if self.guard.noise is None and self.substrate.last is not None:
            settings, trajectories = self.substrate.last
            self.guard.calibrate([(settings, self.as_recorded(trajectories))], values)
        self.substrate.context = self.context

    def as_recorded(self, trajectories: Trajectories) -> Trajectories:
        """Trajectories without the calibration that the substrate sent along: what was
        recorded with them alone.
        """
        recorded = {
            k: v for k, v in (trajectories.context or {}).items() if k not in self.calibration
        }
        return trajectories._replace(context=recorded or None)

    def context(self, count: int) -> PyTree:
        """The calibration, a row a trajectory."""
        return jax.tree.map(
            lambda v: np.broadcast_to(np.asarray(v), (count, *np.shape(v))), self.calibration
        )

    @property
    def prefix(self) -> str:
        """Of its entries in a checkpoint."""
        return f"device-{self.place}/" if self.place else ""

    def arrays(self) -> dict[str, np.ndarray]:
        """Calibration, counts and what is known of the instrument, for a checkpoint."""
        archive = self.substrate.archive
        kept = {CALIBRATION + name: np.asarray(v) for name, v in self.calibration.items()}
        kept |= {FIRST + name: np.asarray(v) for name, v in self.first.items()}
        kept |= self.substrate.memory()
        kept |= {
            "counts": np.array(json.dumps(self.substrate.counts)),
            "batches": np.array(archive.number if archive else 0),
        }
        return {self.prefix + name: array for name, array in kept.items()}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Put the `arrays` of a checkpoint back."""
        own = {
            n.removeprefix(self.prefix): v for n, v in arrays.items() if n.startswith(self.prefix)
        }
        self.substrate.counts = Counter(json.loads(str(own["counts"])))
        self.substrate.remember(own)
        self.count_cut_off(int(own["batches"]))

        def of(start):
            return {n.removeprefix(start): v for n, v in own.items() if n.startswith(start)}

        self.calibration = of(CALIBRATION)
        self.first = of(FIRST) or self.calibration
        if self.calibration:
            self.substrate.context = self.context

    def count_cut_off(self, batches: int) -> None:
        """Batches that came after a checkpoint, which knew of so many, were spent and are
        measured again.
        """
        archive = self.substrate.archive
        lost = archive.trajectories_since(batches) if archive else 0
        if lost:
            self.substrate.counts[CUT_OFF] += lost
            self.note(
                Incident(
                    CUT_OFF, lost, f"{lost} trajectories of what was cut off are kept and not used"
                )
            )

    def drifts(self) -> dict[str, float]:
        """How far each calibrated quantity has moved since the first calibration, root mean
        square.
        """
        now = self.calibration
        first = self.first

        def change(name):
            return np.asarray(now[name], float) - np.asarray(first[name], float)

        return {
            name: float(np.sqrt(np.mean(change(name) ** 2)))
            for name in followed(first)
            if np.size(first[name])
        }


def followed(values: dict[str, Any]) -> list[str]:
    """Calibrated quantities whose drift is worth a curve: not their errors."""
    return [name for name in sorted(values) if not name.endswith("_stderr")][:MOST_DRIFTS]


class DeviceTable:
    """`devices.csv` of a run that goes on."""

    def __init__(self, folder: Path, devices: Sequence[CalibratedDevice]):
        self.path = folder / FILE
        self.devices = devices
        self.names: list[str] = []
        self.file: IO[str] | None = None

    def open(self, row: int) -> None:
        """Leave rows 0 … row − 1, and go on from there."""
        known = next((d.first for d in self.devices if d.first), {})
        each = [*COLUMNS, *(f"drift {name}" for name in followed(known))]
        self.names = each
        columns = ["row", *(f"{k + 1} {name}" for k in range(len(self.devices)) for name in each)]
        history.truncate_numbers(self.path, columns, row - 1)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115, open as long as the run

    def add(self, row: int, healths: Sequence[DeviceHealth], groups: Groups | None) -> None:
        """One more row, visible to readers at once."""
        assert self.file is not None
        cells = [str(row)]
        for k, (device, health) in enumerate(zip(self.devices, healths, strict=True)):
            place = np.flatnonzero([] if groups is None else np.asarray(groups.group) == k)
            here: dict[str, Any] = dict.fromkeys(self.names, np.nan) | {
                f"drift {n}": v for n, v in device.drifts().items()
            }
            here |= {
                "lost": health.lost,
                "failures": health.failures,
                "up": float(health.up),
                "rate": health.rate,
            }
            here |= {
                "guard": device.guard.reading,
                "trajectories": 0.0 if groups is not None else np.nan,
            }
            if groups is not None and len(place):
                p = int(place[0])
                here |= {
                    "J": groups.values[p],
                    "error": groups.value_errors[p],
                    "trajectories": groups.counts[p],
                }
            cells += [f"{here[name]:.5g}" for name in self.names]
        self.file.write(history.csv_line(cells))
        self.file.flush()

    def close(self) -> None:
        """Let go of the file."""
        if self.file is not None:
            self.file.close()
