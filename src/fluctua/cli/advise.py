"""`fluctua advise`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli.common import EXPECTED, fail

if TYPE_CHECKING:
    from fluctua.runs.advise import Advice
    from fluctua.runs.tradeoff import Optimum
    from fluctua.tcmt import Task


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
    trajectories: Annotated[int | None, typer.Option(help="in place of --error: the budget of one estimate")] = None,
    return_bias: Annotated[float, typer.Option(help="most that noise may add to the return, relative to it")] = 0.02,
    rate: Annotated[float | None, typer.Option(help="trajectories a second of your hardware, in Hz")] = None,
    sigma_w: Annotated[list[float] | None, typer.Option(help="amplitude to measure at; may be repeated")] = None,
    pilot: Annotated[int, typer.Option(help="trajectories at each amplitude")] = 400,
    config: Annotated[str, typer.Option(help="for PARAMS.npz: the preset or file with its lattice")] = "paper",
    backend: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    score: Annotated[str, typer.Option(help="recordings: euler, or local-linear for samples far apart")] = "euler",
    model: Annotated[Path | None, typer.Option(help="recordings: a Python file with `process` and `objective`")] = None,
    params: Annotated[Path | None, typer.Option(help="recordings: .npz of parameters, in place of the file's")] = None,
    map_: Annotated[
        list[str] | None, typer.Option("--map", help="recordings: NAME=PLACE in a foreign file; may be repeated")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """How much noise, how many trajectories and how long an accurate gradient takes, from small pilots.

    Of a recording: how many trajectories, how far apart the samples should be, and whether the readout is in the way.
    """
    import jax

    from fluctua.cli import advise_file
    from fluctua.runs.advise import advise as measure
    from fluctua.runs.build import resolve_backend

    try:
        if backend not in ("auto", "cpu", "cuda"):
            raise ValueError(f'--backend must be "auto", "cpu" or "cuda"; got {backend!r}.')
        if error is not None and trajectories is not None:
            raise ValueError("--error asks for trajectories and --trajectories for the error: give one of them.")
        for name, value in (("--error", error), ("--rate", rate), ("--return-bias", return_bias)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive; got {value:g}.")
        if map_ or advise_file.is_recording(source):
            advise_file.refuse({"--trajectories": trajectories, "--sigma-w": sigma_w or None})
            advise_file.advise_from(
                source, error=error or 0.1, rate=rate, score=score, model=model, params=params, map_=map_,
                as_json=as_json,
            )  # fmt: skip
            return
        task, theta, title = _find(source, config)
        device = resolve_backend(backend)
        advice = measure(
            jax.random.key(0), task, theta, error=error, trajectories=trajectories, return_bias=return_bias,
            sigma_w=sigma_w, pilot=pilot, backend=device,
        )  # fmt: skip
    except EXPECTED as problem:
        fail(str(problem))
    if as_json:
        typer.echo(json.dumps(_plain(advice, title, rate, device)))
        return
    _print(advice, title, task, rate, device)


def _find(source: str, config: str) -> tuple[Task, dict[str, Any], str]:
    """What is asked about: task, θ, and what to call it."""
    from fluctua.paper import lattices
    from fluctua.runs.build import build, resolve_backend
    from fluctua.runs.config import changed, named
    from fluctua.runs.reading import read_run

    path = Path(source)
    if path.is_dir():
        run = read_run(path)
        return run.task, run.trained, f"{source}, trained"
    if path.suffix == ".npz":
        (lattice,) = lattices.from_file(path, config)
        return lattice.task, lattice.theta, source
    settings = named(source)
    parts = build(changed(settings, {"backend": resolve_backend("cpu"), "baseline.kind": "time"}))
    return parts.task, parts.theta, f"{source}, at its start"


def _times(advice: Advice, point: Optimum, rate: float | None) -> dict[str, float]:
    each = {"here": point.trajectories * advice.seconds_per_trajectory,
            "h200": point.trajectories * advice.h200_seconds_per_trajectory}  # fmt: skip
    return each | ({} if rate is None else {"hardware": point.trajectories / rate})


def _duration(seconds: float) -> str:
    from fluctua.cli.progress import duration

    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _plain(advice: Advice, title: str, rate: float | None, device: str) -> dict[str, Any]:
    """As JSON has it."""
    point = lambda p: {**p._asdict(), "return_bias": advice.bias.value * p.sigma_w**2,
                       "seconds": _times(advice, p, rate)}  # fmt: skip
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
            f.name: {"parameters": f.size, "gradient_norm2": list(f.norm2), "variance_law": f.variance._asdict(),
                     "bias_slope": f.bias}
            for f in advice.families
        },
    }  # fmt: skip


def _print(advice: Advice, title: str, task: Task, rate: float | None, device: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console, t = Console(width=110), advice.tradeoff
    typer.echo(f"{title}: {task.network.sites} resonators, {len(task.t) - 1:,} steps, time baseline, measured at "
               f"σ_W from {t.low:g} to {t.high:g}")  # fmt: skip
    typer.echo(f"J = {advice.J_silent:.4f} without noise, which adds c σ_W², c = {advice.bias}; single returns spread "
               f"by {advice.spread:.3g} at σ_W = {advice.sigma_w:g}")  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("family", "|∇J|²", "variance of one trajectory", "|∇c|"):
        table.add_column(heading, justify="left" if heading == "family" else "right", no_wrap=True)
    for f in advice.families:
        law = " + ".join(f"{v:.3g}{unit}" for v, unit in zip(f.variance, ("/σ²", "", "σ²"), strict=True) if v > 0)
        table.add_row(f.name, str(f.norm2), law, f"{f.bias:.2g}")
    console.print(table)
    typer.echo(f"one trajectory lifts the gradient out of its noise by Σ|∇J|²/V = {advice.signal}")
    table = Table(box=box.SIMPLE_HEAD)
    headings = ["", "σ_W", "trajectories", "error", "added to J", f"here ({device})", "H200 *"]
    for heading in [*headings, *([] if rate is None else [f"at {rate:g} Hz"])]:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, p in (("recommended", advice.best), ("as it is", advice.at_own)):
        times = [_duration(seconds) for seconds in _times(advice, p, rate).values()]
        table.add_row(name, f"{p.sigma_w:.3g}", f"{p.trajectories:,.0f}", f"{p.error:.2g}",
                      f"{advice.bias.value * p.sigma_w**2:+.2g}", *times)  # fmt: skip
    console.print(table)
    why = {"gradient": "less noise has more variance, more has more bias in the gradient",
           "return bias": "more noise would add more to the return than --return-bias allows",
           "range": "it is the end of what was measured: repeat --sigma-w to look further"}  # fmt: skip
    typer.echo(f"σ_W = {advice.best.sigma_w:.3g}: {why[advice.best.limited_by]}.")
    typer.echo("* from results/bench, time-only baseline, scaled by resonators and steps; not measured here")
