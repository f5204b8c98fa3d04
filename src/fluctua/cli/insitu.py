"""`fluctua insitu`: check and train an instrument, or run a demo on a virtual one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli import options
from fluctua.cli.common import EXPECTED, fail, note, refuse_options
from fluctua.cli.settings import (
    Key,
    Keys,
    Settings,
    parse_settings,
    read_settings,
    split_setting,
)
from fluctua.core.words import close_match

if TYPE_CHECKING:
    from fluctua.cli.instruments.request import InstrumentSettings

ACTIONS = ("train", "check", "demo")
RESUME_KEYS: Keys = {
    "timeout": Key(float, "seconds to wait for an answer, if the driver has `timeout` (30)"),
    "time_limit": Key(float, "seconds that one acquisition may take (300)"),
    "on_doubt": Key(
        str, "after a batch that contradicts the calibrated model: stop or continue (stop)"
    ),
    "final_trajectories": Key(int, "to evaluate J at the end (as many as an iteration); 0: none"),
}
TRAIN_KEYS: Keys = {
    **RESUME_KEYS,
    "learning_rate": Key(float, "learning rate of Adam; falls to a twentieth (0.1)"),
    "probes": Key(int, "settings at which to calibrate before the training (6)"),
    "attempts": Key(int, "failures in a row before giving up (8)"),
    "record": Key(bool, "keep every trajectory on disk (true; in the demo false: a gigabyte)"),
    "share": Key(str, "several devices: settings, equal for all, or parameters (settings)"),
    "forget_after": Key(float, "calibration=training: batches after which data fade (0: never)"),
    "measure_every": Key(int, "calibration=training: iterations of which one measures (1)"),
    "renew": Key(
        bool, "calibration=training: forget all before a batch that is not expected (false)"
    ),
    "readout_noise": Key(
        str, "calibration=training: of each quadrature, or measured per batch (0)"
    ),
    "check_trajectories": Key(int, "per acquisition of a check (20; before a training 2)"),
}
CHECK_KEYS: Keys = {
    name: TRAIN_KEYS[name]
    for name in (
        "timeout",
        "time_limit",
        "probes",
        "measure_every",
        "check_trajectories",
        "final_trajectories",
    )
}
DEMO_KEYS: Keys = {
    "devices": Key(int, "demo: devices that differ, trained alone and together, four held out (1)"),
    "fault_rate": Key(float, "demo: probability that an acquisition goes wrong (0)"),
    "figure": Key(str, "demo: file of the figure (OUT/in_situ.png)"),
    "record": TRAIN_KEYS["record"],
}
INSITU_KEYS: Keys = {**TRAIN_KEYS, **DEMO_KEYS}
TRAINING_OPTIONS = ("out", "model", "iterations", "trajectories", "calibration", "seed", "settings")
"""Options of a training but --baseline, which --calibration training does not have."""


def insitu(
    context: typer.Context,
    action: Annotated[
        str | None,
        typer.Argument(metavar="train|check|demo", help="What to do", show_default=False),
    ] = None,
    instruments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INSTRUMENT",
            help="An address, tcp://HOST:PORT or a VISA resource, or a driver of your own, "
            "FILE.py:NAME or package.module:NAME: a class, or a function that returns a driver. "
            "Several are trained together",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of the run",
            show_default="for the demo runs/insitu-demo-1, -2, …",
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Continue the run in this folder")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="An insitu.Model, or a function that returns one, perhaps from the open driver",
            show_default="at an address that of a virtual bench",
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            help="Number of iterations, including those before a --resume", show_default="100"
        ),
    ] = None,
    trajectories: Annotated[
        int | None,
        typer.Option(
            help="Trajectories per iteration", show_default="300; 2 with --calibration training"
        ),
    ] = None,
    baseline: Annotated[
        str, typer.Option(help="Baseline: none, time, mean, optimal, twin (the calibrated drift)")
    ] = "twin",
    calibration: Annotated[
        str | None,
        typer.Option(
            help="probes: at random settings before the training. training: by the trajectories "
            "of the training itself",
            show_default="probes; training for a partially observed instrument",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of all random numbers", show_default="0; that of the demo: 3"),
    ] = None,
    as_json: options.AsJson = False,
    settings: Settings = None,
) -> None:
    """Check, calibrate and train an instrument.

    check: connects, sets, acquires a few trajectories and compares them with the model: shapes,
    rate, limits of the knobs, repeatability, residuals, time of a training. Exit status 1 if
    something is wrong. Takes the options of `train`, without --out.

    train: the same with few trajectories, then calibration and training into a folder. Failures
    are retried, bad trajectories are discarded and counted, everything is recorded. Ctrl-C or a
    kill loses the current iteration; train --resume FOLDER continues.

    demo: one virtual bench with hidden disorder, three trainings. Calibrates the bench from
    recordings, trains it over its socket, and compares with a training of the nominal simulation
    and one with the hidden parameters.

    An instrument at an address without --model takes the commands of docs/virtual_bench.md.
    Several instruments are devices of one kind: docs/laboratory.md, Arrays. Keys of --set that
    are not listed here are arguments of the functions of driver and model; those of a virtual
    bench are points, noise, sigma_kappa, kerr, omega_max and kappa_max.
    """
    plan: dict[str, Any] = {"iterations": iterations, "trajectories": trajectories}
    plan |= {"baseline": baseline, "calibration": calibration, "seed": seed}
    warnings.showwarning = _show_warning
    try:
        action = _choose_action(action, resume)
        if action == "demo":
            from fluctua.cli.instruments.demo import run_demo

            refuse_options(
                context,
                ("out", "iterations", "trajectories", "baseline", "seed", "settings"),
                "not for the demo, which calibrates at probes a bench of its own.",
            )
            _refuse_instruments(instruments or [])
            run_demo(out, plan, read_settings(settings, DEMO_KEYS))
            return
        from fluctua.cli.instruments import check, run
        from fluctua.cli.instruments.request import Request

        request = Request(instruments or [], model or "", out)
        if action == "check":
            refuse_options(
                context,
                (*TRAINING_OPTIONS[1:], "as_json"),
                "not for a check, which trains nothing.",
            )
            status = check.run_check(request, plan, _split_settings(settings, CHECK_KEYS), as_json)
            raise typer.Exit(status)
        if resume is not None:
            refuse_options(
                context,
                ("resume", "model", "iterations", "settings"),
                "cannot be changed with --resume, which keeps to the plan in the folder; "
                "--iterations, the address and --set timeout, time_limit, on_doubt and "
                "final_trajectories can. For another plan begin another run: --out.",
            )
            run.resume(request, resume, iterations, read_settings(settings, RESUME_KEYS))
        else:
            reason = "not for a training"
            baselines = ["baseline"]
            if calibration == "training":
                reason += " with --calibration training, which has no baseline"
                baselines = []
            refuse_options(context, (*TRAINING_OPTIONS, *baselines), f"{reason}.")
            run.begin(request, plan, _split_settings(settings, TRAIN_KEYS))
    except typer.Exit:
        raise
    except EXPECTED as error:
        fail(str(error))


def _choose_action(action: str | None, resume: Path | None) -> str:
    """Choose the action by the first word."""
    if action is None and resume is not None:
        return "train"
    if action in ACTIONS:
        return action
    if action is None:
        raise ValueError(
            "give train, check or demo first: fluctua insitu train INSTRUMENT --model FILE.py:NAME "
            "--out FOLDER."
        )
    hint = close_match(action, ACTIONS) or f" For an instrument: fluctua insitu train {action}."
    raise ValueError(f"the first word must be train, check or demo; got {action!r}.{hint}")


def _refuse_instruments(instruments: Sequence[str]) -> None:
    if instruments:
        raise ValueError(
            f"the demo has an instrument of its own: leave out {' '.join(instruments)}."
        )


def _split_settings(texts: Sequence[str] | None, keys: Keys) -> InstrumentSettings:
    """Separate the keys of the command from arguments of driver and model."""
    from fluctua.cli.instruments.request import InstrumentSettings

    listed = list(texts or [])
    own = [text for text in listed if split_setting(text)[0] in INSITU_KEYS]
    others = [text for text in listed if text not in own]
    return InstrumentSettings(read_settings(own, keys), parse_settings(others))


def _show_warning(message: Warning | str, *rest: Any, **more: Any) -> None:
    """Print a warning as a line."""
    note(message)
