"""One long record of a steady state, cut into stretches that are nearly independent.

The steps of a steady state are as good as any for a calibration, and the scatter of the stretches
gives the error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import jit
from fluctua.core.words import format_count
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.insitu.recording.trend import describe_trend, find_trend
from fluctua.processes import stationary as stationary_record

APART = 10
"""Correlation times per stretch, where the record has room for `MIN_STRETCHES` of them."""
MIN_STRETCHES = 20
MAX_STRETCHES = 200
"""Stretches of a record."""
SHORTEST = 2
"""Correlation times per stretch at least."""
POINTS = 2**17
"""Samples of a trace that correlations are taken from; longer traces are averaged in groups."""
TIMES = 7
"""Times at which the drift is compared, which must not depend on time."""


class SplitRecord(NamedTuple):
    """A record cut into stretches.

    recording: the stretches as trajectories.
    length: of one stretch, in units of time.
    slowest: number of the component that is correlated for longest.
    memory: its correlation time, 1 + 2Σ|ρ|.
    autocorrelation_time: integrated, 1 + 2Σρ, which is shorter where it oscillates.
    effective: number of independent samples of that component in the record.
    trend: a drift of the record, in words; empty if there is none.
    """

    recording: RecordingFile
    length: float
    slowest: int
    memory: float
    autocorrelation_time: float
    effective: float
    trend: str = ""

    @property
    def numbers(self) -> dict[str, Any]:
        """Numbers of the split by name, for JSON."""
        fields = ("length", "memory", "autocorrelation_time", "effective", "trend")
        named = {name: getattr(self, name) for name in fields}
        return {
            "count": self.recording.count,
            **named,
            "slowest": self.recording.description.components[self.slowest],
        }

    def __repr__(self) -> str:
        name = self.recording.description.components[self.slowest]
        return (
            f"{format_count(self.recording.count, 'stretch')} of {self.length:.4g}; {name}, the "
            f"slowest, is correlated over {self.memory:.3g}: integrated autocorrelation time "
            f"{self.autocorrelation_time:.3g}, {self.effective:,.0f} independent samples"
            + (f"\n→ not steady: {self.trend}" if self.trend else "")
        )


def split_record(recording: RecordingFile, model: RecordingModel) -> SplitRecord:
    """Cut the traces of a steady state into stretches that are nearly independent.

    A stretch is ten times as long as the slowest component is correlated, or shorter down to twice,
    if that leaves twenty of them; a record that has no room for those is refused.

    Args:
        recording: of one long trace or a few.
        model: its drift must not depend on time, because every stretch begins at the same one.

    Returns: the `SplitRecord`.

    >>> trap = fl.Process(lambda theta, x: -theta["k"] * x, lambda theta, x: 0.4 * jnp.ones(1))
    >>> k, t = {"k": jnp.array(0.8)}, np.arange(0.0, 200.0, 0.05)
    >>> x = fl.simulator(trap, jnp.zeros(1), t)(key, k, 4).x
    >>> insitu.files.save("long.nc", insitu.files.Description(t, ("x",), parameters=k), x)
    >>> model = insitu.files.RecordingModel(trap, fl.Objective(lambda theta, x: x[0] ** 2), k)
    >>> with insitu.files.open("long.nc") as long:
    ...     split = insitu.files.split_record(long, model)
    ...     print(split.recording.count)  # stretches, as trajectories
    24
    """
    check_autonomous(recording, model)
    steps = len(recording.t) - 1
    dt = float(np.mean(np.diff(recording.t)))
    group = max(1, steps // POINTS)
    slowest = 0
    memory = 0.0
    own = 0.0
    means = _average_groups(recording, group)
    for i in range(means.shape[2]):
        series = means[:, :, i] - means[:, :, i].mean()
        if np.any(series):  # a channel that never moves is named elsewhere
            long = stationary_record.memory_time(series) * group
            if long > memory:
                slowest = i
                memory = long
                own = max(stationary_record.autocorrelation_time(series) * group, 1.0)
    trend = _find_drift(recording)
    length = max(int(np.ceil(APART * memory)), steps // MAX_STRETCHES, 2)
    if recording.count * (steps // length) < MIN_STRETCHES:
        length = int(steps // np.ceil(MIN_STRETCHES / recording.count))
    if length < max(SHORTEST * memory, 2):
        raise ValueError(
            f"{recording.path} is too short: {recording.count} × {steps * dt:.4g} units of time, "
            f"of which {recording.description.components[slowest]} is correlated over "
            f"{memory * dt:.3g}. {MIN_STRETCHES} stretches of {SHORTEST} such times take "
            f"{MIN_STRETCHES * SHORTEST * memory * dt:.4g}. "
            + (f"That is because of a drift: {trend}" if trend else "Record for longer.")
        )
    whole = recording.count * steps
    return SplitRecord(
        recording.cut(length), length * dt, slowest, memory * dt, own * dt, whole / own, trend
    )


def _find_drift(recording: RecordingFile) -> str:
    """The drift of a trace that stands out most, with what to do; empty if there is none."""
    names = recording.description.components
    searches = [
        find_trend(np.asarray(recording.x[j]), records=recording.count)
        for j in range(recording.count)
    ]
    trends = [search.trend for search in searches if search.trend is not None]
    if not trends:
        return ""
    worst = min(trends, key=lambda trend: trend.probability)
    return (
        f"{describe_trend(worst, names)}. If the detector drifts and the system does not, take "
        "the trend away (fluctua convert IN OUT.nc --detrend TIME); a longer record "
        "does not help."
    )


def _average_groups(recording: RecordingFile, group: int) -> np.ndarray:
    """Average consecutive samples in groups. Shape (E, T // group, M)."""
    groups = []
    for j in range(recording.count):
        x = np.asarray(recording.x[j], np.float64)
        whole = len(x) // group * group
        groups.append(x[:whole].reshape(-1, group, x.shape[1]).mean(axis=1))
    return np.stack(groups)


def check_autonomous(recording: RecordingFile, model: RecordingModel) -> None:
    """Refuse a drift that depends on time."""
    process = check.process(model.process)
    theta = check.parameters(model.theta)
    rows = recording.context
    context = None if rows is None else {name: values[0] for name, values in rows.items()}
    x = np.zeros(model.size or recording.x.shape[2], recording.x.dtype)
    x[slice(None) if model.observed is None else model.observed] = recording.x[0, 0]
    drift = jit(lambda t: process.drift(theta, jnp.asarray(x), t, context))
    times = np.linspace(recording.t[0], recording.t[-1], TIMES)
    drifts = [np.asarray(drift(t)) for t in times]
    if np.abs(np.diff(drifts, axis=0)).max() > 1e-4 * np.abs(drifts).max():
        raise ValueError(
            "the drift depends on time, so that stretches of a record are not alike. Only "
            "records of a drift that stays the same are cut; of a network, one in the frame of "
            "its drive and without modulation."
        )
