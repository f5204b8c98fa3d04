"""`fluctua record`, `inspect` and `convert`: recordings made, looked through and brought into one
form.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from fluctua.cli.common import (
    EXPECTED,
    STOPPED,
    AsJson,
    ChiSpread,
    Horizon,
    Interval,
    Map,
    Rate,
    Scale,
    Seed,
    SigmaKappa,
    SigmaW,
    Size,
    TimeStep,
    bar,
    fail,
    lattice_start,
    opened,
    parameters,
    plain,
    say,
)

if TYPE_CHECKING:
    from fluctua.insitu.recording.inspection import Inspection

SERIOUS = 1
"""Exit status where a gradient from this file would be wrong."""


def record(
    out: Annotated[Path, typer.Argument(metavar="FILE.nc", help="the recording to write")],
    preset: Annotated[
        str | None,
        typer.Option(help="demo, paper, paper-quick or a .toml, in place of the lattice options"),
    ] = None,
    lattice: Size = "3x4",
    horizon: Horizon = 10.0,
    dt: TimeStep = 1e-2,
    sigma_w: SigmaW = 0.5,
    sigma_kappa: SigmaKappa = 0.0,
    chi_std: ChiSpread = 1e-4,
    params: Annotated[Path | None, typer.Option(help=".npz with some of omega, kappa, chi")] = None,
    trajectories: Annotated[
        int, typer.Option(min=1, help="how many the file is to have in the end")
    ] = 200,
    settle: Annotated[
        float,
        typer.Option(
            help="time before the first sample, for a record that begins in the steady state"
        ),
    ] = 0.0,
    every: Annotated[
        int | None,
        typer.Option(help="keep one step of so many", show_default="1; with --preset 10"),
    ] = None,
    observe: Annotated[
        str | None, typer.Option(help="resonators with a detector, such as 0,1,4-7; default all")
    ] = None,
    observation_noise: Annotated[
        float, typer.Option(help="standard deviation of the detectors, each quadrature")
    ] = 0.0,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="NAME=NUMBER of an actuator, kept with the file; may be repeated"),
    ] = None,
    note: Annotated[str, typer.Option(help="free text, kept with the file")] = "",
    append: Annotated[
        bool, typer.Option("--append", help="go on with FILE.nc until it has --trajectories")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="overwrite FILE.nc")] = False,
    seed: Seed = 0,
) -> None:
    """Write a recording from the simulator, to try everything without hardware.

    Ctrl-C leaves a usable file; the same command with --append goes on exactly where it stopped.
    """
    from fluctua.insitu.recording.description import counted
    from fluctua.insitu.recording.simulate import describe
    from fluctua.insitu.recording.simulate import record as run

    done = 0
    try:
        if preset is None:
            task, theta, _ = lattice_start(
                lattice, horizon, dt, sigma_w, sigma_kappa, chi_std, seed
            )
        else:
            task, theta = _of_preset(preset, seed)
        theta = _with(theta, parameters(params))
        head = describe(
            task,
            theta,
            every=every or (1 if preset is None else 10),
            observe=_sites(observe),
            observation_noise=observation_noise,
            seed=seed,
            provenance=note,
            settings=_settings(setting),
            settle=settle,
        )
        with bar("recording") as progress:
            for done in run(out, task, head, trajectories, append=append, replace=replace):
                progress(done, trajectories)
    except KeyboardInterrupt:
        again = " ".join(["fluctua", *sys.argv[1:], *([] if append else ["--append"])])
        say(
            f"\nstopped with {done:,} of {trajectories:,} trajectories in {out}. Go on with: "
            f"{again}"
        )
        raise typer.Exit(STOPPED) from None
    except EXPECTED as error:
        fail(str(error))
    size = out.stat().st_size / 1e6
    say(
        f"{out}: {counted(trajectories, 'trajectory')} × {len(head.t):,} times × "
        f"{counted(len(head.channels), 'channel')}, {size:.1f} MB"
    )
    steady = " --continuing" if settle else ""
    say(
        f"next: fluctua inspect {out}; fluctua estimate {out}{steady}; fluctua calibrate "
        f"{out}{steady}"
    )


def _of_preset(preset: str, seed: int) -> tuple[Any, dict[str, Any]]:
    import jax

    from fluctua import tcmt
    from fluctua.runs.build import make_task
    from fluctua.runs.config import find_config

    config = find_config(preset)
    task = make_task(config)
    start = jax.random.split(jax.random.key(seed))[0]  # as in `lattice_start`
    return task, tcmt.initial_parameters(start, task.network, chi_std=config.start.chi_std)


def _with(theta: dict[str, Any], changes: dict[str, np.ndarray] | None) -> dict[str, Any]:
    for name, value in (changes or {}).items():
        if name not in theta or value.shape != theta[name].shape:
            shapes = ", ".join(f"{k} {v.shape}" for k, v in theta.items())
            raise ValueError(f"--params holds some of {shapes}; got {name} {value.shape}.")
    return {**theta, **(changes or {})}


def _sites(text: str | None) -> list[int] | None:
    """`0,1,4-7` as [0, 1, 4, 5, 6, 7]."""
    if text is None:
        return None
    sites: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"--observe is a list of resonators such as 0,1,4-7; got {text!r}.")
        sites += range(int(first), int(last if dash else first) + 1)
    return sites


def _settings(texts: list[str] | None) -> dict[str, float]:
    settings = {}
    for text in texts or []:
        name, _, number = text.partition("=")
        try:
            settings[name] = float(number)
        except ValueError:
            raise ValueError(
                f"--setting is NAME=NUMBER, such as heater=1.5; got {text!r}."
            ) from None
    return settings


def inspect(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="a recording, .npz, .npy, .csv or MATLAB v7.3 file"),
    ],
    map_: Map = None,
    dt: Interval = None,
    rate: Rate = None,
    scale: Scale = None,
    as_json: AsJson = False,
) -> None:
    """Summarise a recording and say what is wrong with it.

    Exit status 1 if something serious is.
    """
    from fluctua.insitu.recording.inspection import inspect as look

    try:
        with opened(file, map_, dt, rate, scale, damaged=True) as recording:
            inspection = look(recording)
            components = recording.description.components
    except EXPECTED as error:
        fail(str(error))
    if as_json:
        statistics = {
            name: getattr(inspection, name) for name in ("mean", "spread", "lowest", "highest")
        }
        report = {
            **inspection.summary,
            "components": components,
            **statistics,
            "findings": inspection.findings,
        }
        say(json.dumps(plain({**report, "serious": inspection.serious})))
    else:
        _print(inspection, components)
    if inspection.serious:
        raise typer.Exit(SERIOUS)


def _print(inspection: Inspection, components: tuple[str, ...]) -> None:
    from fluctua.insitu.recording.description import counted

    s = inspection.summary
    units = f", times in {s['time_units']}" if s["time_units"] else ""
    kind = "complex channels" if s["complex"] else "channels"
    say(f"{s['file']}  ({s['kind']}, {s['dtype']})")
    say(
        f"  {counted(s['trajectories'], 'trajectory')} × {s['times']:,} times × "
        f"{len(s['channels'])} {kind}"
    )
    say(f"  each {s['duration']:g} long, a sample every {s['interval']:g}{units}")
    shapes = [f"{n} ({'×'.join(map(str, v))})" if v else n for n, v in s["parameters"].items()]
    say(f"  parameters: {', '.join(shapes) or 'none'}")
    for name in ("settings", "context", "tables"):
        if s[name]:
            say(f"  {name}: {', '.join(s[name])}")
    if s["events"]:
        kinds = s["events"]["kinds"]
        each = ", ".join(f"{name} {number:,}" for name, number in list(kinds.items())[:8])
        often = f" ({sum(kinds.values()) / max(1, s['trajectories']):.3g} a trajectory)"
        say(f"  events: {each}{', …' if len(kinds) > 8 else ''}{often}")
    made = [text for text in (s["created"], s["software"]) if text not in ("unknown", s["kind"])]
    origin = ", ".join(made) + (": " if made and s["provenance"] else "") + s["provenance"]
    if origin:
        say(f"  {origin}")
    unit = f" in {s['units']}" if s["units"] else ""
    say(f"\n  {'component':<14} {'mean':>10} {'spread':>10} {'lowest':>10} {'highest':>10}{unit}")
    most = 12
    for i, name in list(enumerate(components))[:most]:
        numbers = (
            inspection.mean[i],
            inspection.spread[i],
            inspection.lowest[i],
            inspection.highest[i],
        )
        say(f"  {name:<14} " + " ".join(f"{v:>10.4g}" for v in numbers))
    if len(components) > most:
        say(f"  … {len(components)} components in all; --json has every one")
    say("")
    for finding in sorted(inspection.findings, key=lambda f: not f.serious):
        colour = typer.colors.RED if finding.serious else typer.colors.YELLOW
        say(
            f"{'SERIOUS' if finding.serious else 'note'}  {finding.what}: ",
            fg=colour,
            nl=False,
            bold=True,
        )
        say(finding.text)
    if not inspection.findings:
        say("Nothing is wrong with it, as far as the numbers tell.")


def convert(
    file: Annotated[
        Path,
        typer.Argument(metavar="IN", help=".npz, .npy, .csv, MATLAB v7.3, HDF5 or a recording"),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.nc", help="the recording to write")],
    map_: Map = None,
    dt: Interval = None,
    rate: Rate = None,
    scale: Scale = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="leave out trajectories that are not finite")
    ] = False,
    params: Annotated[
        Path | None, typer.Option(help=".npz of the parameters that were set, kept in OUT.nc")
    ] = None,
    detrend: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", help="subtract what varies more slowly: the drift of a detector"
        ),
    ] = None,
) -> None:
    """Make a recording of another program's file, or of a damaged one.

    What was counted gets its units, what has no times gets them, and what cannot be read or is not
    finite stays out.
    """
    from fluctua.insitu.recording.conversion import convert as copy
    from fluctua.insitu.recording.description import counted

    try:
        with (
            opened(file, map_, dt, rate, scale, damaged=True) as recording,
            bar("copying") as progress,
        ):
            for text in recording.damage:
                say(f"damaged: {text}", err=True)
            done = copy(
                recording,
                out,
                drop=drop,
                parameters=parameters(params),
                detrend=detrend,
                progress=progress,
            )
            kind = recording.kind
    except EXPECTED as error:
        fail(str(error))
    say(f"{out}: {counted(done.kept, 'trajectory')} of {file} ({kind})")
    if detrend is not None:
        say(
            f"detrended: what varies more slowly than {detrend:g} was subtracted, as an offset of "
            "the detector"
        )
    for what, numbers in (("dropped, not finite", done.dropped), ("lost, damaged", done.lost)):
        if numbers:
            shown = ", ".join(map(str, numbers[:10])) + (", …" if len(numbers) > 10 else "")
            say(f"{what}: {counted(len(numbers), 'trajectory')} ({shown})")
