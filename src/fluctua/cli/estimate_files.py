"""`fluctua estimate` of recordings: the estimate, its numbers and its warnings."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import typer

from fluctua.cli.common import Output, say, show_progress, to_json
from fluctua.cli.files import ignore_reported_warnings, report_residuals, set_precision
from fluctua.core.display.estimates import describe_estimate
from fluctua.core.words import format_count
from fluctua.insitu import estimating, pooling
from fluctua.insitu.advice import Sampling
from fluctua.insitu.pooling import EstimateOptions, Pooled, name_resonator


def estimate_files(
    files: list[Path], options: EstimateOptions, cluster: str | None, output: Output
) -> None:
    """Estimate from all files together and print, with the warnings of each."""
    started = time.perf_counter()
    with (
        warnings.catch_warnings(),
        show_progress("reading", show=not output.as_json) as progress,
    ):
        ignore_reported_warnings()
        pooled = pooling.estimate_files(files, options, cluster=cluster, progress=progress)
    seconds = time.perf_counter() - started
    set_precision(pooled.files[0].precision)  # bounds of a long-run average are computed on demand
    _save(output.out, pooled.result)
    if output.as_json:
        say(json.dumps(to_json(_gather_numbers(pooled, options, seconds))))
    else:
        _print(pooled.result)
        _print_notes(pooled, options)
        written = f"; written to {output.out}" if output.out else ""
        say(f"{seconds:.1f} s, {_describe_method(pooled, options, cluster)}{written}")
    _report_euler(*(file.sampling for file in pooled.files))
    report_residuals(output.strict, *(file.result.residuals for file in pooled.files))
    _report_change(output.strict, pooled.result)


def _gather_numbers(pooled: Pooled, options: EstimateOptions, seconds: float) -> dict[str, Any]:
    """The numbers of --json: of the whole, of each file, and what the first one used."""
    first = pooled.files[0]
    described = [
        {
            "path": str(file.path),
            "trajectories": file.result.estimate.count,
            "residuals": file.result.residuals,
            "transition": file.transition,
            "sampling": file.sampling,
        }
        for file in pooled.files
    ]
    used = {
        "noise": "nominal" if first.ratio is None else "file",
        "diffusion_ratio": first.ratio,
        "observation_variance": first.observation_variance,
        "theta": options.theta,
        "notes": first.notes,
    }
    return {
        **_list_numbers(pooled.result, seconds),
        "transition": _join_transitions(pooled),
        "sampling": first.sampling,
        "files": described,
        "used": used,
    }


def _join_transitions(pooled: Pooled) -> str:
    """Names of the transitions that were used."""
    return " and ".join(sorted({file.transition for file in pooled.files}))


def _print_notes(pooled: Pooled, options: EstimateOptions) -> None:
    """Print which noise and parameters were used."""
    for line in dict.fromkeys(line for file in pooled.files for line in file.notes):
        say(line)
    readout = options.observation_noise
    if readout is not None:
        say(f"readout noise: {readout:g}, as given, corrected for in J and its gradient")


def _describe_method(pooled: Pooled, options: EstimateOptions, cluster: str | None) -> str:
    """Number of files, where they were read, score and baseline, in words."""
    where = f" on the cluster at {cluster}" if cluster else ""
    many = len(pooled.files) > 1 or cluster is not None
    count = f"{format_count(len(pooled.files), 'file')}{where}, " if many else ""
    by_filter = " of a filter" if pooled.result.score == estimating.FILTER else ""
    transitions = _join_transitions(pooled)
    return f"{count}{transitions} score{by_filter}, {options.baseline} baseline"


def _save(out: Path | None, result: estimating.RecordingEstimate) -> None:

    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        f"gradient.{k}": np.asarray(v) for k, v in result.estimate.gradient.items()
    }
    arrays |= {f"stderr.{k}": np.asarray(v) for k, v in result.estimate.stderr.items()}
    np.savez(out, **arrays)


def _report_change(strict: bool, result: estimating.RecordingEstimate) -> None:
    """Print on stderr that a record is not steady; with `strict` exit 1."""
    change = result.continuing.change if result.continuing else None
    if change is None or not change.seen:
        return
    say(f"→ the record is not in a steady state: {change!r}", err=True, fg=typer.colors.YELLOW)
    if strict:
        raise typer.Exit(1)


def _report_euler(*judged: Sampling | None) -> None:
    """Print on stderr that Euler's score does not suit the interval, by the worst of the files."""
    unsuitable = [one for one in judged if one is not None and not one.euler_suits]
    if not unsuitable:
        return
    worst = max(unsuitable, key=lambda one: one.euler)
    allowed = worst.euler * worst.longest / worst.interval
    say(
        f"→ Euler's score does not suit samples {worst.interval:.2g} apart: it biases the "
        f"gradient by about {worst.euler:.0%} (a rule of thumb; {allowed:.0%} at "
        f"{worst.longest:.2g}). Use --score local-linear, or sample faster. It is exact only for "
        "a simulation with Euler steps of this interval. More: fluctua advise FILE",
        err=True,
        fg=typer.colors.YELLOW,
    )


def _list_numbers(result: estimating.RecordingEstimate, seconds: float) -> dict[str, Any]:
    e = result.estimate
    numbers: dict[str, Any] = {
        "J": float(e.value),
        "J_stderr": float(e.value_stderr),
        "trajectories": e.count,
    }
    numbers |= {"gradient": e.gradient, "stderr": e.stderr, "seconds": seconds}
    numbers |= {"residuals": result.residuals, "score": result.score}
    if result.continuing is not None:
        c = result.continuing
        names = (
            "window",
            "autocorrelation_time",
            "effective",
            "duration",
            "length",
            "missing",
            "missing_stderr",
        )
        numbers["continuing"] = {name: getattr(c, name) for name in (*names, "memory", "cut")}
        numbers["continuing"] |= {
            "batches": e.count,
            "bias_bound": c.bias_bound,
            "change": c.change,
        }
        numbers["continuing"]["interval"] = e.interval
        numbers["continuing"]["pieces"] = None if c.pieces is None else c.pieces._asdict()
        del numbers["trajectories"]
    return {**numbers, "refused": list(result.view.missing) if result.view else []}


def _print(result: estimating.RecordingEstimate) -> None:

    say(
        describe_estimate(result.estimate) if result.continuing is None else repr(result.continuing)
    )
    if result.view and result.view.missing:
        missing = result.view.missing
        label = name_resonator(result.view)
        why = f" ({result.score})" if result.score else ""
        say(
            f"{len(missing)} parameters are not trainable, because their score needs channels "
            f"that were not recorded{why}:"
        )
        for name, wanted in list(missing.items())[:6]:
            sites = list(dict.fromkeys(label(i) for i in wanted))
            say(f"  {name} needs {', '.join(sites[:4])}{', …' if len(sites) > 4 else ''}")
        if len(missing) > 6:
            say("  … --json lists them all")
