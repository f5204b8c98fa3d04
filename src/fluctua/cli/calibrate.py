"""`fluctua calibrate`: drift, noise and gains from recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fluctua.cli import files, options
from fluctua.cli.common import EXPECTED, fail, make_console, say, to_json
from fluctua.cli.settings import Key, Keys, Settings, read_settings

CALIBRATE_KEYS: Keys = {
    **options.FILE_KEYS,
    "bias": Key(bool, "examine the residuals and their effect on the gradient (true)"),
}


def calibrate(
    recordings: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Recordings; several, at other settings, give gains"),
    ],
    model: options.ModelCode = None,
    params: options.ParamsFile = None,
    score: Annotated[
        str,
        typer.Option(
            help="Score whose transition is fitted: euler, or local-linear for samples far apart"
        ),
    ] = "euler",
    continuing: options.Continuing = False,
    places: options.Map = None,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Write the measured parameters to this file"),
    ] = None,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Keep noise and drift in FILE itself, where estimate finds them"
        ),
    ] = False,
    strict: options.Strict = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure drift, noise and actuator gains from recordings.

    Also examines what the errors of the model would add to a gradient, and so whether it can be
    trusted with one.
    """
    from fluctua.insitu.calibrate import actuators, fit, report
    from fluctua.insitu.recording.model import load_model

    status = make_console().status("opening")
    summary: dict[str, Any] = {"files": []}
    fits: list[Any] = []
    actuated: list[Any] = []
    guards: list[Any] = []
    try:
        keys = read_settings(settings, CALIBRATE_KEYS)
        out = files.complete_npz(out)
        with status:
            for file in recordings:
                with files.open_file(file, places, keys) as recording:
                    files.set_precision(recording.description.dtype)
                    m = load_model(recording, model, files.read_params(params))
                    calibration = fit.calibrate_recording(
                        recording,
                        m,
                        transition=score,
                        bias=keys.get("bias", True) and len(recordings) == 1,
                        continuing=continuing,
                        progress=lambda text: status.update(f"{file}: {text}"),  # noqa: B023
                    )
                    components = recording.description.components
                    kind = recording.kind
                    count = recording.count
                    actuated.append(dict(recording.description.settings))
                fits.append(calibration.fit)
                guards.append(calibration.guard)
                summary["files"].append(
                    {"file": str(file), "components": components, **_gather_numbers(calibration)}
                )
                if not as_json:
                    status.stop()
                    say(f"{file}\n\n{report.describe(calibration, components)}\n")
                    status.start()
                if write:
                    _write(file, kind, calibration, count)
            gains: Any = None
            knobs = len(recordings) > 1 and actuators.are_knobs(actuated, fits)
            if len(recordings) > 1 and any(actuated):
                measure_gains = actuators.fit_knob_gains if knobs else actuators.actuator_gains
                gains = measure_gains(actuated, fits)
        if out is not None:
            _save(out, calibration.fit, m.theta)
    except EXPECTED as error:
        fail(str(error))
    if as_json:
        say(json.dumps(to_json({**summary, "gains": gains})))
        files.report_residuals(strict, *guards)
        return
    if write:
        kept = ", ".join(map(str, recordings))
        say(f"kept in {kept}: fluctua estimate uses it (--set noise, theta).")
    if gains is not None:
        say(report.describe_knobs(gains) if knobs else report.describe_gains(gains))
    elif len(recordings) > 1:
        say("no gains: the files do not hold the settings of the actuators (`settings`).")
    if out is not None:
        say(f"measured parameters: {out}. Next: fluctua estimate {recordings[-1]} --params {out}")
    files.report_residuals(strict, *guards)


def _gather_numbers(calibration: Any) -> dict[str, Any]:
    from fluctua.core import text
    from fluctua.insitu.calibrate import report

    fit = {
        name: getattr(calibration.fit, name)
        for name in ("theta", "stderr", "robust_stderr", "unresolved", "transitions")
    }
    numbers = {
        "fit": fit,
        "expected": calibration.expected,
        "noise": calibration.noise,
        "model_diffusion": calibration.model_diffusion,
    }
    numbers |= {"guard": calibration.guard}
    if calibration.stretches is not None:
        numbers |= {"stretches": calibration.stretches.numbers}
    if calibration.residuals is not None:
        r = calibration.residuals
        numbers |= {"residuals": {"p_values": r.p_values, "relative": r.relative}}
        numbers |= {"bias": r.bias, "bias_stderr": r.bias_stderr}
        numbers |= {
            "bias_in_gradient_errors": dict(
                zip(text.names(r.bias), report.gradient_errors(calibration), strict=True)
            )
        }
        numbers |= {
            "gradient": calibration.estimate.gradient,
            "gradient_stderr": calibration.estimate.stderr,
        }
    return numbers


def _save(out: Path, fit: Any, theta: Any) -> None:
    """Write the fitted parameters of the model, where the data determine them."""
    import numpy as np

    values: dict[str, Any] = {}
    for name, value in theta.items():
        if name in fit.theta:
            known = np.isfinite(np.asarray(fit.stderr[name]))
            values[name] = np.where(known, np.asarray(fit.theta[name]), np.asarray(value))
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(out, **values)


def _write(file: Path, kind: str, calibration: Any, count: int) -> None:
    from fluctua.insitu.calibrate.table import tabulate_calibration
    from fluctua.insitu.recording.writer import put_table

    if kind != "recording":
        raise ValueError(
            f"--write keeps the calibration in fluctua's own recordings; {file} is {kind}. Put "
            "noise.diffusion and noise.observation_variance into it yourself "
            "(docs/recordings.md), or use --out and --params."
        )
    put_table(file, "noise", tabulate_calibration(calibration, count))
