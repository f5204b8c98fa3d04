"""`fluctua advise FILE`: the same command for trajectories that are there."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from fluctua.cli.files import bar, mapping, parameters, plain, precision

if TYPE_CHECKING:
    from fluctua.insitu.advice import FileAdvice
    from fluctua.learn.repetitions import Needed


def is_recording(source: str) -> bool:
    """Whether it is a file of trajectories, and not of parameters or settings."""
    path = Path(source)
    if not path.is_file() or path.suffix == ".toml":
        return False
    if zipfile.is_zipfile(path):
        with np.load(path, allow_pickle=False) as file:
            return "x" in file.files
    return True  # what it is instead, the reader says


def advise_from(
    source: str,
    *,
    error: float,
    rate: float | None,
    score: str,
    model: Path | None,
    params: Path | None,
    map_: list[str] | None,
    as_json: bool,
) -> None:
    """Measure and print."""
    from fluctua.insitu.advice import advise_file
    from fluctua.insitu.recording.description import counted
    from fluctua.insitu.recording.model import model_of
    from fluctua.insitu.recording.reader import open_recording

    with open_recording(source, mapping(map_)) as recording, bar("reading", show=not as_json) as progress:
        precision(recording.description.dtype)
        found = advise_file(
            recording,
            model_of(recording, model, parameters(params)),
            error=error,
            score=score,
            progress=progress,
        )
        d, shape, network = recording.description, recording.x.shape, model is None
    if as_json:
        typer.echo(json.dumps(plain({"source": source, **found._asdict(), "rate": rate})))
        return
    kind = "complex channels" if d.is_complex else "channels"
    typer.echo(f"{source}: {counted(shape[0], 'trajectory')} × {shape[1]:,} times × {len(d.channels)} {kind}")
    for line in (*found.said, "", *_repetitions(found, rate), "", *_readout(found, d.components, d.units)):
        typer.echo(line)
    for line in ("", *_interval(found, d.time_units, score, network, int(d.simulation.get("every", 0)) == 1)):
        typer.echo(line)


def _repetitions(found: FileAdvice, rate: float | None) -> list[str]:
    r = found.repetitions
    lines = ["HOW MANY REPETITIONS"]
    if r.reached is None:
        lines.append(f"  The gradient does not stand out yet from the noise of {r.recorded:,} trajectories.")
    else:
        lines.append(f"  {r.recorded:,} trajectories give the gradient to {_percent(r.reached)}.")
    lines.append(f"  {_percent(r.error)} takes {_count(r.whole, rate)}.")
    lines.append(f"  100 %, at which a step still points within 45° of uphill, takes {_count(r.training, rate)}.")
    lines.append(f"  {r.clear} of {r.trainable} components stand out by two standard errors.")
    lines.append(
        f"  {_percent(r.share)} of all components to {_percent(r.error)} each takes {_count(r.components, rate)}."
    )
    return lines


def _readout(found: FileAdvice, components: tuple[str, ...], units: str) -> list[str]:
    lines, s = ["READOUT NOISE"], found.sampling
    unit = f" {units}" if units else ""
    if found.observation is None:
        bound = "" if found.observation_bound is None else f": below {found.observation_bound:.2g}{unit}"
        return [*lines, f"  None seen{bound}. What moves between two samples is the system."]
    worst, middle = int(np.argmax(s.readout)), float(np.median(s.readout))
    lines.append(
        f"  {np.sqrt(np.mean(found.observation)):.3g}{unit} (rms). Between two samples it adds to the variance"
    )
    lines.append(
        f"  {_percent(s.readout[worst])} in {components[worst]}, the worst, and {_percent(middle)} in the median one."
    )
    lines.append(
        "  It dominates: most of what is taken for kicks is readout. It is corrected for, but costs trajectories."
        if s.readout_dominates
        else "  It does not dominate, and it is corrected for."
    )
    return lines


def _interval(found: FileAdvice, units: str, score: str, network: bool, stepped: bool) -> list[str]:
    s, error = found.sampling, found.repetitions.error
    lines = ["SAMPLING INTERVAL" + (f", times in {units}" if units else "")]
    lines.append(f"  A sample every {s.interval:.2g}; the system's fastest rate is w = {s.rate:.3g}, wΔt = "
                 f"{s.rate * s.interval:.2g}.")  # fmt: skip
    if score == "euler" and stepped:
        lines.append("  Simulated with Euler steps of this interval: Euler's score is exact. For an instrument:")
    if score == "euler":
        lines.append(f"  Euler's score is biased by about {_percent(s.euler)} of the gradient (a rule of thumb).")
    readout = f"{s.shortest:.2g} or more for the readout"
    bias = f"{s.longest:.2g} or less for a bias below half of {_percent(error)}"
    kerr = " (no Kerr effect)" if network else ""
    linear = f"up to about {s.frozen:.2g}, or any interval if the drift is linear{kerr}"
    if s.verdict == "good":
        return [*lines, "  → The interval is right."]
    if s.verdict == "slower":
        return [*lines, f"  → Sample every {readout}, and {bias if score == 'euler' else linear}."]
    if s.verdict == "faster" and score == "euler":
        return [*lines, f"  → Sample every {bias}.", f"    Or use --score local-linear: {linear}."]
    if s.verdict == "faster":
        return [*lines, f"  → Too long, unless the drift is linear: local linearisation is good {linear}."]
    lines += [f"  → No interval suits Euler's score: {readout}, {bias}.", f"    Use --score local-linear: {linear}."]
    if s.shortest > s.frozen:
        bent = "With a Kerr effect" if network else "Where the drift is not linear"
        lines.append(f"    {bent} that is too short for this readout: make the readout quieter first.")
    return lines


def _count(needed: Needed, rate: float | None) -> str:
    from fluctua.cli.progress import duration

    digits = max(0, int(np.floor(np.log10(max(needed.trajectories, 1)))) - 1)
    text = f"{'more than ' if needed.at_least else ''}{max(2, round(needed.trajectories, -digits)):,.0f} trajectories"
    return text if rate is None else f"{text} ({duration(needed.trajectories / rate)} at {rate:g} Hz)"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def refuse(given: dict[str, Any]) -> None:
    """Options that are for simulated networks only."""
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: a recording has the noise that it has. These are for a network that can be simulated."
        )
