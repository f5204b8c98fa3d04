"""The instruments of a run: one device, or several as one substrate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fluctua.core.estimate import Groups
from fluctua.insitu.device_training.devices import CalibratedDevice, Connect
from fluctua.insitu.device_training.incidents import IncidentLog
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.instrument.device_array import DeviceArray, DeviceHealth
from fluctua.insitu.instrument.guard import ResidualGuard
from fluctua.insitu.instrument.protocol import CommandRejected
from fluctua.insitu.instrument.substrate import InstrumentSubstrate
from fluctua.insitu.model import Model, share_parameters
from fluctua.store import checkpoint

Connects = Connect | Sequence[Connect]
"""One instrument, or several that are trained together."""

CHECKED = "for the check"
"""Trajectories of a check: they were run, and are neither averaged nor kept."""

ARRAY = "array/wait"
"""Entry of a checkpoint of several devices."""


def list_connects(connect: Connects) -> list[Connect]:
    """The instruments, one or several, as a list."""
    return list(connect) if isinstance(connect, Sequence) else [connect]


def check_share(plan: Plan, model: Model, devices: int) -> None:
    """Refuse a plan that does not fit the number of devices, before there is a folder."""
    if devices < 1:
        raise ValueError("`connect` must open one instrument at least; got an empty list.")
    if plan.rates and len(plan.rates) != devices:
        raise ValueError(f"`rates` must be one per device, {devices}; got {len(plan.rates)}.")
    if plan.share == "parameters":
        if devices == 1:
            raise ValueError("`share` = 'parameters' needs several devices; got one.")
        share_parameters(model)
    if devices > 1 and plan.trajectories < 2 * devices:
        raise ValueError(
            f"`trajectories` must be {2 * devices} at least, two for each of {devices} devices; "
            f"got {plan.trajectories}."
        )


class Instruments:
    """The instruments of a run, each with its calibration.

    Args:
        connects: open them.
        model: of each.
        plan: of the training.
        folder: of the run.
        log: of incidents.

    """

    def __init__(
        self, connects: Sequence[Connect], model: Model, plan: Plan, folder: Path, log: IncidentLog
    ):
        self.folder = folder
        several = len(connects) > 1
        guard = ResidualGuard(model.process)
        self.devices = [
            CalibratedDevice(
                connect,
                model,
                plan,
                guard=guard.copy_uncalibrated(),
                folder=folder,
                number=k + 1 if several else 0,
                report=log.add,
            )
            for k, connect in enumerate(connects)
        ]
        self.model = model
        self.substrate: InstrumentSubstrate | DeviceArray = self.devices[0].substrate
        if several:
            shared = plan.share == "parameters"
            self.model = share_parameters(model) if shared else model
            self.substrate = DeviceArray(
                [device.substrate for device in self.devices],
                share=model.methods.correct if shared else None,
                rates=plan.rates or None,
                prepare=self.prepare,
                report=log.add,
            )

    def prepare(self, k: int) -> None:
        """Calibrate a device of several that did not answer before."""
        if not self.devices[k].calibration:
            try:
                self.devices[k].calibrate()
            # one device that cannot be calibrated does not end the training of the others
            except ValueError as error:
                raise CommandRejected(f"it cannot be calibrated: {error}") from error

    def count_checked(self, trajectories: Sequence[int]) -> None:
        """Count trajectories that a check ran on each device before the training."""
        for device, count in zip(self.devices, trajectories, strict=False):
            if count:
                device.substrate.counts[CHECKED] += count

    def count_cut_off(self) -> None:
        """Count what an earlier run in the folder measured and did not keep."""
        for device in self.devices:
            device.count_cut_off(0)

    def calibrate(self) -> None:
        """Calibrate each device at random settings."""
        if isinstance(self.substrate, DeviceArray):
            self.substrate.prepare_all()
        else:
            self.devices[0].calibrate()

    def follow(self) -> None:
        """Update each calibration by the trajectories of the last iteration."""
        for device in self.devices:
            device.follow()

    @property
    def spent(self) -> int:
        """Trajectories that the instruments ran, discarded ones included."""
        return sum(n for kind, n in self.substrate.counts.items() if kind != "failures")

    def health(self) -> list[DeviceHealth]:
        """State of each device."""
        if isinstance(self.substrate, DeviceArray):
            return self.substrate.health()
        return DeviceArray([self.substrate]).health()

    def arrays(self) -> dict[str, np.ndarray]:
        """Calibrations, counts and what is known of the instruments, for a checkpoint."""
        kept = {name: array for device in self.devices for name, array in device.arrays().items()}
        if isinstance(self.substrate, DeviceArray):
            kept |= self.substrate.arrays()
            kept["counts"] = np.array(json.dumps(self.substrate.counts))
        return kept

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Put the `arrays` of a checkpoint back."""
        several = isinstance(self.substrate, DeviceArray)
        if several and ARRAY not in arrays:
            raise ValueError(_describe_mismatch("one device", "several"))
        if not several and ARRAY in arrays:
            raise ValueError(_describe_mismatch("several devices", "one"))
        if isinstance(self.substrate, DeviceArray):
            self.substrate.load(arrays)
        for device in self.devices:
            device.load(arrays)

    def report(self, groups: Groups | None) -> None:
        """Write `devices.txt`: how several devices were and how they differ."""
        if isinstance(self.substrate, DeviceArray) and groups is not None:
            text = self.substrate.describe(groups) + "\n"
            checkpoint.replace(self.folder / "devices.txt", text.encode())

    def close(self) -> None:
        """Close the lines to all instruments."""
        self.substrate.close()


def _describe_mismatch(earlier: str, now: str) -> str:
    return (
        f"the run is of {earlier}, and {now} was given. Go on with the same, or begin another run."
    )
