"""Arguments of `fluctua insitu`: instruments, their model, and the folder of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fluctua.cli.common import note
from fluctua.insitu.device_training.station import (
    Station,
    StationNames,
    load_station,
)

SELF_CALIBRATION_KEYS = ("forget_after", "measure_every", "renew", "readout_noise")
"""Keys for --calibration training only."""


class InstrumentSettings(NamedTuple):
    """Settings by `--set`.

    keys: those of the command.
    arguments: all others, for the functions of driver and model.
    """

    keys: dict[str, Any]
    arguments: dict[str, Any]


class Request(NamedTuple):
    """Instruments by name.

    instruments: addresses, or names of drivers.
    model: name of their model; empty for that of an address.
    out: folder of a new run.
    """

    instruments: list[str]
    model: str
    out: Path | None = None

    def name_station(self, arguments: dict[str, Any]) -> StationNames:
        """The station with arguments of driver and model."""
        return StationNames(tuple(self.instruments), self.model, arguments)

    def refuse_keys(self, calibration: str | None, settings: dict[str, Any]) -> None:
        """Raise `ValueError` for keys of --set that would be ignored.

        calibration: None before the model has chosen one; nothing is refused then.
        """
        if calibration is None:
            return
        ignored = ["probes"] if calibration == "training" else list(SELF_CALIBRATION_KEYS)
        other = "probes" if calibration == "training" else "training"
        _refuse_among(ignored, settings, f"counts with --calibration {other} only.")
        if len(self.instruments) == 1:
            _refuse_among(["share"], settings, "counts for several instruments only.")


def _refuse_among(names: Sequence[str], settings: dict[str, Any], reason: str) -> None:
    ignored = [name for name in names if name in settings]
    if ignored:
        raise ValueError(f"--set {', '.join(ignored)} {reason}")


def open_station(names: StationNames, settings: dict[str, Any], attempts: int) -> Station:
    """Load drivers and model. `timeout` is an argument that a plan does not keep."""
    if "timeout" in settings:
        names = names._replace(options={**names.options, "timeout": settings["timeout"]})
    return load_station(names, attempts=attempts, report=note)
