"""The box on the virtual bench as it stands there: settings, age, what it acquired last. Nothing of messages."""

from __future__ import annotations

import numpy as np

from fluctua.insitu.bench.device import INVALID, Sheet, hidden, measure, reset_settings
from fluctua.insitu.bench.faults import Plan
from fluctua.insitu.instrument.scpi import error

MOST_BYTES = 64 * 2**20
"""Of one acquisition."""


class Problem(Exception):
    """An entry for the error queue."""

    def __init__(self, code: int, detail: str = ""):
        super().__init__(detail)
        self.entry = error(code, detail)


class Bench:
    """The box: its settings, its last acquisition, its age."""

    def __init__(self, sheet: Sheet | None = None, faults: Plan | None = None):
        self.sheet = sheet or Sheet()
        self.hidden = hidden(self.sheet)
        self.faults = faults or Plan(seed=self.sheet.seed)
        self.shots = 0
        self.boots = 0
        self.boot()

    def boot(self) -> None:
        """Switch on: settings as after *RST, and the power-on bit. The age stays."""
        self.reset()
        self.power_on = True
        self.boots += 1

    def reset(self) -> None:
        """*RST."""
        self.settings = reset_settings(self.sheet)
        self.count, self.points, self.amplitude = 10, 601, 10.0
        self.codes: np.ndarray | None = None
        self.fault = ""

    def initiate(self) -> None:
        """Run `count` trajectories."""
        size = 4 * self.count * self.points * self.sheet.nominal.sites
        if size > MOST_BYTES:
            raise Problem(-225, f"{size} bytes, at most {MOST_BYTES}; lower ACQ:COUN or ACQ:POIN")
        before, self.codes, self.fault = self.codes, None, self.faults.next()
        if self.fault == "reboot":
            self.boot()
            self.fault = "reboot"
            return
        if self.fault == "brownout":
            self.settings = reset_settings(self.sheet)
        try:
            codes = measure(
                self.sheet, self.hidden, self.settings, count=self.count, points=self.points,
                amplitude=self.amplitude, shots=self.shots,
            )  # fmt: skip
        except FloatingPointError:
            raise Problem(-200, "the network is unstable at these settings; nothing was acquired") from None
        self.shots += self.count
        self.codes = self.faults.spoil(self.fault, codes, before, self.sheet.full_code, INVALID)
