"""`fluctua insitu`: train an instrument, or try the whole of it on a virtual one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from fluctua.cli.common import EXPECTED, fail, note, refuse_options
from fluctua.cli.settings import Key, Keys, Settings, read_settings

RESUME_KEYS: Keys = {
    "timeout": Key(float, "seconds to wait for an answer (30)"),
    "time_limit": Key(float, "seconds that one acquisition may take (300)"),
    "on_doubt": Key(str, "after a batch that contradicts the calibrated model: stop or continue"),
}
TRAIN_KEYS: Keys = {
    **RESUME_KEYS,
    "learning_rate": Key(float, "learning rate of Adam; falls to a twentieth (0.1)"),
    "probes": Key(int, "settings at which to calibrate before the training (6)"),
    "points": Key(int, "samples per trajectory (601)"),
    "attempts": Key(int, "failures in a row before giving up (8)"),
    "record": Key(bool, "keep every trajectory on disk (true; in the demo false: a gigabyte)"),
    "share": Key(str, "several devices: settings (equal) or parameters (settings corrected)"),
    "sigma_w": Key(str, "σ_W to which noise is injected, or auto: as fluctua advise recommends"),
    "sigma_kappa": Key(float, "amplitude of the modulation of the couplings, recorded (0)"),
    "kerr": Key(bool, "train the Kerr coefficients too"),
    "omega_max": Key(float, "largest detuning of a knob, of either sign (2)"),
    "kappa_max": Key(float, "largest coupling of a knob (1.5)"),
    "forget_after": Key(float, "calibration=training: batches after which data fade; 0: never"),
    "measure_every": Key(int, "calibration=training: iterations of which one measures (1)"),
    "renew": Key(bool, "calibration=training: forget all before a batch that is not expected"),
    "readout_noise": Key(str, "calibration=training: of each quadrature, or measured per batch"),
}
DEMO_KEYS: Keys = {
    "devices": Key(int, "demo: boxes that differ, trained alone and together, four held out (1)"),
    "fault_rate": Key(float, "demo: probability that an acquisition goes wrong (0)"),
    "figure": Key(str, "demo: file of the figure (OUT/in_situ.png)"),
    "record": TRAIN_KEYS["record"],
}
INSITU_KEYS: Keys = {**TRAIN_KEYS, **DEMO_KEYS}
WITHOUT_BASELINE = ("out", "model", "iterations", "trajectories", "calibration", "seed", "settings")
"""Options of a training that calibrates itself."""


def insitu(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="demo|ADDRESS|FILE.py:NAME",
            help="demo: a virtual instrument. tcp://HOST:PORT or a VISA resource: an instrument "
            "that speaks our commands; several are trained together. FILE.py:NAME: a function "
            "that opens an instrument of your own. Not needed with --resume",
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
        typer.Option(metavar="FILE.py:NAME", help="The insitu.Model of an instrument of your own"),
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
        str,
        typer.Option(
            help="probes: at random settings before the training. training: by the trajectories "
            "of the training itself, with one model that every batch refines"
        ),
    ] = "probes",
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of all random numbers", show_default="0; the box of the demo: 3"),
    ] = None,
    settings: Settings = None,
) -> None:
    """Calibrate and train an instrument.

    demo: one bench with hidden disorder, three trainings. Calibrates the bench from recordings,
    trains it over its socket, and compares with a training of the nominal simulation and one that
    knows the hidden parameters.

    ADDRESS: an instrument that speaks the commands of docs/virtual_bench.md. Several addresses are
    devices of one kind, trained together: docs/laboratory.md, Arrays. Failures of the line or the
    box are retried, bad trajectories are discarded and counted, everything is recorded. Ctrl-C or
    a kill loses the current iteration; --resume continues.
    """
    from fluctua.cli.instruments import run
    from fluctua.cli.instruments.line import Request

    request = Request(targets or [], out, resume, model)
    plan: dict[str, Any] = {"iterations": iterations, "trajectories": trajectories}
    plan |= {"baseline": baseline, "calibration": calibration, "seed": seed}
    warnings.showwarning = _show_warning
    try:
        if targets == ["demo"]:
            from fluctua.cli.instruments.demo import run_demo

            refuse_options(
                context,
                ("out", "iterations", "trajectories", "baseline", "seed", "settings"),
                "not for the demo, which calibrates at probes a bench of its own.",
            )
            run_demo(out, plan, read_settings(settings, DEMO_KEYS))
        elif resume is not None:
            refuse_options(
                context,
                ("resume", "model", "iterations", "settings"),
                "cannot be changed with --resume, which keeps to the plan in the folder; "
                "--iterations, the address and --set timeout, time_limit and on_doubt can. For "
                "another plan begin another run: --out.",
            )
            run.resume(request, iterations, read_settings(settings, RESUME_KEYS))
        else:
            if calibration == "training":
                refuse_options(context, WITHOUT_BASELINE, "--calibration training has no baseline.")
            run.begin(request, plan, read_settings(settings, TRAIN_KEYS))
    except typer.Exit:
        raise
    except EXPECTED as error:
        fail(str(error))


def _show_warning(message: Warning | str, *rest: Any, **more: Any) -> None:
    """Print a warning as a line."""
    note(message)
