"""devices.csv: how each device of a run was in every iteration.

The column `row` is that of `history.csv`; `k COLUMN` is of device k, from 1 on:

    J, error            expected return and error from its trajectories; NaN where it took no part
    trajectories, lost  averaged in this iteration; discarded so far
    failures            so far, retried ones included
    up, rate            whether it answers; its speed, relative to the median
    guard               noise of its last batch over that at calibration, of the worst component
    drift NAME          root mean square change of a calibrated quantity since the first calibration
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fluctua.core.estimate import Groups
from fluctua.insitu.device_training.devices import CalibratedDevice, list_drifting
from fluctua.insitu.instrument.device_array import DeviceHealth
from fluctua.store import history

FILE = "devices.csv"
COLUMNS = ("J", "error", "trajectories", "lost", "failures", "up", "rate", "guard")


class DeviceTable:
    """`devices.csv` of a run."""

    def __init__(self, folder: Path, devices: Sequence[CalibratedDevice]):
        self.path = folder / FILE
        self.devices = devices
        self.names: list[str] = []
        self.file: IO[str] | None = None

    def open(self, row: int) -> None:
        """Keep rows 0 … row − 1, and append after them."""
        known = next((d.first for d in self.devices if d.first), {})
        self.names = [*COLUMNS, *(f"drift {name}" for name in list_drifting(known))]
        numbers = range(1, len(self.devices) + 1)
        columns = ["row", *(f"{k} {name}" for k in numbers for name in self.names)]
        history.truncate_numbers(self.path, columns, row - 1)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115, open as long as the run

    def add(self, row: int, healths: Sequence[DeviceHealth], groups: Groups | None) -> None:
        """Write one more row, visible to readers at once."""
        assert self.file is not None
        cells = [str(row)]
        for k, (device, health) in enumerate(zip(self.devices, healths, strict=True)):
            values = dict.fromkeys(self.names, np.nan)
            values |= {f"drift {name}": v for name, v in device.drifts().items()}
            values |= _describe_health(health)
            values |= {"guard": device.guard.reading}
            values |= _describe_group(groups, k)
            cells += [f"{values[name]:.5g}" for name in self.names]
        self.file.write(history.csv_line(cells))
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


def _describe_health(health: DeviceHealth) -> dict[str, Any]:
    return {
        "lost": health.lost,
        "failures": health.failures,
        "up": float(health.up),
        "rate": health.rate,
    }


def _describe_group(groups: Groups | None, k: int) -> dict[str, Any]:
    """J, its error and the trajectories of device k, from 0."""
    if groups is None:
        return {}
    places = np.flatnonzero(np.asarray(groups.group) == k)
    if not len(places):
        return {"trajectories": 0.0}
    place = int(places[0])
    return {
        "J": groups.values[place],
        "error": groups.value_errors[place],
        "trajectories": groups.counts[place],
    }
