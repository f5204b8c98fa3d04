"""`fluctua insitu` of an instrument: a new run, or one that continues."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from fluctua.cli.common import STOPPED, say
from fluctua.cli.instruments.line import Request, open_line
from fluctua.cli.instruments.plan import describe_plan, make_plan, report_incident, show_training
from fluctua.insitu.device_training import run_and_resume as loop
from fluctua.insitu.device_training.plan import Plan
from fluctua.store.code import is_code

OF_ADDRESSES = ("timeout", "points", "sigma_w", "sigma_kappa", "kerr", "omega_max", "kappa_max")
"""Keys that an instrument of one's own does not need: its driver and its model have them."""

OF_SELF_CALIBRATION = ("forget_after", "measure_every", "renew", "readout_noise")
"""Keys that count with --calibration training only."""


def begin(request: Request, values: dict[str, Any], settings: dict[str, Any]) -> None:
    """Train an instrument into a new folder."""
    if not request.targets or request.out is None:
        raise ValueError("give the address of an instrument and --out FOLDER; or --resume FOLDER.")
    _refuse_keys(request, values["calibration"], settings)
    plan = make_plan(values, settings, address=" ".join(request.targets))
    line = open_line(request, plan, settings)
    plan = line.plan
    say(describe_plan(plan))
    rows = loop.run(line.connect, line.model, plan, request.out, report=report_incident)
    _drive(rows, plan, request.out, len(request.targets))


def _refuse_keys(request: Request, calibration: str, settings: dict[str, Any]) -> None:
    """Raise `ValueError` for keys of --set that would be ignored."""
    _refuse_own(request, settings)
    ignored = ["probes"] if calibration == "training" else list(OF_SELF_CALIBRATION)
    other = "probes" if calibration == "training" else "training"
    _refuse_among(ignored, settings, f"counts with --calibration {other} only.")
    if len(request.targets) == 1:
        _refuse_among(["share"], settings, "counts for several instruments only.")


def _refuse_own(request: Request, settings: dict[str, Any]) -> None:
    """Raise `ValueError` for keys that an instrument of one's own ignores."""
    if any(map(is_code, request.targets)):
        _refuse_among(
            OF_ADDRESSES, settings, "is of an instrument at an address; yours has its own model."
        )


def _refuse_among(names: Sequence[str], settings: dict[str, Any], reason: str) -> None:
    ignored = [name for name in names if name in settings]
    if ignored:
        raise ValueError(f"--set {', '.join(ignored)} {reason}")


def resume(request: Request, iterations: int | None, settings: dict[str, Any]) -> None:
    """Continue the run in a folder."""
    assert request.resume is not None
    plan = loop.read_plan(request.resume)
    targets = request.targets or plan.address.split()
    request = request._replace(targets=targets)
    _refuse_own(request, settings)
    line = open_line(request, plan, settings)
    assert request.resume is not None
    rows = loop.resume(
        line.connect,
        line.model,
        request.resume,
        iterations=iterations,
        time_limit=settings.get("time_limit"),
        on_doubt=settings.get("on_doubt"),
        report=report_incident,
    )
    if iterations is not None:
        plan = dataclasses.replace(plan, iterations=iterations)
    _drive(rows, plan, request.resume, len(targets))


def _drive(rows: loop.Rows, plan: Plan, folder: Path, devices: int) -> None:
    """Train to the end and print the result; Ctrl-C stops."""
    try:
        done = [row for row, _ in show_training(rows, plan)]
    except KeyboardInterrupt:
        say(f"\nStopped. Continue with: fluctua insitu --resume {folder}")
        raise typer.Exit(STOPPED) from None
    if not done:
        say("nothing was left to do; --iterations is their number in all.")
        return
    last = done[-1]
    say(
        f"J = {last.J:.4f} ± {last.J_stderr:.4f} after {last.trajectories:,} trajectories "
        "on the instrument"
    )
    say(f"settings   {folder / 'final.npz'}   history   {folder / 'history.csv'}")
    calibrations = "calibration.txt" if devices == 1 else "calibration-*.txt"
    say(f"calibration of the instrument   {folder / calibrations}")
    if devices > 1:
        say((folder / "devices.txt").read_text().strip())
