"""Settings of an estimator that calibrates its model as it measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fluctua.core.arrays import Params
from fluctua.core.trajectories import Trajectories
from fluctua.core.words import close_match

CORRECTIONS = ("none", "simulated", "measured", "weighted")
MEASURED = ("measured", "weighted")
ON_DOUBT = ("stop", "continue")
FROM_BATCHES = "measured"
"""Value of `readout` that measures the noise of the readout in every batch."""

LIMITS = {"simulated": 2, "samples": 0, "measure_every": 1, "every": 1}
"""Options that are whole numbers, with the minimum of each."""


@dataclass(frozen=True, eq=False)
class CalibrationOptions:
    """Settings of a `SelfCalibrating` estimator, checked when built.

    Args:
        watch: names of φ at its top level that are held at their start and watched: what the model
            leaves out, such as couplings beyond the nearest. Where it is found there, errors of the
            fitted unknowns include its effect. Leave a name out of `watch` to have it fitted.
        forget_after: calls over which measurements fade, for a device that changes slowly; inf
            keeps everything.
        renew: forget everything before a call whose trajectories were not expected (χ² of their
            score beyond chance), for a device that jumps. The history of a run records it
            (`event`).
        correction: "none" uses the model's direct part alone, its noise-free gradient. "simulated"
            adds the correction of simulated trajectories, the effect of noise on the gradient.
            "measured" uses direct part and correction of the measured trajectories, whose score
            corrects what the model's path misses; their model is the one calibrated before them,
            since one fitted to their noise would absorb it. "weighted" uses as much of that
            correction as is resolved over `steps` calls (`fluctua.learn.shrunk_correction`).
        steps: calls whose steps add up; see `ShrunkCorrection`. Used with correction="weighted"
            only.
        simulated: trajectories that the model simulates per call. They cost time and no
            measurement.
        samples: number of samples for the calibration's error in the gradient; exact, one per
            unknown, where there are as few unknowns.
        measure_every: one of so many calls measures; the others use the model alone, and J is the
            model's.
        every: one of so many steps counts for the information; see `evidence`.
        refit: trajectories of a model that is not linear in φ are kept and fitted again, all
            together, once their number has grown by this factor; until then a new one is fitted
            with a Gaussian of the others. 1 fits all of them in every call.
        readout: standard deviation of the measurement on each component of a sample, or "measured",
            which takes it from every batch. Its effect on the calibration is subtracted; see
            `evidence`.
        on_doubt: "stop" refuses the call after one whose trajectories are not those of the model
            (`DoubtError`), before anything is measured; "continue" warns and continues. The history
            of a run has the event in both cases.
        returns: (theta, trajectories) -> returns (E,), as measured at the output of the device. By
            default the method `returns` of the device, if it has one. Otherwise they follow from
            the states by the model at φ̂, which is right where everything between state and reward
            is known or among the unknowns, such as γ_e of the leads of a resonator network.
    """

    watch: Sequence[str] = ()
    forget_after: float = math.inf
    renew: bool = False
    correction: str = "none"
    steps: float = 100
    simulated: int = 16
    samples: int = 8
    measure_every: int = 1
    every: int = 1
    refit: float = 1.0
    readout: float | str = 0.0
    on_doubt: str = "stop"
    returns: Callable[[Params, Trajectories], Any] | None = None

    @property
    def uses_measured(self) -> bool:
        """Whether the correction is that of measured trajectories."""
        return self.correction in MEASURED

    def __post_init__(self) -> None:
        if self.correction not in CORRECTIONS:
            raise ValueError(
                f"`correction` is one of {', '.join(map(repr, CORRECTIONS))}; got "
                f"{self.correction!r}." + close_match(str(self.correction), CORRECTIONS)
            )
        for name in ("forget_after", "steps"):
            if not getattr(self, name) >= 1:
                raise ValueError(
                    f"`{name}` is a number of calls, at least 1; got {getattr(self, name)!r}."
                )
        if not 1 <= self.refit < math.inf:
            raise ValueError(f"`refit` is a factor, at least 1; got {self.refit!r}.")
        readout = self.readout
        if readout != FROM_BATCHES and (isinstance(readout, str) or not 0 <= readout < math.inf):
            raise ValueError(
                f'`readout` is a standard deviation, 0 or more, or "measured"; got {readout!r}.'
            )
        for name, minimum in LIMITS.items():
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < minimum:
                raise ValueError(
                    f"`{name}` must be a whole number, at least {minimum}; got {number!r}."
                )
        if self.on_doubt not in ON_DOUBT:
            raise ValueError(
                f"`on_doubt` is one of {', '.join(map(repr, ON_DOUBT))}; got {self.on_doubt!r}."
            )
