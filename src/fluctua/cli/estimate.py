"""`fluctua estimate`: the gradient from recordings, or of a simulated network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli import files, networks, options
from fluctua.cli.common import EXPECTED, Output, fail, refuse_options
from fluctua.cli.settings import Key, Keys, parse_settings, read_settings

if TYPE_CHECKING:
    from fluctua.insitu.pooling import EstimateOptions

ESTIMATE_KEYS: Keys = {
    **options.FILE_KEYS,
    "parameter": Key(str, "parameters that must be estimated, omega or omega[3],kappa[0]"),
    **options.CALIBRATION_KEYS,
    "readout_noise": Key(float, "standard deviation of the readout, in place of the file's"),
    "window": Key(str, "with --continuing: time over which a kick is followed, or auto (auto)"),
    "chunk_mb": Key(int, "megabytes of states held at a time (256)"),
    "stride": Key(list, "with --response: samples per step of the score; [1,2,4] are compared"),
    "period": Key(list, "with --response: period per component, 0 for one that is not periodic"),
    "fit": Key(str, "with --response: parameters to fit to other parts of the record, force,D"),
    "folds": Key(int, "with --response: parts of the record for that fit (5)"),
    "figure": Key(str, "with --response: also draw it to this file"),
}
FOR_RECORDINGS = (
    "model",
    "params",
    "score",
    "baseline",
    "continuing",
    "response",
    "detrend",
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
            help="Recordings, .npz, .npy, .csv or MATLAB v7.3 files, pooled; or a network: a "
            f"preset ({options.PRESET}), a file of settings, a run's folder",
        ),
    ],
    model: options.ModelCode = None,
    params: options.ParamsFile = None,
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
    continuing: options.Continuing = False,
    response: Annotated[
        bool,
        typer.Option(
            "--response",
            help="With --continuing: the response in time of the average to a small step of each "
            "parameter",
        ),
    ] = False,
    detrend: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            help="With --continuing: subtract what varies more slowly than this time, as an offset "
            "of the detector that drifts",
        ),
    ] = None,
    trajectories: options.Trajectories = 1000,
    seed: options.Seed = 0,
    places: options.Map = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Of recordings: one of their keys. Of a network: any key of its "
            "configuration, such as task.dt=0.01 or backend=jax; may be repeated",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="Also write gradient and errors to this file; with --response also FILE.csv",
        ),
    ] = None,
    strict: options.Strict = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Read recordings on a Ray cluster: HOST:PORT, auto for one that runs here, or "
            "local",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Estimate a gradient with error bars, from recordings or of a simulated network.

    A recording may be larger than memory. One of a resonator network carries its own model, and
    after `fluctua calibrate --write` its own noise, which is used. Where channels are missing or
    have readout noise, the score is that of a filter; parameters that no filter can help are
    refused by name. Several files at the same settings give one estimate, each with a baseline of
    its own. With --continuing they are one long record, which is cut where samples are missing or
    not finite.

    A network is simulated with --trajectories and --seed, at its start or, for the folder of a
    run, at its trained parameters.
    """
    try:
        output = Output(out if response else files.complete_npz(out), strict, as_json)
        if len(sources) == 1 and networks.is_simulated(sources[0]):
            from fluctua.cli.estimates.network import Simulation, estimate_network

            refuse_options(context, FOR_NETWORKS, f"for recordings, not for {sources[0]}.")
            simulation = Simulation(sources[0], params, baseline, trajectories, seed)
            estimate_network(simulation, parse_settings(settings), output)
            return
        from fluctua.cli.estimate_files import estimate_files

        refuse_options(context, FOR_RECORDINGS, "for networks that are simulated.")
        keys = read_settings(settings, ESTIMATE_KEYS)
        choices = _gather_options(model, params, score, baseline, places, keys)
        window = _parse_window(keys.get("window", "auto"), continuing)
        _refuse_response_options(response, continuing, baseline, cluster, keys)
        _check_detrend(detrend, continuing, response)
        if continuing:
            choices = choices._replace(window=window, detrend=detrend)
        if response:
            from fluctua.cli.estimates.response import estimate_response

            estimate_response([Path(source) for source in sources], choices, keys, output)
            return
        estimate_files([Path(source) for source in sources], choices, cluster, output)
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
    """Check and collect how every file is read and estimated."""
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
    files.refuse_two_sources(params, theta)
    return EstimateOptions(
        model=model,
        params=files.read_params(params),
        score=score,
        baseline=baseline,
        noise=keys.get("noise", "auto"),
        theta=theta,
        observation_noise=readout_noise,
        required=tuple(filter(None, map(str.strip, keys.get("parameter", "").split(",")))),
        chunk_bytes=chunk_mb * 2**20,
        places=files.parse_places(places),
        dt=keys.get("dt"),
        scale=files.parse_scale(keys.get("scale")),
    )


def _refuse_response_options(
    response: bool, continuing: bool, baseline: str, cluster: str | None, keys: dict[str, Any]
) -> None:
    """Refuse options that a response ignores, and its own keys without --response."""
    if not response:
        alone = [key for key in ("stride", "period", "fit", "folds", "figure") if key in keys]
        if alone:
            raise ValueError(f"--set {', '.join(alone)} needs --response.")
        return
    if not continuing:
        raise ValueError("--response needs a record of a steady state: give --continuing too.")
    if baseline != "time":
        raise ValueError(f"--response takes --baseline time only; got --baseline {baseline}.")
    if cluster is not None:
        raise ValueError("--response runs on this machine only: leave --cluster off.")
    if "chunk_mb" in keys:
        raise ValueError("--set chunk_mb has no effect on --response: leave it off.")


def _check_detrend(detrend: float | None, continuing: bool, response: bool) -> None:
    """Refuse a time that is not positive, and a trend without a long-run average."""
    if detrend is None:
        return
    if not 0 < detrend < float("inf"):
        raise ValueError(f"--detrend must be a positive time; got {detrend:g}.")
    if not continuing or response:
        raise ValueError(
            "--detrend needs a long-run average: give --continuing too, and no --response. For "
            "other estimates remove the trend first (fluctua convert IN OUT.nc --detrend TIME)."
        )


def _parse_window(text: str, continuing: bool) -> float | str:
    """A time, or `auto`."""
    if text == "auto":
        return text
    if not continuing:
        raise ValueError("--set window needs --continuing: it is the window of a long-run average.")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--set window takes a time or auto; got {text!r}.") from None
