"""`fluctua estimate`: the gradient from recordings, or of a simulated network."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli.common import EXPECTED, Output, fail, refuse_options, say, show_progress, to_json
from fluctua.cli.files import (
    complete_npz,
    parse_places,
    parse_scale,
    read_params,
    report_residuals,
    set_precision,
)
from fluctua.cli.networks import is_simulated
from fluctua.cli.options import (
    FILE_KEYS,
    PRESET,
    AsJson,
    Continuing,
    Map,
    ModelCode,
    ParamsFile,
    Seed,
    Strict,
    Trajectories,
)
from fluctua.cli.settings import Key, Keys, parse_settings, read_settings

if TYPE_CHECKING:
    from fluctua.insitu.advice import Sampling
    from fluctua.insitu.estimating import RecordingEstimate
    from fluctua.insitu.pooling import EstimateOptions, Pooled

ESTIMATE_KEYS: Keys = {
    **FILE_KEYS,
    "parameter": Key(str, "parameters that must be estimated, omega or omega[3],kappa[0]"),
    "noise": Key(str, "diffusion Q: auto, file (its calibration) or nominal (the model's)"),
    "theta": Key(str, "parameters of the drift: set, or calibrated (fitted in the file)"),
    "readout_noise": Key(float, "standard deviation of the readout, in place of the file's"),
    "window": Key(str, "with --continuing: time over which a kick is remembered, or auto"),
    "chunk_mb": Key(int, "megabytes of states held at a time (256)"),
}
FOR_RECORDINGS = (
    "model",
    "params",
    "score",
    "baseline",
    "continuing",
    "places",
    "settings",
    "out",
    "strict",
    "as_json",
    "cluster",
)
FOR_NETWORKS = ("params", "baseline", "trajectories", "seed", "settings", "out", "as_json")


def estimate(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|PRESET|FILE.toml|RUN",
            help="Recordings, .npz, .npy, .csv or MATLAB v7.3 files, several of which are pooled; "
            f"or a network to simulate: a preset ({PRESET}), a file of settings, a run's folder",
        ),
    ],
    model: ModelCode = None,
    params: ParamsFile = None,
    score: Annotated[
        str,
        typer.Option(
            help="Score of a recording: euler, local-linear for samples far apart, or auto: as "
            "the file was calibrated"
        ),
    ] = "auto",
    baseline: Annotated[
        str,
        typer.Option(
            help="Baseline: none, time, mean, optimal or twin; simulated also carried and binned"
        ),
    ] = "time",
    continuing: Continuing = False,
    trajectories: Trajectories = 1000,
    seed: Seed = 0,
    places: Map = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Of recordings: the keys listed above. Of a network: any key of its "
            "configuration, such as task.dt=0.01 or backend=jax; may be repeated",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Also write gradient and errors to this file"),
    ] = None,
    strict: Strict = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Read recordings on a Ray cluster: HOST:PORT, auto for one that runs here, or "
            "local",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate a gradient with error bars, from recordings or of a simulated network.

    A recording may be larger than memory. One of a resonator network carries its own model, and
    after `fluctua calibrate --write` its own noise, which is used. Where channels are missing or
    have readout noise, the score is that of a filter; parameters that no filter can help are
    refused by name. Several files at the same settings give one estimate, each with a baseline of
    its own.

    A network is simulated with --trajectories and --seed, at its start or, for the folder of a
    run, at its trained parameters.
    """
    try:
        output = Output(complete_npz(out), strict, as_json)
        if len(sources) == 1 and is_simulated(sources[0]):
            from fluctua.cli.estimate_network import Simulation, estimate_network

            refuse_options(context, FOR_NETWORKS, f"for recordings, not for {sources[0]}.")
            simulation = Simulation(sources[0], params, baseline, trajectories, seed)
            estimate_network(simulation, parse_settings(settings), output)
            return
        refuse_options(context, FOR_RECORDINGS, "for networks that are simulated.")
        keys = read_settings(settings, ESTIMATE_KEYS)
        options = _gather_options(model, params, score, baseline, places, keys)
        window = _parse_window(keys.get("window", "auto"), continuing)
        if continuing:
            options = options._replace(window=window)
        _estimate_files([Path(source) for source in sources], options, cluster, output)
    except typer.Exit:
        raise
    except EXPECTED as error:
        fail(str(error))


def _gather_options(
    model: str | None,
    params: Path | None,
    score: str,
    baseline: str,
    places: list[str] | None,
    keys: dict[str, Any],
) -> EstimateOptions:
    """How every file is read and estimated, checked."""
    from fluctua.insitu.pooling import EstimateOptions

    chunk_mb = keys.get("chunk_mb", 256)
    readout_noise = keys.get("readout_noise")
    theta = keys.get("theta", "set")
    if chunk_mb < 1:
        raise ValueError(f"--set chunk_mb must be 1 or more; got {chunk_mb}.")
    if readout_noise is not None and not 0 <= readout_noise < float("inf"):
        raise ValueError(
            f"--set readout_noise is a standard deviation, 0 or more; got {readout_noise:g}."
        )
    if params is not None and theta == "calibrated":
        raise ValueError(
            "--params and --set theta=calibrated are two sources of the parameters: give one of "
            "them."
        )
    return EstimateOptions(
        model=model,
        params=read_params(params),
        score=score,
        baseline=baseline,
        noise=keys.get("noise", "auto"),
        theta=theta,
        observation_noise=readout_noise,
        required=tuple(filter(None, map(str.strip, keys.get("parameter", "").split(",")))),
        chunk_bytes=chunk_mb * 2**20,
        places=parse_places(places),
        dt=keys.get("dt"),
        scale=parse_scale(keys.get("scale")),
    )


def _parse_window(text: str, continuing: bool) -> float | str:
    """A time, or `auto`."""
    if text == "auto":
        return text
    if not continuing:
        raise ValueError("--set window is of a long-run average: give --continuing too.")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--set window takes a time or auto; got {text!r}.") from None


def _estimate_files(
    files: list[Path], options: EstimateOptions, cluster: str | None, output: Output
) -> None:
    """Estimate from all files together and print, with the warnings of each."""
    from fluctua.insitu.pooling import estimate_files

    started = time.perf_counter()
    with (
        warnings.catch_warnings(),
        show_progress("reading", show=not output.as_json) as progress,
    ):
        _ignore_warnings()
        pooled = estimate_files(files, options, cluster=cluster, progress=progress)
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
    _warn_of_euler(*(file.sampling for file in pooled.files))
    report_residuals(output.strict, *(file.result.residuals for file in pooled.files))
    _warn_of_change(output.strict, pooled.result)


def _ignore_warnings() -> None:
    """Silence the warnings that a command prints in words of its own."""
    for start in (
        "the (recording is not of this|trajectories are not those of the)",
        "the record is not in a steady state",
    ):
        warnings.filterwarnings("ignore", start)


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
        "said": first.notes,
    }
    return {
        **_numbers(pooled.result, seconds),
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
    from fluctua.insitu.estimating import FILTER

    where = f" on the cluster at {cluster}" if cluster else ""
    many = len(pooled.files) > 1 or cluster is not None
    count = f"{len(pooled.files)} files{where}, " if many else ""
    by_filter = " of a filter" if pooled.result.score == FILTER else ""
    transitions = _join_transitions(pooled)
    return f"{count}{transitions} score{by_filter}, {options.baseline} baseline"


def _save(out: Path | None, result: RecordingEstimate) -> None:
    import numpy as np

    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        f"gradient.{k}": np.asarray(v) for k, v in result.estimate.gradient.items()
    }
    arrays |= {f"stderr.{k}": np.asarray(v) for k, v in result.estimate.stderr.items()}
    np.savez(out, **arrays)


def _warn_of_change(strict: bool, result: RecordingEstimate) -> None:
    """Print on stderr that a record is not steady; with `strict` exit 1."""
    change = result.continuing.change if result.continuing else None
    if change is None or not change.seen:
        return
    say(f"→ the record is not in a steady state: {change!r}", err=True, fg=typer.colors.YELLOW)
    if strict:
        raise typer.Exit(1)


def _warn_of_euler(*judged: Sampling | None) -> None:
    """Print on stderr that Euler's score does not suit the interval, by the worst of the files."""
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


def _print(result: RecordingEstimate) -> None:
    from fluctua.core.text import describe_estimate
    from fluctua.insitu.pooling import name_resonator

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
