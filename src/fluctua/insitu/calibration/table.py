"""A calibration as the `noise` table of its recording, and back.

`fluctua calibrate --write` puts it there and `fluctua estimate` takes it from there, so that a file carries what is
known of its noise and of its drift with it. A table that somebody else wrote, with a `diffusion` from another
measurement, will do as well; only that entry is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fluctua.insitu.calibration.calibrating import Calibration
from fluctua.insitu.calibration.noise import observation_seen
from fluctua.insitu.recording.description import Description, now, software_name

DRIFT, ERROR = "drift_", "_stderr"


class NoiseTable(NamedTuple):
    """diffusion, diffusion_stderr: Q (M,), the error NaN if it is not known. observation_variance: s² (M,), None where
    none was seen. drift, drift_stderr: {name: fitted coefficients}, infinite errors for what the data left open.
    origin: date, transition and trajectories, for people.
    """

    diffusion: np.ndarray
    diffusion_stderr: np.ndarray
    observation_variance: np.ndarray | None
    drift: dict[str, np.ndarray]
    drift_stderr: dict[str, np.ndarray]
    origin: str


def table_of(found: Calibration, trajectories: int) -> dict[str, Any]:
    """What `put_table(path, "noise", …)` takes.

    >>> put_table("run.nc", "noise", table_of(calibration, recording.count))
    """
    names = ("diffusion", "diffusion_stderr", "observation_variance", "observation_stderr")
    table: dict[str, Any] = {name: getattr(found.noise, name) for name in names}
    table["observation_seen"] = int(found.noise.observation_seen)
    for name, value, error in _flat(found.fit.theta, found.fit.stderr):
        table |= {f"{DRIFT}{name}": value, f"{DRIFT}{name}{ERROR}": error}
    how = {"transition": found.transition, "trajectories": trajectories}
    return {**table, **how, "created": now(), "software": software_name()}


def read_noise(description: Description) -> NoiseTable | None:
    """The calibration in a recording's head; None if there is none.

    >>> with open_recording("run.nc") as recording:
    ...     read_noise(recording.description).diffusion
    """
    table, size = description.noise, len(description.components)
    if "diffusion" not in table:
        return None
    q = _vector(table, "diffusion", size)
    if not np.all(q > 0):
        bad = int(np.argmin(q))
        raise ValueError(
            f"the file's noise table has a diffusion of {q[bad]:.3g} for {description.components[bad]}; it must be "
            "positive. Calibrate with more trajectories (fluctua calibrate --write), or use --noise nominal."
        )
    s2 = _vector(table, "observation_variance", size) if "observation_variance" in table else None
    if s2 is not None and "observation_seen" in table:
        s2 = s2 if int(table["observation_seen"]) else None
    elif s2 is not None and "observation_stderr" in table:
        s2 = s2 if observation_seen(s2, _vector(table, "observation_stderr", size)) else None
    error = _vector(table, f"diffusion{ERROR}", size) if f"diffusion{ERROR}" in table else np.full(size, np.nan)
    fitted = [n.removeprefix(DRIFT) for n in table if n.startswith(DRIFT) and not n.endswith(ERROR)]
    drift = {n: np.asarray(table[DRIFT + n], float) for n in fitted}
    errors = {n: np.asarray(table.get(DRIFT + n + ERROR, np.zeros_like(v)), float) for n, v in drift.items()}
    return NoiseTable(q, error, None if s2 is None else np.maximum(s2, 0), drift, errors, _origin(table))


def _vector(table: Any, name: str, size: int) -> np.ndarray:
    """One number for each component; a single one stands for all."""
    value = np.asarray(table[name], float)
    if value.shape not in ((), (1,), (size,)) or not np.all(np.isfinite(value)):
        raise ValueError(
            f"`noise.{name}` must be a finite number for each of the {size} components, or one for all; got shape "
            f"{value.shape}. Calibrate again (fluctua calibrate --write), or use --noise nominal."
        )
    return np.broadcast_to(value, (size,)).copy()


def _origin(table: Any) -> str:
    parts = [str(table["created"])[:10]] if "created" in table else []
    parts += [f"{int(table['trajectories']):,} trajectories"] if "trajectories" in table else []
    parts += [f"{table['transition']} transition"] if "transition" in table else []
    return ", ".join(parts) or "of unknown origin"


def _flat(theta: Any, stderr: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """The entries of a θ that is a table; of any other, none: a file has no names for them."""
    if not isinstance(theta, dict) or not all(str(n).isidentifier() and np.ndim(v) >= 0 for n, v in theta.items()):
        return []
    if any(isinstance(v, dict | list | tuple) for v in theta.values()):
        return []
    return [(str(n), np.asarray(v, float), np.asarray(stderr[n], float)) for n, v in theta.items()]
