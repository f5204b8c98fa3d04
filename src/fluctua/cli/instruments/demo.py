"""`fluctua insitu demo`: a virtual instrument, trained in situ and by simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluctua.cli.common import find_free_folder, say
from fluctua.cli.instruments.plan import describe_plan, make_plan, report_incident, show_training
from fluctua.core.words import format_count

if TYPE_CHECKING:
    from fluctua.insitu.bench.demo import DemoResult
    from fluctua.insitu.bench.population import PopulationComparison

BOX = 3
"""Seed of the device of the demo: its hidden disorder."""


def run_demo(out: Path | None, values: dict[str, Any], settings: dict[str, Any]) -> None:
    """Compare three trainings of a virtual instrument, and draw them."""
    from fluctua.insitu.bench import demo, population
    from fluctua.insitu.bench.device import Sheet
    from fluctua.plot.insitu import draw_in_situ, draw_population

    devices = settings.get("devices", 1)
    fault_rate = settings.get("fault_rate", 0.0)
    record = settings.get("record", False)
    if not 1 <= devices <= 32:
        raise ValueError(f"--set devices takes 1 to 32; got {devices}.")
    if not 0 <= fault_rate <= 1:
        raise ValueError(f"--set fault_rate takes 0 to 1; got {fault_rate:g}.")
    seed = values.pop("seed")
    plan = make_plan(values, {}, record=record, longest_pause=2.0)
    name = "insitu-array" if devices > 1 else "insitu-demo"
    out = find_free_folder(name) if out is None else out
    picture = Path(settings.get("figure") or out / ("array.png" if devices > 1 else "in_situ.png"))
    say(describe_plan(plan))
    options: dict[str, Any] = {
        "sheet": Sheet(seed=BOX if seed is None else seed),
        "plan": plan,
        "say": say,
        "report": report_incident,
        "bench_options": ("--set", f"fault_rate={fault_rate}"),
        "show": lambda rows: show_training(rows, plan),
    }
    if devices > 1:
        comparison = population.compare(out, devices=devices, **options)
        say(_tabulate_population(comparison))
        draw_population(comparison).savefig(picture, dpi=150)
        say(f"figure     {picture}   numbers   {out / 'array.csv'}")
        return
    result = demo.run(out, address=_find_visa_address(), **options)
    say(_summarise(result))
    draw_in_situ(result).savefig(picture, dpi=150)
    say(f"figure     {picture}")
    if record:
        size = sum(path.stat().st_size for path in (out / "recordings").iterdir())
        say(f"recorded   {out / 'recordings'}, {size / 2**20:,.0f} MiB")


def _tabulate_population(result: PopulationComparison) -> str:
    from fluctua.core.text import with_error

    k = result.devices
    names = {"before": "before training", "one device": "trained on device 1, carried over"}
    names |= {
        "settings": "trained together, the same settings",
        "parameters": "trained together, settings corrected",
    }
    names |= {"whole range": "the same, whole range of the knobs"}
    lines = [
        "",
        f"J measured on   {'':<20} device 1   {f'devices 1 to {k}, mean':<22} devices held out",
    ]
    for design in result.designs:
        together = with_error(*design.over(slice(0, k)))
        others = with_error(*design.over(slice(k, None)))
        lines.append(
            f"  {names[design.name]:<36} {design.levels[0].J:>6.3f}   {together:<22} {others}"
        )
    return "\n".join([*lines, "", "± is the standard error between devices."])


def _find_visa_address() -> Any:
    """Addresses for PyVISA where it is installed; None for a bare socket."""
    try:
        import pyvisa  # noqa: F401
        import pyvisa_py  # noqa: F401
    except ImportError:
        return None
    return lambda host, port: f"TCPIP::{host}::{port}::SOCKET"


def _summarise(result: DemoResult) -> str:
    from fluctua.core.text import with_error

    better = result.in_situ.J > result.nominal.J
    rows = (
        ("before training", result.before, ""),
        (
            "trained on the nominal simulation, carried over",
            result.nominal,
            f"the simulation predicted {result.nominal_predicted:.3f}",
        ),
        (
            "trained in situ",
            result.in_situ,
            f"{format_count(result.rows[-1].trajectories, 'trajectory')} on the bench",
        ),
        ("trained with the bench's true parameters", result.true, ""),
    )
    lines = ["", "J measured on the bench"]
    lines += [
        f"  {what:<49} {with_error(level.J, level.stderr):<18} {note and f'({note})'}".rstrip()
        for what, level, note in rows
    ]
    times = (
        f", and {result.in_situ.J / result.nominal.J:.1f} times the nominal training"
        if better
        else ""
    )
    lines += ["", f"In situ reaches {result.share:.0%} of what the true parameters reach{times}."]
    known = ", ".join(f"{name} to {error:.3f}" for name, error in result.calibration_error.items())
    return "\n".join([*lines, f"At the end the calibration knew {known} (root mean square)."])
