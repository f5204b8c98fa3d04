"""Head of a recording: channels, times, units, θ, settings, drive and noise."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

from fluctua.core import check
from fluctua.core.display.fields import show_fields

GROUPS = ("parameters", "settings", "drive", "noise", "network", "simulation")
"""Tables of a recording: θ, settings of the actuators, drive, calibration, graph, simulation."""

Table = Mapping[str, Any]


class EventKinds(NamedTuple):
    """The events of a jump process that a recording keeps (`fluctua.Jumps`).

    names: of the R kinds.
    changes: of the state by each kind (R, M); None where sizes are random and stored per event.
    still: whether the state is constant between events.

    >>> kinds = insitu.files.EventKinds(("birth", "death"), changes=np.array([[1.0], [-1.0]]))
    >>> head = insitu.files.Description(np.linspace(0.0, 1.0, 21), ("molecules",), events=kinds)
    """

    names: tuple[str, ...]
    changes: np.ndarray | None = None
    still: bool = True


@show_fields
@dataclass(frozen=True)
class Description:
    """The head of a recording, written before its first trajectory.

    t: times (T+1,), strictly increasing.
    channels: C names.
    dtype: of the states, float32, float64, complex64 or complex128; a complex channel is two
        components of the state x = [Re, Im].
    units, time_units: of the states and of the times.
    context: {name: shape of one trajectory's value}, known of each trajectory (its modulation, the
        phase of its drive); None if nothing.
    parameters: θ as it was set, a table {name: array, number or text} like the following.
    settings: of the actuators, in their own units.
    drive, noise, network, simulation: see docs/recordings.md.
    provenance, software, created: where the data come from, which program wrote them, and when.
    events: the `EventKinds` of a jump process, whose times and marks are stored with every
        trajectory; None if it has none.

    >>> head = insitu.files.Description(
    ...     t=np.linspace(0.0, 1.0, 21),
    ...     channels=("psi[0]", "psi[1]"),
    ...     dtype="complex64",
    ...     time_units="1/kappa",
    ...     parameters={"omega": np.zeros(2)},
    ... )
    """

    t: np.ndarray
    channels: tuple[str, ...]
    dtype: str = "float64"
    units: str = ""
    time_units: str = ""
    context: Mapping[str, tuple[int, ...]] | None = None
    parameters: Table = field(default_factory=dict)
    settings: Table = field(default_factory=dict)
    drive: Table = field(default_factory=dict)
    noise: Table = field(default_factory=dict)
    network: Table = field(default_factory=dict)
    simulation: Table = field(default_factory=dict)
    provenance: str = ""
    software: str = ""
    created: str = ""
    events: EventKinds | None = None

    def __post_init__(self) -> None:
        def put(name, value):
            return object.__setattr__(self, name, value)

        put("t", np.asarray(check.times(self.t), np.float64))
        put("channels", check_names(self.channels))
        kind = np.dtype(self.dtype)
        if kind.name not in ("float32", "float64", "complex64", "complex128"):
            raise ValueError(
                f"`dtype` must be float32, float64, complex64 or complex128; got {kind.name}."
            )
        put("dtype", kind.name)
        if self.context is not None:
            put(
                "context",
                {check_name(k, "context"): tuple(map(int, v)) for k, v in self.context.items()}
                or None,
            )
        for group in GROUPS:
            put(
                group,
                {
                    check_name(k, group): check_value(k, v, group)
                    for k, v in getattr(self, group).items()
                },
            )
        if self.events is not None:
            put("events", _check_kinds(self.events, len(self.components)))
        put("software", self.software or software_name())
        put("created", self.created or format_now())

    @property
    def is_complex(self) -> bool:
        """Whether a channel has two quadratures."""
        return self.dtype.startswith("complex")

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the M components of the state: channels, or `Re …` of all, then `Im …`."""
        if not self.is_complex:
            return self.channels
        return tuple(f"{part} {name}" for part in ("Re", "Im") for name in self.channels)

    @property
    def theta(self) -> dict[str, np.ndarray]:
        """θ in float64, for `gradient`."""
        return {name: np.asarray(value, np.float64) for name, value in self.parameters.items()}


def _check_kinds(kinds: EventKinds, width: int) -> EventKinds:
    """Check that kinds of events have distinct names and changes of the whole state."""
    names = check_names(kinds.names)
    if kinds.changes is None:
        return EventKinds(names, None, bool(kinds.still))
    changes = np.asarray(kinds.changes, np.float64)
    if changes.shape != (len(names), width) or not np.isfinite(changes).all():
        raise ValueError(
            f"`events.changes` must be finite numbers ({len(names)}, {width}), one row per event "
            f"and one column per component; got shape {changes.shape}."
        )
    return EventKinds(names, changes, bool(kinds.still))


def check_names(channels: Sequence[str]) -> tuple[str, ...]:
    """Check that names are distinct and one at least."""
    names = tuple(channels)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"`channels` must be one name or more, each a text; got {names!r}.")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"channels must have names of their own; {', '.join(twice)} appears more than once."
        )
    return names


def check_name(name: Any, group: str) -> str:
    """Check that a name can be a variable in netCDF, MATLAB and Python."""
    if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
        raise ValueError(
            f"names in `{group}` must be like omega or gain_2 (letters, digits, _); got {name!r}."
        )
    return name


def check_value(name: str, value: Any, group: str) -> Any:
    """Check that a value is a text or an array of real numbers."""
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise TypeError(
            f"`{group}` holds real numbers, arrays of them, and texts; `{name}` is {array.dtype}."
        )
    return array


def format_now() -> str:
    """Format the present time as in files, ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def software_name() -> str:
    """Name and version of this program."""
    try:
        return f"fluctua {version('fluctua')}"
    except PackageNotFoundError:
        return "fluctua"
