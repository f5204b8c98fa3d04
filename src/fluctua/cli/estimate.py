"""`fluctua estimate`: the gradient from recordings, or of a simulated network."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli.common import (
    EXPECTED,
    FILE_KEYS,
    PRESET,
    AsJson,
    Continuing,
    Map,
    ModelCode,
    Output,
    ParamsFile,
    Seed,
    Strict,
    Trajectories,
    complete_npz,
    fail,
    is_simulated,
    parse_places,
    parse_scale,
    read_params,
    refuse_options,
    say,
    set_precision,
    show_progress,
    to_json,
    warn_of_residuals,
)
from fluctua.cli.settings import Key, Keys, parse_settings, read_settings

if TYPE_CHECKING:
    from fluctua.insitu.advice import Sampling
    from fluctua.insitu.estimating import RecordingEstimate
    from fluctua.insitu.pooling import EstimateOptions
    from fluctua.insitu.recording.model import RecordingModel

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
        files = [Path(source) for source in sources]
        keys = read_settings(settings, ESTIMATE_KEYS)
        options = _gather_options(model, params, score, baseline, places, keys)
        only = [name.strip() for name in keys.get("parameter", "").split(",") if name.strip()]
        if len(files) > 1 or cluster is not None:
            if continuing:
                raise ValueError(
                    f"--continuing is of one record; got {len(files)} files, or a cluster for them."
                )
            _estimate_files(files, options, only, cluster, output)
        else:
            window = _parse_window(keys.get("window", "auto"), continuing)
            _estimate_file(files[0], options, only, window if continuing else None, output)
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


def _estimate_file(
    file: Path,
    options: EstimateOptions,
    only: list[str],
    window: float | str | None,
    output: Output,
) -> None:
    """Estimate from one file and print. window: of a long-run average; None for trajectories."""
    import numpy as np

    from fluctua.insitu.advice import judge_euler
    from fluctua.insitu.calibrate.table import apply_calibration
    from fluctua.insitu.continuing import estimate_continuing
    from fluctua.insitu.estimating import FILTER, estimate_model, resolve_score
    from fluctua.insitu.hidden import refuse
    from fluctua.insitu.recording.model import load_model
    from fluctua.insitu.recording.reader import open_recording

    started = time.perf_counter()
    with (
        open_recording(
            file, dict(options.places or {}), dt=options.dt, scale=options.scale
        ) as recording,
        show_progress("reading", show=not output.as_json) as progress,
    ):
        set_precision(recording.description.dtype)
        params = None if options.params is None else dict(options.params)
        applied = apply_calibration(
            recording,
            load_model(recording, options.model, params),
            noise=options.noise,
            theta=options.theta,
        )
        model = applied.model
        components = _find_components(only, model.theta)
        score = resolve_score(recording, model.process, options.score)
        variance = applied.observation_variance
        readout = options.observation_noise
        if readout is not None:
            variance = np.array(readout**2) if readout else None
        with warnings.catch_warnings():  # printed below, in colour
            _ignore_warnings()
            if window is not None:
                result = estimate_continuing(
                    recording,
                    model,
                    window=window,
                    score=score,
                    baseline=options.baseline,
                    observation_noise=variance,
                )
            else:
                result = estimate_model(
                    recording,
                    model,
                    score=score,
                    baseline=options.baseline,
                    observation_noise=variance,
                    chunk_bytes=options.chunk_bytes,
                    progress=progress,
                )
        judged = judge_euler(recording, model, variance) if score == "euler" else None
        label = _component_names(recording.description.channels, model)
    if result.view is not None:
        refuse(result.view, components, label)
    seconds = time.perf_counter() - started
    _save(output.out, result)
    if output.as_json:
        used = {
            "noise": "nominal" if applied.ratio is None else "file",
            "diffusion_ratio": applied.ratio,
            "observation_variance": variance,
            "theta": options.theta,
            "said": applied.notes,
        }
        how = {"transition": score, "sampling": judged}
        say(json.dumps(to_json({**_numbers(result, seconds), **how, "used": used})))
    else:
        _print(result, label)
        for line in applied.notes:
            say(line)
        if readout is not None:
            say(f"readout noise: {readout:g}, as given, corrected for in J and its gradient")
        by_filter = " of a filter" if result.score == FILTER else ""
        written = f"; written to {output.out}" if output.out else ""
        say(f"{seconds:.1f} s, {score} score{by_filter}, {options.baseline} baseline{written}")
    _warn_of_euler(judged)
    warn_of_residuals(output.strict, result.residuals)
    _warn_of_change(output.strict, result)


def _ignore_warnings() -> None:
    """Silence the warnings that a command prints in words of its own."""
    for start in (
        "the (recording is not of this|trajectories are not those of the)",
        "the record is not in a steady state",
    ):
        warnings.filterwarnings("ignore", start)


def _estimate_files(
    files: list[Path],
    options: EstimateOptions,
    only: list[str],
    cluster: str | None,
    output: Output,
) -> None:
    """Estimate from all files together and print, with what is to be said of each."""
    from fluctua.insitu.hidden import refuse
    from fluctua.insitu.pooling import estimate_files

    started = time.perf_counter()
    with (
        warnings.catch_warnings(),
        show_progress("reading", show=not output.as_json) as progress,
    ):
        _ignore_warnings()
        result, each = estimate_files(files, options, cluster=cluster, progress=progress)
    if result.view is not None:
        refuse(result.view, _find_components(only, each[0].theta))
    seconds = time.perf_counter() - started
    _save(output.out, result)
    if output.as_json:
        described = [
            {
                "path": str(one.path),
                "trajectories": one.part.count,
                "residuals": one.residuals,
                "transition": one.transition,
                "sampling": one.sampling,
            }
            for one in each
        ]
        numbers = {
            **_numbers(result, seconds),
            "files": described,
            "used": {"said": list(each[0].notes)},
        }
        say(json.dumps(to_json(numbers)))
    else:
        _print(result, str)
        for line in dict.fromkeys(line for one in each for line in one.notes):
            say(line)
        where = f" on the cluster at {cluster}" if cluster else ""
        written = f"; written to {output.out}" if output.out else ""
        transitions = " and ".join(sorted({one.transition for one in each}))
        say(
            f"{seconds:.1f} s, {len(files)} files{where}, {transitions} score, "
            f"{options.baseline} baseline{written}"
        )
    _warn_of_euler(*(one.sampling for one in each))
    warn_of_residuals(output.strict, *(one.residuals for one in each))


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
            f"that were not recorded{why}:"
        )
        for name, wanted in list(missing.items())[:6]:
            sites = list(dict.fromkeys(label(i) for i in wanted))
            say(f"  {name} needs {', '.join(sites[:4])}{', …' if len(sites) > 4 else ''}")
        if len(missing) > 6:
            say("  … --json lists them all")


def _component_names(channels: tuple[str, ...], model: RecordingModel) -> Any:
    """A function from a component of the state to the name of its channel or resonator."""
    sites = (model.size or 2) // 2
    return lambda i: (
        f"psi[{i % sites}]" if model.observed is not None else channels[i % len(channels)]
    )


def _find_components(only: list[str], theta: Any) -> list[str]:
    """Names of the components that must be estimated; `omega` stands for all of its entries."""
    from fluctua.core.text import names

    every = names(theta)
    components = []
    for name in only:
        match = [n for n in every if n == name or n.split("[")[0] == name]
        if not match:
            raise ValueError(
                f"--set parameter: there is no {name!r}; parameters are {', '.join(theta)} and "
                "their entries."
            )
        components += match
    return components
