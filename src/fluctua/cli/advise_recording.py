"""`fluctua advise` of a recording: repetitions, sampling interval, readout noise."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fluctua.cli import files
from fluctua.cli.common import say, show_progress, to_json
from fluctua.core.words import format_count

if TYPE_CHECKING:
    from fluctua.insitu.advice import FileAdvice
    from fluctua.learn.repetitions import Needed, Repetitions


def advise_recording(
    source: str,
    *,
    error: float,
    rate: float | None,
    score: str,
    model: str | None,
    params: Path | None,
    places: list[str] | None,
    settings: dict[str, Any],
    continuing: bool,
    as_json: bool,
) -> None:
    """Measure what a recording allows, and print it."""
    from fluctua.insitu.advice import advise_file, is_stepped
    from fluctua.insitu.estimating import resolve_score
    from fluctua.insitu.recording.model import load_model

    theta = settings.get("theta", "set")
    files.refuse_two_sources(params, theta)
    with (
        warnings.catch_warnings(),
        files.open_file(Path(source), places, settings) as recording,
        show_progress("reading", show=not as_json) as progress,
    ):
        files.ignore_reported_warnings()
        files.set_precision(recording.description.dtype)
        m = load_model(recording, model, files.read_params(params))
        score = resolve_score(recording, m.process, score)
        advice = advise_file(
            recording,
            m,
            continuing=continuing,
            error=error,
            score=score,
            noise=settings.get("noise", "auto"),
            theta=theta,
            progress=progress,
        )
        d = recording.description
        shape = recording.x.shape
        network = model is None
        stepped = is_stepped(recording)
    if as_json:
        numbers = advice._asdict()
        if advice.stretches is not None and advice.continuing is not None:
            c = advice.continuing
            numbers["stretches"] = advice.stretches.numbers
            numbers["continuing"] = {"window": c.window, "length": c.length, "duration": c.duration}
        say(
            json.dumps(
                to_json({"source": source, "notes": numbers.pop("notes"), **numbers, "rate": rate})
            )
        )
        files.report_residuals(False, advice.residuals)
        return
    kind = "complex channels" if d.is_complex else "channels"
    say(
        f"{source}: {format_count(shape[0], 'trajectory')} × {shape[1]:,} times × "
        f"{len(d.channels)} {kind}"
    )
    if advice.stretches is not None:
        say(f"{advice.stretches!r}")
    many = (
        _describe_repetitions(advice, rate)
        if advice.continuing is None
        else _describe_length(advice, d.time_units)
    )
    for line in (*advice.notes, "", *many, "", *_describe_readout(advice, d.components, d.units)):
        say(line)
    for line in ("", *_describe_interval(advice, d.time_units, score, network, stepped)):
        say(line)
    files.report_residuals(False, advice.residuals)


def _describe_length(advice: FileAdvice, units: str) -> list[str]:
    """Describe the length that one long record needs, as `_describe_repetitions` does."""
    r = advice.repetitions
    c = advice.continuing
    assert c is not None
    unit = f" {units}" if units else " units of time"

    def time(needed):
        length = float(f"{needed.trajectories * c.length:.2g}")
        return f"{'more than ' * needed.at_least}{length:,g}{unit}"

    reached = (
        "does not stand out yet from its noise"
        if r.reached is None
        else f"is known to {_format_percent(r.reached)}"
    )
    return [
        "HOW LONG A RECORD",
        f"  From {c.duration:.4g}{unit} the gradient {reached} (window {c.window:.3g}, "
        f"{format_count(r.recorded, 'batch')}).",
        f"  {_format_percent(r.error)} takes {time(r.whole)}.",
        f"  100 %, at which a step still points within 45° of uphill, takes {time(r.training)}.",
        f"  {_describe_standing_out(r)}",
        f"  {_format_percent(r.share)} of all components to {_format_percent(r.error)} each takes "
        f"{time(r.components)}.",
    ]


def _describe_standing_out(r: Repetitions) -> str:
    least = f"the least is {r.weakest.name}, {r.weakest.z:.1f} from zero"
    return f"{r.clear} of {r.trainable} components stand out by two standard errors; {least}."


def _describe_repetitions(advice: FileAdvice, rate: float | None) -> list[str]:
    r = advice.repetitions
    lines = ["HOW MANY REPETITIONS"]
    recorded = format_count(r.recorded, "trajectory")
    if r.reached is None:
        lines.append(f"  The gradient does not stand out yet from the noise of {recorded}.")
    else:
        lines.append(
            f"  {recorded} give the gradient to {_format_percent(r.reached)}, "
            "each component in units of its noise."
        )
    lines.append(f"  {_format_percent(r.error)} takes {_format_count(r.whole, rate)}.")
    lines.append(
        "  100 %, at which a step still points within 45° of uphill, takes "
        f"{_format_count(r.training, rate)}."
    )
    lines.append(f"  {_describe_standing_out(r)}")
    lines.append(
        f"  {_format_percent(r.share)} of all components to {_format_percent(r.error)} each takes "
        f"{_format_count(r.components, rate)}."
    )
    return lines


def _describe_readout(advice: FileAdvice, components: tuple[str, ...], units: str) -> list[str]:
    lines = ["READOUT NOISE"]
    s = advice.sampling
    unit = f" {units}" if units else ""
    if advice.observation is None:
        bound = (
            ""
            if advice.observation_bound is None
            else f": below {advice.observation_bound:.2g}{unit}"
        )
        return [*lines, f"  None seen{bound}. What moves between two samples is the system."]
    worst = int(np.argmax(s.readout))
    middle = float(np.median(s.readout))
    size = np.sqrt(np.broadcast_to(advice.observation, s.readout.shape)[worst])
    lines.append(
        f"  Between two samples it adds to the variance {_format_percent(s.readout[worst])} in "
        f"{components[worst]}, the worst,"
    )
    lines.append(
        f"  where its standard deviation is {size:.3g}{unit}, and {_format_percent(middle)} in "
        "the median one."
    )
    lines.append(
        "  It dominates: most of what is taken for kicks is readout. It is corrected for, but "
        "costs trajectories."
        if s.readout_dominates
        else "  It does not dominate, and it is corrected for."
    )
    return lines


def _describe_interval(
    advice: FileAdvice, units: str, score: str, network: bool, stepped: bool
) -> list[str]:
    s = advice.sampling
    error = advice.repetitions.error
    lines = ["SAMPLING INTERVAL" + (f", times in {units}" if units else "")]
    lines.append(
        f"  A sample every {s.interval:.2g}; the system's fastest rate is w = {s.rate:.3g}, wΔt = "
        f"{s.rate * s.interval:.2g}."
    )
    if score == "euler" and stepped:
        lines.append(
            "  Simulated with Euler steps of this interval: Euler's score is exact. "
            "For an instrument:"
        )
    if score == "euler":
        lines.append(
            f"  Euler's score is biased by about {_format_percent(s.euler)} of the gradient (a "
            "rule of thumb)."
        )
    readout = f"{s.shortest:.2g} or more for the readout"
    bias = f"{s.longest:.2g} or less for a bias below half of {_format_percent(error)}"
    kerr = " (no Kerr effect)" if network else ""
    linear = f"up to about {s.frozen:.2g}, or any interval if the drift is linear{kerr}"
    if s.verdict == "good":
        return [*lines, "  → The interval is right."]
    if s.verdict == "slower":
        return [*lines, f"  → Sample every {readout}, and {bias if score == 'euler' else linear}."]
    if s.verdict == "faster" and score == "euler":
        return [*lines, f"  → Sample every {bias}.", f"    Or use --score local-linear: {linear}."]
    if s.verdict == "faster":
        return [
            *lines,
            f"  → Too long, unless the drift is linear: local linearisation is good {linear}.",
        ]
    lines += [
        f"  → No interval suits Euler's score: {readout}, {bias}.",
        f"    Use --score local-linear: {linear}.",
    ]
    if s.shortest > s.frozen:
        bent = "With a Kerr effect" if network else "Where the drift is not linear"
        lines.append(f"    {bent} that is too short for this readout: reduce its noise first.")
    return lines


def _format_count(needed: Needed, rate: float | None) -> str:
    from fluctua.store.progress import format_duration

    digits = max(0, int(np.floor(np.log10(max(needed.trajectories, 1)))) - 1)
    count = max(2, round(needed.trajectories, -digits))
    text = f"{'more than ' if needed.at_least else ''}{count:,.0f} trajectories"
    return (
        text
        if rate is None
        else f"{text} ({format_duration(needed.trajectories / rate)} at {rate:g} Hz)"
    )


def _format_percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"
