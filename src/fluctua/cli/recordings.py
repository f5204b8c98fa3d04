"""`fluctua record`, `inspect` and `convert`: recordings written, examined and converted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli.common import (
    EXPECTED,
    FILE_KEYS,
    PRESET,
    STOPPED,
    AsJson,
    Map,
    ParamsFile,
    Seed,
    configure,
    fail,
    initial_theta,
    open_file,
    read_params,
    say,
    show_progress,
    to_json,
)
from fluctua.cli.settings import Settings, parse_settings, read_settings

if TYPE_CHECKING:
    from fluctua.insitu.recording.inspection import Inspection
    from fluctua.runs.config import Config

SERIOUS = 1
"""Exit status where a gradient from this file would be wrong."""

INSPECT_KEYS = FILE_KEYS
CONVERT_KEYS = FILE_KEYS
SMALL = {"lattice.rows": 3, "lattice.columns": 4, "task.horizon": 10.0, "task.dt": 0.01}
"""Settings of `fluctua record` without a source: a lattice that a laptop records in a second."""


def record(
    out: Annotated[Path, typer.Argument(metavar="FILE.nc", help="Recording to write")],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET|FILE.toml|RUN",
            help=f"Network to simulate: a preset ({PRESET}), a file of settings or a run's folder",
            show_default="a 3x4 lattice",
        ),
    ] = None,
    params: ParamsFile = None,
    trajectories: Annotated[
        int, typer.Option(min=1, help="Number of trajectories of the file in the end")
    ] = 200,
    settle: Annotated[
        float,
        typer.Option(help="Time before the first sample, to start in the steady state"),
    ] = 0.0,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between two samples", show_default="1; with a source 10"),
    ] = None,
    observe: Annotated[
        str | None,
        typer.Option(help="Resonators with a detector, such as 0,1,4-7", show_default="all"),
    ] = None,
    readout_noise: Annotated[
        float, typer.Option(help="Standard deviation of the readout of each quadrature")
    ] = 0.0,
    append: Annotated[
        bool, typer.Option("--append", help="Continue FILE.nc until it has --trajectories")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite FILE.nc")] = False,
    seed: Seed = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any key of the configuration, such as task.dt=0.001; note=TEXT and "
            "settings.NAME=NUMBER (of an actuator) are kept with the file; may be repeated",
        ),
    ] = None,
) -> None:
    """Write a recording from the simulator, to try everything without hardware.

    Ctrl-C leaves a usable file; the same command with --append continues exactly where it stopped.
    """
    from fluctua.insitu.recording.description import counted
    from fluctua.insitu.recording.simulate import describe
    from fluctua.insitu.recording.simulate import record as run
    from fluctua.runs.build import make_task

    done = 0
    try:
        keys = parse_settings(settings)
        text = str(keys.pop("note", ""))
        actuators = _take_actuators(keys)
        config = _configure(source, keys)
        task = make_task(config)
        theta = initial_theta(task, config, seed)
        if source is not None and Path(source).is_dir():
            from fluctua.runs.reading import read_run

            theta = read_run(Path(source)).trained
        theta = _change_theta(theta, read_params(params))
        head = describe(
            task,
            theta,
            every=every or (1 if source is None else 10),
            observe=_parse_sites(observe),
            observation_noise=readout_noise,
            seed=seed,
            provenance=text,
            settings=actuators,
            settle=settle,
        )
        with show_progress("recording") as progress:
            for done in run(out, task, head, trajectories, append=append, replace=replace):
                progress(done, trajectories)
    except KeyboardInterrupt:
        again = " ".join(["fluctua", *sys.argv[1:], *([] if append else ["--append"])])
        say(
            f"\nstopped with {done:,} of {trajectories:,} trajectories in {out}. Continue with: "
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


def _configure(source: str | None, settings: dict[str, Any]) -> Config:
    """The configuration of a source, or of the small lattice."""
    if source is not None:
        return configure(source, settings)
    return configure("paper", {**SMALL, **settings})


def _change_theta(theta: dict[str, Any], changes: dict[str, Any] | None) -> dict[str, Any]:
    """Parameters of which some come from --params."""
    for name, value in (changes or {}).items():
        if name not in theta or value.shape != theta[name].shape:
            shapes = ", ".join(f"{k} {v.shape}" for k, v in theta.items())
            raise ValueError(f"--params holds some of {shapes}; got {name} {value.shape}.")
    return {**theta, **(changes or {})}


def _parse_sites(text: str | None) -> list[int] | None:
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


def _take_actuators(settings: dict[str, Any]) -> dict[str, float]:
    """Remove `settings.NAME` from the keys of --set. Returns the numbers by NAME."""
    actuators = {}
    for key in [key for key in settings if key.startswith("settings.")]:
        value = settings.pop(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"--set {key} takes a number, such as settings.heater=1.5; got {value!r}."
            )
        actuators[key.removeprefix("settings.")] = float(value)
    return actuators


def inspect(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A recording, .npz, .npy, .csv or MATLAB v7.3 file"),
    ],
    places: Map = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Summarise a recording and list what is wrong with it.

    The exit status is 1 if a fault is serious.
    """
    from fluctua.insitu.recording.inspection import inspect as look

    try:
        with open_file(
            file, places, read_settings(settings, INSPECT_KEYS), damaged=True
        ) as recording:
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
        say(json.dumps(to_json({**report, "serious": inspection.serious})))
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
        often = f" ({sum(kinds.values()) / max(1, s['trajectories']):.3g} per trajectory)"
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
        typer.Argument(
            metavar="IN",
            help="File of another program (.npz, .npy, .csv, MATLAB v7.3, HDF5), or a recording",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.nc", help="Recording to write")],
    places: Map = None,
    settings: Settings = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="Leave out trajectories that are not finite")
    ] = False,
    params: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Parameters that were set, kept in the recording"),
    ] = None,
    detrend: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", help="Subtract variations slower than this, the drift of a detector"
        ),
    ] = None,
) -> None:
    """Convert another program's file, or a damaged one, into a recording.

    Counts get units (--set scale), files without times get them (--set dt); damaged trajectories
    are left out.
    """
    from fluctua.insitu.recording.conversion import convert as copy
    from fluctua.insitu.recording.description import counted

    try:
        with (
            open_file(
                file, places, read_settings(settings, CONVERT_KEYS), damaged=True
            ) as recording,
            show_progress("copying") as progress,
        ):
            for text in recording.damage:
                say(f"damaged: {text}", err=True)
            done = copy(
                recording,
                out,
                drop=drop,
                parameters=read_params(params),
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
