"""What came out of a run: measured once more, written for people and for programs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fluctua.core.averaged import certificate_of
from fluctua.core.text import with_error
from fluctua.runs.build import FAMILIES, make_network
from fluctua.runs.config import Config, load
from fluctua.runs.evaluate import evaluate, load_parameters
from fluctua.store import checkpoint, history
from fluctua.store.checkpoint import replace
from fluctua.store.folder import RunFolder

FINER = 2
"""The final J is also measured with steps this much smaller."""

AROUND = 9
"""Iterations over which J is averaged to find its peak."""
FALL = 6.0
"""Standard errors below its peak at which a training counts as having fallen: the highest of many means is high by
chance, by four of them in ten thousand."""


def conclude(place: RunFolder) -> dict[str, Any]:
    """Measure the final parameters, write summary.txt and summary.json."""
    config, rows = load(place.config), history.read(place.history)
    if not rows:
        return {}
    path = place.path / "summary.json"
    told = gather(place, config, rows)
    replace(place.path / "summary.txt", as_text(told).encode())
    replace(path, (json.dumps(told, indent=1) + "\n").encode())  # last: it says that the run is complete
    return told


def gather(place: RunFolder, config: Config, rows: list[history.Row]) -> dict[str, Any]:
    """The numbers of a summary."""
    theta = load_parameters(place.final, make_network(config))
    first, last = history.effective(rows)[0], rows[-1]
    count = min(max(last.ensemble, 256), 2000)
    measured = {}
    for name, dt in (("final", config.task.dt), ("finer", config.task.dt / FINER)):
        measured[name] = evaluate(config, theta, trajectories=count, seed=config.seed, dt=dt)._asdict()
    return {
        "start": {"J": first.J, "J_stderr": first.J_stderr},
        **measured,
        "iterations": last.iteration + 1,
        "rows": last.row + 1,
        "trajectories": last.trajectories,
        "seconds": round(sum(row.seconds for row in rows), 3),
        "escalations": sum("escalate" in row.event for row in rows),
        "rewinds": sum("rewind" in row.event for row in rows),
        "backend": config.backend,
        "bounds": {name: list(getattr(config.bounds, name)) for name in FAMILIES},
        "at_bounds": {name: _at_bound(theta[name], getattr(config.bounds, name)) for name in FAMILIES},
        **_fallen(history.effective(rows), measured["final"], config.baseline.kind == "twin"),
        **_certified(place, config, theta),
    }


def as_text(told: dict[str, Any]) -> str:
    """For people."""
    value = lambda part: with_error(told[part]["J"], told[part]["J_stderr"])
    lines = [
        f"J before   {value('start')}",
        f"J after    {value('final')}   final.npz, measured afresh with {told['final']['trajectories']:,} trajectories",
        f"           {value('finer')}   with steps of {told['finer']['dt']:g} instead of {told['final']['dt']:g}",
        f"training   {told['iterations']:,} iterations, {told['trajectories']:,} trajectories, "
        f"{told['seconds']:.1f} s on the {told['backend']} backend",
    ]
    if told["escalations"]:
        lines.append(f"schedule   {told['escalations']} escalations, {told['rewinds']} of them with a rewind")
    bounds = (
        f"{name} in [{low:g}, {high:g}] ({told['at_bounds'][name]:.0%} there)"
        for name, (low, high) in told["bounds"].items()
    )
    lines.append("bounds     " + ", ".join(bounds))
    if "peak" in told:
        peak = told["peak"]
        cure = "try smaller steps, or more trajectories"
        cure += "; if the twin may be wrong, baseline.memory=1 with both" if peak["twin"] else ""
        lines.append(
            f"peak       {with_error(peak['J'], peak['J_stderr'])} around iteration {peak['iteration'] + 1:,}, "
            f"above the end: {cure}"
        )
    if "twin" in told:
        each = (f"{name} {row['rms']:.1e} (±{row['error']:.1e})" for name, row in told["twin"].items())
        lines.append(f"twin       its error in the gradient, rms: {', '.join(each)}")
    return "\n".join([*lines, ""])


def _fallen(rows: list[history.Row], final: dict[str, Any], twin: bool) -> dict[str, Any]:
    """The highest J of a training that came down from it, if it did."""
    if len(rows) < AROUND:
        return {}
    window = np.ones(AROUND) / AROUND
    mean = np.convolve([row.J for row in rows], window, "valid")
    error = np.sqrt(np.convolve([row.J_stderr**2 for row in rows], window**2, "valid"))
    k = int(np.argmax(mean))
    if mean[k] - final["J"] < FALL * np.hypot(error[k], final["J_stderr"]) or mean[k] < 1.01 * final["J"]:
        return {}
    middle = rows[k + AROUND // 2].iteration
    return {"peak": {"J": float(mean[k]), "J_stderr": float(error[k]), "iteration": middle, "twin": twin}}


def _certified(place: RunFolder, config: Config, theta: dict[str, Any]) -> dict[str, Any]:
    """The certificate of a run with a twin, family by family, from its newest checkpoint."""
    found = checkpoint.newest(place.checkpoints, lambda text: None) if config.baseline.kind == "twin" else None
    if found is None:
        return {}
    memory = {name.removeprefix("estimator/"): v for name, v in found[1].items() if name.startswith("estimator/")}
    if not memory:
        return {}
    certificate = certificate_of(memory, theta)
    rms = lambda v: float(np.sqrt(np.mean(np.square(v))))  # not relative to the gradient, which vanishes at the end
    return {
        "twin": {
            name: {"rms": rms(certificate.correction[name]), "error": rms(certificate.stderr[name]), "chi2": chi2}
            for name, _, _, chi2 in certificate.rows
        }
    }


def _at_bound(values: Any, bounds: tuple[float, float]) -> float:
    array = np.asarray(values)
    return float(np.mean((array <= np.float32(bounds[0])) | (array >= np.float32(bounds[1])))) if array.size else 0.0
