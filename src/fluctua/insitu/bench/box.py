"""The box on the virtual bench: settings, age, last acquisition and faults; no messages.

A fault goes wrong on purpose: `drop@3` is a dropped connection at the third acquisition.

    drop      the connection is closed in the middle of an answer
    stall     no answer is sent
    short     the block holds less than was requested, and its header agrees
    nan       some trajectories have invalid samples
    clip      some trajectories are clipped at the converter's full scale
    reboot    the box restarts: connections closed, settings lost
    brownout  settings are lost without a sign
    dead      every sample is zero
    frozen    the acquisition before is repeated
    random    every sample is a random code
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from fluctua.insitu.bench.device import (
    INVALID,
    Sheet,
    draw_hidden,
    draw_modulation,
    measure,
    reset_settings,
)
from fluctua.insitu.instrument.scpi import make_error
from fluctua.insitu.instrument.virtual import POINTS

MAX_BYTES = 64 * 2**20
"""Bytes of one acquisition at most."""


class Problem(Exception):
    """An error for the error queue of a session."""

    def __init__(self, code: int, detail: str = ""):
        super().__init__(detail)
        self.entry = make_error(code, detail)


class Bench:
    """The box: its settings, its last acquisition, its age."""

    def __init__(self, sheet: Sheet | None = None, faults: FaultPlan | None = None):
        self.sheet = sheet or Sheet()
        self.hidden = draw_hidden(self.sheet)
        self.faults = faults or FaultPlan(seed=self.sheet.seed)
        self.shots = 0
        self.boots = 0
        self.boot()

    def boot(self) -> None:
        """Switch on: settings as after *RST, and the power-on bit. The age stays."""
        self.reset()
        self.power_on = True
        self.boots += 1

    def reset(self) -> None:
        """Restore the settings, as *RST does."""
        self._default_settings()
        self.count = 10
        self.points = POINTS
        self.amplitude = 10.0
        self.noise = self.sigma_kappa = 0.0
        self.codes: np.ndarray | None = None
        self.played: dict[str, np.ndarray] | None = None
        self.fault = ""

    def _default_settings(self) -> None:
        self.settings = {**reset_settings(self.sheet), "chi": np.zeros(self.sheet.nominal.sites)}

    def initiate(self) -> None:
        """Run `count` trajectories."""
        size = 4 * self.count * self.points * len(self.sheet.sites)
        if size > MAX_BYTES:
            raise Problem(-225, f"{size} bytes, at most {MAX_BYTES}; lower ACQ:COUN or ACQ:POIN")
        before = self.codes
        self.codes = None
        self.fault = self.faults.next()
        self.played = None
        if self.fault == "reboot":
            self.boot()
            self.fault = "reboot"
            return
        if self.fault == "brownout":
            self._default_settings()
            self.noise = self.sigma_kappa = 0.0
        try:
            codes = measure(
                self.sheet,
                self.hidden,
                self.settings,
                count=self.count,
                points=self.points,
                amplitude=self.amplitude,
                shots=self.shots,
                noise=self.noise,
                sigma_kappa=self.sigma_kappa,
            )
            if self.sigma_kappa:
                self.played = draw_modulation(self.sheet, self.count, self.shots)
        except FloatingPointError:
            raise Problem(
                -200, "the network is unstable at these settings; nothing was acquired"
            ) from None
        self.shots += self.count
        self.codes = self.faults.spoil(self.fault, codes, before, self.sheet.full_code, INVALID)


# ------------------------------------------------------------------------------------------ faults


AT_RANDOM = ("drop", "stall", "short", "nan", "clip", "reboot", "brownout")
"""What `rate` draws from."""
KINDS = (*AT_RANDOM, "dead", "frozen", "random")
SPOILT = 0.3
"""Share of the trajectories that `nan` and `clip` spoil; at least one."""


class Fault(NamedTuple):
    """A fault that is due at an acquisition.

    kind: one of `KINDS`.
    after: number of the acquisition, counted from now, from 1.
    times: acquisitions in a row that it spoils.
    """

    kind: str
    after: int = 1
    times: int = 1

    def __str__(self) -> str:
        return f"{self.kind}@{self.after}" + (f"x{self.times}" if self.times > 1 else "")


def parse_fault(text: str) -> Fault:
    """Parse `drop@3` or `nan@5x2`.

    >>> parse_fault("nan@5x2")
    Fault(kind='nan', after=5, times=2)
    """
    match = re.fullmatch(r"([a-z]+)@(\d{1,9})(?:x(\d{1,9}))?", text.strip().lower())
    if not match or match[1] not in KINDS or int(match[2]) < 1:
        raise ValueError(
            "a fault is KIND@ACQUISITION, such as drop@3, or nan@5x2 for two in a row; KIND is "
            f"one of {', '.join(KINDS)}; got {text!r}."
        )
    return Fault(match[1], int(match[2]), int(match[3] or 1))


class FaultPlan:
    """Faults by acquisition.

    rate: probability of a random fault at each acquisition, for endurance tests.
    """

    def __init__(self, faults: tuple[Fault, ...] = (), *, rate: float = 0.0, seed: int = 0):
        if not 0 <= rate <= 1:
            raise ValueError(f"the rate of random faults is a probability, 0 to 1; got {rate}.")
        self.pending = list(faults)
        self.rate = rate
        self.rng = np.random.default_rng([seed, 1])

    def next(self) -> str:
        """Return the kind of fault of the acquisition that begins now, or ""."""
        due = next((fault.kind for fault in self.pending if fault.after <= 1), "")
        self.pending = [
            fault._replace(after=fault.after - 1)
            if fault.after > 1
            else fault._replace(times=fault.times - 1)
            for fault in self.pending
        ]
        self.pending = [fault for fault in self.pending if fault.times > 0]
        if not due and self.rate and self.rng.random() < self.rate:
            due = str(self.rng.choice(AT_RANDOM))
        return due

    def spoil(
        self, kind: str, codes: np.ndarray, before: np.ndarray | None, full: int, invalid: int
    ) -> np.ndarray:
        """Return the codes (E, …) as the fault leaves them.

        Args:
            kind: of the fault, or "".
            codes: that were measured.
            before: of the acquisition before this one, if there was one.
            full: the largest code.
            invalid: the code of a sample that is not one.
        """
        if kind == "dead" or (kind == "frozen" and before is None):
            return np.zeros_like(codes)
        if kind == "frozen":
            assert before is not None
            return np.resize(before, codes.shape)
        if kind == "random":
            return self.rng.integers(-full + 1, full, codes.shape, dtype=codes.dtype)
        if kind not in ("nan", "clip"):
            return codes
        codes = codes.copy()
        which = self.rng.choice(len(codes), max(1, int(SPOILT * len(codes))), replace=False)
        middle = codes.shape[1] // 2
        codes[which, middle : middle + 3] = invalid if kind == "nan" else full
        return codes
