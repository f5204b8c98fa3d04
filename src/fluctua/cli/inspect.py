"""`fluctua inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fluctua.cli.common import EXPECTED, Interval, Map, Rate, Scale, fail, opened, plain

if TYPE_CHECKING:
    from fluctua.insitu.recording.inspection import Inspection

SERIOUS = 1
"""Exit status where a gradient from this file would be wrong."""


def inspect(
    file: Annotated[Path, typer.Argument(help="a recording, .npz, .npy, .csv or MATLAB v7.3 file")],
    map_: Map = None,
    dt: Interval = None,
    rate: Rate = None,
    scale: Scale = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Summarise a recording and say what is wrong with it. Exit status 1 if something serious is."""
    from fluctua.insitu.recording.inspection import inspect as look

    try:
        with opened(file, map_, dt, rate, scale, damaged=True) as recording:
            inspection = look(recording)
            components = recording.description.components
    except EXPECTED as error:
        fail(str(error))
    if as_json:
        statistics = {name: getattr(inspection, name) for name in ("mean", "spread", "lowest", "highest")}
        report = {**inspection.summary, "components": components, **statistics, "findings": inspection.findings}
        typer.echo(json.dumps(plain({**report, "serious": inspection.serious})))
    else:
        _print(inspection, components)
    if inspection.serious:
        raise typer.Exit(SERIOUS)


def _print(inspection: Inspection, components: tuple[str, ...]) -> None:
    from fluctua.insitu.recording.description import counted

    s = inspection.summary
    units = f", times in {s['time_units']}" if s["time_units"] else ""
    kind = "complex channels" if s["complex"] else "channels"
    typer.echo(f"{s['file']}  ({s['kind']}, {s['dtype']})")
    typer.echo(f"  {counted(s['trajectories'], 'trajectory')} × {s['times']:,} times × {len(s['channels'])} {kind}")
    typer.echo(f"  each {s['duration']:g} long, a sample every {s['interval']:g}{units}")
    shapes = [f"{n} ({'×'.join(map(str, v))})" if v else n for n, v in s["parameters"].items()]
    typer.echo(f"  parameters: {', '.join(shapes) or 'none'}")
    for name in ("settings", "context", "tables"):
        if s[name]:
            typer.echo(f"  {name}: {', '.join(s[name])}")
    if s["events"]:
        kinds = s["events"]["kinds"]
        each = ", ".join(f"{name} {number:,}" for name, number in list(kinds.items())[:8])
        often = f" ({sum(kinds.values()) / max(1, s['trajectories']):.3g} a trajectory)"
        typer.echo(f"  events: {each}{', …' if len(kinds) > 8 else ''}{often}")
    made = [text for text in (s["created"], s["software"]) if text not in ("unknown", s["kind"])]
    origin = ", ".join(made) + (": " if made and s["provenance"] else "") + s["provenance"]
    if origin:
        typer.echo(f"  {origin}")
    unit = f" in {s['units']}" if s["units"] else ""
    typer.echo(f"\n  {'component':<14} {'mean':>10} {'spread':>10} {'lowest':>10} {'highest':>10}{unit}")
    most = 12
    for i, name in list(enumerate(components))[:most]:
        numbers = (inspection.mean[i], inspection.spread[i], inspection.lowest[i], inspection.highest[i])
        typer.echo(f"  {name:<14} " + " ".join(f"{v:>10.4g}" for v in numbers))
    if len(components) > most:
        typer.echo(f"  … {len(components)} components in all; --json has every one")
    typer.echo("")
    for finding in sorted(inspection.findings, key=lambda f: not f.serious):
        colour = typer.colors.RED if finding.serious else typer.colors.YELLOW
        typer.secho(f"{'SERIOUS' if finding.serious else 'note'}  {finding.what}: ", fg=colour, nl=False, bold=True)
        typer.echo(finding.text)
    if not inspection.findings:
        typer.echo("Nothing is wrong with it, as far as the numbers tell.")
