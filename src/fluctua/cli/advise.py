"""`fluctua advise`, before a training, or from trajectories that are there."""

from __future__ import annotations

import json
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from fluctua.cli.common import (
    EXPECTED,
    AsJson,
    bar,
    fail,
    mapping,
    parameters,
    plain,
    precision,
    say,
)

if TYPE_CHECKING:
    from fluctua.runs.advise import Advice
    from fluctua.runs.noise import Optimum
    from fluctua.tcmt import Task


_of_lattice = partial(typer.Option, rich_help_panel="Of a lattice")
_of_recording = partial(typer.Option, rich_help_panel="Of a recording")


def advise(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="demo, paper, a TOML file, a run folder, parameters, or a recording",
        ),
    ] = "paper",
    error: Annotated[
        float | None, typer.Option(help="wanted relative error of the gradient", show_default="0.1")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="trajectories a second of your hardware, in Hz")
    ] = None,
    trajectories: Annotated[
        int | None, _of_lattice(help="in place of --error: the budget of one estimate")
    ] = None,
    return_bias: Annotated[
        float, _of_lattice(help="most that noise may add to the return, relative to it")
    ] = 0.02,
    sigma_w: Annotated[
        list[float] | None, _of_lattice(help="amplitude to measure at; may be repeated")
    ] = None,
    pilot: Annotated[int, _of_lattice(help="trajectories at each amplitude")] = 400,
    config: Annotated[
        str, _of_lattice(help="for PARAMS.npz: the preset or file with its lattice")
    ] = "paper",
    backend: Annotated[str, _of_lattice(help="auto, cpu or cuda")] = "auto",
    score: Annotated[
        str,
        _of_recording(
            help="euler, local-linear for samples far apart, or auto: as the file was calibrated"
        ),
    ] = "auto",
    continuing: Annotated[
        bool, _of_recording("--continuing", help="one long record of a steady state, or a few")
    ] = False,
    model: Annotated[
        Path | None, _of_recording(help="a Python file with `process` and `objective`")
    ] = None,
    params: Annotated[
        Path | None, _of_recording(help=".npz of parameters, in place of the file's")
    ] = None,
    map_: Annotated[
        list[str] | None,
        _of_recording("--map", help="NAME=PLACE in a foreign file; may be repeated"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what noise, how many trajectories and how long a gradient takes.

    Of a lattice, from small pilots. Of a recording: how many trajectories, how far apart the
    samples should be, and whether the readout is in the way.
    """
    import jax

    from fluctua.runs.advise import advise as measure
    from fluctua.runs.build import resolve_backend

    try:
        if backend not in ("auto", "cpu", "cuda"):
            raise ValueError(f'--backend must be "auto", "cpu" or "cuda"; got {backend!r}.')
        if error is not None and trajectories is not None:
            raise ValueError(
                "--error asks for trajectories and --trajectories for the error: give one of them."
            )
        for name, value in (("--error", error), ("--rate", rate), ("--return-bias", return_bias)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive; got {value:g}.")
        if map_ or is_recording(source):
            refuse({"--trajectories": trajectories, "--sigma-w": sigma_w or None})
            advise_from(
                source,
                error=error or 0.1,
                rate=rate,
                score=score,
                model=model,
                params=params,
                map_=map_,
                continuing=continuing,
                as_json=as_json,
            )
            return
        task, theta, title = _find(source, config)
        device = resolve_backend(backend)
        advice = measure(
            jax.random.key(0),
            task,
            theta,
            error=error,
            trajectories=trajectories,
            return_bias=return_bias,
            sigma_w=sigma_w,
            pilot=pilot,
            backend=device,
        )
    except EXPECTED as problem:
        fail(str(problem))
    if as_json:
        say(json.dumps(_plain(advice, title, rate, device)))
        return
    _print(advice, title, task, rate, device)


def _find(source: str, config: str) -> tuple[Task, dict[str, Any], str]:
    """What is asked about: task, θ, and what to call it."""
    from fluctua.paper.training import from_file
    from fluctua.runs.build import build, resolve_backend
    from fluctua.runs.config import apply_changes, find_config
    from fluctua.runs.reading import read_run

    path = Path(source)
    if path.is_dir():
        run = read_run(path)
        return run.task, run.trained, f"{source}, trained"
    if path.suffix == ".npz":
        (lattice,) = from_file(path, config)
        return lattice.task, lattice.theta, source
    settings = find_config(source)
    parts = build(
        apply_changes(settings, {"backend": resolve_backend("cpu"), "baseline.kind": "time"})
    )
    return parts.task, parts.theta, f"{source}, at its start"


def _times(advice: Advice, point: Optimum, rate: float | None) -> dict[str, float]:
    each = {
        "here": point.trajectories * advice.seconds_per_trajectory,
        "h200": point.trajectories * advice.h200_seconds_per_trajectory,
    }
    return each | ({} if rate is None else {"hardware": point.trajectories / rate})


def _duration(seconds: float) -> str:
    from fluctua.cli.progress import duration

    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _plain(advice: Advice, title: str, rate: float | None, device: str) -> dict[str, Any]:
    """As JSON has it."""

    def point(p):
        return {
            **p._asdict(),
            "return_bias": advice.bias.value * p.sigma_w**2,
            "seconds": _times(advice, p, rate),
        }

    return {
        "source": title,
        "backend": device,
        "J_silent": advice.J_silent,
        "return_bias_per_sigma2": list(advice.bias),
        "return_std": advice.spread,
        "signal": list(advice.signal),
        "recommended": point(advice.best),
        "own": point(advice.at_own),
        "families": {
            f.name: {
                "parameters": f.size,
                "gradient_norm2": list(f.norm2),
                "variance_law": f.variance._asdict(),
                "bias_slope": f.bias,
            }
            for f in advice.families
        },
    }


def _print(advice: Advice, title: str, task: Task, rate: float | None, device: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    t = advice.tradeoff
    say(
        f"{title}: {task.network.sites} resonators, {len(task.t) - 1:,} steps, time baseline, "
        "measured at "
        f"σ_W from {t.low:g} to {t.high:g}"
    )
    say(
        f"J = {advice.J_silent:.4f} without noise, which adds c σ_W², c = {advice.bias}; single "
        "returns spread "
        f"by {advice.spread:.3g} at σ_W = {advice.sigma_w:g}"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("family", "|∇J|²", "variance of one trajectory", "|∇c|"):
        table.add_column(heading, justify="left" if heading == "family" else "right", no_wrap=True)
    for f in advice.families:
        law = " + ".join(
            f"{v:.3g}{unit}" for v, unit in zip(f.variance, ("/σ²", "", "σ²"), strict=True) if v > 0
        )
        table.add_row(f.name, str(f.norm2), law, f"{f.bias:.2g}")
    console.print(table)
    say(f"one trajectory lifts the gradient out of its noise by Σ|∇J|²/V = {advice.signal}")
    table = Table(box=box.SIMPLE_HEAD)
    headings = ["", "σ_W", "trajectories", "error", "added to J", f"here ({device})", "H200 *"]
    for heading in [*headings, *([] if rate is None else [f"at {rate:g} Hz"])]:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, p in (("recommended", advice.best), ("as it is", advice.at_own)):
        times = [_duration(seconds) for seconds in _times(advice, p, rate).values()]
        table.add_row(
            name,
            f"{p.sigma_w:.3g}",
            f"{p.trajectories:,.0f}",
            f"{p.error:.2g}",
            f"{advice.bias.value * p.sigma_w**2:+.2g}",
            *times,
        )
    console.print(table)
    why = {
        "gradient": "less noise has more variance, more has more bias in the gradient",
        "return bias": "more noise would add more to the return than --return-bias allows",
        "range": "it is the end of what was measured: repeat --sigma-w to look further",
    }
    say(f"σ_W = {advice.best.sigma_w:.3g}: {why[advice.best.limited_by]}.")
    say(
        "* from results/bench, time-only baseline, scaled by resonators and steps; not measured "
        "here"
    )


# --------------------------------------------------------------------------------- from a recording


if TYPE_CHECKING:
    from fluctua.insitu.advice import FileAdvice
    from fluctua.learn.repetitions import Needed, Repetitions


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
    continuing: bool,
    as_json: bool,
) -> None:
    """Measure and print."""
    from fluctua.insitu.advice import advise_file, is_stepped
    from fluctua.insitu.estimating import resolve_score
    from fluctua.insitu.recording.description import counted
    from fluctua.insitu.recording.model import load_model
    from fluctua.insitu.recording.reader import open_recording

    with (
        open_recording(source, mapping(map_)) as recording,
        bar("reading", show=not as_json) as progress,
    ):
        precision(recording.description.dtype)
        m = load_model(recording, model, parameters(params))
        score = resolve_score(recording, m.process, score)
        advice = advise_file(
            recording,
            m,
            continuing=continuing,
            error=error,
            score=score,
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
                plain({"source": source, "said": numbers.pop("notes"), **numbers, "rate": rate})
            )
        )
        return
    kind = "complex channels" if d.is_complex else "channels"
    say(
        f"{source}: {counted(shape[0], 'trajectory')} × {shape[1]:,} times × {len(d.channels)} "
        f"{kind}"
    )
    if advice.stretches is not None:
        say(f"{advice.stretches!r}")
    many = (
        _repetitions(advice, rate) if advice.continuing is None else _how_long(advice, d.time_units)
    )
    for line in (*advice.notes, "", *many, "", *_readout(advice, d.components, d.units)):
        say(line)
    for line in ("", *_interval(advice, d.time_units, score, network, stepped)):
        say(line)


def _how_long(advice: FileAdvice, units: str) -> list[str]:
    """What `_repetitions` says, of one long record."""
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
        else f"is known to {_percent(r.reached)}"
    )
    return [
        "HOW LONG A RECORD",
        f"  From {c.duration:.4g}{unit} the gradient {reached} (window {c.window:.3g}, "
        f"{r.recorded:,} batches).",
        f"  {_percent(r.error)} takes {time(r.whole)}.",
        f"  100 %, at which a step still points within 45° of uphill, takes {time(r.training)}.",
        f"  {_standing_out(r)}",
        f"  {_percent(r.share)} of all components to {_percent(r.error)} each takes "
        f"{time(r.components)}.",
    ]


def _standing_out(r: Repetitions) -> str:
    least = f"the least is {r.weakest.name}, {r.weakest.z:.1f} from zero"
    return f"{r.clear} of {r.trainable} components stand out by two standard errors; {least}."


def _repetitions(advice: FileAdvice, rate: float | None) -> list[str]:
    r = advice.repetitions
    lines = ["HOW MANY REPETITIONS"]
    if r.reached is None:
        lines.append(
            f"  The gradient does not stand out yet from the noise of {r.recorded:,} trajectories."
        )
    else:
        lines.append(
            f"  {r.recorded:,} trajectories give the gradient to {_percent(r.reached)}, each "
            "component in units of its "
            "noise."
        )
    lines.append(f"  {_percent(r.error)} takes {_count(r.whole, rate)}.")
    lines.append(
        "  100 %, at which a step still points within 45° of uphill, takes "
        f"{_count(r.training, rate)}."
    )
    lines.append(f"  {_standing_out(r)}")
    lines.append(
        f"  {_percent(r.share)} of all components to {_percent(r.error)} each takes "
        f"{_count(r.components, rate)}."
    )
    return lines


def _readout(advice: FileAdvice, components: tuple[str, ...], units: str) -> list[str]:
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
        f"  Between two samples it adds to the variance {_percent(s.readout[worst])} in "
        f"{components[worst]}, the worst,"
    )
    lines.append(
        f"  where its standard deviation is {size:.3g}{unit}, and {_percent(middle)} in the median "
        "one."
    )
    lines.append(
        "  It dominates: most of what is taken for kicks is readout. It is corrected for, but "
        "costs trajectories."
        if s.readout_dominates
        else "  It does not dominate, and it is corrected for."
    )
    return lines


def _interval(
    advice: FileAdvice, units: str, score: str, network: bool, stepped: bool
) -> list[str]:
    s = advice.sampling
    error = advice.repetitions.error
    lines = ["SAMPLING INTERVAL" + (f", times in {units}" if units else "")]
    lines.append(
        f"  A sample every {s.interval:.2g}; the system's fastest rate is w = "
        f"{s.rate:.3g}, wΔt = "
        f"{s.rate * s.interval:.2g}."
    )
    if score == "euler" and stepped:
        lines.append(
            "  Simulated with Euler steps of this interval: Euler's score is exact. For an "
            "instrument:"
        )
    if score == "euler":
        lines.append(
            f"  Euler's score is biased by about {_percent(s.euler)} of the gradient (a rule of "
            "thumb)."
        )
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
        lines.append(
            f"    {bent} that is too short for this readout: make the readout quieter first."
        )
    return lines


def _count(needed: Needed, rate: float | None) -> str:
    from fluctua.cli.progress import duration

    digits = max(0, int(np.floor(np.log10(max(needed.trajectories, 1)))) - 1)
    count = max(2, round(needed.trajectories, -digits))
    text = f"{'more than ' if needed.at_least else ''}{count:,.0f} trajectories"
    return (
        text if rate is None else f"{text} ({duration(needed.trajectories / rate)} at {rate:g} Hz)"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def refuse(options: dict[str, Any]) -> None:
    """Options that are for simulated networks only."""
    wrong = [name for name, value in options.items() if value is not None]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: a recording has the noise that it has. These are for a network "
            "that can be simulated."
        )
