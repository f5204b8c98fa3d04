"""`fluctua advise`: noise, trajectories and time that a gradient takes."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fluctua.cli.common import (
    EXPECTED,
    PRESET,
    AsJson,
    Continuing,
    Map,
    ModelCode,
    ParamsFile,
    fail,
    is_simulated,
    refuse_options,
    say,
)
from fluctua.cli.settings import Key, Keys, Settings, read_settings

if TYPE_CHECKING:
    from fluctua.runs.advise import Advice
    from fluctua.runs.noise import Optimum
    from fluctua.tcmt import Task

ADVISE_KEYS: Keys = {
    "return_bias": Key(float, "largest relative change of the return by noise (0.02)"),
    "sigma_w": Key(list, "noise amplitudes to measure at, [0.1, 0.5]"),
    "pilot": Key(int, "trajectories at each amplitude (400)"),
    "backend": Key(str, "auto, cpu or cuda"),
}
FOR_RECORDINGS = ("error", "rate", "score", "continuing", "model", "params", "places", "as_json")
FOR_NETWORKS = ("error", "rate", "trajectories", "params", "settings", "as_json")


def advise(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|FILE.toml|RUN|FILE",
            help=f"A preset ({PRESET}), a file of settings, the folder of a run, or a recording",
        ),
    ] = "paper",
    error: Annotated[
        float | None,
        typer.Option(help="Wanted relative error of the gradient", show_default="0.1"),
    ] = None,
    trajectories: Annotated[
        int | None,
        typer.Option(help="Number of trajectories of one estimate, in place of --error"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Trajectories per second of your hardware")
    ] = None,
    score: Annotated[
        str,
        typer.Option(
            help="Score of a recording: euler, local-linear for samples far apart, or auto: as "
            "the file was calibrated"
        ),
    ] = "auto",
    continuing: Continuing = False,
    model: ModelCode = None,
    params: ParamsFile = None,
    places: Map = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Advise on noise, number of trajectories and time of a gradient.

    Of a simulated network, from small pilots. Of a recording: how many trajectories, how far apart
    the samples should be, and whether the readout is in the way.
    """
    try:
        for name, value in (("--error", error), ("--rate", rate)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive; got {value:g}.")
        if is_recording(source) or (places and not is_simulated(source)):
            from fluctua.cli.advise_recording import advise_recording

            refuse_options(
                context,
                FOR_RECORDINGS,
                "a recording has the noise that it has. These are for a network that can be "
                "simulated.",
            )
            advise_recording(
                source,
                error=error or 0.1,
                rate=rate,
                score=score,
                model=model,
                params=params,
                places=places,
                continuing=continuing,
                as_json=as_json,
            )
            return
        refuse_options(context, FOR_NETWORKS, f"only recordings have these, and {source} is none.")
        if error is not None and trajectories is not None:
            raise ValueError(
                "--error asks for trajectories and --trajectories for the error: give one of them."
            )
        keys = read_settings(settings, ADVISE_KEYS)
        _advise_network(
            source, params, rate, {"error": error, "trajectories": trajectories, **keys}, as_json
        )
    except EXPECTED as problem:
        fail(str(problem))


def _advise_network(
    source: str, params: Path | None, rate: float | None, options: dict[str, Any], as_json: bool
) -> None:
    """Measure by pilots and print."""
    import jax

    from fluctua.runs.advise import Pilots
    from fluctua.runs.advise import advise as measure
    from fluctua.runs.build import resolve_backend

    backend = options.pop("backend", "auto")
    if backend not in ("auto", "cpu", "cuda"):
        raise ValueError(f'backend must be "auto", "cpu" or "cuda"; got {backend!r}.')
    if not options.get("return_bias", 1.0) > 0:
        raise ValueError(f"return_bias must be positive; got {options['return_bias']:g}.")
    subject = _find_subject(source, params)
    device = resolve_backend(backend)
    pilots = Pilots(options.pop("pilot", 400), backend=device)
    advice = measure(jax.random.key(0), subject.task, subject.theta, pilots=pilots, **options)
    if as_json:
        say(json.dumps(_to_json(advice, subject.title, rate, device)))
        return
    _print(advice, subject, rate, device)


class Subject(NamedTuple):
    """A network to advise on, its parameters, and what to call it."""

    task: Task
    theta: dict[str, Any]
    title: str


def _find_subject(source: str, params: Path | None) -> Subject:
    from fluctua.runs.build import build, resolve_backend
    from fluctua.runs.config import apply_changes, find_config
    from fluctua.runs.evaluate import load_parameters
    from fluctua.runs.reading import read_run

    path = Path(source)
    if path.is_dir():
        run = read_run(path)
        subject = Subject(run.task, run.trained, f"{source}, trained")
    elif path.suffix == ".npz":
        raise ValueError(
            f"{source} holds parameters and no settings: fluctua advise paper --params {source}."
        )
    else:
        config = apply_changes(
            find_config(source), {"backend": resolve_backend("cpu"), "baseline.kind": "time"}
        )
        parts = build(config)
        subject = Subject(parts.task, parts.theta, f"{source}, at its start")
    if params is None:
        return subject
    theta = load_parameters(params, subject.task.network, subject.theta)
    return Subject(subject.task, theta, f"{source} at {params}")


def is_recording(source: str) -> bool:
    """Whether a source is a file of trajectories, and not of parameters or settings."""
    path = Path(source)
    if not path.is_file() or path.suffix == ".toml":
        return False
    if zipfile.is_zipfile(path):
        import numpy as np

        with np.load(path, allow_pickle=False) as file:
            return "x" in file.files
    return True  # what it is instead, the reader says


def _times(advice: Advice, point: Optimum, rate: float | None) -> dict[str, float]:
    each = {
        "here": point.trajectories * advice.seconds_per_trajectory,
        "h200": point.trajectories * advice.h200_seconds_per_trajectory,
    }
    return each | ({} if rate is None else {"hardware": point.trajectories / rate})


def _duration(seconds: float) -> str:
    from fluctua.cli.progress import duration

    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _to_json(advice: Advice, title: str, rate: float | None, device: str) -> dict[str, Any]:
    """The advice as JSON has it."""
    return {
        "source": title,
        "backend": device,
        "J_silent": advice.J_silent,
        "return_bias_per_sigma2": list(advice.bias),
        "return_std": advice.spread,
        "signal": list(advice.signal),
        "recommended": _point_to_json(advice, advice.best, rate),
        "own": _point_to_json(advice, advice.at_own, rate),
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


def _point_to_json(advice: Advice, point: Optimum, rate: float | None) -> dict[str, Any]:
    return {
        **point._asdict(),
        "return_bias": advice.bias.value * point.sigma_w**2,
        "seconds": _times(advice, point, rate),
    }


def _print(advice: Advice, subject: Subject, rate: float | None, device: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    task = subject.task
    t = advice.tradeoff
    say(
        f"{subject.title}: {task.network.sites} resonators, {len(task.t) - 1:,} steps, "
        "time baseline, measured at "
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
        "return bias": "more noise would add more to the return than return_bias allows",
        "range": "it is the end of what was measured: --set sigma_w=[…] looks further",
    }
    say(f"σ_W = {advice.best.sigma_w:.3g}: {why[advice.best.limited_by]}.")
    say(
        "* from results/bench, time-only baseline, scaled by resonators and steps; not measured "
        "here"
    )
