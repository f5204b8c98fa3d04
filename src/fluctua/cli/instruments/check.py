"""`fluctua insitu check`: a report on an instrument and its model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer

from fluctua.cli.common import note, say, to_json
from fluctua.cli.instruments.plan import complete_values, make_plan, report_incident
from fluctua.cli.instruments.request import InstrumentSettings, Request, open_station
from fluctua.core.words import format_count
from fluctua.insitu.device_training.plan import Plan, count_work
from fluctua.insitu.device_training.station import Station
from fluctua.insitu.instrument.protocol import InstrumentError
from fluctua.insitu.instrument_check.check import check_instrument
from fluctua.insitu.instrument_check.report import InstrumentCheck, Latency, PredictedTime

TRAJECTORIES = 20
"""Per acquisition of a check."""
BEFORE_TRAINING = 2
"""The same before a training, whose calibration has further tests."""
MAX_CHANNELS = 6
"""Maximum number of names of channels that are printed."""
WIDTH = 12
SIMILAR = 1.5
"""Ratio of the limits of a predicted time up to which one number is printed."""


def run_check(
    request: Request, values: dict[str, Any], settings: InstrumentSettings, as_json: bool
) -> int:
    """Check each instrument and print what was found. Returns the exit status."""
    if not request.instruments:
        raise ValueError(
            "give an instrument: fluctua insitu check INSTRUMENT --model FILE.py:NAME."
        )
    request.refuse_keys(values["calibration"], settings.keys)
    plan = make_plan(values, settings.keys)
    names = request.name_station(settings.arguments)
    trajectories = settings.keys.get("check_trajectories", TRAJECTORIES)
    _refuse_few(trajectories, 1)
    try:
        station = open_station(names, settings.keys, 1)
    except InstrumentError as error:  # the model needs the open driver, which does not answer
        _print_problem(f"{str(error).rstrip('.')}.")
        return 1
    values = complete_values(values, station.model)
    request.refuse_keys(values["calibration"], settings.keys)
    plan = make_plan(values, settings.keys)
    checks = check_station(station, plan, trajectories)
    if as_json:
        work = count_work(plan, len(checks))
        say(json.dumps([_to_json(check, plan, work) for check in checks], indent=1))
    else:
        for name, check in zip(request.instruments, checks, strict=True):
            say(describe_check(name, check, plan, len(checks)))
            for problem in check.problems:
                _print_problem(problem)
    return 0 if all(check.ok for check in checks) else 1


def _print_problem(text: str) -> None:
    say(f"{'PROBLEM':<{WIDTH}}{text}", fg=typer.colors.RED)


def check_station(station: Station, plan: Plan, trajectories: int) -> list[InstrumentCheck]:
    """Check all instruments, one after the other."""
    return [
        check_instrument(
            connect,
            station.model,
            trajectories=trajectories,
            seed=plan.seed,
            retry=plan.retry,
            report=report_incident,
        )
        for connect in station.connects
    ]


def check_before_training(
    station: Station, plan: Plan, instruments: Sequence[str], trajectories: int
) -> tuple[int, ...]:
    """Check instruments with few trajectories. Returns how many each ran; a problem is raised.

    Of several instruments those that do not answer are left out, as long as one does: the training
    tries them again.
    """
    _refuse_few(trajectories, 0)
    checks = check_station(station, plan, trajectories)
    answers = any(check.connected for check in checks)
    for name, check in zip(instruments, checks, strict=True):
        if answers and not check.connected:
            note(f"{name}: {' '.join(check.problems)}")
        else:
            check.refuse_problems()
    for name, check in zip(instruments, checks, strict=True):
        if check.connected:
            say(f"{'instrument':<11}{name}{_describe_instrument(check)}")
    slowest = max(
        (check.latency for check in checks if check.latency is not None),
        key=lambda latency: latency.trajectory,
    )
    if trajectories:
        say(f"{'time':<11}{_describe_time(slowest, plan, len(checks))}")
    return tuple(check.trajectories for check in checks)


def _refuse_few(trajectories: int, minimum: int) -> None:
    if trajectories < minimum:
        raise ValueError(f"--set check_trajectories takes {minimum} or more; got {trajectories}.")


def describe_check(name: str, check: InstrumentCheck, plan: Plan, devices: int) -> str:
    """Describe the result of a check, one line per part."""
    identity = f" ({check.identity})" if check.identity else ""
    lines = [("instrument", f"{name}{identity}")]
    for k, knob in enumerate(check.knobs):
        lines.append(("" if k else "knobs", str(knob)))
    if check.record is not None:
        lines.append(("record", _describe_record(check)))
        if check.record.channels[0] != "0":
            lines.append(("", f"channels {_list_channels(check)}"))
    if check.repeatability is not None:
        same = check.repeatability
        lines.append(
            (
                "repeated",
                f"means within {same.mean:.1f}, variances within {same.variance:.1f} standard "
                f"errors (up to {same.limit:.1f} is chance)",
            )
        )
    lines += _describe_residuals(check)
    if check.latency is not None:
        lines += _describe_latency(check.latency, plan, devices)
    lines += [("note", text) for text in check.notes]
    lines.append(("used", format_count(check.trajectories, "trajectory")))
    if check.ok:
        lines.append(("ok", "the instrument fits its model"))
    return "\n".join(f"{label:<{WIDTH}}{text}" for label, text in lines)


def _describe_instrument(check: InstrumentCheck) -> str:
    """` (IDENTITY): 2 settings, 21 times × 1 channel, 0.05 apart`."""
    knobs = sum(knob.size for knob in check.knobs)
    identity = f" ({check.identity})" if check.identity else ""
    text = f"{identity}: {format_count(knobs, 'setting')}"
    return text if check.record is None else f"{text}, {_describe_record(check)}"


def _describe_record(check: InstrumentCheck) -> str:
    record = check.record
    assert record is not None
    apart = "apart" if record.regular else "apart on average"
    channels = format_count(len(record.channels), "channel")
    return f"{record.times} times × {channels}, {record.interval:.4g} {apart}"


def _list_channels(check: InstrumentCheck) -> str:
    assert check.record is not None
    names = check.record.channels
    more = ", …" if len(names) > MAX_CHANNELS else ""
    return ", ".join(names[:MAX_CHANNELS]) + more


def _describe_residuals(check: InstrumentCheck) -> list[tuple[str, str]]:
    if check.residuals is None:
        return []
    v = check.residuals.residuals.v
    low = f"{v.min():.3g}"
    high = f"{v.max():.3g}"
    span = low if low == high else f"{low} … {high}"
    steps = check.residuals.residuals.steps
    lines = [
        (
            "model",
            f"squared residuals {span} times the model's noise (1 expected) from {steps:,} steps",
        )
    ]
    readout = check.residuals.readout
    if readout.any():
        lines.append(("", f"readout noise up to {readout.max():.2g} per sample"))
    calibration = check.residuals.calibration.splitlines()
    if 1 < len(calibration) <= 12:
        lines += [("", " ".join(line.split())) for line in calibration[1:]]
    return lines


def _describe_latency(latency: Latency, plan: Plan, devices: int) -> list[tuple[str, str]]:
    if not latency.visit >= 0:
        return [("latency", f"{_show_seconds(latency.connect)} to connect")]
    return [
        (
            "latency",
            f"{_show_seconds(latency.connect)} to connect, {_show_seconds(latency.visit)} to set "
            f"and read back, {_show_seconds(latency.trajectory)} per trajectory",
        ),
        ("training", _describe_time(latency, plan, devices)),
    ]


def _describe_time(latency: Latency, plan: Plan, devices: int) -> str:
    work = count_work(plan, devices)
    seconds = latency.predict_seconds(work.acquisitions, work.trajectories)
    each = " per device" if devices > 1 else ""
    return (
        f"{format_count(plan.iterations, 'iteration')}: "
        f"{format_count(work.trajectories, 'trajectory')} in "
        f"{format_count(work.acquisitions, 'acquisition')}{each}, {_show_range(seconds, latency)}"
    )


def _show_range(seconds: PredictedTime, latency: Latency) -> str:
    """A predicted time; both of its limits where they differ."""
    least, most = map(_show_seconds, seconds)
    if seconds.most <= SIMILAR * seconds.least:
        return f"about {most} on the instrument"
    return f"{least} to {most} on the instrument, by acquisitions of {latency.size:.0f}"


def _show_seconds(seconds: float) -> str:
    """A time in its unit: 3 ms, 12 s, 5 min, 2.1 h."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1e3 * seconds:.{0 if seconds > 0.01 else 1}f} ms"
    if seconds < 120:
        return f"{seconds:.{0 if seconds > 10 else 1}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _to_json(check: InstrumentCheck, plan: Plan, work: Any) -> Any:
    entries = to_json(check)
    entries["ok"] = check.ok
    if check.latency is not None:
        seconds = check.latency.predict_seconds(work.acquisitions, work.trajectories)
        entries["training"] = to_json({**work._asdict(), "seconds": seconds._asdict()})
    return entries
