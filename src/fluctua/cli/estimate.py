"""`fluctua estimate`."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from fluctua.cli.common import (
    EXPECTED,
    AsJson,
    Interval,
    Map,
    ModelFile,
    ParamsFile,
    Rate,
    Scale,
    Strict,
    bar,
    factors,
    fail,
    interval,
    mapping,
    npz_file,
    opened,
    parameters,
    plain,
    precision,
    refuse_if,
    say,
)

if TYPE_CHECKING:
    from fluctua.insitu.advice import Sampling
    from fluctua.insitu.estimating import RecordingEstimate
    from fluctua.insitu.pooling import EstimateOptions
    from fluctua.insitu.recording.model import RecordingModel


def estimate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="a recording, .npz, .npy, .csv or MATLAB v7.3 file; several are pooled",
        ),
    ],
    model: ModelFile = None,
    params: ParamsFile = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter", help="that must be estimated, omega[3] or omega; may be repeated"
        ),
    ] = None,
    score: Annotated[
        str,
        typer.Option(
            help="euler, local-linear for samples far apart, or auto: as the file was calibrated"
        ),
    ] = "auto",
    baseline: Annotated[str, typer.Option(help="none, time, mean, optimal or twin")] = "time",
    noise: Annotated[
        str,
        typer.Option(
            help="whose diffusion Q: auto, file (its calibration) or nominal (the model's)"
        ),
    ] = "auto",
    theta: Annotated[
        str,
        typer.Option(
            help="parameters of the drift: set, or calibrated (as fitted in the file's calibration)"
        ),
    ] = "set",
    observation_noise: Annotated[
        float | None,
        typer.Option(
            help="standard deviation of the measurement's own noise to correct for, in place of "
            "the file's"
        ),
    ] = None,
    continuing: Annotated[
        bool,
        typer.Option(
            "--continuing", help="one long record of a steady state, or a few: the long-run average"
        ),
    ] = False,
    window: Annotated[
        str, typer.Option(help="with --continuing: time over which a kick is remembered, or auto")
    ] = "auto",
    map_: Map = None,
    dt: Interval = None,
    rate: Rate = None,
    scale: Scale = None,
    chunk_mb: Annotated[int, typer.Option(help="of states held at a time")] = 256,
    out: Annotated[
        Path | None, typer.Option(help="also write gradient and errors to this .npz")
    ] = None,
    strict: Strict = False,
    as_json: AsJson = False,
    cluster: Annotated[
        str | None, typer.Option(help="read the files on a Ray cluster: HOST:PORT, auto or local")
    ] = None,
) -> None:
    """Estimate the gradient from recordings, with error bars.

    A recording may be larger than memory. One of a resonator network carries its own model, and
    after `fluctua calibrate --write` its own noise, which is used. Where channels are missing or
    carry noise of their own, the score is that of a filter; what no filter can help is refused by
    name. Several files at the same settings give one estimate, each with a baseline of its own.
    """
    from fluctua.insitu.advice import judge_euler
    from fluctua.insitu.calibrate.table import apply_calibration
    from fluctua.insitu.continuing import estimate_continuing
    from fluctua.insitu.estimating import FILTER, estimate_model, resolve_score
    from fluctua.insitu.hidden import refuse
    from fluctua.insitu.pooling import EstimateOptions
    from fluctua.insitu.recording.model import load_model

    begun = time.perf_counter()
    file = files[0]
    try:
        if chunk_mb < 1:
            raise ValueError(f"--chunk-mb must be 1 or more; got {chunk_mb}.")
        if observation_noise is not None and not (
            observation_noise >= 0 and np.isfinite(observation_noise)
        ):
            raise ValueError(
                "--observation-noise is a standard deviation, 0 or more; got "
                f"{observation_noise:g}."
            )
        span = _window(window, continuing)
        if out is not None:
            out = npz_file(out)
        if len(files) > 1 or cluster is not None:
            if continuing:
                raise ValueError(
                    f"--continuing is of one record; got {len(files)} files, or a cluster for them."
                )
            if params is not None and theta == "calibrated":
                raise ValueError(
                    "--params and --theta calibrated both say what the parameters are: give one of "
                    "them."
                )
            reading = EstimateOptions(
                model,
                parameters(params),
                score,
                baseline,
                noise,
                theta,
                observation_noise,
                chunk_mb * 2**20,
                mapping(map_),
                interval(dt, rate),
                factors(scale),
            )
            _several(files, reading, only or [], cluster, begun, out, strict, as_json)
            return
        with (
            opened(file, map_, dt, rate, scale) as recording,
            bar("reading", show=not as_json) as progress,
        ):
            precision(recording.description.dtype)
            if params is not None and theta == "calibrated":
                raise ValueError(
                    "--params and --theta calibrated both say what the parameters are: give one of "
                    "them."
                )
            applied = apply_calibration(
                recording,
                load_model(recording, model, parameters(params)),
                noise=noise,
                theta=theta,
            )
            m = applied.model
            variance = applied.observation_variance
            asked = _asked(only or [], m.theta)
            score = resolve_score(recording, m.process, score)
            if observation_noise is not None:
                variance = np.array(observation_noise**2) if observation_noise else None
            with warnings.catch_warnings():  # told below, in colour
                warnings.filterwarnings(
                    "ignore", "the (recording is not of this|trajectories are not those of the)"
                )
                warnings.filterwarnings("ignore", "the record is not in a steady state")
                if continuing:
                    result = estimate_continuing(
                        recording,
                        m,
                        window=span,
                        score=score,
                        baseline=baseline,
                        observation_noise=variance,
                    )
                else:
                    result = estimate_model(
                        recording,
                        m,
                        score=score,
                        baseline=baseline,
                        observation_noise=variance,
                        chunk_bytes=chunk_mb * 2**20,
                        progress=progress,
                    )
            judged = judge_euler(recording, m, variance) if score == "euler" else None
            label = _component_names(recording.description.channels, m)
        if result.view is not None:
            refuse(result.view, asked, label)
    except EXPECTED as error:
        fail(str(error))
    seconds = time.perf_counter() - begun
    _write(out, result)
    if as_json:
        used = {
            "noise": "nominal" if applied.ratio is None else "file",
            "diffusion_ratio": applied.ratio,
            "observation_variance": variance,
            "theta": theta,
            "said": applied.notes,
        }
        how = {"transition": score, "sampling": judged}
        say(json.dumps(plain({**_numbers(result, seconds), **how, "used": used})))
        _warn_of_euler(judged)
        refuse_if(strict, result.residuals)
        _refuse_change(strict, result)
        return
    _print(result, label)
    for line in applied.notes:
        say(line)
    if observation_noise is not None:
        say(
            f"observation noise: {observation_noise:g}, as given, corrected for in J and its "
            "gradient"
        )
    of_filter = " of a filter" if result.score == FILTER else ""
    written = f"; written to {out}" if out else ""
    say(f"{seconds:.1f} s, {score} score{of_filter}, {baseline} baseline{written}")
    _warn_of_euler(judged)
    refuse_if(strict, result.residuals)
    _refuse_change(strict, result)


def _several(
    files: list[Path],
    reading: EstimateOptions,
    only: list[str],
    cluster: str | None,
    begun: float,
    out: Path | None,
    strict: bool,
    as_json: bool,
) -> None:
    """One estimate from all files, and what is to be said of each."""
    from fluctua.insitu.hidden import refuse
    from fluctua.insitu.pooling import estimate_files

    with warnings.catch_warnings(), bar("reading", show=not as_json) as progress:
        warnings.filterwarnings(
            "ignore", "the (recording is not of this|trajectories are not those of the)"
        )
        result, each = estimate_files(files, reading, cluster=cluster, progress=progress)
    if result.view is not None:
        refuse(result.view, _asked(only, each[0].theta))
    seconds = time.perf_counter() - begun
    _write(out, result)
    residuals = [one.residuals for one in each]
    samplings = [one.sampling for one in each]
    if as_json:
        of_files = [
            {
                "path": str(f.path),
                "trajectories": f.part.count,
                "residuals": f.residuals,
                "transition": f.transition,
                "sampling": f.sampling,
            }
            for f in each
        ]
        numbers = {
            **_numbers(result, seconds),
            "files": of_files,
            "used": {"said": list(each[0].notes)},
        }
        say(json.dumps(plain(numbers)))
        _warn_of_euler(*samplings)
        refuse_if(strict, *residuals)
        return
    _print(result, str)
    for line in dict.fromkeys(note for one in each for note in one.notes):
        say(line)
    where = f" on the cluster at {cluster}" if cluster else ""
    written = f"; written to {out}" if out else ""
    transitions = " and ".join(sorted({one.transition for one in each}))
    say(
        f"{seconds:.1f} s, {len(files)} files{where}, {transitions} score, {reading.baseline} "
        f"baseline{written}"
    )
    _warn_of_euler(*samplings)
    refuse_if(strict, *residuals)


def _write(out: Path | None, result: RecordingEstimate) -> None:
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        f"gradient.{k}": np.asarray(v) for k, v in result.estimate.gradient.items()
    }
    arrays |= {f"stderr.{k}": np.asarray(v) for k, v in result.estimate.stderr.items()}
    np.savez(out, **arrays)


def _window(text: str, continuing: bool) -> float | str:
    """A time, or `auto`."""
    if text == "auto":
        return text
    if not continuing:
        raise ValueError("--window is of a long-run average: give --continuing too.")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--window is a time or auto; got {text!r}.") from None


def _refuse_change(strict: bool, result: RecordingEstimate) -> None:
    """Say on stderr that a record is not steady; with `strict` exit 1."""
    change = result.continuing.change if result.continuing else None
    if change is None or not change.seen:
        return
    say(f"→ the record is not in a steady state: {change!r}", err=True, fg=typer.colors.YELLOW)
    if strict:
        raise typer.Exit(1)


def _warn_of_euler(*judged: Sampling | None) -> None:
    """Say on stderr that Euler's score does not suit the interval, by the worst of the files."""
    unsuitable = [one for one in judged if one is not None and not one.euler_suits]
    if not unsuitable:
        return
    worst = max(unsuitable, key=lambda one: one.euler)
    allowed = worst.euler * worst.longest / worst.interval
    say(
        f"→ Euler's score does not suit samples {worst.interval:.2g} apart: it biases the gradient "
        "by about "
        f"{worst.euler:.0%} (a rule of thumb; {allowed:.0%} at {worst.longest:.2g}). Use --score "
        "local-linear, or "
        "sample faster. It is exact only for a simulation with Euler steps of this interval. More: "
        "fluctua advise FILE",
        err=True,
        fg=typer.colors.YELLOW,
    )


def _numbers(result: RecordingEstimate, seconds: float) -> dict[str, Any]:
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
        del numbers["trajectories"]
    return {**numbers, "refused": list(result.view.missing) if result.view else []}


def _print(result: RecordingEstimate, label: Any) -> None:
    from fluctua.core.text import describe_estimate

    say(
        describe_estimate(result.estimate) if result.continuing is None else repr(result.continuing)
    )
    if result.view and result.view.missing:
        missing = result.view.missing
        why = f" ({result.score})" if result.score else ""
        say(
            f"{len(missing)} parameters are not trainable, because their score needs channels "
            f"nobody recorded{why}:"
        )
        for name, wanted in list(missing.items())[:6]:
            sites = list(dict.fromkeys(label(i) for i in wanted))
            say(f"  {name} needs {', '.join(sites[:4])}{', …' if len(sites) > 4 else ''}")
        if len(missing) > 6:
            say("  … --json lists them all")


def _component_names(channels: tuple[str, ...], model: RecordingModel) -> Any:
    """Component of the whole state -> a name: the channel's, or the resonator that has none."""
    sites = (model.size or 2) // 2
    return lambda i: (
        f"psi[{i % sites}]" if model.observed is not None else channels[i % len(channels)]
    )


def _asked(only: list[str], theta: Any) -> list[str]:
    """`omega` stands for all of its entries."""
    from fluctua.core.text import names

    every = names(theta)
    components = []
    for name in only:
        match = [n for n in every if n == name or n.split("[")[0] == name]
        if not match:
            raise ValueError(
                f"--parameter: there is no {name!r}; parameters are {', '.join(theta)} and their "
                "entries."
            )
        components += match
    return components
