"""`fluctua advise` of a network that is simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from fluctua.cli.common import say
from fluctua.runs import advise
from fluctua.runs.build import build, resolve_backend
from fluctua.runs.config import apply_changes, find_config
from fluctua.runs.evaluate import load_parameters
from fluctua.runs.noise import Optimum
from fluctua.runs.reading import read_run
from fluctua.store.progress import format_duration
from fluctua.tcmt import Task


def advise_network(
    source: str, params: Path | None, rate: float | None, options: dict[str, Any], as_json: bool
) -> None:
    """Measure by pilots and print."""
    backend = options.pop("backend", "auto")
    if backend not in ("auto", "cpu", "cuda"):
        raise ValueError(f'backend must be "auto", "cpu" or "cuda"; got {backend!r}.')
    if not options.get("return_bias", 1.0) > 0:
        raise ValueError(f"return_bias must be positive; got {options['return_bias']:g}.")
    subject = _find_subject(source, params)
    device = resolve_backend(backend)
    pilots = advise.Pilots(options.pop("pilot", 400), backend=device)
    advice = advise.advise(jax.random.key(0), subject.task, subject.theta, pilots=pilots, **options)
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


def _compute_times(advice: advise.Advice, point: Optimum, rate: float | None) -> dict[str, float]:
    each = {
        "here": point.trajectories * advice.seconds_per_trajectory,
        "h200": point.trajectories * advice.h200_seconds_per_trajectory,
    }
    return each | ({} if rate is None else {"hardware": point.trajectories / rate})


def _format_seconds(seconds: float) -> str:

    return f"{seconds:.2g} s" if seconds < 10 else format_duration(seconds)


def _to_json(advice: advise.Advice, title: str, rate: float | None, device: str) -> dict[str, Any]:
    """The advice as JSON has it."""
    return {
        "source": title,
        "backend": device,
        "J_silent": advice.J_noiseless,
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


def _point_to_json(advice: advise.Advice, point: Optimum, rate: float | None) -> dict[str, Any]:
    return {
        **point._asdict(),
        "return_bias": advice.bias.value * point.sigma_w**2,
        "seconds": _compute_times(advice, point, rate),
    }


def _print(advice: advise.Advice, subject: Subject, rate: float | None, device: str) -> None:

    console = Console(width=110)
    task = subject.task
    t = advice.tradeoff
    say(
        f"{subject.title}: {task.network.sites} resonators, {len(task.t) - 1:,} steps, time "
        f"baseline, measured at σ_W from {t.low:g} to {t.high:g}"
    )
    say(
        f"J = {advice.J_noiseless:.4f} without noise, which adds c σ_W², c = {advice.bias}; "
        f"single returns spread by {advice.spread:.3g} at σ_W = {advice.sigma_w:g}"
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
    say(f"signal of one trajectory, gradient against its noise: Σ|∇J|²/V = {advice.signal}")
    table = Table(box=box.SIMPLE_HEAD)
    headings = ["", "σ_W", "trajectories", "error", "added to J", f"here ({device})", "H200 *"]
    for heading in [*headings, *([] if rate is None else [f"at {rate:g} Hz"])]:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, p in (("recommended", advice.best), ("as it is", advice.at_own)):
        times = [_format_seconds(seconds) for seconds in _compute_times(advice, p, rate).values()]
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
        "* from results/bench, time-only baseline, scaled by resonators and steps; "
        "not measured here"
    )
