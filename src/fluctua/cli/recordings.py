"""`fluctua inspect` and `convert`: recordings examined and converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fluctua.cli import files, options
from fluctua.cli.common import EXPECTED, fail, say, show_progress, to_json
from fluctua.cli.settings import Key, Keys, Settings, read_settings
from fluctua.core.words import format_count

if TYPE_CHECKING:
    from fluctua.insitu.recording.inspection import Inspection

SERIOUS = 1
"""Exit status where a gradient from this file would be wrong."""
INSPECT_KEYS = options.FILE_KEYS
CONVERT_KEYS: Keys = {
    **options.FILE_KEYS,
    "axes": Key(str, "of an array with two: time,channel (one trajectory) or trajectory,time"),
    "channels": Key(str, "names of the channels, position,velocity"),
    "units": Key(str, "of the states, such as V"),
    "time_units": Key(str, "of the times, such as s"),
}


def inspect(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A recording, .npz, .npy, .csv or MATLAB v7.3 file"),
    ],
    places: options.Map = None,
    settings: Settings = None,
    as_json: options.AsJson = False,
) -> None:
    """Summarise a recording and list what is wrong with it.

    The exit status is 1 if a fault is serious.
    """
    from fluctua.insitu.recording.inspection import inspect as look

    try:
        with files.open_file(
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

    s = inspection.summary
    units = f", times in {s['time_units']}" if s["time_units"] else ""
    kind = "complex channels" if s["complex"] else "channels"
    say(f"{s['file']}  ({s['kind']}, {s['dtype']})")
    say(
        f"  {format_count(s['trajectories'], 'trajectory')} × {s['times']:,} times × "
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
    made = [text for text in (s["created"], s["software"]) if text != "unknown"]
    made = [text for text in made if not s["kind"].startswith(text)]
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
        say("No fault was found in its numbers.")


def convert(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="File of another program (.npz, .npy, .csv, MATLAB v7.3, HDF5), or a recording",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.nc", help="Recording to write")],
    places: options.Map = None,
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

    try:
        keys = read_settings(settings, CONVERT_KEYS)
        names = keys.get("channels")
        with (
            files.open_file(file, places, keys, damaged=True) as recording,
            show_progress("copying") as progress,
        ):
            for text in recording.damage:
                say(f"damaged: {text}", err=True)
            done = copy(
                recording,
                out,
                drop=drop,
                parameters=files.read_params(params),
                detrend=detrend,
                channels=None if names is None else [name.strip() for name in names.split(",")],
                units=keys.get("units"),
                time_units=keys.get("time_units"),
                progress=progress,
            )
            kind = recording.kind
    except EXPECTED as error:
        fail(str(error))
    say(f"{out}: {format_count(done.kept, 'trajectory')} of {file} ({kind})")
    if detrend is not None:
        say(
            f"detrended: what varies more slowly than {detrend:g} was subtracted, as an offset of "
            "the detector"
        )
    for what, numbers in (("dropped, not finite", done.dropped), ("lost, damaged", done.lost)):
        if numbers:
            shown = ", ".join(map(str, numbers[:10])) + (", …" if len(numbers) > 10 else "")
            say(f"{what}: {format_count(len(numbers), 'trajectory')} ({shown})")
