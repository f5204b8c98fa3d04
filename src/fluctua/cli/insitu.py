"""`fluctua insitu`: train an instrument, or try the whole of it on a virtual one."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fluctua.cli.common import (
    EXPECTED,
    STOPPED,
    fail,
    note,
    refuse_options,
    say,
)
from fluctua.cli.settings import Key, Keys, Settings, read_settings
from fluctua.store.code import is_code, load_code

if TYPE_CHECKING:
    from fluctua.insitu import Model
    from fluctua.insitu.device_training.plan import Plan
    from fluctua.insitu.device_training.run_and_resume import Rows
    from fluctua.insitu.instrument import VirtualBench
    from fluctua.insitu.instrument.virtual import BenchDescription as Sheet
    from fluctua.tcmt import Network

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
OF_ADDRESSES = ("timeout", "points", "sigma_w", "sigma_kappa", "kerr", "omega_max", "kappa_max")
"""Keys that an instrument of one's own does not need: its driver and its model have them."""

WITHOUT_BASELINE = ("out", "model", "iterations", "trajectories", "calibration", "seed", "settings")
"""Options of a training that calibrates itself."""

OF_SELF_CALIBRATION = ("forget_after", "measure_every", "renew", "readout_noise")
"""Keys that count with --calibration training only."""


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
    request = Request(targets or [], out, resume, model)
    plan: dict[str, Any] = {"iterations": iterations, "trajectories": trajectories}
    plan |= {"baseline": baseline, "calibration": calibration, "seed": seed}
    warnings.showwarning = _show_warning
    try:
        if targets == ["demo"]:
            from fluctua.cli.insitu_demo import run_demo

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
            _resume(request, iterations, read_settings(settings, RESUME_KEYS))
        else:
            if calibration == "training":
                refuse_options(context, WITHOUT_BASELINE, "--calibration training has no baseline.")
            _begin(request, plan, read_settings(settings, TRAIN_KEYS))
    except typer.Exit:
        raise
    except EXPECTED as error:
        fail(str(error))


class Request(NamedTuple):
    """What to train, and where. model: code of the model of an instrument of one's own."""

    targets: list[str]
    out: Path | None
    resume: Path | None
    model: str | None


def _begin(request: Request, values: dict[str, Any], settings: dict[str, Any]) -> None:
    from fluctua.cli.insitu_plan import describe_plan, make_plan, report_incident
    from fluctua.insitu.device_training import run_and_resume as loop

    if not request.targets or request.out is None:
        raise ValueError("give the address of an instrument and --out FOLDER; or --resume FOLDER.")
    _refuse_keys(request, values["calibration"], settings)
    plan = make_plan(values, settings, address=" ".join(request.targets))
    line = _open_line(request, plan, settings)
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


def _resume(request: Request, iterations: int | None, settings: dict[str, Any]) -> None:
    from fluctua.cli.insitu_plan import report_incident
    from fluctua.insitu.device_training import run_and_resume as loop

    assert request.resume is not None
    plan = loop.read_plan(request.resume)
    targets = request.targets or plan.address.split()
    request = request._replace(targets=targets)
    _refuse_own(request, settings)
    line = _open_line(request, plan, settings)
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


class Line(NamedTuple):
    """How to reach one instrument or several, their model, and the plan with injected noise."""

    connect: Any
    model: Model
    plan: Plan


def _open_line(request: Request, plan: Plan, settings: dict[str, Any]) -> Line:
    from fluctua.insitu.instrument import VirtualBench

    code = [is_code(target) for target in request.targets]
    if any(code):
        if not all(code) or request.model is None:
            raise ValueError(
                "an instrument of your own needs its model: fluctua insitu FILE.py:NAME --model "
                "FILE.py:NAME --out FOLDER."
            )
        connects = [
            load_code(one, "a function that opens an instrument") for one in request.targets
        ]
        return Line(_one_or_all(connects), _load_model(request.model), plan)
    if request.model is not None:
        raise ValueError(
            "--model is for an instrument of your own, FILE.py:NAME; one at an address has the "
            "model of its data sheet."
        )
    timeout = settings.get("timeout", 30.0)
    connects = [partial(VirtualBench, one, timeout=timeout) for one in request.targets]
    sheet = _read_sheet(connects, plan.attempts)
    if "sigma_w" in settings:
        plan = dataclasses.replace(plan, noise=_find_injected(settings["sigma_w"], sheet, plan))
    options: dict[str, Any] = {
        "points": plan.points,
        "timeout": timeout,
        "noise": plan.noise,
        "sigma_kappa": plan.sigma_kappa,
    }
    each = [partial(VirtualBench, one, **options) for one in request.targets]
    return Line(_one_or_all(each), build_model(sheet, plan), plan)


def _one_or_all(connects: list[Any]) -> Any:
    """The only function that opens an instrument, or the list of several."""
    return connects if len(connects) > 1 else connects[0]


def _load_model(text: str) -> Model:
    """The `insitu.Model` that `FILE.py:NAME` is, or returns."""
    from fluctua.insitu import Model

    expected = "an insitu.Model, or a function without arguments that returns one"
    model = load_code(text, expected)
    if callable(model) and not isinstance(model, type):
        model = model()
    if not isinstance(model, Model):
        raise TypeError(f"{text} must be {expected}; got {type(model).__name__}.")
    return model


def _drive(rows: Rows, plan: Plan, folder: Path, devices: int) -> None:
    """Train to the end and print the result; Ctrl-C stops."""
    from fluctua.cli.insitu_plan import show_training

    try:
        done = [row for row, _ in show_training(rows, plan)]
    except KeyboardInterrupt:
        say(f"\nStopped. Continue with: fluctua insitu --resume {folder}")
        raise typer.Exit(STOPPED) from None
    if not done:
        say("nothing was left to do; --iterations says how many there are in all.")
        return
    last = done[-1]
    say(
        f"J = {last.J:.4f} ± {last.J_stderr:.4f} after {last.trajectories:,} trajectories on the "
        "instrument"
    )
    say(f"settings   {folder / 'final.npz'}   history   {folder / 'history.csv'}")
    calibrations = "calibration.txt" if devices == 1 else "calibration-*.txt"
    say(f"calibration of the instrument   {folder / calibrations}")
    if devices > 1:
        say((folder / "devices.txt").read_text().strip())


def _read_sheet(connects: Sequence[Callable[[], VirtualBench]], attempts: int) -> Sheet:
    """The data sheet of the first of several instruments that answers.

    An invalid reply is asked for again, a line that is dead is not.
    """
    from fluctua.insitu.instrument import CommandRejected, InstrumentError

    for left, connect in zip(reversed(range(len(connects))), connects, strict=True):
        try:
            instrument = _connect(connect, attempts)
            break
        except InstrumentError as error:
            if not left or isinstance(error, CommandRejected):
                raise
            note(str(error))
    instrument.close()
    return instrument.description


def _build_network(sheet: Sheet) -> Network:
    from fluctua import tcmt

    return tcmt.rectangular(sheet.rows, sheet.columns, sigma_w=sheet.sigma_w)


def build_model(sheet: Sheet, plan: Plan) -> Model:
    """The model of an instrument, from its data sheet."""
    from fluctua.insitu import network_model

    bounds = {"omega": (-plan.omega_max, plan.omega_max), "kappa": (0.0, plan.kappa_max)}
    if plan.kerr:
        # at the edge the Kerr effect detunes by a few couplings where the light is
        bounds["chi"] = (-0.05, 0.05)
    return network_model(
        _build_network(sheet),
        interval=sheet.interval,
        points=plan.points,
        bounds=bounds,
        sigma_kappa=plan.sigma_kappa,
    )


def _find_injected(text: str, sheet: Sheet, plan: Plan) -> float:
    """The noise to inject for the wanted σ_W; that of the device adds in squares."""
    import jax
    import numpy as np

    from fluctua import tcmt
    from fluctua.insitu.bench.device import MOST_NOISE
    from fluctua.runs.advise import advise

    own = sheet.sigma_w
    most = float(np.hypot(sheet.sigma_w, MOST_NOISE))
    if text == "auto":
        task = tcmt.transmission(
            _build_network(sheet),
            horizon=(plan.points - 1) * sheet.interval,
            dt=sheet.interval,
            sigma_kappa=plan.sigma_kappa,
        )
        grid = np.geomspace(own, most, 4).tolist()
        start = {"omega": np.zeros(task.network.sites), "kappa": np.ones(len(task.network.bonds))}
        best = advise(
            jax.random.key(plan.seed),
            task,
            start,
            trajectories=plan.trajectories,
            sigma_w=grid,
        ).best
        wanted = best.sigma_w
        say(
            f"noise      σ_W = {wanted:.3g} of {own:.3g} to {most:.3g}, limited by the "
            f"{best.limited_by}"
        )
    else:
        try:
            wanted = float(text)
        except ValueError:
            raise ValueError(f"--set sigma_w takes a number or auto; got {text!r}.") from None
    if not own * (1 - 1e-9) <= wanted <= most * (1 + 1e-9):
        raise ValueError(
            f"--set sigma_w must be {own:g} to {most:.3g}: the device's own noise, and what can "
            f"be added to it; got {wanted:g}."
        )
    return float(np.sqrt(max(wanted**2 - own**2, 0.0)))


def _connect(connect: Callable[[], VirtualBench], attempts: int) -> VirtualBench:
    """Open an instrument; an invalid reply is asked for again."""
    from fluctua.insitu.instrument import InvalidReply

    for _ in range(attempts - 1):
        try:
            return connect()
        except InvalidReply as error:
            note(str(error))
    return connect()


def _show_warning(message: Warning | str, *rest: Any, **more: Any) -> None:
    """Print a warning as a line."""
    note(message)
