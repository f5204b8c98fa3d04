"""`fluctua insitu train`: a new run, or one that continues."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import typer

from fluctua.cli.common import STOPPED, say
from fluctua.cli.instruments.check import BEFORE_TRAINING, check_before_training
from fluctua.cli.instruments.plan import (
    complete_values,
    describe_plan,
    make_plan,
    report_incident,
    show_training,
)
from fluctua.cli.instruments.request import InstrumentSettings, Request, open_station
from fluctua.insitu.device_training import run_and_resume as loop
from fluctua.insitu.device_training.choice import check_plan
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.device_training.station import StationNames


def begin(request: Request, values: dict[str, Any], settings: InstrumentSettings) -> None:
    """Train an instrument into a new folder."""
    if not request.instruments or request.out is None:
        raise ValueError(
            "give an instrument and --out FOLDER: fluctua insitu train INSTRUMENT --model "
            "FILE.py:NAME --out FOLDER; or --resume FOLDER."
        )
    request.refuse_keys(values["calibration"], settings.keys)
    names = request.name_station(settings.arguments)
    plan = make_plan(values, settings.keys, **names.make_absolute()._asdict())
    loop.refuse_folder(request.out)
    station = open_station(names, settings.keys, plan.attempts)
    values = complete_values(values, station.model)
    request.refuse_keys(values["calibration"], settings.keys)
    plan = make_plan(values, settings.keys, **names.make_absolute()._asdict())
    check_plan(plan, station.model, None, len(station.connects))
    trajectories = settings.keys.get("check_trajectories", BEFORE_TRAINING)
    checked = check_before_training(station, plan, request.instruments, trajectories)
    say(describe_plan(plan))
    rows = loop.run(
        station.connects,
        station.model,
        plan,
        request.out,
        checked=checked,
        report=report_incident,
    )
    _drive(rows, plan, request.out, len(request.instruments))


def resume(
    request: Request, folder: Path, iterations: int | None, settings: dict[str, Any]
) -> None:
    """Continue the run in a folder."""
    plan = loop.read_plan(folder)
    names = _choose_names(request, plan, folder)
    try:
        station = open_station(names, settings, plan.attempts)
    except ValueError as error:
        raise ValueError(
            f"{error} Names are those of {folder / 'plan.json'}; where they moved: fluctua insitu "
            f"train INSTRUMENT --model FILE.py:NAME --resume {folder}."
        ) from error
    check_before_training(station, plan, names.instruments, 0)
    rows = loop.resume(
        station.connects,
        station.model,
        folder,
        iterations=iterations,
        time_limit=settings.get("time_limit"),
        on_doubt=settings.get("on_doubt"),
        final_trajectories=settings.get("final_trajectories"),
        report=report_incident,
    )
    if iterations is not None:
        plan = dataclasses.replace(plan, iterations=iterations)
    _drive(rows, plan, folder, len(station.connects))


def _choose_names(request: Request, plan: Plan, folder: Path) -> StationNames:
    """The station of a plan; instruments and model may have moved."""
    instruments = tuple(request.instruments) or plan.instruments
    if not instruments:
        raise ValueError(
            f"the plan in {folder} has no instrument, since the run was started in Python. "
            "Give it: fluctua insitu train "
            f"INSTRUMENT --model FILE.py:NAME --resume {folder}."
        )
    return StationNames(instruments, request.model or plan.model, plan.options)


def _drive(rows: loop.Rows, plan: Plan, folder: Path, devices: int) -> None:
    """Train to the end and print the result; Ctrl-C stops."""
    summary = folder / "summary.txt"
    before = summary.read_text(encoding="utf-8") if summary.exists() else ""
    try:
        done = [row for row, _ in show_training(rows, plan)]
    except KeyboardInterrupt:
        say(f"\nStopped. Continue with: fluctua insitu train --resume {folder}")
        raise typer.Exit(STOPPED) from None
    after = summary.read_text(encoding="utf-8") if summary.exists() else ""
    if not done and after == before:  # a final evaluation that had failed may have been left
        say("nothing was left to do; --iterations is their number in all.")
        return
    say(after, nl=False)
    calibrations = "calibration.txt" if devices == 1 else "calibration-*.txt"
    say(f"stored     settings {folder / 'final.npz'}, history {folder / 'history.csv'},")
    say(f"           calibration {folder / calibrations}, this {folder / 'summary.txt'}")
    if devices > 1:
        say((folder / "devices.txt").read_text().strip())
